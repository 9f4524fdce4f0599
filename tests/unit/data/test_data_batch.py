"""Every column follows when samples are picked, put together or carried to a later stage."""

from dataclasses import replace

import torch
from data_samples import scored

from rlhf_megatron.data.batch import (
    MiniBatch,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    TokenBatch,
    add_columns,
    compute_offsets,
    concat_batches,
    make_token_index,
    select_samples,
)


def test_token_index_follows_the_order_of_the_samples() -> None:
    offsets = torch.tensor([0, 3, 4, 6])
    assert make_token_index(offsets, [2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert make_token_index(offsets, []).tolist() == []
    assert make_token_index(offsets, [1, 1]).tolist() == [3, 3]


def test_select_takes_every_column_along() -> None:
    picked = select_samples(scored(), [2, 0])
    assert type(picked) is ScoredBatch
    assert picked.offsets.tolist() == [0, 2, 5]
    assert picked.token_ids.tolist() == [14, 15, 10, 11, 12]
    assert picked.response_mask.tolist() == [False, True, False, True, True]
    assert picked.rollout_log_probs.tolist() == [-4.0, -5.0, 0.0, -1.0, -2.0]
    assert picked.group_ids.tolist() == [8, 7]
    assert picked.labels == ("l2", "l0")
    assert picked.version_spans == (((2, 0, 1),), ((1, 0, 1), (2, 1, 2)))
    assert picked.num_retractions.tolist() == [2, 0]
    assert picked.reward_parts["exact"].tolist() == [0.0, 1.0]


def test_select_of_nothing_is_an_empty_batch() -> None:
    empty = select_samples(scored(), [])
    assert len(empty) == 0 and empty.num_tokens == 0
    assert empty.token_ids.dtype == torch.int64 and empty.labels == ()


def test_concat_undoes_a_cut() -> None:
    batch = scored()
    whole = concat_batches(
        [select_samples(batch, [0]), select_samples(batch, []), select_samples(batch, [1, 2])]
    )
    assert whole.offsets.tolist() == batch.offsets.tolist()
    assert whole.token_ids.tolist() == batch.token_ids.tolist()
    assert whole.finish_reasons == batch.finish_reasons
    assert whole.reward_parts["exact"].tolist() == [1.0, 0.0, 0.0]
    assert whole.version_spans == batch.version_spans
    assert whole.num_cached_tokens.tolist() == [1, 0, 0]


def test_optional_columns_stay_absent() -> None:
    weights = torch.tensor([0.0, 1.0])
    batch = MiniBatch(
        torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([False, True]), weights, weights
    )
    assert concat_batches([batch, batch]).advantages is None
    assert select_samples(batch, [0]).advantages is None


def test_gain_keeps_what_was_there() -> None:
    tokens = TokenBatch(torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([False, True]))
    weights = torch.tensor([0.0, 1.0])
    result = add_columns(MiniBatch, tokens, loss_weights=weights, metric_weights=weights)
    assert type(result) is MiniBatch
    assert result.token_ids is tokens.token_ids and result.loss_weights.tolist() == [0.0, 1.0]


def test_lengths() -> None:
    assert scored().lengths.tolist() == [3, 1, 2]
    assert compute_offsets(torch.tensor([3, 1, 2])).tolist() == [0, 3, 4, 6]
    assert compute_offsets(torch.tensor([], dtype=torch.int64)).tolist() == [0]
    assert len(PromptBatch(((1,),), ("a",), ("b",), ("c",), (0,), ("",))) == 1
    assert issubclass(ScoredBatch, RolloutBatch)


def test_a_part_that_a_batch_lacks_is_nan_for_its_samples() -> None:
    """Rewards may have other parts in another batch of the step."""
    batch = scored()
    parts = dict(batch.reward_parts)
    [name, *_] = parts
    other = replace(batch, reward_parts={"other": torch.ones(len(batch))})
    joined = concat_batches([batch, other])
    assert set(joined.reward_parts) == {*parts, "other"}
    count = len(batch)
    assert torch.equal(joined.reward_parts[name][:count], parts[name])
    assert joined.reward_parts[name][count:].isnan().all()
    assert joined.reward_parts["other"][:count].isnan().all()
