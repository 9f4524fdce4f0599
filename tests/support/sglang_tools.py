"""Where the tests find stock SGLang, and how it runs on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from places import ROOT

STARTUP_S = 540.0  # about half a minute on a free machine
CPU_ARGUMENTS: dict[str, object] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "grammar_backend": "none",
    "enable_deterministic_inference": True,
    "sleep_on_idle": True,  # or it keeps a core busy
}
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT / "tools" / "sglang_cpu"),
}
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # else it wants a NUMA node for each


def sglang_python() -> Path:
    return Path(
        os.environ.get("RLHF_MEGATRON_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python")
    ).absolute()


needs_sglang = pytest.mark.skipif(
    not sglang_python().exists(),
    reason=(
        f"needs stock SGLang: no {sglang_python()}; `make sglang-cpu`, or"
        " set RLHF_MEGATRON_SGLANG_PYTHON"
    ),
)
