"""Packing of a shard into micro-batches: hand-made documents, filler, target columns,
and the way back.
"""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.data.batch import MiniBatch, TokenBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.sequence_packing import list_token_columns, pack_batch
from rlhf_megatron.weights.parallel_layout import ParallelLayout

# under pipeline parallelism micro-batches are filled to one length
ONE = ParallelLayout(1)
STAGES = ParallelLayout(2, pp=2)


def shard() -> MiniBatch:
    """Three samples of 4, 3 and 2 tokens; the last has no response token."""
    return MiniBatch(
        offsets=torch.tensor([0, 4, 7, 9]),
        token_ids=torch.tensor([10, 11, 12, 13, 20, 21, 22, 30, 31]),
        response_mask=torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.bool),
        loss_weights=torch.arange(9) / 10,
        metric_weights=torch.arange(9) / 100,
        advantages=torch.arange(9.0),
    )


def test_pack_places_documents_filler_rows_and_columns() -> None:
    plan = ReplicaPlan(samples=(0, 1, 2), micro_batches=((0, 2), (1,)), packed_length=7)
    packed = pack_batch(
        shard(), plan, STAGES, columns=("loss_weights", "advantages", "old_log_probs")
    )
    first, second = packed.micro_batches

    # filler, then by length; no document's last token
    assert first.token_ids.tolist() == [[0, 0, 0, 30, 10, 11, 12]]
    assert first.position_ids.tolist() == [[0, 0, 0, 0, 0, 1, 2]]
    assert first.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 7]
    assert first.cu_seqlens.dtype == torch.int32
    assert first.max_seqlen == 3
    assert first.rows.tolist() == [5, 6]
    assert first.targets.tolist() == [12, 13]
    # of 30 and 10 .. 12, without the fillers
    assert (first.sequence_ids.tolist(), first.num_sequences) == ([1, 1], 2)
    assert first.columns["advantages"].tolist() == [2.0, 3.0]
    assert first.columns["loss_weights"].tolist() == pytest.approx([0.2, 0.3])
    assert set(first.columns) == {"loss_weights", "advantages"}

    assert second.token_ids.tolist() == [[0] * 5 + [20, 21]]
    assert second.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert second.rows.tolist() == [6]
    assert second.targets.tolist() == [22]
    assert (second.sequence_ids.tolist(), second.num_sequences) == ([0], 1)
    assert packed.seq_length == 7

    column = packed.unpack_rows([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    assert column.tolist() == [0, 0, -1, -2, 0, 0, -3, 0, 0]


def test_pack_without_filler_keeps_own_lengths() -> None:
    plan = ReplicaPlan(samples=(0, 1, 2), micro_batches=((2, 0), (1,)), packed_length=11)
    packed = pack_batch(shard(), plan, ONE)
    assert [micro.token_ids.numel() for micro in packed.micro_batches] == [4, 2]
    assert packed.micro_batches[0].cu_seqlens.tolist() == [0, 1, 4]
    assert packed.seq_length == 4


def test_a_document_of_one_token_is_kept() -> None:
    batch = TokenBatch(
        torch.tensor([0, 1, 3, 4]),
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([False, False, True, False]),
    )
    packed = pack_batch(batch, ReplicaPlan((0, 1, 2), ((0, 1, 2),), packed_length=4), ONE)
    (micro,) = packed.micro_batches
    assert micro.token_ids.tolist() == [[5, 8, 6]] and micro.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert (micro.rows.tolist(), micro.targets.tolist()) == ([2], [7])
    assert packed.unpack_rows([torch.tensor([-1.0])]).tolist() == [0, 0, -1, 0]


def test_shard_without_response_tokens_has_no_rows() -> None:
    batch = TokenBatch(torch.tensor([0, 2]), torch.tensor([5, 6]), torch.zeros(2, dtype=torch.bool))
    packed = pack_batch(batch, ReplicaPlan((0,), ((0,),), packed_length=8), STAGES)
    assert packed.micro_batches[0].rows.numel() == 0
    assert packed.unpack_rows([torch.empty(0)]).tolist() == [0.0, 0.0]


def test_token_columns_of_a_mini_batch() -> None:
    assert set(list_token_columns(MiniBatch)) == {
        "loss_weights",
        "metric_weights",
        "advantages",
        "old_log_probs",
        "ref_log_probs",
        "rollout_log_probs",
        "is_picked",
        "correction_weights",
        "teacher_ids",
        "teacher_log_probs",
    }


@pytest.mark.parametrize(
    "plan, words",
    [
        (ReplicaPlan((0, 1, 2), ((0, 1),), 11), "name 2 samples but the shard has 3"),
        (ReplicaPlan((0, 1, 2), ((0, 1, 1),), 11), "exactly one micro-batch"),
        (ReplicaPlan((0, 1, 2), ((0, 1, 2),), 5), "has 6 tokens but the plan's packed_length is 5"),
    ],
)
def test_a_plan_of_another_shard_is_refused(plan: ReplicaPlan, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_batch(shard(), plan, ONE)


def test_response_on_a_first_token_is_refused() -> None:
    batch = TokenBatch(torch.tensor([0, 2]), torch.tensor([5, 6]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="first token"):
        pack_batch(batch, ReplicaPlan((0,), ((0,),), 2), ONE)


def test_a_rank_of_two_gets_its_chunks_of_each_document() -> None:
    """The worked example of workers.pack: "a b c d" and "e f g", with c, d and g as
    response tokens.
    """
    batch = MiniBatch(
        offsets=torch.tensor([0, 4, 7]),
        token_ids=torch.tensor([11, 12, 13, 14, 21, 22, 23]),
        response_mask=torch.tensor([0, 0, 1, 1, 0, 0, 1], dtype=torch.bool),
        loss_weights=torch.arange(7) / 10,
        metric_weights=torch.arange(7) / 100,
    )
    plan = ReplicaPlan((0, 1), ((0, 1),), packed_length=12)
    layout = ParallelLayout(4, cp=2, pp=2)
    packed = [pack_batch(batch, plan, layout, rank, ("loss_weights",)) for rank in range(2)]
    (first,), (second,) = (p.micro_batches for p in packed)

    assert first.token_ids.tolist() == [[0, 0, 21, 0, 11, 0]]
    assert first.position_ids.tolist() == [[0, 3, 0, 3, 0, 3]]
    assert (
        first.rows.tolist()
        == first.targets.tolist()
        == first.columns["loss_weights"].tolist()
        == []
    )
    assert second.token_ids.tolist() == [[0, 0, 22, 0, 12, 13]]
    assert second.position_ids.tolist() == [[1, 2, 1, 2, 1, 2]]
    assert second.rows.tolist() == [2, 4, 5]
    assert second.targets.tolist() == [23, 13, 14]
    assert (first.sequence_ids.tolist(), second.sequence_ids.tolist()) == ([], [0, 1, 1])
    assert first.num_sequences == second.num_sequences == 2, "on a rank without rows too"
    assert second.columns["loss_weights"].tolist() == pytest.approx([0.6, 0.2, 0.3])
    for micro in (first, second):
        assert (micro.cu_seqlens.tolist(), micro.max_seqlen) == ([0, 4, 8, 12], 4)
    assert [p.seq_length for p in packed] == [12, 12]
    columns = [
        packed[0].unpack_rows([torch.empty(0)]),
        packed[1].unpack_rows([torch.tensor([-1.0, -2.0, -3.0])]),
    ]
    assert sum(columns).tolist() == [0, 0, -2, -3, 0, 0, -1]


@pytest.mark.parametrize("cp, tp", [(2, 1), (3, 1), (2, 2)])
def test_the_shares_of_all_ranks_are_the_documents(cp: int, tp: int) -> None:
    """Put together by position, the tokens and rows of all ranks are those that one
    rank would have.
    """
    generator = torch.Generator().manual_seed(cp)
    lengths = torch.randint(1, 30, (9,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.rand(int(offsets[-1]), generator=generator) < 0.4
    mask[offsets[:-1]] = False
    batch = TokenBatch(offsets, torch.arange(1, 1 + int(offsets[-1])), mask)
    layout = ParallelLayout(tp * cp, tp=tp, cp=cp, sequence_parallel=tp > 1)
    plan = ReplicaPlan(tuple(range(9)), ((0, 4, 5), (1, 2, 3, 6, 7, 8)), packed_length=1000)

    seen = []
    predicted = []
    # of each micro-batch: (its sequence, sample)
    owners: list[set[tuple[int, int]]] = [set(), set()]
    for rank in range(cp):
        packed = pack_batch(batch, plan, layout, rank)
        predicted += packed.token_index.tolist()
        for number, micro in enumerate(packed.micro_batches):
            assert micro.token_ids.numel() * cp % layout.packed_multiple == 0
            assert micro.cu_seqlens[-1] == micro.token_ids.numel() * cp
            assert bool((micro.cu_seqlens.diff() % (2 * cp) == 0).all())
            ids = micro.token_ids[0]
            positions = micro.position_ids[0]
            seen += [(i, p) for i, p in zip(ids.tolist(), positions.tolist(), strict=True) if i > 0]
            assert micro.targets.tolist() == (ids[micro.rows] + 1).tolist()
            # a target is 1 + its place
            samples = torch.bucketize(micro.targets - 1, offsets, right=True) - 1
            owners[number] |= set(zip(micro.sequence_ids.tolist(), samples.tolist(), strict=True))
            assert micro.num_sequences == len(plan.micro_batches[number])
            chunks = (
                2
                * cp
                * positions
                // torch.repeat_interleave(micro.cu_seqlens.diff(), micro.cu_seqlens.diff() // cp)
            )
            assert set(chunks.tolist()) <= {rank, 2 * cp - 1 - rank}
    trains = {
        int(torch.bucketize(place, offsets, right=True)) - 1 for place in mask.nonzero().flatten()
    }
    for pairs, samples_of_it in zip(owners, plan.micro_batches, strict=True):
        assert {sample for _, sample in pairs} == trains & set(samples_of_it)
        assert (
            len(pairs)
            == len({sequence for sequence, _ in pairs})
            == len({sample for _, sample in pairs})
        )
    forwarded = [
        range(o, o + max(n - 1, 1))
        for o, n in zip(offsets[:-1].tolist(), lengths.tolist(), strict=True)
    ]
    assert sorted(seen) == sorted(
        (1 + token, token - span.start) for span in forwarded for token in span
    )
    assert sorted(predicted) == mask.nonzero().flatten().tolist()


def test_sequence_parallelism_fills_each_micro_batch_to_a_multiple() -> None:
    plan = ReplicaPlan((0, 1, 2), ((0, 2), (1,)), packed_length=8)
    packed = pack_batch(shard(), plan, ParallelLayout(4, tp=4, sequence_parallel=True))
    assert [micro.token_ids.numel() for micro in packed.micro_batches] == [4, 4]
    assert packed.micro_batches[1].cu_seqlens.tolist() == [0, 1, 2, 4]
    assert packed.micro_batches[1].rows.tolist() == [3]
