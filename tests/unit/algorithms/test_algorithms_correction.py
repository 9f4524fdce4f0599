"""Importance weights and rejection against hand-worked numbers and plain loops in float64; presets;
borders; masks.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.metric_names import METRICS, find_matching_metric
from rlhf_megatron.algorithms.rollout_correction import step_correction as step_module
from rlhf_megatron.algorithms.rollout_correction.correction_params import (
    REJECTION_FILTERS,
    CorrectionParams,
    ImportanceWeightParams,
    RejectionFilter,
)
from rlhf_megatron.algorithms.rollout_correction.row_correction import (
    compute_log_mismatch,
    correct_rows,
)
from rlhf_megatron.algorithms.rollout_correction.step_correction import (
    StepCorrection,
    compute_step_correction,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.config import rollout_correction_rules as settings
from rlhf_megatron.config.schema import RolloutCorrectionConfig
from rlhf_megatron.ranks.workers.actor_losses import (
    parse_correction_params,
    parse_loss_side_correction,
)

LOG2 = math.log(2)


@dataclass(frozen=True)
class Step:
    """Samples as lists of log r of their response tokens; each has a prompt token of
    rubbish in front.
    """

    samples: tuple[tuple[float, ...], ...]
    is_valid: tuple[bool, ...] = ()
    engine: float = -3.0  # log-prob of every token

    def correct(self, params: CorrectionParams) -> StepCorrection:
        lengths = torch.tensor([1 + len(sample) for sample in self.samples], dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
        mask[offsets[:-1]] = False
        log_ratio = torch.tensor(
            [x for sample in self.samples for x in (float("nan"), *sample)], dtype=torch.float64
        )
        engine = torch.full_like(log_ratio, self.engine)
        valid = torch.tensor(self.is_valid or (True,) * len(self.samples), dtype=torch.bool)
        return compute_step_correction(engine + log_ratio, engine, mask, valid, offsets, params)

    def rows(self, column: Tensor) -> list[list[float]]:
        """A column of tokens by sample, without the prompt tokens."""
        rows = iter(column.tolist())
        return [[next(rows) for _ in range(1 + len(sample))][1:] for sample in self.samples]


# Ratios: sample A 2, 1/2, 1; sample B 4, 1; sample C 1/4, 1/4; log r in units of log 2.
ABC = Step(((LOG2, -LOG2, 0.0), (2 * LOG2, 0.0), (-2 * LOG2, -2 * LOG2)))


def weights_of(importance: ImportanceWeightParams, step: Step = ABC) -> list[list[float]]:
    found = step.correct(CorrectionParams(importance)).weights_T
    assert found is not None
    return step.rows(found)


def kept_by(
    *filters: RejectionFilter, veto: float | None = None, step: Step = ABC
) -> list[list[float]]:
    found = step.correct(CorrectionParams(filters=filters, veto=veto)).keep_T
    assert found is not None
    return step.rows(found)


def test_weights_by_hand() -> None:
    assert weights_of(ImportanceWeightParams("token", 3.0)) == [
        pytest.approx([2, 0.5, 1]),
        pytest.approx([3, 1]),
        pytest.approx([0.25, 0.25]),
    ]
    # products: 2 * 1/2 * 1 = 1; 4 * 1 = 4, cut at 3; 1/4 * 1/4 = 1/16
    assert weights_of(ImportanceWeightParams("sequence", 3.0)) == [
        pytest.approx([1, 1, 1]),
        pytest.approx([3, 3]),
        pytest.approx([1 / 16, 1 / 16]),
    ]
    # IcePop keeps 1/2 .. 3 as it is and makes the rest 0, above and below
    assert weights_of(ImportanceWeightParams("token", 3.0, 0.4)) == [
        pytest.approx([2, 0.5, 1]),
        pytest.approx([0, 1]),
        pytest.approx([0, 0]),
    ]
    assert weights_of(ImportanceWeightParams("sequence", 3.0, 0.4))[1:] == [[0, 0], [0, 0]]


def test_the_borders_of_icepop_and_of_filters_belong_to_the_inside() -> None:
    """An engine that is sure leaves log r as it is, to the last bit."""
    on_them = Step(((LOG2, -LOG2, 0.0),), engine=0.0)
    assert weights_of(ImportanceWeightParams("token", 2.0, 0.5), on_them)[0] == pytest.approx(
        [2, 0.5, 1]
    )
    just_outside = Step(((LOG2 * (1 + 1e-12), -LOG2 * (1 + 1e-12)),), engine=0.0)
    assert weights_of(ImportanceWeightParams("token", 2.0, 0.5), just_outside) == [[0, 0]]
    assert kept_by(RejectionFilter("token_k1", 2.0, 0.5), step=on_them) == [[True, True, True]]
    assert kept_by(RejectionFilter("token_k1", 2.0, 0.5), step=just_outside) == [[False, False]]
    k2 = 0.5 * LOG2**2
    assert kept_by(RejectionFilter("token_k2", k2), step=on_them) == [[True, True, True]]
    assert kept_by(RejectionFilter("token_k2", k2 * 0.999), step=on_them) == [[False, False, True]]


# A: sum 0, mean 0; B: sum 2, mean 1; C: sum -4, mean -2 (log 2). In nats^2: k2 of log 2 is 0.2402,
# of 2 log 2 0.9609. k3 = r - 1 - log r: of 2 0.3069, of 1/2 0.1931, of 4 1.6137, of 1/4
# 0.6363, of 1 0.
T = True
F = False
BY_HAND = [
    (RejectionFilter("token_k1", 5.0, 0.4), [[T, T, T], [T, T], [F, F]]),
    (RejectionFilter("token_k1", 3.0, 0.2), [[T, T, T], [F, T], [T, T]]),
    (RejectionFilter("token_k2", 0.9), [[T, T, T], [F, T], [F, F]]),
    (RejectionFilter("token_k3", 0.25), [[F, T, T], [F, T], [F, F]]),
    (RejectionFilter("seq_sum_k1", 3.0, 0.05), [[T, T, T], [F, F], [T, T]]),  # products 1, 4, 1/16
    (RejectionFilter("seq_sum_k1", 5.0, 0.1), [[T, T, T], [T, T], [F, F]]),
    (RejectionFilter("seq_sum_k2", 0.95), [[T, T, T], [F, F], [F, F]]),  # 0.4805, 0.9609, 1.9218
    (RejectionFilter("seq_sum_k3", 1.3), [[T, T, T], [F, F], [T, T]]),  # 0.5, 1.6137, 1.2726
    (RejectionFilter("seq_mean_k1", 1.9, 0.2), [[T, T, T], [F, F], [T, T]]),  # 1, 2, 1/4
    (RejectionFilter("seq_mean_k2", 0.5), [[T, T, T], [T, T], [F, F]]),  # 0.1602, 0.4805, 0.9609
    (RejectionFilter("seq_mean_k3", 0.7), [[T, T, T], [F, F], [T, T]]),  # 0.1667, 0.8069, 0.6363
    (RejectionFilter("seq_max_k2", 0.5), [[T, T, T], [F, F], [F, F]]),  # 0.2402, 0.9609, 0.9609
    (RejectionFilter("seq_max_k3", 1.0), [[T, T, T], [F, F], [T, T]]),  # 0.3069, 1.6137, 0.6363
]


@pytest.mark.parametrize(("one", "expected"), BY_HAND, ids=lambda x: getattr(x, "name", ""))
def test_filters_by_hand(one: RejectionFilter, expected: list[list[bool]]) -> None:
    assert kept_by(one) == expected


def test_every_filter_is_worked_by_hand() -> None:
    assert {one.name for one, _ in BY_HAND} == set(REJECTION_FILTERS) == set(settings.FILTERS)


def test_bounds_of_k1_that_are_not_reciprocal_are_of_the_ratio() -> None:
    """Compared with -log r they would keep 0.2 .. 2 in place of 0.5 .. 5."""
    step = Step(((math.log(4.9), math.log(0.51), math.log(0.21), math.log(5.1)),))
    assert kept_by(RejectionFilter("token_k1", 5.0, 0.5), step=step) == [[T, T, F, F]]


def test_all_filters_must_pass_and_the_veto_drops_whole_sequences() -> None:
    both = kept_by(RejectionFilter("token_k3", 0.25), RejectionFilter("seq_max_k2", 0.5))
    assert both == [[F, T, T], [F, F], [F, F]]
    assert kept_by(veto=0.3) == [[T, T, T], [T, T], [F, F]]
    assert kept_by(RejectionFilter("token_k1", 3.0, 0.01), veto=0.6) == [[F, F, F], [F, T], [F, F]]


def exp(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def looped(step: Step, params: CorrectionParams) -> tuple[list[list[float]], list[list[bool]]]:
    """The definitions once more, token by token: (weights, kept)."""
    weights = []
    kept = []
    for sample in step.samples:
        k = {
            "k1": list(sample),
            "k2": [x * x / 2 for x in sample],
            "k3": [math.expm1(min(max(x, -20), 20)) - min(max(x, -20), 20) for x in sample],
        }
        of_sample = []
        for x in sample:
            weight = 1.0
            if params.importance is not None:
                log = x if params.importance.level == "token" else sum(sample)
                weight = exp(log)
                if params.importance.low is None:
                    weight = min(weight, params.importance.high)
                elif not params.importance.low <= math.exp(log) <= params.importance.high:
                    weight = 0.0
            of_sample.append(weight)
        weights.append(of_sample)
        passes = [params.veto is None or all(math.exp(x) >= params.veto for x in sample)] * len(
            sample
        )
        for one in params.filters:
            column = k[one.estimate]
            for t in range(len(sample)):
                value = {
                    "token": column[t],
                    "seq_sum": sum(column),
                    "seq_mean": sum(column) / len(column),
                    "seq_max": max(column),
                }[one.level]
                if one.estimate == "k1":
                    value = math.exp(value)
                passes[t] = (
                    passes[t] and (one.low is None or value >= one.low) and value <= one.high
                )
        kept.append(passes)
    return weights, kept


def drawn(seed: int, num_samples: int = 12, scale: float = 0.8) -> Step:
    rng = random.Random(seed)
    samples = tuple(
        tuple(rng.gauss(0, scale) for _ in range(rng.choice((0, 1, 1, 2, 5, 9))))
        for _ in range(num_samples)
    )
    return Step(samples)


CASES = [
    CorrectionParams(importance, filters=filters, veto=veto)
    for importance in (
        ImportanceWeightParams("token"),
        ImportanceWeightParams("sequence", 1.5),
        ImportanceWeightParams("token", 5.0, 0.5),
    )
    for filters in (
        (RejectionFilter("token_k1", 2.0, 0.4), RejectionFilter("seq_mean_k3", 0.4)),
        (
            RejectionFilter("seq_sum_k1", 6.0, 0.1),
            RejectionFilter("token_k2", 1.0),
            RejectionFilter("seq_max_k3", 2.0),
        ),
        (
            RejectionFilter("seq_mean_k1", 1.5, 0.6),
            RejectionFilter("seq_sum_k2", 2.0),
            RejectionFilter("token_k3", 1.0),
        ),
        (
            RejectionFilter("seq_sum_k3", 3.0),
            RejectionFilter("seq_mean_k2", 0.6),
            RejectionFilter("seq_max_k2", 2.0),
        ),
    )
    for veto in (None, 0.15)
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_everything_equals_a_plain_loop(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the step is worked on in blocks of a few tokens."""
    params = CASES[case]
    step = drawn(case, num_samples=60)
    weights, kept = looped(step, params)
    assert any(x for row in kept for x in row) and not all(x for row in kept for x in row), (
        "the case decides nothing"
    )
    whole = step.correct(params)
    monkeypatch.setattr(step_module, "BLOCK_TOKENS", 4)
    for found in (whole, step.correct(params)):
        assert found.weights_T is not None and found.keep_T is not None
        for mine, theirs in zip(step.rows(found.weights_T), weights, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        assert step.rows(found.keep_T) == kept
        assert found.metrics == pytest.approx(whole.metrics, rel=1e-12, abs=1e-13)


def test_rows_in_any_order_and_over_ranks_are_the_same() -> None:
    """What the loss does: rows of whole sequences in the order of a micro-batch, and a share of
    them on each rank.
    """
    step = drawn(5)
    params = CASES[-1]
    log_ratio_N = torch.tensor([x for sample in step.samples for x in sample], dtype=torch.float64)
    ids_N = torch.arange(len(step.samples)).repeat_interleave(
        torch.tensor([len(s) for s in step.samples])
    )
    whole = correct_rows(log_ratio_N, RowSequences(ids_N, len(step.samples)), params)
    weights, kept = looped(step, params)
    assert whole.weights_N is not None and whole.keep_N is not None
    assert whole.weights_N.tolist() == pytest.approx([w for row in weights for w in row], rel=1e-12)
    assert whole.keep_N.tolist() == [x for row in kept for x in row]
    order = torch.randperm(len(ids_N), generator=torch.Generator().manual_seed(1))
    # the last rank has no row
    shares = [order[: len(order) // 3], order[len(order) // 3 :], order[:0]]
    sums: list[Tensor] = []
    for share in shares:  # first pass: each rank's own sums

        def keep(mine: Tensor) -> Tensor:
            sums.append(mine)
            return mine

        correct_rows(
            log_ratio_N[share], RowSequences(ids_N[share], len(step.samples), keep), params
        )
    total = torch.stack(sums).sum(0)
    for share in shares:
        found = correct_rows(
            log_ratio_N[share],
            RowSequences(ids_N[share], len(step.samples), lambda mine: total),
            params,
        )
        assert found.keep_N is not None and found.weights_N is not None
        assert torch.equal(found.keep_N, whole.keep_N[share])
        assert torch.allclose(found.weights_N, whole.weights_N[share], rtol=1e-12, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_norm_divides_by_the_mean_over_what_is_kept(level: str) -> None:
    """Tokens: of 2, 1/2, 1 | 3 (cut), 1 | and C rejected: 7.5 / 5. Sequences: 1 and 3: 2."""
    params = CorrectionParams(ImportanceWeightParams(level, 3.0), True, veto=0.3)
    step = Step(ABC.samples)
    found = step.correct(params)
    assert found.batch_norm_factor == pytest.approx({"token": 1.5, "sequence": 2.0}[level])
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == found.batch_norm_factor
    plain = step.correct(CorrectionParams(ImportanceWeightParams(level, 3.0), veto=0.3))
    assert found.weights_T is not None and plain.weights_T is not None
    for mine, theirs in zip(step.rows(found.weights_T), step.rows(plain.weights_T), strict=True):
        assert mine == pytest.approx([w / found.batch_norm_factor for w in theirs])


def test_samples_of_masked_status_are_in_no_statistic_and_are_corrected_all_the_same() -> None:
    params = CorrectionParams(
        ImportanceWeightParams("token"), True, (RejectionFilter("token_k1", 3.0, 0.3),), veto=1e-3
    )
    alone = Step(ABC.samples[:2]).correct(params)
    with_masked = Step((*ABC.samples[:2], (5.0, -9.0)), (True, True, False)).correct(params)
    assert with_masked.metrics == pytest.approx(alone.metrics, rel=1e-12)
    assert with_masked.batch_norm_factor == pytest.approx(alone.batch_norm_factor)
    assert Step((*ABC.samples[:2], (5.0, -9.0))).rows(with_masked.keep_T)[2] == [F, F]  # type: ignore[arg-type]


ALL = CorrectionParams(
    ImportanceWeightParams("sequence", 2.0, 0.5),
    True,
    tuple(
        RejectionFilter(name, 2.0, 0.5 if name.endswith("k1") else None)
        for name in REJECTION_FILTERS
    ),
    veto=1e-3,
)


@pytest.mark.parametrize(
    "step",
    [
        Step(()),
        Step(((),)),
        Step(((), ())),
        Step(((0.0,),)),
        Step(((50.0,), (-50.0,), (50.0, -50.0))),
        Step(((50.0, 50.0),) * 3),
        Step(((float("nan"), 0.0), (float("inf"),), (float("-inf"), 0.1))),
        Step(ABC.samples, (False, False, False)),
    ],
    ids=[
        "no sample",
        "no token",
        "no tokens",
        "one token",
        "+-50",
        "all rejected",
        "not numbers",
        "none valid",
    ],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_is_ever_not_a_number(step: Step, level: str) -> None:
    for importance in (ImportanceWeightParams(level, 2.0), ImportanceWeightParams(level, 2.0, 0.5)):
        found = step.correct(replace(ALL, importance=importance))
        assert all(math.isfinite(value) for value in found.metrics.values()), found.metrics
        assert found.weights_T is not None and found.weights_T.isfinite().all()
        assert found.batch_norm_factor is not None and found.batch_norm_factor > 0
        unlisted = [key for key in found.metrics if find_matching_metric(METRICS, key) is None]
        assert not unlisted
    bad = [math.isnan(x) or math.isinf(x) or abs(x) > 40 for sample in step.samples for x in sample]
    kept = [x for row in step.rows(found.keep_T) for x in row]  # type: ignore[arg-type]
    assert not any(b and k for b, k in zip(bad, kept, strict=True))


def test_metrics_by_hand() -> None:
    found = ABC.correct(
        CorrectionParams(
            ImportanceWeightParams("token", 3.0), filters=(RejectionFilter("token_k1", 3.0, 0.3),)
        )
    )
    m = {key.removeprefix("rollout_corr/"): value for key, value in found.metrics.items()}
    ratios = [2, 0.5, 1, 4, 1, 0.25, 0.25]
    acting = [2, 0.5, 1, 3, 1, 0.25, 0.25]
    assert m["rollout_is_mean"] == pytest.approx(sum(ratios) / 7)
    assert (m["rollout_is_max"], m["rollout_is_min"]) == (pytest.approx(4), pytest.approx(0.25))
    mean = sum(acting) / 7
    square = sum(w * w for w in acting) / 7
    assert m["rollout_is_std"] == pytest.approx(math.sqrt(square - mean**2))
    assert m["rollout_is_eff_sample_size"] == pytest.approx(mean**2 / square)
    assert m["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 7)  # above 3
    assert m["rollout_is_ratio_fraction_low"] == pytest.approx(2 / 7)  # below 1/3
    seq = [3.5 / 3, 2.5, 0.25]
    assert m["rollout_is_seq_mean"] == pytest.approx(sum(seq) / 3)
    assert (m["rollout_is_seq_max"], m["rollout_is_seq_min"]) == (
        pytest.approx(2.5),
        pytest.approx(0.25),
    )
    assert m["rollout_is_seq_max_deviation"] == pytest.approx(1.5)
    assert (m["rollout_is_seq_fraction_high"], m["rollout_is_seq_fraction_low"]) == (
        0,
        pytest.approx(1 / 3),
    )
    assert (
        m["rollout_rs_masked_fraction"]
        == m["rollout_rs_token_k1_masked_fraction"]
        == pytest.approx(3 / 7)
    )
    assert m["rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert m["rollout_rs_token_k1_mean"] == pytest.approx(sum(ratios) / 7)
    assert m["rollout_rs_token_k1_fraction_high"] == pytest.approx(1 / 7)
    assert m["rollout_rs_token_k1_fraction_low"] == pytest.approx(2 / 7)
    logs = [LOG2, -LOG2, 0, 2 * LOG2, 0, -2 * LOG2, -2 * LOG2]
    assert m["kl"] == pytest.approx(-sum(logs) / 7)
    assert m["k3_kl"] == pytest.approx(
        sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / 7
    )
    assert m["chi2_token"] == pytest.approx(sum(r * r for r in ratios) / 7 - 1)
    assert m["chi2_seq"] == pytest.approx((1 + 16 + 1 / 256) / 3 - 1)
    # the engine's log-prob is -3 everywhere, the trainer's means are -3, -3 + log 2, -3 - 2 log 2
    assert m["rollout_log_ppl"] == pytest.approx(3) and m["rollout_ppl"] == pytest.approx(
        math.exp(3)
    )
    assert m["training_log_ppl"] == pytest.approx(3 + LOG2 / 3)
    assert m["training_ppl"] == pytest.approx(math.exp(3) * (1 + 0.5 + 4) / 3)
    assert m["log_ppl_diff"] == pytest.approx(LOG2 / 3) and m["log_ppl_abs_diff"] == pytest.approx(
        LOG2
    )
    assert (m["log_ppl_diff_max"], m["log_ppl_diff_min"]) == (
        pytest.approx(2 * LOG2),
        pytest.approx(-LOG2),
    )
    assert m["ppl_ratio"] == pytest.approx((1 + 0.5 + 4) / 3)
    maxima = ABC.correct(
        CorrectionParams(filters=(RejectionFilter("seq_max_k2", 0.5),), veto=0.3)
    ).metrics
    k2 = 0.5 * LOG2**2
    assert maxima["rollout_corr/rollout_rs_seq_max_k2_mean"] == pytest.approx(
        (k2 + 4 * k2 + 4 * k2) / 3
    )
    assert maxima["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 3)
    assert maxima["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(2 / 7)


def test_log_mismatch_is_float64_and_a_number() -> None:
    found = compute_log_mismatch(
        torch.tensor([-1.0, float("nan"), 0.0]), torch.tensor([-1.5, -1.0, float("-inf")])
    )
    assert found.dtype == torch.float64 and found.tolist() == [0.5, -1000.0, -1000.0]


# name -> mode, loss, level, bounds of weights, filter, its bounds: what users of the names expect
PRESETS = {
    "disabled": ("decoupled", None, None, None, None, None),
    "decoupled_token_is": ("decoupled", None, "token", (None, 2.0), None, None),
    "decoupled_seq_is": ("decoupled", None, "sequence", (None, 2.0), None, None),
    "decoupled_token_icepop": ("decoupled", None, "token", (0.5, 5.0), None, None),
    "decoupled_seq_is_rs": ("decoupled", None, "sequence", (None, 2.0), "seq_sum_k1", (0.5, 2.0)),
    "decoupled_geo_rs": ("decoupled", None, None, None, "seq_mean_k1", (0.999, 1.001)),
    "decoupled_geo_rs_seq_tis": (
        "decoupled",
        None,
        "sequence",
        (None, 2.0),
        "seq_mean_k1",
        (0.999, 1.001),
    ),
    "decoupled_geo_rs_token_tis": (
        "decoupled",
        None,
        "token",
        (None, 2.0),
        "seq_mean_k1",
        (0.999, 1.001),
    ),
    "decoupled_k3_rs": ("decoupled", None, None, None, "seq_mean_k3", (None, 0.01)),
    "decoupled_k3_rs_seq_tis": (
        "decoupled",
        None,
        "sequence",
        (None, 2.0),
        "seq_mean_k3",
        (None, 0.01),
    ),
    "decoupled_k3_rs_token_tis": (
        "decoupled",
        None,
        "token",
        (None, 2.0),
        "seq_mean_k3",
        (None, 0.01),
    ),
    "bypass_ppo_clip": ("bypass", "ppo_clip", None, None, None, None),
    "bypass_ppo_clip_geo_rs": ("bypass", "ppo_clip", None, None, "seq_mean_k1", (0.999, 1.001)),
    "bypass_ppo_clip_k3_rs": ("bypass", "ppo_clip", None, None, "seq_mean_k3", (None, 0.01)),
    "bypass_pg_is": ("bypass", "reinforce", "sequence", (None, 2.0), None, None),
    "bypass_pg_token_icepop": ("bypass", "reinforce", "token", (0.5, 5.0), None, None),
    "bypass_pg_geo_rs": ("bypass", "reinforce", None, None, "seq_mean_k1", (0.999, 1.001)),
    "bypass_pg_geo_rs_seq_tis": (
        "bypass",
        "reinforce",
        "sequence",
        (None, 2.0),
        "seq_mean_k1",
        (0.999, 1.001),
    ),
    "bypass_pg_geo_rs_token_tis": (
        "bypass",
        "reinforce",
        "token",
        (None, 2.0),
        "seq_mean_k1",
        (0.999, 1.001),
    ),
}


def test_presets_do_what_their_names_say() -> None:
    assert set(PRESETS) == set(settings.PRESETS)
    for name, (mode, loss, level, cut, one, bounds) in PRESETS.items():
        section = RolloutCorrectionConfig(preset=name)
        resolved = settings.resolve_rollout_correction(section)
        params = parse_correction_params(section)
        assert resolved.mode == mode and (loss is None or resolved.loss_type == loss), name
        expected = (
            None if level is None or cut is None else ImportanceWeightParams(level, cut[1], cut[0])
        )
        filters = (
            () if one is None or bounds is None else (RejectionFilter(one, bounds[1], bounds[0]),)
        )
        assert params == CorrectionParams(expected, filters=filters), name
        in_the_loss = mode == "bypass" and (level is not None or one is not None)
        assert parse_loss_side_correction(section) == (params if in_the_loss else None), name


def test_settings_go_over_the_preset() -> None:
    section = RolloutCorrectionConfig(
        "decoupled_k3_rs_token_tis",
        rollout_is_threshold="0.2_4",
        rollout_rs=("token_k1",),
        rollout_rs_threshold=("4",),
    )
    assert parse_correction_params(section) == CorrectionParams(
        ImportanceWeightParams("token", 4.0, 0.2), filters=(RejectionFilter("token_k1", 4.0, 0.25),)
    )
    assert not parse_correction_params(
        RolloutCorrectionConfig("decoupled_k3_rs", rollout_rs=())
    ).filters


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ImportanceWeightParams("group"),  # type: ignore[arg-type]
        lambda: ImportanceWeightParams("token", 0.0),
        lambda: ImportanceWeightParams("token", 2.0, 3.0),
        lambda: RejectionFilter("seq_max_k1", 2.0, 0.5),
        lambda: RejectionFilter("token_k1", 2.0),
        lambda: RejectionFilter("token_k2", 2.0, 0.5),
        lambda: RejectionFilter("token_k3", float("nan")),
        lambda: CorrectionParams(veto=1.0),
        lambda: CorrectionParams(use_batch_norm=True),
        lambda: CorrectionParams(
            filters=(RejectionFilter("token_k2", 1.0), RejectionFilter("token_k2", 2.0))
        ),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"\."):
        wrong()  # type: ignore[operator]
