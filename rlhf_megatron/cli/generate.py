"""`rlhf-megatron generate SOURCE [PROMPTS ...]`: answers of a model to prompts, into a file."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_megatron.checkpoint.run_checkpoint import CheckpointStore
from rlhf_megatron.config.rules.run import has_pairs
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.generation.answer_file import read_answers
from rlhf_megatron.generation.endpoint import EndpointJob, model_of
from rlhf_megatron.generation.job import GenerateJob, answer_along, engine_setup
from rlhf_megatron.generation.loss import LossJob
from rlhf_megatron.generation.source import Served, config_of, weights_of
from rlhf_megatron.recovery.resume import CHECKPOINTS
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.stop import STOPPED_EXIT_CODE, RunStopped, StopRequest

KEY = "RLHF_MEGATRON_API_KEY"


def generate(args: argparse.Namespace) -> int:
    """Exit code 0: all prompts are answered; 1: engines failed for good; 75: stopped, the same command goes on."""
    code, out = answer(args)
    if not code:
        print(f"score them: rlhf-megatron evaluate {out} reward.name=exact_match")
    return code


def asked(args: argparse.Namespace, settings: Sequence[str] = ()) -> tuple[RunConfig, Path | None]:
    """The configuration of a job, and its source; None: an address. `settings`: those of the command line count over
    them."""
    shortcuts = {"n": args.n, "temperature": args.temperature, "top_p": args.top_p}
    words = [f"rollout.val_kwargs.{key}={value}" for key, value in shortcuts.items() if value is not None]
    words += [f"data.max_response_length={args.max_tokens}"] if args.max_tokens is not None else []
    prompts, overrides = split_words(args)
    source = None if is_address(args.source) else Path(args.source)
    return config_of(source, prompts, [*settings, *words, *overrides]), source


def is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def answer(args: argparse.Namespace, settings: Sequence[str] = (), kind: str = "answers") -> tuple[int, Path]:
    """The exit code of `generate`, and the file of answers. `kind`: of the file; "loss": of losses."""
    config, source = asked(args, settings)
    job: GenerateJob | EndpointJob
    if source is None:
        out = args.out or Path(f"{kind}.jsonl")
        job = _endpoint_job(args, config, out)
    else:
        out = args.out or Path(f"{source.absolute().stem}-{kind}.jsonl")
        served = weights_of(source, Path(config.model.path), args.step, args.best)
        job = _job_of(args, config, served, out, kind)
    figures: dict[str, float] = {}
    code = resumably(lambda stop: figures.update(job.run(stop, _say)), out)
    if code:
        return code, out
    if figures["prompts"]:
        rate = figures["tokens"] / max(figures["seconds"], 1e-9)
        print(f"{figures['samples']:.0f} answers of {figures['tokens']:.0f} tokens, {rate:.0f} tokens/s")
    what, of = ("losses of", "documents") if kind == "loss" else ("answers to", "prompts")
    print(f"{what} {sum(1 for _ in read_answers(out))} {of}: {out}")
    return 0, out


def _job_of(args: argparse.Namespace, config: RunConfig, served: Served, out: Path, kind: str) -> GenerateJob:
    setup, is_pairs = engine_setup(EngineSetup.of(config)), has_pairs(config)
    if kind == "loss":
        return LossJob.of_files(setup, config.data, config.sft, is_pairs, served, out, args.overwrite)
    sft = config.sft if config.job != "train" else None
    return GenerateJob.of(setup, config.data, sft, is_pairs, served, args.split, out, args.tokens, args.overwrite)


def answer_steps(
    args: argparse.Namespace, settings: Sequence[str] = (), kind: str = "answers"
) -> tuple[int, list[tuple[int, Path]]]:
    """The exit code, and a file for each checkpoint of a run, with its step; arguments as of `answer`."""
    config, source = asked(args, settings)
    steps = sorted(CheckpointStore(source / CHECKPOINTS).steps()) if source is not None else []
    if source is None or not steps:
        raise ValueError(f"--every-step needs the directory of a run with checkpoints; {args.source} is none.")
    folder = args.out or Path(f"{source.absolute().stem}-{kind}")
    folder.mkdir(parents=True, exist_ok=True)
    files = [(step, folder / f"step_{step:06d}.jsonl") for step in steps]
    first: GenerateJob | None = None
    jobs = []
    for step, out in files:
        served = weights_of(source, Path(config.model.path), step)
        first = first or _job_of(args, config, served, out, kind)
        jobs.append(replace(first, served=served, out=out))
    return resumably(lambda stop: answer_along(jobs, stop, _say), folder), files


def resumably(work: Callable[[StopRequest], None], out: Path) -> int:
    """Do it until a signal comes, and return the exit code. `out`: what keeps the answers."""
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    try:
        work(stop)
    except RunStopped as stopped:
        _say(f"stopped ({stopped}): the same command goes on; {out} keeps what is answered")
        return STOPPED_EXIT_CODE
    except EngineError as error:
        _say(f"error: {error} The same command goes on; {out} keeps what is answered, with logs of engines beside it")
        return 1
    return 0


def _endpoint_job(args: argparse.Namespace, config: RunConfig, out: Path) -> EndpointJob:
    """Raises ValueError, also for options that an endpoint would ignore."""
    if args.tokens or args.best or args.step is not None or args.split != "val":
        raise ValueError("--tokens, --step, --best and --split are for models and runs; leave them out for an address.")
    url = args.source.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = api_key(args.api_key_file)
    model = args.model or asyncio.run(model_of(url, key, config.rollout.request_timeout_s))
    how = (out, args.at_once, not args.completions, args.overwrite)
    return EndpointJob.of(config.data, config.rollout, config.trainer.seed, url, model, key, *how)


def api_key(path: Path | None) -> str | None:
    """The key in the file, else that of the environment. Raises ValueError for an empty one."""
    key = path.read_text().strip() if path is not None else os.environ.get(KEY, "").strip()
    if path is not None and not key:
        raise ValueError(f"{path} holds no key; write one line of text to it.")
    return key or None


def split_words(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The files and the settings among the words behind SOURCE."""
    files = [word for word in args.words if "=" not in word or Path(word).is_file()]
    return files, [word for word in args.words if word not in files] + list(args.overrides)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
