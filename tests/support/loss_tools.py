"""Policy losses as their formulas have them: one sequence at a time, plain numbers, nothing
of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Response:
    """The response tokens of one sequence. `fixed`: the log-probs at which
    stop-gradients stand still.
    """

    log_probs: Sequence[float]
    old: Sequence[float]
    advantages: Sequence[float]
    fixed: Sequence[float]
    picked: Sequence[bool]

    @property
    def ratios(self) -> list[float]:
        return [math.exp(new - old) for new, old in zip(self.log_probs, self.old, strict=True)]

    @property
    def fixed_ratios(self) -> list[float]:
        return [math.exp(new - old) for new, old in zip(self.fixed, self.old, strict=True)]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def ppo_clip(r: Response) -> list[float]:
    losses = []
    for ratio, a in zip(r.ratios, r.advantages, strict=True):
        worse = max(-a * ratio, -a * clip(ratio, 0.8, 1.2))
        losses.append(min(worse, -3 * a) if a < 0 else worse)
    return losses


def gspo(r: Response) -> list[float]:
    s = math.exp(mean([new - old for new, old in zip(r.log_probs, r.old, strict=True)]))
    return [max(-a * s, -a * clip(s, 0.8, 1.2)) for a in r.advantages]


def geo_mean(r: Response) -> list[float]:
    kept = []
    for new, old, a in zip(r.log_probs, r.old, r.advantages, strict=True):
        sign = -1 if a < 0 else 1
        d = sign * (new - old)
        kept.append(sign * min(d, clip(d, -0.4, 0.4)))
    return [-a * math.exp(mean(kept)) for a in r.advantages]


def sapo(r: Response) -> list[float]:
    losses = []
    for ratio, a in zip(r.ratios, r.advantages, strict=True):
        tau = 1.0 if a > 0 else 1.05
        losses.append(-a * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
    return losses


def reinforce(r: Response) -> list[float]:
    return [-a * new for new, a in zip(r.log_probs, r.advantages, strict=True)]


def dro(r: Response) -> list[float]:
    columns = zip(r.log_probs, r.old, r.advantages, strict=True)
    return [-(a * new - 0.025 * (new - old) ** 2) for new, old, a in columns]


def cispo(r: Response) -> list[float]:
    columns = zip(r.log_probs, r.fixed_ratios, r.advantages, strict=True)
    return [-min(ratio, 5.0) * a * new for new, ratio, a in columns]


def divergence(r: Response, distance: Callable[[float, float], float], bound: float) -> list[float]:
    losses = []
    for new, fixed, old, ratio, a in zip(
        r.log_probs, r.fixed, r.old, r.fixed_ratios, r.advantages, strict=True
    ):
        p = math.exp(fixed)
        p_old = math.exp(old)
        goes_on = p > p_old if a > 0 else p < p_old
        is_out = goes_on and distance(p, p_old) > bound
        losses.append(0.0 if is_out else -a * min(ratio, 20.0) * new)
    return losses


def dppo_tv(r: Response) -> list[float]:
    return divergence(r, lambda p, p_old: abs(p - p_old), 0.15)


def dppo_kl(r: Response) -> list[float]:
    def kl(p: float, p_old: float) -> float:
        return p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))

    return divergence(r, kl, 0.05)


def clip_cov(r: Response) -> list[float]:
    columns = zip(r.ratios, r.advantages, r.picked, strict=True)
    return [
        0.0 if picked else max(-a * ratio, -a * clip(ratio, 0.8, 1.2))
        for ratio, a, picked in columns
    ]


def kl_cov(r: Response) -> list[float]:
    columns = zip(r.ratios, r.advantages, r.picked, strict=True)
    return [-a * ratio + (abs(math.log(ratio)) if picked else 0.0) for ratio, a, picked in columns]


FORMULAS: dict[str, Callable[[Response], list[float]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "reinforce": reinforce,
    "gpg": reinforce,
    "dro": dro,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
PARAMS: dict[str, dict[str, float]] = {"gspo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}}
"""Where the defaults are not what the formulas above say."""

AGGREGATIONS: dict[str, Callable[[list[list[float]]], float]] = {
    "token-mean": lambda losses: mean([x for of_one in losses for x in of_one]),
    "token-sum": lambda losses: sum(x for of_one in losses for x in of_one),
    "seq-mean-token-sum": lambda losses: mean([sum(of_one) for of_one in losses]),
    "seq-mean-token-sum-norm": lambda losses: mean([sum(of_one) / 8 for of_one in losses]),
    "seq-mean-token-mean": lambda losses: mean(
        [mean(of_one) if of_one else 0.0 for of_one in losses]
    ),
}
"""Token losses of each sequence -> one number; the factor of the norm is 8."""

# value, old value, return, then with clip 0.5: loss, d loss / d value, clipped
VALUE_LOSSES = [
    (1.0, 1.0, 3.0, 2.0, -2.0, 0),  # not moved
    (1.4, 1.0, 3.0, 1.28, -1.6, 0),  # moved within the range: free
    (2.0, 1.0, 3.0, 1.125, 0.0, 1),  # moved 1 towards the return: held at 1.5, no gradient
    (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # moved away: all of its gradient, past the range too
    (0.0, 1.0, -3.0, 6.125, 0.0, 1),  # downwards: held at 0.5
    (2.0, 1.0, -3.0, 12.5, 5.0, 0),
    (3.0, 1.0, 3.0, 1.125, 0.0, 1),  # there already, further than it may go
    (5.0, 1.0, 1.25, 7.03125, 3.75, 0),  # beyond the return: the free distance is the larger one
    (1.0, 1.0, 1.0, 0.0, 0.0, 0),
]
