"""`rlhf-megatron simulate`: durations files and what is wrong with them, comparisons, files,
a recorded run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from benchmarks.synthetic_run import Shape, write_run
from rlhf_megatron.cli.main import main
from rlhf_megatron.cli.simulate_command import expand_schedule_grid
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.planning.simulator.durations import (
    LengthsConfig,
    SimulatedWorkload,
    read_durations,
)
from rlhf_megatron.planning.simulator.recorded_durations import (
    format_durations_yaml,
    read_recorded_durations,
)
from rlhf_megatron.planning.simulator.schedule_search import (
    ScheduleStudy,
    StudyCase,
    choose_best_case,
)
from rlhf_megatron.planning.simulator.simulation import SimulationFigures
from rlhf_megatron.planning.simulator.simulation_plan import (
    GpuSplit,
    SimulationSetup,
    compute_slowdown,
)

EXAMPLE = ROOT / "examples" / "simulate_1024"
SMALL = """
lengths: {kind: lognormal, median: 100, sigma: 0.7}
engine: {decode: {points: [[1, 0.01], [32, 0.02]]}, prefill_tokens_per_s: 5000}
trainer: {update_tokens_per_s: 10000, annotate_tokens_per_s: 30000}
sync: {seconds: 0.5}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "durations.yaml"
    path.write_text(SMALL)
    return path


def simulate(*words: object, run: str = "configs/quickstart.yaml") -> int:
    return main(["simulate", str(ROOT / run), *map(str, words)])


def test_it_compares_schedules_and_writes_all_files(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "svg", "trace")}
    where = ("--json", files["json"], "--timeline", files["svg"], "--trace", files["trace"])
    grid_ = ("--schedule", "asynchronous max_lag=1,2", "--schedule", "one_step_off")
    code = simulate(
        "--durations",
        small,
        "--steps",
        5,
        "--warmup",
        1,
        *grid_,
        *where,
        "data.max_response_length=400",
    )
    text = capsys.readouterr().out
    assert code == 0, text
    found = json.loads(files["json"].read_text())
    assert [case["schedule"]["name"] for case in found["cases"]] == [
        "synchronous",
        *["asynchronous"] * 2,
        "one_step_off",
    ]
    best = found["best"]["figures"]
    assert (
        f"best for this run: {found['best']['schedule']['name']}" in text
        and f"{best['step_s']:.1f} s a step" in text
    )
    assert sum(best["lags"].values()) == pytest.approx(1.0) and best["num_steps"] == 4
    svg = ET.fromstring(files["svg"].read_text())
    names = Counter(element.get("class") for element in svg.iter() if element.get("class"))
    assert {"update", "load", "version"} <= names.keys() and "prefers-color-scheme:dark" in files[
        "svg"
    ].read_text()
    events = json.loads(files["trace"].read_text())
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0] == [
        f"step {n}" for n in range(1, 6)
    ]


def test_the_best_split_is_better_than_its_neighbours(tmp_path: Path) -> None:
    """Brute force over all splits of 100 GPUs finds no better one."""
    durations = tmp_path / "d.yaml"
    durations.write_text(SMALL.replace("trainer: {", "trainer: {gpus: 8, "))
    config = load_run_config(
        ROOT / "configs/quickstart.yaml", ["data.max_response_length=400"], False
    ).config
    read = read_durations(durations)
    workload = SimulatedWorkload(read.lengths, read.prompts, config.rollout.n, 400, 100, 1)
    setting = SimulationSetup(config, read)
    study = ScheduleStudy(setting, workload, 6, 2)
    schedule = ScheduleConfig("asynchronous", {"max_lag": 1})
    every = [study.simulate_case(schedule, split) for split in setting.list_splits(100, 1000)]
    assert len(every) > 8 and all(case.split.num_gpus <= 100 for case in every)
    found = study.search_splits(schedule, 100, 8)[0]
    assert found.figures and found.figures.step_s <= 1.02 * min(
        case.figures.step_s for case in every if case.figures
    )


def test_the_trainer_scales_as_stated() -> None:
    # 0.95: twice the GPUs make 1.9 times the tokens, four times 3.61; half of them 1 / 1.9.
    assert compute_slowdown(128, 64, 0.95) == pytest.approx(1 / 1.9)
    assert compute_slowdown(256, 64, 0.95) == pytest.approx(1 / 3.61)
    assert compute_slowdown(32, 64, 0.95) == pytest.approx(1.9)
    config = load_run_config(EXAMPLE / "run.yaml", with_files=False).config
    durations = read_durations(EXAMPLE / "durations.yaml")
    setting = SimulationSetup(config, durations)
    assert setting.split == GpuSplit(512, 64, 8) and setting.gpus_per_engine == 8
    half = setting.make_plan(GpuSplit(256, 96, 8), 1)
    # Update: 1 / 1e6 s a token on 512, x 1.9. Log-probs: actor and reference, 2 / 3e6, x 1.9.
    assert half.update_s_per_token == pytest.approx(
        1.9e-6
    ) and half.annotate_s_per_token == pytest.approx(3.8e6 / 3e12)
    assert half.seconds_per_token[64] == 0.014 and len(half.seconds_per_token) == 257


def test_splits_are_whole_replicas_and_engines() -> None:
    config = load_run_config(EXAMPLE / "run.yaml", with_files=False).config
    durations = read_durations(EXAMPLE / "durations.yaml")
    found = SimulationSetup(config, durations).list_splits(100, 50)
    assert all(split.trainer_gpus % 16 == 0 and split.num_gpus <= 100 for split in found)
    assert found[-1].is_colocated and found[-1] == GpuSplit(96, 12, 8, True)
    apart = replace(durations, sync=replace(durations.sync, turns_s=None))
    with pytest.raises(
        ConfigError,
        match=r"--gpus \(20\) must hold a replica of the trainer \(16\) and an engine \(8\)",
    ):
        SimulationSetup(config, apart).list_splits(20, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("median: 100, ", ""), r"kind \(lognormal\) needs a median"),
        (("sigma: 0.7", "sigma: 0.7, tail: 3"), "unknown key lengths.tail"),
        (
            ("[1, 0.01], [32, 0.02]", "[32, 0.01], [1, 0.02]"),
            "points must be of growing numbers of responses",
        ),
        (("points: [[1, 0.01], [32, 0.02]]", "fixed_s: 0.01"), "give either points"),
        (
            ("update_tokens_per_s: 10000", "update_tokens_per_s: 0"),
            r"update_tokens_per_s \(0\) must be above 0",
        ),
        (("update_tokens_per_s: 10000, ", ""), "trainer.update_tokens_per_s is missing"),
        (("seconds: 0.5", "seconds: -1"), r"seconds \(-1\) must be 0 or more"),
        (("kind: lognormal", "kind: lognorm"), "did you mean lognormal"),
        (("sigma: 0.7", "sigma: 0.7, tail_index: 2"), r"kind \(lognormal\) has no tail_index"),
        (
            ("lognormal, median: 100, sigma: 0.7", "constant, median: 9, within_prompt: 1"),
            "has no within_prompt",
        ),
        (
            ("sync:", "prompts: {kind: lognormal, median: 9, sigma: 1, within_prompt: 0.5}\nsync:"),
            "is of responses",
        ),
        ((SMALL, ""), "it has no sections; write lengths, engine and trainer"),
        (("sync: {", "sync: ["), "not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(
    small: Path, change: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in SMALL
    small.write_text(SMALL.replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_durations(small)
    assert simulate("--durations", small) == 2
    assert capsys.readouterr().err.startswith("durations "), "the message names the file"


def test_sglang_needs_slots_from_somebody(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--durations", small, run="examples/simulate_1024/run.yaml") == 2
    assert "engine.slots (null) must be given" in capsys.readouterr().err
    config = load_run_config(
        EXAMPLE / "run.yaml", ["rollout.sglang.args.max-running-requests=96"], False
    ).config
    assert SimulationSetup(config, read_durations(small)).num_slots == 96


def test_a_grid_of_schedules() -> None:
    found = expand_schedule_grid("asynchronous max_lag=1,2 partial_rollouts=true,false")
    assert [schedule.params for schedule in found] == [
        {"max_lag": lag, "partial_rollouts": goes_on} for lag in (1, 2) for goes_on in (True, False)
    ]
    with pytest.raises(ConfigError, match="max_lags"):
        expand_schedule_grid("asynchronous max_lags=1")
    with pytest.raises(ConfigError, match="must be key=value"):
        expand_schedule_grid("asynchronous max_lag")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warmup", 20], "--warmup (20) must be from 0 to --steps (20) - 1"),
        (["--only", "--gpus", 8], "--only simulates the run as it is"),
        (["--splits", 3], "--splits (3) are of --gpus N"),
        (
            ["--write", "{tmp}/new.yaml", "--only"],
            "--only needs a simulation, but --write makes none",
        ),
        (["--write", "{tmp}/durations.yaml"], "is there already"),
        (["--json", "{tmp}/none/x.json"], "there is no directory {tmp}/none"),
        (["--schedule", " "], "it names no schedule"),
        (["--schedule", "asynchronous max_lag=0"], "max_lag (0) must be at least 1"),
        (["--schedule", "sinchronous"], "unknown schedule 'sinchronous'"),
        (["--gpus", 4], "--gpus (4) must hold a replica of the trainer (4) and an engine (1)"),
    ],
)
def test_what_is_wrong_with_arguments_is_told(
    words: list[object],
    message: str,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(word).replace("{tmp}", str(tmp_path)) for word in words]
    assert simulate("--durations", small, "--steps", 20, *given) == 2
    text = capsys.readouterr().err
    assert message.replace("{tmp}", str(tmp_path)) in text, text
    assert text.startswith(
        ("arguments of simulate: 1 problem", f'--schedule "{given[1]}": 1 problem')
    ), text


def test_a_run_that_has_learnt_nothing_yet_tells_its_durations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, Shape(steps=3, total_steps=3))
    metrics = run_dir / "metrics.jsonl"
    rows = [
        json.loads(line) | {"reward/uniform_groups": 1.0}
        for line in metrics.read_text().splitlines()
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    durations = read_recorded_durations(run_dir)
    assert durations.no_signal == 0.0 and any(
        "none of this run had" in text for text in durations.assumed
    )
    (run_dir / "config.yaml").unlink()
    assert simulate("--durations", run_dir) == 2
    assert capsys.readouterr().err.startswith(f"durations {run_dir}: 1 problem")


def test_a_line_that_is_not_whole_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", Shape(steps=3, total_steps=3))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"kind": "st\n' + metrics.read_text())
    assert simulate("--durations", tmp_path / "run", "--only") == 1
    assert f"{metrics}:1 is not JSON" in capsys.readouterr().err


def figures_of(step_s: float, lag: int, lost: float = 0.0) -> SimulationFigures:
    shares = (0.0, 0.0, 0.0, 0.0)
    return SimulationFigures(
        1,
        step_s,
        step_s,
        step_s,
        1.0,
        1.0,
        1.0,
        *shares,
        float(lag),
        lag,
        {lag: 1.0},
        {"lag": lost},
        0.0,
    )


def test_the_choice() -> None:
    """The fastest loses too much; of two within 2 % the smaller lag counts."""
    split = GpuSplit(1, 1, 1)
    rows = [(90.0, 2, 0.3), (100.0, 4, 0.0), (101.0, 1, 0.0), (103.0, 0, 0.0)]
    cases = [
        StudyCase(ScheduleConfig(f"s{i}"), split, figures_of(*row)) for i, row in enumerate(rows)
    ]
    assert choose_best_case(cases, 0.02, 0.05) == cases[2]
    assert choose_best_case(cases, 0.0, 0.05) == cases[1]
    assert choose_best_case(cases[:1], 0.02, 0.05) == cases[0], (
        "where all lose, the fastest of them"
    )


def test_groups_without_signal_are_not_the_schedules_loss() -> None:
    """Half of the groups have no signal whatever the schedule; only those that it drops for
    their lag count.
    """
    split = GpuSplit(1, 1, 1)
    slow = replace(figures_of(100.0, 1), dropped={"no signal": 0.5})
    fast = replace(figures_of(90.0, 2), dropped={"no signal": 0.5, "lag": 0.2})
    cases = [
        StudyCase(ScheduleConfig(name), split, found)
        for name, found in (("fast", fast), ("slow", slow))
    ]
    assert fast.lost_share == 0.2 and slow.lost_share == 0.0
    assert choose_best_case(cases, 0.02, 0.05) == cases[1]


def test_lengths_have_the_quantiles_that_they_should() -> None:
    """20000 drawn: the median, and the share beyond x of a Pareto tail: 0.1 x (begin / x)^1.5."""
    config = LengthsConfig(
        "pareto", median=1000.0, sigma=0.5, tail_share=0.1, tail_index=1.5, within_prompt=0.5
    )
    prompts = LengthsConfig("constant", median=1.0)
    work = SimulatedWorkload(config, prompts, 20, 10**9, 10, 7)
    groups = [work.draw_response_lengths(number) for number in range(1000)]
    values = sorted(value for group in groups for value in group)
    assert values[10000] == pytest.approx(1000, rel=0.05)
    begin = 1000 * 2.718281828 ** (0.5 * 1.2815515655)  # the 90 % quantile of the body
    for x in (2 * begin, 4 * begin):
        assert sum(value > x for value in values) / 20000 == pytest.approx(
            0.1 * (begin / x) ** 1.5, rel=0.25
        )
    spread = [max(group) / min(group) for group in groups]
    alike = SimulatedWorkload(
        LengthsConfig("lognormal", median=1000.0, sigma=0.5, within_prompt=1.0),
        prompts,
        4,
        10**9,
        10,
        7,
    )
    assert (
        all(len(set(alike.draw_response_lengths(number))) == 1 for number in range(20))
        and min(spread) > 1
    )
    cut = SimulatedWorkload(config, prompts, 20, 1500, 10, 7)
    assert max(cut.draw_response_lengths(3)) <= 1500 and cut.draw_response_lengths(
        3
    ) == cut.draw_response_lengths(3)
    assert work.draw_response_lengths(3, attempt=1) != work.draw_response_lengths(3)


def test_durations_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, Shape(steps=30, total_steps=30))
    durations = read_recorded_durations(run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step"][1:]
    rates = sorted(row["perf/total_num_tokens"] / row["timing_s/update"] for row in rows)
    assert durations.trainer.update_tokens_per_s == pytest.approx(rates[len(rates) // 2], rel=0.02)
    assert (
        durations.sync.seconds
        == sorted(row["timing_s/sync"] for row in rows)[len(rows) // 2 - 1 + len(rows) % 2]
    )
    assert durations.lengths.kind == "values" and len(durations.lengths.values) == 60
    assert any("as fast with many responses" in text for text in durations.assumed)
    path = tmp_path / "again.yaml"
    path.write_text(format_durations_yaml(durations))
    assert read_durations(path) == durations


def test_a_run_that_is_simulated_again_takes_as_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Durations of a run, simulated with that run's settings, give its step time back: stages one
    after the other.
    """
    run_dir = tmp_path / "run"
    write_run(run_dir, Shape(steps=20, total_steps=20))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["timing_s/step"] for row in rows if row["kind"] == "step"][1:]
    out = tmp_path / "figures.json"
    words = (
        "--durations",
        run_dir,
        "--only",
        "--json",
        out,
        "--steps",
        8,
        "actor.mini_batch_size=256",
    )
    code = main(["simulate", str(run_dir / "config.yaml"), *map(str, words)])
    assert code == 0, capsys.readouterr().err
    found = json.loads(out.read_text())["run"]["figures"]["step_s"]
    assert found == pytest.approx(sum(seconds) / len(seconds), rel=0.25)


def test_it_runs_without_torch(small: Path) -> None:
    words = ["simulate", "configs/quickstart.yaml", "--durations", str(small), "--steps", "5"]
    code = (
        "import sys\n"
        "from rlhf_megatron.cli.main import main\n"
        f"assert main({words!r}) == 0\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys(), 'it must start at once'"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120, stdout=subprocess.DEVNULL
    )


def test_colocated_runs_are_simulated_in_turns(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colocated = "configs/quickstart_colocated.yaml"
    assert (
        simulate("--durations", small, "--steps", 5, "--schedule", "one_step_off", run=colocated)
        == 0
    )
    text = capsys.readouterr().out
    assert "turns of trainer and engines take no time" in text
    assert (
        "one_step_off" in text
        and "not simulated: trainer and engines take turns with the same GPUs" in text
    )
