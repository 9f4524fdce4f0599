"""`rlhf-megatron train`: trains in this process, or in those that it starts."""

from __future__ import annotations

import argparse

from rlhf_megatron import api


def train(args: argparse.Namespace) -> int:
    """Return the exit code of the process. Under torchrun every rank comes through here."""
    options = {"fresh": args.fresh, "record": args.record, "replay": args.replay, "replay_from": args.replay_from}
    try:
        api.train(args.config, args.overrides, **options, is_own_process=False)
    except api.RunFailed as error:
        return error.exit_code
    return 0
