"""Buckets in device memory: another process opens them by CUDA IPC; two GPUs
broadcast them by NCCL.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec
import pytest
import torch

from benchmarks.gpu.children import environment
from rlhf_megatron import device as device_sharing
from rlhf_megatron.weights.bucket_buffers import make_memory_buffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.engine_links import EngineLink
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

READER = """
import msgspec, sys
from rlhf_megatron.device import SharedDeviceMemory, open_shared_memory
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
for line in sys.stdin:
    print(format_digest(digest_tensor(open_shared_memory(msgspec.json.decode(line, \
type=SharedDeviceMemory)))), flush=True)
"""
MEMBER = """
import sys, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
address, port, name = sys.argv[1], sys.argv[2], sys.argv[3]
torch.cuda.set_device(1)
store, rank, world = next(c10d.rendezvous(f"tcp://{address}:{port}", 1, 2, \
timeout=c10d.default_pg_timeout))
store = c10d.PrefixStore(name, store)
group, _ = c10d._new_process_group_helper(world, rank, [], c10d.Backend("nccl"), store, \
group_name=name,
    backend_options=None, timeout=c10d.default_pg_timeout)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
found = torch.empty(int(sys.argv[4]), dtype=torch.uint8, device="cuda")
dist.broadcast(found, src=0, group=group)
print(int(found.long().sum()), flush=True)
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )


@pytest.mark.gpu
def test_memory_that_cannot_be_page_locked_ends_no_later_kernel() -> None:
    device = torch.device("cuda", 0)
    memory = torch.zeros(1 << 20)
    assert device_sharing.page_lock_memory(memory, device)
    assert not device_sharing.page_lock_memory(memory, device), "it is locked already"
    assert torch.ones(4, device=device).sum().item() == 4
    device_sharing.page_unlock_memory(memory)


@pytest.mark.gpu
def test_another_process_reads_each_bucket_where_it_lies() -> None:
    """Five buckets through two buffers: each is read as it is when it is sent."""
    device = torch.device("cuda", 0)
    if not device_sharing.can_share_device_memory(device):
        pytest.skip("memory of this device cannot be shared")
    assert device_sharing.get_device_id(device) in device_sharing.list_device_ids()
    reader = child(READER)
    answers = []
    expected = []

    def deliver(manifest: BucketManifest, bucket: torch.Tensor) -> None:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(
            msgspec.json.encode(device_sharing.share_device_memory(bucket)).decode() + "\n"
        )
        reader.stdin.flush()
        answers.append(reader.stdout.readline().strip())

    try:
        transport = make_memory_buffers(device, 1 << 20, 5, deliver)
        for number in range(5):
            filled = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
            transport.wait_for_buffer(number).copy_(filled)
            transport.start_delivery(
                BucketManifest(1, "s", number, transport.get_file_name(number), 1 << 20, ())
            )
            expected.append(format_digest(digest_tensor(filled)))
        transport.wait_for_deliveries()
        transport.close()
    finally:
        reader.kill()
        reader.wait(10)
    assert answers == expected


@pytest.mark.gpu
def test_a_broadcast_by_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    group = EngineLink.make_inviting_link("weights-test", "127.0.0.1", 2, "nccl", 120.0)
    bucket = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
    member = child(MEMBER, "127.0.0.1", str(group.invitation.port), group.name, str(bucket.numel()))
    timer = threading.Timer(200.0, member.kill)
    timer.start()
    try:
        group.join_group()
        group.broadcast_bucket(bucket, 120.0)
        assert member.stdout is not None and int(member.stdout.readline()) == int(
            bucket.long().sum()
        )
    finally:
        timer.cancel()
        member.kill()
        member.wait(10)
        group.close()
