"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import warm
from dist_pool import DistPool
from triton_interpreter import TritonInterpreter

from rlhf_megatron.ranks.kernels.triton_support import query_interpreter_support

# which begins in no process that is forked off one where it was looked for
if not torch.cuda.is_available():
    warm.install()


@pytest.fixture(scope="session")
def dist_pool() -> Iterator[DistPool]:
    """Warm workers for tests with several ranks; see tests/support/dist_pool.py."""
    pool = DistPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def triton_interpreter() -> Iterator[TritonInterpreter]:
    """A warm process in which Triton kernels run on the CPU;
    see tests/support/triton_interpreter.py.
    """
    support = query_interpreter_support()
    if not support.is_usable:
        pytest.skip(support.why_not)
    interpreter = TritonInterpreter()
    yield interpreter
    interpreter.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU seconds of the run: the budget of CONTRIBUTING.md.

    The processes that the tests started count as soon as somebody has waited for them, as in
    `time make test`; xdist's workers have ended by now.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    times = os.times()
    own = times.user + times.system
    children = times.children_user + times.children_system
    terminalreporter.write_line(f"CPU seconds (user + sys): {own + children:.0f}")
