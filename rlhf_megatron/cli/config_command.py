"""`rlhf-megatron config show | check | reference`."""

from __future__ import annotations

import argparse
import os
import sys

from rlhf_megatron.config import reference as config_reference
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.rules.validate import problems_of, problems_of_files
from rlhf_megatron.config.show import as_yaml, table


def show(args: argparse.Namespace) -> None:
    """Prints first, then complains: a value that breaks a rule is best found in the table. Raises ConfigError."""
    loaded = read_run_config(args.config, args.overrides)
    use_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    sys.stdout.write(as_yaml(loaded.config) if args.yaml else table(loaded, use_colours))
    sys.stdout.flush()
    problems = problems_of(loaded) + problems_of_files(loaded)
    if problems:
        raise ConfigError(problems)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError with everything that is wrong."""
    loaded = load_run_config(args.config, args.overrides, with_files=not args.no_files)
    c = loaded.config
    megatron = c.actor.megatron
    sys.stdout.write(
        f"{args.config}: ok ({c.trainer.nnodes} x {c.trainer.n_gpus_per_node} ranks,"
        f" tp{megatron.tensor_model_parallel_size} pp{megatron.pipeline_model_parallel_size},"
        f" {c.data.train_batch_size} x {c.rollout.n} samples a step)\n"
    )


def reference(args: argparse.Namespace) -> None:
    sys.stdout.write(config_reference.reference(args.section))
