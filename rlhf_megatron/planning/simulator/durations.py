"""How long responses are, and how long engines, scorer and trainer take for them.

The `...Durations` and `...Config` classes are the sections of the file that
`rlhf-megatron simulate --durations` reads (docs/simulate.md). Times are seconds of wall clock,
rates are of a whole engine or of the whole trainer pool.

Lengths are drawn by quantiles. The responses of a group are alike to the degree `within_prompt`:
with z of the group and e of each sample standard normal, a response has the length at the quantile
Phi(sqrt(rho) z + sqrt(1 - rho) e) (a Gaussian copula).
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

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.key_paths import join_key_path, list_setting_leaves, suggest_nearest_key
from rlhf_megatron.config.load import format_relative_path, read_config_text
from rlhf_megatron.config.type_conversion import BROKEN, ConfigConverter
from rlhf_megatron.config.yaml_nodes import MappingNode, parse_yaml

ARGUMENTS_SUBJECT = "arguments of simulate"  # subject of what is wrong with them

_STANDARD_NORMAL = NormalDist()
_MIN_TAIL_PROBABILITY = 1e-12  # quantiles are asked for this far from 0 and 1
_KEYS_BY_KIND = {  # kind of lengths -> its keys
    "constant": ("median",),
    "lognormal": ("median", "sigma", "within_prompt"),
    "pareto": ("median", "sigma", "tail_share", "tail_index", "within_prompt"),
    "values": ("values", "within_prompt"),
    "cycle": ("values",),
}
# of keys that must be given
_EXAMPLE_VALUES = {"median": "1000", "sigma": "0.8", "values": "[120, 300, 2048]"}


@dataclass(frozen=True)
class DurationsSection:
    """Part of the file. Rates are above 0, times 0 or more, counts 1 or more; a name
    tells which it is.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for a rate, time or count out of range; the field's name says which of
        these it is.
        """
        for item in fields(self):
            name = item.name
            value = getattr(self, item.name)
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
class DecodeConfig(DurationsSection):
    """Seconds that an engine takes for one token of each response that it decodes, by how many it
    decodes together.

    Either `points`, between which it goes along straight lines (on along the last one behind them,
    level before the first), or `fixed_s` + `per_response_s` x how many.
    """

    points: tuple[tuple[int, float], ...] = ()  # (responses, seconds a token), measured
    fixed_s: float | None = None
    per_response_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless either valid `points` or both of `fixed_s` and `per_response_s`
        are given.
        """
        is_line = self.fixed_s is not None and self.per_response_s is not None
        if is_line == bool(self.points) or (self.fixed_s is None) != (self.per_response_s is None):
            raise ValueError(
                "give either points, such as [[1, 0.012], [64, 0.02]], or both of fixed_s"
                " and per_response_s."
            )
        super().__post_init__()
        if is_line and not (self.fixed_s or self.per_response_s):
            raise ValueError("fixed_s and per_response_s are both 0: a token must take some time.")
        counts = [count for count, _ in self.points]
        if any(low >= high for low, high in pairwise(counts)) or any(count < 1 for count in counts):
            raise ValueError(
                f"points must be of growing numbers of responses, from 1 on; these are {counts}."
            )
        if any(not 0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError(
                "points must have seconds above 0; correct the second number of each pair."
            )

    def interpolate_token_seconds(self, num_responses: int) -> float:
        """Return the seconds that an engine takes for one token of each of `num_responses` running
        responses.
        """
        if self.fixed_s is not None and self.per_response_s is not None:
            return self.fixed_s + self.per_response_s * num_responses
        points = self.points
        if num_responses <= points[0][0] or len(points) == 1:
            return points[0][1]
        pairs = list(pairwise(points))
        (low, low_s), (high, high_s) = next(
            (pair for pair in pairs if num_responses <= pair[1][0]), pairs[-1]
        )
        return max(
            min(low_s, high_s), low_s + (high_s - low_s) * (num_responses - low) / (high - low)
        )


@dataclass(frozen=True)
class EngineDurations(DurationsSection):
    decode: DecodeConfig
    # prompt tokens; nothing else of that engine goes on meanwhile
    prefill_tokens_per_s: float = math.inf
    slots: int | None = None  # responses that it decodes at once; None: as the run sets it
    gpus: int | None = None  # of one engine; None: as the run sets it


@dataclass(frozen=True)
class ScoreDurations(DurationsSection):
    per_sample_s: float = 0.0
    fixed_s: float = 0.0  # a call, which has all groups that are finished then
    workers: int | None = None  # samples that are scored at once; None: reward.num_workers


@dataclass(frozen=True)
class TrainerDurations(DurationsSection):
    """Rates of the whole pool of `gpus`; `simulation_plan.compute_slowdown` scales them to the GPUs
    of the run.
    """

    # tokens of prompts and responses that an epoch of the update goes through
    update_tokens_per_s: float
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
        """Raise ValueError for values out of range."""
        super().__post_init__()
        if not 0.5 <= self.doubling_efficiency <= 1:
            raise ValueError(
                f"doubling_efficiency ({self.doubling_efficiency:g}) must lie in 0.5 (twice the"
                " GPUs gain nothing) .. 1 (they take half the time)."
            )


@dataclass(frozen=True)
class SyncDurations(DurationsSection):
    seconds: float = 0.0  # a weight sync, during which no engine decodes
    # a step of rollout.colocated: all changes of hands; None: not simulated
    turns_s: float | None = None
    # responses that go on over a sync have their keys and values computed anew
    recomputes: bool = True


@dataclass(frozen=True)
class RunDurations:
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
        """Raise ValueError for values out of range, and for `within_prompt` of prompts."""
        if self.prompts.within_prompt:
            raise ValueError(
                f"prompts.within_prompt ({self.prompts.within_prompt:g}) is of responses; give it"
                " in lengths, or remove it."
            )
        if not 0 <= self.no_signal < 1:
            raise ValueError(
                f"no_signal ({self.no_signal:g}) must be from 0 to below 1; use 0 for none."
            )


def read_durations(path: Path) -> RunDurations:
    """Read a durations file. Raise ConfigError with everything that is wrong with the file, with
    lines.
    """
    source = format_relative_path(path)
    subject = f"durations {source}"
    try:
        node = parse_yaml(read_config_text(path), source, 0)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            [ConfigProblem(f"cannot read {source}: {reason}; correct --durations.")],
            ARGUMENTS_SUBJECT,
        ) from None
    except ConfigError as error:  # it is not YAML
        raise ConfigError(error.problems, subject) from None
    if not isinstance(node, MappingNode):
        raise ConfigError(
            [ConfigProblem("it has no sections; write lengths, engine and trainer at least.")],
            subject,
        )
    known = [join_key_path("", leaf.key) for leaf in list_setting_leaves(RunDurations)]
    converter = ConfigConverter(lambda key: suggest_nearest_key(key, known))
    found = converter.convert_section(RunDurations, node, "")
    if converter.problems or found is BROKEN:
        raise ConfigError(converter.problems, subject)
    assert isinstance(found, RunDurations)
    return found


@dataclass(frozen=True)
class LengthsConfig:
    """Tokens that a policy writes for a prompt, before data.max_response_length cuts them."""

    kind: Literal["constant", "lognormal", "pareto", "values", "cycle"]
    median: float | None = None  # of lognormal and pareto; of constant: the length
    sigma: float | None = None  # of lognormal and pareto: standard deviation of the logarithm
    # of pareto: so many of the longest have a Pareto tail behind the lognormal body
    tail_share: float = 0.05
    # of pareto: P(length > x) falls as x^-index there; the smaller the heavier
    tail_index: float = 1.5
    # of values: drawn among these; of cycle: taken in this order, again and again
    values: tuple[float, ...] = ()
    # 0: a prompt's responses are independent; 1: they are all equally long
    within_prompt: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a key that `kind` does not have or lacks, and for values out of
        range.
        """
        own = _KEYS_BY_KIND[self.kind]
        for item in fields(self)[1:]:
            name = item.name
            value = getattr(self, item.name)
            is_given = value != item.default
            if name in _EXAMPLE_VALUES and name in own and not is_given:
                raise ValueError(
                    f"kind ({self.kind}) needs a {name}, such as {_EXAMPLE_VALUES[name]}."
                )
            if name not in own and is_given:
                raise ValueError(
                    f"kind ({self.kind}) has no {name}; remove it, or use another kind."
                )
        for name, value in (("median", self.median), ("tail_index", self.tail_index)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be above 0; give a number such as 1.5.")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma ({self.sigma:g}) must be 0 or more; use one such as 0.8.")
        if not 0 < self.tail_share < 1:
            raise ValueError(
                f"tail_share ({self.tail_share:g}) must lie between 0 and 1; use one such as 0.05."
            )
        if not 0 <= self.within_prompt <= 1:
            raise ValueError(
                f"within_prompt ({self.within_prompt:g}) must be from 0 to 1; use 0"
                " for independence."
            )
        if any(not 1 <= value < math.inf for value in self.values):
            raise ValueError(
                f"values must be 1 or more; {min(self.values):g} .. {max(self.values):g} are given."
            )


def make_quantile_function(lengths_config: LengthsConfig) -> Callable[[float], float]:
    """Return a function from z of a standard normal to the length at its quantile, in tokens, not
    yet cut or rounded. Not for kind "cycle".
    """
    if lengths_config.kind == "constant":
        assert lengths_config.median is not None
        constant = lengths_config.median
        return lambda z: constant
    if lengths_config.kind == "values":
        values = sorted(lengths_config.values)
        return lambda z: values[min(len(values) - 1, int(_STANDARD_NORMAL.cdf(z) * len(values)))]
    assert lengths_config.median is not None and lengths_config.sigma is not None, (
        "cycle draws nothing"
    )
    mu = math.log(lengths_config.median)
    sigma = lengths_config.sigma
    if lengths_config.kind == "lognormal":
        return lambda z: math.exp(mu + sigma * z)
    share = lengths_config.tail_share
    index = lengths_config.tail_index
    z_tail = _STANDARD_NORMAL.inv_cdf(1 - share)
    begin = math.exp(mu + sigma * z_tail)

    def compute_pareto_length(z: float) -> float:
        """Return the length at z: lognormal below the tail, Pareto within it."""
        if z < z_tail:
            return math.exp(mu + sigma * z)
        above = max(_MIN_TAIL_PROBABILITY, 0.5 * math.erfc(z / math.sqrt(2)))
        return begin * (share / above) ** (1 / index)

    return compute_pareto_length


@dataclass
class SimulatedWorkload:
    """The responses to each prompt. Simulations that share a workload see the same ones, so that
    schedules compare.

    Groups are told apart by their number, and by how often they were begun.
    """

    response_lengths_config: LengthsConfig
    prompt_lengths_config: LengthsConfig
    group_size: int
    max_response_tokens: int
    max_prompt_tokens: int
    seed: int
    no_signal_share: float = 0.0  # share of the groups whose samples all have the same reward

    def __post_init__(self) -> None:
        """Make the quantile functions of the lengths."""
        self._response_quantile = (
            make_quantile_function(self.response_lengths_config)
            if self.response_lengths_config.kind != "cycle"
            else None
        )
        self._prompt_quantile = (
            make_quantile_function(self.prompt_lengths_config)
            if self.prompt_lengths_config.kind != "cycle"
            else None
        )
        self._drawn_lengths: dict[tuple[int, int], tuple[int, ...]] = {}

    def draw_response_lengths(self, group_number: int, attempt: int = 0) -> tuple[int, ...]:
        """Return the tokens of each response of a group. The same group and attempt always get the
        same lengths.
        """
        found = self._drawn_lengths.get((group_number, attempt))
        if found is None:
            found = self._drawn_lengths[(group_number, attempt)] = self._draw_lengths(
                group_number, attempt
            )
        return found

    def draw_prompt_length(self, group_number: int) -> int:
        """Return the tokens of a group's prompt; the same group always gets the same length."""
        if self._prompt_quantile is None:
            return _round_up_and_cap(
                self.prompt_lengths_config.values[
                    group_number % len(self.prompt_lengths_config.values)
                ],
                self.max_prompt_tokens,
            )
        return _round_up_and_cap(
            self._prompt_quantile(self._make_generator(group_number, 1 << 20).gauss(0.0, 1.0)),
            self.max_prompt_tokens,
        )

    def has_signal(self, group_number: int, attempt: int = 0) -> bool:
        """Return whether the rewards of a group differ, drawn by `no_signal_share`; the same group
        and attempt always get the same answer.
        """
        return (
            not self.no_signal_share
            or self._make_generator(group_number, (1 << 21) + attempt).random()
            >= self.no_signal_share
        )

    def _draw_lengths(self, group_number: int, attempt: int) -> tuple[int, ...]:
        """Draw the lengths of a group's responses, correlated by `within_prompt`, or take them in
        order for kind "cycle".
        """
        if self._response_quantile is None:
            values = self.response_lengths_config.values
            first = group_number * self.group_size
            return tuple(
                _round_up_and_cap(values[(first + i) % len(values)], self.max_response_tokens)
                for i in range(self.group_size)
            )
        normal = self._make_generator(group_number, attempt).gauss
        rho = self.response_lengths_config.within_prompt
        shared = math.sqrt(rho) * self._make_generator(group_number, 1 << 22).gauss(0.0, 1.0)
        own = math.sqrt(1 - rho)
        function = self._response_quantile
        cap = self.max_response_tokens
        return tuple(
            _round_up_and_cap(function(shared + own * normal(0.0, 1.0)), cap)
            for _ in range(self.group_size)
        )

    def _make_generator(self, group_number: int, purpose: int) -> random.Random:
        """Return a random generator that depends on the seed, the group and the purpose only."""
        return random.Random((self.seed << 64) + (group_number << 24) + purpose)


def _round_up_and_cap(length: float, max_length: int) -> int:
    """Return the length rounded up, at least 1 and at most `max_length`."""
    return max(1, min(max_length, math.ceil(length)))
