"""The reward curve of a run as a picture. matplotlib is in the `demo` extra; without it a run says so and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.scheduler.evaluation import EvaluationResult


def draw_curve(
    path: Path,
    title: str,
    rewards: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, EvaluationResult]],
    majority_accuracy: float | None = None,
) -> bool:
    """Mean reward a step and held-out accuracy with its 95 % interval. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="tab:blue", alpha=0.55, label="mean reward of a step (sampled)")
    if evaluations:
        steps = [step for step, _ in evaluations]
        axes.plot(steps, [r.accuracy for _, r in evaluations], "o-", color="tab:orange", label="held-out accuracy")
        low, high = [r.low for _, r in evaluations], [r.high for _, r in evaluations]
        axes.fill_between(steps, low, high, color="tab:orange", alpha=0.25, label="95 % interval")
    if majority_accuracy is not None:
        axes.axhline(majority_accuracy, color="grey", linestyle=":", label="always the most common answer")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    if rewards or evaluations or majority_accuracy is not None:
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
