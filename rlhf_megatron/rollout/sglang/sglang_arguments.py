"""Arguments of an SGLang server: what the installed version takes, the user's ones checked against
that, and how they are told to it.

SGLang reads a settings file, which keeps values off the command line, but only plain ones: what its
file cannot say (switches, some lists) goes on the command line.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

DETERMINISTIC = "enable-deterministic-inference"
RUN_ARGUMENTS = {  # what the run itself must know or set, and what to do instead
    "model-path": "set model.path",
    "host": "servers listen on 127.0.0.1",
    "port": "a free port is taken",
    "dtype": "set rollout.dtype",
    "config": "write the arguments themselves into rollout.sglang.args",
    "admin-api-key": "a fresh key is made for every server",
    "api-key": "a fresh key is made for every server",
    "custom-weight-loader": "weight syncs go through the run's own",
    "weight-version": "it is the policy version",
    "nccl-port": "the ranks of a server meet in a file",
    "dist-init-addr": (
        "the ranks of a server meet in a file, or at the first of the machines that nnodes"
        " says it spans"
    ),
    "node-rank": "nnodes says how many machines a server spans, and the run counts them",
    "ssl-certfile": "servers are asked over http on 127.0.0.1",
    "ssl-keyfile": "servers are asked over http on 127.0.0.1",
    "grpc-mode": "servers are asked over http",
    "smg-grpc-mode": "servers are asked over http",
    "fastapi-root-path": "paths are SGLang's own",
}
# Runs in the server's environment: one entry an argument, as argparse knows it.
ARGUMENTS_QUERY = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([
    {
        "names": [name.lstrip("-") for name in action.option_strings],
        "field": action.dest,
        "action": type(action).__name__,
        "nargs": action.nargs,
        "type": getattr(action.type, "__name__", ""),
        "choices": None if action.choices is None else [str(choice) for choice in action.choices],
    }
    for action in parser._actions if action.option_strings
]))
"""
_JSON_TYPES = ("loads", "json_list_type")
_NUMBERS = {"int": "a whole number", "float": "a number"}
_NAMES_SHOWN = 12


@dataclass(frozen=True)
class ServerOption:
    """An argument of the installed version."""

    names: tuple[str, ...]  # without dashes
    field: str  # of SGLang's ServerArgs
    action: str  # name of argparse's class
    nargs: int | str | None = None
    type: str = ""  # name of the function that reads it
    choices: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """Return the name by which the run knows the option: the field's name where the option has
        it, else its first name.
        """
        plain = self.field.replace("_", "-")
        return plain if plain in self.names else self.names[0]

    @property
    def is_flag(self) -> bool:
        """Return whether the option takes no value: it is present or absent."""
        return self.nargs == 0

    @property
    def is_switch(self) -> bool:
        """Return whether the option is a flag with a negated form, --no-NAME."""
        return self.action == "BooleanOptionalAction"

    @property
    def is_list(self) -> bool:
        """Return whether the option takes several values."""
        return self.nargs in ("+", "*") or (isinstance(self.nargs, int) and self.nargs > 0)


def parse_options(text: str) -> list[ServerOption]:
    """Parse the text that `ARGUMENTS_QUERY` prints or `encode_options` returns. Raise
    ValueError.
    """
    return msgspec.json.decode(text, type=list[ServerOption])


def encode_options(options: Sequence[ServerOption]) -> str:
    """Return the options as JSON."""
    return msgspec.json.encode(options).decode()


@dataclass(frozen=True)
class CheckedArguments:
    """The user's arguments, checked."""

    value_by_option: dict[str, object]  # by `ServerOption.name`
    file_settings: dict[str, object]  # the part that goes into the settings file
    command_words: tuple[str, ...]  # the part that goes on the command line


def check_arguments(
    arguments: Mapping[str, object], options: Sequence[ServerOption], version: str
) -> CheckedArguments:
    """Check the user's server arguments and sort them into a settings file and command-line words.
    Each must be known to this version of SGLang, be given once, not be one that the run sets
    itself, and have a type that SGLang takes.

    An argument of null is left out. Raise ValueError with the value, the rule and the fix.
    """
    by_name = {
        name: option
        for option in options
        for name in option.names
        if not _is_negation(option, name)
    }
    values: dict[str, object] = {}
    settings: dict[str, object] = {}
    words: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1) or [
                n for n in by_name if n.startswith(f"{name}-")
            ]
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "`python -m sglang.launch_server --help` lists them."
            )
            raise ValueError(
                f"rollout.sglang.args.{key} is no argument of sglang {version}; {hint}"
            )
        option = by_name[name]
        if option.name in RUN_ARGUMENTS:
            raise ValueError(
                f"rollout.sglang.args.{key} is set by the run:"
                f" {RUN_ARGUMENTS[option.name]}; remove it."
            )
        if option.name in values:
            raise ValueError(
                f"rollout.sglang.args.{key} is given twice, under two names; remove one."
            )
        if value is None:
            continue
        values[option.name] = _check_option_value(
            f"rollout.sglang.args.{key}", value, option, version
        )
        if option.is_flag or option.action != "_StoreAction":
            words += _format_option_words(option, value)
        elif isinstance(value, dict) or (isinstance(value, list) and not option.is_list):
            settings[option.names[0]] = json.dumps(value)
        else:
            settings[option.names[0]] = value
    return CheckedArguments(values, settings, tuple(words))


def _is_negation(option: ServerOption, name: str) -> bool:
    """Return whether this name is the negated form of a switch."""
    return option.is_switch and name.startswith("no-")


def _format_option_words(option: ServerOption, value: object) -> list[str]:
    """Return the option with its value as command-line words; none for a flag that is off."""
    if not option.is_flag:
        items = value if isinstance(value, list) else [value]
        return [
            f"--{option.names[0]}",
            *(item if isinstance(item, str) else json.dumps(item) for item in items),
        ]
    if value:
        return [f"--{option.names[0]}"]
    return [f"--no-{option.names[0]}"] if option.is_switch else []


def _check_option_value(key: str, value: object, option: ServerOption, version: str) -> object:
    """Check a value, or each item of a list, and return it unchanged. Raise ValueError with the
    rule.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(
                f"{key} ({value!r}) must be true or false for sglang {version}; it takes no value."
            )
        return value
    if option.is_list:
        items = value if isinstance(value, list) else [value]
        if not items and option.nargs == "+":
            raise ValueError(
                f"{key} ([]) must have an entry for sglang {version}; remove it to leave it off."
            )
        for item in items:
            _check_single_value(key, item, option, version)
        return value
    if isinstance(value, list) and option.type not in _JSON_TYPES:
        raise ValueError(f"{key} ({value!r}) must be one value for sglang {version}, not a list.")
    _check_single_value(key, value, option, version)
    return value


def _check_single_value(key: str, value: object, option: ServerOption, version: str) -> None:
    """Raise ValueError where one value is no number, no JSON or none of the choices that the option
    wants.
    """
    wanted = _NUMBERS.get(option.type)
    if wanted is not None and not _is_readable_as(value, option.type):
        raise ValueError(f"{key} ({value!r}) must be {wanted} for sglang {version}; correct it.")
    if option.type in _JSON_TYPES and isinstance(value, str):
        try:
            json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"{key} ({value!r}) must be JSON for sglang {version} ({error}); write it as a"
                " mapping or a list."
            ) from error
    if option.choices is not None and str(value) not in option.choices:
        near = difflib.get_close_matches(str(value), option.choices, n=1)
        hint = f"did you mean {near[0]}?" if near else "choose one of them."
        shown = ", ".join(option.choices[:_NAMES_SHOWN]) + (
            ", ..." if len(option.choices) > _NAMES_SHOWN else ""
        )
        raise ValueError(f"{key} ({value!r}) must be one of {shown} for sglang {version}; {hint}")


def _is_readable_as(value: object, type_name: str) -> bool:
    """Return whether the value can be read as a number of this type ("int" or "float"). A bool is
    readable as neither number, and a float is not readable as an int.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False
    try:
        float(value) if type_name == "float" else int(str(value))
    except ValueError:
        return False
    return True
