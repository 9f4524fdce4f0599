"""Metrics of a correction, `rollout_corr/*` under verl's names, gathered block by block. Tokens and
sequences that are counted are those given: response tokens of valid samples; a sequence
without any is none.

Weights and ratios are those before cutting, but for `rollout_is_std` and
`rollout_is_eff_sample_size`, which are of what acts. What is shown of a k1 filter is the ratio that
its bounds are bounds of.

A Tally keeps statistics of columns that come block by block: means, deviations, extremes and
shares, all finite.
"""
# N rows, S sequences

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO
from rlhf_megatron.algorithms.rollout_correction.correction_params import (
    CorrectionParams,
    ImportanceWeightParams,
    RejectionFilter,
)
from rlhf_megatron.algorithms.rollout_correction.row_correction import (
    NONFINITE_LOG_RATIO,
    BoundedMeasure,
    RowCorrection,
    clamped_exp,
    compute_kl_estimates,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences

PREFIX = "rollout_corr/"


@dataclass
class RunningStatistics:
    """Sums and extremes of all entries added."""

    shows_range: bool = False
    count: int = 0
    total: float = 0.0
    sum_squares: float = 0.0
    largest: float = 0.0
    smallest: float = 0.0

    def add_entries(self, entries: Tensor) -> None:
        """Add the entries, float64, with their extremes and squares."""
        if not entries.numel():
            return
        low, high = (bound.item() for bound in entries.aminmax())
        self.largest = high if self.count == 0 else max(self.largest, high)
        self.smallest = low if self.count == 0 else min(self.smallest, low)
        self.add_sums(entries, with_squares=True)

    def add_sums(self, entries: Tensor, with_squares: bool = False) -> None:
        """Add the entries without their extremes, and without their squares unless `with_squares`;
        without squares `std` is wrong.
        """
        self.count += entries.numel()
        self.total += entries.sum().item()
        if with_squares:
            self.sum_squares += entries.dot(entries).item()

    @property
    def mean(self) -> float:
        """Return the mean of the entries; 0 without entries."""
        return self.total / max(self.count, 1)

    @property
    def mean_square(self) -> float:
        """Return the mean of the squared entries; 0 without entries."""
        return self.sum_squares / max(self.count, 1)

    @property
    def std(self) -> float:
        """Return the deviation of the entries themselves (divided by n), not an estimate for a
        population.
        """
        return float(max(self.mean_square - self.mean**2, 0.0) ** 0.5)

    @property
    def effective_share(self) -> float:
        """Return the effective sample size as a share of all entries: (sum w)^2 / (n sum w^2); 0
        where all are 0.
        """
        return self.total**2 / (self.count * self.sum_squares) if self.sum_squares > 0 else 0.0

    def make_metrics(self, name: str) -> dict[str, float]:
        """Return the mean under `name` or, with `shows_range`, four metrics
        name_{mean,std,max,min}.
        """
        if not self.shows_range:
            return {name: self.mean}
        found = {"mean": self.mean, "std": self.std, "max": self.largest, "min": self.smallest}
        return {f"{name}_{kind}": value for kind, value in found.items()}


class MetricTally(dict[str, RunningStatistics]):
    """The running statistics by the name of their metric. A name that begins with a point is no
    metric itself, but is used to compute one.
    """

    def get_statistics(self, name: str, shows_range: bool = False) -> RunningStatistics:
        """Return the statistics of a metric, made if absent; `shows_range` counts only then."""
        return self.setdefault(name, RunningStatistics(shows_range))

    def add_share(self, name: str, is_hit: Tensor) -> None:
        """Count the share of True among the entries."""
        self.add_hits(name, int(is_hit.count_nonzero()), is_hit.numel())

    def add_hits(self, name: str, num_hits: int, num_entries: int) -> None:
        """Add `num_hits` of `num_entries` to a share."""
        found = self.get_statistics(name)
        found.count += num_entries
        found.total += num_hits


@dataclass(frozen=True)
class CorrectionRows:
    """The rows of some whole samples that statistics count. Each sequence has at least one row."""

    log_probs_N: Tensor  # trainer's, float32
    rollout_log_probs_N: Tensor
    log_ratio_N: Tensor  # float64, of `compute_log_mismatch`
    sequences: RowSequences
    counts_S: Tensor  # rows of each

    def mean_by_sequence(self, column_N: Tensor) -> Tensor:
        """Return the mean of a column over each sequence, [S] float64."""
        return self.sequences.sum_by_sequence(column_N)[0] / self.counts_S


class CorrectionMetrics:
    """The metrics of a correction: add at least one block, then compute them."""

    def __init__(self, params: CorrectionParams) -> None:
        """Begin without any block."""
        self.params = params
        self._tally = MetricTally()

    def add_block(self, rows: CorrectionRows, correction: RowCorrection) -> None:
        """Add the metrics of a block of rows and of `correction`, the correction of the same
        rows.
        """
        self._add_divergence_metrics(rows)
        if self.params.importance is not None and correction.importance_measure is not None:
            self._add_importance_metrics(
                rows, correction, correction.importance_measure, self.params.importance
            )
        for one, (_, measure) in zip(self.params.filters, correction.filter_measures, strict=True):
            self._add_filter_metrics(rows, one, measure)
        if correction.veto_S is not None and self.params.veto is not None:
            is_veto_N = rows.log_ratio_N < math.log(self.params.veto)
            self._tally.add_share("rollout_is_catastrophic_token_fraction", is_veto_N)
            self._tally.add_share("rollout_is_veto_fraction", correction.veto_S)
        if correction.keep_N is not None:
            self._add_masked_fractions("rollout_rs", rows, ~correction.keep_N)

    def compute_metrics(self, batch_norm_factor: float | None) -> dict[str, float]:
        """Return all metrics of the blocks that were added, at least one, as rollout_corr/*.
        `batch_norm_factor`: a metric of its own, or None.
        """
        of = self._tally.get_statistics
        found: dict[str, float] = {}
        for name, spread in tuple(self._tally.items()):
            found |= {} if name.startswith(".") else spread.make_metrics(name)
            if name.startswith(".deviation "):
                found[f"{name.partition(' ')[2]}_max_deviation"] = spread.largest
        difference = of("log_ppl_diff")
        excess = of(".excess")
        product = of(".product excess")
        found |= {
            "kl": -of(".log ratio").mean,
            "k3_kl": excess.mean - of(".clamped").mean,
            "log_ppl_diff_max": difference.largest,
            "log_ppl_diff_min": difference.smallest,
            "chi2_token": excess.mean_square
            + 2 * excess.mean,  # E[r^2] - 1, without its cancellation
            "chi2_seq": product.mean_square + 2 * product.mean,
        }
        if self.params.importance is not None:
            acting = of(".acting")
            found |= {
                "rollout_is_std": acting.std,
                "rollout_is_eff_sample_size": acting.effective_share,
            }
        if batch_norm_factor is not None:
            found["rollout_is_batch_norm_factor"] = batch_norm_factor
        return {PREFIX + name: value for name, value in found.items()}

    def _add_divergence_metrics(self, rows: CorrectionRows) -> None:
        """Add KL, chi-squared and perplexities of the rows."""
        of = self._tally.get_statistics
        clamped_N = rows.log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        of(".log ratio").add_sums(rows.log_ratio_N)
        of(".clamped").add_sums(clamped_N)
        of(".excess").add_sums(clamped_N.expm1(), with_squares=True)  # r - 1
        trainer_S = rows.mean_by_sequence(_replace_nonfinite(rows.log_probs_N))
        engine_S = rows.mean_by_sequence(_replace_nonfinite(rows.rollout_log_probs_N))
        diff_S = engine_S - trainer_S
        for name, column_S in (
            ("training_log_ppl", -trainer_S),
            ("training_ppl", clamped_exp(-trainer_S)),
            ("rollout_log_ppl", -engine_S),
            ("rollout_ppl", clamped_exp(-engine_S)),
            ("log_ppl_diff", diff_S),
            ("log_ppl_abs_diff", diff_S.abs()),
            ("ppl_ratio", clamped_exp(diff_S)),
        ):
            of(name).add_entries(column_S)
        of(".product excess").add_sums(clamped_exp(-diff_S * rows.counts_S) - 1, with_squares=True)

    def _add_importance_metrics(
        self,
        rows: CorrectionRows,
        correction: RowCorrection,
        measure: BoundedMeasure,
        importance: ImportanceWeightParams,
    ) -> None:
        """Add the ratios before cutting, the weights that act, and the shares beyond the bounds."""
        tally = self._tally
        assert correction.weights_N is not None and measure.is_low is not None
        ratios = measure.ratios
        acting = correction.weights_N
        tally.get_statistics("rollout_is", shows_range=True).add_entries(ratios)
        if measure.is_by_sequence:
            # alike in a sequence: its first
            acting = acting.index_select(0, rows.counts_S.cumsum(0) - rows.counts_S)
        tally.get_statistics(".acting").add_entries(acting)
        tally.add_share("rollout_is_ratio_fraction_high", measure.is_high)
        tally.add_share("rollout_is_ratio_fraction_low", measure.is_low)
        if importance.low is not None:
            tally.add_share("rollout_is_oob_ratio", measure.is_outside)
        low = 1 / importance.high if importance.low is None else importance.low
        ratios_S = ratios if measure.is_by_sequence else rows.mean_by_sequence(ratios)
        self._add_sequence_statistics("rollout_is", ratios_S, importance.high, low, neutral=1.0)

    def _add_filter_metrics(
        self, rows: CorrectionRows, rejection_filter: RejectionFilter, measure: BoundedMeasure
    ) -> None:
        """Add the quantity that a filter bounds, and the shares of rows and sequences that it
        rejects.
        """
        name = f"rollout_rs_{rejection_filter.name}"
        tally = self._tally
        values = measure.ratios if measure.is_log else measure.values
        if rejection_filter.level == "seq_max":
            values = values.new_zeros(values.shape).scatter_reduce_(
                0,
                rows.sequences.ids_T,
                compute_kl_estimates(rows.log_ratio_N, rejection_filter.estimate),
                "amax",
            )
        tally.get_statistics(name, shows_range=True).add_entries(values)
        tally.add_share(f"{name}_fraction_high", measure.is_high)
        if measure.is_low is not None:
            tally.add_share(f"{name}_fraction_low", measure.is_low)
        if measure.is_by_sequence:
            num_masked = int(rows.counts_S.dot(measure.is_outside.to(rows.counts_S.dtype)))
            tally.add_hits(f"{name}_masked_fraction", num_masked, rows.log_ratio_N.numel())
            tally.add_share(f"{name}_seq_masked_fraction", measure.is_outside)
        else:
            self._add_masked_fractions(name, rows, measure.is_outside)
            self._add_sequence_statistics(
                name,
                rows.mean_by_sequence(values),
                rejection_filter.high,
                rejection_filter.low,
                neutral=1.0 if measure.is_log else 0.0,
            )

    def _add_sequence_statistics(
        self, name: str, means_S: Tensor, high: float, low: float | None, neutral: float
    ) -> None:
        """Add the statistics of each sequence's mean, with its distance from `neutral` and the
        shares beyond the bounds.
        """
        self._tally.get_statistics(f"{name}_seq", shows_range=True).add_entries(means_S)
        self._tally.get_statistics(f".deviation {name}_seq").add_entries((means_S - neutral).abs())
        self._tally.add_share(f"{name}_seq_fraction_high", means_S > high)
        if low is not None:
            self._tally.add_share(f"{name}_seq_fraction_low", means_S < low)

    def _add_masked_fractions(self, name: str, rows: CorrectionRows, is_masked_N: Tensor) -> None:
        """Add the share of rows that are masked, and the share of sequences with a masked row."""
        self._tally.add_share(f"{name}_masked_fraction", is_masked_N)
        self._tally.add_share(
            f"{name}_seq_masked_fraction", rows.sequences.sum_by_sequence(is_masked_N)[0] > 0
        )


def _replace_nonfinite(log_probs_N: Tensor) -> Tensor:
    """Return the log-probs with NONFINITE_LOG_RATIO, about no probability, in place of infinite
    ones and NaN, [N].
    """
    return log_probs_N.nan_to_num(
        nan=NONFINITE_LOG_RATIO, posinf=NONFINITE_LOG_RATIO, neginf=NONFINITE_LOG_RATIO
    )
