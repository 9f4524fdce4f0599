"""Parts of answers: texts that end at stops, characters of several tokens, calls of tools, requests
that are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.tokenizer import (
    UNKNOWN_TOKEN_TEXT,
    Tokenizer,
    load_tokenizer,
    write_character_tokenizer,
)
from rlhf_megatron.jobs.serving.growing_choices import (
    TOOL_CALL,
    ChoicePart,
    GrowingText,
    join_choice_parts,
    split_tool_calls,
)
from rlhf_megatron.jobs.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    ServedModel,
    check_request,
    parse_request,
    render_chat_prompt,
)


class Spelled:
    """A tokenizer of which token 9 is the first byte of a character, 8 and 9 together are
    that character.
    """

    def decode(self, ids: list[int]) -> str:
        text = "".join("abcdefgh<9"[i] for i in ids)
        return text.replace("99", "ß").replace("9", UNKNOWN_TOKEN_TEXT)


def grown(text: GrowingText, parts: list[list[int]]) -> list[tuple[str, int | None]]:
    return [text.append_tokens(part, number == len(parts) - 1) for number, part in enumerate(parts)]


def test_text_is_given_out_as_far_as_it_is_certain() -> None:
    spelled: Tokenizer = Spelled()  # type: ignore[assignment]
    assert grown(GrowingText(spelled, ()), [[0, 1], [9], [9, 2]]) == [
        ("ab", None),
        ("", None),
        ("ßc", None),
    ]
    assert grown(GrowingText(spelled, ()), [[0], [9]]) == [
        ("a", None),
        (UNKNOWN_TOKEN_TEXT, None),
    ], "the end is the end"
    assert grown(GrowingText(spelled, ["cd"]), [[0, 2], [2, 1]]) == [("a", None), ("ccb", None)]
    assert grown(GrowingText(spelled, ["cd"]), [[0, 1, 2], [3, 4]]) == [("ab", None), ("", 4)], (
        "the stop is cut off"
    )
    assert grown(GrowingText(spelled, ["e", "bcd"]), [[0, 1], [2, 3, 4]]) == [
        ("a", None),
        ("", 4),
    ], "the first that is whole"
    assert grown(GrowingText(spelled, ["a"]), [[0, 1, 2]]) == [("", 1)]
    assert grown(GrowingText(spelled, (), "<a"), [[1, 8], [0, 1], [2]]) == [
        ("b", None),
        ("", None),
        ("<abc", None),
    ]


def test_calls_of_tools_are_found() -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    text, calls = split_tool_calls(
        f"I add.\n{TOOL_CALL}\n{call}\n</tool_call>{TOOL_CALL}{call}</tool_call>"
    )
    assert (
        text == "I add."
        and [c["function"] for c in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    )
    assert len({c["id"] for c in calls}) == 2
    broken = f"{TOOL_CALL}{{no JSON}}</tool_call>"
    assert split_tool_calls(broken) == (broken, []) and split_tool_calls("none") == ("none", [])


def test_parts_are_joined_with_their_versions() -> None:
    parts = [
        ChoicePart("a", (1,), (-1.0,), ((3, 0, 1),)),
        ChoicePart("b", (2, 3), (-2.0, -3.0), ((3, 1, 2), (4, 2, 3)), "stop"),
    ]
    assert join_choice_parts(parts) == ChoicePart(
        "ab", (1, 2, 3), (-1.0, -2.0, -3.0), ((3, 0, 2), (4, 2, 3)), "stop"
    )


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    write_character_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    return ServedModel("model", tokenizer, None, tokenizer.eos_token_ids, 20, 32)


def test_requests_are_read_as_openai_says(served: ServedModel) -> None:
    data = {
        "prompt": [[2, 3], "4+"],
        "n": 2,
        "max_tokens": None,
        "stop": "=",
        "seed": 5,
        "temperature": 0,
        "user": "me",
    }
    ask = check_request(parse_request(json.dumps(data).encode(), CompletionRequest, served), served)
    assert ask.prompts == ((2, 3), tuple(served.tokenizer.encode("4+"))) and (
        ask.num_choices,
        ask.seed,
    ) == (2, 5)
    assert (
        ask.sampling_params.max_new_tokens == 16
        and ask.sampling_params.stop_token_ids == (1,)
        and ask.stop_texts == ("=",)
    )
    for body, words in (
        ({"prompt": [2, "a"]}, "a list of these"),
        ({"prompt": "1" * 20}, "20 tokens; together they may be 20|20 tokens and 16"),
        ({"prompt": "1", "n": 0}, ">= 1"),
        ({"prompt": "1", "temperature": -1}, "from 0 to 100"),
        ({"prompt": "1", "stream_options": {"include_usage": True}}, "needs stream: true"),
        ({"prompt": ["1"] * 600, "n": 2, "max_tokens": 1}, "more than 1024 answers"),
        ([], "not understood"),
    ):
        with pytest.raises(RequestError, match=words):
            check_request(
                parse_request(json.dumps(body).encode(), CompletionRequest, served), served
            )
    chat = {"messages": [{"role": "user", "content": "1"}]}
    with pytest.raises(RequestError, match="no chat template"):
        check_request(parse_request(json.dumps(chat).encode(), ChatRequest, served), served)
    for more, words in (
        ({"response_format": {"type": "json_object"}}, "needs a grammar"),
        ({"top_logprobs": 2, "logprobs": True}, "the drawn token alone"),
        ({"messages": []}, ">= 1"),
    ):
        with pytest.raises(RequestError, match=words):
            parse_request(json.dumps({**chat, **more}).encode(), ChatRequest, served)


def test_nulls_and_parts_of_messages_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    """Clients send every entry of a message, and this template asks which are there. A null among
    the arguments of a call is a value.
    """
    template = (
        "{% for m in messages %}{{ m.keys() | list }}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    write_character_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    served = ServedModel("m", tokenizer, make_chat_format(tokenizer, None, {}), (1,), 40, 32)

    def render(*messages: dict[str, Any]) -> str:
        body = json.dumps({"messages": messages}).encode()
        return render_chat_prompt(parse_request(body, ChatRequest, served), served)

    plain = render({"role": "user", "content": "ab"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain == "['role', 'content']ab"
    assert render({"role": "user", "content": "ab", "name": None, "tool_calls": []}) == plain
    assert render({"role": "user", "content": parts, "tool_calls": None}) == plain
    assert render({"role": "user", "content": [{"type": "text", "text": None}, *parts]}) == plain
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    called = render({"role": "assistant", "content": None, "tool_calls": [call]})
    assert called.endswith('{"a": null}') and "None" not in called
    with pytest.raises(RequestError, match="a part of a message is no text"):
        render({"role": "user", "content": [*parts, {"type": "image_url", "image_url": "x"}]})
