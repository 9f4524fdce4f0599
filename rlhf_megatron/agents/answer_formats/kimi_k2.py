"""Calls of Kimi K2, between special tokens, with an id that holds the name and the call's number:
<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_megatron.agents.answer_formats.call_texts import (
    CallTextError,
    Tools,
    quote_beginning,
    read_json_arguments,
    take_tool_name,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS

ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
CALL_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:][^\s]*):\d+")


@ANSWER_FORMATS.register("kimi_k2")
class KimiK2(MarkedFormat):
    """The ids of calls are the model's own: the template writes them back in place of names."""

    name = "kimi_k2"
    list_begin = "<|tool_calls_section_begin|>"
    list_end = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a token."""
        id_end = text.find(ARGUMENTS_BEGIN, begin)
        if id_end < 0:
            raise CallTextError(f"the call has no {ARGUMENTS_BEGIN}")
        call_id = text[begin:id_end].strip()
        match = CALL_ID.fullmatch(call_id)
        if match is None:
            raise CallTextError(f"the id {quote_beginning(call_id)} must be functions.NAME:NUMBER")
        name = take_tool_name(match["name"])
        arguments, end = read_json_arguments(text, id_end + len(ARGUMENTS_BEGIN))
        end = expect_mark(text, end, self.call_end, "the arguments")
        yield ReadCall(name, arguments, end, call_id)
