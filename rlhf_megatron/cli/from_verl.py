"""`rlhf-megatron config from-verl`: a configuration of verl as one of ours, and what of it has no counterpart."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.load import display, read_text
from rlhf_megatron.config.source import MAX_CHARACTERS
from rlhf_megatron.verl.draft import Told, line_of
from rlhf_megatron.verl.read import Written, add_overrides, read
from rlhf_megatron.verl.translate import Translation, translate

INCOMPLETE = 1


def from_verl(args: argparse.Namespace) -> int:
    """Exit code 1 where something that changes what is learnt has no counterpart, or the result cannot run as it is.

    Raises ConfigError for what cannot be read, OSError for what cannot be written.
    """
    if args.out is not None and args.out.exists():
        raise ValueError(f"--out {args.out} exists and is not overwritten; name another file, or remove it.")
    environment = dict(os.environ)
    written, source = _read(args.file, environment)
    add_overrides(written, args.overrides)
    result = translate(
        written,
        source,
        Told(args.train_rows, args.response_length, environment.get("HOME", "")),
        environment,
        args.set,
        "result" if args.out is None else display(args.out),
    )
    if args.out is None:
        sys.stdout.write(result.text)
    else:
        with args.out.open("x", encoding="utf-8") as file:
            file.write(result.text)
    sys.stdout.flush()
    sys.stderr.write(report(result, source, args.lenient))
    is_enough = result.is_whole or args.lenient
    return 0 if is_enough and not result.problems else INCOMPLETE


def report(result: Translation, source: str, is_lenient: bool = False) -> str:
    """Return what a user must know beside the YAML."""
    learning = [line_of(one) for one in result.left if one.learns]
    other = [line_of(one) for one in result.left if not one.learns]
    lines = [f"{source}: {len(result.values)} settings taken over"]
    title = "without counterpart, and it changes what is learnt"
    if learning and not is_lenient:
        title += " (exit code 1; --lenient: 0)"
    for heading, items in (
        (title, learning),
        ("without counterpart", other),
        ("the result cannot run as it is", result.problems),
        ("notes", result.notes),
    ):
        if items:
            lines += [f"{heading}:", *(f"  {item}" for item in items)]
    return "\n".join(lines) + "\n"


def _read(file: str, environment: dict[str, str]) -> tuple[Written, str]:
    if file == "-":
        return read(sys.stdin.read(MAX_CHARACTERS + 1), "standard input", environment), "standard input"
    source = display(Path(file))
    try:
        text = read_text(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([Problem(f"cannot read {source}: {reason}; correct the path.")]) from None
    return read(text, source, environment), source
