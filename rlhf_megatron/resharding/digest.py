"""Position-keyed digests of tensors: sum over 16-bit words w_i of (w_i + 1) * mix(i), modulo 2^64.

Being a sum, the digest of a tensor is the sum of the digests of its parts taken at their positions, so that shards can
be digested where they stand, on any device, and added up. It finds accidents, not an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CPU_CHUNK = 1 << 16  # words digested at a time: the int64 temporaries stay in the cache of a core (17 times faster)
_DEVICE_CHUNK = 1 << 22  # on other devices: few launches, temporaries of a few tens of MiB
_MASK = (1 << 64) - 1


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int64 values of its 16-bit words (its bytes, for one-byte types)."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)


def digest(tensor: Tensor, first_word: int = 0) -> int:
    """Digest of `tensor`, taken as lying `first_word` 16-bit words into the whole. In [0, 2^64)."""
    words = _words(tensor)
    chunk = _CPU_CHUNK if words.device.type == "cpu" else _DEVICE_CHUNK
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk].to(torch.int64)
        first = first_word + start
        key = torch.arange(first, first + part.numel(), device=words.device, dtype=torch.int64)
        high = (key >> 7).mul_(-4417276706812531889)
        key.mul_(-7046029254386353131).bitwise_xor_(high).bitwise_or_(1)
        total += part.add_(1).mul_(key).sum()
    return int(total) & _MASK


def as_hex(value: int) -> str:
    """The 16 hex digits under which digests are written and compared."""
    return f"{value & _MASK:016x}"
