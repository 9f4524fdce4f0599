"""Published sets of questions with answers as JSONL: one prompt and one label a line, each
question once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.config.hub import download_from_hub
from rlhf_megatron.data.row_files import iterate_raw_rows
from rlhf_megatron.rewards.scorers.answer_params import find_last_boxed
from rlhf_megatron.write_errors import write_text_file

BOXED_TEMPLATE = "{question}\n\nReason step by step, and put the final answer into \\boxed{{}}."
GREEDY_SETTINGS = (
    "data.max_response_length=2048",
    "rollout.val_kwargs.n=1",
    "rollout.val_kwargs.temperature=0",
)
SAMPLED_SETTINGS = ("rollout.val_kwargs.temperature=0.6", "rollout.val_kwargs.top_p=0.95")
MATH_VERIFY_SETTINGS = ("reward.name: math_verify",)  # it reads the last \boxed{}

_BARE = re.compile(r"\\(?:boxed|fbox) +([^\s${}\\]+)")


@dataclass(frozen=True)
class PublishedDataset:
    """A data set of a hub, and how its rows are read."""

    repository: str
    description: str
    files: Mapping[str, str]  # "train" or "test" -> pattern of its files
    read_question: Callable[[Any], str]
    read_answer: Callable[[Any], str | None]
    template: str = BOXED_TEMPLATE
    settings: tuple[str, ...] = MATH_VERIFY_SETTINGS  # of a run on it, beside its files
    # how `evaluate --task` asks its questions; () without held-out ones
    sampling: tuple[str, ...] = GREEDY_SETTINGS


def _make_column_reader(column_name: str) -> Callable[[Any], str]:
    """Return a function that reads this column of a row as text."""
    return lambda row: str(row[column_name])


def _read_gsm8k_answer(row: Any) -> str | None:
    """Return the answer behind the last "####" of a GSM8K solution, without commas ("#### 1,234");
    None where there is no mark.
    """
    _, marks, answer = str(row["answer"]).rpartition("####")
    return answer.strip().replace(",", "") if marks else None


def _read_boxed_answer(row: Any) -> str | None:
    r"""Return the last box of a MATH solution, or None. A few solutions write \boxed 3 without
    braces.
    """
    solution = str(row["solution"])
    bare = _BARE.findall(solution)
    return find_last_boxed(solution) or (bare[-1].rstrip(".,") if bare else None)


PUBLISHED_DATASETS = {
    "gsm8k": PublishedDataset(
        "openai/gsm8k",
        "grade-school sums, 7,473 and 1,319",
        {"train": "main/train-*.parquet", "test": "main/test-*.parquet"},
        _make_column_reader("question"),
        _read_gsm8k_answer,
    ),
    "math": PublishedDataset(
        "DigitalLearningGmbH/MATH-lighteval",
        "competition problems, 7,500 and 5,000",
        {"train": "data/train-*.parquet", "test": "data/test-*.parquet"},
        _make_column_reader("problem"),
        _read_boxed_answer,
        sampling=(*SAMPLED_SETTINGS, "data.max_response_length=4096", "rollout.val_kwargs.n=4"),
    ),
    "math500": PublishedDataset(
        "HuggingFaceH4/MATH-500",
        "500 of MATH, held out",
        {"test": "test.jsonl"},
        _make_column_reader("problem"),
        _make_column_reader("answer"),
        sampling=(*SAMPLED_SETTINGS, "data.max_response_length=4096", "rollout.val_kwargs.n=4"),
    ),
    "aime24": PublishedDataset(
        "HuggingFaceH4/aime_2024",
        "the 30 problems of AIME 2024, held out",
        {"test": "data/train-*.parquet"},
        _make_column_reader("problem"),
        _make_column_reader("answer"),
        sampling=(*SAMPLED_SETTINGS, "data.max_response_length=16384", "rollout.val_kwargs.n=32"),
    ),
    "dapo17k": PublishedDataset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "17,000 problems with whole numbers as answers; the file repeats each a hundred times",
        {"train": "data/dapo-math-17k.parquet"},
        lambda row: row["prompt"][-1]["content"],
        lambda row: str(row["reward_model"]["ground_truth"]),
        "{question}",  # its text says how to answer
        ("reward.name: math_verify", 'reward.params.pattern: "(?i)answer\\\\s*:\\\\s*([^\\\\n]+)"'),
        (),
    ),
}


def fetch_dataset(published: PublishedDataset) -> Path:
    """Return a directory with a copy of the data set's repository, downloaded from the hub or from
    its cache. Raise ValueError where that fails. Of the repository, only the files that
    `published.files` names are downloaded.
    """
    return Path(
        download_from_hub(
            published.repository, None, list(published.files.values()), is_dataset=True
        )
    )


def prepare_held_out_file(dataset_name: str) -> tuple[Path, list[str]]:
    """Return the path data/NAME/test.jsonl of a data set's held-out file, and the settings
    ("key=value") with which `evaluate --task` uses it. Download and write the data set where the
    file does not exist. Raise ValueError as `prepare_dataset` does.
    """
    published = PUBLISHED_DATASETS[dataset_name]
    out = Path("data") / dataset_name
    if not (out / "test.jsonl").is_file():
        prepare_dataset(dataset_name, fetch_dataset(published), out)
    settings = [setting.replace(": ", "=", 1) for setting in published.settings]
    asked = ["data.apply_chat_template=true", "data.max_prompt_length=2048", *published.sampling]
    return out / "test.jsonl", [*asked, *settings]


def prepare_dataset(
    dataset_name: str, source_directory: Path, output_directory: Path
) -> dict[str, int]:
    """Write train.jsonl and test.jsonl, as far as the data set has them, to `output_directory`,
    from the files in `source_directory`, a copy of the data set's repository. Return the number of
    rows by split.

    Raise ValueError where files or columns are missing, or rows have no answer that can be read;
    nothing is written then.
    """
    published = PUBLISHED_DATASETS[dataset_name]
    texts = {}
    for split, pattern in published.files.items():
        files = sorted(source_directory.glob(pattern))
        if not files:
            raise ValueError(
                f"{source_directory} has no {pattern} of {published.repository}; give a copy of"
                " that repository."
            )
        rows = [
            json.dumps(row, ensure_ascii=False) + "\n"
            for file in files
            for row in _iterate_prompt_rows(published, dataset_name, file)
        ]
        texts[split] = list(dict.fromkeys(rows))
    output_directory.mkdir(parents=True, exist_ok=True)
    for split, lines in texts.items():
        aside = output_directory / f".{split}.jsonl.partial"
        write_text_file(aside, "".join(lines))
        aside.replace(output_directory / f"{split}.jsonl")
    return {split: len(lines) for split, lines in texts.items()}


def _iterate_prompt_rows(
    published: PublishedDataset, dataset_name: str, file: Path
) -> Iterator[dict[str, str]]:
    """Yield the rows of a file as dicts of prompt, answer and data_source. Raise ValueError for a
    row that lacks a column or an answer.
    """
    for number, row in iterate_raw_rows(file):
        if isinstance(row, ValueError):
            raise ValueError(f"{file}:{number}: {row}; download it again.")
        try:
            question, answer = published.read_question(row), published.read_answer(row)
        except (KeyError, TypeError, IndexError) as error:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"{file}:{number} lacks {error} (it has {found}): not the columns that"
                f" {published.repository} had when this was written; write the JSONL yourself"
                " (docs/data.md, Rows)."
            ) from error
        if not answer:
            raise ValueError(f"{file}:{number} has no answer that can be read; download it again.")
        yield {
            "prompt": published.template.format(question=question),
            "answer": answer,
            "data_source": dataset_name,
        }
