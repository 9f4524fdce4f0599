"""The experts of a rank as two grouped products (`actor.megatron.moe_grouped_gemm`), with the parameters of
megatron-core's experts, which run one after the other and are the reference.

Every expert's tokens are filled up to a multiple of 16, and to 16 at least: kernels on GPUs refuse other numbers in the
gradient of the weights. Nothing here waits for the device.

Legend: T tokens on this rank, once for each of their experts here; P the same filled up; E experts, i and o columns.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

ALIGNMENT = 16  # tokens; of bytes it is what grouped_mm asks of a row


class GroupedExperts(SequentialMLP):
    """Stands where megatron's specs have SequentialMLP: for gated experts."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, h], [E], [T] -> [T, h], and no bias. Tokens lie together by expert."""
        tokens_Th, device = permuted_local_hidden_states, permuted_local_hidden_states.device
        counts_E = tokens_per_expert.to(device, torch.int64, non_blocking=True)
        places_T, ends_E = filled_groups(counts_E, len(tokens_Th))
        rows = len(tokens_Th) + ALIGNMENT * self.num_local_experts
        filled_Ph = tokens_Th.new_zeros(rows, tokens_Th.shape[1]).index_copy(0, places_T, tokens_Th)
        gate_up = grouped_linear(filled_Ph, ends_E, self._weights("linear_fc1"))
        gate_up_bias = self._biases("linear_fc1", counts_E, len(tokens_Th))
        product = self._activated(gate_up.index_select(0, places_T), gate_up_bias, permuted_probs)
        filled = product.new_zeros(rows, product.shape[1]).index_copy(0, places_T, product)
        down = grouped_linear(filled, ends_E, self._weights("linear_fc2"))
        output = down.index_select(0, places_T)
        if (down_bias := self._biases("linear_fc2", counts_E, len(tokens_Th))) is not None:
            output = output + (down_bias * permuted_probs.unsqueeze(-1)).to(output.dtype)
        return output, None

    def _weights(self, name: str) -> list[Tensor]:
        """Return the weights of the experts' linear layers of that name. Their own forward passes are never called, so
        their pre-forward hooks run here: overlap_param_gather waits for the weights in them.
        """
        linears = [getattr(expert, name) for expert in self.local_experts]
        for linear in linears:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        return [linear.weight for linear in linears]

    def _biases(self, name: str, counts_E: Tensor, num_tokens: int) -> Tensor | None:
        """[T, o], of each token that of its expert; None where they have none. Behind `_weights`, which waits for
        parameters."""
        if not self.config.add_bias_linear:
            return None
        biases_Eo = torch.stack([getattr(expert, name).bias for expert in self.local_experts])
        experts_E = torch.arange(len(biases_Eo), device=counts_E.device)
        return biases_Eo.index_select(0, experts_E.repeat_interleave(counts_E, output_size=num_tokens))

    def _activated(self, gate_up: Tensor, bias: Tensor | None, probs_T: Tensor) -> Tensor:
        """Apply the activation as megatron's MLP does."""
        config = self.config
        if bias is not None:
            gate_up = gate_up + bias
        if config.bias_activation_fusion:
            given = (gate_up, None, probs_T.unsqueeze(-1), config.activation_func_fp8_input_store)
            if config.activation_func is quick_gelu:
                more = (config.glu_linear_offset, config.activation_func_clamp_value)
                fused: Tensor = weighted_bias_quick_geglu_impl(*given, *more)
            else:
                fused = weighted_bias_swiglu_impl(*given)
            return fused
        gate, up = gate_up.chunk(2, -1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        product: Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
        return (product * probs_T.unsqueeze(-1)).to(gate_up.dtype)


def grouped_linear(tokens_Pi: Tensor, ends_E: Tensor, weights: list[Tensor]) -> Tensor:
    """[P, o]: the rows of each group times its weight [o, i]. `ends_E` int32, each a multiple of ALIGNMENT.

    Rows behind the last group are not defined.
    """
    product: Tensor = _GroupedLinear.apply(tokens_Pi, ends_E, *weights)
    return product


class _GroupedLinear(torch.autograd.Function):
    """Keeps the parameters for the backward pass, and not the copy that they are put together in."""

    @staticmethod
    def forward(ctx: Any, tokens_Pi: Tensor, ends_E: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_Pi, ends_E, *weights)
        return grouped_mm(tokens_Pi, torch.stack(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_Po: Tensor) -> tuple[Tensor | None, ...]:
        tokens_Pi, ends_E, *weights = ctx.saved_tensors
        grad_Po = grad_Po.contiguous()
        of_tokens = grouped_mm(grad_Po, torch.stack(weights), offs=ends_E)
        of_weights = grouped_mm(grad_Po.t(), tokens_Pi, offs=ends_E)
        return of_tokens, None, *of_weights.unbind(0)


def filled_groups(counts_E: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(the row of each token [T], where each expert's rows end [E] int32) once groups are filled up."""
    filled_E = ((counts_E + ALIGNMENT - 1) // ALIGNMENT).clamp(min=1) * ALIGNMENT
    ends_E = filled_E.cumsum(0)
    moved_E = (ends_E - filled_E) - (counts_E.cumsum(0) - counts_E)  # by which an expert's tokens move back
    moved_T = moved_E.repeat_interleave(counts_E, output_size=num_tokens)
    return torch.arange(num_tokens, device=counts_E.device) + moved_T, ends_E.to(torch.int32)
