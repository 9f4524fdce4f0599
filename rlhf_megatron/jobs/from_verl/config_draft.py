"""Holds our configuration as it grows, and what of verl's could not be taken over; writes both as
commented YAML.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.key_paths import (
    get_config_value,
    list_leaf_keys,
    suggest_nearest_key,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import REDACTED, find_secret_keys
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.unsupported_features import FEATURES_BY_NAME
from rlhf_megatron.config.untranslated_settings import UNTRANSLATED, format_untranslated_entry
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

NO_COUNTERPART_NEEDED = "how verl computes: it changes nothing of what is learnt"

UNTRANSLATED_COMMENT = (
    "Settings that change what is trained and that could not be taken over. Every command refuses"
    " this file while a line stands here: remove a line to train without what it asks for."
)

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
    """A setting of verl without counterpart here, or a setting of ours that the file of verl should
    decide and does not.
    """

    name: str  # as written; our key where it is missing
    value: Any  # None where it is missing
    reason: str
    feature: str  # of UNSUPPORTED_FEATURES; "" where it changes nothing of what is learnt

    @property
    def affects_learning(self) -> bool:
        """Return whether the setting changes what is learnt."""
        return bool(self.feature)

    @property
    def is_missing(self) -> bool:
        """Return whether the setting is one of ours, which the file of verl leaves open."""
        return self.feature == "missing" and self.value is None


@dataclass(frozen=True)
class IdleSetting:
    """A setting of verl that the translation leaves out, as it would change nothing."""

    name: str  # as written
    value: Any
    reason: str


class ConfigDraft:
    def __init__(self, verl_settings: VerlSettings, user_facts: UserFacts) -> None:
        """Begin without values; `verl_settings` are the settings to translate."""
        self.verl_settings = verl_settings
        self.user_facts = user_facts
        self.values: dict[str, TranslatedValue] = {}
        self.untranslated: list[UntranslatedSetting] = []
        self.idle_settings: list[IdleSetting] = []  # settings that ask for nothing
        # as written: those behind a value or a request, also where the value is removed later
        self._mentioned_names: set[str] = set()

    def set_value(self, key: str, value: Any, sources: tuple[str, ...], note: str = "") -> None:
        """Set our setting `key`, and mark the settings of verl that it comes from as used.
        `sources` are their names in verl's present layout. A secret is not taken over, but recorded
        as untranslated.
        """
        for source in sources:
            self.verl_settings.mark_used(source)
        written = tuple(filter(self.verl_settings.is_written, sources))
        names = tuple(self.verl_settings.get_written_name(source) for source in written or sources)
        self._mentioned_names.update(names)
        if find_secret_keys(value, key):
            self.untranslated.append(
                UntranslatedSetting(
                    names[0] if names else key, REDACTED, "a secret: write it yourself", ""
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

    def leave_untranslated(self, source: str, reason: str, feature: str = "") -> None:
        """Record that verl's setting `source` has no counterpart, with the reason, and mark it as
        used. `feature` is the one of UNSUPPORTED_FEATURES that it asks for; "" for a setting that
        changes nothing of what is learnt. A secret is not shown.
        """
        assert not feature or feature in FEATURES_BY_NAME, feature
        value = self.verl_settings.use_value(source)
        name = self.verl_settings.get_written_name(source)
        self.untranslated.append(
            UntranslatedSetting(
                name,
                REDACTED if find_secret_keys(value, source) else value,
                reason,
                feature,
            )
        )

    def request_missing_fact(self, key: str, reason: str, source: str = "") -> None:
        """Record that the file does not give our setting `key`, or not in our units, although it
        changes what is learnt; `reason` is the message to the user, `source` verl's setting in
        other units, if there is one.
        """
        self._mentioned_names.add(self.verl_settings.get_written_name(source))
        self.untranslated.append(UntranslatedSetting(key, None, reason, "missing"))

    def drop_setting(self, source: str, reason: str) -> None:
        """Record that verl's setting `source` asks for nothing, with the reason, and mark it as
        used.
        """
        value = self.verl_settings.use_value(source)
        self.idle_settings.append(
            IdleSetting(
                self.verl_settings.get_written_name(source),
                REDACTED if find_secret_keys(value, source) else value,
                reason,
            )
        )

    def list_dropped_settings(self) -> Iterator[IdleSetting]:
        """Yield the written settings that ask for nothing, and then those that no value, comment or
        refusal of the result mentions: how verl computes.
        """
        yield from self.idle_settings
        mentioned = self._mentioned_names | {setting.name for setting in self.untranslated}
        mentioned |= {setting.name for setting in self.idle_settings}
        for key in self.verl_settings.list_written_keys():
            name = self.verl_settings.get_written_name(key)
            if name not in mentioned:
                value = self.verl_settings.peek_value(key)
                shown = REDACTED if find_secret_keys(value, key) else value
                yield IdleSetting(name, shown, NO_COUNTERPART_NEEDED)


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
            other = FOLLOWERS.get(key)
            draft.drop_setting(
                key, f"a copy of {other}" if other else "null, the default of both programs"
            )
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
        is_learning = not is_off_value(value) and key.partition(".")[0] in LEARNING
        draft.leave_untranslated(key, reason, "unknown" if is_learning else "")
    elif is_off_value(value):
        draft.drop_setting(key, "off")
    elif value in entry.off_values:
        draft.drop_setting(key, "what happens here anyway")
    elif not _is_switched_on(draft, entry):
        draft.drop_setting(key, f"without effect: {entry.switch_key} is off")
    else:
        draft.leave_untranslated(key, describe_missing_counterpart(entry), entry.feature)


def translate_unknown_settings(draft: ConfigDraft) -> None:
    """Record all settings of verl that the translation of a job without RL has not used: those of
    unsupported features by verl's table, the others as unknown.
    """
    for key in draft.verl_settings.list_unused_keys():
        entry = find_verl_key(key)
        if entry is not None and entry.feature not in ("", "set_by_hand"):
            _record_unmapped_setting(draft, key)
            continue
        is_off = is_off_value(draft.verl_settings.peek_value(key))
        is_learning = not is_off and key.partition(".")[0] != "trainer"
        draft.leave_untranslated(key, "unknown", "unknown" if is_learning else "")


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
    text = suggest_nearest_key(key, sorted(known)).text
    return text[0].lower() + text[1:] if text.startswith("Did you mean") else ""


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
    refused = [setting for setting in untranslated if setting.affects_learning]
    if refused:
        lines += ["", *_wrap_comment(UNTRANSLATED_COMMENT), f"{UNTRANSLATED}:"]
        lines += [f"  {line}" for line in _render_untranslated_lines(refused)]
    for title, items in (
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


def _render_untranslated_lines(settings: Sequence[UntranslatedSetting]) -> Iterator[str]:
    """Yield a line of YAML for each setting; the reasons of a setting that is there twice become
    one.
    """
    by_name: dict[str, list[UntranslatedSetting]] = {}
    for setting in settings:
        by_name.setdefault(setting.name, []).append(setting)
    for name, same in by_name.items():
        reasons = "; ".join(dict.fromkeys(setting.reason.rstrip(".") for setting in same))
        yield format_untranslated_entry(name, same[0].value, same[0].feature, reasons)


def format_untranslated_line(setting: UntranslatedSetting | IdleSetting) -> str:
    """Return an untranslated setting as "name=value: reason", or as "name: reason" where the file
    does not have the setting.
    """
    if isinstance(setting, UntranslatedSetting) and setting.is_missing:
        return f"{setting.name}: {setting.reason}"
    return f"{setting.name}={format_short_value(setting.value)}: {setting.reason}"


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
