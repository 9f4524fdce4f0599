"""The file of answers: one JSON line a prompt, appended as answers come, so that a job that was
killed goes on.

Beside `answers.jsonl` stands the folder `answers.jsonl.job` with what the job was asked for
(`job.json`) and the logs of its engines. When all prompts are answered the lines are put into the
order of the prompts. A file that is to be parquet is written then, from lines in that folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import DataConfig, SamplingConfig
from rlhf_megatron.controller.observe.line_file import LineFile, write_file_atomically
from rlhf_megatron.data.data_rows import parse_prompt_row
from rlhf_megatron.data.extra_columns import ExtraColumnWriter
from rlhf_megatron.data.row_files import iterate_raw_rows
from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.jobs.generation.answer_columns import complete_answer_row

JOB_FILE = "job.json"
LINES_FILE = "answers.jsonl"
PARQUET_SUFFIX = ".parquet"


class AnswerFile:
    """The file of answers of a job, open for appending; a context manager that closes it.
    `answered_indices` holds the numbers of the prompts that have an answer.
    """

    def __init__(
        self, path: Path, fingerprint: Mapping[str, Any], num_prompts: int, overwrite: bool = False
    ) -> None:
        """Open or create the file and the folder beside it. `fingerprint` holds everything that the
        answers depend on; `overwrite` removes former answers first. Raise ValueError where the file
        holds answers of another job, or for parquet without pyarrow.
        """
        if path.suffix == PARQUET_SUFFIX:
            _import_pyarrow()
        self.path = path
        self.job_folder = path.with_name(path.name + ".job")
        self.num_prompts = num_prompts
        job = self.job_folder / JOB_FILE
        text = json.dumps(fingerprint, indent=1, sort_keys=True) + "\n"
        if overwrite:
            for old in (job, path, self.job_folder / LINES_FILE):
                old.unlink(missing_ok=True)
        # An empty file, such as one of `mktemp`, holds nothing that could be lost.
        if path.exists() and path.stat().st_size and not job.exists():
            raise ValueError(
                f"{path} exists and is not of this command; give --out another name,"
                " or --overwrite."
            )
        if job.exists() and (
            differing := list_fingerprint_differences(_read_fingerprint(job), fingerprint)
        ):
            raise ValueError(
                f"{path} has answers of another job ({'; '.join(differing)}); give --out another"
                " name, or --overwrite."
            )
        self.job_folder.mkdir(parents=True, exist_ok=True)
        write_file_atomically(job, text.encode())
        self._rows_path = self.job_folder / LINES_FILE if path.suffix == PARQUET_SUFFIX else path
        self._line_file = LineFile(self._rows_path)
        self.answered_indices = {row["index"] for row in read_answer_rows(self._rows_path)}

    @property
    def is_complete(self) -> bool:
        """Return whether every prompt has an answer."""
        return len(self.answered_indices) == self.num_prompts

    def append(self, row: Mapping[str, Any]) -> None:
        """Append the row of a prompt; the operating system has the row when this returns. Do
        nothing for a prompt that has an answer already.
        """
        if row["index"] not in self.answered_indices:
            self._line_file.write_row(row)
            self.answered_indices.add(row["index"])

    def write_ordered_rows(self) -> None:
        """Write the rows in the order of the prompts, also as parquet if the name asks for that;
        the file is replaced in one step. Raise OSError where the disk has no room for them.
        """
        self._line_file.flush()  # a disk that was full may hold rows back
        rows = sorted(read_answer_rows(self._rows_path), key=lambda row: row["index"])
        if self.path.suffix == PARQUET_SUFFIX:
            write_file_atomically(self.path, _encode_parquet(rows))
        else:
            write_file_atomically(
                self.path, "".join(json.dumps(row) + "\n" for row in rows).encode()
            )

    def __enter__(self) -> AnswerFile:
        """Return this file, which is open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._line_file.close()


def read_answer_rows(
    path: Path,
    data: DataConfig | None = None,
    extra_writer: ExtraColumnWriter | None = None,
    is_scored: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of answers, in the order of the file; rows that are scored have all
    columns that scoring reads (see `complete_answer_row`). With `data`, also accept rows that other
    programs wrote: the columns of a row of prompts and the list `responses`; of their other columns
    `extra_writer` makes what rewards read. Raise ValueError, with file and line, for a missing file
    or any other row.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist, or is no file.")
    extra_writer = extra_writer or ExtraColumnWriter()
    for number, row in iterate_raw_rows(path):
        try:
            if (
                data is not None
                and isinstance(row, dict)
                and "index" not in row
                and "responses" in row
            ):
                row = _convert_foreign_row(path, number, row, data, extra_writer)
            # A program that holds rows in a table may write whole numbers as 3.0.
            if not isinstance(row["index"], int | float) or row["index"] % 1:
                raise TypeError
            if not isinstance(row["responses"], list):
                raise TypeError
            row["index"] = int(row["index"])
        except (KeyError, TypeError) as error:
            if isinstance(row, ValueError):
                raise ValueError(f"{path}, line {number}: {row}.") from error
            text = 'an object with "index" and "responses", as `rlhf-megatron generate` writes'
            raise ValueError(f"{path}, line {number} must be {text}.") from error
        yield complete_answer_row(row, f"{path}, line {number}", path.stem) if is_scored else row


def _convert_foreign_row(
    path: Path,
    line_number: int,
    row: dict[str, Any],
    data: DataConfig,
    extra_writer: ExtraColumnWriter,
) -> dict[str, Any]:
    """Return a row that another program wrote as a row of ours. Finish reasons and numbers of
    tokens, which such a row lacks, become "stop" and 0. Raise ValueError for a row without prompt,
    label or texts.
    """
    place = f"{path}:{line_number}"
    responses = row["responses"]
    rest = {name: value for name, value in row.items() if name != "responses"}
    if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
        raise ValueError(f"{place}: responses must be a list of texts.")
    try:
        prompt_row = parse_prompt_row(
            rest, data.prompt_key, data.label_key, path.stem, place, extra_writer
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from error
    prompt = prompt_row.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(message.content for message in prompt)
    return {
        "index": line_number,
        "responses": responses,
        "finish_reasons": ["stop"] * len(responses),
        "num_tokens": [0] * len(responses),
        "prompt": prompt,
        "answer": prompt_row.label,
        "source": prompt_row.source,
        "extra": prompt_row.extra,
    }


def _read_fingerprint(job_path: Path) -> dict[str, Any]:
    """Return the fingerprint that a former job has written. Raise ValueError where the file is
    damaged.
    """
    try:
        fingerprint = json.loads(job_path.read_bytes())
        if not isinstance(fingerprint, dict):
            raise TypeError("not an object")
        return fingerprint
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{job_path}, which says what the answers are of, cannot be read ({error}); give --out"
            " another name, or --overwrite."
        ) from error


def make_sampling_fingerprint(
    sampling: SamplingConfig, max_response_length: int, seed: int
) -> dict[str, Any]:
    """Return the settings that the answers of every kind of job depend on."""
    return {"sampling": asdict(sampling), "max_response_length": max_response_length, "seed": seed}


def _import_pyarrow() -> Any:
    """Return the module pyarrow, with pyarrow.parquet imported. Raise ValueError if it is not
    installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"parquet needs pyarrow; install the extra ({format_install_command('parquet')})."
        ) from error
    return pyarrow


def _encode_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the rows as the bytes of a parquet file."""
    arrow = _import_pyarrow()
    out = arrow.BufferOutputStream()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(rows)), out)
    return bytes(out.getvalue())


def list_fingerprint_differences(
    stored_fingerprint: Mapping[str, Any], new_fingerprint: Mapping[str, Any]
) -> list[str]:
    """Return a phrase for each entry in which two fingerprints differ, with both values."""
    names = sorted(stored_fingerprint.keys() | new_fingerprint.keys())
    return [
        f"{n}: {stored_fingerprint.get(n)} there, {new_fingerprint.get(n)} here"
        for n in names
        if stored_fingerprint.get(n) != new_fingerprint.get(n)
    ]


def digest_texts(texts: Iterable[str]) -> str:
    """Return a digest of the texts in their order, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode(errors="surrogatepass") + b"\0")
    return found.hexdigest()[:16]
