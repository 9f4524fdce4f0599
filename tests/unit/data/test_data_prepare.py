"""Published sets: small files with the columns of the real ones, and what is said
where they differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.cli.commands import COMMANDS
from rlhf_megatron.cli.main import main
from rlhf_megatron.rewards.published_datasets import PUBLISHED_DATASETS
from rlhf_megatron.rewards.scorers.math_verify import MathVerifyParams, score_math_verify
from rlhf_megatron.rewards.scorers.reward_types import RewardSample

BOXED = "\n\nReason step by step, and put the final answer into \\boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of"
    " the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "1+1?\n\nRemember to put your answer on its"
    ' own line after "Answer:".'
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "How many?", "answer": "600 * 2 = <<600*2=1200>>1200\n#### 1,200"}],
    "math": [
        {
            "problem": "Half of 1?",
            "level": "Level 1",
            "type": "Algebra",
            "solution": r"So \boxed{\frac{1}{2}}.",
        }
    ],
    "math500": [
        {
            "problem": "1+1?",
            "solution": "two",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "a",
        }
    ],
    "aime24": [
        {"id": 60, "problem": "1+1?", "solution": "two", "answer": "002", "url": "", "year": "2024"}
    ],
    "dapo17k": [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": DAPO, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "extra_info": {"index": "1"},
        }
    ]
    * 3,
}
EXPECTED = {
    "gsm8k": ("How many?" + BOXED, "1200"),
    "math": ("Half of 1?" + BOXED, r"\frac{1}{2}"),
    "math500": ("1+1?" + BOXED, "2"),
    "aime24": ("1+1?" + BOXED, "002"),
    "dapo17k": (DAPO, "2"),
}


def _copy(directory: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """A repository of the set, with the same rows in each split."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for pattern in PUBLISHED_DATASETS[name].files.values():
        file = directory / pattern.replace("*", "00000-of-00001")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.parametrize("name", PUBLISHED_DATASETS)
def test_a_published_set_becomes_prompts_and_labels(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _copy(tmp_path / "copy", name, ROWS[name])
    out = tmp_path / "out"
    assert main(["data", "prepare", name, "--from", str(source), "--out", str(out)]) == 0
    prompt, answer = EXPECTED[name]
    for split in PUBLISHED_DATASETS[name].files:
        (row,) = [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]
        assert row == {"prompt": prompt, "answer": answer, "data_source": name}
    said = capsys.readouterr().out
    assert (
        f"{out}/{next(iter(PUBLISHED_DATASETS[name].files))}.jsonl: 1 rows" in said
        and "reward.name: math_verify" in said
    )


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed 3$.", "3"),
        (r"$x = \fbox{4}$", "4"),
        (r"\boxed{1}, and \boxed{\text{no}}", r"\text{no}"),
        ("none", None),
    ],
)
def test_boxes_of_math_without_braces(solution: str, answer: str | None) -> None:
    assert PUBLISHED_DATASETS["math"].read_answer({"solution": solution}) == answer


def test_the_settings_printed_for_dapo_read_its_answers() -> None:
    import yaml

    (_, text) = PUBLISHED_DATASETS["dapo17k"].settings
    pattern = yaml.safe_load(text)["reward.params.pattern"]
    params = MathVerifyParams(pattern=pattern)
    for response, score in (("so\nAnswer: $2$", 1.0), ("Answer: 3", 0.0), ("answer:2\n", 1.0)):
        sample = RewardSample(DAPO, response, "2", "dapo17k", "stop", 9)
        assert score_math_verify(sample, params).score == score


def test_another_layout_of_the_set_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _copy(tmp_path / "copy", "gsm8k", [{"question": "How many?", "solution": "2"}])
    out = tmp_path / "out"
    assert main(["data", "prepare", "gsm8k", "--from", str(source), "--out", str(out)]) != 0
    said = capsys.readouterr().err
    assert (
        "train-00000-of-00001.parquet:1 lacks 'answer' (it has question, solution)" in said
        and not out.exists()
    )
    assert main(["data", "prepare", "math", "--from", str(source), "--out", str(out)]) != 0
    assert (
        "has no data/train-*.parquet of DigitalLearningGmbH/MATH-lighteval"
        in capsys.readouterr().err
    )


def test_the_command_knows_every_set() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    next(command for command in COMMANDS if command.name == "data").add_arguments(parser)
    for name in PUBLISHED_DATASETS:
        assert parser.parse_args(["prepare", name]).name == name
