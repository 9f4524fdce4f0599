"""`rlhf-megatron doctor --cluster`: started on every rank of a job by torchrun, it tells on which node what differs.

    JOB=doctor NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun.sh --cluster [RUN.yaml]        on each node

Ranks find each other as those of a run do, in the store of torchrun. Rank 0 prints; all end with its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.cli.doctor import node
from rlhf_megatron.cli.doctor.cluster_rows import RankReport, cluster_rows
from rlhf_megatron.cli.doctor.rows import Row
from rlhf_megatron.config.rules.run import megatron_sections
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.parallel.device import backend, device_for
from rlhf_megatron.parallel.environment import set_up
from rlhf_megatron.parallel.link_speed import all_reduce_speed, message_speed
from rlhf_megatron.runtime.torchrun.launcher import is_under_torchrun, rendezvous_store

WAIT_S = 120.0  # for the other ranks, and for a collective
NUM_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}


def examine(args: argparse.Namespace, config: RunConfig | None, show: Callable[[list[Row]], None]) -> int:
    """All ranks. Returns 1 where something is broken on a node, else 0. Raises ValueError without a launcher."""
    if not is_under_torchrun():
        raise ValueError(
            "--cluster looks at nodes from all ranks of a job; start it as a run: JOB=doctor launch/torchrun.sh"
            " --cluster on each node, or JOB=doctor sbatch launch/slurm.sbatch --cluster."
        )
    if config is not None:  # what a run sets before it takes CUDA and NCCL
        set_up(os.environ, config.trainer, config.rollout, [megatron for _, megatron, _ in megatron_sections(config)])
    store = rendezvous_store("doctor", WAIT_S)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = _existing(Path(config.trainer.default_local_dir if config else "."))
    report = _report(_Ranks(store, rank, size), config.trainer.device if config else "auto", folder)
    store.set(f"report/{rank}", json.dumps(dataclasses.asdict(report)))
    if rank == 0:
        reports = [_read(bytes(store.get(f"report/{other}"))) for other in range(size)]
        wanted = config.trainer.nnodes * config.trainer.n_gpus_per_node if config else size
        rows = cluster_rows(reports, str(folder), wanted)
        show(rows)
        store.set("code", str(int(any(row.state == "broken" for row in rows))))
    code = int(store.get("code"))
    with contextlib.suppress(RuntimeError):  # the store ends with node 0, so that waits for the others
        _Ranks(store, rank, size).meet("end")
    return code


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """All ranks, as the store joins them."""

    store: dist.Store
    rank: int
    size: int

    def meet(self, place: str) -> None:
        """Returns when all are there. Raises RuntimeError when one does not come."""
        self.store.set(f"{place}/{self.rank}", "")
        self.store.wait([f"{place}/{other}" for other in range(self.size)], timedelta(seconds=WAIT_S))


def _report(ranks: _Ranks, kind: Any, folder: Path) -> RankReport:
    try:
        device, why_no_device = device_for(kind, int(os.environ["LOCAL_RANK"])), ""
    except (ValueError, RuntimeError) as error:
        device, why_no_device = torch.device("cpu"), str(error)
    report = RankReport(node.rank_facts(device), why_no_device)
    if report.facts.local_rank == 0:
        report = _of_node(ranks.store, report, folder)
    ranks.meet("looked")
    is_one_device = all(not theirs for theirs in _share(ranks, "no device", why_no_device))
    return _with_speeds(ranks, report, device) if is_one_device else report


def _share(ranks: _Ranks, name: str, text: str) -> list[str]:
    """Collect what every rank says under this name. Call on all ranks."""
    ranks.store.set(f"{name}/{ranks.rank}", text)
    return [bytes(ranks.store.get(f"{name}/{other}")).decode() for other in range(ranks.size)]


def _of_node(store: dist.Store, report: RankReport, folder: Path) -> RankReport:
    """The first rank of each node: who can be reached, how clocks differ, whether the folder is one."""
    here, num_nodes = report.facts.node, int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if here == 0:
        store.set("token", uuid.uuid4().hex)
    token = bytes(store.get("token")).decode()
    address = node.own_address(os.environ["MASTER_ADDR"]) if num_nodes > 1 else "127.0.0.1"
    leaders = _Ranks(store, here, num_nodes)
    with node.answering(address) as port, node.left_in(folder, f".doctor-{token}-{here}") as why_not:
        places = _share(leaders, "place", f"{address} {port}")
        answers = node.ask_all([(where, int(number)) for where, number in map(str.split, places)])
        missing = node.not_seen(folder, [f".doctor-{token}-{other}" for other in range(num_nodes)])
        leaders.meet("nodes looked")
    return dataclasses.replace(
        report,
        unreachable={str(other): why for other, (_, why) in enumerate(answers) if why},
        clock_s=-(answers[0][0] or 0.0),
        folder_why_not=why_not,
        unseen=[int(name.rpartition("-")[2]) for name in missing],
    )


def _with_speeds(ranks: _Ranks, report: RankReport, device: torch.device) -> RankReport:
    """All ranks: sums within each node and over all, messages from each node to the next."""
    nodes = [int(text) for text in _share(ranks, "node", str(report.facts.node))]
    num_bytes = NUM_BYTES[device.type]
    try:
        store = dist.PrefixStore("world", ranks.store)
        limit = timedelta(seconds=WAIT_S)
        dist.init_process_group(backend(device), store=store, rank=ranks.rank, world_size=ranks.size, timeout=limit)
        assert dist.group.WORLD is not None
        members = [[rank for rank in range(ranks.size) if nodes[rank] == number] for number in range(max(nodes) + 1)]
        groups = [dist.new_group(of_node, timeout=limit) for of_node in members]
        in_node = all_reduce_speed(groups[report.facts.node], device, num_bytes) if len(groups) > 1 else 0.0
        over_all = all_reduce_speed(dist.group.WORLD, device, num_bytes) if ranks.size > 1 else 0.0
        to_next = 0.0
        for number, of_node in enumerate(members if len(members) > 1 else ()):
            next_node = members[(number + 1) % len(members)]
            found = message_speed(of_node[0], next_node[0], device, num_bytes)
            to_next = found if ranks.rank == of_node[0] else to_next
            ranks.meet(f"message {number}")
        dist.destroy_process_group()
    except RuntimeError as error:
        return dataclasses.replace(report, speed_why_not=str(error).splitlines()[0])
    return dataclasses.replace(report, in_node=in_node, over_all=over_all, to_next=to_next)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _read(text: bytes) -> RankReport:
    values = json.loads(text)
    return RankReport(**{**values, "facts": node.RankFacts(**values["facts"])})
