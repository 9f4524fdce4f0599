"""Digests: the written formula, sums of parts, and what they tell apart."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlhf_megatron.weights import tensor_digest as digest_parts
from rlhf_megatron.weights.tensor_digest import (
    digest_tensor,
    digest_tensor_part,
    format_digest,
    make_end_keys,
    sum_words_on_device,
)

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
    return torch.randint(-32768, 32768, (count,), generator=torch.Generator().manual_seed(seed)).to(
        torch.int16
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 127, 4094, 4096, 8191, 20_002])
@pytest.mark.parametrize("first", [0, 1, 2, 77, 4095, 4096 * 5000 + 4094])
def test_formula(count: int, first: int) -> None:
    words = random_words(count, seed=count)
    expected = by_hand(words_of(words), first)
    assert digest_tensor(words.view(torch.bfloat16), first) == expected
    if count % 2 == 0:
        assert digest_tensor(words.view(torch.float32), first) == expected
    # begins anywhere in memory
    assert digest_tensor(torch.cat([words[:1], words])[1:], first) == expected
    ends = end_key(first + count) - end_key(first)
    # as on a device that is not the CPU
    assert (sum_words_on_device(words, first) + ends) & MASK == expected


def test_many_chunks_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its words at some places are not zero, so that the formula is quick."""
    tensor = torch.zeros(1_100_003, dtype=torch.bfloat16)
    places = random.Random(1).sample(range(len(tensor)), 300)
    tensor[places] = torch.randn(300).bfloat16()
    expected = end_key(len(tensor)) - end_key(0)
    for place in places:
        (word,) = words_of(tensor[place : place + 1])
        expected += by_hand([word], place) - end_key(place + 1) + end_key(place)
    assert digest_tensor(tensor) == expected & MASK
    monkeypatch.setattr("rlhf_megatron.weights.tensor_digest._DEVICE_CHUNK", 7)
    ends = end_key(len(tensor)) - end_key(0)
    assert (sum_words_on_device(tensor.view(torch.int16), 0) + ends) & MASK == expected & MASK


def test_one_byte_types_count_their_bytes() -> None:
    raw = torch.randint(
        0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    expected = by_hand(raw.tolist())
    assert (
        digest_tensor(raw)
        == digest_tensor(raw.view(torch.int8))
        == digest_tensor(raw.view(torch.float8_e4m3fn))
        == expected
    )


@pytest.mark.parametrize("seed", range(20))
def test_parts_at_any_position_add_up(seed: int) -> None:
    draw = random.Random(seed)
    tensor = random_words(draw.randrange(1, 30_000), seed).view(torch.bfloat16)
    first = draw.randrange(10_000)
    cuts = sorted(
        {0, len(tensor), *(draw.randrange(len(tensor)) for _ in range(draw.randrange(6)))}
    )
    parts = [digest_tensor(tensor[start:end], first + start) for start, end in pairwise(cuts)]
    assert sum(parts) & MASK == digest_tensor(tensor, first)
    rows = tensor[: len(tensor) // 3 * 3].view(3, -1)
    by_row = sum(digest_tensor(row, i * rows.shape[1]) for i, row in enumerate(rows))
    assert by_row & MASK == digest_tensor(rows) == digest_tensor(rows.T.contiguous().T)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Of any bits."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(
        0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).view(shape)


def part_by_hand(tensor: Tensor, axis: int, start: int, count: int) -> int:
    """Word by word: what the words of the part add to the digest of the whole."""
    unit = max(1, tensor.element_size() // 2)
    rows = tensor.shape[0]
    width = tensor.shape[1] * unit
    of_words = tensor.view(torch.uint8).to(torch.int16) if tensor.element_size() == 1 else tensor
    words = of_words.view(torch.int16).tolist()
    low, high = (0, width) if axis == 0 else (start * unit, (start + count) * unit)
    chosen = range(start, start + count) if axis == 0 else range(rows)
    return (
        sum(
            by_hand([word & 0xFFFF for word in words[r][low:high]], r * width + low) for r in chosen
        )
        & MASK
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 9), (6, 5), (5, 333), (7, 1030)])
@pytest.mark.parametrize("in_turns", [True, False])
def test_formula_of_parts(
    shape: tuple[int, int], dtype: torch.dtype, in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_parts, "_CPU_TURN_WORDS", 0 if in_turns else 1 << 60)
    monkeypatch.setattr(digest_parts, "_CPU_WORDS", 700)  # several chunks
    tensor = random_tensor(shape, dtype, seed=7)
    draw = random.Random(7)
    for axis in (0, 1):
        for _ in range(3):
            start = draw.randrange(shape[axis])
            count = draw.randrange(shape[axis] - start + 1)
            part = tensor.narrow(axis, start, count)
            assert digest_tensor_part(part, shape, axis, start) == part_by_hand(
                tensor, axis, start, count
            )


DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float64]
SHAPES = [
    (1, 7),
    (5, 333),
    (64, 64),
    (7, 4096),
    (300, 256),
    (33, 1000),
    (513, 515),
    (2050, 48),
    (3, 9000),
    (900, 768),
]


@pytest.mark.parametrize("seed", range(60))
def test_any_parts_of_rows_or_columns_add_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors of one, two, four and eight bytes a number, odd sizes among them; where they
    stand, or copied.
    """
    draw = random.Random(seed)
    dtype = draw.choice(DTYPES)
    shape = draw.choice(SHAPES)
    axis = draw.randrange(2)
    monkeypatch.setattr(digest_parts, "_CPU_TURN_WORDS", draw.choice([0, 1 << 15, 1 << 60]))
    tensor = random_tensor(shape, dtype, seed)
    size = shape[axis]
    cuts = sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(5)))})
    total = 0
    for start, end in pairwise(cuts):
        part = tensor.narrow(axis, start, end - start)
        total += digest_tensor_part(
            part.clone() if draw.random() < 0.5 else part, shape, axis, start
        )
    assert total & MASK == digest_tensor(tensor)


def test_parts_of_other_axes_and_of_parts() -> None:
    """Of one and of three axes; an empty part adds nothing;
    a part at the wrong place is another.
    """
    vector = random_tensor((77,), torch.bfloat16, 1)
    cube = random_tensor((4, 6, 10), torch.float32, 2)
    assert sum(
        digest_tensor_part(vector[a:b], (77,), 0, a) for a, b in ((0, 40), (40, 77))
    ) & MASK == digest_tensor(vector)
    for axis in range(3):
        parts = [
            digest_tensor_part(cube.narrow(axis, i, 2), (4, 6, 10), axis, i)
            for i in range(0, cube.shape[axis], 2)
        ]
        assert sum(parts) & MASK == digest_tensor(cube)
    turned = random_tensor((50, 30), torch.float32, 4).t()
    assert sum(
        digest_tensor_part(turned[:, a : a + 25], (30, 50), 1, a) for a in (0, 25)
    ) & MASK == digest_tensor(turned)
    assert digest_tensor_part(cube[:, 6:], (4, 6, 10), 1, 6) == 0
    assert digest_tensor_part(cube[:, :3], (4, 6, 10), 1, 0) != digest_tensor_part(
        cube[:, :3], (4, 6, 10), 1, 3
    )


def test_ends_of_many_places() -> None:
    places = [0, 1, 5, 4096, 1 << 33, (1 << 40) + 7]
    assert [key & MASK for key in make_end_keys(torch.tensor(places)).tolist()] == [
        end_key(place) for place in places
    ]


def test_parts_as_on_a_device_that_is_not_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have no product of a matrix of integers, and read no lanes that begin in the
    middle of one.
    """
    tensor = random_tensor((515, 516), torch.bfloat16, 3)
    expected = [
        digest_tensor_part(tensor[:, a:b], (515, 516), 1, a) for a, b in ((0, 129), (129, 516))
    ]
    monkeypatch.setattr(digest_parts, "_is_on_cpu", lambda tensor: False)
    for words in (0, 1 << 60):
        monkeypatch.setattr(digest_parts, "_DEVICE_TURN_WORDS", words)
        found = [
            digest_tensor_part(tensor[:, a:b], (515, 516), 1, a) for a, b in ((0, 129), (129, 516))
        ]
        assert found == expected and sum(found) & MASK == digest_tensor(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_flipped_bit_is_found(dtype: torch.dtype) -> None:
    tensor = torch.randn(70, 131).to(dtype)
    raw = tensor.view(torch.uint8).view(-1)
    right = digest_tensor(tensor)
    seen = set()
    draw = random.Random(3)
    places = [
        (byte, bit) for byte in [*range(8), *draw.sample(range(len(raw)), 60)] for bit in range(8)
    ]
    for byte, bit in places:
        raw[byte] ^= 1 << bit
        seen.add(digest_tensor(tensor))
        raw[byte] ^= 1 << bit
    assert digest_tensor(tensor) == right and right not in seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_changed_signs_are_found(dtype: torch.dtype) -> None:
    """Of numbers that stand in the upper part of a lane too: one sum of 64-bit lanes
    would not see them.
    """
    tensor = torch.ones(4096 * 3, dtype=dtype)
    draw = random.Random(4)
    right = digest_tensor(tensor)
    for _ in range(200):
        i, j = draw.sample(range(3, len(tensor), 4), 2)
        changed = tensor.clone()
        changed[[i, j]] = -1
        assert digest_tensor(changed) != right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (16, 1024), (8, 4096), (5, 333)])
def test_swapped_rows_columns_and_blocks_are_found(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows, columns = shape
    variants = [
        tensor[[1, 0, *range(2, rows)]],
        tensor[:, [1, 0, *range(2, columns)]],
        tensor.flip(0),
        tensor.flip(1),
    ]
    variants += [
        tensor.roll(1, 0),
        tensor.roll(1, 1),
        tensor.roll(columns // 2, 1),
        tensor.T.contiguous(),
        -tensor,
    ]
    half = rows // 2
    # gate and up
    variants.append(torch.cat([tensor[half : 2 * half], tensor[:half], tensor[2 * half :]]))
    found = [digest_tensor(variant) for variant in [tensor, *variants]]
    assert len(set(found)) == len(found)


def test_zeros_count() -> None:
    ends = torch.cat([torch.randn(50), torch.zeros(50)])
    cut_off = [digest_tensor(ends[:n]) for n in range(50, 101)]
    empty = [
        digest_tensor(torch.zeros(n, dtype=torch.bfloat16)) for n in (0, 1, 2, 999, 1000, 1001)
    ]
    assert len({*cut_off, *empty}) == len(cut_off) + len(empty)
    assert digest_tensor(torch.zeros(4), word_offset=4) != digest_tensor(torch.zeros(4))
    assert digest_tensor(torch.tensor([0.0])) != digest_tensor(torch.tensor([-0.0]))


@pytest.mark.gpu
def test_a_device_finds_the_same() -> None:
    for count, first in ((5, 0), (50_001, 4095), (20_000_000, 2)):
        tensor = random_words(count, 1).view(torch.bfloat16)
        assert digest_tensor(tensor.cuda(), first) == digest_tensor(tensor, first)
        assert digest_tensor(tensor.cuda()[1:], first) == digest_tensor(tensor[1:], first)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(513, 515), (4096, 4096), (900, 1536)])
def test_a_device_finds_the_same_of_parts(shape: tuple[int, int]) -> None:
    tensor = random_tensor(shape, torch.bfloat16, 1)
    for axis in (0, 1):
        part = tensor.narrow(axis, 130, 257)
        assert digest_tensor_part(part.cuda(), shape, axis, 130) == digest_tensor_part(
            part, shape, axis, 130
        )


def test_hex() -> None:
    assert format_digest(255) == "00000000000000ff" and format_digest(-1) == "f" * 16
