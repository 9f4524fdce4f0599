"""The rules of the section `reward`: contradictions, and settings that would be ignored."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from math import isfinite
from typing import Any

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.schema import RunConfig

BY_SOURCE, TERMS, LONGEST = "reward.by_source", "reward.terms", "data.max_response_length"
OF_PROCESSES = ("reward.num_workers", "reward.timeout_s")
# Rewards of ours that are called in the controller's own process. A name that is not here may need one of its own.
IN_CONTROLLER = ("character_share", "exact_match", "format", "overlong")


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    r = config.reward
    names = [r.name, *(one.name for one in (*r.by_source.values(), *r.terms))]
    fix = "name a reward that runs in a process of its own, such as math_verify or function"
    yield all(name in IN_CONTROLLER for name in names), OF_PROCESSES, "reward.name", fix
    all_have_their_own = bool(config.data.sources) and {s.name for s in config.data.sources} <= set(r.by_source)
    yield all_have_their_own, ("reward.name", "reward.params"), BY_SOURCE, "leave a source out there"


def sources(loaded: Loaded) -> Iterator[Problem]:
    """Those of files and tasks are known only when they are read."""
    names = [source.name for source in loaded.config.data.sources]
    if names:
        yield from unknown_sources(loaded.config.reward.by_source, names)


def unknown_sources(by_source: dict[str, Any], known: list[str]) -> Iterator[Problem]:
    """`known`: names of all data sources of the run."""
    for name in by_source:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield Problem(
                f"{BY_SOURCE} has a reward for {name!r}, but the data sources of this run are"
                f" {', '.join(map(repr, known))}{hint or '; rename or remove it.'}",
                (BY_SOURCE, "data.sources"),
            )


def weights(loaded: Loaded) -> Iterator[Problem]:
    r = loaded.config.reward
    entries = [(BY_SOURCE, f"{BY_SOURCE}.{name}", one) for name, one in r.by_source.items()]
    entries += [(TERMS, f"{TERMS}[{i}]", one) for i, one in enumerate(r.terms)]
    for key, where, one in entries:
        if not isfinite(one.weight):
            yield Problem(f"{where}.weight ({one.weight}) must be a number; use 1.0, or 0 to log it only.", (key,))


def lengths(loaded: Loaded) -> Iterator[Problem]:
    """The over-long term against the longest response that is generated."""
    longest = loaded.config.data.max_response_length
    for i, term in enumerate(loaded.config.reward.terms):
        max_len, buffer = term.params.get("max_len"), term.params.get("buffer")
        if term.name != "overlong" or not isinstance(max_len, int) or not isinstance(buffer, int):
            continue
        if max_len - buffer >= longest:
            yield Problem(
                f"{TERMS}[{i}]: a response is over-long from max_len - buffer ({max_len} - {buffer} ="
                f" {max_len - buffer} tokens) on, but none has more than {LONGEST} ({longest}); use max_len:"
                f" {longest}.",
                (TERMS, LONGEST),
            )


RULES = (sources, weights, lengths)
