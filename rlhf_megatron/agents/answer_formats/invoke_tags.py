"""Calls of MiniMax M2 and Muse Glimmer as tags with untyped values: <invoke name="f">, then
<parameter name="x">1</parameter> for each argument, then </invoke>, and marks around the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.agents.answer_formats.call_texts import (
    LONGEST_TAG,
    CallTextError,
    Tools,
    find_argument_schemas,
    read_argument,
    skip_white_space,
    take_tool_name,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS


@ANSWER_FORMATS.register("minimax_m2")
class MiniMaxM2(MarkedFormat):
    """A list of tags, one a call."""

    name = "minimax_m2"
    list_begin = "<minimax:tool_call>"
    list_end = "</minimax:tool_call>"
    call_begin = '<invoke name="'
    call_end = "</invoke>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a tag."""
        yield read_invoke_tag(text, begin, tools, "")


@ANSWER_FORMATS.register("muse_glimmer")
class MuseGlimmer(MarkedFormat):
    """Messages to a tool with one tag each, messages to the model itself, which are thoughts, and
    messages to the user.
    """

    name = "muse_glimmer"
    thought_marks = (" to=self<|message|>", "<|eom|>")
    list_begin = "<atem:function_calls>"
    list_end = "</atem:function_calls>"
    call_begin = '<atem:invoke name="'
    call_end = "</atem:invoke>"
    silent_pattern = r"<\|start\|>assistant| to=[\w.:/-]{1,200}<\|message\|>|<\|eo[mt]\|>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a tag."""
        yield read_invoke_tag(text, begin, tools, "atem:")


def read_invoke_tag(text: str, begin: int, tools: Tools | None, prefix: str) -> ReadCall:
    """Return the call whose name begins at `begin`, in tags that begin with `prefix`."""
    parameter = f'<{prefix}parameter name="'
    value_end = re.compile(
        f"</{prefix}parameter>(?=\\s*(?:{re.escape(parameter)}|</{prefix}invoke>))"
    )
    name, position = _read_name(text, begin)
    name = take_tool_name(name)
    schemas = find_argument_schemas(tools, name)
    arguments: dict[str, Any] = {}
    position = skip_white_space(text, position)
    while text.startswith(parameter, position):
        key, value_begin = _read_name(text, position + len(parameter))
        match = value_end.search(text, value_begin)
        value_text = text[value_begin : match.start() if match else len(text)]
        if match is None or parameter in value_text:
            raise CallTextError(f"the parameter {key!r} is not ended by </{prefix}parameter>")
        if key in arguments:
            raise CallTextError(f"the parameter {key!r} stands twice")
        arguments[key] = read_argument(key, value_text, schemas.get(key))
        position = skip_white_space(text, match.end())
    end = expect_mark(text, position, f"</{prefix}invoke>", "the parameters")
    return ReadCall(name, arguments, end)


def _read_name(text: str, begin: int) -> tuple[str, int]:
    """Return the name that ends with a quote and >, and the position behind them."""
    end = text.find('">', begin, begin + LONGEST_TAG)
    if end < 0:
        raise CallTextError('the tag with name="..." has no end')
    return text[begin:end], end + len('">')
