"""Answers of models whose template knows no tools: text and thoughts between <think> tags."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.agents.answer_formats.call_texts import Tools
from rlhf_megatron.agents.answer_formats.marked_format import MarkedFormat, ReadCall
from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS


@ANSWER_FORMATS.register("plain")
class PlainText(MarkedFormat):
    """No text is a call."""

    name = "plain"

    def read_calls(self, text: str, begin: int, tools: Tools | None) -> Iterator[ReadCall]:
        """Yield no call: no mark begins one."""
        yield from ()
