"""Core attention over packed documents, rotary positions and the norm, against
arithmetic written out.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhf_megatron.ranks.models.document_token_order import DocumentRun
from rlhf_megatron.ranks.models.packed_attention import _attend_by_length, make_packed_documents
from rlhf_megatron.ranks.models.rms_norm_layer import RMSNorm, _RMSNormFunction
from rlhf_megatron.ranks.models.rotary_embedding import (
    RotaryConfig,
    make_rotary_tables,
    rotate_pairs,
)


def documents(lengths: list[int]):
    borders = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return make_packed_documents(borders, max(lengths), positions[None])


def written_out(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """softmax(q k^T * scale) v per document and head;
    query head n reads key-value head n // group.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            for head in range(q.shape[1]):
                scores = (
                    torch.stack([q[t, head] @ k[s, head // group] for s in range(start, t + 1)])
                    * scale
                )
                out[t, head] = scores.softmax(0) @ v[start : t + 1, head // group]
        start += length
    return out


@pytest.mark.parametrize("lengths", [[3, 3, 5, 5, 5, 1], [4, 2, 4, 1, 2, 4], [7], [2, 0, 3, 0, 2]])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_equals_attention_written_out(lengths: list[int], num_groups: int) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(total, num_groups, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    weight = torch.randn(total, 4, 6, dtype=torch.float64)
    scale = 1 / math.sqrt(6)
    want = written_out(q, k, v, lengths, scale)
    want_grads = torch.autograd.grad((want * weight).sum(), (q, k, v))
    got = _attend_by_length(q, k, v, documents(lengths), scale)
    got_grads = torch.autograd.grad((got * weight).sum(), (q, k, v))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_equal_lengths_that_lie_together_are_not_moved() -> None:
    together = documents([2, 2, 5, 3, 3, 3]).length_groups
    assert together.document_runs == (
        DocumentRun(0, 4, 2),
        DocumentRun(4, 9, 5),
        DocumentRun(9, 18, 3),
    )
    assert together.query_order is None and together.key_order is None
    mixed = documents([2, 3, 2]).length_groups
    assert mixed.document_runs == (DocumentRun(0, 4, 2), DocumentRun(4, 7, 3))
    assert mixed.query_order is not None and mixed.query_order.tokens.tolist() == [
        0,
        1,
        5,
        6,
        2,
        3,
        4,
    ]
    assert mixed.query_order.inverse.tolist() == [0, 1, 4, 5, 6, 2, 3]


def test_rotation_by_hand_and_its_gradient() -> None:
    cos, sin = make_rotary_tables(
        torch.tensor([0, 1]), head_dim=4, rotary=RotaryConfig(100.0), dtype=torch.float64
    )
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    # angle of pairs (x0, x2) and (x1, x3) at position 1: 100^0 and 100^(-1/2)
    fast = 1.0
    slow = 0.1
    turned = [
        math.cos(fast) - 3 * math.sin(fast),
        2 * math.cos(slow) - 4 * math.sin(slow),
        3 * math.cos(fast) + math.sin(fast),
        4 * math.cos(slow) + 2 * math.sin(slow),
    ]
    got = rotate_pairs(x, cos, sin)
    assert got[0].tolist() == x[0].tolist()
    torch.testing.assert_close(
        got[1, 0], torch.tensor(turned, dtype=torch.float64), atol=1e-6, rtol=0
    )
    assert torch.autograd.gradcheck(lambda x: rotate_pairs(x, cos, sin), (x.requires_grad_(),))


def test_norm_by_hand_and_its_gradient() -> None:
    config = SimpleNamespace(params_dtype=torch.float64, sequence_parallel=True)
    norm = RMSNorm(config, 2, eps=0.5)
    assert norm.weight.sequence_parallel and list(norm.state_dict()) == ["weight"]
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 10.0]))
        # mean of squares 12.5, with eps 13; zeros stay zeros
        got = norm(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]], dtype=torch.float64))
    want = torch.tensor(
        [[[3 / math.sqrt(13), 40 / math.sqrt(13)]], [[0.0, 0.0]]], dtype=torch.float64
    )
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight: _RMSNormFunction.apply(x, weight, 0.1), (x, weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 64, eps=1e-6)
    x = torch.randn(7, 1, 64, dtype=dtype)
    want = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), 1e-6)
    torch.testing.assert_close(
        norm(x).double(), want, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("behind", [None, [-1, -1, 0, 1, 1]], ids=["whole", "behind-prompts"])
def test_varlen_kernel_equals_the_float32_path(num_groups: int, behind: list[int] | None) -> None:
    from rlhf_megatron.ranks.models.flash_attention import choose_flash_kernel
    from rlhf_megatron.ranks.models.packed_attention import _attend_with_flash

    torch.manual_seed(0)
    lengths = [3, 17, 1, 64, 5]
    q = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(
            sum(lengths), num_groups, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(2)
    )
    borders = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    prompts = None if behind is None else torch.tensor(behind, device="cuda")
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    docs = make_packed_documents(borders, 81, positions, None, prompts, sum(lengths) + 3 + 17 + 17)
    want = _attend_by_length(q.float(), k.float(), v.float(), docs, 0.125)
    flash = choose_flash_kernel(q.device, q.dtype, q.shape[-1]).attention_call
    assert flash is not None
    got = _attend_with_flash(q, k, v, docs, 0.125, flash)
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
    weight = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad((got.float() * weight).sum(), (q, k, v)),
        torch.autograd.grad((want * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a.float(), b.float(), atol=5e-2, rtol=5e-2)
