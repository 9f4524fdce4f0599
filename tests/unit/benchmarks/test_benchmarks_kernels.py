"""The kernel benchmarks measure what they say: planted slow and wrong heads are told, and the
page is in sync.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import common, performance_page, run_all
from benchmarks.kernels import head, memory, precision, report, tensor_parallel
from benchmarks.kernels.baselines import chunk_of, gradients_first, naive, token_chunks
from benchmarks.kernels.case import CaseResult, Figure
from benchmarks.kernels.head_problem import (
    Problem,
    Shape,
    check_same_work,
    fused,
    make_problem,
    run_head,
)
from benchmarks.kernels.measure import Parts, Ratio, in_child, in_children, take_turns

CHILD_S = 60.0


def scripted(
    seconds: list[float], calls: list[str] | None = None, name: str = ""
) -> Callable[[], Parts]:
    """A variant whose rounds take these seconds, a third of them forward."""
    left = iter(seconds)

    def run() -> Parts:
        if calls is not None:
            calls.append(name)
        total = next(left)
        return {"forward": total / 3, "backward": total * 2 / 3}

    return run


def test_a_ratio_is_the_median_of_the_rounds_and_its_spread_their_middle_half() -> None:
    ratio = Ratio.of([0.8, 0.9, 1.0, 2.0, 0.85])
    assert (ratio.value, len(ratio.values)) == (0.9, 5)
    # the quartiles of five are the second and the fourth
    assert ratio.spread == pytest.approx((1.0 - 0.85) / 0.9)
    assert Ratio.of([3.0]).spread == math.inf


def test_rounds_go_on_until_the_ratio_is_steady() -> None:
    steady = take_turns({"a": scripted([1.0] * 9), "b": scripted([2.0] * 9)}, [("a", "b")], most=9)
    assert len(steady.rounds["a"]) == 3 and steady.ratio("a", "b").value == 0.5
    unsteady = take_turns(
        {"a": scripted([1.0, 2.0, 3.0, 4.0]), "b": scripted([1.0] * 4)}, [("a", "b")], most=4
    )
    assert unsteady.ratio("a", "b").values == (1.0, 2.0, 3.0, 4.0)


def test_variants_take_turns_in_either_order_and_some_only_once() -> None:
    calls: list[str] = []
    variants = {
        name: scripted([float(index + 1)] * 5, calls, name) for index, name in enumerate("abc")
    }
    turns = take_turns(variants, [("a", "b")], once=("c",), most=5)
    assert calls == ["a", "b", "c", "b", "a", "a", "b"]
    assert (
        turns.ratio("a", "c").values == (1 / 3,) and turns.ratio("b", "a", "backward").value == 2.0
    )
    assert turns.summary()["c"] == {"forward": [1.0], "backward": [2.0]}


def test_the_runner_limits_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_KERNELS_REPEATS", "2")
    assert (
        len(take_turns({"a": scripted([1, 9]), "b": scripted([1, 1])}, [("a", "b")]).rounds["a"])
        == 2
    )


def fail(what: str) -> int:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    if what == "raise":
        raise ValueError("too far off")
    return os.getpid()


def test_children_answer_or_are_told_of() -> None:
    first, second = in_children(fail, [{"what": "answer"}, {"what": "answer"}], CHILD_S)
    assert first != second != os.getpid()
    with pytest.raises(RuntimeError, match="too far off"):
        in_child(fail, CHILD_S, what="raise")
    with pytest.raises(RuntimeError, match="died without a word"):
        in_child(fail, CHILD_S, what="die")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer within 0 s"):
        in_child(fail, 0.2, what="hang")
    assert time.monotonic() - start < 300


@pytest.mark.parametrize(
    ("scheme", "with_entropy"), [(token_chunks, True), (gradients_first, False)]
)
def test_schemes_of_others_compute_the_same(scheme: Any, with_entropy: bool) -> None:
    """Against autograd in float64, over several of their chunks with a ragged last one."""
    problem = make_problem(Shape(1100, 8, 301), torch.float64)
    assert chunk_of(1100, 8, 301) == 32  # 38 chunks wanted, 29 tokens each, the next power of two
    expected = run_head(naive(with_entropy), problem)
    found = run_head(scheme, problem)
    # token_chunks has its softmax in float32
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert torch.allclose(found.grad_hidden_TH, expected.grad_hidden_TH, rtol=1e-4, atol=1e-9)
    assert found.grad_weight_VH is not None and expected.grad_weight_VH is not None
    assert torch.allclose(found.grad_weight_VH, expected.grad_weight_VH, rtol=1e-4, atol=1e-8)


def test_chunks_of_liger_at_the_two_shapes() -> None:
    assert chunk_of(2048, 576, 49152) == 32 and chunk_of(1024, 1024, 151936) == 8
    assert chunk_of(5, 64, 64) == 5  # never more than there are


def test_a_wrong_head_is_not_timed() -> None:
    problem = make_problem(Shape(9, 8, 40))
    check_same_work({"ours": fused()}, naive(True), problem)

    def shifted(problem: Problem) -> torch.Tensor:
        return fused()(Problem(problem.hidden_TH, problem.weight_VH, problem.targets_T.roll(1)))

    with pytest.raises(RuntimeError, match="shifted does not do the same work"):
        check_same_work({"shifted": shifted}, naive(True), problem)
    with pytest.raises(RuntimeError, match="gradient of the weight"):
        check_same_work(
            {
                "flat": lambda p: fused()(
                    Problem(p.hidden_TH, p.weight_VH * 1.0 + 1e-3 * p.weight_VH, p.targets_T)
                )
            },
            naive(True),
            problem,
        )


def test_a_slow_head_misses_its_bar() -> None:
    """Six passes of the naive head against one."""

    def slow(problem: Problem) -> torch.Tensor:
        return torch.stack([naive(True)(problem) for _ in range(6)]).mean()

    problem = make_problem(Shape(128, 32, 4096))
    heads = {
        head.OURS: slow,
        head.NAIVE: naive(True),
        head.OURS_LOG_PROB: naive(False),
        head.NAIVE_LOG_PROB: slow,
    }
    check_same_work({"slow": slow}, naive(True), problem)
    turns = head.measure(problem, heads)
    slower, faster, bare = head.figures_of("A", head.Size(problem_shape(problem), 0.85), turns)
    assert slower.value > 2 and not slower.is_met
    assert faster.value < 0.5 and bare.value > 1.5 and bare.baseline == head.BARE
    good = Figure("A: time", 0.8, "x", "naive", 0.85)
    text = "\n".join(
        report.lines_of(report.Outcome("C1", "time", 1.0, CaseResult((slower, good), {})))
    )
    assert text.count("MISSED") == 1 and text.count("OK") == 1


def problem_shape(problem: Problem) -> Shape:
    return Shape(*problem.hidden_TH.shape, problem.weight_VH.shape[0])


def test_memory_of_the_naive_head_is_five_tensors() -> None:
    """[T, V] float32 of 134 MB; ours holds 48 MB of logits and two tiles at the most."""
    shape = Shape(2048, 16, 16384)
    expected = 20 * shape.num_tokens * shape.vocab
    assert in_child(memory.extra_bytes, CHILD_S, name="naive", shape=shape) == pytest.approx(
        expected, rel=0.15
    )
    assert in_child(memory.extra_bytes, CHILD_S, name="ours", shape=shape) < 0.15 * expected


def test_slope_by_hand() -> None:
    assert memory.slope([1.0, 2.0, 4.0], [10.0, 13.0, 19.0]) == pytest.approx(3.0)


def precision_figures(compute: precision.Compute, sample: precision.Sample) -> dict[str, Figure]:
    exact = precision.results(precision.plain(torch.float64), sample, torch.float64)
    found = precision.errors_of(compute, sample, torch.float32, exact)
    plain = precision.errors_of(precision.plain(torch.float32), sample, torch.float32, exact)
    return {
        figure.what.rpartition(": ")[2]: figure
        for figure in precision.figures_of("x", found, plain)
    }


def test_rounded_logits_miss_the_bars_of_precision() -> None:
    sample = precision.samples(Shape(16, 24, 211))["float32, ragged vocabulary"]
    rounded = precision_figures(precision.plain(torch.float32, torch.bfloat16), sample)
    assert not any(figure.is_met for figure in rounded.values())
    assert rounded["log-prob"].value > 1e-3
    assert all(figure.is_met for figure in precision_figures(precision.ours, sample).values())


def test_a_running_maximum_from_zero_misses_the_bars_of_low_logits() -> None:
    """A published kernel starts it there: below -87 or so nothing is left of the sum."""

    def from_zero(sample: precision.Sample, problem: Problem) -> precision.Outputs:
        logits_TV = problem.hidden_TH @ problem.weight_VH.T
        log_p_TV = logits_TV - logits_TV.exp().sum(-1, keepdim=True).log()
        return log_p_TV.gather(-1, problem.targets_T[:, None])[:, 0], -(
            log_p_TV.exp() * log_p_TV
        ).sum(-1)

    sample = precision.samples(Shape(8, 24, 101))["low logits, -200 to -180"]
    logits_TV = sample.problem.hidden_TH @ sample.problem.weight_VH.T
    assert logits_TV.min() > -200 and logits_TV.max() < -180
    assert not precision_figures(from_zero, sample)["log-prob"].is_met
    assert precision_figures(precision.ours, sample)["log-prob"].is_met


def count_three(rank: int, store: str) -> int:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        before = tensor_parallel.num_collectives(dist.group.WORLD)
        values = torch.ones(4)
        dist.all_reduce(values)
        dist.all_reduce(values, async_op=True).wait()
        dist.broadcast(values, 0)
        return tensor_parallel.num_collectives(dist.group.WORLD) - before
    finally:
        dist.destroy_process_group()


@pytest.mark.dist
def test_every_collective_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    jobs = [{"rank": rank, "store": str(tmp_path / "store")} for rank in range(2)]
    assert in_children(count_three, jobs, CHILD_S) == [3, 3]


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.kernels", *arguments]
    return subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, timeout=300)


def check_file(path: Path, names: list[str]) -> None:
    written = json.loads(path.read_text())
    assert list(written["cases"]) == names and written["is_quick"] is True
    for name, case in written["cases"].items():
        assert case["error"] == "" and case["figures"], name
        assert all(math.isfinite(figure["value"]) for figure in case["figures"])
        assert all(figure["is_met"] for figure in case["figures"]), name
    assert written["machine"]["threads"] == "1"


@pytest.mark.dist
def test_quick_cases_of_the_head_run(tmp_path: Path) -> None:
    """Errors, counts and memory have their bars in a quick run too."""
    path = tmp_path / "quick.json"
    names = ["C2", "C3", "C4", "C5", "C6", "C7"]
    done = run_program("--quick", "--repeats", "1", "--only", *names, "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_file(path, names)


@pytest.mark.long
@pytest.mark.dist
def test_all_quick_cases_run(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    done = run_program("--quick", "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    cases = list(json.loads(path.read_text())["cases"])
    assert {"C1", "C2", "C3", "C4", "C5", "C6", "C7"} <= set(cases)
    check_file(path, cases)


def outcomes() -> list[report.Outcome]:
    good = [Figure(f"sample {i}: error", i * 1e-7, "nat", "", 1e-5) for i in range(12)]
    bad = [
        Figure("sample 3: gradient", 7.0, "x", "naive", 2.0),
        Figure("sample 4: gradient", math.nan, "x", "", 2.0),
    ]
    fast = (Figure("A: time", 0.5, "x", "naive", 0.8),)
    return [
        report.Outcome("C3", "errors", 2.0, CaseResult((*good, *bad), {"shape": "T=1 H=2 V=3"})),
        report.Outcome(
            "C1", "time", 2.0, CaseResult(fast, {"absent": {"a package": "not installed"}})
        ),
        report.Outcome("C9", "broken", 2.0, None, "Traceback\nValueError: why"),
    ]


def test_a_result_file_keeps_figures_and_failures(tmp_path: Path) -> None:
    found = outcomes()
    assert [outcome.is_good for outcome in found] == [False, True, False]
    path = common.write_result(
        "kernels_cpu", "python -m benchmarks.kernels", {"cases": report.as_json(found)}, tmp_path
    )
    written = json.loads(path.read_text())
    assert report.figures_of(written["cases"]["C1"]) == [Figure("A: time", 0.5, "x", "naive", 0.8)]
    rows = run_all.kernel_rows(written)
    assert [(row.what, row.ratio) for row in rows] == [
        ("C3 errors", math.inf),
        ("C1 time", 0.625),
        ("C9 broken", math.inf),
    ]
    assert not run_all.print_table(["kernels"], tmp_path)


def test_the_share_of_a_bar() -> None:
    assert run_all.over_bar(Figure("", 3.0, "x", "", 2.0)) == 1.5
    assert run_all.over_bar(Figure("", 3.0, "x", "", 6.0, is_more_better=True)) == 2.0
    assert (
        run_all.over_bar(Figure("", 0.0, "", "", 0.0)) == 0.0
        and run_all.over_bar(Figure("", 1.0, "", "", 0.0)) == math.inf
    )


def test_the_page_shows_the_worst_and_what_failed(tmp_path: Path) -> None:
    common.write_result(
        "kernels_cpu",
        "python -m benchmarks.kernels",
        {"cases": report.as_json(outcomes())},
        tmp_path,
    )
    text = performance_page.page(tmp_path)
    assert "| C3: errors (14) | sample 3: gradient | 7 x | <= 2 | MISSED | naive |" in text
    assert (
        "| C3: errors (14) | sample 4: gradient | nan x | <= 2 | MISSED |  |" in text
        and "sample 11" not in text
    )
    assert "| C1: time (1) | A: time | 0.5 x | <= 0.8 | OK | naive |" in text
    assert "| C9: broken | no result: ValueError: why |" in text
    assert "Not measured in C1: a package: not installed." in text
    assert (
        "No run on a GPU has been recorded yet" in text
        and "`make gpu-check PYTHON=python3`" in text
    )
    assert "Not run yet: `python -m benchmarks.bench_grpo_step`." in text


def test_the_page_shows_the_latest_run_on_a_gpu(tmp_path: Path) -> None:
    def case(value: float) -> dict[str, Any]:
        figure = {
            **vars(Figure("forward, rate", value, "TFLOP/s", "", 650.0, True)),
            "is_met": value >= 650,
        }
        details = {
            "skipped": {"a package": "needs a wheel"},
            "failed": {"too large": "Traceback\nOutOfMemoryError: 1"},
        }
        return {
            "what": "forward",
            "outcome": "measured",
            "seconds": 3.0,
            "figures": [figure],
            "details": details,
        }

    def write(name: str, day: str, cases: dict[str, Any], is_quick: bool = False) -> None:
        result = {
            "commit": name[21:26],
            "device": {"name": "A GPU"},
            "machine": {"cpu": "A CPU", "cores": 4, "time": f"{day}T10:00:00Z"},
            "gpu_versions": {"torch": "9.9"},
            "counts": {"passed": 5},
            "cases": cases,
            "is_quick": is_quick,
        }
        common.write_result(name, "python -m benchmarks.gpu_check", result, tmp_path)

    write("gpu_check-2026-01-01-aaaaa", "2026-01-01", {"G2": case(100.0)})
    write("gpu_check-2026-01-02-bbbbb-part1", "2026-01-02", {"G2": case(700.0)})
    late = {**case(10.0), "outcome": "out of time", "message": "not done after 9 s"}
    write("gpu_check-2026-01-02-bbbbb-part2", "2026-01-02", {"G10": late})
    write("gpu_check-2026-01-03-ccccc", "2026-01-03", {"G2": case(1.0)}, is_quick=True)
    text = performance_page.page(tmp_path)
    assert "| G2: forward (1) | forward, rate | 700 TFLOP/s | >= 650 | OK |  |" in text
    assert "| G10: forward (1) | forward, rate | 10 TFLOP/s | >= 650 | MISSED |  |" in text
    assert "a package: needs a wheel; too large: OutOfMemoryError: 1." in text
    assert text.count("Not measured in G10: not complete: not done after 9 s;") == 1
    assert (
        "A GPU; A CPU, 4 cores; python" in text
        and "torch 9.9" in text
        and "commit bbbbb, 2026-01-02" in text
    )
    assert "100 TFLOP/s" not in text and "| forward, rate | 1 TFLOP/s" not in text


def test_the_page_is_what_the_files_say() -> None:
    assert performance_page.PAGE.read_text() == performance_page.page(), (
        "docs/performance.md is not what benchmarks/results says: python -m"
        " benchmarks.performance_page --write"
    )
