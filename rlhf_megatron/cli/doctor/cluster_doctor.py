"""`rlhf-megatron doctor --cluster`: started on every rank of a job by torchrun, it tells on which
node what differs.

    JOB=doctor NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun.sh --cluster
        [RUN.yaml] on each node

Ranks find each other as those of a run do, in the store of torchrun. Rank 0 prints; all end with
its exit code.
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

from rlhf_megatron.cli.doctor import node_probe
from rlhf_megatron.cli.doctor.cluster_rows import RankReport, make_cluster_rows
from rlhf_megatron.cli.doctor.trainer_rows import DoctorRow
from rlhf_megatron.config.cuda_environment import set_missing_variables
from rlhf_megatron.config.rules.run_rules import list_pool_layouts
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.device import choose_distributed_backend, select_rank_device
from rlhf_megatron.ranks.parallel.link_speed import measure_all_reduce_speed, measure_message_speed
from rlhf_megatron.runtime.torchrun.control_store import open_rendezvous_store
from rlhf_megatron.runtime.torchrun.torchrun_launcher import (
    is_under_torchrun,
)

WAIT_S = 120.0  # for the other ranks, and for a collective
NUM_BYTES_BY_DEVICE = {"cuda": 256 << 20, "cpu": 4 << 20}


def examine_cluster(
    args: argparse.Namespace, config: RunConfig | None, show_rows: Callable[[list[DoctorRow]], None]
) -> int:
    """Examine all nodes of a job; call this on all ranks. Rank 0 passes the rows to `show_rows`.
    Return 1 on every rank if something is broken on a node, else 0. Raise ValueError if torchrun
    did not start this process.
    """
    if not is_under_torchrun():
        raise ValueError(
            "--cluster looks at nodes from all ranks of a job; start it as a run: JOB=doctor"
            " launch/torchrun.sh --cluster on each node, or JOB=doctor sbatch"
            " launch/slurm.sbatch --cluster."
        )
    if config is not None:  # what a run sets before it takes CUDA and NCCL
        set_missing_variables(
            os.environ,
            config.trainer,
            config.rollout,
            [megatron for _, megatron, _ in list_pool_layouts(config)],
        )
    store = open_rendezvous_store("doctor", WAIT_S)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    folder = _find_existing_folder(Path(config.trainer.default_local_dir if config else "."))
    report = _examine_rank(
        _RankStore(store, rank, size), config.trainer.device if config else "auto", folder
    )
    store.set(f"report/{rank}", json.dumps(dataclasses.asdict(report)))
    if rank == 0:
        reports = [_parse_rank_report(bytes(store.get(f"report/{other}"))) for other in range(size)]
        wanted = config.trainer.nnodes * config.trainer.n_gpus_per_node if config else size
        rows = make_cluster_rows(reports, str(folder), wanted)
        show_rows(rows)
        store.set("code", str(int(any(row.state == "broken" for row in rows))))
    code = int(store.get("code"))
    # the store ends with node 0, so that waits for the others
    with contextlib.suppress(RuntimeError):
        _RankStore(store, rank, size).wait_for_all_ranks("end")
    return code


@dataclasses.dataclass(frozen=True)
class _RankStore:
    """A group of ranks (or of nodes) that share a store, and this process's number among them."""

    store: dist.Store
    rank: int
    num_ranks: int

    def wait_for_all_ranks(self, barrier_name: str) -> None:
        """Wait until all ranks have called this with the same name. Raise RuntimeError if one does
        not come in time.
        """
        self.store.set(f"{barrier_name}/{self.rank}", "")
        self.store.wait(
            [f"{barrier_name}/{other}" for other in range(self.num_ranks)],
            timedelta(seconds=WAIT_S),
        )


def _examine_rank(ranks: _RankStore, device_kind: Any, folder: Path) -> RankReport:
    """Return this rank's report: its device and software, on a node's first rank also the node's
    network, clock and folder, and speeds if every rank has a device. Call this on all ranks.
    """
    try:
        device = select_rank_device(device_kind, int(os.environ["LOCAL_RANK"]))
        why_no_device = ""
    except (ValueError, RuntimeError) as error:
        device = torch.device("cpu")
        why_no_device = str(error)
    report = RankReport(node_probe.collect_rank_facts(device), why_no_device)
    if report.facts.local_rank == 0:
        report = _add_node_findings(ranks.store, report, folder)
    ranks.wait_for_all_ranks("looked")
    is_one_device = all(not theirs for theirs in _gather_texts(ranks, "no device", why_no_device))
    return _add_measured_speeds(ranks, report, device) if is_one_device else report


def _gather_texts(ranks: _RankStore, key_prefix: str, text: str) -> list[str]:
    """Store a text of this rank, and return the texts of all ranks under this prefix in order of
    rank. Call this on all ranks of the store.
    """
    ranks.store.set(f"{key_prefix}/{ranks.rank}", text)
    return [
        bytes(ranks.store.get(f"{key_prefix}/{other}")).decode() for other in range(ranks.num_ranks)
    ]


def _add_node_findings(store: dist.Store, report: RankReport, folder: Path) -> RankReport:
    """Return the report with this node's findings: nodes that it cannot reach, its clock's offset,
    and whether the folder is shared. Call this on the first rank of each node.
    """
    here = report.facts.node
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if here == 0:
        store.set("token", uuid.uuid4().hex)
    token = bytes(store.get("token")).decode()
    address = (
        node_probe.find_own_address_towards(os.environ["MASTER_ADDR"])
        if num_nodes > 1
        else "127.0.0.1"
    )
    leaders = _RankStore(store, here, num_nodes)
    with (
        node_probe.serve_clock(address) as port,
        node_probe.leave_marker_file(folder, f".doctor-{token}-{here}") as why_not,
    ):
        places = _gather_texts(leaders, "place", f"{address} {port}")
        answers = node_probe.measure_clock_offsets(
            [(where, int(number)) for where, number in map(str.split, places)]
        )
        missing = node_probe.find_unseen_files(
            folder, [f".doctor-{token}-{other}" for other in range(num_nodes)]
        )
        leaders.wait_for_all_ranks("nodes looked")
    return dataclasses.replace(
        report,
        unreachable_nodes={str(other): why for other, (_, why) in enumerate(answers) if why},
        clock_offset_s=-(answers[0][0] or 0.0),
        folder_why_not=why_not,
        unseen_nodes=[int(name.rpartition("-")[2]) for name in missing],
    )


def _add_measured_speeds(ranks: _RankStore, report: RankReport, device: torch.device) -> RankReport:
    """Return the report with measured speeds in bytes a second: all-reduces within each node and
    over all ranks, and messages from each node to the next. Where a collective fails, return the
    reason instead. Call this on all ranks.
    """
    nodes = [int(text) for text in _gather_texts(ranks, "node", str(report.facts.node))]
    num_bytes = NUM_BYTES_BY_DEVICE[device.type]
    try:
        store = dist.PrefixStore("world", ranks.store)
        limit = timedelta(seconds=WAIT_S)
        dist.init_process_group(
            choose_distributed_backend(device),
            store=store,
            rank=ranks.rank,
            world_size=ranks.num_ranks,
            timeout=limit,
        )
        assert dist.group.WORLD is not None
        members = [
            [rank for rank in range(ranks.num_ranks) if nodes[rank] == number]
            for number in range(max(nodes) + 1)
        ]
        groups = [dist.new_group(of_node, timeout=limit) for of_node in members]
        in_node = (
            measure_all_reduce_speed(groups[report.facts.node], device, num_bytes)
            if len(groups) > 1
            else 0.0
        )
        over_all = (
            measure_all_reduce_speed(dist.group.WORLD, device, num_bytes)
            if ranks.num_ranks > 1
            else 0.0
        )
        to_next = 0.0
        for number, of_node in enumerate(members if len(members) > 1 else ()):
            next_node = members[(number + 1) % len(members)]
            found = measure_message_speed(of_node[0], next_node[0], device, num_bytes)
            to_next = found if ranks.rank == of_node[0] else to_next
            ranks.wait_for_all_ranks(f"message {number}")
        dist.destroy_process_group()
    except RuntimeError as error:
        return dataclasses.replace(report, speed_why_not=str(error).splitlines()[0])
    return dataclasses.replace(
        report, node_bytes_per_s=in_node, world_bytes_per_s=over_all, next_node_bytes_per_s=to_next
    )


def _find_existing_folder(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists, as an absolute path."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _parse_rank_report(text: bytes) -> RankReport:
    """Return the report that another rank stored as JSON."""
    values = json.loads(text)
    return RankReport(**{**values, "facts": node_probe.RankFacts(**values["facts"])})
