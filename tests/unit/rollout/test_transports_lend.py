"""Device memory that is lent to an engine which fails. References stand in for a device's, the
server is real.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.device import SharedDeviceMemory
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.transports import tensor_transport
from rlhf_megatron.rollout.transports.tensor_transport import (
    LocalTensorTransport,
    SGLangTensorTransport,
)
from rlhf_megatron.weights.bucket_buffers import LentSegment
from rlhf_megatron.weights.bucket_manifest import BucketManifest


def reference(name: bytes) -> SharedDeviceMemory:
    return SharedDeviceMemory("GPU-1", 0, 8, b"", 8, 0, name, 0, b"", False)


@pytest.fixture
def declined(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    found: list[bytes] = []
    monkeypatch.setattr(tensor_transport, "share_device_memory", lambda bucket: reference(b"own"))
    monkeypatch.setattr(
        tensor_transport,
        "release_unopened_memory",
        lambda memory: found.append(memory.counter_handle),
    )
    return found


@pytest.fixture
def server() -> Iterator[Any]:
    """`how`: it dies as the request comes, is late with its answer, or has loaded the bucket."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.server.how == "dies":  # type: ignore[attr-defined]
                return
            if self.server.how == "is late":  # type: ignore[attr-defined]
                is_over.wait(60)
            self.send_response(500 if self.server.how == "refuses it" else 200)  # type: ignore[attr-defined]
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        is_over.set()
        made.shutdown()


MANIFEST = BucketManifest(1, "s", 0, "none", 8, ())
BUCKET = torch.zeros(8, dtype=torch.uint8)
OTHERS = [[LentSegment(8, reference(b"of rank 1"))]]


def address(server: Any) -> EngineAddress:
    return EngineAddress("engine0", "local", f"http://127.0.0.1:{server.server_port}", "key")


@pytest.mark.parametrize(
    ("how", "expected"),
    [("dies", [b"own", b"of rank 1"]), ("is late", []), ("refuses it", []), ("has loaded it", [])],
)
def test_what_an_engine_that_fails_will_not_open_is_given_back(
    server: Any, declined: list[bytes], how: str, expected: list[bytes]
) -> None:
    """One that is only late may open it yet; one that answers has closed what it opened."""
    server.how = how
    engine = LocalEngine(address(server), admin_timeout_s=0.2 if how == "is late" else 30.0)
    try:
        LocalTensorTransport(engine).lend_bucket(MANIFEST, BUCKET, OTHERS)
    except EngineError as error:
        assert isinstance(error, EngineTimeoutError) == (how == "is late")
    assert declined == expected


def test_the_ranks_of_a_server_that_dies_give_it_back_as_well(
    server: Any, declined: list[bytes], tmp_path: Path
) -> None:
    server.how = "dies"
    with pytest.raises(EngineError):
        SGLangTensorTransport(address(server), tmp_path).lend_bucket(MANIFEST, BUCKET, OTHERS)
    assert declined == [b"own", b"of rank 1"]
