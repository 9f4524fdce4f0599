"""Calls as tags with untyped values, of Qwen3-Coder, Qwen 3.5 and newer, and Nemotron 3:
<tool_call><function=f><parameter=x>1</parameter></function></tool_call>, with line ends between.
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

PARAMETER = "<parameter="
# the end of a value, told from the same text inside of it by what follows
VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")


@ANSWER_FORMATS.register("qwen_xml")
class QwenXml(MarkedFormat):
    """A tag a function with a tag for each argument. Models often leave the outer tag out, which
    says nothing more.
    """

    name = "qwen_xml"
    list_begin = "<tool_call>"
    list_end = "</tool_call>"
    call_begin = "<function="
    call_end = "</function>"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield the call of a function's tag."""
        name_end = text.find(">", begin, begin + LONGEST_TAG)
        if name_end < 0:
            raise CallTextError("the tag <function=NAME> has no end")
        name = take_tool_name(text[begin:name_end])
        schemas = find_argument_schemas(tools, name)
        arguments: dict[str, Any] = {}
        position = skip_white_space(text, name_end + 1)
        while text.startswith(PARAMETER, position):
            key_end = text.find(">", position, position + LONGEST_TAG)
            if key_end < 0:
                raise CallTextError("the tag <parameter=NAME> has no end")
            key = text[position + len(PARAMETER) : key_end].strip()
            match = VALUE_END.search(text, key_end + 1)
            value_text = text[key_end + 1 : match.start() if match else len(text)]
            if match is None or PARAMETER in value_text:
                raise CallTextError(f"the parameter {key!r} is not ended by </parameter>")
            if key in arguments:
                raise CallTextError(f"the parameter {key!r} stands twice")
            arguments[key] = read_argument(key, _cut_lines(value_text), schemas.get(key))
            position = skip_white_space(text, match.end())
        end = expect_mark(text, position, self.call_end, "the parameters")
        yield ReadCall(name, arguments, end)


def _cut_lines(text: str) -> str:
    """Return a value without the line ends that stand at its tags."""
    return text.removeprefix("\n").removesuffix("\n")
