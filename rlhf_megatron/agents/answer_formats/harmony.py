"""Answers of GPT-OSS: messages on channels, of which those to a tool are calls:
<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_megatron.agents.answer_formats.call_texts import (
    CallTextError,
    Tools,
    quote_beginning,
    read_json_arguments,
    skip_white_space,
)
from rlhf_megatron.agents.answer_formats.marked_format import cut_answer_end
from rlhf_megatron.agents.answer_formats.parsed_answer import (
    ANSWER_FORMATS,
    AnswerFormat,
    AnswerParts,
    ParsedAnswer,
)

START = "<|start|>"
MESSAGE = "<|message|>"
MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
# what a header consists of; other text in it is content
HEADER_PARTS = re.compile(
    r"<\|start\|>(?:assistant)?|^\s*assistant|\bto=[^\s<]+|<\|channel\|>\s*\w*"
    r"|<\|constrain\|>\s*\w*|\b(?:json|code)(?=<\|message\|>)|<\|message\|>"
)
FUNCTION_PREFIX = "functions."
THOUGHT_CHANNEL = "analysis"
NO_TOOLS = frozenset({"assistant", "user", "all"})  # recipients that are no tools
HEADER_MARK = re.compile(r"<\|(?:start|channel)\|>")
LONGEST_HEADER = 1000


@ANSWER_FORMATS.register("harmony")
class Harmony(AnswerFormat):
    """The recipient of a message makes it a call, whatever its channel. Messages on the channel
    analysis are thoughts, others are content.
    """

    name = "harmony"

    def __init__(self, end_texts: Sequence[str] = ()) -> None:
        """Take the texts of the tokens that end an answer; some of them end messages too."""
        self._end_texts = tuple(end_texts)

    def parse_answer(
        self, text: str, is_reasoning_open: bool = False, tools: Tools | None = None
    ) -> ParsedAnswer:
        """Return the parts of an answer, as the protocol says."""
        text = cut_answer_end(text, self._end_texts)
        parts = AnswerParts(text)
        position = 0
        if is_reasoning_open:
            end, position = _find_message_end(text, 0)
            parts.add_thought(text[:end])
        while skip_white_space(text, position) < len(text):
            header_end = text.find(MESSAGE, position)
            if header_end < 0:
                _add_cut_message(text[position:], parts)
                break
            if parts.is_full():
                parts.add_unread_rest(text[position:])
                break
            header_begin = text.rfind(START, position, header_end)
            if header_begin < 0:
                header_begin = max(position, header_end - LONGEST_HEADER)
            parts.add_content(text[position:header_begin])
            body_begin = header_end + len(MESSAGE)
            end, next_position = _find_message_end(text, body_begin)
            _add_message(text, header_begin, body_begin, end, parts)
            position = next_position
        return parts.build()


def _find_message_end(text: str, begin: int) -> tuple[int, int]:
    """Return where the message ends whose text begins at `begin`, and the position behind the
    token that ends it.
    """
    match = MESSAGE_END.search(text, begin)
    return match.span() if match else (len(text), len(text))


def _add_message(
    text: str, header_begin: int, body_begin: int, end: int, parts: AnswerParts
) -> None:
    """Add the message whose header begins at `header_begin`, and whose text reaches from
    `body_begin` to `end`.
    """
    header = text[header_begin:body_begin]
    body = text[body_begin:end]
    recipient = RECIPIENT.search(header)
    channel = CHANNEL.search(header)
    if recipient is not None and recipient[1] not in NO_TOOLS:
        try:
            arguments, arguments_end = read_json_arguments(body, 0)
            if skip_white_space(body, arguments_end) < len(body):
                shown = quote_beginning(body[arguments_end:].strip())
                raise CallTextError(f"text stands behind the JSON object: {shown}")
        except CallTextError as error:
            parts.add_broken_call(text[header_begin:end], str(error))
            return
        parts.add_content(HEADER_PARTS.sub("", header).strip())
        parts.add_call(recipient[1].removeprefix(FUNCTION_PREFIX), arguments)
        return
    parts.add_content(HEADER_PARTS.sub("", header).strip())
    if channel is not None and channel[1] == THOUGHT_CHANNEL:
        parts.add_thought(body)
    else:
        parts.add_content(body)


def _add_cut_message(text: str, parts: AnswerParts) -> None:
    """Add a message that ends within its header, or text that is no message."""
    mark = HEADER_MARK.search(text)
    is_call_begun = text.lstrip().startswith("to=") or (
        mark is not None and RECIPIENT.search(text, mark.end()) is not None
    )
    if is_call_begun:
        parts.add_broken_call(text, "the answer ends within the call")
    else:
        parts.add_content(text)
