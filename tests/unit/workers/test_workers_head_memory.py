"""The memory that `rlhf-megatron check` plans for the head is what it takes, and a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dist_pool import DistPool
from workers_head_jobs import head_peak

from rlhf_megatron.ranks.kernels.head_memory import HeadCallShape, compute_head_memory_bound

SLACK = 0.08  # of the plan: rounding to blocks, and what is not held at the same time
SHAPE = HeadCallShape(
    num_tokens=1500,
    num_rows=1500,
    hidden_size=64,
    num_columns=9000,
    chunk_size=8192,
    dtype=torch.float32,
    device_type="cpu",
    num_sequence_parts=1,
    stash_bytes=0,
    backend="chunked",
)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, num_rows=700),
        replace(SHAPE, hidden_size=512, num_columns=2000),
        replace(SHAPE, dtype=torch.bfloat16),
        replace(SHAPE, stash_bytes=1 << 30),
        replace(SHAPE, dtype=torch.bfloat16, stash_bytes=20 << 20),
        pytest.param(replace(SHAPE, dtype=torch.float64, chunk_size=1000), marks=pytest.mark.long),
    ],
    ids=["float32", "700 rows", "wide", "bfloat16", "stash", "bfloat16 and some stash", "float64"],
)
def test_the_plan_is_what_the_head_takes(shape: HeadCallShape) -> None:
    planned = compute_head_memory_bound(shape).peak_bytes
    found = head_peak(None, shape, 1)
    assert (1 - SLACK) * planned <= found <= planned


@pytest.mark.dist
def test_a_split_sequence_is_gathered(dist_pool: DistPool) -> None:
    shape = replace(SHAPE, hidden_size=512, num_columns=3000, num_sequence_parts=2, chunk_size=1024)
    # that gloo makes of what it sums: temporary tensors of collectives
    copy = 4 * shape.num_tokens * shape.hidden_size
    for found in dist_pool.run(
        head_peak, tp=2, sequence_parallel=True, shape=shape, num_parts=2, timeout_s=300
    ):
        assert (
            (1 - SLACK) * compute_head_memory_bound(shape).peak_bytes
            <= found
            <= compute_head_memory_bound(shape).peak_bytes + copy
        )


def test_parts_counted_by_hand() -> None:
    """On a GPU: 8192 rows x 8192 columns of 4 bytes, their gradient in 2 bytes where logits are
    computed again; a stash of whole chunks, each column 2 bytes and each chunk one float32 more.
    """
    shape = HeadCallShape(16384, 16384, 4096, 37984, 8192, torch.bfloat16, "cuda", 1, 0, "triton")
    plan = compute_head_memory_bound(shape)
    assert plan.tile_bytes == 8192 * 8192 * (4 + 2)
    assert plan.hidden_gradient_bytes == 16384 * 4096 * (4 + 2)
    assert (
        compute_head_memory_bound(replace(shape, num_sequence_parts=4)).hidden_gradient_bytes
        == 16384 * 4096 * 4 + 16384 * 4096 * 2 // 4
    )
    a_chunk = 16384 * (2 * 8192 + 4)
    assert (
        plan.stash_bytes
        == compute_head_memory_bound(replace(shape, stash_bytes=a_chunk - 1)).stash_bytes
        == 0
    )
    assert (
        compute_head_memory_bound(replace(shape, stash_bytes=3 * a_chunk)).stash_bytes
        == 3 * a_chunk
    )
    rest = 16384 * (2 * (37984 - 4 * 8192) + 4)
    assert (
        compute_head_memory_bound(replace(shape, stash_bytes=1 << 40)).stash_bytes
        == 4 * a_chunk + rest
    )
