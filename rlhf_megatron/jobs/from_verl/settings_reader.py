"""Reads the settings in a YAML file, a shell script or a list of overrides for verl. Nothing is
run or followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.verl_names import find_verl_key, rename_to_current_key
from rlhf_megatron.config.yaml_nodes import (
    MAX_CHARACTERS,
    MappingNode,
    Node,
    convert_to_plain,
    parse_yaml,
)
from rlhf_megatron.jobs.from_verl.shell_script import UNKNOWN, ShellScript, ShellWord

COMMAND_LINE = "command line"
_OVERRIDE = re.compile(
    r"(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./@][A-Za-z_0-9][\w-]*)*)(?:=(.*))?\Z", re.DOTALL
)
_PROGRAM = re.compile(r"(?:^|[./])main_\w+(?:\.py)?\Z|(?:^|[/.])verl\.trainer\.\w+\Z")
_NOT_OURS = ("hydra", "defaults")
JOBS = ("sft", "generation_server", "generation", "eval")
_OF_JOBS = {
    "model.partial_pretrain": "sft",
    "data.multiturn.enable": "sft",
    "data.pad_mode": "sft",
    "data.reward_model_key": "eval",
    "data.n_samples": "generation",
    "data.output_path": "generation_server",
    "data.response_key": "sft",
}
_WITHOUT_SECTION = ("ulysses_sequence_parallel_size", "use_remove_padding")  # of supervised jobs
_NAMES_ONLY = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")


@dataclass(frozen=True)
class VerlSetting:
    name: str  # as written, such as actor_rollout_ref.rollout.n
    value: Any  # plain: None, bool, int, float, str, list, dict
    location: str  # file:line, or "command line"


@dataclass(frozen=True)
class ValueProblem:
    """A setting of verl whose value cannot be known or used; the message names the fix."""

    name: str  # as written
    message: str


@dataclass
class WrittenSettings:
    """The settings of a file and of the overrides after it. A later setting of a name replaces
    an earlier one.
    """

    settings: dict[str, VerlSetting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the user: what was assumed or not read
    problems: list[ValueProblem] = field(default_factory=list)
    job: str = ""  # of JOBS; "": reinforcement learning

    def add(self, setting: VerlSetting) -> None:
        """Add a setting in place of an earlier one of the same name; note the replacement if the
        values differ.
        """
        before = self.settings.get(setting.name)
        if before is not None and before.value != setting.value:
            self.notes.append(
                f"{setting.name} is given twice: {setting.value!r} ({setting.location}) replaces"
                f" {before.value!r} ({before.location})."
            )
        self.settings[setting.name] = setting

    def remove(self, name: str) -> None:
        """Remove the setting of this name and all settings below it."""
        for key in [key for key in self.settings if key == name or key.startswith(name + ".")]:
            del self.settings[key]


def read_verl_settings(text: str, source: str, environment: Mapping[str, str]) -> WrittenSettings:
    """Return the settings in the text of a YAML file, a shell script, or a list of overrides.
    `source` is the name of the file, for messages and for its type; `environment` holds the
    variables that a script may use.

    Raise ConfigError, with the reason, for a text that is neither, holds no setting, or cannot be
    read without doubt.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            [
                ConfigProblem(
                    f"it has more than {MAX_CHARACTERS} characters; name another file.",
                    location=source,
                )
            ]
        )
    is_yaml = source.endswith((".yaml", ".yml"))
    if not is_yaml and not source.endswith((".sh", ".bash")):
        is_yaml = _is_yaml_text(text)
    written = (
        _read_yaml_settings(text, source)
        if is_yaml
        else _read_script_settings(text, source, environment)
    )
    if not written.settings:
        what = (
            "it holds no setting of verl; name a YAML file, or a script or list with"
            " overrides (section.key=value)."
        )
        raise ConfigError([ConfigProblem(what, location=source)])
    written.job = written.job or next(
        (job for name, job in _OF_JOBS.items() if name in written.settings), ""
    )
    return written


def add_command_line_overrides(written_settings: WrittenSettings, overrides: Sequence[str]) -> None:
    """Add the overrides of the command line on top of the settings of the file. Raise ConfigError
    with all that are malformed.
    """
    problems = []
    for override in overrides:
        if _OVERRIDE.match(override) and ("=" in override or override.startswith("~")):
            _add_override(written_settings, override, COMMAND_LINE)
        else:
            problems.append(
                ConfigProblem(
                    f"override {override!r} must have the form section.key=value.",
                    location=COMMAND_LINE,
                )
            )
    if problems:
        raise ConfigError(problems)


def _is_yaml_text(text: str) -> bool:
    """Return whether a text is meant as YAML: a mapping, or broken YAML without lines that look
    like overrides or a call of verl.
    """
    try:
        return isinstance(parse_yaml(text, "", 0), MappingNode)
    except ConfigError:
        return not re.search(r"^\s*[+~]{0,2}[A-Za-z_]\w*(?:\.\w+)+=|main_ppo", text, re.MULTILINE)


def _read_yaml_settings(text: str, source: str) -> WrittenSettings:
    """Return the settings of a YAML text, without Hydra's own sections; note that a `defaults:`
    list is not followed. Raise ConfigError for bad syntax or a text that is no mapping.
    """
    tree = parse_yaml(text, source, 0)
    if not isinstance(tree, MappingNode):
        raise ConfigError(
            [
                ConfigProblem(
                    "it must be a mapping of sections (data:, actor_rollout_ref:, ...).",
                    location=source,
                )
            ]
        )
    written = WrittenSettings()
    if "defaults" in tree.items:
        written.notes.append(
            "the `defaults:` list is not followed: what it would take from other files stands here"
            " at verl's defaults. For all of a run's settings, print them with verl's `--cfg"
            " job --resolve`."
        )
    for name, node in tree.items.items():
        if name not in _NOT_OURS:
            for setting in flatten_yaml_settings(name, node):
                written.add(setting)
    return written


def flatten_yaml_settings(name: str, node: Node) -> Iterator[VerlSetting]:
    """Yield the settings of a YAML tree with their full names, each with its file and line."""
    if isinstance(node, MappingNode) and node.items:
        for key, child in node.items.items():
            yield from flatten_yaml_settings(f"{name}.{key}", child)
    else:
        yield VerlSetting(name, convert_to_plain(node), str(node.origin))


def _read_script_settings(
    text: str, source: str, environment: Mapping[str, str]
) -> WrittenSettings:
    """Return the settings of the command in a shell script that starts verl, with notes on the
    variables that were filled in. Raise ConfigError for a script that cannot be read or starts verl
    several times.
    """
    if UNKNOWN in text:
        raise ConfigError([ConfigProblem("it is not a text file; name another.", location=source)])
    script = ShellScript(environment)
    try:
        script.read(text)
    except ValueError as error:
        raise ConfigError(
            [ConfigProblem(f"it cannot be read as a script: {error}", location=source)]
        ) from None
    written = WrittenSettings()
    for override, line in _find_script_overrides(script, source, written):
        _add_override(written, override, f"{source}:{line}")
    if script.used_environment:
        used = ", ".join(sorted(script.used_environment))
        written.notes.append(f"taken from this shell's environment, as the script would: {used}.")
    if script.defaulted_variables:
        used = ", ".join(
            f"{name}={value}" for name, value in sorted(script.defaulted_variables.items())
        )
        written.notes.append(
            f"variables that nobody has set stand at the script's defaults: {used}."
        )
    return written


def _find_script_overrides(
    script: ShellScript, source: str, written_settings: WrittenSettings
) -> Iterator[tuple[str, int]]:
    """Yield (override, line) for the command that starts verl, or for all lines of a script without
    such a command. Set the job in `written_settings`, and note configuration files that are not
    read. Raise ConfigError for several such commands, a conversion, or a command that a stray
    character cuts off.
    """
    starts = [
        (command, index)
        for command in script.commands
        for index, word in enumerate(command)
        if _PROGRAM.search(word.text) and not _looks_like_override(word.text)
    ]
    if len(starts) > 1:
        lines = ", ".join(str(command[index].line) for command, index in starts)
        text = (
            f"it starts verl {len(starts)} times (lines {lines}); make a file of each,"
            " and give one."
        )
        raise ConfigError([ConfigProblem(text, location=source)])
    if not starts:
        for command in script.commands:
            yield from (
                (text, line)
                for text, line in _join_bracketed_words(command)
                if _looks_like_override(text)
            )
        return
    command, index = starts[0]
    program = command[index].text
    if "merger" in program:
        text = f"it is a job of conversion (it starts {program}): rlhf-megatron convert does that."
        raise ConfigError([ConfigProblem(text, location=source)])
    written_settings.job = next(
        (job for job in JOBS if job in program.rpartition(".")[2] or f"main_{job}" in program), ""
    )
    for later in script.commands[script.commands.index(command) + 1 :]:
        if later and _looks_like_override(later[0].text):
            text = (
                f"the command that starts verl ends before {later[0].text} (line {later[0].line}):"
                " a backslash"
            )
            raise ConfigError(
                [
                    ConfigProblem(
                        f"{text} continues a line only as its last character.", location=source
                    )
                ]
            )
    for word in command[index + 1 :]:
        if re.match(r"--?config[-_](name|path|dir)", word.text):
            name = word.text.partition("=")[2]
            if "multiturn" in name:  # a file that is not read, but that much is known
                yield "actor_rollout_ref.rollout.multi_turn.enable=true", word.line
            if name and not word.text.startswith("--config-path"):
                written_settings.notes.append(
                    f"{word.text} is not read: what the command does not set stands here at verl's"
                    " defaults (ppo_megatron_trainer)."
                )
        elif _looks_like_override(word.text):
            yield word.text, word.line


def _looks_like_override(text: str) -> bool:
    """Return whether a word has the form section.key=value, with Hydra's prefixes, or ~key."""
    match = _OVERRIDE.match(text)
    is_key = match is not None and ("." in match[2] or match[2] in _WITHOUT_SECTION)
    return match is not None and ((match[3] is not None and is_key) or match[1] == "~")


def _join_bracketed_words(command: Sequence[ShellWord]) -> Iterator[tuple[str, int]]:
    """Yield (text, line) of the words of a command, with words inside of open brackets joined by
    spaces, since the values in a plain list may hold spaces.
    """
    text = ""
    line = 0
    for word in command:
        is_open = text.count("[") > text.count("]") or text.count("{") > text.count("}")
        if text and is_open:
            text += " " + word.text
            continue
        if text:
            yield text, line
        text = word.text
        line = word.line
    if text:
        yield text, line


def _add_override(written_settings: WrittenSettings, override: str, location: str) -> None:
    """Apply an override to the settings: add or replace, remove for "~", or record a problem where
    the value depends on what only a shell could tell. An override on the command line resolves such
    a problem.
    """
    match = _OVERRIDE.match(override)
    assert match is not None, f"{override!r} was looked at before"
    prefix = match[1]
    name = match[2].replace("/", ".").partition("@")[0]
    text = match[3]
    if name.partition(".")[0] in _NOT_OURS:
        return
    if prefix == "~":
        written_settings.remove(name)
    elif text is not None and UNKNOWN in text:
        written_settings.remove(name)
        shown = text.replace(UNKNOWN, "...")
        unknown = (
            f"{name}={shown}: its value depends on what only the shell can tell (a command, a"
            " branch, an argument"
        )
        entry = find_verl_key(rename_to_current_key(name))
        if name in _NAMES_ONLY:
            written_settings.notes.append(f"{unknown} of the script); it is left out.")
        elif entry is not None and entry.target is None:
            # whatever it is: there is no place for it
            written_settings.add(VerlSetting(name, shown, location))
        else:
            message = (
                f"{unknown} of the script); give {name}=value on the command line. [{location}]"
            )
            written_settings.problems.append(ValueProblem(name, message))
    else:
        value = parse_hydra_value(text or "", location)
        if isinstance(value, Mapping) and value:
            for setting in _flatten_value(name, value, location):
                written_settings.add(setting)
        else:
            written_settings.add(VerlSetting(name, value, location))
    if location == COMMAND_LINE:
        written_settings.problems = [
            problem for problem in written_settings.problems if problem.name != name
        ]


def _flatten_value(name: str, value: Any, location: str) -> Iterator[VerlSetting]:
    """Yield a setting for each leaf of a nested value, with its full name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten_value(f"{name}.{key}", item, location)
    else:
        yield VerlSetting(name, value, location)


def parse_hydra_value(text: str, location: str) -> Any:
    """Return the value of an override. Hydra's grammar is YAML's, except for `{a:1}` and for text
    that YAML would refuse, which is returned as text.
    """
    text = text.strip()
    if text.startswith(("{", "[")):
        text = re.sub(r"([{,]\s*[\w.]+):(?=[^\s/])", r"\1: ", text)
    try:
        return convert_to_plain(parse_yaml(text, location, 0, with_lines=False))
    except ConfigError:
        return text
