"""Imports go down the list of layers only: the whole package is read, nothing is imported."""

import ast
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "rlhf_megatron"
LAYERS = [
    ("registry", "plugins", "config", "faults", "stop"),
    ("data", "algorithms", "rewards"),
    ("parallel", "kernels"),
    ("models",),
    ("checkpoint", "workers"),
    ("resharding",),
    ("rollout", "rewards/service"),
    ("runtime",),
    ("sync", "scheduler", "recovery", "observe", "evaluation"),
    ("proof", "simulator", "verl", "cli"),
]
"""Rooms from the ground up. A folder below a room may have a layer of its own."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MEGATRON = ("parallel", "models", "checkpoint", "workers")
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in LAYERS[0])


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def top(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def level(parts: tuple[str, ...]) -> int | None:
    """Layer of the innermost folder that has one; None for a module beside the rooms."""
    return LEVEL.get("/".join(parts[:2]), LEVEL.get(parts[0])) if parts else None


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    here = level(path.relative_to(PACKAGE).with_suffix("").parts)
    assert here is not None
    for name in imported(path):
        package, *parts = name.split(".")
        there = level(tuple(parts)) if package == "rlhf_megatron" else None
        if there is not None:
            assert there <= here, f"{path.name} (layer {here}) imports {name} (layer {there})"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    if "megatron" in roots:
        assert top(path) in MEGATRON, "megatron is imported in parallel/, models/, checkpoint/ and workers/ only"
    if "triton" in roots:
        assert top(path) == "kernels" and path.stem.endswith("_triton")
    if "ray" in roots:
        assert path.relative_to(PACKAGE).as_posix() == "runtime/ray/cluster.py"
    if {"sglang", "sglang_router"} & roots:
        assert path.relative_to(PACKAGE).parts[:3] == ("rollout", "sglang", "server")
    if "transformers" in roots:
        assert path.relative_to(PACKAGE).parts[:2] == ("rollout", "local"), "trainers know no transformers"
    if LEVEL[top(path)] == 0:
        assert "torch" not in roots, "configuration must load without torch"
    if path.relative_to(PACKAGE).parts[:2] == ("observe", "report"):
        assert not roots & {"torch", "numpy"}, "a report is made on machines without torch, and at once"


def test_every_top_level_package_has_a_layer() -> None:
    found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert found <= set(LEVEL), f"add {found - set(LEVEL)} to the list of layers"
