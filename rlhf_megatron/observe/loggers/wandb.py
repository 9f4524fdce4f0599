"""Weights & Biases: metrics, histograms, settings, samples as a table."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.observe.loggers import LOGGERS, BatchView, Logger, is_view_step, kept_id

if TYPE_CHECKING:
    from rlhf_megatron.observe.run_facts import RunFacts

WITHOUT_SERVICE = ("offline", "disabled", "dryrun")  # values of WANDB_MODE
RUN_ID = "wandb_run_id"  # file in the run directory
FINISH_TIMEOUT_S = 120.0  # for what is not yet sent when the run ends


@LOGGERS.register("wandb")
class WandbLogger(Logger):
    """Files under `wandb/`. Its environment variables (WANDB_MODE, WANDB_API_KEY) hold as they always do."""

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        import wandb

        self._total_steps = total_steps
        self._known: set[str] = set()  # metrics whose axis was told
        settings = wandb.Settings(silent=True, console="off")  # the terminal is another logger's
        if hasattr(settings, "finish_timeout"):
            settings.finish_timeout = FINISH_TIMEOUT_S
        self._run: Any = wandb.init(
            project=facts.project,
            name=facts.name,
            id=kept_id(run_dir / RUN_ID),
            resume="allow",
            dir=str(run_dir),
            config=dict(facts.config),
            settings=settings,
        )

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                "wandb is not installed; install it (pip install '.[wandb]') or take wandb out of trainer.logger."
            )
        import wandb

        can_ask = "prompt" in inspect.signature(wandb.login).parameters  # older ones would wait for an answer
        if wandb.setup().settings.mode not in WITHOUT_SERVICE and can_ask and not wandb.login(prompt=False):
            raise ValueError(
                "wandb has no API key; run `wandb login`, set WANDB_API_KEY, or write to the run directory only with"
                " WANDB_MODE=offline."
            )

    def row(self, kind: str, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._log("warmup/step" if kind == "warmup" else "step", step, metrics)

    def batch(self, step: int, view: BatchView) -> None:
        if not is_view_step(step, self._total_steps):
            return
        import wandb

        values: dict[str, Any] = {
            f"histogram/{name}": wandb.Histogram(column.double().numpy()) for name, column in view.distributions()
        }
        if view.samples:
            columns = list(vars(view.samples[0]))
            table = [
                [str(value) if isinstance(value, dict | tuple) else value for value in vars(s).values()]
                for s in view.samples
            ]
            values["samples"] = wandb.Table(columns=columns, data=table)
        self._log("step", step, values)

    def close(self, is_failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(is_failed))

    def _log(self, axis: str, step: int, values: Mapping[str, Any]) -> None:
        run, self._run = self._run, None  # a service that fails is not waited for at the end
        for key in values.keys() - self._known:
            run.define_metric(key, step_metric=axis)
        self._known |= values.keys()
        run.log({**values, axis: step})
        self._run = run
