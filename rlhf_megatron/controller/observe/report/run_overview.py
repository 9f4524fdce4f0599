"""The head of a report: what was run, how it ended, what it came to, and which settings
somebody chose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

from rlhf_megatron.config.former_defaults import add_implied_defaults
from rlhf_megatron.config.key_paths import get_config_value, list_setting_leaves
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.controller.evaluation.confidence_intervals import Z95
from rlhf_megatron.controller.observe.line_file import COMPLETE, FAILED, STOPPED
from rlhf_megatron.controller.observe.report.charts import (
    MASKED_SHARE_KEY,
    NUM_SAMPLES_KEY,
    REWARD_STD_KEY,
)
from rlhf_megatron.controller.observe.report.run_files import MetricRow, RunFiles

STEP_SECONDS_KEY = "timing_s/step"
HELD_OUT_KEY = "val/accuracy"
BINARY_SCORES_KEY = "val/binary_scores"
MAX_RUNNING_AGE_S = 180.0  # a run without a summary that wrote so lately may still be at work
SETTINGS_WITHOUT_INFLUENCE = (  # on what a run does
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.samples_kept",
)
NUM_END_STEPS = 10  # steps at each end that "first" and "last" reward are means of

NUM_PACE_STEPS = 20  # steps whose mean is what a step takes


@dataclass(frozen=True)
class IntervalEstimate:
    """A number and its 95 % interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class OverviewFact:
    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class ChangedSetting:
    key: str
    value: str
    default: str  # empty: this version has no such setting
    doc: str


@dataclass(frozen=True)
class RunStatus:
    state: str  # "finished", "stopped", "failed", "interrupted" or "running"
    text: str


def read_setting(run: RunFiles, key: str) -> Any:
    """Return the value of a setting in the run's config.yaml; None where it is not written
    there.
    """
    value: Any = run.config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def find_last_step(run: RunFiles) -> int:
    """Return the last step that was made; 0 where there is none."""
    return run.steps[-1].step if run.steps else 0


def read_run_seconds(run: RunFiles) -> float:
    """Return the wall time of the run, from summary.json or else the last row."""
    told = (run.summary or {}).get("seconds")
    rows = [*run.steps, *run.evaluations, *run.warmups]
    return float(told) if isinstance(told, int | float) else max(row.run_seconds for row in rows)


def determine_run_status(run: RunFiles) -> RunStatus:
    """Return how the run ended, by attempts.jsonl; where that has no end, by its logs and the age
    of its files.
    """
    step = find_last_step(run)
    total = read_setting(run, "trainer.total_training_steps")
    place = f"step {step} of {total}" if isinstance(total, int) else f"step {step}"
    if not run.steps and run.warmups:
        place = f"warm-up step {run.warmups[-1].step}"
    last = run.attempts[-1] if run.attempts else {}
    word, _, why = str(last.get("reason", "")).partition(": ")
    if run.summary is not None or word == COMPLETE:
        return RunStatus("finished", f"finished at {place}")
    if word in (STOPPED, FAILED):
        return RunStatus(word, f"{word} after {place}: {why}")
    if run.log_errors:
        return RunStatus("failed", f"failed after {place}")
    if run.age_s < MAX_RUNNING_AGE_S:
        return RunStatus(
            "running",
            (
                f"no summary yet; {place} was written less than {MAX_RUNNING_AGE_S / 60:.0f}"
                " minutes ago"
            ),
        )
    return RunStatus(
        "interrupted", f"interrupted after {place}: no summary.json and no error in its logs"
    )


def estimate_seconds_left(step_seconds: Sequence[float], num_steps_left: int) -> float | None:
    """Estimate the time of the steps to come by the mean of the last steps, without evaluations;
    None where no step is known yet.
    """
    recent = list(step_seconds)[-NUM_PACE_STEPS:]
    return sum(recent) / len(recent) * num_steps_left if recent else None


def format_progress_lines(run: RunFiles) -> list[str]:
    """Return the lines that `rlhf-megatron status` prints. Notes of what could not be read stand at
    the end.
    """
    found = determine_run_status(run)
    total = read_setting(run, "trainer.total_training_steps")
    done = find_last_step(run)
    if found.state != "running":
        lines = [found.text]
    else:
        place = (
            f"step {done} of {total}"
            if done or not run.warmups
            else f"warm-up step {run.warmups[-1].step}"
        )
        lines = [f"running, {place} done {format_duration(run.age_s)} ago"]
        took = [
            row.metrics[STEP_SECONDS_KEY]
            for row in run.steps
            if math.isfinite(row.metrics.get(STEP_SECONDS_KEY, math.nan))
        ]
        left = estimate_seconds_left(took, total - done) if isinstance(total, int) else None
        if left is not None:
            lines.append(
                f"about {format_duration(left)} left for {total - done} steps, as long as"
                " the last ones"
            )
    rewards = [row for row in run.steps if "critic/rewards/mean" in row.metrics]
    if rewards:
        lines.append(
            f"reward {rewards[-1].metrics['critic/rewards/mean']:.3f} at step {rewards[-1].step}"
        )
    last_evaluation = run.evaluations[-1] if run.evaluations else None
    if (score := _read_held_out_score(last_evaluation)) is not None:
        lines.append(
            f"held-out {name_held_out_score([run])} {score.value:.3f} at step"
            f" {run.evaluations[-1].step}"
        )
    if run.log_errors and found.state == "running":
        lines.append(f"logged: {run.log_errors[-1]}")
    return [*lines, *(f"note: {note}" for note in run.notes)]


def read_held_out_scores(
    run: RunFiles,
) -> tuple[IntervalEstimate | None, IntervalEstimate | None]:
    """Return (held-out score before the first step, last held-out score), None where it was not
    measured.
    """
    before = next((row for row in run.evaluations if row.step == 0), None)
    after = next((row for row in reversed(run.evaluations) if row.step > 0), None)
    return _read_held_out_score(before), _read_held_out_score(after)


def read_held_out_score_at(run: RunFiles, step: int | None) -> IntervalEstimate | None:
    """Return the held-out score of the evaluation after this step; None where there is none, and
    for None.
    """
    return _read_held_out_score(next((row for row in run.evaluations if row.step == step), None))


def find_last_common_step(runs: Sequence[RunFiles]) -> int | None:
    """Return the last step that all runs have made; None where there is none."""
    return _find_last_shared_step([{row.step for row in run.steps} for run in runs])


def find_last_common_evaluation(runs: Sequence[RunFiles]) -> int | None:
    """Return the last step, not 0, after which all runs measured a held-out score; None where there
    is none.
    """
    steps = [
        {row.step for row in run.evaluations if row.step and _read_held_out_score(row) is not None}
        for run in runs
    ]
    return _find_last_shared_step(steps)


def _find_last_shared_step(step_sets: Sequence[set[int]]) -> int | None:
    """Return the largest step that is in all sets; None where there is none."""
    shared = reduce(set.intersection, step_sets) if step_sets else set()
    return max(shared, default=None)


def name_held_out_score(runs: Sequence[RunFiles]) -> str:
    """Return what the mean main reward of the held-out items is called: "accuracy" where the runs
    say that all scores are 0 or 1, else "score".
    """
    rows = [row for run in runs for row in run.evaluations if HELD_OUT_KEY in row.metrics]
    is_accuracy = all(row.metrics.get(BINARY_SCORES_KEY) == 1.0 for row in rows)
    return "accuracy" if rows and is_accuracy else "score"


def _read_held_out_score(row: MetricRow | None) -> IntervalEstimate | None:
    """Return the held-out score of an evaluation; None where it has none that is finite."""
    value = row.metrics.get(HELD_OUT_KEY, math.nan) if row else math.nan
    if row is None or not math.isfinite(value):
        return None
    low, high = (row.metrics.get(f"{HELD_OUT_KEY}_{end}", math.nan) for end in ("low", "high"))
    is_known = math.isfinite(low) and math.isfinite(high)
    return IntervalEstimate(value, low, high) if is_known else IntervalEstimate(value)


def estimate_accuracy_gain(before: IntervalEstimate, after: IntervalEstimate) -> IntervalEstimate:
    """Return after - before. Interval: Newcombe 1998, method 10, for two independent proportions;
    too wide for the same items.
    """
    if None in (before.low, before.high, after.low, after.high):
        return IntervalEstimate(after.value - before.value)
    assert (
        before.low is not None
        and before.high is not None
        and after.low is not None
        and after.high is not None
    )
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    difference = after.value - before.value
    return IntervalEstimate(difference, difference - down, difference + up)


def estimate_mean_reward(rows: Sequence[MetricRow]) -> IntervalEstimate | None:
    """Return the mean of the rewards of these steps; the interval is over their samples, where the
    rows have the deviation. None where no row has a reward.
    """
    rows = [row for row in rows if math.isfinite(row.metrics.get("critic/rewards/mean", math.nan))]
    if not rows:
        return None
    value = sum(row.metrics["critic/rewards/mean"] for row in rows) / len(rows)
    variance = 0.0
    for row in rows:
        count = row.metrics.get(NUM_SAMPLES_KEY, 0.0) * (1 - row.metrics.get(MASKED_SHARE_KEY, 0.0))
        if REWARD_STD_KEY not in row.metrics or not count >= 2:
            return IntervalEstimate(value)
        variance += row.metrics[REWARD_STD_KEY] ** 2 / count
    half = Z95 * math.sqrt(variance) / len(rows)
    return IntervalEstimate(value, value - half, value + half)


def select_first_and_last_rows(
    rows: Sequence[MetricRow],
) -> tuple[Sequence[MetricRow], Sequence[MetricRow]]:
    """Return (the first rows, the last rows), NUM_END_STEPS at most and never more than half of
    all, but at least one.
    """
    count = max(1, min(NUM_END_STEPS, len(rows) // 2))
    return rows[:count], rows[-count:]


def describe_layouts(run: RunFiles) -> str:
    """Return the layouts of the actor's pool and of the critic's, if it has one; for a resumed run
    all layouts in turn.
    """
    told = [line.get("layouts") for line in run.attempts] + [(run.summary or {}).get("layouts")]
    texts = [
        ", ".join(f"{name} {layout}" for name, layout in one.items())
        for one in told
        if isinstance(one, Mapping)
    ]
    return ", then ".join(text for text, _ in groupby(texts)) or str(
        (run.summary or {}).get("layout") or ""
    )


def _count_ranks(run: RunFiles) -> int:
    """Return the number of ranks by the run's settings; 0 where they are not known."""
    nodes = read_setting(run, "trainer.nnodes")
    per_node = read_setting(run, "trainer.n_gpus_per_node")
    return nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else 0


def list_overview_facts(run: RunFiles) -> list[OverviewFact]:
    """Return the facts of a run (model, layout, engine, algorithm, data, versions), as far as its
    files have them.
    """
    summary = run.summary or {}
    engine = read_setting(run, "rollout.engine")
    num_engines = read_setting(run, "rollout.num_engines")
    prompts = read_setting(run, "data.train_batch_size")
    group = read_setting(run, "rollout.n")
    sources = read_setting(run, "data.sources") or []
    names = [str(s.get("name")) for s in sources if isinstance(s, Mapping)]
    versions = summary.get("versions")
    found = [
        OverviewFact(
            "Model",
            _join_present_parts(
                read_setting(run, "model.path") or summary.get("model"),
                read_setting(run, "model.dtype"),
            ),
        ),
        OverviewFact(
            "Layout",
            describe_layouts(run),
            "of the ranks: tensor, pipeline, context and data parallel sizes",
        ),
        OverviewFact("Ranks", str(_count_ranks(run) or "")),
        OverviewFact(
            "Engine", f"{num_engines} × {engine}" if engine and num_engines else str(engine or "")
        ),
        OverviewFact(
            "Algorithm",
            _join_present_parts(
                read_setting(run, "algorithm.adv_estimator"),
                read_setting(run, "actor.policy_loss.loss_mode"),
            ),
        ),
        OverviewFact("Samples a step", f"{prompts} prompts × {group}" if prompts and group else ""),
        OverviewFact(
            "Data",
            ", ".join(names)
            or str(read_setting(run, "data.task") or "")
            or _join_train_file_names(run),
        ),
        OverviewFact("Reward", str(read_setting(run, "reward.name") or "")),
        OverviewFact("Seed", str(summary.get("seed", read_setting(run, "trainer.seed") or ""))),
        OverviewFact(
            "Versions",
            ", ".join(f"{k} {v}" for k, v in versions.items())
            if isinstance(versions, Mapping)
            else "",
        ),
    ]
    return [fact for fact in found if fact.value]


def _join_present_parts(*parts: Any) -> str:
    """Join the parts that are not empty with commas."""
    return ", ".join(str(part) for part in parts if part)


def _join_train_file_names(run: RunFiles) -> str:
    """Join the training files with commas."""
    return ", ".join(str(name) for name in read_setting(run, "data.train_files") or [])


def format_duration(seconds: float) -> str:
    """Return a duration as text, such as "3 h 05 min", "1 min 46 s" or "12 s"."""
    total = round(seconds)
    hours = total // 3600
    minutes = total // 60 % 60
    rest = total % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def list_default_settings() -> dict[str, tuple[str, str]]:
    """Return, by full key, (the default of this version as text, the description of the
    setting).
    """
    default = RunConfig()
    return {
        leaf.key: (format_yaml_value(get_config_value(default, leaf.key)), leaf.doc)
        for leaf in list_setting_leaves(RunConfig)
    }


def list_changed_settings(run: RunFiles) -> list[ChangedSetting]:
    """Return the settings that differ from this version's defaults, in the order of config.yaml."""
    usual = list_default_settings()
    unknown = ("", "not a setting of this version")
    found = [
        ChangedSetting(key, value, *usual.get(key, unknown))
        for key, value in flatten_written_settings(run).items()
    ]
    return [setting for setting in found if setting.value != setting.default]


def flatten_written_settings(run: RunFiles) -> dict[str, str]:
    """Return all settings that config.yaml has as text, by full key, also those that this version
    does not know, and the former defaults that config.yaml means by not having their settings.
    """
    known = {leaf.key for leaf in list_setting_leaves(RunConfig)}

    def walk_tree(tree: Mapping[str, Any], key_prefix: str) -> Iterator[tuple[str, str]]:
        """Yield (full key, value as text) of the settings below a section."""
        for name, value in tree.items():
            key = f"{key_prefix}{name}"
            if (
                key not in known
                and isinstance(value, Mapping)
                and any(k.startswith(f"{key}.") for k in known)
            ):
                yield from walk_tree(value, f"{key}.")
            else:
                yield key, format_yaml_value(value)

    return add_implied_defaults(dict(walk_tree(run.config or {}, "")))
