"""Imports go down the list of wings, and each process loads the wings that it is
declared to load.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from import_graph import (
    PACKAGE,
    close_over_imports,
    find_import_circles,
    list_modules,
    read_imports,
)

PURE = (
    "registry",
    "lazy",
    "plugins",
    "part_hooks",
    "part_signatures",
    "moved_imports",
    "stop",
    "retry",
    "parent_process",
    "import_folders",
    "http_guard",
    "write_errors",
    "install_hints",
    "faults",
    "device",
    "mcore_patch",
    "config",
    "data",
    "algorithms",
)
WINGS = [
    PURE,
    ("weights",),
    ("ranks",),
    ("rollout",),
    ("rewards",),
    ("agents",),
    ("runtime",),
    ("controller",),
    ("planning",),
    ("jobs",),
    ("extend", "api", "cli", "__main__"),
]
"""From the ground up."""
LEVEL = {name: level for level, names in enumerate(WINGS) for name in names}


def wing_of(module: str) -> str:
    """The folder, or the module beside the folders; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def test_imports_go_down() -> None:
    wrong = []
    for module in list_modules():
        for imported in read_imports(module):
            if wing_of(module) == "" or not imported.name.startswith("rlhf_megatron."):
                continue
            if LEVEL[wing_of(imported.name)] > LEVEL[wing_of(module)]:
                wrong.append(f"{module} imports {imported.name}")
    assert not wrong, "\n".join(wrong)


def test_every_top_level_name_is_in_a_wing() -> None:
    names = {wing_of(module) for module in list_modules()} - {""}
    assert names <= set(LEVEL), f"add {names - set(LEVEL)} to the list of wings"


def test_no_modules_import_each_other() -> None:
    assert find_import_circles() == []


@dataclass(frozen=True)
class Process:
    """A process of a run: the module that it begins with, and the wings that it may load."""

    entry: str
    wings: tuple[str, ...]
    exceptions: dict[str, str] = field(default_factory=dict)
    """Modules of other wings that it may load -> why."""
    with_functions: bool = True  # imports inside functions count


PROTOCOLS_OF_RANKS = {
    "ranks.workers.worker_protocols": "the methods of ranks that the controller calls, as types",
    "ranks.workers.rank_reports": "what ranks report, as dataclasses",
    "ranks.workers.offload": "the names of the parts of a rank's memory",
    "ranks.workers.forwarded_documents": "counts the tokens that ranks forward",
    "ranks.parallel.gloo_device": "one network thread a process, for each process group",
}
PROCESSES = {
    "controller": Process(
        "controller.scheduler.training_run",
        (*PURE, "weights", "rollout", "rewards", "agents", "runtime", "controller"),
        {
            **PROTOCOLS_OF_RANKS,
            "ranks.resharding.weight_sender": "the arguments and reports of a weight sync",
            "ranks.workers.actor_losses": "checks the losses that a configuration names",
            "ranks.kernels.policy_row_loss": "the same",
            "ranks.kernels.weighted_row_loss": "the same",
            "ranks.kernels.triton_support": "the same",
        },
        with_functions=False,
    ),
    "supervised controller": Process(
        "controller.supervised.supervised_run",
        (*PURE, "weights", "rollout", "rewards", "agents", "runtime", "controller"),
        {
            **PROTOCOLS_OF_RANKS,
            "ranks.resharding.weight_sender": "the arguments and reports of a weight sync",
            "ranks.workers.actor_losses": "checks the losses that a configuration names",
            "ranks.kernels.policy_row_loss": "the same",
            "ranks.kernels.weighted_row_loss": "the same",
            "ranks.kernels.triton_support": "the same",
        },
        with_functions=False,
    ),
    "rank": Process("runtime.rank_process", (*PURE, "weights", "ranks", "rollout", "runtime")),
    "roles of a rank": Process(
        "runtime.rank_roles", (*PURE, "weights", "ranks", "rollout", "runtime")
    ),
    "bundled engine server": Process("rollout.local.local_server", (*PURE, "weights", "rollout")),
    "SGLang's loader": Process("rollout.sglang.server.loader", (*PURE, "weights", "rollout")),
    "router": Process("rollout.sglang.server.router_main", (*PURE, "rollout")),
    "driver": Process("rollout.drivers.driver_process", (*PURE, "weights", "rollout")),
    "reward worker": Process("rewards.service.worker_template", (*PURE, "rewards")),
    "dialogue of an agents' worker": Process("agents.dialogue", (*PURE, "agents")),
    "torchrun's agent": Process("runtime.torchrun.agent", (*PURE, "weights", "rollout", "runtime")),
    "route store": Process("runtime.route_store", (*PURE, "rollout", "runtime")),
    "command line": Process("cli.main", ("config", "mcore_patch", "import_folders", "cli")),
    "restarts": Process("cli.restarts", (*PURE, "runtime", "cli")),
    "launch size": Process("cli.launch_size", (*PURE, "cli")),
}
SMALLER = {
    "bundled engine server": 54,
    "SGLang's loader": 40,
    "route store": 20,
    "command line": 12,
}
"""Process -> the number of modules that it may load: one of a wing brings few others of it."""


@pytest.mark.parametrize("name", PROCESSES)
def test_processes_load_their_wings_only(name: str) -> None:
    process = PROCESSES[name]
    loaded_by = close_over_imports(f"rlhf_megatron.{process.entry}", process.with_functions)
    allowed = {*process.wings, ""}
    wrong = []
    for module, loader in loaded_by.items():
        short = module.removeprefix("rlhf_megatron.")
        is_package_of_exception = any(one.startswith(f"{short}.") for one in process.exceptions)
        if wing_of(module) in allowed or short in process.exceptions or is_package_of_exception:
            continue
        wrong.append(f"{module}, imported by {loader}")
    assert not wrong, f"{name} ({process.entry}) loads:\n" + "\n".join(wrong)
    assert len(loaded_by) <= SMALLER.get(name, len(loaded_by)), sorted(loaded_by)


def test_exceptions_are_needed() -> None:
    """A module that no process loads any more leaves the list."""
    for name, process in PROCESSES.items():
        loaded_by = close_over_imports(f"rlhf_megatron.{process.entry}", with_functions=True)
        unused = {one for one in process.exceptions if f"rlhf_megatron.{one}" not in loaded_by}
        assert not unused, f"{name} does not load {sorted(unused)}"


def test_heavy_packages_stay_where_they_belong() -> None:
    """megatron on ranks; triton, ray, SGLang, transformers in a place each; no torch in what
    must load at once.
    """
    wrong = []
    for module, path in list_modules().items():
        place = path.relative_to(PACKAGE)
        roots = {imported.name.partition(".")[0] for imported in read_imports(module)}
        is_report = place.parts[:3] == ("controller", "observe", "report")
        is_in_server = place.parts[:3] == ("rollout", "sglang", "server")
        is_triton_file = place.parts[:2] == ("ranks", "kernels") and path.stem.endswith("_triton")
        # trainers know no transformers but in two places: for the backend fsdp, and for tokenizers
        # that transformers does not read as tokenizer.json says
        is_transformers_file = place.as_posix() in (
            "weights/transformers_causal_lm.py",
            "data/tokenizer_backend.py",
        )
        is_light = wing_of(module) in (
            "registry",
            "plugins",
            "part_hooks",
            "moved_imports",
            "extend",
            "config",
            "faults",
            "stop",
        )
        is_right = {
            "megatron": wing_of(module) == "ranks",
            "triton": is_triton_file,
            "ray": place.as_posix() == "runtime/ray/ray_cluster.py",
            "sglang": is_in_server,
            "sglang_router": is_in_server,
            "transformers": place.parts[:2] == ("rollout", "local") or is_transformers_file,
            "torch": not is_light and not is_report,
            "numpy": not is_report,
        }
        wrong += [
            f"{place} imports {name}"
            for name, is_allowed in is_right.items()
            if name in roots and not is_allowed
        ]
    assert not wrong, "\n".join(wrong)


def takes_run_config(node: ast.AST) -> bool:
    """Whether a function has a parameter, or a class a field, whose annotation names RunConfig,
    also as a string.
    """
    annotations: list[ast.expr | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        every_argument = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        ]
        annotations = [argument.annotation for argument in every_argument]
    elif isinstance(node, ast.ClassDef):
        annotations = [
            statement.annotation for statement in node.body if isinstance(statement, ast.AnnAssign)
        ]
    return any(
        "RunConfig" in ast.unparse(annotation)
        for annotation in annotations
        if annotation is not None
    )


def test_few_functions_take_the_whole_configuration() -> None:
    """Outside config/, cli/ and the file that wires a run, a function takes the sections
    that it needs.
    """
    found = []
    wiring = PACKAGE / "controller" / "scheduler" / "training_run.py"
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ("config", "cli") or path == wiring:
            continue
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if takes_run_config(node)]
        found += [f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', '')}" for node in nodes]
    assert len(found) <= 20, "pass sections in place of RunConfig:\n" + "\n".join(sorted(found))


def test_modules_name_their_subject() -> None:
    """A basename stands once in the package, so that a stack trace tells the file."""
    places: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            places.setdefault(path.name, []).append(path.relative_to(PACKAGE))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
