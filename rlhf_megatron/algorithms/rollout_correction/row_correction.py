"""Importance weights and rejection of some rows, from the logarithm of each row's mismatch ratio.
Without gradient.

The same functions serve the controller (the rows of many whole samples, before an update) and the
loss (the rows of a micro-batch, with the moving policy). Everything is float64: r - 1 - log r of a
small log r has no digits in float32.

    importance weights   token: r, sequence: the product of the sequence's r; then min(., high), or
                         0 outside (IcePop)
                         "Off-policy RL" (TIS, https://fengyao.notion.site/off-policy-rl); IcePop:
                             arXiv 2510.18855
    rejection            `RejectionFilter`; a veto drops every sequence with a token of r
                         below the threshold

An exponent is clamped to +-20; bounds are compared as logarithms before that. No token is looked at
alone where a sequence counts: sums over whole sequences come from `RowSequences`, all of one call
in one exchange.
"""

# N rows, S sequences

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO
from rlhf_megatron.algorithms.rollout_correction.correction_params import (
    CorrectionParams,
    ImportanceWeightParams,
    RejectionFilter,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences

# log r where a log-prob is infinite or not a number: weight about 0, rejected by every filter
NONFINITE_LOG_RATIO = -1000.0


@dataclass(frozen=True)
class BoundedMeasure:
    """The quantity that a filter or the importance weights compare with their bounds, one a row or
    one a sequence.
    """

    values: Tensor  # [N] or [S] float64: log r (k1, weights), or the k2 or k3 estimate
    is_high: Tensor  # bool, above the upper bound
    is_low: Tensor | None  # bool, below the lower bound; None where there is none
    is_by_sequence: bool
    is_log: bool

    @functools.cached_property
    def ratios(self) -> Tensor:
        """Return the exponential of the values, which are logarithms here, with the exponent
        clamped.
        """
        return clamped_exp(self.values)

    @functools.cached_property
    def is_outside(self) -> Tensor:
        """Return which entries are beyond a bound."""
        return self.is_high if self.is_low is None else self.is_high | self.is_low

    def repeat_per_row(self, column: Tensor, sequences: RowSequences) -> Tensor:
        """Return a column of this measure's entries as a column of rows; unchanged where the
        measure is one of rows.
        """
        return sequences.repeat_per_row(column) if self.is_by_sequence else column


@dataclass(frozen=True)
class RowCorrection:
    """The correction of some rows."""

    weights_N: Tensor | None  # float64; None: no importance weights. Not normalised over a batch
    keep_N: Tensor | None  # bool; None: nothing rejects
    importance_measure: BoundedMeasure | None
    filter_measures: tuple[tuple[str, BoundedMeasure], ...]
    veto_S: Tensor | None  # bool, sequences with a token below the veto threshold


def compute_log_mismatch(log_probs_N: Tensor, rollout_log_probs_N: Tensor) -> Tensor:
    """Return log r = trainer's - engine's log-prob of each row, [N] float64; NONFINITE_LOG_RATIO
    where it is not finite.
    """
    log_ratio_N = log_probs_N.detach().to(torch.float64) - rollout_log_probs_N
    return log_ratio_N.nan_to_num_(
        nan=NONFINITE_LOG_RATIO, posinf=NONFINITE_LOG_RATIO, neginf=NONFINITE_LOG_RATIO
    )


@torch.no_grad()
def correct_rows(
    log_ratio_N: Tensor, sequences: RowSequences, params: CorrectionParams
) -> RowCorrection:
    """Return the importance weights and the rejection of the rows. One exchange of `sequences` is
    made where anything depends on whole sequences, in which all ranks that share them must take
    part.
    """
    rows = _compute_row_estimates(log_ratio_N, params)
    wanted = _select_columns_to_sum(rows, params)
    sums = (
        dict(zip(wanted, sequences.sum_by_sequence(*wanted.values()), strict=True))
        if wanted
        else {}
    )
    importance = weights_N = keep_N = veto_S = None
    if params.importance is not None:
        importance = _make_importance_measure(rows["k1"], sums, params.importance)
        weights_N = importance.repeat_per_row(
            _compute_importance_weights(importance, params.importance), sequences
        )
    filters = []
    for one in params.filters:
        measure = _make_filter_measure(one, rows, sums)
        filters.append((one.name, measure))
        passes_N = measure.repeat_per_row(~measure.is_outside, sequences)
        keep_N = passes_N if keep_N is None else keep_N & passes_N
    if params.veto is not None:
        veto_S = sums["veto"] > 0
        passes_N = sequences.repeat_per_row(~veto_S)
        keep_N = passes_N if keep_N is None else keep_N & passes_N
    return RowCorrection(weights_N, keep_N, importance, tuple(filters), veto_S)


def clamped_exp(log_values: Tensor) -> Tensor:
    """Return exp of the values, with the exponent clamped to +-MAX_LOG_RATIO, as a new tensor."""
    return log_values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()


def compute_kl_estimates(log_ratio_N: Tensor, estimator_name: str) -> Tensor:
    """Return the estimate of each entry by its name, [N]: k1 is log r, k2 is (log r)^2 / 2, k3 is r
    - 1 - log r with log r clamped.
    """
    if estimator_name == "k1":
        return log_ratio_N
    if estimator_name == "k2":
        return log_ratio_N.square().mul_(0.5)
    clamped_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped_N.expm1().sub_(clamped_N)


def _compute_row_estimates(log_ratio_N: Tensor, params: CorrectionParams) -> dict[str, Tensor]:
    """Return each row's estimates that a filter reads, by name; k1 always."""
    needed = {one.estimate for one in params.filters}
    return {
        "k1": log_ratio_N,
        **{kind: compute_kl_estimates(log_ratio_N, kind) for kind in sorted(needed - {"k1"})},
    }


def _select_columns_to_sum(rows: dict[str, Tensor], params: CorrectionParams) -> dict[str, Tensor]:
    """Return the columns to sum over sequences, by name. A sequence's maximum is over a bound where
    the number of its rows over the bound is not 0.
    """
    columns: dict[str, Tensor] = {}
    if params.importance is not None and params.importance.level == "sequence":
        columns["k1"] = rows["k1"]
    for one in params.filters:
        if one.level in ("seq_sum", "seq_mean"):
            columns[one.estimate] = rows[one.estimate]
        if one.level == "seq_mean":
            columns["count"] = torch.ones_like(rows["k1"])
        if one.level == "seq_max":
            columns[one.name] = rows[one.estimate] > one.high
    if params.veto is not None:
        columns["veto"] = rows["k1"] < math.log(params.veto)
    return columns


def _make_importance_measure(
    log_ratio_N: Tensor, sums: dict[str, Tensor], importance: ImportanceWeightParams
) -> BoundedMeasure:
    """Return the log ratios of tokens or of sequences, with the entries beyond the bounds. A
    truncation has no lower bound: 1 / high is taken, for metrics only.
    """
    of_sequences = importance.level == "sequence"
    log = sums["k1"] if of_sequences else log_ratio_N
    # of truncation: for metrics only
    low = 1 / importance.high if importance.low is None else importance.low
    return BoundedMeasure(
        log, log > math.log(importance.high), log < math.log(low), of_sequences, is_log=True
    )


def _compute_importance_weights(
    measure: BoundedMeasure, importance: ImportanceWeightParams
) -> Tensor:
    """Return the weights: ratios cut at the upper bound or, with a lower bound, 0 outside of the
    bounds.
    """
    if importance.low is None:
        return measure.ratios.clamp(max=importance.high)
    return measure.ratios.masked_fill(measure.is_outside, 0.0)


def _make_filter_measure(
    rejection_filter: RejectionFilter, rows: dict[str, Tensor], sums: dict[str, Tensor]
) -> BoundedMeasure:
    """Return the quantity that a filter bounds, of tokens or of sequences. For a maximum the values
    only say whether it is over the bound.
    """
    is_log = rejection_filter.estimate == "k1"
    if rejection_filter.level == "seq_max":  # the maximum itself is not known here: metrics find it
        is_high_S = sums[rejection_filter.name] > 0
        return BoundedMeasure(
            is_high_S.to(torch.float64), is_high_S, None, is_by_sequence=True, is_log=False
        )
    values = (
        rows[rejection_filter.estimate]
        if rejection_filter.level == "token"
        else sums[rejection_filter.estimate]
    )
    if rejection_filter.level == "seq_mean":
        values = values / sums["count"].clamp(min=1)
    is_high = values > (math.log(rejection_filter.high) if is_log else rejection_filter.high)
    is_low = None if rejection_filter.low is None else values < math.log(rejection_filter.low)
    return BoundedMeasure(values, is_high, is_low, rejection_filter.level != "token", is_log)
