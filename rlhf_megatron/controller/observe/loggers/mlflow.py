"""MLflow: metrics and settings, in the store that its own environment names
(MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import importlib.util
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.controller.observe.loggers import LOGGERS, RunLogger, shorten_error_text
from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.write_errors import write_text_file

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.run_facts import RunFacts

logger = logging.getLogger(__name__)

RUN_ID_FILE = "mlflow_run_id"  # file in the run directory
SERVER_SCHEMES = ("http:", "https:")
ANSWER_TIMEOUT_S = 10.0  # of a server at the check
CHECK_RUN_NAME = "rlhf_megatron: can the store be written"  # exists for a moment
_UNWRITABLE_CHARACTERS = re.compile(r"[^/\w.\- :]")  # MLflow's rule for names of metrics
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")  # in an address: user:password@


class StoreNames:
    """The names that metrics have in a store. Two metrics of which one would be the folder of the
    other, which parts of a user's own may hand out, get names that a file store can keep.
    """

    def __init__(self, stored_names: Iterable[str]) -> None:
        """Begin with the names that a resumed run has in its store."""
        self._name_by_key: dict[str, str] = {}
        self._names: set[str] = set()
        self._folders: set[str] = set()
        for name in stored_names:
            self._add_name(name)

    def find_name(self, key: str) -> str:
        """Return the name of a metric: its key with "@" as "_at_" and with "_" for what MLflow does
        not take; with "." for "/" where a name before it has the name as a folder, or is a folder
        of it.
        """
        if key not in self._name_by_key:
            name = _UNWRITABLE_CHARACTERS.sub("_", key.replace("@", "_at_"))
            # a path cannot have "", "." and ".." as parts, nor begin with ".."
            parts = [part if part.strip(".") else "_" for part in name.split("/")]
            name = "/".join([parts[0].lstrip("."), *parts[1:]])
            if name in self._folders or not self._names.isdisjoint(_list_folders(name)):
                logger.warning(
                    "metric %s is %s in MLflow: another metric is its folder, or the reverse;"
                    " give it another name.",
                    key,
                    name.replace("/", "."),
                )
                name = name.replace("/", ".")
            self._add_name(name)
            self._name_by_key[key] = name
        return self._name_by_key[key]

    def _add_name(self, name: str) -> None:
        """Keep a name and the folders that it needs."""
        self._names.add(name)
        self._folders.update(_list_folders(name))


def _list_folders(name: str) -> list[str]:
    """Return all folders of a name: of a/b/c these are a and a/b."""
    return list(accumulate(name.split("/")[:-1], lambda folder, part: f"{folder}/{part}"))


@LOGGERS.register("mlflow")
class MlflowLogger(RunLogger):
    """A run of the experiment `trainer.project_name`; one that is resumed goes on. For the names of
    metrics see `StoreNames`.
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
            stored_names = list(self._client.get_run(self._run_id).data.metrics)
        else:
            found = self._client.get_experiment_by_name(facts.project_name)
            experiment = (
                self._client.create_experiment(facts.project_name)
                if found is None
                else found.experiment_id
            )
            self._run_id = self._client.create_run(experiment, run_name=facts.run_name).info.run_id
            write_text_file(path, f"{self._run_id}\n")
            stored_names = []
        self._store_names = StoreNames(stored_names)
        self._client.log_dict(self._run_id, dict(facts.config), "config.yaml")

    @classmethod
    def check_setup(cls) -> None:
        """Raise ValueError where mlflow is not installed, or where its store cannot be opened and
        written.
        """
        if importlib.util.find_spec("mlflow") is None:
            raise ValueError(
                f"mlflow is not installed; install it ({format_install_command('mlflow')})"
                " or take mlflow out of trainer.logger."
            )
        from mlflow import get_tracking_uri

        uri = get_tracking_uri()
        try:
            with _without_tracebacks():
                _try_store(uri)
        except Exception as error:
            text = f"the store of MLflow ({uri}) cannot be used: {shorten_error_text(error)}."
            raise ValueError(
                f"{_PASSWORD.sub('', text)} Set MLFLOW_TRACKING_URI to one that can be written, or"
                " take mlflow out of trainer.logger."
            ) from error

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Log the metrics under the names of `StoreNames`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(self._store_names.find_name(key), value, now, step)
            for key, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self, is_failed: bool) -> None:
        """End the run as FAILED or FINISHED."""
        self._client.set_terminated(self._run_id, "FAILED" if is_failed else "FINISHED")


def _try_store(tracking_uri: str) -> None:
    """Open the store. In a file or database also write a run and delete it; a server keeps deleted
    runs, and gets none. Raise what the store raises.
    """
    from mlflow import MlflowClient

    if tracking_uri.startswith(SERVER_SCHEMES):
        _require_answer(tracking_uri)
    client = MlflowClient(tracking_uri)
    experiments = client.search_experiments(max_results=1)
    delete_for_good = getattr(client._tracking_client.store, "_hard_delete_run", None)
    if delete_for_good is None or not experiments:
        return
    run_id = client.create_run(experiments[0].experiment_id, run_name=CHECK_RUN_NAME).info.run_id
    client.log_metric(run_id, "check", 1.0)
    client.delete_run(run_id)
    delete_for_good(run_id)


def _require_answer(url: str) -> None:
    """Raise where nothing answers at the address. MLflow's client would try for minutes."""
    import requests

    # who sends a certificate answers; MLflow has settings of its own for certificates
    with suppress(requests.exceptions.SSLError):
        requests.get(url, timeout=ANSWER_TIMEOUT_S, allow_redirects=False)


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep MLflow from logging the tracebacks of errors that are told in a sentence."""
    mlflow_logger = logging.getLogger("mlflow")
    level = mlflow_logger.level
    mlflow_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        mlflow_logger.setLevel(level)
