"""`rlhf-megatron train`, `sft` and `reward-model`: train in this process, or in
those that they start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import Any

from rlhf_megatron.stop import get_startup_exit_code


def run_train_job_command(args: argparse.Namespace) -> int:
    """Run the job train and return the exit code of this process. Under torchrun every rank calls
    this function.
    """
    options = {"record": args.record, "replay": args.replay, "replay_from": args.replay_from}
    return _start_training("train", args, options)


def run_sft_job_command(args: argparse.Namespace) -> int:
    """Run the job sft and return the exit code of this process. Under torchrun every rank calls
    this function.
    """
    return _start_training("sft", args, {})


def run_reward_model_job_command(args: argparse.Namespace) -> int:
    """Run the job reward-model and return the exit code of this process. Under torchrun every rank
    calls this function.
    """
    return _start_training("reward-model", args, {})


def _start_training(job_name: str, args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run the job through `rlhf_megatron.api` and return 0, or the exit code of a failed run.
    Outside of torchrun, first install handlers for signals that arrive before the run has begun.
    `options` are the arguments that only some jobs have.
    """
    # a rank waits where Python cannot run: a signal must end it at once
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        # until the launcher or the controller takes them
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _exit_on_early_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    from rlhf_megatron import api

    run = {"train": api.train, "sft": api.sft, "reward-model": api.reward_model}[job_name]
    try:
        is_free = args.allow_changes
        run(
            args.config,
            args.overrides,
            fresh=args.fresh,
            allow_changes=is_free,
            **options,
            is_own_process=False,
        )
    except api.RunFailed as error:
        return error.exit_code
    return 0


def _exit_on_early_signal(signal_number: int, frame: FrameType | None) -> None:
    """Handle a signal before the run has begun: print a message and raise SystemExit with the
    startup exit code of the signal.
    """
    sys.stderr.write(
        f"stopped: {signal.Signals(signal_number).name} before the run has begun; the same command"
        " begins it\n"
    )
    raise SystemExit(get_startup_exit_code(signal_number))
