"""Plans: every sample once, budgets kept, equal counts, balanced, the same each time; and their way
there and back.
"""

import pytest
import torch
from data_samples import scored
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.data.batch import (
    CriticValues,
    MiniBatch,
    ScoredBatch,
    TokenBatch,
    compute_offsets,
)
from rlhf_megatron.data.replica_plan import (
    NO_OP,
    ReplicaPlan,
    plan_replicas,
    restore_sample_order,
    take_replica_shard,
)


def tokens(lengths: list[int]) -> TokenBatch:
    count = sum(lengths)
    return TokenBatch(
        compute_offsets(torch.tensor(lengths, dtype=torch.int64)),
        torch.arange(100, 100 + count),
        torch.ones(count, dtype=torch.bool),
    )


@st.composite
def calls(draw: st.DrawFn) -> dict:
    """Arguments of plan_replicas that can be met: all three multiples, packed ones of
    documents among others.
    """
    document_multiple = draw(st.integers(1, 6))
    packed_multiple = document_multiple * draw(st.integers(1, 4))
    budget = draw(st.integers(2, 12)) * packed_multiple
    return {
        "lengths": draw(st.lists(st.integers(1, budget), max_size=40)),
        "num_replicas": draw(st.integers(1, 5)),
        "token_budget": budget + draw(st.integers(0, packed_multiple - 1)),
        "document_multiple": document_multiple,
        "packed_multiple": packed_multiple,
        "micro_batch_multiple": draw(st.integers(1, 4)),
    }


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@settings(max_examples=400, deadline=None)
@given(calls())
def test_properties(call: dict) -> None:
    lengths = call["lengths"]
    multiple = call["document_multiple"]
    plans = plan_replicas(**call)
    assert len(plans) == call["num_replicas"]
    assert plans == plan_replicas(**call)

    planned = [sample for plan in plans for sample in plan.samples]
    assert sorted(s for s in planned if s != NO_OP) == list(range(len(lengths)))
    num_micro_batches = len(plans[0].micro_batches)
    assert num_micro_batches % call["micro_batch_multiple"] == 0
    assert planned.count(NO_OP) == max(0, len(plans) * num_micro_batches - len(lengths))

    packed = []
    for plan in plans:
        assert len(plan.micro_batches) == num_micro_batches
        assert [i for micro_batch in plan.micro_batches for i in micro_batch] == list(
            range(len(plan.samples))
        )
        for micro_batch in plan.micro_batches:
            assert micro_batch
            held = [plan.samples[i] for i in micro_batch]
            assert held == [NO_OP] or NO_OP not in held
            documents = [2 if sample == NO_OP else lengths[sample] for sample in held]
            packed.append(sum(round_up(length, multiple) for length in documents))
    packed_length = round_up(max(packed), call["packed_multiple"])
    assert packed_length <= call["token_budget"]
    assert {plan.packed_length for plan in plans} == {packed_length}


@settings(max_examples=200, deadline=None)
@given(calls())
def test_micro_batches_are_as_few_as_first_fit_finds(call: dict) -> None:
    room = call["token_budget"] // call["packed_multiple"] * call["packed_multiple"]
    bins: list[int] = []
    for length in sorted(
        (round_up(length, call["document_multiple"]) for length in call["lengths"]), reverse=True
    ):
        fitting = next((i for i, used in enumerate(bins) if used + length <= room), None)
        if fitting is None:
            bins.append(length)
        else:
            bins[fitting] += length
    needed = max(1, -(-len(bins) // call["num_replicas"]))
    assert len(plan_replicas(**call)[0].micro_batches) <= round_up(
        needed, call["micro_batch_multiple"]
    )


@settings(max_examples=100, deadline=None)
@given(calls())
def test_take_and_restore_are_inverse(call: dict) -> None:
    batch = tokens(call["lengths"])
    plans = plan_replicas(**call)
    back = restore_sample_order(
        [CriticValues(take_replica_shard(batch, plan).token_ids) for plan in plans],
        plans,
        batch.offsets,
    )
    assert back.values.tolist() == batch.token_ids.tolist()


def test_by_hand() -> None:
    first, second = plan_replicas([5, 3, 4], num_replicas=2, token_budget=6)
    assert first == ReplicaPlan(samples=(0, NO_OP), micro_batches=((0,), (1,)), packed_length=5)
    assert second == ReplicaPlan(samples=(2, 1), micro_batches=((0,), (1,)), packed_length=5)


def test_one_micro_batch_keeps_the_order() -> None:
    (plan,) = plan_replicas([5, 3, 4], num_replicas=1, token_budget=12)
    assert plan == ReplicaPlan(samples=(0, 1, 2), micro_batches=((0, 1, 2),), packed_length=12)


def test_document_multiple_counts_against_the_budget() -> None:
    """3 and 5 tokens become 4 and 8: together 12,
    over a budget of 11 that 8 raw tokens would fit.
    """
    (plan,) = plan_replicas([3, 5], num_replicas=1, token_budget=11, document_multiple=4)
    assert plan == ReplicaPlan(samples=(1, 0), micro_batches=((0,), (1,)), packed_length=8)


def test_packed_multiple_rounds_the_budget_down_and_the_length_up() -> None:
    """Documents of 4 + 4 + 2 = 10 tokens fit in 14, but packed to a multiple of 8 that is 16: 6
    and 4, both as 8.
    """
    (plan,) = plan_replicas(
        [3, 4, 1], num_replicas=1, token_budget=14, document_multiple=2, packed_multiple=8
    )
    assert plan == ReplicaPlan(samples=(0, 2, 1), micro_batches=((0, 1), (2,)), packed_length=8)


def test_micro_batch_multiple_adds_micro_batches() -> None:
    """One micro-batch would do; rounds of three spread two samples over two and leave a no-op
    sample for the third.
    """
    (plan,) = plan_replicas([3, 4], num_replicas=1, token_budget=14, micro_batch_multiple=3)
    assert plan == ReplicaPlan(
        samples=(1, 0, NO_OP), micro_batches=((0,), (1,), (2,)), packed_length=4
    )


def test_a_tight_packing_is_found() -> None:
    """Cheapest-bin-first puts 6 and 5 apart and then 4, 3 on 5 and 6, leaving no room for 2; 6+4
    and 5+3+2 fit.
    """
    (plan,) = plan_replicas([6, 5, 4, 3, 2], num_replicas=1, token_budget=10)
    assert len(plan.micro_batches) == 2
    assert {plan.samples[i] for i in plan.micro_batches[0]} == {0, 2}


def test_load_is_balanced_by_cost_not_by_tokens() -> None:
    """Where attention dominates, one document of 8 costs (64) as much as four of 4 (16 each)."""
    first, second = plan_replicas(
        [8, 4, 4, 4, 4], num_replicas=2, token_budget=100, attention_length=0
    )
    assert (first.samples, second.samples) == ((0,), (1, 2, 3, 4))
    first, second = plan_replicas(
        [8, 4, 4, 4, 4], num_replicas=2, token_budget=100, attention_length=10**9
    )
    assert {len(first.samples), len(second.samples)} == {2, 3}


def test_no_samples_at_all() -> None:
    plans = plan_replicas([], num_replicas=2, token_budget=8, document_multiple=4)
    assert plans == (ReplicaPlan((NO_OP,), ((0,),), 4),) * 2


def test_over_the_budget() -> None:
    fix = (
        r"over the budget of 10 tokens a micro-batch; raise actor.ppo_max_token_len_per_gpu x"
        r" context_parallel_size to 12 or more"
    )
    with pytest.raises(
        ValueError, match=r"sample 1 has 9 tokens \(12 after padding to a multiple of 4\), " + fix
    ):
        plan_replicas([3, 9], num_replicas=1, token_budget=10, document_multiple=4)
    with pytest.raises(
        ValueError,
        match=r"sample 0 has 9 tokens \(16 after padding to a multiple of 8\).*to 16 or more",
    ):
        plan_replicas([9, 3], num_replicas=1, token_budget=15, packed_multiple=8)
    with pytest.raises(ValueError, match=r"the budget of 7 tokens .* must be at least 8"):
        plan_replicas([], num_replicas=1, token_budget=7, packed_multiple=8)
    with pytest.raises(
        ValueError, match=r"sample 0 has 7 tokens, over the budget of 6 tokens.* to 9 or more"
    ):
        plan_replicas([7, 9], num_replicas=1, token_budget=6)


def test_no_op_samples_have_every_column_and_weigh_nothing() -> None:
    plan = ReplicaPlan(samples=(1, NO_OP, NO_OP), micro_batches=((0,), (1,), (2,)), packed_length=2)
    shard = take_replica_shard(scored(), plan)
    assert type(shard) is ScoredBatch
    assert shard.offsets.tolist() == [0, 1, 3, 5]
    assert shard.token_ids.tolist() == [13, 0, 0, 0, 0]
    assert shard.response_mask.tolist() == [False] * 5
    assert shard.rewards.tolist() == [0.0, 0.0, 0.0]
    assert shard.labels == ("l1", "", "")
    assert shard.reward_parts["exact"].tolist() == [0.0, 0.0, 0.0]

    ones = torch.ones(3)
    mini = MiniBatch(
        torch.tensor([0, 3]), torch.arange(3), ones.bool(), ones, ones, advantages=ones
    )
    shard = take_replica_shard(mini, ReplicaPlan((NO_OP,), ((0,),), 2))
    assert shard.loss_weights.tolist() == [0.0, 0.0] and shard.metric_weights.tolist() == [0.0, 0.0]
    assert shard.advantages is not None and shard.advantages.tolist() == [0.0, 0.0]
    assert shard.old_log_probs is None


def test_restore_drops_no_op_samples() -> None:
    plans = plan_replicas([2, 3], num_replicas=3, token_budget=6)
    parts = [take_replica_shard(tokens([2, 3]), plan) for plan in plans]
    assert [part.token_ids.tolist() for part in parts] == [[102, 103, 104], [100, 101], [0, 0]]
    values = [CriticValues(part.token_ids) for part in parts]
    assert restore_sample_order(values, plans, tokens([2, 3]).offsets).values.tolist() == [
        100,
        101,
        102,
        103,
        104,
    ]
