"""FP8 rollouts: what is sent to engines that hold matrices in blocks of 128 x 128,
with a scale each.

A rank of the trainer quantises what it holds (`weights.quantised_weights.quantise_to_fp8`) before
it is cut for the engine's ranks. Where all cuts lie between blocks (`require_whole_fp8_blocks`),
these are the bytes of the whole matrix quantised at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.quantised_weights import (
    FP8_BLOCK,
    SCALE,
    is_stored_in_fp8,
    quantise_to_fp8,
)
from rlhf_megatron.weights.shard_plan import EngineLayout, find_engine_span
from rlhf_megatron.weights.weight_table import HFTensor, TensorSpan, WeightRule, find_hf_spans


def make_fp8_rule(rule: WeightRule, engine_dtype: str) -> WeightRule:
    """Return a rule of the same Megatron tensor whose `hf_tensors` are the matrices, in FP8 where
    `is_stored_in_fp8` says so, followed by their scales. `to_hf` quantises the weight after a cast
    to `engine_dtype`, the engine's type. There is no way back: `to_megatron` still takes plain
    matrices.
    """
    is_fp8 = [is_stored_in_fp8(hf.name) for hf in rule.hf_tensors]
    if not any(is_fp8):
        return rule

    def convert_to_quantised_hf(tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rule's Hugging Face tensors, quantised where they are FP8, followed by the
        scales.
        """
        plain = rule.to_hf(tensor.to(getattr(torch, engine_dtype)))
        made = [
            quantise_to_fp8(values) if own else (values, None)
            for values, own in zip(plain, is_fp8, strict=True)
        ]
        return (*(values for values, _ in made), *(scale for _, scale in made if scale is not None))

    matrices = [
        replace(hf, dtype="float8_e4m3fn") if own else hf
        for hf, own in zip(rule.hf_tensors, is_fp8, strict=True)
    ]
    scales = [
        _make_scale_tensor(hf) for hf, own in zip(rule.hf_tensors, is_fp8, strict=True) if own
    ]
    return replace(rule, hf_tensors=(*matrices, *scales), to_hf=convert_to_quantised_hf)


def _make_scale_tensor(hf_tensor: HFTensor) -> HFTensor:
    """Return the tensor that holds the scales of an FP8 matrix, one for each block."""
    shape = tuple(-(-size // block) for size, block in zip(hf_tensor.shape, FP8_BLOCK, strict=True))
    return HFTensor(hf_tensor.name + SCALE, shape, dtype="float32")


def make_engine_table(
    table: Sequence[WeightRule], engine_dtype: str, quantization: str | None
) -> tuple[WeightRule, ...]:
    """Return the table of the tensors that engines get under this `rollout.quantization`; None: not
    quantised.
    """
    return (
        tuple(table)
        if quantization is None
        else tuple(make_fp8_rule(rule, engine_dtype) for rule in table)
    )


def require_whole_fp8_blocks(
    table: Sequence[WeightRule], layout: ParallelLayout, engine_layout: EngineLayout
) -> None:
    """Raise ValueError where the trainer's ranks or an engine's ranks cut an FP8 matrix within a
    block.
    """
    for rule in table:
        for hf, span, ways, whose in chain(
            _iterate_trainer_cuts(rule, layout), _iterate_engine_cuts(rule, engine_layout)
        ):
            block = FP8_BLOCK[span.dim]
            size = hf.shape[span.dim]
            if is_stored_in_fp8(hf.name) and span.start % block:
                raise ValueError(
                    f"rollout.quantization (fp8) has a scale for each {block} x {block} of a"
                    f" matrix, but {whose} cuts {size} {('rows', 'columns')[span.dim]} of"
                    f" {hf.name} into {ways} parts of {size // ways}; each must have a multiple of"
                    f" {block}: use fewer parts, or leave rollout.quantization out."
                )


def _iterate_trainer_cuts(
    rule: WeightRule, layout: ParallelLayout
) -> Iterator[tuple[HFTensor, TensorSpan, int, str]]:
    """Yield (tensor, span of the second shard, number of shards, name of the setting) where the
    trainer cuts the tensors of a rule.
    """
    ways = layout.tp
    name = "actor.megatron.tensor_model_parallel_size"
    if rule.expert is not None:
        ways = layout.etp
        name = "actor.megatron.expert_tensor_parallel_size"
    if ways > 1:
        yield from (
            (hf, span, ways, name)
            for hf, span in zip(rule.hf_tensors, find_hf_spans(rule, ways, 1), strict=True)
        )


def _iterate_engine_cuts(
    rule: WeightRule, engine_layout: EngineLayout
) -> Iterator[tuple[HFTensor, TensorSpan, int, str]]:
    """Yield (tensor, span, number of parts, name of the setting) of each part that an engine's
    ranks hold, where the engine cuts the tensor.
    """
    for hf in rule.hf_tensors:
        ways = (
            engine_layout.count_tensor_ways(rule, hf.name)
            if rule.expert is None
            else engine_layout.tp // engine_layout.ep
        )
        for rank in range(engine_layout.tp if ways > 1 else 0):
            if (span := find_engine_span(rule, hf, engine_layout, rank)) is not None:
                yield hf, span, ways, "the engine's tp_size"
