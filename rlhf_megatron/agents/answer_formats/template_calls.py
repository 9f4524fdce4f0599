"""Finds the format in which a chat template writes calls, and the shape in which it takes them, by
letting it render made-up calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_megatron.agents.answer_formats.call_texts import Tools, quote_beginning
from rlhf_megatron.agents.answer_formats.parsed_answer import (
    ANSWER_FORMATS,
    AnswerFormat,
)
from rlhf_megatron.agents.template_suffix import SPELLINGS, CallSpelling
from rlhf_megatron.data.chat_template import DATE_FUNCTION, make_chat_format
from rlhf_megatron.data.tokenizer import Tokenizer

# how a template takes calls: content "" or null where a message has none, and arguments as an
# object or as JSON text
CallShape = CallSpelling
Messages = Sequence[Mapping[str, Any]]
# messages, tools, and whether the prompt for an answer is written at the end -> text; it raises
# ValueError where the template refuses the messages
RenderFunction = Callable[[Messages, Tools | None, bool], str]

PLAIN = "plain"
# stand in made-up messages; no template writes them
QUESTION_MARK = "QZX4XZQ"
ARGUMENT_MARK = "QZX5XZQ"
RESULT_MARK = "QZX6XZQ"
TOOL_NAME = "made_up_tool"
ARGUMENTS: dict[str, Any] = {"text": ARGUMENT_MARK, "number": 5, "list": [1, "a"]}
MADE_UP_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "number": {"type": "integer"},
                    "list": {"type": "array"},
                },
                "required": ["text"],
            },
        },
    },
)
# Mistral's templates take nine letters and digits; Kimi K2's write the id in place of the name
CALL_IDS = ("call00001", f"functions.{TOOL_NAME}:0")
LEFT_OUT = "leaves out"
MADE_UP_DAY = "2025-01-31"  # for templates that write today's date
OPEN_THOUGHT = re.compile(
    r"(?:<think>|\[THINK\]|<\|channel>thought|<\|channel\|>analysis<\|message\|>)\s*\Z"
)


def is_thought_open(prompt: str) -> bool:
    """Return whether a prompt for an answer ends with the beginning of a thought, so that the
    answer begins within it.
    """
    return OPEN_THOUGHT.search(prompt[-200:]) is not None


def choose_answer_format(
    tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None
) -> AnswerFormat:
    """Return the format of answers that the tokenizer's chat template writes: the first that reads
    a made-up call out of what the template writes of it. The plain format, where there is no
    template or the template writes no calls. `template_kwargs`: the run's variables of the
    template.

    Raise ValueError where the template writes calls that no format reads, and as
    `make_chat_format` does.
    """
    end_texts = [tokenizer.decode_with_special_tokens([i]) for i in tokenizer.eos_token_ids]
    plain_format: AnswerFormat = ANSWER_FORMATS.get(PLAIN).build(end_texts)
    if tokenizer.chat_template is None:
        return plain_format
    variables = dict(template_kwargs or {})
    if DATE_FUNCTION in tokenizer.chat_template:
        variables.setdefault(DATE_FUNCTION, MADE_UP_DAY)
    chat = make_chat_format(tokenizer, None, variables)

    def render(messages: Messages, tools: Tools | None, has_answer_prompt: bool) -> str:
        """Return the text of messages."""
        return chat.render_conversation(messages, has_answer_prompt, tools)

    written_call = ""
    formats = [ANSWER_FORMATS.get(name).build(end_texts) for name in _list_format_names()]
    for answer_text, is_open in _write_made_up_calls(render):
        written_call = written_call or answer_text
        for answer_format in formats:
            answer = answer_format.parse_answer(answer_text, is_open, MADE_UP_TOOLS)
            calls = [(call.name, call.arguments) for call in answer.calls]
            if calls == [(TOOL_NAME, ARGUMENTS)] and not answer.broken_calls:
                return answer_format
    if written_call:
        known = ", ".join(ANSWER_FORMATS)
        raise ValueError(
            "the chat template writes calls of tools in a format that is not known:"
            f" {quote_beginning(written_call)}; register a format that reads them, in a file that"
            f" plugins: names. Known: {known}."
        )
    return plain_format


def choose_call_shape(render: RenderFunction) -> CallShape | None:
    """Return the first shape of calls in which the template writes a made-up call and its result;
    None where it does in none, and `describe_tool_problem` says why.
    """
    return next((shape for shape in SPELLINGS if not _try_call_shape(render, shape)), None)


def describe_tool_problem(render: RenderFunction) -> str:
    """Return why a template is refused for tools: what it leaves out, or its error; "" where a
    shape of calls is right.
    """
    problems = [_try_call_shape(render, shape) for shape in SPELLINGS]
    if "" in problems:
        return ""
    return next((text for text in problems if LEFT_OUT in text), problems[0])


def make_call_message(
    shape: CallShape, name: str, arguments: Mapping[str, Any], call_id: str
) -> dict[str, Any]:
    """Return an assistant's message with one call and no text, in a shape."""
    written = json.dumps(arguments, ensure_ascii=False) if shape.arguments_are_text else arguments
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
    content = None if shape.content_is_null else ""
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _list_format_names() -> list[str]:
    """Return the names of all formats, a user's own before those of this package."""
    package = __name__.rpartition(".")[0]

    def is_of_this_package(name: str) -> bool:
        """Return whether the format's class stands in this package."""
        return bool(ANSWER_FORMATS.get(name).build.__module__.startswith(package))

    return sorted(ANSWER_FORMATS, key=is_of_this_package)


def _try_call_shape(render: RenderFunction, shape: CallShape) -> str:
    """Return what stands against a shape of calls; "" where the template writes the call and its
    result.
    """
    problem = ""
    for call_id in CALL_IDS:
        talk = [*_make_talk(shape, call_id), _make_result(call_id)]
        try:
            text = render(talk, MADE_UP_TOOLS, True)
        except ValueError as error:
            problem = problem or f"the chat template refuses a call of a tool: {error}"
            continue
        if ARGUMENT_MARK not in text:
            return f"the chat template {LEFT_OUT} calls of tools"
        if f"'text': '{ARGUMENT_MARK}'" in text:
            return "the chat template writes arguments of calls as Python shows objects"
        if RESULT_MARK not in text:
            return f"the chat template {LEFT_OUT} the results of tools"
        return ""
    return problem


def _write_made_up_calls(render: RenderFunction) -> Iterator[tuple[str, bool]]:
    """Yield the made-up call as the template writes it in each shape that shows it, and whether the
    prompt opens the thought. Each is the text behind the prompt for an answer, where the template
    keeps that prompt, and then the text behind the question.
    """
    for shape in SPELLINGS:
        for call_id in CALL_IDS:
            talk = _make_talk(shape, call_id)
            try:
                prompt = render(talk[:1], MADE_UP_TOOLS, True)
                text = render(talk, MADE_UP_TOOLS, False)
            except ValueError:
                continue
            if ARGUMENT_MARK not in text:
                continue
            if text.startswith(prompt):
                yield text.removeprefix(prompt), is_thought_open(prompt)
            yield text.rpartition(QUESTION_MARK)[2], False


def _make_talk(shape: CallShape, call_id: str) -> list[dict[str, Any]]:
    """Return a question and an answer that calls the made-up tool."""
    return [
        {"role": "user", "content": QUESTION_MARK},
        make_call_message(shape, TOOL_NAME, ARGUMENTS, call_id),
    ]


def _make_result(call_id: str) -> dict[str, Any]:
    """Return the made-up result of the call."""
    return {"role": "tool", "content": RESULT_MARK, "name": TOOL_NAME, "tool_call_id": call_id}
