"""`rlhf-megatron serve-rewards RUN.yaml`: the rewards of a configuration for runs on
other machines.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_megatron.cli.generate_command import read_api_key
from rlhf_megatron.config.rules.run_rules import has_served_model
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.jobs.generation.model_source import load_job_config
from rlhf_megatron.rewards.service.reward_http_server import RewardHttpServer
from rlhf_megatron.rewards.service.reward_model_servers import RewardModelServers
from rlhf_megatron.rewards.service.reward_scorer import REWARD_LOG, make_reward_scorer
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.fleet.server_process import StartProgress, make_throttled_progress
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit
from rlhf_megatron.stop import StopRequest


def run_serve_rewards_command(args: argparse.Namespace) -> int:
    """Score samples for runs elsewhere until a stop signal, then return 0. Raise ValueError for
    wrong rewards, and where their processes have ended.
    """
    config = load_job_config(args.config, [], args.overrides)
    stop = StopRequest()
    folder = args.out.absolute()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    raise_open_file_limit()
    server = RewardHttpServer(args.host, args.port, read_api_key(args.api_key_file))
    with start_model_servers(
        config, folder, make_throttled_progress(_print_to_stderr, stop.raise_if_requested)
    ) as model:
        term = model.make_reward_term() if model is not None else None
        with make_reward_scorer(config.reward, folder / REWARD_LOG, term) as scorer:
            scorer.wait_until_ready()
            _print_to_stderr(f"rewards at {server.url}")
            server.score_until_over(scorer, lambda: stop.is_requested, _print_to_stderr)
    return 0


@contextmanager
def start_model_servers(
    config: RunConfig, folder: Path, report_progress: StartProgress
) -> Iterator[RewardModelServers | None]:
    """Start the servers of the reward model for the duration of the block, and yield them; yield
    None where the configuration has no served reward model.
    """
    if not has_served_model(config):
        yield None
        return
    with RewardModelServers(
        EngineSetup.from_config(config), config.reward_model, folder, report_progress
    ) as servers:
        yield servers


def _print_to_stderr(line: str) -> None:
    """Print a line to standard error, at once."""
    print(line, file=sys.stderr, flush=True)
