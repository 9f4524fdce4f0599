"""Digests: the written formula, sums of parts, and what they tell apart."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlhf_megatron.resharding.digest import as_hex, digest, on_device

MASK = (1 << 64) - 1
LINE_WORDS = 4096


def signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def key(kind: int, index: int) -> int:
    """The factors in Python's own integers; >> keeps the sign, as in int64."""
    value = signed((index + (kind << 56)) * -7046029254386353131)
    value = signed((value ^ value >> 32) * -4417276706812531889)
    value = signed((value ^ value >> 29) * -7723592293110705685)
    return value ^ value >> 32 | 1


def end_key(position: int) -> int:
    value = (position + 1) * 0x9E3779B97F4A7C15 & MASK
    return (value ^ value >> 29) * 0xC2B2AE3D27D4EB4F & MASK


def by_hand(words: list[int], first: int = 0) -> int:
    """The formula of the docstring, word by word."""
    total = end_key(first + len(words)) - end_key(first)
    for i, word in enumerate(words, start=first):
        line, place = divmod(i, LINE_WORDS)
        total += (word << 16 * (i % 4)) * key(1, place // 4) * key(3, line)
        line, place = divmod(i + 2, LINE_WORDS)
        total += (word << 16 * ((i + 2) % 4)) * key(2, place // 4 // 64) * key(3, line)
    return total & MASK


def words_of(tensor: Tensor) -> list[int]:
    return [word & 0xFFFF for word in tensor.view(torch.int16).view(-1).tolist()]


def random_words(count: int, seed: int) -> Tensor:
    return torch.randint(-32768, 32768, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 127, 4094, 4096, 8191, 20_002])
@pytest.mark.parametrize("first", [0, 1, 2, 77, 4095, 4096 * 5000 + 4094])
def test_formula(count: int, first: int) -> None:
    words = random_words(count, seed=count)
    expected = by_hand(words_of(words), first)
    assert digest(words.view(torch.bfloat16), first) == expected
    if count % 2 == 0:
        assert digest(words.view(torch.float32), first) == expected
    assert digest(torch.cat([words[:1], words])[1:], first) == expected  # begins anywhere in memory
    ends = end_key(first + count) - end_key(first)
    assert (on_device(words, first) + ends) & MASK == expected  # as on a device that is not the CPU


def test_many_chunks_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its words at some places are not zero, so that the formula is quick."""
    tensor = torch.zeros(1_100_003, dtype=torch.bfloat16)
    places = random.Random(1).sample(range(len(tensor)), 300)
    tensor[places] = torch.randn(300).bfloat16()
    expected = end_key(len(tensor)) - end_key(0)
    for place in places:
        (word,) = words_of(tensor[place : place + 1])
        expected += by_hand([word], place) - end_key(place + 1) + end_key(place)
    assert digest(tensor) == expected & MASK
    monkeypatch.setattr("rlhf_megatron.resharding.digest._DEVICE_CHUNK", 7)
    ends = end_key(len(tensor)) - end_key(0)
    assert (on_device(tensor.view(torch.int16), 0) + ends) & MASK == expected & MASK


def test_one_byte_types_count_their_bytes() -> None:
    raw = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = by_hand(raw.tolist())
    assert digest(raw) == digest(raw.view(torch.int8)) == digest(raw.view(torch.float8_e4m3fn)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_parts_at_any_position_add_up(seed: int) -> None:
    draw = random.Random(seed)
    tensor = random_words(draw.randrange(1, 30_000), seed).view(torch.bfloat16)
    first = draw.randrange(10_000)
    cuts = sorted({0, len(tensor), *(draw.randrange(len(tensor)) for _ in range(draw.randrange(6)))})
    parts = [digest(tensor[start:end], first + start) for start, end in pairwise(cuts)]
    assert sum(parts) & MASK == digest(tensor, first)
    rows = tensor[: len(tensor) // 3 * 3].view(3, -1)
    by_row = sum(digest(row, i * rows.shape[1]) for i, row in enumerate(rows))
    assert by_row & MASK == digest(rows) == digest(rows.T.contiguous().T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_flipped_bit_is_found(dtype: torch.dtype) -> None:
    tensor = torch.randn(70, 131).to(dtype)
    raw = tensor.view(torch.uint8).view(-1)
    right, seen = digest(tensor), set()
    draw = random.Random(3)
    places = [(byte, bit) for byte in [*range(8), *draw.sample(range(len(raw)), 60)] for bit in range(8)]
    for byte, bit in places:
        raw[byte] ^= 1 << bit
        seen.add(digest(tensor))
        raw[byte] ^= 1 << bit
    assert digest(tensor) == right and right not in seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_changed_signs_are_found(dtype: torch.dtype) -> None:
    """Of numbers that stand in the upper part of a lane too: one sum of 64-bit lanes would not see them."""
    tensor = torch.ones(4096 * 3, dtype=dtype)
    draw, right = random.Random(4), digest(tensor)
    for _ in range(200):
        i, j = draw.sample(range(3, len(tensor), 4), 2)
        changed = tensor.clone()
        changed[[i, j]] = -1
        assert digest(changed) != right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (16, 1024), (8, 4096), (5, 333)])
def test_swapped_rows_columns_and_blocks_are_found(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows, columns = shape
    variants = [tensor[[1, 0, *range(2, rows)]], tensor[:, [1, 0, *range(2, columns)]], tensor.flip(0), tensor.flip(1)]
    variants += [tensor.roll(1, 0), tensor.roll(1, 1), tensor.roll(columns // 2, 1), tensor.T.contiguous(), -tensor]
    half = rows // 2
    variants.append(torch.cat([tensor[half : 2 * half], tensor[:half], tensor[2 * half :]]))  # gate and up
    found = [digest(variant) for variant in [tensor, *variants]]
    assert len(set(found)) == len(found)


def test_zeros_count() -> None:
    ends = torch.cat([torch.randn(50), torch.zeros(50)])
    cut_off = [digest(ends[:n]) for n in range(50, 101)]
    empty = [digest(torch.zeros(n, dtype=torch.bfloat16)) for n in (0, 1, 2, 999, 1000, 1001)]
    assert len({*cut_off, *empty}) == len(cut_off) + len(empty)
    assert digest(torch.zeros(4), first_word=4) != digest(torch.zeros(4))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.gpu
def test_a_device_finds_the_same() -> None:
    for count, first in ((5, 0), (50_001, 4095), (20_000_000, 2)):
        tensor = random_words(count, 1).view(torch.bfloat16)
        assert digest(tensor.cuda(), first) == digest(tensor, first)
        assert digest(tensor.cuda()[1:], first) == digest(tensor[1:], first)


def test_hex() -> None:
    assert as_hex(255) == "00000000000000ff" and as_hex(-1) == "f" * 16
