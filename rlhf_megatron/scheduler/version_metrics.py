"""How old the policy was that sampled a step's tokens. Pure."""

from __future__ import annotations

import torch

from rlhf_megatron.data.batch import RolloutBatch
from rlhf_megatron.scheduler.batch_metrics import statistics


def version_metrics(version: int, batch: RolloutBatch) -> dict[str, float]:
    """`version`: of the weights that are about to be trained. Lag is told from a sample's first token, staleness from
    its oldest."""
    metrics = {"policy/lag": (version - batch.policy_versions.float()).mean().item()}
    oldest, spans = batch.policy_versions, torch.ones(len(batch), dtype=torch.int64)
    if batch.version_spans is not None and any(batch.version_spans):
        pairs = zip(batch.version_spans, batch.policy_versions.tolist(), strict=True)
        versions = [{of for of, _, _ in of_sample} or {first} for of_sample, first in pairs]
        oldest = torch.tensor([min(of_sample) for of_sample in versions])
        spans = torch.tensor([len(of_sample) for of_sample in versions])
    prefix = "training/off_policy/trajectory"
    return metrics | statistics(f"{prefix}_staleness", version - oldest) | statistics(f"{prefix}_spans", spans)
