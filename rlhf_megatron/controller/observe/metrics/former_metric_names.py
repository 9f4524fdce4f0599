"""Metrics that had another name in an earlier version: rows of former runs are read under the names
of today, by the report, comparisons, resumption and exports. docs/metrics.md has the same table.

To rename a metric: a line here and there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TypeVar

from rlhf_megatron.algorithms.metric_names import make_single_key_part

Value = TypeVar("Value")

MAX_REMEMBERED_KEYS = 10_000

FORMER_METRIC_NAMES: Mapping[str, str] = {
    "perf/tokens_per_s/generate": "perf/tokens_per_s_generate",
    "perf/tokens_per_s/update": "perf/tokens_per_s_update",
    **{
        f"val/<source>/{figure}@<k>/{end}": f"val/<source>/{figure}@<k>_{end}"
        for figure in ("best", "worst", "maj")
        for end in ("low", "high")
    },
    "reward/part/<name>/<part>": "reward/part/<name>:<part>",
    **{
        f"gdpo/<name>/<part>/{figure}": f"gdpo/<name>:<part>/{figure}"
        for figure in ("mean", "std", "max", "min")
    },
}
"""former name -> name of today"""
_PLACEHOLDER_PATTERNS = {"source": ".+", "k": r"\d+", "name": "[^/]+", "part": ".+"}


@cache
def _compile_former_names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return (pattern of a former name, name of today as a format string) of each line."""

    def write_group(match: re.Match[str]) -> str:
        """Return the named group that a placeholder stands for."""
        return f"(?P<{match[1]}>{_PLACEHOLDER_PATTERNS[match[1]]})"

    return tuple(
        (
            re.compile(re.sub(r"<(\w+)>", write_group, former)),
            re.sub(r"<(\w+)>", r"{\1}", current),
        )
        for former, current in FORMER_METRIC_NAMES.items()
    )


@lru_cache(maxsize=MAX_REMEMBERED_KEYS)
def find_current_name(key: str) -> str:
    """Return the name that a metric of this name has today, such as "perf/tokens_per_s_update" of
    "perf/tokens_per_s/update"; the key itself where its name did not change.
    """
    for pattern, current in _compile_former_names():
        match = pattern.fullmatch(key)
        if match is not None:
            words = match.groupdict()
            if "part" in words:
                words["part"] = make_single_key_part(words["part"])
            return current.format(**words)
    return key


def rename_former_metrics(row: Mapping[str, Value]) -> dict[str, Value]:
    """Return a row of metrics.jsonl with its metrics under the names of today."""
    return {find_current_name(key): value for key, value in row.items()}
