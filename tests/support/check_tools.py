"""`rlhf-megatron check` as a program, for test_check_run.py. As a script: with a mistake
planted in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from end_to_end_tools import MARKER, processes_with, wait_for_the_end
from places import ROOT

TIMEOUT_S = 900.0  # a run of a few processes takes 30 to 60 s where nothing else does
PLANTED = "actor.optim.weight_decay=0.5"


@dataclass(frozen=True)
class Checked:
    """A check that has ended."""

    exit_code: int
    console: str
    out: Path
    left: list[int]  # processes of it that still lived some seconds after its end

    @property
    def certificate(self) -> dict[str, Any]:
        return json.loads((self.out / "certificate.json").read_text())

    @property
    def report(self) -> str:
        return (self.out / "certificate.md").read_text()


def start(
    out: Path, words: Sequence[str], script: Path | None = None
) -> tuple[subprocess.Popen[str], str]:
    """The program in the root of the repository, and the marker of its processes."""
    marker = uuid.uuid4().hex
    program = ["-m", "rlhf_megatron"] if script is None else [str(script)]
    command = [sys.executable, *program, "check", *words, "--out", str(out)]
    environment = {**os.environ, MARKER: marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes
    )
    return process, f"{MARKER}={marker}"


def check(out: Path, *words: str, script: Path | None = None) -> Checked:
    """`words`: the configuration, options and settings."""
    process, marker = start(out, words, script)
    try:
        console, _ = process.communicate(timeout=TIMEOUT_S)
        left = wait_for_the_end(marker, within_s=10)
    finally:
        for pid in processes_with(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()
    return Checked(process.returncode, console, out, left)


def _plant() -> None:
    """The unsharded run trains with another weight decay than the layout."""
    from rlhf_megatron.planning.check import layout_proof as programs
    from rlhf_megatron.planning.check.layout_proof import ONE_RANK

    run_train = programs.run_train_command

    def planted(
        config: Path, words: Sequence[str], run_dir: Path, timeout_s: float
    ) -> programs.FinishedRun:
        is_one_rank = run_dir.name.startswith(ONE_RANK)
        return run_train(config, [*words, PLANTED] if is_one_rank else words, run_dir, timeout_s)

    programs.run_train_command = planted


if __name__ == "__main__":
    from rlhf_megatron.cli.main import main

    _plant()
    sys.exit(main(sys.argv[1:]))
