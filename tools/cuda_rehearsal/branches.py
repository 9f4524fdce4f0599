"""Where the package does something else on a GPU than on a CPU: functions, found by reading the
sources. Each is run by the rehearsal on device cuda, or is excused here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rlhf_megatron"
KINDS = ("cuda", "cpu")
ATTRIBUTES = ("is_available", "is_cuda", "device_count")
CALLS = ("has_accelerator", "count_devices")
# Text and arithmetic about devices, or a setting of another program: nothing is
# computed on one there.
APART = (
    "cli/",
    "jobs/from_verl/",
    "config/",
    "controller/preflight.py",
    "controller/scheduler/run_replay.py",
    "planning/",
    "ranks/parallel/cpu_platform.py",
    "ranks/kernels/head_memory.py",
)
APART += (
    "runtime/torchrun/machine_servers.py",
)  # devices of servers, from numbers alone, with unit tests
NOT_APART = ("config/cuda_environment.py",)  # sets up the devices of this process
# those that the last rehearsal of all cases has come to
TAKEN = Path(__file__).with_name("branches.txt")
_NO_PACKAGE = (
    "Transformer Engine and Apex have no wheels: nothing of theirs is installed where this runs"
)
_NO_TRACE = "runs in autograd's own thread, which no tracer follows: its figures are compared"
_STOCK = "stock SGLang on GPUs: the case `servers` comes here, where 8.6 GB of it are installed"
EXCUSED: dict[str, str] = {
    "weights/quantised_weights.py:quantise_to_fp8": (
        "takes more numbers at once on a GPU, by the same formula"
    ),
    "jobs/generation/model_source.py:_make_engine_overrides": (
        "chooses stock SGLang where it sees a GPU, for files without a configuration"
    ),
    "ranks/models/layer_specs.py:_make_grouped_experts_spec": _NO_PACKAGE,
    "ranks/models/fused_kernel_choice.py:choose_adam_kernel": _NO_PACKAGE,
    "device.py:choose_distributed_backend": _STOCK,
    "ranks/parallel/weight_grad.py:wgrad_gemm_accum_fp32": _NO_TRACE,
    "rollout/fleet/engine_setup.py:EngineSetup.make_machine_gpus": _STOCK,
    "rollout/sglang/attached_engines.py:_find_settings_problems": _STOCK,
    "rollout/sglang/sglang_environment.py:runs_on_cpu": _STOCK,
    "rollout/transports/tensor_transport.py:SGLangTensorTransport.deliver_bucket": _STOCK,
    "runtime/ray/ray_driver.py:_count_devices": (
        "Ray counts devices by itself, and finds none of the null library's"
    ),
}


def device_branches() -> set[str]:
    """Returns "path:qualified name" of each function that asks for the kind of device."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name in NOT_APART or not name.startswith(APART):
            found |= {f"{name}:{function}" for function in _asking(ast.parse(path.read_text()), "")}
    return found


def listed(folder: Path) -> Path:
    """Writes the list that a rehearsal of numbers reads,
    and forgets what an earlier one has seen.
    """
    path = folder / "branches"
    path.write_text("\n".join(sorted(device_branches())))
    path.with_suffix(".seen").unlink(missing_ok=True)
    return path


def not_seen(path: Path) -> list[str]:
    """The functions of the list that no process has called on device cuda and that
    are not excused.
    """
    return sorted(set(path.read_text().splitlines()) - seen(path) - EXCUSED.keys())


def seen(path: Path) -> set[str]:
    """Those that some process has called."""
    return set(path.with_suffix(".seen").read_text().splitlines())


def _asking(tree: ast.AST, inside: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function or isinstance(node, ast.ClassDef):
            yield from _asking(node, f"{inside}{node.name}{'.<locals>.' if is_function else '.'}")
        else:
            if inside and _asks(node):
                yield inside.removesuffix(".<locals>.").removesuffix(".")
            yield from _asking(node, inside)


def _asks(node: ast.AST) -> bool:
    """Whether a comparison with a kind, or a question for devices, stands in a node that
    is no function.
    """
    if isinstance(node, ast.Compare):
        return any(
            isinstance(part, ast.Constant) and part.value in KINDS
            for part in (node.left, *node.comparators)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in CALLS
    return isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES
