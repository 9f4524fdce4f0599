"""A program for the tests of the launchers: hosts with toy roles, and a controller that
runs one scenario.

python -m runtime_toy launch SCENARIO POOLS DIRECTORY     (in tests/), under torchrun
python -m runtime_toy ray SCENARIO POOLS DIRECTORY        under Ray, in the cluster RAY_ADDRESS or
                                                          one of its own

POOLS: ranks, tp and pp of the actor's pool, as "4,1,2"; with one for the critic "2,2,1+2,1,1". The
actor's pool has the role "toy"; the critic's, or the actor's where there is none, the
role "critic".
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from end_to_end_tools import MARKER

from rlhf_megatron.controller.recovery.stage_watchdog import StageWatchdog
from rlhf_megatron.data.batch import TokenBatch, TokenLogProbs
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.rollout.fleet.server_process import ServerProcess
from rlhf_megatron.runtime.host_control import RunDeadlines
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.rank_pools import ACTOR, CRITIC, PoolMember, PoolSpec
from rlhf_megatron.runtime.routed_worker_group import RoutedWorkerGroup
from rlhf_megatron.runtime.torchrun.torchrun_launcher import (
    launch_single_node,
    run_torchrun_controller,
    run_torchrun_host,
)
from rlhf_megatron.stop import STOPPED_EXIT_CODE, StopRequest
from rlhf_megatron.weights.parallel_layout import ParallelLayout

CALL_TIMEOUT_S = 2.0
STOP_GRACE_S = {"busy": 1.5}  # of a scenario; others have plenty
MEET_TIMEOUT_S = 40.0
MACHINES = "RUNTIME_TOY_MACHINES"  # of a Ray run


class Toy:
    """A role that needs torch only."""

    def __init__(self, pool: PoolMember, directory: Path) -> None:
        self.pool = pool
        self.directory = directory
        self.num_calls = 0

    def log_probs(self, batch: TokenBatch, plan: ReplicaPlan, scale: float) -> TokenLogProbs | None:
        """scale x token; checks on the way that all ranks of the replica have the same shard."""
        self.num_calls += 1
        total = batch.token_ids.sum()
        dist.all_reduce(total, group=self.pool.replica_group)
        assert total == batch.token_ids.sum() * self.pool.replica_group.size()
        return TokenLogProbs(batch.token_ids * scale)

    def update(self, batch: TokenBatch, plan: ReplicaPlan) -> UpdateResult:
        """The loss is the sum of this replica's tokens; the norm, the sum over the pool's ranks of
        1 + their number.
        """
        self.num_calls += 1
        norm = torch.tensor(1.0 + self.pool.rank)
        dist.all_reduce(norm)
        return UpdateResult(
            {"loss": float(batch.token_ids.sum())}, float(norm), lr=0.5, is_skipped=False
        )

    def place(self, note: str) -> str:
        self.num_calls += 1
        return (
            f"{self.pool.rank_label} {note} {self.num_calls} of"
            f" rank {os.environ.get('RANK', self.pool.rank)}"
        )

    def meet(self, mine: str, other: str) -> int:
        """Returns when the ranks of another call are in it as well: that of `other`, which
        waits for `mine`.
        """
        self.num_calls += 1
        (self.directory / f"{mine}{self.pool.rank}").touch()
        deadline = time.monotonic() + MEET_TIMEOUT_S
        while not (self.directory / f"{other}0").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{mine} is here alone.")
            time.sleep(0.02)
        dist.barrier()
        return self.num_calls

    def fail_on(self, rank: int) -> None:
        if self.pool.rank == rank:
            raise RuntimeError(f"tensor w{rank} is missing.")
        dist.barrier()

    def kill_on(self, rank: int) -> None:
        if self.pool.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def hang(self, sleeper: int, stopped: int) -> None:
        if self.pool.rank == sleeper:
            time.sleep(600)
        if self.pool.rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)
        dist.barrier()

    def close(self) -> None:
        (self.directory / f"closed{os.environ.get('RANK', self.pool.rank)}").touch()


def batch_of(num_samples: int) -> TokenBatch:
    """Sample i has i + 1 tokens of value i."""
    lengths = torch.arange(num_samples) + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.repeat_interleave(torch.arange(num_samples), lengths)
    return TokenBatch(
        offsets=offsets, token_ids=tokens, response_mask=torch.ones_like(tokens, dtype=torch.bool)
    )


def values(group: RoutedWorkerGroup) -> dict[str, object]:
    batch = batch_of(7)
    futures = [
        group.scatter_call("toy.log_probs", batch, token_budget=12, scale=scale)
        for scale in (0.5, 2.0)
    ]
    update = group.scatter_call("toy.update", batch, token_budget=12)
    places = group.broadcast_call("toy.place", note="x")
    single = group.scatter_call("toy.log_probs", batch_of(1), token_budget=12, scale=1.0)
    statuses = group.query_statuses()
    return {
        "log_probs": [future.result().log_probs.tolist() for future in futures],
        "update": [update.result().sums["loss"], update.result().grad_norm],
        "places": places.result(),
        "single": single.result().log_probs.tolist(),
        "statuses": [s.rank_label for s in statuses.values() if s is not None],
    }


def two_pools(group: RoutedWorkerGroup) -> dict[str, object]:
    batch = batch_of(7)
    met = [
        group.broadcast_call("toy.meet", mine="a", other="b"),
        group.broadcast_call("critic.meet", mine="b", other="a"),
    ]
    updates = [
        group.scatter_call(f"{role}.update", batch, token_budget=12) for role in ("toy", "critic")
    ]
    log_probs = group.scatter_call("critic.log_probs", batch, token_budget=12, scale=3.0)
    places = [group.broadcast_call(f"{role}.place", note="x") for role in ("toy", "critic")]
    statuses = group.query_statuses()
    return {
        "met": [future.result() for future in met],
        "log_probs": log_probs.result().log_probs.tolist(),
        "updates": [
            [future.result().sums["loss"], future.result().grad_norm] for future in updates
        ],
        "places": [place for future in places for place in future.result()],
        "statuses": [s.rank_label for s in statuses.values() if s is not None],
        "layout": str(group.layout),
        "layouts": {name: str(layout) for name, layout in group.layouts.items()},
    }


def kill_the_critic(group: RoutedWorkerGroup) -> dict[str, object]:
    """While the actor's pool is in a call that would not end."""
    pending = group.broadcast_call("toy.hang", sleeper=0, stopped=-1)
    lost = group.broadcast_call("critic.kill_on", rank=1)
    start = time.monotonic()
    errors = []
    for future in (pending, lost):
        try:
            future.result()
        except HostError as error:
            errors.append(error)
    assert len(errors) == 2 and errors[0] is errors[1], "one error, on both pools"
    assert time.monotonic() - start < 300, "without waiting for the call that would not end"
    raise errors[0]


def stop_between_calls(group: RoutedWorkerGroup, directory: Path, stop: StopRequest) -> int:
    """What a loop does: it looks at `stop` between calls,
    and "saves" on the hosts before it ends.
    """
    (directory / "ready").touch()
    while not stop.is_requested:
        group.broadcast_call("toy.nap", seconds=1.0).result()
    group.broadcast_call("toy.place", note="saved").result()
    (directory / "reason").write_text(stop.reason)
    return STOPPED_EXIT_CODE


def late_stage(group: RoutedWorkerGroup, directory: Path) -> int:
    """Rank 0 waits in a collective, rank 1 sleeps, rank 2's process is stopped; the calls
    themselves have a minute.
    """
    with StageWatchdog(60.0, {"update": 1.5}, directory) as watchdog:
        watchdog.set_report_sources(group, lambda: ["12:00:00 engine0 generate: 0.25 s"])
        with watchdog("score"):
            group.broadcast_call("toy.place", note="x").result()
        with watchdog("update"):
            group.broadcast_call("toy.hang", sleeper=1, stopped=2).result()
    return 0


def run_scenario(name: str, group: RoutedWorkerGroup, directory: Path, stop: StopRequest) -> int:
    if name in ("values", "two_pools"):
        (directory / "result.json").write_text(
            json.dumps(values(group) if name == "values" else two_pools(group))
        )
    elif name == "kill_the_critic":
        kill_the_critic(group)
    elif name == "raise":
        group.broadcast_call("toy.fail_on", rank=1).result()
    elif name == "kill":
        group.broadcast_call("toy.kill_on", rank=1).result()
    elif name == "hang":
        group.broadcast_call("toy.hang", sleeper=1, stopped=2).result()
    elif name == "late_critic":
        group.broadcast_call("critic.hang", sleeper=1, stopped=-1).result()
    elif name == "exit7":
        return 7
    elif name == "late_stage":
        return late_stage(group, directory)
    elif name == "stop":
        return stop_between_calls(group, directory, stop)
    elif name in (
        "busy",
        "endless",
    ):  # an engine that ignores SIGTERM, with a child; rank 0 in a collective, rank 1 asleep
        stubborn = ["sh", "-c", "trap '' TERM; sleep 600 & sleep 600"]
        engine = ServerProcess("engine0", stubborn, directory / "engine0.log", {})
        future = group.broadcast_call("toy.hang", sleeper=1, stopped=-1)
        inherited = [
            name
            for name in os.environ
            if name.startswith(("RLHF_MEGATRON", "TORCHELASTIC"))
            and name not in (MARKER, "RLHF_MEGATRON_FORKS")
        ]
        (directory / "ready").write_text(json.dumps(inherited))
        try:
            future.result()
        finally:
            engine.stop()
    else:
        raise AssertionError(f"no scenario {name}")
    return 0


def pools_of_text(text: str) -> tuple[PoolSpec, ...]:
    layouts = [ParallelLayout(*map(int, pool.split(","))) for pool in text.split("+")]
    first_ranks = (0, layouts[0].world_size)
    named = zip((ACTOR, CRITIC), layouts, first_ranks, strict=False)
    return tuple(PoolSpec(name, layout, first) for name, layout, first in named)


def make_roles(
    scenario: str, names: Sequence[str], directory: Path, pool: PoolMember, is_marked: bool = False
) -> dict[str, object]:
    """`names`: of the job's pools. `is_marked`: this process is to be found by its number."""
    if is_marked:
        (directory / f"host{pool.rank}.pid").write_text(str(os.getpid()))
    if scenario == "build" and pool.rank == 1 and pool.pool_name == names[-1]:
        raise ValueError("no weights in model.path.")
    if scenario == "build" and len(names) > 1 and pool.pool_name == ACTOR:
        time.sleep(600)  # a large model
    places = {"toy": ACTOR, "critic": names[-1]}
    return {role: Toy(pool, directory) for role, name in places.items() if name == pool.pool_name}


def under_ray(
    scenario: str, pools: Sequence[PoolSpec], directory: Path, deadlines: RunDeadlines
) -> int:
    from runtime_toy import make_roles as make  # as ranks import it: this module is __main__ here

    from rlhf_megatron.config.schema import RayConfig, RolloutConfig, TrainerConfig
    from rlhf_megatron.runtime.ray.ray_driver import RayJob, run_ray_driver

    num_cpus = 1e6 if scenario == "no_room" else 0.1
    nnodes = int(os.environ.get(MACHINES, "1"))
    trainer = TrainerConfig(
        runtime="ray", nnodes=nnodes, n_gpus_per_node=pools[-1].end_rank // nnodes, device="cpu"
    )
    ray = RayConfig(num_cpus_per_rank=num_cpus, start_timeout_s=5.0, placement="spread")
    build = partial(make, scenario, [pool.name for pool in pools], directory, is_marked=True)
    stop = StopRequest()
    job = RayJob(
        trainer,
        ray,
        RolloutConfig(),
        None,
        (),
        pools,
        build,
        directory / "logs",
        deadlines,
        has_engines=False,
    )
    return run_ray_driver(
        lambda group, place: run_scenario(scenario, group, directory, stop), job, stop
    )


def main(command: str, scenario: str, pools_text: str, directory: str) -> int:
    arguments = [scenario, pools_text, directory]
    pools = pools_of_text(pools_text)
    place = Path(directory)
    call_s = CALL_TIMEOUT_S if scenario in ("hang", "late_critic") else 600
    deadlines = RunDeadlines(startup_s=300, call_s=call_s, stop_s=STOP_GRACE_S.get(scenario, 600.0))
    if command == "launch":
        launch_single_node(["host", *arguments], pools[-1].end_rank, module="runtime_toy")
    if command == "host":
        (place / f"host{os.environ['RANK']}.pid").write_text(str(os.getpid()))
        build_roles = partial(make_roles, scenario, [pool.name for pool in pools], place)
        return run_torchrun_host(
            build_roles,
            pools,
            ["-m", "runtime_toy", "controller", *arguments],
            place / "logs",
            deadlines,
        )
    (place / "controller.pid").write_text(str(os.getpid()))
    try:
        if command == "ray":
            return under_ray(scenario, pools, place, deadlines)
        stop = StopRequest()
        return run_torchrun_controller(
            lambda group: run_scenario(scenario, group, place, stop), pools, deadlines, stop
        )
    except (ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
