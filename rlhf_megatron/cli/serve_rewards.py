"""`rlhf-megatron serve-rewards RUN.yaml`: the rewards of a configuration for runs on other machines."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_megatron.cli.generate import api_key
from rlhf_megatron.config.rules.run import has_served_model
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.generation.source import config_of
from rlhf_megatron.rewards.service.model_servers import ModelServers
from rlhf_megatron.rewards.service.scorer import REWARD_LOG, make_scorer
from rlhf_megatron.rewards.service.server import RewardServer
from rlhf_megatron.rollout.fleet.process import Progress, now_and_then
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.stop import StopRequest


def serve_rewards(args: argparse.Namespace) -> int:
    """Exit code 0: it was told to end. Raises ValueError for wrong rewards, and where their processes are gone."""
    config = config_of(args.config, [], args.overrides)
    stop, folder = StopRequest(), args.out.absolute()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    server = RewardServer(args.host, args.port, api_key(args.api_key_file))
    with model_servers(config, folder, now_and_then(_say, stop.check)) as model:
        term = model.term() if model is not None else None
        with make_scorer(config.reward, folder / REWARD_LOG, term) as scorer:
            scorer.await_ready()
            _say(f"rewards at {server.url}")
            server.run(scorer, lambda: stop.is_requested)
    return 0


@contextmanager
def model_servers(config: RunConfig, folder: Path, progress: Progress) -> Iterator[ModelServers | None]:
    """Start the servers of the reward model and stop them in the end; None where the configuration has none."""
    if not has_served_model(config):
        yield None
        return
    with ModelServers(EngineSetup.of(config), config.reward_model, folder, progress) as servers:
        yield servers


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
