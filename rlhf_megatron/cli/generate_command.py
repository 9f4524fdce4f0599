"""`rlhf-megatron generate SOURCE [PROMPTS ...]`: answers of a model to prompts, into a file."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_megatron.config.rules.run_rules import learns_from_pairs
from rlhf_megatron.config.schema import DataConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import DEFAULT
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore
from rlhf_megatron.controller.recovery.resume_point import CHECKPOINTS
from rlhf_megatron.jobs.generation.answer_file import read_answer_rows
from rlhf_megatron.jobs.generation.answer_generation_job import (
    AnswerGenerationJob,
    answer_with_checkpoints,
    make_standalone_engine_setup,
)
from rlhf_megatron.jobs.generation.endpoint_job import EndpointJob, fetch_model_name
from rlhf_megatron.jobs.generation.episode_job import EpisodeJob
from rlhf_megatron.jobs.generation.loss_job import LossJob
from rlhf_megatron.jobs.generation.model_source import (
    ServedWeights,
    find_served_weights,
    load_job_settings,
)
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.stop import STOPPED_EXIT_CODE, RunStopped, StopRequest

# Called with (source, label, extra) of each prompt; raises ConfigError for labels that are refused.
LabelCheck = Callable[[Sequence[tuple[str, str, str]]], None]
API_KEY_VARIABLE = "RLHF_MEGATRON_API_KEY"


def run_generate_command(args: argparse.Namespace) -> int:
    """Write a model's answers to prompts into a file. Return 0 if all prompts are answered, 1 if
    engines failed for good, 75 if the command was stopped; the same command then continues.
    """
    code, out = generate_answer_file(args)
    if not code:
        print(f"score them: rlhf-megatron evaluate {out} reward.name=exact_match")
    return code


@dataclass(frozen=True)
class AnswerJobSettings:
    """The configuration of a job that answers prompts, and where its weights come from."""

    config: RunConfig
    source: Path | None  # of the weights; None: an address answers
    is_default_length: bool  # nobody has set data.max_response_length


def resolve_job_settings(
    args: argparse.Namespace, default_settings: Sequence[str] = ()
) -> AnswerJobSettings:
    """Return the settings of a job that answers prompts. Settings of the command line override
    `default_settings`.
    """
    shortcuts = {"n": args.n, "temperature": args.temperature, "top_p": args.top_p}
    words = [
        f"rollout.val_kwargs.{key}={value}" for key, value in shortcuts.items() if value is not None
    ]
    words += [f"data.max_response_length={args.max_tokens}"] if args.max_tokens is not None else []
    prompts, overrides = split_files_and_settings(args)
    source = None if is_http_address(args.source) else Path(args.source)
    loaded = load_job_settings(source, prompts, [*default_settings, *words, *overrides])
    return AnswerJobSettings(
        loaded.config, source, loaded.find_origin("data.max_response_length") == DEFAULT
    )


def is_http_address(source: str) -> bool:
    """Return whether a source is an http or https address rather than a path."""
    return source.startswith(("http://", "https://"))


def generate_answer_file(
    args: argparse.Namespace,
    default_settings: Sequence[str] = (),
    file_kind: str = "answers",
    check_labels: LabelCheck | None = None,
) -> tuple[int, Path]:
    """Let the source answer the prompts, and print the counts and rate. Return the exit code, as of
    `run_generate_command`, and the path of the file. `file_kind` "loss" writes losses of given
    documents in place of answers; the kind is also part of the default file name. `check_labels` is
    called with the labels of the prompts before anything is started.
    """
    settings = resolve_job_settings(args, default_settings)
    config = settings.config
    source = settings.source
    _require_prompts(args.source, config.data)
    job: AnswerGenerationJob | EndpointJob
    if source is None:
        out = args.out or Path(f"{file_kind}.jsonl")
        job = _make_endpoint_job(args, config, out)
    else:
        out = args.out or Path(f"{source.absolute().stem}-{file_kind}.jsonl")
        served = find_served_weights(source, Path(config.model.path), args.step, args.best)
        job = _make_generate_job(args, settings, served, out, file_kind)
    if check_labels is not None:
        check_labels(job.list_labels())
    figures: dict[str, float] = {}
    code = run_until_stopped(lambda stop: figures.update(job.run(stop, _print_to_stderr)), out)
    if code:
        return code, out
    if figures["prompts"]:
        rate = figures["tokens"] / max(figures["seconds"], 1e-9)
        print(
            f"{figures['samples']:.0f} answers of {figures['tokens']:.0f} tokens,"
            f" {rate:.0f} tokens/s"
        )
    what, of = ("losses of", "documents") if file_kind == "loss" else ("answers to", "prompts")
    print(f"{what} {sum(1 for _ in read_answer_rows(out))} {of}: {out}")
    return 0, out


def _require_prompts(source: str, data: DataConfig) -> None:
    """Raise ValueError where neither the source nor the command line names anything to ask."""
    if not (data.train_files or data.val_files or data.task or data.sources):
        raise ValueError(
            f"{source} brings no prompts; name a file of prompts behind it: JSONL, JSON or"
            " parquet (docs/data.md)."
        )


def _make_generate_job(
    args: argparse.Namespace,
    settings: AnswerJobSettings,
    served: ServedWeights,
    out_path: Path,
    file_kind: str,
) -> AnswerGenerationJob:
    """Return the job that writes answers of a model with engines of this command to `out_path`, or
    losses if `file_kind` is "loss".
    """
    config = settings.config
    setup = make_standalone_engine_setup(EngineSetup.from_config(config))
    is_pairs = learns_from_pairs(config)
    if file_kind == "loss":
        return LossJob.from_files(
            setup, config.data, config.sft, is_pairs, served, out_path, args.overwrite
        )
    if config.rollout.environment.name is not None:
        return EpisodeJob.from_settings(
            setup, config.data, served, args.split, out_path, args.tokens, args.overwrite
        )
    sft = config.sft if config.job != "train" else None
    return AnswerGenerationJob.from_config(
        setup,
        config.data,
        sft,
        is_pairs,
        served,
        args.split,
        out_path,
        args.tokens,
        args.overwrite,
        settings.is_default_length,
    )


def generate_answers_of_each_step(
    args: argparse.Namespace,
    default_settings: Sequence[str] = (),
    file_kind: str = "answers",
    check_labels: LabelCheck | None = None,
) -> tuple[int, list[tuple[int, Path]]]:
    """Let each checkpoint of a run answer, one file a checkpoint. Return the exit code and (step,
    path) of each file; the arguments are those of `generate_answer_file`. Raise ValueError where
    the source is no run with checkpoints.
    """
    settings = resolve_job_settings(args, default_settings)
    config = settings.config
    source = settings.source
    steps = sorted(CheckpointStore(source / CHECKPOINTS).list_steps()) if source is not None else []
    if source is None or not steps:
        raise ValueError(
            f"--every-step needs the directory of a run with checkpoints; {args.source} is none."
        )
    folder = args.out or Path(f"{source.absolute().stem}-{file_kind}")
    folder.mkdir(parents=True, exist_ok=True)
    files = [(step, folder / f"step_{step:06d}.jsonl") for step in steps]
    first: AnswerGenerationJob | None = None
    jobs = []
    for step, out in files:
        served = find_served_weights(source, Path(config.model.path), step)
        first = first or _make_generate_job(args, settings, served, out, file_kind)
        jobs.append(replace(first, served_weights=served, output_path=out))
    if check_labels is not None:
        check_labels(jobs[0].list_labels())
    return run_until_stopped(
        lambda stop: answer_with_checkpoints(jobs, stop, _print_to_stderr), folder
    ), files


def refuse_environment(config: RunConfig) -> None:
    """Raise ValueError for a configuration whose samples talk with an environment, where an address
    answers: episodes need the ids that were sampled, and endpoints give texts.
    """
    name = config.rollout.environment.name
    if name is not None:
        raise ValueError(
            f"rollout.environment.name is {name}, and an address answers with texts: episodes need"
            " the sampled token ids, which engines of this command give; name a model or a run, or"
            " set rollout.environment.name=null."
        )


def run_until_stopped(run_job: Callable[[StopRequest], None], answers_path: Path) -> int:
    """Run the job with a StopRequest that SIGTERM and SIGINT trigger. Return 0 when it is done, 75
    after a stop, 1 after an engine failure, each with a message that names `answers_path`, where
    finished answers are kept.
    """
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    try:
        run_job(stop)
    except RunStopped as stopped:
        _print_to_stderr(
            f"stopped ({stopped}): the same command goes on; {answers_path} keeps what is answered"
        )
        return STOPPED_EXIT_CODE
    except EngineError as error:
        _print_to_stderr(
            f"error: {error} The same command goes on; {answers_path} keeps what is answered, with"
            " logs of engines beside it"
        )
        return 1
    return 0


def _make_endpoint_job(args: argparse.Namespace, config: RunConfig, out_path: Path) -> EndpointJob:
    """Return the job that asks an OpenAI-compatible server; without --model, ask the server for its
    first model. Raise ValueError for options that an endpoint would ignore.
    """
    refuse_environment(config)
    if args.tokens or args.best or args.step is not None or args.split != "val":
        raise ValueError(
            "--tokens, --step, --best and --split are for models and runs; leave them out for"
            " an address."
        )
    url = args.source.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    key = read_api_key(args.api_key_file)
    model = args.model or asyncio.run(fetch_model_name(url, key, config.rollout.request_timeout_s))
    return EndpointJob.from_config(
        config.data,
        config.rollout,
        config.trainer.seed,
        url,
        model,
        key,
        out_path,
        num_concurrent_prompts=args.at_once,
        is_chat=not args.completions,
        overwrite=args.overwrite,
    )


def read_api_key(key_path: Path | None) -> str | None:
    """Return the API key in the file, or without a file the key of the environment variable
    RLHF_MEGATRON_API_KEY; None where neither exists. Raise ValueError for an empty file.
    """
    key = (
        key_path.read_text().strip()
        if key_path is not None
        else os.environ.get(API_KEY_VARIABLE, "").strip()
    )
    if key_path is not None and not key:
        raise ValueError(f"{key_path} holds no key; write one line of text to it.")
    return key or None


def split_files_and_settings(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the files of prompts, and the settings (with those of args.overrides), among the words
    behind SOURCE. A word with "=" is a setting unless a file of that name exists.
    """
    files = [word for word in args.words if "=" not in word or Path(word).is_file()]
    return files, [word for word in args.words if word not in files] + list(args.overrides)


def _print_to_stderr(line: str) -> None:
    """Print a line to standard error, at once."""
    print(line, file=sys.stderr, flush=True)
