"""`rlhf-megatron config show | check | explain | reference`."""

from __future__ import annotations

import argparse
import os
import sys

from rlhf_megatron.config import explain as config_explain
from rlhf_megatron.config import reference as config_reference
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.rules import Check
from rlhf_megatron.config.rules.parts import unchecked
from rlhf_megatron.config.rules.validate import problems_of, problems_of_files
from rlhf_megatron.config.show import as_yaml, table


def show(args: argparse.Namespace) -> None:
    """Print all values, then raise ConfigError with all problems: a wrong value is best found in the table."""
    loaded = read_run_config(args.config, args.overrides)
    use_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    sys.stdout.write(as_yaml(loaded.config) if args.yaml else table(loaded, use_colours))
    sys.stdout.flush()
    problems = problems_of(loaded) + problems_of_files(loaded)
    if problems:
        raise ConfigError(problems)


def check(args: argparse.Namespace) -> None:
    """Say which plugins it runs, then run them and all checks that `train` makes before it starts anything.

    Raises ConfigError with everything that is wrong.
    """
    checks: list[Check] = []
    if not args.no_files:
        from rlhf_megatron.proof.preflight import checks_of_run

        checks = checks_of_run()
    loaded = load_run_config(
        args.config, args.overrides, not args.no_files, not args.no_plugins, checks, sys.stdout.write
    )
    if not args.no_files and loaded.lock is not None:
        from rlhf_megatron.recovery.lock_file import check_lock

        check_lock(loaded, False, print)
    for one in unchecked(loaded.config):
        sys.stdout.write(f"not checked: {one.kind} {one.name!r} ({one.key}), which a plugin may have\n")
    c = loaded.config
    megatron = c.actor.megatron
    sys.stdout.write(
        f"{args.config}: ok ({c.trainer.nnodes} x {c.trainer.n_gpus_per_node} ranks,"
        f" tp{megatron.tensor_model_parallel_size} pp{megatron.pipeline_model_parallel_size},"
        f" {c.data.train_batch_size}{f' x {c.rollout.n}' if c.job == 'train' else ''} samples a step)\n"
    )


def reference(args: argparse.Namespace) -> None:
    sys.stdout.write(config_reference.reference(args.section))


def explain(args: argparse.Namespace) -> None:
    """Print what is known of one setting. Raises ValueError for one that does not exist."""
    loaded = read_run_config(args.config, args.overrides) if args.config else None
    sys.stdout.write(config_explain.explain(args.key, loaded))
