"""What several files of whole runs share."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import MARKER, overrides, write_config
from forked_runs import ForkServer
from launch_tools import Started, environment


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("consoles")) as server:
        yield server


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    """launch(kind, program, settings, variable=value): start an attempt of the test's run by
    `program CONFIG settings`, with these variables, as a `kind` of Started. What lives of it after
    the test is killed.
    """
    attempts: list[Started] = []
    config = write_config(tmp_path)

    def start(
        kind: type[Started], program: Sequence[str], settings: dict[str, Any], **variables: str
    ) -> Started:
        marker = uuid.uuid4().hex
        with (tmp_path / "console").open("ab") as console:
            process = subprocess.Popen(
                [*program, str(config), *overrides(settings)],
                cwd=tmp_path,
                env=environment(marker, **variables),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        attempts.append(kind(tmp_path, process, f"{MARKER}={marker}"))
        return attempts[-1]

    yield start
    for attempt in attempts:
        attempt.end()
