"""Checkpoints from strangers: nothing in `.metadata`, `common.pt` or a pickled object runs,
whatever it says.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_pool import DistPool, JobError
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.safe_pickle import (
    read_checkpoint_metadata,
    read_plain_file,
    read_plain_values,
)

STATE = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "half": torch.arange(6, dtype=torch.bfloat16),
    "ids": torch.tensor([3, 1, 2]),
    "number": torch.tensor(7.0),
}
COMMON: dict[str, Any] = {
    "scheduler": {"num_steps": 3, "max_lr": 1e-4, "style": "constant", "betas": [0.9, 0.95]},
    "x": None,
}


class Evil:
    """Runs `call(*args)` where it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call
        self.args = args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.args


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Appears when a planted command ran."""
    return tmp_path / "marker"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    dcp.save(STATE, checkpoint_id=directory, no_dist=True)
    return directory


def honest(checkpoint: Path) -> Metadata:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def touch(marker: Path) -> Evil:
    return Evil(os.system, f"touch {marker}")


def test_metadata_is_read_as_torch_reads_it(checkpoint: Path) -> None:
    expected = honest(checkpoint)
    found = read_checkpoint_metadata(checkpoint / ".metadata")
    assert set(expected.state_dict_metadata) == set(STATE)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data and len(found.storage_data) == len(STATE)


class EarlyPython311(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_an_early_python_3_11_is_read(checkpoint: Path) -> None:
    expected = read_checkpoint_metadata(checkpoint / ".metadata")
    path = checkpoint / ".metadata"
    metadata = honest(checkpoint)
    with path.open("wb") as file:
        EarlyPython311(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    assert read_checkpoint_metadata(path) == expected


EVIL: dict[str, Callable[[Metadata, Path], Any]] = {
    "instead of metadata": lambda metadata, marker: touch(marker),
    "in a field of it": lambda metadata, marker: changed(metadata, planner_data=touch(marker)),
    "in a new field of it": lambda metadata, marker: changed(
        metadata, mcore_data={"x": touch(marker)}
    ),
    "as an entry": lambda metadata, marker: changed(
        metadata, state_dict_metadata={"weight": touch(marker)}
    ),
    "eval": lambda metadata, marker: Evil(eval, f"open({str(marker)!r}, 'w').close()"),
    "an attribute of a module": lambda metadata, marker: changed(
        metadata, storage_meta=Evil(getattr, Evil(__import__, "os"), "system")
    ),
    "a loader of pickles": lambda metadata, marker: Evil(pickle.loads, pickle.dumps(touch(marker))),
    "a module of torch's": lambda metadata, marker: Evil(
        torch.hub.load_state_dict_from_url, "file:///x"
    ),
}
FORBIDDEN = {
    "eval": r"__builtin__\.eval|builtins\.eval",
    "an attribute of a module": r"(__builtin__|builtins)\.__import__",
    "a loader of pickles": r"_?c?[pP]ickle\.loads",
    "a module of torch's": r"torch\.hub",
}


def changed(metadata: Metadata, **fields: Any) -> Metadata:
    vars(metadata).update(fields)
    return metadata


def saved(value: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", EVIL)
def test_evil_metadata_is_refused_and_runs_nothing(
    checkpoint: Path, marker: Path, kind: str, protocol: int
) -> None:
    path = checkpoint / ".metadata"
    path.write_bytes(pickle.dumps(EVIL[kind](honest(checkpoint), marker), protocol=protocol))
    with pytest.raises(
        ValueError, match=rf"\.metadata names {FORBIDDEN.get(kind, r'posix.system')}"
    ):
        read_checkpoint_metadata(path)
    assert not marker.exists()


def test_the_evil_files_of_these_tests_would_run(checkpoint: Path, marker: Path) -> None:
    (checkpoint / ".metadata").write_bytes(
        pickle.dumps(EVIL["in a field of it"](honest(checkpoint), marker))
    )
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert marker.exists()


def test_dotted_names_do_not_lead_out_of_an_allowed_module(checkpoint: Path, marker: Path) -> None:
    """STACK_GLOBAL walks attributes: an allowed module imports os."""
    for module, name in [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch", "serialization.os.system"),
    ]:
        code = (
            b"\x80\x04"
            + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
            + b"\x93."
        )
        (checkpoint / ".metadata").write_bytes(code)
        with pytest.raises(ValueError, match="which no checkpoint of this trainer holds"):
            read_checkpoint_metadata(checkpoint / ".metadata")
    assert not marker.exists()


def test_a_pickle_cannot_change_the_classes_that_it_names(checkpoint: Path) -> None:
    """GLOBAL and BUILD with a slot state set attributes of a class itself, in every later
    checkpoint of the process.
    """
    code = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'planted'\nI1\nstb."
    pickle.loads(code)
    assert torch_metadata.Metadata.planted == 1  # type: ignore[attr-defined]
    del torch_metadata.Metadata.planted  # type: ignore[attr-defined]
    (checkpoint / ".metadata").write_bytes(code)
    with pytest.raises(ValueError, match=r"\.metadata is (broken|no metadata)"):
        read_checkpoint_metadata(checkpoint / ".metadata")
    assert not hasattr(torch_metadata.Metadata, "planted")


def with_file(metadata: Metadata, **fields: Any) -> Metadata:
    """The first part of a tensor lies elsewhere."""
    vars(next(iter(metadata.storage_data.values()))).update(fields)
    return metadata


MALFORMED: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "a pickled object": (
        lambda m: changed(m, state_dict_metadata={"extra": BytesStorageMetadata()}),
        "extra is a pickled object",
    ),
    "a file elsewhere": (
        lambda m: with_file(m, relative_path="../../secret.distcp"),
        "plain .*files",
    ),
    "an absolute file": (
        lambda m: with_file(m, relative_path="/etc/passwd"),
        "names the file '/etc/passwd'",
    ),
    "a negative length": (lambda m: with_file(m, length=-1), "-1 where a count belongs"),
    "a transform": (lambda m: with_file(m, transform_descriptors=["zstd"]), "transformed by"),
    "a list": (lambda m: [m], "list where Metadata belongs"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_metadata_that_says_something_else_is_refused(checkpoint: Path, kind: str) -> None:
    change, message = MALFORMED[kind]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(change(honest(checkpoint))))
    with pytest.raises(ValueError, match=message):
        read_checkpoint_metadata(checkpoint / ".metadata")


def test_a_part_outside_of_its_tensor_is_refused(checkpoint: Path) -> None:
    metadata = honest(checkpoint)
    entry = metadata.state_dict_metadata["weight"]
    assert isinstance(entry, torch_metadata.TensorStorageMetadata)
    entry.chunks[0].offsets = torch.Size([1, 0])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        ValueError, match=r"weight has a part \(3, 4\) at \(1, 0\) outside of its shape \(3, 4\)"
    ):
        read_checkpoint_metadata(checkpoint / ".metadata")


def test_every_truncation_of_the_metadata_is_an_error_that_names_it(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"\.metadata is broken"):
            read_checkpoint_metadata(path)


def test_a_link_or_a_pipe_is_not_opened(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    path.rename(checkpoint / "moved")
    path.symlink_to("moved")
    with pytest.raises(ValueError, match="is a link"):
        read_checkpoint_metadata(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="plain file"):  # and does not wait for a writer
        read_checkpoint_metadata(path)


def test_common_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "common.pt"
    torch.save(COMMON, path)
    read_plain_values(str(path), read_plain_file(path))
    assert (
        read_plain_values("common.pt", path.read_bytes())
        == COMMON
        == torch.load(path, weights_only=True)
    )


def test_evil_common_is_refused_and_runs_nothing(tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "common.pt"
    for evil in (touch(marker), {**COMMON, "args": touch(marker)}, {"a": [(touch(marker),)]}):
        torch.save(evil, path)
        with pytest.raises(ValueError, match=r"common\.pt names posix\.system"):
            read_plain_values(str(path), read_plain_file(path))
    torch.save(evil, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"common\.pt is no file that torch\.save wrote"):
        read_plain_values(str(path), read_plain_file(path))
    assert not marker.exists()


def test_common_with_tensors_or_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "common.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(
        ValueError, match=r"names torch\._utils\._rebuild_tensor_v2|refers to stored tensors"
    ):
        read_plain_values(str(path), read_plain_file(path))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", b"\x80\x02" + b"N0" * 50_000_000 + b"N.")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="stored as it is"):
        read_plain_values(str(path), read_plain_file(path))


def loads_of(world: World, checkpoint: Path, target: Path | None) -> dict[str, Any]:
    """What a rank gets out of a checkpoint through torch's and megatron's own entries, with the
    readers replaced.
    """
    from megatron.core.dist_checkpointing.serialization import (
        load_common_state_dict,
        load_tensors_metadata,
    )

    from rlhf_megatron.weights import safe_pickle as safe_reads

    safe_reads.patch_checkpoint_readers()
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        if target is not None:  # a swap behind the check
            safe_reads.check_checkpoint_directory(checkpoint)
            (checkpoint / target.name).write_bytes(target.read_bytes())
        loaded = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
        shapes = {
            name: tuple(t.global_shape)
            for name, t in load_tensors_metadata(str(checkpoint)).items()
        }
        dcp.load(loaded, checkpoint_id=checkpoint, no_dist=True)
        return {
            "tensors": loaded,
            "shapes": shapes,
            "common": load_common_state_dict(str(checkpoint)),
        }
    finally:
        del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]


@pytest.mark.dist
def test_torch_and_megatron_load_through_the_safe_readers(
    dist_pool: DistPool, checkpoint: Path, tmp_path: Path, marker: Path
) -> None:
    (checkpoint / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    torch.save(COMMON, checkpoint / "common.pt")
    (result,) = dist_pool.run(loads_of, checkpoint=checkpoint, target=None, timeout_s=300)
    assert all(torch.equal(result["tensors"][name], tensor) for name, tensor in STATE.items())
    assert result["shapes"] == {name: tuple(tensor.shape) for name, tensor in STATE.items()}
    assert result["common"] == COMMON
    evil = tmp_path / ".metadata"
    evil.write_bytes(pickle.dumps(EVIL["in a field of it"](honest(checkpoint), marker)))
    good = (checkpoint / ".metadata").read_bytes()
    with pytest.raises(JobError, match=r"\.metadata names posix\.system"):
        dist_pool.run(loads_of, checkpoint=checkpoint, target=evil, timeout_s=300)
    (checkpoint / ".metadata").write_bytes(good)
    evil = tmp_path / "common.pt"
    torch.save({"x": touch(marker)}, evil)
    with pytest.raises(JobError, match=r"common\.pt names posix\.system"):
        dist_pool.run(loads_of, checkpoint=checkpoint, target=evil, timeout_s=300)
    assert not marker.exists()


def loaded_as_a_run_does(world: World, checkpoint: Path) -> None:
    from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import load_sharded_state

    load_sharded_state(checkpoint, {})


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["instead of metadata", "in a new field of it", "eval"])
def test_a_run_refuses_evil_metadata(
    dist_pool: DistPool, checkpoint: Path, marker: Path, kind: str
) -> None:
    (checkpoint / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    torch.save(COMMON, checkpoint / "common.pt")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(EVIL[kind](honest(checkpoint), marker)))
    with pytest.raises(
        JobError, match=rf"\.metadata names ({FORBIDDEN.get(kind, 'posix.system')})"
    ):
        dist_pool.run(loaded_as_a_run_does, checkpoint=checkpoint, timeout_s=300)
    assert not marker.exists()


def test_another_backend_is_not_opened(checkpoint: Path) -> None:
    """megatron-core picks its reader by this file."""
    from rlhf_megatron.weights.safe_pickle import check_checkpoint_directory

    for text in (
        '{"sharded_backend": "zarr", "sharded_backend_version": 1}',
        "[]",
        "{",
        "[" * 100_000,
        "{}",
    ):
        (checkpoint / "metadata.json").write_text(text)
        with pytest.raises(ValueError, match=r"metadata\.json"):
            check_checkpoint_directory(checkpoint)
