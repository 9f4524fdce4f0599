"""The correction of a whole step on the controller, before its update: columns for the loss, and metrics.

Blocks of whole samples are worked on one after the other: memory that stays in a cache is several times faster.
The mean that batch normalisation divides by is over the step, so it does not depend on mini- or micro-batches, and no
rank has to ask another.
"""

# B samples, T packed tokens, N response tokens of a block, S its sequences

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import places, repeated
from rlhf_megatron.algorithms.rollout_correction.metrics import CorrectionMetrics, Rows
from rlhf_megatron.algorithms.rollout_correction.params import CorrectionParams
from rlhf_megatron.algorithms.rollout_correction.ratios import Corrected, correct, log_mismatch
from rlhf_megatron.algorithms.sequences import Sequences

BLOCK_TOKENS = 65536


@dataclass(frozen=True)
class StepCorrection:
    """The correction of a step. No number in it is infinite or NaN."""

    weights_T: Tensor | None  # float32, factor of the policy loss, 1 outside of the response mask; None: no weights
    keep_T: Tensor | None  # bool, False: rejected; None: nothing rejects
    batch_norm_factor: float | None  # what the weights were divided by; None: not normalised
    metrics: dict[str, float]


@dataclass(frozen=True)
class ContiguousSequences(Sequences):
    """Rows in the order of their sequences."""

    lengths_S: Tensor = None  # type: ignore[assignment]  # [S] int64 rows, may be 0

    def sums(self, *columns_T: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.segment_reduce(column_T.to(torch.float64), "sum", lengths=self.lengths_S, unsafe=True)
            for column_T in columns_T
        )

    def spread(self, column_S: Tensor) -> Tensor:
        return repeated(column_S, self.lengths_S)


@torch.no_grad()
def correct_step(
    log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    response_mask_T: Tensor,
    is_valid_B: Tensor,
    offsets: Tensor,
    params: CorrectionParams,
) -> StepCorrection:
    """Weights and rejection of all response tokens; statistics over those of valid samples.

    `log_probs_T`: of the trainer's policy at the start of the update. Both columns may hold anything outside of
    `response_mask_T`. The mean of a batch normalisation is over tokens that are kept, at sequence level over sequences
    that have any; where it is 0 nothing is divided.
    """
    metrics = CorrectionMetrics(params)
    weights_T = torch.ones(response_mask_T.numel()) if params.importance is not None else None
    keep_T = torch.ones_like(response_mask_T) if params.rejects else None
    total, count = 0.0, 0.0
    for first, last in _blocks(offsets):
        start, stop = int(offsets[first]), int(offsets[last])
        block = _Block(
            log_probs_T[start:stop],
            rollout_log_probs_T[start:stop],
            response_mask_T[start:stop],
            is_valid_B[first:last],
            offsets[first : last + 1] - start,
            needs_owners=any(one.level == "seq_max" for one in params.filters),
        )
        for is_valid, index_N, rows in block.rows(with_invalid=weights_T is not None or keep_T is not None):
            corrected = correct(rows.log_ratio_N, rows.sequences, params)
            if weights_T is not None and corrected.weights_N is not None:
                weights_T[start:stop].index_copy_(0, index_N, corrected.weights_N.float())
            if keep_T is not None and corrected.keep_N is not None:
                keep_T[start:stop].index_copy_(0, index_N, corrected.keep_N)
            if is_valid:
                metrics.add(rows, corrected)
            if is_valid and params.use_batch_norm:
                of_block = _weight_sum(rows, corrected, params)
                total, count = total + of_block[0], count + of_block[1]
    factor = None
    if params.use_batch_norm and weights_T is not None:
        factor = total / count if total > 0 else 1.0
        weights_T[response_mask_T] /= factor
    return StepCorrection(weights_T, keep_T, factor, metrics.read(factor))


class _Block:
    """Some whole samples. Those without response tokens are left out."""

    def __init__(
        self,
        log_probs_T: Tensor,
        rollout_T: Tensor,
        mask_T: Tensor,
        is_valid_B: Tensor,
        offsets: Tensor,
        needs_owners: bool,
    ) -> None:
        self.needs_owners = needs_owners
        self.index_N = places(mask_T)
        self.log_probs_N = log_probs_T.index_select(0, self.index_N)
        self.rollout_N = rollout_T.index_select(0, self.index_N)
        counts_B = torch.searchsorted(self.index_N, offsets).diff()
        self.lengths_S = counts_B[counts_B > 0]
        self.is_valid_S = is_valid_B[counts_B > 0]

    def rows(self, with_invalid: bool) -> Iterator[tuple[bool, Tensor, Rows]]:
        """(whether they are of valid samples, their places in the block, they themselves); valid ones always, others
        where they are asked for and there are any. What is found for a row depends on its own sequence only."""
        if bool(self.is_valid_S.all()):
            yield True, self.index_N, self._of(self.log_probs_N, self.rollout_N, self.lengths_S)
            return
        is_valid_N = repeated(self.is_valid_S, self.lengths_S)
        for is_valid in (True, False) if with_invalid else (True,):
            chosen_N = places(is_valid_N if is_valid else ~is_valid_N)
            lengths_S = self.lengths_S[self.is_valid_S if is_valid else ~self.is_valid_S]
            columns = (self.log_probs_N.index_select(0, chosen_N), self.rollout_N.index_select(0, chosen_N))
            yield is_valid, self.index_N.index_select(0, chosen_N), self._of(*columns, lengths_S)

    def _of(self, log_probs_N: Tensor, rollout_N: Tensor, lengths_S: Tensor) -> Rows:
        ids_N = lengths_S[:0]  # most ask for sums and spread entries only
        if self.needs_owners:
            ids_N = repeated(torch.arange(lengths_S.numel()), lengths_S)
        sequences = ContiguousSequences(ids_N, lengths_S.numel(), lengths_S=lengths_S)
        return Rows(log_probs_N, rollout_N, log_mismatch(log_probs_N, rollout_N), sequences, lengths_S)


def _weight_sum(rows: Rows, corrected: Corrected, params: CorrectionParams) -> tuple[float, float]:
    """(sum of the weights that are kept, their number), over tokens or over sequences."""
    assert corrected.weights_N is not None and params.importance is not None
    keep_N = torch.ones_like(corrected.weights_N) if corrected.keep_N is None else corrected.keep_N.to(torch.float64)
    if params.importance.level == "token":
        return float((corrected.weights_N * keep_N).sum()), float(keep_N.sum())
    total_S, count_S = rows.sequences.sums(corrected.weights_N * keep_N, keep_N)
    has_any_S = count_S > 0
    return float((total_S / count_S.clamp(min=1)).sum()), float(has_any_S.sum())


def _blocks(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """Spans of samples of about BLOCK_TOKENS tokens, at least one sample each."""
    ends = offsets.tolist()
    first = 0
    for sample in range(1, len(ends)):
        if ends[sample] - ends[first] >= BLOCK_TOKENS or sample == len(ends) - 1:
            yield first, sample
            first = sample
