"""Calls of GLM 4.5 and newer: <tool_call>f, then a key and an untyped value for each argument:
<arg_key>x</arg_key><arg_value>1</arg_value>, then </tool_call>, with or without line ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.agents.answer_formats.call_texts import (
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

KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN = "<arg_value>"
# the end of a value, told from the same text inside of it by what follows
VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
NAME_END = re.compile(r"<arg_key>|</tool_call>")


@ANSWER_FORMATS.register("glm")
class Glm(MarkedFormat):
    """One tag a call, with the name and pairs of a key and a value."""

    name = "glm"
    call_begin = "<tool_call>"
    call_end = "</tool_call>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a tag."""
        match = NAME_END.search(text, begin)
        if match is None:
            raise CallTextError(f"the call is not ended by {self.call_end}")
        name = take_tool_name(text[begin : match.start()])
        schemas = find_argument_schemas(tools, name)
        arguments: dict[str, Any] = {}
        position = match.start()
        while text.startswith(KEY_BEGIN, position):
            key_end = text.find(KEY_END, position)
            if key_end < 0:
                raise CallTextError(f"a key is not ended by {KEY_END}")
            key = text[position + len(KEY_BEGIN) : key_end].strip()
            value_begin = expect_mark(text, key_end + len(KEY_END), VALUE_BEGIN, f"the key {key!r}")
            value_match = VALUE_END.search(text, value_begin)
            value_text = text[value_begin : value_match.start() if value_match else len(text)]
            if value_match is None or KEY_BEGIN in value_text or VALUE_BEGIN in value_text:
                raise CallTextError(f"the value of {key!r} is not ended by </arg_value>")
            if key in arguments:
                raise CallTextError(f"the key {key!r} stands twice")
            arguments[key] = read_argument(key, value_text, schemas.get(key))
            position = skip_white_space(text, value_match.end())
        end = expect_mark(text, position, self.call_end, "the arguments")
        yield ReadCall(name, arguments, end)
