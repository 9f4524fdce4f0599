"""Data files as rows of plain values: JSONL, and parquet where pyarrow is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARQUET_BATCH = 1024  # rows that are held as Python objects at once


def raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number counted from 1, the row's value) of each row; a ValueError in place of one that cannot be read.

    `*.parquet` is parquet, anything else JSONL: one JSON value a line, blank lines left out. Raises ValueError for a
    file that is missing or not what its name says, and for parquet without pyarrow.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file; check data.train_files and data.val_files.")
    return _parquet(path) if path.suffix == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse(line)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 (byte {line[error.start] if error.start < len(line) else 0:#04x})")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path}: parquet files need pyarrow; install the extra (pip install '.[parquet]'), or convert the file to"
            " JSONL."
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file that pyarrow can read ({error}); write it again.") from error


def _without_nulls(value: Any) -> Any:
    """Columns and struct fields that a row leaves open are null in parquet, and absent in JSONL."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
