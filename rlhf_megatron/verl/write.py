"""The result as YAML for people: a comment beside each value tells where it comes from, one above it what differs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_megatron.config.show import as_text
from rlhf_megatron.verl.draft import Left, Value, tree_of

WIDTH = 116
COLUMN = 58  # where comments beside a value begin, as far as values let them


def as_yaml(
    values: dict[str, Value],
    left: Sequence[Left],
    dropped: Sequence[tuple[str, str]],
    notes: Sequence[str],
    source: str,
) -> str:
    """`dropped`: (our setting, why) that would have no effect. The text loads as a configuration of ours."""
    lines = [
        *_comment(
            f"From {source} by `rlhf-megatron config from-verl`. Beside a value: the setting of verl that it is made"
            " of; (default): the file is silent, and verl does this."
        )
    ]
    for section, tree in tree_of(values).items():
        lines += ["", *_section(section, tree, 0)]
    for title, items in (
        ("Without counterpart, and it changes what is learnt:", [line_of(one) for one in left if one.learns]),
        ("Without counterpart:", [line_of(one) for one in left if not one.learns]),
        ("Left out, as it would have no effect here:", [f"{key}: {why}" for key, why in dropped]),
        ("Notes:", notes),
    ):
        if items:
            lines += ["", *_comment(title)]
            for item in items:
                lines += _comment(item, "- ")
    return "\n".join(lines) + "\n"


def line_of(left: Left) -> str:
    return f"{left.name}={shown(left.value)}: {left.reason}" if left.name else left.reason


def shown(value: Any) -> str:
    """In at most 80 characters, on one line."""
    text = as_text(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


def _section(name: str, node: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Value):
        yield from _comment(node.note, "", indent) if node.note else ()
        line = f"{indent}{as_text(name)}: {as_text(node.value)}"
        origin = ", ".join(node.sources) + (" (default)" if node.is_default else "")
        yield f"{line:<{COLUMN}}  # {_plain(origin)}" if node.sources else line
        return
    yield f"{indent}{as_text(name)}:"
    for child, below in node.items():
        yield from _section(child, below, depth + 1)


def _comment(text: str, bullet: str = "", indent: str = "") -> list[str]:
    start = f"{indent}# {bullet}"
    return textwrap.wrap(
        _plain(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=f"{indent}# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str) -> str:
    """Without what would end a comment, or what YAML forbids in one."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)
