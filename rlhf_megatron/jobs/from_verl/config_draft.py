"""Holds our configuration as it grows, and what of verl's could not be taken over; writes both as
commented YAML.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.key_paths import get_config_value, list_leaf_keys
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import REDACTED, find_secret_keys
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.verl_names import VERL_NAMES, VerlKey, find_verl_key
from rlhf_megatron.jobs.from_verl.verl_settings import DEFAULTS, VerlSettings

LEARNING = (
    "actor",
    "algorithm",
    "critic",
    "data",
    "distillation",
    "model",
    "reference",
    "reward",
    "rollout",
)
"""Sections in which an unknown setting may change what is learnt."""

FOLLOWERS = {
    "critic.model.tokenizer_path": "model.path",
    **{f"{role}.rollout_n": "rollout.n" for role in ("actor", "critic", "reference")},
}

WIDTH = 116
COLUMN = 58  # where comments beside a value begin, as far as values let them


@dataclass(frozen=True)
class UserFacts:
    """Facts that only the user knows; None where the user has not given one."""

    num_train_rows: int | None = None  # of the training files: epochs into steps
    # usual tokens of a response: nats a token into nats a response
    response_length: int | None = None
    home_directory: str = ""  # directory that ~ stands for
    reward_name: str = ""  # our reward's name, where it is given


@dataclass(frozen=True)
class TranslatedValue:
    value: Any
    sources: tuple[str, ...]  # names of verl's settings that it is made of
    is_default: bool  # of verl: the file does not say it
    note: str = ""  # where the meaning differs


@dataclass(frozen=True)
class UntranslatedSetting:
    """A setting of verl without counterpart here."""

    name: str  # as written; "" where the file should say something and does not
    value: Any
    reason: str
    affects_learning: bool  # it changes what is learnt


class ConfigDraft:
    def __init__(self, verl_settings: VerlSettings, user_facts: UserFacts) -> None:
        """Begin without values; `verl_settings` are the settings to translate."""
        self.verl_settings = verl_settings
        self.user_facts = user_facts
        self.values: dict[str, TranslatedValue] = {}
        self.untranslated: list[UntranslatedSetting] = []
        self.num_idle_settings = 0  # settings that ask for nothing

    def set_value(self, key: str, value: Any, sources: tuple[str, ...], note: str = "") -> None:
        """Set our setting `key`, and mark the settings of verl that it comes from as used.
        `sources` are their names in verl's present layout. A secret is not taken over, but recorded
        as untranslated.
        """
        for source in sources:
            self.verl_settings.mark_used(source)
        written = tuple(filter(self.verl_settings.is_written, sources))
        names = tuple(self.verl_settings.get_written_name(source) for source in written or sources)
        if find_secret_keys(value, key):
            self.untranslated.append(
                UntranslatedSetting(
                    names[0] if names else key, REDACTED, "a secret: write it yourself", False
                )
            )
            return
        self.values[key] = TranslatedValue(value, names, bool(sources) and not written, note)

    def copy_setting(self, source: str, key: str = "", value: Any = ..., note: str = "") -> None:
        """Copy verl's setting `source` to our setting `key` (the same name if none is given), with
        `value` in place of its value if given. Where the file does not set `source`, copy verl's
        default, if that is known and differs from ours.
        """
        key = key or source
        if value is ...:
            value = self.verl_settings.use_value(source)
        self.verl_settings.mark_used(source)
        if not self.verl_settings.is_written(source) and (
            source not in DEFAULTS or _is_same_value(value, get_default_value(key))
        ):
            return
        if value is not None or self.verl_settings.is_written(source):
            self.set_value(key, value, (source,), note)

    def convert_setting(
        self,
        source: str,
        key: str = "",
        convert_value: Callable[[Any], Any] = lambda value: value,
        note: str = "",
    ) -> None:
        """Set our setting `key` (the same name if none is given) to `convert_value` of verl's
        setting `source`, if the file or verl's defaults have a value for it.
        """
        value = self.verl_settings.use_value(source)
        if value is not None:
            self.set_value(key or source, convert_value(value), (source,), note)

    def leave_untranslated(self, source: str, reason: str, affects_learning: bool = False) -> None:
        """Record that verl's setting `source` has no counterpart, with the reason, and mark it as
        used. A secret is not shown.
        """
        value = self.verl_settings.use_value(source)
        name = self.verl_settings.get_written_name(source)
        self.untranslated.append(
            UntranslatedSetting(
                name,
                REDACTED if find_secret_keys(value, source) else value,
                reason,
                affects_learning,
            )
        )

    def request_missing_fact(self, reason: str) -> None:
        """Record a fact that changes what is learnt and that the file does not give, or not in our
        units; `reason` is the message to the user.
        """
        self.untranslated.append(UntranslatedSetting("", None, reason, True))


def get_default_value(key: str) -> Any:
    """Return our default of a setting; None for an entry of a free mapping and for an
    unknown key.
    """
    return get_config_value(RunConfig(), key) if key in list_leaf_keys(RunConfig) else None


def _is_same_value(value: Any, default: Any) -> bool:
    """Return whether a value equals our default; lists and tuples compare as equal, true and 1 do
    not.
    """
    plain = list(default) if isinstance(default, tuple) else default
    return bool(value == plain) and isinstance(value, bool) == isinstance(plain, bool)


def nest_by_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return key paths with values as nested sections, in the order of the schema; an entry of a
    free mapping is inside of that mapping.
    """
    order = {key: place for place, key in enumerate(list_leaf_keys(RunConfig))}
    tree: dict[str, Any] = {}
    for key in sorted(
        values, key=lambda key: order.get(key, order.get(find_containing_setting(key), len(order)))
    ):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = values[key]
    return tree


def find_containing_setting(key: str) -> str:
    """Return the setting of ours that `key` is or of which it is an entry; "" if there is none."""
    while key:
        if key in list_leaf_keys(RunConfig):
            return key
        key = key.rpartition(".")[0]
    return ""


def translate_remaining_settings(draft: ConfigDraft) -> None:
    """Deal with all settings of verl that no translation has used: copy those with our names, count
    those that ask for nothing, and record the rest as untranslated.
    """
    for key in draft.verl_settings.list_unused_keys():
        if key.rpartition(".")[2] == "_target_":
            draft.verl_settings.mark_used(key)
        elif (
            key in list_leaf_keys(RunConfig)
            and draft.verl_settings.peek_value(key) is None is get_default_value(key)
        ) or _is_copy_of_other_setting(draft, key):
            draft.verl_settings.mark_used(key)
            draft.num_idle_settings += 1
        elif (ours := find_containing_setting(key)) and (
            ours == key or isinstance(get_default_value(ours), Mapping)
        ):
            draft.copy_setting(key)
        else:
            _record_unmapped_setting(draft, key)


def _is_copy_of_other_setting(draft: ConfigDraft, key: str) -> bool:
    """Return whether the key is one of verl's copies of other settings and still has the same value
    as the other.
    """
    other = FOLLOWERS.get(key)
    return other is not None and draft.verl_settings.peek_value(
        key
    ) == draft.verl_settings.peek_value(other)


def _record_unmapped_setting(draft: ConfigDraft, key: str) -> None:
    """Record a setting without a translation as untranslated, with the advice of verl's table or a
    guess at its spelling; only count the setting if it asks for nothing.
    """
    entry = find_verl_key(key)
    value = draft.verl_settings.use_value(key)
    if entry is None:
        reason = f"unknown; {suggest_verl_key(key)}" if suggest_verl_key(key) else "unknown"
        draft.leave_untranslated(
            key,
            reason,
            affects_learning=not is_off_value(value) and key.partition(".")[0] in LEARNING,
        )
    elif is_off_value(value) or value in entry.off_values or not _is_switched_on(draft, entry):
        draft.num_idle_settings += 1
    else:
        draft.leave_untranslated(key, describe_missing_counterpart(entry), entry.affects_learning)


def describe_missing_counterpart(entry: VerlKey) -> str:
    """Return why a setting of verl has no counterpart here, or which setting to use instead."""
    note = entry.note.removesuffix("; remove it")
    if entry.target is None:
        return note
    return f"see {entry.target}: {note}" if note else f"see {entry.target}"


def _is_switched_on(draft: ConfigDraft, entry: VerlKey) -> bool:
    """Return whether the setting has any effect in verl: its switch is on, or it has none."""
    return not entry.switch_key or not is_off_value(
        draft.verl_settings.peek_value(entry.switch_key)
    )


def is_off_value(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, 0, -1, an empty text or list, or "none"
    and the like.
    """
    return (
        value is None
        or value is False
        or value in ("", "null", "none", "None", "disabled", 0, [], {}, -1)
    )


def suggest_verl_key(key: str) -> str:
    """Return a guess at the setting of verl that a misspelt key meant, as "did you mean ...?"; ""
    if nothing is near.
    """
    known = (
        {entry.name for entry in VERL_NAMES if not entry.name.endswith("*")}
        | set(DEFAULTS)
        | set(list_leaf_keys(RunConfig))
    )
    section, _, name = key.rpartition(".")
    siblings = {
        other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section
    }
    found = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    best = (
        [siblings[found[0]]] if found else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    )
    return f"did you mean {best[0]}?" if best else ""


def render_commented_yaml(
    values: dict[str, TranslatedValue],
    untranslated: Sequence[UntranslatedSetting],
    dropped_settings: Sequence[tuple[str, str]],
    notes: Sequence[str],
    source: str,
) -> str:
    """Return the translated configuration as YAML with comments: beside each value verl's settings
    behind it, and below them the untranslated settings, the dropped ones and notes.
    `dropped_settings` are (our setting, why it would have no effect). The text loads as a
    configuration of ours.
    """
    lines = [
        *_wrap_comment(
            f"From {source} by `rlhf-megatron config from-verl`. Beside a value: the setting of"
            " verl that it is made of; (default): the file is silent, and verl does this."
        )
    ]
    for section, tree in nest_by_section(values).items():
        lines += ["", *_render_section(section, tree, 0)]
    for title, items in (
        (
            "Without counterpart, and it changes what is learnt:",
            [format_untranslated_line(one) for one in untranslated if one.affects_learning],
        ),
        (
            "Without counterpart:",
            [format_untranslated_line(one) for one in untranslated if not one.affects_learning],
        ),
        (
            "Left out, as it would have no effect here:",
            [f"{key}: {why}" for key, why in dropped_settings],
        ),
        ("Notes:", notes),
    ):
        if items:
            lines += ["", *_wrap_comment(title)]
            for item in items:
                lines += _wrap_comment(item, "- ")
    return "\n".join(lines) + "\n"


def format_untranslated_line(setting: UntranslatedSetting) -> str:
    """Return an untranslated setting as "name=value: reason", or the reason alone where the setting
    has no name.
    """
    return (
        f"{setting.name}={format_short_value(setting.value)}: {setting.reason}"
        if setting.name
        else setting.reason
    )


def format_short_value(value: Any) -> str:
    """Return a value on one line of at most 80 characters."""
    text = format_yaml_value(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


def _render_section(name: str, node: Any, depth: int) -> Iterator[str]:
    """Yield the YAML lines of a section or value, indented by `depth`, with the origin of each
    value as a comment.
    """
    indent = "  " * depth
    if isinstance(node, TranslatedValue):
        yield from _wrap_comment(node.note, "", indent) if node.note else ()
        line = f"{indent}{format_yaml_value(name)}: {format_yaml_value(node.value)}"
        origin = ", ".join(node.sources) + (" (default)" if node.is_default else "")
        yield f"{line:<{COLUMN}}  # {_remove_unprintable(origin)}" if node.sources else line
        return
    yield f"{indent}{format_yaml_value(name)}:"
    for child, below in node.items():
        yield from _render_section(child, below, depth + 1)


def _wrap_comment(text: str, bullet: str = "", indent: str = "") -> list[str]:
    """Return a text as wrapped comment lines, with a bullet before the first."""
    start = f"{indent}# {bullet}"
    return textwrap.wrap(
        _remove_unprintable(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=f"{indent}# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _remove_unprintable(text: str) -> str:
    """Return the text with white space characters as spaces and unprintable ones as "?", since
    these would end a comment or are forbidden in YAML.
    """
    return "".join(_make_printable(char) for char in text)


def _make_printable(char: str) -> str:
    """Return a printable character unchanged, other white space as a space, and any other character
    as "?".
    """
    if char.isprintable():
        return char
    return " " if char.isspace() else "?"
