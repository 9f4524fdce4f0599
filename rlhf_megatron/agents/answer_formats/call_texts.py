"""Reading the parts of a call: JSON, names, and values without types.

Everything raises CallTextError with the reason, a sentence for the model, and takes time that grows
with the length of the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]]
MAX_NESTING = 100  # lists and objects one in another; more would end as RecursionError elsewhere
SHOWN_CHARACTERS = 40
LONGEST_TAG = 1000  # characters of a tag that holds a name
WHITE_SPACE = re.compile(r"\s*")
TOOL_NAME = re.compile(r"[\w.:/-]+")
PYTHON_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
TYPE_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class CallTextError(ValueError):
    """A call cannot be read; the message is the reason."""


def skip_white_space(text: str, begin: int) -> int:
    """Return the position of the first character at or behind `begin` that is no white space."""
    match = WHITE_SPACE.match(text, begin)
    assert match is not None, "an empty match is a match"
    return match.end()


def quote_beginning(text: str) -> str:
    """Return the beginning of a text, quoted, for messages."""
    is_longer = len(text) > SHOWN_CHARACTERS
    return repr(text[:SHOWN_CHARACTERS]) + (" ..." if is_longer else "")


def read_json(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `begin`, behind white space, and the position behind
    it.
    """
    begin = skip_white_space(text, begin)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        shown = quote_beginning(text[error.pos : error.pos + SHOWN_CHARACTERS + 1])
        place = f"at {shown}" if error.pos < len(text) else "at its end"
        message = error.msg.removesuffix(" at")
        raise CallTextError(f"the text is no JSON: {message} {place}") from None
    except RecursionError:
        raise CallTextError(describe_deep_nesting()) from None
    except CallTextError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise CallTextError(f"the JSON cannot be read: {error}") from None
    check_value(value)
    return value, end


def read_json_arguments(text: str, begin: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object that begins at `begin`, and the position behind it."""
    value, end = read_json(text, begin)
    if not isinstance(value, dict):
        raise CallTextError(
            f"the arguments must be a JSON object, and are of type {name_type(value)}"
        )
    return value, end


def check_value(value: Any) -> None:
    """Refuse a value that is nested deeper than MAX_NESTING, or that holds a text which cannot be
    written: half of a surrogate pair.
    """
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                _check_surrogates(item)
        if not inner:
            return
        level = inner
    if any(isinstance(item, dict | list) for item in level):
        raise CallTextError(describe_deep_nesting())
    for item in level:
        if isinstance(item, str):
            _check_surrogates(item)


def take_name_and_arguments(
    value: Any, arguments_key: str = "arguments", id_key: str | None = None
) -> tuple[str, dict[str, Any], str]:
    """Return the name, the arguments and the id ("" without one) of a call that is a JSON object of
    these entries alone.
    """
    if not isinstance(value, dict):
        raise CallTextError(f"a call must be a JSON object, and this is of type {name_type(value)}")
    needed_keys = ["name", arguments_key]
    for key in needed_keys:
        if key not in value:
            raise CallTextError(f"the call has no {key!r}: write an object with {needed_keys}")
    for key in value:
        if key not in needed_keys and key != id_key:
            raise CallTextError(
                f"the call has a key {quote_beginning(key)}; it takes {needed_keys}"
            )
    name = value["name"]
    arguments = value[arguments_key]
    call_id = value.get(id_key, "") if id_key else ""
    if not isinstance(name, str) or not name:
        raise CallTextError("the call's name must be a text that is not empty")
    if not isinstance(arguments, dict):
        raise CallTextError(
            f"{arguments_key!r} must be a JSON object, and is of type {name_type(arguments)}"
        )
    if not isinstance(call_id, str):
        raise CallTextError(f"the call's id must be a text, and is of type {name_type(call_id)}")
    return name, arguments, call_id


def take_tool_name(text: str) -> str:
    """Return a tool's name without white space around it. Raise CallTextError for other text."""
    name = text.strip()
    if TOOL_NAME.fullmatch(name) is None:
        raise CallTextError(
            f"{quote_beginning(name)} is no tool's name: letters, digits and _ . : / -"
        )
    return name


def name_type(value: Any) -> str:
    """Return the name that JSON schemas have for a value's type."""
    return TYPE_NAMES[type(value)]


def find_argument_schemas(tools: Tools | None, name: str) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by their names; {} where they are not known."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def read_untyped_value(text: str, schema: Any) -> Any:
    """Return the value of an argument that is written without quotes: `1` may be a number or a
    text. The argument's schema decides; without one, what is JSON is no text.

    Raise CallTextError where the schema allows no text and the value is nothing else.
    """
    types = list_schema_types(schema)
    is_text_allowed = not types or "string" in types
    if types == {"string"}:
        return text
    try:
        value, end = read_json(text, 0)
        if skip_white_space(text, end) < len(text):
            raise CallTextError("text stands behind the value")
    except CallTextError as error:
        word = text.strip()
        if word in PYTHON_WORDS and _fits_types(PYTHON_WORDS[word], types):
            return PYTHON_WORDS[word]
        if is_text_allowed:
            return text
        raise CallTextError(
            f"{quote_beginning(text)} is of no type of {sorted(types)}: {error}"
        ) from None
    # a text that looks like a number, where the schema wants a text or an object
    return value if _fits_types(value, types) or not is_text_allowed else text


def read_argument(key: str, text: str, schema: Any) -> Any:
    """Return an argument's value as `read_untyped_value` does. The error names the argument."""
    try:
        return read_untyped_value(text, schema)
    except CallTextError as error:
        raise CallTextError(f"the parameter {key!r}: {error}") from None


def list_schema_types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; an empty set where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        return {TYPE_NAMES.get(type(value), "") for value in schema["enum"]}
    types: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key) or ():
            branch_types = list_schema_types(branch)
            if not branch_types:
                return set()
            types |= branch_types
    return types


def _fits_types(value: Any, types: set[str]) -> bool:
    """Return whether a value is of one of the types; no types allow all."""
    type_name = name_type(value)
    is_whole_number = type_name == "integer" and "number" in types
    return not types or type_name in types or is_whole_number


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, and refuse one that has a key twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        seen_keys: set[str] = set()
        for key in keys:
            if key in seen_keys:
                raise CallTextError(f"the key {quote_beginning(key)} stands twice in an object")
            seen_keys.add(key)
    return value


def _refuse_constant(word: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise CallTextError(f"{word} is no JSON value")


def _parse_float(text: str) -> float:
    """Return a number, and refuse one that is too large to be told from infinity."""
    value = float(text)
    if math.isinf(value):
        raise CallTextError(f"the number {quote_beginning(text)} is too large")
    return value


def _check_surrogates(text: str) -> None:
    """Refuse a text that holds half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CallTextError(
            f"the text {quote_beginning(text)} holds half of a surrogate pair (\\ud83d alone)"
        ) from None


def describe_deep_nesting() -> str:
    """Return the reason for a value that is nested too deep."""
    return f"lists or objects are nested deeper than {MAX_NESTING}"


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_constant=_refuse_constant, parse_float=_parse_float
)
