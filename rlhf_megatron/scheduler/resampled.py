"""What a step trains on where rewards decide how often a sample does: PF-PPO, see algorithms/resampling.py."""

from __future__ import annotations

from rlhf_megatron.algorithms.resampling import ResamplingParams, resample
from rlhf_megatron.config.schema import PFPPOConfig
from rlhf_megatron.data.batch import TrainBatch, select
from rlhf_megatron.scheduler.batch_metrics import valid_samples
from rlhf_megatron.scheduler.seeds import derive_seed

PURPOSE = 13  # of the seed


def resampled(batch: TrainBatch, config: PFPPOConfig, seed: int, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """(as many samples of `batch`, drawn with all their columns; metrics). `batch` itself where that is switched off.

    Drawn by (seed, step), so that a resumed or replayed step draws the same. Made for the update only: the metrics of
    rewards and lengths tell what the policy sampled.
    """
    if not config.enable:
        return batch, {}
    params = ResamplingParams(config.reweight_method, config.weight_pow)
    drawn = resample(batch.rewards, valid_samples(batch), params, derive_seed(seed, step, PURPOSE)).tolist()
    return select(batch, drawn), {"pf_ppo/distinct_samples": len(set(drawn)) / len(batch)}
