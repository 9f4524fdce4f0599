"""The bundled server against callers that mean no good: refused with 4xx, alive, and its
weights as they were.
"""

from __future__ import annotations

import json
import pickle
import random
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import urllib3
from rollout_tools import digests_of, request, tiny_qwen3, weights_of, write_buckets

from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_bodies import encode_requests
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.weights.bucket_manifest import BucketManifest

pytestmark = pytest.mark.dist
VERSION = 5
GOOD = json.loads(
    encode_requests([request((1, 2), (7,), 3, stop_token_ids=(3,), top_p=0.9, top_k=4, min_p=0.1)])
)


class Target:
    """A server that serves version 5, and the buckets of a sync to the next."""

    def __init__(self, servers: EngineServers, transfer_dir: Path) -> None:
        self.address = servers.addresses[0]
        self.process = servers.processes[0]
        self.transfer_dir = transfer_dir
        self.engine = LocalEngine(self.address)
        self.weights = weights_of(tiny_qwen3(1))
        self.other = weights_of(tiny_qwen3(2))
        self.port = int(self.address.url.rpartition(":")[2])

    def sync(self, version: int) -> None:
        self.engine.begin_weight_update(version)
        for manifest in write_buckets(self.weights, self.transfer_dir, version):
            self.engine.update_weights(manifest)
        self.engine.commit_weight_update(version)

    def send(
        self, path: str, body: bytes, method: str = "POST", **headers: str
    ) -> tuple[int, bytes, Any]:
        headers = {"Authorization": f"Bearer {self.address.token}", **headers}
        answer = urllib3.request(
            method, self.address.url + path, body=body, headers=headers, timeout=60, retries=False
        )
        return answer.status, answer.data, answer.headers

    def raw(self, text: bytes) -> bytes:
        """The answer to bytes that no HTTP client would send."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(text)
            return connection.recv(65536)

    def is_unharmed(self) -> None:
        assert self.process.exit_code is None
        assert self.engine.get_weight_digests() == digests_of(self.weights)
        assert self.engine.get_served_version() is not None
        assert len(self.engine.generate([request((1, 2), (7,), 3)], 60)[0][0].token_ids) == 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("target")
    tiny_qwen3(1).save_pretrained(folder / "model")
    (folder / "transfer").mkdir()
    with start_local_engines(
        folder / "model", 1, folder, transfer_dir=folder / "transfer"
    ) as servers:
        made = Target(servers, folder / "transfer")
        made.sync(VERSION)
        yield made


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        import os

        return os.system, (f"touch {self.marker}",)


PATHS = ("/generate", "/begin_weight_update", "/update_weights", "/commit_weight_update")


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_json_object(target: Target, tmp_path: Path, path: str) -> None:
    marker = tmp_path / "marker"
    generator = random.Random(path)
    bodies = [
        pickle.dumps(Evil(marker)),
        pickle.dumps({"requests": Evil(marker)}),
        b"\xff\xfe\x00",
        b"",
        b"null",
        b"[1, 2]",
        b'"text"',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"requests": NaN}',
        b'{"version": Infinity}',
        b'{"version": 1' + b"0" * 5000 + b"}",
        *(generator.randbytes(generator.randrange(1, 400)) for _ in range(20)),
    ]
    for body in bodies:
        status, answer, _ = target.send(path, body)
        assert status == 400, (body[:60], status, answer[:200])
        assert len(answer) < 20_000
    assert not marker.exists()
    target.is_unharmed()


def mutations(
    good: dict[str, Any], generator: random.Random, number: int
) -> Iterator[dict[str, Any]]:
    """Copies of a JSON object with one value replaced by something that does not belong there."""
    strange: list[Any] = [
        None,
        True,
        -1,
        1.5,
        1 << 70,
        -(1 << 70),
        "",
        "x",
        "../x",
        "/etc/passwd",
        "\0",
        [],
        [[]],
        {},
        "a" * 9999,
    ]
    for _ in range(number):
        copy = json.loads(json.dumps(good))
        node: Any = copy
        while True:
            key = generator.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], dict | list) and node[key] and generator.random() < 0.8:
                node = node[key]
                continue
            old = node[key]
            node[key] = generator.choice(
                [value for value in strange if value != old or type(value) is not type(old)]
            )
            break
        yield copy


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("/pause", {"mode": "abort"}),
        ("/release_memory", {"parts": ["weights"]}),
        ("/resume_memory", {"parts": ["x"]}),
    ],
)
def test_orders_with_wrong_values(target: Target, path: str, good: dict[str, Any]) -> None:
    for body in (
        *mutations(good, random.Random(path), 60),
        {"mode": {"abort": 1}, "parts": [["weights"], {}]},
    ):
        status, answer, _ = target.send(path, json.dumps(body).encode())
        assert status == 400 and b"the body must be" in answer, (body, status, answer)
    target.is_unharmed()


def test_requests_with_wrong_values(target: Target) -> None:
    for body in mutations(GOOD, random.Random(1), 250):
        status, answer, _ = target.send("/generate", json.dumps(body).encode())
        # 1.5 is a temperature
        is_harmless = body["requests"] == [] or (status == 200 and b"groups" in answer)
        assert status == 400 or is_harmless, (body, status, answer[:200])
    target.is_unharmed()


def test_manifests_with_wrong_values(target: Target) -> None:
    """Each ends the sync at the latest at its commit; the engine is STALE until a good one, and
    never half new.
    """
    served = target.engine.get_served_version()
    assert served is not None
    target.engine.begin_weight_update(served + 1)
    manifest = write_buckets(target.other, target.transfer_dir, served + 1, num_buckets=1)[0]
    small = replace(manifest, tensors=manifest.tensors[:3])
    for body in mutations(asdict(small), random.Random(2), 200):
        status, answer, _ = target.send("/update_weights", json.dumps(body).encode())
        changed = body["sender"] != small.sender or body["bucket"] != small.bucket
        harmless = changed or body["tensors"] == [] or body["num_bytes"] == 1 << 70
        if status != 400:
            assert status == 200 and harmless, (body, status, answer[:300])
            target.send("/commit_weight_update", json.dumps({"version": served + 1}).encode())
        if b"but the open sync is None" in answer or status == 200:
            target.engine.begin_weight_update(served + 1, is_full_resync=True)
    target.sync(served + 2)
    target.is_unharmed()


def test_links_and_paths_of_buckets(target: Target, tmp_path: Path) -> None:
    served = target.engine.get_served_version()
    assert served is not None
    manifest = write_buckets(target.other, tmp_path, served + 1, num_buckets=1)[0]
    (target.transfer_dir / "link").symlink_to(tmp_path / manifest.file)
    (target.transfer_dir / "folder").mkdir()
    (target.transfer_dir / "folder" / "inside").write_bytes(b"x" * manifest.num_bytes)
    for file in (
        "link",
        "folder",
        "folder/inside",
        str(tmp_path / manifest.file),
        f"../{manifest.file}",
        "..",
        "",
    ):
        target.engine.begin_weight_update(served + 1, is_full_resync=True)
        evil = json.dumps({**asdict(manifest), "file": file}).encode()
        status, answer, _ = target.send("/update_weights", evil)
        assert status == 400 and (b"plain" in answer), (file, answer)
    target.sync(served + 1)
    target.is_unharmed()


def test_sizes_that_lie(target: Target) -> None:
    token = target.address.token.encode()
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + token + b"\r\n"
    too_large = target.raw(head + b"Content-Length: 10737418240\r\n\r\n{")
    assert b" 413 " in too_large.split(b"\r\n")[0], too_large
    for length in (b"-1", b"1e3", b"0x10", b"99999999999999999999999999"):
        answer = target.raw(head + b"Content-Length: " + length + b"\r\n\r\n{}").split(b"\r\n")[0]
        assert b" 400 " in answer or b" 413 " in answer, (length, answer)
    twice = target.raw(
        head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ).split(b"\r\n")[0]
    assert b" 400 " in twice, twice
    long_header = target.raw(head + b"X: " + b"a" * 100_000 + b"\r\n\r\n").split(b"\r\n")[0]
    assert b" 400 " in long_header or b" 431 " in long_header
    target.is_unharmed()


def test_what_is_no_http_costs_a_line_a_minute(target: Target) -> None:
    """Whoever can connect can send it, and a proxy that damages a request sends the token in it."""
    lines = target.process.read_log_tail(10_000).count("refused a request that is no HTTP")
    for _ in range(20):
        target.raw(
            b"POST /generate HTTP/1.1\r\nAuthorization: Bearer "
            + target.address.token.encode()
            + b"\0\r\n\r\n"
        )
    log = target.process.read_log_tail(10_000)
    assert log.count("refused a request that is no HTTP") == max(1, lines)
    assert "Traceback" not in log and target.address.token not in log


def test_a_body_without_the_token_is_not_read(target: Target) -> None:
    answer = target.raw(
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10737418240\r\n\r\n{"
    )
    assert b" 401 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic abc",
        "Bearer ÿ".encode().decode("latin-1"),
        "Bearer " + "x" * 5000,
    ],
)
def test_tokens_that_are_none(target: Target, given: str) -> None:
    for path in (*PATHS, "/info", "/abort", "/pause", "/release_memory", "/resume_memory"):
        method = "GET" if path == "/info" else "POST"
        assert target.send(path, b"{}", method, Authorization=given)[0] == 401
        for scheme in ("", "bearer ", "Basic "):
            assert (
                target.send(path, b"{}", method, Authorization=scheme + target.address.token)[0]
                == 401
            )


def test_web_pages_cannot_call_it(target: Target) -> None:
    """A page of another site names itself as the origin, or has its own name lead to 127.0.0.1
    (DNS rebinding).
    """
    body = json.dumps(GOOD).encode()
    for headers in (
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{target.port}"},
    ):
        assert target.send("/generate", body, **headers)[0] == 403
        assert target.send("/health", b"", "GET", **headers)[0] == 403
    for host in (f"127.0.0.1:{target.port}", "localhost", f"localhost:{target.port}", "[::1]"):
        assert target.send("/generate", body, Host=host)[0] == 200
    status, _, headers = target.send("/generate", b"", "OPTIONS")
    assert status == 405 and not [
        name for name in headers if name.lower().startswith("access-control")
    ]


def test_it_listens_on_the_loopback_address_only(target: Target) -> None:
    others = {
        entry[4][0]
        for entry in socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)
    }
    for address in others - {"127.0.0.1"}:
        if not address.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((address, target.port), timeout=2)


def test_a_manifest_is_what_its_types_say() -> None:
    good = {"version": 1, "sender": "s", "bucket": 0, "file": "f", "num_bytes": 8, "tensors": []}
    assert BucketManifest.parse_json(json.dumps(good)).num_bytes == 8
    for field in good:
        for wrong in (None, 1.0, True, {}, ["x"], "x" if field not in ("sender", "file") else 1):
            with pytest.raises(ValueError, match="not a bucket manifest"):
                BucketManifest.parse_json(json.dumps({**good, field: wrong}))
