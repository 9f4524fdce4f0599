"""Mistakes that trainers have had, planted in worker processes: real functions are replaced for the
length of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.sharded import RankResult, run_on_rank
from rlhf_megatron.ranks.parallel.world import World


def run_with(world: World, mistake: str | None, **arguments: Any) -> list[RankResult]:
    """A job of the worker pool: `run_on_rank` with one of MISTAKES, which is gone from the
    process afterwards.
    """
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            (MISTAKES | {planted.__name__: planted for planted in WITH_EXPERTS})[mistake](patch)
        return run_on_rank(world, **arguments)


def qkv_one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    """All queries, all keys, all values; Megatron wants them group by group."""
    from rlhf_megatron.weights.families import decoder_family

    patch.setattr(
        decoder_family, "_interleave_qkv", lambda num_groups, q, k, v: torch.cat([q, k, v])
    )


def norms_not_marked(patch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism nobody adds up what the tp ranks have of a norm's gradient."""
    from rlhf_megatron.ranks.models.rms_norm_layer import RMSNorm

    _mark(patch, RMSNorm, "weight", is_summed_over_tp=False)


def _mark(patch: pytest.MonkeyPatch, kind: Any, parameter: str, is_summed_over_tp: bool) -> None:
    """The gradient of that parameter of each new module of `kind` is summed over tp, or not."""
    init = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        getattr(self, parameter).sequence_parallel = is_summed_over_tp

    patch.setattr(kind, "__init__", __init__)


def each_replica_its_own_count(patch: pytest.MonkeyPatch) -> None:
    """Every replica divides by the tokens that it has itself,
    and the mean is taken over replicas.
    """
    from rlhf_megatron.ranks.workers.actor import ActorModel

    update = ActorModel.update

    def with_local_count(self: Any, batch: Any, *args: Any) -> Any:
        total = batch.loss_weights.sum() * self.world.layout.dp
        return update(
            self, replace(batch, loss_weights=batch.loss_weights / total.clamp(min=1e-12)), *args
        )

    patch.setattr(ActorModel, "update", with_local_count)


def labels_shifted_after_the_cut(patch: pytest.MonkeyPatch) -> None:
    """At the end of a chunk the label is the next token that this cp rank has, not the next one
    of the document.
    """
    from rlhf_megatron.ranks.workers import actor, forward_passes, sequence_packing

    def shifted(*args: Any, **kwargs: Any) -> sequence_packing.PackedBatch:
        packed = sequence_packing.pack_batch(*args, **kwargs)
        return replace(
            packed,
            micro_batches=tuple(_with_next_of_share(micro) for micro in packed.micro_batches),
        )

    patch.setattr(actor, "pack_batch", shifted)
    patch.setattr(forward_passes, "pack_batch", shifted)


def _with_next_of_share(micro: Any) -> Any:
    positions = micro.position_ids[0]
    tokens = micro.token_ids[0]
    following = positions.roll(-1)
    is_border = (following != positions + 1) & (following != 0)
    targets: Tensor = torch.where(is_border[micro.rows], tokens.roll(-1)[micro.rows], micro.targets)
    return replace(micro, targets=targets)


def weight_decay_on_norms(patch: pytest.MonkeyPatch) -> None:
    """The groups' wd_mult of 0 for vectors is not there."""
    from rlhf_megatron.ranks.workers import megatron_optimizer

    patch.setattr(megatron_optimizer, "get_standard_config_overrides", lambda config: {})


def one_step_count_for_all(patch: pytest.MonkeyPatch) -> None:
    """After a checkpoint is loaded all parameters share one count of steps, which AdamW raises
    once a parameter.
    """
    from rlhf_megatron.ranks.workers.megatron_optimizer import MegatronStepOptimizer

    load = MegatronStepOptimizer.load_state_dict

    def sharing(self: Any, *args: Any) -> None:
        load(self, *args)
        for part in self.megatron_optimizer.chained_optimizers:
            states = [state for state in part.optimizer.state.values() if "step" in state]
            for state in states:
                state["step"] = states[0]["step"]

    patch.setattr(MegatronStepOptimizer, "load_state_dict", sharing)


def head_bias_counted_by_every_tp_rank(patch: pytest.MonkeyPatch) -> None:
    """Marked as if each tp rank had seen other tokens: what is whole on every rank is
    summed over them.
    """
    from rlhf_megatron.ranks.models.output_heads import ValueHead

    _mark(patch, ValueHead, "bias", is_summed_over_tp=True)


def values_of_the_next_row(patch: pytest.MonkeyPatch) -> None:
    """The value of the tokens up to and with t in place of those before t."""
    from rlhf_megatron.ranks.workers import critic, forward_passes, sequence_packing

    def shifted(*args: Any, **kwargs: Any) -> sequence_packing.PackedBatch:
        packed = sequence_packing.pack_batch(*args, **kwargs)
        return replace(
            packed, micro_batches=tuple(_with_next_rows(micro) for micro in packed.micro_batches)
        )

    patch.setattr(critic, "pack_batch", shifted)
    patch.setattr(forward_passes, "pack_batch", shifted)


def _with_next_rows(micro: Any) -> Any:
    return replace(micro, rows=(micro.rows + 1).clamp(max=micro.token_ids.numel() - 1))


def value_weights_divided_again(patch: pytest.MonkeyPatch) -> None:
    """The weights are over the global count already,
    and the sum over replicas is taken for a mean.
    """
    from rlhf_megatron.ranks.workers.critic import CriticModel

    update = CriticModel.update

    def with_mean(self: Any, batch: Any, plan: Any) -> Any:
        return update(
            self, replace(batch, loss_weights=batch.loss_weights / self.world.layout.dp), plan
        )

    patch.setattr(CriticModel, "update", with_mean)


def head_gathers_with_summed_gradient(patch: pytest.MonkeyPatch) -> None:
    """The head's gather sums gradients over tp, as a split output layer's must: here each rank
    has all of it.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from rlhf_megatron.ranks.models import output_heads

    def gather(hidden: Tensor, tp_group: Any) -> Tensor:
        return gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=tp_group
        )

    patch.setattr(output_heads, "gather_sequence_parts", gather)


def values_not_held(patch: pytest.MonkeyPatch) -> None:
    """No value clip."""
    from rlhf_megatron.ranks.kernels.weighted_row_loss import compute_value_loss_sums
    from rlhf_megatron.ranks.workers import critic

    patch.setattr(
        critic,
        "compute_value_loss_sums",
        lambda values, columns, cliprange: compute_value_loss_sums(values, columns, 0.0),
    )


def experts_reduced_as_dense_layers(patch: pytest.MonkeyPatch) -> None:
    """As megatron-core 0.16 does at ep 1: over dense replicas, though etp is not tp and other ranks
    hold the same.
    """
    _mark_experts(patch, "allreduce", True)


def experts_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """As megatron-core does with their biases: the tp ranks have other experts, whose
    gradients are added up.
    """
    _mark_experts(patch, "sequence_parallel", True)


def experts_counted_on_the_first_tp_rank(patch: pytest.MonkeyPatch) -> None:
    """As with Transformer Engine's layers at etp 1: the norm of all gradients lacks the experts of
    other tp ranks.
    """
    _mark_experts(patch, "tensor_model_parallel", False)


def _mark_experts(patch: pytest.MonkeyPatch, name: str, value: bool) -> None:
    from rlhf_megatron.ranks.models import megatron_model_builder
    from rlhf_megatron.ranks.parallel.mcore_fixes import is_expert_parameter

    mark = megatron_model_builder.mark_expert_parameters

    def wrong(model: Any) -> None:
        mark(model)
        for parameter_name, parameter in model.named_parameters():
            if is_expert_parameter(parameter_name):
                setattr(parameter, name, value)

    patch.setattr(megatron_model_builder, "mark_expert_parameters", wrong)


def gate_and_up_swapped(patch: pytest.MonkeyPatch) -> None:
    """An expert's first matrix has the rows of up before those of gate."""
    from rlhf_megatron.weights.families import expert_layers

    patch.setattr(expert_layers, "concatenate_tensors", lambda gate, up: torch.cat([up, gate]))
    patch.setattr(
        expert_layers, "split_into_halves", lambda matrix: tuple(reversed(matrix.chunk(2)))
    )


def expert_bias_dropped(patch: pytest.MonkeyPatch) -> None:
    """Routers pick by their scores alone."""
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def without(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kept = self.expert_bias
        self.expert_bias = torch.zeros_like(self.expert_bias)
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.expert_bias = kept

    patch.setattr(TopKRouter, "forward", without)


def experts_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """On a context-parallel rank each token meets the experts of the token before it."""
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def rolled(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, routing_map = forward(self, *args, **kwargs)
        return probs.roll(1, 0), routing_map.roll(1, 0)

    patch.setattr(TopKRouter, "forward", rolled)


def experts_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Each expert loads the weights of the next one."""
    from rlhf_megatron.weights.families import decoder_family

    made = decoder_family.make_expert_rules

    def shifted(*args: Any) -> list[Any]:
        router, *rules = made(*args)
        tensors = [rule.hf_tensors for rule in rules]
        return [
            router,
            *map(lambda rule, hf: replace(rule, hf_tensors=hf), rules, tensors[2:] + tensors[:2]),
        ]

    patch.setattr(decoder_family, "make_expert_rules", shifted)


def position_keys_not_summed(patch: pytest.MonkeyPatch) -> None:
    """As where megatron-core splits latent attention's down projections: no rank adds up over tp
    what the heads of the others have of the gradient of the keys' position part.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer import multi_latent_attention

    def gather(keys: Tensor, group: Any) -> Tensor:
        return gather_from_sequence_parallel_region(
            keys, tensor_parallel_output_grad=False, group=group
        )

    patch.setattr(multi_latent_attention, "gather_from_sequence_parallel_region", gather)


def expert_biases_added_in_place(patch: pytest.MonkeyPatch) -> None:
    """As megatron-core does it, to what a sum over one rank has handed through."""
    from megatron.core.tensor_parallel import RowParallelLinear

    from rlhf_megatron.ranks.models.layer_specs import ExpertRowLinear

    patch.setattr(ExpertRowLinear, "forward", RowParallelLinear.forward)


def sinks_counted_on_the_first_tp_rank(patch: pytest.MonkeyPatch) -> None:
    """The norm of all gradients lacks the sinks of the other ranks' heads."""
    _of_attention(
        patch, lambda attention: setattr(attention.softmax_offset, "tensor_model_parallel", False)
    )


def window_one_longer(patch: pytest.MonkeyPatch) -> None:
    """The size of a window in place of the tokens before a token in it."""
    _of_attention(
        patch,
        lambda attention: setattr(attention, "window", attention.window and attention.window + 1),
    )


def window_in_the_other_layers(patch: pytest.MonkeyPatch) -> None:
    """Layers counted from 0 where megatron-core counts from 1."""
    from rlhf_megatron.ranks.models import packed_attention

    found = packed_attention.is_layer_window_attention
    patch.setattr(
        packed_attention,
        "is_layer_window_attention",
        lambda size, layers, number: found(size, layers, number - 1),
    )


def _of_attention(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    from rlhf_megatron.ranks.models.packed_attention import PackedAttention

    init = PackedAttention.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self)

    patch.setattr(PackedAttention, "__init__", __init__)


def gate_and_up_taken_as_halves(patch: pytest.MonkeyPatch) -> None:
    """The columns of gate and up stand by turns in GPT-OSS's files,
    not one half behind the other.
    """
    from rlhf_megatron.weights.families import gpt_oss

    patch.setattr(
        gpt_oss,
        "_separate_gate_and_up",
        lambda gate_up: gate_up if gate_up.dim() == 1 else gate_up.T,
    )
    patch.setattr(
        gpt_oss,
        "_interleave_gate_and_up",
        lambda gate_up: (gate_up if gate_up.dim() == 1 else gate_up.T,),
    )


WITH_EXPERTS = (
    sinks_counted_on_the_first_tp_rank,
    window_one_longer,
    window_in_the_other_layers,
    gate_and_up_taken_as_halves,
    expert_biases_added_in_place,
    experts_reduced_as_dense_layers,
    experts_summed_over_tp,
    experts_counted_on_the_first_tp_rank,
    gate_and_up_swapped,
    expert_bias_dropped,
    experts_of_the_neighbour,
    experts_off_by_one,
    position_keys_not_summed,
)
MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    mistake.__name__: mistake
    for mistake in (
        qkv_one_after_the_other,
        norms_not_marked,
        each_replica_its_own_count,
        labels_shifted_after_the_cut,
        weight_decay_on_norms,
        one_step_count_for_all,
        head_bias_counted_by_every_tp_rank,
        values_of_the_next_row,
        value_weights_divided_again,
        head_gathers_with_summed_gradient,
        values_not_held,
    )
}
