"""Answers in each format, read by hand; broken calls; and that nothing of an answer is lost."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
from tool_templates import HERMES_CALLS
from written_answers import make_tokenizer

import rlhf_megatron.agents.answer_formats  # noqa: F401  (registers the formats)
from rlhf_megatron.agents.answer_formats.call_texts import MAX_NESTING, read_untyped_value
from rlhf_megatron.agents.answer_formats.parsed_answer import (
    ANSWER_FORMATS,
    MAX_CALLS,
    AnswerFormat,
    ParsedAnswer,
    ToolCall,
    make_assistant_message,
)
from rlhf_megatron.agents.answer_formats.template_calls import (
    choose_answer_format,
    is_thought_open,
)

END = "<|end_of_answer|>"


def make_format(name: str) -> AnswerFormat:
    return ANSWER_FORMATS.get(name).build([END])


def parse(name: str, text: str, is_open: bool = False, tools: Any = None) -> ParsedAnswer:
    return make_format(name).parse_answer(text, is_open, tools)


def list_calls(answer: ParsedAnswer) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in answer.calls]


@dataclass(frozen=True)
class WrittenFormat:
    """How a format writes an answer with a thought, text and two calls, typed by hand."""

    answer: str
    call: str  # f(x=CUT) whose argument, the number 7, stands at the place
    begin: str = ""  # in front of a call that stands alone
    end: str = ""
    content: str = "Look."
    thought: str = "Hm."
    ids: tuple[str, ...] = ()


CALLS = [("f", {"x": 1, "s": "a"}), ("g", {})]
FORMATS = {
    "hermes_json": WrittenFormat(
        "<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1, "s": "a"}}'
        '\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": 7}}\n</tool_call>',
    ),
    "qwen_xml": WrittenFormat(
        "<think>\nHm.\n</think>\n\nLook.\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"
        "<parameter=s>\na\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": WrittenFormat(
        "\n<think>Hm.</think>\nLook.\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    ),
    "deepseek": WrittenFormat(
        "<think>Hm.</think>Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"x": 1, "s": "a"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 7}<｜tool▁call▁end｜>',
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": WrittenFormat(
        "<think>Hm.</think>Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
        '<|tool_call_argument_begin|>{"x": 1, "s": "a"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.g:4"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 7}<|tool_call_end|>',
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ids=("functions.f:3", "functions.g:4"),
    ),
    "minimax_m2": WrittenFormat(
        '<think>\nHm.\n</think>\n\nLook.\n<minimax:tool_call>\n<invoke name="f">\n'
        '<parameter name="x">1'
        '</parameter>\n<parameter name="s">a</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
        "</minimax:tool_call>",
        '<invoke name="f">\n<parameter name="x">7</parameter>\n</invoke>\n',
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "muse_glimmer": WrittenFormat(
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Look.<|eom|>"
        '<|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
        '<atem:parameter name="x">1</atem:parameter>\n<atem:parameter name="s">a</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=g<|message|>"
        '<atem:function_calls>\n<atem:invoke name="g">\n</atem:invoke>\n</atem:function_calls>'
        "<|eot|>",
        '<atem:invoke name="f">\n<atem:parameter name="x">7</atem:parameter>\n</atem:invoke>\n',
        "<atem:function_calls>\n",
        "</atem:function_calls>",
    ),
    "harmony": WrittenFormat(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look."
        "<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
        '{"x": 1, "s": "a"}<|call|><|start|>assistant<|channel|>commentary to=functions.g '
        "<|constrain|>json<|message|>{}<|call|>",
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"x": 7}<|call|>',
    ),
    "mistral": WrittenFormat(
        '[THINK]Hm.[/THINK]Look.[TOOL_CALLS][{"name": "f", "arguments": {"x": 1, "s": "a"}, '
        '"id": "123456789"}][TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        '[TOOL_CALLS]f[ARGS]{"x": 7}',
        ids=("123456789", "abcdefghi"),
    ),
    "nemotron_nano_2": WrittenFormat(
        "<think>\n\nHm.\n</think>\nLook.\n\n<TOOLCALL>["
        '{"name": "f", "arguments": {"x": 1, "s": "a"}}, '
        '{"name": "g", "arguments": {}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "f", "arguments": {"x": 7}}]</TOOLCALL>',
    ),
    "llama_json": WrittenFormat(
        '<|python_start|>Look.<|python_end|>{"name": "f", "parameters": {"x": 1, "s": "a"}}; '
        '{"name": "g", "parameters": {}}',
        '<|python_tag|>{"name": "f", "parameters": {"x": 7}}',
        thought="",
    ),
    "pythonic": WrittenFormat(
        "<think>Hm.</think>[f(x=1, s='a'), g()]\nLook.",
        "[f(x=7)]",
    ),
    "lfm2": WrittenFormat(
        "<think>Hm.</think>Look.<|tool_call_start|>[f(x=1, s='a'), g()]<|tool_call_end|>",
        "<|tool_call_start|>[f(x=7)]<|tool_call_end|>",
    ),
    "gemma_4": WrittenFormat(
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:f{s:<|"|>a<|"|>,x:1}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>Look.<|tool_response>",
        "<|tool_call>call:f{x:7}<tool_call|>",
    ),
}
# formats whose arguments are JSON: a JSON text can be put in for {"x": 7}
JSON_FORMATS = ("hermes_json", "deepseek", "kimi_k2", "harmony", "mistral", "nemotron_nano_2",
                "llama_json")  # fmt: skip
# a call of theirs begins at the beginning of an answer or behind a mark
BARE_FORMATS = ("pythonic",)


def test_every_format_has_an_answer_by_hand() -> None:
    assert set(FORMATS) | {"plain"} == set(ANSWER_FORMATS)
    assert all(make_format(name).name == name for name in ANSWER_FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("end", ["", END, END + "\n"])
def test_an_answer_of_each_format(name: str, end: str) -> None:
    written = FORMATS[name]
    answer = parse(name, written.answer + end)
    assert list_calls(answer) == CALLS
    assert (answer.content, answer.reasoning) == (written.content, written.thought)
    assert answer.broken_calls == ()
    ids = [call.call_id for call in answer.calls]
    if written.ids:
        assert tuple(ids) == written.ids
    else:
        assert len(set(ids)) == 2
        assert all(re.fullmatch("[0-9a-z]{9}", call_id) for call_id in ids)
    assert answer == parse(name, written.answer + end)


@pytest.mark.parametrize("name", FORMATS)
def test_the_prompt_has_opened_the_thought(name: str) -> None:
    thought_end = {"harmony": "<|end|>", "mistral": "[/THINK]", "gemma_4": "\n<channel|>",
                   "muse_glimmer": "<|eom|>"}.get(name, "</think>")  # fmt: skip
    call = FORMATS[name].begin + FORMATS[name].call + FORMATS[name].end
    answer = parse(name, f"Hm. {call} no{thought_end}\n{call}", True)
    if name == "harmony":  # the call's own end ends the thought
        call_text = "<|start|>assistant<|channel|>analysis<|message|>Hm. <|constrain|> no<|end|>"
        answer = parse(name, call_text + call)
        assert answer.reasoning == "Hm. <|constrain|> no"
    else:
        assert answer.reasoning == f"Hm. {call} no"
    assert list_calls(answer) == [("f", {"x": 7})]
    assert (answer.content, answer.broken_calls) == ("", ())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_a_call_inside_of_a_thought_does_not_count(name: str) -> None:
    """Nor in a thought without an end."""
    call = FORMATS[name].begin + FORMATS[name].call + FORMATS[name].end
    answer = parse(name, f"Shall I {call}", True)
    assert answer == ParsedAnswer("", f"Shall I {call}", (), ())


def test_text_without_marks_stays_as_it_is() -> None:
    for name in ANSWER_FORMATS:
        assert parse(name, " 4\n\n") == ParsedAnswer(" 4\n\n", "", (), ())
        assert parse(name, "") == ParsedAnswer("", "", (), ())


def test_plain_text_has_thoughts_and_no_calls() -> None:
    text = "<think>\na\n</think>\n\nb <tool_call>{}</tool_call> <think>c</think> d"
    answer = ParsedAnswer("b <tool_call>{}</tool_call>\nd", "a\nc", (), ())
    assert parse("plain", text) == answer
    assert parse("plain", "a</think>b", True) == ParsedAnswer("b", "a", (), ())
    assert parse("plain", "never done", True) == ParsedAnswer("", "never done", (), ())


@pytest.mark.parametrize("prompt", ["...<think>\n", "<|assistant|><think>", "[THINK]"])
def test_prompts_that_open_a_thought(prompt: str) -> None:
    assert is_thought_open(prompt)


@pytest.mark.parametrize("prompt", ["", "<think>\n\n</think>\n\n", "<|im_start|>assistant\n"])
def test_prompts_that_open_no_thought(prompt: str) -> None:
    assert not is_thought_open(prompt)


BROKEN_JSON = {
    '{"x": 1, "x": 2}': "the key 'x' stands twice",
    '{"x": {"y": 1, "y": 1}}': "the key 'y' stands twice",
    '{"x": NaN}': "NaN is no JSON value",
    '{"x": -Infinity}': "-Infinity is no JSON value",
    '{"x": 1e999}': "is too large",
    '{"x": 1,}': "the text is no JSON",
    '{"x": [1,]}': "the text is no JSON",
    "{'x': 1}": "the text is no JSON",
    '{"x": 1': "",
    '{"x": 1} and more': "",
    '{"x": 1}}': "",
    '{"x": "a\nb"}': "Invalid control character at '\\n",
    '{"x": "\\ud83d"}': "half of a surrogate pair",
    '{"\\udc00": 1}': "half of a surrogate pair",
    '{"x": ' + "9" * 5000 + "}": "digits",
    "[1]": "must be a JSON object",
    '"text"': "must be a JSON object",
}


# formats without a mark behind a call: what stands behind its JSON is the answer's text
ENDS_EARLY = {"mistral": ('{"x": 1} and more', '{"x": 1}}'), "llama_json": ('{"x": 1}}',)}


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize("broken_json", BROKEN_JSON)
def test_broken_json(name: str, broken_json: str) -> None:
    """The call is text with a reason, and the whole calls beside it count."""
    written = FORMATS[name]
    broken = written.call.replace('{"x": 7}', broken_json)
    calls = [broken] if name in ("llama_json",) else [written.call, broken, written.call]
    answer = parse(name, "".join([written.begin, *calls, written.end]))
    is_behind = broken_json in ENDS_EARLY.get(name, ())
    num_calls = len(calls) if is_behind else len(calls) - 1
    assert [call.name for call in answer.calls] == ["f"] * num_calls
    if is_behind:
        assert broken_json.removeprefix('{"x": 1}').strip() in answer.content
        return
    (problem,) = answer.broken_calls
    assert BROKEN_JSON[broken_json] in problem.reason
    assert broken_json[:200] in problem.text
    assert len(problem.reason) < 300


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_texts_with_escapes(name: str) -> None:
    text = '{"x": "\\u6771\\ud83d\\ude42 \\"</tool_call>\\" \\n\\/"}'
    answer = parse(name, FORMATS[name].call.replace('{"x": 7}', text))
    assert list_calls(answer) == [("f", {"x": '東🙂 "</tool_call>" \n/'})]


NO_CALLS = {
    "hermes_json": {
        '<tool_call>{"name": "f"}</tool_call>': "the call has no 'arguments'",
        '<tool_call>{"arguments": {}}</tool_call>': "the call has no 'name'",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>': "must be a text that is not empty",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>': "must be a text that is not empty",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>': "is of type string",
        '<tool_call>{"name": "f", "arguments": {}, "k": 1}</tool_call>': "has a key 'k'",
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>': "must be a JSON object",
        "<tool_call></tool_call>": "the text is no JSON",
        '<tool_call>{"name": "f", "arguments": {}}': "</tool_call> must follow the JSON object",
        "<tool_call>": "the text is no JSON: Expecting value at its end",
    },
    "qwen_xml": {
        "<tool_call>\n</tool_call>": "<tool_call> must be followed by <function=",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>': "must be followed by <function=",
        "<tool_call><function=f": "<function=NAME> has no end",
        "<tool_call><function=a b></function></tool_call>": "is no tool's name",
        "<function=f><parameter=x>1</function>": "'x' is not ended by </parameter>",
        "<function=f><parameter=x>1<parameter=y>2</parameter></function>": "'x' is not ended",
        "<function=f><parameter=x>1</parameter>": "'x' is not ended by </parameter>",
        "<function=f><parameter=x>1</parameter><parameter=x>1</parameter>"
        "</function>": "'x' stands twice",
        "<function=f>x</function>": "</function> must follow the parameters; 'x</function>' stands",
    },
    "glm": {
        "<tool_call>f": "is not ended by </tool_call>",
        '<tool_call>{"name": "f"}</tool_call>': "is no tool's name",
        "<tool_call>f<arg_key>x</tool_call>": "a key is not ended by </arg_key>",
        "<tool_call>f<arg_key>x</arg_key>1</tool_call>": "<arg_value> must follow the key 'x'",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</tool_call>": "'x' is not ended by",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1<arg_key>y</arg_key><arg_value>2</arg_value>"
        "</tool_call>": "'x' is not ended by",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>x</arg_key><arg_value>1"
        "</arg_value></tool_call>": "'x' stands twice",
    },
    "deepseek": {
        "<｜tool▁calls▁begin｜>": "must be followed by <｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>": "the call has no <｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g\n```json\n{}\n```": "the text is no JSON",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n{}": "```json must follow",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}": "<｜tool▁call▁end｜> must follow the arguments",
    },
    "kimi_k2": {
        "<|tool_calls_section_begin|>": "must be followed by <|tool_call_begin|>",
        "<|tool_call_begin|>functions.f:0": "the call has no <|tool_call_argument_begin|>",
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{}": "functions.NAME:NUMBER",
    },
    "minimax_m2": {
        "<minimax:tool_call>f()</minimax:tool_call>": 'must be followed by <invoke name="',
        '<invoke name="f': 'the tag with name="..." has no end',
        '<invoke name="f"><parameter name="x">1</invoke>': "'x' is not ended by </parameter>",
        '<invoke name="f"><parameter name="x">1<parameter name="y">2</parameter></invoke>': (
            "'x' is not ended by </parameter>"
        ),
        '<invoke name="f"><p name="x">1</p></invoke>': "</invoke> must follow the parameters",
    },
    "muse_glimmer": {
        "<atem:function_calls>": 'must be followed by <atem:invoke name="',
        '<atem:invoke name="f"><atem:parameter name="x">1': "is not ended by </atem:parameter>",
    },
    "harmony": {
        "<|start|>assistant to=functions.f<|channel|>commentary": "the answer ends within the call",
        "<|start|>assistant<|channel|>analysis to=python<|message|>print(1)<|call|>": "no JSON",
        "<|start|>assistant to=functions.f<|message|>": "no JSON: Expecting value at its end",
    },
    "mistral": {
        "[TOOL_CALLS]": "a list of calls, or a name and [ARGS], must follow",
        "[TOOL_CALLS][]": "the text is no JSON",
        "[TOOL_CALLS] [{}]": "the call has no 'name'",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": 1}]': "id must be a text",
        "[TOOL_CALLS]a b[ARGS]{}": "is no tool's name",
    },
    "nemotron_nano_2": {
        '<TOOLCALL>[{"name": "f"}]</TOOLCALL>': "the call has no 'arguments'",
        '<TOOLCALL>{"name": "f", "arguments": {}}</TOOLCALL>': "[ must follow the mark of calls",
    },
    "llama_json": {
        "<|python_tag|>print(1)": '<|python_tag|> must be followed by {"name": ...',
        '{"name": "f", "parameters": [1]}': "'parameters' must be a JSON object",
        '{"name": "f", "parameters": {}, "x": 1}': "the call has a key 'x'",
        '<|python_tag|>{"name": "f", "x": 1}': "the call has no 'parameters'",
        "<|python_tag|>f.call(1)": "an argument must be KEY=VALUE",
    },
    "pythonic": {
        "[f(1)]": "an argument must be KEY=VALUE, not '1)]'",
        "[f(x=y)]": "'y)]' is no value that can be read",
        "[f(x=1": "')' is missing at its end",
        "[f(x=1, x=2)]": "the argument 'x' stands twice",
        "[f(x='a)]": "is no value that can be read",
        "[f(x=inf)]": "is no value that can be read",
        "[f(x=1e999)]": "is too large",
        "[f(x=g())]": "is no value that can be read",
        "[f(x={1: 2})]": "a key must be a text",
        "[f(x={'a': 1, 'a': 2})]": "the key 'a' stands twice",
        "[f(x='\\ud83d')]": "is no character",
        "[f(x=" + "9" * 5000 + ")]": "digits",
    },
    "lfm2": {
        "<|tool_call_start|>[f(x=1]<|tool_call_end|>": "a comma or ')' must stand in place of",
        "<|tool_call_start|>f(x=1)<|tool_call_end|>": "[ must follow the mark of calls",
        "<|tool_call_start|>[]<|tool_call_end|>": "a list of calls holds NAME(KEY=VALUE, ...)",
    },
    "gemma_4": {
        "<|tool_call>f{}<tool_call|>": "call: must follow <|tool_call>",
        "<|tool_call>call:f<tool_call|>": "the call's name must be followed by {",
        '<|tool_call>call:f{x:<|"|>a}<tool_call|>': "a text is not ended by",
        "<|tool_call>call:f{x:1,x:2}<tool_call|>": "the key 'x' stands twice",
        "<|tool_call>call:f{x:a}<tool_call|>": "is no value that can be read",
        "<|tool_call>call:f{:1}<tool_call|>": "a key must stand at",
    },
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts]
)
def test_broken_calls(name: str, text: str) -> None:
    """A half call at the end of an answer among them; what stands before it counts."""
    answer = parse(name, text)
    assert answer.calls == ()
    (problem,) = answer.broken_calls
    assert NO_CALLS[name][text] in problem.reason
    # marks around the list of calls, and the token behind a message, are not part of a call
    call_text = text
    for mark in OUTER_MARKS.get(name, ()):
        call_text = call_text.replace(mark, "")
    assert "".join(call_text.split()) in "".join(problem.text.split())
    assert answer.content == ""
    if name not in BARE_FORMATS and text != "<|python_tag|>print(1)":
        before = FORMATS[name].call
        separate = "; " if name == "llama_json" and text.startswith("{") else "\n"
        answer = parse(name, f"{before}{separate}{text}")
        assert list_calls(answer) == [("f", {"x": 7})]
        assert len(answer.broken_calls) == 1


OUTER_MARKS = {"qwen_xml": ("<tool_call>", "</tool_call>"), "harmony": ("<|call|>",)}


def test_every_format_has_broken_calls() -> None:
    assert set(NO_CALLS) == set(FORMATS)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in BARE_FORMATS])
def test_answers_that_are_cut_anywhere(name: str) -> None:
    """No text raises an error, no call counts that the whole answer does not have, and each word of
    the text is somewhere.
    """
    text = FORMATS[name].answer.replace("Hm.", "thoughtword").replace("Look.", "contentword")
    for end in range(len(text)):
        answer = parse(name, text[:end])
        assert list_calls(answer) in ([], CALLS[:1], CALLS)
        shown = show_all(answer)
        assert all(word in shown for word in ("thoughtword", "contentword") if word in text[:end])


def show_all(answer: ParsedAnswer) -> str:
    """All parts of an answer as one text."""
    calls = [json.dumps([call.name, call.arguments]) for call in answer.calls]
    broken_texts = [call.text for call in answer.broken_calls]
    return "\n".join([answer.content, answer.reasoning, *calls, *broken_texts])


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "[",
         "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁call▁end｜>",
         "<｜tool▁sep｜>", "```json\n", "```", "<|tool_calls_section_begin|>",
         "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>", '<invoke name="f">', "</invoke>",
         '<parameter name="x">', "<|channel|>analysis<|message|>", "<|start|>assistant", "<|end|>",
         " to=functions.f", "<|channel|>commentary", "<|message|>", "<|call|>", "[TOOL_CALLS]",
         "[ARGS]", "[THINK]", "[/THINK]", "<TOOLCALL>", "</TOOLCALL>", "<|python_tag|>", "[f(x=",
         ")]",
         "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", "call:f{x:",
         '{"name": "f", "arguments": {"x": "', '"}}', '{"name": "f", "parameters": {', "}", "]",
         '{"x": 1}', "function", " to=self<|message|>", "<|eom|>", '<atem:invoke name="f">',
         "</atem:invoke>", "f", "\n", " ", ",", '<|"|>', "'", '"')  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS, "plain"])
def test_nothing_is_lost_of_random_texts(name: str) -> None:
    """Each word of a text that is made of marks and words stands in a part of the answer, once."""
    random_numbers = random.Random(7)
    for _ in range(400):
        words = [f"w{number:03d}" for number in range(8)]
        pieces = words + random_numbers.choices(MARKS, k=random_numbers.randrange(1, 16))
        random_numbers.shuffle(pieces)
        text = "".join(pieces)
        shown = show_all(parse(name, text, random_numbers.random() < 0.2))
        assert [shown.count(word) for word in words] == [1] * len(words), text


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_deep_nesting_is_refused(name: str) -> None:
    for depth in (MAX_NESTING, MAX_NESTING + 5, 100_000):
        nested = "[" * (depth - 1) + "]" * (depth - 1)
        answer = parse(name, FORMATS[name].call.replace("7", nested))
        if depth == MAX_NESTING and name not in ("hermes_json", "nemotron_nano_2", "llama_json"):
            assert len(answer.calls) == 1
        if depth > MAX_NESTING:
            assert answer.calls == ()
            assert "nested deeper than 100" in answer.broken_calls[0].reason
    half = FORMATS[name].call.partition("7")[0] + "[" * 100_000
    assert "nested deeper than 100" in parse(name, half).broken_calls[0].reason


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "gemma_4"])
def test_deep_nesting_of_literals_is_refused(name: str) -> None:
    for opening, closing in (("[", "]"), ("{'a': ", "}")):
        opening = opening.replace("'", "") if name == "gemma_4" else opening
        for depth in (MAX_NESTING - 1, MAX_NESTING + 5, 100_000):
            nested = opening * depth + "1" + closing * depth
            answer = parse(name, FORMATS[name].call.replace("7", nested))
            assert len(answer.calls) == (depth < MAX_NESTING)
            if depth > MAX_NESTING:
                assert "nested deeper than 100" in answer.broken_calls[0].reason


@pytest.mark.parametrize("name", FORMATS)
def test_a_million_characters(name: str) -> None:
    """Of arguments, and of everything that could be read again and again."""
    call = FORMATS[name].call
    quote = {"pythonic": "'", "lfm2": "'", "gemma_4": '<|"|>'}.get(name, "")
    quote = '"' if name in JSON_FORMATS else quote
    for unit in ("a", "é ", "</t", "{["):
        long_text = unit * (1_000_000 // len(unit))
        answer = parse(name, call.replace("7", quote + long_text.strip() + quote))
        assert [call.arguments["x"] for call in answer.calls] == [long_text.strip()]
    parse(name, call + " " * 1_000_000 + "x")
    parts = ("<|channel|>", "<|start|>assistant", "to=f ", ":1", "\n{", "<|python_tag|>f.")
    begins = (call.partition("7")[0], FORMATS[name].begin, "<", " ", "\n", "\\", call[:3], *parts)
    for begin in begins:
        for is_open in (False, True):
            parse(name, (begin or "-") * (200_000 // max(len(begin), 1)), is_open)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in BARE_FORMATS])
def test_more_calls_than_are_read(name: str) -> None:
    written = FORMATS[name]
    text = written.begin + written.call * (MAX_CALLS + 50) + written.end
    answer = parse(name, text)
    assert len(answer.calls) == MAX_CALLS
    (problem,) = answer.broken_calls
    assert problem.reason == f"an answer has at most {MAX_CALLS} calls"
    assert problem.text.count("7") == 50


def test_ids_that_are_written_twice_are_made() -> None:
    call = FORMATS["kimi_k2"].call
    first, second = parse("kimi_k2", call + call).calls
    assert first.call_id == "functions.f:0"
    assert re.fullmatch("[0-9a-f]{9}", second.call_id)


def test_ids_differ_between_answers() -> None:
    call = FORMATS["hermes_json"].call
    ids = {parse("hermes_json", text).calls[0].call_id for text in (call, "x" + call, call + "\nx")}
    assert len(ids) == 3


def test_messages_of_harmony_that_are_no_calls() -> None:
    """A result that the model made up, text without a channel, and text between messages."""
    made_up = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>"
    assert parse("harmony", made_up) == ParsedAnswer("functions.f{}", "", (), ())
    assert parse("harmony", "connect(to=x)") == ParsedAnswer("connect(to=x)", "", (), ())
    text = "<|channel|>analysis<|message|>a<|end|>between<|channel|>final<|message|>b<|return|>"
    assert parse("harmony", text) == ParsedAnswer("between\nb", "a", (), ())
    (call,) = parse("harmony", " to=browser.open<|channel|>analysis<|message|>{}<|call|>").calls
    assert call.name == "browser.open"
    for cut in (" to=functions.f", "<|start|>assistant to=f", "<|channel|>commentary to=f"):
        (problem,) = parse("harmony", cut).broken_calls
        assert (problem.text, problem.reason) == (cut.strip(), "the answer ends within the call")


def test_lists_of_calls_with_a_broken_item() -> None:
    """An item that is JSON and no call is refused alone; an item that cannot be read ends the
    list.
    """
    whole = '{"name": "f", "arguments": {"x": 7}}'
    answer = parse("mistral", f'[TOOL_CALLS] [{whole}, {{"nam": "g"}}, {whole}]')
    assert list_calls(answer) == [("f", {"x": 7})] * 2
    assert [call.text for call in answer.broken_calls] == ['{"nam": "g"},']
    answer = parse("nemotron_nano_2", f"<TOOLCALL>[{whole}, {{nam}}, {whole}]</TOOLCALL> more")
    assert list_calls(answer) == [("f", {"x": 7})]
    assert [call.text for call in answer.broken_calls] == [f"{{nam}}, {whole}]</TOOLCALL>"]
    assert answer.content == "more"
    answer = parse("lfm2", "<|tool_call_start|>[f(x=7), g(y), f(x=7)]<|tool_call_end|>")
    assert list_calls(answer) == [("f", {"x": 7})]
    assert [call.text for call in answer.broken_calls] == ["g(y), f(x=7)]<|tool_call_end|>"]


def test_the_end_of_a_broken_item_is_looked_for_behind_the_calls_before_it() -> None:
    end = "<|tool_call_end|>"
    answer = parse("lfm2", f"<|tool_call_start|>[f(x='{end}'), g(y)]{end} more")
    assert list_calls(answer) == [("f", {"x": end})]
    assert [call.text for call in answer.broken_calls] == [f"g(y)]{end}"]
    assert answer.content == "more"


def test_calls_of_llama_behind_text() -> None:
    """They begin a line; an object of JSON without arguments is the answer's text."""
    call = '{"name": "f", "arguments": {"x": 7}}'
    answer = parse("llama_json", f"I look.\n  {call}; {call}\nDone.")
    assert list_calls(answer) == [("f", {"x": 7})] * 2
    assert answer.content == "I look.\nDone."
    half = parse("llama_json", 'I look.\n{"name": "f", "parameters": {')
    assert (half.content, half.calls, len(half.broken_calls)) == ("I look.", (), 1)
    for text in ('{"name": "Bob", "age": 3}', f"as {call}", '[\n{"name": "Bob"},\n{"name": "Al"}]'):
        assert parse("llama_json", text) == ParsedAnswer(text, "", (), ())


def test_literals_of_python_and_json() -> None:
    text = """[a.b(i=-3, f=.5)]"""
    assert parse("pythonic", text).calls == ()
    text = """[a.b(i=-3, f=2.50, e=1e-7, n=None, m=null, t=True, u=true, l=[1, 'x', [],],
        d={"k": {'j': False}},
        s='it\\'s', q="a 'b' \\x41\\u6771\\U0001f642\\n\\q", r="東
京")]"""
    (call,) = parse("pythonic", text).calls
    assert call.name == "a.b"
    assert call.arguments == {
        "i": -3, "f": 2.5, "e": 1e-7, "n": None, "m": None, "t": True, "u": True, "l": [1, "x", []],
        "d": {"k": {"j": False}}, "s": "it's", "q": "a 'b' A東🙂\n\\q", "r": "東\n京",
    }  # fmt: skip


def make_tools(**schemas: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": schemas}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", None, 1),
        ("1", {"type": "string"}, "1"),
        ('"a"', {"type": "string"}, '"a"'),
        ("1", {"type": "integer"}, 1),
        ("1", {"type": "number"}, 1),
        ("1", {"type": ["string", "null"]}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"type": "string"}, "None"),
        ("True", {"type": "boolean"}, True),
        ("True", None, True),
        ("[1, 2]", {"type": "string"}, "[1, 2]"),
        ("[1, 2]", {"anyOf": [{"type": "array"}, {"type": "string"}]}, [1, 2]),
        ("[1, 2", {"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1, 2"),
        ("[1, 2", None, "[1, 2"),
        (" a ", None, " a "),
        ("red", {"enum": ["red", 3]}, "red"),
        ("3", {"enum": ["red", 3]}, 3),
        ("3", {"oneOf": [{"$ref": "#/x"}]}, 3),
        ('"a"', {"type": "array"}, "a"),  # the environment refuses it by the schema
        ("[" * 100_000, None, "[" * 100_000),
    ],
)
def test_values_without_quotes(text: str, schema: Any, value: Any) -> None:
    read = read_untyped_value(text, schema)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax_m2", "muse_glimmer"])
def test_schemas_give_values_their_types(name: str) -> None:
    call = FORMATS[name].call
    assert parse(name, call).calls[0].arguments == {"x": 7}
    text_tools = make_tools(x={"type": "string"})
    assert parse(name, call, tools=text_tools).calls[0].arguments == {"x": "7"}
    answer = parse(name, call, tools=make_tools(x={"type": "array"}))
    assert answer.calls[0].arguments == {"x": 7}
    answer = parse(name, call.replace("7", "[1,"), tools=make_tools(x={"type": "array"}))
    assert answer.calls == ()
    assert "the parameter 'x': '[1,' is of no type of ['array']: the text is no JSON" in (
        answer.broken_calls[0].reason
    )


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax_m2", "muse_glimmer"])
def test_texts_that_look_like_ends(name: str) -> None:
    """An end of a value counts where a value can end."""
    value = "a</parameter> b</arg_value> </atem:parameter> </tool_call> </invoke> c"
    answer = parse(name, FORMATS[name].call.replace("7", value))
    assert list_calls(answer) == [("f", {"x": value})]


def test_an_answer_as_a_message() -> None:
    answer = parse("hermes_json", FORMATS["hermes_json"].answer + "<tool_call>half")
    first, second = answer.calls
    assert isinstance(first, ToolCall)
    assert make_assistant_message(answer) == {
        "role": "assistant",
        "content": "Look.\n<tool_call>half",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": first.call_id,
                "type": "function",
                "function": {"name": "f", "arguments": {"x": 1, "s": "a"}},
            },
            {"id": second.call_id, "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }
    assert make_assistant_message(parse("plain", "4")) == {"role": "assistant", "content": "4"}


class AtSign:
    """A user's format, which reads what `hermes_json` reads."""

    name = "zz_sign"

    def __init__(self, end_texts: Any) -> None:
        self.hermes_format = ANSWER_FORMATS.get("hermes_json").build(end_texts)

    def parse_answer(
        self, text: str, is_reasoning_open: bool = False, tools: Any = None
    ) -> ParsedAnswer:
        return self.hermes_format.parse_answer(text, is_reasoning_open, tools)


class Lacking:
    name = "lacking"

    def __init__(self, end_texts: Any) -> None:
        pass


def test_a_format_of_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered as other parts are, and goes before ours where both read the template."""
    monkeypatch.setattr(ANSWER_FORMATS, "_entries", dict(ANSWER_FORMATS._entries))
    tokenizer = make_tokenizer(HERMES_CALLS, "<|im_end|>")
    assert choose_answer_format(tokenizer).name == "hermes_json"
    ANSWER_FORMATS.register("zz_sign")(AtSign)
    assert choose_answer_format(tokenizer).name == "zz_sign"
    with pytest.raises(ValueError, match="Lacking lacks parse_answer"):
        ANSWER_FORMATS.register("lacking")(Lacking)  # type: ignore[arg-type]
