"""A checkpoint is loaded under another layout: the further optimizer step against one that stayed,
and against float64.

On the ranks: the parity benchmark's models, batch and recipe. One optimizer step in the old layout,
its checkpoint, a worker with other weights in the new layout that loads it, one more step. What the
further step changed is compared, a tensor at a time, with the same step of transformers in float64;
the bar is that of the parity benchmark, three times float32's own error. The run that went on in
the old layout is held to the same bar.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.cases import (
    FAMILIES,
    NUM_SAMPLES,
    Cut,
    Recipe,
    Role,
    add_past,
    add_values,
    make_batch,
    make_state,
)
from benchmarks.parity.layouts import Axes
from benchmarks.parity.measure import BAR
from benchmarks.parity.reference import COLUMNS, make_model, run_in_float32, run_reference
from benchmarks.parity.rounding import share_of_bar, tensor_figures
from benchmarks.parity.run import LAYOUT_TIMEOUT_S, DistPool
from benchmarks.parity.sharded import FIRST, hf_tensors, train_batch
from benchmarks.parity.subjects import SUBJECTS
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.runtime.call_dispatch import make_scattered_call

FAMILY = "qwen3_tied"
WHOLE = ((0, NUM_SAMPLES),)
ONE = Cut("one", WHOLE, 64, "token-mean")
TWO = Cut("two", WHOLE * 2, 64, "token-mean")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Move:
    """From one layout to another."""

    old: Axes
    new: Axes
    role: Role = "actor"

    @property
    def name(self) -> str:
        critic = "critic_" if self.role == "critic" else ""
        return f"relayout/{critic}{self.old.name}-to-{self.new.name}"


_DP2 = Axes(dp=2, distributed=True)
MOVES = (
    Move(Axes(tp=2), Axes(pp=2)),
    Move(Axes(pp=2), _DP2),
    Move(_DP2, Axes(tp=2, sequence_parallel=True)),
    Move(_DP2, Axes(dp=2)),
    Move(Axes(dp=2), _DP2),
    Move(Axes(tp=2, pp=2), Axes()),
    Move(
        Axes(tp=2, sequence_parallel=True, dp=2, distributed=True),
        Axes(pp=2, vpp=2, dp=2, distributed=True, overlap=True),
    ),
    Move(Axes(tp=2), Axes(pp=2), "critic"),
    Move(Axes(pp=2), _DP2, "critic"),
)


@dataclass(frozen=True)
class Figure:
    """The tensor of the further step's update that is nearest to its bar, or farthest over it."""

    where: str
    tensor: str
    error: float
    float32_error: float
    bar: float

    @property
    def is_ok(self) -> bool:
        return bool(self.error <= self.bar)  # a NaN is a miss


def first_step(
    world: World, directory: Path, go_on: bool, **arguments: Any
) -> tuple[Weights, Weights] | None:
    """A job of the worker pool: one optimizer step and its checkpoint; `go_on`: and the further
    step without a break.

    Returns this rank's weights before and after the further step.
    """
    worker, step = _worker(world, seed=None, **arguments)
    step()
    worker.save(directory)
    if not go_on:
        return None
    before = _export(worker)
    step()
    return before, _export(worker)


def further_step(world: World, directory: Path, **arguments: Any) -> tuple[Weights, Weights]:
    """A job of the worker pool: a worker that holds other weights loads the checkpoint and makes
    one more step.
    """
    worker, step = _worker(world, seed=99, **arguments)
    worker.load(directory)
    before = _export(worker)
    step()
    return before, _export(worker)


def _worker(
    world: World,
    seed: int | None,
    state: Weights,
    batch: Weights,
    recipe: Recipe,
    megatron: MegatronConfig,
    role: Role,
) -> Any:
    """(a worker, the function that makes one optimizer step with it). `seed`: of other
    weights than `state`.
    """
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        state = {
            name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()
        }
    subject: Any = SUBJECTS[role](TWO, recipe, megatron)  # its mini-batch fits its own update
    worker = subject.make(FAMILIES[FAMILY], state, world)
    mini_batch = subject.mini_batch(train_batch(batch))
    plan = make_scattered_call(
        0, "update", mini_batch, world.layout, TWO.token_budget, {}
    ).replica_plans[world.coordinates.dp]

    def step() -> None:
        from rlhf_megatron.data.replica_plan import take_replica_shard

        subject.update(worker, take_replica_shard(mini_batch, plan), plan)

    return worker, step


def _export(worker: Any) -> Weights:
    """This rank's shards by Megatron name, the last stage's copy of a tied embedding too."""
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters

    exported = {
        rule.megatron_name: shard.clone()
        for rule, shard in worker.export_shards()
        if shard is not None
    }
    return {
        name: p.detach().clone()
        for name, p in collect_named_parameters(worker.backend.model.chunks).items()
    } | exported


@dataclass(frozen=True)
class Truth:
    """Inputs, and the update of the further step in float64 and in draws of float32."""

    state: Weights
    batch: Weights
    exact: Weights
    draws: list[Weights]


@cache
def truth(role: Role) -> Truth:
    recipe = Recipe()
    hf_config = FAMILIES[FAMILY]
    state = make_state(FAMILY, role)
    batch = make_batch()
    with torch.no_grad():
        model = make_model(hf_config, state, torch.float64, role)
        columns = COLUMNS[role](model, batch, range(NUM_SAMPLES), recipe)
    batch = (
        add_past(batch, columns["log_probs"])
        if role == "actor"
        else add_values(batch, columns["values"])
    )

    def update(one: Weights, two: Weights) -> Weights:
        names = [key.removeprefix("weights/") for key in two if key.startswith("weights/")]
        return {name: (two[f"weights/{name}"] - one[f"weights/{name}"]).double() for name in names}

    exact = [
        run_reference(hf_config, state, batch, cut, recipe, torch.float64, role)
        for cut in (ONE, TWO)
    ]
    draws = [run_in_float32(hf_config, state, batch, cut, recipe, role) for cut in (ONE, TWO)]
    return Truth(
        state, batch, update(*exact), [update(one, two) for one, two in zip(*draws, strict=True)]
    )


def run_move(pool: DistPool, move: Move, directory: Path) -> list[Figure]:
    """Two figures: of the run that went on in the old layout, and of the one that was resumed
    in the new one.
    """
    known = truth(move.role)
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    shared = {"state": known.state, "batch": known.batch, "recipe": Recipe(), "role": move.role}

    def run(job: Any, axes: Axes, **arguments: Any) -> Weights:
        results = pool.run(
            job,
            tp=axes.tp,
            pp=axes.pp,
            dp=axes.dp,
            vpp=axes.vpp,
            sequence_parallel=axes.sequence_parallel,
            timeout_s=LAYOUT_TIMEOUT_S,
            directory=directory,
            megatron=axes.megatron,
            **shared,
            **arguments,
        )
        before, after = (_full([result[i] for result in results], axes, move.role) for i in (0, 1))
        return {name: after[name].double() - before[name].double() for name in after}

    stayed = run(first_step, move.old, go_on=True)
    resumed = run(further_step, move.new)
    shutil.rmtree(directory, ignore_errors=True)
    return [
        worst(f"went on at {move.old.name}", stayed, known.exact, known.draws),
        worst(f"resumed at {move.new.name}", resumed, known.exact, known.draws),
    ]


def _full(shards: Sequence[Weights], axes: Axes, role: Role) -> Weights:
    """Hugging Face name -> tensor. Raises AssertionError when ranks that hold the same
    weights differ.
    """
    copies = hf_tensors(list(shards), FAMILIES[FAMILY], axes, role, is_whole=True)
    first = copies.pop(FIRST)
    for copy, named in copies.items():
        for name, tensor in named.items():
            assert torch.equal(tensor, first[name]), f"{name} differs in the copy {copy}"
    return first


def worst(
    where: str, update: Mapping[str, Tensor], exact: Mapping[str, Tensor], draws: Sequence[Weights]
) -> Figure:
    """The tensor that is nearest to its bar, or farthest over it."""
    figure = max(tensor_figures(update, exact, draws), key=lambda figure: share_of_bar(figure, BAR))
    return Figure(where, *figure, BAR * figure[2])


def as_row(move: Move, figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        "name": move.name,
        "figures": [{**asdict(figure), "ok": figure.is_ok} for figure in figures],
    }
