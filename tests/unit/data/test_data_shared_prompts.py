"""Samples of one prompt: found by their tokens, dealt together, packed behind one copy of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.data.batch import MiniBatch, TokenBatch, compute_offsets, select_samples
from rlhf_megatron.data.replica_plan import NO_OP, ReplicaPlan, plan_replicas, take_replica_shard
from rlhf_megatron.data.shared_prompts import SamplePrompts, find_sample_prompts
from rlhf_megatron.ranks.models.flash_attention import SequenceBorders
from rlhf_megatron.ranks.models.packed_attention import (
    _attend_by_length,
    _attend_with_flash,
    make_packed_documents,
)
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, pack_batch
from rlhf_megatron.runtime.call_dispatch import plan_scattered_call
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout

SHARING = ParallelLayout(1, shares_prompts=True)


def batch_of(samples: list[tuple[list[int], list[int]]]) -> TokenBatch:
    """Each a prompt and a response that trains."""
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in samples])
    return TokenBatch(
        offsets=compute_offsets(lengths),
        token_ids=torch.tensor(
            [token for sample in samples for token in chain(*sample)], dtype=torch.int32
        ),
        response_mask=torch.tensor(
            [part == 1 for sample in samples for part in (0, 1) for _ in sample[part]]
        ),
    )


PAIR = batch_of([([5, 6, 7], [1, 2, 3]), ([8, 9], [1, 2]), ([5, 6, 7], [4])])


def test_equal_tokens_before_the_response_make_one_prompt() -> None:
    assert find_sample_prompts(PAIR) == SamplePrompts(
        prompt_numbers=(0, 1, 0), prompt_lengths=(3, 2, 3)
    )
    nothing = batch_of([([5], [1, 2]), ([5, 6, 7], []), ([5, 6], [1])])
    assert find_sample_prompts(nothing).prompt_lengths == (1, 0, 2), (
        "without a response all is the sample's own"
    )


def test_the_setting_reaches_the_layout_by_which_controller_and_ranks_go() -> None:
    assert make_parallel_layout(MegatronConfig(share_prompts=True), 2) == ParallelLayout(
        2, shares_prompts=True
    )
    apart, shared = (
        plan_scattered_call(PAIR, make_parallel_layout(MegatronConfig(share_prompts=x), 1), 9)
        for x in (False, True)
    )
    assert (len(apart[0].micro_batches), len(shared[0].micro_batches)) == (2, 1), (
        "11 tokens apart, 8 shared"
    )


def test_packed_by_hand() -> None:
    """5 6 7 once; behind it 1 2 and nothing, as the last token of a sample predicts nothing. 8 9 is
    nobody else's.
    """
    plan = ReplicaPlan(samples=(0, 1, 2), micro_batches=((0, 1, 2),), packed_length=8)
    (micro,) = (packed := pack_batch(PAIR, plan, SHARING)).micro_batches
    assert micro.token_ids.tolist() == [[5, 6, 7, 8, 9, 1, 1, 2]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert micro.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert micro.prompts is not None and micro.prompts.tolist() == [-1, -1, 0]
    assert (micro.max_seqlen, micro.num_keys, micro.num_sequences) == (5, 3 + 3 + 5, 3)
    assert micro.rows.tolist() == [4, 5, 2, 2, 6, 7] and micro.targets.tolist() == [
        1,
        2,
        4,
        1,
        2,
        3,
    ]
    assert micro.sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]
    found = packed.unpack_rows([torch.arange(1.0, 7.0)])
    assert found.tolist() == [0, 0, 0, 4, 5, 6, 0, 0, 1, 2, 0, 0, 0, 3]
    stages = pack_batch(
        PAIR,
        ReplicaPlan((0, 1, 2), ((0, 1), (2,)), 10),
        ParallelLayout(2, pp=2, shares_prompts=True),
    )
    first, second = stages.micro_batches
    assert first.token_ids.tolist() == [[0, 0, 8, 9, 1, 5, 6, 7, 1, 2]], (
        "no other sample of its prompt is there"
    )
    assert first.prompts is not None and first.prompts.tolist() == [-1] * 4
    assert second.num_keys == 10 and second.cu_seqlens.numel() == 9


def test_a_filler_does_not_shift_prompts() -> None:
    plan = ReplicaPlan((0, 1), ((0, 1),), 12)
    batch = batch_of([([5, 6, 7], [1, 2]), ([5, 6, 7], [4])])
    (micro,) = pack_batch(batch, plan, ParallelLayout(2, pp=2, shares_prompts=True)).micro_batches
    assert micro.token_ids.tolist() == [[0] * 8 + [5, 6, 7, 1]]
    assert micro.prompts is not None and micro.prompts.tolist() == [-1] * 9 + [8]
    assert micro.num_keys == 8 + 3 + 4
    assert (micro.rows.tolist(), micro.targets.tolist()) == ([10, 10, 11], [4, 1, 2])


@st.composite
def groups(draw: st.DrawFn) -> TokenBatch:
    """Samples of up to four prompts in any order."""
    prompts = draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=4)
    )
    responses = st.lists(st.integers(0, 3), min_size=0, max_size=6)
    samples = draw(
        st.lists(st.tuples(st.sampled_from(prompts), responses), min_size=1, max_size=24)
    )
    return batch_of([(prompt, response) for prompt, response in samples])


@given(groups(), st.integers(1, 3), st.integers(14, 60), st.booleans())
def test_each_sample_is_computed_once_behind_its_prompt(
    batch: TokenBatch, dp: int, budget: int, fills: bool
) -> None:
    """Packed and read back, a response token is predicted behind all that stands before it in its
    sample, and a prompt is forwarded once; no micro-batch is over the budget.
    """
    layout = ParallelLayout(dp * (2 if fills else 1), pp=2 if fills else 1, shares_prompts=True)
    plans = plan_scattered_call(batch, layout, budget)
    seen = []
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    for plan in plans:
        shard = take_replica_shard(batch, plan)
        found = []
        num_forwarded = 0
        packed = pack_batch(shard, plan, layout)
        for micro, group in zip(packed.micro_batches, plan.micro_batches, strict=True):
            assert micro.token_ids.numel() <= budget
            found += [(id(micro), *row) for row in rows_of(micro)]
            num_forwarded += sum(
                num_own_tokens(shard, [i for i in group if plan.samples[i] != NO_OP])
            )
        assert packed.forwarded_counts[0] == num_forwarded
        samples = set()
        for token, (micro_id, number, tokens) in zip(
            packed.token_index.tolist(), found, strict=True
        ):
            start = int(shard.offsets[shard.offsets <= token].max())
            assert tokens == shard.token_ids[start : token + 1].tolist()
            samples.add((micro_id, number, start))
        assert (
            len({start for *_, start in samples})
            == len({sample[:2] for sample in samples})
            == len(samples)
        )
        assert (
            sorted(packed.token_index.tolist()) == shard.response_mask.nonzero().flatten().tolist()
        )
        seen += [sample for sample in plan.samples if sample != NO_OP]
    assert sorted(seen) == list(range(len(batch)))


def rows_of(micro: MicroBatch) -> Iterator[tuple[int, list[int]]]:
    """Yield of each row which sample it is of, and the tokens that its place sees, read through the
    borders and the prompts, with the one that it predicts.
    """
    spans = [slice(*pair) for pair in pairwise(micro.cu_seqlens.tolist())]
    assert micro.prompts is not None
    behind = micro.prompts.tolist()
    rows = (micro.rows.tolist(), micro.targets.tolist(), micro.sequence_ids.tolist())
    for place, target, number in zip(*rows, strict=True):
        (document,) = (d for d, span in enumerate(spans) if span.start <= place < span.stop)
        seen = [] if behind[document] < 0 else micro.token_ids[0, spans[behind[document]]].tolist()
        seen += micro.token_ids[0, spans[document].start : place + 1].tolist()
        assert micro.position_ids[0, place] == len(seen) - 1 and 0 <= number < micro.num_sequences
        yield number, [*seen, target]


def num_own_tokens(shard: TokenBatch, group: list[int]) -> Iterator[int]:
    """Yield the tokens of each sample that a micro-batch of these forwards: the prompt with its
    first one only.
    """
    found = find_sample_prompts(shard)
    known = set[int]()
    for sample in group:
        number = found.prompt_numbers[sample]
        shared = found.prompt_lengths[sample]
        yield max(1, int(shard.lengths[sample]) - 1) - (shared if number in known else 0)
        known.add(number)


def test_groups_stay_together_and_are_parted_where_replicas_would_wait() -> None:
    lengths = [100 + 4] * 32
    numbers = tuple(n // 16 for n in range(32))
    prompts = SamplePrompts(numbers, (100,) * 32)

    def loads(num_replicas: int, budget: int = 1000) -> list[list[tuple[int, ...]]]:
        plans = plan_replicas(lengths, num_replicas, budget, sample_prompts=prompts)
        return [
            [tuple(numbers[plan.samples[i]] for i in group) for group in plan.micro_batches]
            for plan in plans
        ]

    assert sorted(loads(2)) == [[(0,) * 16], [(1,) * 16]], "a prompt a replica"
    assert sorted(loads(4)) == [[(0,) * 8], [(0,) * 8], [(1,) * 8], [(1,) * 8]], (
        "two replicas would have nothing"
    )
    assert all(
        len(set(group)) == 1 and len(group) <= 10 for share in loads(1, 140) for group in share
    )
    with pytest.raises(ValueError, match="sample 0 has 104 tokens, over the budget of 90"):
        loads(1, 90)


def test_many_samples_of_which_nothing_but_the_prompt_is_forwarded_are_parted() -> None:
    """They cost no token, but each a row of the head, whose memory the budget bounds, too."""
    batch = batch_of([([5, 6, 7], [n]) for n in range(64)])
    (plan,) = plan_scattered_call(batch, SHARING, 10)
    assert [len(group) for group in plan.micro_batches] == [8] * 8, "3 tokens and 7 further samples"
    assert all(
        micro.token_ids.numel() == 3 and len(micro.rows) == 8
        for micro in pack_batch(batch, plan, SHARING).micro_batches
    )
    (alone,) = plan_scattered_call(select_samples(batch, [0]), SHARING, 3)
    assert alone.packed_length == 3


def plain_varlen(query, key, value, borders: SequenceBorders, scale: float):
    """What a kernel of flash attention computes, sequence by sequence."""
    outputs = []
    ends = zip(
        pairwise(borders.query_borders.tolist()),
        pairwise(borders.key_borders.tolist()),
        strict=True,
    )
    for (first, last), (start, stop) in ends:
        q, k, v = (
            x.transpose(0, 1) for x in (query[first:last], key[start:stop], value[start:stop])
        )
        assert last - first <= borders.longest_query and stop - start <= borders.longest_key
        mask = torch.ones(last - first, stop - start, dtype=torch.bool).tril(
            stop - start - (last - first)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(
            attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", ["plain", "window", "sinks", "kernel"])
def test_attention_behind_a_prompt_is_that_of_whole_documents(kind: str) -> None:
    """Prompts of 3 and 2 tokens with 3 and 1 documents behind them, one document without;
    gradients too.
    """
    torch.manual_seed(0)
    lengths = [3, 2, 4, 2, 5, 2, 1]
    behind = [-1, -1, -1, 0, 0, 1, 0]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    own = [list(range(start, stop)) for start, stop in pairwise(starts)]
    whole = [(own[prompt] if prompt >= 0 else []) + own[d] for d, prompt in enumerate(behind)][2:]
    order = torch.tensor([token for document in whole for token in document])
    tensors = [
        torch.randn(starts[-1], heads, 6, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    sinks = torch.randn(4, dtype=torch.float64) if kind == "sinks" else None
    window = 3 if kind == "window" else None
    scale = 1 / math.sqrt(6)

    def packed(lengths: list[int], prompts: torch.Tensor | None = None, num_keys: int = 0):
        borders = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return make_packed_documents(borders, 8, torch.zeros(sum(lengths)), None, prompts, num_keys)

    shared = packed(lengths, torch.tensor(behind), sum(lengths) + 3 + 3 + 3 + 2)
    if kind == "kernel":
        found = _attend_with_flash(*tensors, shared, scale, plain_varlen)
    else:
        found = _attend_by_length(*tensors, shared, scale, window, sinks)
    apart = _attend_by_length(
        *(x[order] for x in tensors), packed([len(d) for d in whole]), scale, window, sinks
    )
    for document, out in zip(own[2:], apart.split([len(d) for d in whole]), strict=True):
        torch.testing.assert_close(found[document], out[-len(document) :], atol=1e-12, rtol=0)
    weight = torch.randn_like(found)
    weight[: starts[2]] = 0  # what stands in whole documents several times
    is_own = torch.cat(
        [torch.arange(len(d)) >= len(d) - n for d, n in zip(whole, lengths[2:], strict=True)]
    )
    grads = torch.autograd.grad((found * weight).sum(), tensors)
    wanted = torch.autograd.grad((apart * weight[order])[is_own].sum(), tensors)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_samples_that_share_nothing_are_planned_as_ever() -> None:
    batch = MiniBatch(
        PAIR.offsets, PAIR.token_ids, PAIR.response_mask, *[torch.zeros(PAIR.num_tokens)] * 3
    )
    apart = [SamplePrompts((0, 1, 2), (0, 0, 0)), None]
    assert (
        len(
            {
                plan_replicas(batch.lengths.tolist(), 2, 8, sample_prompts=prompts)
                for prompts in apart
            }
        )
        == 1
    )
