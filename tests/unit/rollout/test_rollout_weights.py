"""The receiving side of a weight sync, without a server: what stands is what was sent, nothing
stale is ever fit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_tools import digests_of, tiny_qwen3, weights_of, with_entry, write_buckets
from safetensors.torch import load_file, save_file

from rlhf_megatron.device import SharedDeviceMemory
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver
from rlhf_megatron.weights.bucket_buffers import LentSegment
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.quantised_weights import (
    FP8_BLOCK,
    dequantise_fp8,
    is_stored_in_fp8,
    quantise_to_fp8,
)
from rlhf_megatron.weights.tensor_digest import digest_tensor_part, format_digest

SENT = weights_of(tiny_qwen3(11))


@pytest.fixture
def receiver(tmp_path: Path) -> WeightReceiver:
    return WeightReceiver(tiny_qwen3(10), tmp_path, is_loaded=True)


def test_a_sync_leaves_the_sent_weights_standing(receiver: WeightReceiver, tmp_path: Path) -> None:
    assert receiver.stale_reason is None and receiver.version is None
    assert receiver.compute_digests() == digests_of(weights_of(tiny_qwen3(10)))
    receiver.begin_sync(3, is_full_resync=False)
    assert "to version 3 is under way" in str(receiver.stale_reason)
    for manifest in write_buckets(SENT, tmp_path, 3, num_buckets=3):
        receiver.load_bucket(manifest)
    assert receiver.stale_reason is not None
    receiver.commit_sync(3)
    assert receiver.stale_reason is None and receiver.version == 3
    assert receiver.compute_digests() == digests_of(SENT)
    assert "lm_head.weight" not in receiver.compute_digests()  # tied: the embedding's, once
    receiver.commit_sync(3)  # again, as after a lost answer


def test_no_weights_means_stale_until_the_first_sync(tmp_path: Path) -> None:
    receiver = WeightReceiver(tiny_qwen3(10), tmp_path, is_loaded=False)
    assert "without weights" in str(receiver.stale_reason)


def damaged(kind: str, manifest: BucketManifest, directory: Path) -> BucketManifest:
    """A bucket that must be refused; returns its manifest."""
    path = directory / manifest.file
    if kind == "flipped bit":
        raw = bytearray(path.read_bytes())
        raw[manifest.tensors[-1].offset + 5] ^= 1
        path.write_bytes(raw)
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "symlink":
        path.rename(directory / "elsewhere")
        path.symlink_to(directory / "elsewhere")
    elif kind == "missing file":
        path.unlink()
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "name":
        return with_entry(manifest, -1, name="lm_head.weight")
    elif kind == "shape":
        shape = manifest.tensors[-1].shape
        return with_entry(manifest, -1, shape=(1, *shape))
    elif kind == "dtype":
        return with_entry(manifest, -1, dtype="bfloat16")
    elif kind == "digest":
        return with_entry(manifest, -1, digest="0" * 16)
    return manifest


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flipped bit", "digest .* of what stands after loading"),
        ("truncated", "the manifest says"),
        ("symlink", "plain file"),
        ("missing file", "No such file"),
        ("pipe", "of another user or no plain file"),
        ("name", "no parameter of that name"),
        ("shape", "sent as float32 .* engine holds float32"),
        ("dtype", "sent as bfloat16"),
        ("digest", "0000000000000000 in the manifest"),
    ],
)
def test_a_wrong_bucket_is_refused_and_the_next_sync_mends(
    receiver: WeightReceiver, tmp_path: Path, kind: str, words: str
) -> None:
    before = receiver.compute_digests()
    receiver.begin_sync(1, is_full_resync=False)
    bad, good = write_buckets(SENT, tmp_path, 1)
    with pytest.raises(ValueError, match=words):
        receiver.load_bucket(damaged(kind, bad, tmp_path))
    # these are seen in what stands: all others before a byte is written
    if kind not in ("flipped bit", "digest"):
        assert receiver.compute_digests() == before
    assert "failed" in str(receiver.stale_reason)
    with pytest.raises(ValueError, match="open sync is None"):
        receiver.load_bucket(good)
    with pytest.raises(ValueError, match="open sync is None"):
        receiver.commit_sync(1)
    assert receiver.stale_reason is not None and receiver.version is None
    receiver.begin_sync(1, is_full_resync=False)  # a new full sync mends it
    for path in tmp_path.iterdir():
        path.unlink()
    for manifest in write_buckets(SENT, tmp_path, 1):
        receiver.load_bucket(manifest)
    receiver.commit_sync(1)
    assert receiver.stale_reason is None and receiver.compute_digests() == digests_of(SENT)


def test_device_memory_that_cannot_be_opened(receiver: WeightReceiver, tmp_path: Path) -> None:
    """What can be opened is for a device: tests/gpu/gpu_checks.py `check_sync`."""
    manifest, *_ = write_buckets(SENT, tmp_path, 3, num_buckets=3)
    sizes = (manifest.num_bytes, b"h", manifest.num_bytes, 0)
    memory = SharedDeviceMemory("some-gpu", 0, *sizes, b"c", 0, b"e", False)
    receiver.begin_sync(3, is_full_resync=False)
    with pytest.raises(ValueError, match="memory lies on device some-gpu; this process sees"):
        receiver.load_bucket(manifest, [LentSegment(0, memory)])
    assert "to version 3 failed" in str(receiver.stale_reason)
    assert receiver.compute_digests() == digests_of(weights_of(tiny_qwen3(10)))


def test_commit_needs_every_tensor(receiver: WeightReceiver, tmp_path: Path) -> None:
    receiver.begin_sync(1, is_full_resync=False)
    receiver.load_bucket(write_buckets(SENT, tmp_path, 1)[0])
    with pytest.raises(ValueError, match=r"\d+ of \d+ tensors never came whole: model\.layers\.1"):
        receiver.commit_sync(1)
    assert "failed" in str(receiver.stale_reason)


def test_versions_only_rise(receiver: WeightReceiver, tmp_path: Path) -> None:
    def sync(version: int, full_resync: bool = False) -> None:
        receiver.begin_sync(version, full_resync)
        for manifest in write_buckets(SENT, tmp_path, version):
            receiver.load_bucket(manifest)
        receiver.commit_sync(version)

    sync(0)
    sync(5)
    for version, full_resync in ((5, False), (4, False), (4, True), (-1, False)):
        with pytest.raises(ValueError, match="must be above"):
            receiver.begin_sync(version, full_resync)
    assert receiver.stale_reason is None  # a refused begin changes nothing
    sync(5, full_resync=True)
    sync(6)
    assert receiver.version == 6


def test_a_bucket_of_another_sync_changes_nothing(receiver: WeightReceiver, tmp_path: Path) -> None:
    old = write_buckets(SENT, tmp_path, 1)
    with pytest.raises(ValueError, match="open sync is None"):
        receiver.load_bucket(old[0])
    assert receiver.stale_reason is None
    receiver.begin_sync(2, is_full_resync=False)
    with pytest.raises(ValueError, match="bucket of version 1, but the open sync is 2"):
        receiver.load_bucket(old[0])
    for manifest in write_buckets(SENT, tmp_path, 2):
        receiver.load_bucket(manifest)
        receiver.load_bucket(manifest)  # a request that arrives twice does no harm
    receiver.commit_sync(2)
    assert receiver.compute_digests() == digests_of(SENT)


def test_one_tensor_with_two_contents_is_refused(receiver: WeightReceiver, tmp_path: Path) -> None:
    receiver.begin_sync(1, is_full_resync=False)
    first = write_buckets(SENT, tmp_path, 1)[0]
    receiver.load_bucket(first)
    name = first.tensors[0].name
    (tmp_path / "other").mkdir()
    other = write_buckets({name: SENT[name] + 1}, tmp_path / "other", 1, 1)[0]
    (tmp_path / "other" / other.file).rename(tmp_path / "second")
    with pytest.raises(ValueError, match="sent twice in this sync"):
        receiver.load_bucket(replace(other, file="second"))


def parts_of(name: str, axis: int, *starts: int) -> list[TensorEntry]:
    """A tensor cut along an axis at these places, without offsets."""
    tensor = SENT[name]
    ends = (*starts[1:], tensor.shape[axis])
    return [
        TensorEntry(
            name,
            "float32",
            tuple(tensor.shape),
            0,
            format_digest(
                digest_tensor_part(
                    tensor.narrow(axis, start, end - start), tuple(tensor.shape), axis, start
                )
            ),
            (axis, start, end - start),
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def send_part(receiver: WeightReceiver, entry: TensorEntry, directory: Path) -> None:
    span = entry.span
    part = SENT[entry.name].narrow(span.dim, span.start, span.num_entries).contiguous()
    (directory / "part").write_bytes(part.view(-1).view(torch.uint8).numpy().tobytes())
    receiver.load_bucket(BucketManifest(1, "actor dp0 pp0 tp0", 0, "part", part.nbytes, (entry,)))


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_make_a_whole_tensor(receiver: WeightReceiver, tmp_path: Path, axis: int) -> None:
    """Those of one tensor may come in any order and twice; without one of them
    nothing is committed.
    """
    name = "model.layers.0.mlp.down_proj.weight"
    first, second, third = parts_of(name, axis, 0, 3, 5)
    for is_whole in (False, True):
        receiver.begin_sync(1, is_full_resync=False)
        for manifest in write_buckets({n: t for n, t in SENT.items() if n != name}, tmp_path, 1):
            receiver.load_bucket(manifest)
        for entry in (third, first, *((second, first) if is_whole else ())):
            send_part(receiver, entry, tmp_path)
        if not is_whole:
            with pytest.raises(ValueError, match=rf"1 of \d+ tensors never came whole: {name}"):
                receiver.commit_sync(1)
    receiver.commit_sync(1)
    assert receiver.compute_digests() == digests_of(SENT)
    receiver.begin_sync(2, is_full_resync=False)
    wrong = replace(first, digest="0" * 16)
    with pytest.raises(ValueError, match="open sync is 2"):
        send_part(receiver, wrong, tmp_path)


def test_release_and_resume(receiver: WeightReceiver, tmp_path: Path) -> None:
    parameters = [parameter for parameter, _ in receiver._parameters]
    whole = sum(parameter.numel() * 4 for parameter in parameters)
    assert receiver.num_bytes == whole
    for _ in range(2):
        receiver.release_memory()
        assert [parameter.untyped_storage().nbytes() for parameter in parameters] == [0] * len(
            parameters
        )
        assert receiver.num_bytes == 0 and receiver.is_released
        assert "its memory is released (weights)" in str(receiver.stale_reason)
    with pytest.raises(ValueError, match="resume_memory must come before"):
        receiver.begin_sync(1, is_full_resync=False)
    with pytest.raises(ValueError, match="nothing to digest"):
        receiver.compute_digests()
    receiver.restore_memory()
    assert receiver.num_bytes == whole and not receiver.is_released
    assert "have not been sent again" in str(receiver.stale_reason)
    receiver.begin_sync(1, is_full_resync=False)
    receiver.restore_memory()  # they are there: nothing is wiped
    for manifest in write_buckets(SENT, tmp_path, 1):
        receiver.load_bucket(manifest)
    receiver.commit_sync(1)
    assert receiver.compute_digests() == digests_of(SENT)


def test_a_release_ends_the_open_sync(receiver: WeightReceiver, tmp_path: Path) -> None:
    receiver.begin_sync(1, is_full_resync=False)
    receiver.release_memory()
    receiver.restore_memory()
    with pytest.raises(ValueError, match="open sync is None"):
        receiver.load_bucket(write_buckets(SENT, tmp_path, 1)[0])


RELEASE = """
import sys
from pathlib import Path
import torch
from rlhf_megatron.device import read_own_resident_bytes
from rlhf_megatron.rollout.local.local_model import release_unused_memory
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver
torch.empty(24 << 20, dtype=torch.uint8)  # freed at once: from now on glibc takes smaller pieces \
from its heap
module = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(400))
last = torch.ones(256, 256)  # what lies behind the freed ones in the heap, and stays
receiver = WeightReceiver(module, Path(sys.argv[1]), is_loaded=True)
release_unused_memory(torch.device("cpu"))
before = read_own_resident_bytes()
receiver.release_memory()
release_unused_memory(torch.device("cpu"))
print(before - read_own_resident_bytes())
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the kernel does not tell resident memory"
)
def test_released_memory_goes_back_to_the_kernel(tmp_path: Path) -> None:
    """Tensors of 256 KiB: a process keeps such pieces when they are freed, unless it is told to
    give them back.

    In a process of its own: what other tests left running in this one takes and frees memory, too.
    """
    released = subprocess.run(
        [sys.executable, "-c", RELEASE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(released.stdout) > 0.9 * 400 * 256 * 256 * 4


def behind(manifest: BucketManifest, directory: Path, offset: int, tail: bytes) -> BucketManifest:
    """The bucket, `offset` bytes into its file."""
    path = directory / manifest.file
    path.write_bytes(os.urandom(offset) + path.read_bytes() + tail)
    return replace(manifest, file_offset=offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [8, 13, 4096, 4097, 70_002])
def test_a_bucket_behind_other_bytes_of_its_file(
    tmp_path: Path, offset: int, dtype: torch.dtype
) -> None:
    receiver = WeightReceiver(tiny_qwen3(10).to(dtype), tmp_path, is_loaded=True)
    sent = {name: tensor.to(dtype) for name, tensor in SENT.items()}
    receiver.begin_sync(1, is_full_resync=False)
    for manifest in write_buckets(sent, tmp_path, 1):
        receiver.load_bucket(behind(manifest, tmp_path, offset, tail=b"more"))
    receiver.commit_sync(1)
    assert receiver.compute_digests() == digests_of(sent)


def in_blocks(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(weights)
    for name in weights:
        if is_stored_in_fp8(name):
            found[name], found[f"{name}_scale_inv"] = quantise_to_fp8(weights[name])
    return found


def test_blocks_and_scales_stand_beside_what_is_computed_with(tmp_path: Path) -> None:
    """The model computes with the numbers that they stand for from the commit on, also after a
    release; a scale that does not come, or a plain matrix, is named.
    """
    module = tiny_qwen3(10)
    sent = in_blocks(SENT)
    receiver = WeightReceiver(module, tmp_path, is_loaded=False, is_fp8=True)
    for version in (1, 2):
        receiver.begin_sync(version, is_full_resync=False)
        for manifest in write_buckets(sent, tmp_path, version):
            receiver.load_bucket(manifest)
        receiver.commit_sync(version)
        assert receiver.compute_digests() == digests_of(sent) and receiver.stale_reason is None
        for name, parameter in module.named_parameters():
            scale = f"{name}_scale_inv"
            numbers = (
                dequantise_fp8(sent[name], sent[scale], FP8_BLOCK, torch.float32)
                if scale in sent
                else sent[name]
            )
            assert torch.equal(parameter, numbers), name
        receiver.release_memory()
        assert receiver.num_bytes == 0
        receiver.restore_memory()
    missing = "model.layers.1.mlp.up_proj.weight_scale_inv"
    receiver.begin_sync(3, is_full_resync=False)
    for manifest in write_buckets(
        {name: tensor for name, tensor in sent.items() if name != missing}, tmp_path, 3
    ):
        receiver.load_bucket(manifest)
    with pytest.raises(
        ValueError, match=f"1 of {len(sent)} tensors never came whole: {re.escape(missing)}"
    ):
        receiver.commit_sync(3)
    receiver.begin_sync(3, is_full_resync=False)
    words = r"q_proj\.weight': sent as float32 .*, but the engine holds float8_e4m3fn"
    with pytest.raises(ValueError, match=words):
        for manifest in write_buckets(SENT, tmp_path, 3):
            receiver.load_bucket(manifest)


def test_a_file_that_ends_before_the_bucket_does(receiver: WeightReceiver, tmp_path: Path) -> None:
    receiver.begin_sync(1, is_full_resync=False)
    manifest = behind(write_buckets(SENT, tmp_path, 1)[0], tmp_path, 100, tail=b"")
    with pytest.raises(
        ValueError, match=rf"manifest says {manifest.num_bytes} after the first 101"
    ):
        receiver.load_bucket(replace(manifest, file_offset=101))
    receiver.begin_sync(1, is_full_resync=False)
    with pytest.raises(ValueError, match="after the first"):
        receiver.load_bucket(replace(manifest, file_offset=1 << 70))


@pytest.mark.parametrize("padding", [0, 3])
def test_buckets_of_a_safetensors_file(
    receiver: WeightReceiver, tmp_path: Path, padding: int
) -> None:
    """Two buckets in one file, as another program wrote it; with `padding` its tensors lie
    at odd places.
    """
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in SENT.items()}, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = raw[8 : 8 + length] + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    places = sorted((*header[name]["data_offsets"], name) for name in SENT)
    assert load_file(path).keys() == SENT.keys()
    receiver.begin_sync(1, is_full_resync=False)
    for bucket, part in enumerate((places[:5], places[5:])):
        first = part[0][0]
        digests = digests_of(SENT)
        entries = tuple(
            TensorEntry(name, "float32", tuple(SENT[name].shape), start - first, digests[name])
            for start, _, name in part
        )
        offset = 8 + len(text) + first
        size = part[-1][1] - first
        receiver.load_bucket(
            BucketManifest(1, "actor dp0 pp0 tp0", bucket, path.name, size, entries, offset)
        )
    receiver.commit_sync(1)
    assert receiver.compute_digests() == digests_of(SENT)


def test_bfloat16_weights_and_receiver(tmp_path: Path) -> None:
    receiver = WeightReceiver(tiny_qwen3(10).to(torch.bfloat16), tmp_path, is_loaded=True)
    sent = {name: tensor.to(torch.bfloat16) for name, tensor in SENT.items()}
    receiver.begin_sync(1, is_full_resync=False)
    with pytest.raises(ValueError, match="engine holds bfloat16"):
        receiver.load_bucket(write_buckets(SENT, tmp_path, 1)[0])
    receiver.begin_sync(1, is_full_resync=False)
    for manifest in write_buckets(sent, tmp_path, 1):
        receiver.load_bucket(manifest)
    receiver.commit_sync(1)
    assert receiver.compute_digests() == digests_of(sent)
