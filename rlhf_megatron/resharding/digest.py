"""Position-keyed digests of tensors: sum over 16-bit words w_i of (w_i + 1) * mix(i), modulo 2^64.

Being a sum, the digest of a tensor is the sum of the digests of its parts taken at their positions, so that shards can
be digested where they stand, on any device, and added up. It finds accidents, not an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # words digested at a time; bounds the int64 temporaries to a few tens of MiB
_MASK = (1 << 64) - 1


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int64 values of its 16-bit words (its bytes, for one-byte types)."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)


def digest(tensor: Tensor, first_word: int = 0) -> int:
    """Digest of `tensor`, taken as lying `first_word` 16-bit words into the whole. In [0, 2^64)."""
    words = _words(tensor)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        index = torch.arange(part.numel(), device=part.device, dtype=torch.int64) + (first_word + start)
        key = (index * -7046029254386353131) ^ (index >> 7) * -4417276706812531889
        total += int(((part + 1) * (key | 1)).sum())
    return total & _MASK


def as_hex(value: int) -> str:
    """The 16 hex digits under which digests are written and compared."""
    return f"{value & _MASK:016x}"
