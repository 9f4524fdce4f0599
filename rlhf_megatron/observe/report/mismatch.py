"""The mismatch page: histograms of |log-prob of trainer - of engine|, added up so that a page can hold them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlhf_megatron.observe.report.numbers import spread_evenly
from rlhf_megatron.observe.report.records import MismatchStep, WorstToken

MAX_COLUMNS = 120  # of the map over steps; longer runs add neighbouring steps up
MAX_VERSIONS = 60  # choices of policy versions; more are added up to ranges
NUM_WORST, NUM_WORST_OF_STEPS = 100, 60  # tokens over all; and the worst of so many steps


@dataclass(frozen=True)
class Cell:
    """Tokens of some steps, one range of versions and one finish reason."""

    column: int  # index into Mismatch.columns
    version: int  # index into Mismatch.versions
    reason: int  # index into Mismatch.reasons
    num_tokens: int
    mean: float
    max: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    edges: tuple[float, ...]
    columns: tuple[tuple[int, int], ...]  # first and last step of each
    versions: tuple[str, ...]
    version_ranges: tuple[tuple[int, int] | None, ...]  # first and last of each; None: unknown
    reasons: tuple[str, ...]
    cells: tuple[Cell, ...]
    worst: tuple[tuple[int, WorstToken], ...]  # step and token, the largest difference first
    notes: tuple[str, ...]


def mismatch(steps: Sequence[MismatchStep]) -> Mismatch | None:
    """None: there are no tokens."""
    edges = Counter(step.edges for step in steps).most_common(1)[0][0] if steps else ()
    used = sorted((step for step in steps if step.edges == edges), key=lambda step: step.step)
    if not any(group.num_tokens for step in used for group in step.groups):
        return None
    notes = []
    if len(used) < len(steps):
        notes.append(f"{len(steps) - len(used)} steps with other bins are left out.")
    found = sorted({g.policy_version for step in used for g in step.groups if g.policy_version is not None})
    version_ranges = _ranges(found, MAX_VERSIONS)
    column_ranges = _ranges(sorted({step.step for step in used}), MAX_COLUMNS)
    reasons = sorted({group.finish_reason for step in used for group in step.groups})
    has_unknown = any(group.policy_version is None for step in used for group in step.groups)
    versions = [_range_text(first, last) for first, last in version_ranges] + ["unknown"] * has_unknown
    sums: dict[tuple[int, int, int], Cell] = {}
    for step in used:
        column = _index(column_ranges, step.step)
        for group in step.groups:
            known = group.policy_version is not None
            version = _index(version_ranges, group.policy_version or 0) if known else len(version_ranges)
            place = (column, version, reasons.index(group.finish_reason))
            cell = Cell(*place, group.num_tokens, group.mean, group.max, group.counts)
            sums[place] = _sum(sums[place], cell) if place in sums else cell
    return Mismatch(
        edges=edges,
        columns=tuple(column_ranges),
        versions=tuple(versions),
        version_ranges=(*version_ranges, *([None] * has_unknown)),
        reasons=tuple(reasons),
        cells=tuple(sums[place] for place in sorted(sums)),
        worst=_worst(used),
        notes=tuple(notes),
    )


def _ranges(values: Sequence[int], max_count: int) -> list[tuple[int, int]]:
    """Neighbouring values put together to at most `max_count` ranges of about the same number of values."""
    count = min(len(values), max_count)
    cuts = [i * len(values) // count for i in range(count)] + [len(values)] if count else []
    return [(values[begin], values[end - 1]) for begin, end in pairwise(cuts)]


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _index(ranges: Sequence[tuple[int, int]], value: int) -> int:
    return next(i for i, (first, last) in enumerate(ranges) if first <= value <= last)


def _sum(one: Cell, other: Cell) -> Cell:
    tokens = one.num_tokens + other.num_tokens
    mean = (one.mean * one.num_tokens + other.mean * other.num_tokens) / max(1, tokens)
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Cell(one.column, one.version, one.reason, tokens, mean, max(one.max, other.max), counts)


def _worst(steps: Sequence[MismatchStep]) -> tuple[tuple[int, WorstToken], ...]:
    every = [(step.step, token) for step in steps for token in step.worst]
    every.sort(key=lambda entry: -entry[1].difference)
    with_tokens = [step for step in steps if step.worst]
    of_steps = [with_tokens[i] for i in spread_evenly(len(with_tokens), NUM_WORST_OF_STEPS)]
    chosen = every[:NUM_WORST] + [(s.step, max(s.worst, key=lambda token: token.difference)) for s in of_steps]
    return tuple(sorted(dict.fromkeys(chosen), key=lambda entry: -entry[1].difference))
