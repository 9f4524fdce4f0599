"""Health verdicts: what the last steps' metrics say of a run that goes wrong, with the rule and what to do. Pure.

A rule reads the steps of a run, oldest first, and returns None where it cannot tell (too few steps, no such metric).
docs/monitoring.md has the table of these rules; a test compares its numbers.
HealthWatch applies the rules step after step, tells each change, and sums up at the end.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Steps = Sequence[Mapping[str, float]]

WINDOW = 5  # steps that are averaged, at the beginning of a run and at its end
NUM_BEFORE = 20  # steps that a spike is compared with

MIN_ENTROPY_SHARE = 0.1  # of the entropy of the first steps
MAX_SOLVED = 0.9  # groups that are all right: then entropy may go
MAX_REFERENCE_KL = 0.5  # nats a token
MAX_UPDATE_KL = 0.1  # nats a token
MAX_MASKED = 0.05  # share of samples
MAX_UNIFORM = 0.9  # share of groups
MAX_CLIP = 0.3  # share of tokens
MAX_CUT = 0.3  # share of responses
MAX_MISMATCH_GROWTH = 3.0  # times that of the first steps
MIN_MISMATCH = 1e-3  # nats a token: what is below does no harm
MAX_SPIKE = 10.0  # times the median of the steps before


@dataclass(frozen=True)
class Verdict:
    """Of one rule at one step."""

    name: str  # the metric is health/<name>
    is_bad: bool
    value: float
    rule: str  # "the value must ..."
    fix: str

    def __str__(self) -> str:
        return f"health/{self.name}: {self.rule}; it is {self.value:.4g}. {self.fix}"


def verdicts(steps: Steps) -> list[Verdict]:
    """Of those rules that can tell; `steps`: the metrics of each, oldest first, the last one now."""
    return [verdict for rule in RULES if (verdict := rule(steps)) is not None]


def entropy_collapse(steps: Steps) -> Verdict | None:
    first, last = _mean_of(steps[:WINDOW], "actor/entropy"), _mean_of(steps[-WINDOW:], "actor/entropy")
    if first is None or last is None or first <= 0.0 or len(steps) < 2 * WINDOW:
        return None
    is_solved = (_mean_of(steps[-WINDOW:], "reward/solve_all") or 0.0) > MAX_SOLVED
    return Verdict(
        "entropy_collapse",
        last < MIN_ENTROPY_SHARE * first and not is_solved,
        last / first,
        f"the last {WINDOW} steps should have at least {MIN_ENTROPY_SHARE:g} times the entropy of the first {WINDOW}",
        "Raise actor.entropy_coeff or the upper clip of the policy loss, lower actor.optim.lr, or add a KL term.",
    )


def kl_runaway(steps: Steps) -> Verdict | None:
    limits = {
        "actor/kl_loss": MAX_REFERENCE_KL,
        "actor/reward_kl_penalty": MAX_REFERENCE_KL,
        "actor/ppo_kl": MAX_UPDATE_KL,
    }
    means = {key: _mean_of(steps[-WINDOW:], key) for key in limits}
    found = {key: mean for key, mean in means.items() if mean is not None}
    if not found:
        return None
    worst = max(found, key=lambda key: found[key] / limits[key])
    return Verdict(
        "kl_runaway",
        found[worst] > limits[worst],
        found[worst],
        f"the mean of {worst} over {WINDOW} steps should be at most {limits[worst]:g} nats a token",
        "Lower actor.optim.lr or actor.ppo_epochs; against the reference raise the weight of the KL term.",
    )


def reward_errors(steps: Steps) -> Verdict | None:
    return _above(
        steps,
        "reward_errors",
        "reward/masked",
        MAX_MASKED,
        "See reward/status/* for why, and the log of the reward's processes; such samples train nothing.",
    )


def no_signal(steps: Steps) -> Verdict | None:
    return _above(
        steps,
        "no_signal",
        "reward/uniform_groups",
        MAX_UNIFORM,
        "If reward/solve_all is high take harder prompts, if reward/solve_none is easier ones or a warm-up; or raise"
        " rollout.n.",
    )


def clip_high(steps: Steps) -> Verdict | None:
    return _above(
        steps,
        "clip_high",
        "actor/pg_clipfrac",
        MAX_CLIP,
        "Most of the update is thrown away: lower actor.optim.lr or actor.ppo_epochs, or use larger mini-batches.",
    )


def clip_zero(steps: Steps) -> Verdict | None:
    """Told only where a step has several optimizer steps: in the first all ratios are 1."""
    counts = _values(steps[-WINDOW:], "actor/num_optimizer_steps")
    mean = _mean_of(steps[-WINDOW:], "actor/pg_clipfrac")
    if mean is None or len(counts) < WINDOW or min(counts) < 2:
        return None
    return Verdict(
        "clip_zero",
        mean == 0.0,
        mean,
        f"some tokens should be clipped in {WINDOW} steps that have several optimizer steps each",
        "The policy hardly moves: raise actor.optim.lr, and look whether advantages are 0 (reward/mixed_groups).",
    )


def length_limit(steps: Steps) -> Verdict | None:
    return _above(
        steps,
        "length_limit",
        "response_length/clip_ratio",
        MAX_CUT,
        "Raise data.max_response_length, or penalise overlong responses in the reward.",
    )


def mismatch_growing(steps: Steps) -> Verdict | None:
    first, last = (_mean_of(part, "training/rollout_kl") for part in (steps[:WINDOW], steps[-WINDOW:]))
    if first is None or last is None or len(steps) < 2 * WINDOW:
        return None
    limit = max(MIN_MISMATCH, MAX_MISMATCH_GROWTH * first)
    return Verdict(
        "mismatch_growing",
        last > limit,
        last,
        f"training/rollout_kl of the last {WINDOW} steps should be at most {limit:.3g} nats:"
        f" {MAX_MISMATCH_GROWTH:g} times that of the first {WINDOW}, or {MIN_MISMATCH:g}",
        "Look at the report, section Mismatch; use the engine's dtype in the trainer or algorithm.rollout_correction.",
    )


def grad_norm_spike(steps: Steps) -> Verdict | None:
    before, last = _values(steps[-NUM_BEFORE - 1 : -1], "actor/grad_norm"), _values(steps[-1:], "actor/grad_norm")
    if len(before) < WINDOW or not last or (median := statistics.median(before)) <= 0.0:
        return None
    return Verdict(
        "grad_norm_spike",
        last[0] > MAX_SPIKE * median,
        last[0] / median,
        f"actor/grad_norm should be at most {MAX_SPIKE:g} times the median of the {NUM_BEFORE} steps before",
        "One such step is clipped by actor.optim.clip_grad; if they come often lower actor.optim.lr, and look at the"
        " worst samples of the step.",
    )


Rule = Callable[[Steps], Verdict | None]
RULES: tuple[Rule, ...] = (
    entropy_collapse,
    kl_runaway,
    reward_errors,
    no_signal,
    clip_high,
    clip_zero,
    length_limit,
    mismatch_growing,
    grad_norm_spike,
)
KEYS = (  # of all that the rules read
    *("actor/entropy", "reward/solve_all", "actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
    *("reward/masked", "reward/uniform_groups", "actor/pg_clipfrac", "actor/num_optimizer_steps"),
    *("response_length/clip_ratio", "training/rollout_kl", "actor/grad_norm"),
)


def _above(steps: Steps, name: str, key: str, limit: float, fix: str) -> Verdict | None:
    mean = _mean_of(steps[-WINDOW:], key)
    if mean is None:
        return None
    return Verdict(name, mean > limit, mean, f"the mean of {key} over {WINDOW} steps should be at most {limit:g}", fix)


def _values(steps: Steps, key: str) -> list[float]:
    return [step[key] for step in steps if key in step and math.isfinite(step[key])]


def _mean_of(steps: Steps, key: str) -> float | None:
    """None unless a whole window of steps has a number."""
    values = _values(steps, key)
    return statistics.fmean(values) if len(values) >= WINDOW else None


@dataclass
class Trouble:
    """A verdict that was bad at some step."""

    first_step: int
    last_step: int
    num_steps: int  # at which it was bad
    is_now: bool
    text: str  # of the last of them


class HealthWatch:
    """Keeps of the former steps only those that the rules read."""

    def __init__(self) -> None:
        self.troubles: dict[str, Trouble] = {}
        self._num_seen = 0
        self._first: list[dict[str, float]] = []
        self._last: deque[dict[str, float]] = deque(maxlen=max(NUM_BEFORE + 1, WINDOW))

    def seen(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """(metrics health/*, lines for the person who watches: one for each verdict that has changed)."""
        row = {key: float(metrics[key]) for key in KEYS if metrics.get(key) is not None}
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._last.append(row)
        self._num_seen += 1
        found = verdicts(self._steps())
        lines = [line for verdict in found if (line := self._take(step, verdict))]
        return {f"health/{verdict.name}": float(verdict.is_bad) for verdict in found}, lines

    def summary(self) -> dict[str, dict[str, Any]]:
        """By verdict, those that were bad at some step."""
        return {name: asdict(trouble) for name, trouble in self.troubles.items()}

    def _steps(self) -> list[dict[str, float]]:
        """All steps of a short run; of a longer one the first and the last, which is all that any rule reads."""
        num_between = self._num_seen - len(self._last)
        return [*self._first[: max(0, num_between)], *self._last]

    def _take(self, step: int, verdict: Verdict) -> str:
        known = self.troubles.get(verdict.name)
        was_bad = known is not None and known.is_now
        if verdict.is_bad:
            if known is None:
                known = self.troubles[verdict.name] = Trouble(step, step, 0, True, "")
            known.last_step, known.is_now, known.text = step, True, str(verdict)
            known.num_steps += 1
            return "" if was_bad else f"step {step}: {verdict}"
        if known is not None and was_bad:
            known.is_now = False
            return f"step {step}: health/{verdict.name} is over"
        return ""
