"""Calls in a JSON list behind one mark: of Mistral and Nemotron Nano 2."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.agents.answer_formats.call_texts import (
    CallTextError,
    Tools,
    quote_beginning,
    read_json,
    read_json_arguments,
    skip_white_space,
    take_name_and_arguments,
    take_tool_name,
)
from rlhf_megatron.agents.answer_formats.marked_format import (
    MarkedFormat,
    ReadCall,
    RefusedCall,
    expect_mark,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS

ID_BEGIN = "[CALL_ID]"
ARGUMENTS_BEGIN = "[ARGS]"


@ANSWER_FORMATS.register("mistral")
class Mistral(MarkedFormat):
    """[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "123456789"}], and of models since
    the middle of 2025 [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}, once a call, with or without
    the id.
    """

    name = "mistral"
    thought_marks = ("[THINK]", "[/THINK]")
    call_begin = "[TOOL_CALLS]"

    def read_calls(
        self, text: str, begin: int, tools: Tools | None
    ) -> Iterator[ReadCall | RefusedCall]:
        """Yield the calls of a list, or the call of a name."""
        if text.startswith("[", skip_white_space(text, begin)) and not text.startswith(
            (ID_BEGIN, ARGUMENTS_BEGIN), skip_white_space(text, begin)
        ):
            yield from read_listed_calls(text, begin, id_key="id")
            return
        arguments_begin = text.find(ARGUMENTS_BEGIN, begin)
        if arguments_begin < 0:
            raise CallTextError(f"a list of calls, or a name and {ARGUMENTS_BEGIN}, must follow")
        name, _, call_id = text[begin:arguments_begin].partition(ID_BEGIN)
        name = take_tool_name(name)
        arguments, end = read_json_arguments(text, arguments_begin + len(ARGUMENTS_BEGIN))
        yield ReadCall(name, arguments, end, call_id.strip())


@ANSWER_FORMATS.register("nemotron_nano_2")
class NemotronNano2(MarkedFormat):
    """<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}]</TOOLCALL>"""

    name = "nemotron_nano_2"
    call_begin = "<TOOLCALL>"
    call_end = "</TOOLCALL>"

    def read_calls(
        self, text: str, begin: int, tools: Tools | None
    ) -> Iterator[ReadCall | RefusedCall]:
        """Yield the calls of a list."""
        yield from read_listed_calls(text, begin, end_mark=self.call_end)


def read_listed_calls(
    text: str, begin: int, id_key: str | None = None, end_mark: str = ""
) -> Iterator[ReadCall | RefusedCall]:
    """Yield the calls of the JSON list that begins at `begin` and that `end_mark` follows. An item
    that is JSON and no call is refused alone.
    """
    position = expect_mark(text, begin, "[", "the mark of calls")
    separator = ","
    while separator == ",":
        value, position = read_json(text, position)
        position = skip_white_space(text, position)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            shown = quote_beginning(text[position:])
            raise CallTextError(f"a list of calls must go on with a comma or ], not with {shown}")
        position += 1
        if separator == "]" and end_mark:
            position = expect_mark(text, position, end_mark, "the list")
        try:
            name, arguments, call_id = take_name_and_arguments(value, id_key=id_key)
            yield ReadCall(name, arguments, position, call_id)
        except CallTextError as error:
            yield RefusedCall(str(error), position)
