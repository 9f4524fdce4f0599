"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from dist_pool import DistPool


@pytest.fixture(scope="session")
def dist_pool() -> Iterator[DistPool]:
    """Warm workers for tests with several ranks; see tests/dist_pool.py."""
    pool = DistPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
