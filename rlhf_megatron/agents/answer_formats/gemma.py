"""Calls of Gemma 4 between tokens, with bare keys and with texts in quotes of their own:
<|tool_call>call:f{x:1,s:<|"|>a<|"|>}<tool_call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.agents.answer_formats.call_texts import (
    MAX_NESTING,
    CallTextError,
    Tools,
    describe_deep_nesting,
    quote_beginning,
    skip_white_space,
    take_tool_name,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS
from rlhf_megatron.agents.answer_formats.python_calls import read_literal, skip_separator

QUOTE = '<|"|>'
CALL_PREFIX = "call:"
BARE_KEY = re.compile(r"[^:{}\[\],]+")


@ANSWER_FORMATS.register("gemma_4")
class Gemma4(MarkedFormat):
    """One pair of tokens a call."""

    name = "gemma_4"
    thought_marks = ("<|channel>thought", "<channel|>")
    call_begin = "<|tool_call>"
    call_end = "<tool_call|>"
    silent_pattern = r"<\|tool_response>"  # the model ends an answer with calls with it

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a pair of tokens."""
        name_begin = expect_mark(text, begin, CALL_PREFIX, self.call_begin)
        name_end = text.find("{", name_begin)
        if name_end < 0:
            raise CallTextError("the call's name must be followed by {")
        name = take_tool_name(text[name_begin:name_end])
        arguments, end = _read_object(text, name_end + 1, 1)
        end = expect_mark(text, end, self.call_end, "the arguments")
        yield ReadCall(name, arguments, end)


def _read_value(text: str, begin: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at `begin`, and the position behind it."""
    begin = skip_white_space(text, begin)
    if text.startswith(QUOTE, begin):
        return _read_quoted(text, begin)
    first = text[begin : begin + 1]
    if first not in ("{", "["):
        return read_literal(text, begin, depth)
    if depth >= MAX_NESTING:
        raise CallTextError(describe_deep_nesting())
    read = _read_object if first == "{" else _read_list
    return read(text, begin + 1, depth + 1)


def _read_object(text: str, begin: int, depth: int) -> tuple[dict[str, Any], int]:
    """Return the object whose items begin at `begin`, and the position behind it."""
    value: dict[str, Any] = {}
    position = skip_white_space(text, begin)
    while not text.startswith("}", position):
        if text.startswith(QUOTE, position):
            key, key_end = _read_quoted(text, position)
        else:
            match = BARE_KEY.match(text, position)
            if match is None:
                raise CallTextError(f"a key must stand at {quote_beginning(text[position:])}")
            key = match.group().strip()
            key_end = match.end()
        if key in value:
            raise CallTextError(f"the key {quote_beginning(key)} stands twice in an object")
        value_begin = expect_mark(text, key_end, ":", f"the key {quote_beginning(key)}")
        value[key], position = _read_value(text, value_begin, depth)
        position = skip_separator(text, position, "}")
    return value, position + 1


def _read_list(text: str, begin: int, depth: int) -> tuple[list[Any], int]:
    """Return the list whose items begin at `begin`, and the position behind it."""
    items: list[Any] = []
    position = skip_white_space(text, begin)
    while not text.startswith("]", position):
        item, position = _read_value(text, position, depth)
        items.append(item)
        position = skip_separator(text, position, "]")
    return items, position + 1


def _read_quoted(text: str, begin: int) -> tuple[str, int]:
    """Return the text between the quotes that begin at `begin`, and the position behind them."""
    end = text.find(QUOTE, begin + len(QUOTE))
    if end < 0:
        raise CallTextError(f"a text is not ended by {QUOTE}")
    return text[begin + len(QUOTE) : end], end + len(QUOTE)
