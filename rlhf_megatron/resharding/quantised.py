"""FP8 rollouts: what is sent to engines that hold matrices in blocks of 128 x 128, with a scale each.

A rank of the trainer quantises what it holds (`checkpoint.quantised.to_fp8`) before it is cut for the engine's ranks.
Where all cuts lie between blocks (`require_whole_blocks`), these are the bytes of the whole matrix quantised at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from rlhf_megatron.checkpoint.quantised import FP8_BLOCK, SCALE, is_in_fp8, to_fp8
from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.models.table import HFTensor, Rule, Span, hf_spans
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.shards import EngineLayout, taken_by


def quantised_rule(rule: Rule, dtype: str) -> Rule:
    """Returns a rule of the same Megatron tensor, whose `hf` are the matrices, in FP8 where `is_in_fp8` says so, and
    their scales behind them. What is quantised is the weight in `dtype`, the engine's. It has no way back: its
    `to_megatron` still takes plain matrices."""
    is_fp8 = [is_in_fp8(hf.name) for hf in rule.hf]
    if not any(is_fp8):
        return rule

    def to_hf(tensor: Tensor) -> tuple[Tensor, ...]:
        plain = rule.to_hf(tensor.to(getattr(torch, dtype)))
        made = [to_fp8(values) if own else (values, None) for values, own in zip(plain, is_fp8, strict=True)]
        return (*(values for values, _ in made), *(scale for _, scale in made if scale is not None))

    matrices = [replace(hf, dtype="float8_e4m3fn") if own else hf for hf, own in zip(rule.hf, is_fp8, strict=True)]
    scales = [_scale_of(hf) for hf, own in zip(rule.hf, is_fp8, strict=True) if own]
    return replace(rule, hf=(*matrices, *scales), to_hf=to_hf)


def _scale_of(hf: HFTensor) -> HFTensor:
    shape = tuple(-(-size // block) for size, block in zip(hf.shape, FP8_BLOCK, strict=True))
    return HFTensor(hf.name + SCALE, shape, dtype="float32")


def engine_table(table: Sequence[Rule], dtype: str, quantization: str | None) -> tuple[Rule, ...]:
    """Returns the table of what engines are sent under that `rollout.quantization`."""
    return tuple(table) if quantization is None else tuple(quantised_rule(rule, dtype) for rule in table)


def require_whole_blocks(table: Sequence[Rule], layout: Layout, engine: EngineLayout) -> None:
    """Raises ValueError where a matrix in FP8 is cut within a block, by the trainer's ranks or by an engine's."""
    for rule in table:
        for hf, span, ways, whose in chain(_of_trainer(rule, layout), _of_engine(rule, engine)):
            block, size = FP8_BLOCK[span.axis], hf.shape[span.axis]
            if is_in_fp8(hf.name) and span.start % block:
                raise ValueError(
                    f"rollout.quantization (fp8) has a scale for each {block} x {block} of a matrix, but {whose} cuts"
                    f" {size} {('rows', 'columns')[span.axis]} of {hf.name} into {ways} parts of {size // ways}; each"
                    f" must have a multiple of {block}: use fewer parts, or leave rollout.quantization out."
                )


def _of_trainer(rule: Rule, layout: Layout) -> Iterator[tuple[HFTensor, Span, int, str]]:
    ways, name = (layout.tp, "actor.megatron.tensor_model_parallel_size")
    if rule.expert is not None:
        ways, name = layout.etp, "actor.megatron.expert_tensor_parallel_size"
    if ways > 1:
        yield from ((hf, span, ways, name) for hf, span in zip(rule.hf, hf_spans(rule, ways, 1), strict=True))


def _of_engine(rule: Rule, engine: EngineLayout) -> Iterator[tuple[HFTensor, Span, int, str]]:
    for hf in rule.hf:
        ways = engine.ways(rule, hf.name) if rule.expert is None else engine.tp // engine.ep
        for rank in range(engine.tp if ways > 1 else 0):
            if (span := taken_by(rule, hf, engine, rank)) is not None:
                yield hf, span, ways, "the engine's tp_size"
