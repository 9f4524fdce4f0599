"""Each case in a process of its own with a time budget: what dies there (of memory, of a \
compiler) loses itself only.

    python -m benchmarks.gpu.children G2 --output FILE [--quick] [--limit-s 60]

runs one case in this process, which is what `run_case` starts. FILE has what was measured so
far at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from rlhf_megatron.parent_process import end_with_parent
from tools.cuda_rehearsal.environment import python_path

MESSAGE_LENGTH = 2000
GRACE_S = 5.0  # between a case's own deadline and its end


@dataclass(frozen=True)
class Entry:
    """A case: its file in this folder, and the seconds that it may take, its process's
    start included.
    """

    module: str
    budget_s: float


CASES = {
    "G1": Entry("gemm", 40),
    "G2": Entry("forward", 90),
    "G3": Entry("backward", 110),
    "G4": Entry("stash", 80),
    "G5": Entry("memory", 80),
    "G6": Entry("row_kernel", 40),
    "G7": Entry("other_shapes", 90),
    "G8": Entry("repeatable", 50),
    "G9": Entry("policy_loss", 60),
    "G10": Entry("train_step", 270),
    "G11": Entry("compaction", 80),
}


def run_case(name: str, budget_s: float, is_quick: bool = False) -> dict[str, Any]:
    """{"what", "outcome": "measured", "failed" or "out of time", "seconds", "figures", "details",
    ...} of one case.

    What it had measured before it failed is kept.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "case.json"
        errors = Path(folder) / "errors"
        command = [sys.executable, "-m", "benchmarks.gpu.children", name, f"--output={output}"]
        command += [f"--limit-s={max(1.0, budget_s - GRACE_S)}", *(["--quick"] if is_quick else [])]
        with errors.open("w") as stream:
            code = run_group(command, budget_s, stderr=stream)
        found = (
            json.loads(output.read_text()) if output.exists() else {"figures": [], "details": {}}
        )
        message = errors.read_text()[-MESSAGE_LENGTH:]
    outcome = {None: "out of time", 0: "measured"}.get(code, "failed")
    if outcome != "measured":
        found["message"] = message if outcome == "failed" else f"not done after {budget_s:.0f} s"
        print(f"  {name}: {outcome}. {found['message']}", flush=True)
    return {"what": "", "outcome": outcome, "seconds": round(time.monotonic() - start, 1), **found}


def run_group(command: Sequence[str], timeout_s: float, **streams: Any) -> int | None:
    """Exit code; None where it was ended, with all that it started, because its time was up."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
        **streams,
    )
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(child)


def end_group(child: subprocess.Popen[Any]) -> None:
    """A process that leads a group, and whatever is left of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment() -> dict[str, str]:
    """Children find the package and what lies on this process's path, without an installation."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def num_missed(cases: Mapping[str, Mapping[str, Any]]) -> int:
    """Figures that do not meet their bar."""
    return sum(not figure["is_met"] for case in cases.values() for figure in case["figures"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    args = parser.parse_args(arguments)
    start = time.monotonic()
    from benchmarks.gpu import recorder
    from benchmarks.gpu.device_state import device_state

    recorder.target = recorder.Target(args.output, start + args.limit_s)
    case = importlib.import_module(f"benchmarks.gpu.{CASES[args.case].module}").CASE
    assert case.name == args.case, f"{CASES[args.case].module}.py has the case {case.name}"
    print(f"  {case.name}: {case.what}", flush=True)
    before = device_state()
    result = case.run(args.quick)
    found = {
        "what": case.what,
        "figures": recorder.as_rows(result.figures),
        "details": result.details,
        "device_state": {"before": before, "after": device_state()},
    }
    recorder.write_json(args.output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
