"""`rlhf-megatron train` in processes of its own, awaited; nothing of it is left on any way out."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.rollout.fleet.process import ServerProcess

POLL_S = 0.2
ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # processes, not GPUs
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class ProgramError(RuntimeError):
    """A program that failed or took too long. The message has the end of what it said, and where the logs are."""


@dataclass(frozen=True)
class Finished:
    """A run that ended well."""

    run_dir: Path
    seconds: float


def run_train(config: Path, arguments: Sequence[str], run_dir: Path, timeout_s: float) -> Finished:
    """`rlhf-megatron train config arguments` until it ends; its output goes to `run_dir` + ".log".

    Raises ProgramError. The processes are gone when this returns or raises, KeyboardInterrupt included.
    """
    log = run_dir.with_name(run_dir.name + ".log")
    start = time.monotonic()
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config), *arguments]
    process = ServerProcess(run_dir.name, command, log, ENVIRONMENT)
    try:
        while (code := process.exit_code) is None and time.monotonic() - start < timeout_s:
            time.sleep(POLL_S)
    finally:
        process.stop()
    if code != 0:
        reason = f"no end within {timeout_s:.0f} s" if code is None else f"exit code {code}"
        logs = f"{log}, {run_dir / 'logs'} and {run_dir / 'engines'}"
        raise ProgramError(f"{run_dir.name}: {reason}. It ended with:\n{process.tail()}\nLogs: {logs}")
    return Finished(run_dir, time.monotonic() - start)
