"""Where weights come from: a Hugging Face directory, a converted directory, a random seed, another file format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rlhf_megatron.models.table import Rule


class WeightSource(Protocol):
    """Gives the Hugging Face tensors of one rule at a time, so that a whole model is never in memory."""

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """The tensors of `rule.hf`, in that order, on the CPU; read-only views are allowed. Raises ValueError."""

    def dtype_of(self, rule: Rule) -> str:
        """ "float32", "bfloat16" or "float16", without reading the tensors. Raises ValueError when they differ."""


def one_dtype(rule: Rule, dtypes: set[str]) -> str:
    """The only one of `dtypes`. Raises ValueError: one Megatron tensor cannot be made of tensors of several types."""
    if len(dtypes) != 1:
        names = ", ".join(hf.name for hf in rule.hf)
        raise ValueError(
            f"{names} have types {', '.join(sorted(dtypes))} but become the one tensor {rule.megatron_name}; give one"
            " type for all weights (--dtype)."
        )
    return next(iter(dtypes))
