"""Calls as JSON between tags, of Qwen 2.5 and 3, SmolLM 3 and Hermes:
<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.agents.answer_formats.call_texts import (
    Tools,
    read_json,
    take_name_and_arguments,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS


@ANSWER_FORMATS.register("hermes_json")
class HermesJson(MarkedFormat):
    """One tag a call, each with a JSON object."""

    name = "hermes_json"
    call_begin = "<tool_call>"
    call_end = "</tool_call>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a tag."""
        value, end = read_json(text, begin)
        end = expect_mark(text, end, self.call_end, "the JSON object")
        name, arguments, _ = take_name_and_arguments(value)
        yield ReadCall(name, arguments, end)
