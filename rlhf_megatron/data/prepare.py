"""Published sets of questions with answers as JSONL: one prompt and one label a line, each question once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.config.hub import download
from rlhf_megatron.data.rows import raw_rows
from rlhf_megatron.rewards.scorers.answer import last_boxed

BOXED = "{question}\n\nReason step by step, and put the final answer into \\boxed{{}}."
GREEDY = ("data.max_response_length=2048", "rollout.val_kwargs.n=1", "rollout.val_kwargs.temperature=0")
SAMPLED = ("rollout.val_kwargs.temperature=0.6", "rollout.val_kwargs.top_p=0.95")
VERIFIED = ("reward.name: math_verify",)  # it reads the last \boxed{}


@dataclass(frozen=True)
class Published:
    """A data set of a hub, and how its rows are read."""

    repository: str
    about: str
    files: Mapping[str, str]  # "train" or "test" -> pattern of its files
    question: Callable[[Any], str]
    answer: Callable[[Any], str | None]
    template: str = BOXED
    settings: tuple[str, ...] = VERIFIED  # of a run on it, beside its files
    sampling: tuple[str, ...] = GREEDY  # how `evaluate --task` asks its questions; () without held-out ones


def _column(name: str) -> Callable[[Any], str]:
    return lambda row: str(row[name])


def _after_marks(row: Any) -> str | None:
    """GSM8K: the solution ends with "#### 1,234"."""
    _, marks, answer = str(row["answer"]).rpartition("####")
    return answer.strip().replace(",", "") if marks else None


_BARE = re.compile(r"\\(?:boxed|fbox) +([^\s${}\\]+)")


def _boxed(row: Any) -> str | None:
    r"""Return the last box of a solution of MATH; a few of them write \boxed 3 without braces."""
    solution = str(row["solution"])
    bare = _BARE.findall(solution)
    return last_boxed(solution) or (bare[-1].rstrip(".,") if bare else None)


SETS = {
    "gsm8k": Published(
        "openai/gsm8k",
        "grade-school sums, 7,473 and 1,319",
        {"train": "main/train-*.parquet", "test": "main/test-*.parquet"},
        _column("question"),
        _after_marks,
    ),
    "math": Published(
        "DigitalLearningGmbH/MATH-lighteval",
        "competition problems, 7,500 and 5,000",
        {"train": "data/train-*.parquet", "test": "data/test-*.parquet"},
        _column("problem"),
        _boxed,
        sampling=(*SAMPLED, "data.max_response_length=4096", "rollout.val_kwargs.n=4"),
    ),
    "math500": Published(
        "HuggingFaceH4/MATH-500",
        "500 of MATH, held out",
        {"test": "test.jsonl"},
        _column("problem"),
        _column("answer"),
        sampling=(*SAMPLED, "data.max_response_length=4096", "rollout.val_kwargs.n=4"),
    ),
    "aime24": Published(
        "HuggingFaceH4/aime_2024",
        "the 30 problems of AIME 2024, held out",
        {"test": "data/train-*.parquet"},
        _column("problem"),
        _column("answer"),
        sampling=(*SAMPLED, "data.max_response_length=16384", "rollout.val_kwargs.n=32"),
    ),
    "dapo17k": Published(
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


def fetched(published: Published) -> Path:
    """A copy of the set's repository, from the hub or its cache. Raises ValueError."""
    return Path(download(published.repository, None, list(published.files.values()), is_data=True))


def questions(name: str) -> tuple[Path, list[str]]:
    """The held-out file of a set, in data/NAME, and the settings with which `evaluate --task` asks it. Fetches the set
    where the file is not there. Raises ValueError as `prepare` does."""
    published, out = SETS[name], Path("data") / name
    if not (out / "test.jsonl").is_file():
        prepare(name, fetched(published), out)
    settings = [setting.replace(": ", "=", 1) for setting in published.settings]
    asked = ["data.apply_chat_template=true", "data.max_prompt_length=2048", *published.sampling]
    return out / "test.jsonl", [*asked, *settings]


def prepare(name: str, source: Path, out: Path) -> dict[str, int]:
    """Write `out`/train.jsonl and test.jsonl from the files of `source`; return how many rows each has.

    `source`: a copy of the data set's repository. Raises ValueError where files or columns are missing, or rows have no
    answer that can be read; nothing is written then.
    """
    published, texts = SETS[name], {}
    for split, pattern in published.files.items():
        files = sorted(source.glob(pattern))
        if not files:
            raise ValueError(f"{source} has no {pattern} of {published.repository}; give a copy of that repository.")
        rows = [json.dumps(row, ensure_ascii=False) + "\n" for file in files for row in _rows(published, name, file)]
        texts[split] = list(dict.fromkeys(rows))
    out.mkdir(parents=True, exist_ok=True)
    for split, lines in texts.items():
        aside = out / f".{split}.jsonl.partial"
        aside.write_text("".join(lines), encoding="utf-8")
        aside.replace(out / f"{split}.jsonl")
    return {split: len(lines) for split, lines in texts.items()}


def _rows(published: Published, name: str, file: Path) -> Iterator[dict[str, str]]:
    for number, row in raw_rows(file):
        if isinstance(row, ValueError):
            raise ValueError(f"{file}:{number}: {row}; download it again.")
        try:
            question, answer = published.question(row), published.answer(row)
        except (KeyError, TypeError, IndexError) as error:
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"{file}:{number} lacks {error} (it has {found}): not the columns that {published.repository} had when"
                " this was written; write the JSONL yourself (docs/data.md, Rows)."
            ) from error
        if not answer:
            raise ValueError(f"{file}:{number} has no answer that can be read; download it again.")
        yield {"prompt": published.template.format(question=question), "answer": answer, "data_source": name}
