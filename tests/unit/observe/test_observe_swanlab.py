"""SwanLab without its service: what its offline files say, resumption, and what is told
before a run starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import SUPPORT
from service_files import records

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.controller.observe.loggers import check_logger_setups
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker

FACTS = RunFacts("a run", "a project", config={"actor": {"optim": {"lr": 1e-4}}})


def write(run_dir: Path) -> None:
    """A run of two steps and its resumption by two more, in this process."""
    for steps in ((1, 2), (3, 4)):
        with RunTracker(run_dir, ("swanlab",), 4, FACTS) as tracker:
            for step in steps:
                tracker.log_metrics(
                    step, "step", {"critic/rewards/mean": step / 4, "val/sums/mean@4": 0.5}
                )


def test_a_run_and_its_resumption_are_one(tmp_path: Path) -> None:
    """In a process of its own: swanlab keeps threads."""
    pytest.importorskip("swanlab")
    code = f"import sys; sys.path[:0] = {[str(SUPPORT), str(Path(__file__).parent)]!r}\n"
    code += "import logging; logging.basicConfig()\n"
    code += f"import {__name__} as t; from pathlib import Path; t.write(Path({str(tmp_path)!r}))"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SWANLAB_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"HOME": str(tmp_path), "SWANLAB_MODE": "offline"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0 and "switched off" not in done.stderr, done.stderr
    name = (tmp_path / "swanlab_run_id").read_text().strip()
    files = sorted((tmp_path / "swanlab").glob(f"run-*-{name}/run-{name}.swanlab"))
    assert len(files) == 2
    from swanlab.proto.swanlab.record.v1 import record_pb2

    for path, steps in zip(files, ((1, 2), (3, 4)), strict=True):
        found = [record_pb2.Record.FromString(data) for data in records(path)]
        start = next(record.start for record in found if record.HasField("start"))
        assert (start.project, start.name, start.id) == ("a-project", "a run", name)
        points = [
            (r.scalar.step, r.scalar.key, r.scalar.value.number)
            for r in found
            if r.HasField("scalar")
        ]
        assert points == [
            point
            for s in steps
            for point in ((s, "critic/rewards/mean", s / 4), (s, "val/sums/mean@4", 0.5))
        ]
        assert (
            found[-1].finish.state == 1
            and "lr: 0.0001" in (path.parent / "files" / "config.yaml").read_text()
        )


def test_a_missing_key_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    for name in [name for name in os.environ if name.startswith("SWANLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"trainer.logger: swanlab has no API key; run `swanlab login`"
    ):
        check_logger_setups(["swanlab"])
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    check_logger_setups(["swanlab"])


def test_a_service_that_does_not_answer_is_told_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    code = (
        "from rlhf_megatron.controller.observe.loggers import check_logger_setups;"
        " check_logger_setups(['swanlab'])"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SWANLAB_")}
    nowhere = {"SWANLAB_API_HOST": "http://127.0.0.1:9", "SWANLAB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **nowhere, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode != 0 and done.stdout == ""
    assert "trainer.logger: swanlab cannot log in at http://127.0.0.1:9" in done.stderr, done.stderr
    assert "or take swanlab out of trainer.logger" in done.stderr


def test_a_missing_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=r"trainer.logger: swanlab is not installed; install it"):
        check_logger_setups(["swanlab"])
