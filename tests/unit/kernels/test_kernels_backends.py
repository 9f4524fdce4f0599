"""Every backend of linear_log_prob against the same formulas in float64: log-probs, entropies,
squares, gradients.

The Triton backend runs under triton's interpreter, in a process of its own, and all of them on CUDA
where there is one.
"""

# T tokens, R rows, V vocabulary (with padding), H hidden

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend, compute_linear_log_probs
from rlhf_megatron.ranks.kernels.logit_tile_ops import TorchTileOps

ENOUGH = 2**30  # bytes of stash


@dataclass(frozen=True)
class Case:
    """`slope`: added to the logits, from 0 for the first token of the vocabulary to this for the
    last one; `offset`:
    added to all. `temperature` "rows": one each, from 0.5 to 2. `without`: which upstream
    gradients are zero.
    """

    num_tokens: int = 6
    # chosen by `rows_R`, several of a token where there are more; None: without `rows_R`
    num_rows: int | None = None
    vocab_rows: int = 53
    vocab_size: int = 53
    chunk_size: int = 16
    hidden: int = 8
    dtype: torch.dtype = torch.float32
    temperature: float | str = 1.0
    offset: float = 0.0
    slope: float = 0.0
    with_entropy: bool = True
    stash_bytes: int = 0
    without: str = ""  # "some rows", "all rows"
    targets: tuple[int, ...] | None = None
    softcap: float | None = None


CASES = {
    "plain": Case(),
    "no entropy": Case(with_entropy=False),
    "temperature": Case(temperature=0.7),
    "temperature of each row": Case(temperature="rows"),
    "padded, one chunk only padding": Case(vocab_rows=80, vocab_size=53, temperature="rows"),
    "one token of one word": Case(num_tokens=1, vocab_rows=1, vocab_size=1, chunk_size=1),
    "one token": Case(num_tokens=1, chunk_size=64),
    "no token": Case(num_tokens=0),
    "no row": Case(num_rows=0),
    "some rows": Case(num_tokens=9, num_rows=4, temperature="rows"),
    "rows of one token": Case(num_tokens=4, num_rows=14, temperature="rows", without="some rows"),
    "rows of one token, stash": Case(num_tokens=4, num_rows=14, stash_bytes=ENOUGH),
    "targets at the borders of chunks": Case(targets=(0, 15, 16, 31, 32, 52)),
    "logits about -200": Case(offset=-200.0),
    "logits about 200": Case(offset=200.0),
    "logits from -200 to 200": Case(offset=-200.0, slope=400.0, targets=(0, 10, 26, 40, 51, 52)),
    "logits from 200 to -200": Case(offset=200.0, slope=-400.0, targets=(0, 1, 2, 26, 40, 52)),
    "some rows without gradient": Case(without="some rows", temperature="rows"),
    "no row with gradient": Case(without="all rows"),
    "stash": Case(stash_bytes=ENOUGH, temperature="rows"),
    "stash, no entropy": Case(stash_bytes=ENOUGH, with_entropy=False),
    "stash, logits from -200 to 200": Case(
        stash_bytes=ENOUGH, offset=-200.0, slope=400.0, targets=(0, 10, 26, 40, 51, 52)
    ),
    "stash of two chunks of four": Case(stash_bytes=500, vocab_rows=60, without="some rows"),
    "softcap": Case(softcap=3.0, temperature="rows"),
    "softcap, logits from -200 to 200": Case(
        softcap=30.0,
        offset=-200.0,
        slope=400.0,
        targets=(0, 10, 26, 40, 51, 52),
        with_entropy=False,
    ),
    "softcap, stash not taken": Case(
        softcap=5.0, stash_bytes=ENOUGH, num_tokens=9, num_rows=5, without="some rows"
    ),
    "softcap, bfloat16": Case(softcap=5.0, dtype=torch.bfloat16, temperature=0.8, vocab_rows=64),
    "softcap, float64": Case(softcap=5.0, dtype=torch.float64, temperature="rows"),
    "bfloat16": Case(dtype=torch.bfloat16, temperature="rows", vocab_rows=64),
    "bfloat16, stash": Case(dtype=torch.bfloat16, stash_bytes=ENOUGH, num_tokens=9, num_rows=5),
    "float16": Case(dtype=torch.float16, temperature=0.8),
    "float64": Case(dtype=torch.float64, temperature="rows", stash_bytes=ENOUGH),
}
LONG_CASES = {
    "many chunks": Case(
        num_tokens=40,
        vocab_rows=1000,
        vocab_size=983,
        chunk_size=128,
        hidden=24,
        temperature="rows",
    )
}


@dataclass(frozen=True)
class Inputs:
    hidden_TH: Tensor
    weight_VH: Tensor
    targets_R: Tensor
    rows_R: Tensor | None
    temperature_R: Tensor
    grad_log_probs_R: Tensor
    grad_entropies_R: Tensor


def inputs(case: Case) -> Inputs:
    """Two hidden channels carry the offset and the slope: their hidden states are 1."""
    generator = torch.Generator().manual_seed(3)
    randn = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden_TH = randn(case.num_tokens, case.hidden)
    weight_VH = randn(case.vocab_rows, case.hidden)
    hidden_TH[:, :2] = 1.0
    weight_VH[:, 0] = case.offset
    weight_VH[:, 1] = torch.linspace(0.0, case.slope, case.vocab_size + 1)[1:].repeat(2)[
        : case.vocab_rows
    ]
    weight_VH[case.vocab_size :] *= 30.0  # padding that would win if it counted
    num_rows = case.num_tokens if case.num_rows is None else case.num_rows
    rows_R = (
        None
        if case.num_rows is None
        else torch.randperm(case.num_tokens, generator=generator)[:num_rows]
    )
    if rows_R is not None and len(rows_R) < num_rows:
        rows_R = torch.randint(0, case.num_tokens, (num_rows,), generator=generator)
    targets_R = torch.randint(0, case.vocab_size, (num_rows,), generator=generator)
    if case.targets is not None:
        targets_R = torch.tensor(case.targets)
    temperature_R = (
        torch.linspace(0.5, 2.0, num_rows)
        if case.temperature == "rows"
        else torch.full((num_rows,), float(case.temperature))
    )
    grads_2R = randn(2, num_rows)
    if case.without:
        grads_2R[:, :: 1 if case.without == "all rows" else 2] = 0.0
    return Inputs(
        hidden_TH.to(case.dtype),
        weight_VH.to(case.dtype),
        targets_R,
        rows_R,
        temperature_R,
        *grads_2R,
    )


def formulas(case: Case, given: Inputs) -> dict[str, Tensor]:
    """Softmax, its statistics and the gradient of sum u log p + w H, element by element."""
    rows_R = torch.arange(case.num_tokens) if given.rows_R is None else given.rows_R
    hidden_RH = given.hidden_TH.double()[rows_R]
    weight_VH = given.weight_VH.double()[: case.vocab_size]
    inv_R1 = 1.0 / given.temperature_R.double()[:, None]
    logits_RV = hidden_RH @ weight_VH.T
    tanh_RV = (logits_RV / case.softcap).tanh() if case.softcap else torch.zeros_like(logits_RV)
    z_RV = (case.softcap * tanh_RV if case.softcap else logits_RV) * inv_R1
    largest_R1 = z_RV.max(1, keepdim=True).values if len(z_RV) else z_RV[:, :1]
    log_p_RV = z_RV - largest_R1 - (z_RV - largest_R1).exp().sum(1, keepdim=True).log()
    p_RV = log_p_RV.exp()
    entropies_R = -(p_RV * log_p_RV).sum(1)
    is_target_RV = torch.arange(case.vocab_size) == given.targets_R[:, None]
    grad_RV = given.grad_log_probs_R[:, None] * (is_target_RV.double() - p_RV)
    if case.with_entropy:
        grad_RV = grad_RV - given.grad_entropies_R[:, None] * p_RV * (
            log_p_RV + entropies_R[:, None]
        )
    grad_RV = grad_RV * inv_R1 * (1 - tanh_RV.square())
    grad_hidden_TH = torch.zeros(case.num_tokens, case.hidden, dtype=torch.float64)
    grad_hidden_TH.index_add_(0, rows_R, grad_RV @ weight_VH)
    grad_weight_VH = torch.zeros(case.vocab_rows, case.hidden, dtype=torch.float64)
    grad_weight_VH[: case.vocab_size] = grad_RV.T @ hidden_RH
    found = {"log-probs": (log_p_RV * is_target_RV).sum(1), "squares": (p_RV * p_RV).sum(1)}
    if case.with_entropy:
        found["entropies"] = entropies_R
    return {**found, "hidden's gradient": grad_hidden_TH, "weight's gradient": grad_weight_VH}


def outcome(case: Case, backend: LogProbBackend, device: str) -> dict[str, Tensor]:
    given = inputs(case)
    hidden_TH, weight_VH = (
        x.to(device).requires_grad_() for x in (given.hidden_TH, given.weight_VH)
    )
    out = compute_linear_log_probs(
        hidden_TH,
        weight_VH,
        given.targets_R.to(device),
        temperature=given.temperature_R.to(device)
        if case.temperature == "rows"
        else float(case.temperature),
        vocab_start=0,
        vocab_size=case.vocab_size,
        tp_group=None,
        chunk_size=case.chunk_size,
        with_entropy=case.with_entropy,
        with_sum_squares=True,
        rows_R=None if given.rows_R is None else given.rows_R.to(device),
        has_repeated_rows=case.num_rows is not None and case.num_rows > case.num_tokens,
        stash_bytes=case.stash_bytes,
        softcap=case.softcap,
        backend=backend,
    )
    loss = (out.log_probs_R * given.grad_log_probs_R.to(device, out.log_probs_R.dtype)).sum()
    found = {"log-probs": out.log_probs_R, "squares": out.sum_squares_R}
    if out.entropies_R is not None:
        loss = (
            loss
            + (out.entropies_R * given.grad_entropies_R.to(device, out.entropies_R.dtype)).sum()
        )
        found["entropies"] = out.entropies_R
    loss.backward()
    found |= {"hidden's gradient": hidden_TH.grad, "weight's gradient": weight_VH.grad}
    return {name: x.detach().cpu() for name, x in found.items()}


def without_torch(case: Case, device: str) -> dict[str, Tensor]:
    """The Triton backend, which fails here if it leaves a tile to torch that is not float64."""
    passes = ("update_statistics", "compute_logit_gradient", "compute_logit_gradient_from_stash")
    kept = {name: getattr(TorchTileOps, name) for name in passes}

    def refuse(*_: Any) -> None:
        raise AssertionError("a tile was left to torch")

    try:
        for name in passes if case.dtype != torch.float64 else ():
            setattr(TorchTileOps, name, refuse)
        return outcome(case, "triton", device)
    finally:
        for name, function in kept.items():
            setattr(TorchTileOps, name, function)


def run(where: str, case: Case, request: pytest.FixtureRequest) -> dict[str, Tensor]:
    backend, _, device = where.partition(" on ")
    if device:
        return (
            without_torch(case, "cuda") if backend == "triton" else outcome(case, backend, "cuda")
        )
    if backend == "triton":
        return request.getfixturevalue("triton_interpreter").run(without_torch, case, "cpu")
    return outcome(case, backend, "cpu")


WHERE = [
    *("reference", "chunked", "triton"),
    *(
        pytest.param(f"{name} on CUDA", marks=pytest.mark.gpu)
        for name in ("reference", "chunked", "triton")
    ),
]


def check(case: Case, found: dict[str, Tensor]) -> None:
    given = inputs(case)
    expected = formulas(case, given)
    assert found.keys() == expected.keys()
    is_float64 = case.dtype == torch.float64
    # What is added up in the largest logit; its rounding to float32 counts twice in a
    # difference of two.
    terms_RV = given.hidden_TH.double().abs() @ given.weight_VH.double().abs()[: case.vocab_size].T
    largest = (
        terms_RV.max().item() / given.temperature_R.min().item() if len(given.targets_R) else 0.0
    )
    forward = 1e-12 if is_float64 else 1e-6 + largest * 2.0**-23
    # Of the gradient's norm: float32's sums, float16's 11 bits in the stash, the result's rounding
    # to 16 bits and that of the logits' gradient before its products.
    backward = (
        1e-11
        if is_float64
        else 2e-5
        if case.dtype == torch.float32
        else 0.75 * torch.finfo(case.dtype).eps
    )
    if case.stash_bytes:
        backward += 3e-4
    for name, value in expected.items():
        if "gradient" in name:
            assert found[name].dtype == case.dtype, name
            error = (found[name].double() - value).norm()
            size = value.norm()
            assert error <= backward * size, f"{name}: {error:.3g} of {size:.3g}"
            assert torch.equal(
                found[name][value.abs().sum(1) == 0],
                torch.zeros_like(found[name][value.abs().sum(1) == 0]),
            )
        else:
            assert found[name].dtype == (torch.float64 if is_float64 else torch.float32), name
            error = (found[name].double() - value).abs().max() if len(value) else torch.tensor(0.0)
            assert found[name].shape == value.shape and error <= forward, f"{name}: {error:.3g}"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_CASES)]
)
def test_equals_the_formulas(where: str, name: str, request: pytest.FixtureRequest) -> None:
    case = {**CASES, **LONG_CASES}[name]
    check(case, run(where, case, request))
