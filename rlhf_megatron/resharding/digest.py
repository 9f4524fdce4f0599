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

from collections.abc import Iterator
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LINE = 1024  # lanes
GROUP = 64  # lanes
WORDS = 4  # in a lane
MOVED = 2  # words
_LINE_WORDS = LINE * WORDS
_CPU_CHUNK = 96  # lines that both sums go over in turn: they stay in a cache
_DEVICE_CHUNK = 4096  # on other devices: few launches, temporaries of a few tens of MiB
_LINES_KEPT = 4096  # whose keys are not made anew each time: 32 MiB of a tensor
_MASK = (1 << 64) - 1
_KEY_T, _KEY_U, _KEY_M = range(1, 4)  # which row of keys
Lanes = npt.NDArray[np.int64]


def digest(tensor: Tensor, first_word: int = 0) -> int:
    """Digest of `tensor`, taken as lying `first_word` words into the whole. In [0, 2^64)."""
    words = words_of(tensor.detach().contiguous().view(-1))
    total = in_lines(words, first_word)
    return (total + end_key(first_word + words.numel()) - end_key(first_word)) & _MASK


def words_of(tensor: Tensor) -> Tensor:
    """The words (int16) of a tensor whose last dimension is contiguous."""
    return tensor.view(torch.uint8).to(torch.int16) if tensor.element_size() == 1 else tensor.view(torch.int16)


def in_lines(words: Tensor, first_word: int) -> int:
    """Return both sums, without E, over words [n] int16 that begin `first_word` words into the whole."""
    return _on_cpu(words.numpy(), first_word) if words.device.type == "cpu" else on_device(words, first_word)


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


def _on_cpu(words: npt.NDArray[np.int16], first_word: int) -> int:
    """Return both sums. NumPy sums small parts, since its calls cost least, and torch large ones."""
    by_lane, by_group = keys_in_a_line(torch.device("cpu"))
    straight, moved = _Lines.of(words, first_word), _Lines.of(words, first_word + MOVED)
    total = 0
    for line, lanes in straight.edges:
        total += int(np.dot(lanes, by_lane.numpy())) * int(_keys_of_lines(line, 1)[0])
    for line, lanes in moved.edges:
        total += int(np.dot(lanes.reshape(-1, GROUP).sum(1), by_group.numpy())) * int(_keys_of_lines(line, 1)[0])
    if len(straight.whole) or len(moved.whole):
        total += _of_whole_lines(straight, moved)
    return total


def _of_whole_lines(straight: _Lines, moved: _Lines) -> int:
    by_lane, by_group = keys_in_a_line(torch.device("cpu"))
    # The lanes can begin anywhere in a word of memory: torch reads them so, NumPy would copy them first.
    lines = torch.from_numpy(straight.whole)
    groups = torch.from_numpy(moved.whole).view(-1, LINE // GROUP, GROUP)
    of_lines = torch.empty(len(lines), dtype=torch.int64)
    of_groups = torch.empty(len(groups), LINE // GROUP, dtype=torch.int64)
    for start in range(0, max(len(lines), len(groups)), _CPU_CHUNK):
        chunk = slice(start, start + _CPU_CHUNK)
        torch.mv(lines[chunk], by_lane, out=of_lines[chunk])
        torch.sum(groups[chunk], 2, out=of_groups[chunk])
    total = int(np.dot(of_lines.numpy(), _keys_of_lines(straight.first, len(lines))))
    return total + int(np.dot(torch.mv(of_groups, by_group).numpy(), _keys_of_lines(moved.first, len(groups))))


class _Lines(NamedTuple):
    """Words that begin somewhere in a row of lines, as lanes."""

    first: int  # number of the first whole line
    whole: Lanes  # [lines, LINE], where they stand
    edges: list[tuple[int, Lanes]]  # number and lanes of a line that is cut, padded with zeros

    @staticmethod
    def of(words: npt.NDArray[np.int16], first_word: int) -> _Lines:
        line, start = divmod(first_word, _LINE_WORDS)
        edges = []
        if start and len(words):
            edges.append((line, _padded(words[: _LINE_WORDS - start], start)))
        begin = -first_word % _LINE_WORDS
        num_whole = max(0, len(words) - begin) // _LINE_WORDS
        end = begin + num_whole * _LINE_WORDS
        line += bool(start)
        if end < len(words):
            edges.append((line + num_whole, _padded(words[end:], 0)))
        return _Lines(line, words[begin:end].view(np.int64).reshape(num_whole, LINE), edges)


def _padded(words: npt.NDArray[np.int16], start: int) -> Lanes:
    line = np.zeros(LINE, np.int64)
    line.view(np.int16)[start : start + len(words)] = words
    return line


def on_device(words: Tensor, first_word: int) -> int:
    """Return both sums by plain operations, for words [n] int16 on any device."""
    by_lane, by_group = keys_in_a_line(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for shift, by_place in ((0, by_lane), (MOVED, by_group.repeat_interleave(GROUP))):
        place, end = first_word + shift, first_word + shift + words.numel()
        while place < end:
            line, start = divmod(place, _LINE_WORDS)
            part = words[place - first_word - shift :][: _DEVICE_CHUNK * _LINE_WORDS - start]
            lanes = torch.nn.functional.pad(part, (start, -(start + part.numel()) % _LINE_WORDS)).view(torch.int64)
            lines = (lanes.view(-1, LINE) * by_place).sum(1)
            index = torch.arange(line, line + len(lines), device=words.device)
            total += (lines * keys(_KEY_M, index)).sum()
            place += part.numel()
    return int(total)


@lru_cache(maxsize=8)
def keys_in_a_line(device: torch.device) -> tuple[Tensor, Tensor]:
    """T and U."""
    index = torch.arange(LINE, device=device)
    return keys(_KEY_T, index), keys(_KEY_U, index[: LINE // GROUP])


def _keys_of_lines(first: int, count: int) -> Lanes:
    if first + count <= _LINES_KEPT:
        return _keys_of_the_first_lines()[first : first + count]
    return keys(_KEY_M, torch.arange(first, first + count)).numpy()


@lru_cache(maxsize=1)
def _keys_of_the_first_lines() -> Lanes:
    return keys(_KEY_M, torch.arange(_LINES_KEPT)).numpy()


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
    """Return both sums. Each row is summed within a line first; rows that are `turns` apart meet the same factors."""
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
    """Multiply a matrix of integers by a vector, which only the CPU has an operator for."""
    if _is_cpu(lanes):
        torch.mv(lanes, factors, out=of_rows)
    else:
        torch.sum(lanes * factors, 1, out=of_rows)


def _chunk_words(words: Tensor) -> int:
    return _CPU_WORDS if _is_cpu(words) else _DEVICE_WORDS


def _is_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
