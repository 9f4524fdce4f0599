"""What a simulation knows of a run's time: how long responses are, and what engines, scorer and trainer take for them.

These dataclasses are the sections of the file that `rlhf-megatron simulate --durations` reads; docs/simulate.md
describes it. All times are seconds of a clock on the wall, rates are of a whole engine or of the whole trainer pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.keys import join, leaves, nearest
from rlhf_megatron.config.load import display, read_text
from rlhf_megatron.config.source import MappingNode, parse
from rlhf_megatron.config.typed import BROKEN, Converter
from rlhf_megatron.simulator.lengths import LengthsConfig

ARGUMENTS = "arguments of simulate"  # subject of what is wrong with them


def _check(rules: Mapping[str, tuple[float, float, str]]) -> None:
    """name -> (value, smallest that is allowed, what to use)."""
    for name, (value, least, fix) in rules.items():
        if not least <= value < math.inf:
            raise ValueError(f"{name} ({value:g}) must be {least:g} or more; {fix}.")


@dataclass(frozen=True)
class DecodeConfig:
    """Seconds that an engine takes for one token of each response that it decodes, by how many it decodes together.

    Either `points`, between which it goes along straight lines (on along the last one behind them, level before the
    first), or `fixed_s` + `per_response_s` x how many.
    """

    points: tuple[tuple[int, float], ...] = ()  # (responses, seconds a token), measured
    fixed_s: float | None = None
    per_response_s: float | None = None

    def __post_init__(self) -> None:
        is_line = self.fixed_s is not None and self.per_response_s is not None
        if is_line == bool(self.points) or (self.fixed_s is None) != (self.per_response_s is None):
            raise ValueError(
                "give either points, such as [[1, 0.012], [64, 0.02]], or both of fixed_s and per_response_s."
            )
        if is_line:
            assert self.fixed_s is not None and self.per_response_s is not None
            _check({"fixed_s": (self.fixed_s, 0.0, "use 0 for none")})
            _check({"per_response_s": (self.per_response_s, 0.0, "use 0 for none")})
            if self.fixed_s + self.per_response_s <= 0:
                raise ValueError("fixed_s and per_response_s are both 0: a token must take some time.")
        counts = [count for count, _ in self.points]
        if any(low >= high for low, high in pairwise(counts)) or any(count < 1 for count in counts):
            raise ValueError(f"points must be of growing numbers of responses, from 1 on; these are {counts}.")
        if any(not 0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError("points must have seconds above 0; correct the second number of each pair.")

    def seconds(self, count: int) -> float:
        """A token of each of `count` responses that run."""
        if self.fixed_s is not None and self.per_response_s is not None:
            return self.fixed_s + self.per_response_s * count
        points = self.points
        if count <= points[0][0] or len(points) == 1:
            return points[0][1]
        pairs = list(pairwise(points))
        (low, low_s), (high, high_s) = next((pair for pair in pairs if count <= pair[1][0]), pairs[-1])
        return max(min(low_s, high_s), low_s + (high_s - low_s) * (count - low) / (high - low))


@dataclass(frozen=True)
class EngineDurations:
    decode: DecodeConfig
    prefill_tokens_per_s: float = math.inf  # prompt tokens; nothing else of that engine goes on meanwhile
    slots: int | None = None  # responses that it decodes at once; None: as the run sets it
    gpus: int | None = None  # of one engine; None: as the run sets it

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"prefill_tokens_per_s ({self.prefill_tokens_per_s:g}) must be above 0.")
        for name, value in (("slots", self.slots), ("gpus", self.gpus)):
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be 1 or more.")


@dataclass(frozen=True)
class ScoreDurations:
    per_sample_s: float = 0.0
    fixed_s: float = 0.0  # a call, which has all groups that are finished then
    workers: int | None = None  # samples that are scored at once; None: reward.num_workers

    def __post_init__(self) -> None:
        _check({"per_sample_s": (self.per_sample_s, 0.0, "use 0 for none")})
        _check({"fixed_s": (self.fixed_s, 0.0, "use 0 for none")})
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers ({self.workers}) must be 1 or more.")


@dataclass(frozen=True)
class TrainerDurations:
    """Of the whole pool of `gpus`, which may be other than those of the run: see `plan.slowdown`."""

    update_tokens_per_s: float  # tokens of prompts and responses that an epoch of the update goes through
    update_fixed_s: float = 0.0  # a step
    annotate_tokens_per_s: float = math.inf  # log-probs of the actor
    reference_tokens_per_s: float = math.inf  # of the reference, where the run has one
    critic_tokens_per_s: float = math.inf  # values, where the run has a critic
    critic_update_tokens_per_s: float = math.inf
    annotate_fixed_s: float = 0.0  # a call
    advantages_s: float = 0.0  # a step, on the controller
    gpus: int | None = None  # for which all of these hold; None: those of the run
    doubling_efficiency: float = 1.0  # twice the GPUs do so many times twice the tokens a second

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_per_s") and not value > 0:
                raise ValueError(f"{item.name} ({value:g}) must be above 0.")
            if item.name.endswith("_s") and not item.name.endswith("_per_s"):
                _check({item.name: (value, 0.0, "use 0 for none")})
        if self.gpus is not None and self.gpus < 1:
            raise ValueError(f"gpus ({self.gpus}) must be 1 or more.")
        if not 0.5 <= self.doubling_efficiency <= 1:
            raise ValueError(
                f"doubling_efficiency ({self.doubling_efficiency:g}) must lie in 0.5 (twice the GPUs gain nothing) .. 1"
                " (they take half the time)."
            )


@dataclass(frozen=True)
class SyncDurations:
    seconds: float = 0.0  # a weight sync, during which no engine decodes
    turns_s: float | None = None  # a step of rollout.colocated: all changes of hands; None: not simulated
    recomputes: bool = True  # responses that go on over a sync have their keys and values computed anew

    def __post_init__(self) -> None:
        _check({"seconds": (self.seconds, 0.0, "use 0 for none")})
        if self.turns_s is not None:
            _check({"turns_s": (self.turns_s, 0.0, "use 0 for none")})


@dataclass(frozen=True)
class Durations:
    """A durations file."""

    lengths: LengthsConfig
    engine: EngineDurations
    trainer: TrainerDurations
    prompts: LengthsConfig = field(default_factory=lambda: LengthsConfig("constant", median=512.0))
    score: ScoreDurations = field(default_factory=ScoreDurations)
    sync: SyncDurations = field(default_factory=SyncDurations)
    no_signal: float = 0.0  # share of the groups that algorithm.filter_groups leaves out
    source: str = ""  # where the figures come from: text for readers
    assumed: tuple[str, ...] = ()  # what was not measured: text for readers

    def __post_init__(self) -> None:
        if self.prompts.within_prompt:
            raise ValueError(
                f"prompts.within_prompt ({self.prompts.within_prompt:g}) is of responses; give it in lengths, or remove"
                " it."
            )
        if not 0 <= self.no_signal < 1:
            raise ValueError(f"no_signal ({self.no_signal:g}) must lie in 0 .. 1, without 1; use 0 for none.")


def read_durations(path: Path) -> Durations:
    """Raises ConfigError with everything that is wrong with the file, with lines."""
    source = display(path)
    subject = f"durations {source}"
    try:
        node = parse(read_text(path), source, 0)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([Problem(f"cannot read {source}: {reason}; correct --durations.")], ARGUMENTS) from None
    except ConfigError as error:  # it is not YAML
        raise ConfigError(error.problems, subject) from None
    if not isinstance(node, MappingNode):
        raise ConfigError([Problem("it has no sections; write lengths, engine and trainer at least.")], subject)
    known = _keys(Durations, "")
    converter = Converter(lambda key: nearest(key, known))
    found = converter.section(Durations, node, "")
    if converter.problems or found is BROKEN:
        raise ConfigError(converter.problems, subject)
    assert isinstance(found, Durations)
    return found


def _keys(cls: type, path: str) -> list[str]:
    return [join(path, leaf.key) for leaf in leaves(cls)]
