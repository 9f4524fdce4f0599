"""What ranks told of their nodes, as rows of the doctor's table: differences and slow nodes are named."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.cli.doctor.node import GIB, RankFacts
from rlhf_megatron.cli.doctor.rows import Row, State

CLOCK_S = 1.0  # certificates, file times and traces bear as much
USED_BYTES = 2 * GIB  # of a device that nobody else works on: contexts of CUDA
SLOW = 0.6  # of the median
BREAKING = ("device", "torch", "NCCL", "driver", "python", "megatron-core", "transformers", "rlhf-megatron")


@dataclass(frozen=True)
class RankReport:
    """The findings of one rank. Only the first rank of a node reports on the node: `unreachable`, `clock_s`,
    `folder_why_not`, `unseen`. Speeds in bytes a second; 0.0: not measured.
    """

    facts: RankFacts
    why_no_device: str = ""
    unreachable: Mapping[str, str] = field(default_factory=dict)  # node -> why
    clock_s: float = 0.0  # ahead of node 0's
    folder_why_not: str = ""
    unseen: Sequence[int] = ()  # nodes whose file does not appear in the shared folder
    in_node: float = 0.0
    over_all: float = 0.0
    to_next: float = 0.0  # of the first rank to the first rank of the next node
    speed_why_not: str = ""


def cluster_rows(reports: Sequence[RankReport], folder: str, num_ranks: int) -> list[Row]:
    """`reports`: by rank. `folder`: that all nodes are to see. `num_ranks`: of the run that this job is for."""
    leaders = [report for report in reports if report.facts.local_rank == 0]
    return [
        _ranks_row(reports, num_ranks),
        *_device_rows(reports),
        *_alike_rows(reports),
        _reach_row(leaders),
        _clock_row(leaders),
        _folder_row(leaders, folder),
        *_speed_rows(reports, leaders),
    ]


def named(facts: Iterable[RankFacts]) -> str:
    """ "node 1 (gpu-b), node 3 (gpu-d)" """
    found = {one.node: one.host for one in facts}
    return ", ".join(f"node {number} ({found[number]})" for number in sorted(found))


def _ranks_row(reports: Sequence[RankReport], num_ranks: int) -> Row:
    num_nodes = len({report.facts.node for report in reports})
    taken = f"{len(reports)} on {num_nodes} node(s)"
    if len(reports) == num_ranks:
        return Row("cluster", "ranks", "live", taken)
    why = f"trainer.nnodes x trainer.n_gpus_per_node is {num_ranks}"
    return Row("cluster", "ranks", "broken", taken, why, "change NNODES x NPROC_PER_NODE, or these settings")


def _device_rows(reports: Sequence[RankReport]) -> list[Row]:
    missing = [report for report in reports if report.why_no_device]
    if missing:
        why = missing[0].why_no_device
        return [Row("cluster", "devices", "broken", named(r.facts for r in missing), why, "nvidia-smi on that node")]
    rows = []
    holders: dict[str, list[RankFacts]] = {}
    for report in reports:
        if report.facts.device_id:
            holders.setdefault(report.facts.device_id, []).append(report.facts)
    shared = [ranks for ranks in holders.values() if len(ranks) > 1]
    if shared:
        taken = f"ranks {', '.join(str(facts.rank) for facts in shared[0])} have the same one"
        rows.append(Row("cluster", "devices", "broken", taken, named(shared[0]), "look at CUDA_VISIBLE_DEVICES there"))
    used = [report.facts for report in reports if report.facts.used_bytes > USED_BYTES]
    if used:
        worst = max(used, key=lambda facts: facts.used_bytes)
        taken = f"{worst.used_bytes / GIB:.0f} GiB in use on device {worst.local_rank} of node {worst.node}"
        rows.append(Row("cluster", "memory", "broken", taken, f"others run on {named(used)}", "nvidia-smi tells who"))
    return rows


def _alike_rows(reports: Sequence[RankReport]) -> list[Row]:
    """One row for all that is alike, one for each that differs."""
    rows, alike = [], []
    for name in dict.fromkeys(name for report in reports for name in report.facts.alike):
        values: dict[str, list[RankFacts]] = {}
        for report in reports:
            values.setdefault(report.facts.alike.get(name, "none"), []).append(report.facts)
        if len(values) == 1:
            alike.append(f"{name} {next(iter(values))}")
            continue
        common = max(values, key=lambda value: len(values[value]))
        others = "; ".join(f"{value or 'empty'} on {named(values[value])}" for value in values if value != common)
        state: State = "broken" if name in BREAKING else "not live"
        rows.append(Row("cluster", name, state, f"differs: {others}", f"{common or 'empty'} on all others"))
    return [Row("cluster", "alike on all", "live", "; ".join(alike)), *rows]


def _reach_row(leaders: Sequence[RankReport]) -> Row:
    broken = [report for report in leaders if report.unreachable]
    if not broken:
        return Row("cluster", "ports", "live", "every node reaches every other")
    first = broken[0]
    other, why = next(iter(first.unreachable.items()))
    return Row(
        "cluster",
        "ports",
        "broken",
        f"node {other} cannot be reached from {named(report.facts for report in broken)}",
        why,
        "open all TCP ports between the nodes, or name the right interface: MASTER_ADDR on it, NCCL_SOCKET_IFNAME",
    )


def _clock_row(leaders: Sequence[RankReport]) -> Row:
    worst = max(leaders, key=lambda report: abs(report.clock_s))
    if abs(worst.clock_s) <= CLOCK_S:
        return Row("cluster", "clocks", "live", f"within {max(abs(worst.clock_s), 0.001):.3f} s")
    taken = f"{named([worst.facts])} is {worst.clock_s:+.1f} s from node 0"
    return Row("cluster", "clocks", "not live", taken, "logs and traces will not fit together", "chronyc tracking")


def _folder_row(leaders: Sequence[RankReport], folder: str) -> Row:
    failed = [report for report in leaders if report.folder_why_not]
    if failed:
        fix = "mount it there for writing, or set trainer.default_local_dir to a folder that all nodes see"
        return Row("cluster", "shared folder", "broken", folder, failed[0].folder_why_not, fix)
    apart = [report for report in leaders if report.unseen]
    if apart:
        fix = "set trainer.default_local_dir to a folder that all nodes see"
        why = f"{named(report.facts for report in apart)} does not see what other nodes write there"
        return Row("cluster", "shared folder", "broken", folder, why, fix)
    return Row("cluster", "shared folder", "live", folder)


def _speed_rows(reports: Sequence[RankReport], leaders: Sequence[RankReport]) -> list[Row]:
    failed = [report for report in reports if report.speed_why_not]
    if failed:
        fix = "NCCL_DEBUG=INFO tells more"
        taken = named(report.facts for report in failed)
        return [Row("cluster", "collectives", "broken", taken, failed[0].speed_why_not, fix)]
    rows = []
    measured = [report for report in reports if report.over_all]
    if measured:
        speed = min(report.over_all for report in measured)
        rows.append(Row("cluster", "all-reduce, all ranks", "live", f"{_text(speed)} bus bandwidth"))
    if any(report.in_node for report in leaders):
        rows.append(_speed_row("all-reduce in a node", leaders, lambda report: report.in_node))
    if any(report.to_next for report in leaders):
        rows.append(_speed_row("message to the next node", leaders, lambda report: report.to_next))
    return rows


def _speed_row(path: str, leaders: Sequence[RankReport], speed_of: Callable[[RankReport], float]) -> Row:
    median = statistics.median(map(speed_of, leaders))
    taken = f"{_text(median)} in the median of {len(leaders)} nodes"
    slow = [report for report in leaders if speed_of(report) < SLOW * median]
    if not slow:
        return Row("cluster", path, "live", taken)
    worst = min(slow, key=speed_of)
    why = f"slower from {named(report.facts for report in slow)}: {_text(speed_of(worst))}"
    return Row("cluster", path, "not live", taken, why, "look at links and adapters there, or leave it out")


def _text(speed: float) -> str:
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"
