"""The columns of a batch whose distribution people look at."""

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.algorithms.mismatch_histogram import differences
from rlhf_megatron.data.batch import TrainBatch
from rlhf_megatron.scheduler.batch_metrics import response_lengths, valid_samples
from rlhf_megatron.scheduler.version_metrics import lags


def distributions(batch: TrainBatch, version: int | None = None) -> dict[str, Tensor]:
    """Name -> [n] finite values: of samples whose reward counts, of all responses, or of response tokens.

    `version`: of the policy that trained on them; with it there are their lags, where any is not 0.
    """
    mask_T = batch.response_mask
    columns = {"rewards": batch.rewards[valid_samples(batch)], "response_length": response_lengths(batch)}
    if version is not None and bool((of_samples := lags(version, batch)).any()):
        columns["lag"] = of_samples
    columns["advantages"] = batch.advantages[mask_T]
    if batch.old_log_probs is not None:
        engine_N, trainer_N = batch.rollout_log_probs[mask_T], batch.old_log_probs[mask_T]
        columns["log_prob_difference"] = differences(engine_N, trainer_N)
        columns["mismatch_ratio"] = (trainer_N - engine_N).exp()
    for name, column_T in (("values", batch.values), ("returns", batch.returns), ("entropy", batch.entropies)):
        if column_T is not None:
            columns[name] = column_T[mask_T]
    return {name: finite for name, values in columns.items() if (finite := values[values.isfinite()]).numel()}
