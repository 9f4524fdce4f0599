"""The two patch modules: what they replace, what they leave alone,
and which versions they accept.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool

from rlhf_megatron import device
from rlhf_megatron.device import copy_tensors_to_device
from rlhf_megatron.mcore_patch import (
    MegatronPatch,
    apply_needed_patches,
    check_megatron_version,
    check_undeclared_dependencies,
    replace_symbol,
)
from rlhf_megatron.ranks.parallel import cpu_platform, mcore_fixes
from rlhf_megatron.ranks.parallel.gloo_device import share_gloo_device
from rlhf_megatron.ranks.parallel.megatron_setup import (
    prepare_megatron,
    refuse_broken_transformer_engine,
)
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.bucket_buffers import BucketBuffers

needs_no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU platform is applied without CUDA only"
)


@pytest.mark.parametrize("version", ["0.16.1", "0.16.1+local", "0.17.0", "0.19.2", "0.19.0rc1"])
def test_supported_versions(version: str) -> None:
    check_megatron_version(version)


@pytest.mark.parametrize("version", ["0.16.0", "0.15.3", "0.20.0", "1.0.0"])
def test_other_versions_are_named(version: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"megatron-core {version} is installed, supported are 0.16.1 to 0.19.x"
    ):
        check_megatron_version(version)


def test_installed_version_is_supported() -> None:
    check_megatron_version()


def test_triton_is_asked_for_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_undeclared_dependencies("0.17.1")
    with pytest.raises(
        RuntimeError, match=r"megatron-core 0.18.0 imports triton.*pip install --no-deps triton"
    ):
        check_undeclared_dependencies("0.18.0")


def test_every_patch_has_a_symbol_and_a_reason() -> None:
    for patch in (*cpu_platform.PATCHES, *mcore_fixes.PATCHES):
        assert patch.symbol and len(patch.reason) > 20


def test_a_symbol_that_is_gone_is_named() -> None:
    def broken() -> None:
        raise AttributeError("no such name")

    with pytest.raises(
        RuntimeError, match=r"cannot replace optimizer.thing \(it is wrong\): no such name"
    ):
        apply_needed_patches([MegatronPatch("optimizer.thing", "it is wrong", broken)])


@pytest.mark.parametrize(
    ("versions", "version", "is_covered"),
    [
        ("0.16.1", "0.16.1+local", True),
        ("0.16.1", "0.17.0", False),
        ("0.16.1 to 0.19.x", "0.19.2", True),
        ("0.16.1 to 0.19.x", "0.20.0", False),
        ("0.17.0 to 0.18.1", "0.16.1", False),
        ("0.17.0 to 0.18.1", "0.18.2", False),
    ],
)
def test_versions_of_a_patch(versions: str, version: str, is_covered: bool) -> None:
    assert MegatronPatch("symbol", "reason", list, versions).covers_version(version) is is_covered


def test_what_is_mended_already_is_left_alone() -> None:
    applied: list[str] = []
    for name, is_needed in (("mended", lambda: False), ("broken", lambda: True), ("unknown", None)):
        apply_needed_patches(
            [
                MegatronPatch(
                    name, "why", lambda name=name: applied.append(name), is_needed=is_needed
                )
            ]
        )
    assert applied == ["broken", "unknown"]


def test_a_name_that_nothing_reads_is_not_replaced() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        replace_symbol(torch, "no_such_name", 1)
    assert not hasattr(torch, "no_such_name")


@needs_no_cuda
def test_the_defects_of_the_installed_version_are_those_of_the_table() -> None:
    """In a fresh process, before anything is mended. Where this fails, the table's versions are
    to be corrected.
    """
    code = (
        "from rlhf_megatron.ranks.parallel import cpu_platform, mcore_fixes\n"
        "from importlib.metadata import version\n"
        "cpu_platform.apply_cpu_platform()\n"
        "for patch in mcore_fixes.PATCHES:\n"
        "    if patch.is_needed: print(patch.symbol, patch.covers_version(version('megatron-core'))"
        " == patch.is_needed())\n"
        "mcore_fixes.apply_megatron_fixes()\n"
        "print(*(patch.is_needed() for patch in mcore_fixes.PATCHES if patch.is_needed))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *before, after = done.stdout.splitlines()
    assert len(before) == 6 and all(line.endswith(" True") for line in before), done.stdout
    assert after == " ".join(["False"] * 6)


@needs_no_cuda
def test_what_a_process_need_not_import_is_not_imported_and_the_start_is_quiet() -> None:
    """The controller has no use for megatron, and a rank on a CPU compiles nothing. Nothing is
    printed but torch's own word on a CUDA toolkit that it finds on a machine without a device.
    """
    code = """if True:
        import sys
        import rlhf_megatron.controller.scheduler.training_run
        assert "megatron" not in sys.modules and "torch._dynamo" not in sys.modules
        from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron
        prepare_megatron()
        import rlhf_megatron.runtime.rank_roles
        assert "megatron.core.models.gpt" in sys.modules and "torch._inductor" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [
        line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line
    ] == []


@needs_no_cuda
def test_torch_itself_is_left_alone() -> None:
    prepare_megatron()
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch is not torch
    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    assert schedules.torch.float32 is torch.float32
    assert not hasattr(torch.zeros, "__wrapped__")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros([], device="cuda")
    # breaks where functions of torch are replaced in place
    importlib.import_module("torch._dynamo")


def test_gloo_groups_share_one_network_thread() -> None:
    """torch alone starts one a group, and each wakes 100 times a second."""

    def num_threads() -> int:
        names = (
            Path("/proc/self/task") / thread / "comm" for thread in os.listdir("/proc/self/task")
        )
        return sum(name.read_text().startswith("gloo_tcp_loop") for name in names)

    share_gloo_device()
    before = num_threads()
    groups = [
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=seconds))
        for seconds in (7, 8, 9)
    ]
    assert num_threads() - before <= 1
    assert [group.options._timeout.seconds for group in groups] == [7, 8, 9]
    other = os.fork()
    if other == 0:  # a child has none of its parent's threads and starts its own
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=7))
        deadline = time.monotonic() + 10
        # a thread takes its name when it first runs
        while num_threads() == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(num_threads() != 1 or alone.size() != 1)
    assert os.waitpid(other, 0)[1] == 0


@needs_no_cuda
def test_fused_functions_run_uncompiled_whoever_imported_megatron_first() -> None:
    prepare_megatron()
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.attention import Attention

    for function in (
        fused_bias_swiglu.swiglu,
        fused_bias_swiglu.swiglu_back,
        Attention._apply_output_gate,
    ):
        assert not hasattr(function, "_torchdynamo_orig_callable")


def test_half_a_transformer_engine_is_told_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core survives an ImportError alone."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "transformer_engine.py").write_text(
        "assert False, 'Could not find shared object file'\n"
    )
    with pytest.raises(
        ValueError, match=r"AssertionError: Could not find shared object file\. Install all of it"
    ):
        refuse_broken_transformer_engine()
    (tmp_path / "transformer_engine.py").write_text("import a_package_that_is_not_there\n")
    importlib.invalidate_caches()
    refuse_broken_transformer_engine()


def test_small_tensors_move_in_one_transfer_and_keep_shapes_and_types() -> None:
    tensors = [
        torch.arange(3),
        torch.tensor([True, False, True]),
        torch.tensor([[1.5, 2.5]]),
        torch.zeros(0, dtype=torch.int32),
        torch.arange(5, dtype=torch.int32)[None],
    ]
    assert all(
        there is mine
        for there, mine in zip(
            copy_tensors_to_device(tensors, torch.device("cpu")), tensors, strict=True
        )
    )
    there = copy_tensors_to_device(tensors, torch.device("meta"))
    assert [(t.dtype, t.shape) for t in there] == [(t.dtype, t.shape) for t in tensors]
    assert len({t.untyped_storage()._cdata for t in there}) == 1
    places = device._split_into_views(torch.empty(200, dtype=torch.uint8), tensors)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    assert all(torch.equal(place, tensor) for place, tensor in zip(places, tensors, strict=True))


def test_host_memory_is_page_locked_for_a_gpu_and_unlocked_before_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append(("lock", size))
            return 0 if size > 8 else 1

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unlock", address))

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(
        device, "_clear_cuda_error", lambda where: calls.append(("forget", where.index))
    )
    memory = [torch.empty(size, dtype=torch.uint8) for size in (16, 4, 0)]
    buffers = BucketBuffers(memory, lambda manifest, raw: None)
    buffers.lock_pages(torch.device("cpu"))
    assert calls == []
    buffers.lock_pages(torch.device("cuda", 0))
    buffers.close()
    unlocked = ("unlock", memory[0].data_ptr())
    assert calls == [("lock", 16), ("lock", 4), ("forget", 0), unlocked], (
        "what could not be is left alone"
    )


def uneven(world: World) -> tuple[list[list[int]], list[int]]:
    from megatron.core.tensor_parallel import mappings

    distributed = mappings.torch.distributed
    mine = torch.arange(world.rank + 1)  # rank 0 has one entry, rank 1 two
    gathered = [torch.empty(1, dtype=torch.int64), torch.empty(2, dtype=torch.int64)]
    distributed.all_gather(gathered, mine, group=world.tp_group)
    part = torch.empty(world.rank + 1, dtype=torch.int64)
    distributed.reduce_scatter(
        part, [torch.tensor([1]), torch.tensor([10, 20])], group=world.tp_group
    )
    assert dist.all_gather is not distributed.all_gather
    return [t.tolist() for t in gathered], part.tolist()


@pytest.mark.dist
def test_uneven_collectives(dist_pool: DistPool) -> None:
    first, second = dist_pool.run(uneven, tp=2)
    assert first == ([[0], [0, 1]], [2])
    assert second == ([[0], [0, 1]], [20, 40])
