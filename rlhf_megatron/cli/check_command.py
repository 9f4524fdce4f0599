"""`rlhf-megatron check`: everything about a run that can be found out on a machine
without its GPUs.
"""

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
from rlhf_megatron.config.rules.model_rules import find_critic_model_problems
from rlhf_megatron.config.rules.run_rules import (
    compute_world_size,
    count_actor_ranks,
    has_critic,
    list_learning_pool_layouts,
    list_pool_layouts,
)
from rlhf_megatron.config.rules.validate import validate_model_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

if TYPE_CHECKING:
    from rlhf_megatron.planning.check.certificate import LayoutCertificate
    from rlhf_megatron.planning.check.layout_proof import LayoutProof, ModelConfigs

NUM_ROWS_SHOWN = 10  # figures over the bar
UNFINISHED_CHECK_FILE = "shape.yaml"  # stands in the directory of a check that was interrupted


def run_check_command(args: argparse.Namespace) -> int:
    """Check a run's layout on this machine and write the certificate. Return 0 if everything
    passes, 1 if the layout's results differ from those of one rank or a run fails.

    Hide GPUs from this process, and turn SIGTERM into an exit that cleans up. Raise ConfigError for
    problems that `config check` finds, ValueError for options or a model that cannot be checked.
    """
    # before torch is imported: shapes and processes, no GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, _exit_on_signal)  # through `finally`, so that no process is left
    if args.max_processes < 1:
        raise ValueError(f"--max-processes is {args.max_processes}; it must be at least 1.")
    start = time.monotonic()
    loaded = load_run_config(args.config, args.overrides, with_files=not args.no_files)
    models = _read_models(loaded)
    layout = _describe_layout(loaded.config)
    print(
        f"configuration  {args.config}: ok ({layout}, {compute_world_size(loaded.config)} ranks)",
        flush=True,
    )
    directory = _choose_directory(args, loaded.config)
    certificate = _make_certificate(args, loaded.config, models, directory)

    from rlhf_megatron.planning.check import certificate as certificates

    path = certificates.write_certificate(certificate, directory)
    _print_result(certificate.proof)
    print(
        f"verdict        {certificate.verdict} after {time.monotonic() - start:.0f} s;"
        f" certificate: {path}"
    )
    return 1 if certificate.verdict == "failed" else 0


def _exit_on_signal(signal_number: int, frame: object) -> NoReturn:
    """Handle a signal by raising SystemExit with code 128 + its number."""
    raise SystemExit(128 + signal_number)


def _read_models(loaded: LoadedConfig) -> ModelConfigs:
    """Return the config.json of the policy and of the critic (the policy's where the critic has
    none), after checking them against the layouts. Raise ConfigError for a model that does not fit,
    and ValueError for a job or backend that `check` does not cover.
    """
    from rlhf_megatron.controller.preflight import check_fp8_blocks
    from rlhf_megatron.planning.check.layout_proof import ModelConfigs
    from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
    from rlhf_megatron.weights.hf_reader import read_hf_config

    config = loaded.config
    if config.job != "train":
        raise ValueError(
            f"check takes RL runs, and this file has job: {config.job}. Check a copy with job:"
            " train, whose workers and layout are the same, or use `config check` and train"
            " a few steps."
        )
    if config.actor.backend == "fsdp":
        raise ValueError(
            "check proves layouts of Megatron, and actor.backend fsdp has only one: each rank is a"
            " replica. Use `config check`; the run itself measures at its start what"
            " FSDP relies on."
        )
    policy = read_hf_config(Path(config.model.path))
    has_other = has_critic(config) and config.critic.path is not None
    critic = (
        read_hf_config(Path(config.critic.path)) if has_other and config.critic.path else policy
    )
    problems = validate_model_config(loaded, policy)
    problems += (
        [str(problem) for problem in find_critic_model_problems(config, critic)]
        if has_other
        else []
    )
    if problems:
        raise ConfigError(problems)
    check_fp8_blocks(EngineSetup.from_config(config), config.actor, count_actor_ranks(config))
    return ModelConfigs(policy, critic)


def _describe_layout(config: RunConfig) -> str:
    """Return the layout of the pools in words: "tp2 pp2 dp1", or "tp2 pp2 dp1, critic tp2 pp1 dp1"
    with a pool of the critic's own.
    """
    from rlhf_megatron.runtime.rank_pools import build_pool_specs

    first, *others = build_pool_specs(config)
    return ", ".join([str(first.layout), *(f"{pool.name} {pool.layout}" for pool in others)])


def _make_certificate(
    args: argparse.Namespace, config: RunConfig, models: ModelConfigs, directory: Path
) -> LayoutCertificate:
    """Return the certificate of a layout: settle open settings, plan and print the memory, create
    the directory, and, without --no-run, run the folded layouts and compare them with one rank. All
    of this is printed on the way.
    """
    from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron

    prepare_megatron()
    from rlhf_megatron.planning.check import memory_table
    from rlhf_megatron.planning.check.certificate import LayoutCertificate
    from rlhf_megatron.planning.check.fold_layout import fold_layouts
    from rlhf_megatron.planning.check.layout_proof import prove_layouts
    from rlhf_megatron.runtime.rank_roles import RoleBuilder

    device_bytes = 0 if config.trainer.device == "cpu" else memory_table.DEFAULT_GPU_BYTES
    given = config
    config = RoleBuilder(config).with_settled_layouts(device_bytes).config
    memory = memory_table.plan_run_memory(config, models.policy, models.critic)
    _print_memory(memory)
    _create_directory(directory)
    proof = None
    if not args.no_run:
        layouts = fold_layouts(list(list_learning_pool_layouts(config)), args.max_processes)
        for folded in layouts:
            differences = "; ".join(folded.differences) or "as in the run"
            print(
                f"layout         {folded.name}: {folded.num_ranks} processes ({differences})",
                flush=True,
            )
        proof = prove_layouts(config, models, layouts, directory, _print_progress)
    return LayoutCertificate(
        command=shlex.join(["rlhf-megatron", *_format_command_words(args)]),
        config=str(args.config),
        overrides=tuple(args.overrides),
        layout=_describe_layout(config),
        num_ranks=compute_world_size(config),
        has_files=not args.no_files,
        notes=(*_list_notes(config), *_describe_settled_settings(given, config)),
        memory=memory,
        proof=proof,
    )


def _format_command_words(args: argparse.Namespace) -> list[str]:
    """Return the words of a command line that repeats this check."""
    words = ["check", str(args.config), *args.overrides, "--max-processes", str(args.max_processes)]
    words += ["--out", str(args.out)] if args.out is not None else []
    return words + ["--no-run"] * args.no_run + ["--no-files"] * args.no_files


def _choose_directory(args: argparse.Namespace, config: RunConfig) -> Path:
    """Return the directory for the certificate: --out, or one beside the run directory. Raise
    ValueError for a directory that holds files which no check wrote.
    """
    path: Path = (
        args.out
        or Path(config.trainer.default_local_dir) / f"{config.trainer.experiment_name}-check"
    )
    path = path.absolute()
    is_former = (path / UNFINISHED_CHECK_FILE).is_file() or (path / "certificate.json").is_file()
    if path.exists() and not is_former and (path.is_file() or any(path.iterdir())):
        raise ValueError(
            f"{path} has files that no check wrote; name another directory with --out."
        )
    return path


def _create_directory(path: Path) -> None:
    """Create the directory, new and empty; move the directory of a former check aside and print
    where.
    """
    from rlhf_megatron.controller.observe.run_dir import create_fresh_run_dir

    directory, moved = create_fresh_run_dir(str(path.parent), path.name)
    (directory / "logs").rmdir()  # each run has its own
    if moved is not None:
        print(f"{path} held a former check; it is {moved} now")


def _list_notes(config: RunConfig) -> tuple[str, ...]:
    """Return the certificate's note on pools whose transformer_impl is auto, which is another one
    on GPUs than here; () without such pools.
    """
    sections = [
        section
        for section, megatron, _ in list_pool_layouts(config)
        if megatron.transformer_impl == "auto"
    ]
    if not sections:
        return ()
    settings = " ".join(f"{section}.transformer_impl=transformer_engine" for section in sections)
    verb = "checks" if len(sections) == 1 else "check"
    return (
        (
            "transformer_impl is auto, which is local on this machine and transformer_engine on"
            f" GPUs where Transformer Engine is installed; {settings} {verb} that module layout"
        ),
    )


def _describe_settled_settings(
    written_config: RunConfig, settled_config: RunConfig
) -> Iterator[str]:
    """Yield a sentence for each setting of a pool that the configuration leaves open, with the
    value that the run will choose on a GPU.
    """
    for (section, left, _), (_, megatron, _) in zip(
        list_pool_layouts(written_config), list_pool_layouts(settled_config), strict=True
    ):
        if settled_config.trainer.device != "cpu" and left.use_distributed_optimizer is None:
            is_shared = str(bool(megatron.use_distributed_optimizer)).lower()
            yield f"{section}.use_distributed_optimizer is left to the run: {is_shared} on GPUs"
        if settled_config.trainer.device != "cpu" and left.recompute_granularity is None:
            value = megatron.recompute_granularity or "none"
            yield f"{section}.recompute_granularity is left to the run: {value} on GPUs of 80 GB"


def _print_progress(text: str) -> None:
    """Print a line on the progress of the check's runs."""
    print(f"run            {text}", flush=True)


def _print_memory(memory: Any) -> None:
    """Print the table of planned memory, with its notes."""
    from rlhf_megatron.planning.check import memory_table

    print("memory", flush=True)
    table = [memory_table.HEADER, *memory_table.make_memory_rows(memory)]
    widths = [max(len(row[column]) for row in table) for column in range(len(memory_table.HEADER))]
    for row in table:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for line in memory_table.make_memory_notes(memory):
        print(f"  {line}", flush=True)


def _print_result(proof: LayoutProof | None) -> None:
    """Print for each layout how many figures differ from one rank by more than their bar, the worst
    of them, and the problems of its run; nothing without a proof.
    """
    from rlhf_megatron.planning.check import certificate as certificates
    from rlhf_megatron.planning.check import run_comparison

    for result in proof.layouts if proof else ():
        over = certificates.list_rows_over_bar(result)
        name = f"{result.folded_run.name} ({result.folded_run})"
        print(
            f"compare        {name}: {len(result.rows)} figures against one rank, {len(over)}"
            " over the bar"
        )
        for row in run_comparison.select_worst_rows(over)[:NUM_ROWS_SHOWN]:
            print(
                f"  {row.quantity} of {row.where}: {row.value:.6g}, one rank {row.one_rank:.6g};",
                end=" ",
            )
            print(f"error {row.error:.2g}, bar {row.bar:.2g}")
        for problem in result.problems:
            print(f"  {problem}")
    sys.stdout.flush()
