"""What a run says at its start about the joins of its tokenizer and template."""

from __future__ import annotations

from pathlib import Path

import pytest
from join_talks import make_template_format
from published_templates import PUBLISHED

from rlhf_megatron.agents.dialogue import DialogueFormat, make_dialogue_format
from rlhf_megatron.agents.join_check import JoinCheck, check_joins, describe_joins
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.tokenizer import load_tokenizer, write_character_tokenizer

KINDS = (
    "user after an answer",
    "user after an answer with a thought",
    "user after an answer with an empty thought",
    "third turn of a user",
    "tool after a call",
    "tool after text and a call",
    "tool after a thought and a call",
    "two results after two calls",
    "second turn of tools",
    "user after a turn of tools",
    "tool in a user's second turn",
    "user after a cut answer",
    "user after spaces",
    "tool's result and user",
)
WITH_TOOLS = {kind for kind in KINDS if "tool" in kind or "calls" in kind}
# behind a plain answer it does not count that a template left out an earlier call
BEHIND_CALLS = WITH_TOOLS - {"user after a turn of tools"}
# a family -> the kinds that are refused, and words of the reason
REFUSED: dict[str, tuple[set[str], str]] = {
    "qwen3": (set(), ""),
    "glm45": (set(), ""),
    "deepseek_v3": (set(), ""),
    "mistral": (set(), ""),
    "llama3": (BEHIND_CALLS, "leaves out the calls of an answer"),
    "llama31": ({"two results after two calls"}, "leaves out the calls of an answer"),
    "gpt_oss": ({"two results after two calls"}, "leaves out the calls of an answer"),
    "hermes": (set(KINDS) - WITH_TOOLS, "'NoneType' object is not iterable"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_kinds_of_known_templates(family: str) -> None:
    template, stops, _ = PUBLISHED[family]
    checks = check_joins(make_template_format(template, stops))
    assert tuple(check.kind for check in checks) == KINDS
    refused_kinds, words = REFUSED[family]
    assert {check.kind for check in checks if not check.is_exact} == refused_kinds
    for check in checks:
        assert (words in check.reason) if not check.is_exact else check.reason == ""


def test_a_run_with_a_system_prompt() -> None:
    """The talks have no system message of their own then."""
    template, stops, _ = PUBLISHED["qwen3"]
    made = make_template_format(template, stops)
    chat = make_chat_format(made.tokenizer, "Be short.", {})
    checks = check_joins(DialogueFormat(made.tokenizer, chat, made.stop_token_ids))
    assert [check for check in checks if not check.is_exact] == []


def test_a_template_that_ends_no_call_is_refused_behind_calls() -> None:
    """As DeepSeek R1's: a single call is followed by the tool's result at once."""
    template = """{%- for m in messages %}
        {%- if m.tool_calls %}{{- 'call ' + m.tool_calls[0].function.arguments.a|string }}
        {%- elif m.role == 'tool' %}{{- '<|result|>' + m.content }}
        {%- else %}{{- '<|' + m.role + '|>' + m.content }}
            {{- '<|end|>' if m.role == 'assistant' }}{%- endif %}
    {%- endfor %}"""
    checks = check_joins(make_template_format(template, ["<|end|>"]))
    refused = {check.kind: check.reason for check in checks if not check.is_exact}
    with_calls_last = {
        "tool after a call",
        "tool after a thought and a call",
        "second turn of tools",
        "tool in a user's second turn",
        "tool's result and user",
    }
    assert with_calls_last <= set(refused)
    assert "ends it with no token: it goes on with '<|result|>" in refused["tool after a call"]
    assert "user after a turn of tools" not in refused


def test_plain_text_has_two_kinds(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    checks = check_joins(make_dialogue_format(load_tokenizer(tmp_path), DataConfig(), []))
    assert checks == (
        JoinCheck("user after an answer", True, ""),
        JoinCheck("user after a cut answer", True, ""),
    )


def test_lines_name_what_is_exact_and_what_is_refused_for_which_reason() -> None:
    exact = JoinCheck("user after an answer", True, "")
    first = JoinCheck("tool after a call", False, "the chat template ends no call.")
    second = JoinCheck("second turn of tools", False, "the chat template ends no call.")
    other = JoinCheck("two results after two calls", False, "only one call.")
    assert describe_joins([exact]) == [
        "all 1 kinds of next messages that were tried have exact joins"
    ]
    assert describe_joins([exact, first, other, second]) == [
        "1 of 4 kinds of next messages that were tried have exact joins: user after an answer",
        "refused, which ends an episode: tool after a call, second turn of tools: the chat template"
        " ends no call.",
        "refused, which ends an episode: two results after two calls: only one call.",
    ]
    assert describe_joins([first])[0] == "no kind of next message that was tried has an exact join"
