"""`rlhf-megatron serve` as clients see it: plain HTTP, and loads of it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
from places import ROOT, SUPPORT
from program_jobs import Job
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, sglang_python

from rlhf_megatron.data.tokenizer import Tokenizer

MODEL = ROOT / "examples" / "quickstart" / "warm_model"
TEMPLATE = (
    "{% if tools %}{{ tools | length }}*{% endif %}{% for m in messages %}{{ m.content"
    " }}{% endfor %}="
)
KEY = "a key for clients"
SMALL = (
    "trainer.device=cpu",
    "rollout.max_num_seqs=16",
    "rollout.health_interval_s=0.2",
    "rollout.num_engines=2",
)
ADDRESS = re.compile(r"is served at (http://\S+)/v1")


def sglang_words() -> tuple[str, ...]:
    """Settings of stock SGLang on a CPU."""
    args = {**CPU_ARGUMENTS, "context_length": 64, "max_total_tokens": 2048}
    given = {f"args.{name}": value for name, value in args.items()} | {
        f"env.{n}": v for n, v in CPU_ENV.items()
    }
    given["python"] = str(sglang_python())
    words = [f"rollout.sglang.{name}={json.dumps(value)}" for name, value in given.items()]
    return (
        "rollout.engine=sglang",
        "rollout.health_interval_s=2",
        f"rollout.startup_timeout_s={STARTUP_S}",
        *words,
    )


def openai_python() -> str | None:
    """An interpreter that has OpenAI's package: this one, or SGLang's, of which it is a part."""
    if importlib.util.find_spec("openai"):
        return sys.executable
    return str(sglang_python()) if sglang_python().exists() else None


def has_openai() -> bool:
    return openai_python() is not None


needs_openai = pytest.mark.skipif(
    not has_openai(), reason="needs OpenAI's package, here or beside SGLang"
)


def ask_with_openai(url: str, *words: str) -> None:
    """Run OpenAI's own client against the server. `words`: of the program."""
    command = [openai_python() or "", str(SUPPORT / "openai_program.py"), url, KEY, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "is content" in done.stdout, done.stdout + done.stderr


class Client:
    """A server's address and key."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.url = url
        self.key = key
        self._pool = urllib3.PoolManager(maxsize=64)

    def send(
        self, method: str, path: str, body: Any = None, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Authorization": f"Bearer {self.key}"}
        given = {"json": body} if body is not None else {}
        return self._pool.request(
            method,
            self.url + path,
            headers=headers,
            timeout=120.0,
            retries=False,
            **given,
            **options,
        )

    def get(self, path: str) -> Any:
        return self.send("GET", path).json()

    def post(self, path: str, **body: Any) -> Any:
        """The answer, which must be 200."""
        answer = self.send("POST", path, body)
        assert answer.status == 200, answer.data
        return answer.json()

    def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and message of OpenAI's form."""
        answer = self.send("POST", path, body)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and answer.status >= 400
        return answer.status, error["message"]

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Of a stream that ended well."""
        answer = self.send("POST", path, {"stream": True, **body}, preload_content=False)
        assert answer.status == 200 and answer.headers["Content-Type"].startswith(
            "text/event-stream"
        ), answer.data
        events = answer.read().decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]", events[-1]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def metric(self, name: str) -> float:
        lines = self.send("GET", "/metrics").data.decode().splitlines()
        return next(
            float(line.split()[-1]) for line in lines if line.startswith(f"rlhf_megatron_{name} ")
        )


@contextmanager
def served(directory: Path, *words: str, model: Path | None = None) -> Iterator[tuple[Job, Client]]:
    """A server with the key KEY; it has ended with code 0 behind the block. `model`: None, a copy
    with a template.
    """
    if model is None and "--follow" not in words:
        model = directory / "model"
        shutil.copytree(MODEL, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
    key = directory / "key"
    key.write_text(KEY + "\n")
    source = (str(model),) if model is not None else ()
    job = Job(
        directory, "serve", *source, "--port", "0", "--api-key-file", str(key), *SMALL, *words
    )
    try:
        found = ADDRESS.search(job.wait_for_words("is served at", STARTUP_S))
        assert found is not None
        yield job, Client(found[1])
        job.process.terminate()
        assert job.process.wait(60) == 0, job.console.read_text()
    finally:
        if job.process.poll() is None:
            job.process.kill()
        job.end()


def names_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids by the names under which log-probs show tokens."""
    return {
        tokenizer.decode_with_special_tokens([number]): number
        for number in range(tokenizer.vocab_size)
    }


class Load:
    """Clients that ask, each again and again, until the block ends;
    `answers` and `errors` of all.
    """

    def __init__(self, asks: list[Callable[[int], Any]]) -> None:
        """`asks`: of each client, called with the number of its request."""
        self.answers: list[Any] = []
        self.errors: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(ask,), daemon=True) for ask in asks
        ]

    def _run(self, ask: Callable[[int], Any]) -> None:
        number = 0
        while not self._over.is_set():
            try:
                self.answers.append(ask(number))
            except BaseException as error:
                self.errors.append(error)
            number += 1

    def wait(self, condition: Callable[[], bool], within_s: float = 120) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline and not self.errors, self.errors
            time.sleep(0.05)

    def wait_for(self, count: int) -> None:
        """So many more answers."""
        enough = len(self.answers) + count
        self.wait(lambda: len(self.answers) >= enough)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)
