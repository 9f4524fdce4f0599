"""Preference and distillation losses against TRL 1.16's own functions: value and gradient on 200
random ragged batches.

    make .venv-trl/.installed && .venv-trl/bin/python -m benchmarks.trl_losses

TRL's loss of pairs is `DPOTrainer._compute_loss`, called on a stand-in for the trainer whose models
hand out given log-probs; its divergence from a teacher's most likely tokens is
`ServerDistillationTrainer`'s, those of the whole vocabulary are `GKDTrainer`'s, in float64. Exits 1
where a value or a gradient differs by more than 1e-6.
"""
# B pairs, T tokens, V vocabulary, K most likely tokens

from __future__ import annotations

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
import trl.trainer.dpo_trainer as trl_dpo
from torch import Tensor
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import (
    ServerDistillationTrainer,
)

from rlhf_megatron.algorithms.distillation.distillation_loss import normalize_top_k_log_probs
from rlhf_megatron.algorithms.distillation.forward_kl import forward_kl
from rlhf_megatron.algorithms.distillation.reverse_kl import reverse_kl
from rlhf_megatron.algorithms.preferences.dpo import DPOParams, dpo
from rlhf_megatron.algorithms.preferences.preference_loss import PreferencePairs

BATCHES = 200
BAR = 1e-6
LOSSES = (("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1))


def model_of(log_probs: Tensor) -> Any:
    """What the trainer calls for a model: log-probs of the next tokens, 0 where none counts."""
    nothing = torch.zeros_like(log_probs.detach())
    found = SimpleNamespace(
        log_probs=log_probs,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
        log_sum_sq_probs=nothing,
    )

    class Model:
        training = True

        def __call__(self, **inputs: Any) -> Any:
            return found

    return Model()


def loss_of_trl(
    policy: Tensor, reference: Tensor, mask: Tensor, beta: float, kind: str, smoothing: float
) -> Tensor:
    class Accelerator:
        device = torch.device("cpu")

        def gather(self, tensor: Tensor) -> Tensor:
            return tensor

        gather_for_metrics = gather

    trainer = SimpleNamespace(
        model=model_of(policy),
        ref_model=model_of(reference),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=1.0,
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trl_dpo.disable_gradient_checkpointing = lambda *args, **settings: contextlib.nullcontext()
    trl_dpo.is_peft_model = lambda model: False
    ids = torch.zeros_like(mask)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    return trl_dpo.DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)


def loss_of_ours(policy: Tensor, reference: Tensor, mask: Tensor, params: DPOParams) -> Tensor:
    chosen, rejected = policy.sum(1).chunk(2)
    pairs = PreferencePairs(
        chosen, rejected, *reference.sum(1).chunk(2), *mask[:, 1:].sum(1).double().chunk(2)
    )
    return dpo(pairs, params).loss_P.mean()


def pairs_batch(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(policy [2B, T - 1], reference, mask [2B, T]): chosen answers first, of any length, after
    prompts of any.
    """
    pairs = 1 + number % 5
    tokens = 6 + number % 9
    mask = torch.zeros(2 * pairs, tokens, dtype=torch.long)
    for row in mask:
        begin = int(torch.randint(1, tokens - 1, (1,), generator=generator))
        row[begin : int(torch.randint(begin + 1, tokens + 1, (1,), generator=generator))] = 1
    drawn = -3 * torch.rand(2, 2 * pairs, tokens - 1, generator=generator, dtype=torch.float64)
    return drawn[0] * mask[:, 1:], drawn[1] * mask[:, 1:], mask


def teacher_of_trl(
    student_TV: Tensor, ids: Tensor, teacher: Tensor, labels: Tensor, has_tail: bool
) -> Tensor:
    stand_in = SimpleNamespace(
        loss_add_tail=has_tail,
        _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss,
    )
    told = {"topk_logprobs": teacher, "topk_token_ids": ids}
    return ServerDistillationTrainer._compute_server_forward_kl_loss(
        stand_in, told, student_TV, labels
    )


def compare(
    worst: dict[str, float], name: str, theirs: Tensor, ours: Tensor, leaves: tuple[Tensor, Tensor]
) -> None:
    gradients = [
        torch.autograd.grad(value, leaf)[0]
        for value, leaf in zip((theirs, ours), leaves, strict=True)
    ]
    error = max((theirs - ours).abs().item(), (gradients[0] - gradients[1]).abs().max().item())
    worst[name] = max(worst.get(name, 0.0), error)


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    worst: dict[str, float] = {}
    for number in range(BATCHES):
        policy, reference, mask = pairs_batch(number, generator)
        for kind, smoothing in LOSSES:
            theirs = policy.clone().requires_grad_()
            ours = policy.clone().requires_grad_()
            found = loss_of_trl(theirs, reference, mask, 0.3, kind, smoothing)
            params = DPOParams(0.3, kind, smoothing)
            compare(
                worst,
                f"dpo {kind}",
                found,
                loss_of_ours(ours, reference, mask, params),
                (theirs, ours),
            )
        rows = 1 + number % 3
        tokens = 4 + number % 7
        vocabulary = 11
        count = 2 + number % 4
        logits, of_teacher = (
            torch.randn(2, rows, tokens, vocabulary, generator=generator, dtype=torch.float64) * 2
        )
        labels = torch.where(torch.rand(rows, tokens, generator=generator) < 0.7, 1, -100)
        labels[0, 0] = 1
        teacher_TK, ids_TK = of_teacher.log_softmax(-1).topk(count, -1)
        is_trained = labels != -100
        for has_tail in (True, False):
            theirs = logits.clone().requires_grad_()
            ours = logits.clone().requires_grad_()
            found = teacher_of_trl(theirs.log_softmax(-1), ids_TK, teacher_TK, labels, has_tail)
            student = normalize_top_k_log_probs(ours.log_softmax(-1).gather(-1, ids_TK), has_tail)
            mine = forward_kl(student, normalize_top_k_log_probs(teacher_TK, has_tail))[
                is_trained
            ].mean()
            compare(
                worst, f"forward_kl{' with tail' if has_tail else ''}", found, mine, (theirs, ours)
            )
        for beta, name, loss in ((0.0, "forward_kl", forward_kl), (1.0, "reverse_kl", reverse_kl)):
            theirs = logits.clone().requires_grad_()
            ours = logits.clone().requires_grad_()
            found = GKDTrainer.generalized_jsd_loss(theirs, of_teacher, labels, beta=beta)
            student = ours.log_softmax(-1)
            teacher = of_teacher.log_softmax(-1)
            compare(
                worst,
                f"{name}, whole vocabulary",
                found,
                loss(student, teacher)[is_trained].mean(),
                (theirs, ours),
            )
    print(
        f"TRL {trl.__version__}, {BATCHES} random ragged batches, the largest difference of a"
        " value or a gradient:"
    )
    for name, error in worst.items():
        print(f"  {name}: {error:.1e}")
    return 0 if max(worst.values()) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
