"""The actor against plain transformers: log-probs, gradients and weights after three steps,
under every layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import OVERLAPPED, SHARDED, RankResult, summed, train, whole

from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.data.replica_plan import restore_sample_order

pytestmark = pytest.mark.dist
# times the error that float32 has of its own: transformers against float64, over some
# orders of summation
BAR = 3.0
LAYOUTS: list[dict[str, Any]] = [  # axes of dist_pool, and settings of MegatronConfig that are none
    {},
    {"tp": 2},
    {"pp": 2},
    {"dp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "sequence_parallel": True, "megatron": {"recompute_granularity": "selective"}},
    {"pp": 2, "vpp": 2, "megatron": SHARDED},
    {"cp": 2, "megatron": {"transformer_impl": "transformer_engine"}},
    {"cp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
    {"dp": 2, "megatron": {"overlap_grad_reduce": True}, "bucket_size": 20_000},
    {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, "megatron": OVERLAPPED},
    {
        "pp": 2,
        "cp": 2,
        "megatron": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    },
]
SHARING: list[dict[str, Any]] = [
    {},
    {"dp": 2},
    {"tp": 2, "sequence_parallel": True, "megatron": {"recompute_granularity": "selective"}},
    {"tp": 2, "pp": 2, "vpp": 2},
]
"""Layouts in which samples of one prompt share it."""


@dataclass(frozen=True)
class Case:
    """A model, a mini-batch, and the same steps in transformers at two precisions."""

    name: str
    loss: str
    state: dict[str, Tensor]
    batch: MiniBatch
    entropies: Tensor
    sum_squares: Tensor
    exact: list[reference.Step]  # float64
    draws: list[list[reference.Step]]  # float32


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(*request.param)


@functools.cache
def case_of(name: str, loss: str, has_equal_prompts: bool = False) -> Case:
    model = reference.make_model(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    batch = reference.make_batch()
    if has_equal_prompts:
        batch = reference.with_equal_prompts(batch)
    with torch.no_grad():
        log_probs, _ = reference.token_log_probs(model, batch)
    batch = reference.with_past(batch, log_probs)
    draws = reference.in_float32(
        lambda: reference.make_model(name), lambda model: reference.run_steps(model, batch, loss)
    )
    exact_model = reference.make_model(name).double()
    with torch.no_grad():
        _, entropies = reference.token_log_probs(exact_model, batch)
        squares = reference.token_sum_squares(exact_model, batch)
    return Case(
        name,
        loss,
        state,
        batch,
        entropies,
        squares,
        reference.run_steps(exact_model, batch, loss),
        draws,
    )


def label(layout: dict[str, Any]) -> str:
    axes = [
        f"{axis}{size}" for axis, size in layout.items() if axis not in ("megatron", "bucket_size")
    ]
    return " ".join([*axes, *map(str, layout.get("megatron", {}))]) or "one rank"


POLICIES = [("qwen3_tied", "policy"), ("llama", "policy")]
QUICK = {("llama", "policy"): (0, 3, 6, 7, 10, 11), ("llama", "sft"): (0, 4, 8)}
"""Layouts of the cases behind the first: what depends on a layout is its reductions, which
all cases have.
"""


def cells() -> Iterator[Any]:
    for case in (*POLICIES, ("llama", "sft")):
        for number, layout in enumerate(LAYOUTS):
            marks = [pytest.mark.long] * (number not in QUICK.get(case, range(len(LAYOUTS))))
            yield pytest.param(case, layout, marks=marks, id=f"{'-'.join(case)}-{label(layout)}")
    for layout in SHARING:
        yield pytest.param(
            ("qwen3_tied", "policy", True),
            {**layout, "shares_prompts": True},
            id=f"shared-{label(layout)}",
        )


def gathered_log_probs(results: list[RankResult], offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaders = [r for r in results if r.log_probs is not None]
    merged = restore_sample_order(
        [r.log_probs for r in leaders], [r.plan for r in leaders], offsets
    )
    return merged.log_probs, merged.entropies, merged.sum_squares


@pytest.mark.parametrize(("case", "layout"), list(cells()), indirect=["case"])
def test_three_steps_equal_transformers(
    dist_pool: DistPool, case: Case, layout: dict[str, Any]
) -> None:
    results = dist_pool.run(
        train,
        name=case.name,
        state=case.state,
        batch=case.batch,
        loss=case.loss,
        timeout_s=300,
        **layout,
    )
    tp = layout.get("tp", 1)
    copies = layout.get("dp", 1) * layout.get("cp", 1)
    log_probs, entropies, sum_squares = gathered_log_probs(results, case.batch.offsets)
    bound = BAR * reference.unit_of_tokens(case.exact[0], case.draws)
    assert (log_probs - case.exact[0].predicted).abs().max().item() <= bound
    assert (entropies - case.entropies).abs().max().item() <= bound
    assert (sum_squares - case.sum_squares).abs().max().item() <= bound

    grads, weights = (whole(results, case.name, tp, copies, kind) for kind in ("grads", "weights"))
    found = reference.in_units(grads, weights, case.state, case.exact[-1], case.draws)
    print(found)
    assert max(found.values()) <= BAR, found

    for step in range(reference.STEPS):
        result = summed(results, step)
        assert result.grad_norm == pytest.approx(case.exact[step].grad_norm, rel=1e-4)
        assert result.sums["actor/loss"] == pytest.approx(case.exact[step].loss, abs=1e-5, rel=1e-5)
        assert (result.lr, result.is_skipped) == (reference.LR, False)


@pytest.mark.parametrize("case", POLICIES, ids="-".join, indirect=True)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"cp": 2}], ids=label)
def test_metrics_of_an_update_are_averages_over_all_response_tokens(
    dist_pool: DistPool, case: Case, layout: dict[str, Any]
) -> None:
    """Summed over replicas, context-parallel ranks and micro-batches, against the same averages
    taken in one piece.
    """
    results = dist_pool.run(
        train,
        **layout,
        name=case.name,
        state=case.state,
        batch=case.batch,
        loss="policy",
        num_steps=1,
    )
    sums = summed(results, 0).sums
    mask = case.batch.response_mask
    batch = case.batch
    log_probs = case.exact[0].predicted[mask]
    log_ratio = log_probs - batch.old_log_probs[mask]
    k3 = (batch.ref_log_probs[mask] - log_probs).exp() - (batch.ref_log_probs[mask] - log_probs) - 1
    ratio = log_ratio.exp()
    advantages = batch.advantages[mask]
    is_clipped = ((ratio > 1 + reference.CLIP_HIGH) & (advantages > 0)) | (
        (ratio < 1 - reference.CLIP_LOW) & (advantages < 0)
    )
    assert sums["actor/ppo_kl"] == pytest.approx(float(-log_ratio.mean()), abs=2e-6)
    assert sums["actor/kl_loss"] == pytest.approx(float(k3.mean()), abs=2e-6)
    assert sums["actor/entropy_loss"] == pytest.approx(float(case.entropies[mask].mean()), abs=2e-6)
    assert sums["actor/pg_clipfrac"] == pytest.approx(float(is_clipped.double().mean()), abs=1e-6)
    assert 0.1 < sums["actor/pg_clipfrac"] < 0.9, "the case must clip some tokens and spare some"


@pytest.mark.parametrize("case", POLICIES[:1], ids="-".join, indirect=True)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}], ids=label)
def test_an_update_whose_old_log_probs_are_its_own_tells_them(
    dist_pool: DistPool, case: Case, layout: dict[str, Any]
) -> None:
    """It tells what a pass of their own tells, and learns what it learns when they are
    given: bit for bit.
    """

    def trained(batch: MiniBatch) -> list[RankResult]:
        return dist_pool.run(
            train,
            **layout,
            name=case.name,
            state=case.state,
            batch=batch,
            loss="policy",
            num_steps=1,
        )

    results = trained(replace(case.batch, old_log_probs=None))
    leaders = [r for r in results if r.updates[0] is not None]
    told = restore_sample_order(
        [r.updates[0].old_log_probs for r in leaders], [r.plan for r in leaders], case.batch.offsets
    )
    log_probs, entropies, _ = gathered_log_probs(results, case.batch.offsets)
    assert torch.allclose(told.log_probs, log_probs, rtol=0, atol=2e-6)
    assert torch.allclose(told.entropies, entropies, rtol=0, atol=2e-6)
    given = trained(replace(case.batch, old_log_probs=told.log_probs))
    assert all(r.updates[0] is None or r.updates[0].old_log_probs is None for r in given)
    assert summed(given, 0) == replace(summed(results, 0), old_log_probs=None)
    for one, other in zip(results, given, strict=True):
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
