"""Worlds: groups of a layout, several layouts in one process; and the pool that runs them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool, JobError

from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.parallel_layout import ParallelLayout


def describe(world: World) -> dict[str, object]:
    groups = {
        name: dist.get_process_group_ranks(getattr(world, f"{name}_group"))
        for name in ("tp", "pp", "cp", "dp", "dp_cp", "model_parallel")
    }
    return {**groups, "place": str(world), "leader": world.leader_rank}


@pytest.mark.dist
def test_groups_of_tp2_pp2(dist_pool: DistPool) -> None:
    ranks = dist_pool.run(describe, tp=2, pp=2)
    assert [r["tp"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["pp"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["dp"] for r in ranks] == [[0], [1], [2], [3]]
    assert all(r["model_parallel"] == [0, 1, 2, 3] and r["leader"] == 2 for r in ranks)
    assert ranks[3]["place"] == "dp0 pp1 tp1"


@pytest.mark.dist
def test_each_replica_has_its_own_leader_in_a_process_that_had_another_layout(
    dist_pool: DistPool,
) -> None:
    ranks = dist_pool.run(describe, pp=2, dp=2)
    assert [r["model_parallel"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["leader"] for r in ranks] == [2, 3, 2, 3]
    assert [r["dp"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.dist
def test_context_parallel_ranks_lie_within_a_replica(dist_pool: DistPool) -> None:
    ranks = dist_pool.run(describe, cp=2, dp=2)
    assert [r["cp"] for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp"] for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["leader"] for r in ranks] == [0, 0, 2, 2]
    assert all(r["dp_cp"] == [0, 1, 2, 3] and len(r["model_parallel"]) == 1 for r in ranks)
    assert [r["place"] for r in ranks] == [
        "dp0 pp0 tp0",
        "dp0 pp0 cp1 tp0",
        "dp1 pp0 tp0",
        "dp1 pp0 cp1 tp0",
    ]


@pytest.mark.dist
def test_virtual_stages_are_stages_of_the_same_groups(dist_pool: DistPool) -> None:
    ranks = dist_pool.run(describe, pp=2, vpp=2)
    assert [r["pp"] for r in ranks] == [[0, 1], [0, 1]]
    assert [r["leader"] for r in ranks] == [1, 1]


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
    assert len(dist_pool.run(describe, dp=2)) == 2


def test_one_rank_needs_no_launcher_and_worlds_can_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    cpu = torch.device("cpu")
    for is_default_group_ended in (False, True, True):
        world = create_world(ParallelLayout(1), cpu)
        assert world.is_leader
        with pytest.raises(ValueError, match="has a world already"):
            create_world(ParallelLayout(1), cpu)
        destroy_world(is_default_group_ended)
        assert dist.is_initialized() is not is_default_group_ended
    destroy_world()


def test_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="needs 2 processes but RANK and WORLD_SIZE are not set"):
        create_world(ParallelLayout(2, tp=2), torch.device("cpu"))
