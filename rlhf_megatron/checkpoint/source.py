"""Where weights come from: a Hugging Face directory, a converted directory, a random seed, another file format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlhf_megatron.models.table import Rule


class WeightSource(Protocol):
    """Gives the Hugging Face tensors of one rule at a time, so that a whole model is never in memory."""

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """The tensors of `rule.hf`, in that order, on the CPU; read-only views are allowed. Raises ValueError."""
