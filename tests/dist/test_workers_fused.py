"""Training by fused paths: weight gradients added by the matrix product, an Adam that counts its
steps elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from places import SUPPORT
from torch import Tensor
from workers_jobs import OVERLAPPED, SHARDED, RankResult, make_actor, share, train, whole

from benchmarks.parity.rounding import relative_error
from rlhf_megatron.ranks.parallel.world import World

NAME = "qwen3_tied"
FUSED = {"gradient_accumulation_fusion": True}


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model(NAME).state_dict().items()}


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(relative_error(a[key], b[key]) for key in b)


def gathered(results: list[RankResult], layout: dict[str, Any], kind: str) -> dict[str, Tensor]:
    return whole(
        results, NAME, layout.get("tp", 1), layout.get("dp", 1) * layout.get("cp", 1), kind
    )


def train_watching_products(world: World, **arguments: Any) -> tuple[RankResult, int]:
    """`train`, and how many weight gradients the fused product added."""
    from megatron.core.tensor_parallel import layers

    from rlhf_megatron.ranks.parallel import weight_grad

    calls = []

    class Counting:
        @staticmethod
        def wgrad_gemm_accum_fp32(*tensors: Tensor) -> None:
            calls.append(tensors)
            weight_grad.wgrad_gemm_accum_fp32(*tensors)

    layers.fused_weight_gradient_mlp_cuda = Counting
    try:
        return train(world, **arguments), len(calls)
    finally:
        layers.fused_weight_gradient_mlp_cuda = weight_grad


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [
        {
            "tp": 2,
            "sequence_parallel": True,
            "megatron": {**OVERLAPPED, **FUSED},
            "bucket_size": 20_000,
        },
        {"pp": 2, "megatron": {**FUSED, "transformer_impl": "transformer_engine"}},
    ],
    ids=["tp2-sp-overlapped", "pp2-te-names"],
)
def test_fused_weight_gradients_equal_transformers(
    dist_pool: DistPool, state: dict[str, Tensor], layout: dict[str, Any]
) -> None:
    """The bar of the other layouts: three times float32's own error."""
    batch = reference.make_batch()
    common = {"name": NAME, "state": state, "batch": batch, "loss": "sft", "timeout_s": 300}
    found = dist_pool.run(train_watching_products, **common, **layout)
    results = [result for result, _ in found]
    exact = reference.run_steps(reference.make_model(NAME).double(), batch, "sft")[-1]
    draws = reference.in_float32(
        lambda: reference.make_model(NAME), lambda model: reference.run_steps(model, batch, "sft")
    )
    grads, weights = (gathered(results, layout, kind) for kind in ("grads", "weights"))
    errors = reference.in_units(grads, weights, state, exact, draws)
    assert max(errors.values()) <= 3, errors
    # qkv, proj, fc1, fc2
    assert all(num_products > 0 and num_products % 4 == 0 for _, num_products in found)


def train_with_fused_adam(world: World, **arguments: Any) -> RankResult:
    """`train`, megatron-core having found another Adam when it was imported."""
    from fused_adam import FusedAdam
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    found = optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam, distrib_optimizer.Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = FusedAdam
    distrib_optimizer.Adam = FusedAdam
    try:
        return train(world, **arguments)
    finally:
        optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam, distrib_optimizer.Adam = found


@pytest.mark.dist
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16],
    ids=["float32", "bfloat16"],
)
def test_a_checkpoint_goes_from_one_adam_to_the_other(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Under a distributed optimizer and under a plain one. Step counts show in the step after the
    load: with a wrong one the correction of the moments' bias is off by a third.
    """
    sharded = {"dp": 2, "megatron": SHARDED}
    plain = {"tp": 2}
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
    }
    common |= {"dtype": dtype, "timeout_s": 300}
    through = dist_pool.run(train, num_steps=3, **sharded, **common)
    want = gathered(through, sharded, "weights")
    fused = tmp_path / "fused"
    torchs = tmp_path / "torch"
    dist_pool.run(train_with_fused_adam, num_steps=2, directory=fused, **sharded, **common)
    dist_pool.run(train, num_steps=2, directory=torchs, **plain, **common)
    for job, layout, directory in (
        (train, plain, fused),
        (train_with_fused_adam, sharded, fused),
        (train_with_fused_adam, sharded, torchs),
    ):
        resumed = dist_pool.run(
            job, num_steps=1, directory=directory, is_loading=True, **layout, **common
        )
        weights = gathered(resumed, layout, "weights")
        if dtype == torch.float32:
            moved, wanted = ({key: w[key] - state[key] for key in w} for w in (weights, want))
            assert worst(moved, wanted) <= 1e-3
        else:
            # a step is about one unit in the last place: another layout rounds some
            # weights the other way
            assert worst(weights, want) <= 1e-3


def before_and_after_a_step(world: World, state: dict[str, Tensor]) -> tuple[int, int, list[int]]:
    """State tensors of the fused Adam before and after a first step, and the step count
    of each group.
    """
    from fused_adam import FusedAdam
    from megatron.core import optimizer

    found = optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = FusedAdam
    try:
        actor = make_actor(world, NAME, state)
        before = len(actor.backend.optimizer.list_state_tensors())
        shard, plan = share(world, reference.make_batch(), 40)
        actor.update(shard, plan, reference.TEMPERATURE, "sft")
        groups = actor.backend.optimizer.megatron_optimizer.param_groups
        return (
            before,
            len(actor.backend.optimizer.list_state_tensors()),
            [group["step"] for group in groups],
        )
    finally:
        optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam = found


@pytest.mark.dist
def test_fused_adam_has_its_moments_before_the_first_step(
    dist_pool: DistPool, state: dict[str, Tensor]
) -> None:
    """So that what is moved to host memory, compared over replicas and planned for is there
    from the start.
    """
    (found,) = dist_pool.run(before_and_after_a_step, timeout_s=300, state=state)
    before, after, steps = found
    assert before == after > 0 and before % 2 == 0
    assert steps == [1] * len(steps) and len(steps) == 2  # with weight decay and without


STAND_INS = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "class FusedAdam:\n    pass\n\n\nclass FusedSGD:\n    pass\n",
    "apex/multi_tensor_apply/__init__.py": (
        "def multi_tensor_applier(*tensors):\n    raise RuntimeError('CUDA')\n"
    ),
    "amp_C.py": "multi_tensor_l2norm = multi_tensor_scale = None\n",
}
CODE = """
from megatron.core import optimizer
assert not optimizer.USING_PYTORCH_OPTIMIZER and optimizer.Adam.__module__ == "apex.optimizers"
import torch
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.ranks.parallel.world import create_world
from rlhf_megatron.ranks.workers.megatron_optimizer import detect_megatron_adam
world = create_world(ParallelLayout(1), torch.device("cpu"))
assert detect_megatron_adam() == "torch", detect_megatron_adam()
import workers_jobs, workers_reference as reference
state = {key: value.clone() for key, value in reference.make_model("llama").state_dict().items()}
result = workers_jobs.train(world, "llama", state, reference.make_batch(), "sft", num_steps=1)
print(result.updates[0].is_skipped, result.updates[0].grad_norm > 2 * reference.CLIP)
"""


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU platform is applied without CUDA only"
)
def test_a_fused_adam_that_can_be_imported_is_not_taken_on_a_cpu(tmp_path: Path) -> None:
    """In a fresh process: megatron-core picks its optimizers as it is imported, before anything is
    asked of them.
    """
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(SUPPORT)!r}]\n{CODE}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # a step was made, with clipped gradients
    assert done.stdout.split() == ["False", "True"], done.stdout
