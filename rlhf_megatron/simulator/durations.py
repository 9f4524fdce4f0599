"""How long responses are, and how long engines, scorer and trainer take for them.

The `...Durations` and `...Config` classes are the sections of the file that `rlhf-megatron simulate --durations` reads
(docs/simulate.md). Times are seconds of wall clock, rates are of a whole engine or of the whole trainer pool.

Lengths are drawn by quantiles. The responses of a group are alike to the degree `within_prompt`: with z of the group
and e of each sample standard normal, a response has the length at the quantile Phi(sqrt(rho) z + sqrt(1 - rho) e) (a
Gaussian copula).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.keys import join, leaves, nearest
from rlhf_megatron.config.load import display, read_text
from rlhf_megatron.config.source import MappingNode, parse
from rlhf_megatron.config.typed import BROKEN, Converter

ARGUMENTS = "arguments of simulate"  # subject of what is wrong with them


@dataclass(frozen=True)
class Section:
    """Part of the file. Rates are above 0, times 0 or more, counts 1 or more; a name tells which it is."""

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = item.name, getattr(self, item.name)
            is_time = name == "seconds" or (name.endswith("_s") and not name.endswith("_per_s"))
            if value is None:
                continue
            if name.endswith("_per_s") and not value > 0:
                raise ValueError(f"{name} ({value:g}) must be above 0.")
            if is_time and not 0 <= value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be 0 or more; use 0 for none.")
            if name in ("slots", "gpus", "workers") and value < 1:
                raise ValueError(f"{name} ({value}) must be 1 or more.")


@dataclass(frozen=True)
class DecodeConfig(Section):
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
        super().__post_init__()
        if is_line and not (self.fixed_s or self.per_response_s):
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
class EngineDurations(Section):
    decode: DecodeConfig
    prefill_tokens_per_s: float = math.inf  # prompt tokens; nothing else of that engine goes on meanwhile
    slots: int | None = None  # responses that it decodes at once; None: as the run sets it
    gpus: int | None = None  # of one engine; None: as the run sets it


@dataclass(frozen=True)
class ScoreDurations(Section):
    per_sample_s: float = 0.0
    fixed_s: float = 0.0  # a call, which has all groups that are finished then
    workers: int | None = None  # samples that are scored at once; None: reward.num_workers


@dataclass(frozen=True)
class TrainerDurations(Section):
    """Rates of the whole pool of `gpus`; `plan.slowdown` scales them to the GPUs of the run."""

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
        super().__post_init__()
        if not 0.5 <= self.doubling_efficiency <= 1:
            raise ValueError(
                f"doubling_efficiency ({self.doubling_efficiency:g}) must lie in 0.5 (twice the GPUs gain nothing) .. 1"
                " (they take half the time)."
            )


@dataclass(frozen=True)
class SyncDurations(Section):
    seconds: float = 0.0  # a weight sync, during which no engine decodes
    turns_s: float | None = None  # a step of rollout.colocated: all changes of hands; None: not simulated
    recomputes: bool = True  # responses that go on over a sync have their keys and values computed anew


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
            raise ValueError(f"no_signal ({self.no_signal:g}) must be from 0 to below 1; use 0 for none.")


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
    known = [join("", leaf.key) for leaf in leaves(Durations)]
    converter = Converter(lambda key: nearest(key, known))
    found = converter.section(Durations, node, "")
    if converter.problems or found is BROKEN:
        raise ConfigError(converter.problems, subject)
    assert isinstance(found, Durations)
    return found


_NORMAL = NormalDist()
_EDGE = 1e-12  # quantiles are asked for this far from 0 and 1
_KEYS = {  # kind of lengths -> its keys
    "constant": ("median",),
    "lognormal": ("median", "sigma", "within_prompt"),
    "pareto": ("median", "sigma", "tail_share", "tail_index", "within_prompt"),
    "values": ("values", "within_prompt"),
    "cycle": ("values",),
}
_EXAMPLES = {"median": "1000", "sigma": "0.8", "values": "[120, 300, 2048]"}  # of keys that must be given


@dataclass(frozen=True)
class LengthsConfig:
    """Tokens that a policy writes for a prompt, before data.max_response_length cuts them."""

    kind: Literal["constant", "lognormal", "pareto", "values", "cycle"]
    median: float | None = None  # of lognormal and pareto; of constant: the length
    sigma: float | None = None  # of lognormal and pareto: standard deviation of the logarithm
    tail_share: float = 0.05  # of pareto: so many of the longest have a Pareto tail behind the lognormal body
    tail_index: float = 1.5  # of pareto: P(length > x) falls as x^-index there; the smaller the heavier
    values: tuple[float, ...] = ()  # of values: drawn among these; of cycle: taken in this order, again and again
    within_prompt: float = 0.0  # 0: a prompt's responses are independent; 1: they are all equally long

    def __post_init__(self) -> None:
        own = _KEYS[self.kind]
        for item in fields(self)[1:]:
            name, value = item.name, getattr(self, item.name)
            is_given = value != item.default
            if name in _EXAMPLES and name in own and not is_given:
                raise ValueError(f"kind ({self.kind}) needs a {name}, such as {_EXAMPLES[name]}.")
            if name not in own and is_given:
                raise ValueError(f"kind ({self.kind}) has no {name}; remove it, or use another kind.")
        for name, value in (("median", self.median), ("tail_index", self.tail_index)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be above 0; give a number such as 1.5.")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma ({self.sigma:g}) must be 0 or more; use one such as 0.8.")
        if not 0 < self.tail_share < 1:
            raise ValueError(f"tail_share ({self.tail_share:g}) must lie between 0 and 1; use one such as 0.05.")
        if not 0 <= self.within_prompt <= 1:
            raise ValueError(f"within_prompt ({self.within_prompt:g}) must be from 0 to 1; use 0 for independence.")
        if any(not 1 <= value < math.inf for value in self.values):
            raise ValueError(f"values must be 1 or more; {min(self.values):g} .. {max(self.values):g} are given.")


def quantile_function(config: LengthsConfig) -> Callable[[float], float]:
    """z of a standard normal -> the length at its quantile, in tokens, not yet cut or rounded."""
    if config.kind == "constant":
        assert config.median is not None
        constant = config.median
        return lambda z: constant
    if config.kind == "values":
        values = sorted(config.values)
        return lambda z: values[min(len(values) - 1, int(_NORMAL.cdf(z) * len(values)))]
    assert config.median is not None and config.sigma is not None, "cycle draws nothing"
    mu, sigma = math.log(config.median), config.sigma
    if config.kind == "lognormal":
        return lambda z: math.exp(mu + sigma * z)
    share, index = config.tail_share, config.tail_index
    z_tail = _NORMAL.inv_cdf(1 - share)
    begin = math.exp(mu + sigma * z_tail)

    def pareto(z: float) -> float:
        if z < z_tail:
            return math.exp(mu + sigma * z)
        above = max(_EDGE, 0.5 * math.erfc(z / math.sqrt(2)))
        return begin * (share / above) ** (1 / index)

    return pareto


@dataclass
class Workload:
    """The responses to each prompt. Simulations that share a workload see the same ones, so that schedules compare.

    Groups are told apart by their number, and by how often they were begun.
    """

    responses: LengthsConfig
    prompts: LengthsConfig
    group_size: int
    max_response: int
    max_prompt: int
    seed: int
    no_signal: float = 0.0  # share of the groups whose samples all have the same reward

    def __post_init__(self) -> None:
        self._response = quantile_function(self.responses) if self.responses.kind != "cycle" else None
        self._prompt = quantile_function(self.prompts) if self.prompts.kind != "cycle" else None
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def response_lengths(self, number: int, attempt: int = 0) -> tuple[int, ...]:
        """Return the tokens of each response of a group."""
        found = self._known.get((number, attempt))
        if found is None:
            found = self._known[(number, attempt)] = self._draw(number, attempt)
        return found

    def prompt_length(self, number: int) -> int:
        if self._prompt is None:
            return _whole(self.prompts.values[number % len(self.prompts.values)], self.max_prompt)
        return _whole(self._prompt(self._random(number, 1 << 20).gauss(0.0, 1.0)), self.max_prompt)

    def has_signal(self, number: int, attempt: int = 0) -> bool:
        return not self.no_signal or self._random(number, (1 << 21) + attempt).random() >= self.no_signal

    def _draw(self, number: int, attempt: int) -> tuple[int, ...]:
        if self._response is None:
            values, first = self.responses.values, number * self.group_size
            return tuple(_whole(values[(first + i) % len(values)], self.max_response) for i in range(self.group_size))
        normal = self._random(number, attempt).gauss
        rho = self.responses.within_prompt
        shared, own = math.sqrt(rho) * self._random(number, 1 << 22).gauss(0.0, 1.0), math.sqrt(1 - rho)
        function, cap = self._response, self.max_response
        return tuple(_whole(function(shared + own * normal(0.0, 1.0)), cap) for _ in range(self.group_size))

    def _random(self, number: int, purpose: int) -> random.Random:
        return random.Random((self.seed << 64) + (number << 24) + purpose)


def _whole(length: float, cap: int) -> int:
    return max(1, min(cap, math.ceil(length)))
