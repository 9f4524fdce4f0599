"""`generate` and `evaluate` of runs with episodes play the games that the run itself plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end_tools import write_config
from forked_runs import Attempt, ForkServer
from places import ROOT

from rlhf_megatron.cli.main import main

pytestmark = pytest.mark.dist
GAME = ROOT / "configs" / "quickstart_game.yaml"
NUM_GAMES = 21  # three for each secret


@pytest.fixture(scope="module")
def run(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    """One step, with evaluations before and after it."""
    directory = tmp_path_factory.mktemp("run")
    rows = [{"prompt": "?", "answer": f"0{1 + number % 7}"} for number in range(NUM_GAMES)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("train", "val"):
        (directory / f"{name}.jsonl").write_text(text)
    files = {"train_files": [str(directory / "train.jsonl")]}
    files["val_files"] = [str(directory / "val.jsonl")]
    path = write_config(directory, {"task": None, **files}, GAME)
    settings = yaml.safe_load(path.read_text())
    settings["warmup"] |= {"max_steps": 40, "batch_size": 32, "test_freq": 40}
    path.write_text(yaml.safe_dump(settings))
    attempt = server.train(path, {"trainer.total_training_steps": 1, "trainer.test_freq": 1})
    assert attempt.code == 0, attempt.console
    return attempt


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluate_plays_what_the_run_played(
    run: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    words = ["evaluate", str(run.run_dir), "--out", str(answers), "--tokens"]
    assert main([*words, "--json", str(tmp_path / "figures.json")]) == 0
    console = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["mean"] == run.summary()["accuracy_after"]
    rows = read_rows(answers)
    episodes = [episode for row in rows for episode in row["episodes"]]
    assert len(rows) == NUM_GAMES and len(episodes) == 4 * NUM_GAMES
    ends = {end: sum(one["end"] == end for one in episodes) for end in ("done", "max_turns")}
    assert sum(ends.values()) == len(episodes)
    assert f"{len(episodes)} episodes of " in console and f"done {ends['done'] / 84:.1%}" in console
    for row in rows:
        for number, episode in enumerate(row["episodes"]):
            turns = episode["messages"][1::2]
            assert len(turns) == episode["num_turns"]
            assert turns[-1]["content"] == row["responses"][number]
            assert len(row["turn_spans"][number]) == episode["num_turns"]
            assert sum(episode["turn_rewards"]) == float(episode["end"] == "done")

    # a file that was cut in the midst of its rows, and of a row, goes on to the same bytes
    whole = answers.read_bytes()
    lines = whole.splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:9]) + lines[9][:40])
    assert main(["generate", str(run.run_dir), "--out", str(answers), "--tokens"]) == 0
    assert answers.read_bytes() == whole


def test_an_address_answers_with_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "?", "answer": "04"}) + "\n")
    words = ["--out", str(tmp_path / "answers.jsonl"), "rollout.environment.name=guess_number"]
    assert main(["evaluate", "http://127.0.0.1:9/v1", str(questions), *words]) == 1
    error = capsys.readouterr().err
    assert "rollout.environment.name is guess_number" in error
    assert "set rollout.environment.name=null" in error
    assert not (tmp_path / "answers.jsonl").exists()


def test_limits_beyond_the_context_are_named(
    run: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path / "answers.jsonl"), "rollout.environment.max_tokens=9000"]
    assert main(["generate", str(run.run_dir), *words]) == 1
    assert "rollout.environment.max_tokens is 9000, but " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
