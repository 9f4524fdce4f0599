"""The linear layer that stands for latent attention's down projections: whole on every
tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that is whole on every tp rank; it takes and returns this rank's part of the
    sequence. State dict: `weight`, in checkpoints the same on all ranks.

    Needs sequence parallelism where tp is over 1: then `finalize_model_grads` sums the ranks'
    gradients, each of its own tokens.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, tp_group: Any = None, **unused: Any
    ) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        self.tp_group = tp_group
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Leave the weights as they are, without drawing random numbers, because other code loads
        them.
        """

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return ([s, b, output], None) for x [s, b, h]: the second value is the missing bias, as
        megatron's parallel layers return it.
        """
        return super().forward(x), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the layer's sharded tensors for megatron's checkpoints."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
