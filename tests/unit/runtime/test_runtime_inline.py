"""A WorkerGroup of one rank in this process, and the dispatch that all launchers share."""

from pathlib import Path

import pytest
import torch

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import TokenBatch, TokenLogProbs
from rlhf_megatron.data.replica_plan import NO_OP, ReplicaPlan
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.call_dispatch import (
    join_replica_results,
    make_scattered_call,
    sum_update_results,
)
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.rank_pools import PoolMember
from rlhf_megatron.weights.parallel_layout import ParallelLayout


def batch_of(*samples: list[int]) -> TokenBatch:
    lengths = torch.tensor([0] + [len(s) for s in samples])
    tokens = torch.tensor([t for s in samples for t in s])
    return TokenBatch(offsets=lengths.cumsum(0), token_ids=tokens, response_mask=tokens > 4)


class Doubler:
    """log_probs = token / 2; every update has the loss 3 x the number of tokens."""

    def __init__(self) -> None:
        self.is_closed = False

    def log_probs(self, batch: TokenBatch, plan: ReplicaPlan, scale: float = 0.5) -> TokenLogProbs:
        return TokenLogProbs(batch.token_ids * scale)

    def update(self, batch: TokenBatch, plan: ReplicaPlan) -> UpdateResult:
        return UpdateResult(
            {"loss": 3.0 * batch.num_tokens}, grad_norm=2.0, lr=0.1, is_skipped=False
        )

    def count(self, batch: TokenBatch, plan: ReplicaPlan) -> int:
        return len(batch)

    def fail(self, path: Path) -> None:
        raise ValueError(f"{path} is missing.")

    def close(self) -> None:
        self.is_closed = True


def test_inline_group_runs_both_verbs_and_closes_its_roles() -> None:
    role = Doubler()
    group = InlineWorkerGroup(lambda pool: {"actor": role})
    try:
        batch = batch_of([1, 2, 7], [3, 9], [4, 5, 6, 8])
        result = group.scatter_call("actor.log_probs", batch, token_budget=4, scale=2.0).result()
        assert result.log_probs.tolist() == [2, 4, 14, 6, 18, 8, 10, 12, 16]
        assert group.scatter_call("actor.update", batch, token_budget=9).result().sums == {
            "loss": 27.0
        }
        with pytest.raises(ValueError, match=r"weights\.bin is missing"):
            group.broadcast_call("actor.fail", path=Path("weights.bin")).result()
        with pytest.raises(LookupError, match=r"no role 'critic'.*\['actor'\]"):
            group.broadcast_call("critic.save").result()
        with pytest.raises(LookupError, match="no method '__class__'"):
            group.broadcast_call("actor.__class__").result()
        with pytest.raises(TypeError, match=r"actor\.count returned a int"):
            group.scatter_call("actor.count", batch, token_budget=9).result()
    finally:
        group.close()
        group.close()
    assert role.is_closed


def test_a_failed_build_leaves_no_process_group_behind() -> None:
    def explode(pool: PoolMember) -> dict[str, object]:
        raise ValueError(f"{pool.rank_label} no weights")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"\[actor dp0 pp0 tp0\] no weights"):
            InlineWorkerGroup(explode)


def test_scatter_gives_shards_to_leaders_and_plans_to_all() -> None:
    # dp 2; leaders are the last stage's tp 0: ranks 4 and 6
    layout = ParallelLayout(world_size=8, tp=2, pp=2)
    batch = batch_of([1, 2, 7], [3, 9], [4, 5, 6, 8])
    scattered = make_scattered_call(
        7, "actor.log_probs", batch, layout, token_budget=8, arguments={"temperature": 0.5}
    )
    assert scattered.leader_ranks == (4, 6)
    calls = [scattered.make_rank_call(rank) for rank in range(8)]
    assert [rank for rank, call in enumerate(calls) if call.shard is not None] == [4, 6]
    assert all(call.id == 7 and call.arguments["temperature"] == 0.5 for call in calls)
    for rank, call in enumerate(calls):
        assert call.arguments["plan"] == scattered.replica_plans[layout.locate_rank(rank).dp]
    assert sorted(s for plan in scattered.replica_plans for s in plan.samples if s != NO_OP) == [
        0,
        1,
        2,
    ]
    shards = [codec.decode_message(b"".join(calls[rank].shard)) for rank in scattered.leader_ranks]
    # int64 ids and a mask
    assert scattered.max_shard_bytes == max(shard.num_tokens for shard in shards) * (8 + 1)
    results = [TokenLogProbs(shard.token_ids / 2) for shard in shards]
    whole = join_replica_results("actor.log_probs", results, scattered.replica_plans, batch.offsets)
    assert torch.equal(whole.log_probs, batch.token_ids / 2) and whole.entropies is None


def test_plans_heed_what_the_layout_demands() -> None:
    """tp2 with sequence parallelism, cp2, pp2 in two rounds: documents in fours, packed in eights,
    pairs of batches.

    The forwarded lengths 9, 4, 2 become 12, 4, 4. A rank's budget of 6 is 12 for the two that split
    each document, of which 8 can be used; a rank's budget of 8 is 16.
    """
    layout = ParallelLayout(world_size=8, tp=2, pp=2, cp=2, vpp=2, sequence_parallel=True)
    batch = batch_of(list(range(10)), list(range(5)), list(range(3)))
    with pytest.raises(
        ValueError, match=r"sample 0 has 9 tokens \(16 after padding to a multiple of 8\).* of 12 "
    ):
        make_scattered_call(1, "actor.log_probs", batch, layout, token_budget=6, arguments={})
    scattered = make_scattered_call(
        1, "actor.log_probs", batch, layout, token_budget=8, arguments={}
    )
    assert scattered.leader_ranks == (4,)
    assert scattered.replica_plans == (
        ReplicaPlan(samples=(0, 1, 2), micro_batches=((0,), (1, 2)), packed_length=16),
    )
    short = make_scattered_call(
        1, "actor.log_probs", batch_of([1, 2, 3]), layout, token_budget=8, arguments={}
    )
    assert short.replica_plans == (
        ReplicaPlan(samples=(0, NO_OP), micro_batches=((0,), (1,)), packed_length=8),
    )


def test_updates_add_up_and_global_values_must_agree() -> None:
    nan = float("nan")
    one = UpdateResult({"loss": 1.0, "kl": 0.25}, grad_norm=nan, lr=0.1, is_skipped=True)
    two = UpdateResult({"loss": 2.5, "kl": 0.5}, grad_norm=nan, lr=0.1, is_skipped=True)
    total = sum_update_results("actor.update", [one, two])
    assert total.sums == {"loss": 3.5, "kl": 0.75} and total.is_skipped
    other = UpdateResult({"loss": 2.5, "kl": 0.5}, grad_norm=1.0, lr=0.1, is_skipped=True)
    with pytest.raises(AssertionError, match="grad_norm differs"):
        sum_update_results("actor.update", [one, other])


def test_columns_that_updates_tell_come_back_in_the_order_of_the_batch() -> None:
    offsets = torch.tensor([0, 2, 3, 5])
    plans = [ReplicaPlan((2, 0), ((0, 1),), 4), ReplicaPlan((1,), ((0,),), 4)]
    told = [TokenLogProbs(torch.tensor([30.0, 31, 10, 11])), TokenLogProbs(torch.tensor([20.0]))]
    results = [
        UpdateResult({"loss": 1.0}, 2.0, 0.1, is_skipped=False, old_log_probs=own) for own in told
    ]
    total = join_replica_results("actor.update", results, plans, offsets)
    assert total.sums == {"loss": 2.0} and total.old_log_probs.log_probs.tolist() == [
        10,
        11,
        20,
        30,
        31,
    ]
