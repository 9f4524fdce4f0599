"""`rlhf-megatron generate SOURCE [PROMPTS ...]`: answers of a model to prompts, into a file."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rlhf_megatron.generation.answer_file import read_answers
from rlhf_megatron.generation.job import GenerateJob
from rlhf_megatron.generation.source import config_of, weights_of
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.stop import STOPPED_EXIT_CODE, RunStopped, StopRequest


def generate(args: argparse.Namespace) -> int:
    """Exit code 0: all prompts are answered; 1: engines failed for good; 75: stopped, the same command goes on."""
    code, out = answer(args)
    if not code:
        print(f"score them: rlhf-megatron evaluate {out} reward.name=exact_match")
    return code


def answer(args: argparse.Namespace) -> tuple[int, Path]:
    """The exit code of `generate`, and the file of answers."""
    shortcuts = {"n": args.n, "temperature": args.temperature, "top_p": args.top_p}
    words = [f"rollout.val_kwargs.{key}={value}" for key, value in shortcuts.items() if value is not None]
    words += [f"data.max_response_length={args.max_tokens}"] if args.max_tokens is not None else []
    prompts, overrides = split_words(args)
    source = Path(args.source)
    config = config_of(source, prompts, [*words, *overrides])
    out = args.out or Path(f"{source.absolute().stem}-answers.jsonl")
    served = weights_of(source, Path(config.model.path), args.step, args.best)
    job = GenerateJob.of(config, served, args.split, out, args.tokens, args.overwrite)
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    try:
        figures = job.run(stop, _say)
    except RunStopped as stopped:
        _say(f"stopped ({stopped}): the same command goes on; {out} keeps what is answered")
        return STOPPED_EXIT_CODE, out
    except EngineError as error:
        _say(f"error: {error} The same command goes on; {out} keeps what is answered, logs: {out}.job/engines")
        return 1, out
    if figures["prompts"]:
        rate = figures["tokens"] / max(figures["seconds"], 1e-9)
        print(f"{figures['samples']:.0f} answers of {figures['tokens']:.0f} tokens, {rate:.0f} tokens/s")
    print(f"answers to {sum(1 for _ in read_answers(out))} prompts: {out}")
    return 0, out


def split_words(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The files and the settings among the words behind SOURCE."""
    files = [word for word in args.words if "=" not in word or Path(word).is_file()]
    return files, [word for word in args.words if word not in files] + list(args.overrides)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
