"""Calls of DeepSeek V3, R1 and V3.1, between special tokens. V3 and R1 write the type, the name and
a block of JSON; V3.1 writes the name and JSON:
<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.agents.answer_formats.call_texts import (
    CallTextError,
    Tools,
    read_json_arguments,
    skip_white_space,
    take_tool_name,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS

SEPARATOR = "<｜tool▁sep｜>"
BLOCK_BEGIN, BLOCK_END = "```json", "```"
CALL_TYPE = "function"


@ANSWER_FORMATS.register("deepseek")
class DeepSeek(MarkedFormat):
    """Both spellings are read: what stands before the separator tells them apart."""

    name = "deepseek"
    list_begin = "<｜tool▁calls▁begin｜>"
    list_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a token."""
        separator = text.find(SEPARATOR, begin)
        if separator < 0:
            raise CallTextError(f"the call has no {SEPARATOR}")
        head = text[begin:separator].strip()
        position = skip_white_space(text, separator + len(SEPARATOR))
        if head == CALL_TYPE and not text.startswith("{", position):
            block = text.find(BLOCK_BEGIN, position)
            if block < 0:
                raise CallTextError(f"{BLOCK_BEGIN} must follow the call's name")
            name = take_tool_name(text[position:block])
            arguments, end = read_json_arguments(text, block + len(BLOCK_BEGIN))
            end = expect_mark(text, end, BLOCK_END, "the arguments")
        else:
            name = take_tool_name(head)
            arguments, end = read_json_arguments(text, position)
        end = expect_mark(text, end, self.call_end, "the arguments")
        yield ReadCall(name, arguments, end)
