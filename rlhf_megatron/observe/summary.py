"""The first line that a run prints, and its results at the end: summary.json and a picture of the reward curve.

matplotlib is in the `demo` extra; without it a run says so and makes no picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import ModelConfig, TrainerConfig
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.evaluation.evaluation import EvaluationResult, majority_accuracy
from rlhf_megatron.observe.line_file import Attempts
from rlhf_megatron.observe.run_dir import write_json
from rlhf_megatron.observe.run_facts import versions
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.runtime.worker_group import WorkerGroup


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


PACKAGES = ("torch", "megatron-core", "transformers", "rlhf-megatron")


def description(name: str, model: ModelConfig, where: str, engines: str, sets: PromptSets) -> str:
    """Return the first line that a run says. `where`: its pools and layouts; `engines`: number and kind."""
    text = (
        f"{name}: {model.path} ({model.dtype}), {where}, {engines} engine(s),"
        f" {len(sets.train)} training and {len(sets.held_out)} held-out prompts"
    )
    skipped = {"malformed rows skipped": sets.num_bad_rows, "over-long prompts dropped": sets.num_overlong}
    skipped["over-long prompts cut"] = sets.num_cut
    skipped["held-out prompts that are trained on too"] = sets.num_shared
    if len(sets.sources) > 1:
        total = sum(source.weight for source in sets.sources)
        shares = ", ".join(
            f"{source.name} {source.weight / total:.0%} of {len(source.items)}" for source in sets.sources
        )
        text += f" ({shares})"
    return text + "".join(f"; {count} {what}" for what, count in skipped.items() if count)


def finish(
    trainer: TrainerConfig,
    model_path: str,
    tracker: Tracker,
    run_dir: Path,
    sets: PromptSets,
    warmup_accuracy: float | None,
    attempts: Attempts,
    layouts: Mapping[str, str],
) -> None:
    """Write curve and summary.json of a run that has all of its steps."""
    majority = majority_accuracy([item.label for item in sets.held_out]) if sets.held_out else None
    title = f"{trainer.experiment_name} ({layouts['actor']})"
    has_curve = draw_curve(run_dir / "curve.png", title, tracker.rewards, tracker.evaluations, majority)
    found = summary(tracker, layouts, majority, warmup_accuracy, attempts)
    write_json(run_dir / "summary.json", found | {"seed": trainer.seed, "model": model_path})
    tracker.note(f"summary: {run_dir / 'summary.json'}")
    tracker.note(
        f"curve: {run_dir / 'curve.png'}" if has_curve else "no curve: install matplotlib (pip install '.[demo]')"
    )
    tracker.note(f"report: rlhf-megatron report {run_dir}")


def layouts_of(group: WorkerGroup) -> dict[str, str]:
    """Return the layout of each pool."""
    return {pool: str(layout) for pool, layout in group.layouts.items()}


def summary(
    tracker: Tracker,
    layouts: Mapping[str, str],
    majority: float | None,
    warmup_accuracy: float | None,
    attempts: Attempts,
) -> dict[str, Any]:
    """Return what a run came to, for people and for scripts."""
    found: dict[str, Any] = {}
    evaluations = tracker.evaluations
    before, after = [r for step, r in evaluations if step == 0], [r for step, r in evaluations if step > 0]
    for name, results in (("before", before), ("after", after)):
        if results:
            found[f"accuracy_{name}"] = results[-1].accuracy
            found[f"accuracy_{name}_interval"] = [results[-1].low, results[-1].high]
            found[f"accuracy_{name}_items"] = results[-1].num_items
    return {
        **found,
        "majority_answer_accuracy": majority,
        "warmup_sampled_accuracy": warmup_accuracy,
        "reward_first": tracker.rewards[0][1] if tracker.rewards else None,
        "reward_last": tracker.rewards[-1][1] if tracker.rewards else None,
        "steps": tracker.rewards[-1][0] if tracker.rewards else 0,
        "layout": layouts["actor"],
        "layouts": dict(layouts),
        "seconds": round(tracker.seconds, 1),
        "ettr": round(tracker.clock.ettr(), 4),
        "num_attempts": attempts.count,
        "resumed_from_step": attempts.resumed_from_step,
        "log_prob_max_abs_diff": tracker.first_mismatch,
        "health": tracker.health.summary(),
        "versions": versions(PACKAGES),
    }
