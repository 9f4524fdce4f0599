"""What a client says of a server that is not there, and of one that does not answer."""

from __future__ import annotations

import socket

import pytest

from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.http import HttpClient


def client(port: int) -> HttpClient:
    return HttpClient(EngineAddress("engine0", "local", f"http://127.0.0.1:{port}", "token"))


def test_a_refused_connection_is_no_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(EngineError, match=r"engine0 .*/health\): no connection .*[Rr]efused") as caught:
        client(port).get("/health", 60.0)
    assert not isinstance(caught.value, EngineTimeoutError)


def test_a_server_that_never_answers_is_one() -> None:
    no_answer = pytest.raises(EngineTimeoutError, match=r"no answer within 0.2 s\.")
    with socket.create_server(("127.0.0.1", 0)) as server, no_answer:
        client(server.getsockname()[1]).get("/health", 0.2)
