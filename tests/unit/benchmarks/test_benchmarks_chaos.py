"""The harness itself: runs that differ are told apart, the matrix covers every point, processes are
known by role.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from chaos_tools import write_run

from benchmarks.chaos import cases
from benchmarks.chaos.compare import differences
from benchmarks.chaos.program import role_of
from benchmarks.common import ROOT
from rlhf_megatron.faults import POINTS, parse_fault_plan


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """The same run twice; the times differ."""
    return write_run(tmp_path / "a", seconds=1.0), write_run(tmp_path / "b", seconds=2.0)


def edit(run_dir: Path, file: str, index: int, **values: object) -> None:
    """Change one line of a file of lines."""
    rows = [json.loads(line) for line in (run_dir / file).read_text().splitlines()]
    rows[index] |= values
    (run_dir / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_time_of_day_is_no_difference(two_runs: tuple[Path, Path]) -> None:
    assert (
        differences(*two_runs, is_bitwise=True) == []
        and differences(*two_runs, is_bitwise=False) == []
    )


def test_the_last_bit_of_a_metric_is_a_difference(two_runs: tuple[Path, Path]) -> None:
    edit(two_runs[1], "metrics.jsonl", 1, **{"actor/loss": 0.30000000000000004})
    expected = ["step 1 actor/loss: 0.3 undisturbed, 0.30000000000000004 here"]
    assert differences(*two_runs, is_bitwise=True) == expected
    assert differences(*two_runs, is_bitwise=False) == [], "the state is the same"


def test_a_version_that_jumped_is_a_difference_of_state(two_runs: tuple[Path, Path]) -> None:
    edit(two_runs[1], "metrics.jsonl", 2, **{"policy/version": 4.0})
    assert differences(*two_runs, is_bitwise=False) == [
        "step 2 policy/version: 3.0 undisturbed, 4.0 here"
    ]


def test_a_step_that_was_done_twice_is_told(two_runs: tuple[Path, Path]) -> None:
    path = two_runs[1] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    found = differences(*two_runs, is_bitwise=False)
    assert found == ["step 2 has 2 rows", "step 2 is one too many"]


def test_a_step_that_is_missing_is_told(two_runs: tuple[Path, Path]) -> None:
    path = two_runs[1] / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert differences(*two_runs, is_bitwise=False) == ["step 2 is missing"]


def test_lost_and_doubled_samples_are_told(two_runs: tuple[Path, Path]) -> None:
    edit(two_runs[1], "samples.jsonl", 3, prompt="01+01=")
    assert differences(*two_runs, is_bitwise=False) == [
        "sample of (2, '00+01=', 2) is lost",
        "sample of (2, '01+01=', 2) is one too many",
    ]
    assert differences(*two_runs, is_bitwise=True) == [
        "samples.jsonl differs from line 4 of 4 on (4 lines here)"
    ]


def test_a_sample_of_an_older_policy_is_told(two_runs: tuple[Path, Path]) -> None:
    edit(two_runs[1], "samples.jsonl", 3, policy_version=1)
    assert "sample of (2, '00+01=', 1) is one too many" in differences(*two_runs, is_bitwise=False)


def test_one_byte_of_the_weights_is_a_difference(two_runs: tuple[Path, Path]) -> None:
    path = two_runs[1] / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert differences(*two_runs, is_bitwise=True) == ["final weights model.safetensors differ"]
    shutil.rmtree(two_runs[1] / "hf")
    assert differences(*two_runs, is_bitwise=True) == ["final weights model.safetensors differ"]


def test_the_matrix_kills_everybody_everywhere() -> None:
    """Each point: in one process; and with two ranks, each kind of process that passes it."""
    names = {case.name for case in cases.matrix()}
    for point, text in POINTS.items():
        assert f"inline/kill/{point}" in names
        whom = ["controller"] if text.startswith("controller:") else ["rank0", "rank1"]
        if text.startswith("driver:"):
            whom = ["driver0"]
        if point == "sync.after_bucket":
            whom = ["rank0"]  # at tp2 one rank sends
        assert all(f"tp2/kill_{who}/{point}" in names for who in whom), point
    assert len(POINTS) >= 12


def test_every_point_is_passed_somewhere() -> None:
    """A name in the list alone would make a plan do nothing."""
    sources = "".join(path.read_text() for path in (ROOT / "rlhf_megatron").rglob("*.py"))
    assert [point for point in POINTS if f'reach_fault_point("{point}")' not in sources] == []


def test_every_plan_can_be_read_and_names_who_passes_the_point() -> None:
    for case in cases.matrix():
        for fault in parse_fault_plan(case.plan):
            if fault.process_name is not None:
                assert fault.process_name.rstrip("0123456789") == cases.passed_by(fault.point), (
                    case.name
                )
            assert fault.step is None or cases.passed_by(fault.point) == "controller", (
                f"{case.name}: ranks know no step"
            )


def test_cases_are_chosen_by_part_pattern_and_layout() -> None:
    assert [case.name for case in cases.choose(["kill_rank1/ckpt.mid"], [])] == [
        "tp2/kill_rank1/ckpt.mid_data"
    ]
    assert {case.layout for case in cases.choose(["*/kill*/ckpt.mid_data"], ["inline"])} == {
        "inline"
    }
    assert len(cases.choose([], [])) == len(cases.matrix())


@pytest.mark.parametrize(
    ("words", "environment", "role"),
    [
        (
            [
                "python",
                "-m",
                "rlhf_megatron.runtime.torchrun.agent",
                "-m",
                "rlhf_megatron",
                "train",
            ],
            {},
            "agent",
        ),
        (["python", "-m", "rlhf_megatron", "train", "c.yaml"], {"RANK": "1"}, "rank1"),
        (
            ["python", "-m", "rlhf_megatron", "train"],
            {"RLHF_MEGATRON_RUN_DIR": "runs/x"},
            "controller",
        ),
        (["python", "-m", "rlhf_megatron", "train"], {}, "inline"),
        (
            ["python", "-m", "s", "--ready-file", "runs/x/engines/engine1.ready.json"],
            {"RANK": "0"},
            "engine1",
        ),
        (["python", "-c", "pass"], {"RANK": "0"}, "other"),
    ],
)
def test_processes_are_known_by_their_role(
    words: list[str], environment: dict[str, str], role: str
) -> None:
    assert role_of(words, environment) == role
