"""Each call in a child that is forked off before CUDA has begun: it has an allocator and groups of
its own, and modules are imported once.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

Arguments = tuple[Any, ...]


def in_children(
    function: Callable[..., Any], calls: Iterable[Arguments]
) -> Iterator[tuple[Arguments, Any]]:
    """(arguments, what the function returned as JSON has it, or in words why it failed) of each
    call, in order.
    """
    with mock.patch("torch._C._cuda_getDeviceCount", return_value=1):  # the real one forbids forks
        prepare()
    with TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        for arguments in calls:
            answer.unlink(missing_ok=True)
            if not (child := os.fork()):
                _answer(function, arguments, answer)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            yield (
                arguments,
                json.loads(answer.read_text())
                if code == 0
                else f"the process ended with code {code}",
            )


def num_failed(function: Callable[..., list[str]], cells: Iterable[Arguments]) -> int:
    """Print a line a cell, and the problems that `function` returns of it. Returns how many
    cells have some.
    """
    total = 0
    for cell, found in in_children(function, cells):
        problems = [found] if isinstance(found, str) else found
        total += bool(problems)
        print(f"{'FAILED' if problems else 'ok':7}{', '.join(map(str, cell))}", flush=True)
        for words in problems:
            print(f"       {words}", flush=True)
    return total


def _answer(function: Callable[..., Any], arguments: Arguments, answer: Path) -> None:
    """In the child, which ends here."""
    try:
        found = function(*arguments)
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/torch/" not in frame.filename
        ]
        places = " < ".join(
            f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-6:])
        )
        found = f"{type(error).__name__}: {str(error)[:500]} ({places})"
    answer.write_text(json.dumps(found))
    os._exit(0)


def prepare() -> None:
    """Import what every child needs."""
    from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron

    prepare_megatron()
    from rlhf_megatron.ranks.workers import actor, critic, megatron_backend, reference_model  # noqa: F401
