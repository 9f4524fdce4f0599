"""Weights & Biases: metrics, histograms, settings, samples as a table."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.controller.observe.loggers import (
    LOGGERS,
    BatchView,
    RunLogger,
    is_batch_view_step,
    load_or_draw_run_id,
    shorten_error_text,
)
from rlhf_megatron.install_hints import format_install_command

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.report.run_files import HeldOutSample, LoggedSample
    from rlhf_megatron.controller.observe.run_facts import RunFacts

OFFLINE_MODES = ("offline", "disabled", "dryrun")  # values of WANDB_MODE
RUN_ID_FILE = "wandb_run_id"  # file in the run directory
FINISH_TIMEOUT_S = 120.0  # for what is not yet sent when the run ends


@LOGGERS.register("wandb")
class WandbLogger(RunLogger):
    """Files under `wandb/`. Its environment variables (WANDB_MODE, WANDB_API_KEY) hold as
    they always do.
    """

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Start the run, or go on with the run whose id is in the run directory."""
        import wandb

        self._total_steps = total_steps
        self._defined_metrics: set[str] = set()  # metrics whose axis was told
        settings = wandb.Settings(silent=True, console="off")  # the terminal is another logger's
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = FINISH_TIMEOUT_S
        self._wandb_run: Any = wandb.init(
            project=facts.project_name,
            name=facts.run_name,
            id=load_or_draw_run_id(run_dir / RUN_ID_FILE),
            resume="allow",
            dir=str(run_dir),
            config=dict(facts.config),
            settings=settings,
        )

    @classmethod
    def check_setup(cls) -> None:
        """Raise ValueError where wandb is not installed, or is online without an API key that its
        service takes.
        """
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"wandb is not installed; install it ({format_install_command('wandb')})"
                " or take wandb out of trainer.logger."
            )
        import wandb

        if wandb.setup().settings.mode in OFFLINE_MODES:
            return  # its files are in the run directory
        # older ones would wait for an answer
        can_ask = "prompt" in inspect.signature(wandb.login).parameters
        if not can_ask:
            return
        try:
            has_key = wandb.login(prompt=False, verify=True)
        except Exception as error:
            raise ValueError(
                f"wandb cannot log in: {shorten_error_text(error)}. Correct WANDB_API_KEY or"
                " WANDB_BASE_URL, write to the run directory only with WANDB_MODE=offline, or take"
                " wandb out of trainer.logger."
            ) from error
        if not has_key:
            raise ValueError(
                "wandb has no API key; run `wandb login`, set WANDB_API_KEY, or write to the run"
                " directory only with WANDB_MODE=offline."
            )

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Log the metrics over the axis "step", or "warmup/step" for a warm-up. `run_seconds` is
        not used.
        """
        self._log_values("warmup/step" if row_kind == "warmup" else "step", step, metrics)

    def log_batch(self, step: int, batch_view: BatchView) -> None:
        """Log histograms and a table of samples, at the steps of `is_batch_view_step`."""
        if not is_batch_view_step(step, self._total_steps):
            return
        import wandb

        values: dict[str, Any] = {
            f"histogram/{name}": wandb.Histogram(column.double().numpy())
            for name, column in batch_view.iter_distributions()
        }
        if batch_view.samples:
            values["samples"] = _make_table(batch_view.samples)
        self._log_values("step", step, values)

    def log_held_out_samples(self, step: int, samples: Sequence[HeldOutSample]) -> None:
        """Log a table of the samples."""
        self._log_values("step", step, {"held_out_samples": _make_table(samples)})

    def close(self, is_failed: bool) -> None:
        """Finish the run; do nothing where a call to the service failed before."""
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=int(is_failed))

    def _log_values(self, step_axis: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the values over `step_axis`, defining the axis of new metrics first. Where this
        raises, `close` will not wait for the service.
        """
        # a service that fails is not waited for at the end
        run = self._wandb_run
        self._wandb_run = None
        for key in values.keys() - self._defined_metrics:
            run.define_metric(key, step_metric=step_axis)
        self._defined_metrics |= values.keys()
        run.log({**values, step_axis: step})
        self._wandb_run = run


def _make_table(samples: Sequence[LoggedSample] | Sequence[HeldOutSample]) -> Any:
    """Return a table of W&B with a row for each sample."""
    import wandb

    rows = [
        [
            str(value) if isinstance(value, dict | tuple) else value
            for value in vars(sample).values()
        ]
        for sample in samples
    ]
    return wandb.Table(columns=list(vars(samples[0])), data=rows)
