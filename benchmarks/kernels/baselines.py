"""What our head is compared with: the naive one, and the schemes of two published trainers, written
anew in torch.

`naive`            float32 logits, log_softmax, gather, entropy from the softmax; autograd.
`token_chunks`     as verl's torch path does: 512 tokens at a time over the whole vocabulary;
                   softmax, logsumexp and
                   log_softmax in float32; the backward pass computes the logits again, with a
                       one-hot tensor.
`gradients_first`  as Liger-Kernel's fused linear cross entropy does: chunks of tokens, as many as
                   the vocabulary is
                   larger than the hidden size; gradients are formed in the forward pass.
                       Log-probabilities only.

Neither is the published code: that is in `published`, where it runs on a CPU.
"""

# T tokens, C tokens of a chunk, V vocabulary, H hidden

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.head_problem import Head, Problem

TOKENS_OF_A_CHUNK = 512


def naive_outputs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies [T] in the type of the inputs."""
    logits_TV = hidden_TH @ weight_VH.T
    log_p_TV = logits_TV.log_softmax(-1)
    log_probs_T = log_p_TV.gather(-1, targets_T[:, None])[:, 0]
    return log_probs_T, -(log_p_TV.exp() * log_p_TV).sum(-1) if with_entropy else None


def naive(with_entropy: bool) -> Head:
    def head(problem: Problem) -> Tensor:
        return problem.loss(
            *naive_outputs(problem.hidden_TH, problem.weight_VH, problem.targets_T, with_entropy)
        )

    return head


def token_chunks(problem: Problem) -> Tensor:
    """The loss with entropy."""
    return problem.loss(
        *_TokenChunks.apply(problem.hidden_TH, problem.weight_VH, problem.targets_T)
    )


class _TokenChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_probs = []
        entropies = []
        for hidden_CH, targets_C in zip(
            hidden_TH.split(TOKENS_OF_A_CHUNK), targets_T.split(TOKENS_OF_A_CHUNK), strict=True
        ):
            logits_CV = (hidden_CH @ weight_VH.T).float()
            entropies.append(logits_CV.logsumexp(-1) - (logits_CV.softmax(-1) * logits_CV).sum(-1))
            log_probs.append(logits_CV.log_softmax(-1).gather(-1, targets_C[:, None])[:, 0])
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T)
        return torch.cat(log_probs), torch.cat(entropies)

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs_T: Tensor, grad_entropies_T: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        hidden_TH, weight_VH, targets_T = ctx.saved_tensors
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH)
        for first in range(0, hidden_TH.shape[0], TOKENS_OF_A_CHUNK):
            rows = slice(first, first + TOKENS_OF_A_CHUNK)
            logits_CV = (hidden_TH[rows] @ weight_VH.T).float()
            p_CV = logits_CV.softmax(-1)
            one_hot_CV = torch.zeros_like(p_CV).scatter_(1, targets_T[rows, None], 1.0)
            grad_CV = grad_log_probs_T[rows, None] * (one_hot_CV - p_CV)
            entropies_C = logits_CV.logsumexp(-1) - (p_CV * logits_CV).sum(-1)
            log_p_CV = logits_CV.log_softmax(-1)
            grad_CV += grad_entropies_T[rows, None] * (-p_CV * (log_p_CV + entropies_C[:, None]))
            grad_CV = grad_CV.to(hidden_TH.dtype)
            grad_hidden_TH[rows] = grad_CV @ weight_VH
            grad_weight_VH += grad_CV.T @ hidden_TH[rows]
        return grad_hidden_TH, grad_weight_VH, None


def chunk_of(num_tokens: int, hidden: int, vocab: int) -> int:
    """Tokens of a chunk of `gradients_first`: a power of two, so that a chunk's logits are about as
    large as the hidden states.
    """
    num_chunks = -(-vocab // hidden)
    tokens = -(-num_tokens // num_chunks)
    return min(1 << (tokens - 1).bit_length(), num_tokens)


def gradients_first(problem: Problem) -> Tensor:
    """The loss without entropy."""
    return _GradientsFirst.apply(problem.hidden_TH, problem.weight_VH, problem.targets_T)


class _GradientsFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
        num_tokens = hidden_TH.shape[0]
        size = chunk_of(num_tokens, hidden_TH.shape[1], weight_VH.shape[0])
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH)
        total = hidden_TH.new_zeros(())
        for first in range(0, num_tokens, size):
            rows = slice(first, first + size)
            grad_CV = hidden_TH[rows] @ weight_VH.T
            log_z_C = grad_CV.logsumexp(-1)
            index_C1 = targets_T[rows, None]
            total += (log_z_C - grad_CV.gather(1, index_C1)[:, 0]).sum()
            grad_CV.sub_(log_z_C[:, None]).exp_()
            grad_CV.scatter_add_(
                1, index_C1, torch.full_like(index_C1, -1, dtype=grad_CV.dtype)
            ).div_(num_tokens)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[rows])
            grad_weight_VH.addmm_(grad_CV.T, hidden_TH[rows])
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        return total / num_tokens

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden_TH, grad_weight_VH = ctx.saved_tensors
        return grad_hidden_TH.mul_(grad_loss), grad_weight_VH.mul_(grad_loss), None
