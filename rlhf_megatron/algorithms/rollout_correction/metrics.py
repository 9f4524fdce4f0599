"""Metrics of a correction, `rollout_corr/*` under verl's names, gathered block by block. Tokens and sequences that are
counted are those given: response tokens of valid samples; a sequence without any is none.

Weights and ratios are those before cutting, but for `rollout_is_std` and `rollout_is_eff_sample_size`, which are of
what acts. What is shown of a k1 filter is the ratio that its bounds are bounds of.

A Tally keeps statistics of columns that come block by block: means, deviations, extremes and shares, all finite.
"""
# N rows, S sequences

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rlhf_megatron.algorithms.losses.kl import MAX_LOG_RATIO
from rlhf_megatron.algorithms.rollout_correction.params import CorrectionParams, Filter, Importance
from rlhf_megatron.algorithms.rollout_correction.ratios import NO_NUMBER, Corrected, Measure, estimates, exp
from rlhf_megatron.algorithms.sequences import Sequences


@dataclass
class Spread:
    """Sums and extremes of all entries added."""

    shows_range: bool = False
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    smallest: float = 0.0

    def add(self, entries: Tensor) -> None:
        """[any] float64."""
        if not entries.numel():
            return
        low, high = (bound.item() for bound in entries.aminmax())
        self.largest = high if self.count == 0 else max(self.largest, high)
        self.smallest = low if self.count == 0 else min(self.smallest, low)
        self.add_sums(entries, with_squares=True)

    def add_sums(self, entries: Tensor, with_squares: bool = False) -> None:
        """Add entries without their extremes, and without the deviation unless `with_squares`."""
        self.count += entries.numel()
        self.total += entries.sum().item()
        if with_squares:
            self.squares += entries.dot(entries).item()

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    @property
    def mean_square(self) -> float:
        return self.squares / max(self.count, 1)

    @property
    def std(self) -> float:
        """The deviation of the entries themselves, not of a population that they stand for."""
        return float(max(self.mean_square - self.mean**2, 0.0) ** 0.5)

    @property
    def effective_share(self) -> float:
        """Effective sample size as a share of all: (sum w)^2 / (n sum w^2)."""
        return self.total**2 / (self.count * self.squares) if self.squares > 0 else 0.0

    def metrics(self, name: str) -> dict[str, float]:
        """name, the mean; or name_{mean,std,max,min}."""
        if not self.shows_range:
            return {name: self.mean}
        found = {"mean": self.mean, "std": self.std, "max": self.largest, "min": self.smallest}
        return {f"{name}_{kind}": value for kind, value in found.items()}


class Tally(dict[str, Spread]):
    """Spreads by the name of a metric. A name that begins with a point is no metric itself, but is used to compute
    one.
    """

    def of(self, name: str, shows_range: bool = False) -> Spread:
        return self.setdefault(name, Spread(shows_range))

    def share(self, name: str, is_hit: Tensor) -> None:
        """Count the share of True among the entries."""
        self.hits(name, int(is_hit.count_nonzero()), is_hit.numel())

    def hits(self, name: str, num_hits: int, count: int) -> None:
        """A share as `num_hits` of `count`."""
        found = self.of(name)
        found.count += count
        found.total += num_hits


PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class Rows:
    """The rows of some whole samples that statistics count. Each sequence has at least one row."""

    log_probs_N: Tensor  # trainer's, float32
    rollout_log_probs_N: Tensor
    log_ratio_N: Tensor  # float64, of `log_mismatch`
    sequences: Sequences
    counts_S: Tensor  # rows of each

    def means(self, column_N: Tensor) -> Tensor:
        """[S] float64, of a column of numbers."""
        return self.sequences.sums(column_N)[0] / self.counts_S


class CorrectionMetrics:
    """Add every block, one at least, then read."""

    def __init__(self, params: CorrectionParams) -> None:
        self.params = params
        self._tally = Tally()

    def add(self, rows: Rows, corrected: Corrected) -> None:
        """`corrected` is of the same rows."""
        self._add_divergence(rows)
        if self.params.importance is not None and corrected.importance is not None:
            self._add_importance(rows, corrected, corrected.importance, self.params.importance)
        for one, (_, measure) in zip(self.params.filters, corrected.filters, strict=True):
            self._add_filter(rows, one, measure)
        if corrected.veto_S is not None and self.params.veto is not None:
            is_veto_N = rows.log_ratio_N < math.log(self.params.veto)
            self._tally.share("rollout_is_catastrophic_token_fraction", is_veto_N)
            self._tally.share("rollout_is_veto_fraction", corrected.veto_S)
        if corrected.keep_N is not None:
            self._add_masked("rollout_rs", rows, ~corrected.keep_N)

    def read(self, batch_norm_factor: float | None) -> dict[str, float]:
        of = self._tally.of
        found: dict[str, float] = {}
        for name, spread in tuple(self._tally.items()):
            found |= {} if name.startswith(".") else spread.metrics(name)
            if name.startswith(".deviation "):
                found[f"{name.partition(' ')[2]}_max_deviation"] = spread.largest
        difference, excess, product = of("log_ppl_diff"), of(".excess"), of(".product excess")
        found |= {
            "kl": -of(".log ratio").mean,
            "k3_kl": excess.mean - of(".clamped").mean,
            "log_ppl_diff_max": difference.largest,
            "log_ppl_diff_min": difference.smallest,
            "chi2_token": excess.mean_square + 2 * excess.mean,  # E[r^2] - 1, without its cancellation
            "chi2_seq": product.mean_square + 2 * product.mean,
        }
        if self.params.importance is not None:
            acting = of(".acting")
            found |= {"rollout_is_std": acting.std, "rollout_is_eff_sample_size": acting.effective_share}
        if batch_norm_factor is not None:
            found["rollout_is_batch_norm_factor"] = batch_norm_factor
        return {PREFIX + name: value for name, value in found.items()}

    def _add_divergence(self, rows: Rows) -> None:
        of = self._tally.of
        clamped_N = rows.log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        of(".log ratio").add_sums(rows.log_ratio_N)
        of(".clamped").add_sums(clamped_N)
        of(".excess").add_sums(clamped_N.expm1(), with_squares=True)  # r - 1
        trainer_S, engine_S = rows.means(_numbers(rows.log_probs_N)), rows.means(_numbers(rows.rollout_log_probs_N))
        diff_S = engine_S - trainer_S
        for name, column_S in (
            ("training_log_ppl", -trainer_S),
            ("training_ppl", exp(-trainer_S)),
            ("rollout_log_ppl", -engine_S),
            ("rollout_ppl", exp(-engine_S)),
            ("log_ppl_diff", diff_S),
            ("log_ppl_abs_diff", diff_S.abs()),
            ("ppl_ratio", exp(diff_S)),
        ):
            of(name).add(column_S)
        of(".product excess").add_sums(exp(-diff_S * rows.counts_S) - 1, with_squares=True)

    def _add_importance(self, rows: Rows, corrected: Corrected, measure: Measure, importance: Importance) -> None:
        tally = self._tally
        assert corrected.weights_N is not None and measure.is_low is not None
        ratios, acting = measure.ratios, corrected.weights_N
        tally.of("rollout_is", shows_range=True).add(ratios)
        if measure.of_sequences:
            acting = acting.index_select(0, rows.counts_S.cumsum(0) - rows.counts_S)  # alike in a sequence: its first
        tally.of(".acting").add(acting)
        tally.share("rollout_is_ratio_fraction_high", measure.is_high)
        tally.share("rollout_is_ratio_fraction_low", measure.is_low)
        if importance.low is not None:
            tally.share("rollout_is_oob_ratio", measure.is_outside)
        low = 1 / importance.high if importance.low is None else importance.low
        ratios_S = ratios if measure.of_sequences else rows.means(ratios)
        self._add_sequences("rollout_is", ratios_S, importance.high, low, neutral=1.0)

    def _add_filter(self, rows: Rows, one: Filter, measure: Measure) -> None:
        name, tally = f"rollout_rs_{one.name}", self._tally
        values = measure.ratios if measure.is_log else measure.values
        if one.level == "seq_max":
            values = values.new_zeros(values.shape).scatter_reduce_(
                0, rows.sequences.ids_T, estimates(rows.log_ratio_N, one.estimate), "amax"
            )
        tally.of(name, shows_range=True).add(values)
        tally.share(f"{name}_fraction_high", measure.is_high)
        if measure.is_low is not None:
            tally.share(f"{name}_fraction_low", measure.is_low)
        if measure.of_sequences:
            num_masked = int(rows.counts_S.dot(measure.is_outside.to(rows.counts_S.dtype)))
            tally.hits(f"{name}_masked_fraction", num_masked, rows.log_ratio_N.numel())
            tally.share(f"{name}_seq_masked_fraction", measure.is_outside)
        else:
            self._add_masked(name, rows, measure.is_outside)
            self._add_sequences(name, rows.means(values), one.high, one.low, neutral=1.0 if measure.is_log else 0.0)

    def _add_sequences(self, name: str, means_S: Tensor, high: float, low: float | None, neutral: float) -> None:
        """Add statistics of each sequence's mean."""
        self._tally.of(f"{name}_seq", shows_range=True).add(means_S)
        self._tally.of(f".deviation {name}_seq").add((means_S - neutral).abs())
        self._tally.share(f"{name}_seq_fraction_high", means_S > high)
        if low is not None:
            self._tally.share(f"{name}_seq_fraction_low", means_S < low)

    def _add_masked(self, name: str, rows: Rows, is_masked_N: Tensor) -> None:
        self._tally.share(f"{name}_masked_fraction", is_masked_N)
        self._tally.share(f"{name}_seq_masked_fraction", rows.sequences.sums(is_masked_N)[0] > 0)


def _numbers(log_probs_N: Tensor) -> Tensor:
    """[N]; what is not a number as a log-prob of no probability at all."""
    return log_probs_N.nan_to_num(nan=NO_NUMBER, posinf=NO_NUMBER, neginf=NO_NUMBER)
