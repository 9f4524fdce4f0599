"""MLflow: metrics and settings, in the store that its own environment names
(MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.controller.observe.loggers import LOGGERS, RunLogger
from rlhf_megatron.write_errors import write_text_file

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.run_facts import RunFacts

RUN_ID_FILE = "mlflow_run_id"  # file in the run directory


@LOGGERS.register("mlflow")
class MlflowLogger(RunLogger):
    """A run of the experiment `trainer.project_name`; one that is resumed goes on. `@` in a
    name is `_at_`.
    """

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Create the run, or go on with the run whose id is in the run directory, and log the
        configuration.
        """
        from mlflow import MlflowClient

        self._client = MlflowClient()
        path = run_dir / RUN_ID_FILE
        if path.is_file():
            self._run_id = path.read_text().strip()
            self._client.update_run(self._run_id, "RUNNING")
        else:
            found = self._client.get_experiment_by_name(facts.project_name)
            experiment = (
                self._client.create_experiment(facts.project_name)
                if found is None
                else found.experiment_id
            )
            self._run_id = self._client.create_run(experiment, run_name=facts.run_name).info.run_id
            write_text_file(path, f"{self._run_id}\n")
        self._client.log_dict(self._run_id, dict(facts.config), "config.yaml")

    @classmethod
    def check_setup(cls) -> None:
        """Raise ValueError where mlflow is not installed."""
        if importlib.util.find_spec("mlflow") is None:
            raise ValueError(
                "mlflow is not installed; install it (pip install '.[mlflow]') or take mlflow out"
                " of trainer.logger."
            )

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Log the metrics, with "@" in a name written as "_at_"."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(key.replace("@", "_at_"), value, now, step) for key, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self, is_failed: bool) -> None:
        """End the run as FAILED or FINISHED."""
        self._client.set_terminated(self._run_id, "FAILED" if is_failed else "FINISHED")
