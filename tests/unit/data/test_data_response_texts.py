"""What prompts write of answers, by the templates of several families without their tools, and
where decoding leaves special tokens out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from chat_templates import LLAMA, QWEN, write_chat_tokenizer

from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.response_texts import (
    ResponseReader,
    find_response_prefix,
    find_template_prefix,
)
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1_DISTILL = (
    "{% if not add_generation_prompt is defined %}"
    "{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(system_prompt='') %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}"
    "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# its last turn, and turns behind the last question, have thoughts, empty ones where there are none
QWEN3 = (
    "{%- set ns = namespace(last_query_index=messages|length - 1, is_open=true) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.is_open and message.role == 'user' %}{%- set ns.is_open = false %}"
    "{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' or message.role == 'system' %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}"
    "{%- set reasoning_content = '' %}{%- if '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index %}"
    "{{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n')"
    " + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}@PROMPT@{%- endif %}"
)
QWEN3_HYBRID = QWEN3.replace(
    "@PROMPT@",
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
)
QWEN3_THINKING = QWEN3.replace("@PROMPT@", "{{- '<think>\n' }}")
# former turns have empty thoughts, too
GLM45 = (
    "[gMASK]<sop>{%- for m in messages %}{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content.strip() }}"
    "{%- elif m.role == 'system' %}<|system|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{{- '\n<think></think>' if (enable_thinking is"
    " defined and not enable_thinking) else '' }}{%- endif %}"
)
# former turns begin with </think>, which has a letter in common with the <think> of a prompt
DEEPSEEK_V31 = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜></think>' + m.content"
    " + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{ '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content"
    " + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# only the last question has instructions behind it
LAST_QUESTION = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{{ ' Think first.' if loop.last else '' }}\n{% endfor %}{{ 'assistant: <think>\n' }}"
)
REFUSING = (
    "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    "{{ messages[0].content + ' assistant: <think>\n' }}"
)


@pytest.mark.parametrize(
    ("template", "variables", "prefix"),
    [
        (CHATML, {}, ""),
        (LLAMA, {"date_string": "26 Jul 2024"}, ""),
        (QWEN, {}, ""),
        (QWEN, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        (R1_DISTILL, {}, "<think>\n"),
        (QWEN3_HYBRID, {}, ""),
        (QWEN3_HYBRID, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        (QWEN3_THINKING, {}, "<think>\n"),
        (GLM45, {}, ""),
        (GLM45, {"enable_thinking": False}, "<think></think>"),
        (DEEPSEEK_V31, {"thinking": True}, "<think>"),
        (DEEPSEEK_V31, {"thinking": False}, "</think>"),
        (MISTRAL, {}, ""),
        (CHATML.replace("assistant\n'", "assistant\nSure, <answer>'"), {}, "Sure, <answer>"),
        (LAST_QUESTION, {}, "<think>\n"),
        (REFUSING, {}, ""),
    ],
)
@pytest.mark.parametrize("system_prompt", [None, "Answer with a <think> block."])
def test_prefixes_of_templates(
    tmp_path: Path,
    template: str,
    variables: dict[str, object],
    prefix: str,
    system_prompt: str | None,
) -> None:
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", chat_template=template))
    chat = make_chat_format(tokenizer, system_prompt, variables)
    assert find_template_prefix(chat) == prefix
    if template is REFUSING:  # a prompt tells of itself
        prefix = "<think>\n"
        chat = make_chat_format(tokenizer, None, variables)
    prompt = chat.render_prompt("What is <think> 1+1?")
    reader = ResponseReader(tokenizer, find_template_prefix(chat))
    assert reader.find_prefix(prompt) == prefix


@pytest.mark.parametrize(
    ("prompt", "prefix"),
    [
        ("1+1=", ""),
        ("User: 1+1?\nAssistant: Let me think.\n<think>", "<think>"),
        ("User: 1+1?\nAssistant: <think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("Write your thoughts in <think> and </think>", ""),
        ("[THINK]", "[THINK]"),
        ("<b>", ""),
        ("<think> 1+1=", ""),
        ("x" * 100 + "<thinking>\n", "<thinking>\n"),
    ],
)
def test_prefixes_of_plain_prompts(prompt: str, prefix: str) -> None:
    assert find_response_prefix(prompt) == prefix


def test_a_prompt_that_was_cut_has_no_prefix() -> None:
    assert find_response_prefix("<|User|>1+1=<|Assist", "Sure, ") == ""


def make_metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer that writes a blank before each word but the first of a text, as those of
    SentencePiece do.
    """
    names = ["<s>", "</s>", "<think>", "</think>", "▁one", "▁two", "three"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<s>")
    )
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in names[:4]]
    )
    return Tokenizer(backend, [1], 0)


@pytest.mark.parametrize(
    ("token_ids", "text", "places"),
    [
        ((4, 5), "one two", ()),
        ((4, 5, 1), "one two", ((7, "</s>"),)),
        ((2, 4, 3, 5, 6, 1), "one twothree", ((0, "<think>"), (3, "</think>"), (12, "</s>"))),
        ((3, 3, 4, 1, 1), "one", ((0, "</think>"),) * 2 + ((3, "</s>"),) * 2),
        ((2,), "", ((0, "<think>"),)),
        ((), "", ()),
    ],
)
def test_places_of_special_tokens(
    token_ids: tuple[int, ...], text: str, places: tuple[tuple[int, str], ...]
) -> None:
    reader = ResponseReader(make_metaspace_tokenizer())
    assert reader.tokenizer.decode(token_ids) == text
    assert reader.locate_special_tokens(token_ids, text) == places


def test_places_beside_characters_of_several_tokens(tmp_path: Path) -> None:
    specials = ("<|im_end|>", "<think>", "</think>")
    tokenizer = load_tokenizer(
        write_chat_tokenizer(tmp_path, ("<|bos|>", *specials), chat_template=CHATML)
    )
    response = "<think>½ and ☃\n</think>\n\n٣<|im_end|>"
    token_ids = tokenizer.encode(response)
    text = tokenizer.decode(token_ids)
    assert text == "½ and ☃\n\n\n٣"
    places = ResponseReader(tokenizer).locate_special_tokens(token_ids, text)
    assert places == ((0, "<think>"), (8, "</think>"), (11, "<|im_end|>"))
    # a half of a character before a special token is the replacement character, in any decoding
    cut = (*tokenizer.encode("☃")[:1], *tokenizer.encode("</think>☃"))
    assert tokenizer.decode(cut[:1]) == "\N{REPLACEMENT CHARACTER}"
    ((position, name),) = ResponseReader(tokenizer).locate_special_tokens(
        cut, tokenizer.decode(cut)
    )
    assert (position, name) == (1, "</think>")
