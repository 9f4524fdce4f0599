"""Health verdicts: what the last steps' metrics say of a run that goes wrong, with the rule and
what to do. Pure.

A rule reads the steps of a run, oldest first, and returns None where it cannot tell (too few steps,
no such metric). docs/monitoring.md has the table of these rules; a test compares its numbers.
HealthWatch applies the rules step after step, tells each change, and sums up at the end.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

StepMetrics = Sequence[Mapping[str, float]]
RuleFinding = tuple[bool, float, str]  # whether it is bad, the value, what "should" be

NUM_WINDOW_STEPS = 5  # steps that are averaged, at the beginning of a run and at its end
NUM_STEPS_BEFORE_SPIKE = 20  # steps that a spike is compared with

MIN_ENTROPY_SHARE = 0.1  # of the entropy of the first steps
MAX_SOLVED_SHARE = 0.9  # groups that are all right: then entropy may go
MAX_REFERENCE_KL = 0.5  # nats a token
MAX_UPDATE_KL = 0.1  # nats a token
MAX_MASKED_SHARE = 0.05  # share of samples
MAX_UNIFORM_SHARE = 0.9  # share of groups
MAX_CLIPPED_SHARE = 0.3  # share of tokens
MIN_LR_SHARE = 0.5  # of the peak learning rate: below it a policy may stand still
MAX_TRUNCATED_SHARE = 0.3  # share of responses
MAX_MISMATCH_GROWTH = 3.0  # times that of the first steps
MIN_MISMATCH_KL = 1e-3  # nats a token: what is below does no harm
MAX_SPIKE_RATIO = 10.0  # times the median of the steps before
KL_LIMITS = {
    "actor/kl_loss": MAX_REFERENCE_KL,
    "actor/reward_kl_penalty": MAX_REFERENCE_KL,
    "actor/ppo_kl": MAX_UPDATE_KL,
}
PEAK_LR_KEY = "peak actor/lr"  # in the steps that a HealthWatch keeps

RULE_METRIC_KEYS = (  # of all that the rules read
    *("actor/entropy", "reward/solve_all", *KL_LIMITS, "actor/lr"),
    *("reward/masked", "reward/uniform_groups", "actor/pg_clipfrac", "actor/num_optimizer_steps"),
    *("response_length/clip_ratio", "training/rollout_kl", "actor/grad_norm"),
)


@dataclass(frozen=True)
class HealthVerdict:
    """The verdict of one rule at one step."""

    name: str  # the metric is health/<name>
    is_bad: bool
    value: float
    rule_text: str  # "the value must ..."
    fix: str

    def __str__(self) -> str:
        """Return the rule, the value and what to do, as a line."""
        return f"health/{self.name}: {self.rule_text}; it is {self.value:.4g}. {self.fix}"


def judge_steps(steps: StepMetrics) -> list[HealthVerdict]:
    """Return the verdicts of the rules that have enough data. `steps`: the metrics of each step,
    oldest first, the current one last.
    """
    verdicts = []
    for rule in HEALTH_RULES:
        finding = rule.judge(steps)
        if finding is not None:
            is_bad, value, rule_text = finding
            verdicts.append(HealthVerdict(rule.name, is_bad, value, rule_text, rule.fix))
    return verdicts


def _judge_entropy_collapse(steps: StepMetrics) -> RuleFinding | None:
    """Judge the entropy of the last steps against the first steps; not bad where nearly all groups
    are solved. Return (is bad, value, rule text), or None for a run shorter than both windows.
    """
    first = _mean_over_window(steps[:NUM_WINDOW_STEPS], "actor/entropy")
    last = _mean_over_window(steps[-NUM_WINDOW_STEPS:], "actor/entropy")
    if first is None or last is None or first <= 0.0 or len(steps) < 2 * NUM_WINDOW_STEPS:
        return None
    is_solved = (
        _mean_over_window(steps[-NUM_WINDOW_STEPS:], "reward/solve_all") or 0.0
    ) > MAX_SOLVED_SHARE
    should = (
        f"the last {NUM_WINDOW_STEPS} steps should have at least {MIN_ENTROPY_SHARE:g} times the"
        f" entropy of the first {NUM_WINDOW_STEPS}"
    )
    return last < MIN_ENTROPY_SHARE * first and not is_solved, last / first, should


def _judge_kl_runaway(steps: StepMetrics) -> RuleFinding | None:
    """Judge the KL metric that is largest relative to its limit. Return (is bad, value, rule text),
    or None where the steps have no such metric.
    """
    means = {key: _mean_over_window(steps[-NUM_WINDOW_STEPS:], key) for key in KL_LIMITS}
    found = {key: mean for key, mean in means.items() if mean is not None}
    if not found:
        return None
    worst = max(found, key=lambda key: found[key] / KL_LIMITS[key])
    should = (
        f"the mean of {worst} over {NUM_WINDOW_STEPS} steps should be at most {KL_LIMITS[worst]:g}"
        " nats a token"
    )
    return found[worst] > KL_LIMITS[worst], found[worst], should


def _judge_zero_clipping(steps: StepMetrics) -> RuleFinding | None:
    """Judge whether no token was clipped in the last steps, unless the learning rate has decayed.
    Return (is bad, value, rule text), or None unless all of them have several optimizer steps: in
    the first optimizer step all ratios are 1.
    """
    counts = _collect_finite_values(steps[-NUM_WINDOW_STEPS:], "actor/num_optimizer_steps")
    mean = _mean_over_window(steps[-NUM_WINDOW_STEPS:], "actor/pg_clipfrac")
    if mean is None or len(counts) < NUM_WINDOW_STEPS or min(counts) < 2:
        return None
    rates = _collect_finite_values(steps[-NUM_WINDOW_STEPS:], "actor/lr") or [1.0]
    is_decayed = min(rates) < MIN_LR_SHARE * max(
        [*rates, *_collect_finite_values(steps[-1:], PEAK_LR_KEY)]
    )
    should = (
        f"some tokens should be clipped in {NUM_WINDOW_STEPS} steps that have several"
        " optimizer steps each"
    )
    return mean == 0.0 and not is_decayed, mean, should


def _judge_mismatch_growth(steps: StepMetrics) -> RuleFinding | None:
    """Judge the mismatch KL of the last steps against the first steps. Return (is bad, value, rule
    text), or None for a run shorter than both windows.
    """
    first, last = (
        _mean_over_window(part, "training/rollout_kl")
        for part in (steps[:NUM_WINDOW_STEPS], steps[-NUM_WINDOW_STEPS:])
    )
    if first is None or last is None or len(steps) < 2 * NUM_WINDOW_STEPS:
        return None
    limit = max(MIN_MISMATCH_KL, MAX_MISMATCH_GROWTH * first)
    should = (
        f"training/rollout_kl of the last {NUM_WINDOW_STEPS} steps should be at most {limit:.3g}"
        f" nats: {MAX_MISMATCH_GROWTH:g} times that of the first {NUM_WINDOW_STEPS},"
        f" or {MIN_MISMATCH_KL:g}"
    )
    return last > limit, last, should


def _judge_grad_norm_spike(steps: StepMetrics) -> RuleFinding | None:
    """Judge the last gradient norm against the median of the steps before. Return (is bad, value,
    rule text), or None where the steps are too few.
    """
    before = _collect_finite_values(steps[-NUM_STEPS_BEFORE_SPIKE - 1 : -1], "actor/grad_norm")
    last = _collect_finite_values(steps[-1:], "actor/grad_norm")
    if len(before) < NUM_WINDOW_STEPS or not last or (median := statistics.median(before)) <= 0.0:
        return None
    should = (
        f"actor/grad_norm should be at most {MAX_SPIKE_RATIO:g} times the median of the"
        f" {NUM_STEPS_BEFORE_SPIKE} steps before"
    )
    return last[0] > MAX_SPIKE_RATIO * median, last[0] / median, should


def _make_upper_limit_rule(
    metric_key: str, limit: float
) -> Callable[[StepMetrics], RuleFinding | None]:
    """Return a rule function that judges a run bad where the mean of the metric over the last steps
    is above `limit`.
    """

    def judge_window_mean(steps: StepMetrics) -> RuleFinding | None:
        """Judge the mean over the last steps. Return (is bad, value, rule text), or None unless all
        of them have the metric.
        """
        mean = _mean_over_window(steps[-NUM_WINDOW_STEPS:], metric_key)
        should = (
            f"the mean of {metric_key} over {NUM_WINDOW_STEPS} steps should be at most {limit:g}"
        )
        return None if mean is None else (mean > limit, mean, should)

    return judge_window_mean


@dataclass(frozen=True)
class HealthRule:
    """`judge` returns None where it cannot tell."""

    name: str
    judge: Callable[[StepMetrics], RuleFinding | None]
    fix: str
    meaning: str  # why a bad verdict is trouble, as a sentence
    metric_keys: tuple[str, ...]  # metrics to look at


HEALTH_RULES = (
    HealthRule(
        "entropy_collapse",
        _judge_entropy_collapse,
        (
            "Raise actor.entropy_coeff or the upper clip of the policy loss, lower actor.optim.lr,"
            " or add a KL term."
        ),
        meaning="The policy answers each prompt in one way only, and finds nothing new any more.",
        metric_keys=(
            "actor/entropy",
            "reward/solve_all",
        ),
    ),
    HealthRule(
        "kl_runaway",
        _judge_kl_runaway,
        (
            "Lower actor.optim.lr or actor.ppo_epochs; against the reference raise the weight of"
            " the KL term."
        ),
        meaning=(
            "The policy leaves the reference, or its former self, faster than its samples can tell"
            " whether that is good."
        ),
        metric_keys=(*KL_LIMITS,),
    ),
    HealthRule(
        "reward_errors",
        _make_upper_limit_rule("reward/masked", MAX_MASKED_SHARE),
        (
            "See reward/status/* for why, and the log of the reward's processes; such samples"
            " train nothing."
        ),
        meaning="The step is smaller than it was meant to be.",
        metric_keys=("reward/masked",),
    ),
    HealthRule(
        "no_signal",
        _make_upper_limit_rule("reward/uniform_groups", MAX_UNIFORM_SHARE),
        (
            "If reward/solve_all is high take harder prompts, if reward/solve_none is easier ones"
            " or a warm-up; or raise rollout.n."
        ),
        meaning="A group whose samples have one reward has no advantage: it teaches nothing.",
        metric_keys=(
            "reward/uniform_groups",
            "reward/mixed_groups",
            "reward/solve_all",
            "reward/solve_none",
        ),
    ),
    HealthRule(
        "clip_high",
        _make_upper_limit_rule("actor/pg_clipfrac", MAX_CLIPPED_SHARE),
        (
            "Most of the update is thrown away: lower actor.optim.lr or actor.ppo_epochs, or use"
            " larger mini-batches."
        ),
        meaning="The ratio leaves its bounds at many tokens, whose gradient is dropped.",
        metric_keys=(
            "actor/pg_clipfrac",
            "actor/ppo_kl",
        ),
    ),
    HealthRule(
        "clip_zero",
        _judge_zero_clipping,
        (
            "The policy hardly moves: raise actor.optim.lr, and look whether advantages are"
            " 0 (reward/mixed_groups)."
        ),
        meaning="After the first optimizer step of a step ratios should move away from 1.",
        metric_keys=(
            "actor/pg_clipfrac",
            "actor/lr",
            "reward/mixed_groups",
        ),
    ),
    HealthRule(
        "length_limit",
        _make_upper_limit_rule("response_length/clip_ratio", MAX_TRUNCATED_SHARE),
        "Raise data.max_response_length, or penalise overlong responses in the reward.",
        meaning="A response that is cut off has no end, and often no answer that could be scored.",
        metric_keys=(
            "response_length/clip_ratio",
            "response_length/mean",
        ),
    ),
    HealthRule(
        "mismatch_growing",
        _judge_mismatch_growth,
        (
            "Look at the report, section Mismatch; use the engine's dtype in the trainer"
            " or algorithm.rollout_correction."
        ),
        meaning="The engines sample from another policy than the trainer thinks, more and more so.",
        metric_keys=(
            "training/rollout_kl",
            "training/rollout_log_probs_diff_p99",
        ),
    ),
    HealthRule(
        "grad_norm_spike",
        _judge_grad_norm_spike,
        (
            "One such step is clipped by actor.optim.clip_grad; if they come often lower"
            " actor.optim.lr, and look at the worst samples of the step."
        ),
        meaning=(
            "One batch pulls far harder than those before: a broken sample, or the beginning of a"
            " divergence."
        ),
        metric_keys=("actor/grad_norm",),
    ),
)


def _collect_finite_values(steps: StepMetrics, metric_key: str) -> list[float]:
    """Return the finite values of the metric, of the steps that have one."""
    return [
        step[metric_key] for step in steps if metric_key in step and math.isfinite(step[metric_key])
    ]


def _mean_over_window(steps: StepMetrics, metric_key: str) -> float | None:
    """Return the mean of the metric; None where fewer than NUM_WINDOW_STEPS of the steps have a
    finite value.
    """
    values = _collect_finite_values(steps, metric_key)
    return statistics.fmean(values) if len(values) >= NUM_WINDOW_STEPS else None


@dataclass
class HealthTrouble:
    """A verdict that was bad at some step."""

    first_step: int
    last_step: int
    num_steps: int  # at which it was bad
    is_now: bool
    text: str  # of the last of them


class HealthWatch:
    """Keeps of the former steps only those that the rules read. `peak_lr`: of the schedule; None:
    highest so far.
    """

    def __init__(self, peak_lr: float | None = None) -> None:
        """Begin without steps. `peak_lr` is the peak of the learning-rate schedule; None: the
        highest rate seen so far counts as the peak.
        """
        self._peak_lr = peak_lr or 0.0
        self.troubles: dict[str, HealthTrouble] = {}
        self._num_steps_seen = 0
        self._first_rows: list[dict[str, float]] = []
        self._last_rows: deque[dict[str, float]] = deque(
            maxlen=max(NUM_STEPS_BEFORE_SPIKE + 1, NUM_WINDOW_STEPS)
        )

    def judge_step(
        self, step: int, metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], list[str]]:
        """Judge a step. Return (metrics health/*, which are 1 where a verdict is bad and else 0; a
        line for each verdict that has changed, for the person who watches).
        """
        row = {key: float(metrics[key]) for key in RULE_METRIC_KEYS if metrics.get(key) is not None}
        self._peak_lr = row[PEAK_LR_KEY] = max(self._peak_lr, row.get("actor/lr", 0.0))
        if len(self._first_rows) < NUM_WINDOW_STEPS:
            self._first_rows.append(row)
        self._last_rows.append(row)
        self._num_steps_seen += 1
        found = judge_steps(self._collect_kept_rows())
        lines = [line for verdict in found if (line := self._update_trouble(step, verdict))]
        return {f"health/{verdict.name}": float(verdict.is_bad) for verdict in found}, lines

    def summarise_troubles(self) -> dict[str, dict[str, Any]]:
        """Return the verdicts that were bad at some step, by name."""
        return {name: asdict(trouble) for name, trouble in self.troubles.items()}

    def _collect_kept_rows(self) -> list[dict[str, float]]:
        """Return all steps of a short run; of a longer run the first and the last steps, which is
        all that any rule reads.
        """
        num_between = self._num_steps_seen - len(self._last_rows)
        return [*self._first_rows[: max(0, num_between)], *self._last_rows]

    def _update_trouble(self, step: int, verdict: HealthVerdict) -> str:
        """Record a verdict. Return a line where it turned bad or is over, else ""."""
        known = self.troubles.get(verdict.name)
        was_bad = known is not None and known.is_now
        if verdict.is_bad:
            if known is None:
                known = self.troubles[verdict.name] = HealthTrouble(step, step, 0, True, "")
            known.last_step = step
            known.is_now = True
            known.text = str(verdict)
            known.num_steps += 1
            return "" if was_bad else f"step {step}: {verdict}"
        if known is not None and was_bad:
            known.is_now = False
            return f"step {step}: health/{verdict.name} is over"
        return ""
