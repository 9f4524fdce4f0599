"""Position-keyed digests of tensors, taken at less than twice the time of a memory copy.

A tensor is a row of unsigned 16-bit words w_i (of its bytes, for one-byte types). Four words make a lane
L_q = w_4q + 2^16 w_4q+1 + 2^32 w_4q+2 + 2^48 w_4q+3, and 1024 lanes a line. L' are the lanes of the same words moved on
by two places. The digest is, modulo 2^64,

    sum over q of L_q T[q mod 1024] M[q div 1024]  +  sum over q of L'_q U[(q mod 1024) div 64] M[q div 1024]
    +  E(end) - E(first)

with odd pseudo-random T, U, M. The upper words of a lane meet only the lower bits of T, so that two changed signs could
cancel in the first sum; in the second sum these words are the lower ones. E makes zeros at the end count.

Every word has a factor of its own, so the digest of a tensor is the sum of those of its parts taken at their positions:
shards can be digested where they stand, on any device, and added up. It finds accidents, not an adversary: any change
of one word, and of several but for a few patterns, such as x and -x exchanged between two lanes of one group that are
alike otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

LINE = 1024  # lanes
GROUP = 64  # lanes
WORDS = 4  # in a lane
MOVED = 2  # words
_LINE_WORDS = LINE * WORDS
_CPU_CHUNK = 64  # lines that both sums go over in turn: they stay in the cache of a core
_DEVICE_CHUNK = 4096  # on other devices: few launches, temporaries of a few tens of MiB
_LINES_KEPT = 4096  # whose keys are not made anew each time: 32 MiB of a tensor
_MASK = (1 << 64) - 1
_KEY_T, _KEY_U, _KEY_M = range(1, 4)  # which row of keys


def digest(tensor: Tensor, first_word: int = 0) -> int:
    """Digest of `tensor`, taken as lying `first_word` words into the whole. In [0, 2^64)."""
    words = _words(tensor)
    by_lane, by_group = _keys_in_a_line(words.device)
    straight, moved = _Lines(words, first_word), _Lines(words, first_word + MOVED)
    in_groups = moved.whole.view(len(moved.whole), LINE // GROUP, GROUP)
    of_lanes = words.new_empty(len(straight.whole), dtype=torch.int64)
    of_groups = words.new_empty(in_groups.shape[:2], dtype=torch.int64)
    chunk = _CPU_CHUNK if words.device.type == "cpu" else _DEVICE_CHUNK
    rows = (straight.whole, of_lanes, in_groups, of_groups)
    for lanes, lane_sums, groups, group_sums in zip_longest(*(row.split(chunk) for row in rows)):
        if lanes is not None:
            _times(lanes, by_lane, lane_sums)
        if groups is not None:
            torch.sum(groups, 2, out=group_sums)
    total = _times_keys_of_lines(of_lanes, straight.first)
    total += _times_keys_of_lines(_times(of_groups, by_group), moved.first)
    for line, lanes in straight.edges:
        total += _times_keys_of_lines(_times(lanes, by_lane), line)
    for line, lanes in moved.edges:
        total += _times_keys_of_lines(_times(lanes.view(1, -1, GROUP).sum(2), by_group), line)
    return (int(total) + end_key(first_word + words.numel()) - end_key(first_word)) & _MASK


def as_hex(value: int) -> str:
    """The 16 hex digits under which digests are written and compared."""
    return f"{value & _MASK:016x}"


def keys(kind: int, index: Tensor) -> Tensor:
    """Odd pseudo-random 64-bit factors (int64) of the positions `index` (int64); `kind` tells their rows apart."""
    key = (index + (kind << 56)) * -7046029254386353131
    key.bitwise_xor_(key >> 32).mul_(-4417276706812531889)
    key.bitwise_xor_(key >> 29).mul_(-7723592293110705685)
    return key.bitwise_xor_(key >> 32).bitwise_or_(1)


def end_key(position: int) -> int:
    """E: a pseudo-random number for the place, in words, where a part begins or ends."""
    key = (position + 1) * 0x9E3779B97F4A7C15 & _MASK
    return (key ^ key >> 29) * 0xC2B2AE3D27D4EB4F & _MASK


class _Lines:
    """Words that begin somewhere in a row of lines, as lanes: whole lines where they stand, cut ones padded."""

    def __init__(self, words: Tensor, first: int) -> None:
        line, start = divmod(first, _LINE_WORDS)
        head = words[: _LINE_WORDS - start] if start else words[:0]
        rest = words[head.numel() :]
        num_whole = rest.numel() // _LINE_WORDS
        tail = rest[num_whole * _LINE_WORDS :]
        self.first = line + bool(start)  # number of the first whole line
        self.whole = _lanes(rest[: num_whole * _LINE_WORDS]).view(num_whole, LINE)
        self.edges = [(line, _padded(head, start))] if head.numel() else []
        self.edges += [(self.first + num_whole, _padded(tail, 0))] if tail.numel() else []


def _times(matrix: Tensor, vector: Tensor, out: Tensor | None = None) -> Tensor:
    """Matrix times vector, modulo 2^64."""
    if matrix.device.type == "cpu":
        return torch.mv(matrix, vector, out=out)  # one pass at the speed of memory
    return torch.sum(matrix * vector, 1, out=out)  # devices multiply no matrices of integers


def _times_keys_of_lines(sums: Tensor, line: int) -> Tensor:
    key = _keys_of_lines(sums.device)[line : line + len(sums)]
    if len(key) < len(sums):
        key = keys(_KEY_M, torch.arange(line, line + len(sums), device=sums.device))
    return torch.dot(sums, key) if sums.device.type == "cpu" else (sums * key).sum()


@lru_cache(maxsize=8)
def _keys_in_a_line(device: torch.device) -> tuple[Tensor, Tensor]:
    index = torch.arange(LINE, device=device)
    return keys(_KEY_T, index), keys(_KEY_U, index[: LINE // GROUP])


@lru_cache(maxsize=8)
def _keys_of_lines(device: torch.device) -> Tensor:
    return keys(_KEY_M, torch.arange(_LINES_KEPT, device=device))


def _words(tensor: Tensor) -> Tensor:
    """The tensor's words as a row of int16; views its memory where that is possible."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).to(torch.int16) if flat.element_size() == 1 else flat.view(torch.int16)


def _lanes(words: Tensor) -> Tensor:
    """int64 over the same bytes. They can begin anywhere in a lane: processors read that, other devices get a copy."""
    if words.device.type == "cpu":
        return torch.from_numpy(words.numpy().view(np.int64))
    return (words.clone() if words.storage_offset() % WORDS else words).view(torch.int64)


def _padded(words: Tensor, start: int) -> Tensor:
    """One line, zero but for `words` from word `start` on."""
    line = words.new_zeros(_LINE_WORDS)
    line[start : start + words.numel()] = words
    return line.view(torch.int64).view(1, LINE)
