"""What a worker process runs in the tests of the Checkpointer: real roles in one
process, real files.
"""

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
from rlhf_megatron.config.rules.run_rules import has_critic, needs_reference
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.recovery.resume_point import RunState
from rlhf_megatron.controller.recovery.run_checkpointer import CheckpointSaveFailed, RunCheckpointer
from rlhf_megatron.data.item_stream import StreamCursor
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.parallel_layout import ParallelLayout


@dataclass
class Notes:
    """What a Checkpointer said and called."""

    lines: list[str] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)


@contextmanager
def hosts(config: RunConfig) -> Iterator[tuple[InlineWorkerGroup, dict[str, Any]]]:
    """(group, its roles). The worker's world makes room for the group's and comes back."""
    from rlhf_megatron.runtime.rank_roles import RoleBuilder

    destroy_world()
    group = InlineWorkerGroup(RoleBuilder(config))
    try:
        yield group, dict(group._host._roles)  # type: ignore[union-attr]
    finally:
        group.close()
        create_world(ParallelLayout(world_size=1), torch.device("cpu"))


def make(
    config: RunConfig, group: InlineWorkerGroup, run_dir: Path
) -> tuple[RunCheckpointer, Notes]:
    notes = Notes()
    has_frozen_start = needs_reference(config) and config.reference.path is None
    text = render_config_yaml(config)
    workers = RoleProxies(group)
    saver = RunCheckpointer(
        config.trainer,
        text,
        workers,
        has_critic(config),
        has_frozen_start,
        run_dir,
        notes.lines.append,
    )
    saver.commit_callback = notes.commits.append
    return saver, notes


def state_of(step: int, **columns: Any) -> RunState:
    cursor = StreamCursor(num_drawn=8 * step, batch_size=8, order="abc")
    return RunState(step, policy_version=step + 1, cursor=cursor, kl={"coef": 0.1 + 0.2}, **columns)


def train(group: InlineWorkerGroup) -> None:
    batch = reference.make_batch()
    batch = replace(batch, token_ids=batch.token_ids % 32)
    group.scatter_call("actor.update", batch, token_budget=64, temperature=1.0, loss="sft").result()


def weights(role: Any) -> dict[str, Tensor]:
    return {
        rule.megatron_name: tensor.clone()
        for rule, tensor in role.export_shards()
        if tensor is not None
    }


def moments(role: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in role.backend.optimizer.list_state_tensors()]


def draws() -> list[Any]:
    """The next values of all random streams of this process, which move on by it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    found: list[Any] = [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        float(np.random.randn()),
    ]
    found += torch.rand(2).tolist()
    with get_cuda_rng_tracker().fork():
        found += torch.rand(2).tolist()
    return found


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@contextmanager
def faulty(text: str, directory: Path) -> Iterator[None]:
    faults.install_fault_plan(text, "controller", directory / f"faults_{text.partition(':')[0]}")
    try:
        yield
    finally:
        faults.install_fault_plan("", "", directory)


def round_trip(world: World, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Two checkpoints while training goes on, a third process-life that restores the second one."""
    found: dict[str, Any] = {}
    with hosts(config) as (group, roles):
        saver, notes = make(config, group, run_dir)
        train(group)
        group.broadcast_call("actor.reset_optimizer", phase="rl").result()
        group.broadcast_call("host.refresh_reference").result()
        train(group)
        saver.begin_save(state_of(1, num_warmup_steps=1, warmup_accuracy=0.5))
        train(group)
        saver.wait_for_save()
        draws()
        with faulty("delay@ckpt.mid_data:seconds=1", run_dir.parent):
            saver.begin_save(state_of(2, num_warmup_steps=1))
            at_save = {name: weights(roles[name]) for name in ("actor", "critic", "reference")}
            found["moments"] = moments(roles["actor"])
            next_draws = draws()
            found["early"] = (
                saver.commit_if_written(),
                list(notes.commits),
                saver.store.list_steps(),
            )
            train(group)
            saver.wait_for_save()
        found["metrics"], found["later"] = saver.commit_if_written(), saver.commit_if_written()
        saver.begin_save(state_of(2))  # it is there already
        found["lines"], found["commits"], found["steps"] = (
            notes.lines,
            notes.commits,
            saver.store.list_steps(),
        )
        found["has_moved"] = not is_equal(weights(roles["actor"]), at_save["actor"])
        train(group)
        after = weights(roles["actor"])

    with hosts(config) as (group, roles):
        saver, notes = make(config, group, run_dir)
        newest = saver.store.find_newest()
        assert newest is not None
        found["state"] = saver.restore_checkpoint(newest)
        found["draws"] = draws() == next_draws
        found["restored"] = {
            name: is_equal(weights(roles[name]), at_save[name]) for name in at_save
        }
        found["same_moments"] = all(
            torch.equal(a, b)
            for a, b in zip(moments(roles["actor"]), found.pop("moments"), strict=True)
        )
        found["phase"] = roles["actor"].phase_name
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
        saver.begin_save(state_of(1))
        saver.wait_for_save()
        saver.commit_if_written()

        def failing(name: str, step: int, fault: str = "") -> None:
            with faulty(fault, run_dir.parent):
                saver.begin_save(state_of(step))
                train(group)
                saver.wait_for_save()
            names = sorted(entry.name for entry in saver.store.directory.iterdir())
            found[name] = (saver.commit_if_written(), notes.lines[-1], names)

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
        saver.begin_save(state_of(6))
        found["no directory"] = (saver.commit_if_written(), notes.lines[-1], [])
        directory.unlink()
        directory.with_name("away").rename(directory)

        with faulty("delay@ckpt.before_data:seconds=0.5", run_dir.parent):
            saver.begin_save(state_of(7))
            shutil.rmtree(directory / ".step_000007.partial")
        saver.wait_for_save()
        found["vanished"] = (
            saver.commit_if_written(),
            notes.lines[-1],
            sorted(entry.name for entry in directory.iterdir()),
        )
        saver.begin_save(state_of(8))
        saver.wait_for_save()
        found["good"] = (saver.commit_if_written(), saver.store.list_steps(), notes.commits)

        stopping, _ = make(
            replace(config, trainer=replace(config.trainer, save_failure="stop")), group, run_dir
        )
        with faulty("disk_full@ckpt.before_data", run_dir.parent):
            found["stop"] = raised(
                lambda: (stopping.begin_save(state_of(9)), stopping.wait_for_save()),
                CheckpointSaveFailed,
            )
    return found


def refusals(
    world: World, config: RunConfig, run_dir: Path, spoil: Callable[[Path], None]
) -> list[str]:
    """What `restore` says after `spoil(directory)`, with a manifest that fits what is there."""
    with hosts(config) as (group, _):
        saver, _ = make(config, group, run_dir)
        newest = saver.store.find_newest()
        assert newest is not None
        spoil(newest.path)
        again = saver.store.find_newest()
        assert again is not None, "the manifest was to fit"
        return [raised(lambda: saver.restore_checkpoint(again), ValueError)]


def raised(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""
