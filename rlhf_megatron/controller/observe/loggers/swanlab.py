"""SwanLab: metrics and settings, where its own environment says (SWANLAB_MODE, SWANLAB_API_KEY)."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.controller.observe.loggers import (
    LOGGERS,
    RunLogger,
    load_or_draw_run_id,
    shorten_error_text,
)
from rlhf_megatron.install_hints import format_install_command

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.run_facts import RunFacts

# in the run directory
FILES_DIR = "swanlab"
RUN_ID_FILE = "swanlab_run_id"


@LOGGERS.register("swanlab")
class SwanlabLogger(RunLogger):
    """An experiment of the project `trainer.project_name`, whose name has "-" for what SwanLab
    does not take.

    A run that is resumed goes on as the same experiment. Files lie under `swanlab/` of the
    run directory.
    """

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Start the experiment, or go on with the one whose id is in the run directory."""
        import swanlab

        (run_dir / FILES_DIR).mkdir(exist_ok=True)
        terminal = swanlab.Settings.Terminal(proxy_type="none")  # the terminal is another logger's
        self._swanlab_run = swanlab.init(
            project=re.sub(r"[^0-9a-zA-Z_.+-]", "-", facts.project_name),
            name=facts.run_name,
            id=load_or_draw_run_id(run_dir / RUN_ID_FILE),
            resume="allow",
            log_dir=str(run_dir / FILES_DIR),
            config=dict(facts.config),
            settings=swanlab.Settings(interactive=False, terminal=terminal),
        )

    @classmethod
    def check_setup(cls) -> None:
        """Raise ValueError where swanlab is not installed, or is online without an API key that its
        service takes.
        """
        if importlib.util.find_spec("swanlab") is None:
            raise ValueError(
                f"swanlab is not installed; install it ({format_install_command('swanlab')})"
                " or take swanlab out of trainer.logger."
            )
        import swanlab

        settings = swanlab.Settings()
        if settings.mode == "online" and not settings.api_key:
            raise ValueError(
                "swanlab has no API key; run `swanlab login`, set SWANLAB_API_KEY, or write to the"
                " run directory only with SWANLAB_MODE=offline."
            )
        if settings.mode == "online":
            try:
                # its greeting is not the run's; the key is saved nowhere
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                    swanlab.login(api_key=settings.api_key, save=False)
            except Exception as error:
                raise ValueError(
                    f"swanlab cannot log in at {settings.api_host}: {shorten_error_text(error)}."
                    " Correct SWANLAB_API_KEY or SWANLAB_API_HOST, write to the run directory only"
                    " with SWANLAB_MODE=offline, or take swanlab out of trainer.logger."
                ) from error

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Log the metrics at this step."""
        self._swanlab_run.log(metrics, step=step)

    def close(self, is_failed: bool) -> None:
        """End the experiment, as crashed where the run failed."""
        self._swanlab_run.finish(
            "crashed", "the run failed"
        ) if is_failed else self._swanlab_run.finish()
