"""Weights & Biases without its service: offline files are read back, and a service that
fails ends nothing.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import SUPPORT
from scheduler_samples import train_batch
from service_files import records

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.controller.observe.loggers import check_logger_setups
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker

SAID = {"actor/num_epochs": 1.0, "rollout/num_samples": 8.0}
FACTS = RunFacts(
    "a run", "a project", num_samples_logged=2, config={"actor": {"optim": {"lr": 1e-4}}}
)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)


def write(run_dir: Path) -> None:
    with RunTracker(run_dir, ("jsonl", "wandb"), 2, FACTS) as tracker:
        tracker.log_warmup_step(40, {"warmup/loss": 2.0})
        for step in (1, 2):
            with tracker.track_step(step):
                tracker.set_step_batch(train_batch(8), SAID)


def in_a_process_of_its_own(run_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """wandb keeps threads and a service process; a test must not leave them to others."""
    code = f"import sys; sys.path[:0] = {[str(SUPPORT), str(Path(__file__).parent)]!r}\n"
    code += "import logging; logging.basicConfig(level=logging.WARNING)\n"
    code += f"import {__name__} as t; from pathlib import Path; t.write(Path({str(run_dir)!r}))"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    clean["HOME"] = str(run_dir)  # no key, no settings
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


@needs_wandb
def test_an_offline_run_has_everything(tmp_path: Path) -> None:
    result = in_a_process_of_its_own(tmp_path, WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and result.stdout == "", "the terminal belongs to the console"
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    found = [wandb_internal_pb2.Record.FromString(data) for data in records(path)]
    run = next(r.run for r in found if r.HasField("run"))
    assert (run.project, run.display_name) == ("a project", "a run")
    config = {item.key: json.loads(item.value_json) for r in found for item in r.run.config.update}
    assert config["actor"] == {"optim": {"lr": 1e-4}}
    history = [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in found
        if r.HasField("history")
    ]
    expected = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in history if "critic/rewards/mean" in row]
    for row, written in zip(steps, expected[1:], strict=True):
        assert row["step"] == written["step"]
        assert {key: row[key] for key in written if "/" in key} == {
            k: v for k, v in written.items() if "/" in k
        }
    assert [
        (row["warmup/step"], row["warmup/loss"]) for row in history if "warmup/loss" in row
    ] == [(40, 2.0)]
    axes = {r.metric.name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert (
        axes["warmup/loss"] == "warmup/step"
        and axes["critic/rewards/mean"] == axes["samples"] == "step"
    )
    rewards = [row for row in history if "histogram/rewards/values" in row]
    assert len(rewards) == 2 and sum(rewards[0]["histogram/rewards/values"]) == 8
    assert rewards[0]["histogram/rewards/bins"][-1] == 7.0
    tables = [json.loads(p.read_text()) for p in path.parent.glob("files/media/table/*.table.json")]
    assert len(tables) == 2 and tables[0]["columns"][:3] == ["step", "kind", "prompt"]
    assert {tuple(row[:3]) for table in tables for row in table["data"]} == {
        *(
            (step, kind, prompt)
            for step in (1, 2)
            for kind, prompt in (("best", "7"), ("worst", "0"))
        ),
    }
    assert next(r.exit.exit_code for r in found if r.HasField("exit")) == 0


@needs_wandb
def test_a_service_that_cannot_be_reached_is_told_once(tmp_path: Path) -> None:
    nowhere = {
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "2",
    }
    result = in_a_process_of_its_own(tmp_path, **nowhere)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("logger wandb is switched off: ") == 1
    assert result.stderr.count("The run goes on with jsonl.") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@needs_wandb
def test_no_key_is_told_before_anything_starts(tmp_path: Path) -> None:
    code = (
        "from rlhf_megatron.controller.observe.loggers import check_logger_setups;"
        " check_logger_setups(['wandb'])"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")} | {
        "HOME": str(tmp_path)
    }
    for environment, says in (
        ({}, "wandb has no API key; run `wandb login`"),
        ({"WANDB_MODE": "offline"}, ""),
        (
            {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40},
            "trainer.logger: wandb cannot log in: Failed to authenticate with http://127.0.0.1:9",
        ),
    ):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=clean | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (result.returncode != 0) == bool(says) and says in result.stderr, result.stderr


def test_a_missing_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_logger_setups(("console", "jsonl", "tensorboard"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"trainer.logger: wandb is not installed; install it .*\[wandb\]"
    ):
        check_logger_setups(("console", "wandb"))


class BreakingService:
    """The package as far as the logger calls it; logging fails from the second time on."""

    Settings = Table = staticmethod(lambda **arguments: SimpleNamespace(**arguments))
    Histogram = staticmethod(lambda values: values)

    def __init__(self) -> None:
        self.num_logged = self.num_finished = 0

    def init(self, **arguments: Any) -> "BreakingService":
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        self.num_logged += 1
        if self.num_logged > 1:
            raise ConnectionError("gone")

    def finish(self, exit_code: int) -> None:
        self.num_finished += 1


def test_a_service_that_breaks_during_the_run_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = BreakingService()
    monkeypatch.setitem(sys.modules, "wandb", service)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        write(tmp_path)
    assert [r.message for r in caplog.records] == [
        "logger wandb is switched off: ConnectionError: gone. The run goes on with jsonl."
    ]
    assert service.num_logged == 2 and service.num_finished == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
