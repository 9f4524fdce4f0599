"""The first line that a run prints, and its results at the end: summary.json and a picture of the reward curve.

matplotlib is in the `demo` extra; without it a run says so and makes no picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import ModelConfig, RolloutConfig, SamplingConfig, TrainerConfig
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.evaluation.evaluation import EvaluationResult, majority_accuracy
from rlhf_megatron.observe.line_file import Attempts, explained, write_patiently
from rlhf_megatron.observe.run_dir import write_json
from rlhf_megatron.observe.run_facts import versions
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.runtime.worker_group import WorkerGroup


def how_sampled(sampling: SamplingConfig | RolloutConfig) -> str:
    """Describe the sampling in a few words, for the legend of a curve."""
    if sampling.temperature == 0.0:
        return "greedy"
    many = f", {sampling.n} samples a prompt" if sampling.n > 1 else ""
    return f"sampled at temperature {sampling.temperature:g}{many}"


def draw_losses(
    path: Path, title: str, losses: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]
) -> bool:
    """Loss a step and held-out loss. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(*zip(*losses, strict=True), color="tab:blue", alpha=0.55, label="sft/loss, a step")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="val/loss, held-out")
    axes.set(xlabel="step", ylabel="loss, nats", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def draw_curve(
    path: Path,
    title: str,
    rewards: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, EvaluationResult]],
    majority_accuracy: float | None = None,
    how: tuple[str, str] = ("sampled", "greedy"),
) -> bool:
    """Mean reward a step and held-out score with its 95 % interval. False where matplotlib is not installed.

    `how`: the samples of a step and those of an evaluation were drawn. The axis is 0 to 1 where all values are in it.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if rewards:
        label = f"critic/rewards/mean, a step ({how[0]})"
        axes.plot(*zip(*rewards, strict=True), color="tab:blue", alpha=0.55, label=label)
    if evaluations:
        steps, results = zip(*evaluations, strict=True)
        label = f"val/accuracy, held-out ({how[1]})"
        axes.plot(steps, [r.accuracy for r in results], "o-", color="tab:orange", label=label)
        low, high = [r.low for r in results], [r.high for r in results]
        axes.fill_between(steps, low, high, color="tab:orange", alpha=0.25, label="95 % interval")
    if majority_accuracy is not None:
        axes.axhline(majority_accuracy, color="grey", linestyle=":", label="always the most common answer")
    values = [*(value for _, value in rewards), *(end for _, r in evaluations for end in (r.low, r.accuracy, r.high))]
    axes.set(xlabel="step", ylabel="score", title=title)
    if all(0.0 <= value <= 1.0 for value in values):
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if rewards or evaluations or majority_accuracy is not None:
        axes.legend(loc="best")
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
    rollout: RolloutConfig,
    model_path: str,
    tracker: Tracker,
    run_dir: Path,
    sets: PromptSets,
    warmup_accuracy: float | None,
    attempts: Attempts,
    layouts: Mapping[str, str],
    check_stop: Callable[[], None],
) -> None:
    """Write curve and summary.json of a run that has all of its steps, when the disk has room for them.

    Raises OSError with advice where it has none for long; started again, the run writes them.
    """
    majority = majority_accuracy([item.label for item in sets.held_out]) if sets.held_out else None
    title = f"{trainer.experiment_name} ({layouts['actor']})"
    how = how_sampled(rollout), how_sampled(rollout.val_kwargs)
    found = summary(tracker, layouts, majority, warmup_accuracy, attempts)
    found |= {"seed": trainer.seed, "model": model_path}
    _write(
        found,
        tracker,
        run_dir,
        check_stop,
        lambda path: draw_curve(path, title, tracker.curve, tracker.evaluations, majority, how),
    )


def write_summary(
    found: dict[str, Any],
    tracker: Tracker,
    run_dir: Path,
    check_stop: Callable[[], None],
    title: str,
    held_out: Sequence[tuple[int, float]],
) -> None:
    """Write the summary of a job without rewards, as `finish` does. `held_out`: (step, loss)."""
    _write(found, tracker, run_dir, check_stop, lambda path: draw_losses(path, title, tracker.curve, held_out))


def _write(
    found: dict[str, Any],
    tracker: Tracker,
    run_dir: Path,
    check_stop: Callable[[], None],
    draw: Callable[[Path], bool],
) -> None:
    write_patiently(tracker.loggers.flush, check_stop)
    write_patiently(lambda: write_json(run_dir / "summary.json", found), check_stop)
    tracker.note(f"summary: {run_dir / 'summary.json'}")
    try:
        has_curve = draw(run_dir / "curve.png")
        tracker.note(
            f"curve: {run_dir / 'curve.png'}" if has_curve else "no curve: install matplotlib (pip install '.[demo]')"
        )
    except OSError as error:
        tracker.note(f"no curve: {explained(run_dir / 'curve.png', error).strerror}")
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
        "reward_first": tracker.curve[0][1] if tracker.curve else None,
        "reward_last": tracker.curve[-1][1] if tracker.curve else None,
        "log_prob_max_abs_diff": tracker.first_mismatch,
        **facts_of_any(tracker, layouts, attempts),
    }


def facts_of_any(tracker: Tracker, layouts: Mapping[str, str], attempts: Attempts) -> dict[str, Any]:
    """Return what the summary of every job says."""
    return {
        "steps": tracker.curve[-1][0] if tracker.curve else 0,
        "layout": layouts["actor"],
        "layouts": dict(layouts),
        "seconds": round(tracker.seconds, 1),
        "ettr": round(tracker.clock.ettr(), 4),
        "num_attempts": attempts.count,
        "resumed_from_step": attempts.resumed_from_step,
        "health": tracker.health.summary(),
        "versions": versions(PACKAGES),
    }
