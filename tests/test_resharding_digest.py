"""Digests: the written formula, sums of parts, and what they tell apart."""

import pytest
import torch

from rlhf_megatron.resharding.digest import as_hex, digest

MASK = (1 << 64) - 1


def by_hand(words: list[int], first: int = 0) -> int:
    """The formula of the docstring in Python's own integers; words are signed 16-bit."""
    total = 0
    for i, word in enumerate(words, start=first):
        key = ((i * -7046029254386353131) & MASK) ^ (((i >> 7) * -4417276706812531889) & MASK)
        total += (word + 1) * (key | 1)
    return total & MASK


@pytest.mark.parametrize("count", [0, 1, 127, 128, 1000, 65536, 65537, 200_000])
def test_formula(count: int) -> None:
    words = torch.randint(-32768, 32768, (count,), generator=torch.Generator().manual_seed(count)).to(torch.int16)
    expected = by_hand(words.tolist(), first=77)
    assert digest(words.view(torch.bfloat16), first_word=77) == expected
    if count % 2 == 0:
        assert digest(words.view(torch.float32), first_word=77) == expected


def test_digest_of_a_whole_is_the_sum_of_its_parts() -> None:
    tensor = torch.randn(300, 700)
    parts = [digest(part, first_word=start * 700 * 2) for start, part in ((0, tensor[:111]), (111, tensor[111:]))]
    assert digest(tensor) == sum(parts) & MASK
    assert digest(tensor.T) == digest(tensor.T.contiguous())


def test_changes_are_seen() -> None:
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    seen = {digest(tensor), digest(torch.zeros(999, dtype=torch.bfloat16)), digest(torch.zeros(1001).bfloat16())}
    for position in (0, 1, 500, 999):
        changed = tensor.clone()
        changed[position] = 1
        seen.add(digest(changed))
    assert len(seen) == 7
    swapped = torch.arange(1000.0)
    swapped[[3, 900]] = swapped[[900, 3]]
    assert digest(swapped) != digest(torch.arange(1000.0))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_hex() -> None:
    assert as_hex(255) == "00000000000000ff" and as_hex(-1) == "f" * 16
