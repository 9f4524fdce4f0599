"""The CUDA code path without a GPU: right numbers, memory of another process, and mistakes that
each pass catches.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cuda_tools import NEEDS_CUDA_BUILD, PYTHON
from places import ROOT, SUPPORT

from tools.cuda_rehearsal.environment import environment

pytestmark = [pytest.mark.dist, NEEDS_CUDA_BUILD]

# Waits for the device in one call of an actor on one rank, in bfloat16: none of them a micro-batch.
ONCE_A_STEP = "the verdict on an optimizer step: whether it is skipped is decided on the host"
WAITS = {
    "log_probs": {
        "ranks/workers/sequence_packing.py:unpack_rows": (
            2,
            "results leave the device once a call: log-probs and entropies",
        ),
    },
    "update": {
        "ranks/workers/nonfinite.py:<listcomp>": (1, ONCE_A_STEP),
        "ranks/workers/nonfinite.py:all_reduce_verdict": (1, ONCE_A_STEP),
        (
            "ranks/workers/megatron_optimizer.py:check_finiteness >"
            " core/optimizer/clip_grads.py:get_grad_norm_fp32"
        ): (
            1,
            "megatron-core's own",
        ),
        "ranks/workers/trained_model.py:_make_update_result": (
            1,
            "sums and metrics leave the device once a mini-batch",
        ),
    },
}


@pytest.fixture(scope="module")
def built() -> Path:
    command = [PYTHON, "-m", "tools.cuda_rehearsal.build", PYTHON.parents[1] / "null_cuda"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr[-3000:]
    return Path(found.stdout.strip())


def start(built: Path, *words: str, has_numbers: bool = True) -> subprocess.Popen[str]:
    program, *rest = words
    env = environment(built, has_numbers, 2)
    command = [PYTHON, SUPPORT / f"cuda_{program}.py", *rest]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    return {name: said for line in output.splitlines() for name, said in json.loads(line).items()}


def test_a_model_on_device_cuda_learns_as_on_the_cpu(built: Path) -> None:
    found = told(start(built, "numbers", "model"))
    assert found["device"] == "cuda:0"
    assert found["worst gradient"] < 1e-5  # relative L2 error after three steps in float32
    # bfloat16 keeps 8 bits
    assert found["attention"] < 0.01 and found["attention with sinks"] < 0.02


def test_another_process_takes_weights_by_cuda_ipc(built: Path) -> None:
    found = told(start(built, "numbers", "send"))
    assert found["memory"] == "device_memory" and found["lay on"]
    assert found["standing"] == found["sent"] and found["stale"] is None


def test_mistakes_are_caught_by_the_pass_that_can(built: Path) -> None:
    numbers = start(built, "mistakes", "numbers")
    checks = start(built, "mistakes", "checks", has_numbers=False)
    found = told(numbers)
    assert (
        "to be on the same device, but aten::addmm got one on cpu" in found["cpu in a forward pass"]
    )
    assert "to be on the same device, but aten::add got one on cuda:1" in found["another device"]
    assert "to have the same dtype" in found["two types"]
    assert "a kernel that the host does not compute" in found["a kernel that nobody computes"]
    assert "device may be out of range" in found["a rank too many"]
    for what in ("number", "size", "copy"):
        assert "called a synchronizing CUDA operation" in found[f"the host waits for a {what}"]
    found = told(checks)
    assert "FlashAttention only support fp16 and bf16" in found["attention in float32"]
    assert "does not have a deterministic implementation" in found["no deterministic form"]
    assert "called a synchronizing CUDA operation" in found["the host waits"]
    assert found["a copy that is waited for"] == "nothing"
    for what in ("nobody waits for the copy", "the copy waits for nobody"):
        assert "CUDASanitizerErrors" in found[what]


def test_a_kernel_that_spills_is_named(built: Path) -> None:
    found = told(start(built, "mistakes", "spill", has_numbers=False))
    (words,) = found["spill"]
    assert words.startswith("_shares spills") and words.endswith("a thread on sm_90")


def test_the_host_waits_where_the_list_says_and_in_no_micro_batch(built: Path) -> None:
    found = told(start(built, "waits"))
    assert found == {
        call: {place: [n, n] for place, (n, _) in places.items()} for call, places in WAITS.items()
    }


def test_ranks_that_call_different_things_are_told_what_each_called(
    built: Path, tmp_path: Path
) -> None:
    ranks = [
        start(built, "mistakes", "rank", str(tmp_path / "store"), str(rank)) for rank in range(2)
    ]
    for rank, found in enumerate(map(told, ranks)):
        assert found["sum"] == 3.0
        words = (
            f"ranks differ on rank {rank} of 2; rank 0: all_reduce of 40 B rank 1:"
            " broadcast of 40 B"
        )
        assert words in found["differ"]


def test_ranks_of_a_group_have_the_same_settings(built: Path, tmp_path: Path) -> None:
    name = "NCCL_CUMEM_ENABLE"
    ranks = [
        start(built, "mistakes", "rank", str(tmp_path / "store"), str(rank), name)
        for rank in range(2)
    ]
    for found in map(told, ranks):
        assert f"rank 0: {name} unset, NCCL_NVLS_ENABLE unset rank 1: {name} 0" in found["lacks"]


def test_ranks_lend_their_own_device_memory_to_the_ranks_of_an_engine(
    built: Path, tmp_path: Path
) -> None:
    """tp2 to tp2, six syncs and one over NCCL: those with a mistake fail, none keeps memory,
    the others stand.
    """
    found = told(start(built, "shards", "all", str(tmp_path)))
    assert found["devices"] == 2
    words = {
        "stale": "tensors do not stand in it as they were sent",
        "missing": "but the memory given has bytes 0 to",
        "offset": "but the memory given has bytes 0 to",
        "dead": "engine0 (http://127.0.0.1:",
    }
    for ranks in found["syncs"]:
        (kind,) = {rank["kind"] for rank in ranks}
        if ranks is not found["syncs"][0]:  # the first one leaves the keys of digests
            assert [rank["kept"] for rank in ranks] == [0, 0], kind
        first, second = ranks
        failure = first["failures"].get("engine0", "")
        assert words.get(kind, "") in failure and bool(failure) == (kind in words)
        if kind in ("right", "links"):
            digests = {name: int(first["digests"].get(name, "0"), 16) for name in first["standing"]}
            total = {
                name: value + int(second["digests"].get(name, "0"), 16)
                for name, value in digests.items()
            }
            assert {name: f"{value % 2**64:016x}" for name, value in total.items()} == first[
                "standing"
            ]
            assert (
                first["bytes_moved"]
                == first["bytes_needed"]
                >= first["num_bytes"] + second["num_bytes"]
            )
            assert 0.7 < first["num_bytes"] / second["num_bytes"] < 1.4
    kinds = [ranks[0]["kind"] for ranks in found["syncs"]]
    assert kinds == ["right", "stale", "missing", "offset", "dead", "right", "links"]
