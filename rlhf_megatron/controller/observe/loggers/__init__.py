"""What a logger is, and those of a run: each is told what the run does, and writes or shows what
it likes of it.

A new one is a new file here with a class that is registered in LOGGERS; every module of this
package is imported.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.lazy import Tensor
from rlhf_megatron.registry import Registry, import_package_modules
from rlhf_megatron.write_errors import FULL_DISK_ERRNOS, explain_write_error, write_text_file

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.report.run_files import (
        HeldOutSample,
        LoggedSample,
        MismatchStep,
    )
    from rlhf_megatron.controller.observe.run_facts import RunFacts

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 20  # that must be free before a logger is made again
MAX_ERROR_CHARACTERS = 400  # of what another library says
MAX_BATCH_VIEWS = 200  # histograms and tables of a run; viewers show no more of them


@dataclass(frozen=True)
class BatchView:
    """A step's batch as loggers see it, made once for all of them."""

    samples: tuple[LoggedSample, ...]
    mismatch_step: MismatchStep | None
    # see `metrics.batch.distributions`; whole columns
    iter_distributions: Callable[[], Iterator[tuple[str, Tensor]]]


class RunLogger:
    """Does nothing. All calls come from one thread. Optional packages are imported
    inside of methods.

    What a method raises switches the logger off and never ends the run (see `LoggerSet`).
    """

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Create the logger's files in `run_dir`, or go on with existing files; the base class has
        none.
        """

    @classmethod
    def check_setup(cls) -> None:
        """Check the logger before anything is started: open its store, and leave no run in it.
        Raise ValueError, with the fix, where the logger cannot work here; the base class always
        works. Whether the run directory can be written is checked elsewhere.
        """

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Log the metrics of a step; the base class does nothing. `row_kind`: warmup, step or
        evaluation; `run_seconds`: seconds since the run began.
        """

    def log_batch(self, step: int, batch_view: BatchView) -> None:
        """Log the samples and distributions that a step trained on; the base class does nothing.
        Called before the step's metrics.
        """

    def log_held_out_samples(self, step: int, samples: Sequence[HeldOutSample]) -> None:
        """Log a few samples of the evaluation after `step`; the base class does nothing. Called
        before the evaluation's metrics.
        """

    def show_stage(self, text: str) -> None:
        """Show what the run does or waits for now, until the next text; the base class does
        nothing.
        """

    def show_note(self, text: str) -> None:
        """Show a line to the person who watches; the base class does nothing."""

    def flush(self) -> None:
        """Write what waits for room on the disk. Raise OSError where the disk still has none. The
        base class has nothing to write.
        """

    def close(self, is_failed: bool) -> None:
        """Close the logger; the base class does nothing. `is_failed`: the run ends by an
        exception.
        """


LOGGERS: Registry[type[RunLogger]] = Registry(
    "logger", RunLogger, call_arguments=("run_dir", "total_steps", "facts")
)


def is_batch_view_step(step: int, total_steps: int) -> bool:
    """Return whether large things are logged at this step: at the first, the last, and every
    ceil(total_steps / MAX_BATCH_VIEWS)-th step.
    """
    return step in (1, total_steps) or step % max(1, -(-total_steps // MAX_BATCH_VIEWS)) == 0


def load_or_draw_run_id(id_path: Path) -> str:
    """Return the id of a run at a service. The id is drawn once and kept in a file: a resumed run
    goes on as the same.
    """
    if not id_path.is_file():
        write_text_file(id_path, f"{secrets.token_hex(4)}\n")
    return id_path.read_text().strip()


def shorten_error_text(error: Exception) -> str:
    """Return the text of an error of another library on one line, cut to MAX_ERROR_CHARACTERS."""
    text = " ".join((str(error) or type(error).__name__).split()).rstrip(".")
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]} ..."


class LoggerSet:
    """The loggers of a run. One that fails is switched off with one message; the run and
    the others go on.

    One that found the disk full is made again at later steps, until it works.
    """

    def __init__(
        self, logger_names: Sequence[str], run_dir: Path, total_steps: int, facts: RunFacts
    ) -> None:
        """Start these loggers; a logger that cannot start is left out, with a warning."""
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._facts = facts
        self._active_loggers: dict[str, RunLogger] = {}
        self._loggers_without_space: set[str] = set()
        errors = {name: self._start_logger(name, facts) for name in dict.fromkeys(logger_names)}
        for name, error in errors.items():
            self._warn_of_failure(name, error)

    def call_each(self, call: Callable[[RunLogger], None]) -> None:
        """Call `call` with each active logger. A logger that raises is closed and switched off,
        with a warning.
        """
        for name, one in list(self._active_loggers.items()):
            try:
                call(one)
            except Exception as error:
                del self._active_loggers[name]
                self._warn_of_failure(name, error)
                with suppress(Exception):
                    one.close(is_failed=True)

    def restart_stopped_by_full_disk(self, step: int) -> None:
        """Start loggers again that found the disk full, once it has room. Their viewers drop the
        rows of this step and later ones from the former files.
        """
        has_room = (
            self._loggers_without_space and shutil.disk_usage(self._run_dir).free > MIN_FREE_BYTES
        )
        for name in sorted(self._loggers_without_space) if has_room else ():
            if self._start_logger(name, replace(self._facts, resumed_from_step=step - 1)) is None:
                self._loggers_without_space.discard(name)
                logger.warning("logger %s: there is room again, and it goes on.", name)

    def flush(self) -> None:
        """Write the lines that wait in all loggers. Raise OSError where the disk still has
        no room.
        """
        for one in self._active_loggers.values():
            one.flush()

    def _start_logger(self, name: str, facts: RunFacts) -> Exception | None:
        """Start a logger and return None; where it cannot start, return the error."""
        build = LOGGERS.get(name).build
        try:
            self._active_loggers[name] = build(self._run_dir, self._total_steps, facts)
        except Exception as error:
            return error
        return None

    def _warn_of_failure(self, name: str, error: Exception | None) -> None:
        """Log that a logger is switched off; nothing where `error` is None. Remember a logger that
        found the disk full.
        """
        if error is None:
            return
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRNOS:
            self._loggers_without_space.add(name)
            text = (
                f"{explain_write_error(self._run_dir / name, error).strerror} It is tried again"
                " at each step"
            )
        others = (
            ", ".join(other for other in self._active_loggers if other != name) or "no other logger"
        )
        logger.warning(
            "logger %s is switched off: %s. The run goes on with %s.", name, text, others
        )


def check_logger_setups(logger_names: Sequence[str]) -> None:
    """Check the loggers of a run, without starting any. Raise ConfigError with what they lack."""
    problems = []
    for name in logger_names:
        try:
            LOGGERS.get(name).build.check_setup()
        except ValueError as error:
            problems.append(f"trainer.logger: {error}")
    if problems:
        raise ConfigError(problems)


import_package_modules(__name__, __path__)
