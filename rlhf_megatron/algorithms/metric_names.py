"""The form of a line in the catalogue of metrics, and every metric that algorithms/ hands out.

To add one: a line in metric_names.txt, beside those of what hands it out (`better` only where there
is a direction). Names are the field's own where one exists. No name is another's folder (`a/b`
beside `a/b/c`): stores that keep a file a metric could not have both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, cast

# the direction in which a run is better off, where there is one
BetterDirection = Literal["", "higher", "lower"]
Reduction = Literal[
    "mean", "sum", "max", "min", "std", "quantile", "share", "ratio", "last", "count", "verdict"
]

# What is reduced, in the words that the reference shows.
OPTIMIZER_STEPS = "response tokens of a mini-batch, then optimizer steps"
TOKENS = "response tokens of a step"
VALID_TOKENS = "response tokens of samples whose reward counts"
SAMPLES = "samples of a step"
VALID_SAMPLES = "samples whose reward counts"
SEQUENCES = "whole responses of a step"
GROUPS = "groups of a step"
STEP = "a step"

PLACEHOLDERS: Mapping[str, tuple[str, str]] = {  # name -> (regular expression, what it stands for)
    "stage": (
        r"[a-z_]+",
        (
            "a stage of the step: next, generate, score or take, annotate, advantages, update,"
            " sync, evaluate"
        ),
    ),
    "role": (r"actor|critic", "actor or critic"),
    "phase": (r"training|sync|generation", "training, sync or generation"),
    "source": (r".+", "a data source, or the name of an evaluation set"),
    "status": (r".+", "a status of a reward: ok, malformed, timeout, masked:<why>"),
    "reason": (r".+", "stop, length or abort"),
    "end": (r"[a-z_]+", "what ended an episode: done, max_turns, timeout ..."),
    "name": (r".+", "a name that the reward gives"),
    "option": (r"[a-z0-9_]+", "an entry of a list in the configuration"),
    "verdict": (r"[a-z_]+", "a health verdict"),
    "N": (r"\d+|N", "rollout.val_kwargs.n, the samples of an item"),
    "k": (r"\d+|N", "2, 4, 8 .. and N"),
}

RESPONSES = "whole responses of samples whose reward counts"
ENTRIES = (
    "response tokens, or whole responses where it is of sequences; of samples whose reward counts"
)
HAVE_PART = "samples whose reward counts and has the part"


@dataclass(frozen=True)
class MetricDescription:
    """One line: `reduction` of many numbers, `reduced_over` these, made the one that is written."""

    unit: str  # "share" is a number from 0 to 1, "1" has no unit
    meaning: str
    reduction: Reduction
    reduced_over: str
    better_direction: BetterDirection = ""


@cache
def compile_name_pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of a metric name with placeholders such as <role>."""
    parts = re.split(r"<(\w+)>", name)
    return re.compile(
        "".join(f"(?:{PLACEHOLDERS[p][0]})" if i % 2 else re.escape(p) for i, p in enumerate(parts))
    )


_PATH_PARTS_WITH_A_MEANING = re.compile(r"\.*")  # "", "." and "..": no names of files


def make_single_key_part(name: str) -> str:
    """Return a name that a run makes, such as the reward part "math/latency_s", as one part of a
    metric's key: "math:latency_s". As two parts it would make "math" the folder of a metric.
    """
    return mark_reserved_part(name.replace("/", ":"), _PATH_PARTS_WITH_A_MEANING)


def mark_reserved_part(part: str, reserved: re.Pattern[str]) -> str:
    """Return a part of a key with one more "_" at its end where it is a reserved word, or one with
    such marks: different parts stay different.
    """
    return f"{part}_" if reserved.fullmatch(part.rstrip("_")) else part


def find_matching_metric(
    metrics: Mapping[str, MetricDescription], key: str
) -> MetricDescription | None:
    """Return the description of a key as a run writes it, such as "reward/part/format": the key's
    own, else the first whose placeholders match; None where none does.
    """
    if key in metrics:
        return metrics[key]
    return next(
        (
            metric
            for name, metric in metrics.items()
            if "<" in name and compile_name_pattern(name).fullmatch(key)
        ),
        None,
    )


def _parse_metric_line(line: str) -> tuple[str, MetricDescription]:
    """Return the name and description that a line of metric_names.txt holds."""
    name, unit, meaning, reduction, over, *better = line.split(" | ")
    return name, MetricDescription(
        unit,
        meaning,
        cast(Reduction, reduction),
        globals()[over],
        cast(BetterDirection, "".join(better)),
    )


_TABLE = files("rlhf_megatron.algorithms").joinpath("metric_names.txt").read_text(encoding="utf-8")
METRICS: dict[str, MetricDescription] = dict(
    _parse_metric_line(line) for line in _TABLE.splitlines() if not line.startswith("#")
)
"""Those of losses are per token; the caller averages them over a mini-batch's response tokens, by
metric weights.
"""
