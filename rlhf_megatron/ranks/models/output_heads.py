"""The heads behind the final norm. Both return hidden states, whose rows become
log-probs or values.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup


class HiddenStatesHead(ColumnParallelLinear):
    """megatron's output layer with its weight, marks and sharded_state_dict, whose forward
    multiplies nothing.

    The gradient of the returned hidden states must be complete on every tp rank:
    `ranks.kernels.log_prob` sums it over tp.
    """

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return (`input_` as it is, None): [s, b, h], this rank's part of the sequence under
        sequence parallelism.
        """
        return input_, None


class ValueHead(torch.nn.Module):
    """A head with one number a token. Every tp rank has the whole head and computes all values,
    from the hidden states of all tokens.

    So each rank has the whole gradient of the head and of the gathered hidden states, and nothing
    is summed over tp: unlike the parameters of norms, the head's parameters are not marked as
    `sequence_parallel`.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        is_sequence_split: bool,
        tp_group: ProcessGroup,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype)) if has_bias else None
        self.register_parameter("bias", bias)
        self.sequence_parallel = is_sequence_split
        self.tp_group = tp_group

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return (the hidden states as they are, None), as `HiddenStatesHead.forward` does."""
        return input_, None

    def compute_values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """Return [R] float32 values from the hidden states [S, hidden] that forward returned, at
        rows of the whole sequence. All tp ranks must call it.
        """
        whole_SH = (
            gather_sequence_parts(hidden_SH, self.tp_group) if self.sequence_parallel else hidden_SH
        )
        hidden_RH = whole_SH.index_select(0, rows_R)
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden_RH.float(), self.weight.float(), bias)[:, 0]

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]
    ) -> Any:
        """Return the state for megatron's distributed checkpoint, under another name than an output
        layer's.

        megatron lets the rows of `output_layer.weight` differ in number: a policy's output layer
        would load as a value head.
        """
        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, tensor in state.items():
            tensor.key = f"value_head.{name.removeprefix(prefix)}"
        return state


def expose_hidden_states(model: Any) -> None:
    """Make `model(...)`, a GPTModel with the last stage, return hidden states [b, s, h] instead of
    logits.
    """
    # The same module under another class: what megatron set on it and on its weight stays.
    model.output_layer.__class__ = HiddenStatesHead


def install_value_head(model: Any, tp_group: ProcessGroup, has_bias: bool = True) -> None:
    """Replace the output layer of a GPTModel by a value head, with or without a bias; the model
    then returns hidden states [b, s, h].
    """
    config = model.config
    model.output_layer = ValueHead(
        config.hidden_size, config.params_dtype, config.sequence_parallel, tp_group, has_bias
    )


def get_head_weight(chunk: torch.nn.Module) -> torch.nn.Parameter:
    """Return the weight of the output head [padded vocabulary / tp, hidden] on the last stage, also
    of a model wrapped in DDP.

    A tied head is the embedding where the last stage is the first, else the last stage's own copy,
    whose gradient megatron's finalize_model_grads sums with the first stage's. Raise ValueError on
    a chunk without the last stage.
    """
    model = _unwrap_model_with_head(chunk)
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def get_value_head(chunk: torch.nn.Module) -> ValueHead:
    """Return a critic's value head, also of a model wrapped in DDP. Raise ValueError on a chunk
    without the last stage.
    """
    head = _unwrap_model_with_head(chunk).output_layer
    assert isinstance(head, ValueHead), (
        f"the model has a {type(head).__name__}, it was not built with a value head"
    )
    return head


def _unwrap_model_with_head(chunk: torch.nn.Module) -> Any:
    """Return the unwrapped model of a chunk with the output head; raise ValueError for any other
    chunk.
    """
    model = unwrap_model(chunk)
    if not model.post_process:
        raise ValueError(
            "this chunk has no output head: it stands on the last pipeline stage only."
        )
    return model


def gather_sequence_parts(hidden_SH: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Return the sequence parts of all tp ranks, in order; the gradient of the result must be
    complete on every tp rank.
    """
    return gather_from_sequence_parallel_region(
        hidden_SH, tensor_parallel_output_grad=False, group=tp_group
    )
