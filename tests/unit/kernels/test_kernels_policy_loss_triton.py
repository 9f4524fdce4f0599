"""The Triton kernel of the policy loss against the eager loss in float64, under the
interpreter and on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels_policy_loss import (
    PARAMS,
    Results,
    assert_equal,
    eager,
    in_dtype,
    make_inputs,
    make_weights,
)
from torch import Tensor
from triton_interpreter import TritonInterpreter

from rlhf_megatron.algorithms.losses import PolicyLossInputs
from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams
from rlhf_megatron.ranks.kernels import policy_row_loss
from rlhf_megatron.ranks.kernels.policy_row_loss import MAX_ERROR
from rlhf_megatron.ranks.kernels.triton_support import (
    query_interpreter_support,
    query_triton_support,
)

BLOCK = 64  # in place of 512, so that few rows have several programs
Run = Callable[[PolicyLossInputs, tuple[Tensor, Tensor], RegularizerParams], Results]


def run_kernel(
    inputs: PolicyLossInputs,
    weights: tuple[Tensor, Tensor],
    regularizers: RegularizerParams,
    device: str,
) -> Results:
    """Loss, gradient of the log-probs and sums; the same bits each time."""
    from rlhf_megatron.ranks.kernels import policy_row_loss_triton

    columns = {name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__}
    there = PolicyLossInputs(
        **{name: None if x is None else x.to(device) for name, x in columns.items()}
    )
    usual = policy_row_loss_triton.BLOCK
    policy_row_loss_triton.BLOCK = BLOCK
    try:
        arguments = (there, PARAMS, regularizers, weights[0].to(device), weights[1].to(device))
        found, again = (
            policy_row_loss_triton.compute_ppo_clip_row_sums(*arguments) for _ in range(2)
        )
    finally:
        policy_row_loss_triton.BLOCK = usual
    assert torch.equal(found.grad_R.view(torch.int32), again.grad_R.view(torch.int32)), (
        "not repeatable"
    )
    results = {"loss": found.loss_sum, **found.metric_sums, "log_probs_T": found.grad_R}
    sums = {"loss": again.loss_sum, **again.metric_sums}
    assert all(
        torch.equal(value.view(torch.int32), results[name].view(torch.int32))
        for name, value in sums.items()
    )
    return {name: value.cpu() for name, value in results.items()}


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Calls `run_kernel` where Triton's kernels run."""
    if request.param == "cuda":
        support = query_triton_support(torch.device("cuda"))
        if not support.is_usable:
            pytest.skip(support.why_not)
        yield lambda *args: run_kernel(*args, device="cuda")
        return
    interpreter: TritonInterpreter = request.getfixturevalue("triton_interpreter")
    yield lambda *args: interpreter.run(run_kernel, *args, device="cpu")


def exact(
    inputs: PolicyLossInputs, weights: tuple[Tensor, Tensor], regularizers: RegularizerParams
) -> Results:
    wide = (weights[0].double(), weights[1].double())
    found = eager(in_dtype(inputs, torch.float64), wide, PARAMS, regularizers)
    found.pop("entropies_T", None)  # its gradient is no kernel's work
    return found


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+", "abs", "abs+"])
@pytest.mark.parametrize("coefficients", [(0.0, 0.0), (0.1, 0.03)])
@pytest.mark.parametrize(
    "without", [{}, {"correction_weights_T": None}], ids=["corrected", "plain"]
)
def test_equals_eager(
    run: Run, kind: Any, coefficients: tuple[float, float], without: dict[str, None]
) -> None:
    """Three programs, the last one ragged."""
    inputs = make_inputs(1, 150, torch.float32, **without)
    weights = make_weights(150, torch.float32)
    regularizers = RegularizerParams(coefficients[0], kind, coefficients[1])
    assert_equal(
        run(inputs, weights, regularizers), exact(inputs, weights, regularizers), 1e-5, 1e-6
    )


@pytest.mark.parametrize("num_rows", [0, 1, BLOCK, BLOCK + 1])
def test_sizes_without_optional_columns(run: Run, num_rows: int) -> None:
    absent: dict[str, None] = dict.fromkeys(
        ("entropies_T", "ref_log_probs_T", "correction_weights_T")
    )
    inputs = make_inputs(2, num_rows, torch.float32, **absent)
    weights = make_weights(num_rows, torch.float32)
    found = run(inputs, weights, RegularizerParams())
    assert_equal(found, exact(inputs, weights, RegularizerParams()), 1e-5, 1e-6)
    assert found["log_probs_T"].shape == (num_rows,)


def test_k3_near_zero_keeps_its_digits(run: Run) -> None:
    """d^2 / 2 of tiny differences: e^d - 1 - d in float32 would leave nothing of them."""
    diff = torch.tensor([1e-4, -1e-4, 1e-2, -0.3, 0.49, 0.51, -0.51, 2.0])
    zeros = torch.zeros(8)
    inputs = PolicyLossInputs(zeros, zeros, zeros, torch.ones(8, dtype=torch.bool), None, diff)
    for row in range(8):
        one = torch.zeros(8)
        one[row] = 1.0
        found = run(inputs, (one, one), RegularizerParams(1.0, "k3", 0.0))
        d = float(diff[row].double())
        assert (
            found["loss"].item()
            == found["actor/kl_loss"].item()
            == pytest.approx(math.expm1(d) - d, rel=2e-6)
        )
        assert found["log_probs_T"][row].item() == pytest.approx(-math.expm1(d), rel=1e-6)


def test_what_is_not_a_number_is_seen(run: Run) -> None:
    for column in ("log_probs_T", "advantages_T", "ref_log_probs_T"):
        inputs = make_inputs(3, 100, torch.float32)
        spoilt = getattr(inputs, column).clone()
        spoilt[70] = math.nan
        inputs = replace(inputs, **{column: spoilt})
        found = run(inputs, make_weights(100, torch.float32), RegularizerParams(0.1, "k3", 0.03))
        assert math.isnan(found["loss"].item()), column
        assert found["log_probs_T"].isnan().nonzero().flatten().tolist() == [70], column


def self_check(is_spoilt: bool, device: str) -> float:
    from rlhf_megatron.ranks.kernels import policy_row_loss_triton
    from rlhf_megatron.ranks.kernels.policy_row_loss import measure_loss_kernel_error

    usual = policy_row_loss_triton.KL_KINDS
    policy_row_loss_triton.KL_KINDS = {"k3": 2} if is_spoilt else usual
    try:
        return measure_loss_kernel_error(torch.device(device))
    finally:
        policy_row_loss_triton.KL_KINDS = usual


def test_the_self_check_sees_a_wrong_kernel(triton_interpreter: TritonInterpreter) -> None:
    """Another KL estimate, off by some 1e-2."""
    assert triton_interpreter.run(self_check, is_spoilt=False, device="cpu") < 1e-6
    assert triton_interpreter.run(self_check, is_spoilt=True, device="cpu") > 10 * MAX_ERROR


def test_a_kernel_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> float:
        raise RuntimeError("no compiler\nand a long explanation")

    monkeypatch.setattr(policy_row_loss, "measure_loss_kernel_error", fails)
    assert (
        policy_row_loss._describe_kernel_problem(torch.device("cpu"))
        == "its Triton kernel failed: RuntimeError: no compiler"
    )
    monkeypatch.setattr(policy_row_loss, "measure_loss_kernel_error", lambda device: math.nan)
    assert "off by nan" in policy_row_loss._describe_kernel_problem(torch.device("cpu"))
    monkeypatch.setattr(policy_row_loss, "measure_loss_kernel_error", lambda device: 1e-7)
    assert policy_row_loss._describe_kernel_problem(torch.device("cpu")) == ""


@pytest.mark.parametrize("has_all", [False, True])
def test_compiles_for_a_gpu_that_is_not_here(
    has_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code of an H200, which the interpreter never sees: types and names that it lets
    pass are refused.
    """
    support = query_interpreter_support()
    if not support.version:
        pytest.skip(support.why_not)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlhf_megatron.ranks.kernels import policy_row_loss_triton

    kernel = policy_row_loss_triton._ppo_clip_kernel
    constants = {
        "KL_KIND": 3 if has_all else 0,
        "IS_KL_STRAIGHT": has_all,
        "HAS_ENTROPIES": has_all,
        "HAS_CORRECTION": has_all,
        "NUM_SUMS": 7 if has_all else 5,
        "BLOCK": policy_row_loss_triton.BLOCK,
    }
    types = {name: "*fp32" for name in kernel.arg_names if name.endswith("_R")} | {
        "block_sums": "*fp32"
    }
    scalars = {"num_rows": "i32"} | dict.fromkeys(
        ("low", "high", "bound", "kl_coef", "entropy_coeff"), "fp32"
    )
    signature = {**types, **scalars, **dict.fromkeys(constants, "constexpr")}
    assert set(signature) == set(kernel.arg_names)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}
    )
    assert len(compiled.asm["cubin"]) > 0 and "fma.rn" not in compiled.asm["ptx"]
