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
Finding = tuple[bool, float, str]  # whether it is bad, the value, what "should" be

WINDOW = 5  # steps that are averaged, at the beginning of a run and at its end
NUM_BEFORE = 20  # steps that a spike is compared with

MIN_ENTROPY_SHARE = 0.1  # of the entropy of the first steps
MAX_SOLVED = 0.9  # groups that are all right: then entropy may go
MAX_REFERENCE_KL = 0.5  # nats a token
MAX_UPDATE_KL = 0.1  # nats a token
MAX_MASKED = 0.05  # share of samples
MAX_UNIFORM = 0.9  # share of groups
MAX_CLIP = 0.3  # share of tokens
MIN_LR_SHARE = 0.5  # of the peak learning rate: below it a policy may stand still
MAX_CUT = 0.3  # share of responses
MAX_MISMATCH_GROWTH = 3.0  # times that of the first steps
MIN_MISMATCH = 1e-3  # nats a token: what is below does no harm
MAX_SPIKE = 10.0  # times the median of the steps before
KL_LIMITS = {
    "actor/kl_loss": MAX_REFERENCE_KL,
    "actor/reward_kl_penalty": MAX_REFERENCE_KL,
    "actor/ppo_kl": MAX_UPDATE_KL,
}
PEAK_LR = "peak actor/lr"  # in the steps that a HealthWatch keeps


@dataclass(frozen=True)
class Verdict:
    """The verdict of one rule at one step."""

    name: str  # the metric is health/<name>
    is_bad: bool
    value: float
    rule: str  # "the value must ..."
    fix: str

    def __str__(self) -> str:
        return f"health/{self.name}: {self.rule}; it is {self.value:.4g}. {self.fix}"


def verdicts(steps: Steps) -> list[Verdict]:
    """Return the verdicts of the rules that have enough data. `steps`: the metrics of each step, oldest first, the
    current one last.
    """
    found = [(rule, rule.judge(steps)) for rule in RULES]
    return [Verdict(rule.name, *finding, rule.fix) for rule, finding in found if finding is not None]


def _entropy_collapse(steps: Steps) -> Finding | None:
    first, last = _mean_of(steps[:WINDOW], "actor/entropy"), _mean_of(steps[-WINDOW:], "actor/entropy")
    if first is None or last is None or first <= 0.0 or len(steps) < 2 * WINDOW:
        return None
    is_solved = (_mean_of(steps[-WINDOW:], "reward/solve_all") or 0.0) > MAX_SOLVED
    should = (
        f"the last {WINDOW} steps should have at least {MIN_ENTROPY_SHARE:g} times the entropy of the first {WINDOW}"
    )
    return last < MIN_ENTROPY_SHARE * first and not is_solved, last / first, should


def _kl_runaway(steps: Steps) -> Finding | None:
    means = {key: _mean_of(steps[-WINDOW:], key) for key in KL_LIMITS}
    found = {key: mean for key, mean in means.items() if mean is not None}
    if not found:
        return None
    worst = max(found, key=lambda key: found[key] / KL_LIMITS[key])
    should = f"the mean of {worst} over {WINDOW} steps should be at most {KL_LIMITS[worst]:g} nats a token"
    return found[worst] > KL_LIMITS[worst], found[worst], should


def _clip_zero(steps: Steps) -> Finding | None:
    """Told only where a step has several optimizer steps: in the first all ratios are 1."""
    counts = _values(steps[-WINDOW:], "actor/num_optimizer_steps")
    mean = _mean_of(steps[-WINDOW:], "actor/pg_clipfrac")
    if mean is None or len(counts) < WINDOW or min(counts) < 2:
        return None
    rates = _values(steps[-WINDOW:], "actor/lr") or [1.0]
    is_decayed = min(rates) < MIN_LR_SHARE * max([*rates, *_values(steps[-1:], PEAK_LR)])
    should = f"some tokens should be clipped in {WINDOW} steps that have several optimizer steps each"
    return mean == 0.0 and not is_decayed, mean, should


def _mismatch_growing(steps: Steps) -> Finding | None:
    first, last = (_mean_of(part, "training/rollout_kl") for part in (steps[:WINDOW], steps[-WINDOW:]))
    if first is None or last is None or len(steps) < 2 * WINDOW:
        return None
    limit = max(MIN_MISMATCH, MAX_MISMATCH_GROWTH * first)
    should = (
        f"training/rollout_kl of the last {WINDOW} steps should be at most {limit:.3g} nats:"
        f" {MAX_MISMATCH_GROWTH:g} times that of the first {WINDOW}, or {MIN_MISMATCH:g}"
    )
    return last > limit, last, should


def _grad_norm_spike(steps: Steps) -> Finding | None:
    before, last = _values(steps[-NUM_BEFORE - 1 : -1], "actor/grad_norm"), _values(steps[-1:], "actor/grad_norm")
    if len(before) < WINDOW or not last or (median := statistics.median(before)) <= 0.0:
        return None
    should = f"actor/grad_norm should be at most {MAX_SPIKE:g} times the median of the {NUM_BEFORE} steps before"
    return last[0] > MAX_SPIKE * median, last[0] / median, should


def _above(key: str, limit: float) -> Callable[[Steps], Finding | None]:
    def judge(steps: Steps) -> Finding | None:
        mean = _mean_of(steps[-WINDOW:], key)
        should = f"the mean of {key} over {WINDOW} steps should be at most {limit:g}"
        return None if mean is None else (mean > limit, mean, should)

    return judge


@dataclass(frozen=True)
class Rule:
    """`judge` returns None where it cannot tell."""

    name: str
    judge: Callable[[Steps], Finding | None]
    fix: str


RULES = (
    Rule(
        "entropy_collapse",
        _entropy_collapse,
        "Raise actor.entropy_coeff or the upper clip of the policy loss, lower actor.optim.lr, or add a KL term.",
    ),
    Rule(
        "kl_runaway",
        _kl_runaway,
        "Lower actor.optim.lr or actor.ppo_epochs; against the reference raise the weight of the KL term.",
    ),
    Rule(
        "reward_errors",
        _above("reward/masked", MAX_MASKED),
        "See reward/status/* for why, and the log of the reward's processes; such samples train nothing.",
    ),
    Rule(
        "no_signal",
        _above("reward/uniform_groups", MAX_UNIFORM),
        "If reward/solve_all is high take harder prompts, if reward/solve_none is easier ones or a warm-up; or raise"
        " rollout.n.",
    ),
    Rule(
        "clip_high",
        _above("actor/pg_clipfrac", MAX_CLIP),
        "Most of the update is thrown away: lower actor.optim.lr or actor.ppo_epochs, or use larger mini-batches.",
    ),
    Rule(
        "clip_zero",
        _clip_zero,
        "The policy hardly moves: raise actor.optim.lr, and look whether advantages are 0 (reward/mixed_groups).",
    ),
    Rule(
        "length_limit",
        _above("response_length/clip_ratio", MAX_CUT),
        "Raise data.max_response_length, or penalise overlong responses in the reward.",
    ),
    Rule(
        "mismatch_growing",
        _mismatch_growing,
        "Look at the report, section Mismatch; use the engine's dtype in the trainer or algorithm.rollout_correction.",
    ),
    Rule(
        "grad_norm_spike",
        _grad_norm_spike,
        "One such step is clipped by actor.optim.clip_grad; if they come often lower actor.optim.lr, and look at the"
        " worst samples of the step.",
    ),
)
KEYS = (  # of all that the rules read
    *("actor/entropy", "reward/solve_all", *KL_LIMITS, "actor/lr"),
    *("reward/masked", "reward/uniform_groups", "actor/pg_clipfrac", "actor/num_optimizer_steps"),
    *("response_length/clip_ratio", "training/rollout_kl", "actor/grad_norm"),
)


def _values(steps: Steps, key: str) -> list[float]:
    return [step[key] for step in steps if key in step and math.isfinite(step[key])]


def _mean_of(steps: Steps, key: str) -> float | None:
    """Return the mean over the window; None unless every step of the window has the metric."""
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
    """Keeps of the former steps only those that the rules read. `peak_lr`: of the schedule; None: highest so far."""

    def __init__(self, peak_lr: float | None = None) -> None:
        self._peak_lr = peak_lr or 0.0
        self.troubles: dict[str, Trouble] = {}
        self._num_seen = 0
        self._first: list[dict[str, float]] = []
        self._last: deque[dict[str, float]] = deque(maxlen=max(NUM_BEFORE + 1, WINDOW))

    def seen(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """(metrics health/*, lines for the person who watches: one for each verdict that has changed)."""
        row = {key: float(metrics[key]) for key in KEYS if metrics.get(key) is not None}
        self._peak_lr = row[PEAK_LR] = max(self._peak_lr, row.get("actor/lr", 0.0))
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._last.append(row)
        self._num_seen += 1
        found = verdicts(self._steps())
        lines = [line for verdict in found if (line := self._take(step, verdict))]
        return {f"health/{verdict.name}": float(verdict.is_bad) for verdict in found}, lines

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return the verdicts that were bad at some step, by name."""
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
