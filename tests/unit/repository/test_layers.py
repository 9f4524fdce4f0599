"""Imports go down the list of layers only: the whole package is read, nothing is imported."""

import ast
from pathlib import Path

from places import ROOT

PACKAGE = ROOT / "rlhf_megatron"
LAYERS = [
    ("registry", "plugins", "config", "faults", "stop"),
    ("data", "algorithms", "rewards"),
    ("parallel", "kernels"),
    ("models",),
    ("checkpoint", "workers"),
    ("resharding", "conversion"),
    ("rollout", "rewards/service"),
    ("runtime",),
    (
        "sync",
        "scheduler",
        "recovery",
        "observe",
        "evaluation",
        "generation",
        "serving",
        "supervised",
    ),
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


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.split(".")[0] for name in imported(path)}


def test_imports_go_down() -> None:
    wrong = []
    for path in MODULES:
        here = level(path.relative_to(PACKAGE).with_suffix("").parts)
        assert here is not None, path
        for name in imported(path):
            package, *parts = name.split(".")
            there = level(tuple(parts)) if package == "rlhf_megatron" else None
            if there is not None and there > here:
                wrong.append(
                    f"{path.relative_to(PACKAGE)} (layer {here}) imports {name} (layer {there})"
                )
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_where_they_belong() -> None:
    """megatron in few rooms; triton, ray, SGLang, transformers in a place each; no torch in what must load at once."""
    wrong = []
    for path in MODULES:
        place, roots = path.relative_to(PACKAGE), imports(path)
        is_right = {
            "megatron": top(path) in MEGATRON,
            "triton": top(path) == "kernels" and path.stem.endswith("_triton"),
            "ray": place.as_posix() == "runtime/ray/ray_cluster.py",
            "sglang": place.parts[:3] == ("rollout", "sglang", "server"),
            "sglang_router": place.parts[:3] == ("rollout", "sglang", "server"),
            # trainers know no transformers but in one place, for the backend fsdp
            "transformers": place.parts[:2] == ("rollout", "local")
            or place.as_posix() == "weights/transformers_causal_lm.py",
            "torch": LEVEL[top(path)] > 0 and place.parts[:2] != ("observe", "report"),
            "numpy": place.parts[:2] != ("observe", "report"),
        }
        wrong += [
            f"{place} imports {name}"
            for name, is_there in is_right.items()
            if name in roots and not is_there
        ]
    assert not wrong, "\n".join(wrong)


def test_every_top_level_package_has_a_layer() -> None:
    found = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert found <= set(LEVEL), f"add {found - set(LEVEL)} to the list of layers"


def takes_run_config(node: ast.AST) -> bool:
    """Whether a function has a parameter, or a class a field, whose annotation names RunConfig, also as a string."""
    annotations: list[ast.expr | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        of = node.args
        arguments = [
            *of.posonlyargs,
            *of.args,
            *of.kwonlyargs,
            *filter(None, (of.vararg, of.kwarg)),
        ]
        annotations = [argument.annotation for argument in arguments]
    elif isinstance(node, ast.ClassDef):
        annotations = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
    return any("RunConfig" in ast.unparse(one) for one in annotations if one is not None)


def test_few_functions_take_the_whole_configuration() -> None:
    """Outside config/, cli/ and the file that wires a run, a function takes the sections that it needs."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if top(path) not in ("config", "cli") and path != PACKAGE / "scheduler" / "run.py":
            nodes = [
                node for node in ast.walk(ast.parse(path.read_text())) if takes_run_config(node)
            ]
            found += [f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', '')}" for node in nodes]
    assert len(found) <= 20, "pass sections in place of RunConfig:\n" + "\n".join(sorted(found))
