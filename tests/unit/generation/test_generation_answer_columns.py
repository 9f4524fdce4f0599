"""Rows of answers with keys of other types, or without some: completed, or named in an error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.agents.episode_batch import EpisodeRewardWeights
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.jobs.generation.answer_file import AnswerFile
from rlhf_megatron.jobs.generation.answer_scoring import (
    compare_answers,
    score_answer_file,
    score_responses,
)
from rlhf_megatron.rewards.scorers.reward_types import RewardResult, RewardSample

ROW: dict[str, Any] = {
    "index": 0,
    "source": "sums",
    "prompt": "1+1?",
    "answer": "2",
    "responses": ["2", "3"],
    "finish_reasons": ["stop", "length"],
    "num_tokens": [1, 2],
    "extra": '{"level": 1}',
}


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("changes", "extra", "lengths"),
    [
        ({}, '{"level": 1}', (1, 2)),
        ({"extra": {"level": 1}}, '{"level": 1}', (1, 2)),
        ({"extra": None}, "", (1, 2)),
        ({"finish_reasons": None, "num_tokens": None}, '{"level": 1}', (0, 0)),
        ({"num_tokens": [3.0, 4.0], "answer": 2}, '{"level": 1}', (3, 4)),
        ({"answer": 2.0}, '{"level": 1}', (1, 2)),
    ],
)
@pytest.mark.parametrize("is_absent", [False, True])
def test_rows_that_another_program_wrote_are_completed(
    tmp_path: Path,
    changes: dict[str, Any],
    extra: str,
    lengths: tuple[int, int],
    is_absent: bool,
) -> None:
    row = {**ROW, **changes}
    if is_absent:
        row = {name: value for name, value in row.items() if value is not None}
    path = write_rows(tmp_path / "answers.jsonl", row)
    (scored,) = score_answer_file(path, RewardConfig(), tmp_path / "log")
    assert scored.collect_valid_scores() == [(1.0, 0.0)]
    assert scored.prompts.extras == (extra,) and scored.lengths == (lengths,)
    assert scored.prompts.labels == ("2",)


def test_a_row_without_a_source_has_that_of_its_file(tmp_path: Path) -> None:
    row = {name: value for name, value in ROW.items() if name != "source"}
    (scored,) = score_answer_file(
        write_rows(tmp_path / "sums_of_today.jsonl", row), RewardConfig(), tmp_path / "log"
    )
    assert scored.name == "sums_of_today"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": ["a"]}, "'extra' (['a']) must be an object, or the JSON of one."),
        ({"extra": "[1]"}, "'extra' ('[1]') must be an object, or the JSON of one."),
        ({"finish_reasons": ["stop"]}, "'finish_reasons' (['stop']) must be a list of 2 texts"),
        ({"num_tokens": [1, -1]}, "'num_tokens' ([1, -1]) must be a list of 2 numbers of tokens"),
        ({"responses": ["2", None]}, "'responses' (['2', None]) must be a list of 2 texts"),
        ({"prompt": None}, "has no 'prompt'; it has 'index', 'source', "),
        ({"answer": None}, "has no 'answer'"),
        ({"answer": True}, "'answer' (True) must be a text."),
        ({"source": ""}, "'source' ('') must be the name of a data source."),
        ({"responses": ["2", "\ud800"]}, "its 'responses' has half of a surrogate pair (\\ud800"),
    ],
)
def test_what_a_row_lacks_is_named_with_row_and_key(
    tmp_path: Path, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "answers.jsonl", ROW, {**ROW, "index": 1, **changes})
    assert main(["evaluate", str(path)]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: {path}, line 2") and words in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("digits", ["[" * 50_000 + "]" * 50_000, "9" * 5000])
def test_a_line_that_no_program_can_read_is_named(
    tmp_path: Path, digits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "answers.jsonl", ROW, {**ROW, "answer": "@"})
    path.write_text(path.read_text().replace('"@"', digits))
    assert main(["evaluate", str(path)]) == 1
    assert f"{path}, line 2: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"loss": "x"}, {"loss": []}, {"num_tokens": []}, {"num_tokens": [0]}, {"source": None}],
)
def test_losses_that_are_none_are_named(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"index": 7, "source": "sums", "responses": [], "loss": 3.0, "num_tokens": [3]}
    path = write_rows(tmp_path / "losses.jsonl", {**row, **changes})
    assert main(["evaluate", str(path), "--loss"]) == 1
    assert f"error: {path}: the row with index 7 must have" in capsys.readouterr().err


def test_a_damaged_description_of_the_job_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerFile(path, {"seed": 1}, 1) as answers:
        answers.append(ROW)
    job = tmp_path / "answers.jsonl.job" / "job.json"
    for text in ("[]", "{", "[" * 100_000):
        job.write_text(text)
        with pytest.raises(ValueError, match=r"job\.json, which says what .* --overwrite"):
            AnswerFile(path, {"seed": 1}, 1)


EPISODE: dict[str, Any] = {
    "end": "done",
    "status": "ok",
    "reward": None,
    "turn_rewards": [],
    "num_turns": 2,
    "messages": [],
}


def test_the_environment_and_the_scorers_judge_episodes() -> None:
    """The scorer gives "2" a 1 and other answers a 0."""
    cases = [
        # answer, episode, reward by the environment alone, with weights of 2 and 0.5
        ("2", {}, 1.0, 1.0),  # the environment leaves it to the scorers
        ("3", {}, 0.0, 0.0),
        ("3", {"reward": 0.5, "turn_rewards": [0.25, 0.0]}, 0.75, 1.5),
        ("2", {"reward": 0.5}, 0.5, 1.5),
        ("2", {"status": "timeout", "end": "timeout"}, 0.0, 0.0),
        ("2", {"status": "masked:refused", "end": "refused", "error": "why"}, 0.0, 0.0),
    ]
    row = ROW | {
        "responses": [answer for answer, *_ in cases],
        "episodes": [EPISODE | changes for _, changes, *_ in cases],
    }
    samples = [RewardSample("?", answer, "2", "sums", "stop", 1) for answer in row["responses"]]
    asked: list[int] = []

    def score(batch: list[RewardSample]) -> list[RewardResult]:
        asked.append(len(batch))
        return [RewardResult(float(sample.response == "2")) for sample in batch]

    alone = score_responses([row], samples, score, None)
    weighed = score_responses([row], samples, score, EpisodeRewardWeights(2.0, 0.5))
    assert asked == [2, 4]
    assert [result.score for result in alone] == [case[2] for case in cases]
    assert [result.score for result in weighed] == [case[3] for case in cases]
    for results in (alone, weighed):
        assert [result.status for result in results[-2:]] == ["timeout", "masked:refused"]
        assert results[-1].error == "why"


@pytest.mark.parametrize(
    "changes",
    [
        {"end": None},
        {"status": 1},
        {"reward": "1"},
        {"reward": math.nan},
        {"turn_rewards": None},
        {"turn_rewards": [True]},
        {"num_turns": -1},
    ],
)
def test_episodes_of_another_shape_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    row = {**ROW, "episodes": [EPISODE, EPISODE | changes]}
    path = write_rows(tmp_path / "answers.jsonl", row)
    with pytest.raises(ValueError, match=r"'episodes' .* must be a list of 2 episodes"):
        score_answer_file(path, RewardConfig(), tmp_path / "log")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            [],
            "scored by exact_match, the default; reward.name=NAME chooses another"
            " (rlhf-megatron algorithms lists all)",
        ),
        (["reward.name=exact_match"], "scored by exact_match"),
        (
            [
                "reward.by_source={sums: {name: gsm8k}}",
                "reward.name=short_answer",
                "reward.terms=[{name: format, params: {pattern: '.*'}}]",
            ],
            "scored by short_answer, gsm8k for sums, with the terms format",
        ),
    ],
)
def test_the_reward_of_the_scores_is_named(
    tmp_path: Path, settings: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "answers.jsonl", ROW)
    assert main(["evaluate", str(path), *settings]) == 0
    assert line in capsys.readouterr().err.splitlines()


def test_rewards_out_of_range_are_masked_as_in_training() -> None:
    row = ROW | {"responses": ["2"], "episodes": [EPISODE | {"reward": 1e30}]}
    sample = RewardSample("?", "2", "2", "sums", "stop", 1)
    [result] = score_responses([row], [sample], lambda samples: [], None)
    assert result.status == "masked:environment_failed" and "1e+30" in result.error


def test_items_with_one_prompt_are_compared_one_by_one(tmp_path: Path) -> None:
    """Games may all begin with "?": four items, of which three lose in the second file."""
    files = []
    for name, rewards in (("first", [1.0, 1.0, 1.0, 0.0]), ("second", [0.0] * 4)):
        rows = [
            ROW
            | {"prompt": "?", "index": index, "answer": "2" if index < 2 else "3"}
            | {"episodes": [EPISODE | {"reward": reward}] * 2}
            for index, reward in enumerate(rewards)
        ]
        path = write_rows(tmp_path / f"{name}.jsonl", *rows)
        files.append(score_answer_file(path, RewardConfig(), tmp_path / "log"))
    num_items, difference, _ = compare_answers(*files)
    assert (num_items, difference) == (4, -0.75)
