"""One call that readies megatron-core in a process: version, fixes, and the CPU platform where needed."""

from __future__ import annotations

from rlhf_megatron.parallel import cpu_platform, mcore_fixes
from rlhf_megatron.parallel.mcore_patch import check_undeclared_needs, check_version


def prepare_megatron() -> None:
    """Call before the first use of megatron-core; `create_world` does. Safe to call again. Takes seconds (imports).

    Importing megatron beforehand is harmless.
    Raises RuntimeError for an unsupported version of megatron-core, or one that lacks a package.
    """
    check_version()
    check_undeclared_needs()
    cpu_platform.apply()
    mcore_fixes.apply()
