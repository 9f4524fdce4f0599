"""`rlhf-megatron serve SOURCE`: a model or a run behind an OpenAI-compatible address."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

from rlhf_megatron.cli.generate_command import read_api_key
from rlhf_megatron.jobs.generation.answer_generation_job import make_standalone_engine_setup
from rlhf_megatron.jobs.generation.model_source import load_job_config
from rlhf_megatron.jobs.serving.http_front import ServingLimits
from rlhf_megatron.jobs.serving.serve_job import ServeJob
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.stop import RunStopped, StopRequest


def run_serve_command(args: argparse.Namespace) -> int:
    """Serve a model or a run in OpenAI's format until a stop signal (return 0) or until its engines
    have failed for good (return 1). Raise ValueError for wrong words on the command line.
    """
    sources = [word for word in args.words if "=" not in word or Path(word).exists()]
    overrides = [word for word in args.words if word not in sources] + list(args.overrides)
    if len(sources) > 1 or not (sources or args.follow):
        raise ValueError(
            f"serve takes one model, run or RUN.yaml, not {len(sources)}; or --follow RUN_DIR."
        )
    source = Path(sources[0]) if sources else args.follow
    name = args.name or source.absolute().name.removesuffix(".yaml")
    folder = (args.out or Path(f"{source.absolute().stem}-server")).absolute()
    key = read_api_key(args.api_key_file)
    config = load_job_config(source, [], overrides)
    setup = make_standalone_engine_setup(EngineSetup.from_config(config))
    job = ServeJob(
        setup,
        config.data,
        source,
        args.follow,
        folder,
        name,
        args.host,
        args.port,
        key,
        _make_limits(args),
    )
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    try:
        job.run_server(stop, _print_to_stderr)
    except RunStopped:
        return 0
    except EngineError as error:
        _print_to_stderr(f"error: {error} Logs: {folder}/engines")
        return 1
    return 0


def _make_limits(args: argparse.Namespace) -> ServingLimits:
    """Return the limits of requests: the defaults, or what the command line says."""
    limits = ServingLimits()
    if args.max_characters is not None:
        limits = replace(limits, most_characters=args.max_characters)
    if args.max_body_mib is not None:
        limits = replace(limits, max_body_bytes=args.max_body_mib << 20)
    return limits


def _print_to_stderr(line: str) -> None:
    """Print a line to standard error, at once."""
    print(line, file=sys.stderr, flush=True)
