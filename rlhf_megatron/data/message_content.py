"""What the messages of a chat may hold beside their text: entries that stand for nothing, and
content in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drop_absent_entries(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the entries that are null or an empty list: tables and exports of
    them give every message every entry, and templates ask whether one is there. What an entry holds
    inside stays: a null among a tool's arguments is a value.
    """
    return {name: value for name, value in message.items() if value is not None and value != []}


def is_text_part_list(content: Any) -> bool:
    """Return whether content is a list of parts, all of them text."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        )
    )


def join_text_parts(content: Any) -> Any:
    """Return the text of a message's content, joined from its text parts as chat templates join
    them, with nothing in between. Content in any other form is returned unchanged.
    """
    if not is_text_part_list(content):
        return content
    return "".join(part["text"] for part in content)


def find_other_part_type(content: Any) -> str | None:
    """Return the type of the first part of a message's content that is no text, such as
    "image_url"; None where the content is no list of parts, or all parts are text.
    """
    if not isinstance(content, list):
        return None
    for part in content:
        part_type = part.get("type") if isinstance(part, dict) else None
        if isinstance(part_type, str) and not is_text_part_list([part]):
            return part_type
    return None
