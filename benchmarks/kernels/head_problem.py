"""Problems for the LM head, and what runs on them: a head makes a loss of a problem, its gradient
is timed with it.
"""

# T tokens, V vocabulary, H hidden

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.ranks.kernels.log_prob import HeadOutputs, compute_linear_log_probs

CHUNK_SIZE = 4096  # the trainer's default, actor.log_prob_chunk_size


@dataclass(frozen=True)
class Problem:
    """The loss is -sum(log_probs_T) / T - ENTROPY_COEFFICIENT sum(entropies_T) / T: each token
    weighs the same, since heads that form the gradient in the forward pass know no other case.
    """

    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    temperature: float = 1.0

    @property
    def gradient_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.hidden_TH, self.weight_VH))

    def loss(self, log_probs_T: Tensor, entropies_T: Tensor | None) -> Tensor:
        total = log_probs_T.sum()
        if entropies_T is not None:
            total = total + ENTROPY_COEFFICIENT * entropies_T.sum()
        return -total / self.targets_T.numel()


ENTROPY_COEFFICIENT = 0.01
Head = Callable[[Problem], Tensor]  # the loss, with its graph


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"T={self.num_tokens} H={self.hidden} V={self.vocab}"


@dataclass
class HeadRun:
    """One forward and backward pass. Seconds are CPU seconds of this process."""

    loss: float
    grad_hidden_TH: Tensor
    grad_weight_VH: Tensor | None  # None where it went elsewhere
    seconds: dict[str, float] = field(default_factory=dict)


def make_problem(
    shape: Shape, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0
) -> Problem:
    """Logits are normal with deviation `scale`."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(shape.num_tokens, shape.hidden, generator=generator)
    weight_VH = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(
        scale / math.sqrt(shape.hidden)
    )
    targets_T = torch.randint(0, shape.vocab, (shape.num_tokens,), generator=generator)
    return Problem(
        hidden_TH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_(), targets_T
    )


def run_head(head: Head, problem: Problem) -> HeadRun:
    """Gradients are dropped first, so that every run allocates its own."""
    problem.hidden_TH.grad = problem.weight_VH.grad = None
    start = time.process_time()
    loss = head(problem)
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    grads = problem.hidden_TH.grad, problem.weight_VH.grad
    problem.hidden_TH.grad = problem.weight_VH.grad = None
    assert grads[0] is not None
    return HeadRun(
        loss.item(), grads[0], grads[1], {"forward": middle - start, "backward": end - middle}
    )


def fused_outputs(problem: Problem, **arguments: Any) -> HeadOutputs:
    """Ours, on the whole problem."""
    defaults: dict[str, Any] = {
        "temperature": problem.temperature,
        "vocab_start": 0,
        "vocab_size": problem.weight_VH.shape[0],
        "tp_group": None,
        "chunk_size": CHUNK_SIZE,
        "with_entropy": True,
        "backend": "chunked",
    }
    return compute_linear_log_probs(
        problem.hidden_TH, problem.weight_VH, problem.targets_T, **{**defaults, **arguments}
    )


def fused(**arguments: Any) -> Head:
    """Our head with arguments of `compute_linear_log_probs`."""

    def head(problem: Problem) -> Tensor:
        outputs = fused_outputs(problem, **arguments)
        return problem.loss(outputs.log_probs_R, outputs.entropies_R)

    return head


def relative_error(found: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of `expected`, in float64."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return difference.item()


def check_same_work(
    heads: dict[str, Head], baseline: Head, problem: Problem, tolerance: float = 1e-4
) -> None:
    """Raises RuntimeError when a head's loss or gradients are not the baseline's: what is not equal
    is not compared.
    """
    expected = run_head(baseline, problem)
    assert expected.grad_weight_VH is not None
    for name, head in heads.items():
        found = run_head(head, problem)
        assert found.grad_weight_VH is not None
        errors = {
            "loss": abs(found.loss - expected.loss) / abs(expected.loss),
            "gradient of the hidden states": relative_error(
                found.grad_hidden_TH, expected.grad_hidden_TH
            ),
            "gradient of the weight": relative_error(found.grad_weight_VH, expected.grad_weight_VH),
        }
        wrong = {what: error for what, error in errors.items() if not error <= tolerance}
        if wrong:
            raise RuntimeError(
                f"{name} does not do the same work as its baseline: relative errors {wrong}"
            )
