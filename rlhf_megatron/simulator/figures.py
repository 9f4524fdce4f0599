"""What a simulation came to, in figures. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.scheduler.schedules.flow import DropReason
from rlhf_megatron.simulator.plan import Split
from rlhf_megatron.simulator.simulation import History

NO_SIGNAL: DropReason = "no signal"


@dataclass(frozen=True)
class Figures:
    """Of the steps after the first `num_warmup`. Shares are of the time from the sync before them to the last one."""

    num_steps: int
    step_s: float  # mean
    step_s_min: float
    step_s_max: float
    tokens_per_s: float  # of prompts and responses that were trained
    tokens_per_s_per_gpu: float
    response_tokens: float  # mean length of the responses that were trained
    trainer_idle: float  # share of the time in which the trainer's pool neither annotates, updates nor sends weights
    engines_idle: float  # share of the engines' time in which they decode nothing and take part in no sync
    engines_syncing: float  # share of their time that weight syncs take
    scorer_idle: float
    lag_mean: float  # over samples
    lag_max: int
    lags: dict[int, float]  # lag -> share of the trained samples
    dropped: dict[str, float]  # reason -> groups, as a share of those that were begun
    regenerated: float  # the same, of those begun anew

    @property
    def lost(self) -> float:
        """Groups that the schedule drops or begins anew, as a share of those that were begun. Those without signal
        would not train under any."""
        return sum(share for reason, share in self.dropped.items() if reason != NO_SIGNAL) + self.regenerated

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures(history: History, split: Split, num_warmup: int) -> Figures:
    """Raises ValueError where no step is left."""
    steps = history.steps[num_warmup:]
    if not steps:
        raise ValueError(
            f"--warmup ({num_warmup}) must be less than the simulated steps ({len(history.steps)}); lower it, or raise"
            " --steps."
        )
    begin, end = history.busy[num_warmup], history.busy[-1]
    total = end.when - begin.when
    num_tokens = sum(step.num_tokens for step in steps)
    lags = sum((step.lags for step in steps), Counter[int]())
    num_samples = lags.total()
    num_started = end.num_started - begin.num_started
    drops = {reason: (count - begin.drops[reason]) / max(1, num_started) for reason, count in end.drops.items()}
    seconds = [step.seconds for step in steps]
    paused = (end.paused - begin.paused) / total
    return Figures(
        num_steps=len(steps),
        step_s=total / len(steps),
        step_s_min=min(seconds),
        step_s_max=max(seconds),
        tokens_per_s=num_tokens / total,
        tokens_per_s_per_gpu=num_tokens / total / split.gpus,
        response_tokens=sum(step.num_response_tokens for step in steps) / max(1, num_samples),
        trainer_idle=_share(1 - (end.trainer - begin.trainer) / total),
        engines_idle=_share(1 - (end.engines - begin.engines) / total / history.num_engines - paused),
        engines_syncing=paused,
        scorer_idle=_share(1 - (end.scorer - begin.scorer) / total),
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, num_samples),
        lag_max=max(lags, default=0),
        lags={lag: lags[lag] / num_samples for lag in sorted(lags)},
        dropped={reason: share for reason, share in sorted(drops.items()) if share and reason not in ("again", "end")},
        regenerated=drops.get("again", 0.0),
    )


def _share(value: float) -> float:
    """Without rounding's tail below 0, and over 1 where a call reaches past the last sync."""
    return min(1.0, max(0.0, value))
