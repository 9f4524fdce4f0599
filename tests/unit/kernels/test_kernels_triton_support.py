"""Whether Triton can be used, said without importing it; and the head's kernels compiled for Hopper
without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.ranks.kernels import triton_support
from rlhf_megatron.ranks.kernels.triton_support import query_interpreter_support, try_triton_kernel

CPU = torch.device("cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """That these packages are installed and no others."""

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    is_there = "triton" in versions or "pytorch-triton" in versions
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_there else None)


@pytest.mark.parametrize(
    ("versions", "why_not"),
    [
        ({"triton": "3.9.0", "numpy": "2.4.6"}, ""),
        ({"triton": "3.6.0", "numpy": "2.3.5"}, ""),
        (
            {"triton": "3.6.0+git1", "numpy": "2.4.6"},
            "triton 3.6.0+git1 cannot interpret with numpy 2.4.6; install",
        ),
        ({"pytorch-triton": "3.7.0", "numpy": "2.5.0"}, ""),
        ({"triton": "3.10.1", "numpy": "2.5.0"}, ""),
        ({"triton": "3.9.0"}, "needs numpy"),
        ({"triton": "3.2.0", "numpy": "1.26.4"}, "triton 3.2.0 is older than 3.3"),
        ({"numpy": "2.4.6"}, "triton is not installed; `pip install triton`"),
    ],
)
def test_what_the_interpreter_needs(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], why_not: str
) -> None:
    pretend(monkeypatch, versions)
    support = query_interpreter_support()
    assert why_not in support.why_not and support.is_usable == (not why_not)
    assert support.version == versions.get("triton", versions.get("pytorch-triton", ""))


def test_a_cpu_is_no_place_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"triton": "3.9.0"})
    assert "compiles for GPUs" in triton_support.query_triton_support(CPU).why_not
    assert try_triton_kernel(CPU) == triton_support.query_triton_support(CPU).why_not


def test_a_cpu_is_not_told_to_install_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    why_not = triton_support.query_triton_support(CPU).why_not
    assert "compiles for GPUs" in why_not and "pip install" not in why_not
    on_gpu = triton_support.query_triton_support(torch.device("cuda", 0)).why_not
    assert "triton is not installed; `pip install triton`" in on_gpu


@pytest.mark.parametrize(
    ("capability", "why_not"),
    [((9, 0), ""), ((8, 0), ""), ((7, 5), "capability (7.5) is below 8.0")],
)
def test_the_device_must_be_new_enough(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], why_not: str
) -> None:
    pretend(monkeypatch, {"triton": "3.6.0"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    support = triton_support.query_triton_support(torch.device("cuda", 0))
    assert why_not in support.why_not and support.is_usable == (not why_not)


def test_a_kernel_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and device look well, and then torch cannot use the device."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("it would run")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    why_not = try_triton_kernel(torch.device("cuda", 0))
    assert why_not.startswith("a kernel failed") and why_not.endswith(".")
    assert "CUDA" in why_not or "NVIDIA" in why_not
    assert "\n" not in why_not


@pytest.mark.gpu
def test_kernels_run_on_cuda() -> None:
    assert try_triton_kernel(torch.device("cuda")) == ""


WITHOUT_TRITON = """
import sys, torch
sys.modules["triton"] = None  # as if it were not installed
from rlhf_megatron.ranks.kernels.log_prob import compute_linear_log_probs
from rlhf_megatron.ranks.kernels.triton_support import try_triton_kernel
out = compute_linear_log_probs(
    torch.ones(2, 1), torch.zeros(4, 1), torch.tensor([1, 2]), temperature=1.0, vocab_start=0, \
vocab_size=4,
    tp_group=None, chunk_size=2, with_entropy=False,
)
print(out.log_probs_R.exp().tolist(), try_triton_kernel(torch.device("cuda")))
"""


def test_the_head_runs_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("[0.25, 0.25] triton is not installed"), done.stderr


POINTERS = {
    "logits": "*fp32", "tile": "*fp32", "columns": "*i64", "stash": "*fp16", "grads": "*bf16",
    "hidden": "tensordesc<bf16[128,64]>", "weight": "tensordesc<bf16[256,64]>",
}  # fmt: skip


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    num_warps: int,
    types: dict[str, str],
    num_stages: int = 3,
) -> Any:
    """For sm_90. Pointers and strides are multiples of 16, as those of torch's tensors and of
    wide tiles are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    values = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
            continue
        is_number = "stride" in name or name.startswith("num_") or name == "first"
        signature[name] = {**POINTERS, **types}.get(name, "i32" if is_number else "*fp32")
        if (
            name
            not in (
                "num_rows",
                "running_stride",
                "stash_max_stride",
                "num_splits",
                "softcap",
                "first",
            )
            and "tensordesc" not in signature[name]
        ):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(kernel: Any, folder: Path) -> int:
    """What a thread has in memory because registers did not suffice, by cuobjdump, which
    comes with triton.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists() and not (tool := Path(shutil.which("cuobjdump") or "")).is_file():
        pytest.skip("no cuobjdump")
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, timeout=60
    ).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return int(found[1])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rlhf_megatron.ranks.kernels import log_prob_triton

    if log_prob_triton.is_triton_interpreted():
        pytest.skip("TRITON_INTERPRET is set in the process of the tests")
    return log_prob_triton


LONG = pytest.mark.long
WITHOUT: dict[str, tuple[str, ...]] = {
    "update": ("weighteds", "squares", "stash", "stash_maxima", "softcap"),
    "update, all": ("softcap",),
    "gradient": ("stash_maxima", "softcap"),
    "gradient, no entropy": (
        "stash_maxima",
        "softcap",
        "entropies",
        "grad_entropies",
        "inv_temperatures",
    ),
    "gradient from stash": ("softcap",),
    "update, capped": ("stash", "stash_maxima"),
    "gradient, capped": ("stash_maxima",),
}


@pytest.mark.parametrize(
    ("name", "num_columns"),
    [
        ("update, all", 8192),
        ("gradient", 8192),
        ("gradient, capped", 8192),
        *(pytest.param(name, size, marks=LONG) for name in WITHOUT for size in (4096, 18992)),
        *(
            pytest.param(name, 8192, marks=LONG)
            for name in ("update", "update, capped", "gradient, no entropy", "gradient from stash")
        ),
    ],
)
def test_compiles_for_hopper_with_wide_loads_and_no_spills(
    compiler: Any, tmp_path: Path, name: str, num_columns: int
) -> None:
    _, sizes = compiler._choose_launch_sizes(torch.empty(4, num_columns, device="meta"))
    num_warps = sizes.pop("num_warps")
    del sizes["enable_fp_fusion"]
    kernel = (
        compiler._update_statistics_kernel
        if name.startswith("update")
        else compiler._logit_gradient_kernel
    )
    types = {"softcap": "fp32", **({"tile": "*fp16"} if "stash" in name else {})}
    found = compiled(kernel, {**sizes, **dict.fromkeys(WITHOUT[name])}, num_warps, types)
    words = sizes["BLOCK"] // (32 * num_warps) * (2 if "stash" in name else 4) // 16
    wide = len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", found.asm["ptx"]))
    assert wide == words * (2 if name == "update, all" and not sizes["IS_ONE_BLOCK"] else 1), (
        "128 bits a load"
    )
    assert stack_bytes(found, tmp_path) == 0


def test_other_sizes_are_the_same_kernels(compiler: Any) -> None:
    """Constants by powers of two: 14 for rows of one block, one for all longer ones, whatever the
    number of rows.
    """
    shapes = [
        (rows, columns)
        for rows in (1, 77, 8192)
        for columns in [*range(1, 200), *range(200, 9000, 99), 18992, 65536, 151936]
    ]
    constants = {
        tuple(compiler._choose_launch_sizes(torch.empty(shape, device="meta"))[1].items())
        for shape in shapes
    }
    assert len(constants) == 15
    for rows, columns in ((1, 151936), (8192, 8192), (77, 5)):
        (programs,), sizes = compiler._choose_launch_sizes(
            torch.empty(rows, columns, device="meta")
        )
        assert (programs - 1) * sizes["NUM_ROWS"] < rows <= programs * sizes["NUM_ROWS"]
