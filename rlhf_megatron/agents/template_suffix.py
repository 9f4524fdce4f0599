"""What a chat template writes behind an answer when further messages follow.

The text is rendered behind a made-up past of one user message and the answer with a mark at its
end, so that its cost does not grow with the conversation. That is right where the template writes
the same text behind the real past. The template itself is asked whether it does: the whole
conversation is rendered, with the mark in the last answer, when messages of such shapes stand in
this order for the first time, and later at the second, fourth, eighth ... time. Where the two texts
differ (a template that ends a list of calls only if another call stood before), the whole
conversation is rendered each time.

A template that moves a part of the answer behind its end, or that does not end the answer before
the next message begins, has no text that could be put behind the sampled answer: it is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhf_megatron.data.chat_template import ChatFormat
from rlhf_megatron.data.message_content import drop_absent_entries, join_text_parts

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
# stand in messages; no template writes them
END_MARK = "QZX7XZQ"  # the end of the answer
INNER_MARK = "QZX8XZQ"  # other texts of the answer
NEXT_MARK = "QZX9XZQ"  # the message behind the answer
MADE_UP_QUESTION: Message = {"role": "user", "content": "u"}
MADE_UP_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": END_MARK}},
}
MADE_UP_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
THOUGHT_TEXTS = ("<think>", "</think>")
REASONING_ENTRIES = ("reasoning_content", "reasoning", "thinking")
# messages of the past whose order counts; of those before them it counts which shapes there were
NUM_ORDERED_MESSAGES = 4
SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class TemplateSuffix:
    """What a template writes behind the text of an answer."""

    closing: str  # from the answer's text to its end token, with the token; "": it writes no end
    end: str  # the token that ends the answer; ""
    tail: str  # what stands behind the end token, up to the next answer
    # the end token stands behind answers whatever follows, and is no beginning of the next role
    is_plain_end: bool


@dataclass(frozen=True)
class CallSpelling:
    """How the calls of an assistant's message are handed to a template."""

    content_is_null: bool  # where the message has no text; else it is ""
    arguments_are_text: bool  # JSON as text; else an object


SPELLINGS = tuple(
    CallSpelling(content_is_null, arguments_are_text)
    for content_is_null, arguments_are_text in product((False, True), repeat=2)
)


@dataclass(frozen=True)
class _AnswerEnd:
    """How a template ends answers of a shape when messages of certain shapes follow."""

    # messages of the past that the made-up past begins with: system messages; None: the template
    # takes no made-up past
    num_head_messages: int | None
    closing: str
    end: str
    is_plain_end: bool


@dataclass
class _ShapeUses:
    """How often messages of certain shapes stood in this order."""

    num_uses: int = 0
    needs_whole: bool = False  # the made-up past gives another text

    def is_check_due(self) -> bool:
        """Return whether the whole conversation is rendered for this use: the first, second,
        fourth, eighth ... one.
        """
        return self.num_uses & (self.num_uses - 1) == 0


class SuffixRenderer:
    """Renders conversations, and what stands behind their last answers, with one template."""

    def __init__(
        self, chat: ChatFormat, stop_texts: Sequence[str], special_texts: Sequence[str]
    ) -> None:
        """Take the template, the tokens that end a turn and all special tokens, as texts."""
        self._chat = chat
        self._stop_texts = stop_texts
        self._special_texts = special_texts
        self._spelling: CallSpelling | None = None  # of calls; None: no call was rendered yet
        self._ends: dict[Any, _AnswerEnd] = {}
        self._uses: dict[Any, _ShapeUses] = {}

    def find_border_texts(self, added_texts: Iterable[str]) -> frozenset[str]:
        """Return those of the texts of a tokenizer's added tokens that are no special tokens, and
        with which the template borders messages all the same, such as <｜User｜> of DeepSeek: what
        it writes between an answer and the next question, and in the other borders where no special
        token stands. The tokens around thoughts are none. Qwen3's <tool_response> stands inside of
        <|im_start|> and <|im_end|>, and environments write it themselves in a user's message.
        """
        question = {"role": "user", "content": INNER_MARK}
        answer = {"role": "assistant", "content": END_MARK}
        follow_up = {"role": "user", "content": NEXT_MARK}
        caller = {"role": "assistant", "content": "", "tool_calls": [MADE_UP_CALL]}
        result = {"role": "tool", "content": NEXT_MARK, "tool_call_id": "call00001", "name": "f"}
        talks: tuple[tuple[list[Message], Tools | None], ...] = (
            ([question, answer, follow_up], None),
            ([question, caller, result], [MADE_UP_TOOL]),
        )
        borders = []
        between_turns = ""
        for messages, tools in talks:
            try:
                text = self.render_prompt(messages, tools)
            except ValueError:
                continue
            behind_question = text.rpartition(INNER_MARK)[2]
            before_answer, _, behind_answer = behind_question.partition(END_MARK)
            before_next, mark, behind_next = behind_answer.partition(NEXT_MARK)
            if not mark:
                continue
            borders += [before_answer, before_next, behind_next]
            between_turns = before_next if tools is None else between_turns
        texts = [text for text in added_texts if text not in (*self._special_texts, *THOUGHT_TEXTS)]
        return frozenset(
            text
            for text in texts
            for border in borders
            if text in between_turns or (text in border and not self._find_first_special(border)[1])
        )

    def render_prompt(self, messages: Sequence[Message], tools: Tools | None) -> str:
        """Return a conversation as text that ends with the prompt for an answer. Raise ValueError
        where the template refuses it.
        """
        return self._render(_spell_messages(messages, self._find_spelling(messages, tools)), tools)

    def render_suffix(
        self,
        past: Sequence[Message],
        answer: Message,
        new_messages: Sequence[Message],
        tools: Tools | None,
    ) -> TemplateSuffix:
        """Return what the template writes behind `answer`, which follows `past`, when
        `new_messages` follow the answer and the next answer is asked for. Raise ValueError where
        the template fails, or writes nothing that can be put behind the answer alone.
        """
        new_shapes = tuple(_describe_shape(message) for message in new_messages)
        end_key = (_describe_shape(answer), new_shapes, bool(tools))
        end = self._ends.get(end_key)
        if end is None:
            end = self._find_answer_end(_list_heads(past), answer, new_messages, tools)
            self._ends[end_key] = end
        past_shapes = [_describe_shape(message) for message in past]
        uses_key = (
            end_key,
            frozenset(past_shapes[:-NUM_ORDERED_MESSAGES]),
            tuple(past_shapes[-NUM_ORDERED_MESSAGES:]),
        )
        uses = self._uses.setdefault(uses_key, _ShapeUses())
        uses.num_uses += 1
        behind = None
        made_up_past = past
        if end.num_head_messages is not None and not uses.needs_whole:
            made_up_past = [*past[: end.num_head_messages], MADE_UP_QUESTION]
            behind = self._render_behind(made_up_past, answer, new_messages, tools)
        if behind is None or uses.is_check_due():
            # stays so where the template refuses the whole conversation
            uses.needs_whole = True
            whole = self._render_behind(past, answer, new_messages, tools)
            uses.needs_whole = whole != behind
            behind = whole
        if not behind.startswith(end.closing) or (uses.needs_whole and not end.end):
            # the ids of calls stand behind their arguments, or the past changes the end
            head = past if uses.needs_whole else made_up_past
            end = self._find_answer_end([head], answer, new_messages, tools)
            if not behind.startswith(end.closing):
                raise ValueError(
                    "the chat template ends the answer with"
                    f" {behind[:SHOWN_CHARACTERS]!r}, and with"
                    f" {end.closing[:SHOWN_CHARACTERS]!r} before another message"
                )
        return TemplateSuffix(end.closing, end.end, behind[len(end.closing) :], end.is_plain_end)

    def _find_answer_end(
        self,
        heads: Iterable[Sequence[Message]],
        answer: Message,
        new_messages: Sequence[Message],
        tools: Tools | None,
    ) -> _AnswerEnd:
        """Return how the template ends the answer, by rendering it behind the first of `heads` that
        it takes, with a mark in the message that follows. Raise ValueError as `render_suffix` does.
        """
        marked = [{**new_messages[0], "content": NEXT_MARK}, *new_messages[1:]]
        problem: ValueError | None = None
        for head in heads:
            try:
                behind = self._render_behind(head, answer, marked, tools)
            except ValueError as error:
                problem = problem or error
                continue
            between, mark, _ = behind.partition(NEXT_MARK)
            if not mark:
                raise ValueError(
                    f"the chat template leaves out a message of the role {new_messages[0]['role']}"
                )
            closing = self._cut_behind_end(between, answer)
            end = self._find_last_special(closing)
            num_head_messages = len(head) - 1 if head[-1] is MADE_UP_QUESTION else None
            header = between[len(closing) :]
            is_plain_end = bool(self._find_first_special(header)[1]) and self._has_same_end(
                closing, head, answer, new_messages[0]["role"], tools
            )
            return _AnswerEnd(num_head_messages, closing, end, is_plain_end)
        assert problem is not None, "there is at least one head"
        raise problem

    def _has_same_end(
        self,
        closing: str,
        head: Sequence[Message],
        answer: Message,
        next_role: str,
        tools: Tools | None,
    ) -> bool:
        """Return whether the template ends the answer with `closing` before a message of another
        role, too, or refuses such a message.
        """
        other_role = "assistant" if next_role == "user" else "user"
        other_message = {"role": other_role, "content": NEXT_MARK}
        try:
            behind = self._render_behind(head, answer, [other_message], tools)
        except ValueError:
            return True
        return self._cut_behind_end(behind.partition(NEXT_MARK)[0], answer) == closing

    def _cut_behind_end(self, between: str, answer: Message) -> str:
        """Return what stands between an answer and the next message up to the token that ends the
        answer, with the token; "" where the template writes no such token.
        """
        end = _find_first_text(between, self._stop_texts)
        if end is None and not answer.get("tool_calls"):
            end = self._find_replaced_end(between)
        return between[: end[0] + len(end[1])] if end else ""

    def _find_replaced_end(self, between: str) -> tuple[int, str] | None:
        """Return the position and the text of the special token with which the template ends
        answers of the past, where it ends the last answer with a stop token at the same place
        (GPT-OSS: the model writes <|return|>, and the past has <|end|>). Else return None.

        A token ends messages if it stands behind a user's message and an answer alike, if the same
        special token begins the next message behind both, and if fewer messages are ended than
        begun where an answer is asked for.
        """
        position, candidate = self._find_first_special(between)
        if not candidate:
            return None
        answer = {"role": "assistant", "content": END_MARK}
        try:
            last = self._render([MADE_UP_QUESTION, answer], None, has_answer_prompt=False)
            asked = self._render([{"role": "user", "content": END_MARK}], None)
        except ValueError:
            return None
        stop = _find_first_text(_cut_behind_mark(last), self._stop_texts)
        behind_question = _cut_behind_mark(asked)
        ends_question = behind_question.startswith(between[: position + len(candidate)])
        next_tokens = [
            self._find_first_special(text[position + len(candidate) :])
            for text in (between, behind_question)
        ]
        next_token = next_tokens[0][1]
        if (
            stop is not None
            and stop[0] == position
            and ends_question
            and next_token != ""
            and next_tokens[0] == next_tokens[1]
            and asked.count(candidate) < asked.count(next_token)
        ):
            return position, candidate
        return None

    def _find_first_special(self, text: str) -> tuple[int, str]:
        """Return the position and the text of the first special token in a text; (0, "") where
        there is none.
        """
        return _find_first_text(text, self._special_texts) or (0, "")

    def _find_last_special(self, closing: str) -> str:
        """Return the token with which a closing ends: the longest stop token or special token."""
        ends = [
            text for text in (*self._stop_texts, *self._special_texts) if closing.endswith(text)
        ]
        return max(ends, key=len, default="")

    def _render_behind(
        self,
        past: Sequence[Message],
        answer: Message,
        new_messages: Sequence[Message],
        tools: Tools | None,
    ) -> str:
        """Return what the template writes behind the answer's text, or behind its last call's last
        argument. Raise ValueError where it fails, where it leaves the answer out, and where it
        writes parts of the answer behind its end.
        """
        spelling = self._find_spelling([answer, *new_messages, *past], tools)
        messages = [
            *_spell_messages(past, spelling),
            _mark_answer(answer, spelling),
            *_spell_messages(new_messages, spelling),
        ]
        text = self._render(messages, tools)
        if END_MARK not in text:
            part = "the calls" if answer.get("tool_calls") else "the text"
            raise ValueError(f"the chat template leaves out {part} of an answer")
        if text.count(END_MARK) > 1:
            raise ValueError(
                f"the end of the answer is not known: the chat template writes it twice, or a"
                f" message holds {END_MARK!r}, with which it is marked"
            )
        behind = _cut_behind_mark(text)
        if INNER_MARK in behind:
            raise ValueError(
                "the chat template moves a part of the answer (its text, its thought or a call)"
                " behind its last call, where the sampled answer does not have it"
            )
        return behind

    def _render(
        self, messages: Sequence[Message], tools: Tools | None, has_answer_prompt: bool = True
    ) -> str:
        """Return the text of messages. Raise ValueError where the template refuses them. The limit
        of memory would hold for all threads of the process, in which user code may run.
        """
        return self._chat.render_conversation(messages, has_answer_prompt, tools, is_bounded=False)

    def _find_spelling(self, messages: Iterable[Message], tools: Tools | None) -> CallSpelling:
        """Return the spelling in which the template writes calls, by rendering the first call of
        the messages in each; the first spelling where no message has calls, or none is written.
        """
        if self._spelling is not None:
            return self._spelling
        caller = next((message for message in messages if message.get("tool_calls")), None)
        if caller is None:
            return SPELLINGS[0]
        call = caller["tool_calls"][0]
        only_call = {**caller, "content": None, "tool_calls": [call]}
        name = call.get("function", call).get("name")
        result = {"role": "tool", "content": "r", "name": name, "tool_call_id": call.get("id")}
        for spelling in SPELLINGS:
            talk = [
                MADE_UP_QUESTION,
                _mark_answer(only_call, spelling),
                _spell_message(result, spelling),
            ]
            try:
                text = self._render(talk, tools)
            except ValueError:
                continue
            if END_MARK in text:
                self._spelling = spelling
                return spelling
        return SPELLINGS[0]


def _describe_shape(message: Message) -> tuple[Any, ...]:
    """Return what a template may look at to choose its text: the role, and which parts are there.
    Of calls it counts whether there are none, one or several.
    """
    return (
        message["role"],
        bool(message.get("content")),
        min(len(message.get("tool_calls") or ()), 2),
        any(message.get(name) for name in REASONING_ENTRIES),
    )


def _list_heads(past: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the pasts to try: a made-up question alone, then with the system messages, then the
    past itself.
    """
    yield [MADE_UP_QUESTION]
    num_system = next((i for i, m in enumerate(past) if m["role"] != "system"), len(past))
    if num_system:
        yield [*past[:num_system], MADE_UP_QUESTION]
    yield past


def _mark_answer(answer: Message, spelling: CallSpelling) -> dict[str, Any]:
    """Return the answer with a mark at its end, and other marks at the ends of its other texts. An
    answer with calls ends with the last argument of the last call.
    """
    marked = _spell_message(answer, spelling)
    for name in REASONING_ENTRIES:
        if isinstance(marked.get(name), str) and marked[name]:
            marked[name] += INNER_MARK
    calls = marked.get("tool_calls")
    if not calls:
        marked["content"] = (marked.get("content") or "") + END_MARK
        return marked
    if marked.get("content"):
        marked["content"] += INNER_MARK
    marks = [INNER_MARK] * (len(calls) - 1) + [END_MARK]
    marked["tool_calls"] = [
        _set_call_arguments(call, {"a": mark}, spelling.arguments_are_text)
        for call, mark in zip(calls, marks, strict=True)
    ]
    return marked


def _spell_messages(messages: Sequence[Message], spelling: CallSpelling) -> list[Message]:
    """Return messages as templates take them: without entries that are null, with text that is
    joined from its parts, and with calls in one spelling.
    """
    return [_spell_message(message, spelling) for message in messages]


def _spell_message(message: Message, spelling: CallSpelling) -> dict[str, Any]:
    """Return one message as `_spell_messages` does."""
    spelled = drop_absent_entries(message)
    content = join_text_parts(message.get("content"))
    calls = spelled.get("tool_calls")
    if not content:
        content = None if calls and spelling.content_is_null else ""
    spelled["content"] = content
    if calls:
        spelled["tool_calls"] = [
            _set_call_arguments(
                call, call.get("function", call).get("arguments"), spelling.arguments_are_text
            )
            for call in calls
        ]
    return spelled


def _set_call_arguments(
    call: Mapping[str, Any], arguments: Any, arguments_are_text: bool
) -> dict[str, Any]:
    """Return a call with arguments as JSON text or as an object. Text that is no JSON stays."""
    if arguments_are_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not arguments_are_text and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _cut_behind_mark(text: str) -> str:
    """Return the text behind the last mark of the answer's end."""
    return text.rpartition(END_MARK)[2]


def _find_first_text(text: str, wanted_texts: Iterable[str]) -> tuple[int, str] | None:
    """Return the position and the text of the first of the wanted texts in a text, the longest at
    its place, or None.
    """
    places = [
        (position, -len(wanted), wanted)
        for wanted in wanted_texts
        if wanted and (position := text.find(wanted)) >= 0
    ]
    if not places:
        return None
    position, _, wanted = min(places)
    return position, wanted
