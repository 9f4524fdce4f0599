"""`rlhf-megatron train`, `sft` and `reward-model`: train in this process, or in those that they start."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import Any

from rlhf_megatron.stop import startup_exit_code


def train(args: argparse.Namespace) -> int:
    """Return the exit code of the process. Under torchrun every rank comes through here."""
    options = {"record": args.record, "replay": args.replay, "replay_from": args.replay_from}
    return _started("train", args, options)


def sft(args: argparse.Namespace) -> int:
    """Return the exit code of the job `sft`; every rank comes through here, as for `train`."""
    return _started("sft", args, {})


def reward_model(args: argparse.Namespace) -> int:
    """Return the exit code of the job `reward-model`; every rank comes through here, as for `train`."""
    return _started("reward-model", args, {})


def _started(command: str, args: argparse.Namespace, options: dict[str, Any]) -> int:
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a rank waits where Python cannot run: a signal must end it at once
        for number in (signal.SIGTERM, signal.SIGUSR1):  # until the launcher or the controller takes them
            signal.signal(number, _stop)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    from rlhf_megatron import api

    run = {"train": api.train, "sft": api.sft, "reward-model": api.reward_model}[command]
    try:
        is_free = args.allow_changes
        run(args.config, args.overrides, fresh=args.fresh, allow_changes=is_free, **options, is_own_process=False)
    except api.RunFailed as error:
        return error.exit_code
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    sys.stderr.write(f"stopped: {signal.Signals(number).name} before the run has begun; the same command begins it\n")
    raise SystemExit(startup_exit_code(number))
