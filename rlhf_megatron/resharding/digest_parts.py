"""Digests of parts of a tensor, taken where they stand: parts that cover a tensor once add up to its digest.

A part of the rows is a row of words like the whole. A part of the columns is many short ones, one in each row. Rows
whose places in a line (see `resharding.digest`) are equal meet the same factors, so they are taken together; every
4096 / gcd(words of a row, 4096) rows it comes round again, which for the widths of models are few turns. Where too
little comes together in a turn, the columns are laid into a few rows of zeros at a time instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.resharding.digest import (
    GROUP,
    LINE,
    MOVED,
    WORDS,
    digest,
    in_lines,
    keys,
    keys_in_a_line,
    words_of,
)

_KEY_M = 3  # as in resharding.digest
_LINE_WORDS = LINE * WORDS
_MASK = (1 << 64) - 1
_CPU_WORDS = 1 << 18  # of a chunk, which stays in a cache
_DEVICE_WORDS = 1 << 24
_CPU_TURN_WORDS = 1 << 15  # fewer in a turn, and calls cost more than zeros
_DEVICE_TURN_WORDS = 1 << 20


def digest_part(part: Tensor, shape: tuple[int, ...], axis: int, start: int) -> int:
    """Digest of `part`, entries start .. start + part.shape[axis] - 1 along `axis` of a tensor of `shape`, taken at its
    place there. In [0, 2^64); parts that cover the tensor once add up to the digest of it, modulo 2^64."""
    expected = (*shape[:axis], part.shape[axis], *shape[axis + 1 :]) if 0 <= axis < len(shape) else None
    assert tuple(part.shape) == expected and start + part.shape[axis] <= shape[axis], (part.shape, shape, axis, start)
    unit = max(1, part.element_size() // 2)  # words
    before, after = prod(shape[:axis]), prod(shape[axis + 1 :]) * unit
    if before == 1 or part.shape[axis] == shape[axis]:
        return digest(part, start * after)
    flat = part.detach().reshape(before, -1)
    words = words_of(flat if flat.stride(1) == 1 else flat.contiguous())
    return _columns(words, shape[axis] * after, start * after)


def _columns(words: Tensor, width: int, first: int) -> int:
    """Words [rows, columns] int16 that begin `first` words into each row of `width`."""
    rows, columns = words.shape
    if not words.numel():
        return 0
    turns = _LINE_WORDS // gcd(width, _LINE_WORDS)
    in_turns = words.numel() // turns >= (_CPU_TURN_WORDS if _is_cpu(words) else _DEVICE_TURN_WORDS)
    total = _by_turns(words, width, first, turns) if in_turns else _among_zeros(words, width, first)
    return (total + _ends(rows, columns, width, first)) & _MASK


def _ends(rows: int, columns: int, width: int, first: int) -> int:
    begins = torch.arange(rows) * width + first
    return int((end_keys(begins + columns) - end_keys(begins)).sum())


def end_keys(positions: Tensor) -> Tensor:
    """`end_key` of many positions (int64), modulo 2^64 in two's complement."""
    key = (positions + 1) * (0x9E3779B97F4A7C15 - (1 << 64))
    return (key ^ ((key >> 29) & ((1 << 35) - 1))) * (0xC2B2AE3D27D4EB4F - (1 << 64))


def _among_zeros(words: Tensor, width: int, first: int) -> int:
    rows, columns = words.shape
    at_once = max(1, _chunk_words(words) // width)
    lines = words.new_zeros(min(at_once, rows), width)
    total = 0
    for start in range(0, rows, at_once):
        chunk = words[start : start + at_once]
        lines[: len(chunk), first : first + columns] = chunk
        total += in_lines(lines[: len(chunk)].view(-1), start * width)
    return total


def _by_turns(words: Tensor, width: int, first: int, turns: int) -> int:
    """Both sums: first within a line for every row, where rows that are `turns` apart meet the same factors."""
    rows, columns = words.shape
    device, turns = words.device, min(turns, rows)
    by_lane, by_group = keys_in_a_line(device)
    factors = (by_lane, by_group.repeat_interleave(GROUP))
    of_turn = -(-rows // turns)
    at_once = min(of_turn, max(1, _chunk_words(words) // columns))
    padded = words.new_zeros(at_once, (columns + 4 * WORDS - 1) // WORDS * WORDS)
    num_lines = (columns + 2 * _LINE_WORDS - 2) // _LINE_WORDS
    sums = torch.zeros(2, num_lines, turns, of_turn, dtype=torch.int64, device=device)
    for turn in range(turns):
        place = (turn * width + first) % _LINE_WORDS
        padded.zero_()
        for start in range(0, of_turn, at_once):
            chunk = words[turn + start * turns :: turns][:at_once]
            for i, (lane, lanes) in enumerate(_lanes(chunk, place, padded)):
                for line, low, high in _pieces(lane, lanes.shape[1]):
                    of_rows = sums[i, line, turn, start : start + len(chunk)]
                    _times(lanes[:, low:high], factors[i][(lane + low) % LINE :][: high - low], of_rows)
    begins = (
        torch.arange(turns, device=device)[:, None] + torch.arange(of_turn, device=device) * turns
    ) * width + first
    begins = torch.stack([begins, begins + MOVED])[:, None]
    lines = begins // _LINE_WORDS + torch.arange(num_lines, device=device)[:, None, None]
    return int((sums * keys(_KEY_M, lines)).sum())


def _lanes(words: Tensor, place: int, padded: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(place of the first lane in its line, lanes [rows, lanes] int64) of rows that begin at word `place` of a line,
    and of the same words moved on. They are laid into `padded`, which is zero but for such rows."""
    rows, columns = words.shape
    lane, in_lane = divmod(place, WORDS)
    padded[:rows, WORDS + in_lane : WORDS + in_lane + columns] = words
    yield lane, padded.view(torch.int64)[:rows, 1 : 1 + -(-(in_lane + columns) // WORDS)]
    lane, moved = divmod((place + MOVED) % _LINE_WORDS, WORDS)
    begin = WORDS + in_lane - moved
    end = begin + -(-(moved + columns) // WORDS) * WORDS
    if _is_cpu(words):  # reads lanes that begin in the middle of one
        yield lane, torch.from_numpy(padded[:rows].numpy()[:, begin:end].view(np.int64))
    else:
        yield lane, padded[:rows, begin:end].clone(memory_format=torch.contiguous_format).view(torch.int64)


def _pieces(lane: int, num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """(lines after the first, from, to) of lanes that begin `lane` lanes into a line, cut where lines end."""
    low, number = 0, 0
    while low < num_lanes:
        high = min(num_lanes, low + LINE - (lane + low) % LINE)
        yield number, low, high
        low, number = high, number + 1


def _times(lanes: Tensor, factors: Tensor, of_rows: Tensor) -> None:
    """No device but the CPU multiplies matrices of integers."""
    if _is_cpu(lanes):
        torch.mv(lanes, factors, out=of_rows)
    else:
        torch.sum(lanes * factors, 1, out=of_rows)


def _chunk_words(words: Tensor) -> int:
    return _CPU_WORDS if _is_cpu(words) else _DEVICE_WORDS


def _is_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
