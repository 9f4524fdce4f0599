"""The file of answers: one JSON line a prompt, appended as answers come, so that a job that was killed goes on.

Beside `answers.jsonl` stands the folder `answers.jsonl.job` with what the job was asked for (`job.json`) and the logs
of its engines. When all prompts are answered the lines are put into the order of the prompts. A file that is to be
parquet is written then, from lines in that folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import DataConfig, SamplingConfig
from rlhf_megatron.data.rows import checked, raw_rows
from rlhf_megatron.observe.line_file import LineFile, write_whole

JOB, LINES = "job.json", "answers.jsonl"
PARQUET = ".parquet"


class AnswerFile:
    """A context manager. `done`: numbers of the prompts that are answered."""

    def __init__(self, path: Path, asked: Mapping[str, Any], num_prompts: int, overwrite: bool = False) -> None:
        """`asked`: what answers depend on. Raises ValueError where the file holds answers of another job."""
        if path.suffix == PARQUET:
            _arrow()
        self.path, self.folder, self.num_prompts = path, path.with_name(path.name + ".job"), num_prompts
        job = self.folder / JOB
        text = json.dumps(asked, indent=1, sort_keys=True) + "\n"
        if overwrite:
            for old in (job, path, self.folder / LINES):
                old.unlink(missing_ok=True)
        if path.exists() and not job.exists():
            raise ValueError(f"{path} exists and is not of this command; give --out another name, or --overwrite.")
        if job.exists() and (differing := differences(json.loads(job.read_text()), asked)):
            raise ValueError(
                f"{path} has answers of another job ({'; '.join(differing)}); give --out another name, or --overwrite."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(job, text.encode())
        self._rows = self.folder / LINES if path.suffix == PARQUET else path
        self._lines = LineFile(self._rows)
        self.done = {row["index"] for row in read_answers(self._rows)}

    @property
    def is_complete(self) -> bool:
        return len(self.done) == self.num_prompts

    def append(self, row: Mapping[str, Any]) -> None:
        """The row is with the operating system when this returns. A prompt that has an answer keeps the first."""
        if row["index"] not in self.done:
            self._lines.write(row)
            self.done.add(row["index"])

    def finish(self) -> None:
        """Put the rows into the order of the prompts; the file is replaced at once."""
        rows = sorted(read_answers(self._rows), key=lambda row: row["index"])
        if self.path.suffix == PARQUET:
            write_whole(self.path, _as_parquet(rows))
        else:
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()


def read_answers(path: Path, data: DataConfig | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file of answers, in the order of the file. `data`: also those that others wrote, which have the
    list `responses` beside what rows of prompts have. Raises ValueError naming file and row."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist, or is no file.")
    for number, row in raw_rows(path):
        try:
            if data is not None and isinstance(row, dict) and "index" not in row and "responses" in row:
                row = _of_others(path, number, row, data)
            if not isinstance(row["index"], int) or not isinstance(row["responses"], list):
                raise TypeError
        except (KeyError, TypeError) as error:
            text = 'an object with "index" and "responses", as `rlhf-megatron generate` writes'
            raise ValueError(f"{path}, line {number} must be {text}.") from error
        yield row


def _of_others(path: Path, number: int, row: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """Such a row as ours: it says nothing of ends and tokens. Raises ValueError."""
    place = f"{path}:{number}"
    responses, rest = row["responses"], {name: value for name, value in row.items() if name != "responses"}
    if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
        raise ValueError(f"{place}: responses must be a list of texts.")
    try:
        asked = checked(rest, data.prompt_key, data.label_key, path.stem, place)
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from error
    prompt = asked.prompt if isinstance(asked.prompt, str) else "\n".join(m.content for m in asked.prompt)
    of_prompt = {"prompt": prompt, "answer": asked.label, "source": asked.source, "extra": asked.extra}
    count = len(responses)
    found: dict[str, Any] = {
        "index": number,
        "responses": responses,
        "finish_reasons": ["stop"] * count,
        "num_tokens": [0] * count,
    }
    return found | of_prompt


def asked_of(sampling: SamplingConfig, max_response_length: int, seed: int) -> dict[str, Any]:
    """Return the settings that answers of every kind of job depend on."""
    return {"sampling": asdict(sampling), "max_response_length": max_response_length, "seed": seed}


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("parquet needs pyarrow; install the extra (pip install '.[parquet]').") from error
    return pyarrow


def _as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    arrow = _arrow()
    out = arrow.BufferOutputStream()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(rows)), out)
    return bytes(out.getvalue())


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what two jobs were asked for differently, a phrase each."""
    names = sorted(before.keys() | now.keys())
    return [f"{n}: {before.get(n)} there, {now.get(n)} here" for n in names if before.get(n) != now.get(n)]


def digest_of(texts: Iterable[str]) -> str:
    """16 hexadecimal digits of the texts in order."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode(errors="surrogatepass") + b"\0")
    return found.hexdigest()[:16]
