"""MLflow, read back from a store on disk: rows, settings, and a run that is resumed."""

from pathlib import Path

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.controller.observe.loggers import check_logger_setups
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker

FACTS = RunFacts("a run", "a project", config={"actor": {"optim": {"lr": 1e-4}}})


def test_a_run_and_its_resumption_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    for step in (1, 2):
        with RunTracker(tmp_path, ("mlflow",), 2, FACTS) as tracker:
            tracker.log_metrics(
                step, "step", {"critic/rewards/mean": step / 4, "val/sums/mean@4": 0.5}
            )
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("a project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "critic/rewards/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["val/sums/mean_at_4"] == 0.5
    assert (
        "lr: 0.0001"
        in Path(
            client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path))
        ).read_text()
    )


def test_a_missing_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=r"trainer.logger: mlflow is not installed; install it"):
        check_logger_setups(["mlflow"])
