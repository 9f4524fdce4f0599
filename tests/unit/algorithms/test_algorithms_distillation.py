"""Divergences from a teacher against their formulas written out in float64, on 200 random
ragged batches.

`python -m benchmarks.trl_losses` compares the same functions with those of TRL 1.16.
"""

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.distillation import DISTILLATION_LOSSES
from rlhf_megatron.algorithms.distillation.distillation_loss import (
    DistillationParams,
    normalize_top_k_log_probs,
)

BAR = 1e-6


def draw(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """(student's logits [T, V], teacher's log-probs [T, V], the teacher's K likeliest
    tokens [T, K]).
    """
    generator = torch.Generator().manual_seed(number)
    tokens = 1 + number % 13
    vocabulary = 5 + number % 8
    count = 1 + number % 4
    logits, of_teacher = 2 * torch.randn(
        2, tokens, vocabulary, generator=generator, dtype=torch.float64
    )
    teacher = of_teacher.log_softmax(-1)
    return logits, teacher, teacher.topk(count, -1).indices


def weights_of(logits: Tensor) -> Tensor:
    return torch.linspace(0.1, 1.0, len(logits), dtype=torch.float64)


def found(
    name: str, logits: Tensor, teacher: Tensor, ids: Tensor, has_tail: bool
) -> tuple[Tensor, Tensor]:
    """([T] loss, gradient of its weighted sum by the logits)."""
    leaf = logits.clone().requires_grad_()
    pair = (
        normalize_top_k_log_probs(log_p.gather(-1, ids), has_tail)
        for log_p in (leaf.log_softmax(-1), teacher)
    )
    loss = DISTILLATION_LOSSES.get(name).build(*pair)
    return loss.detach(), torch.autograd.grad((loss * weights_of(logits)).sum(), leaf)[0]


def test_the_forward_divergence_with_a_tail() -> None:
    """By the logits of student q and teacher p: q - p where the teacher told; elsewhere q -
    p_rest q / q_rest.
    """
    for number in range(200):
        logits, teacher, ids = draw(number)
        p = teacher.exp()
        q = logits.softmax(-1)
        is_told = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids, True)
        p_rest, q_rest = (one.masked_fill(is_told, 0).sum(-1, keepdim=True) for one in (p, q))
        told = (p * (p / q).log()).masked_fill(~is_told, 0).sum(-1)
        wanted = told + (p_rest * (p_rest / q_rest).log())[:, 0]
        slopes = torch.where(is_told, q - p, q - p_rest * q / q_rest) * weights_of(logits)[:, None]
        loss, gradient = found("forward_kl", logits, teacher, ids, has_tail=True)
        assert (loss - wanted).abs().max() <= BAR and (gradient - slopes).abs().max() <= BAR, number


@pytest.mark.parametrize("has_tail", [True, False])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_both_divergences_written_out(name: str, has_tail: bool) -> None:
    for number in range(200):
        logits, teacher, ids = draw(number)
        if not has_tail and ids.shape[1] == 1:
            continue
        leaf = logits.clone().requires_grad_()
        p, q = (one.gather(-1, ids) for one in (teacher.exp(), leaf.softmax(-1)))
        if has_tail:
            p, q = (torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in (p, q))
        else:
            p, q = (one / one.sum(-1, keepdim=True) for one in (p, q))
        wanted = (p * (p / q).log() if name == "forward_kl" else q * (q / p).log()).sum(-1)
        (slopes,) = torch.autograd.grad((wanted * weights_of(logits)).sum(), leaf)
        loss, gradient = found(name, logits, teacher, ids, has_tail)
        assert (loss - wanted).abs().max() <= BAR and (gradient - slopes).abs().max() <= BAR, number


def test_a_student_that_is_its_teacher_has_no_loss_and_no_slope() -> None:
    """Also where the told tokens have all of the probability in float32."""
    logits = torch.tensor([[40.0, 0.0, 0.0], [0.3, 0.2, 0.1]])
    for name in ("forward_kl", "reverse_kl"):
        for has_tail in (True, False):
            loss, gradient = found(
                name, logits, logits.log_softmax(-1), torch.tensor([[0, 1], [0, 1]]), has_tail
            )
            assert loss.abs().max() <= BAR and gradient.abs().max() <= BAR


def test_parameters() -> None:
    with pytest.raises(
        ValueError, match=r"top_k \(1\) must be at least 1, and 2 without has_tail; use 16"
    ):
        DistillationParams(top_k=1, has_tail=False)
    assert DistillationParams().top_k == 16
