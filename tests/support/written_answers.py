"""Answers with calls as chat templates write them, from messages with random arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import tokenizers

from rlhf_megatron.agents.answer_formats.call_texts import name_type
from rlhf_megatron.agents.answer_formats.parsed_answer import AnswerFormat, ParsedAnswer
from rlhf_megatron.agents.answer_formats.template_calls import (
    MADE_UP_DAY,
    CallShape,
    choose_answer_format,
    choose_call_shape,
    is_thought_open,
    make_call_message,
)
from rlhf_megatron.data.chat_template import DATE_FUNCTION, ChatFormat, make_chat_format
from rlhf_megatron.data.tokenizer import Tokenizer

# the beginning or the whole of an empty thought, with which some prompts end
PROMPT_THOUGHT = re.compile(r"(?:<think>)?\s*(?:</think>\s*)?\Z")
EASY_TEXTS = (
    *("Paris", "two words", "naïve 東京 🙂", "1", "true", "null", "", "x < y & z > 0", "a=b;c"),
    *("{x}", "[1, 2]", "3.50"),
)
# some templates write texts in quotes and escape nothing
TEXTS_TO_ESCAPE = (
    *("it's", 'a "quoted" word', "two\nlines", "tab\there", "back\\slash \\n", "</x>\n"),
    *("\n edges \n", '{"name": "f", "arguments": {}}', "\u2028 \x7f", "', y='2"),
)
CONTENTS = ("", "Look: 東京", "text of\ntwo lines")
THOUGHTS = ("", "I think.\nYes")


@dataclass(frozen=True)
class TemplateCalls:
    """A chat template with the format that it writes."""

    chat: ChatFormat
    answer_format: AnswerFormat
    shape: CallShape | None


def make_tokenizer(template: str, end_text: str) -> Tokenizer:
    """A tokenizer with one token, which ends answers, for tests that make no ids."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, end_text: 1}))
    backend.add_special_tokens([end_text])
    return Tokenizer(backend, (1,), 0, template, {"bos_token": "<bos>", "eos_token": end_text})


def look_at_template(tokenizer: Tokenizer) -> TemplateCalls:
    """The format and the shape of calls that are chosen for a tokenizer's template."""
    assert tokenizer.chat_template is not None
    writes_date = DATE_FUNCTION in tokenizer.chat_template
    chat = make_chat_format(tokenizer, None, {DATE_FUNCTION: MADE_UP_DAY} if writes_date else {})

    def render(messages: Any, tools: Any, has_answer_prompt: bool) -> str:
        return chat.render_conversation(messages, has_answer_prompt, tools)

    return TemplateCalls(chat, choose_answer_format(tokenizer), choose_call_shape(render))


def make_value(rng: Random, texts: Sequence[str], depth: int = 0) -> Any:
    """A random value of JSON."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(texts)
    if kind == 2:
        return rng.choice((0, -7, 12345678901234567890))
    if kind == 3:
        return rng.choice((0.5, -2.25e-7, 1e22, 3.0))
    if kind == 4:
        return rng.choice((True, False))
    if kind == 5:
        return None
    if kind == 6:
        return [make_value(rng, texts, depth + 1) for _ in range(rng.randrange(4))]
    return {f"k{i}": make_value(rng, texts, depth + 1) for i in range(rng.randrange(4))}


def make_calls(rng: Random, num_calls: int, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Names and arguments of calls, each of another tool."""
    return [
        {
            "name": f"tool_{i}",
            "arguments": {f"a{j}": make_value(rng, texts) for j in range(rng.randrange(5))},
        }
        for i in range(num_calls)
    ]


def describe_tools(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of calls, with the types of the calls' arguments."""
    return [
        {
            "type": "function",
            "function": {
                "name": call["name"],
                "description": "d",
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": name_type(value)} for key, value in call["arguments"].items()
                    },
                },
            },
        }
        for call in calls
    ]


def write_answer(
    template: TemplateCalls, calls: Sequence[dict[str, Any]], content: str, thought: str
) -> tuple[str, bool]:
    """The answer as the template writes it, and whether its prompt has opened the thought. Raises
    ValueError where the template refuses the calls.
    """
    assert template.shape is not None
    messages = [
        make_call_message(
            template.shape, call["name"], call["arguments"], make_call_id(template, i)
        )
        for i, call in enumerate(calls, start=1)
    ]
    answer = dict(messages[0])
    answer["tool_calls"] = [message["tool_calls"][0] for message in messages]
    if content:
        answer["content"] = content
    if thought:
        answer |= {"reasoning_content": thought, "thinking": thought}
    question = {"role": "user", "content": "u"}
    tools = describe_tools(calls)
    prompt = template.chat.render_conversation([question], True, tools)
    text = template.chat.render_conversation([question, answer], False, tools)
    if text.startswith(prompt):
        return text.removeprefix(prompt), is_thought_open(prompt)
    closed_prompt = PROMPT_THOUGHT.sub("", prompt)
    assert text.startswith(closed_prompt), (prompt[-80:], text[-400:])
    return text.removeprefix(closed_prompt), False


def make_call_id(template: TemplateCalls, number: int) -> str:
    """The id of a call: templates take nine letters and digits, or Kimi's own form."""
    if template.answer_format.name == "kimi_k2":
        return f"functions.tool_{number - 1}:{number - 1}"
    return f"call{number:05d}"


def name_calls(answer: ParsedAnswer) -> list[dict[str, Any]]:
    """The names and arguments of an answer's calls."""
    return [{"name": call.name, "arguments": call.arguments} for call in answer.calls]


def find_unequal_answer(
    template: TemplateCalls, texts: Sequence[str], num_answers: int, most_calls: int
) -> str:
    """Write random answers and read them back. What the first unequal one is; "" where all are
    equal: the calls, and the content and the thought where the template writes them.
    """
    for seed in range(num_answers):
        rng = Random(seed)
        calls = make_calls(rng, 1 + seed % most_calls, texts)
        content = rng.choice(CONTENTS)
        thought = rng.choice(THOUGHTS)
        try:
            text, is_open = write_answer(template, calls, content, thought)
        except ValueError:  # GPT-OSS's takes no content beside a thought
            text, is_open = write_answer(template, calls, "", thought)
            content = ""
        answer = template.answer_format.parse_answer(text, is_open, describe_tools(calls))
        is_content_equal = answer.content == (content if content in text else "")
        is_thought_equal = answer.reasoning == (thought if thought in text else "")
        # GPT-OSS's writes the content of an answer with calls as a thought
        is_moved = content != "" and answer.reasoning == content and answer.content == ""
        if (
            name_calls(answer) != calls
            or answer.broken_calls
            or not (is_moved or (is_content_equal and is_thought_equal))
        ):
            return f"{calls} {content!r} {thought!r}\nas {text!r}\nread as {answer}"
    return ""
