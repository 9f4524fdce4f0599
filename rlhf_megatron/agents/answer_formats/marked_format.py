"""Answers whose thoughts and calls stand between marks, in any order.

A format names its marks and reads one call; what is common is here: thoughts, marks around a list
of calls, broken calls, and the ends of answers.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rlhf_megatron.agents.answer_formats.call_texts import (
    CallTextError,
    Tools,
    skip_white_space,
)
from rlhf_megatron.agents.answer_formats.parsed_answer import (
    AnswerFormat,
    AnswerParts,
    ParsedAnswer,
)


@dataclass(frozen=True)
class ReadCall:
    """A call that stands in an answer's text up to the position `end`."""

    name: str
    arguments: dict[str, Any]
    end: int
    call_id: str = ""


@dataclass(frozen=True)
class RefusedCall:
    """A part of a list that ends at the position `end` and is no call."""

    reason: str
    end: int


@dataclass(frozen=True)
class ContentPart:
    """Text up to the position `end` that only looked like a call."""

    end: int


class MarkedFormat(AnswerFormat):
    """A format with marks. A mark of a call begins a call wherever it stands outside of thoughts;
    marks of a list around the calls say nothing more, but a list without a call is broken.
    """

    thought_marks: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    list_begin: ClassVar[str] = ""  # "": the format has no marks around its calls
    list_end: ClassVar[str] = ""
    call_begin: ClassVar[str] = ""  # "": no mark begins a call
    call_end: ClassVar[str] = ""  # "": a call ends by itself
    silent_pattern: ClassVar[str] = ""  # of marks that stand for nothing
    # a call without a mark, at the beginning of the answer or behind a mark, white space before it
    bare_call: ClassVar[re.Pattern[str] | None] = None
    # a call without a mark at the beginning of a line, from the line end before it; it begins with
    # a line end, and no other mark does
    line_call_pattern: ClassVar[str] = ""

    def __init__(self, end_texts: Sequence[str] = ()) -> None:
        """Take the texts of the tokens that end an answer."""
        self._end_texts = tuple(end_texts)

    @abstractmethod
    def read_calls(
        self, text: str, begin: int, tools: Tools | None
    ) -> Iterator[ReadCall | RefusedCall | ContentPart]:
        """Yield the calls of a mark, `begin` being the position behind the mark, or where a call
        without a mark begins. The position `end` of the last one is behind its end mark. Raise
        CallTextError where a call cannot be read.
        """

    def parse_answer(
        self, text: str, is_reasoning_open: bool = False, tools: Tools | None = None
    ) -> ParsedAnswer:
        """Return the parts of an answer, as the protocol says."""
        text = cut_answer_end(text, self._end_texts)
        parts = AnswerParts(text)
        position = self._add_thought(text, 0, parts) if is_reasoning_open else 0
        while position < len(text):
            if self.bare_call is not None and self.bare_call.match(text, position):
                position = self._add_calls(text, position, position, parts, tools)
                continue
            match = self._mark_pattern.search(text, position)
            begin = match.start() if match else len(text)
            parts.add_content(text[position:begin])
            if match is None:
                break
            position = self._add_marked_part(text, match, parts, tools)
        return parts.build()

    @cached_property
    def _mark_pattern(self) -> re.Pattern[str]:
        """Return the pattern of the marks that begin something."""
        marks = (self.thought_marks[0], self.list_begin, self.list_end, self.call_begin)
        patterns = [re.escape(mark) for mark in marks if mark]
        patterns += [text for text in (self.silent_pattern, self.line_call_pattern) if text]
        return re.compile("|".join(patterns))

    @cached_property
    def _broken_end_pattern(self) -> re.Pattern[str]:
        """Return the pattern of what ends a broken call: its own end, or what begins another."""
        ends = [re.escape(mark) for mark in (self.call_end, self.list_end) if mark]
        begins = [f"(?={re.escape(mark)})" for mark in (self.call_begin, self.list_begin) if mark]
        return re.compile("|".join([*ends, *begins]) or r"\Z")

    def _add_marked_part(
        self, text: str, match: re.Match[str], parts: AnswerParts, tools: Tools | None
    ) -> int:
        """Add what the mark begins, and return the position behind it."""
        mark = match.group()
        if mark == self.thought_marks[0]:
            return self._add_thought(text, match.end(), parts)
        if mark == self.call_begin or (self.line_call_pattern and mark.startswith("\n")):
            return self._add_calls(text, match.start(), match.end(), parts, tools)
        if mark == self.list_begin and not parts.is_full():
            first = skip_white_space(text, match.end())
            if text.startswith(self.call_begin, first):
                return first
            reason = f"{mark} must be followed by {self.call_begin}"
            return self._add_broken_call(text, match.start(), match.end(), reason, parts)
        return match.end()

    def _add_calls(
        self, text: str, begin: int, body_begin: int, parts: AnswerParts, tools: Tools | None
    ) -> int:
        """Add the calls of the mark that stands from `begin` to `body_begin`, and return the
        position behind them.
        """
        if parts.is_full():
            parts.add_unread_rest(text[begin:])
            return len(text)
        search_begin = body_begin
        try:
            for call in self.read_calls(text, body_begin, tools):
                if isinstance(call, ReadCall):
                    parts.add_call(call.name, call.arguments, call.call_id)
                elif isinstance(call, RefusedCall):
                    parts.add_broken_call(text[begin : call.end], call.reason)
                else:
                    parts.add_content(text[begin : call.end])
                begin = call.end
                search_begin = call.end
        except CallTextError as error:
            return self._add_broken_call(text, begin, search_begin, str(error), parts)
        return begin

    def _add_broken_call(
        self, text: str, begin: int, search_begin: int, reason: str, parts: AnswerParts
    ) -> int:
        """Add a broken call that ends at the first end mark, or where another call begins, and
        return the position behind it.
        """
        match = self._broken_end_pattern.search(text, search_begin)
        end = match.end() if match else len(text)
        if match is None and self.call_end:
            reason += " (the answer ends within the call)"
        parts.add_broken_call(text[begin:end], reason)
        return end

    def _add_thought(self, text: str, begin: int, parts: AnswerParts) -> int:
        """Add the thought that begins at `begin`, and return the position behind it. A thought
        without an end reaches to the end of the answer.
        """
        end_mark = self.thought_marks[1]
        end = text.find(end_mark, begin)
        parts.add_thought(text[begin:] if end < 0 else text[begin:end])
        return len(text) if end < 0 else end + len(end_mark)


def cut_answer_end(text: str, end_texts: Sequence[str]) -> str:
    """Return an answer without the tokens that end it, and without white space behind those."""
    stripped = text.rstrip()
    for end_text in sorted(end_texts, key=len, reverse=True):
        if end_text and stripped.endswith(end_text):
            return stripped[: -len(end_text)]
    return text


def expect_mark(text: str, begin: int, mark: str, subject: str) -> int:
    """Return the position behind a mark that stands at `begin` or behind white space. Raise
    CallTextError where other text stands there.
    """
    position = skip_white_space(text, begin)
    if text.startswith(mark, position):
        return position + len(mark)
    shown = repr(text[position : position + 20])
    place = f"{shown} stands there" if position < len(text) else "the answer ends there"
    raise CallTextError(f"{mark} must follow {subject}; {place}")
