"""Rewards and the columns that a row could not carry: a reward that asks for such a column fails
with the reason, and never scores with a default in its place.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.data.data_rows import parse_prompt_row
from rlhf_megatron.data.extra_columns import ExtraColumnWriter, LeftOutColumnError
from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.scorers.code_tests import CodeParams, parse_code_tests, score_code
from rlhf_megatron.rewards.scorers.llm_judge import LlmJudgeParams, fill_judge_template
from rlhf_megatron.rewards.scorers.user_function import FunctionParams, score_by_user_function
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer

FUNCTIONS = """
def by_extra(extra):
    return extra["page"]


def by_info(extra_info):
    return extra_info.get("index", 7)


def compute_score(solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""
LONG = "x" * 70_000


def make_sample(*named_columns: str, is_named: bool = False, **columns: Any) -> RewardSample:
    """A sample of a row with these columns, as a run carries them."""
    writer = ExtraColumnWriter(named_columns if is_named else None)
    row = parse_prompt_row(
        {"prompt": "?", "answer": "2", **columns}, "prompt", "answer", "s", "o", writer
    )
    return RewardSample("?", "2", row.label, row.source, "stop", 1, row.extra)


def call(folder: Path, name: str, sample: RewardSample) -> float:
    (folder / "mine.py").write_text(FUNCTIONS)
    return score_by_user_function(sample, FunctionParams(f"{folder / 'mine.py'}:{name}")).score


def test_a_function_of_the_user(tmp_path: Path) -> None:
    assert call(tmp_path, "by_extra", make_sample(page=3)) == 3
    with pytest.raises(KeyError):
        call(tmp_path, "by_extra", make_sample(other=3))
    with pytest.raises(
        LeftOutColumnError, match=r"the column 'page' of the row is not in extra .to"
    ):
        call(tmp_path, "by_extra", make_sample(page=LONG))
    with pytest.raises(LeftOutColumnError, match=r"'page' .* .not named in data.extra_columns."):
        call(tmp_path, "by_extra", make_sample("other", is_named=True, page=3, other=1))
    info = {"index": 3, "split": "train"}
    assert call(tmp_path, "by_info", make_sample(extra_info=info)) == 3
    assert call(tmp_path, "by_info", make_sample(extra_info=None)) == 7
    unnamed = make_sample("extra_info.split", is_named=True, extra_info=info)
    with pytest.raises(LeftOutColumnError, match=r"'index' .* .not named in data.extra_columns."):
        call(tmp_path, "by_info", unnamed)
    with pytest.raises(LeftOutColumnError, match=r"'index'"):
        call(tmp_path, "by_info", make_sample(is_named=True, extra_info=info))
    # a function that takes extra_info and does not ask for anything in it
    assert call(tmp_path, "compute_score", make_sample(is_named=True, extra_info=info)) == 1


def test_the_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    config = RewardConfig(
        name="function", params={"path": f"{tmp_path / 'mine.py'}:by_extra"}, num_workers=1,
        max_error_rate=1.0,
    )  # fmt: skip
    with make_reward_scorer(config, tmp_path / "log") as scorer:
        [result] = scorer([make_sample(page=LONG)])
    assert result.status == "masked:LeftOutColumnError"
    assert "the column 'page' of the row is not in extra (too long: a row carries" in result.error


def test_the_rubric_of_a_judge() -> None:
    params = LlmJudgeParams(RewardEndpoint("http://h:1/v1"), "judge", rubric="of all rows")
    assert "of one row" in fill_judge_template(make_sample(rubric="of one row"), params)
    for sample in (make_sample(), make_sample(rubric=None)):
        text = fill_judge_template(sample, params)
        assert "of all rows" in text and "None" not in text
    with pytest.raises(LeftOutColumnError, match=r"the column 'rubric'"):
        fill_judge_template(make_sample(rubric=LONG), params)


def test_the_metadata_of_code_tests() -> None:
    label = json.dumps([{"input": "1", "output": "1", "testtype": "functional"}])
    metadata = json.dumps({"func_name": "f"})
    assert parse_code_tests(label, make_sample(metadata=metadata).extra).function_name == "f"
    for columns in ({"metadata": None}, {}):
        with pytest.raises(ValueError, match=r"functional tests need the name of the function"):
            parse_code_tests(label, make_sample(**columns).extra)
    sample = replace(make_sample(is_named=True, metadata=metadata), label=label)
    result = score_code(sample, CodeParams())
    assert result.status == "masked:bad_label" and "the column 'metadata'" in result.error
