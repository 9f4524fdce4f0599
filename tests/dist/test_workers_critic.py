"""The critic against plain transformers: values, gradients and weights after three steps,
under every layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_critic_jobs import CriticResult, score, train_critic
from workers_jobs import OVERLAPPED, SHARDED, summed, whole

from rlhf_megatron.config.schema import FSDPConfig
from rlhf_megatron.data.batch import (
    TokenBatch,
    ValueMiniBatch,
    append_next_state_positions,
    find_next_state_positions,
)
from rlhf_megatron.data.replica_plan import restore_sample_order

pytestmark = pytest.mark.dist
# times the error that float32 has of its own: transformers against float64, over some
# orders of summation
BAR = 3.0
HEAD = ("output_layer.weight", "output_layer.bias")
LAYOUTS: list[
    tuple[str, dict[str, Any]]
] = [  # axes of dist_pool, and settings of MegatronConfig that are none
    ("llama", {}),
    ("llama", {"tp": 2}),
    ("qwen3_tied", {"pp": 2}),
    ("llama", {"cp": 2, "megatron": SHARDED}),
    ("qwen3_tied", {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000}),
    (
        "qwen3_tied",
        {
            "tp": 2,
            "sequence_parallel": True,
            "megatron": {"transformer_impl": "transformer_engine"},
        },
    ),
    ("llama", {"pp": 2, "vpp": 2, "megatron": {"recompute_granularity": "selective"}}),
    ("qwen3_tied", {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, "megatron": OVERLAPPED}),
    ("equal prompts", {"shares_prompts": True}),
    ("equal prompts", {"tp": 2, "sequence_parallel": True, "shares_prompts": True}),
]


@dataclass(frozen=True)
class Case:
    """A model, a mini-batch, and the same steps in transformers at two precisions."""

    name: str
    state: dict[str, Tensor]
    batch: ValueMiniBatch
    exact: list[reference.Step]  # float64
    draws: list[list[reference.Step]]  # float32


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    made = {name: make_case(name, reference.make_batch()) for name in reference.HF_CONFIGS}
    return made | {
        "equal prompts": make_case(
            "qwen3_tied", reference.with_equal_prompts(reference.make_batch())
        )
    }


def make_case(name: str, tokens: TokenBatch) -> Case:
    model = reference.make_value_model(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        batch = reference.make_value_batch(reference.all_values(model, tokens))
    batch = replace(batch, token_ids=tokens.token_ids)
    exact = reference.run_value_steps(reference.make_value_model(name).double(), batch)
    draws = reference.in_float32(
        lambda: reference.make_value_model(name),
        lambda model: reference.run_value_steps(model, batch),
    )
    return Case(name, state, batch, exact, draws)


def label(value: Any) -> str:
    if isinstance(value, str):
        return value
    axes = [
        f"{axis}{size}" for axis, size in value.items() if axis not in ("megatron", "bucket_size")
    ]
    return " ".join([*axes, *map(str, value.get("megatron", {}))]) or "one rank"


def run(
    dist_pool: DistPool, case: Case, layout: dict[str, Any], **options: Any
) -> list[CriticResult]:
    return dist_pool.run(
        train_critic,
        name=case.name,
        state=case.state,
        batch=case.batch,
        timeout_s=300,
        **layout,
        **options,
    )


def errors(case: Case, results: list[CriticResult], layout: dict[str, Any]) -> dict[str, float]:
    """Quantity -> error against float64, in units of float32's own; the worst tensor of each."""
    tp = layout.get("tp", 1)
    copies = layout.get("dp", 1) * layout.get("cp", 1)
    leaders = [result for result in results if result.values is not None]
    values = restore_sample_order(
        [leader.values for leader in leaders],
        [leader.plan for leader in leaders],
        case.batch.offsets,
    ).values
    off = float((values - case.exact[0].predicted).abs().max())
    grads, weights = (
        whole(results, case.name, tp, copies, kind, "value") for kind in ("grads", "weights")
    )
    in_units = reference.in_units(grads, weights, case.state, case.exact[-1], case.draws)
    return {"values": off / reference.unit_of_tokens(case.exact[0], case.draws), **in_units}


@pytest.mark.parametrize("name, layout", LAYOUTS, ids=label)
def test_three_steps_equal_transformers(
    dist_pool: DistPool, cases: dict[str, Case], name: str, layout: dict[str, Any]
) -> None:
    case = cases[name]
    results = run(dist_pool, case, layout)
    found = errors(case, results, layout)
    print(found)
    assert max(found.values()) <= BAR, found
    for step in range(reference.STEPS):
        result = summed(results, step)
        assert result.grad_norm == pytest.approx(case.exact[step].grad_norm, rel=1e-4)
        assert result.sums["critic/vf_loss"] == pytest.approx(case.exact[step].loss, rel=1e-5)
        assert (result.lr, result.is_skipped) == (reference.LR, False)
    holders = [result for result in results if HEAD[0] in result.weights]
    assert len(holders) == len(results) // layout.get("pp", 1), (
        "the head is on all ranks of the last stage, only"
    )
    for holder in holders:
        assert all(torch.equal(holder.weights[part], holders[0].weights[part]) for part in HEAD)
        assert not holder.weights[HEAD[0]].equal(case.state["score.weight"])


def test_fsdp2_equals_transformers_and_goes_on_bit_for_bit(
    dist_pool: DistPool, cases: dict[str, Case], tmp_path: Path
) -> None:
    """Three steps at dp2 against transformers, and against two steps, a checkpoint and
    one step more.
    """
    case = cases["qwen3_tied"]
    job: dict[str, Any] = {
        "name": case.name,
        "state": case.state,
        "batch": case.batch,
        "fsdp": FSDPConfig(),
        "dp": 2,
    }
    results = dist_pool.run(train_critic, **job)
    values = restore_sample_order(
        [r.values for r in results], [r.plan for r in results], case.batch.offsets
    ).values
    off = float((values - case.exact[0].predicted).abs().max()) / reference.unit_of_tokens(
        case.exact[0], case.draws
    )
    grads, weights = (
        joined([getattr(result, kind) for result in results]) for kind in ("grads", "weights")
    )
    found = {
        "values": off,
        **reference.in_units(grads, weights, case.state, case.exact[-1], case.draws),
    }
    assert max(found.values()) <= BAR, found
    assert not weights["score.weight"].equal(case.state["score.weight"])
    dist_pool.run(train_critic, **job, num_steps=2, directory=tmp_path / "critic")
    resumed = dist_pool.run(
        train_critic, **job, num_steps=1, directory=tmp_path / "critic", is_loading=True
    )
    again = joined([result.weights for result in resumed])
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def joined(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


@pytest.mark.parametrize(
    ("layout", "fsdp"),
    [({"tp": 2, "pp": 2}, None), ({"dp": 2}, None), ({"dp": 2}, FSDPConfig())],
    ids=["tp2 pp2", "dp2", "fsdp dp2"],
)
def test_a_frozen_model_scores_as_transformers_does(
    dist_pool: DistPool, cases: dict[str, Case], layout: dict[str, Any], fsdp: FSDPConfig | None
) -> None:
    """The state behind the last token, and behind every token of the responses, in one
    pass: [12] + [T].
    """
    case = cases["qwen3_tied"]
    is_wanted_T = case.batch.response_mask.clone()
    is_wanted_T[case.batch.offsets[1:] - 1] = True
    batch = append_next_state_positions(case.batch, is_wanted_T)

    def predicted(model: torch.nn.Module) -> list[reference.Step]:
        with torch.no_grad():
            return [
                reference.Step(
                    0.0, reference.all_values(model, batch) * batch.response_mask, {}, 0.0, {}
                )
            ]

    [exact] = predicted(reference.make_value_model(case.name).double())
    draws = reference.in_float32(lambda: reference.make_value_model(case.name), predicted)
    results = dist_pool.run(
        score, name=case.name, state=case.state, batch=batch, fsdp=fsdp, **layout
    )
    leaders = [result for result in results if result[0] is not None]
    found = restore_sample_order(
        [values for values, _ in leaders], [plan for _, plan in leaders], batch.offsets
    ).values
    behind_N = find_next_state_positions(case.batch.offsets, is_wanted_T)
    assert float((found - exact.predicted).abs().max()) <= BAR * reference.unit_of_tokens(
        exact, draws
    )
    assert float(exact.predicted[behind_N].std()) > 0.1, "the model tells states apart"
    assert found.count_nonzero() == len(behind_N), "nothing else is computed"


def test_metrics_of_an_update_are_averages_over_all_response_tokens(
    dist_pool: DistPool, cases: dict[str, Case]
) -> None:
    """Summed over replicas, context-parallel ranks and micro-batches, against the same averages
    taken in one piece.
    """
    case = cases["llama"]
    results = run(dist_pool, case, {"dp": 2, "cp": 2}, num_steps=1)
    mask = case.batch.response_mask
    batch = case.batch
    values = case.exact[0].predicted[mask]
    old = batch.old_values[mask]
    returns = batch.returns[mask]
    clipped = old + (values - old).clamp(-reference.VALUE_CLIP, reference.VALUE_CLIP)
    is_clipped = (clipped - returns).abs() > (values - returns).abs()
    assert 0.1 < float(is_clipped.double().mean()) < 0.9, (
        "the case must clip some tokens and spare some"
    )
    assert summed(results, 0).sums == pytest.approx(
        {
            "critic/vf_loss": case.exact[0].loss,
            "critic/vf_clipfrac": float(is_clipped.double().mean()),
            "critic/vpred_mean": float(values.mean()),
        },
        abs=2e-6,
    )


SEQUENCE_SPLIT = {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    "mistake, layout, quantity",
    [
        ("head_summed_over_tp", SEQUENCE_SPLIT, "grads"),
        ("body_summed_over_tp", SEQUENCE_SPLIT, "grads"),
        ("head_not_summed_over_cp", {"cp": 2}, "grads"),
        ("value_after_the_token", {}, "grads"),
    ],
    ids=label,
)
def test_a_planted_mistake_is_over_the_bar(
    dist_pool: DistPool, cases: dict[str, Case], mistake: str, layout: dict[str, Any], quantity: str
) -> None:
    case = cases["llama"]
    found = errors(case, run(dist_pool, case, layout, mistake=mistake), layout)
    assert found[quantity] > 100 * BAR, found
