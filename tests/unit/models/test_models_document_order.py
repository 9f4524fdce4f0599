"""Tokens by length and by context-parallel rank: tables by hand; attention over shares against
it written out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from models_build_jobs import share_of_document
from test_models_build_attention import documents, written_out
from torch import Tensor

from rlhf_megatron.ranks.models.document_token_order import (
    DocumentRun,
    compute_chunk_positions,
    group_documents_by_length,
    locate_prefix_keys,
    order_gathered_tokens,
)
from rlhf_megatron.ranks.models.flash_attention import choose_flash_kernel
from rlhf_megatron.ranks.models.packed_attention import (
    PackedDocuments,
    _attend_by_length,
    _attend_with_flash,
)

HEADS = 4
GROUPS = 2
DIM = 6


def test_tables_by_hand() -> None:
    borders = torch.tensor([0, 8, 12], dtype=torch.int32)
    # documents 0..7 and 8..11 in four chunks each: 01 23 45 67 | 8 9 10 11
    assert order_gathered_tokens(borders, 12, cp=2).tolist() == [
        0,
        1,
        6,
        7,
        8,
        11,
        2,
        3,
        4,
        5,
        9,
        10,
    ]
    assert compute_chunk_positions(8, cp=2, cp_rank=0).tolist() == [0, 1, 6, 7]
    assert compute_chunk_positions(8, cp=2, cp_rank=1).tolist() == [2, 3, 4, 5]
    queries, keys, places = locate_prefix_keys(borders, 12, cp=2, cp_rank=1)
    assert queries.tolist() == [0, 2, 4, 5, 6] and queries.dtype == torch.int32
    # 0..3, 0..5, 8..9, 8..10
    assert keys.tolist() == [0, 4, 10, 12, 15] and keys.dtype == torch.int32
    gathered = [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert [gathered[place] for place in places] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 8, 9, 8, 9, 10]


def test_groups_of_one_length_by_hand() -> None:
    # lengths 4 8 4: the 4s come together, queries by this rank's halves, keys whole and out of the
    # gathered order
    grouped = group_documents_by_length(torch.tensor([0, 4, 12, 16]), cp=2)
    assert grouped.document_runs == (DocumentRun(0, 4, 2), DocumentRun(4, 8, 4))
    assert grouped.query_order is not None and grouped.key_order is not None
    assert grouped.query_order.tokens.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    # gathered: rank 0 has 0 3 | 4 5 10 11 | 12 15, rank 1 has 1 2 | 6 7 8 9 | 13 14
    gathered = [0, 3, 4, 5, 10, 11, 12, 15, 1, 2, 6, 7, 8, 9, 13, 14]
    got = [gathered[place] for place in grouped.key_order.tokens]
    assert got == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
    assert grouped.key_order.tokens[grouped.key_order.inverse].tolist() == list(range(16))


def test_documents_that_do_not_fit_the_chunks_are_caught() -> None:
    with pytest.raises(AssertionError, match="document lengths"):
        group_documents_by_length(torch.tensor([0, 4, 10]), cp=2)


def share(lengths: list[int], cp: int, rank: int) -> list[int]:
    """Tokens of a rank, written out."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        s + at
        for s, n in zip(starts, lengths, strict=True)
        for at in share_of_document(n, cp, rank)
    ]


def documents_of(lengths: list[int], cp: int, rank: int, device: str = "cpu") -> PackedDocuments:
    whole = documents(lengths)
    positions = whole.positions[share(lengths, cp, rank)].to(device)
    return replace(
        whole, cu_seqlens_q=whole.cu_seqlens_q.to(device), positions=positions, cp=cp, cp_rank=rank
    )


def inputs(
    total: int, dtype: torch.dtype = torch.float64, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(total, HEADS, dim, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(total, GROUPS, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("chunks", [[1, 1, 2, 2, 2], [2, 1, 2, 0, 1], [4], [1, 3, 2]])
def test_the_shares_make_up_attention_written_out(cp: int, chunks: list[int]) -> None:
    lengths = [size * 2 * cp for size in chunks]
    q, k, v = inputs(sum(lengths))
    scale = 1 / math.sqrt(DIM)
    want = written_out(q, k, v, lengths, scale)
    gathered = [token for rank in range(cp) for token in share(lengths, cp, rank)]
    got = torch.cat(
        [
            _attend_by_length(
                q[share(lengths, cp, rank)],
                k[gathered],
                v[gathered],
                documents_of(lengths, cp, rank),
                scale,
            )
            for rank in range(cp)
        ]
    )
    torch.testing.assert_close(got, want[gathered], atol=1e-12, rtol=0)
    weight = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad((got * weight[gathered]).sum(), (q, k, v)),
        torch.autograd.grad((want * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cp", [2, 3])
def test_pairs_of_sequences_make_up_attention_written_out(cp: int) -> None:
    """The tables for the flash kernel, with the kernel written out:
    causal, last query at last key.
    """
    lengths = [size * 2 * cp for size in (2, 1, 0, 3)]
    q, k, v = (tensor.detach() for tensor in inputs(sum(lengths)))
    want = written_out(q, k, v, lengths, scale=0.3)
    gathered = [token for rank in range(cp) for token in share(lengths, cp, rank)]
    for rank in range(cp):
        here = share(lengths, cp, rank)
        query_borders, key_borders, places = documents_of(lengths, cp, rank).prefix_key_layout
        keys = k[gathered][places]
        values = v[gathered][places]
        for i in range(len(query_borders) - 1):
            queries = here[query_borders[i] : query_borders[i + 1]]
            low = int(key_borders[i])
            high = int(key_borders[i + 1])
            for n, token in enumerate(queries):
                last = high - (len(queries) - 1 - n)  # after the last key that this query sees
                for head in range(HEADS):
                    scores = keys[low:last, head * GROUPS // HEADS] @ q[token, head] * 0.3
                    out = scores.softmax(0) @ values[low:last, head * GROUPS // HEADS]
                    torch.testing.assert_close(out, want[token, head], atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("cp", [2, 4])
def test_varlen_kernel_over_a_share_equals_the_float32_path(cp: int) -> None:
    lengths = [size * 2 * cp for size in (3, 17, 1, 0, 32)]
    tensors = [
        tensor.detach().cuda().requires_grad_()
        for tensor in inputs(sum(lengths), torch.bfloat16, dim=64)
    ]
    gathered = [token for rank in range(cp) for token in share(lengths, cp, rank)]
    for rank in range(cp):
        here = share(lengths, cp, rank)
        docs = documents_of(lengths, cp, rank, "cuda")
        q = tensors[0][here]
        k = tensors[1][gathered]
        v = tensors[2][gathered]
        want = _attend_by_length(q.float(), k.float(), v.float(), docs, 0.125)
        flash = choose_flash_kernel(q.device, q.dtype, q.shape[-1]).attention_call
        assert flash is not None
        got = _attend_with_flash(q, k, v, docs, 0.125, flash)
        torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
        weight = torch.randn_like(want)
        for a, b in zip(
            torch.autograd.grad(
                (got.float() * weight).sum(), tensors, retain_graph=True
            ),  # both begin at q, k, v
            torch.autograd.grad((want * weight).sum(), tensors),
            strict=True,
        ):
            torch.testing.assert_close(a.float(), b.float(), atol=5e-2, rtol=5e-2)
