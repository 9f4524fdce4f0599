"""The experts of a rank as two grouped products (`actor.megatron.moe_grouped_gemm`).

`GroupedExperts` has the parameters of megatron-core's experts, which run one after the other and
are the reference. `TorchGroupedLinear` stands on a CPU for the grouped linear layers of Transformer
Engine, under their names.

Every expert's tokens are filled up to a multiple of 16, and to 16 at least: kernels on GPUs refuse
other numbers in the gradient of the weights. Nothing here waits for the device.

Legend: T tokens on this rank, once for each of their experts here; P the same filled up; E experts,
i and o columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import grouped_mm

ALIGNMENT = 16  # tokens; of bytes it is what grouped_mm asks of a row


class GroupedExperts(SequentialMLP):
    """Takes the place of SequentialMLP in megatron's layer specs, for gated experts."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Return ([T, h], None) for hidden states [T, h] whose tokens lie together by expert,
        counts [E] and probabilities [T]; the second value is the missing bias.
        """
        tokens_Th = permuted_local_hidden_states
        device = permuted_local_hidden_states.device
        counts_E = tokens_per_expert.to(device, torch.int64, non_blocking=True)
        groups = pad_expert_groups(counts_E, len(tokens_Th))
        gate_up = _multiply_by_expert_weights(
            tokens_Th, groups, self._collect_weights("linear_fc1")
        )
        gate_up_bias = self._expand_biases("linear_fc1", counts_E, len(tokens_Th))
        product = self._apply_activation(gate_up, gate_up_bias, permuted_probs)
        output = _multiply_by_expert_weights(product, groups, self._collect_weights("linear_fc2"))
        if (down_bias := self._expand_biases("linear_fc2", counts_E, len(tokens_Th))) is not None:
            output = output + (down_bias * permuted_probs.unsqueeze(-1)).to(output.dtype)
        return output, None

    def _collect_weights(self, linear_name: str) -> list[Tensor]:
        """Return the weights of the experts' linear layers of that name. Their own forward passes
        are never called, so their pre-forward hooks run here: overlap_param_gather waits for the
        weights in them.
        """
        linears = [getattr(expert, linear_name) for expert in self.local_experts]
        for linear in linears:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
        return [linear.weight for linear in linears]

    def _expand_biases(self, linear_name: str, counts_E: Tensor, num_tokens: int) -> Tensor | None:
        """Return [T, o], the bias of each token's expert; None where the experts have no biases.
        Call it after `_collect_weights`, which waits for the parameters.
        """
        if not self.config.add_bias_linear:
            return None
        return _expand_biases_to_tokens(
            [getattr(expert, linear_name).bias for expert in self.local_experts],
            counts_E,
            num_tokens,
        )

    def _apply_activation(self, gate_up: Tensor, bias: Tensor | None, probs_T: Tensor) -> Tensor:
        """Return the gated activation of `gate_up`, times each token's probability, as megatron's
        MLP computes it.
        """
        config = self.config
        if bias is not None:
            gate_up = gate_up + bias
        if config.bias_activation_fusion:
            probs_T1 = probs_T.unsqueeze(-1)
            if config.activation_func is quick_gelu:
                fused: Tensor = weighted_bias_quick_geglu_impl(
                    gate_up,
                    None,
                    probs_T1,
                    config.activation_func_fp8_input_store,
                    config.glu_linear_offset,
                    config.activation_func_clamp_value,
                )
            else:
                fused = weighted_bias_swiglu_impl(
                    gate_up, None, probs_T1, config.activation_func_fp8_input_store
                )
            return fused
        gate, up = gate_up.chunk(2, -1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
        product: Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
        return (product * probs_T.unsqueeze(-1)).to(gate_up.dtype)


class TorchGroupedLinear(torch.nn.Module):
    """A linear layer of all experts of a rank: parameters `weight0`, `bias0`, `weight1`, ...
    megatron-core's TEGroupedMLP makes and calls it like Transformer Engine's layer.
    """

    tp_dim: int  # of a weight [o, i], along which etp splits it

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_transformer_engine_options: Any,
    ) -> None:
        super().__init__()
        self.process_groups = pg_collection
        self.num_gemms = num_gemms
        self.is_bias_returned = skip_bias_add
        shape = [output_size, input_size]
        shape[self.tp_dim] //= dist.get_world_size(pg_collection.expt_tp)
        for number in range(num_gemms):
            self.register_parameter(
                f"weight{number}", Parameter(torch.zeros(shape, dtype=config.params_dtype))
            )
            if bias:
                self.register_parameter(
                    f"bias{number}", Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                )

    def forward(self, tokens_Ti: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Return ([T, o], the biases where the caller adds them, else None) for `tokens_Ti` [T, i],
        sorted by expert, with `counts` tokens for each expert.
        """
        counts_E = torch.tensor(counts, device=tokens_Ti.device)
        product = _multiply_by_expert_weights(
            tokens_Ti,
            pad_expert_groups(counts_E, len(tokens_Ti)),
            self._collect_expert_parameters("weight"),
        )
        biases = self._collect_expert_parameters("bias")
        if not biases or self.is_bias_returned:
            return product, biases or None
        return product + _expand_biases_to_tokens(biases, counts_E, len(tokens_Ti)), None

    def _collect_expert_parameters(self, parameter_name: str) -> list[Tensor]:
        """Return the parameter "weight" or "bias" of each expert; [] where there are no biases."""
        found = [
            getattr(self, f"{parameter_name}{number}", None) for number in range(self.num_gemms)
        ]
        return [parameter for parameter in found if parameter is not None]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded tensors for megatron's checkpoints: one tensor for the experts of all
        ranks, as for experts that run one after the other.
        """
        groups = self.process_groups
        axes = {"weight": self.tp_dim, **({"bias": 0} if self.tp_dim == 0 else {})}
        first = dist.get_rank(groups.ep) * self.num_gemms
        total = dist.get_world_size(groups.ep) * self.num_gemms
        state = {}
        for number in range(self.num_gemms):
            parts = {name: getattr(self, f"{name}{number}", None) for name in ("weight", "bias")}
            entries = make_sharded_tensors_for_checkpoint(
                {name: part for name, part in parts.items() if part is not None},
                prefix,
                axes,
                (*sharded_offsets, (len(sharded_offsets), first + number, total)),
                tp_group=groups.expt_tp,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            )
            for name, entry in entries.items():
                entry.replica_id = (*entry.replica_id[:2], dist.get_rank(groups.expt_dp))
                state[f"{name}{number}"] = entry
        return state


class ColumnGroupedLinear(TorchGroupedLinear):
    """The gate and up projections of all experts."""

    tp_dim = 0


class RowGroupedLinear(TorchGroupedLinear):
    """The down projections of all experts."""

    tp_dim = 1


def _multiply_by_expert_weights(
    tokens_Ti: Tensor, padded_groups: tuple[Tensor, Tensor], weights: list[Tensor]
) -> Tensor:
    """Return [T, o]: each token times the weight of its expert. `padded_groups` comes from
    `pad_expert_groups`.
    """
    places_T, ends_E = padded_groups
    filled = tokens_Ti.new_zeros(len(tokens_Ti) + ALIGNMENT * len(weights), tokens_Ti.shape[1])
    return apply_grouped_linear(
        filled.index_copy(0, places_T, tokens_Ti), ends_E, weights
    ).index_select(0, places_T)


def _expand_biases_to_tokens(biases: list[Tensor], counts_E: Tensor, num_tokens: int) -> Tensor:
    """Return [T, o]: the bias of each token's expert."""
    experts_E = torch.arange(len(biases), device=counts_E.device)
    return torch.stack(biases).index_select(
        0, experts_E.repeat_interleave(counts_E, output_size=num_tokens)
    )


def apply_grouped_linear(tokens_Pi: Tensor, ends_E: Tensor, weights: list[Tensor]) -> Tensor:
    """Return [P, o]: the rows of each group times the group's weight [o, i]. `ends_E` int32 holds
    the end of each group's rows, a multiple of ALIGNMENT.

    Rows behind the last group are undefined.
    """
    product: Tensor = _GroupedLinearFunction.apply(tokens_Pi, ends_E, *weights)
    return product


class _GroupedLinearFunction(torch.autograd.Function):
    """The grouped product, which keeps the parameters for the backward pass and not their stacked
    copy.
    """

    @staticmethod
    def forward(ctx: Any, tokens_Pi: Tensor, ends_E: Tensor, *weights: Tensor) -> Tensor:
        """Return [P, o]: the rows of each group times the group's weight."""
        ctx.save_for_backward(tokens_Pi, ends_E, *weights)
        return grouped_mm(tokens_Pi, torch.stack(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_Po: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of each weight."""
        tokens_Pi, ends_E, *weights = ctx.saved_tensors
        grad_Po = grad_Po.contiguous()
        of_tokens = grouped_mm(grad_Po, torch.stack(weights), offs=ends_E)
        of_weights = grouped_mm(grad_Po.t(), tokens_Pi, offs=ends_E)
        return of_tokens, None, *of_weights.unbind(0)


def pad_expert_groups(counts_E: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return (the row of each token [T], the end of each expert's rows [E] int32) after each
    expert's tokens are padded to a multiple of ALIGNMENT rows, at least one such multiple.
    """
    filled_E = ((counts_E + ALIGNMENT - 1) // ALIGNMENT).clamp(min=1) * ALIGNMENT
    ends_E = filled_E.cumsum(0)
    # by which an expert's tokens move back
    moved_E = (ends_E - filled_E) - (counts_E.cumsum(0) - counts_E)
    moved_T = moved_E.repeat_interleave(counts_E, output_size=num_tokens)
    return torch.arange(num_tokens, device=counts_E.device) + moved_T, ends_E.to(torch.int32)
