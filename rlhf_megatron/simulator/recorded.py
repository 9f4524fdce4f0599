"""Reads durations from the files of a finished run, and lists what had to be assumed.

metrics.jsonl has the time of each stage and of each call to the hosts; `record/` (of --record) has all samples,
samples.jsonl a few of each step. The first step is left out: it warms everything up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.parts import reads
from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.simulator.durations import (
    DecodeConfig,
    Durations,
    EngineDurations,
    LengthsConfig,
    ScoreDurations,
    SyncDurations,
    TrainerDurations,
)
from rlhf_megatron.simulator.plan import num_engines

METRICS, SAMPLES, CONFIG, RECORD = "metrics.jsonl", "samples.jsonl", "config.yaml", "record"
MIN_SAMPLES = 20  # whose lengths stand for all
MAX_VALUES = 2000  # lengths that are kept, at even quantiles of those that there are
Row = Mapping[str, Any]


def recorded_durations(run_dir: Path) -> Durations:
    """Raises ValueError, ConfigError where the run does not tell enough."""
    rows = _steps(run_dir)
    try:
        config = read_run_config(run_dir / CONFIG).config
    except ConfigError as error:
        raise ConfigError(error.problems, f"durations {run_dir}") from None
    assumed: list[str] = []
    lengths = _lengths(run_dir, rows, assumed)
    return Durations(
        lengths=lengths,
        prompts=LengthsConfig("constant", median=max(1.0, mean(row["prompt_length/mean"] for row in rows))),
        engine=EngineDurations(
            DecodeConfig(points=((1, _decode(config.schedule.name, config.rollout, rows, assumed)),)),
            slots=_slots(config.data.train_batch_size, config.rollout, assumed),
        ),
        trainer=_trainer(rows, assumed),
        score=ScoreDurations(per_sample_s=_score(config.reward.num_workers, rows, assumed)),
        sync=SyncDurations(
            seconds=_seconds(rows, "sync"), turns_s=_seconds(rows, "turns") if config.rollout.colocated else None
        ),
        no_signal=_no_signal(rows, assumed),
        source=f"{len(rows)} steps of {run_dir.name}",
        assumed=tuple(assumed),
    )


def _steps(run_dir: Path) -> list[Row]:
    path = run_dir / METRICS
    try:
        found = _json_lines(path)
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; give a durations file, or the directory of a run with the logger"
            " jsonl."
        ) from error
    by_step: dict[int, Row] = {}
    for row in found:
        if row["kind"] == "step":
            by_step[row["step"]] = row
    rows = [by_step[step] for step in sorted(by_step)]
    if not rows:
        raise ValueError(f"{path} has no step; wait for some, or give a durations file.")
    return rows[1:] or rows


def _json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text().split("\n")[:-1], 1):  # the last one is empty, or cut off
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}); remove the line, or give another run.") from None
    return rows


def _lengths(run_dir: Path, rows: Sequence[Row], assumed: list[str]) -> LengthsConfig:
    """Use the lengths of all recorded samples, else those of the random samples shown, else the mean of all."""
    values = _of_record(run_dir / RECORD, [row["step"] for row in rows]) or _of_samples(run_dir / SAMPLES)
    if len(values) >= MIN_SAMPLES:
        values = sorted(values)
        if len(values) > MAX_VALUES:
            values = [values[round((i + 0.5) * len(values) / MAX_VALUES - 0.5)] for i in range(MAX_VALUES)]
        assumed.append("responses of one prompt are as different as those of several")
        return LengthsConfig("values", values=tuple(float(max(1, value)) for value in values))
    found = mean(row["response_length/mean"] for row in rows)
    assumed.append(f"all responses are as long as their mean: there are neither {RECORD}/ nor {MIN_SAMPLES} samples")
    return LengthsConfig("constant", median=max(1.0, found))


def _of_record(directory: Path, steps: Sequence[int]) -> list[int]:
    if not directory.is_dir():
        return []
    # The only place of the simulator that needs torch: recorded batches are tensors.
    from rlhf_megatron.observe.metrics.batch import response_lengths
    from rlhf_megatron.recovery.recorder import Recorder

    recorder = Recorder(directory)
    is_there = {int(path.stem.removeprefix("step_")) for path in directory.glob("step_*.batch")}
    return [n for step in steps if step in is_there for n in response_lengths(recorder.read(step)).tolist()]


def _of_samples(path: Path) -> list[int]:
    if not path.exists():
        return []
    return [line["num_tokens"] for line in _json_lines(path) if line["kind"] == "random" and line["num_tokens"]]


def _decode(schedule: str, rollout: RolloutConfig, rows: Sequence[Row], assumed: list[str]) -> float:
    """Return the seconds of a token of each response.

    A generate call takes as long as its longest response, or as the slots allow.
    """
    if "timing_s/generate" not in rows[0]:
        raise ValueError(
            f"schedule.name ({schedule}) of this run does not tell how long generation takes; measure a"
            " synchronous run, or give engine.decode in a durations file."
        )
    assumed.append("an engine decodes as fast with many responses as with few, and prompts take no time")
    slots = rollout.max_num_seqs if reads(rollout, "rollout.max_num_seqs") else None

    def tokens_in_turn(row: Row) -> float:
        total = row["response_length/mean"] * row["rollout/num_samples"] / num_engines(rollout)
        return max(row["response_length/max"], total / slots if slots else 0.0, 1.0)

    return median(row["timing_s/generate"] / tokens_in_turn(row) for row in rows)


def _slots(batch_size: int, rollout: RolloutConfig, assumed: list[str]) -> int | None:
    """Return the responses that an engine decodes at once; None where the run's settings have them."""
    if reads(rollout, "rollout.max_num_seqs") or "max_running_requests" in rollout.sglang.args:
        return None
    slots = -(-batch_size * rollout.n // num_engines(rollout))
    assumed.append(f"an engine decodes all of its share of a step's responses at once ({slots})")
    return slots


def _trainer(rows: Sequence[Row], assumed: list[str]) -> TrainerDurations:
    """Use the time of calls to the hosts; where a run did not write it, the time of the stages."""

    def rate(call: str) -> float | None:
        found = [row[f"timing_per_token_ms/{call}"] for row in rows if row.get(f"timing_per_token_ms/{call}")]
        return 1e3 / median(found) if found else None

    def of_stage(stage: str) -> float:
        found = [row[f"timing_s/{stage}"] / row["perf/total_num_tokens"] for row in rows if f"timing_s/{stage}" in row]
        return 1 / max(1e-12, median(found)) if found else float("inf")

    update = rate("update_actor")
    if update is None:
        assumed.append("the actor alone takes the stages annotate and update: there are no times of calls")
    epochs, critic_epochs = (
        max(1.0, mean(row.get(f"{role}/num_epochs", 1.0) for row in rows)) for role in ("actor", "critic")
    )
    none = float("inf")
    return TrainerDurations(
        update_tokens_per_s=epochs * (update or of_stage("update")),
        annotate_tokens_per_s=(rate("old_log_prob") or none) if update else of_stage("annotate"),
        reference_tokens_per_s=rate("ref") or none,
        critic_tokens_per_s=rate("values") or none,
        critic_update_tokens_per_s=critic_epochs * (rate("update_critic") or none),
        advantages_s=_seconds(rows, "advantages"),
    )


def _score(num_workers: int, rows: Sequence[Row], assumed: list[str]) -> float:
    assumed.append(f"all reward.num_workers ({num_workers}) workers take the same time for the reward of a sample")
    per_sample = [row.get("timing_s/score", 0.0) / row["rollout/num_samples"] for row in rows]
    return median(per_sample) * num_workers


def _no_signal(rows: Sequence[Row], assumed: list[str]) -> float:
    share = mean(row.get("reward/uniform_groups", 0.0) for row in rows)
    if share < 1:
        return share
    assumed.append("all groups have signal, though none of this run had")
    return 0.0


def _seconds(rows: Sequence[Row], stage: str) -> float:
    return median(row.get(f"timing_s/{stage}", 0.0) for row in rows)


def as_yaml(durations: Durations) -> str:
    """Write what is not a default, in the form that `read_durations` reads."""
    return yaml.safe_dump(_given(durations), sort_keys=False, allow_unicode=True, width=100)


def _given(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            found[item.name] = _given(value)
        elif item.default is MISSING or value != item.default:
            found[item.name] = (
                [list(e) if isinstance(e, tuple) else e for e in value] if isinstance(value, tuple) else value
            )
    return {name: value for name, value in found.items() if value != {}}
