"""Every message on a missing package has its command from one function, and names an extra that
setup.py has.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

import rlhf_megatron
from rlhf_megatron.install_hints import (
    DISTRIBUTION,
    _format_command,
    _format_make_target,
    format_install_command,
)

PACKAGE = Path(rlhf_megatron.__file__).parent
ROOT = PACKAGE.parent
HINT = re.compile(r"pip install[^\n`]*?['\"]?(?:\.|rlhf-megatron)\[([\w,-]+)\]")


def read_extras() -> set[str]:
    """The keys of EXTRAS in setup.py, which runs when it is imported."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS":
            return set(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no EXTRAS")


def list_asked_extras() -> dict[str, str]:
    """Extra -> file, of the calls with a literal."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "format_install_command":
                (argument,) = node.args
                if isinstance(argument, ast.Constant):
                    found[str(argument.value)] = str(path.relative_to(ROOT))
    return found


def test_each_extra_of_a_message_is_one_of_setup() -> None:
    asked = list_asked_extras()
    assert len(asked) >= 8
    assert {extra: file for extra, file in asked.items() if extra not in read_extras()} == {}


def test_extras_of_rewards_that_doctor_names_are_of_setup() -> None:
    from rlhf_megatron.cli.doctor.doctor_command import EXTRAS_BY_REWARD

    assert {extra for _, extra in EXTRAS_BY_REWARD.values()} <= read_extras()


def test_no_message_writes_the_command_by_itself() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "install_hints.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"rlhf-megatron\[|\(pip install '\.\[", line)
    ]
    assert found == []


def test_no_message_names_a_target_of_the_makefile_by_itself() -> None:
    """An installed package has no Makefile: the hint says where it is."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and id(node) not in statements  # no docstring
            and re.search(r"`make [a-z]|\bmake [a-z]+-[a-z]+\b", str(node.value))
        ]
    assert found == []


def test_extras_of_documents_are_those_of_setup() -> None:
    paths = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").rglob("*.yaml"),
    ]
    named = {
        extra: path.name
        for path in paths
        for extras in HINT.findall(path.read_text())
        for extra in extras.split(",")
        if extra != "NAME"  # of docs/install.md
    }
    assert len(named) >= 3
    assert {extra: file for extra, file in named.items() if extra not in read_extras()} == {}


def test_the_page_on_installation_lists_all_extras() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    assert {extra for extra in read_extras() if f"`{extra}`" not in text} == set()


def test_commands_of_a_wheel_and_of_a_working_tree(tmp_path: Path) -> None:
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    assert _format_command("demo", site_packages, tmp_path) == "pip install 'rlhf-megatron[demo]'"
    tree = tmp_path / "my tree"
    tree.mkdir()
    (tree / "setup.py").touch()
    assert _format_command("demo", tree, tree) == "pip install -e '.[demo]'"
    *_, target = shlex.split(_format_command("demo", tree, tmp_path))
    assert target == f"{tree}[demo]"


def test_targets_of_the_makefile_name_their_folder(tmp_path: Path) -> None:
    hint = _format_make_target("sglang-cpu", tmp_path, tmp_path)
    assert hint == "`make sglang-cpu` in a clone of the repository"
    (tmp_path / "setup.py").touch()
    assert _format_make_target("sglang-cpu", tmp_path, tmp_path) == "`make sglang-cpu`"
    elsewhere = _format_make_target("sglang-cpu", tmp_path, tmp_path / "runs")
    assert elsewhere == f"`make sglang-cpu` in {tmp_path}"


def test_the_command_is_right_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests run in a working tree."""
    monkeypatch.chdir(tmp_path)
    *words, target = shlex.split(format_install_command("parquet"))
    assert words == ["pip", "install", "-e"]
    assert (Path(target.removesuffix("[parquet]")) / "setup.py").is_file()


def test_the_installed_package_provides_the_extras() -> None:
    """pip finds the name, and what an extra needs, in this metadata."""
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    assert set(list_asked_extras()) <= set(metadata.get_all("Provides-Extra") or ())
