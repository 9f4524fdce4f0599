"""Configurations and templates of strangers: a clear error in bounded time, and nothing
of theirs runs.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from chat_templates import LLAMA, QWEN, write_chat_tokenizer

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.data.chat_template import (
    ChatFormat,
    TemplateSandbox,
    make_chat_format,
    render_chat_template,
)
from rlhf_megatron.data.data_rows import ChatMessage
from rlhf_megatron.data.tokenizer import load_tokenizer

BOUND_S = 60.0  # on a slow machine; unbounded, each of these takes hours or all memory

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
EVIL_YAML = {
    "apply": (
        "model: !!python/object/apply:os.system ['touch {marker}']",
        "tag .*os.system' is not supported",
    ),
    "apply, as a value": (
        "model: {{path: !!python/object/apply:os.system ['touch {marker}']}}",
        "tag .*os.system' is not supported",
    ),
    "new": ("model: !!python/object/new:os.system ['touch {marker}']", "is not supported"),
    "name": ("model: {{path: !!python/name:os.system ''}}", "is not supported"),
    "module": ("model: {{path: !!python/module:os ''}}", "is not supported"),
    "local tag": ("model: !evil {{path: x}}", "tag '!evil' is not supported"),
    "twice": ("model: {{path: a}}\nmodel: {{path: b}}", "key 'model' is written twice"),
    "no number": ("trainer: {{seed: !!int abc}}", "'abc' is no int"),
    "a number of 5000 digits": (
        "trainer: {{seed: " + "9" * 5000 + "}}",
        "is no int that can be read",
    ),
    "itself": ("model: &m {{path: *m}}", "an anchor contains itself"),
    "laughs": (LAUGHS, "more than 20000 values with its aliases written out"),
    "deep lists": ("a: " + "[" * 600 + "]" * 600, "too deep in each other"),
    "deep sections": ("a: " + "{{a: " * 600 + "}}" * 600, "too deep in each other"),
    "long": ("# " + "x" * (2 << 20), "more than 1048576 characters"),
    "a zero byte": ("model: \x00", "not valid YAML"),
}


@pytest.mark.parametrize("kind", EVIL_YAML)
def test_evil_yaml_is_an_error_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    text, message = EVIL_YAML[kind]
    path = tmp_path / "run.yaml"
    marker = tmp_path / "marker"
    path.write_text(text if kind == "laughs" else text.format(marker=marker))
    start = time.process_time()
    with pytest.raises(ConfigError, match=message):
        read_run_config(path)
    assert time.process_time() - start < BOUND_S and not marker.exists()
    (tmp_path / "child.yaml").write_text("extends: run.yaml\n")
    with pytest.raises(ConfigError, match=message):
        read_run_config(tmp_path / "child.yaml")


def test_evil_yaml_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    marker = tmp_path / "marker"
    with pytest.raises(
        ConfigError, match=r"override .trainer.seed.*tag .*os.system' is not supported"
    ):
        read_run_config(
            tmp_path / "run.yaml",
            [f"trainer.seed=!!python/object/apply:os.system ['touch {marker}']"],
        )
    assert not marker.exists()


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="more than 1048576 characters"):
        read_run_config("/dev/zero")


def chat_format(directory: Path, template: str) -> ChatFormat:
    return make_chat_format(
        load_tokenizer(write_chat_tokenizer(directory, chat_template=template)), None, {}
    )


ESCAPES = (
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__",
    "messages|attr('__class__')",
    "(messages|first)['__class__']",
    "raise_exception.__globals__",
    "self.__init__.__globals__",
    "self._TemplateReference__context.environment",
    "cycler.__init__.__globals__.os.system('touch {marker}')",
    "lipsum.__globals__['os'].popen('touch {marker}').read()",
    "joiner.__init__.__globals__.__builtins__",
    "namespace.__init__.__globals__",
    "strftime_now.__code__",
    "'{{0.__class__}}'.format(messages)",
    "messages.append({{}})",
    "messages[0].update({{'role': 'x'}})",
    "messages.clear()",
)


@pytest.mark.parametrize("code", ESCAPES)
def test_a_template_does_not_reach_out_of_its_sandbox(tmp_path: Path, code: str) -> None:
    marker = tmp_path / "marker"
    messages = (ChatMessage("user", "hello"),)
    expression = code.format(marker=marker)
    try:
        text = chat_format(tmp_path, "{{ strftime_now and " + expression + " }}").render_prompt(
            messages
        )
    except ValueError as error:
        text = str(error)
        assert "unsafe" in text or "undefined" in text or "no attribute" in text, text
    assert not any(
        word in text for word in ("<class", "<built-in", "<function", "<module", "os.system(")
    )
    assert not marker.exists()


ENDLESS = {
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999)"
        " %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "loops over a list": (
        "{% set x = range(9999)|list %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "macros": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"
    ),
    "a macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "ranges": "{% for a in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "powers": "{{ 9 ** 9 ** 9 }}",
    "a power of a variable": "{% set x = 999999 %}{{ x ** x }}",
    "repetition": "{{ 'a' * 99999999999 }}",
    "repetition of a list": "{{ ([0] * 9999999999)|length }}",
    "doubling": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x"
        " %}{% endfor %}"
    ),
    "joining": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x"
        " %}{% endfor %}"
    ),
    "squares": (
        "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"
    ),
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "a format": "{{ '{:>9999999999}'.format(1) }}",
    "an old format": "{{ '%9999999999d' % 1 }}",
    "an old format, as a filter": "{{ '%9999999999d'|format(1) }}",
    "indents": "{{ [1]|tojson(indent=9999999999) }}",
    "replacing": "{% set x = 'a' * 999999 %}{{ x|replace('a', x) }}",
    "a huge text, often": (
        "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{{ x }}{% endfor %}"
    ),
    "a huge text, upper": (
        "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}"
    ),
    "lists of lists": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set n.x = [n.x, (range(99999)|list)] %}{% endfor %}",
    "slices": "{{ 'a'|slice(9999999999)|list }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_that_would_not_end_is_refused(tmp_path: Path, kind: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match="chat template"):
        chat_format(tmp_path, ENDLESS[kind]).render_prompt("hello")
    assert time.process_time() - start < BOUND_S


@pytest.mark.parametrize("chance", ["[1, 2]|random", "lipsum()"])
def test_a_template_has_no_dice(tmp_path: Path, chance: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        chat_format(tmp_path, "{{ " + chance + " }}").render_prompt("hello")


def test_the_bounds_leave_templates_as_they_are() -> None:
    template = TemplateSandbox().from_string(
        "{% for m in items recursive %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% if m is iterable %}({{ loop(m) }}){% endif %}{% else %}none{% endfor %}"
        " {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ 'a' ~ 1 ~ 'b' }} {{ [1] + [2] }} {{ 3 * 2.5 }}"
        "{% for m in nothing %}x{% else %} empty{% endfor %}{% for a, b in pairs if a %} {{ a }}{{"
        " b }}{% endfor %}"
    )
    text = render_chat_template(template, items=[1, [2, 3]], nothing=[], pairs=[(0, 1), (2, 3)])
    assert text == "1/2,2/2(1/2,2/2) 1024 ababab a1b [1, 2] 7.5 empty 23"


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_long_chats_stay_below_the_bound(tmp_path: Path, template: str) -> None:
    chat = tuple(ChatMessage(("user", "assistant")[i % 2], f"message {i}") for i in range(5001))
    directory = write_chat_tokenizer(tmp_path, chat_template=template)
    kwargs = {"date_string": "1 Jan 2025"} if template == LLAMA else {}
    assert "message 5000" in make_chat_format(
        load_tokenizer(directory), None, kwargs
    ).render_prompt(chat)
