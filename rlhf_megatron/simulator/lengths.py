"""How many tokens responses have: distributions given by their quantiles, and the samples that are drawn from them.

A group's responses are alike to the degree `within_prompt`: with z of the group and e of each sample standard normal,
a response has the length at the quantile Phi(sqrt(rho) z + sqrt(1 - rho) e) (a Gaussian copula).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

_NORMAL = NormalDist()
_EDGE = 1e-12  # quantiles are asked for this far from 0 and 1


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
        shaped, listed = ("lognormal", "pareto"), ("values", "cycle")
        if (self.median is None) == (self.kind not in listed):
            need = "needs a median" if self.kind not in listed else "has no median; remove it"
            raise ValueError(f"kind ({self.kind}) {need}" + (", such as 1000." if self.kind not in listed else "."))
        if (self.sigma is None) == (self.kind in shaped):
            raise ValueError(
                f"kind ({self.kind}) needs a sigma, such as 0.8."
                if self.kind in shaped
                else f"kind ({self.kind}) has no sigma; remove it."
            )
        if bool(self.values) != (self.kind in listed):
            raise ValueError(
                f"kind ({self.kind}) needs values, such as [120, 300, 2048]."
                if self.kind in listed
                else f"kind ({self.kind}) has no values; remove them, or set kind: values."
            )
        for name, default in (("tail_share", 0.05), ("tail_index", 1.5)):
            if self.kind != "pareto" and getattr(self, name) != default:
                raise ValueError(f"kind ({self.kind}) has no {name}; remove it, or set kind: pareto.")
        if self.kind in ("constant", "cycle") and self.within_prompt:
            raise ValueError(f"kind ({self.kind}) has no within_prompt, since it draws nothing; remove it.")
        for name, value in (("median", self.median), ("tail_index", self.tail_index)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be above 0; give a number such as 1.5.")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma ({self.sigma:g}) must be 0 or more; use one such as 0.8.")
        if not 0 < self.tail_share < 1:
            raise ValueError(f"tail_share ({self.tail_share:g}) must lie between 0 and 1; use one such as 0.05.")
        if not 0 <= self.within_prompt <= 1:
            raise ValueError(f"within_prompt ({self.within_prompt:g}) must lie in 0 .. 1; use 0 for independence.")
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
    """What the policy writes for each prompt: the same in every simulation that shares it, so that schedules compare.

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
        """Of the samples of a group, tokens."""
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
