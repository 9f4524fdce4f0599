"""`rlhf-megatron serve SOURCE`: a model or a run behind an OpenAI-compatible address."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rlhf_megatron.cli.generate import api_key
from rlhf_megatron.generation.job import engine_setup
from rlhf_megatron.generation.source import config_of
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.serving.job import ServeJob
from rlhf_megatron.stop import RunStopped, StopRequest


def serve(args: argparse.Namespace) -> int:
    """Exit code 0: it was told to end; 1: its engines failed for good."""
    sources = [word for word in args.words if "=" not in word or Path(word).exists()]
    overrides = [word for word in args.words if word not in sources] + list(args.overrides)
    if len(sources) > 1 or not (sources or args.follow):
        raise ValueError(f"serve takes one model, run or RUN.yaml, not {len(sources)}; or --follow RUN_DIR.")
    source = Path(sources[0]) if sources else args.follow
    name = args.name or source.absolute().name.removesuffix(".yaml")
    folder = (args.out or Path(f"{source.absolute().stem}-server")).absolute()
    key = api_key(args.api_key_file)
    config = config_of(source, [], overrides)
    setup = engine_setup(EngineSetup.of(config))
    job = ServeJob(setup, config.data, source, args.follow, folder, name, args.host, args.port, key)
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    try:
        job.run(stop, _say)
    except RunStopped:
        return 0
    except EngineError as error:
        _say(f"error: {error} Logs: {folder}/engines")
        return 1
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
