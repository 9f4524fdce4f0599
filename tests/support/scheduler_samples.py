"""Batches for the tests of scheduler/."""

import torch

from rlhf_megatron.data.batch import ScoredBatch, TrainBatch, add_columns


def train_batch(num_samples: int = 10) -> TrainBatch:
    """Sample i has 1 prompt token and i + 1 response tokens,
    all with id 100 + i and advantage i.
    """
    lengths = torch.arange(num_samples) + 2
    owner = torch.arange(num_samples).repeat_interleave(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.ones(len(owner), dtype=torch.bool)
    mask[offsets[:-1]] = False
    names = tuple(str(i) for i in range(num_samples))
    return TrainBatch(
        offsets=offsets,
        token_ids=100 + owner,
        response_mask=mask,
        rollout_log_probs=-owner.float(),
        group_ids=torch.arange(num_samples) // 2,
        sample_ids=torch.arange(num_samples),
        policy_versions=torch.ones(num_samples, dtype=torch.int64),
        finish_reasons=("stop",) * num_samples,
        prompts=names,
        responses=names,
        labels=names,
        sources=names,
        extras=("",) * len(names),
        rewards=torch.arange(num_samples).float(),
        reward_statuses=("ok",) * num_samples,
        old_log_probs=-2.0 * owner,
        advantages=owner.float() * mask,
    )


def to_train(batch: ScoredBatch, **columns: object) -> TrainBatch:
    return add_columns(
        TrainBatch, batch, advantages=torch.tensor([0.0, 3.0, -1.0, 0.0, 0.0, 4.0]), **columns
    )
