"""The command `rlhf-megatron`: parses, imports what the subcommand needs, and turns errors
into exit codes.

Exit codes: 0 done; 1 an error that the message explains; 2 wrong arguments or configuration; 3 a
capsule whose numbers are finite when it is run again; 17 numbers that are not finite; 75 stopped on
request with the state saved; 128 + n ended by signal n. An error that a user cannot have caused is
not caught: it keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence

from rlhf_megatron import __version__
from rlhf_megatron.cli.command_parser import CommandParser
from rlhf_megatron.cli.commands import COMMANDS, add_traceback_option
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.import_folders import protect_imports

USAGE_ERROR = 2
# for the checks of a node's first rank, which the other ranks leave to it
_FIRST_RANK_GRACE_S = 60.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands of `COMMANDS`. After parsing, `args.run` is the
    "module:function" to call.
    """
    parser = CommandParser(
        prog="rlhf-megatron",
        description="Train large language models with reinforcement learning on Megatron-Core.",
        epilog="`rlhf-megatron COMMAND -h` explains a command; docs/commands.md lists all.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_traceback_option(parser)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(command.name, help=command.help_text)
        if command.target:
            sub.set_defaults(run=command.target)
            add_traceback_option(sub)
        command.add_arguments(sub)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line (sys.argv if `argv` is None). Overrides and other words may be before,
    between and after options, which argparse alone does not allow. Exit with code 2 and a message
    for unknown arguments.
    """
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    more = next((name for name in ("words", "overrides") if hasattr(args, name)), None)
    strange = [
        item
        for item in rest
        if item.startswith("-") or more is None or (more == "overrides" and "=" not in item)
    ]
    if strange:
        settings = [item.lstrip("-") for item in strange if item.startswith("--") and "=" in item]
        hint = f"; a setting is given without dashes: {' '.join(settings)}" if settings else ""
        parser.error(f"unrecognized arguments: {' '.join(strange)}{hint}")
    if rest:
        setattr(args, str(more), [*getattr(args, str(more)), *rest])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Print configuration errors (2), other errors
    that a user can fix (1) and an interrupt (130) as messages; with --traceback raise the errors.
    """
    protect_imports()
    args = parse_arguments(argv)
    module, _, function = args.run.partition(":")
    try:
        return getattr(importlib.import_module(module, __package__), function)(args) or 0
    except ConfigError as error:
        if hasattr(args, "traceback"):
            raise
        # the first rank of the node finds the same, and ends this one
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_FIRST_RANK_GRACE_S)
            return USAGE_ERROR
        _print_error_lines(
            f"{error.subject or _describe_error_subject(args)}: {len(error.problems)} problem(s)",
            *(f"  {p}" for p in error.problems),
        )
        return USAGE_ERROR
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if hasattr(args, "traceback"):
            raise
        _print_error_lines(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _print_error_lines("interrupted")
        return 130


def _describe_error_subject(args: argparse.Namespace) -> str:
    """Return the words that name the configuration in the header of an error report."""
    path = getattr(args, "config", None)
    return "configuration" if path is None else f"configuration {path}"


def _print_error_lines(*lines: str) -> None:
    """Write lines to standard error."""
    sys.stderr.write("\n".join(lines) + "\n")
