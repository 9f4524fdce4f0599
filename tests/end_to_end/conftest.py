"""What several files of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked_runs import ForkServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("consoles")) as server:
        yield server
