"""Problems of reasoning-gym as a task, and the reward that reads its entries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.data.data_rows import PromptRow
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.data.tasks.reasoning_gym_task import ReasoningGymTaskParams
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.scorers.reasoning_gym_reward import (
    ReasoningGymRewardParams as RewardParams,
)
from rlhf_megatron.rewards.scorers.reasoning_gym_reward import score_reasoning_gym as score_sample
from rlhf_megatron.rewards.service.reward_scorer import check_rewards_load, make_reward_scorer

try:
    import reasoning_gym as library
except ImportError:
    library = None
needs_library = pytest.mark.skipif(library is None, reason="needs the extra `reasoning-gym`")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def rows(
    dataset: str = "chain_sum", size: int = 30, num_val: int = 10, **params: object
) -> tuple[PromptRow, ...]:
    made = TASKS.get("reasoning_gym").build(
        ReasoningGymTaskParams(dataset, size=size, num_val=num_val, **params)
    )  # type: ignore[arg-type]
    assert (len(made.train), len(made.held_out)) == (size, num_val)
    return (*made.train, *made.held_out)


def score(
    row: PromptRow, response: str, reason: str = "stop", **params: object
) -> tuple[float, str, dict[str, float]]:
    sample = RewardSample(row.prompt, response, row.label, row.source, reason, 1, row.extra)
    result = score_sample(sample, RewardParams(**params))  # type: ignore[arg-type]
    return result.score, result.status, result.parts


@needs_library
def test_problems_are_right_and_differ() -> None:
    """The sums are worked out here from the text of the question."""
    made = rows(config=SUMS, template="Q: {question}\nA:")
    for row in made:
        problem = row.prompt.removeprefix("Q: ").removesuffix(" =\nA:").rpartition(": ")[2]
        left, sign, right = problem.split()
        assert row.label == str(int(left) + (int(right) if sign == "+" else -int(right)))
        assert (
            row.source == "chain_sum" and json.loads(row.extra)["reasoning_gym"]["config"] == SUMS
        )
    assert len({row.prompt for row in made}) == 40
    assert made == rows(config=SUMS, template="Q: {question}\nA:") and made != rows(
        config=SUMS, seed=5
    )


@needs_library
def test_only_the_whole_parsed_answer_counts() -> None:
    row = rows()[0]
    assert score(row, f" {row.label}\n") == (1.0, "ok", {"library": 1.0})
    wrong, _, parts = score(row, f"{row.label} or {row.label}1")
    assert wrong == 0.0 and 0.0 < parts["library"] < 1.0, (
        "the library pays for an answer that contains the right one"
    )
    assert score(row, f"so <answer>{row.label}</answer>", pattern="<answer>(.*)</answer>")[0] == 1.0
    assert score(row, row.label, pattern="<answer>(.*)</answer>")[1] == "malformed"
    assert score(row, row.label, reason="length")[1] == "malformed"
    assert score(row, "9" * 5000)[1] == "malformed"


@needs_library
def test_problems_with_many_answers_are_the_librarys_to_judge() -> None:
    row = rows("graph_color", size=2, num_val=1)[0]
    assert row.label == "" and score(row, "{}")[1] == "masked:no_label"
    entry = json.loads(row.extra)["reasoning_gym"]["entry"]
    colours = json.dumps(entry["metadata"]["possible_answer"])
    assert score(row, colours, score="library") == (1.0, "ok", {"library": 1.0})
    assert score(row, "no colours", score="library")[0] < 0.1


@needs_library
def test_through_processes(tmp_path: Path) -> None:
    config = RewardConfig(name="reasoning_gym", num_workers=2, timeout_s=30.0)
    check_rewards_load(config)
    made = rows()
    with make_reward_scorer(config, tmp_path / "log") as scorer:
        results = scorer(
            [
                RewardSample("", row.label, row.label, row.source, "stop", 1, row.extra)
                for row in made
            ]
        )
    assert {result.score for result in results} == {1.0}
    assert results[0].parts == {"reasoning_gym": 1.0, "reasoning_gym/library": 1.0}


@needs_library
@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (
            {"dataset": "chain_summ"},
            r"dataset \('chain_summ'\) must be one of reasoning-gym's .*chain_sum",
        ),
        ({"config": {"terms": 2}}, r"config .* is not one of reasoning-gym's chain_sum: .*terms"),
        (
            {"config": {"min_terms": 9}},
            "is not one of reasoning-gym's chain_sum: max_terms must be >= min_terms",
        ),
        (
            {"config": {**SUMS, "max_digits": 1}, "size": 500},
            "different problems in .* ask for fewer",
        ),
        ({"dataset": "rearc"}, r"dataset \('rearc'\) cannot be used"),
    ],
)
def test_what_the_library_cannot_do(params: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rows(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"size": 0}, r"size \(0\) must be at least 1"),
        ({"template": "x"}, r"template \('x'\) must have \{question\} in it"),
        ({"config": {"seed": 1}}, r"config \(\['seed'\]\) must not set seed"),
    ],
)
def test_wrong_params(params: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ReasoningGymTaskParams("chain_sum", **params)  # type: ignore[arg-type]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ValueError,
        match=r"reasoning-gym is not there.*pip install -e '\.\[reasoning-gym\]'",
    ):
        rows()
    with pytest.raises(ValueError, match=r"pip install -e '\.\[reasoning-gym\]'"):
        RewardParams().prepare()


@pytest.mark.skipif(library is not None, reason="the library is installed")
def test_a_missing_library_is_told_before_a_run() -> None:
    with pytest.raises(
        ConfigError,
        match=r"reward.params: the reward reasoning_gym needs a package that is not there",
    ):
        check_rewards_load(RewardConfig(name="reasoning_gym"))


def test_a_sample_of_another_task_is_masked() -> None:
    row = PromptRow("1+1=", "2", "addition", "here")
    assert score(row, "2")[1] == "masked:no_entry"
