"""The correction of a whole step on the controller, before its update: columns for the
loss, and metrics.

Blocks of whole samples are worked on one after the other: memory that stays in a cache is several
times faster. The mean that batch normalisation divides by is over the step, so it does not depend
on mini- or micro-batches, and no rank has to ask another.
"""

# B samples, T packed tokens, N response tokens of a block, S its sequences

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    find_true_positions,
    repeat_per_sample_length,
)
from rlhf_megatron.algorithms.rollout_correction.correction_metrics import (
    CorrectionMetrics,
    CorrectionRows,
)
from rlhf_megatron.algorithms.rollout_correction.correction_params import CorrectionParams
from rlhf_megatron.algorithms.rollout_correction.row_correction import (
    RowCorrection,
    compute_log_mismatch,
    correct_rows,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences

BLOCK_TOKENS = 65536


@dataclass(frozen=True)
class StepCorrection:
    """The correction of a step. No number in it is infinite or NaN."""

    # float32, factor of the policy loss, 1 outside of the response mask; None: no weights
    weights_T: Tensor | None
    keep_T: Tensor | None  # bool, False: rejected; None: nothing rejects
    batch_norm_factor: float | None  # what the weights were divided by; None: not normalised
    metrics: dict[str, float]


@dataclass(frozen=True)
class ContiguousSequences(RowSequences):
    """Rows in the order of their sequences."""

    lengths_S: Tensor = None  # type: ignore[assignment]  # [S] int64 rows, may be 0

    def sum_by_sequence(self, *columns_T: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of each column over the sequences, [S] float64 each; no exchange."""
        return tuple(
            torch.segment_reduce(
                column_T.to(torch.float64), "sum", lengths=self.lengths_S, unsafe=True
            )
            for column_T in columns_T
        )

    def repeat_per_row(self, column_S: Tensor) -> Tensor:
        """Return each row's entry of its sequence."""
        return repeat_per_sample_length(column_S, self.lengths_S)


@torch.no_grad()
def compute_step_correction(
    log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    response_mask_T: Tensor,
    is_valid_B: Tensor,
    offsets: Tensor,
    params: CorrectionParams,
) -> StepCorrection:
    """Return the weights and the rejection of all response tokens of a step, with metrics over the
    response tokens of valid samples.

    `log_probs_T`: of the trainer's policy at the start of the update. Both log-prob columns may
    hold anything outside of `response_mask_T`. The mean of a batch normalisation is over tokens
    that are kept, at sequence level over sequences that have any; where it is 0 nothing is divided.
    """
    metrics = CorrectionMetrics(params)
    weights_T = torch.ones(response_mask_T.numel()) if params.importance is not None else None
    keep_T = torch.ones_like(response_mask_T) if params.has_rejection else None
    total = 0.0
    count = 0.0
    for first, last in _iterate_sample_blocks(offsets):
        start = int(offsets[first])
        stop = int(offsets[last])
        block = _SampleBlock(
            log_probs_T[start:stop],
            rollout_log_probs_T[start:stop],
            response_mask_T[start:stop],
            is_valid_B[first:last],
            offsets[first : last + 1] - start,
            needs_sequence_ids=any(one.level == "seq_max" for one in params.filters),
        )
        for is_valid, index_N, rows in block.split_by_validity(
            with_invalid=weights_T is not None or keep_T is not None
        ):
            corrected = correct_rows(rows.log_ratio_N, rows.sequences, params)
            if weights_T is not None and corrected.weights_N is not None:
                weights_T[start:stop].index_copy_(0, index_N, corrected.weights_N.float())
            if keep_T is not None and corrected.keep_N is not None:
                keep_T[start:stop].index_copy_(0, index_N, corrected.keep_N)
            if is_valid:
                metrics.add_block(rows, corrected)
            if is_valid and params.use_batch_norm:
                of_block = _sum_kept_weights(rows, corrected, params)
                total = total + of_block[0]
                count = count + of_block[1]
    factor = None
    if params.use_batch_norm and weights_T is not None:
        factor = total / count if total > 0 else 1.0
        weights_T[response_mask_T] /= factor
    return StepCorrection(weights_T, keep_T, factor, metrics.compute_metrics(factor))


class _SampleBlock:
    """Some whole samples. Those without response tokens are left out."""

    def __init__(
        self,
        log_probs_T: Tensor,
        rollout_log_probs_T: Tensor,
        mask_T: Tensor,
        is_valid_B: Tensor,
        offsets: Tensor,
        needs_sequence_ids: bool,
    ) -> None:
        """Find the response tokens of the samples and cut the columns to them."""
        self.needs_sequence_ids = needs_sequence_ids
        self.positions_N = find_true_positions(mask_T)
        self.log_probs_N = log_probs_T.index_select(0, self.positions_N)
        self.rollout_log_probs_N = rollout_log_probs_T.index_select(0, self.positions_N)
        counts_B = torch.searchsorted(self.positions_N, offsets).diff()
        self.lengths_S = counts_B[counts_B > 0]
        self.is_valid_S = is_valid_B[counts_B > 0]

    def split_by_validity(
        self, with_invalid: bool
    ) -> Iterator[tuple[bool, Tensor, CorrectionRows]]:
        """Yield (True, positions in the block, rows) of the valid samples and, with `with_invalid`,
        (False, ...) of the others where there are any. The correction of a row depends on its own
        sequence only.
        """
        if bool(self.is_valid_S.all()):
            yield (
                True,
                self.positions_N,
                self._make_correction_rows(
                    self.log_probs_N, self.rollout_log_probs_N, self.lengths_S
                ),
            )
            return
        is_valid_N = repeat_per_sample_length(self.is_valid_S, self.lengths_S)
        for is_valid in (True, False) if with_invalid else (True,):
            chosen_N = find_true_positions(is_valid_N if is_valid else ~is_valid_N)
            lengths_S = self.lengths_S[self.is_valid_S if is_valid else ~self.is_valid_S]
            log_probs_N = self.log_probs_N.index_select(0, chosen_N)
            rollout_log_probs_N = self.rollout_log_probs_N.index_select(0, chosen_N)
            yield (
                is_valid,
                self.positions_N.index_select(0, chosen_N),
                self._make_correction_rows(log_probs_N, rollout_log_probs_N, lengths_S),
            )

    def _make_correction_rows(
        self, log_probs_N: Tensor, rollout_log_probs_N: Tensor, lengths_S: Tensor
    ) -> CorrectionRows:
        """Return the rows of these columns. They have sequence ids only where a filter needs
        them.
        """
        ids_N = lengths_S[:0]  # most ask for sums and spread entries only
        if self.needs_sequence_ids:
            ids_N = repeat_per_sample_length(torch.arange(lengths_S.numel()), lengths_S)
        sequences = ContiguousSequences(ids_N, lengths_S.numel(), lengths_S=lengths_S)
        return CorrectionRows(
            log_probs_N,
            rollout_log_probs_N,
            compute_log_mismatch(log_probs_N, rollout_log_probs_N),
            sequences,
            lengths_S,
        )


def _sum_kept_weights(
    rows: CorrectionRows, correction: RowCorrection, params: CorrectionParams
) -> tuple[float, float]:
    """Return (sum of the weights that are kept, their number), over tokens or over sequences."""
    assert correction.weights_N is not None and params.importance is not None
    keep_N = (
        torch.ones_like(correction.weights_N)
        if correction.keep_N is None
        else correction.keep_N.to(torch.float64)
    )
    if params.importance.level == "token":
        return float((correction.weights_N * keep_N).sum()), float(keep_N.sum())
    total_S, count_S = rows.sequences.sum_by_sequence(correction.weights_N * keep_N, keep_N)
    has_any_S = count_S > 0
    return float((total_S / count_S.clamp(min=1)).sum()), float(has_any_S.sum())


def _iterate_sample_blocks(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first sample, one behind the last) of blocks of about BLOCK_TOKENS tokens, at least
    one sample each.
    """
    ends = offsets.tolist()
    first = 0
    for sample in range(1, len(ends)):
        if ends[sample] - ends[first] >= BLOCK_TOKENS or sample == len(ends) - 1:
            yield first, sample
            first = sample
