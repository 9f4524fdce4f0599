"""The reference of all settings as Markdown, made from the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from rlhf_megatron.config.key_paths import (
    get_config_value,
    list_setting_leaves,
    resolve_field_types,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.schema.setting_fields import NOT_NEGATIVE
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.verl_names import RENAMED_SECTIONS, VERL_NAMES

HEAD = """\
# Settings

A key of a YAML file is section.key; `docs/config.md` says how files and overrides become settings.
"""


def render_settings_reference(section: str = "") -> str:
    """Return the reference of all settings as Markdown, or only the sections whose titles contain
    `section`. Raise ValueError where no title does.
    """
    text = (
        HEAD
        + "".join(_render_sections())
        + "".join(_render_entry_sections())
        + "".join(_render_verl_names())
    )
    if not section:
        return text
    found = [part for part in text.split("\n## ")[1:] if section in part.partition("\n")[0]]
    if not found:
        raise ValueError(
            f"no section is called {section}; `rlhf-megatron config reference` prints all."
        )
    return "\n".join(f"## {part}" for part in found)


def _render_sections() -> Iterator[str]:
    """Yield the Markdown of each section of the schema: a title, and a table row for
    each setting.
    """
    section = None
    for leaf in list_setting_leaves(RunConfig):
        here, _, name = leaf.key.rpartition(".")
        if here != section:
            section = here
            yield f"\n## {section}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        default = format_yaml_value(get_config_value(RunConfig(), leaf.key))
        limits = "" if leaf.bounds == NOT_NEGATIVE else f" ({leaf.bounds})"
        meaning = leaf.doc + limits
        yield (
            f"| `{name}` | {_escape_table_cell(describe_type(leaf.type))} |"
            f" `{_escape_table_cell(default)}` | {_escape_table_cell(meaning)} |\n"
        )


def _render_entry_sections() -> Iterator[str]:
    """Yield the Markdown tables of the dataclasses that are entries of a list or mapping and so
    have no key path of their own.
    """
    for leaf in list_setting_leaves(RunConfig):
        for kind in get_args(leaf.type):
            if not (isinstance(kind, type) and is_dataclass(kind)):
                continue
            yield (
                f"\n## an entry of {leaf.key}\n\n| key | type | default | meaning"
                " |\n|---|---|---|---|\n"
            )
            types_ = resolve_field_types(kind)
            for field in fields(kind):
                value = (
                    field.default if field.default_factory is MISSING else field.default_factory()
                )
                default = (
                    "" if value is MISSING else f"`{_escape_table_cell(format_yaml_value(value))}`"
                )
                meaning = _escape_table_cell(field.metadata["doc"])
                yield (
                    f"| `{field.name}` | {_escape_table_cell(describe_type(types_[field.name]))} |"
                    f" {default} | {meaning} |\n"
                )


def _render_verl_names() -> Iterator[str]:
    """Yield the Markdown table of verl's names and the settings that correspond to them."""
    yield "\n## Coming from verl\n\nOther keys have the names of verl.\n\n"
    yield "| verl | here | note |\n|---|---|---|\n"
    for old, new in RENAMED_SECTIONS:
        yield f"| `{old}.*` | `{new}.*` | |\n"
    for entry in VERL_NAMES:
        yield (
            f"| `{entry.name}` | {f'`{entry.target}`' if entry.target else '-'} |"
            f" {_escape_table_cell(entry.note)} |\n"
        )


def describe_type(annotation: Any) -> str:
    """Return a type annotation in words for a reader of YAML, such as "whole number" or "list of
    text".
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(str(argument) for argument in arguments)
    if origin in (tuple, list):
        if origin is tuple and arguments[-1] is not Ellipsis:
            return (
                f"list of {len(arguments)}:"
                f" {', '.join(describe_type(argument) for argument in arguments)}"
            )
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return (
            f"mapping to {describe_type(arguments[1])}" if is_dataclass(arguments[1]) else "mapping"
        )
    if is_dataclass(annotation):
        return f"`{{{', '.join(field.name for field in fields(annotation))}}}`"
    names = {
        type(None): "null",
        int: "whole number",
        float: "number",
        bool: "true or false",
        str: "text",
        Any: "any",
    }
    return names[annotation]


def _escape_table_cell(text: str) -> str:
    """Escape the vertical bars in the text of a Markdown table cell."""
    return text.replace("|", "\\|")
