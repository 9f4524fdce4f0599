"""Buckets by broadcast: real gloo groups between senders of this process and engines that
are processes.

The engines are tests/support/broadcast_engine.py, which joins as stock SGLang does;
test_sync_matrix.py has SGLang itself.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from broadcast_engine import HANG_S
from places import SUPPORT
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.transports import process_group_transport
from rlhf_megatron.rollout.transports.process_group_transport import (
    EngineProcessGroups,
    ProcessGroupTransport,
    find_address_towards_url,
)
from rlhf_megatron.rollout.transports.weight_delivery import WeightDelivery
from rlhf_megatron.weights.bucket_buffers import BucketBuffers
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

pytestmark = pytest.mark.dist
Started = tuple[EngineAddress, subprocess.Popen[str]]


@contextmanager
def running(count: int, directory: Path) -> Iterator[list[Started]]:
    """Engines, started at once."""
    script = SUPPORT / "broadcast_engine.py"
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            command = [sys.executable, str(script), str(directory)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            processes.append(process)
        started = []
        for index, process in enumerate(processes):
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            started.append((EngineAddress(f"engine{index}", "sglang", url, "t" * 32), process))
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transfer")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[list[Started]]:
    with running(2, folder) as engines:
        yield engines


def ask(address: EngineAddress, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(address.url + path, data), timeout=60
    ) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def a_bucket(sender: str, number: int, numel: int = 5000) -> tuple[BucketManifest, Tensor]:
    """Two tensors without a gap, of seeded numbers."""
    generator = torch.Generator().manual_seed(1000 * len(sender) + number)
    tensors = [torch.randn(numel, generator=generator), torch.randn(3, 7, generator=generator)]
    entries = []
    offset = 0
    for part, tensor in enumerate(tensors):
        name = f"{sender}.{number}.{part}"
        entries.append(
            TensorEntry(
                name, "float32", tuple(tensor.shape), offset, format_digest(digest_tensor(tensor))
            )
        )
        offset += tensor.nbytes
    raw = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    return BucketManifest(
        1, sender, number, f"in-memory-{number % 2}", raw.numel(), tuple(entries)
    ), raw


def transports(
    engines: list[Started],
    directory: Path,
    groups: EngineProcessGroups,
    sender: str = "s",
    timeout_s: float = 60.0,
) -> list[ProcessGroupTransport]:
    return [
        ProcessGroupTransport(a, directory, sender, "gloo", groups, 60.0, timeout_s)
        for a, _ in engines
    ]


def delivering(
    engines: list[Started],
    directory: Path,
    groups: EngineProcessGroups,
    sender: str = "s",
    timeout_s: float = 60.0,
) -> WeightDelivery:
    place: Any = SimpleNamespace(coordinates=sender, device=torch.device("cpu"))
    return WeightDelivery(
        transports(engines, directory, groups, sender, timeout_s), "process_group", directory, place
    )


def receipts(directory: Path, name: str) -> dict[str, str]:
    """What stands in an engine of one rank: a digest for each tensor."""
    found: dict[str, str] = {}
    for path in directory.glob(f"receipt-{name}-*.0"):
        found |= {
            tensor: parts[0][3] for tensor, parts in json.loads(path.read_text())["parts"].items()
        }
    return found


def digests(*manifests: BucketManifest) -> dict[str, str]:
    return {entry.name: entry.digest for manifest in manifests for entry in manifest.tensors}


def new_log(address: EngineAddress, verb: str, since: float) -> list[dict[str, Any]]:
    return [
        entry
        for entry in ask(address, "/log")["log"]
        if entry["verb"] == verb and entry["start"] > since
    ]


def expect(engine: Started, directory: Path, *manifests: BucketManifest) -> None:
    """These stand in the engine, by the receipts of their sender's tensors alone."""
    wanted = digests(*manifests)
    stem = next(iter(wanted)).split(".")[0]
    found = {
        name: value
        for name, value in receipts(directory, engine[0].name).items()
        if name.startswith(stem)
    }
    assert found == wanted


def test_what_stands_is_what_was_broadcast_and_the_group_is_kept(
    pair: list[Started], folder: Path
) -> None:
    engines = pair[:1]
    groups = EngineProcessGroups()
    begin = time.time()
    address = engines[0][0]
    buckets = [a_bucket("kept", number) for number in range(4)]
    for sync in range(2):
        with delivering(engines, folder, groups) as delivery:
            buffers = delivery.open_buffers(1 << 16, 2)
            assert type(buffers) is BucketBuffers, "they lie in the sender's own memory"
            for manifest, raw in buckets[2 * sync : 2 * sync + 2]:
                buffers.wait_for_buffer(manifest.bucket)[: raw.numel()].copy_(raw)
                buffers.start_delivery(manifest)
            buffers.wait_for_deliveries()
            buffers.close()
        assert delivery.failure_by_engine == {}
        size = 4 * (5000 + 21)
        assert (delivery.traffic.bytes_moved, delivery.traffic.bytes_needed) == (2 * size, 2 * size)
    expect(engines[0], folder, *[manifest for manifest, _ in buckets])
    assert len(new_log(address, "init_weights_update_group", begin)) == 1
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) == {"127.0.0.1"}  # the store, and gloo's own
    groups.close()
    assert ask(address, "/log")["groups"] == []


def test_two_senders_and_two_engines_at_once(pair: list[Started], folder: Path) -> None:
    """Each gives both engines 25 buckets of all sizes, as fast as it can; the other sender's
    come between them.
    """
    sent = {
        sender: [a_bucket(sender, number, 1 + 60_000 * (number * 7 % 5)) for number in range(25)]
        for sender in ("both one", "both another")
    }

    def send(sender: str) -> dict[str, str]:
        groups = EngineProcessGroups()
        with delivering(pair, folder, groups, sender) as delivery:
            delivery.open_buffers(1, 1).close()
            for manifest, raw in sent[sender]:
                delivery(manifest, raw)
        groups.close()
        return delivery.failure_by_engine

    since = time.time()
    with ThreadPoolExecutor(2) as pool:
        failures = list(pool.map(send, sent))
    assert failures == [{}, {}]
    for engine in pair:
        for buckets in sent.values():
            expect(engine, folder, *[manifest for manifest, _ in buckets])
        log = new_log(engine[0], "update_weights_from_distributed", since)
        assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(log))
        switches = sum(
            before["group"] != after["group"] for before, after in itertools.pairwise(log)
        )
        assert len(log) == 50 and switches > 10, "the senders did not run side by side"


def deliver_with_a_fault(
    kind: str, engines: list[Started], directory: Path, words: str
) -> tuple[EngineProcessGroups, list[tuple[BucketManifest, Tensor]]]:
    """Of four buckets the second fails in engine0, which is left out; engine1 gets all. Nothing is
    stuck afterwards.
    """
    groups = EngineProcessGroups()
    threads = threading.active_count()
    ask(engines[0][0], "/fault", {"kind": kind, "nth": 2})
    buckets = [a_bucket(kind, number, 400_000) for number in range(4)]
    with delivering(
        engines, directory, groups, timeout_s=3.0 if kind == "hang" else 120.0
    ) as delivery:
        delivery.open_buffers(1, 1).close()
        for manifest, raw in buckets:
            delivery(manifest, raw)
    assert list(delivery.failure_by_engine) == ["engine0"], delivery.failure_by_engine
    assert re.match(
        f"engine0, bucket 1 of {kind}: .*{words}", delivery.failure_by_engine["engine0"], re.DOTALL
    )
    expect(engines[0], directory, buckets[0][0])
    expect(engines[1], directory, *[manifest for manifest, _ in buckets])
    deadline = time.monotonic() + HANG_S + 60
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.1)
    return groups, buckets


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("refuse", "not to the taste of the engine"),
        pytest.param("hang", r"(no answer|no end) within 3 s", marks=pytest.mark.long),
    ],
)
def test_an_engine_that_fails_in_a_bucket_is_left_out_and_the_next_sync_mends_it(
    pair: list[Started], folder: Path, kind: str, words: str
) -> None:
    groups, buckets = deliver_with_a_fault(kind, pair, folder, words)
    with delivering(pair, folder, groups) as delivery:
        delivery.open_buffers(1, 1).close()
        for manifest, raw in buckets:
            delivery(manifest, raw)
    assert delivery.failure_by_engine == {}
    expect(pair[0], folder, *[manifest for manifest, _ in buckets])
    groups.close()


def test_a_flipped_bit_is_seen_in_the_receipt(pair: list[Started], folder: Path) -> None:
    groups = EngineProcessGroups()
    manifest, raw = a_bucket("flipped", 0)
    damaged = raw.clone()
    damaged[7 * 4 + 1] ^= 16
    with delivering(pair[:1], folder, groups) as delivery:
        delivery.open_buffers(1, 1).close()
        delivery(manifest, damaged)
        delivery(*a_bucket("flipped", 1))  # it is left out: nothing of this comes
    words = (
        "engine0, bucket 0 of flipped: 1 of 2 tensors do not stand in it as they were sent: tensor"
        " 'flipped.0.0': "
    )
    assert delivery.failure_by_engine["engine0"].startswith(words + "digest ")
    assert not any("flipped.1" in name for name in receipts(folder, "engine0"))
    groups.close()


def test_an_engine_that_dies_in_a_bucket_is_left_out_and_gets_a_new_group_when_it_is_back(
    tmp_path: Path,
) -> None:
    with running(2, tmp_path) as engines:
        groups, buckets = deliver_with_a_fault("die", engines, tmp_path, "([Cc]onnection|closed)")
        back = engines[1]  # stands for it: the same name at another port
        again = (replace(engines[0][0], url=back[0].url), back[1])
        (transport,) = transports([again], tmp_path, groups)
        transport.prepare_sync()
        for manifest, raw in buckets:
            transport.deliver_bucket(manifest, raw)
        expect(again, tmp_path, *[manifest for manifest, _ in buckets])
        assert len(ask(back[0], "/log")["groups"]) == 2  # its own, and the new one
        groups.close()
        assert ask(back[0], "/log")["groups"] == []


def test_a_group_that_cannot_be_made(
    pair: list[Started], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No port on this host's address; and a server that refuses."""
    manifest, raw = a_bucket("never", 0)
    with monkeypatch.context() as patch:
        # no address of this host
        patch.setattr(process_group_transport, "find_address_towards_url", lambda url: "192.0.2.1")
        with delivering(pair[:1], folder, EngineProcessGroups()) as delivery:
            delivery.open_buffers(1, 1).close()
            delivery(manifest, raw)
    assert (
        "cannot listen on 192.0.2.1 towards http://127.0.0.1"
        in delivery.failure_by_engine["engine0"]
    )
    assert "use another rollout.weight_transport" in delivery.failure_by_engine["engine0"]

    transport = ProcessGroupTransport(
        pair[0][0], folder, "never", "no-such-backend", EngineProcessGroups(), 600.0, 600.0
    )
    begin = time.monotonic()
    with pytest.raises(
        EngineError, match=r"process group weights-.*no-such-backend|NO-SUCH-BACKEND"
    ):
        transport.prepare_sync()
    assert time.monotonic() - begin < 300


@pytest.mark.long
def test_an_engine_that_never_joins(tmp_path: Path) -> None:
    with running(1, tmp_path) as ((address, process),):
        os.kill(process.pid, signal.SIGSTOP)
        transport = ProcessGroupTransport(
            address, tmp_path, "s", "gloo", EngineProcessGroups(), 2.0, 600.0
        )
        begin = time.monotonic()
        with pytest.raises(EngineError, match="engine0, process group weights-"):
            transport.prepare_sync()
        assert time.monotonic() - begin < 300


def test_the_address_is_that_of_the_route_to_the_engine() -> None:
    assert find_address_towards_url("http://127.0.0.1:30000") == "127.0.0.1"
    assert find_address_towards_url("http://localhost:30000") in ("127.0.0.1", "::1")
    with pytest.raises(OSError):
        find_address_towards_url("http://no-such-host.invalid:30000")
