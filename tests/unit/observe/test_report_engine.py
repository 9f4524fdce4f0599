"""What the report says of the engines over a whole run, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_samples import Page, step_row, write_run_dir

from rlhf_megatron.observe.report.engine import as_bytes, engine_facts, memory_rows
from rlhf_megatron.observe.report.files import read_run
from rlhf_megatron.observe.report.page import run_page


def told(path: Path, *rows: dict[str, Any]) -> dict[str, str]:
    return {fact.label: fact.value for fact in engine_facts(read_run(write_run_dir(path, rows)))}


def row(step: int, **more: float) -> dict[str, Any]:
    """8 samples in a step of 4.5 s, of these 3 s `generate`; 10 response tokens and 5 prompt tokens a sample."""
    usual = {"response_length/mean": 10.0, "prompt_length/mean": 5.0, "sync/seconds": 0.2, "sync/num_bytes": 2.5e9}
    return step_row(step, 0.5, **{**usual, **{name.replace("__", "/"): value for name, value in more.items()}})


def test_steps_count_by_their_samples_and_tokens(tmp_path: Path) -> None:
    first = row(1, rollout__finish_reason__stop=0.75, rollout__finish_reason__length=0.25)
    first |= {"rollout/cached_token_share": 0.5, "rollout/num_retractions": 2.0}
    second = row(2, rollout__num_samples=24, rollout__finish_reason__stop=1.0, rollout__finish_reason__length=0.0)
    second |= {"rollout/cached_token_share": 0.0, "rollout/num_retractions": 1.0, "prompt_length/mean": 15.0}
    second |= {"rollout/samples_of_several_versions": 0.5}
    assert told(tmp_path / "a", first, second) == {
        "Engine": "1 × local",
        "Generation": "53 tokens/s; 320 tokens in 67 % of the time of steps",  # 80 + 240 tokens in 6 of 9 s
        "Samples ended by": "stop 93.8 %, length 6.2 %",  # 6 + 24 and 2 of 32
        "Prompt tokens from the prefix cache": "5.0 %",  # 20 of 40 + 360
        "Retractions": "3",
        "Samples of several policy versions": "12",
        "Weight sync": "0.2 s each, 4.4 % of the time of steps, 2.5 GB",
    }


def test_trouble_and_bytes(tmp_path: Path) -> None:
    counters = {"rollout/engine_failures": 0.0, "rollout/engine_restarts": 0.0, "rollout/requests_reissued": 0.0}
    quiet = told(tmp_path / "quiet", {**row(1), **counters}, {**row(2), **counters})
    assert quiet["Trouble"] == "none" and "Bytes moved / needed" not in quiet
    bad = {**row(2), **counters, "rollout/engine_failures": 2.0, "rollout/requests_reissued": 40.0}
    bad |= {"sync/bytes_moved": 3e6, "sync/bytes_needed": 2e6}
    loud = told(tmp_path / "loud", {**row(1), **counters}, bad)
    assert loud["Trouble"] == "2 failures, 40 prompts asked for again"
    assert loud["Bytes moved / needed"] == "1.50 (3 MB / 2 MB)"


def test_memory_by_phase_is_the_most_of_any_step(tmp_path: Path) -> None:
    first = {
        "memory/training_device_bytes": 4e9,
        "memory/generation_device_bytes": 0.0,
        "memory/sync_engine_bytes": 1e9,
    }
    rows = [{**row(1), **first}, {**row(2), "memory/training_device_bytes": 5.5e9}]
    run = read_run(write_run_dir(tmp_path / "a", rows))
    assert memory_rows(run) == (
        ["phase", "trainer on its device", "engine"],
        [["training", "5.5 GB", "–"], ["sync", "–", "1 GB"], ["generation", "0 B", "–"]],
    )
    page = Page(run_page(run, []))
    assert "Memory by phase" in page.text and "training 5.5 GB –" in page.text
    assert [(s["label"], s["y"]) for s in page.series("memory_device")] == [
        ("generation", [0.0]),
        ("training", [4e9, 5.5e9]),
    ]
    assert memory_rows(read_run(write_run_dir(tmp_path / "b", [row(1)])))[1] == []


def test_a_replay_had_no_engine(tmp_path: Path) -> None:
    assert told(tmp_path / "a", step_row(1, 0.5, **{"rollout/finish_reason/stop": 1.0})) == {}


def test_a_little_is_not_nothing(tmp_path: Path) -> None:
    shares = {"rollout/finish_reason/stop": 0.9999, "rollout/finish_reason/abort": 0.0001}
    assert told(tmp_path / "a", {**row(1), **shares})["Samples ended by"] == "stop 100.0 %, abort < 0.1 %"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2.5e9, "2.5 GB"), (4e12, "4 TB"), (7e15, "7e+03 TB")],
)
def test_bytes_in_words(count: float, text: str) -> None:
    assert as_bytes(count) == text
