"""JSONL files to checked rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_SHOWN = 5  # problems that an error message lists


@dataclass(frozen=True)
class PromptRow:
    prompt: str
    label: str  # what the reward compares with
    source: str  # name of the file or task
    origin: str  # where a user finds it: "train.jsonl:12"
    extra: str = ""  # JSON object of what else a reward may read


@dataclass(frozen=True)
class RowCounts:
    """Of the non-blank lines of all files."""

    num_rows: int
    num_bad: int  # skipped
    num_duplicates: int  # good rows whose prompt stood in an earlier row; they are kept


def read_jsonl(
    paths: Sequence[str | Path], prompt_key: str, label_key: str, skip_bad_rows: bool
) -> tuple[tuple[PromptRow, ...], RowCounts]:
    """One JSON object a line; `prompt_key` holds a non-empty string, `label_key` a string or a number.

    Raises ValueError for a missing file, for any bad row (unless `skip_bad_rows`), and when no good row is left.
    """
    rows: list[PromptRow] = []
    problems: list[str] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"{path} does not exist or is not a file; check data.train_files and data.val_files.")
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                origin = f"{path}:{number}"
                try:
                    prompt, label = _parse(line, prompt_key, label_key)
                    rows.append(PromptRow(prompt, label, path.stem, origin))
                except ValueError as error:
                    problems.append(f"{origin}: {error}")
    num_rows = len(rows) + len(problems)
    names = ", ".join(map(str, paths))
    if problems and (not skip_bad_rows or not rows):
        listed = "\n".join(f"  {problem}" for problem in problems[:NUM_SHOWN])
        more = f"\n  and {len(problems) - NUM_SHOWN} more" if len(problems) > NUM_SHOWN else ""
        fix = "set data.skip_bad_rows=true to count and skip them" if rows else "no usable row is left"
        raise ValueError(f"{len(problems)} of {num_rows} rows cannot be used:\n{listed}{more}\nCorrect them; {fix}.")
    if not rows:
        raise ValueError(f"the dataset is empty: no rows in {names or 'no files'}; each line must be a JSON object.")
    return tuple(rows), RowCounts(num_rows, len(problems), len(rows) - len({row.prompt for row in rows}))


def _parse(line: bytes, prompt_key: str, label_key: str) -> tuple[str, str]:
    """Prompt and label of one line. Raises ValueError saying what is wrong with it."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {line[error.start] if error.start < len(line) else 0:#04x})") from None
    try:
        row = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {_json_type(row)}, not an object")
    for key, field in ((prompt_key, "data.prompt_key"), (label_key, "data.label_key")):
        if key not in row:
            raise ValueError(f"no key {key!r} (set {field}); it has {', '.join(map(repr, row)) or 'none'}")
    prompt, label = row[prompt_key], row[label_key]
    if not isinstance(prompt, str):
        raise ValueError(f"{prompt_key!r} must be a string, not a JSON {_json_type(prompt)}")
    if not prompt.strip():
        raise ValueError(f"{prompt_key!r} is empty")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"{label_key!r} must be a string or a number, not a JSON {_json_type(label)}")
    return prompt, label if isinstance(label, str) else repr(label)


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
