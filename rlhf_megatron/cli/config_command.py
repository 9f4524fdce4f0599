"""`rlhf-megatron config show | check | explain | reference`."""

from __future__ import annotations

import argparse
import os
import sys

from rlhf_megatron.config import explain as config_explain
from rlhf_megatron.config import reference as config_reference
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.rules import PreflightCheck
from rlhf_megatron.config.rules.part_rules import list_unchecked_parts
from rlhf_megatron.config.rules.validate import find_config_problems, list_file_problems
from rlhf_megatron.config.show import format_settings_table, render_config_yaml
from rlhf_megatron.controller.settings_checks import list_settings_checks


def run_config_show_command(args: argparse.Namespace) -> None:
    """Print all settings with their values and origins, or as YAML, then raise ConfigError with all
    problems: a wrong value is best found in the table.
    """
    loaded = read_run_config(args.config, args.overrides)
    use_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    sys.stdout.write(
        render_config_yaml(loaded.config)
        if args.yaml
        else format_settings_table(loaded, use_colours)
    )
    sys.stdout.flush()
    problems = find_config_problems(loaded) + list_file_problems(loaded)
    if problems:
        raise ConfigError(problems)


def run_config_check_command(args: argparse.Namespace) -> None:
    """Run the plugins, after printing their names, and all checks that `train` makes before it
    starts anything, with --no-files those that need only settings; print the configuration's size
    if all pass. Raise ConfigError with every problem.
    """
    checks: list[PreflightCheck] = list_settings_checks()
    if not args.no_files:
        from rlhf_megatron.controller.preflight import list_preflight_checks

        checks = list_preflight_checks(report_line=print)
    loaded = load_run_config(
        args.config,
        args.overrides,
        not args.no_files,
        not args.no_plugins,
        checks,
        sys.stdout.write,
    )
    if not args.no_files and loaded.lock_contents is not None:
        from rlhf_megatron.controller.recovery.config_lock_file import check_config_lock

        check_config_lock(loaded, False, print)
    for one in list_unchecked_parts(loaded.config):
        sys.stdout.write(
            f"not checked: {one.kind} {one.name!r} ({one.key}), which a plugin may have\n"
        )
    c = loaded.config
    megatron = c.actor.megatron
    sys.stdout.write(
        f"{args.config}: ok ({c.trainer.nnodes} x {c.trainer.n_gpus_per_node} ranks,"
        f" tp{megatron.tensor_model_parallel_size} pp{megatron.pipeline_model_parallel_size},"
        f" {c.data.train_batch_size}{f' x {c.rollout.n}' if c.job == 'train' else ''} samples a"
        " step)\n"
    )


def run_config_reference_command(args: argparse.Namespace) -> None:
    """Print the reference of all settings, or of one section, as Markdown. Raise ValueError for an
    unknown section.
    """
    sys.stdout.write(config_reference.render_settings_reference(args.section))


def run_config_explain_command(args: argparse.Namespace) -> None:
    """Print the explanation of one setting, with its value if a configuration is given. Raise
    ValueError for a setting that does not exist.
    """
    loaded = read_run_config(args.config, args.overrides) if args.config else None
    sys.stdout.write(config_explain.explain_setting(args.key, loaded))
