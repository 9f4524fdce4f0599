"""Worlds: groups of a layout, bytes from the leader, several layouts in one process; and the pool that runs them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool, JobError

from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.world import World, broadcast_bytes, create_world, destroy_world


def describe(world: World, data: bytes) -> dict[str, object]:
    groups = {
        name: dist.get_process_group_ranks(getattr(world, f"{name}_group"))
        for name in ("tp", "pp", "dp", "model_parallel", "replica")
    }
    mine = data + str(world.rank).encode() if world.is_leader else None
    got = [broadcast_bytes(world, mine), broadcast_bytes(world, b"" if world.is_leader else None)]
    return {**groups, "bytes": got, "place": str(world), "leader": world.leader}


@pytest.mark.dist
def test_groups_of_tp2_pp2(dist_pool: DistPool) -> None:
    ranks = dist_pool.run(describe, tp=2, pp=2, data=b"x" * 70_000)
    assert [r["tp"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["pp"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["dp"] for r in ranks] == [[0], [1], [2], [3]]
    assert all(r["model_parallel"] == r["replica"] == [0, 1, 2, 3] and r["leader"] == 2 for r in ranks)
    assert all(r["bytes"] == [b"x" * 70_000 + b"2", b""] for r in ranks)
    assert ranks[3]["place"] == "dp0 pp1 tp1"


@pytest.mark.dist
def test_each_replica_hears_its_own_leader_in_a_process_that_had_another_layout(dist_pool: DistPool) -> None:
    ranks = dist_pool.run(describe, pp=2, dp=2, data=b"")
    assert [r["replica"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["bytes"][0] for r in ranks] == [b"2", b"3", b"2", b"3"]
    assert [r["dp"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def fail_on_rank_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("broken on purpose")


def hang(world: World) -> None:
    time.sleep(60)


@pytest.mark.dist
def test_pool_reports_the_failing_rank_and_recovers(dist_pool: DistPool) -> None:
    with pytest.raises(JobError, match=r"(?s)dp0 pp0 tp1.*broken on purpose"):
        dist_pool.run(fail_on_rank_one, tp=2)
    start = time.monotonic()
    with pytest.raises(JobError, match=r"(?s)rank 0 did not answer within 1 s.*in hang"):
        dist_pool.run(hang, timeout_s=1)
    assert time.monotonic() - start < 60
    assert len(dist_pool.run(describe, dp=2, data=b"")) == 2


def test_one_rank_needs_no_launcher_and_worlds_can_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    cpu = torch.device("cpu")
    for is_default_group_ended in (False, True, True):
        world = create_world(Layout(1), cpu)
        assert broadcast_bytes(world, b"abc") == b"abc" and world.is_leader
        with pytest.raises(ValueError, match="has a world already"):
            create_world(Layout(1), cpu)
        destroy_world(is_default_group_ended)
        assert dist.is_initialized() is not is_default_group_ended
    destroy_world()


def test_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="needs 2 processes but RANK and WORLD_SIZE are not set"):
        create_world(Layout(2, tp=2), torch.device("cpu"))
