"""What runs on every rank in the tests of saving and loading."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import workers_reference as reference
from torch import Tensor
from workers_jobs import make_actor, shards, share

from rlhf_megatron import faults
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.checkpoint_manifest import SaveResult

LONG_S = 60.0


def overtaken_save(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: MiniBatch,
    directory: Path,
    **settings: Any,
) -> dict[str, Any]:
    """Two steps, a save by a slow writer, two more steps meanwhile; then a second actor loads."""
    actor = make_actor(world, name, state, **settings)
    shard, plan = share(world, batch, 40)

    def update(worker: Any) -> None:
        worker.update(shard, plan, reference.TEMPERATURE, "sft")

    for _ in range(2):
        update(actor)
    (directory / f"faults{world.rank}").mkdir()
    faults.install_fault_plan(
        "delay@ckpt.mid_data:seconds=2", f"rank{world.rank}", directory / f"faults{world.rank}"
    )
    try:
        actor.begin_save(directory / "actor")
        _, at_save = shards(actor)
        moments_at_save = [
            tensor.clone() for tensor in actor.backend.optimizer.list_state_tensors()
        ]
        for _ in range(2):
            update(actor)
        was_done = actor.is_save_done()
        result: SaveResult = actor.finish_save(LONG_S)
    finally:
        faults.install_fault_plan("", "", directory)
    other = make_actor(world, name, state, **settings)
    other.load(directory / "actor")
    _, loaded = shards(other)
    moments = [tensor.clone() for tensor in other.backend.optimizer.list_state_tensors()]
    for _ in range(2):
        update(other)
    _, through = shards(actor)
    _, resumed = shards(other)
    return {
        "was_done": was_done,
        "result": result,
        "has_moved": any(not torch.equal(through[key], at_save[key]) for key in through),
        "is_loaded": all(torch.equal(loaded[key], at_save[key]) for key in at_save),
        "moments": all(torch.equal(a, b) for a, b in zip(moments, moments_at_save, strict=True)),
        "goes_on": all(torch.equal(resumed[key], through[key]) for key in through),
    }


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow past `num_bytes`: a write fails in the middle, as
    on a full disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing_saves(
    world: World, name: str, state: dict[str, Tensor], batch: MiniBatch, directory: Path
) -> dict[str, SaveResult]:
    """Saves that rank 1, or the first rank at the end, cannot write; then a good one by
    the same actor.
    """
    actor = make_actor(world, name, state)
    shard, plan = share(world, batch, 40)

    def save(to: Path, timeout_s: float = LONG_S) -> SaveResult:
        actor.begin_save(to)
        found: SaveResult = actor.finish_save(timeout_s)
        actor.update(shard, plan, reference.TEMPERATURE, "sft")
        return found

    def faulty(plan_text: str, to: Path, timeout_s: float = LONG_S) -> SaveResult:
        faults.install_fault_plan(plan_text, f"rank{world.rank}", directory / f"faults {to.name}")
        try:
            return save(to, timeout_s)
        finally:
            faults.install_fault_plan("", "", directory)

    results = {
        "injected": faulty("disk_full@ckpt.mid_data:who=rank1", directory / "injected"),
        "before": faulty("disk_full@ckpt.before_data:who=rank0", directory / "before"),
        "late": faulty(
            "delay@ckpt.mid_data:who=rank1,seconds=3", directory / "late", timeout_s=0.2
        ),
        "gone": save(directory / "nowhere" / "actor"),
        "read only": save(Path("/sys/actor")),
    }
    if world.rank == 1:
        with small_files(30_000):
            results["limit"] = save(directory / "limit")
    else:
        results["limit"] = save(directory / "limit")
    (directory / "metadata").mkdir(exist_ok=True)
    # the first rank cannot make this file
    (directory / "metadata" / ".metadata.tmp").mkdir(exist_ok=True)
    results["metadata"] = save(directory / "metadata")
    started = time.monotonic()
    results["good"] = save(directory / "good")
    assert time.monotonic() - started < LONG_S / 2
    return results


def resumed(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: MiniBatch,
    loss: str,
    directory: Path,
    again: Path,
    **settings: Any,
) -> dict[str, Any]:
    """Load, save what was loaded, then one step."""
    actor = make_actor(world, name, state, **settings)
    actor.load(directory)
    _, loaded = shards(actor)
    actor.save(again)
    shard, plan = share(world, batch, 40)
    actor.update(shard, plan, reference.TEMPERATURE, loss)
    grads, weights = shards(actor)
    return {"loaded": loaded, "grads": grads, "weights": weights}
