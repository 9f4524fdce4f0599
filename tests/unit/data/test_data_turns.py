"""What trains of a conversation, by the templates of eight families: exact text, or refused with what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, write_family

from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.data.turns import Turns, turns_of


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": "x y"}}}]
PLAIN = [user("Hi"), says("Hello!"), user("2+2?"), says("4")]
THINKING = [user("Hi"), says("Hello!", **dict.fromkeys(("reasoning_content", "thinking"), "greet")), user("2+2?"),
            says("4", **dict.fromkeys(("reasoning_content", "thinking"), "sum"))]  # fmt: skip
TOOLS = [user("17+x?"), says("", tool_calls=CALL), {"role": "tool", "content": "3"}, says("It is 3.")]
ANALYSIS, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final"))
EMPTY = "<think>\n\n</think>\n\n"
HERMES = '\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": "x y"}}\n</tool_call><|im_end|>'


def trained(directory: Path, family: str, messages: list[dict[str, Any]]) -> tuple[Turns, list[list[str]]]:
    """The turns, and the text of each stretch that trains, by document."""
    tokenizer = load_tokenizer(write_family(directory, family))
    chat = make_chat_format(tokenizer, None, {})
    turns = turns_of(messages, lambda part, asks: chat.conversation(part, asks), tokenizer)
    return turns, [[tokenizer.spell(d.token_ids[b:e]) for b, e in d.trained] for d in turns.documents]


WHOLE, BY_TURN = True, False
EXPECTED = [
    ("qwen25", PLAIN, WHOLE, [["Hello!<|im_end|>", "4<|im_end|>"]]),
    ("qwen25", TOOLS, WHOLE, [[HERMES, "It is 3.<|im_end|>"]]),
    ("qwen3", PLAIN, BY_TURN, [[f"{EMPTY}Hello!<|im_end|>"], [f"{EMPTY}4<|im_end|>"]]),
    ("qwen3", THINKING, BY_TURN,
     [["<think>\ngreet\n</think>\n\nHello!<|im_end|>"], ["<think>\nsum\n</think>\n\n4<|im_end|>"]]),
    ("qwen3", TOOLS, WHOLE, [[EMPTY + HERMES, f"{EMPTY}It is 3.<|im_end|>"]]),
    ("llama3", PLAIN, WHOLE, [["Hello!<|eot_id|>", "4<|eot_id|>"]]),
    ("mistral", PLAIN, WHOLE, [[" Hello!<|eos|>", " 4<|eos|>"]]),
    ("glm4", PLAIN, WHOLE, [["Hello!<|user|>", "4<|eos|>"]]),
    ("glm4", TOOLS, WHOLE, [["<tool_call>add\na=17\nb=x y</tool_call><|observation|>", "It is 3.<|eos|>"]]),
    ("gpt_oss", PLAIN, BY_TURN, [[f"{FINAL}Hello!<|return|>"], [f"{FINAL}4<|return|>"]]),
    ("gpt_oss", THINKING, BY_TURN,
     [[f"{ANALYSIS}greet<|end|><|start|>assistant{FINAL}Hello!<|return|>"],
      [f"{ANALYSIS}sum<|end|><|start|>assistant{FINAL}4<|return|>"]]),
    ("phi3", PLAIN, WHOLE, [["Hello!<|end|>", "4<|end|>"]]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "is_whole", "expected"), EXPECTED)
def test_what_trains(
    family: str, messages: list[dict[str, Any]], is_whole: bool, expected: list[list[str]], tmp_path: Path
) -> None:
    turns, found = trained(tmp_path, family, messages)
    assert (turns.is_whole, found) == (is_whole, expected)
    assert turns.num_stops_added == (1 if family == "glm4" else 0)  # behind its last turn stands no role


@pytest.mark.parametrize(
    ("family", "messages", "what"),
    [
        ("deepseek_r1", PLAIN, r"message 2: .*the prompt goes on with '<think>..', the conversation with 'Hello!"),
        ("llama3", TOOLS, r"leaves out or changes a tool call \('add' is not in"),
        ("mistral", TOOLS, r"leaves out or changes a tool call"),
        ("qwen25", [user("Hi")], r"no message of an assistant"),
    ],
)
def test_what_is_refused(family: str, messages: list[dict[str, Any]], what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=what):
        trained(tmp_path, family, messages)


def test_lost_thoughts_are_counted(tmp_path: Path) -> None:
    assert trained(tmp_path, "qwen25", THINKING)[0].num_thoughts_lost == 2
    assert trained(tmp_path / "other", "qwen3", THINKING)[0].num_thoughts_lost == 0


def test_a_border_inside_of_a_token_is_refused(tmp_path: Path) -> None:
    """The prompt ends with a space, which the tokenizer joins with the answer."""
    tokenizer = load_tokenizer(write_family(tmp_path, "qwen25"))

    def render(messages: Any, asks: bool) -> str:
        return "".join(f"{m['role'][0]}: {m['content']}<|im_end|>" for m in messages) + ("a: " if asks else "")

    assert len(tokenizer.encode(" assistant")) < len(tokenizer.encode(" ")) + len(tokenizer.encode("assistant"))
    with pytest.raises(ValueError, match=r"inside of the token ' a"):
        turns_of([user("Hi"), says("assistant")], render, tokenizer)


def test_every_family_is_asked() -> None:
    assert {row[0] for row in EXPECTED} | {"deepseek_r1"} == set(FAMILIES)
