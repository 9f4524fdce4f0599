"""KL(student || teacher), "MiniLLM" (arXiv 2306.08543): the student leaves out what the
teacher does not say.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.distillation.distillation_loss import (
    DISTILLATION_LOSSES,
    DistillationParams,
)
from rlhf_megatron.lazy import Tensor


@DISTILLATION_LOSSES.register("reverse_kl", DistillationParams)
def reverse_kl(student_TN: Tensor, teacher_TN: Tensor) -> Tensor:
    """Return the loss of each token [T] in nats: the sum of p_student (log p_student - log
    p_teacher).
    """
    return (student_TN.exp() * (student_TN - teacher_TN)).sum(-1)
