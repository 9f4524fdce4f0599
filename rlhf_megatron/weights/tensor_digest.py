"""Position-keyed digests of tensors, taken at less than twice the time of a memory copy.

A tensor is a row of unsigned 16-bit words w_i (of its bytes, for one-byte types). Four words make a
lane L_q = w_4q + 2^16 w_4q+1 + 2^32 w_4q+2 + 2^48 w_4q+3, and 1024 lanes a line. L' are the lanes
of the same words moved on by two places. The digest is, modulo 2^64,

    sum over q of L_q T[q mod 1024] M[q div 1024]  +  sum over q of L'_q U[(q mod 1024) div
                                                      64] M[q div 1024]
    +  E(end) - E(first)

with odd pseudo-random T, U, M. The upper words of a lane meet only the lower bits of T, so that two
changed signs could cancel in the first sum; in the second sum these words are the lower ones. E
makes zeros at the end count.

Every word has a factor of its own, so the digest of a tensor is the sum of those of its parts taken
at their positions:
shards can be digested where they stand, on any device, and added up. It finds accidents, not an
adversary: any change of one word, and of several but for a few patterns, such as x and -x exchanged
between two lanes of one group that are alike otherwise.
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

_CPU_WORDS = 1 << 18  # of a chunk, which stays in a cache
_DEVICE_WORDS = 1 << 24
_CPU_TURN_WORDS = 1 << 15  # fewer in a turn, and calls cost more than zeros
_DEVICE_TURN_WORDS = 1 << 20


def digest_tensor(tensor: Tensor, word_offset: int = 0) -> int:
    """Return the digest of `tensor`, in [0, 2^64), taken as lying `word_offset` words into the
    whole tensor.
    """
    words = view_as_words(tensor.detach().contiguous().view(-1))
    total = sum_words(words, word_offset)
    return (total + make_end_key(word_offset + words.numel()) - make_end_key(word_offset)) & _MASK


def view_as_words(tensor: Tensor) -> Tensor:
    """Return the tensor as int16 words: a view, or a copy for one-byte types. The last dimension
    must be contiguous.
    """
    return (
        tensor.view(torch.uint8).to(torch.int16)
        if tensor.element_size() == 1
        else tensor.view(torch.int16)
    )


def sum_words(words: Tensor, word_offset: int) -> int:
    """Return both sums of the digest, without E, over words [n] int16 that begin `word_offset`
    words into the whole.
    """
    return (
        _sum_words_on_cpu(words.numpy(), word_offset)
        if words.device.type == "cpu"
        else sum_words_on_device(words, word_offset)
    )


def format_digest(digest: int) -> str:
    """Return the 16 hex digits under which digests are written and compared."""
    return f"{digest & _MASK:016x}"


def make_position_keys(key_row: int, positions: Tensor) -> Tensor:
    """Return odd pseudo-random 64-bit factors (int64) for `positions` (int64). `key_row` selects
    the row of keys: T, U or M.
    """
    key = (positions + (key_row << 56)) * -7046029254386353131
    key.bitwise_xor_(key >> 32).mul_(-4417276706812531889)
    key.bitwise_xor_(key >> 29).mul_(-7723592293110705685)
    return key.bitwise_xor_(key >> 32).bitwise_or_(1)


def make_end_key(position: int) -> int:
    """Return E: a pseudo-random number in [0, 2^64) for the position, in words, where a part begins
    or ends.
    """
    key = (position + 1) * 0x9E3779B97F4A7C15 & _MASK
    return (key ^ key >> 29) * 0xC2B2AE3D27D4EB4F & _MASK


def _sum_words_on_cpu(words: npt.NDArray[np.int16], word_offset: int) -> int:
    """Return both sums of the digest. NumPy sums small parts, since its calls cost the least, and
    torch sums large ones.
    """
    by_lane, by_group = make_line_keys(torch.device("cpu"))
    straight = _WordLines.from_words(words, word_offset)
    moved = _WordLines.from_words(words, word_offset + MOVED)
    total = 0
    for line, lanes in straight.edge_lines:
        total += int(np.dot(lanes, by_lane.numpy())) * int(_get_line_factors(line, 1)[0])
    for line, lanes in moved.edge_lines:
        total += int(np.dot(lanes.reshape(-1, GROUP).sum(1), by_group.numpy())) * int(
            _get_line_factors(line, 1)[0]
        )
    if len(straight.whole_lines) or len(moved.whole_lines):
        total += _sum_whole_lines(straight, moved)
    return total


def _sum_whole_lines(lines_at_offset: _WordLines, lines_moved_on: _WordLines) -> int:
    """Return the part of both sums that whole lines contribute, with torch. `lines_moved_on`: the
    same words moved on by two places.
    """
    by_lane, by_group = make_line_keys(torch.device("cpu"))
    # The lanes can begin anywhere in a word of memory: torch reads them so, NumPy would
    # copy them first.
    lines = torch.from_numpy(lines_at_offset.whole_lines)
    groups = torch.from_numpy(lines_moved_on.whole_lines).view(-1, LINE // GROUP, GROUP)
    of_lines = torch.empty(len(lines), dtype=torch.int64)
    of_groups = torch.empty(len(groups), LINE // GROUP, dtype=torch.int64)
    for start in range(0, max(len(lines), len(groups)), _CPU_CHUNK):
        chunk = slice(start, start + _CPU_CHUNK)
        torch.mv(lines[chunk], by_lane, out=of_lines[chunk])
        torch.sum(groups[chunk], 2, out=of_groups[chunk])
    total = int(np.dot(of_lines.numpy(), _get_line_factors(lines_at_offset.first_line, len(lines))))
    return total + int(
        np.dot(
            torch.mv(of_groups, by_group).numpy(),
            _get_line_factors(lines_moved_on.first_line, len(groups)),
        )
    )


class _WordLines(NamedTuple):
    """Words that begin somewhere in a row of lines, as lanes."""

    first_line: int  # number of the first whole line
    whole_lines: Lanes  # [lines, LINE], where they stand
    edge_lines: list[tuple[int, Lanes]]  # number and lanes of a line that is cut, padded with zeros

    @staticmethod
    def from_words(words: npt.NDArray[np.int16], word_offset: int) -> _WordLines:
        """Divide words that begin `word_offset` words into the whole into whole lines and the cut
        lines at both ends.
        """
        line, start = divmod(word_offset, _LINE_WORDS)
        edges = []
        if start and len(words):
            edges.append((line, _pad_to_line(words[: _LINE_WORDS - start], start)))
        begin = -word_offset % _LINE_WORDS
        num_whole = max(0, len(words) - begin) // _LINE_WORDS
        end = begin + num_whole * _LINE_WORDS
        line += bool(start)
        if end < len(words):
            edges.append((line + num_whole, _pad_to_line(words[end:], 0)))
        return _WordLines(line, words[begin:end].view(np.int64).reshape(num_whole, LINE), edges)


def _pad_to_line(words: npt.NDArray[np.int16], start_in_line: int) -> Lanes:
    """Return one line of lanes that holds `words` from word `start_in_line` on, and zeros
    elsewhere.
    """
    line = np.zeros(LINE, np.int64)
    line.view(np.int16)[start_in_line : start_in_line + len(words)] = words
    return line


def sum_words_on_device(words: Tensor, word_offset: int) -> int:
    """Return both sums of the digest by plain operations, for words [n] int16 on any device."""
    by_lane, by_group = make_line_keys(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for shift, by_place in ((0, by_lane), (MOVED, by_group.repeat_interleave(GROUP))):
        place = word_offset + shift
        end = word_offset + shift + words.numel()
        while place < end:
            line, start = divmod(place, _LINE_WORDS)
            part = words[place - word_offset - shift :][: _DEVICE_CHUNK * _LINE_WORDS - start]
            lanes = torch.nn.functional.pad(
                part, (start, -(start + part.numel()) % _LINE_WORDS)
            ).view(torch.int64)
            lines = (lanes.view(-1, LINE) * by_place).sum(1)
            index = torch.arange(line, line + len(lines), device=words.device)
            total += (lines * make_position_keys(_KEY_M, index)).sum()
            place += part.numel()
    return int(total)


@lru_cache(maxsize=8)
def make_line_keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors T [LINE] and U [LINE // GROUP] on a device."""
    index = torch.arange(LINE, device=device)
    return make_position_keys(_KEY_T, index), make_position_keys(_KEY_U, index[: LINE // GROUP])


def _get_line_factors(first_line: int, num_lines: int) -> Lanes:
    """Return the factors M of `num_lines` lines from `first_line` on."""
    if first_line + num_lines <= _LINES_KEPT:
        return _cache_first_line_factors()[first_line : first_line + num_lines]
    return make_position_keys(_KEY_M, torch.arange(first_line, first_line + num_lines)).numpy()


@lru_cache(maxsize=1)
def _cache_first_line_factors() -> Lanes:
    """Return the factors M of the first _LINES_KEPT lines, computed once."""
    return make_position_keys(_KEY_M, torch.arange(_LINES_KEPT)).numpy()


def digest_tensor_part(part: Tensor, shape: tuple[int, ...], axis: int, start: int) -> int:
    """Return the digest, in [0, 2^64), of `part`: entries start .. start + part.shape[axis] - 1
    along `axis` of a tensor of `shape`, taken at their place there. The digests of parts that cover
    the tensor once add up to the digest of the tensor, modulo 2^64.
    """
    expected = (
        (*shape[:axis], part.shape[axis], *shape[axis + 1 :]) if 0 <= axis < len(shape) else None
    )
    assert tuple(part.shape) == expected and start + part.shape[axis] <= shape[axis], (
        part.shape,
        shape,
        axis,
        start,
    )
    unit = max(1, part.element_size() // 2)  # words
    before = prod(shape[:axis])
    after = prod(shape[axis + 1 :]) * unit
    if before == 1 or part.shape[axis] == shape[axis]:
        return digest_tensor(part, start * after)
    flat = part.detach().reshape(before, -1)
    words = view_as_words(flat if flat.stride(1) == 1 else flat.contiguous())
    return _digest_columns(words, shape[axis] * after, start * after)


def _digest_columns(words: Tensor, row_width: int, column_offset: int) -> int:
    """Return the digest of words [rows, columns] int16 that begin `column_offset` words into each
    row of `row_width` words of the whole.
    """
    rows, columns = words.shape
    if not words.numel():
        return 0
    turns = _LINE_WORDS // gcd(row_width, _LINE_WORDS)
    in_turns = words.numel() // turns >= (
        _CPU_TURN_WORDS if _is_on_cpu(words) else _DEVICE_TURN_WORDS
    )
    total = (
        _sum_rows_of_equal_phase(words, row_width, column_offset, turns)
        if in_turns
        else _sum_rows_padded_with_zeros(words, row_width, column_offset)
    )
    return (total + _sum_row_end_keys(rows, columns, row_width, column_offset)) & _MASK


def _sum_row_end_keys(num_rows: int, num_columns: int, row_width: int, column_offset: int) -> int:
    """Return the sum of E(end) - E(begin) over all rows."""
    begins = torch.arange(num_rows) * row_width + column_offset
    return int((make_end_keys(begins + num_columns) - make_end_keys(begins)).sum())


def make_end_keys(positions: Tensor) -> Tensor:
    """Return `make_end_key` of many positions (int64), modulo 2^64 in two's complement."""
    key = (positions + 1) * (0x9E3779B97F4A7C15 - (1 << 64))
    return (key ^ ((key >> 29) & ((1 << 35) - 1))) * (0xC2B2AE3D27D4EB4F - (1 << 64))


def _sum_rows_padded_with_zeros(words: Tensor, row_width: int, column_offset: int) -> int:
    """Return both sums for columns of rows: lay the words into full rows of zeros and sum these."""
    rows, columns = words.shape
    at_once = max(1, _get_chunk_words(words) // row_width)
    lines = words.new_zeros(min(at_once, rows), row_width)
    total = 0
    for start in range(0, rows, at_once):
        chunk = words[start : start + at_once]
        lines[: len(chunk), column_offset : column_offset + columns] = chunk
        total += sum_words(lines[: len(chunk)].view(-1), start * row_width)
    return total


def _sum_rows_of_equal_phase(
    words: Tensor, row_width: int, column_offset: int, num_phases: int
) -> int:
    """Return both sums for columns of rows: sum each row within its lines first. Rows that are
    `num_phases` apart begin at the same place of a line, so that they share their factors.
    """
    rows, columns = words.shape
    device = words.device
    num_phases = min(num_phases, rows)
    by_lane, by_group = make_line_keys(device)
    factors = (by_lane, by_group.repeat_interleave(GROUP))
    of_turn = -(-rows // num_phases)
    at_once = min(of_turn, max(1, _get_chunk_words(words) // columns))
    padded = words.new_zeros(at_once, (columns + 4 * WORDS - 1) // WORDS * WORDS)
    num_lines = (columns + 2 * _LINE_WORDS - 2) // _LINE_WORDS
    sums = torch.zeros(2, num_lines, num_phases, of_turn, dtype=torch.int64, device=device)
    for turn in range(num_phases):
        place = (turn * row_width + column_offset) % _LINE_WORDS
        padded.zero_()
        for start in range(0, of_turn, at_once):
            chunk = words[turn + start * num_phases :: num_phases][:at_once]
            for i, (lane, lanes) in enumerate(_iterate_lane_matrices(chunk, place, padded)):
                for line, low, high in _split_lanes_at_lines(lane, lanes.shape[1]):
                    of_rows = sums[i, line, turn, start : start + len(chunk)]
                    _multiply_lanes(
                        lanes[:, low:high], factors[i][(lane + low) % LINE :][: high - low], of_rows
                    )
    begins = (
        torch.arange(num_phases, device=device)[:, None]
        + torch.arange(of_turn, device=device) * num_phases
    ) * row_width + column_offset
    begins = torch.stack([begins, begins + MOVED])[:, None]
    lines = begins // _LINE_WORDS + torch.arange(num_lines, device=device)[:, None, None]
    return int((sums * make_position_keys(_KEY_M, lines)).sum())


def _iterate_lane_matrices(
    words: Tensor, word_in_line: int, padded_buffer: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield (place of the first lane in its line, lanes [rows, lanes] int64) twice: for rows that
    begin at word `word_in_line` of a line, and for the same words moved on. The words are written
    into `padded_buffer`, which must hold zeros or rows from the same place only.
    """
    rows, columns = words.shape
    lane, in_lane = divmod(word_in_line, WORDS)
    padded_buffer[:rows, WORDS + in_lane : WORDS + in_lane + columns] = words
    yield lane, padded_buffer.view(torch.int64)[:rows, 1 : 1 + -(-(in_lane + columns) // WORDS)]
    lane, moved = divmod((word_in_line + MOVED) % _LINE_WORDS, WORDS)
    begin = WORDS + in_lane - moved
    end = begin + -(-(moved + columns) // WORDS) * WORDS
    if _is_on_cpu(words):  # reads lanes that begin in the middle of one
        yield lane, torch.from_numpy(padded_buffer[:rows].numpy()[:, begin:end].view(np.int64))
    else:
        yield (
            lane,
            padded_buffer[:rows, begin:end]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.int64),
        )


def _split_lanes_at_lines(first_lane: int, num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (line number after the first, begin, end) of the runs of lanes that lie in one line,
    for lanes that begin `first_lane` lanes into a line.
    """
    low = 0
    number = 0
    while low < num_lanes:
        high = min(num_lanes, low + LINE - (first_lane + low) % LINE)
        yield number, low, high
        low = high
        number = number + 1


def _multiply_lanes(lanes: Tensor, factors: Tensor, row_sums_out: Tensor) -> None:
    """Write the product of an integer matrix and a vector into `row_sums_out`. Only the CPU has an
    operator for this.
    """
    if _is_on_cpu(lanes):
        torch.mv(lanes, factors, out=row_sums_out)
    else:
        torch.sum(lanes * factors, 1, out=row_sums_out)


def _get_chunk_words(words: Tensor) -> int:
    """Return the number of words to process at once on the device of `words`."""
    return _CPU_WORDS if _is_on_cpu(words) else _DEVICE_WORDS


def _is_on_cpu(tensor: Tensor) -> bool:
    """Return whether the tensor lies in host memory."""
    return tensor.device.type == "cpu"
