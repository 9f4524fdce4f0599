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
    """Of all entries added."""

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
        self.count += entries.numel()
        self.total += entries.sum().item()
        self.squares += entries.dot(entries).item()

    def add_sums(self, entries: Tensor, with_squares: bool = False) -> None:
        """Without the extremes, and the deviation where not wanted."""
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
        """Of the entries themselves, not of a population that they stand for."""
        return float(max(self.mean_square - self.mean**2, 0.0) ** 0.5)

    @property
    def effective_share(self) -> float:
        """Effective sample size as a share of all: (sum w)^2 / (n sum w^2)."""
        return self.total**2 / (self.count * self.squares) if self.squares > 0 else 0.0

    def metrics(self, name: str) -> dict[str, float]:
        """name_{mean,std,max,min}."""
        return {
            f"{name}_mean": self.mean,
            f"{name}_std": self.std,
            f"{name}_max": self.largest,
            f"{name}_min": self.smallest,
        }


class Tally:
    """Spreads and shares by name."""

    def __init__(self) -> None:
        self._spreads: dict[str, Spread] = {}

    def spread(self, name: str, entries: Tensor) -> None:
        self.of(name).add(entries)

    def share(self, name: str, is_hit: Tensor) -> None:
        """Of True among the entries."""
        self.hits(name, int(is_hit.count_nonzero()), is_hit.numel())

    def hits(self, name: str, num_hits: int, count: int) -> None:
        """A share as `num_hits` of `count`."""
        found = self.of(name)
        found.count += count
        found.total += num_hits

    def of(self, name: str) -> Spread:
        return self._spreads.setdefault(name, Spread())


PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class Rows:
    """Those of some whole samples that statistics count. Each sequence has a row."""

    log_probs_N: Tensor  # trainer's, float32
    rollout_log_probs_N: Tensor
    log_ratio_N: Tensor  # float64, of `log_mismatch`
    sequences: Sequences
    counts_S: Tensor  # rows of each

    def means(self, column_N: Tensor) -> Tensor:
        """[S] float64, of a column of numbers."""
        return self.sequences.sums(column_N)[0] / self.counts_S


class CorrectionMetrics:
    """Add every block, then read."""

    def __init__(self, params: CorrectionParams) -> None:
        self.params = params
        self._tally = Tally()

    def add(self, rows: Rows, corrected: Corrected) -> None:
        """`corrected` is of the same rows."""
        log_ratio_N = rows.log_ratio_N
        self._add_divergence(rows)
        if self.params.importance is not None and corrected.importance is not None:
            self._add_importance(rows, corrected, corrected.importance, self.params.importance)
        for one, (_, measure) in zip(self.params.filters, corrected.filters, strict=True):
            self._add_filter(rows, log_ratio_N, one, measure)
        if corrected.veto_S is not None and self.params.veto is not None:
            is_veto_N = log_ratio_N < math.log(self.params.veto)
            self._tally.share("rollout_is_catastrophic_token_fraction", is_veto_N)
            self._tally.share("rollout_is_veto_fraction", corrected.veto_S)
        if corrected.keep_N is not None:
            self._add_masked("rollout_rs", rows, ~corrected.keep_N)

    def read(self, batch_norm_factor: float | None) -> dict[str, float]:
        found = self._divergence()
        if self.params.importance is not None:
            found |= self._importance(self.params.importance)
        if batch_norm_factor is not None:
            found["rollout_is_batch_norm_factor"] = batch_norm_factor
        for one in self.params.filters:
            found |= self._filter(one)
        if self.params.veto is not None:
            names = ("rollout_is_catastrophic_token_fraction", "rollout_is_veto_fraction")
            found |= {name: self._tally.of(name).mean for name in names}
        if self.params.rejects:
            found |= self._masked("rollout_rs")
        return {PREFIX + name: value for name, value in found.items()}

    def _add_divergence(self, rows: Rows) -> None:
        tally = self._tally
        clamped_N = rows.log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        excess_N = clamped_N.expm1()  # r - 1
        tally.of("log_ratio").add_sums(rows.log_ratio_N)
        tally.of("clamped").add_sums(clamped_N)
        tally.of("excess").add_sums(excess_N, with_squares=True)
        trainer_S, engine_S = rows.means(_numbers(rows.log_probs_N)), rows.means(_numbers(rows.rollout_log_probs_N))
        tally.spread("training_log_ppl", -trainer_S)
        tally.spread("training_ppl", exp(-trainer_S))
        tally.spread("rollout_log_ppl", -engine_S)
        tally.spread("rollout_ppl", exp(-engine_S))
        diff_S = engine_S - trainer_S
        tally.spread("log_ppl_diff", diff_S)
        tally.spread("log_ppl_abs_diff", diff_S.abs())
        tally.spread("ppl_ratio", exp(diff_S))
        product_S = exp(-diff_S * rows.counts_S)
        tally.of("product_excess").add_sums(product_S - 1, with_squares=True)

    def _divergence(self) -> dict[str, float]:
        of = self._tally.of
        means = (
            *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl"),
            *("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio"),
        )
        return {
            **{name: of(name).mean for name in means},
            "kl": -of("log_ratio").mean,
            "k3_kl": of("excess").mean - of("clamped").mean,
            "log_ppl_diff_max": of("log_ppl_diff").largest,
            "log_ppl_diff_min": of("log_ppl_diff").smallest,
            "chi2_token": of("excess").mean_square + 2 * of("excess").mean,  # E[r^2] - 1, without its cancellation
            "chi2_seq": of("product_excess").mean_square + 2 * of("product_excess").mean,
        }

    def _add_importance(self, rows: Rows, corrected: Corrected, measure: Measure, importance: Importance) -> None:
        tally = self._tally
        assert corrected.weights_N is not None
        ratios, acting = measure.ratios, corrected.weights_N
        tally.spread("rollout_is", ratios)
        if measure.of_sequences:
            acting = acting.index_select(0, rows.counts_S.cumsum(0) - rows.counts_S)  # alike in a sequence: its first
        tally.spread("rollout_is_acting", acting)
        tally.share("rollout_is_ratio_fraction_high", measure.is_high)
        assert measure.is_low is not None
        tally.share("rollout_is_ratio_fraction_low", measure.is_low)
        if importance.low is not None:
            tally.share("rollout_is_oob_ratio", measure.is_outside)
        low = 1 / importance.high if importance.low is None else importance.low
        ratios_S = ratios if measure.of_sequences else rows.means(ratios)
        self._add_sequences("rollout_is", ratios_S, importance.high, low, neutral=1.0)

    def _importance(self, importance: Importance) -> dict[str, float]:
        of = self._tally.of
        acting = of("rollout_is_acting")
        names = ["rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low"]
        names += ["rollout_is_oob_ratio"] if importance.low is not None else []
        return {
            **of("rollout_is").metrics("rollout_is"),
            "rollout_is_std": acting.std,
            "rollout_is_eff_sample_size": acting.effective_share,
            **{name: of(name).mean for name in names},
            **self._sequences("rollout_is", has_low=True),
        }

    def _add_filter(self, rows: Rows, log_ratio_N: Tensor, one: Filter, measure: Measure) -> None:
        name, tally = f"rollout_rs_{one.name}", self._tally
        values = measure.ratios if measure.is_log else measure.values
        if one.level == "seq_max":
            values = values.new_zeros(values.shape).scatter_reduce_(
                0, rows.sequences.ids_T, estimates(log_ratio_N, one.estimate), "amax"
            )
        tally.spread(name, values)
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

    def _filter(self, one: Filter) -> dict[str, float]:
        name, of = f"rollout_rs_{one.name}", self._tally.of
        found = {**of(name).metrics(name), f"{name}_fraction_high": of(f"{name}_fraction_high").mean}
        if one.low is not None:
            found[f"{name}_fraction_low"] = of(f"{name}_fraction_low").mean
        if one.level == "token":
            found |= self._sequences(name, has_low=one.low is not None)
        return found | self._masked(name)

    def _add_sequences(self, name: str, means_S: Tensor, high: float, low: float | None, neutral: float) -> None:
        """Of each sequence's mean."""
        self._tally.spread(f"{name}_seq", means_S)
        self._tally.spread(f"{name}_seq_deviation", (means_S - neutral).abs())
        self._tally.share(f"{name}_seq_fraction_high", means_S > high)
        if low is not None:
            self._tally.share(f"{name}_seq_fraction_low", means_S < low)

    def _sequences(self, name: str, has_low: bool) -> dict[str, float]:
        of = self._tally.of
        shares = [f"{name}_seq_fraction_high"] + ([f"{name}_seq_fraction_low"] if has_low else [])
        return {
            **of(f"{name}_seq").metrics(f"{name}_seq"),
            f"{name}_seq_max_deviation": of(f"{name}_seq_deviation").largest,
            **{share: of(share).mean for share in shares},
        }

    def _add_masked(self, name: str, rows: Rows, is_masked_N: Tensor) -> None:
        self._tally.share(f"{name}_masked_fraction", is_masked_N)
        self._tally.share(f"{name}_seq_masked_fraction", rows.sequences.sums(is_masked_N)[0] > 0)

    def _masked(self, name: str) -> dict[str, float]:
        names = (f"{name}_masked_fraction", f"{name}_seq_masked_fraction")
        return {share: self._tally.of(share).mean for share in names}


def _numbers(log_probs_N: Tensor) -> Tensor:
    """[N]; what is not a number as a log-prob of no probability at all."""
    return log_probs_N.nan_to_num(nan=NO_NUMBER, posinf=NO_NUMBER, neginf=NO_NUMBER)
