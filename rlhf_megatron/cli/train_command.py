"""`rlhf-megatron train`, `run_sft_job_command` and `reward-model`: train in this process, or in
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
    """Return the exit code of the process. Under torchrun every rank comes through here."""
    options = {"record": args.record, "replay": args.replay, "replay_from": args.replay_from}
    return _start_training("train", args, options)


def run_sft_job_command(args: argparse.Namespace) -> int:
    """Return the exit code of the job `run_sft_job_command`; every rank comes through here, as
    for `run_train_job_command`.
    """
    return _start_training("sft", args, {})


def run_reward_model_job_command(args: argparse.Namespace) -> int:
    """Return the exit code of the job `reward-model`; every rank comes through here, as
    for `run_train_job_command`.
    """
    return _start_training("reward-model", args, {})


def _start_training(job_name: str, args: argparse.Namespace, options: dict[str, Any]) -> int:
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
    ):  # a rank waits where Python cannot run: a signal must end it at once
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
        ):  # until the launcher or the controller takes them
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
    sys.stderr.write(
        f"stopped: {signal.Signals(signal_number).name} before the run has begun; the same command"
        " begins it\n"
    )
    raise SystemExit(get_startup_exit_code(signal_number))
