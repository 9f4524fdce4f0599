"""Several runs as configurations with seeds: which belong together, and what they came to. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rlhf_megatron.config.keys import leaves, value_of
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import as_text
from rlhf_megatron.report.facts import Estimate, written_settings
from rlhf_megatron.report.numbers import seed_interval
from rlhf_megatron.report.records import RunFiles
from rlhf_megatron.scheduler.intervals import t95

SEEDS = ("trainer.seed", "model.init_seed", "data.seed")
NAMES = (  # where a run writes, not what it does
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.samples_kept",
)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration that differ in their seeds only."""

    label: str
    runs: tuple[RunFiles, ...]


def group_runs(runs: Sequence[RunFiles]) -> list[Group]:
    """In the order of their first runs. Labels differ."""
    by_settings: dict[tuple[tuple[str, str], ...], list[RunFiles]] = {}
    for run in runs:
        key = tuple((k, v) for k, v in sorted(all_settings(run).items()) if k not in (*SEEDS, *NAMES))
        by_settings.setdefault(key, []).append(run)
    labels: list[str] = []
    for members in by_settings.values():
        label = _label([run.path.resolve().name for run in members])
        labels.append(label if label not in labels else f"{label} ({len(labels) + 1})")
    return [Group(label, tuple(members)) for label, members in zip(labels, by_settings.values(), strict=True)]


def all_settings(run: RunFiles) -> dict[str, str]:
    """Full key -> value as text; what its config.yaml leaves out has this version's default."""
    default = RunConfig()
    usual = {leaf.key: as_text(value_of(default, leaf.key)) for leaf in leaves(RunConfig)}
    return usual | written_settings(run)


def differing_settings(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(key, value in each group) of the settings in which groups differ, seeds and names apart."""
    settings = [all_settings(group.runs[0]) for group in groups]
    keys = dict.fromkeys(key for found in settings for key in found)
    rows = [(key, [found.get(key, "") for found in settings]) for key in keys if key not in (*SEEDS, *NAMES)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def mean_over_runs(values: Sequence[float]) -> Estimate | None:
    """Mean over runs with Student's t interval. None for no value."""
    if not values:
        return None
    interval = seed_interval(values)
    return Estimate(statistics.fmean(values), *(interval or (None, None)))


def difference(values: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """Mean of `values` minus mean of `base`, runs of two configurations. Interval: Welch 1947. None for no value."""
    if not values or not base:
        return None
    mean = statistics.fmean(values) - statistics.fmean(base)
    if len(values) < 2 or len(base) < 2:
        return Estimate(mean)
    one, other = statistics.variance(values) / len(values), statistics.variance(base) / len(base)
    if one + other == 0:
        return Estimate(mean, mean, mean)
    degrees = (one + other) ** 2 / (one**2 / (len(values) - 1) + other**2 / (len(base) - 1))
    half = t95(max(1, math.floor(degrees))) * math.sqrt(one + other)
    return Estimate(mean, mean - half, mean + half)


def _label(names: Sequence[str]) -> str:
    """The name of a single run; of several what their names begin with in common, and their number."""
    if len(names) == 1:
        return names[0]
    common = "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*names)))
    common = common.rstrip("-_. 0123456789").removesuffix("seed").rstrip("-_. ")
    return f"{common or names[0]} ({len(names)} runs)"
