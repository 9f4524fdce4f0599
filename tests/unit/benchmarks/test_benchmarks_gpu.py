"""The GPU benchmarks on a CPU: arithmetic by hand, every case at a tiny size, and what stays when
something dies.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, gpu_check
from benchmarks.gpu import children, device_state, gpu_tests, recorder, timing, train_step
from benchmarks.gpu.arithmetic import GemmSeconds, HeadShape, peak_flops, percent, step_flop, tflops
from benchmarks.gpu.baselines import Baseline, naive_outputs
from benchmarks.gpu.head import HeadInputs, MainGrad, OurHead
from benchmarks.gpu.repeatable import simulate_ranks
from benchmarks.gpu.small_models import DeviceWeights, make_batch, make_lengths, qwen2_config
from benchmarks.gpu.timing import Spread, time_parts
from benchmarks.kernels.case import Figure

CPU = torch.device("cpu")
WITHOUT_WORLD = [name for name in children.CASES if name not in ("G10", "G11")]


@pytest.fixture
def no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "target", recorder.Target())


# --- arithmetic


def test_operations_and_rates_of_a_product() -> None:
    shape = HeadShape(num_tokens=8192, hidden=4096, vocab=151936)
    assert shape.gemm_flop == 2 * 8192 * 4096 * 151936 == 10_196_252_360_704
    assert tflops(shape.gemm_flop, 12.9e-3) == pytest.approx(790.4, abs=0.1)
    assert tflops(3 * shape.gemm_flop, 48e-3) == pytest.approx(637.3, abs=0.1)
    assert GemmSeconds(0.5, 0.25, 0.125).all_three == 0.875
    assert percent(13.0, 20.0) == 65.0


def test_operations_of_a_training_step_by_hand() -> None:
    """Two layers of width 8 with 2 heads of 4 (1 of keys and values); documents of 3 and 5
    tokens, 6 rows.
    """
    config = qwen2_config(hidden=8, num_layers=2, num_heads=2, intermediate=16, vocab=100) | {
        "num_key_value_heads": 1
    }
    weights_of_a_layer = 8 * 8 + 2 * (8 * 4) + 8 * 8 + 3 * 8 * 16  # q, k and v, o, mlp
    flop = step_flop(config, [3, 5], num_rows=6)
    assert flop.layers == 3 * 2 * (2 * weights_of_a_layer) * 8
    # twice 2 operations a pair and channel
    assert flop.attention == 3 * 2 * (2 * 8) * 2 * (9 / 2 + 25 / 2)
    assert flop.head == 3 * 2 * 8 * 100 * 6
    assert flop.head_share == flop.head / (flop.layers + flop.attention + flop.head)
    assert step_flop(config, [3, 5], 6, num_passes=1).total == flop.total / 3


def test_operations_of_a_known_model() -> None:
    """Six operations a token and weight: Qwen2.5-0.5B has 358 million in its layers, biases and
    norms left out.
    """
    flop = step_flop(qwen2_config(896, 24, 14, 4864), [1], 1)
    assert flop.layers / 6 == 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864) == 357_826_560
    assert flop.head / 6 == 896 * 151936


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_device(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_the_median_is_of_the_parts_of_all_turns() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    seen: list[str] = []

    def sleep() -> None:
        seen.append("slow")
        time.sleep(2e-2)

    fast, slow = time_parts(
        [lambda: seen.append("fast"), sleep], CPU, 0.0, before=lambda: seen.append("before")
    )
    assert seen == ["before", "fast", "slow"] * 10  # three warm-ups, seven timed
    assert fast.num_runs == slow.num_runs == 7 and fast.median < 2e-2 <= slow.fastest


def test_a_state_of_nvidia_smi_is_read() -> None:
    line = (
        "NVIDIA H200, 580.159.03, 1980, 3201, 1980, 512.33, 700.00, 45, 0x0000000000000004, [N/A]\n"
    )
    state = device_state.parse_state(line)
    assert (
        state["name"] == "NVIDIA H200"
        and state["clocks.sm"] == 1980
        and state["power.draw"] == 512.33
    )
    assert state["memory.used"] == "[N/A]"


@pytest.mark.usefixtures("no_target")
def test_bars_count_on_a_gpu_at_full_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorder.Recorder(is_quick=True)
    found.add("forward", 600.0, "TFLOP/s", bar=650, is_more_better=True)
    assert (
        found.figures[0] == Figure("forward", 600.0, "TFLOP/s", "", None, True)
        and found.figures[0].is_met
    )
    found.device = torch.device("cuda")
    found.is_quick = False
    times = Spread(median=0.016, fastest=0.015, slowest=0.02, num_runs=50)
    found.add_rate("forward", times, num_flop=9.6e12, bare_s=0.012, bar_tflops=650, bar_ms=15.7)
    assert [(f.what, f.value, f.unit, f.bar, f.is_met) for f in found.figures[1:]] == [
        ("forward, time", 16.0, "ms", 15.7, False),
        ("forward, rate", 600.0, "TFLOP/s", 650, False),
        ("forward, of bare GEMM", 75.0, "%", None, True),
    ]
    assert found.details["seconds"]["forward"]["slowest"] == 0.02
    with pytest.raises(ValueError, match="these sizes need a GPU"):
        recorder.Recorder(is_quick=False)


# --- what the head and its baselines compute


def test_our_head_and_the_naive_one_do_the_same_work() -> None:
    """The passes that are timed give the same log-probs, entropies and gradients, in float32."""
    inputs = HeadInputs.make(HeadShape(20, 16, 70), CPU, torch.float32)
    main_grad = MainGrad(inputs.weight_VH)
    ours = OurHead(inputs, "chunked", 32, main_grad)
    ours.forward()
    ours.backward()
    assert (
        ours.outputs is not None
        and ours.outputs.entropies_R is not None
        and inputs.hidden_TH.grad is not None
    )
    found = [
        ours.outputs.log_probs_R,
        ours.outputs.entropies_R,
        inputs.hidden_TH.grad,
        main_grad.total_VH,
    ]
    ours.forget()
    plain = Baseline(inputs, naive_outputs)
    plain.forward()
    plain.backward()
    assert inputs.hidden_TH.grad is not None and inputs.weight_VH.grad is not None
    expected = [*plain.outputs, inputs.hidden_TH.grad, inputs.weight_VH.grad]
    for value, truth in zip(found, expected, strict=True):
        assert (value - truth).abs().max() < 1e-5 * truth.abs().max()
    plain.forget()
    assert inputs.hidden_TH.grad is None and inputs.weight_VH.grad is None


def test_simulated_ranks_give_what_one_has() -> None:
    inputs = HeadInputs.make(HeadShape(20, 16, 64), CPU, torch.float32)
    log_probs_T, entropies_T = naive_outputs(inputs.hidden_TH, inputs.weight_VH, inputs.targets_T)
    ranks = simulate_ranks(inputs, 4, "chunked", 8)
    assert len(ranks) == 4
    for rank in ranks:
        assert torch.equal(rank[0], ranks[0][0]) and torch.equal(rank[1], ranks[0][1])
    assert (ranks[0][0] - log_probs_T).abs().max() < 1e-5 and (
        ranks[0][1] - entropies_T
    ).abs().max() < 1e-5


def test_samples_are_as_long_as_promised() -> None:
    lengths = make_lengths(5000, 300)
    assert (
        sum(lengths) == 5000
        and min(lengths) >= 16
        and max(lengths) < 300 + 16
        and len(set(lengths)) > 5
    )
    batch = make_batch([10, 4], vocab=50, prompt_share=0.5)
    assert batch.response_mask.tolist() == [False] * 5 + [True] * 5 + [False] * 2 + [True] * 2
    assert float(batch.loss_weights.sum()) == pytest.approx(1.0)


def test_weights_are_made_once() -> None:
    weights = DeviceWeights(CPU)
    named = weights.named(qwen2_config(16, 1, 2, 24, vocab=40))
    assert named["model.embed_tokens.weight"] is weights.made["model.embed_tokens.weight"]
    assert float(named["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert torch.equal(named["model.norm.weight"], torch.ones(16))
    assert torch.equal(named["model.layers.0.self_attn.q_proj.bias"], torch.zeros(16))


def test_a_step_that_does_other_work_is_refused() -> None:
    batch = make_batch([10, 4], vocab=50, prompt_share=0.5)
    work = train_step.Work({}, batch, (16,), (2,))
    ours = train_step.StepTimes("ours", Spread.of([0.5]), (0.25, 2.0))
    slow, fast = (
        train_step.StepTimes(name, Spread.of([s]), (0.25, 2.1))
        for name, s in (("slow", 2.0), ("fast", 1.0))
    )
    found = recorder.Recorder(is_quick=True)
    train_step.compare(found, "x", work, [ours], [slow, fast])
    assert [(f.what, f.value, f.baseline) for f in found.figures] == [
        ("x, tokens/s over the plain loop's", 2.0, "fast")
    ]
    other = train_step.StepTimes("other", Spread.of([1.0]), (0.25, 2.5))
    with pytest.raises(RuntimeError, match="not the same work"):
        train_step.compare(found, "x", work, [ours], [other])


# --- every case


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch, no_target: None) -> None:
    """Enough to run every line."""
    monkeypatch.setattr(timing, "MIN_WARMUPS", 2)
    monkeypatch.setattr(timing, "MIN_RUNS", 1)


@pytest.mark.usefixtures("few_turns")
@pytest.mark.parametrize("name", WITHOUT_WORLD)
def test_a_case_runs_at_a_tiny_size(name: str, tmp_path: Path) -> None:
    recorder.target.path = tmp_path / "case.json"
    case = children.importlib.import_module(f"benchmarks.gpu.{children.CASES[name].module}").CASE
    result = case.run(True)
    assert case.name == name and result.figures and not result.details["failed"], result.details[
        "failed"
    ]
    assert all(figure.value == figure.value and figure.bar is None for figure in result.figures)
    written = json.loads(recorder.target.path.read_text())
    assert len(written["figures"]) == len(result.figures) and written["details"]["device"] == "cpu"
    check = {
        "G1": lambda values: values["main_grad slice, relative error"] < 1e-6,
        "G8": lambda values: (
            all(value == 0 for what, value in values.items() if "that differ" in what)
            and values["tp 8 against tp 1, chunked: largest difference"] < 1e-5
        ),
        "G9": lambda values: values["fused and eager gradient, relative difference"] < 1e-5,
    }
    values = {figure.what: figure.value for figure in result.figures}
    assert check.get(name, bool)(values)


@pytest.mark.usefixtures("few_turns")
@pytest.mark.parametrize("name", ["G10", "G11"])
def test_a_case_with_a_model_runs_at_a_tiny_size(name: str) -> None:
    case = children.importlib.import_module(f"benchmarks.gpu.{children.CASES[name].module}").CASE
    result = case.run(True)
    assert not result.details["failed"], result.details["failed"]
    speeds = [figure.value for figure in result.figures if figure.unit == "tokens/s"]
    assert len(speeds) >= 3 and min(speeds) > 0
    if name == "G10":
        (ours, plain), norms = result.details["tiny, first loss and gradient norm, ours and plain"]
        assert ours == pytest.approx(plain, abs=2e-3) and norms[0] == pytest.approx(
            norms[1], rel=0.02
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ["G2", "G3", "G4", "G6", "G7", "G8", "G9"])
def test_a_case_runs_with_tritons_kernels(name: str) -> None:
    """Under the interpreter, in a process of its own: it counts from triton's import on."""
    code = (
        "import importlib, json, sys\n"
        "from benchmarks.gpu import children, timing\n"
        "timing.MIN_WARMUPS, timing.MIN_RUNS = 2, 1\n"
        f"case = importlib.import_module('benchmarks.gpu.{children.CASES[name].module}').CASE\n"
        "result = case.run(True)\n"
        "print(json.dumps([result.details['failed'], {f.what: f.value for f in result.figures}]))\n"
    )
    environment = children.environment() | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    failed, values = json.loads(done.stdout.splitlines()[-1])
    assert not failed
    of_triton = {what: value for what, value in values.items() if "triton" in what}
    assert len(of_triton) >= {"G7": 0, "G9": 0}.get(name, 4)
    assert all(value == 0 for what, value in of_triton.items() if "that differ" in what)
    errors = [
        value
        for what, value in values.items()
        if "largest difference" in what or "relative difference" in what
    ]
    assert max(errors, default=0.0) < 1e-5 and len(errors) == {"G8": 2, "G9": 2}.get(name, 0)


# --- what stays when something dies


@pytest.mark.usefixtures("no_target")
def test_what_fails_loses_itself_only() -> None:
    found = recorder.Recorder(is_quick=True)

    def bad() -> None:
        found.add("before it broke", 1.0, "ms")
        raise torch.cuda.OutOfMemoryError("too much")

    def absent() -> None:
        raise recorder.MissingError("the package no_such_package")

    assert found.attempt("bad", bad) is None and found.attempt("absent", absent) is None
    assert found.attempt("good", lambda: 3) == 3
    recorder.target.deadline = 0.0
    assert found.attempt("late", lambda: 4) is None
    result = found.result()
    assert [figure.what for figure in result.figures] == ["before it broke"]
    assert "too much" in result.details["failed"]["bad"]
    assert result.details["skipped"] == {
        "absent": "the package no_such_package",
        "late": "the case's time was up",
    }
    with pytest.raises(RuntimeError, match="nothing was measured"):
        recorder.Recorder(is_quick=True).result()


def test_a_case_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Through the whole of gpu_check."""
    arguments = ["--quick", "--output", str(tmp_path), "--commit", "abc"]
    assert gpu_check.main([*arguments, "--only", "G6"]) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    case = written["cases"]["G6"]
    assert (
        path.name.endswith("-abc-part1.json") and written["commit"] == "abc" and written["is_quick"]
    )
    assert case["outcome"] == "measured" and case["what"] == "passes over a materialised tile"
    assert [f["value"] for f in case["figures"] if f["unit"] == "GB/s"]
    assert set(case["device_state"]) == {"before", "after"}
    assert gpu_check.main([*arguments, "--only", "G1", "--budget-s", "1"]) == 0
    again = json.loads(path.read_text())
    assert again["cases"] == written["cases"] and again["out_of_time"] == ["G1"], (
        "what is not run again stays"
    )


def test_what_a_case_had_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(command: list[str], timeout_s: float, **streams: Any) -> int | None:
        path = next(
            Path(word.partition("=")[2]) for word in command if word.startswith("--output=")
        )
        recorder.write_json(path, {"figures": [{"what": "a", "is_met": False}], "details": {}})
        streams["stderr"].write("Killed: too much memory")
        return exits.pop()

    monkeypatch.setattr(children, "run_group", die)
    exits: list[int | None] = [-9, None]
    late = children.run_case("G5", 60.0)
    killed = children.run_case("G5", 60.0)
    assert (late["outcome"], late["message"]) == ("out of time", "not done after 60 s")
    assert (killed["outcome"], killed["message"]) == ("failed", "Killed: too much memory")
    assert [figure["what"] for figure in killed["figures"]] == ["a"]
    assert children.num_missed({"G5": late, "G6": killed}) == 2


def test_a_process_and_what_it_started_end_with_its_time(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    limits_s = iter((1.0, 10.0, 100.0))  # on a busy machine it takes a while to begin
    while not (tmp_path / "pid").exists():
        assert children.run_group([sys.executable, "-c", code], next(limits_s)) is None
    pid = (tmp_path / "pid").read_text()
    for _ in range(1200):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the process's child goes on")
    assert children.run_group([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == 3


def test_steps_that_do_not_fit_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--quick",
        "--only",
        "G1",
        "G10",
        "--budget-s",
        "1",
        "--output",
        str(tmp_path),
        "--commit",
        "abc",
    ]
    assert gpu_check.main(arguments) == 0
    assert capsys.readouterr().out.count("left out: the time is up") == 2
    written = {path.name[-6]: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert written["1"]["out_of_time"] == ["G1"] and written["2"]["out_of_time"] == ["G10"]


# --- tests that need a GPU


def test_what_pytest_reports_is_read_as_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('error', 0.25)\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "def test_absent(): pytest.skip('needs a thing')\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("import no_such_package\n")
    found = gpu_tests.run_pytest([file, broken], ("--rootdir", str(tmp_path)))
    outcomes = {outcome.name.rpartition("::")[2]: outcome for outcome in found}
    assert (outcomes["test_good"].outcome, outcomes["test_good"].figures) == (
        "passed",
        {"error": 0.25},
    )
    assert (
        outcomes["test_bad"].outcome == "failed"
        and "one is not two" in outcomes["test_bad"].message
    )
    assert (
        outcomes["test_absent"].outcome == "skipped"
        and "needs a thing" in outcomes["test_absent"].message
    )
    broken_outcome = next(o for o in found if "no_such_package" in o.message)
    assert broken_outcome.outcome == "failed" and len(found) == 4


@pytest.mark.long
def test_a_test_that_hangs_or_kills_its_process_loses_itself_only(tmp_path: Path) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(
        "import os, time\n"
        "def test_good(): pass\n"
        "def test_hangs(): time.sleep(600)\n"
        "def test_dies(): os._exit(7)\n"
        "def test_good_too(): pass\n"
    )
    arguments = ("--rootdir", str(tmp_path))
    found = gpu_tests.run_pytest([file], arguments, test_limit_s=20.0)
    outcomes = {outcome.name.rpartition("::")[2]: outcome for outcome in found}
    assert len(found) == 4
    assert outcomes["test_good"].outcome == outcomes["test_good_too"].outcome == "passed"
    assert (
        outcomes["test_hangs"].outcome == "failed"
        and "not done after" in outcomes["test_hangs"].message
    )
    assert (
        outcomes["test_dies"].outcome == "failed"
        and "ended with 7" in outcomes["test_dies"].message
    )
    late = gpu_tests.run_pytest([file], arguments, budget_s=15.0)
    assert [outcome.outcome for outcome in late] == ["passed", "not run", "not run", "not run"]


def test_gpu_check_without_pytest() -> None:
    def bad() -> dict[str, float]:
        raise AssertionError("too far off")

    def absent() -> dict[str, float]:
        raise LookupError("needs a thing")

    outcomes = gpu_tests.run_functions(
        {"good": lambda: {"error": 0.25}, "bad": bad, "absent": absent}, LookupError
    )
    assert [(o.name, o.outcome) for o in outcomes] == [
        ("good", "passed"),
        ("bad", "failed"),
        ("absent", "skipped"),
    ]
    assert outcomes[0].figures == {"error": 0.25} and "too far off" in outcomes[1].message
    assert gpu_tests.print_outcomes(outcomes) == {"passed": 1, "failed": 1, "skipped": 1}


def test_gpu_check_finds_the_gpu_tests() -> None:
    files = gpu_tests.files_with_gpu_tests()
    names = [path.name for path in files]
    assert {"test_gpu_checks.py", "test_gpu_kernels.py"} <= set(
        names
    ) and "test_registry.py" not in names
    slow = [path.name for path in files if gpu_tests.is_slow(path)]
    assert "test_gpu_local_engine.py" in slow and "test_gpu_checks.py" not in slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_check_without_a_device_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(common.RESULTS.iterdir())
    assert gpu_check.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out and set(common.RESULTS.iterdir()) == before
