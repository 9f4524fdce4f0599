"""JSON over HTTP with a deadline on every call; what goes wrong becomes an `EngineError` that names the engine."""

from __future__ import annotations

import json
import time
from typing import Any

import urllib3

from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineRequestError, EngineTimeoutError

_CONNECT_TIMEOUT_S = 10.0
_CONNECTIONS = 1024  # that are kept: a session has a call a group


class HttpClient:
    """Thread-safe. One pool of connections to one server."""

    def __init__(self, address: EngineAddress, key: str | None = None) -> None:
        """`key`: sent as bearer token; None: that of the admin verbs. Without one no header is sent."""
        self.address = address
        self._pool = urllib3.connection_from_url(address.url, maxsize=_CONNECTIONS, block=False, retries=False)
        key = address.token if key is None else key
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str, timeout_s: float) -> Any:
        return self._send("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """`body`: what json.dumps takes, or a string of JSON. Returns the parsed answer.

        Raises EngineTimeoutError after `timeout_s`, EngineRequestError on 4xx, EngineError otherwise.
        """
        return self._send("POST", path, body if isinstance(body, str) else json.dumps(body), timeout_s)

    def close(self) -> None:
        self._pool.close()

    def _send(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        who = f"{self.address.name} ({self.address.url}{path})"
        deadline = time.monotonic() + timeout_s
        timeout = urllib3.Timeout(connect=min(_CONNECT_TIMEOUT_S, timeout_s), read=timeout_s)
        try:
            response = self._pool.urlopen(
                method, path, body=body, headers=self._headers, timeout=timeout, preload_content=False, redirect=False
            )
            data = self._read(response, deadline)
        except urllib3.exceptions.NewConnectionError as error:  # to urllib3 a timeout, though nobody was waited for
            raise EngineError(f"{who}: no connection ({error.__cause__ or error}).") from error
        except urllib3.exceptions.TimeoutError as error:
            raise EngineTimeoutError(f"{who}: no answer within {timeout_s:g} s.") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise EngineError(f"{who}: {error}.") from error
        if response.status != 200:
            kind = EngineRequestError if 400 <= response.status < 500 else EngineError
            raise kind(f"{who} answered {response.status}: {_words(data)}")
        if "json" not in response.headers.get("Content-Type", ""):
            return data.decode(errors="replace")  # some of SGLang's verbs answer with a line of text
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise EngineError(f"{who}: the answer is not JSON: {data[:200]!r}") from error

    def _read(self, response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
        parts = []
        for part in response.stream(1 << 20):
            parts.append(part)
            if time.monotonic() > deadline:
                response.close()
                raise urllib3.exceptions.TimeoutError("the answer took too long")
        response.release_conn()
        return b"".join(parts)


def _words(data: bytes) -> str:
    """The server's own message."""
    text = data.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:500]
