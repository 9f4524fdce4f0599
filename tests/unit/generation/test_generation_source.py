"""The configuration of a job that trains nothing, by what it is pointed at."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import MODEL

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
