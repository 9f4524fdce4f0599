"""MLflow, read back from its stores: rows, settings, a run that is resumed, names that a file store
could not keep, and stores that cannot be written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.controller.observe.loggers import check_logger_setups
from rlhf_megatron.controller.observe.loggers.mlflow import StoreNames
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker

FACTS = RunFacts("a run", "a project", config={"actor": {"optim": {"lr": 1e-4}}})


@pytest.fixture(params=["file", "sqlite"])
def mlflow(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)  # where artifacts of a database lie
    stores = {"file": (tmp_path / "store").as_uri(), "sqlite": f"sqlite:///{tmp_path}/store.db"}
    package.set_tracking_uri(stores[request.param])
    return package


def test_a_run_and_its_resumption_are_one(tmp_path: Path, mlflow: Any) -> None:
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


NAMES_OF_PARTS_OF_A_USER = {
    "mine/loss": 1.0,
    "mine/loss/extra": 2.0,
    "mine/x, y (%)": 3.0,
    "mine//twice": 4.0,
    "../up": 5.0,
    "actor/loss": 6.0,
}


def test_no_name_switches_the_logger_off(
    tmp_path: Path, mlflow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            with RunTracker(tmp_path, ("mlflow",), 2, FACTS) as tracker:
                tracker.log_metrics(step, "step", NAMES_OF_PARTS_OF_A_USER)
    assert not [r.message for r in caplog.records if "switched off" in r.message]
    assert [r.message for r in caplog.records if "mine/loss/extra" in r.message] == [
        "metric mine/loss/extra is mine.loss.extra in MLflow: another metric is its folder, or the"
        " reverse; give it another name."
    ] * 2
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("a project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics == {
        "mine/loss": 1.0,
        "mine.loss.extra": 2.0,
        "mine/x_ y ___": 3.0,
        "mine/_/twice": 4.0,
        "_/up": 5.0,
        "actor/loss": 6.0,
    }
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        assert [point.step for point in history] == [1, 2], name


def test_the_folder_may_come_after_what_is_in_it() -> None:
    names = StoreNames([])
    assert [names.find_name(key) for key in ("a/b/c", "a/b", "a", "a/b/c/d", "ab/c")] == [
        "a/b/c",
        "a.b",
        "a",
        "a.b.c.d",
        "ab/c",
    ]


def test_a_store_that_can_be_written_is_left_without_a_run(mlflow: Any) -> None:
    check_logger_setups(["mlflow"])
    client = mlflow.MlflowClient()
    from mlflow.entities import ViewType

    found = client.search_experiments(view_type=ViewType.ALL)
    assert [experiment.name for experiment in found] == ["Default"]
    assert not client.search_runs(["0"], run_view_type=ViewType.ALL)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("file://{folder}/a_file/store", "Not a directory|Errno 20"),
        ("sqlite:///{folder}/a_file/store.db", "Not a directory|File exists|unable to open"),
        ("sqlite:///file:{folder}/store.db?mode=ro&uri=true", "attempt to write a readonly"),
        ("http://me:secret@127.0.0.1:9", "Connection refused"),
    ],
)
def test_a_store_that_cannot_be_written_is_told_before_anything_starts(
    tmp_path: Path,
    mlflow: Any,
    uri: str,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mlflow.MlflowClient(f"sqlite:///{tmp_path}/store.db").search_experiments()
    (tmp_path / "a_file").write_text("")
    mlflow.set_tracking_uri(uri.format(folder=tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_logger_setups(["mlflow"])
    text = str(caught.value)
    assert any(word in text for word in says.split("|")), text
    assert "trainer.logger: the store of MLflow (" in text
    assert "Set MLFLOW_TRACKING_URI to one that can be written" in text and "secret" not in text
    assert not [record for record in caplog.records if record.exc_info]


def test_a_missing_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=r"trainer.logger: mlflow is not installed; install it"):
        check_logger_setups(["mlflow"])
