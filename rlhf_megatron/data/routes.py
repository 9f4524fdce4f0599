"""Files in which engines write which experts the tokens of a sample met, and ranks read it: the bytes, up to 960 a
token, pass no controller. A file is an array of numpy's, [tokens, layers x experts of a token] of one byte or two, in
the order of the sample's tokens, prompt first, without the last one, which nothing has read. Its layers are those with
experts, or all of the model."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[Any]]


def write_routes(directory: str, ids: Ids) -> str:
    """The path of a new file with `ids` [tokens, ...], of whatever integers. It appears whole. Makes the directory.
    Raises OSError with what to do about it."""
    folder = Path(directory)
    path = folder / f"{uuid.uuid4().hex}.npy"
    aside = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            compact = ids.reshape(len(ids), -1).astype(np.uint8 if ids.max(initial=0) < 256 else np.int16)
            np.save(file, compact, allow_pickle=False)
        os.replace(aside, path)
    except OSError as error:
        raise OSError(
            f"{folder} does not take which experts a sample met ({error.strerror or error}): make room there, or use"
            " actor.router_replay: r2, which writes no files."
        ) from error
    return str(path)


def read_routes(name: str, num_layers: Sequence[int], top_k: int) -> Ids:
    """[tokens, one of `num_layers`, top_k], mapped, not read. Raises ValueError for a file that is missing or of
    another model."""
    if not Path(name).is_file():
        raise ValueError(
            f"{name}, where an engine wrote which experts a sample met, is not there: engines and ranks must see one"
            " file system, and nothing but the run may remove it. Or use actor.router_replay: r2."
        )
    ids: Ids = np.load(name, mmap_mode="r", allow_pickle=False)
    if ids.ndim != 2 or ids.shape[1] not in [number * top_k for number in num_layers]:
        layers = " or ".join(map(str, num_layers))
        raise ValueError(f"{name} has ids of shape {ids.shape}, not [tokens, {layers} layers x {top_k}].")
    return ids.reshape(len(ids), -1, top_k)


def check_ids(name: str, ids: Ids, num_experts: int) -> None:
    """Raises ValueError for an expert that a layer does not have: as a smaller type its id would be another one's."""
    if (highest := int(ids.max(initial=0))) >= num_experts:
        raise ValueError(f"{name} names expert {highest}, and a layer has {num_experts}: it is of another model.")


def are_there(names: Iterable[str]) -> bool:
    """Whether all of these files can be read. One that a machine's end has cut off is empty."""
    paths = [Path(name) for name in names if name]
    return all(path.is_file() and path.stat().st_size for path in paths)


def remove_routes(names: Iterable[str]) -> None:
    """Remove files, those that are there."""
    for name in names:
        if name:
            Path(name).unlink(missing_ok=True)
