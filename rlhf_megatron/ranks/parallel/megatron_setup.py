"""Readies megatron-core in a process: version, fixes, the CPU platform where needed,
and `trainer.deterministic`.
"""

from __future__ import annotations

import importlib

from rlhf_megatron.mcore_patch import (
    check_megatron_version,
    check_undeclared_dependencies,
)
from rlhf_megatron.ranks.parallel import cpu_platform, mcore_fixes
from rlhf_megatron.ranks.parallel.gloo_device import share_gloo_device
from rlhf_megatron.ranks.parallel.optional_packages import (
    INSTALL,
    TRANSFORMER_ENGINE,
    find_package,
    format_error_line,
)


def prepare_megatron() -> None:
    """Check the version of megatron-core and apply the fixes, the CPU platform and shared gloo
    threads. Call it before the first use of megatron-core, as `create_world` does; calling it again
    is safe. The imports take seconds.

    Importing megatron beforehand is harmless. Raise RuntimeError for an unsupported version of
    megatron-core, or one that lacks a package, and ValueError as
    `refuse_broken_transformer_engine`.
    """
    check_megatron_version()
    check_undeclared_dependencies()
    refuse_broken_transformer_engine()
    cpu_platform.apply_cpu_platform()
    mcore_fixes.apply_megatron_fixes()
    share_gloo_device()


def refuse_broken_transformer_engine() -> None:
    """Raise ValueError where Transformer Engine is installed but its import fails with anything but
    ImportError. megatron-core imports it where it is installed, and goes on without it only after
    an ImportError; a partial installation, or one of two versions, raises something else.
    """
    if not (
        found := find_package(TRANSFORMER_ENGINE, ("transformer-engine", "transformer_engine"))
    ).is_present:
        return
    try:
        importlib.import_module(TRANSFORMER_ENGINE)
    except ImportError:
        return
    except Exception as error:  # AssertionError, RuntimeError, FileNotFoundError and others
        version = found.version or "of unknown version"
        raise ValueError(
            f"Transformer Engine ({version}) is installed in part only, and megatron-core cannot"
            f" start beside it: {format_error_line(error)}. Install all of it"
            f" ({INSTALL[TRANSFORMER_ENGINE]}), or remove it (pip uninstall transformer-engine"
            " transformer-engine-torch transformer-engine-cu12)."
        ) from error
