"""Files of answers that others wrote, scored with the keys of a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_megatron.config.schema import DataConfig, RewardConfig
from rlhf_megatron.jobs.generation.answer_scoring import score_answer_file

ROW = {
    "question": [{"role": "user", "content": "1+1?"}],
    "data_source": "sums",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "responses": ["2", "3"],
}


def test_answers_with_the_columns_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    data = DataConfig(prompt_key="question", label_key="reward_model.ground_truth")
    path.write_text("".join(json.dumps({**ROW, "id": i}) + "\n" for i in range(2)))
    (found,) = score_answer_file(path, RewardConfig(), tmp_path / "log", data)
    assert (
        found.name == "sums"
        and found.collect_valid_scores() == [(1.0, 0.0)] * 2
        and found.prompts.prompts == ("1+1?",) * 2
    )
    assert json.loads(found.prompts.extras[1]) == {
        "data_source": "sums",
        "reward_model": {"style": "rule"},
        "id": 1,
    }
    with pytest.raises(ValueError, match=r"line 1 must be an object with \"index\""):
        score_answer_file(path, RewardConfig(), tmp_path / "log")
    for wrong, words in (
        ({"responses": "2"}, "responses must be a list of texts"),
        ({"question": 3}, "'question'"),
    ):
        path.write_text(json.dumps(ROW | wrong) + "\n")
        with pytest.raises(ValueError, match=f"out.jsonl:1: {words}"):
            score_answer_file(path, RewardConfig(), tmp_path / "log", data)


def test_answers_with_columns_that_no_reward_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of a table that went through another program: an array, NaN, nulls, whole numbers as
    1.0, and a source that is null.
    """
    path = tmp_path / "out.json"
    data = DataConfig(prompt_key="question", label_key="reward_model.ground_truth")
    row = ROW | {"time": float("nan"), "data_source": None, "note": None}
    path.write_text(json.dumps([row, row], indent=1))
    (scored,) = score_answer_file(path, RewardConfig(), tmp_path / "log", data)
    assert scored.name == "out" and scored.collect_valid_scores() == [(1.0, 0.0)] * 2
    assert f"'time' of 2 rows (NaN; first {path}:1)" in caplog.text
    own = {
        "index": 1.0,
        "source": "sums",
        "prompt": "1+1?",
        "answer": "2",
        "extra": None,
        "responses": ["2", "3"],
        "finish_reasons": ["stop", "stop"],
        "num_tokens": [1, 1],
    }
    path.write_text(json.dumps([own]))
    (scored,) = score_answer_file(path, RewardConfig(), tmp_path / "log")
    assert scored.collect_valid_scores() == [(1.0, 0.0)] and scored.prompts.group_ids == (1,)
    assert scored.prompts.extras == ("",)
    path.write_text(json.dumps([own | {"index": 1.5}]))
    with pytest.raises(ValueError, match=r"line 1 must be an object with \"index\""):
        score_answer_file(path, RewardConfig(), tmp_path / "log")
