"""Calls that chat templates write are read back equal, and the format is chosen by what a template
writes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from published_templates import PUBLISHED
from tool_templates import TOOL_TEMPLATES
from written_answers import (
    EASY_TEXTS,
    TEXTS_TO_ESCAPE,
    find_unequal_answer,
    look_at_template,
    make_tokenizer,
)

from rlhf_megatron.agents.answer_formats.parsed_answer import ANSWER_FORMATS
from rlhf_megatron.agents.answer_formats.template_calls import (
    CallShape,
    choose_answer_format,
    choose_call_shape,
    describe_tool_problem,
)
from rlhf_megatron.data.chat_template import make_chat_format

ALL_TEXTS = (*EASY_TEXTS, *TEXTS_TO_ESCAPE)
NUM_ANSWERS = 16
FORMATS_OF_PUBLISHED = {
    "llama3": "plain",
    "llama31": "llama_json",
    "qwen25": "hermes_json",
    "qwen3": "hermes_json",
    "hermes": "hermes_json",
    "mistral": "mistral",
    "deepseek_v3": "deepseek",
    "deepseek_r1": "plain",
    "glm45": "glm",
    "gpt_oss": "harmony",
    "phi3": "plain",
}
TEMPLATES = {
    **{name: row for name, row in TOOL_TEMPLATES.items() if name != "llama_4_pythonic"},
    **{
        name: (PUBLISHED[name][0], format_name, PUBLISHED[name][1][0])
        for name, format_name in FORMATS_OF_PUBLISHED.items()
    },
}
# their templates write the first call of an answer alone, or refuse several
WITH_ONE_CALL = {"llama31", "gpt_oss", "llama3_1", "llama3_2", "gptoss", "gptoss_training"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_back_equal(name: str) -> None:
    text, format_name, end_text = TEMPLATES[name]
    template = look_at_template(make_tokenizer(text, end_text))
    assert template.answer_format.name == format_name
    assert (template.shape is None) == (format_name == "plain")
    if template.shape is not None:
        most_calls = 1 if name in WITH_ONE_CALL else 4
        assert find_unequal_answer(template, ALL_TEXTS, NUM_ANSWERS, most_calls) == ""


def test_values_in_quotes_take_the_types_of_the_tool() -> None:
    """Llama 4's pythonic template writes every value as a text, and escapes nothing."""
    text, _, end_text = TOOL_TEMPLATES["llama_4_pythonic"]
    template = look_at_template(make_tokenizer(text, end_text))
    assert template.answer_format.name == "pythonic"
    written = '[f(a="5", b="[1, {\'k\': None}]", c="5", d="True")]<|eot|>'
    schemas = {"a": {"type": "integer"}, "b": {"type": "array"}, "c": {"type": "string"},
               "d": {"type": "boolean"}}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": schemas}}}]
    (call,) = template.answer_format.parse_answer(written, tools=tools).calls
    assert call.arguments == {"a": 5, "b": [1, {"k": None}], "c": "5", "d": True}


SHAPES = {
    # name -> content is null, arguments are text
    "qwen3": (False, False),
    "deepseek_v3": (False, True),
    "kimi_k2": (False, False),
    "gpt_oss": (False, False),
    "mistral_args": (False, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_shape_that_shows_the_call_is_chosen(name: str) -> None:
    text, _, end_text = TEMPLATES[name]
    shape = look_at_template(make_tokenizer(text, end_text)).shape
    assert shape == CallShape(*SHAPES[name])


def choose_shape(template: str) -> tuple[CallShape | None, str]:
    chat = make_chat_format(make_tokenizer(template, "<end>"), None, {})

    def render(messages: Any, tools: Any, has_answer_prompt: bool) -> str:
        return chat.render_conversation(messages, has_answer_prompt, tools)

    return choose_call_shape(render), describe_tool_problem(render)


MESSAGES = "{%- for m in messages %}{{- m.role + ':' }}"
CALL = "{{- m.tool_calls[0].function.arguments if m.tool_calls else m.content }}"
LEAVES_RESULTS_OUT = CALL.replace("m.content", "'' if m.role == 'tool' else m.content")


def test_shapes_that_lose_something_are_not_chosen() -> None:
    only_null = MESSAGES + "{%- if m.content is none %}" + CALL + "{%- else %}{{- m.content }}"
    shape, problem = choose_shape(only_null + "{%- endif %}{%- endfor %}")
    assert (shape, problem) == (CallShape(True, True), "")
    # an object would be shown as Python shows it
    shape, problem = choose_shape(MESSAGES + CALL + "{%- endfor %}")
    assert (shape, problem) == (CallShape(False, True), "")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MESSAGES + "{{- m.content }}{%- endfor %}", "leaves out calls of tools"),
        (MESSAGES + LEAVES_RESULTS_OUT + "{%- endfor %}", "leaves out the results of tools"),
        (
            MESSAGES + "{{- raise_exception('no tools') if m.tool_calls }}{%- endfor %}",
            "refuses a call of a tool: the chat template refuses the prompt (no tools",
        ),
    ],
)
def test_templates_that_are_refused_for_tools(template: str, reason: str) -> None:
    shape, problem = choose_shape(template)
    assert shape is None
    assert reason in problem


def test_an_unknown_format_is_refused_with_what_the_template_writes() -> None:
    template = MESSAGES + "{{- '@call ' + m.tool_calls | tojson if m.tool_calls }}{%- endfor %}"
    words = r"not known: 'assistant:@call \[.*register a format"
    with pytest.raises(ValueError, match=words) as refusal:
        choose_answer_format(make_tokenizer(template, "<end>"))
    assert all(name in str(refusal.value) for name in ANSWER_FORMATS)


def test_no_template_means_plain_text() -> None:
    tokenizer = make_tokenizer("", "<end>")
    tokenizer.chat_template = None
    answer_format = choose_answer_format(tokenizer)
    assert answer_format.name == "plain"
    assert answer_format.parse_answer("42<end>").content == "42"


TRL = importlib.util.find_spec("trl")
FORMATS_OF_TRL = {
    "deepseek": ("deepseekv3", "deepseek_r1_distill"),
    "gemma_4": ("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    "glm": ("glm4moe",),
    "harmony": ("gptoss",),
    "hermes_json": ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
    "lfm2": ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"),
    "llama_json": ("llama3_1", "llama3_2"),
    "muse_glimmer": ("muse_glimmer",),
    "qwen_xml": (
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    ),
}
ENDS_OF_TRL = {
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma_4": "<turn|>",
    "glm": "<|observation|>",
    "llama_json": "<|eot_id|>",
    "muse_glimmer": "<|eot|>",
}
# they write texts in quotes and escape nothing
WITHOUT_ESCAPES = {"lfm2_2_5", "lfm2_2_5_v2"}
# its template writes two calls, the second with the end of the list; the third begins behind the
# answer's end. Calls beside content are left out
NOT_EQUAL = {"deepseek_r1_distill", "deepseek_r1_distill_training"}


@pytest.mark.skipif(
    TRL is None, reason="the package trl, which has published templates, is not installed"
)
def test_calls_of_all_published_templates() -> None:
    assert TRL is not None and TRL.submodule_search_locations is not None
    folder = Path(TRL.submodule_search_locations[0]) / "chat_templates"
    format_by_stem = {stem: name for name, stems in FORMATS_OF_TRL.items() for stem in stems}
    for path in sorted(folder.glob("*.jinja")):
        stem = path.stem
        format_name = format_by_stem.get(stem.removesuffix("_training"), "plain")
        end_text = ENDS_OF_TRL.get(format_name, "<|im_end|>")
        tokenizer = make_tokenizer(path.read_text(encoding="utf-8"), end_text)
        template = look_at_template(tokenizer)
        assert template.answer_format.name == format_name, stem
        if format_name == "plain" or stem in NOT_EQUAL:
            continue
        texts = EASY_TEXTS if stem in WITHOUT_ESCAPES else ALL_TEXTS
        most_calls = 1 if stem in WITH_ONE_CALL else 4
        assert find_unequal_answer(template, texts, NUM_ANSWERS, most_calls) == "", stem
