"""A process that runs programs in sandboxes, as this user or as another one.

    python program_runner.py UID PYTHON TIMEOUT_S LAYERS MEMORY_MIB CPU_S

It reads lines of JSON (code, num_runs) and answers one line each: how the last run ended, what
was printed, how long the run took, and the error where the sandbox failed. The first line that it
writes says which layers are in force.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.sandbox_layers import SandboxLimits
from rlhf_megatron.rewards.sandbox.sandbox_protocol import SandboxProgram, SandboxUnavailableError

SYSTEM_PYTHON = "/usr/bin/python3"  # which every user may start
ORDINARY_UID = 64321  # of nobody
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class RunReport:
    """How the last run of a program ended."""

    ending: str
    exit_code: int
    stdout: str
    stderr: str
    took_s: float  # wall time
    counted_s: float  # as the guardian has counted it
    error: str  # of the sandbox; the sample would be masked


def run_program(sandbox: LocalSandbox, code: str, num_runs: int) -> RunReport:
    """Run the program in a session of the sandbox, and return the report on its last run."""
    start = time.monotonic()
    try:
        with sandbox.open_session(SandboxProgram(code)) as session:
            for _ in range(num_runs):
                start = time.monotonic()
                result = session.run_program()
                took_s = time.monotonic() - start
    except SandboxUnavailableError as error:
        return RunReport("masked", 0, "", "", time.monotonic() - start, 0.0, str(error))
    return RunReport(
        result.ending,
        result.exit_code,
        result.stdout,
        result.stderr,
        took_s,
        sandbox.counted_s,
        "",
    )


def serve() -> None:
    """Change to the user of the command line, and run the programs of the standard input."""
    uid, python, timeout_s, layers, memory_mib, cpu_s = sys.argv[1:]
    if int(uid) != os.geteuid():
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    settings = SandboxSettings(
        limits=SandboxLimits(memory_mib=int(memory_mib), cpu_s=int(cpu_s)),
        python=python or None,
        layers=tuple(layers.split(",")),
        allow_open=True,
    )
    sandbox = LocalSandbox(settings, float(timeout_s))
    sandbox.start_guardian()
    print(json.dumps({"layers": sandbox.active_layers, "note": sandbox.layers_note}), flush=True)
    for line in sys.stdin:
        program = json.loads(line)
        report = run_program(sandbox, program["code"], program["num_runs"])
        print(json.dumps(asdict(report)), flush=True)
    sandbox.close()


class ProgramRunner:
    """The process, as the tests see it."""

    def __init__(
        self, uid: int, layers: Sequence[str], timeout_s: float, limits: SandboxLimits
    ) -> None:
        """Start the process, and read which layers are in force."""
        python = "" if uid == os.geteuid() else SYSTEM_PYTHON
        words = [str(uid), python, str(timeout_s), ",".join(layers)]
        words += [str(limits.memory_mib), str(limits.cpu_s)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        first_line = self._read_line()
        self.active_layers = tuple(first_line["layers"])
        self.layers_note = first_line["note"]

    def _read_line(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line: dict[str, object] = json.loads(self._process.stdout.readline())
        return line

    def run(self, code: str, num_runs: int = 1) -> RunReport:
        """Run a program and return the report on its last run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"code": code, "num_runs": num_runs}) + "\n")
        self._process.stdin.flush()
        return RunReport(**self._read_line())  # type: ignore[arg-type]

    def close(self) -> None:
        """End the process and its sandboxes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    serve()
