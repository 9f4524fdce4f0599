"""Commands that know samples of one answer refuse runs with episodes: scores would be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import MODEL, ROOT

from rlhf_megatron.cli.main import main

GAME = ROOT / "configs" / "quickstart_game.yaml"


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_single_answers_are_not_scored_as_episodes(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "?", "answer": "04"}) + "\n")
    (tmp_path / "run.yaml").write_text(
        f"extends: {GAME}\nmodel: {{path: {MODEL}, init_seed: null}}\n"
    )
    assert main([command, "run.yaml", str(rows)]) == 1
    error = capsys.readouterr().err
    assert "rollout.environment.name is guess_number" in error
    assert "set rollout.environment.name=null" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "run.yaml"]


def test_simulate_knows_no_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(GAME), "--gpu", "h100-80g"]) == 1
    assert "simulate knows samples of one answer" in capsys.readouterr().err
