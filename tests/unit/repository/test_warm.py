"""tests/support/warm.py: programs that are forked are those that would have been started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import warm
from places import ROOT


def test_what_is_imported_beforehand_is_there() -> None:
    assert [name for name in warm.PRELOADED if importlib.util.find_spec(name) is None] == []


def test_which_commands_are_known() -> None:
    python = sys.executable
    assert warm.program_of([python, "-u", "-m", "rlhf_megatron", "train", "x"]) == [
        "-m",
        "rlhf_megatron",
        "train",
        "x",
    ]
    assert (
        warm.program_of(
            ["/bin/sh", "-c", 'read -r word && exec "$@"', "sh", python, "-m", warm.ENGINE]
        )
        is not None
    )
    for words in (
        [python, "-c", "pass"],
        [python, "-m", "platform"],
        ["python", "-m", "rlhf_megatron"],
        [],
        ["ls"],
    ):
        assert warm.program_of(words) is None


@pytest.mark.dist
@pytest.mark.parametrize("start", [contextlib.nullcontext, warm.cold])
def test_words_and_exit_codes(start: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for words, code, said in (
        (["--version"], 0, ""),
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
    ):
        command = [sys.executable, "-m", "rlhf_megatron", *words]
        with start():
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300
            )
        assert (
            done.returncode == code and said in done.stderr and bool(done.stdout) == (code == 0)
        ), done
