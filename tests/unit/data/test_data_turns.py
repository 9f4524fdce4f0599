"""What trains of a conversation, by the templates of eleven models: exact text, or refused
with what differs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from published_templates import PUBLISHED, write_published

from rlhf_megatron.data.assistant_turns import ConversationDocuments, tokenize_conversation
from rlhf_megatron.data.chat_template import ChatFormat, make_chat_format
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def calls(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "id": "a1b2c3d4e", "function": {"name": "add", "arguments": arguments}}
    ]


def with_tools(arguments: Any, **others: Any) -> list[dict[str, Any]]:
    return [user("17+x?"), says("", tool_calls=calls(arguments), **others),
            {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "3"},
            says("It is 3.")]  # fmt: skip


THOUGHTS = ("reasoning_content", "thinking")
PLAIN = [user("Hi"), says("Hello!"), user("2+2?"), says("4")]
SYSTEM = [{"role": "system", "content": "Be brief."}, *PLAIN]
THINKING = [user("Hi"), says("Hello!", **dict.fromkeys(THOUGHTS, "greet")), user("2+2?"),
            says("4", **dict.fromkeys(THOUGHTS, "sum"))]  # fmt: skip
INLINE = [user("Hi"), says("<think>\ngreet\n</think>\n\nHello!")]
TOOLS = with_tools({"a": 17, "b": "x y"})
TEXT_TOOLS = with_tools('{"a": 17}')
TOOLS_THINKING = with_tools({"a": 17, "b": "x y"}, **dict.fromkeys(THOUGHTS, "look"))
CHATS = (PLAIN, SYSTEM, THINKING, INLINE, TOOLS, TEXT_TOOLS, TOOLS_THINKING)
CAN_CALL = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
ANALYSIS, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final"))
EMPTY = "<think>\n\n</think>\n\n"
ARGUMENTS = '{"a": 17, "b": "x y"}'
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": ' + ARGUMENTS + "}\n</tool_call><|im_end|>"
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>17</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x y"
)
GLM_CALL += "</arg_value>\n</tool_call><|observation|>"
MISTRAL_CALL = (
    '[TOOL_CALLS] [{"name": "add", "arguments": ' + ARGUMENTS + ', "id": "a1b2c3d4e"}]<|eos|>'
)
OSS_CALL = f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"


def chat_of(
    directory: Path, family: str, template: str | None = None
) -> tuple[Tokenizer, ChatFormat]:
    tokenizer = load_tokenizer(write_published(directory, family, template))
    has_day = "strftime_now" in (tokenizer.chat_template or "")
    return tokenizer, make_chat_format(
        tokenizer, None, {"strftime_now": "2025-01-31"} if has_day else {}
    )


def tools_for(family: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Those of GPT-OSS are written by a page of macros, which has nothing to do with turns."""
    return (
        CAN_CALL
        if messages in (TOOLS, TEXT_TOOLS, TOOLS_THINKING) and family != "gpt_oss"
        else None
    )


def trained(
    directory: Path, family: str, messages: list[dict[str, Any]]
) -> tuple[ConversationDocuments, list[list[str]]]:
    """The turns, and the text of each stretch that trains, by document."""
    tokenizer, chat = chat_of(directory, family)
    tools = tools_for(family, messages)
    turns = tokenize_conversation(
        messages, lambda part, asks: chat.render_conversation(part, asks, tools), tokenizer
    )
    return turns, [
        [tokenizer.decode_with_special_tokens(d.token_ids[b:e]) for b, e in d.trained_spans]
        for d in turns.documents
    ]


WHOLE = True
BY_TURN = False
EXPECTED = [
    ("llama3", PLAIN, WHOLE, [["Hello!<|eot_id|>", "4<|eot_id|>"]]),
    ("llama3", SYSTEM, WHOLE, [["Hello!<|eot_id|>", "4<|eot_id|>"]]),
    ("llama31", SYSTEM, WHOLE, [["Hello!<|eot_id|>", "4<|eot_id|>"]]),
    ("llama31", TOOLS, WHOLE,
     [['{"name": "add", "parameters": ' + ARGUMENTS + "}<|eot_id|>", "It is 3.<|eot_id|>"]]),
    ("qwen25", PLAIN, WHOLE, [["Hello!<|im_end|>", "4<|im_end|>"]]),
    ("qwen25", SYSTEM, WHOLE, [["Hello!<|im_end|>", "4<|im_end|>"]]),
    ("qwen3", PLAIN, BY_TURN, [[f"{EMPTY}Hello!<|im_end|>"], [f"{EMPTY}4<|im_end|>"]]),
    ("qwen3", THINKING, BY_TURN,
     [["<think>\ngreet\n</think>\n\nHello!<|im_end|>"], ["<think>\nsum\n</think>\n\n4<|im_end|>"]]),
    ("qwen3", INLINE, WHOLE, [["<think>\ngreet\n</think>\n\nHello!<|im_end|>"]]),
    ("qwen3", TOOLS, BY_TURN, [[EMPTY + QWEN_CALL], [f"{EMPTY}It is 3.<|im_end|>"]]),
    ("qwen3", TOOLS_THINKING, WHOLE,
     [["<think>\nlook\n</think>\n\n" + QWEN_CALL, f"{EMPTY}It is 3.<|im_end|>"]]),
    ("mistral", PLAIN, WHOLE, [[" Hello!<|eos|>", " 4<|eos|>"]]),
    ("mistral", TOOLS, WHOLE,
     [[MISTRAL_CALL, " It is 3.<|eos|>"]]),
    ("glm45", PLAIN, WHOLE, [["\n<think></think>\nHello!<|user|>", "\n<think></think>\n4<|eos|>"]]),
    ("glm45", THINKING, BY_TURN,
     [["\n<think>greet</think>\nHello!<|eos|>"], ["\n<think>sum</think>\n4<|eos|>"]]),
    ("glm45", TOOLS, WHOLE,
     [["\n<think></think>\n" + GLM_CALL, "\n<think></think>\nIt is 3.<|eos|>"]]),
    ("gpt_oss", PLAIN, BY_TURN, [[f"{FINAL}Hello!<|return|>"], [f"{FINAL}4<|return|>"]]),
    ("gpt_oss", THINKING, BY_TURN,
     [[f"{ANALYSIS}greet<|end|><|start|>assistant{FINAL}Hello!<|return|>"],
      [f"{ANALYSIS}sum<|end|><|start|>assistant{FINAL}4<|return|>"]]),
    ("gpt_oss", TOOLS, WHOLE, [[OSS_CALL, f"{FINAL}It is 3.<|return|>"]]),
    ("phi3", SYSTEM, WHOLE, [["Hello!<|end|>", "4<|end|>"]]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "is_whole", "expected"), EXPECTED)
def test_what_trains(
    family: str,
    messages: list[dict[str, Any]],
    is_whole: bool,
    expected: list[list[str]],
    tmp_path: Path,
) -> None:
    turns, found = trained(tmp_path, family, messages)
    assert (turns.is_single_document, found) == (is_whole, expected)
    added = (
        sum(text.endswith("<|eos|>") for document in expected for text in document)
        if family == "glm45"
        else 0
    )
    assert turns.num_stops_added == added  # behind its last turn stands no role


PROMPT_THINKS = r"message 2: .*the prompt goes on with '<think>..', the conversation with "
REFUSED = [
    ("deepseek_v3", PLAIN, PROMPT_THINKS + "'Hello!"),
    ("deepseek_v3", TEXT_TOOLS,
     r"message 2: .* goes on with 'think>..', the conversation with '｜tool▁calls▁begin｜>"),
    ("deepseek_v3", TOOLS, "the chat template refuses the prompt"),
    ("deepseek_r1", THINKING, PROMPT_THINKS + "'Hello!"),
    ("hermes", TOOLS,
     r"message 4: .*the prompt goes on with '<.im_end.>.*', the conversation with '.n<.im_end.>"),
    ("gpt_oss", TOOLS_THINKING,
     (
         r"message 4: .* goes on with '<.channel.>analysis.*', the conversation with"
         r" ' to=functions.add"
     )),
    ("llama3", TOOLS, r"leaves out or changes a tool call \('add' is not in"),
    ("phi3", TOOLS, r"leaves out or changes a tool call"),
    ("mistral",
     [user("Hi"),
      says("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}])],
     "Tool call IDs should be alphanumeric strings with length 9"),
    ("qwen25", TEXT_TOOLS, r'arguments of a tool call as "{..a..: 17}"; write them as an object'),
    ("qwen25", [user("Hi")], r"no message of an assistant"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "what"), REFUSED)
def test_what_is_refused(
    family: str, messages: list[dict[str, Any]], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=what):
        trained(tmp_path, family, messages)


def test_the_call_of_qwen25_begins_where_its_prompt_ends(tmp_path: Path) -> None:
    """Its template puts no newline before a call without words, and the prompt ends with one."""
    _, found = trained(tmp_path, "qwen25", TOOLS)
    assert found == [[QWEN_CALL, "It is 3.<|im_end|>"]]


def test_texts_of_calls_are_found_as_json_writes_them(tmp_path: Path) -> None:
    """With letters beyond ASCII and what JSON escapes. An object as Python writes it is no JSON."""
    messages = with_tools({"a": 'é "x"\n', "b": [1.5, {"c": None}], "d": True})
    _, found = trained(tmp_path, "qwen25", messages)
    arguments = '{"a": "é \\"x\\"\\n", "b": [1.5, {"c": null}], "d": true}'
    assert (
        found[0][0]
        == f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    )
    tokenizer = load_tokenizer(write_published(tmp_path / "other", "qwen25"))

    def render(messages: Any, asks: bool) -> str:
        called = [
            call["function"] for message in messages for call in message.get("tool_calls", ())
        ]
        return "q: " + "".join(f"{call['name']} {call['arguments']}<|im_end|>" for call in called)

    with pytest.raises(
        ValueError, match=r"tool call as {'a': 17, 'b': 'x y'}; write them as JSON text"
    ):
        tokenize_conversation(TOOLS[:2], render, tokenizer)


def test_lost_thoughts_are_counted(tmp_path: Path) -> None:
    assert trained(tmp_path, "qwen25", THINKING)[0].num_thoughts_lost == 2
    tokenizer = load_tokenizer(write_published(tmp_path / "cut", "qwen25"))

    def render(messages: Any, asks: bool) -> str:
        return "".join(
            f"{m['role']}: {m['content'].split('</think>')[-1]}<|im_end|>" for m in messages
        )

    assert tokenize_conversation(INLINE, render, tokenizer).num_thoughts_lost == 1
    assert trained(tmp_path / "other", "qwen3", THINKING)[0].num_thoughts_lost == 0


def test_an_answer_that_the_template_changes_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))

    def render(messages: Any, asks: bool) -> str:
        said = "".join(f"{m['role']}: {m['content'].upper()}<|im_end|>" for m in messages)
        return said + ("assistant: " if asks else "")

    with pytest.raises(ValueError, match=r"leaves out or changes the answer \('Hello!' is not in"):
        tokenize_conversation([user("Hi"), says("<think>no</think>Hello!")], render, tokenizer)


def test_a_border_inside_of_a_token_is_refused(tmp_path: Path) -> None:
    """The prompt ends with a space, which the tokenizer joins with the answer."""
    tokenizer = load_tokenizer(write_published(tmp_path, "qwen25"))

    def render(messages: Any, asks: bool) -> str:
        return "".join(f"{m['role'][0]}: {m['content']}<|im_end|>" for m in messages) + (
            "a: " if asks else ""
        )

    assert len(tokenizer.encode(" assistant")) < len(tokenizer.encode(" ")) + len(
        tokenizer.encode("assistant")
    )
    with pytest.raises(ValueError, match=r"inside of the token ' a"):
        tokenize_conversation([user("Hi"), says("assistant")], render, tokenizer)


def test_every_model_is_asked() -> None:
    assert {row[0] for row in (*EXPECTED, *REFUSED)} == set(PUBLISHED)


TRL = importlib.util.find_spec("trl")


@pytest.mark.skipif(
    TRL is None, reason="the package trl, which has published templates, is not installed"
)
@pytest.mark.parametrize(
    "family", [name for name, (_, _, file) in PUBLISHED.items() if file is not None]
)
def test_typed_templates_write_what_the_published_ones_write(family: str, tmp_path: Path) -> None:
    assert TRL is not None and TRL.submodule_search_locations is not None
    path = (
        Path(TRL.submodule_search_locations[0]) / "chat_templates" / f"{PUBLISHED[family][2]}.jinja"
    )
    _, typed = chat_of(tmp_path / "typed", family)
    _, published = chat_of(tmp_path / "published", family, path.read_text(encoding="utf-8"))

    def text(chat: ChatFormat, messages: list[dict[str, Any]], asks: bool) -> str | None:
        try:
            return chat.render_conversation(messages, asks, tools_for(family, messages))
        except ValueError:
            return None

    for messages in CHATS:
        for count in range(1, len(messages) + 1):
            for asks in (True, False):
                part = messages[:count]
                assert text(typed, part, asks) == text(published, part, asks), (part, asks)
