"""Samples behind a shared prompt against the same samples apart: what attends differently from
family to family.

Apart all families are compared with transformers (tests/dist/test_parity_*.py, `make parity`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from test_workers_actor import gathered_log_probs
from torch import Tensor
from workers_jobs import RankResult, train_family

from benchmarks.parity.cases import FAMILIES, make_state
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.data.replica_plan import take_replica_shard
from rlhf_megatron.ranks.workers.sequence_packing import pack_batch
from rlhf_megatron.weights.parallel_layout import ParallelLayout

pytestmark = pytest.mark.dist
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
CELLS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {**SP, "ep": 2, "etp": 1}),  # latent attention
    ("gpt_oss", {}),  # windows and sinks
    ("qwen3_moe", {"dp": 2, "ep": 2}),
    ("glm4_moe", {"pp": 2}),  # a part of each head is turned
]


def num_forwarded(batch: MiniBatch, rank: RankResult, shares_prompts: bool) -> int:
    """Count the tokens of a rank's micro-batches."""
    packed = pack_batch(
        take_replica_shard(batch, rank.plan),
        rank.plan,
        ParallelLayout(1, shares_prompts=shares_prompts),
    )
    return sum(micro.token_ids.numel() for micro in packed.micro_batches)


@pytest.mark.parametrize("family, layout", CELLS, ids=[family for family, _ in CELLS])
def test_log_probs_and_gradients_are_those_of_samples_apart(
    dist_pool: DistPool, family: str, layout: dict[str, Any]
) -> None:
    batch = reference.with_equal_prompts(reference.make_batch(24))
    past = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(5)) - 3.0
    batch = reference.with_past(batch, past)

    def trained(shares_prompts: bool) -> tuple[Tensor, list[RankResult]]:
        results = dist_pool.run(
            train_family, hf_config=FAMILIES[family], state=make_state(family), batch=batch,
            loss="policy",
            num_steps=1, token_budget=60, shares_prompts=shares_prompts, timeout_s=300, **layout,
        )  # fmt: skip
        return torch.stack(gathered_log_probs(results, batch.offsets)), results

    apart, apart_ranks = trained(False)
    shared, shared_ranks = trained(True)
    torch.testing.assert_close(shared, apart, atol=2e-5, rtol=0)
    for one, other in zip(shared_ranks, apart_ranks, strict=True):
        assert num_forwarded(batch, one, shares_prompts=True) < num_forwarded(
            batch, other, shares_prompts=False
        )
        for name, grad in one.grads.items():
            assert (grad - other.grads[name]).norm() <= 2e-5 * other.grads[name].norm() + 1e-9, name
