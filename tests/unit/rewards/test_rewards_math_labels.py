"""Labels and answers of mathematics in many spellings: their scores, and the report on labels
that are not read whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from math_labels import GeneratedLabel, generate_labels
from places import MODEL, ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import DataConfig, RewardConfig
from rlhf_megatron.controller.preflight import list_preflight_checks
from rlhf_megatron.jobs.generation.answer_scoring import score_answer_file
from rlhf_megatron.rewards.scorers import REWARDS, RewardSample
from rlhf_megatron.rewards.scorers.math_spelling import read_formula_spelling, respell_prose
from rlhf_megatron.rewards.scorers.math_verify import MathVerifyParams, score_math_verify
from rlhf_megatron.rewards.scorers.reward_types import PartialReadingParams
from rlhf_megatron.rewards.service.reward_scorer import (
    MAX_READ_LABELS,
    check_reward_labels,
    describe_partial_labels,
)

pytest.importorskip("math_verify", reason="needs the extra `math`")

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_label_kinds.jsonl").read_text("utf-8").splitlines()
]
SENTENCE = "9. Anya needs to climb one floor, Vanya five times longer."


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load math-verify once."""
    MathVerifyParams().prepare()


def score(label: str, response: str, pattern: str | None = None) -> float | str:
    """Return the score; the status where it is masked."""
    result = score_math_verify(
        RewardSample("", response, label, "math", "stop", 1), MathVerifyParams(pattern=pattern)
    )
    return result.status if result.status.startswith("masked") else result.score


def test_the_table_has_forty_kinds_with_five_pairs_in_each_place() -> None:
    places = [(pair["kind"], pair["spelled_in"]) for pair in PAIRS]
    kinds = {kind for kind, _ in places}
    assert len(PAIRS) == 400
    assert len(kinds) == 40
    for kind in kinds:
        assert places.count((kind, "label")) == 5, kind
        assert places.count((kind, "answer")) == 5, kind


def test_every_spelling_has_its_score_in_the_label_and_in_the_answer() -> None:
    wrong = [
        (pair, actual)
        for pair in PAIRS
        if (actual := score(pair["label"], pair["response"])) != pair["score"]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("７", "7", 1),
        ("5 million dollars", "5000000", 1),
        ("2 dozen", "24", 1),
        ("5th", "5", 1),
        ("5^{\\text{th}}", "5", 1),
        ("2pi", r"2\pi", 1),
        ("2π", r"2\pi", 1),
        ("(-∞, 3]", r"(-\infty, 3]", 1),
        ("(2, ∞)", "(2, 3)", 0),
        (r"2+3\mathrm{i}", "3i+2", 1),
        (r"2+3\mathrm{i}", "2", 0),
        ("¹⁄₂", "0.5", 1),
        ("x₁+x₂", "x_2+x_1", 1),
        ("10²³", "10^{23}", 1),
        ("√(2+√3)", r"\sqrt{2+\sqrt{3}}", 1),
        ("Monday", r"\text{Monday}", 1),
        ("Monday", r"\text{Sunday}", 0),
        ("five", "5", 1),
        (r"0.5\,", "0.5", 1),
        (r"\(3\) and \(4\)", "3", 0),
        ("sin(x)", r"\sin x", 1),
        ("ln 2", r"\ln 2", 1),
        ("log₂8", "3", 1),
        ("x is 5", "5", 1),
        ("2e-3", "2e - 3", 1),
        ("2e-3", "0.002", 1),
        ("2e-3", "2", 0),
        ("5 m", "5 s", 0),
        ("2ab", "2", 0),
        ("xyz", "zyx", 1),
        ("20 °C", "20", 1),
        ("9.8 m/s²", r"9.8\ \mathrm{m/s^2}", 1),
        ("10 km/h", r"10\,\frac{\mathrm{km}}{\mathrm{h}}", 1),
        ("10 km/h", r"10\frac{km}{h}", 1),
        ("10–20%", "10%", 0),
        (r"7\text{--}8", "7", 0),
        ("1990–1995", "1990", 0),
        ("(7–8)", "7", 0),
        ("7–8", "7 – 8 km", 1),
        ("9**9**9**9", "1", "masked:bad_label"),
        ("1_000_000", "10^6", 1),
        ("1_000", "1", 0),
        ("12_34", "12", 0),
        ("0x1F", "31", 1),
        ("0x1F", "0", 0),
        ("0b101", "5", 1),
        ("31", "0o37", 1),
    ],
)
def test_other_spellings(label: str, answer: str, expected: float | str) -> None:
    assert score(label, f"\\boxed{{{answer}}}") == expected


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("42", "***42***", 1),
        ("42", r"**\(42\)**", 1),
        ("42", "**42.**", 1),
        ("42", "# 42", 1),
        ("42", "42!!", 1),
        ("42", "**Final answer:** 42", 1),
        ("42", r"$\boxed{42}$!", 1),
        ("42", r"\boxed{42!}", 0),
        ("-42", "-42", 1),
        ("-42", "−42", 1),
        ("-42", "- 42", 0),
        ("5-x", "- x + 5", 1),
        ("8", "roughly 7–8 apples", 0),
        ("1024", "This gives 2**10 as the answer", 1),
        ("2", "This gives 2**10 as the answer", 0),
        ("0.001", "it is 10⁻³ in the end", 1),
        ("1000000", "so it is 1e6 in all", 1),
        ("90.5", "The angle is 90°30'.", 1),
        ("90", "The angle is 90°30'.", 0),
        ("4343", "The answer is 4343_6", 0),
        ("10", "The answer is $10 km/h$.", 1),
        ("5", "It cost $5 and not $4, so $5", 1),
        ("5", "the answer is 9**9**9**9", 0),
        ("5", r"the answer is \boxed{9**9**9**9}", 0),
    ],
)
def test_responses_without_a_box(label: str, response: str, expected: float) -> None:
    assert score(label, response) == expected


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("42", "**Answer:** 42", 1),
        ("42", "**Answer: 42**", 1),
        ("42", "Answer: 42!", 1),
        ("120", "Answer: 5!", 1),
        ("-42", "Answer: - 42", 1),
        ("42", "Answer: - 42", 0),
        ("1000", r"Answer: 1\,000", 1),
        ("10", "Answer: 10 km/h", 1),
    ],
)
def test_answers_that_a_pattern_cuts_out(label: str, response: str, expected: float) -> None:
    assert score(label, response, r"(?i)answer\s*:\s*([^\n]+)") == expected


def check_generated(labels: list[GeneratedLabel]) -> None:
    """Assert that right answers score 1 and wrong ones 0, in a box and without one, and that the
    whole of each label counts.
    """
    params = MathVerifyParams()
    for label in labels:
        scores = [
            score(label.label, response)
            for response in (
                f"\\boxed{{{label.right}}}",
                f"\\boxed{{{label.wrong}}}",
                f"so \\boxed{{ {label.label} }}.",
                label.right,
                label.wrong,
                f"The answer is ${label.right}$.",
            )
        ]
        assert scores == [1, 0, 1, 1, 0, 1], label
        assert params.describe_partial_reading(label.label) == "", label


def test_usual_labels_have_the_scores_of_their_values() -> None:
    check_generated(list(generate_labels(150, seed=40)))


@pytest.mark.long
def test_five_thousand_usual_labels_have_the_scores_of_their_values() -> None:
    check_generated(list(generate_labels(5000, seed=1)))


def test_spellings_that_nothing_changes_are_left_as_they_are() -> None:
    for text in (
        "42",
        "-0.5",
        r"\frac{1}{2}",
        "(1, 2)",
        "[0,1)",
        "x^2+2x+1",
        "7-8",
        r"\{1,2\}",
        "x=3",
        "12\\%",
        "f(x)=2x",
        "a_n",
        r"\log_2 8",
        "7--8",
    ):
        spelling = read_formula_spelling(text)
        assert (spelling.main, spelling.alternatives) == (text, ()), text
    prose = "We sum 1 and 2, so x_1 = 3 and $y = \\frac{1}{2}$. It cost $5, not $6."
    assert respell_prose(prose) == prose


def test_hostile_responses_take_no_time() -> None:
    """Each pattern that looks at a response is linear in its length: the test would not end."""
    for piece in ("1", "1 ", "$1", r"\(", "**1", "√", "½", "1°", "–", "1–", "{", r"\text{"):
        respell_prose("½ " + piece * (60_000 // len(piece)))
        read_formula_spelling(piece * (256 // len(piece)))


# --- the report on labels that are not read whole -------------------------------------------------


@pytest.mark.parametrize(
    ("label", "reading"),
    [
        ("42", ""),
        ("2√3", ""),
        ("10 km/h", ""),
        ("7–8", ""),
        ("Monday", ""),
        (SENTENCE, "counts as 5 only"),
        ("5 bananas", "counts without 'bananas', too"),
        ("4 @ 5", "counts as 5 only"),
        ("3 ? 4", "counts as 4 only"),
        ("5♥", "counts as 5 only"),
        ("5 mod 7", "counts 'mod' as a product of its letters"),
        ("x=3 where y", "counts 'where' as a product of its letters"),
        ("9^{9^{9}}", "is too large to work out and is masked"),
        ("¢25", "cannot be read as mathematics: only the same text is right"),
        ("5 4", "counts '5 4' as the sum of two numbers"),
        (r"\frac 5 4", ""),
        ("1 1/2", ""),
        ("12 cm × 5 cm", "counts 'cm' as a product of its letters"),
        ("5 cm and 3 cm", "counts 'cm' as a product of its letters"),
        ("3 hours 30 minutes", "counts as 30 only"),
    ],
)
def test_how_a_label_counts(label: str, reading: str) -> None:
    assert MathVerifyParams().describe_partial_reading(label) == reading


@pytest.mark.parametrize(
    ("name", "label", "reading"),
    [
        ("gsm8k", "1,234", ""),
        ("gsm8k", "1,5", "counts as '15', since commas fall away"),
        ("math", r"\frac12", ""),
        ("math", r"5\text{ cm}", ""),
        ("math", r"5\text{ or }6", "counts as '5' only"),
        ("math_dapo", "x = 5", ""),
        ("math_dapo", "x=3, y=4", "counts as '4' only"),
        ("short_answer", "Paris", ""),
        ("short_answer", "1,000", ""),
        ("short_answer", "-1.5", "counts as '15', since punctuation falls away"),
    ],
)
def test_how_other_rewards_count_a_label(name: str, label: str, reading: str) -> None:
    params_class = REWARDS.get(name).params
    assert params_class is not None
    params = params_class()
    assert isinstance(params, PartialReadingParams)
    assert params.describe_partial_reading(label) == reading


LABELS = [
    *[("a", "42", "")] * 5,
    ("a", SENTENCE, ""),
    *[("a", "5 bananas", "")] * 2,
    ("a", "4 @ 5", ""),
    ("a", "3 ? 4", ""),
    ("b", "2√3", ""),
]
LINE = (
    "reward (math_verify) does not read 5 of 10 labels of the source 'a' whole:"
    f" {SENTENCE!r} counts as 5 only; '5 bananas' counts without 'bananas', too; '4 @ 5' counts as"
    " 5 only. Answers are compared with what it reads; write the answer alone into such rows."
)


def test_labels_that_are_not_read_whole_are_counted_with_three_examples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert describe_partial_labels(RewardConfig(name="math_verify"), LABELS) == [LINE]
    assert describe_partial_labels(RewardConfig(name="exact_match"), LABELS) == []
    check_reward_labels(RewardConfig(name="math_verify"), LABELS)
    assert [record.message for record in caplog.records] == [LINE]


def test_of_many_different_labels_as_many_are_read_as_take_seconds() -> None:
    labels = [("a", str(number), "") for number in range(2 * MAX_READ_LABELS - 1)]
    [line] = describe_partial_labels(
        RewardConfig(name="math_verify"), [("a", "4 @ 5", ""), *labels]
    )
    assert f"does not read 1 of {MAX_READ_LABELS} labels, of {2 * MAX_READ_LABELS} in all" in line


def test_a_file_of_answers_is_reported_before_its_answers_are_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"question": "Who is faster?", "answer": SENTENCE, "responses": [r"\boxed{5}"]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    [scored] = score_answer_file(
        tmp_path / "answers.jsonl",
        RewardConfig(name="math_verify", num_workers=1),
        tmp_path / "log",
        DataConfig(prompt_key="question", label_key="answer"),
    )
    assert [result.score for item in scored.results for result in item] == [1.0]
    assert "does not read 1 of 1 labels of the source 'answers' whole" in caplog.text


def test_a_run_and_data_show_report_such_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1+2=", "answer": label} for label in ("3", "3 ? 4")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"model.path={MODEL}",
        f"trainer.default_local_dir={tmp_path / 'runs'}",
        "data.task=null",
        f"data.train_files=[{path}]",
        "reward.name=math_verify",
        "warmup.max_steps=0",
        f"data.val_files=[{path}]",
        "actor.mini_batch_size=32",
        "data.train_batch_size=2",
    ]
    line = (
        "reward (math_verify) does not read 2 of 4 labels of the source 'rows' whole: '3 ? 4'"
        " counts as 4 only."
    )
    run_file = ROOT / "configs" / "quickstart.yaml"
    assert main(["data", "show", str(run_file), "-n", "1", *settings]) == 0
    assert line in capsys.readouterr().out
    config = read_run_config(run_file, settings).config
    for check in list_preflight_checks():
        if "data.train_files" in check.required_keys:
            check.run(config)
    assert line in caplog.text


def test_evaluate_checks_the_labels_before_it_asks_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens at the address: a model that were asked first would give another error."""
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "1+2=", "answer": ["3", "three"]}) + "\n")
    command = ["evaluate", "http://127.0.0.1:9/v1", str(path), "--model", "none"]
    out = tmp_path / "answers.jsonl"
    assert main([*command, "--out", str(out), "reward.name=math_verify"]) != 0
    assert "1 of 1 labels of the source 'questions' could score" in capsys.readouterr().err
    assert not out.exists()
