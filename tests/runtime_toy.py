"""A program for tests/test_runtime_torchrun.py: hosts with a toy role, and a controller that runs one scenario.

python -m runtime_toy launch SCENARIO NUM_RANKS TP PP DIRECTORY     (in tests/)
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.data.batch import LogProbs, TokenBatch, gain
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.pool import Pool
from rlhf_megatron.runtime.remote import RemoteGroup
from rlhf_megatron.runtime.torchrun import Deadlines, launch_single_node, run_controller, run_host
from rlhf_megatron.workers.contract import UpdateResult

CALL_TIMEOUT_S = 2.0


class Toy:
    """A role that needs torch only."""

    def __init__(self, pool: Pool, directory: Path) -> None:
        self.pool = pool
        self.directory = directory
        self.num_calls = 0

    def log_probs(self, batch: TokenBatch, plan: ReplicaPlan, scale: float) -> LogProbs | None:
        """scale x token; checks on the way that all ranks of the replica have the same shard."""
        self.num_calls += 1
        total = batch.token_ids.sum()
        dist.all_reduce(total, group=self.pool.replica_group)
        assert total == batch.token_ids.sum() * self.pool.replica_group.size()
        return gain(LogProbs, batch, log_probs=batch.token_ids * scale)

    def update(self, batch: TokenBatch, plan: ReplicaPlan) -> UpdateResult:
        """The loss is the sum of this replica's tokens; the norm, the sum over all ranks of the rank's number."""
        self.num_calls += 1
        norm = torch.tensor(float(self.pool.rank))
        dist.all_reduce(norm)
        return UpdateResult({"loss": float(batch.token_ids.sum())}, float(norm), lr=0.5, is_skipped=False)

    def place(self, note: str) -> str:
        self.num_calls += 1
        return f"{self.pool.where} {note} {self.num_calls}"

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

    def close(self) -> None:
        (self.directory / f"closed{self.pool.rank}").touch()


def batch_of(num_samples: int) -> TokenBatch:
    """Sample i has i + 1 tokens of value i."""
    lengths = torch.arange(num_samples) + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.repeat_interleave(torch.arange(num_samples), lengths)
    return TokenBatch(offsets=offsets, token_ids=tokens, response_mask=torch.ones_like(tokens, dtype=torch.bool))


def run_scenario(name: str, group: RemoteGroup, directory: Path) -> int:
    if name == "values":
        batch = batch_of(7)
        futures = [group.scatter("toy.log_probs", batch, token_budget=12, scale=scale) for scale in (0.5, 2.0)]
        update = group.scatter("toy.update", batch, token_budget=12)
        places = group.broadcast("toy.place", note="x")
        single = group.scatter("toy.log_probs", batch_of(1), token_budget=12, scale=1.0)
        statuses = group.statuses()
        result = {
            "log_probs": [future.result().log_probs.tolist() for future in futures],
            "update": [update.result().sums["loss"], update.result().grad_norm],
            "places": places.result(),
            "single": single.result().log_probs.tolist(),
            "statuses": [s.where for s in statuses.values() if s is not None],
        }
        (directory / "result.json").write_text(json.dumps(result))
    elif name == "raise":
        group.broadcast("toy.fail_on", rank=1).result()
    elif name == "kill":
        group.broadcast("toy.kill_on", rank=1).result()
    elif name == "hang":
        group.broadcast("toy.hang", sleeper=1, stopped=2).result()
    elif name == "exit7":
        return 7
    elif name == "busy":  # rank 0 in a collective, rank 1 asleep
        future = group.broadcast("toy.hang", sleeper=1, stopped=-1)
        inherited = [variable for variable in os.environ if variable.startswith(("RLHF_MEGATRON", "TORCHELASTIC"))]
        (directory / "ready").write_text(json.dumps(inherited))
        future.result()
    else:
        raise AssertionError(f"no scenario {name}")
    return 0


def main(command: str, scenario: str, num_ranks: str, tp: str, pp: str, directory: str) -> int:
    arguments = [scenario, num_ranks, tp, pp, directory]
    layout = Layout(int(num_ranks), int(tp), int(pp))
    place = Path(directory)
    deadlines = Deadlines(startup_s=60, call_s=CALL_TIMEOUT_S if scenario == "hang" else 60)
    if command == "launch":
        launch_single_node(["host", *arguments], int(num_ranks), module="runtime_toy")
    if command == "host":
        (place / f"host{os.environ['RANK']}.pid").write_text(str(os.getpid()))

        def build_roles(pool: Pool) -> dict[str, object]:
            if scenario == "build" and pool.rank == 1:
                raise ValueError("no weights in model.path.")
            return {"toy": Toy(pool, place)}

        return run_host(build_roles, layout, ["-m", "runtime_toy", "controller", *arguments], place / "logs", deadlines)
    (place / "controller.pid").write_text(str(os.getpid()))
    try:
        return run_controller(lambda group: run_scenario(scenario, group, place), layout, deadlines)
    except (ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
