"""The first line that a run prints, and its results at the end: summary.json and a picture of
the reward curve.

matplotlib is in the `demo` extra; without it a run says so and makes no picture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.config.schema import ModelConfig, RolloutConfig, SamplingConfig, TrainerConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    EvaluationResult,
    compute_majority_accuracy,
)
from rlhf_megatron.controller.observe.line_file import (
    RunAttempts,
    retry_while_disk_is_full,
)
from rlhf_megatron.controller.observe.run_dir import write_json_atomically
from rlhf_megatron.controller.observe.run_facts import read_package_versions
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.data.extra_columns import describe_left_out_columns
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.write_errors import explain_write_error, explain_write_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSIONED_PACKAGES = ("torch", "megatron-core", "transformers", "rlhf-megatron")


def describe_sampling(sampling: SamplingConfig | RolloutConfig) -> str:
    """Describe the sampling in a few words, for the legend of a curve."""
    if sampling.temperature == 0.0:
        return "greedy"
    many = f", {sampling.n} samples a prompt" if sampling.n > 1 else ""
    return f"sampled at temperature {sampling.temperature:g}{many}"


def draw_loss_curve(
    path: Path,
    title: str,
    losses: Sequence[tuple[int, float]],
    held_out_losses: Sequence[tuple[int, float]],
) -> bool:
    """Draw the loss of each step and the held-out loss to the image file `path`. Return False where
    matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(*zip(*losses, strict=True), color="tab:blue", alpha=0.55, label="sft/loss, a step")
    if held_out_losses:
        axes.plot(
            *zip(*held_out_losses, strict=True),
            "o-",
            color="tab:orange",
            label="val/loss, held-out",
        )
    axes.set(xlabel="step", ylabel="loss, nats", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    _save_curve(figure, path)
    pyplot.close(figure)
    return True


def _save_curve(figure: Figure, path: Path) -> None:
    """Save a figure as an image. Warnings of matplotlib, such as of a character of the run's name
    that its font lacks, are no use to a run that ends.
    """
    with warnings.catch_warnings(), explain_write_errors(path):
        warnings.simplefilter("ignore")
        figure.tight_layout()
        figure.savefig(path)


def draw_reward_curve(
    path: Path,
    title: str,
    rewards: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, EvaluationResult]],
    majority_accuracy: float | None = None,
    sampling_texts: tuple[str, str] = ("sampled", "greedy"),
) -> bool:
    """Draw the mean reward of each step and the held-out score with its 95 % interval to the image
    file `path`. Return False where matplotlib is not installed.

    `sampling_texts` say how the samples of a step and those of an evaluation were drawn. The axis
    is 0 to 1 where all values are within it.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if rewards:
        label = f"critic/rewards/mean, a step ({sampling_texts[0]})"
        axes.plot(*zip(*rewards, strict=True), color="tab:blue", alpha=0.55, label=label)
    if evaluations:
        steps, results = zip(*evaluations, strict=True)
        label = f"val/accuracy, held-out ({sampling_texts[1]})"
        axes.plot(steps, [r.accuracy for r in results], "o-", color="tab:orange", label=label)
        low = [r.low for r in results]
        high = [r.high for r in results]
        axes.fill_between(steps, low, high, color="tab:orange", alpha=0.25, label="95 % interval")
    if majority_accuracy is not None:
        axes.axhline(
            majority_accuracy, color="grey", linestyle=":", label="always the most common answer"
        )
    values = [
        *(value for _, value in rewards),
        *(end for _, r in evaluations for end in (r.low, r.accuracy, r.high)),
    ]
    axes.set(xlabel="step", ylabel="score", title=title)
    if all(0.0 <= value <= 1.0 for value in values):
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if rewards or evaluations or majority_accuracy is not None:
        axes.legend(loc="best")
    _save_curve(figure, path)
    pyplot.close(figure)
    return True


def describe_run_start(
    run_name: str, model: ModelConfig, pools_text: str, engines_text: str, prompt_sets: PromptSets
) -> str:
    """Return the first line that a run shows. `pools_text`: its pools and layouts; `engines_text`:
    number and kind of engines.
    """
    text = (
        f"{run_name}: {model.path} ({model.dtype}), {pools_text}, {engines_text} engine(s),"
        f" {len(prompt_sets.train_items)} training and {len(prompt_sets.held_out_items)}"
        " held-out prompts"
    )
    skipped = {
        "malformed rows skipped": prompt_sets.num_bad_rows,
        "over-long prompts dropped": prompt_sets.num_overlong,
    }
    skipped["over-long prompts cut"] = prompt_sets.num_cut
    skipped["held-out prompts that are trained on too"] = prompt_sets.num_held_out_in_train
    if len(prompt_sets.sources) > 1:
        total = sum(source.weight for source in prompt_sets.sources)
        shares = ", ".join(
            f"{source.name} {source.weight / total:.0%} of {len(source.items)}"
            for source in prompt_sets.sources
        )
        text += f" ({shares})"
    phrases = [f"{count} {what}" for what, count in skipped.items() if count]
    if note := describe_left_out_columns(prompt_sets.left_out_columns):
        phrases.append(note)
    return "; ".join([text, *phrases])


def write_training_summary(
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    model_path: str,
    tracker: RunTracker,
    run_dir: Path,
    prompt_sets: PromptSets,
    warmup_accuracy: float | None,
    attempts: RunAttempts,
    layouts: Mapping[str, str],
    check_stop: Callable[[], None],
) -> None:
    """Write the reward curve and summary.json of a run that has all of its steps, waiting while the
    disk is full.

    Raise OSError with advice where the disk stays full; started again, the run writes them.
    """
    majority = (
        compute_majority_accuracy([item.label for item in prompt_sets.held_out_items])
        if prompt_sets.held_out_items
        else None
    )
    title = f"{trainer.experiment_name} ({layouts['actor']})"
    how = describe_sampling(rollout), describe_sampling(rollout.val_kwargs)
    found = summarise_training(tracker, layouts, majority, warmup_accuracy, attempts)
    found |= {"seed": trainer.seed, "model": model_path}
    _write_summary_and_curve(
        found,
        tracker,
        run_dir,
        check_stop,
        lambda path: draw_reward_curve(
            path, title, tracker.curve_points, tracker.evaluation_results, majority, how
        ),
    )


def write_loss_summary(
    summary_fields: dict[str, Any],
    tracker: RunTracker,
    run_dir: Path,
    check_stop: Callable[[], None],
    title: str,
    held_out_losses: Sequence[tuple[int, float]],
) -> None:
    """Write the summary and the loss curve of a job without rewards, as `write_training_summary`
    does. `held_out_losses`: (step, loss).
    """
    _write_summary_and_curve(
        summary_fields,
        tracker,
        run_dir,
        check_stop,
        lambda path: draw_loss_curve(path, title, tracker.curve_points, held_out_losses),
    )


def _write_summary_and_curve(
    summary_fields: dict[str, Any],
    tracker: RunTracker,
    run_dir: Path,
    check_stop: Callable[[], None],
    draw_curve: Callable[[Path], bool],
) -> None:
    """Write summary.json and curve.png, and note their paths. Wait for room for the summary; only
    note where there is none for the curve.
    """
    retry_while_disk_is_full(tracker.logger_set.flush, check_stop)
    retry_while_disk_is_full(
        lambda: write_json_atomically(run_dir / "summary.json", summary_fields), check_stop
    )
    tracker.show_note(f"summary: {run_dir / 'summary.json'}")
    try:
        has_curve = draw_curve(run_dir / "curve.png")
        tracker.show_note(
            f"curve: {run_dir / 'curve.png'}"
            if has_curve
            else f"no curve: install matplotlib ({format_install_command('demo')})"
        )
    except OSError as error:
        tracker.show_note(f"no curve: {explain_write_error(run_dir / 'curve.png', error).strerror}")
    tracker.show_note(f"report: rlhf-megatron report {run_dir}")


def describe_pool_layouts(worker_group: WorkerGroup) -> dict[str, str]:
    """Return the layout of each pool, as text."""
    return {pool: str(layout) for pool, layout in worker_group.layouts.items()}


def summarise_training(
    tracker: RunTracker,
    layouts: Mapping[str, str],
    majority_accuracy: float | None,
    warmup_accuracy: float | None,
    attempts: RunAttempts,
) -> dict[str, Any]:
    """Return the entries of summary.json of a training run: accuracies, first and last reward, and
    the entries of every job.
    """
    found: dict[str, Any] = {}
    evaluations = tracker.evaluation_results
    before = [r for step, r in evaluations if step == 0]
    after = [r for step, r in evaluations if step > 0]
    for name, results in (("before", before), ("after", after)):
        if results:
            found[f"accuracy_{name}"] = results[-1].accuracy
            found[f"accuracy_{name}_interval"] = [results[-1].low, results[-1].high]
            found[f"accuracy_{name}_items"] = results[-1].num_items
    return {
        **found,
        "majority_answer_accuracy": majority_accuracy,
        "warmup_sampled_accuracy": warmup_accuracy,
        "reward_first": tracker.curve_points[0][1] if tracker.curve_points else None,
        "reward_last": tracker.curve_points[-1][1] if tracker.curve_points else None,
        "log_prob_max_abs_diff": tracker.first_mismatch,
        **summarise_any_job(tracker, layouts, attempts),
    }


def summarise_any_job(
    tracker: RunTracker, layouts: Mapping[str, str], attempts: RunAttempts
) -> dict[str, Any]:
    """Return the entries of summary.json that every job has."""
    return {
        "steps": tracker.curve_points[-1][0] if tracker.curve_points else 0,
        "layout": layouts["actor"],
        "layouts": dict(layouts),
        "seconds": round(tracker.run_seconds, 1),
        "ettr": round(tracker.clock.compute_ettr(), 4),
        "num_attempts": attempts.num_attempts,
        "resumed_from_step": attempts.resumed_from_step,
        "health": tracker.health_watch.summarise_troubles(),
        "versions": read_package_versions(VERSIONED_PACKAGES),
    }
