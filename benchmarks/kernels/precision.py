"""C3: errors of the LM head against float64 on the same inputs, beside those of the naive
head in float32.

Log-prob and entropy: largest absolute error in nats. Gradients: L2 norm of the error over that of
the gradient, of a loss that weighs every token differently. The naive head sees float32 copies of
bfloat16 inputs, so that both gradients are rounded to bfloat16 once; what logits rounded to
bfloat16 cost is the last row. `low logits`: all between -200 and -180 and exact in float32, so that
what is left is the error of the softmax alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import (
    Problem,
    Shape,
    fused_outputs,
    make_problem,
    relative_error,
)

LOG_PROB_BAR = 1e-5
GRADIENT_BAR = 2.0
# vocabularies that no chunk divides
SHAPE = Shape(256, 512, 20011)
QUICK_SHAPE = Shape(33, 32, 1003)
SCALE = 4.0  # deviation of the logits over the temperature: the largest is some 20
ENTROPY_WEIGHT = 0.3


@dataclass(frozen=True)
class Errors:
    log_prob: float
    entropy: float
    grad_hidden: float
    grad_weight: float


@dataclass(frozen=True)
class Sample:
    """`num_padded`: rows at the end of the weight that stand for no token."""

    problem: Problem
    num_padded: int = 0
    temperature_T: Tensor | None = None  # one a row, instead of the problem's

    @property
    def vocab(self) -> int:
        return self.problem.weight_VH.shape[0] - self.num_padded

    @property
    def temperature(self) -> Tensor | float:
        return self.problem.temperature if self.temperature_T is None else self.temperature_T


Outputs = tuple[Tensor, Tensor]  # log-probs and entropies
# the second: the sample's problem with leaves of its own
Compute = Callable[[Sample, Problem], Outputs]


def ours(sample: Sample, problem: Problem) -> Outputs:
    outputs = fused_outputs(problem, vocab_size=sample.vocab, temperature=sample.temperature)
    assert outputs.entropies_R is not None
    return outputs.log_probs_R, outputs.entropies_R


def plain(dtype: torch.dtype, logits_dtype: torch.dtype | None = None) -> Compute:
    """The naive head in `dtype`; logits rounded to `logits_dtype` where one is given."""

    def compute(sample: Sample, problem: Problem) -> Outputs:
        weight_VH = problem.weight_VH[: sample.vocab].to(dtype)
        logits_TV = problem.hidden_TH.to(dtype) @ weight_VH.T
        if logits_dtype is not None:
            logits_TV = logits_TV.to(logits_dtype).to(dtype)
        temperature = sample.temperature
        logits_TV = logits_TV / (
            temperature[:, None].to(dtype) if torch.is_tensor(temperature) else temperature
        )
        log_p_TV = logits_TV.log_softmax(-1)
        log_probs_T = log_p_TV.gather(-1, problem.targets_T[:, None])[:, 0]
        return log_probs_T, -(log_p_TV.exp() * log_p_TV).sum(-1)

    return compute


def results(
    compute: Compute, sample: Sample, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropies, gradients of hidden states and weight, from leaves of `dtype`."""
    source = sample.problem
    leaves = [
        tensor.detach().to(dtype).requires_grad_()
        for tensor in (source.hidden_TH, source.weight_VH)
    ]
    log_probs_T, entropies_T = compute(
        sample, Problem(leaves[0], leaves[1], source.targets_T, source.temperature)
    )
    generator = torch.Generator().manual_seed(7)
    upstream_2T = torch.randn(2, len(source.targets_T), generator=generator).to(log_probs_T.dtype)
    loss = (log_probs_T * upstream_2T[0]).sum() + ENTROPY_WEIGHT * (
        entropies_T * upstream_2T[1]
    ).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, leaves)
    return log_probs_T.detach(), entropies_T.detach(), grad_hidden, grad_weight


def errors_of(
    compute: Compute, sample: Sample, dtype: torch.dtype, exact: tuple[Tensor, ...]
) -> Errors:
    log_probs_T, entropies_T, grad_hidden, grad_weight = results(compute, sample, dtype)
    return Errors(
        (log_probs_T.double() - exact[0]).abs().max().item(),
        (entropies_T.double() - exact[1]).abs().max().item(),
        relative_error(grad_hidden, exact[2]),
        relative_error(grad_weight, exact[3]),
    )


def low_logits(shape: Shape) -> Problem:
    """Hidden states 0 and 1, weights in eighths, and one column of -190: logits of 10 eighths
    around it, exact.
    """
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randint(0, 2, (shape.num_tokens, shape.hidden), generator=generator).float()
    weight_VH = torch.randint(-1, 2, (shape.vocab, shape.hidden), generator=generator).float() / 8
    hidden_TH[:, 0] = 1.0
    weight_VH[:, 0] = -190.0
    targets_T = torch.randint(0, shape.vocab, (shape.num_tokens,), generator=generator)
    return Problem(hidden_TH.requires_grad_(), weight_VH.requires_grad_(), targets_T)


def samples(shape: Shape) -> dict[str, Sample]:
    whole = make_problem(shape, scale=SCALE)
    padded = make_problem(Shape(shape.num_tokens, shape.hidden, shape.vocab + 117), scale=SCALE)
    with torch.no_grad():
        padded.weight_VH[shape.vocab :] = 100.0  # it would win every row
    padded = Problem(
        padded.hidden_TH, padded.weight_VH, padded.targets_T.clamp(max=shape.vocab - 1)
    )
    cold = make_problem(shape, scale=0.7 * SCALE)
    temperature_T = torch.rand(shape.num_tokens, generator=torch.Generator().manual_seed(11)) + 0.5
    return {
        "float32, ragged vocabulary": Sample(whole),
        "bfloat16 inputs": Sample(make_problem(shape, torch.bfloat16, SCALE)),
        "low logits, -200 to -180": Sample(low_logits(shape)),
        "padded vocabulary": Sample(padded, num_padded=117),
        "temperature 0.7": Sample(Problem(cold.hidden_TH, cold.weight_VH, cold.targets_T, 0.7)),
        "a temperature a row, 0.5 to 1.5": Sample(
            make_problem(shape, scale=0.5 * SCALE), 0, temperature_T
        ),
        "one token": Sample(make_problem(Shape(1, shape.hidden, shape.vocab), scale=SCALE)),
    }


def figures_of(name: str, found: Errors, naive: Errors) -> list[Figure]:
    # processors differ in how they sum: the bar is the naive head's error where that is larger
    values = []
    for what, ours_error, naive_error in (
        ("log-prob", found.log_prob, naive.log_prob),
        ("entropy", found.entropy, naive.entropy),
    ):
        bar = max(LOG_PROB_BAR, naive_error)
        values.append(Figure(f"{name}: {what}", ours_error, "nat", f"naive {naive_error:.1e}", bar))
    for what, ours_error, naive_error in (
        ("gradient of hidden states", found.grad_hidden, naive.grad_hidden),
        ("gradient of weight", found.grad_weight, naive.grad_weight),
    ):
        size = f"naive float32, {naive_error:.1e}"
        values.append(Figure(f"{name}: {what}", ours_error / naive_error, "x", size, GRADIENT_BAR))
    return values


def without_tokens(shape: Shape) -> list[Figure]:
    """No response token: nothing comes out, and the gradients are there and zero."""
    problem = make_problem(shape)
    outputs = fused_outputs(
        Problem(problem.hidden_TH, problem.weight_VH, problem.targets_T[:0]),
        rows_R=torch.empty(0, dtype=torch.int64),
    )
    assert outputs.entropies_R is not None
    grads = torch.autograd.grad(
        outputs.log_probs_R.sum() + outputs.entropies_R.sum(),
        [problem.hidden_TH, problem.weight_VH],
    )
    return [
        Figure("no response token: results", float(outputs.log_probs_R.numel()), "rows", "", 0.0),
        Figure(
            "no response token: largest gradient",
            max(grad.abs().max().item() for grad in grads),
            "",
            "",
            0.0,
        ),
    ]


def run(is_quick: bool) -> CaseResult:
    shape = QUICK_SHAPE if is_quick else SHAPE
    figures: list[Figure] = []
    details: dict[str, Any] = {"shape": str(shape), "deviation_of_logits": SCALE}
    for name, sample in samples(shape).items():
        exact = results(plain(torch.float64), sample, torch.float64)
        dtype = sample.problem.hidden_TH.dtype
        found, naive = (
            errors_of(compute, sample, dtype, exact) for compute in (ours, plain(torch.float32))
        )
        figures += figures_of(name, found, naive)
        details[name] = {"ours": vars(found), "naive float32": vars(naive)}
        if dtype == torch.bfloat16:
            rounded = errors_of(plain(torch.float32, torch.bfloat16), sample, dtype, exact)
            details[name]["naive, logits rounded to bfloat16"] = vars(rounded)
            figures.append(
                Figure(
                    f"{name}: log-prob, logits rounded to bfloat16",
                    rounded.log_prob,
                    "nat",
                    "what others pay for it",
                )
            )
    return CaseResult((*figures, *without_tokens(shape)), details)


CASE = Case("C3", "LM head: errors against float64", run)
