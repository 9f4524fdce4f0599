"""Optional packages: whether one is there, is the right one, and can be imported. Imports
nothing heavy itself.

What is broken raises whatever its authors thought of (Transformer Engine: AssertionError,
RuntimeError and FileNotFoundError beside ImportError, of which megatron-core expects the last one
only). Here it becomes a sentence.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRANSFORMER_ENGINE = "transformer_engine"
APEX = "apex"
DEEP_EP = "deep_ep"
# of Apex: adds a weight's gradient to a float32 buffer
GRADIENT_EXTENSION = "fused_weight_gradient_mlp_cuda"
INSTALL = {
    TRANSFORMER_ENGINE: "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    APEX: (
        "git clone https://github.com/NVIDIA/apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v"
        " --no-build-isolation ./apex (its README has the flags of older versions)"
    ),
    "flash_attn": "pip install --no-build-isolation flash-attn",
    "flash_attn_interface": (
        "git clone https://github.com/Dao-AILab/flash-attention && pip install --no-build-isolation"
        " ./flash-attention/hopper"
    ),
    "triton": "pip install --no-deps triton",
    DEEP_EP: (
        "git clone https://github.com/deepseek-ai/DeepEP && pip install"
        " --no-build-isolation ./DeepEP"
    ),
}
NOT_NVIDIAS = (
    "it is not NVIDIA's Apex: PyPI has another project of this name, NVIDIA's is built from source"
)


@dataclass(frozen=True)
class OptionalPackage:
    """The facts about a package that are known without importing it."""

    module: str
    is_present: bool
    version: str = ""  # empty: not present, or installed without metadata
    why_not: str = ""  # one sentence: absent, or present and of no use

    @property
    def is_usable(self) -> bool:
        """Return whether the package is present and nothing speaks against its use."""
        return not self.why_not


def find_package(module_name: str, distribution_names: Sequence[str] = ()) -> OptionalPackage:
    """Return whether a module is installed, and the version of the first of `distribution_names`
    (by default the module's name) that has a version. The module is not imported.
    """
    if not _has_module(module_name):
        return OptionalPackage(module_name, False, why_not=f"{module_name} is not installed")
    names = distribution_names or (module_name,)
    return OptionalPackage(
        module_name,
        True,
        next((found for name in names if (found := read_package_version(name))), ""),
    )


def read_package_version(distribution: str) -> str:
    """Return the installed version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_transformer_engine() -> OptionalPackage:
    """Return what is installed of Transformer Engine, without importing it. The package without its
    library for torch (a plain `pip install`) is not usable.
    """
    found = find_package(TRANSFORMER_ENGINE, ("transformer-engine", "transformer_engine"))
    if not found.is_present:
        return found
    folder = _find_package_folder(TRANSFORMER_ENGINE)
    if folder is None or not (folder / "pytorch").is_dir():
        return OptionalPackage(
            found.module,
            True,
            found.version,
            f"{folder or found.module} has no transformer_engine.pytorch",
        )
    return found


def find_apex() -> OptionalPackage:
    """Return what is installed of Apex, without importing it; only NVIDIA's Apex with its CUDA
    extensions is usable.
    """
    found = find_package(APEX)
    if not found.is_present:
        return found
    folder = _find_package_folder(APEX)
    if folder is None or not all(
        (folder / part).exists() for part in ("optimizers", "multi_tensor_apply")
    ):
        return OptionalPackage(APEX, True, found.version, NOT_NVIDIAS)
    if not _has_module("amp_C"):
        why_not = (
            "it was built without its CUDA extensions (no module amp_C), which its optimizers"
            " and norms need"
        )
        return OptionalPackage(APEX, True, found.version, why_not)
    return found


def has_gradient_extension() -> bool:
    """Return whether Apex was built with the extension with which megatron-core's layers add their
    weight gradients.
    """
    return _has_module(GRADIENT_EXTENSION)


def explain_missing_deep_ep() -> str:
    """Return why DeepEP's kernels cannot send tokens to experts; empty when they can."""
    return find_package(DEEP_EP).why_not or try_import_attribute(DEEP_EP, "Buffer")[1]


def explain_missing_fused_permutation() -> str:
    """Return why Transformer Engine cannot sort tokens by expert; empty when it can."""
    name = "transformer_engine.pytorch.permutation"
    return (
        find_transformer_engine().why_not or try_import_attribute(name, "moe_permute_with_probs")[1]
    )


def explain_missing_compiler() -> str:
    """Return the part that torch.compile for a GPU lacks on this machine; empty when nothing is
    missing.
    """
    if not _has_module("triton"):
        return "triton is not installed"
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "no C compiler is found, which triton needs for its launchers"
    return ""


@functools.cache
def try_import_attribute(module: str, attribute_name: str) -> tuple[Any, str]:
    """Return (the attribute of the module, ""), or (None, the import error in one line). The result
    is cached.
    """
    try:
        return getattr(importlib.import_module(module), attribute_name), ""
    except Exception as error:  # a package that is broken raises what it likes
        return None, format_error_line(error)


def format_error_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0] if lines else type(error).__name__


def _has_module(name: str) -> bool:
    """Return whether a module can be found, without importing it (but importing its parent
    packages).
    """
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: it is in sys.modules without a spec
        return False


def _find_package_folder(module: str) -> Path | None:
    """Return the first folder of a package, or None where it is absent or not a package."""
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None
