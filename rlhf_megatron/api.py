"""The Python API: train a run, load its configuration, read what it wrote. The commands call the
same functions.

Importing it imports no torch; docs/api.md has an example for a notebook.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.jobs.train_job import CHECKED_ENV, TrainJob

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.report.report_writer import WrittenReport

logger = logging.getLogger(__name__)

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings over those of a file: ["trainer.seed=7"] as on the command line,
or {"trainer.seed": 7}.
"""


class RunFailed(RuntimeError):
    """A run that ended before it had all of its steps, or a replay that found other numbers."""

    def __init__(self, directory: Path, exit_code: int) -> None:
        """Make the message from the run's directory and exit code."""
        self.directory = directory
        self.exit_code = exit_code
        super().__init__(
            f"the run in {directory} ended with exit code {exit_code}; its last messages and"
            f" {directory / 'logs'} say why."
        )


@dataclass(frozen=True)
class Run:
    """The directory of a run. Each call reads its files anew, so a run that is going on
    can be watched.
    """

    directory: Path

    def __init__(self, directory: str | Path, must_exist: bool = True) -> None:
        """Refer to the directory of a run. Raise ValueError where there is no such directory,
        unless `must_exist` is False because the directory may be on another machine.
        """
        object.__setattr__(self, "directory", Path(directory))
        if must_exist and not self.directory.is_dir():
            raise ValueError(
                f"{directory} is not a directory; give that of a run, such as runs/quickstart."
            )

    @property
    def config(self) -> RunConfig:
        """Return the configuration that the run started with; secrets are redacted. Raise
        ConfigError where it cannot be read.
        """
        return read_run_config(self.directory / "config.yaml").config

    def metrics(
        self, kind: Literal["step", "evaluation", "warmup"] = "step"
    ) -> list[dict[str, Any]]:
        """Return one row for each step, in order: `step`, `seconds` and the metrics of
        docs/metrics.md. A value that was not finite is None. A step that was repeated has its last
        row.
        """
        rows = {
            row["step"]: row for row in self._read_rows("metrics.jsonl") if row.get("kind") == kind
        }
        return [rows[step] for step in sorted(rows)]

    def samples(self) -> list[dict[str, Any]]:
        """Return the samples that each step kept (trainer.samples_kept): prompt, response, reward
        and more.
        """
        return self._read_rows("samples.jsonl")

    def held_out_samples(self) -> list[dict[str, Any]]:
        """Return the samples that each evaluation kept, of the same items in each: step, item,
        prompt, response, score and more.
        """
        return self._read_rows("held_out_samples.jsonl")

    def checkpoints(self) -> dict[int, Path]:
        """Return the directories of all complete checkpoints by step, the newest last."""
        found = (self.directory / "checkpoints").glob("step_*/manifest.json")
        return {int(path.parent.name.removeprefix("step_")): path.parent for path in sorted(found)}

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a finished run; None while the run is not finished."""
        path = self.directory / "summary.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def export(
        self,
        out: str | Path,
        step: int | None = None,
        *,
        best: bool = False,
        dtype: str | None = None,
    ) -> Path:
        """Write the policy of a checkpoint to the new directory `out` in Hugging Face layout, and
        return `out`.

        The checkpoint is the newest; that of `step`; or, with `best`, the one with the best
        trainer.keep_best metric. `dtype`: "float32", "bfloat16", "float16"; None: the run's type.
        Raise ValueError where there is no such checkpoint.
        """
        from rlhf_megatron.controller.recovery.checkpoint_export import find_exportable_weights

        weights = find_exportable_weights(self.directory, step, best)
        weights.write_hf_directory(Path(out), dtype)
        for note in weights.notes:
            logger.warning("%s: %s", out, note)
        return Path(out)

    def report(self, out: Path | None = None) -> Path:
        """Write the report (HTML and pictures) and return the path of its page. Raise ValueError
        before the first step.
        """
        return report([self.directory], out).page_path

    def _read_rows(self, file_name: str) -> list[dict[str, Any]]:
        """Return the rows of one of the run's files of JSON lines."""
        from rlhf_megatron.controller.observe.line_file import read_step_rows

        return read_step_rows(self.directory, file_name)


def load_config(
    path: str | Path,
    overrides: Overrides = (),
    *,
    with_files: bool = True,
    with_plugins: bool = True,
) -> RunConfig:
    """Return the checked configuration of a run.

    `with_files`: also check model, tokenizer and data on disk. `with_plugins`: run its plugins;
    without, parts that the plugins may register are not checked.

    Raise ConfigError with every problem at once.
    """
    return load_run_config(path, _format_overrides(overrides), with_files, with_plugins).config


def train(
    path: str | Path,
    overrides: Overrides = (),
    *,
    fresh: bool = False,
    record: bool = False,
    replay: int | Path | None = None,
    replay_from: str | Path | None = None,
    allow_changes: bool = False,
    is_own_process: bool = True,
) -> Run:
    """Train the run that the YAML file at `path` describes, and return it when it has all of its
    steps.

    A run that was begun before continues from its newest checkpoint; `fresh` starts anew. `record`
    writes every step's batches; `replay` trains on recorded batches up to that step (of the run
    `replay_from`), or runs the mini-batch of a capsule again. `allow_changes` accepts a lock file
    also where model, data or plugins have changed.

    The run gets a process of its own, whose output is printed here; when this call is interrupted,
    the run is asked to stop, which saves a checkpoint. `is_own_process=False` is for a program that
    does nothing else: this process becomes the launcher and mostly does not return.

    Raise ConfigError with every problem before anything starts, RunFailed when the run did not end
    well.
    """
    words = _build_override_arguments(overrides, fresh)
    source = None if replay_from is None else Path(replay_from)
    return _run_job(
        TrainJob(Path(path), words, record, replay, source, "train", allow_changes), is_own_process
    )


def _build_override_arguments(overrides: Overrides, fresh: bool) -> tuple[str, ...]:
    """Return the overrides as command-line arguments; `fresh` adds the one that disables
    resuming.
    """
    return (*_format_overrides(overrides), *(["trainer.resume_mode=disable"] if fresh else []))


def _run_job(job: TrainJob, is_own_process: bool) -> Run:
    """Run the job, in a process of its own or in this one, and return its run. Raise RunFailed
    where it exits with another code than 0.
    """
    exit_code = _run_in_subprocess(job) if is_own_process else job.start()
    if exit_code:
        raise RunFailed(job.run_dir, exit_code)
    return Run(job.run_dir, must_exist=is_own_process)  # a rank of another machine may not see it


def sft(
    path: str | Path,
    overrides: Overrides = (),
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    is_own_process: bool = True,
) -> Run:
    """Train on documents, or on pairs of answers, as the YAML file at `path` describes (job: sft).
    Arguments, result and errors are those of `train`.
    """
    return _train_supervised("sft", path, overrides, fresh, allow_changes, is_own_process)


def reward_model(
    path: str | Path,
    overrides: Overrides = (),
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    is_own_process: bool = True,
) -> Run:
    """Train a model that scores answers, from pairs of them (job: reward-model). Arguments, result
    and errors are those of `train`.
    """
    return _train_supervised("reward-model", path, overrides, fresh, allow_changes, is_own_process)


def _train_supervised(
    command: Literal["sft", "reward-model"],
    path: str | Path,
    overrides: Overrides,
    fresh: bool,
    allow_changes: bool,
    is_own_process: bool,
) -> Run:
    """Run a supervised job by its command, as `train` does."""
    words = _build_override_arguments(overrides, fresh)
    return _run_job(
        TrainJob(Path(path), words, command=command, allow_changes=allow_changes), is_own_process
    )


def report(
    run_dirs: Sequence[str | Path], out: str | Path | None = None, reload_s: int | None = None
) -> WrittenReport:
    """Write the report of one run, or of several side by side, and return its files. Raise
    ValueError where there is nothing to report.

    `reload_s`: seconds after which a browser reads the page again, while a run continues; None:
    never.
    """
    from rlhf_megatron.controller.observe.report.report_writer import write_report

    return write_report(
        [Path(path) for path in run_dirs], None if out is None else Path(out), reload_s
    )


def _format_overrides(overrides: Overrides) -> tuple[str, ...]:
    """Return the overrides in the form key=value."""
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={format_yaml_value(value)}" for key, value in overrides.items())
    return tuple(overrides)


def _run_in_subprocess(job: TrainJob) -> int:
    """Run the job in a process of its own, print its output line by line, and return its exit code.
    Raise ConfigError here for a bad configuration. When interrupted, send the run SIGTERM and wait
    for it.
    """
    _ = job.config  # its problems are raised here, not printed there
    environment = make_import_environment(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", CHECKED_ENV: "1"}
    command = [sys.executable, "-m", "rlhf_megatron", *job.build_arguments()]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,  # an interruption of this process is not one of the run
    ) as process:
        assert process.stdout is not None, "it was asked for"
        try:
            for line in process.stdout:
                print(line, end="")
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            print(process.stdout.read(), end="")
            raise
    return process.returncode
