"""Losses against a teacher by name (`sft.loss_mode`). Every module of this package
registers itself.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.distillation.distillation_loss import DISTILLATION_LOSSES
from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)

__all__ = ["DISTILLATION_LOSSES"]
