"""How old the policy was that sampled a step's tokens. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.data.batch import RolloutBatch
from rlhf_megatron.scheduler.batch_metrics import statistics


def version_metrics(version: int, batch: RolloutBatch) -> dict[str, float]:
    """`version`: of the weights that are about to be trained. Lag is told from a sample's first token, staleness from
    its oldest."""
    prefix = "training/off_policy/trajectory"
    spans = torch.tensor([len(of_sample) for of_sample in _versions(batch)])
    return {
        "policy/lag": (version - batch.policy_versions.float()).mean().item(),
        **statistics(f"{prefix}_staleness", lags(version, batch)),
        **statistics(f"{prefix}_spans", spans),
    }


def lags(version: int, batch: RolloutBatch) -> Tensor:
    """[B] int64: `version` less that of each sample's oldest token."""
    return version - torch.tensor([min(of_sample) for of_sample in _versions(batch)], dtype=torch.int64)


def _versions(batch: RolloutBatch) -> list[set[int]]:
    """Of the tokens of each sample."""
    spans = batch.version_spans or ((),) * len(batch)
    pairs = zip(spans, batch.policy_versions.tolist(), strict=True)
    return [{of for of, _, _ in of_sample} or {first} for of_sample, first in pairs]
