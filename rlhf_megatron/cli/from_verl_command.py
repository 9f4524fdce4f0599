"""`rlhf-megatron config from-verl`: a configuration of verl as one of ours, and what of it has
no counterpart.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.load import format_relative_path, read_config_text
from rlhf_megatron.config.yaml_nodes import MAX_CHARACTERS
from rlhf_megatron.jobs.from_verl.config_draft import UserFacts, format_untranslated_line
from rlhf_megatron.jobs.from_verl.settings_reader import (
    WrittenSettings,
    add_command_line_overrides,
    read_verl_settings,
)
from rlhf_megatron.jobs.from_verl.translate_config import ConfigTranslation, translate_verl_config
from rlhf_megatron.write_errors import explain_write_errors

INCOMPLETE_EXIT_CODE = 1


def run_from_verl_command(args: argparse.Namespace) -> int:
    """Translate a configuration of verl, write the YAML to --out or standard output, and report the
    settings without counterpart on standard error, with --show-dropped also those that ask for
    nothing.

    Return 1 where a setting that changes what is learnt has no counterpart (0 with --lenient), or
    the result cannot run as it is. Raise ConfigError for a file that cannot be read, ValueError
    where --out exists, OSError where it cannot be written.
    """
    if args.out is not None and args.out.exists():
        raise ValueError(
            f"--out {args.out} exists and is not overwritten; name another file, or remove it."
        )
    environment = dict(os.environ)
    written, source = _read_verl_config(args.file, environment)
    add_command_line_overrides(written, args.overrides)
    result = translate_verl_config(
        written,
        source,
        UserFacts(args.train_rows, args.response_length, environment.get("HOME", "")),
        environment,
        args.set,
        "result" if args.out is None else format_relative_path(args.out),
    )
    if args.out is None:
        sys.stdout.write(result.yaml_text)
    else:
        with explain_write_errors(args.out), args.out.open("x", encoding="utf-8") as file:
            file.write(result.yaml_text)
    sys.stdout.flush()
    sys.stderr.write(format_translation_report(result, source, args.lenient))
    if args.show_dropped:
        sys.stderr.write(format_dropped_settings(result))
    is_enough = result.is_complete or args.lenient
    return 0 if is_enough and not result.problems else INCOMPLETE_EXIT_CODE


def format_translation_report(
    translation: ConfigTranslation, source_name: str, is_lenient: bool = False
) -> str:
    """Return the report on a translation: the number of settings taken over, settings without
    counterpart (those that change what is learnt first), problems of the result, and notes.
    """
    learning = [
        format_untranslated_line(one) for one in translation.untranslated if one.affects_learning
    ]
    other = [
        format_untranslated_line(one)
        for one in translation.untranslated
        if not one.affects_learning
    ]
    lines = [f"{source_name}: {len(translation.values)} settings taken over"]
    title = (
        "without counterpart, and it changes what is learnt; every command refuses the result until"
        " the line below `untranslated` is removed"
    )
    if learning and not is_lenient:
        title += " (exit code 1; --lenient: 0)"
    for heading, items in (
        (title, learning),
        ("without counterpart", other),
        ("the result cannot run as it is", translation.problems),
        ("notes", translation.notes),
    ):
        if items:
            lines += [f"{heading}:", *(f"  {item}" for item in items)]
    return "\n".join(lines) + "\n"


def format_dropped_settings(translation: ConfigTranslation) -> str:
    """Return the list of settings that the translation left out because they change nothing, each
    with its reason: settings of verl, then settings of ours that the result would ignore.
    """
    lines = [format_untranslated_line(setting) for setting in translation.idle_settings]
    lines += [f"{key}: {reason}" for key, reason in translation.dropped_settings]
    return "\n".join([f"dropped ({len(lines)}):", *(f"  {line}" for line in lines)]) + "\n"


def _read_verl_config(file_name: str, environment: dict[str, str]) -> tuple[WrittenSettings, str]:
    """Return the settings in a file, or in standard input for "-", and the name of this source for
    messages. Raise ConfigError where the file cannot be read.
    """
    if file_name == "-":
        return read_verl_settings(
            sys.stdin.read(MAX_CHARACTERS + 1), "standard input", environment
        ), "standard input"
    source = format_relative_path(Path(file_name))
    try:
        text = read_config_text(Path(file_name))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            [ConfigProblem(f"cannot read {source}: {reason}; correct the path.")]
        ) from None
    return read_verl_settings(text, source, environment), source
