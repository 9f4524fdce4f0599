"""Calls of Llama 3.1 and newer as the whole answer: {"name": "f", "parameters": {"x": 1}}, with
<|python_tag|> before it or not, several apart by ";"; of built-in tools <|python_tag|>f.call(x=1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_megatron.agents.answer_formats.call_texts import (
    CallTextError,
    Tools,
    read_json,
    skip_white_space,
    take_name_and_arguments,
)
from rlhf_megatron.agents.answer_formats.marked_format import ContentPart, MarkedFormat, ReadCall
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS
from rlhf_megatron.agents.answer_formats.python_calls import read_python_call

BUILT_IN_CALL = re.compile(r"(?P<name>\w+)\.call(?=\()")
ARGUMENTS_KEYS = ("parameters", "arguments")
NEXT_CALL = re.compile(r'\s*+[;,]?\s*+(?=\{\s*"name")')


@ANSWER_FORMATS.register("llama_json")
class LlamaJson(MarkedFormat):
    """A call begins the answer, or a line behind text. Models write "arguments" for "parameters",
    too; engines take both. A JSON object with neither is no call.
    """

    name = "llama_json"
    call_begin = "<|python_tag|>"
    silent_pattern = r"<\|python_(?:start|end)\|>"  # of Llama 4, around text
    bare_call = re.compile(r'\s*\{\s*"name"')
    line_call_pattern = r'\n[ \t]*(?=\{\s*"name")'

    def read_calls(
        self, text: str, begin: int, tools: Tools | None
    ) -> Iterator[ReadCall | ContentPart]:
        """Yield the calls that stand one behind the other."""
        position = skip_white_space(text, begin)
        match = BUILT_IN_CALL.match(text, position)
        if match is not None:
            arguments, end = read_python_call(text, match.end())
            yield ReadCall(match["name"], arguments, end)
            return
        if not text.startswith("{", position):
            raise CallTextError(
                f'{self.call_begin} must be followed by {{"name": ..., "parameters": ...}}'
            )
        has_mark = text.endswith(self.call_begin, 0, begin)
        is_call = True
        while is_call:
            value, end = read_json(text, position)
            next_match = NEXT_CALL.match(text, end)
            is_call = next_match is not None
            position = next_match.end() if next_match else end
            keys = [key for key in ARGUMENTS_KEYS if isinstance(value, dict) and key in value]
            if keys or has_mark:
                key = keys[0] if keys else ARGUMENTS_KEYS[0]
                name, arguments, _ = take_name_and_arguments(value, key)
                yield ReadCall(name, arguments, position)
            else:
                yield ContentPart(position)
