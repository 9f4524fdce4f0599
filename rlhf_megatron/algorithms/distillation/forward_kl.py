"""KL(teacher || student), "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531): the
student covers what the teacher says.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.distillation.distillation_loss import (
    DISTILLATION_LOSSES,
    DistillationParams,
)
from rlhf_megatron.lazy import Tensor


@DISTILLATION_LOSSES.register("forward_kl", DistillationParams)
def forward_kl(student_TN: Tensor, teacher_TN: Tensor) -> Tensor:
    """Return the loss of each token [T] in nats: the sum of p_teacher (log p_teacher - log
    p_student).
    """
    return (teacher_TN.exp() * (teacher_TN - student_TN)).sum(-1)
