"""What a worker process runs in the tests of the Checkpointer: real roles in one process, real files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workers_reference as reference
from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.config.rules.run import has_critic, needs_reference
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.data.stream import PromptCursor
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.world import World, create_world, destroy_world
from rlhf_megatron.recovery.checkpointer import Checkpointer, SaveFailed
from rlhf_megatron.recovery.resume import RunState
from rlhf_megatron.runtime.inline import InlineGroup
from rlhf_megatron.runtime.proxies import Workers


@dataclass
class Notes:
    """What a Checkpointer said and called."""

    lines: list[str] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)


@contextmanager
def hosts(config: RunConfig) -> Iterator[tuple[InlineGroup, dict[str, Any]]]:
    """(group, its roles). The worker's world makes room for the group's and comes back."""
    from rlhf_megatron.runtime.roles import RoleBuilder

    destroy_world()
    group = InlineGroup(RoleBuilder(config))
    try:
        yield group, dict(group._host._roles)  # type: ignore[union-attr]
    finally:
        group.close()
        create_world(Layout(world_size=1), torch.device("cpu"))


def make(config: RunConfig, group: InlineGroup, run_dir: Path) -> tuple[Checkpointer, Notes]:
    notes = Notes()
    has_frozen_start = needs_reference(config) and config.reference.path is None
    text, workers = as_yaml(config), Workers(group)
    saver = Checkpointer(
        config.trainer, text, workers, has_critic(config), has_frozen_start, run_dir, notes.lines.append
    )
    saver.on_commit = notes.commits.append
    return saver, notes


def state_of(step: int, **columns: Any) -> RunState:
    cursor = PromptCursor(num_drawn=8 * step, batch_size=8, order="abc")
    return RunState(step, policy_version=step + 1, cursor=cursor, kl={"coef": 0.1 + 0.2}, **columns)


def train(group: InlineGroup) -> None:
    batch = reference.make_batch()
    batch = replace(batch, token_ids=batch.token_ids % 32)
    group.scatter("actor.update", batch, token_budget=64, temperature=1.0, loss="sft").result()


def weights(role: Any) -> dict[str, Tensor]:
    return {rule.megatron_name: tensor.clone() for rule, tensor in role.export() if tensor is not None}


def moments(role: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in role.backend.optimizer.state_tensors()]


def draws() -> list[Any]:
    """The next values of all random streams of this process, which move on by it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    found: list[Any] = [random.random(), random.gauss(0, 1), np.random.rand(), float(np.random.randn())]
    found += torch.rand(2).tolist()
    with get_cuda_rng_tracker().fork():
        found += torch.rand(2).tolist()
    return found


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@contextmanager
def faulty(text: str, directory: Path) -> Iterator[None]:
    faults.install(text, "controller", directory / f"faults_{text.partition(':')[0]}")
    try:
        yield
    finally:
        faults.install("", "", directory)


def round_trip(world: World, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Two checkpoints while training goes on, a third process-life that restores the second one."""
    found: dict[str, Any] = {}
    with hosts(config) as (group, roles):
        saver, notes = make(config, group, run_dir)
        train(group)
        group.broadcast("actor.reset_optimizer", phase="rl").result()
        group.broadcast("host.refresh_reference").result()
        train(group)
        saver.save(state_of(1, num_warmup_steps=1, warmup_accuracy=0.5))
        train(group)
        saver.wait()
        draws()
        with faulty("delay@ckpt.mid_data:seconds=1", run_dir.parent):
            saver.save(state_of(2, num_warmup_steps=1))
            at_save = {name: weights(roles[name]) for name in ("actor", "critic", "reference")}
            found["moments"] = moments(roles["actor"])
            next_draws = draws()
            found["early"] = (saver.poll(), list(notes.commits), saver.store.steps())
            train(group)
            saver.wait()
        found["metrics"], found["later"] = saver.poll(), saver.poll()
        saver.save(state_of(2))  # it is there already
        found["lines"], found["commits"], found["steps"] = notes.lines, notes.commits, saver.store.steps()
        found["has_moved"] = not is_equal(weights(roles["actor"]), at_save["actor"])
        train(group)
        after = weights(roles["actor"])

    with hosts(config) as (group, roles):
        saver, notes = make(config, group, run_dir)
        newest = saver.store.newest()
        assert newest is not None
        found["state"] = saver.restore(newest)
        found["draws"] = draws() == next_draws
        found["restored"] = {name: is_equal(weights(roles[name]), at_save[name]) for name in at_save}
        found["same_moments"] = all(
            torch.equal(a, b) for a, b in zip(moments(roles["actor"]), found.pop("moments"), strict=True)
        )
        found["phase"] = roles["actor"].phase
        train(group)
        train(group)
        found["goes_on"] = is_equal(weights(roles["actor"]), after)
        found["notes_of_resume"] = notes.lines
    return found


def failures(world: World, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Saves that fail in every way, each followed by training; then a good one."""
    found: dict[str, Any] = {}
    with hosts(config) as (group, _):
        saver, notes = make(config, group, run_dir)
        saver.save(state_of(1))
        saver.wait()
        saver.poll()

        def failing(name: str, step: int, fault: str = "") -> None:
            with faulty(fault, run_dir.parent):
                saver.save(state_of(step))
                train(group)
                saver.wait()
            names = sorted(entry.name for entry in saver.store.directory.iterdir())
            found[name] = (saver.poll(), notes.lines[-1], names)

        failing("data", 2, "disk_full@ckpt.mid_data")
        failing("commit", 3, "disk_full@ckpt.before_commit")
        failing("bug", 4, "fail@ckpt.before_data")
        real = shutil.disk_usage
        shutil.disk_usage = lambda path: real(path)._replace(free=1000)  # type: ignore[assignment]
        try:
            failing("space", 5)
        finally:
            shutil.disk_usage = real
        directory = saver.store.directory
        directory.rename(directory.with_name("away"))
        directory.write_bytes(b"")
        saver.save(state_of(6))
        found["no directory"] = (saver.poll(), notes.lines[-1], [])
        directory.unlink()
        directory.with_name("away").rename(directory)

        with faulty("delay@ckpt.before_data:seconds=0.5", run_dir.parent):
            saver.save(state_of(7))
            shutil.rmtree(directory / ".step_000007.partial")
        saver.wait()
        found["vanished"] = (saver.poll(), notes.lines[-1], sorted(entry.name for entry in directory.iterdir()))
        saver.save(state_of(8))
        saver.wait()
        found["good"] = (saver.poll(), saver.store.steps(), notes.commits)

        stopping, _ = make(replace(config, trainer=replace(config.trainer, save_failure="stop")), group, run_dir)
        with faulty("disk_full@ckpt.before_data", run_dir.parent):
            found["stop"] = raised(lambda: (stopping.save(state_of(9)), stopping.wait()), SaveFailed)
    return found


def refusals(world: World, config: RunConfig, run_dir: Path, spoil: Callable[[Path], None]) -> list[str]:
    """What `restore` says after `spoil(directory)`, with a manifest that fits what is there."""
    with hosts(config) as (group, _):
        saver, _ = make(config, group, run_dir)
        newest = saver.store.newest()
        assert newest is not None
        spoil(newest.path)
        again = saver.store.newest()
        assert again is not None, "the manifest was to fit"
        return [raised(lambda: saver.restore(again), ValueError)]


def raised(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""
