"""Intervals against numbers worked out by hand; what is left out of long curves, samples, traces
and histograms.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report_samples import step_row, write_run_dir

from rlhf_megatron.controller.observe.report.chart_catalogue import ChartSpec
from rlhf_megatron.controller.observe.report.charts import (
    make_section_charts,
    match_metric_keys,
    round_significant,
    select_curve_points,
    select_evenly_spaced,
)
from rlhf_megatron.controller.observe.report.comparison_page import (
    estimate_mean_difference,
    estimate_mean_over_runs,
)
from rlhf_megatron.controller.observe.report.page_payload import (
    MAX_STEP_RANGES,
    MAX_TIMELINE_STEPS,
    make_mismatch_histograms,
    make_timeline,
)
from rlhf_megatron.controller.observe.report.run_files import (
    LoggedSample,
    MetricRow,
    MismatchGroup,
    MismatchStep,
    TraceSpan,
    read_run_files,
)
from rlhf_megatron.controller.observe.report.run_overview import (
    IntervalEstimate,
    estimate_accuracy_gain,
    estimate_mean_reward,
    format_duration,
)
from rlhf_megatron.controller.observe.report.run_sections import choose_page_samples, shorten_text


def test_the_band_of_the_reward_is_over_the_samples_that_count(tmp_path: Path) -> None:
    # 8 samples, a quarter of them masked: 6. Half width 1.95996 x 0.5 / sqrt(6) = 0.40008.
    run = read_run_files(
        write_run_dir(
            tmp_path / "a", [step_row(1, 0.5, **{"reward/masked": 0.25}), step_row(2, 0.75)]
        )
    )
    (series,) = make_section_charts(run, "reward")[0].series
    assert series.low is not None and series.high is not None
    assert (series.low[0], series.high[0]) == pytest.approx(
        (0.5 - 0.40008, 0.5 + 0.40008), abs=1e-5
    )
    assert series.high[1] == pytest.approx(0.75 + 1.959964 * 0.5 / math.sqrt(8), abs=1e-5)


def test_without_a_deviation_there_is_no_band_and_a_reason(tmp_path: Path) -> None:
    row = step_row(1, 0.5)
    del row["critic/rewards/std"]
    chart = make_section_charts(read_run_files(write_run_dir(tmp_path / "a", [row])), "reward")[0]
    assert chart.series[0].low is None and "wrote no critic/rewards/std" in chart.note


def test_the_mean_of_several_steps() -> None:
    # Variance of a step's mean: 0.5^2 / 8 = 1/32; of the mean of two: 2/32 / 4 = 1/64;
    # deviation 1/8.
    rows = [MetricRow("step", i, 0.0, step_row(i, reward)) for i, reward in ((1, 0.25), (2, 0.75))]
    found = estimate_mean_reward(rows)
    assert found is not None and found.low is not None
    assert (found.value, found.low) == (0.5, pytest.approx(0.5 - 1.959964 / 8))
    assert estimate_mean_reward([]) is None


def test_the_interval_of_a_gain() -> None:
    # sqrt(0.1^2 + 0.05^2) = 0.111803 below, sqrt(0.04^2 + 0.12^2) = 0.126491 above.
    found = estimate_accuracy_gain(
        IntervalEstimate(0.2, 0.08, 0.25), IntervalEstimate(0.6, 0.5, 0.64)
    )
    assert found.low == pytest.approx(0.4 - 0.111803, abs=1e-6) and found.high == pytest.approx(
        0.4 + 0.126491, abs=1e-6
    )
    assert estimate_accuracy_gain(IntervalEstimate(0.2), IntervalEstimate(0.6)).low is None


def test_the_interval_over_seeds() -> None:
    # Mean 0.5, deviation 0.1, t(2) = 4.302653: half width 4.302653 x 0.1 / sqrt(3) = 0.248414.
    found = estimate_mean_over_runs([0.6, 0.4, 0.5])
    assert found is not None and found.low is not None
    assert (found.value, found.low) == (pytest.approx(0.5), pytest.approx(0.5 - 0.248414, abs=1e-6))
    assert (
        estimate_mean_over_runs([0.5]) == IntervalEstimate(0.5)
        and estimate_mean_over_runs([]) is None
    )


def test_the_difference_of_two_configurations() -> None:
    # Variances of the means 0.01 / 3 and 0.02 / 2; degrees (1/75)^2 / ((1/300)^2 / 2 +
    # (1/100)^2 / 1) = 1.684 -> 1:
    # t(1) = 12.706205, half width 12.706205 x sqrt(1/75) = 1.467185.
    found = estimate_mean_difference([0.6, 0.8], [0.6, 0.4, 0.5])
    assert found is not None and found.low is not None
    assert found.value == pytest.approx(0.2) and found.low == pytest.approx(
        0.2 - 1.467185, abs=1e-5
    )
    assert (
        estimate_mean_difference([0.7], [0.4, 0.6]) == IntervalEstimate(pytest.approx(0.2))
        and estimate_mean_difference([], [1.0]) is None
    )


def test_thinned_curves_keep_ends_and_extremes() -> None:
    values = [math.sin(i / 50) for i in range(10_000)]
    values[4321] = 99.0
    values[7654] = -99.0
    kept = select_curve_points(values, 1000)
    assert len(kept) <= 1000 and kept == sorted(set(kept)) and {0, 4321, 7654, 9999} <= set(kept)
    assert select_curve_points(values[:1000], 1000) == list(range(1000))
    holes: list[float | None] = [None] * 5000
    holes[2500] = 1.0
    assert 2500 in select_curve_points(holes, 100) and len(select_curve_points(holes, 100)) <= 100


def test_even_choices() -> None:
    assert select_evenly_spaced(5, 10) == [0, 1, 2, 3, 4]
    assert select_evenly_spaced(101, 5) == [0, 25, 50, 75, 100]
    assert select_evenly_spaced(7, 1) == [6] and select_evenly_spaced(0, 3) == []


def test_numbers_for_json() -> None:
    assert [round_significant(v) for v in (1 / 3, 123456789.0, math.nan, math.inf, None)] == [
        0.333333,
        123457000.0,
        None,
        None,
        None,
    ]
    assert [format_duration(v) for v in (12.4, 106.0, 11103.0)] == [
        "12 s",
        "1 min 46 s",
        "3 h 05 min",
    ]


def make_sample(step: int, text: str) -> LoggedSample:
    return LoggedSample(step, "best", text, text, "", "", 1.0, "ok", {}, "stop", 1, 1)


def test_samples_within_a_budget_are_of_evenly_chosen_steps() -> None:
    # a step: 2 x (700 + 300)
    samples = [make_sample(step, "x" * 350) for step in range(1, 102) for _ in range(2)]
    found = choose_page_samples(samples, max_characters=10_000)
    assert [s.step for s in found] == [s for s in (1, 26, 51, 76, 101) for _ in range(2)]
    assert [s.step for s in choose_page_samples(samples, max_characters=1)] == [1, 1, 101, 101]
    assert (
        choose_page_samples([], max_characters=10) == []
        and len(choose_page_samples(samples, max_characters=1_000_000)) == 202
    )


def test_a_long_text_loses_its_middle() -> None:
    text = "a" * 4000 + "b" * 500 + "c" * 2000
    assert shorten_text(text) == "a" * 4000 + "\n[... 500 characters left out ...]\n" + "c" * 2000
    assert shorten_text("b" * 6000) == "b" * 6000


def test_a_timeline_of_a_long_run_keeps_the_slowest_steps() -> None:
    spans = []
    for step in range(1, 3001):
        seconds = 50.0 if step == 1234 else 1.0
        spans += [TraceSpan(f"step {step}", 2.0 * step, seconds, step, True, False)]
        spans += [TraceSpan("update", 2.0 * step, seconds, step, False, False)]
    found = make_timeline(spans)
    assert (
        found is not None
        and found.num_run_steps == 3000
        and len(found.step_spans) <= MAX_TIMELINE_STEPS
    )
    assert {1, 1234, 3000} <= {step.step for step in found.step_spans}
    assert {bar.step for _, bar in found.stage_bars} == {step.step for step in found.step_spans}


def test_a_step_that_did_not_end_has_the_extent_of_its_stages() -> None:
    spans = [
        TraceSpan("update", 5.0, 2.0, 3, False, False),
        TraceSpan("generate", 1.0, 3.0, 3, False, False),
    ]
    spans += [
        TraceSpan("load", 0.0, 1.0, None, False, False),
        TraceSpan("actor.update", 5.5, 1.0, 3, False, True),
    ]
    found = make_timeline(spans)
    assert (
        found is not None
        and found.stage_names == ("generate", "update", "actor.update")
        and found.num_calls == 1
    )
    assert [(s.step, s.start_s, s.seconds) for s in found.step_spans] == [(3, 1.0, 6.0)]
    assert make_timeline([]) is None


def group(version: int, reason: str, counts: tuple[int, ...], mean: float = 1.0) -> MismatchGroup:
    return MismatchGroup(version, reason, counts, sum(counts), mean, 2.0, 3.0)


def test_histograms_are_added_up_without_losing_a_token() -> None:
    edges = (0.0, 1.0, 2.0, 3.0)
    steps = [
        MismatchStep(
            step,
            edges,
            (group(step, "stop", (1, step, 0)), group(step - 1, "length", (0, 0, 2))),
            (),
        )
        for step in range(1, 1001)
    ]
    found = make_mismatch_histograms(
        [*steps, MismatchStep(1001, (0.0, 5.0), (group(1, "stop", (7,)),), ())]
    )
    assert found is not None and len(found.step_ranges) == MAX_STEP_RANGES
    assert found.step_ranges[0] == (1, 8) and found.step_ranges[-1][1] == 1000
    assert found.notes == ("1 steps with other bins are left out.",)
    for reason, expected in (("stop", (1000, 500500, 0)), ("length", (0, 0, 2000))):
        cells = [cell for cell in found.cells if found.finish_reasons[cell.reason_index] == reason]
        assert tuple(map(sum, zip(*(cell.counts for cell in cells), strict=True))) == expected
    for cell in found.cells:
        assert sum(cell.counts) == cell.num_tokens and cell.version_index < len(
            found.version_ranges
        )


def test_means_of_added_histograms_are_weighted() -> None:
    one = group(1, "stop", (1, 0), mean=4.0)
    two = group(1, "stop", (0, 3), mean=8.0)
    found = make_mismatch_histograms([MismatchStep(1, (0.0, 1.0, 2.0), (one, two), ())])
    assert found is not None and len(found.cells) == 1
    assert (found.cells[0].mean, found.cells[0].counts, found.cells[0].num_tokens) == (
        7.0,
        (1, 3),
        4,
    )
    assert make_mismatch_histograms([]) is None


def test_lines_of_one_source_are_told_apart() -> None:
    spec = ChartSpec("best", "Best of N", ("val/<source>/best@N",), row_kind="evaluation")
    keys = ["val/mul/best@2", "val/add/best@4", "val/add/best@2"]
    assert match_metric_keys(spec, keys) == [
        ("val/add/best@4", "add, best@4"),
        ("val/add/best@2", "add, best@2"),
        ("val/mul/best@2", "mul, best@2"),
    ]
    assert [
        label for _, label in match_metric_keys(spec, ["val/mul/best@2", "val/add/best@2"])
    ] == ["add", "mul"]
