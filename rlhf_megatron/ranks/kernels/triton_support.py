"""Whether Triton kernels can run here, and why not. Imports triton only when a kernel is tried."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from dataclasses import dataclass

import torch

OLDEST = (3, 3)  # of triton; older ones were never tried with these kernels
# older interpreters fail with numpy >= 2.4: arrays of one element are no scalars there
INTERPRETER_OF_ANY_NUMPY = 3, 7
MIN_CAPABILITY = (8, 0)  # of the CUDA device: bfloat16, and what triton itself still supports


@dataclass(frozen=True)
class TritonSupport:
    """Whether Triton kernels can run. `why_not` is one sentence, empty where they can; `version` is
    empty where triton is not installed.
    """

    version: str
    why_not: str

    @property
    def is_usable(self) -> bool:
        """Return whether kernels can run."""
        return not self.why_not


def query_triton_support(device: torch.device) -> TritonSupport:
    """Return whether kernels can be compiled for and run on `device`, as far as that is known
    without importing triton.

    On a CPU they never can: there they run under the interpreter only, which is for tests (see
    `query_interpreter_support`). `try_triton_kernel` finds out whether a compiled kernel really
    runs.
    """
    found = _find_installed_triton()
    if device.type != "cuda":  # before what is missing: an installation would change nothing
        return TritonSupport(
            found.version, f"triton compiles for GPUs, and the device is {device.type!r}."
        )
    if not found.is_usable:
        return found
    if not torch.cuda.is_available():
        return TritonSupport(found.version, "torch finds no CUDA device.")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return TritonSupport(
            found.version,
            f"the device's compute capability ({capability[0]}.{capability[1]}) is below"
            f" {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}.",
        )
    return found


def query_interpreter_support() -> TritonSupport:
    """Return whether kernels can run on the CPU under triton's interpreter (TRITON_INTERPRET=1
    before triton is imported).
    """
    found = _find_installed_triton()
    if not found.is_usable:
        return found
    numpy = _read_triton_package_version("numpy")
    if not numpy:
        return TritonSupport(
            found.version, "triton's interpreter needs numpy; `pip install numpy`."
        )
    if _parse_major_minor(found.version) < INTERPRETER_OF_ANY_NUMPY and _parse_major_minor(
        numpy
    ) >= (2, 4):
        return TritonSupport(
            found.version,
            (
                f"triton {found.version} cannot interpret with numpy {numpy}; install numpy < 2.4"
                " or triton >= 3.7."
            ),
        )
    return found


def try_triton_kernel(device: torch.device) -> str:
    """Compile one small kernel, run it on `device` and check its result; return "" or the reason
    why that did not work.

    The first call takes a second or two. This catches problems that no version shows: no C compiler
    or no Python headers for triton's launcher, a driver that is too old, a cache directory that
    cannot be written.
    """
    support = query_triton_support(device)
    if not support.is_usable:
        return support.why_not
    try:
        from rlhf_megatron.ranks.kernels.log_prob_triton import (
            is_triton_interpreted,
            measure_smallest_tile_error,
        )

        if is_triton_interpreted():
            return (
                "TRITON_INTERPRET is set: kernels would run in Python, thousands of times"
                " slower; unset it."
            )
        error = measure_smallest_tile_error(device)
    except (
        Exception
    ) as problem:  # whatever a compiler, a linker or a driver raises: it is reported, not handled
        hint = (
            ""
            if shutil.which("gcc") or shutil.which("clang")
            else " (no gcc or clang is found: install one)"
        )
        lines = f"{type(problem).__name__}: {problem}".splitlines()
        line = lines[0].rstrip(".") if lines else type(problem).__name__
        return f"a kernel failed{hint}: {line}."
    if not error < 1e-5:
        return f"a kernel gave wrong numbers: off by {error:g}."
    return ""


def _find_installed_triton() -> TritonSupport:
    """Return the installed version of triton, and why it cannot be used where it is missing or too
    old.
    """
    if importlib.util.find_spec("triton") is None:
        return TritonSupport(
            "",
            "triton is not installed; `pip install triton` (a CUDA build of torch brings its own).",
        )
    version = _read_triton_package_version("triton") or _read_triton_package_version(
        "pytorch-triton"
    )
    if version and _parse_major_minor(version) < OLDEST:
        return TritonSupport(
            version,
            f"triton {version} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest one known.",
        )
    return TritonSupport(version or "unknown", "")


def _read_triton_package_version(package_name: str) -> str:
    """Return the installed version of a package; empty where it is not installed."""
    try:
        return importlib.metadata.version(package_name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _parse_major_minor(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version and ignore the rest ("3.6.0+git1234"); (0, 0) for other
    texts.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
