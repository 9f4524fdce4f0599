"""Reads durations from the files of a finished run, and lists what had to be assumed.

metrics.jsonl has the time of each stage and of each call to the hosts; `record/` (of --record) has
all samples, samples.jsonl a few of each step. The first step is left out: it warms everything up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.part_rules import has_engine_setting
from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.controller.observe.line_file import is_usable_number, parse_json_text
from rlhf_megatron.planning.simulator.durations import (
    DecodeConfig,
    EngineDurations,
    LengthsConfig,
    RunDurations,
    ScoreDurations,
    SyncDurations,
    TrainerDurations,
)
from rlhf_megatron.planning.simulator.simulation_plan import count_rollout_engines

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.yaml"
RECORD_DIR = "record"
MIN_SAMPLES = 20  # whose lengths stand for all
MAX_LENGTH_VALUES = 2000  # lengths that are kept, at even quantiles of those that there are
MetricsLine = Mapping[str, Any]
# of a step; without them nothing can be derived from it
REQUIRED_METRICS = (
    "prompt_length/mean",
    "response_length/mean",
    "response_length/max",
    "rollout/num_samples",
    "perf/total_num_tokens",
)


def read_recorded_durations(run_dir: Path) -> RunDurations:
    """Return the durations of a finished run, read from its files, with all assumptions. Raise
    ValueError or ConfigError where the files do not have enough.
    """
    assumed: list[str] = []
    rows = _read_step_rows_after_first(run_dir, assumed)
    try:
        config = read_run_config(run_dir / CONFIG_FILE).config
    except ConfigError as error:
        raise ConfigError(error.problems, f"durations {run_dir}") from None
    lengths = _derive_lengths(run_dir, rows, assumed)
    return RunDurations(
        lengths=lengths,
        prompts=LengthsConfig(
            "constant", median=max(1.0, mean(row["prompt_length/mean"] for row in rows))
        ),
        engine=EngineDurations(
            DecodeConfig(
                points=(
                    (1, _derive_token_seconds(config.schedule.name, config.rollout, rows, assumed)),
                )
            ),
            slots=_derive_num_slots(config.data.train_batch_size, config.rollout, assumed),
        ),
        trainer=_derive_trainer_durations(rows, assumed),
        score=ScoreDurations(
            per_sample_s=_derive_score_seconds(config.reward.num_workers, rows, assumed)
        ),
        sync=SyncDurations(
            seconds=_compute_median_stage_seconds(rows, "sync"),
            turns_s=_compute_median_stage_seconds(rows, "turns")
            if config.rollout.colocated
            else None,
        ),
        no_signal=_derive_no_signal_share(rows, assumed),
        source=f"{len(rows)} steps of {run_dir.name}",
        assumed=tuple(assumed),
    )


def _read_step_rows_after_first(run_dir: Path, assumptions: list[str]) -> list[MetricsLine]:
    """Return the metrics of all steps but the first, or of the first where it is alone, and append
    to `assumptions` how many steps and numbers are left out. Raise ValueError where there is none.
    """
    path = run_dir / METRICS_FILE
    try:
        lines = _read_json_lines(path)
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; give a durations file, or the directory of a"
            " run with the logger jsonl."
        ) from error
    by_step: dict[int, MetricsLine] = {}
    num_unusable = 0
    for line in lines:
        is_step = line.get("kind") == "step" and isinstance(line.get("step"), int)
        if is_step and is_usable_number(line["step"]):
            row = {name: value for name, value in line.items() if is_usable_number(value)}
            num_unusable += sum(_is_number(value) for value in line.values()) - len(row)
            by_step[line["step"]] = row
    if num_unusable:
        assumptions.append(
            f"{num_unusable} numbers of {METRICS_FILE} that none can be are left out"
        )
    rows = [by_step[step] for step in sorted(by_step)]
    if not rows:
        raise ValueError(f"{path} has no step; wait for some, or give a durations file.")
    return _select_complete_rows(path, rows[1:] or rows, assumptions)


def _select_complete_rows(
    path: Path, rows: Sequence[MetricsLine], assumptions: list[str]
) -> list[MetricsLine]:
    """Return the steps that have all REQUIRED_METRICS, each above 0, and append to `assumptions`
    how many others are left out. Raise ValueError where none has them.
    """
    complete = [row for row in rows if all(row.get(name, 0) > 0 for name in REQUIRED_METRICS)]
    if not complete:
        missing = [name for name in REQUIRED_METRICS if not rows[-1].get(name, 0) > 0]
        raise ValueError(
            f"{path} has no step with all metrics that are needed; its last step lacks"
            f" {', '.join(missing)}: give the directory of another run, or a durations file."
        )
    if len(complete) < len(rows):
        assumptions.append(f"{len(rows) - len(complete)} steps that lack metrics are left out")
    return complete


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, whatever its size."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_json_lines(path: Path) -> list[MetricsLine]:
    """Return the objects of a file of JSON lines, without an unfinished last line. Raise ValueError
    for a line that is no JSON object.
    """
    rows: list[MetricsLine] = []
    text = path.read_bytes().decode("utf-8", errors="replace")
    # the last one is empty, or cut off
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            row = parse_json_text(line)
        except ValueError as error:
            raise ValueError(
                f"{path}:{number} is not JSON ({error}); remove the line, or give another run."
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}:{number} must be a JSON object; remove the line, or give another run."
            )
        rows.append(row)
    return rows


def _derive_lengths(
    run_dir: Path, rows: Sequence[MetricsLine], assumptions: list[str]
) -> LengthsConfig:
    """Return the distribution of response lengths: the lengths of all recorded samples, else of the
    random samples in samples.jsonl, else the mean of all. Append what is assumed to `assumptions`.
    """
    values = _read_recorded_lengths(
        run_dir / RECORD_DIR, [row["step"] for row in rows]
    ) or _read_sampled_lengths(run_dir / SAMPLES_FILE)
    if len(values) >= MIN_SAMPLES:
        values = sorted(values)
        if len(values) > MAX_LENGTH_VALUES:
            values = [
                values[round((i + 0.5) * len(values) / MAX_LENGTH_VALUES - 0.5)]
                for i in range(MAX_LENGTH_VALUES)
            ]
        assumptions.append("responses of one prompt are as different as those of several")
        return LengthsConfig("values", values=tuple(float(max(1, value)) for value in values))
    found = mean(row["response_length/mean"] for row in rows)
    assumptions.append(
        f"all responses are as long as their mean: there are neither {RECORD_DIR}/ nor"
        f" {MIN_SAMPLES} samples"
    )
    return LengthsConfig("constant", median=max(1.0, found))


def _read_recorded_lengths(directory: Path, steps: Sequence[int]) -> list[int]:
    """Return the response lengths of the recorded samples of these steps; [] where the run was not
    recorded.
    """
    if not directory.is_dir():
        return []
    # The only place of the simulator that needs torch: recorded batches are tensors.
    from rlhf_megatron.controller.observe.metrics.batch_metrics import count_sampled_tokens
    from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder

    recorder = RolloutRecorder(directory)
    is_there = {
        int(number)
        for path in directory.glob("step_*.batch")
        if (number := path.stem.removeprefix("step_")).isdecimal()
    }
    return [
        n
        for step in steps
        if step in is_there
        for n in count_sampled_tokens(recorder.read_step(step)).tolist()
    ]


def _read_sampled_lengths(path: Path) -> list[int]:
    """Return the response lengths of the random samples in samples.jsonl; [] where it does not
    exist.
    """
    if not path.exists():
        return []
    return [
        line["num_tokens"]
        for line in _read_json_lines(path)
        if line.get("kind") == "random"
        and is_usable_number(line.get("num_tokens"))
        and line["num_tokens"] > 0
    ]


def _derive_token_seconds(
    schedule_name: str, rollout: RolloutConfig, rows: Sequence[MetricsLine], assumptions: list[str]
) -> float:
    """Return the seconds that an engine takes for a token of each response, the median over steps.
    Append what is assumed to `assumptions`. Raise ValueError where the run has no time of
    generation.

    A generate call takes as long as its longest response, or as the slots allow.
    """
    timed_rows = [row for row in rows if "timing_s/generate" in row]
    if not timed_rows:
        raise ValueError(
            f"schedule.name ({schedule_name}) of this run does not tell how long generation takes;"
            " measure a synchronous run, or give engine.decode in a durations file."
        )
    assumptions.append(
        "an engine decodes as fast with many responses as with few, and prompts take no time"
    )
    slots = rollout.max_num_seqs if has_engine_setting(rollout, "rollout.max_num_seqs") else None

    def count_sequential_tokens(row: MetricsLine) -> float:
        """Return the tokens that an engine decodes one after the other in a step."""
        total = (
            row["response_length/mean"]
            * row["rollout/num_samples"]
            / count_rollout_engines(rollout)
        )
        return max(row["response_length/max"], total / slots if slots else 0.0, 1.0)

    return median(row["timing_s/generate"] / count_sequential_tokens(row) for row in timed_rows)


def _derive_num_slots(
    batch_size: int, rollout: RolloutConfig, assumptions: list[str]
) -> int | None:
    """Return the number of responses that an engine decodes at once, assumed to be its share of a
    step; None where the run's settings have the number.
    """
    if (
        has_engine_setting(rollout, "rollout.max_num_seqs")
        or "max_running_requests" in rollout.sglang.args
    ):
        return None
    slots = -(-batch_size * rollout.n // count_rollout_engines(rollout))
    assumptions.append(
        f"an engine decodes all of its share of a step's responses at once ({slots})"
    )
    return slots


def _derive_trainer_durations(
    rows: Sequence[MetricsLine], assumptions: list[str]
) -> TrainerDurations:
    """Return the trainer's rates from the times of calls to the hosts, or from the times of stages
    where the run did not write these.
    """

    def measure_call_rate(call_name: str) -> float | None:
        """Return the tokens a second of a call, None where the run has no time of it."""
        found = [
            row[f"timing_per_token_ms/{call_name}"]
            for row in rows
            if row.get(f"timing_per_token_ms/{call_name}")
        ]
        return 1e3 / median(found) if found else None

    def measure_stage_rate(stage_name: str) -> float:
        """Return the tokens a second of a stage, infinity where the run has no time of it."""
        found = [
            row[f"timing_s/{stage_name}"] / row["perf/total_num_tokens"]
            for row in rows
            if f"timing_s/{stage_name}" in row
        ]
        return 1 / max(1e-12, median(found)) if found else float("inf")

    update = measure_call_rate("update_actor")
    if update is None:
        assumptions.append(
            "the actor alone takes the stages annotate and update: there are no times of calls"
        )
    epochs, critic_epochs = (
        max(1.0, mean(row.get(f"{role}/num_epochs", 1.0) for row in rows))
        for role in ("actor", "critic")
    )
    none = float("inf")
    return TrainerDurations(
        update_tokens_per_s=epochs * (update or measure_stage_rate("update")),
        annotate_tokens_per_s=(measure_call_rate("old_log_prob") or none)
        if update
        else measure_stage_rate("annotate"),
        reference_tokens_per_s=measure_call_rate("ref") or none,
        critic_tokens_per_s=measure_call_rate("values") or none,
        critic_update_tokens_per_s=critic_epochs * (measure_call_rate("update_critic") or none),
        advantages_s=_compute_median_stage_seconds(rows, "advantages"),
    )


def _derive_score_seconds(
    num_workers: int, rows: Sequence[MetricsLine], assumptions: list[str]
) -> float:
    """Return the seconds of one worker for the reward of a sample."""
    assumptions.append(
        f"all reward.num_workers ({num_workers}) workers take the same time for the reward"
        " of a sample"
    )
    per_sample = [row.get("timing_s/score", 0.0) / row["rollout/num_samples"] for row in rows]
    return median(per_sample) * num_workers


def _derive_no_signal_share(rows: Sequence[MetricsLine], assumptions: list[str]) -> float:
    """Return the mean share of groups without signal; 0 where no group of the run had signal."""
    share = mean(row.get("reward/uniform_groups", 0.0) for row in rows)
    if share < 1:
        return share
    assumptions.append("all groups have signal, though none of this run had")
    return 0.0


def _compute_median_stage_seconds(rows: Sequence[MetricsLine], stage_name: str) -> float:
    """Return the median seconds of a stage; rows without the stage count as 0."""
    return median(row.get(f"timing_s/{stage_name}", 0.0) for row in rows)


def format_durations_yaml(durations: RunDurations) -> str:
    """Return the values that are not defaults as YAML, in the form that `read_durations` reads."""
    return yaml.safe_dump(
        _collect_changed_fields(durations), sort_keys=False, allow_unicode=True, width=100
    )


def _collect_changed_fields(section: Any) -> dict[str, Any]:
    """Return the fields of a section that are not defaults, by name."""
    found: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            found[item.name] = _collect_changed_fields(value)
        elif item.default is MISSING or value != item.default:
            found[item.name] = (
                [list(e) if isinstance(e, tuple) else e for e in value]
                if isinstance(value, tuple)
                else value
            )
    return {name: value for name, value in found.items() if value != {}}
