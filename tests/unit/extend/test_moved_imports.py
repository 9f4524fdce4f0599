"""A plugin that imports what was moved is told where it is now, all of it at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron import extend, plugins
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.moved_imports import find_current_names
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.registry import PACKAGES, load_registry

FORMER_PAGE = Path(__file__).with_name("extending_before_the_door.md")
EXAMPLE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORMER_EXAMPLES = dict(EXAMPLE.findall(FORMER_PAGE.read_text()))
UNMOVED = {"reward.py"}  # what it imports has kept its place

EXPECTED = {
    "estimator.py": {"compute_sample_rewards", "spread_over_response_tokens"},
    "loss.py": {"make_ppo_kl_metric"},
    "aggregation.py": {"AGGREGATIONS", "AggregationInputs", "sum_by_sequence"},
    "family.py": {
        "FAMILIES",
        "HFConfig",
        "DecoderDimensions",
        "read_decoder_dimensions",
        "make_decoder_family",
    },
    "engine.py": {"ENGINES", "EngineAddress", "LocalEngine", "LocalEngineKind"},
    "schedule.py": {
        "SCHEDULES",
        "GroupFlow",
        "StalePolicy",
        "SyncPolicy",
        "find_groups_past_lag",
        "find_groups_to_annotate",
        "select_first_scored",
    },
    "balancer.py": {
        "BALANCERS",
        "BalancerKind",
        "ChunkAssignment",
        "EngineSetup",
        "FleetMember",
        "LeastOutstandingBalancer",
        "OutstandingLoad",
        "RequestChunk",
    },
    "logger.py": {"LOGGERS", "RunLogger"},
    "task.py": {"PromptRow", "TaskRows"},
}
"""File of the page as it was -> the names of the door that its errors tell."""


@pytest.fixture(autouse=True)
def fresh_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin of another test is there, and none is left."""
    monkeypatch.setattr(plugins, "_loaded_plugins", {})
    before = {kind: set(load_registry(kind)) for kind in PACKAGES}
    yield
    for kind, names in before.items():
        for name in set(load_registry(kind)) - names:
            del load_registry(kind)._entries[name]


def load_and_list_problems(plugin: Path, text: str) -> list[str]:
    plugin.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_plugins([str(plugin)])
    return error.value.problems


def test_the_former_page_has_a_file_of_each_kind() -> None:
    assert set(FORMER_EXAMPLES) == set(EXPECTED) | UNMOVED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_former_examples_are_told_every_new_name(tmp_path: Path, name: str) -> None:
    plugin = tmp_path / name
    problems = load_and_list_problems(plugin, FORMER_EXAMPLES[name])
    told = {
        match[1]
        for problem in problems
        if (match := re.search(r"write: from rlhf_megatron\.extend import (\w+)\.$", problem))
    }
    assert told == EXPECTED[name]
    assert all(problem.startswith(f"plugins: {plugin} uses rlhf_megatron.") for problem in problems)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_import_that_fails_is_told(tmp_path: Path, name: str) -> None:
    """Each import of the former file either works today, or one of the errors names it."""
    text = FORMER_EXAMPLES[name]
    problems = "\n".join(load_and_list_problems(tmp_path / name, text))
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            is_told = (
                f" uses {node.module}.{alias.name} in {tmp_path / name}:{node.lineno}," in problems
            )
            try:
                exec(f"from {node.module} import {alias.name}")
            except ImportError:
                assert is_told, f"{node.module}.{alias.name}"
            else:
                assert not is_told, f"{node.module}.{alias.name}"


def test_an_example_whose_imports_stayed_still_works(tmp_path: Path) -> None:
    for name in UNMOVED:
        (tmp_path / name).write_text(FORMER_EXAMPLES[name])
        load_plugins([str(tmp_path / name)])


def test_the_message_says_line_module_and_door(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    (problem,) = load_and_list_problems(
        plugin, "import os\nfrom rlhf_megatron.observe.loggers import Logger\n"
    )
    assert problem == (
        f"plugins: {plugin} uses rlhf_megatron.observe.loggers.Logger in {plugin}:2, which is now"
        " rlhf_megatron.controller.observe.loggers.RunLogger; write: from rlhf_megatron.extend"
        " import RunLogger."
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "import rlhf_megatron.rollout.kinds as kinds\n",
            "rollout.kinds in {plugin}:1, which is now rlhf_megatron.rollout.engine_kinds.",
            id="module",
        ),
        pytest.param(
            "from rlhf_megatron.algorithms.losses import policy_loss\npolicy_loss.told\n",
            "AttributeError in {plugin}:2",
            id="attribute that never was",
        ),
        pytest.param(
            "from rlhf_megatron.rollout import kinds, never_there\n",
            "rollout.kinds in {plugin}:1, which is now rlhf_megatron.rollout.engine_kinds.",
            id="module among others",
        ),
        pytest.param(
            "import rlhf_megatron.data.tasks as tasks\ntasks.TASKS\ntasks.Told\n",
            "AttributeError in {plugin}:3: module 'rlhf_megatron.data.tasks' has no",
            id="unknown attribute",
        ),
        pytest.param(
            "from rlhf_megatron.never import There\n",
            "ModuleNotFoundError in {plugin}:1: No module named 'rlhf_megatron.never'",
            id="module that never was",
        ),
    ],
)
def test_other_ways_to_use_a_former_name(tmp_path: Path, text: str, expected: str) -> None:
    plugin = tmp_path / "mine.py"
    problems = load_and_list_problems(plugin, text)
    assert expected.format(plugin=plugin) in problems[0]


def test_an_attribute_of_a_module_that_stayed(tmp_path: Path) -> None:
    """The module is where it was, one of its names is not."""
    module, former_name, current = next(
        (module, former_name, current)
        for (module, former_name), current in sorted(_read_table().items())
        if former_name and current.module == module and current.door_name
    )
    text = f"import {module} as base\nbase.{former_name}\n"
    (problem,) = load_and_list_problems(tmp_path / "mine.py", text)
    assert f"uses {module}.{former_name}" in problem
    assert problem.endswith(f"from rlhf_megatron.extend import {current.door_name}.")


def test_a_neighbour_of_the_plugin_is_looked_at_too(tmp_path: Path) -> None:
    neighbour = tmp_path / "neighbour_of_a_plugin.py"
    neighbour.write_text("from rlhf_megatron.rollout.kinds import LocalKind\n")
    problems = load_and_list_problems(
        tmp_path / "mine.py",
        "import neighbour_of_a_plugin\nfrom rlhf_megatron.rollout.engine import EngineAddress\n",
    )
    assert len(problems) == 2
    assert any(f"{neighbour}:1" in problem and "LocalEngineKind" in problem for problem in problems)
    assert any("mine.py:2" in problem and "EngineAddress" in problem for problem in problems)


def test_an_error_of_another_package_is_told_as_it_is(tmp_path: Path) -> None:
    """Former names are looked for where an import of this package fails, and nowhere else."""
    text = "import gone_module\nfrom rlhf_megatron.rollout.kinds import LocalKind\n"
    (problem,) = load_and_list_problems(tmp_path / "mine.py", text)
    assert "No module named 'gone_module'" in problem and "LocalEngineKind" not in problem


def test_a_failing_import_without_a_former_name_is_told_beside_others(tmp_path: Path) -> None:
    text = (
        "from rlhf_megatron.never import There\nfrom rlhf_megatron.rollout.kinds import LocalKind\n"
    )
    problems = load_and_list_problems(tmp_path / "mine.py", text)
    assert len(problems) == 2
    assert "LocalEngineKind" in problems[0]
    assert "No module named 'rlhf_megatron.never'" in problems[1]


def test_every_door_name_in_the_table_is_in_the_door() -> None:
    door_names = {current.door_name for current in _read_table().values()} - {""}
    assert len(door_names) > 150
    assert door_names <= set(extend.__all__)


def test_a_name_that_a_package_had_of_its_module_is_found() -> None:
    (current,) = find_current_names("rlhf_megatron.models.families", "FAMILIES")
    assert current.door_name == "FAMILIES"


def _read_table():  # type: ignore[no-untyped-def]
    from rlhf_megatron.moved_imports import _read_former_names

    return {key: places[0] for key, places in _read_former_names().items()}
