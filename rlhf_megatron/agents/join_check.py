"""Tries at the start of a run which kinds of next messages can be put behind sampled answers with
this tokenizer and this chat template, on made-up talks, and says so in the log.

Each turn of an episode is checked by itself (`Dialogue.append_messages`). What is tried here is
what a user wants to know before the run: a template that has no exact join behind calls of tools
would end every episode with tools as refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.agents.dialogue import (
    Dialogue,
    DialogueFormat,
    JoinRefusedError,
    Message,
)

SHOWN_CHARACTERS = 200  # of a reason
MADE_UP_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
)


SYSTEM_MESSAGE: Message = {"role": "system", "content": "Be short."}


@dataclass(frozen=True)
class JoinCheck:
    """Whether messages of a kind can be put behind an answer."""

    kind: str
    is_exact: bool
    reason: str  # why they cannot; ""


@dataclass(frozen=True)
class _Talk:
    """A made-up conversation up to an answer, and what follows the answer."""

    kind: str
    past: tuple[Message, ...]
    answer: Message
    new_messages: tuple[Message, ...]
    has_stop: bool = True

    @property
    def has_tools(self) -> bool:
        """Return whether a message of the talk calls a tool."""
        return any("tool_calls" in message for message in (*self.past, self.answer))


def check_joins(dialogue_format: DialogueFormat) -> tuple[JoinCheck, ...]:
    """Return for each kind of talk whether its new messages have exact ids behind the answer, at
    least behind one of the stop tokens. Plain text has two kinds, without tools and thoughts.
    """
    if dialogue_format.chat is None:
        talks = _list_plain_talks()
    else:
        # a conversation has one system message, that of the settings or its own
        has_system_prompt = dialogue_format.chat.system_prompt is not None
        talks = _list_chat_talks(() if has_system_prompt else (SYSTEM_MESSAGE,))
    return tuple(_check_talk(dialogue_format, talk) for talk in talks)


def describe_joins(checks: Sequence[JoinCheck]) -> list[str]:
    """Return lines for the log: the kinds of joins that are exact, and those that are refused with
    the reason, one line for each reason.
    """
    exact_kinds = [check.kind for check in checks if check.is_exact]
    lines = []
    if len(exact_kinds) == len(checks):
        lines.append(f"all {len(checks)} kinds of next messages that were tried have exact joins")
    elif exact_kinds:
        lines.append(
            f"{len(exact_kinds)} of {len(checks)} kinds of next messages that were tried have exact"
            f" joins: {', '.join(exact_kinds)}"
        )
    else:
        lines.append("no kind of next message that was tried has an exact join")
    kinds_by_reason: dict[str, list[str]] = {}
    for check in checks:
        if not check.is_exact:
            kinds_by_reason.setdefault(check.reason, []).append(check.kind)
    for reason, kinds in kinds_by_reason.items():
        lines.append(
            f"refused, which ends an episode: {', '.join(kinds)}: {reason[:SHOWN_CHARACTERS]}"
        )
    return lines


def _check_talk(dialogue_format: DialogueFormat, talk: _Talk) -> JoinCheck:
    """Return what becomes of a talk behind the first stop token that its template takes."""
    reason = ""
    for stop_token_id in dialogue_format.stop_token_ids:
        try:
            _join_talk(dialogue_format, talk, stop_token_id)
        except JoinRefusedError as error:
            reason = reason or str(error)
        else:
            return JoinCheck(talk.kind, True, "")
    return JoinCheck(talk.kind, False, reason)


def _join_talk(dialogue_format: DialogueFormat, talk: _Talk, stop_token_id: int) -> None:
    """Put the new messages of a talk behind its answer. Raise JoinRefusedError."""
    tools = MADE_UP_TOOLS if talk.has_tools else None
    dialogue = Dialogue(dialogue_format)
    dialogue.append_messages(talk.past, tools)
    # the ids of the answer's text play no part in the join
    answer_ids = (stop_token_id,) if talk.has_stop else ()
    dialogue.append_answer(answer_ids, talk.answer)
    dialogue.append_messages([*talk.past, talk.answer, *talk.new_messages], tools)


def _list_plain_talks() -> list[_Talk]:
    """Return the talks of plain text: digits and signs, which also small vocabularies spell."""
    question: Message = {"role": "user", "content": "1 "}
    answer: Message = {"role": "assistant", "content": "2 "}
    return [
        _Talk("user after an answer", (question,), answer, (question,)),
        _Talk("user after a cut answer", (question,), answer, (question,), has_stop=False),
    ]


def _list_chat_talks(system: tuple[Message, ...]) -> list[_Talk]:
    """Return the talks of chats; two of them begin with the messages `system`."""
    question: Message = {"role": "user", "content": "How much is 1 + 2?"}
    again: Message = {"role": "user", "content": "And in words?"}
    answer = _make_answer("It is 3.")
    thought_answer = _make_answer("It is 3.", "One and two.")
    call = _make_answer("", num_calls=1)
    thought_call = _make_answer("", "I call the tool.", num_calls=1)
    two_calls = _make_answer("", num_calls=2)
    result = _make_result(0)
    results = (_make_result(0), _make_result(1))
    return [
        _Talk("user after an answer", (question,), answer, (again,)),
        _Talk("user after an answer with a thought", (question,), thought_answer, (again,)),
        _Talk(
            "user after an answer with an empty thought",
            (question,),
            _make_answer("It is 3.", ""),
            (again,),
        ),
        _Talk("third turn of a user", (*system, question, answer, again), answer, (again,)),
        _Talk("tool after a call", (question,), call, (result,)),
        _Talk(
            "tool after text and a call",
            (question,),
            _make_answer("Let me see.", num_calls=1),
            (result,),
        ),
        _Talk("tool after a thought and a call", (question,), thought_call, (result,)),
        _Talk("two results after two calls", (question,), two_calls, results),
        _Talk(
            "second turn of tools",
            (*system, question, thought_call, result),
            thought_call,
            (result,),
        ),
        _Talk(
            "user after a turn of tools",
            (question, thought_call, result),
            thought_answer,
            (again,),
        ),
        _Talk(
            "tool in a user's second turn",
            (question, call, result, answer, again),
            call,
            (result,),
        ),
        _Talk(
            "user after a cut answer", (question,), _make_answer("It is"), (again,), has_stop=False
        ),
        _Talk("user after spaces", (question,), _make_answer("  It is 3. \n"), (again,)),
        _Talk("tool's result and user", (question,), call, (result, again)),
    ]


def _make_answer(text: str, thought: str | None = None, num_calls: int = 0) -> Message:
    """Return a message of an assistant. Templates know a thought under two names."""
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message |= {"reasoning_content": thought, "thinking": thought}
    if num_calls:
        message["tool_calls"] = [_make_call(index) for index in range(num_calls)]
    return message


def _make_call(index: int) -> Mapping[str, Any]:
    """Return the call of a tool. Some templates take ids of nine characters only."""
    function = {"name": "add", "arguments": {"a": index, "b": 2}}
    return {"id": f"call0000{index}", "type": "function", "function": function}


def _make_result(index: int) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{index}", "content": "3"}
