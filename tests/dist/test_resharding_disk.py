"""Buckets as files: of every layout together they are a model directory; what happens when
the disk is full.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from safetensors.torch import load_file
from test_resharding_sender import CONFIG, LLAMA, SEED, send
from transformers import AutoModelForCausalLM

from rlhf_megatron.rollout.transports.disk_transport import (
    SafetensorsFileBuffers,
    assemble_weight_checkpoint,
    encode_gapless_header,
    remove_other_versions,
)
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors

TINY = 1  # byte: every fusion group has a bucket, and so a file, of its own


def bucket_of(*tensors: torch.Tensor) -> tuple[tuple[TensorEntry, ...], torch.Tensor]:
    """Named a, b, ...; without gaps."""
    entries = []
    offset = 0
    for name, tensor in zip("abcdefgh", tensors, strict=False):
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(
                name, dtype, tuple(tensor.shape), offset, format_digest(digest_tensor(tensor))
            )
        )
        offset += tensor.nbytes
    return tuple(entries), torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])


def deliver_one(
    directory: Path, tensors: list[torch.Tensor], deliver: Any, number: int = 0
) -> None:
    entries, raw = bucket_of(*tensors)
    transport = SafetensorsFileBuffers(directory, "dp0 pp0 tp0", raw.numel(), 1, deliver)
    try:
        transport.wait_for_buffer(number)[: raw.numel()].copy_(raw)
        transport.start_delivery(
            BucketManifest(
                1, "dp0 pp0 tp0", number, transport.get_file_name(number), raw.numel(), entries
            )
        )
        transport.wait_for_deliveries()
    finally:
        transport.close()


def test_a_file_is_whole_when_it_is_delivered(tmp_path: Path) -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor([-1.5]), torch.arange(3.0)]
    seen: list[BucketManifest] = []

    def deliver(manifest: BucketManifest, bucket: torch.Tensor) -> None:
        seen.append(BucketManifest.parse_json(manifest.encode_json()))
        found = load_file(tmp_path / manifest.file)
        assert all(
            torch.equal(found[name], tensor) for name, tensor in zip("abc", tensors, strict=True)
        )
        data = (tmp_path / manifest.file).read_bytes()
        # an engine reads the same bytes from here
        assert data[manifest.file_offset :] == bytes(bucket.tolist())
        assert (
            manifest.file_offset % 64 == 0
            and len(data) == manifest.file_offset + manifest.num_bytes
        )

    deliver_one(tmp_path, tensors, deliver)
    assert [manifest.num_bytes for manifest in seen] == [40]
    assert [path.name for path in tmp_path.iterdir()] == ["weights-dp0-pp0-tp0-00000.safetensors"]


def test_a_header_for_tensors_with_gaps_is_refused() -> None:
    with pytest.raises(
        AssertionError, match="b begins at byte 64, not at 4: the format has no gaps"
    ):
        encode_gapless_header(
            [TensorEntry("a", "float32", (1,), 0, ""), TensorEntry("b", "float32", (1,), 64, "")]
        )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axes", "config", "dtype", "bucket_bytes"),
    [
        ({"tp": 2}, LLAMA, "float32", TINY),
        ({"pp": 2}, CONFIG, "bfloat16", 1 << 20),
        pytest.param({"pp": 2, "vpp": 2}, CONFIG, "bfloat16", TINY, marks=pytest.mark.long),
        pytest.param({"tp": 2, "pp": 2}, LLAMA, "float32", TINY, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_files_of_all_senders_are_a_model_that_transformers_loads(
    dist_pool: DistPool, tmp_path: Path, axes: dict, config: dict, dtype: str, bucket_bytes: int
) -> None:
    results = dist_pool.run(
        send,
        config=config,
        transfer_dir=tmp_path,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        memory="files",
        timeout_s=300,
        **axes,
    )
    assert [r["error"] for r in results] == [""] * len(results)
    names = [name for r in results for name in r["report"].digests]
    directory = assemble_weight_checkpoint(tmp_path, 3, names, config, None)
    assert directory == tmp_path / "version-3" and [path.name for path in tmp_path.iterdir()] == [
        "version-3"
    ]
    num_files = len(list(directory.glob("*.safetensors")))
    assert num_files == sum(len(r["manifests"]) for r in results) >= axes.get("pp", 1)
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == dtype

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    standing = dict(model.named_parameters())
    expected = dict(generate_random_hf_tensors(config, SEED))
    assert standing.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(standing[name], tensor.to(getattr(torch, dtype))), name


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process may become larger: the kernel says so as it does for a
    disk that is full.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_before_the_engine_is_asked(tmp_path: Path) -> None:
    def deliver(manifest: BucketManifest, bucket: torch.Tensor) -> None:
        raise AssertionError("it must not come to that")

    with (
        full_disk(3000),
        pytest.raises(ValueError, match=r"no room for weights at .*two versions .*transfer_dir"),
    ):
        deliver_one(tmp_path, [torch.zeros(1000)], deliver)
    assert list(tmp_path.iterdir()) == []
    deliver_one(tmp_path, [torch.zeros(1000)], lambda manifest, bucket: None)
    with full_disk(100), pytest.raises(ValueError, match=r"no room for weights at .*version-4"):
        assemble_weight_checkpoint(
            tmp_path, 4, ["a"], {"model_type": "llama", "padding": "x" * 200}, None
        )
    # the next one finds what it needs
    assert (tmp_path / "weights-dp0-pp0-tp0-00000.safetensors").exists()
    assemble_weight_checkpoint(tmp_path, 4, ["a"], {"model_type": "llama"}, None)


def test_files_that_are_not_those_of_the_sync(tmp_path: Path) -> None:
    """One of a sync that was given up is gone when its sender begins anew; a missing or foreign
    one is an error.
    """
    deliver_one(tmp_path, [torch.zeros(3)], lambda manifest, bucket: None, number=7)
    (tmp_path / "weights-dp0-pp0-tp0-00008.partial").write_bytes(b"of a sender that was killed")
    deliver_one(tmp_path, [torch.ones(3), torch.ones(2)], lambda manifest, bucket: None)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-dp0-pp0-tp0-00000.safetensors"]
    for names in (["a"], ["a", "b", "c"]):
        with pytest.raises(
            ValueError, match=r"not those of the \d tensors that were sent: \['[bc]'\]"
        ):
            assemble_weight_checkpoint(tmp_path, 1, names, {}, None)


def test_one_version_is_kept(tmp_path: Path) -> None:
    """A version that is sent again takes the place of the first;
    other directories are left alone.
    """
    for version, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        deliver_one(tmp_path, [torch.full((4,), value)], lambda manifest, bucket: None)
        assemble_weight_checkpoint(tmp_path, version, ["a"], {"model_type": "llama"}, None)
    (tmp_path / "version-x").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "version-1",
        "version-2",
        "version-x",
    ]
    remove_other_versions(tmp_path, version_to_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-x"]
    (file,) = (tmp_path / "version-2").glob("*.safetensors")
    assert load_file(file)["a"].tolist() == [3.0] * 4
