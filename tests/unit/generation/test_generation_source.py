"""The configuration of a job that trains nothing, by what it is pointed at."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import MODEL
from rollout_tools import tiny_qwen3

from rlhf_megatron.cli.main import main
from rlhf_megatron.jobs.generation import model_source


@pytest.mark.parametrize(("job", "engine"), [("sft", "local"), ("train", "sglang")])
def test_a_run_of_a_job_without_rewards_names_no_engine(
    job: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "has_accelerator", lambda: False)
    (tmp_path / "config.yaml").write_text(f"job: {job}\nmodel: {{path: {MODEL}}}\n")
    assert model_source.load_job_config(tmp_path, [], []).rollout.engine == engine
    assert (
        model_source.load_job_config(tmp_path, [], ["rollout.engine=sglang"]).rollout.engine
        == "sglang"
    )


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_model_brings_no_prompts(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    tiny_qwen3(1).save_pretrained(model)
    assert main([command, str(model)]) == 1
    error = capsys.readouterr().err
    assert f"error: {model} brings no prompts; name a file of prompts behind it" in error
