"""A number that is not finite on one rank: nothing changes on any, what was found is told, the
weights are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool, JobError
from torch import Tensor
from workers_critic_jobs import make_critic
from workers_jobs import OVERLAPPED, SHARDED, StateSource, make_actor, share

from rlhf_megatron import faults
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.nonfinite import find_bad_tensors
from rlhf_megatron.ranks.workers.rank_reports import BadTensor, NonFiniteReport

NAME = "qwen3_tied"
EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.layers.3.input_layernorm.weight"


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model(NAME).state_dict().items()}


def snapshot(worker: Any) -> dict[str, Tensor]:
    """All that a step changes on this rank: parameters, moments, main parameters, step
    counts, the schedule.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters

    worker.backend.gather_parameters()
    optimizer = worker.backend.optimizer
    found = {
        name: parameter.detach().clone()
        for name, parameter in collect_named_parameters(worker.backend.chunks).items()
    }
    for number, part in enumerate(optimizer.megatron_optimizer.chained_optimizers):
        for index, entry in enumerate(part.optimizer.state.values()):
            found |= {f"{number} {index} {key}": value.clone() for key, value in entry.items()}
    for index, main in enumerate(optimizer.list_main_parameters()):
        found[f"main {index}"] = main.detach().clone()
    found["schedule"] = torch.tensor(
        [optimizer.scheduler.num_steps, optimizer.lr], dtype=torch.float64
    )
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@dataclass(frozen=True)
class Outcome:
    """Of one rank."""

    update: Any
    is_unchanged: bool
    findings: list[NonFiniteReport]
    after: Any  # the update after it


def planted(
    world: World,
    state: dict[str, Tensor],
    rank: int,
    name: str,
    value: float,
    dtype: torch.dtype = torch.float32,
    megatron: dict[str, Any] | None = None,
) -> Outcome:
    """A sound step, one for which `value` stands in the complete gradient of `name` on one rank
    only, a sound one.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters

    actor = make_actor(world, NAME, state, dtype=dtype, megatron=megatron, bucket_size=20_000)
    shard, plan = share(world, reference.make_batch(), 40)
    actor.update(shard, plan, reference.TEMPERATURE, "sft")
    before = snapshot(actor)
    optimizer = actor.backend.optimizer
    step = optimizer.step

    def damaged(losses: Tensor | None) -> Any:
        if world.rank == rank:
            collect_named_parameters(actor.backend.chunks)[name].main_grad.view(-1)[1] = value
        return step(losses)

    optimizer.step = damaged
    update = actor.update(shard, plan, reference.TEMPERATURE, "sft")
    is_unchanged = same(before, snapshot(actor))
    optimizer.step = step
    after = actor.update(shard, plan, reference.TEMPERATURE, "sft")
    assert not same(before, snapshot(actor)), (
        "a sound step must change something, or the test sees nothing"
    )
    return Outcome(update, is_unchanged, actor.take_skip_reports(), after)


# In the first three, the gradient norm does not see it, or not on every rank.
CASES: dict[str, tuple[dict[str, Any], int, str, float]] = {
    "copy of a norm, tp2": ({"tp": 2}, 1, NORM, math.nan),
    "copy of the tied embedding, pp2": ({"pp": 2}, 1, "output_layer.weight", math.inf),
    "one replica, dp2": ({"dp": 2}, 1, EMBEDDING, math.nan),
    "tp2, sequence parallel, sharded": (
        {"tp": 2, "sequence_parallel": True, "megatron": SHARDED},
        1,
        NORM,
        -math.inf,
    ),
    "dp2, overlapped": ({"dp": 2, "megatron": OVERLAPPED}, 0, NORM, math.nan),
    "cp2, overlapped, bf16": (
        {"cp": 2, "megatron": OVERLAPPED, "dtype": torch.bfloat16},
        1,
        EMBEDDING,
        math.nan,
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("layout, rank, name, value", CASES.values(), ids=CASES.keys())
def test_a_gradient_of_one_rank_stops_the_step_on_all(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    layout: dict[str, Any],
    rank: int,
    name: str,
    value: float,
) -> None:
    outcomes = dist_pool.run(
        planted, state=state, rank=rank, name=name, value=value, timeout_s=300, **layout
    )
    assert all(outcome.is_unchanged for outcome in outcomes)
    leaders = [outcome for outcome in outcomes if outcome.update is not None]
    expected = math.nan if math.isnan(value) else math.inf
    for outcome in leaders:
        assert outcome.update.is_skipped and repr(outcome.update.grad_norm) == repr(expected)
        assert not outcome.after.is_skipped and math.isfinite(outcome.after.grad_norm)
    for number, outcome in enumerate(outcomes):
        (findings,) = outcome.findings
        assert [bad.name for bad in findings.gradients] == ([name] if number == rank else [])
        assert findings.parameters == () and findings.num_bad_tokens == 0
    (bad,) = outcomes[rank].findings[0].gradients
    assert (bad.num_nan, bad.num_inf) == ((1, 0) if math.isnan(value) else (0, 1))


def with_bad_column(
    world: World, state: dict[str, Tensor], column: str, value: float, directory: Path
) -> Any:
    """Policy updates; one token of the second sample has `value` in `column`. Two of them, then
    what was found.
    """
    torch.manual_seed(3)
    actor = make_actor(world, NAME, state)
    batch = reference.with_past(
        reference.make_batch(), torch.zeros(reference.make_batch().num_tokens)
    )
    changed = getattr(batch, column).clone()
    token = int(batch.offsets[2]) - 1  # the last token of sample 1 is a response token
    changed[token] = value
    shard, plan = share(world, replace(batch, **{column: changed}), 40)
    before = snapshot(actor)
    updates = [
        actor.update(shard, plan, reference.TEMPERATURE, "policy", directory) for _ in range(2)
    ]
    assert same(before, snapshot(actor))
    in_micro_batch = [1 in [plan.samples[i] for i in group] for group in plan.micro_batches]
    return updates, actor.take_skip_reports(), in_micro_batch


@pytest.mark.dist
@pytest.mark.parametrize("column, value", [("old_log_probs", math.nan), ("advantages", math.inf)])
def test_a_loss_of_one_replica_stops_the_step_and_keeps_the_weights_once(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path, column: str, value: float
) -> None:
    directory = tmp_path / "capsule"
    results = dist_pool.run(
        with_bad_column,
        dp=2,
        state=state,
        column=column,
        value=value,
        directory=directory,
        timeout_s=300,
    )
    for updates, findings, in_micro_batch in results:
        assert [update.is_skipped for update in updates] == [True, True]
        assert [(found.has_weights, found.error) for found in findings] == [(True, ""), (False, "")]
        for found in findings:  # the micro-batch of the sample, on the replica that has it
            assert [not math.isfinite(loss) for loss in found.losses] == in_micro_batch
            assert found.num_bad_tokens == 0  # the current log-probs are finite
    assert sum(any(in_micro_batch) for _, _, in_micro_batch in results) == 1
    assert sorted(path.name for path in (directory / "rng").iterdir()) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    (again,) = dist_pool.run(
        look_again, state=state, column=column, value=value, directory=directory
    )
    result, findings, is_equal = again
    assert is_equal and result.is_skipped
    assert findings.first_bad_tensor == "loss"


def look_again(
    world: World, state: dict[str, Tensor], column: str, value: float, directory: Path
) -> Any:
    """The capsule's weights in a model that had others, in another layout, and the same
    pass, watched.
    """
    other = make_actor(world, NAME, {key: 1.5 * tensor for key, tensor in state.items()})
    before = snapshot(make_actor(world, NAME, state))
    other.load_weights(directory)
    loaded = snapshot(other)
    batch = reference.with_past(
        reference.make_batch(), torch.zeros(reference.make_batch().num_tokens)
    )
    changed = getattr(batch, column).clone()
    changed[int(batch.offsets[2]) - 1] = value
    shard, plan = share(world, replace(batch, **{column: changed}), 40)
    result = other.rerun_forward_backward(shard, plan, reference.TEMPERATURE, "policy")
    assert same(loaded, snapshot(other)), "looking again makes no step"
    (findings,) = other.take_skip_reports()
    return (
        result,
        findings,
        all(torch.equal(before[key], loaded[key]) for key in before if "." in key),
    )


def overflowing(world: World, state: dict[str, Tensor], directory: Path) -> Any:
    """A layer whose weights overflow the activations: what comes first, which tokens, and that
    nothing is exported.
    """
    bad = dict(state)
    key = "model.layers.2.mlp.down_proj.weight"
    bad[key] = torch.full_like(state[key], 1e38)
    actor = make_actor(world, NAME, bad)
    shard, plan = share(world, reference.make_batch(), 40)
    result = actor.rerun_forward_backward(shard, plan, reference.TEMPERATURE, "sft")
    (findings,) = actor.take_skip_reports()
    tokens = {int(token) for token in shard.response_mask.nonzero()}
    assert result is None or result.is_skipped
    return findings, tokens


@pytest.mark.dist
def test_what_is_not_finite_first_is_named(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    first, last = dist_pool.run(overflowing, pp=2, state=state, directory=tmp_path, timeout_s=300)
    assert last[0].first_bad_tensor == "output of decoder.layers.2.mlp.linear_fc2"
    assert set(last[0].bad_tokens) <= last[1] and last[0].num_bad_tokens > 0
    assert first[0].bad_tokens == () and first[0].losses == ()


def export_of(world: World, state: dict[str, Tensor], rank: int) -> None:
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters

    actor = make_actor(world, NAME, state)
    list(actor.export_shards())
    if world.rank == rank:
        collect_named_parameters(actor.backend.chunks)[NORM].data[3] = math.inf
    list(actor.export_shards())


@pytest.mark.dist
def test_parameters_that_are_not_finite_are_not_exported(
    dist_pool: DistPool, state: dict[str, Tensor]
) -> None:
    with pytest.raises(
        JobError, match=rf"(?s)parameters are not finite: {NORM} \(1 Inf of 64\).*the engines keep"
    ):
        dist_pool.run(export_of, state=state, rank=1, pp=2, timeout_s=300)
    with pytest.raises(JobError, match="parameters are not finite: those of another rank"):
        dist_pool.run(export_of, state=state, rank=1, pp=2, timeout_s=300)


def critic_with_a_bad_return(world: World, directory: Path) -> Any:
    model = reference.make_value_model(NAME)
    source = StateSource({key: value.clone() for key, value in model.state_dict().items()})
    critic = make_critic(world, NAME, source)
    batch = reference.make_value_batch(torch.zeros(reference.make_batch().num_tokens))
    returns = batch.returns.clone()
    returns[int(batch.offsets[1]) - 1] = math.nan
    shard, plan = share(world, batch, 40)
    sound = critic.update(shard, plan, capsule=directory)
    bad, plan = share(world, replace(batch, returns=returns), 40)
    before = snapshot(critic)
    skipped = critic.update(bad, plan, capsule=directory / "a")
    return (
        sound.is_skipped,
        skipped.is_skipped,
        same(before, snapshot(critic)),
        critic.take_skip_reports(),
    )


@pytest.mark.dist
def test_a_critic_skips_too(dist_pool: DistPool, tmp_path: Path) -> None:
    (result,) = dist_pool.run(critic_with_a_bad_return, directory=tmp_path)
    sound, skipped, is_unchanged, findings = result
    assert (sound, skipped, is_unchanged) == (False, True, True)
    assert len(findings) == 1 and findings[0].has_weights
    assert (tmp_path / "a" / "weights").is_dir()


def marked(world: World, state: dict[str, Tensor], directory: Path) -> list[bool]:
    """The marks of a fault plan: NaN before the second step of rank 1."""
    faults.install_fault_plan(
        "mark@actor.before_optimizer_step:who=rank1,nth=2", f"rank{world.rank}", directory
    )
    try:
        actor = make_actor(world, NAME, state)
        shard, plan = share(world, reference.make_batch(), 40)
        updates = [actor.update(shard, plan, reference.TEMPERATURE, "sft") for _ in range(3)]
        return [update.is_skipped for update in updates]
    finally:
        faults.install_fault_plan("", "", directory)


@pytest.mark.dist
def test_a_fault_plan_plants_a_nan(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    assert (
        dist_pool.run(marked, dp=2, state=state, directory=tmp_path, timeout_s=300)
        == [[False, True, False]] * 2
    )


def weights_on_a_full_disk(world: World, state: dict[str, Tensor], directory: Path) -> Any:
    actor = make_actor(world, NAME, state)
    batch = reference.make_batch()
    bad = replace(batch, loss_weights=batch.loss_weights * math.nan)
    shard, plan = share(world, bad, 40)
    actor.update(shard, plan, reference.TEMPERATURE, "sft", directory / "file" / "capsule")
    sound, plan = share(world, batch, 40)
    return actor.take_skip_reports(), actor.update(
        sound, plan, reference.TEMPERATURE, "sft"
    ).is_skipped


@pytest.mark.dist
def test_a_capsule_that_cannot_be_written_is_told_and_ends_nothing(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    (result,) = dist_pool.run(weights_on_a_full_disk, state=state, directory=tmp_path)
    (findings,), is_skipped = result
    assert not findings.has_weights and "Not a directory" in findings.error and not is_skipped


def test_bad_tensors_counts_what_is_not_finite() -> None:
    large = torch.full((4,), 3e38)  # its sum overflows, its elements do not
    bad = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.inf])
    found = find_bad_tensors(
        {"a": torch.ones(3), "large": large, "bad": bad, "empty": torch.zeros(0)}
    )
    assert found == (BadTensor("bad", num_nan=1, num_inf=3, num_elements=5),)
    assert str(found[0]) == "bad (1 NaN and 3 Inf of 5)"
