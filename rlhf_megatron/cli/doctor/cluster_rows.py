"""What ranks told of their nodes, as rows of the doctor's table: differences and slow
nodes are named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.cli.doctor.node_probe import GIB, RankFacts
from rlhf_megatron.cli.doctor.trainer_rows import DoctorRow, PathState

MAX_CLOCK_OFFSET_S = 1.0  # certificates, file times and traces bear as much
MAX_IDLE_DEVICE_BYTES = 2 * GIB  # of a device that nobody else works on: contexts of CUDA
MIN_SPEED_SHARE = 0.6  # of the median
VALUES_THAT_MUST_AGREE = (
    "device",
    "torch",
    "NCCL",
    "driver",
    "python",
    "megatron-core",
    "transformers",
    "rlhf-megatron",
)


@dataclass(frozen=True)
class RankReport:
    """The findings of one rank. Only the first rank of a node reports on the node:
    `unreachable_nodes`, `clock_offset_s`, `folder_why_not`, `unseen_nodes`. Speeds in bytes a
    second; 0.0: not measured.
    """

    facts: RankFacts
    why_no_device: str = ""
    unreachable_nodes: Mapping[str, str] = field(default_factory=dict)  # node -> why
    clock_offset_s: float = 0.0  # ahead of node 0's
    folder_why_not: str = ""
    unseen_nodes: Sequence[int] = ()  # nodes whose file does not appear in the shared folder
    node_bytes_per_s: float = 0.0
    world_bytes_per_s: float = 0.0
    next_node_bytes_per_s: float = 0.0  # of the first rank to the first rank of the next node
    speed_why_not: str = ""


def make_cluster_rows(
    reports: Sequence[RankReport], folder: str, num_ranks: int
) -> list[DoctorRow]:
    """Return the rows on all nodes: ranks, devices, differences, ports, clocks, shared folder and
    speeds. `reports` are in order of rank, `folder` is the folder that all nodes must see, and
    `num_ranks` is the number of ranks that the run needs.
    """
    leaders = [report for report in reports if report.facts.local_rank == 0]
    return [
        _make_ranks_row(reports, num_ranks),
        *_make_device_problem_rows(reports),
        *_make_uniformity_rows(reports),
        _make_ports_row(leaders),
        _make_clocks_row(leaders),
        _make_shared_folder_row(leaders, folder),
        *_make_speed_rows(reports, leaders),
    ]


def format_node_names(facts: Iterable[RankFacts]) -> str:
    """Return the nodes of these ranks in words, each once: "node 1 (gpu-b), node 3 (gpu-d)"."""
    found = {one.node: one.host_name for one in facts}
    return ", ".join(f"node {number} ({found[number]})" for number in sorted(found))


def _make_ranks_row(reports: Sequence[RankReport], num_ranks: int) -> DoctorRow:
    """Return the row on the number of ranks; broken if the run needs another number."""
    num_nodes = len({report.facts.node for report in reports})
    taken = f"{len(reports)} on {num_nodes} node(s)"
    if len(reports) == num_ranks:
        return DoctorRow("cluster", "ranks", "live", taken)
    why = f"trainer.nnodes x trainer.n_gpus_per_node is {num_ranks}"
    return DoctorRow(
        "cluster",
        "ranks",
        "broken",
        taken,
        why,
        "change NNODES x NPROC_PER_NODE, or these settings",
    )


def _make_device_problem_rows(reports: Sequence[RankReport]) -> list[DoctorRow]:
    """Return rows on devices that are missing, shared by ranks, or used by other processes; an
    empty list if there is no problem.
    """
    missing = [report for report in reports if report.why_no_device]
    if missing:
        why = missing[0].why_no_device
        return [
            DoctorRow(
                "cluster",
                "devices",
                "broken",
                format_node_names(r.facts for r in missing),
                why,
                "nvidia-smi on that node",
            )
        ]
    rows = []
    holders: dict[str, list[RankFacts]] = {}
    for report in reports:
        if report.facts.device_id:
            holders.setdefault(report.facts.device_id, []).append(report.facts)
    shared = [ranks for ranks in holders.values() if len(ranks) > 1]
    if shared:
        taken = f"ranks {', '.join(str(facts.rank) for facts in shared[0])} have the same one"
        rows.append(
            DoctorRow(
                "cluster",
                "devices",
                "broken",
                taken,
                format_node_names(shared[0]),
                "look at CUDA_VISIBLE_DEVICES there",
            )
        )
    used = [report.facts for report in reports if report.facts.used_bytes > MAX_IDLE_DEVICE_BYTES]
    if used:
        worst = max(used, key=lambda facts: facts.used_bytes)
        taken = (
            f"{worst.used_bytes / GIB:.0f} GiB in use on device {worst.local_rank} of"
            f" node {worst.node}"
        )
        rows.append(
            DoctorRow(
                "cluster",
                "memory",
                "broken",
                taken,
                f"others run on {format_node_names(used)}",
                "nvidia-smi tells who",
            )
        )
    return rows


def _make_uniformity_rows(reports: Sequence[RankReport]) -> list[DoctorRow]:
    """Return one row with all values that are alike on all ranks, and a row for each value that
    differs.
    """
    rows = []
    alike = []
    for name in dict.fromkeys(name for report in reports for name in report.facts.uniform_values):
        values: dict[str, list[RankFacts]] = {}
        for report in reports:
            values.setdefault(report.facts.uniform_values.get(name, "none"), []).append(
                report.facts
            )
        if len(values) == 1:
            alike.append(f"{name} {next(iter(values))}")
            continue
        common = max(values, key=lambda value: len(values[value]))
        others = "; ".join(
            f"{value or 'empty'} on {format_node_names(values[value])}"
            for value in values
            if value != common
        )
        state: PathState = "broken" if name in VALUES_THAT_MUST_AGREE else "not live"
        rows.append(
            DoctorRow(
                "cluster", name, state, f"differs: {others}", f"{common or 'empty'} on all others"
            )
        )
    return [DoctorRow("cluster", "alike on all", "live", "; ".join(alike)), *rows]


def _make_ports_row(leaders: Sequence[RankReport]) -> DoctorRow:
    """Return the row on whether every node reaches every other over TCP."""
    broken = [report for report in leaders if report.unreachable_nodes]
    if not broken:
        return DoctorRow("cluster", "ports", "live", "every node reaches every other")
    first = broken[0]
    other, why = next(iter(first.unreachable_nodes.items()))
    return DoctorRow(
        "cluster",
        "ports",
        "broken",
        (
            f"node {other} cannot be reached"
            f" from {format_node_names(report.facts for report in broken)}"
        ),
        why,
        (
            "open all TCP ports between the nodes, or name the right interface: MASTER_ADDR on"
            " it, NCCL_SOCKET_IFNAME"
        ),
    )


def _make_clocks_row(leaders: Sequence[RankReport]) -> DoctorRow:
    """Return the row on the largest offset of a node's clock from that of node 0."""
    worst = max(leaders, key=lambda report: abs(report.clock_offset_s))
    if abs(worst.clock_offset_s) <= MAX_CLOCK_OFFSET_S:
        return DoctorRow(
            "cluster", "clocks", "live", f"within {max(abs(worst.clock_offset_s), 0.001):.3f} s"
        )
    taken = f"{format_node_names([worst.facts])} is {worst.clock_offset_s:+.1f} s from node 0"
    return DoctorRow(
        "cluster",
        "clocks",
        "not live",
        taken,
        "logs and traces will not fit together",
        "chronyc tracking",
    )


def _make_shared_folder_row(leaders: Sequence[RankReport], folder: str) -> DoctorRow:
    """Return the row on the folder that all nodes must see; broken where a node cannot write to it
    or does not see the files of others.
    """
    failed = [report for report in leaders if report.folder_why_not]
    if failed:
        fix = (
            "mount it there for writing, or set trainer.default_local_dir to a folder that"
            " all nodes see"
        )
        return DoctorRow(
            "cluster", "shared folder", "broken", folder, failed[0].folder_why_not, fix
        )
    apart = [report for report in leaders if report.unseen_nodes]
    if apart:
        fix = "set trainer.default_local_dir to a folder that all nodes see"
        why = (
            f"{format_node_names(report.facts for report in apart)} does not see what other nodes"
            " write there"
        )
        return DoctorRow("cluster", "shared folder", "broken", folder, why, fix)
    return DoctorRow("cluster", "shared folder", "live", folder)


def _make_speed_rows(
    reports: Sequence[RankReport], leaders: Sequence[RankReport]
) -> list[DoctorRow]:
    """Return rows on the measured speeds; one broken row instead if a collective failed."""
    failed = [report for report in reports if report.speed_why_not]
    if failed:
        fix = "NCCL_DEBUG=INFO tells more"
        taken = format_node_names(report.facts for report in failed)
        return [DoctorRow("cluster", "collectives", "broken", taken, failed[0].speed_why_not, fix)]
    rows = []
    measured = [report for report in reports if report.world_bytes_per_s]
    if measured:
        speed = min(report.world_bytes_per_s for report in measured)
        rows.append(
            DoctorRow(
                "cluster", "all-reduce, all ranks", "live", f"{_format_speed(speed)} bus bandwidth"
            )
        )
    if any(report.node_bytes_per_s for report in leaders):
        rows.append(
            _make_speed_row("all-reduce in a node", leaders, lambda report: report.node_bytes_per_s)
        )
    if any(report.next_node_bytes_per_s for report in leaders):
        rows.append(
            _make_speed_row(
                "message to the next node", leaders, lambda report: report.next_node_bytes_per_s
            )
        )
    return rows


def _make_speed_row(
    path_name: str, leaders: Sequence[RankReport], get_speed: Callable[[RankReport], float]
) -> DoctorRow:
    """Return the row on a speed of each node; not live, with the slow nodes, if some are below
    MIN_SPEED_SHARE of the median.
    """
    median = statistics.median(map(get_speed, leaders))
    taken = f"{_format_speed(median)} in the median of {len(leaders)} nodes"
    slow = [report for report in leaders if get_speed(report) < MIN_SPEED_SHARE * median]
    if not slow:
        return DoctorRow("cluster", path_name, "live", taken)
    worst = min(slow, key=get_speed)
    why = (
        f"slower from {format_node_names(report.facts for report in slow)}:"
        f" {_format_speed(get_speed(worst))}"
    )
    return DoctorRow(
        "cluster",
        path_name,
        "not live",
        taken,
        why,
        "look at links and adapters there, or leave it out",
    )


def _format_speed(speed: float) -> str:
    """Return bytes a second in words: "12.3 GB/s", or MB/s below 0.1 GB/s."""
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"
