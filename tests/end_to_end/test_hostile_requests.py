"""What one client can do to the servers of this package: malformed requests, connections that ask
nothing or stop half-way, bodies and prompts at each bound. Each is a real process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml
from config_samples import VALID
from places import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.dist, pytest.mark.long]
KEY = "a-secret-key-of-clients"
ENGINE_MODULE = "rlhf_megatron.rollout.local.local_server"
MOST_GROWTH_KIB = 1 << 20
CONTEXT = 131072


@dataclass
class HostileTarget:
    """A server process, and how it is asked."""

    process: subprocess.Popen[bytes]
    port: int
    path: str
    log: Path

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60.0)

    def send(self, data: bytes) -> bytes:
        """Return all that the server answers until it closes the connection, or drops it."""
        pieces = []
        with self.connect() as connection, suppress(OSError):
            connection.sendall(data)
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces)

    def head(self, length: int | str, **more: str) -> bytes:
        headers = {
            "Host": "127.0.0.1",
            "Authorization": f"Bearer {KEY}",
            "Content-Length": str(length),
            "Connection": "close",
            **more,
        }
        lines = [f"POST {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def post(self, body: bytes) -> int:
        answer = self.send(self.head(len(body)) + body)
        return int(answer.split()[1]) if answer else 0

    def measure_answer_s(self) -> float:
        """Return how long the server takes to answer a question that costs nothing."""
        start = time.monotonic()
        is_open = self.path != "/score"
        question = "GET /health" if is_open else "POST /nowhere"
        answer = self.send(
            f"{question} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
            "Connection: close\r\nContent-Length: 0\r\n\r\n".encode()
        )
        assert answer.startswith(b"HTTP/1.1"), answer[:100]
        return time.monotonic() - start

    def read_peak_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])


def write_long_model(directory: Path) -> Path:
    """A tiny model with a long context, whose tokenizer has tokens of a hundred spaces."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" " * 128, "what is the sum of one and two"] * 50, trainer)
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@contextmanager
def start_server(
    folder: Path, words: list[str], path: str, ready: str, module: str = "rlhf_megatron"
) -> Iterator[HostileTarget]:
    log = folder / "log"
    (folder / "key").write_text(KEY)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 180.0
        while ready not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        line = next(line for line in log.read_text().splitlines() if ready in line)
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        yield HostileTarget(process, port, path, log)
        assert process.poll() is None, "it still serves"
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def start_serve(folder: Path) -> Iterator[HostileTarget]:
    model = write_long_model(folder / "model")
    words = ["serve", str(model), "--port", "0", "--api-key-file", "key", "trainer.device=cpu"]
    words += ["rollout.max_num_batched_tokens=131072"]
    with start_server(folder, words, "/v1/completions", "is served at") as target:
        yield target


@contextmanager
def start_serve_rewards(folder: Path) -> Iterator[HostileTarget]:
    run = {**yaml.safe_load(VALID), "reward": {"name": "exact_match"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    words = ["serve-rewards", "run.yaml", "--port", "0", "--api-key-file", "key", "--out", "out"]
    with start_server(folder, words, "/score", "rewards at") as target:
        yield target


@contextmanager
def start_engine(folder: Path) -> Iterator[HostileTarget]:
    """The bundled engine, as a run starts it: by its module, with a file of its token."""
    model = write_long_model(folder / "model")
    (folder / "token").write_text(KEY)
    (folder / "token").chmod(0o600)
    words = ["--model", str(model), "--token-file", "token"]
    with start_server(folder, words, "/generate", "listening on", ENGINE_MODULE) as target:
        yield target


STARTS = {"serve": start_serve, "serve-rewards": start_serve_rewards, "engine": start_engine}


@pytest.fixture(scope="module", params=STARTS)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostileTarget]:
    with STARTS[request.param](tmp_path_factory.mktemp("hostile")) as started:
        yield started


def make_malformed_requests(target: HostileTarget) -> list[bytes]:
    """Two hundred requests that are wrong in some way, most of them with the right key."""
    head = target.head(2)
    key_line = f"Authorization: Bearer {KEY}".encode()
    fixed = [
        head.replace(key_line, key_line + b"\0") + b"{}",
        target.head("\N{SUPERSCRIPT TWO}") + b"{}",
        target.head(-1),
        target.head("1e9"),
        target.head(2, **{"Transfer-Encoding": "chunked"}) + b"zz\r\n{}",
        target.head(2, **{"Content-Encoding": "gzip"}) + b"{}",
        target.head(2, **{"X-Long": "a" * 100_000}) + b"{}",
        head.replace(b"HTTP/1.1", b"HTTP/9.9") + b"{}",
        head.replace(b"POST", b"P\xffST") + b"{}",
        target.head(100_000) + b"[" * 100_000,
        target.head(100_000) + b'{"a":' * 20_000,
        target.head(12) + b'{"n": 1e999}',
        target.head(20) + b'{"prompt": "\\ud800"}',
        b"\0" * 5000,
        b"GET / HTTP/1.1\r\n" * 2000,
    ]
    random_ones = [secrets.token_bytes(200 + 7 * n) for n in range(100)]
    bodies = [secrets.token_bytes(50 + n) for n in range(200 - len(fixed) - len(random_ones))]
    return [*fixed, *random_ones, *(target.head(len(body)) + body for body in bodies)]


def test_malformed_requests(target: HostileTarget) -> None:
    requests = make_malformed_requests(target)
    assert len(requests) == 200
    for data in requests:
        answer = target.send(data)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (
            data[:200],
            answer[:200],
        )
    assert target.measure_answer_s() < 1.0
    log = target.log.read_text()
    assert KEY not in log and "Traceback" not in log


def test_connections_that_ask_nothing(target: HostileTarget) -> None:
    idle = [target.connect() for _ in range(500)]
    half = [target.connect() for _ in range(300)]
    whole = target.head(1_000_000) + b"[" * 2000
    for number, connection in enumerate(half):
        connection.sendall(whole[: len(whole) * (number % 4 + 1) // 5])
    assert target.measure_answer_s() < 1.0
    for connection in half[::2]:
        connection.close()
    assert target.measure_answer_s() < 1.0
    for connection in (*idle, *half):
        connection.close()
    log = target.log.read_text()
    assert KEY not in log and "Traceback" not in log


def watch_answers(target: HostileTarget, is_over: threading.Event) -> list[float]:
    """Ask a question that costs nothing, over and over, until the event; return the times."""
    times = []
    while not is_over.is_set():
        times.append(target.measure_answer_s())
        time.sleep(0.05)
    return times


@contextmanager
def watching_answers(target: HostileTarget) -> Iterator[list[float]]:
    is_over = threading.Event()
    times: list[float] = []
    thread = threading.Thread(target=lambda: times.extend(watch_answers(target, is_over)))
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()


def test_bodies_of_all_sizes(target: HostileTarget) -> None:
    before = target.read_peak_kib()
    with watching_answers(target) as times:
        statuses = {}
        for size in (1 << 10, 1 << 20, 8 << 20, 15 << 20, 60 << 20, 300 << 20):
            statuses[size] = target.post(b'{"prompt": "' + b"1" * size + b'"}')
    # the smallest one is a prompt that the model takes
    assert set(statuses.values()) <= {0, 200, 400, 413}, statuses
    assert statuses[300 << 20] in (0, 413)
    assert max(times) < 1.0
    assert target.read_peak_kib() - before < MOST_GROWTH_KIB


@pytest.mark.parametrize("target", ["serve"], indirect=True)
def test_prompts_at_each_bound(target: HostileTarget) -> None:
    """As many characters as are tokenized at once, one more, and many at a time; of words, which
    make many tokens, and of spaces, of which a hundred are one.
    """
    before = target.read_peak_kib()

    def ask(text: str | list[str]) -> int:
        body: dict[str, Any] = {"prompt": text, "max_tokens": 1}
        return target.post(json.dumps(body).encode())

    with watching_answers(target) as times:
        words = "what is the sum of one and two " * 70_000
        assert ask(words[:2_000_000]) == 400, "too many tokens"
        assert ask(words[:2_000_001]) == 413
        assert ask([" " * 1_000_000, " " * 1_000_001]) == 413
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(ask(words[:1_000_000])))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [400] * 12
        assert ask("what is the sum") == 200
    assert max(times) < 1.0, sorted(times)[-5:]
    assert target.read_peak_kib() - before < MOST_GROWTH_KIB
