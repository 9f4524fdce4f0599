"""A pytest plugin that writes a line of JSON as things happen: one that hangs or kills it
loses only itself.

    python -m pytest -p benchmarks.gpu.stream_plugin --stream FILE [--done FILE] ...

`--done`: ids of tests, one a line, that are left out. Lines: {"collected": [ids]}, then {"started":
id} and {"name", "outcome", "seconds", "message", "figures"} of each test. What cannot be imported
is an outcome too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MESSAGE_LENGTH = 2000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stream", type=Path, required=True, help="file that gets a line of JSON per event"
    )
    parser.addoption(
        "--done", type=Path, default=None, help="file with ids of tests that are left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Stream(config.getoption("--stream")), "stream")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--done") is not None:
        done = set(config.getoption("--done").read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in done]


class _Stream:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: list[Any] = []  # of the running test's phases

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            message = str(report.longrepr)[-MESSAGE_LENGTH:]
            self._write(
                {
                    "name": report.nodeid,
                    "outcome": "failed",
                    "seconds": 0.0,
                    "message": message,
                    "figures": {},
                }
            )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": [item.nodeid for item in session.items]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports = []
        self._write({"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)
        if report.when != "teardown":
            return
        worst = next((r for r in self.reports if r.failed), None) or next(
            (r for r in self.reports if r.skipped), None
        )
        outcome = "passed"
        message = ""
        if worst is not None:
            outcome = "failed" if worst.failed else "skipped"
            message = str(
                worst.longrepr[2] if isinstance(worst.longrepr, tuple) else worst.longrepr
            )
        self._write(
            {
                "name": report.nodeid,
                "outcome": outcome,
                "seconds": round(sum(r.duration for r in self.reports), 3),
                "message": message[-MESSAGE_LENGTH:],
                "figures": {key: _plain(value) for key, value in report.user_properties},
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(event) + "\n")


def _plain(value: object) -> float | str:
    return float(value) if isinstance(value, (int, float)) else str(value)
