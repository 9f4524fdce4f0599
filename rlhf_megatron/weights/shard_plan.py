"""Who sends what in a weight sync, and who takes it. Pure integers: provable on any machine.

Coordinates are those of the Hugging Face tensors: both sides' cuts are spans of them. The ranks of
a pipeline stage fall into copies, each of which holds the stage's tensors once
(`ParallelLayout.copy_size`); a copy serves every engine that is given to it. In a copy each rank
sends what it alone holds, and a share of what several hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.config.schema.rollout_sections import SIZES_OF_SGLANG
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import (
    HFTensor,
    TensorSpan,
    WeightRule,
    find_hf_spans,
    select_stage_rules,
)

_VOCABULARY_MULTIPLE = 64  # rows that SGLang pads a vocabulary to, before it cuts it


@dataclass
class SendShare:
    """The weights that one rank of a copy sends."""

    rules: list[WeightRule] = field(default_factory=list)  # in table order
    # by Megatron name: the parts of `WeightRule.hf_tensors` that it sends
    spans_by_name: dict[str, tuple[TensorSpan, ...]] = field(default_factory=dict)


def plan_send_shares(rules: Sequence[WeightRule], layout: ParallelLayout) -> tuple[SendShare, ...]:
    """Return the share that each place of a copy sends, so that each part of `rules` is sent once.
    A fusion group that several ranks hold goes, whole, to the rank with the least to send so far.
    """
    shares = tuple(SendShare() for _ in range(layout.copy_size))
    loads = [0] * layout.copy_size
    wanted: dict[tuple[int, ...], dict[str, list[tuple[WeightRule, tuple[TensorSpan, ...]]]]] = (
        defaultdict(dict)
    )
    for rule in rules:
        for places, spans in _iterate_held_shards(rule, layout):
            wanted[places].setdefault(rule.fusion_group, []).append((rule, spans))
    senders: dict[str, list[int]] = defaultdict(list)
    for places in sorted(wanted, key=len):  # those that have no choice first
        groups = wanted[places].values()
        for group in sorted(
            groups,
            key=lambda group: -sum(count_span_elements(rule, spans) for rule, spans in group),
        ):
            place = min(places, key=lambda p: (loads[p], p))
            for rule, spans in group:
                senders[rule.megatron_name].append(place)
                shares[place].spans_by_name[rule.megatron_name] = spans
                loads[place] += count_span_elements(rule, spans)
    for rule in rules:
        for place in senders[rule.megatron_name]:
            shares[place].rules.append(rule)
    return shares


def count_span_elements(rule: WeightRule, spans: Sequence[TensorSpan]) -> int:
    """Return the elements of these parts of a rule's Hugging Face tensors, one part for each
    tensor.
    """
    return sum(
        prod(span.shape_within(hf.shape)) for hf, span in zip(rule.hf_tensors, spans, strict=True)
    )


def _iterate_held_shards(
    rule: WeightRule, layout: ParallelLayout
) -> Iterator[tuple[tuple[int, ...], tuple[TensorSpan, ...]]]:
    """Yield, for each shard of a rule, the places in a copy whose ranks hold the shard, and the
    parts of the Hugging Face tensors that the shard is.
    """
    places = range(layout.copy_size)
    if rule.expert is None:
        ways = layout.tp
        number_at = {place: place % layout.tp for place in places}
    else:
        owner = rule.expert // (rule.num_experts // layout.ep)
        ways = layout.etp
        number_at = {p: p % layout.etp for p in places if p // layout.etp % layout.ep == owner}
    if rule.split == "replicated":
        yield tuple(number_at), find_hf_spans(rule, 1, 0)
        return
    for number in range(ways):
        yield (
            tuple(p for p, n in number_at.items() if n == number),
            find_hf_spans(rule, ways, number),
        )


def count_serving_copies(layout: ParallelLayout) -> int:
    """Return the number of copies of a stage that can serve engines: all copies if they are alike,
    else 1.
    """
    is_alike = (
        layout.copy_size % layout.tp == 0 and layout.copy_size % (layout.ep * layout.etp) == 0
    )
    return layout.stage_size // layout.copy_size if is_alike else 1


def find_copy_index(layout: ParallelLayout, rank: int) -> int:
    """Return the number of a rank's copy in its stage."""
    return layout.compute_stage_position(rank) // layout.copy_size


@dataclass(frozen=True)
class EngineLayout:
    """How stock SGLang cuts a model: dense layers over tp ranks; experts over ep of them, and each
    over tp / ep; under DP attention the embedding and attention over tp / dp. Where a part is cut
    over fewer than tp ranks, others hold the same again.
    """

    tp: int = 1
    ep: int = 1
    shared_expert_ways: int = 0  # ranks over which an expert of every token is cut; 0: tp
    dp: int = 1  # groups of ranks whose attention serves requests of their own
    head_ways: int = 0  # ranks over which the head is cut; 0: tp
    dense_mlp_ways: int = 0  # ranks over which the MLP of a layer without experts is cut; 0: tp

    @staticmethod
    def from_rollout_config(rollout: RolloutConfig) -> EngineLayout:
        """Return the layout that `rollout.sglang.args` set; one rank for another engine. Raise
        ValueError for impossible sizes.
        """
        if rollout.engine != "sglang":
            return EngineLayout()
        given = {name.replace("_", "-"): value for name, value in rollout.sglang.args.items()}
        tp, ep, dp = (
            int(str(next((given[name] for name in names if name in given), 1)))
            for names in SIZES_OF_SGLANG
        )
        # with the others of each of the ep parts
        is_fused = given.get("enforce-shared-experts-fusion", False)
        shared = tp // ep if is_fused else 0
        if given.get("moe-a2a-backend", "none") not in ("none", None):
            shared = 1
        dense = int(str(given.get("moe-dense-tp-size") or 0))
        return EngineLayout(
            tp, ep, shared, dp, tp // max(1, dp) if given.get("enable-dp-lm-head") else 0, dense
        )

    def __post_init__(self) -> None:
        """Raise ValueError where tp is not a multiple of ep and of dp."""
        for name, size in (("ep", self.ep), ("dp", self.dp)):
            if size < 1 or self.tp % size:
                raise ValueError(
                    f"an engine's tp size ({self.tp}) must be a multiple of its {name}"
                    f" size ({size})."
                )

    def count_tensor_ways(self, rule: WeightRule, hf_name: str) -> int:
        """Return the number of ranks over which the engine cuts a tensor that does not belong to
        one routed expert. `hf_name`: the tensor's Hugging Face name.
        """
        if ".shared_experts." in hf_name:
            return self.shared_expert_ways or self.tp
        if rule.owner == "head":
            return self.head_ways or self.tp
        if rule.owner == "embedding" or ".self_attn." in hf_name:
            return self.tp // self.dp
        return self.dense_mlp_ways or self.tp


def find_engine_span(
    rule: WeightRule, hf_tensor: HFTensor, engine_layout: EngineLayout, engine_rank: int
) -> TensorSpan | None:
    """Return the part of a rule's tensor that rank `engine_rank` of an engine holds; None: the rank
    holds nothing of the tensor.

    With fewer key-value heads than ranks, several ranks hold the same head, as SGLang does it.
    """
    ways = engine_layout.count_tensor_ways(rule, hf_tensor.name)
    number = engine_rank % ways
    if rule.expert is not None:
        ways = engine_layout.tp // engine_layout.ep
        owner, number = divmod(engine_rank, ways)
        if owner != rule.expert // (rule.num_experts // engine_layout.ep):
            return None
    # ranks that share an expert add up: one of them has it
    if number and hf_tensor.name.endswith(".down_proj_bias"):
        return None
    if rule.split == "replicated" or ways == 1:
        return TensorSpan.cover_whole_tensor(hf_tensor)
    axis = rule.hf_split_dim
    size = hf_tensor.shape[axis]
    if rule.owner != "layer" and axis == 0:
        padded = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        each = -(-padded // ways)
    else:
        # Rows of keys and values, of which each block has as many as heads: they are not
        # cut within one.
        is_query = hf_tensor.name.startswith(rule.hf_tensors[0].name)  # or its scales
        blocks = (
            rule.num_blocks
            if rule.num_blocks and len(rule.hf_tensors) > 1 and not is_query
            else None
        )
        if blocks is not None and blocks < ways:
            number = number * blocks // ways
            ways = blocks
        each = size // ways
    start = min(number * each, size)
    return TensorSpan(axis, start, min(each, size - start))


def intersect_spans(
    first_span: TensorSpan, second_span: TensorSpan, shape: tuple[int, ...]
) -> TensorSpan | None:
    """Return the part that two spans of a tensor of `shape` have in common; None: nothing. Raise
    ValueError where the two cut the tensor along different axes.
    """
    for mine, theirs in ((first_span, second_span), (second_span, first_span)):
        if mine.num_entries == shape[mine.dim]:
            return theirs if theirs.num_entries else None
    if first_span.dim != second_span.dim:
        raise ValueError(
            f"{first_span} and {second_span} cut a tensor of {shape} along two axes; it must be"
            " sent whole."
        )
    start = max(first_span.start, second_span.start)
    stop = min(
        first_span.start + first_span.num_entries, second_span.start + second_span.num_entries
    )
    return TensorSpan(first_span.dim, start, stop - start) if start < stop else None


def spans_cover_tensor(spans: Iterable[TensorSpan], shape: tuple[int, ...]) -> bool:
    """Return whether these parts, all along one axis, cover every entry of a tensor exactly
    once.
    """
    found = sorted(
        (span.start, span.num_entries, span.dim)
        for span in spans
        if span.num_entries or not shape[span.dim]
    )
    reached = 0
    for start, count, axis in found:
        if start != reached or axis != found[0][2]:
            return False
        reached += count
    return bool(found) and reached == shape[found[0][2]]


@dataclass(frozen=True)
class ShardTransfer:
    """One part of one tensor from a rank of a copy to a rank of an engine."""

    sender_rank: int  # place in the copy
    engine_rank: int  # rank of the engine
    hf_tensor: HFTensor
    span: TensorSpan
    num_bytes: int


def iterate_transfers(
    shares: Sequence[SendShare], engine_layout: EngineLayout, engine_dtype: str
) -> Iterator[ShardTransfer]:
    """Yield every part that the ranks of an engine get from the ranks of one copy of a stage."""
    for source, share in enumerate(shares):
        for rule in share.rules:
            for hf, sent in zip(
                rule.hf_tensors, share.spans_by_name[rule.megatron_name], strict=True
            ):
                width = DTYPE_BYTES[rule.get_sent_dtype(hf, engine_dtype)]
                for target in range(engine_layout.tp):
                    taken = find_engine_span(rule, hf, engine_layout, target)
                    common = None if taken is None else intersect_spans(sent, taken, hf.shape)
                    if common is not None:
                        yield ShardTransfer(
                            source, target, hf, common, prod(common.shape_within(hf.shape)) * width
                        )


@dataclass(frozen=True)
class StageLinkBytes:
    """Bytes that one copy of a stage sends to one engine."""

    bytes_by_link: Mapping[tuple[int, int], int]  # (place in the copy, rank of the engine)
    stage_bytes: int  # of the stage's tensors, each once

    @property
    def bytes_by_sender(self) -> dict[int, int]:
        """Return the bytes that each sending rank sends, by its place in the copy."""
        found: dict[int, int] = defaultdict(int)
        for (source, _), num_bytes in self.bytes_by_link.items():
            found[source] += num_bytes
        return dict(found)


def compute_stage_link_bytes(
    table: Sequence[WeightRule],
    layout: ParallelLayout,
    engine_layout: EngineLayout,
    engine_dtype: str,
) -> tuple[StageLinkBytes, ...]:
    """Return, for each pipeline stage, the bytes that one copy sends over each link to one engine.
    Raise ValueError when the layers do not divide.
    """
    stages = []
    for stage in range(layout.pp):
        rules = select_stage_rules(table, stage, layout)
        by_link: dict[tuple[int, int], int] = defaultdict(int)
        for one in iterate_transfers(plan_send_shares(rules, layout), engine_layout, engine_dtype):
            by_link[one.sender_rank, one.engine_rank] += one.num_bytes
        num_bytes = sum(
            prod(hf.shape) * DTYPE_BYTES[rule.get_sent_dtype(hf, engine_dtype)]
            for rule in rules
            for hf in rule.hf_tensors
        )
        stages.append(StageLinkBytes(dict(by_link), num_bytes))
    return tuple(stages)
