"""Shipped files with random mistakes: each ends in a message or in a run that could start,
within a second.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import MODEL, ROOT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.key_paths import list_leaf_keys
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.model_rules import find_policy_model_problems
from rlhf_megatron.config.rules.validate import find_config_problems
from rlhf_megatron.config.schema import ModelConfig, RunConfig
from rlhf_megatron.config.type_conversion import BROKEN, ConfigConverter
from rlhf_megatron.config.verl_names import has_known_subkeys, suggest_setting
from rlhf_megatron.config.yaml_nodes import LoadedConfig, MappingNode, ValueOrigin, convert_to_nodes
from rlhf_megatron.data.data_rows import read_prompt_rows
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.planning.simulator.durations import read_durations
from rlhf_megatron.weights.families.family_lookup import find_model_family

CONFIGS = sorted((ROOT / "configs").glob("*.yaml")) + [ROOT / "examples/simulate_1024/run.yaml"]
MODELS = sorted((ROOT / "examples").rglob("config.json"))
DURATIONS = ROOT / "examples/simulate_1024/durations.yaml"
ROWS = [
    {"prompt": "1+2=", "answer": "3", "data_source": "add"},
    {
        "prompt": [{"role": "user", "content": "1+2="}],
        "answer": 3,
        "reward_model": {"ground_truth": "3"},
    },
]
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
ODD = [
    *(
        None,
        True,
        False,
        "",
        " ",
        "x" * 300,
        "a\nb",
        "\x00",
        "../../x",
        "/dev/zero",
        "1e400",
        "nan",
        "é\u2028",
    ),
    *(
        -1,
        0,
        1,
        3,
        2**31,
        2**63,
        -(2**63),
        10**18,
        10**400,
        -(10**400),
        0.5,
        -0.0,
        1e308,
        -1e308,
        1e-320,
    ),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        [],
        {},
        [[]],
        [None],
        {"": 1},
        {"a": {"b": None}},
        DEEP,
        ["a", "a"],
    ),
]


@cache
def tree_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value below."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in list(items):
        yield tree, key
        yield from places(value)


def mutated(tree: Any, chance: random.Random) -> Any:
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        found = list(places(tree))
        if not found:
            break
        container, key = chance.choice(found)
        kind = chance.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[f"{key}s"] = container.pop(key)
        elif kind == 2:
            other, name = chance.choice(found)
            container[key] = (
                copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None
            )
        else:
            container[key] = copy.deepcopy(chance.choice(ODD))
    return tree


def a_configuration(chance: random.Random, directory: Path) -> None:
    """As `load_run_config` does, but for reading the file, which takes most of its time."""
    tree: dict[str, Any] = mutated(tree_of(chance.choice(CONFIGS)), chance)
    for key in chance.sample(list_leaf_keys(RunConfig), 3):
        *sections, name = key.split(".")
        below: Any = tree
        for section in sections:
            below = below.setdefault(section, {}) if isinstance(below, dict) else {}
        if isinstance(below, dict):
            below[name] = copy.deepcopy(chance.choice(ODD))
    tree.pop("extends", None)
    node = convert_to_nodes(tree, ValueOrigin("fuzz", 1, 0))
    converter = ConfigConverter(suggest_setting, has_known_subkeys)
    assert isinstance(node, MappingNode)
    config = converter.convert_section(RunConfig, node, "", RunConfig())
    if config is not BROKEN:
        raise ConfigError(
            [*converter.problems, *find_config_problems(LoadedConfig(config, converter.provenance))]
        )


def a_file(chance: random.Random, directory: Path) -> None:
    """Its characters."""
    path = directory / "run.yaml"
    path.write_bytes(noisy(chance.choice(CONFIGS).read_bytes(), chance))
    load_run_config(path, with_files=False)


def noisy(text: bytes, chance: random.Random) -> bytes:
    found = bytearray(text)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(found) + 1)
        piece = chance.choice(
            (
                b"",
                b"\x00",
                b"{",
                b"]",
                b": ",
                b"\t",
                b"'",
                b"&a ",
                b"*a",
                b"\xff",
                b"- ",
                b'"\\ud800"',
            )
        )
        found[at : at + chance.randint(0, 3)] = piece or bytes([chance.randrange(256)])
    return bytes(found)


def a_model(chance: random.Random, directory: Path) -> None:
    """Where nothing is told of it, the family takes it."""
    tree = mutated(tree_of(chance.choice(MODELS)), chance)
    problems = list(
        find_policy_model_problems(
            RunConfig(model=ModelConfig(path="model")), json.loads(json.dumps(tree))
        )
    )
    if not problems:
        find_model_family(tree).make_transformer_arguments(tree)
        find_model_family(tree).make_gpt_arguments(tree)
    raise ConfigError(problems)


def rows(chance: random.Random, directory: Path) -> None:
    text = "".join(json.dumps(mutated(row, chance)) + "\n" for row in ROWS).encode()
    (directory / "rows.jsonl").write_bytes(noisy(text, chance) if chance.random() < 0.5 else text)
    read_prompt_rows([directory / "rows.jsonl"], "prompt", "answer", chance.random() < 0.5)


def a_tokenizer(chance: random.Random, directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        text = (MODEL / name).read_bytes()
        changed = json.dumps(mutated(json.loads(text), chance)).encode()
        (directory / name).write_bytes(chance.choice((text, changed, noisy(text, chance))))
    load_tokenizer(directory)


def durations(chance: random.Random, directory: Path) -> None:
    path = directory / "durations.yaml"
    path.write_text(json.dumps(mutated(tree_of(DURATIONS), chance)))
    read_durations(path)


KINDS: dict[str, tuple[Callable[[random.Random, Path], None], int]] = {
    "configuration": (a_configuration, 500),
    "file": (a_file, 50),
    "model": (a_model, 900),
    "rows": (rows, 400),
    "tokenizer": (a_tokenizer, 100),
    "durations": (durations, 50),
}
"""What is mutated, and how often in a short run: 2,000 in all."""


def mutate(kind: str, directory: Path, count: int) -> None:
    run = KINDS[kind][0]
    for seed in range(count):
        try:
            run(random.Random(f"{kind}/{seed}"), directory)
        except ValueError as error:
            str(error).encode(errors="backslashreplace")
        except Exception as error:
            raise AssertionError(f"{kind} {seed} raises {type(error).__name__}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_is_a_message(tmp_path: Path, kind: str) -> None:
    mutate(kind, tmp_path, KINDS[kind][1])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_mistakes_are_messages(tmp_path: Path, kind: str) -> None:
    mutate(kind, tmp_path, 2000)
