"""Two pools in one job under torchrun, with the toy roles of runtime_toy.py; and which
ranks are whose.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_samples import VALID
from runtime_tools import Start, toy_runs

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.runtime.rank_pools import PoolSpec, build_pool_specs, find_pool_of_rank

TWO_POOLS = "3,1,1+2,2,1"  # three replicas; one of two ranks


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with toy_runs(tmp_path) as begin:
        yield begin


@pytest.mark.dist
def test_calls_go_to_the_pool_that_has_the_role_and_pools_run_at_the_same_time(
    start: Start,
) -> None:
    """The first call of each pool waits inside for the other's."""
    run = start("two_pools", TWO_POOLS)
    assert run.wait() == 0, run.console()
    result = json.loads((run.directory / "result.json").read_text())
    assert result["met"] == [[1, 1, 1], [1, 1]], "the first call on every rank"
    loss = 0 + 2 + 6 + 12 + 20 + 30 + 42
    assert result["updates"] == [[loss, 1 + 2 + 3], [loss, 1 + 2]], (
        "collectives end at the pool's border"
    )
    assert result["log_probs"] == [3.0 * i for i in range(7) for _ in range(i + 1)]
    actor = [f"[actor dp{dp} pp0 tp0]" for dp in range(3)]
    critic = [f"[critic dp0 pp0 tp{tp}]" for tp in range(2)]
    assert result["places"] == [
        *(f"{name} x 3 of rank {rank}" for rank, name in enumerate(actor)),
        *(f"{name} x 4 of rank {rank}" for rank, name in enumerate(critic, 3)),
    ], "each had run the calls made to its own pool before"
    assert result["statuses"] == [*actor, *critic]
    assert (result["layout"], result["layouts"]) == (
        "tp1 pp1 dp3",
        {"actor": "tp1 pp1 dp3", "critic": "tp2 pp1 dp1"},
    )
    assert all((run.directory / f"closed{rank}").exists() for rank in range(5))
    run.assert_no_orphans(6)


@pytest.mark.dist
def test_a_killed_rank_of_the_critic_ends_both_pools_and_is_named(start: Start) -> None:
    run = start("kill_the_critic", "1,1,1+2,2,1")
    assert run.wait() != 0
    assert "HostLostError: [critic dp0 pp0 tp1] (process " in run.console()
    assert "died during critic.kill_on" in run.console()
    run.assert_no_orphans(4)


@pytest.mark.dist
def test_a_critic_that_cannot_be_built_ends_the_actor_that_is_being_built(start: Start) -> None:
    run = start("build", "1,1,1+2,1,2")
    assert run.wait() == 3
    assert (
        "HostCallValueError: [critic dp0 pp1 tp0] building roles: no weights in model.path."
        in run.console()
    )
    assert "Traceback" not in run.console() and "no weights in model.path" in run.log(2), (
        "by the number in the job"
    )
    run.assert_no_orphans(4)


@pytest.mark.dist
def test_a_late_call_tells_what_the_hosts_of_both_pools_do(start: Start) -> None:
    run = start("late_critic", "1,1,1+2,2,1")
    assert run.wait() != 0
    lines = run.console().splitlines()
    lines = lines[
        lines.index(
            "HostTimeoutError: critic.hang was not finished within 2 s"
            " (trainer.stage_timeout_s). The hosts:"
        ) :
    ]
    heads = {line.split("]")[0].strip() + "]": line for line in lines if line.startswith("  [")}
    assert heads.keys() == {"[actor dp0 pp0 tp0]", "[critic dp0 pp0 tp0]", "[critic dp0 pp0 tp1]"}
    assert "no call: waiting for a call" in heads["[actor dp0 pp0 tp0]"]
    assert heads["[critic dp0 pp0 tp0]"].endswith("in barrier")
    run.assert_no_orphans(4)


CRITIC = """
algorithm: {adv_estimator: gae}
critic: {num_ranks: 4, megatron: {tensor_model_parallel_size: 2}}
"""
TWO = ["actor tp2 pp2 dp1 on 4 ranks", "critic tp2 pp1 dp2 on 4 ranks"]
ONE = ["actor tp2 pp2 dp2 on 8 ranks"]


@pytest.mark.parametrize(
    ("more", "override", "expected"),
    [
        ("", "algorithm.adv_estimator=grpo", ONE),
        ("", "algorithm.adv_estimator=gae", ONE),
        (CRITIC, "trainer.seed=2", TWO),
        (CRITIC, "critic.num_ranks=0", ONE),
        (CRITIC, "algorithm.adv_estimator=grpo", ONE),
    ],
)
def test_pools_of_a_configuration(
    more: str, override: str, expected: list[str], tmp_path: Path
) -> None:
    """The last two: the file has a critic with a pool of its own, and a later word has none."""
    file = tmp_path / "run.yaml"
    file.write_text(VALID + more)
    pools = build_pool_specs(load_run_config(file, [override], with_files=False).config)
    assert [str(pool) for pool in pools] == expected
    assert [pool.first_rank for pool in pools] == [0, 4][: len(pools)]
    owners: list[PoolSpec] = [find_pool_of_rank(pools, rank) for rank in range(8)]
    assert [pool.name for pool in owners] == (
        ["actor"] * 4 + ["critic"] * 4 if len(pools) > 1 else ["actor"] * 8
    )
