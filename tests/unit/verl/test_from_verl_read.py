"""Reading verl's files: scripts, lists, Hydra's values, OmegaConf's interpolations; what is
broken says so.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.jobs.from_verl.settings_reader import (
    add_command_line_overrides,
    parse_hydra_value,
    read_verl_settings,
)
from rlhf_megatron.jobs.from_verl.shell_script import UNKNOWN, ShellScript
from rlhf_megatron.jobs.from_verl.verl_settings import VerlSettings


def settings(
    text: str, source: str = "run.sh", environment: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        name: one.value
        for name, one in read_verl_settings(text, source, environment or {}).settings.items()
    }


def expanded(word: str, before: str = "", **environment: str) -> list[str]:
    script = ShellScript(environment)
    script.read(before)
    return script.expand_word(word)


@pytest.mark.parametrize(
    ("word", "result"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("'$A'", "$A"),
        ('"$A $B"', "1 x y"),
        (r"\$A", "$A"),
        (r'"\n\""', r"\n" + '"'),
        ("${C:-7}", "7"),
        ("${C:-$A}", "1"),
        ("${A:-7}", "1"),
        ("$((A + 2 * (3 - 1)))", "5"),
        ("$(( -7 / 2 ))", "-3"),  # towards zero, as a shell has it
        ("$(( -7 % 2 ))", "-1"),
        ("${data.seed}", "${data.seed}"),
        ("$(date)", UNKNOWN),
        ("`date`", UNKNOWN),
        ("$((A / 0))", UNKNOWN),
        ("$((2 ** 9999999))", UNKNOWN),
        ("$1", UNKNOWN),
        ("$nobody", UNKNOWN),
        ("${A%.*}", UNKNOWN),
        ("$", "$"),
    ],
)
def test_words(word: str, result: str) -> None:
    assert expanded(word, 'A=1\nB="x y"\n') == [result]


def test_arrays_and_arguments() -> None:
    before = 'A=(a.b=1 # "one)\n  c.d="x y")\nA+=(e.f=3)\n'
    assert expanded('"${A[@]}"', before) == ["a.b=1", "c.d=x y", "e.f=3"]
    assert expanded("$@", before) == []


def test_a_script_with_branches() -> None:
    text = """
    n=4
    if [ "$X" = 1 ]; then
        lr=1e-5
    else
        lr=1e-6
    fi
    python3 -m verl.trainer.main_ppo a.n=$n a.lr=$lr 2>&1 | tee log.txt
    """
    written = read_verl_settings(text, "run.sh", {})
    assert {name: one.value for name, one in written.settings.items()} == {"a.n": 4}
    (problem,) = written.problems
    assert (
        problem.message.startswith("a.lr=...: its value depends on what only the shell can tell")
        and "[run.sh:8]" in problem.message
    )
    add_command_line_overrides(written, ["a.lr=2e-6"])
    assert written.settings["a.lr"].value == 2e-6 and not written.problems


def test_prefixes_and_removals() -> None:
    text = (
        "main_ppo.py +a.b=1 ++a.c=2 a.d=3 ~a.d a.e.f=4 a.e.g=5 ~a.e a.b=6"
        " hydra.run.dir=x model@m.n=7"
    )
    assert settings("python " + text) == {"a.b": 6, "a.c": 2, "model": 7}
    notes = read_verl_settings("python " + text, "run.sh", {}).notes
    assert notes == ["a.b is given twice: 6 (run.sh:1) replaces 1 (run.sh:1)."]


def test_a_plain_list() -> None:
    text = "# settings\na.b=1\n+a.c='x y'\na.files=[a.jsonl, b.jsonl]\n"
    assert settings(text, "list.txt") == {"a.b": 1, "a.c": "x y", "a.files": ["a.jsonl", "b.jsonl"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("True", True),
        ("null", None),
        ("", None),
        ("text", "text"),
        ("['console','wandb']", ["console", "wandb"]),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("{url:http://x}", {"url": "http://x"}),
        ("'64'", "64"),
        ("a: b: c", "a: b: c"),
    ],
)
def test_values_of_overrides(text: str, value: Any) -> None:
    assert parse_hydra_value(text, "") == value


def test_interpolations() -> None:
    text = """
a: {b: 4, name: x, list: [1, 2]}
c:
  d: ${a.b}
  e: ${oc.select:a.gone,16}
  f: ${oc.select:a.b,16}
  g: ${.d}
  h: run-${a.name}-${a.b}
  i: ${..a.b}
  j: ${oc.env:WHO,nobody}
  k: ${oc.env:HOME,nobody}
  l: ${a.list}
  m: ${c.n}
  n: ${c.m}
  o: ${gone.key}
  p: ???
  q: ${oc.select:a.gone}
"""
    given = VerlSettings(read_verl_settings(text, "run.yaml", {}), {"HOME": "/home/me"})
    expected = {
        "d": 4,
        "e": 16,
        "f": 4,
        "g": 4,
        "h": "run-x-4",
        "i": 4,
        "j": "nobody",
        "k": "/home/me",
        "l": [1, 2],
    }
    assert {name: given.use_value(f"c.{name}") for name in expected} == expected
    assert (
        given.is_written("c.q") and given.use_value("c.q") is None and not given.is_written("c.p")
    )
    assert not any(map(given.is_written, ("c.m", "c.n", "c.o")))  # in a circle, or to nothing
    assert sum("points to what is not there" in note for note in given.notes) == 3


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("a: [1\n", "run.yaml", "not valid YAML"),
        ("a: 1\na: 2\n", "run.yaml", "written twice"),
        ("- 1\n", "run.yaml", "must be a mapping of sections"),
        ("", "run.yaml", "must be a mapping of sections"),
        ("echo hello\n", "run.sh", "holds no setting of verl"),
        ("defaults: [x]\n", "run.yaml", "holds no setting of verl"),
        ("python main_ppo.py a.b='x\n", "run.sh", "line 1: the quote ' does not end"),
        (
            "python main_ppo.py a.b=1\npython main_ppo.py a.b=2\n",
            "run.sh",
            "starts verl 2 times (lines 1, 2)",
        ),
        ("x" * (1 << 20) + "y", "run.sh", "more than 1048576 characters"),
        ("a.b=\x00\n", "run.sh", "not a text file"),
        (
            "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 9 + "main_ppo a.b=$A",
            "run.sh",
            "grows beyond 100000",
        ),
        ("A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40, "run.sh", "more than 20000 words"),
    ],
)
def test_broken_input(text: str, source: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_verl_settings(text, source, {})
    assert message in str(raised.value)


def test_overrides_that_are_none() -> None:
    written = read_verl_settings("a.b=1", "list.txt", {})
    with pytest.raises(ConfigError, match="'nonsense' must have the form"):
        add_command_line_overrides(written, ["a.c=1", "nonsense"])
