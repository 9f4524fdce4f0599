"""`rlhf-megatron check`: everything about a run that can be found out on a machine without its GPUs."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.model import critic_model_problems
from rlhf_megatron.config.rules.run import actor_ranks, has_critic, learning_sections, megatron_sections, world_size
from rlhf_megatron.config.rules.validate import validate_model
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded

if TYPE_CHECKING:
    from rlhf_megatron.proof.check.certificate import Certificate
    from rlhf_megatron.proof.check.proof import Models, Proof

ROWS_SHOWN = 10  # figures over the bar
FORMER = "shape.yaml"  # stands in the directory of a check that was interrupted


def check(args: argparse.Namespace) -> int:
    """0 when everything passes, 1 when the layout does not equal one rank or a run fails.

    Raises ConfigError for what `config check` finds, ValueError for a model that cannot be read.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: shapes and processes, no GPU
    signal.signal(signal.SIGTERM, _leave)  # through `finally`, so that no process is left
    if args.max_processes < 1:
        raise ValueError(f"--max-processes is {args.max_processes}; it must be at least 1.")
    start = time.monotonic()
    loaded = load_run_config(args.config, args.overrides, with_files=not args.no_files)
    models = _models(loaded)
    layout = _layout(loaded.config)
    print(f"configuration  {args.config}: ok ({layout}, {world_size(loaded.config)} ranks)", flush=True)
    directory = _directory(args, loaded.config)
    certificate = _certificate(args, loaded.config, models, directory)

    from rlhf_megatron.proof.check import certificate as certificates

    path = certificates.write(certificate, directory)
    _print_result(certificate.proof)
    print(f"verdict        {certificate.verdict} after {time.monotonic() - start:.0f} s; certificate: {path}")
    return 1 if certificate.verdict == "failed" else 0


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _models(loaded: Loaded) -> Models:
    """config.json of the policy and of the critic, checked against the layouts; the files that must be there."""
    from rlhf_megatron.checkpoint.hf_reader import read_hf_config
    from rlhf_megatron.proof.check.proof import Models
    from rlhf_megatron.proof.preflight import check_blocks
    from rlhf_megatron.rollout.fleet.start import EngineSetup

    config = loaded.config
    if config.job != "train":
        raise ValueError(
            f"check takes RL runs, and this file has job: {config.job}. Check a copy with job: train, whose workers and"
            " layout are the same, or use `config check` and train a few steps."
        )
    if config.actor.backend == "fsdp":
        raise ValueError(
            "check proves layouts of Megatron, and actor.backend fsdp has only one: each rank is a replica. Use"
            " `config check`; the run itself measures at its start what FSDP relies on."
        )
    policy = read_hf_config(Path(config.model.path))
    has_other = has_critic(config) and config.critic.path is not None
    critic = read_hf_config(Path(config.critic.path)) if has_other and config.critic.path else policy
    problems = validate_model(loaded, policy)
    problems += [str(problem) for problem in critic_model_problems(config, critic)] if has_other else []
    if problems:
        raise ConfigError(problems)
    check_blocks(EngineSetup.of(config), config.actor, actor_ranks(config))
    return Models(policy, critic)


def _layout(config: RunConfig) -> str:
    """ "tp2 pp2 dp1"; with a pool for the critic "tp2 pp2 dp1, critic tp2 pp1 dp1"."""
    from rlhf_megatron.runtime.pool import pools_of

    first, *others = pools_of(config)
    return ", ".join([str(first.layout), *(f"{pool.name} {pool.layout}" for pool in others)])


def _certificate(args: argparse.Namespace, config: RunConfig, models: Models, directory: Path) -> Certificate:
    from rlhf_megatron.parallel.prepare import prepare_megatron

    prepare_megatron()
    from rlhf_megatron.proof.check import memory_table
    from rlhf_megatron.proof.check.certificate import Certificate
    from rlhf_megatron.proof.check.fold_layout import fold_layouts
    from rlhf_megatron.proof.check.proof import prove
    from rlhf_megatron.runtime.roles import RoleBuilder

    device_bytes = 0 if config.trainer.device == "cpu" else memory_table.GPU_BYTES
    given, config = config, RoleBuilder(config).settled(device_bytes).config
    memory = memory_table.plan(config, models.policy, models.critic)
    _print_memory(memory)
    _make_directory(directory)
    proof = None
    if not args.no_run:
        layouts = fold_layouts(list(learning_sections(config)), args.max_processes)
        for folded in layouts:
            differences = "; ".join(folded.differences) or "as in the run"
            print(f"layout         {folded.name}: {folded.num_ranks} processes ({differences})", flush=True)
        proof = prove(config, models, layouts, directory, _progress)
    return Certificate(
        command=shlex.join(["rlhf-megatron", *_words(args)]),
        config=str(args.config),
        overrides=tuple(args.overrides),
        layout=_layout(config),
        num_ranks=world_size(config),
        has_files=not args.no_files,
        notes=(*_notes(config), *_settled(given, config)),
        memory=memory,
        proof=proof,
    )


def _words(args: argparse.Namespace) -> list[str]:
    """The command line that says the same again."""
    words = ["check", str(args.config), *args.overrides, "--max-processes", str(args.max_processes)]
    words += ["--out", str(args.out)] if args.out is not None else []
    return words + ["--no-run"] * args.no_run + ["--no-files"] * args.no_files


def _directory(args: argparse.Namespace, config: RunConfig) -> Path:
    """Return where the certificate goes. Raises ValueError for a directory that holds anything but a former check."""
    path: Path = args.out or Path(config.trainer.default_local_dir) / f"{config.trainer.experiment_name}-check"
    path = path.absolute()
    is_former = (path / FORMER).is_file() or (path / "certificate.json").is_file()
    if path.exists() and not is_former and (path.is_file() or any(path.iterdir())):
        raise ValueError(f"{path} has files that no check wrote; name another directory with --out.")
    return path


def _make_directory(path: Path) -> None:
    """New and empty; a former one is moved aside."""
    from rlhf_megatron.observe.run_dir import fresh_run_dir

    directory, moved = fresh_run_dir(str(path.parent), path.name)
    (directory / "logs").rmdir()  # each run has its own
    if moved is not None:
        print(f"{path} held a former check; it is {moved} now")


def _notes(config: RunConfig) -> tuple[str, ...]:
    sections = [section for section, megatron, _ in megatron_sections(config) if megatron.transformer_impl == "auto"]
    if not sections:
        return ()
    settings = " ".join(f"{section}.transformer_impl=transformer_engine" for section in sections)
    verb = "checks" if len(sections) == 1 else "check"
    return (
        "transformer_impl is auto, which is local on this machine and transformer_engine on GPUs where Transformer"
        f" Engine is installed; {settings} {verb} that module layout",
    )


def _settled(given: RunConfig, config: RunConfig) -> Iterator[str]:
    """Say how the run will decide, on a GPU, what the configuration leaves to it."""
    for (section, left, _), (_, megatron, _) in zip(megatron_sections(given), megatron_sections(config), strict=True):
        if config.trainer.device != "cpu" and left.use_distributed_optimizer is None:
            is_shared = str(bool(megatron.use_distributed_optimizer)).lower()
            yield f"{section}.use_distributed_optimizer is left to the run: {is_shared} on GPUs"
        if config.trainer.device != "cpu" and left.recompute_granularity is None:
            value = megatron.recompute_granularity or "none"
            yield f"{section}.recompute_granularity is left to the run: {value} on GPUs of 80 GB"


def _progress(text: str) -> None:
    print(f"run            {text}", flush=True)


def _print_memory(memory: Any) -> None:
    from rlhf_megatron.proof.check import memory_table

    print("memory", flush=True)
    table = [memory_table.HEADER, *memory_table.rows(memory)]
    widths = [max(len(row[column]) for row in table) for column in range(len(memory_table.HEADER))]
    for row in table:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for line in memory_table.notes(memory):
        print(f"  {line}", flush=True)


def _print_result(proof: Proof | None) -> None:
    from rlhf_megatron.proof.check import certificate as certificates
    from rlhf_megatron.proof.check import compare

    for result in proof.layouts if proof else ():
        over = certificates.over_the_bar(result)
        name = f"{result.folded.name} ({result.folded})"
        print(f"compare        {name}: {len(result.rows)} figures against one rank, {len(over)} over the bar")
        for row in compare.worst(over)[:ROWS_SHOWN]:
            print(f"  {row.quantity} of {row.where}: {row.value:.6g}, one rank {row.one_rank:.6g};", end=" ")
            print(f"error {row.error:.2g}, bar {row.bar:.2g}")
        for problem in result.problems:
            print(f"  {problem}")
    sys.stdout.flush()
