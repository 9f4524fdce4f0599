"""The output layer hands out hidden states: the kernels make log-probs from them and the head's weight."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor


class HiddenStatesHead(ColumnParallelLinear):
    """megatron's output layer with its weight, marks and sharded_state_dict, whose forward multiplies nothing.

    The gradient of what it hands out must be complete on every tp rank: `kernels.log_prob` sums it over tp.
    """

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, h] -> the same; the whole sequence where sequence parallelism had split it."""
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return input_, None


def expose_hidden_states(model: Any) -> None:
    """Make `model(...)`, a GPTModel with the last stage, return hidden states [b, s, h]."""
    # The same module under another class: what megatron set on it and on its weight stays.
    model.output_layer.__class__ = HiddenStatesHead


def head_weight(chunk: torch.nn.Module) -> torch.nn.Parameter:
    """The output head [padded vocabulary / tp, hidden] on the last stage, also of a model wrapped in DDP.

    Tied: the embedding where the last stage is the first, else the last stage's own copy, whose gradient megatron's
    finalize_model_grads sums with the first stage's. Raises ValueError on a chunk without the last stage.
    """
    model = unwrap_model(chunk)
    if not model.post_process:
        raise ValueError("this chunk has no output head: it stands on the last pipeline stage only.")
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
