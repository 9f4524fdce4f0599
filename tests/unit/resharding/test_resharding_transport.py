"""Buckets in shared memory: contents, overlap, errors, clean-up; and the directory they lie in."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rlhf_megatron.rollout.transports.disk_transport import SafetensorsFileBuffers
from rlhf_megatron.rollout.transports.tensor_transport import (
    MappedFilePool,
    SharedMemoryBuffers,
    attach_shared_buffers,
)
from rlhf_megatron.rollout.transports.transfer_dir import (
    make_transfer_directory,
    make_transfer_directory_at,
)
from rlhf_megatron.weights.bucket_buffers import BucketBuffers, DeliverBucket, make_memory_buffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest


def manifest(transport: BucketBuffers, bucket: int) -> BucketManifest:
    return BucketManifest(1, "dp0 pp0 tp0", bucket, transport.get_file_name(bucket), 8, ())


def open_medium(
    medium: str, directory: Path, num_buckets: int, deliver: DeliverBucket
) -> BucketBuffers:
    if medium == "device_memory":
        return make_memory_buffers(torch.device("cpu"), 8, num_buckets, deliver)
    kind = SafetensorsFileBuffers if medium == "disk" else SharedMemoryBuffers
    return kind(directory, "dp0 pp0 tp0", 8, num_buckets, deliver)


@pytest.mark.parametrize("medium", ["shared_memory", "device_memory", "disk"])
def test_delivery_runs_while_the_next_bucket_is_filled(tmp_path: Path, medium: str) -> None:
    """Two buffers and no third: bucket 2 gets the memory of bucket 0, and not before that has
    been delivered.
    """
    delivered: list[tuple[int, bytes]] = []
    may_read = threading.Event()

    def deliver(m: BucketManifest, raw: torch.Tensor) -> None:
        assert may_read.wait(30)
        in_file = medium != "device_memory"
        data = (tmp_path / m.file).read_bytes()[m.file_offset :] if in_file else bytes(raw.tolist())
        delivered.append((m.bucket, data))

    transport = open_medium(medium, tmp_path, 5, deliver)
    places = []
    for bucket in range(2):
        buffer = transport.wait_for_buffer(bucket)
        buffer.fill_(bucket + 1)  # bucket 1 is filled while the delivery of bucket 0 waits
        places.append(buffer.data_ptr())
        transport.start_delivery(manifest(transport, bucket))
    assert delivered == []
    threading.Timer(0.2, may_read.set).start()
    for bucket in range(2, 5):
        buffer = transport.wait_for_buffer(bucket)
        assert (bucket - 2, bytes([bucket - 1] * 8)) in delivered
        buffer.fill_(bucket + 1)
        places.append(buffer.data_ptr())
        transport.start_delivery(manifest(transport, bucket))
    transport.wait_for_deliveries()
    assert delivered == [(i, bytes([i + 1] * 8)) for i in range(5)]
    assert len(set(places)) == 2 and places == [places[i % 2] for i in range(5)]
    if medium == "shared_memory":
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "dp0-pp0-tp0-0.bin",
            "dp0-pp0-tp0-1.bin",
        ]
        assert (tmp_path / "dp0-pp0-tp0-0.bin").stat().st_mode & 0o777 == 0o600
    transport.close()
    transport.close()
    assert len(list(tmp_path.iterdir())) == (5 if medium == "disk" else 0)


def test_failed_delivery_is_raised_when_its_buffer_comes_round_and_by_drain(tmp_path: Path) -> None:
    def deliver(m: BucketManifest, _: torch.Tensor) -> None:
        if m.bucket == 0:
            raise OSError("engine0 said no")

    for ask in ("buffer", "drain"):
        transport = SharedMemoryBuffers(tmp_path, "s", 8, 9, deliver)
        transport.start_delivery(manifest(transport, 0))
        transport.start_delivery(manifest(transport, 1))
        with pytest.raises(OSError, match="engine0 said no"):
            transport.wait_for_buffer(2) if ask == "buffer" else transport.wait_for_deliveries()
        transport.close()
    assert list(tmp_path.iterdir()) == []


def test_one_bucket_takes_one_file_and_leftovers_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "s-0.bin").write_bytes(b"left by a run that was killed")
    transport = SharedMemoryBuffers(tmp_path, "s", 100, 1, lambda m, _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["s-0.bin"]
    assert transport.wait_for_buffer(0).shape == (100,) and transport.wait_for_buffer(0).eq(0).all()
    transport.close()


def test_no_room_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no room for a weight buffer of 1125899906842624000 .*Lower"
    ):
        SharedMemoryBuffers(tmp_path, "s", 1_125_899_906_842_624_000, 2, lambda m, _: None)
    assert list(tmp_path.iterdir()) == []


def test_transfer_dir_is_private_and_removed(tmp_path: Path) -> None:
    with make_transfer_directory(tmp_path, 10) as made:
        assert made.path.parent == tmp_path and made.path.stat().st_mode & 0o777 == 0o700
        (made.path / "bucket").write_bytes(b"x")
        # making another leaves a live one alone
        with make_transfer_directory(tmp_path, 10) as other:
            assert other.path != made.path and (made.path / "bucket").exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        ValueError, match=r"weight buffers need 1\d+ bytes .*Set rollout\.transfer_dir"
    ):
        make_transfer_directory(tmp_path, 10**18)
    with pytest.raises(ValueError, match="not a writable directory"):
        make_transfer_directory(tmp_path / "absent", 1)
    assert list(tmp_path.iterdir()) == []


def test_directory_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, time; from rlhf_megatron.rollout.transports.transfer_dir"
        " import make_transfer_directory\n"
        "made = make_transfer_directory(sys.argv[1], 1); print(made.path,"
        " flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        abandoned = Path(process.stdout.readline().strip())
        make_transfer_directory(tmp_path, 1).remove_directory()
        assert abandoned.is_dir()  # its owner lives
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    adopted = make_transfer_directory_at(abandoned)  # the next keeper of the same run
    assert adopted is not None and make_transfer_directory_at(abandoned) is None
    os.close(adopted._lock_descriptor)  # it is killed as well
    make_transfer_directory(tmp_path, 1).remove_directory()
    assert not abandoned.exists()


def test_buffer_is_seen_by_a_reader_of_the_file(tmp_path: Path) -> None:
    transport = SharedMemoryBuffers(tmp_path, "s", 16, 1, lambda m, _: None)
    transport.wait_for_buffer(0).view(torch.float32).copy_(torch.tensor([1.0, -2.0, 3.5, 0.0]))
    raw = bytearray((tmp_path / transport.get_file_name(0)).read_bytes())
    assert torch.frombuffer(raw, dtype=torch.float32).tolist() == [1.0, -2.0, 3.5, 0.0]
    transport.close()


def test_files_are_kept_from_sync_to_sync(tmp_path: Path) -> None:
    """The same memory as long as it is large enough; what another sync does not use goes, and
    all at the end.
    """
    kept = MappedFilePool()
    first = SharedMemoryBuffers(tmp_path, "s", 100, 2, lambda m, _: None, kept)
    first.wait_for_buffer(0).fill_(7)
    places = [first.wait_for_buffer(number).data_ptr() for number in (0, 1)]
    first.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["s-0.bin", "s-1.bin"]
    smaller = SharedMemoryBuffers(tmp_path, "s", 60, 1, lambda m, _: None, kept)
    assert (
        smaller.wait_for_buffer(0).data_ptr() == places[0]
        and smaller.wait_for_buffer(0).tolist() == [7] * 60
    )
    assert [path.name for path in tmp_path.iterdir()] == ["s-0.bin"]
    smaller.close()
    (tmp_path / "s-0.bin").unlink()
    again = SharedMemoryBuffers(tmp_path, "s", 200, 2, lambda m, _: None, kept)
    assert (
        again.wait_for_buffer(1).numel() == 200 and again.wait_for_buffer(0).tolist() == [0] * 200
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    again.close()
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_maps_its_own_part_of_a_buffer(tmp_path: Path) -> None:
    owner = SharedMemoryBuffers(tmp_path, "dp0 pp0 tp0", 3 * 4096, 5, lambda m, _: None)
    parts = attach_shared_buffers(tmp_path, "dp0 pp0 tp0", 4096, 8192, 5)
    assert [part.numel() for part in parts] == [8192, 8192]
    parts[1].fill_(3)
    assert owner.wait_for_buffer(1)[4096:].tolist() == [3] * 8192
    assert not owner.wait_for_buffer(1)[:4096].any() and not owner.wait_for_buffer(0).any()
    owner.close()
    with pytest.raises(FileNotFoundError):
        attach_shared_buffers(tmp_path, "dp0 pp0 tp0", 0, 4096, 1)
