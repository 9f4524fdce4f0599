"""Packing of a shard into micro-batches: hand-made documents, filler, target columns, and the way back."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.data.batch import MiniBatch, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.workers.pack import pack, token_columns


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
    packed = pack(shard(), plan, ("loss_weights", "advantages", "old_log_probs"))
    first, second = packed.micro_batches

    assert first.token_ids.tolist() == [[0, 0, 0, 30, 10, 11, 12]]  # filler, then by length; no document's last token
    assert first.position_ids.tolist() == [[0, 0, 0, 0, 0, 1, 2]]
    assert first.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 7]
    assert first.cu_seqlens.dtype == torch.int32
    assert first.max_seqlen == 3
    assert first.rows.tolist() == [5, 6]
    assert first.targets.tolist() == [12, 13]
    assert first.columns["advantages"].tolist() == [2.0, 3.0]
    assert first.columns["loss_weights"].tolist() == pytest.approx([0.2, 0.3])
    assert set(first.columns) == {"loss_weights", "advantages"}

    assert second.token_ids.tolist() == [[0] * 5 + [20, 21]]
    assert second.cu_seqlens.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert second.rows.tolist() == [6]
    assert second.targets.tolist() == [22]
    assert packed.seq_length == 7

    column = packed.unpack([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    assert column.tolist() == [0, 0, -1, -2, 0, 0, -3, 0, 0]


def test_pack_without_filler_keeps_own_lengths() -> None:
    plan = ReplicaPlan(samples=(0, 1, 2), micro_batches=((2, 0), (1,)), packed_length=11)
    packed = pack(shard(), plan, fill=False)
    assert [micro.token_ids.numel() for micro in packed.micro_batches] == [4, 2]
    assert packed.micro_batches[0].cu_seqlens.tolist() == [0, 1, 4]
    assert packed.seq_length == 4


def test_a_document_of_one_token_is_kept() -> None:
    batch = TokenBatch(
        torch.tensor([0, 1, 3, 4]), torch.tensor([5, 6, 7, 8]), torch.tensor([False, False, True, False])
    )
    packed = pack(batch, ReplicaPlan((0, 1, 2), ((0, 1, 2),), packed_length=4), fill=False)
    (micro,) = packed.micro_batches
    assert micro.token_ids.tolist() == [[5, 8, 6]] and micro.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert (micro.rows.tolist(), micro.targets.tolist()) == ([2], [7])
    assert packed.unpack([torch.tensor([-1.0])]).tolist() == [0, 0, -1, 0]


def test_shard_without_response_tokens_has_no_rows() -> None:
    batch = TokenBatch(torch.tensor([0, 2]), torch.tensor([5, 6]), torch.zeros(2, dtype=torch.bool))
    packed = pack(batch, ReplicaPlan((0,), ((0,),), packed_length=8))
    assert packed.micro_batches[0].rows.numel() == 0
    assert packed.unpack([torch.empty(0)]).tolist() == [0.0, 0.0]


def test_token_columns_of_a_mini_batch() -> None:
    assert set(token_columns(MiniBatch)) == {
        "loss_weights",
        "metric_weights",
        "advantages",
        "old_log_probs",
        "ref_log_probs",
        "rollout_log_probs",
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
        pack(shard(), plan)


def test_response_on_a_first_token_is_refused() -> None:
    batch = TokenBatch(torch.tensor([0, 2]), torch.tensor([5, 6]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="first token"):
        pack(batch, ReplicaPlan((0,), ((0,),), 2))
