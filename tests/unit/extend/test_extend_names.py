"""The door for users' parts: its table, imports, documentation and what it loads agree."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from places import ROOT

import rlhf_megatron
from rlhf_megatron import extend
from rlhf_megatron.extend import door_names
from rlhf_megatron.extend.door_names import (
    BASE_CLASSES,
    DOOR_NAMES,
    FORMER_DOOR_NAMES,
    NAMES_BY_KIND,
    FormerDoorName,
)
from rlhf_megatron.registry import PACKAGES, load_registry
from tools import extend_door

DOOR = ROOT / "rlhf_megatron" / "extend" / "__init__.py"
PAGE = ROOT / "docs" / "extending.md"
EXAMPLE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAVY = ("torch", "aiohttp", "megatron", "transformers", "numpy", "ray")

INTERNAL_IMPORTS = {
    "Tensor": "a user's file imports torch itself; ours must not load it with the configuration",
    "torch": "likewise",
    "np": "likewise",
    "GRPOParams": "parameters of another estimator; a user's has its own",
    "JSON_LABEL_KEY": "how a list of labels is marked; has_json_label tells",
    "ONE_TEXT": "words of our messages",
    "write_text_file": "what a full disk is told as; a user's file writes its text itself",
    "format_install_command": "how an extra of this package is installed",
    "FAILOVER_S": "a number of our messages",
    "FIELDS_BY_VERL_NAME": "the other names of a sample's fields",
    "find_last_box": "find_last_boxed returns its content",
    **dict.fromkeys(
        (
            "NUMBERS_SIDE_BY_SIDE",
            "PLAIN_NUMBER",
            "find_loose_word",
            "read_formula_spelling",
            "respell_prose",
            "strip_line_mark",
        ),
        "the spellings that math_verify reads; a user's reward calls math_verify",
    ),
    "add_import_folder": "where the modules of a user's part lie; the run has seen to that",
    "add_working_directory": "likewise",
}
"""What our own parts import and a user's does not need, with the reason."""


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_type_checking_imports() -> dict[str, tuple[str, str]]:
    """Return name -> (module, attribute) of the imports that only type checkers see."""
    (block,) = (
        node
        for node in ast.parse(DOOR.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            assert alias.asname is not None, f"{alias.name} is no explicit re-export"
            found[alias.asname] = (node.module, alias.name)
    return found


def test_importing_the_door_loads_nothing_heavy() -> None:
    code = "import sys, rlhf_megatron.extend; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(run_python(code).split())
    assert "rlhf_megatron" in loaded
    assert not loaded & set(HEAVY)


def test_registries_load_no_torch() -> None:
    """`config check` runs plugins: their decorators must not load what they need only later."""
    registries = [name for name in DOOR_NAMES if name.isupper() and name.endswith("S")]
    registries = [name for name in registries if DOOR_NAMES[name].summary.startswith("registry of")]
    assert len(registries) == 15
    code = (
        f"import sys; from rlhf_megatron.extend import {', '.join(registries)}; print(*sys.modules)"
    )
    assert not set(run_python(code).split()) & set(HEAVY)


def test_no_name_loads_megatron() -> None:
    """A plugin runs on the controller and in engine servers too."""
    code = (
        "import sys, rlhf_megatron.extend as door\n"
        "for name in door.__all__: getattr(door, name)\n"
        "print(*{module.split('.')[0] for module in sys.modules})"
    )
    assert not set(run_python(code).split()) & {"megatron", "transformers", "ray", "sglang"}


@pytest.mark.parametrize("name", sorted(DOOR_NAMES))
def test_a_name_is_what_its_module_has(name: str) -> None:
    entry = DOOR_NAMES[name]
    assert getattr(extend, name) is getattr(importlib.import_module(entry.module), entry.attribute)
    assert entry.summary and len(entry.summary) <= 100 and not entry.summary.endswith(".")


def test_table_imports_and_all_agree() -> None:
    table = {name: (entry.module, entry.attribute) for name, entry in DOOR_NAMES.items()}
    assert read_type_checking_imports() == table
    assert set(extend.__all__) == set(table) and set(dir(extend)) == set(table)
    assert sum(map(len, NAMES_BY_KIND.values())) == len(DOOR_NAMES), "a name stands twice"
    assert set(BASE_CLASSES) <= set(DOOR_NAMES)


def test_the_page_lists_every_name() -> None:
    text = PAGE.read_text()
    assert extend_door.replace_name_tables(text) == text, "run python -m tools.extend_door"


def test_examples_import_from_the_door_alone() -> None:
    """So do all files and documents that users start from."""
    sources = {path.name: path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    for page in (ROOT / "docs").rglob("*.md"):
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        ):
            sources[f"{page.name} {number}"] = block
    assert any(name.startswith("extending.md") for name in sources)
    doors = {"rlhf_megatron", "rlhf_megatron.extend"}
    for name, source in sources.items():
        modules = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
        deep = {module for module in modules if module.startswith("rlhf_megatron")} - doors
        assert not deep, f"{name} imports {deep}"


def list_our_imports(path: Path) -> set[tuple[str, str]]:
    """(module, name) of what a module imports of this package, or reads of a module of it."""
    tree = ast.parse(path.read_text())
    found = set()
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_megatron."):
            assert node.module
            for alias in node.names:
                as_module = ROOT / f"{node.module.replace('.', '/')}/{alias.name}.py"
                if as_module.exists():
                    modules[alias.name] = f"{node.module}.{alias.name}"
                else:
                    found.add((node.module, alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            found.add((modules[ast.unparse(node.value)], node.attr))
    return found


def test_the_door_has_what_our_own_parts_import() -> None:
    """A user's part is made of the same pieces as one of ours."""
    door_objects = {id(getattr(extend, name)) for name in extend.__all__}
    door_attributes = {entry.attribute for entry in DOOR_NAMES.values()}
    num_parts = 0
    missing = []
    for package in sorted(set(PACKAGES.values())):
        folder = ROOT / package.replace(".", "/")
        for path in sorted(folder.glob("*.py")) if folder.is_dir() else ():
            if not re.search(r"\.register\(|register_group_estimator\(", path.read_text()):
                continue
            if path.stem == "__init__" or f"{package}.{path.stem}" in {
                entry.module for entry in DOOR_NAMES.values()
            }:
                continue
            num_parts += 1
            for module, name in sorted(list_our_imports(path)):
                value = getattr(importlib.import_module(module), name)
                is_there = id(value) in door_objects or name in door_attributes
                if not is_there and name not in INTERNAL_IMPORTS:
                    missing.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert num_parts > 40
    assert not missing, "\n".join(missing)


def test_the_door_has_all_registries() -> None:
    registries = {id(load_registry(kind)) for kind in PACKAGES}
    assert registries <= {id(getattr(extend, name)) for name in extend.__all__}


def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    """The examples of the page are right to mypy, and a wrong use of a name is not."""
    examples = EXAMPLE.findall(PAGE.read_text())
    for name, text in examples:
        (tmp_path / name).write_text(text)
    imports = ", ".join(extend.__all__)
    wrong = "from rlhf_megatron.extend import PromptRow, TaskRows\nTaskRows(train=PromptRow)\n"
    (tmp_path / "all_names.py").write_text(f"from rlhf_megatron.extend import {imports}\n")
    (tmp_path / "wrong.py").write_text(wrong)
    command = [
        *(sys.executable, "-m", "mypy", "--strict", "--config-file", ""),
        *("--no-site-packages", "--ignore-missing-imports"),  # torch is not what is looked at
        *("--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache")),
        *map(str, sorted(tmp_path.glob("*.py"))),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2 and all("wrong.py:2" in line for line in errors), done.stdout
    assert 'Missing positional argument "held_out"' in done.stdout


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Told'"):
        _ = extend.Told  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Told'"):
        exec("from rlhf_megatron.extend import Told")


def test_a_former_name_works_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = FormerDoorName("RunLogger", removed_in="9.9.0")
    monkeypatch.setitem(door_names.FORMER_DOOR_NAMES, "Logger", former)
    plugin = tmp_path / "planted.py"
    plugin.write_text("x = 1\nfrom rlhf_megatron.extend import Logger\n")
    space: dict[str, object] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # once a line: Python's own default
        exec(compile(plugin.read_text(), str(plugin), "exec"), space)
    assert space["Logger"] is extend.RunLogger
    (warning,) = caught
    assert warning.category is FutureWarning, "Python hides a DeprecationWarning from users"
    assert str(warning.message) == (
        "rlhf_megatron.extend.Logger is RunLogger now, and Logger is removed in 9.9.0; import"
        " RunLogger."
    )
    assert (warning.filename, warning.lineno) == (str(plugin), 2)
    assert "Logger" not in extend.__all__


def read_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".")[:3])


def test_former_names_are_removed_in_time() -> None:
    version = read_version(rlhf_megatron.__version__)
    for name, former in FORMER_DOOR_NAMES.items():
        assert name not in DOOR_NAMES and former.name in DOOR_NAMES
        assert read_version(former.removed_in) > version, f"remove {name}"


def test_packaged_tables_are_those_of_docs_dev() -> None:
    folder = DOOR.parent
    for name, render in (
        ("former_names.tsv", extend_door.render_former_names),
        ("former_hooks.tsv", extend_door.render_former_hooks),
    ):
        assert (folder / name).read_text() == render(), "run python -m tools.extend_door"


def test_packaged_tables_are_installed() -> None:
    assert '"rlhf_megatron.extend": ["*.tsv"]' in (ROOT / "setup.py").read_text()
