"""What a line of the catalogue of metrics says; they are in *metric_names.py of algorithms/ and scheduler/.

    "actor/pg_clipfrac": Metric("share", "tokens whose loss the ratio clip replaced", "mean", OPTIMIZER_STEPS)

A name may have parts in angle brackets (PLACEHOLDERS), which stand for what a run fills in: `timing_s/<stage>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "std", "quantile", "share", "ratio", "last", "count", "verdict"]

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
        "a stage of the step: next, generate, score or take, annotate, advantages, update, sync, evaluate",
    ),
    "role": (r"actor|critic", "actor or critic"),
    "phase": (r"training|sync|generation", "training, sync or generation"),
    "source": (r".+", "a data source, or the name of an evaluation set"),
    "status": (r".+", "a status of a reward: ok, malformed, timeout, masked:<why>"),
    "reason": (r".+", "stop, length or abort"),
    "name": (r".+", "a name that the reward gives"),
    "option": (r"[a-z0-9_]+", "an entry of a list in the configuration"),
    "verdict": (r"[a-z_]+", "a health verdict"),
    "N": (r"\d+|N", "rollout.val_kwargs.n, the samples of an item"),
    "k": (r"\d+|N", "2, 4, 8 .. and N"),
}


@dataclass(frozen=True)
class Metric:
    """One line: `reduction` of many numbers, `over` these, made the one that is written."""

    unit: str  # "share" is a number from 0 to 1, "1" has no unit
    meaning: str
    reduction: Reduction
    over: str
    better: Literal["", "higher", "lower"] = ""  # the direction in which a run is better off, where there is one


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<(\w+)>", name)
    return re.compile("".join(f"(?:{PLACEHOLDERS[p][0]})" if i % 2 else re.escape(p) for i, p in enumerate(parts)))


def find_in(metrics: Mapping[str, Metric], key: str) -> Metric | None:
    """The line of a key as a run writes it, "reward/part/format" too; the first that fits, None where none does."""
    if key in metrics:
        return metrics[key]
    return next((metric for name, metric in metrics.items() if "<" in name and _pattern(name).fullmatch(key)), None)
