"""Calls that are written as in Python: [f(x=1, s='a'), g()]. Values are literals of Python or words
of JSON; nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlhf_megatron.agents.answer_formats.call_texts import (
    MAX_NESTING,
    CallTextError,
    Tools,
    describe_deep_nesting,
    find_argument_schemas,
    list_schema_types,
    quote_beginning,
    read_untyped_value,
    skip_white_space,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS

STRING = re.compile(r"'((?:[^'\\]|\\.)*+)'" + r'|"((?:[^"\\]|\\.)*+)"', re.DOTALL)
NUMBER = re.compile(r"-?\d+(?P<fraction>\.\d*)?(?P<exponent>[eE][+-]?\d+)?(?![\w.])")
WORD = re.compile(r"[^\W\d]\w*")
TOOL_NAME = re.compile(r"[^\W\d][\w.]*")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
ESCAPED_CHARACTERS: Mapping[str, str] = {
    "\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b",
    "f": "\f", "v": "\v", "0": "\0", "\n": "",
}  # fmt: skip
WORDS: Mapping[str, Any] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
SURROGATES = range(0xD800, 0xE000)


@ANSWER_FORMATS.register("pythonic")
class Pythonic(MarkedFormat):
    """A list of calls as the whole answer, of Llama 4 and Llama 3.2 with templates for it."""

    name = "pythonic"
    silent_pattern = r"<\|python_(?:start|end)\|>"
    bare_call = re.compile(r"\s*\[\s*[^\W\d][\w.]*\(")

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the calls of a list."""
        for call in read_python_calls(text, begin):
            schemas = find_argument_schemas(tools, call.name)
            arguments = {
                key: unquote_value(value, schemas.get(key)) for key, value in call.arguments.items()
            }
            yield replace(call, arguments=arguments)


@ANSWER_FORMATS.register("lfm2")
class Lfm2(MarkedFormat):
    """A list of calls between tokens, of LFM 2 and 2.5."""

    name = "lfm2"
    call_begin = "<|tool_call_start|>"
    call_end = "<|tool_call_end|>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the calls of a list."""
        yield from read_python_calls(text, begin, self.call_end)


def read_python_calls(text: str, begin: int, end_mark: str = "") -> Iterator[ReadCall]:
    """Yield the calls of the list that begins at `begin` and that `end_mark` follows."""
    position = expect_mark(text, begin, "[", "the mark of calls")
    separator = ","
    while separator == ",":
        match = TOOL_NAME.match(text, skip_white_space(text, position))
        if match is None:
            raise CallTextError("a list of calls holds NAME(KEY=VALUE, ...), separated by commas")
        arguments, position = read_python_call(text, match.end())
        position = skip_white_space(text, position)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            shown = quote_beginning(text[position:])
            raise CallTextError(f"a list of calls must go on with a comma or ], not with {shown}")
        position += 1
        if separator == "]" and end_mark:
            position = expect_mark(text, position, end_mark, "the list")
        yield ReadCall(match.group(), arguments, position)


def read_python_call(text: str, begin: int) -> tuple[dict[str, Any], int]:
    """Return the arguments between the parentheses that begin at `begin`, and the position behind
    them.
    """
    position = expect_mark(text, begin, "(", "the name of a tool")
    arguments: dict[str, Any] = {}
    position = skip_white_space(text, position)
    while not text.startswith(")", position):
        match = WORD.match(text, position)
        if match is None or not text.startswith("=", skip_white_space(text, match.end())):
            raise CallTextError(
                f"an argument must be KEY=VALUE, not {quote_beginning(text[position:])}"
            )
        key = match.group()
        if key in arguments:
            raise CallTextError(f"the argument {key!r} stands twice")
        value_begin = expect_mark(text, match.end(), "=", f"the key {key!r}")
        arguments[key], position = read_literal(text, value_begin)
        position = skip_separator(text, position, ")")
    return arguments, position + 1


def read_literal(text: str, begin: int, depth: int = 1) -> tuple[Any, int]:
    """Return the literal that begins at `begin` or behind white space, and the position behind
    it. `depth` counts the lists and objects around it.
    """
    begin = skip_white_space(text, begin)
    first = text[begin : begin + 1]
    if first and first in "[{":
        if depth >= MAX_NESTING:
            raise CallTextError(describe_deep_nesting())
        read = _read_list if first == "[" else _read_object
        return read(text, begin + 1, depth + 1)
    match = STRING.match(text, begin)
    if match is not None:
        return decode_escapes(match[1] if match[2] is None else match[2]), match.end()
    match = NUMBER.match(text, begin)
    if match is not None:
        return _make_number(match), match.end()
    match = WORD.match(text, begin)
    if match is not None and match.group() in WORDS:
        return WORDS[match.group()], match.end()
    raise CallTextError(f"{quote_beginning(text[begin:])} is no value that can be read")


def unquote_value(value: Any, schema: Any) -> Any:
    """Return the value of an argument. Templates write all values in quotes: the value in quotes
    counts where the argument's schema allows no text.
    """
    types = list_schema_types(schema)
    if not isinstance(value, str) or not types or "string" in types:
        return value
    with suppress(CallTextError):
        return read_untyped_value(value, schema)
    with suppress(CallTextError):
        literal, end = read_literal(value, 0)
        return literal if end == len(value) else value
    return value


def decode_escapes(text: str) -> str:
    """Return the text that stands in quotes, its escapes as Python reads them."""
    return ESCAPE.sub(_decode_escape, text) if "\\" in text else text


def skip_separator(text: str, begin: int, end_mark: str) -> int:
    """Return the position of the next item behind a comma, or of the mark that ends the items.
    Raise CallTextError for other text.
    """
    position = skip_white_space(text, begin)
    if text.startswith(",", position):
        return skip_white_space(text, position + 1)
    if text.startswith(end_mark, position):
        return position
    if position == len(text):
        raise CallTextError(f"{end_mark!r} is missing at its end")
    shown = quote_beginning(text[position:])
    raise CallTextError(f"a comma or {end_mark!r} must stand in place of {shown}")


def _read_list(text: str, begin: int, depth: int) -> tuple[list[Any], int]:
    """Return the list whose items begin at `begin`, and the position behind it."""
    items: list[Any] = []
    position = skip_white_space(text, begin)
    while not text.startswith("]", position):
        item, position = read_literal(text, position, depth)
        items.append(item)
        position = skip_separator(text, position, "]")
    return items, position + 1


def _read_object(text: str, begin: int, depth: int) -> tuple[dict[str, Any], int]:
    """Return the dictionary whose items begin at `begin`, and the position behind it."""
    value: dict[str, Any] = {}
    position = skip_white_space(text, begin)
    while not text.startswith("}", position):
        match = STRING.match(text, position)
        if match is None:
            raise CallTextError(f"a key must be a text, not {quote_beginning(text[position:])}")
        key = decode_escapes(match[1] if match[2] is None else match[2])
        if key in value:
            raise CallTextError(f"the key {quote_beginning(key)} stands twice in an object")
        value_begin = expect_mark(text, match.end(), ":", f"the key {quote_beginning(key)}")
        value[key], position = read_literal(text, value_begin, depth)
        position = skip_separator(text, position, "}")
    return value, position + 1


def _make_number(match: re.Match[str]) -> int | float:
    """Return the number of a match of NUMBER."""
    if match["fraction"] is None and match["exponent"] is None:
        try:
            return int(match.group())
        except ValueError as error:  # thousands of digits
            raise CallTextError(str(error)) from None
    value = float(match.group())
    if value in (float("inf"), float("-inf")):
        raise CallTextError(f"the number {quote_beginning(match.group())} is too large")
    return value


def _decode_escape(match: re.Match[str]) -> str:
    """Return the character of a match of ESCAPE; a backslash before another character stays."""
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return ESCAPED_CHARACTERS.get(match[4], match.group())
    code = int(digits, 16)
    if code > 0x10FFFF or code in SURROGATES:
        raise CallTextError(f"{match.group()} is no character")
    return chr(code)
