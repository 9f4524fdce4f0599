"""What an actor keeps and refuses: checkpoints, skipped steps, fresh optimizers, replicas
without samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool, JobError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from workers_jobs import (
    CONFIG,
    OVERLAPPED,
    SHARDED,
    RankResult,
    StateSource,
    make_actor,
    shards,
    share,
    summed,
    train,
    whole,
)

from benchmarks.parity.rounding import relative_error
from rlhf_megatron.config.schema import KernelsConfig, OptimConfig
from rlhf_megatron.data.batch import MiniBatch, select_samples
from rlhf_megatron.ranks.parallel.world import World

pytestmark = pytest.mark.dist
NAME = "qwen3_tied"


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model(NAME).state_dict().items()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(relative_error(a[key], b[key]) for key in a)


MOVES: list[
    tuple[str, torch.dtype, dict[str, Any], list[dict[str, Any]]]
] = [  # saved under one, loaded under others
    ("plain", torch.float32, {"tp": 2}, [{"tp": 2}, {"pp": 2}, {"dp": 2, "megatron": SHARDED}]),
    ("plain, bf16", torch.bfloat16, {"tp": 2}, [{"tp": 2}, {"pp": 2}]),
    (
        "sequence parallel",
        torch.float32,
        {"tp": 2, "sequence_parallel": True, "megatron": SHARDED},
        [
            {"tp": 2, "sequence_parallel": True, "megatron": SHARDED},
            {"pp": 2, "vpp": 2, "megatron": SHARDED},
            {},
        ],
    ),
    (
        "overlapped",
        torch.float32,
        {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
        [
            {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
            {"cp": 2},
            {"tp": 2, "megatron": SHARDED},
        ],
    ),
    (
        "overlapped, bf16",
        torch.bfloat16,
        {"cp": 2, "megatron": OVERLAPPED},
        [{"cp": 2, "megatron": OVERLAPPED}, {"tp": 2}],
    ),
    # The tied embedding has a bucket of its own, behind the padding of another.
    (
        "padded buckets",
        torch.float32,
        {"pp": 2, "dp": 2, "megatron": SHARDED},
        [{"pp": 2, "dp": 2, "megatron": SHARDED}, {}],
    ),
]


@pytest.mark.parametrize(
    "dtype, saved, loaded", [move[1:] for move in MOVES], ids=[move[0] for move in MOVES]
)
def test_a_checkpoint_goes_on_under_another_layout(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    tmp_path: Path,
    dtype: torch.dtype,
    saved: dict[str, Any],
    loaded: list[dict[str, Any]],
) -> None:
    """Weights right after a load prove little: moments and step counts show in
    the step after it.
    """
    directory = tmp_path / "checkpoint"
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
        "dtype": dtype,
        "timeout_s": 300,
    }
    through = dist_pool.run(
        train, num_steps=3, directory=directory, save_after=2, **saved, **common
    )
    expected = weights_of(through, saved)
    for number, layout in enumerate(loaded):
        resumed = dist_pool.run(
            train, num_steps=1, directory=directory, is_loading=True, **layout, **common
        )
        weights = weights_of(resumed, layout)
        if number == 0:  # as it was saved
            assert all(torch.equal(weights[key], expected[key]) for key in expected)
        elif dtype == torch.float32:
            moved, wanted = ({key: w[key] - state[key] for key in w} for w in (weights, expected))
            assert largest_difference(moved, wanted) <= 1e-3
        else:
            # a step is about one unit in the last place: another layout rounds some
            # weights the other way
            assert largest_difference(weights, expected) <= 1e-3
        assert summed(resumed, 0).lr == summed(through, 2).lr


def weights_of(results: list[RankResult], layout: dict[str, Any]) -> dict[str, Tensor]:
    return whole(
        results, NAME, layout.get("tp", 1), layout.get("dp", 1) * layout.get("cp", 1), "weights"
    )


@pytest.mark.parametrize(
    ("dtype", "layout", "setting"),
    [
        (torch.float32, {"tp": 2, "megatron": {}}, "optimizer_cpu_offload"),
        (
            torch.bfloat16,
            {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
            "optimizer_cpu_offload",
        ),
        (
            torch.bfloat16,
            {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
            "use_precision_aware_optimizer",
        ),
    ],
    ids=["float32, plain", "bf16, overlapped", "bf16, remainders"],
)
def test_an_optimizer_that_keeps_its_state_otherwise_makes_the_same_steps(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    tmp_path: Path,
    dtype: torch.dtype,
    layout: dict[str, Any],
    setting: str,
) -> None:
    """In host memory, or in fewer bits: bit for bit, and its checkpoint goes on with the state
    as it mostly is.
    """
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
    }
    common |= {"dtype": dtype, "directory": tmp_path / "checkpoint"}
    on_host = {**layout, "megatron": {**layout["megatron"], setting: True}}
    streamed = weights_of(
        dist_pool.run(train, num_steps=3, save_after=2, **on_host, **common), layout
    )
    for resumed in (on_host, layout):
        found = weights_of(
            dist_pool.run(train, num_steps=1, is_loading=True, **resumed, **common), layout
        )
        assert all(torch.equal(found[key], streamed[key]) for key in streamed)
    expected = weights_of(
        dist_pool.run(train, num_steps=3, **layout, **common | {"directory": None}), layout
    )
    assert all(torch.equal(streamed[key], expected[key]) for key in expected)
    assert not all(
        torch.equal(expected[key], state.get(key, expected[key]).to(dtype)) for key in expected
    )


def stored_keys(directory: Path) -> set[str]:
    """Of all tensors and objects in a checkpoint."""
    return set(FileSystemReader(directory).read_metadata().state_dict_metadata)


def test_a_checkpoint_from_before_the_first_step_goes_on(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
    }
    through = dist_pool.run(train, num_steps=2, **common)
    dist_pool.run(train, num_steps=0, directory=tmp_path / "fresh", **common)
    assert not [key for key in stored_keys(tmp_path / "fresh") if "_extra_state" in key], (
        "pickled objects of layers"
    )
    resumed = dist_pool.run(
        train, num_steps=2, directory=tmp_path / "fresh", is_loading=True, **common
    )
    expected = whole(through, NAME, 1, 1, "weights")
    assert all(
        torch.equal(expected[key], w) for key, w in whole(resumed, NAME, 1, 1, "weights").items()
    )


def test_a_checkpoint_of_another_model_is_refused(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"batch": reference.make_batch(), "loss": "sft", "num_steps": 0}
    dist_pool.run(train, name=NAME, state=state, directory=tmp_path / "tied", **common)
    other = reference.make_model("llama").state_dict()
    with pytest.raises(JobError, match=r"output_layer.weight is missing"):
        dist_pool.run(
            train, name="llama", state=other, directory=tmp_path / "tied", is_loading=True, **common
        )
    with pytest.raises(JobError, match=r"nowhere is not a checkpoint"):
        dist_pool.run(
            train, name=NAME, state=state, directory=tmp_path / "nowhere", is_loading=True, **common
        )


def poisoned_update(
    world: World, state: dict[str, Tensor], batch: MiniBatch, megatron: dict[str, Any]
) -> tuple[Any, Any, bool, RankResult]:
    """An update whose loss weight is infinite in one replica only, then a sound one; (bad, good, is
    unchanged, end).
    """
    actor = make_actor(world, NAME, state, megatron=megatron, bucket_size=20_000)
    shard, plan = share(world, batch, 40)
    weights = shard.loss_weights.clone()
    if world.coordinates.dp == 0:
        weights[shard.response_mask.nonzero()[0]] = float("inf")
    _, before = shards(actor)
    bad = actor.update(replace(shard, loss_weights=weights), plan, reference.TEMPERATURE, "sft")
    _, after = shards(actor)
    good = actor.update(shard, plan, reference.TEMPERATURE, "sft")
    same = all(torch.equal(before[key], after[key]) for key in before)
    return bad, good, same, RankResult(None, [good], *shards(actor), plan)


@pytest.mark.parametrize("megatron", [{}, OVERLAPPED], ids=["plain", "overlapped"])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(
    dist_pool: DistPool, state: dict[str, Tensor], megatron: dict[str, Any]
) -> None:
    batch = reference.make_batch()
    layout: dict[str, Any] = {"pp": 2, "dp": 2, "megatron": megatron, "timeout_s": 300}
    poisoned = dist_pool.run(poisoned_update, state=state, batch=batch, **layout)
    clean = dist_pool.run(
        train,
        name=NAME,
        state=state,
        batch=batch,
        loss="sft",
        num_steps=1,
        bucket_size=20_000,
        **layout,
    )
    assert all(is_same for _, _, is_same, _ in poisoned)
    trained = whole([result for _, _, _, result in poisoned], NAME, 1, 2, "weights")
    assert largest_difference(trained, whole(clean, NAME, 1, 2, "weights")) == 0.0
    bad = [update for update, _, _, _ in poisoned if update is not None]
    good = [update for _, update, _, _ in poisoned if update is not None]
    assert [update.is_skipped for update in bad] == [True, True]
    assert [update.is_skipped for update in good] == [False, False]


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp": 2},
        {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
        {"cp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
    ],
    ids=["tp2 dp2", "dp2 overlapped", "cp2 overlapped"],
)
def test_ranks_without_rows_take_part(
    dist_pool: DistPool, state: dict[str, Tensor], layout: dict[str, Any]
) -> None:
    """One response token of one sample over two replicas or context-parallel ranks: one of
    them has none.

    The steps are those of one rank; the second one is where overlapped reductions wait for each
    parameter's hook.
    """
    sample = select_samples(reference.make_batch(), [3])
    mask = torch.zeros_like(sample.response_mask)
    mask[-3] = True
    sample = replace(
        sample, response_mask=mask, loss_weights=mask.float(), metric_weights=mask.float()
    )
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": sample,
        "loss": "sft",
        "num_steps": 3,
    }
    alone = dist_pool.run(train, **common)
    spread = dist_pool.run(train, timeout_s=300, **layout, **common)
    copies = layout.get("dp", 1) * layout.get("cp", 1)
    error = largest_difference(
        whole(spread, NAME, layout.get("tp", 1), copies, "grads"), whole(alone, NAME, 1, 1, "grads")
    )
    assert error <= 1e-5
    for step in range(3):
        assert summed(spread, step).grad_norm == pytest.approx(
            summed(alone, step).grad_norm, rel=1e-5
        )
        assert summed(spread, step).sums["actor/loss"] == pytest.approx(
            summed(alone, step).sums["actor/loss"], rel=1e-5
        )


def test_loss_and_gradient_do_not_depend_on_the_token_budget(
    dist_pool: DistPool, state: dict[str, Tensor]
) -> None:
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
        "pp": 2,
    }
    runs = {
        budget: dist_pool.run(train, token_budget=budget, num_steps=1, **common)
        for budget in (14, 33, 1000)
    }
    assert len({len(run[0].plan.micro_batches) for run in runs.values()}) == 3
    whole_batch = whole(runs[1000], NAME, 1, 1, "grads")
    for budget in (14, 33):
        assert largest_difference(whole(runs[budget], NAME, 1, 1, "grads"), whole_batch) <= 1e-5
        assert summed(runs[budget], 0).sums["actor/loss"] == pytest.approx(
            summed(runs[1000], 0).sums["actor/loss"], rel=1e-6
        )


def schedules(
    world: World, state: dict[str, Tensor], batch: MiniBatch
) -> list[tuple[float, float, float]]:
    """(lr, weight decay of matrices, weight decay of norms) at each step of a warm-up phase, then
    of a fresh one.
    """

    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase

    warm = OptimConfig(
        lr=1e-3, lr_warmup_steps=2, lr_decay_style="linear", weight_decay=0.1, weight_decay_end=0.3
    )
    phases = {
        "warmup": TrainingPhase(warm, 4),
        "rl": TrainingPhase(OptimConfig(lr=5e-4, weight_decay=0.2), 10),
    }
    actor = ActorModel(
        MegatronBackend(
            reference.HF_CONFIGS[NAME], StateSource(state), world, torch.float32, CONFIG.megatron
        ),
        CONFIG,
        phases,
    )
    shard, plan = share(world, batch, 1000)
    seen = []
    for phase, count in (("warmup", 4), ("rl", 1)):
        if phase == "rl":
            actor.reset_optimizer("rl")
        for _ in range(count):
            result = actor.update(shard, plan, 1.0, "sft")
            groups = actor.backend.optimizer.megatron_optimizer.param_groups
            decay = {
                p.dim() > 1: group["weight_decay"] for group in groups for p in group["params"]
            }
            seen.append((result.lr, decay[True], decay[False]))
    moments = [
        s["step"].item()
        for s in actor.backend.optimizer.megatron_optimizer.chained_optimizers[
            0
        ].optimizer.state.values()
    ]
    assert set(moments) == {1.0}, "the fresh optimizer has counted the warm-up's steps"
    return seen


def test_schedules_and_a_fresh_optimizer(dist_pool: DistPool, state: dict[str, Tensor]) -> None:
    """Warm-up 0 -> 1e-3 in two steps, then linearly to 0 one step after the fourth; weight decay
    0.1 -> 0.3; norms are exempt.
    """
    (seen,) = dist_pool.run(schedules, state=state, batch=reference.make_batch())
    assert [lr for lr, _, _ in seen] == pytest.approx([5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3, 5e-4])
    assert [decay for _, decay, _ in seen] == pytest.approx([0.15, 0.2, 0.25, 0.3, 0.2])
    assert [decay for _, _, decay in seen] == [0.0] * 5


def two_references(
    world: World, state: dict[str, Tensor], batch: MiniBatch, megatron: dict[str, Any]
) -> tuple[Any, ...]:
    """Log-probs of actor and reference, alike at first, after an update, and after the reference
    became the actor.
    """
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.reference_model import ReferenceModel

    actor = make_actor(world, NAME, state, megatron=megatron)
    config = reference.HF_CONFIGS[NAME]
    settings = actor.config.megatron
    head = (50, KernelsConfig())
    backend = MegatronBackend(
        config, StateSource(state), world, torch.float32, settings, is_frozen=True
    )
    frozen = ReferenceModel(backend, *head, is_offloaded=True)
    shard, plan = share(world, batch, 40)

    def both() -> tuple[Any, Any]:
        return tuple(role.log_probs(shard, plan, reference.TEMPERATURE) for role in (actor, frozen))

    before = both()
    actor.update(shard, plan, reference.TEMPERATURE, "sft")
    trained = both()
    actor.update(shard, plan, reference.TEMPERATURE, "sft")
    actor.backend.gather_parameters()
    frozen.copy_weights_from(actor.backend)
    return before, trained, both()


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "megatron": {}},
        {"pp": 2, "vpp": 2, "dp": 2, "megatron": OVERLAPPED},
        {"tp": 2, "sequence_parallel": True, "megatron": {"recompute_granularity": "selective"}},
        {"cp": 2, "megatron": OVERLAPPED},
    ],
    ids=["tp2 pp2", "pp2 vpp2 dp2", "tp2 sequence parallel", "cp2"],
)
def test_a_reference_stays_until_it_is_told_to_become_the_actor(
    dist_pool: DistPool, state: dict[str, Tensor], layout: dict[str, Any]
) -> None:
    ranks = dist_pool.run(
        two_references, state=state, batch=reference.make_batch(), timeout_s=300, **layout
    )
    # of the last stage
    first = (len(ranks) // layout["pp"]) * (layout["pp"] - 1) if "pp" in layout else 0
    leaders = [first + dp for dp in range(layout.get("dp", 1))]
    assert [i for i, rank in enumerate(ranks) if rank[0][0] is not None] == leaders, (
        "results are the leaders'"
    )
    for leader in leaders:
        (actor_0, frozen_0), (actor_1, frozen_1), (actor_2, frozen_2) = ranks[leader]
        assert torch.equal(actor_0.log_probs, frozen_0.log_probs)
        assert torch.equal(frozen_1.log_probs, frozen_0.log_probs)
        assert not torch.equal(actor_1.log_probs, frozen_1.log_probs)
        assert torch.equal(actor_2.log_probs, frozen_2.log_probs)
        assert not torch.equal(actor_2.log_probs, actor_1.log_probs)
        assert frozen_2.entropies is None


def masters_and_exports(
    world: World, state: dict[str, Tensor], batch: MiniBatch, megatron: dict[str, Any]
) -> dict[str, Any]:
    """After a step in bfloat16: is the model stale, does the export round the masters, what
    does a reset keep.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.workers.optimizer_state import iterate_parameter_states

    actor = make_actor(
        world, NAME, state, dtype=torch.bfloat16, megatron=megatron, bucket_size=20_000
    )
    shard, plan = share(world, batch, 40)
    actor.update(shard, plan, reference.TEMPERATURE, "sft")
    parameters = collect_named_parameters(actor.backend.model.chunks)
    after_step = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    exported = {
        rule.megatron_name: tensor for rule, tensor in actor.export_shards() if tensor is not None
    }
    held = [
        entry
        for entry in iterate_parameter_states(actor.backend.optimizer.megatron_optimizer)
        if entry.main_param is not None
    ]
    names = {id(parameter): name for name, parameter in parameters.items()}

    def flat(entry: Any) -> Tensor:
        tensor = exported[names[id(entry.model_param)]].flatten()
        return tensor if entry.element_range is None else tensor[entry.element_range]

    masters = [entry.main_param.detach().clone() for entry in held]
    result = {
        "is_stale": any(
            not torch.equal(after_step[name], tensor) for name, tensor in exported.items()
        ),
        "is_rounded": all(
            torch.equal(flat(e), m.flatten().bfloat16()) for e, m in zip(held, masters, strict=True)
        ),
        "is_finer": any(not torch.equal(m, m.bfloat16().float()) for m in masters),
        "exported": {name: tensor.clone() for name, tensor in exported.items()},
    }
    actor.reset_optimizer("rl")
    fresh = [
        entry
        for entry in iterate_parameter_states(actor.backend.optimizer.megatron_optimizer)
        if entry.main_param is not None
    ]
    result["is_kept"] = all(
        torch.equal(e.main_param, m) for e, m in zip(fresh, masters, strict=True)
    )
    result["is_fresh"] = all(
        not value.any() for entry in fresh for value in entry.optimizer_state.values()
    )
    return result


@pytest.mark.parametrize(
    "megatron", [{}, SHARDED, OVERLAPPED], ids=["plain", "sharded", "overlapped"]
)
def test_exports_are_the_float32_masters_rounded_and_a_reset_keeps_them(
    dist_pool: DistPool, state: dict[str, Tensor], megatron: dict[str, Any]
) -> None:
    ranks = dist_pool.run(
        masters_and_exports,
        dp=2,
        state=state,
        batch=reference.make_batch(),
        megatron=megatron,
        timeout_s=300,
    )
    for rank in ranks:
        assert rank["is_rounded"] and rank["is_finer"] and rank["is_kept"] and rank["is_fresh"]
        assert all(
            torch.equal(rank["exported"][name], ranks[0]["exported"][name])
            for name in rank["exported"]
        )
    # With the gather overlapped, what the other rank has updated is old here until
    # something asks for it.
    assert [rank["is_stale"] for rank in ranks] == ["overlap_param_gather" in megatron] * 2
