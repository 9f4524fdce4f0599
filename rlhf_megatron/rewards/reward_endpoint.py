"""Requests of rewards to servers, with limits that hold over all worker processes of a run,
and with retries.

The limits of an address are locks on files that all processes of the user share: the kernel frees
those of a process that ends. Where a run has workers on several machines, each has its share. A
request that fails in a way that may pass is sent again, after a pause that doubles and varies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import random
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_megatron.retry import RetryPauses, may_pass, parse_retry_after

OWN_FAULT = 500  # the status of a failure that may pass which the request itself may cause
LOOK_S = 0.02
MAX_ANSWER_BYTES = 1 << 26
_num_machines = 1  # that have workers of the run


def divide_endpoint_limits(num_machines: int) -> None:
    """Divide the limits of each server by `num_machines`, the number of machines that have workers
    of the run, in this process and its later forks.
    """
    global _num_machines
    _num_machines = num_machines


class RewardEndpointError(RuntimeError):
    """A server did not answer, or answered wrongly; the policy is not to blame."""

    mask_reason = "endpoint"  # of the masked sample


class RewardEndpointRefusedError(RewardEndpointError):
    """A server answered that it does not accept the request, and would answer the same again."""

    mask_reason = "refused"


@dataclass(frozen=True)
class RewardEndpoint:
    """The address of a server, and the limits of requests to it."""

    url: str  # http:// or https://, with the path
    timeout_s: float = 60.0  # of one request
    patience_s: float = 120.0  # after the first request, in which failed ones are sent again
    concurrency: int = 16  # requests at a time, over all workers (on each machine one at least)
    requests_per_s: float | None = None  # over all workers; null: no limit
    key_file: str | None = None  # holds the bearer token

    def __post_init__(self) -> None:
        """Raise ValueError for a url that is not http(s), or a limit out of range."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"url ({self.url!r}) must begin with http:// or https:// and name a host."
            )
        if min(self.timeout_s, self.patience_s) <= 0 or self.concurrency < 1:
            raise ValueError(
                f"timeout_s ({self.timeout_s}), patience_s ({self.patience_s}) must be above 0,"
                f" concurrency ({self.concurrency}) at least 1."
            )
        if self.requests_per_s is not None and self.requests_per_s <= 0:
            raise ValueError(
                f"requests_per_s ({self.requests_per_s}) must be above 0; null: no limit."
            )

    @property
    def max_wait_s(self) -> float:
        """Return the longest time in seconds from this request's turn to its answer."""
        return self.patience_s + self.timeout_s

    def post_with_retries(self, body: Any, probe: Any = None) -> RewardEndpointAnswer:
        """Wait for a turn, post `body` as JSON, and return the answer; send the request again after
        a failure that may pass. Raise RewardEndpointError when there is no JSON answer within
        `patience_s`, RewardEndpointRefusedError when the server refuses the request.

        `probe` is a request that a sound server answers. A server that answers it, but fails at
        `body` twice with status 500, refuses `body`.
        """
        pauses = RetryPauses(self.patience_s)
        while True:
            with self.hold_turn():
                sent = time.monotonic()
                # the patience begins here: waiting for a turn is no failure of the server
                pauses.start_try()
                status, text, retry_after_s = self._post_once(json.dumps(body).encode())
            if status == 200:
                try:
                    return RewardEndpointAnswer(
                        json.loads(text), pauses.num_retries, time.monotonic() - sent
                    )
                except (ValueError, RecursionError) as error:
                    raise RewardEndpointError(
                        f"{self.url} answered what is no JSON: {text[:200]!r}."
                    ) from error
            is_own_fault = (
                status == OWN_FAULT
                and pauses.num_retries > 0
                and probe is not None
                and self._answers_probe(probe)
            )
            if is_own_fault or not may_pass(status):
                raise RewardEndpointRefusedError(f"{self.url} answered {status}: {text[:200]!r}.")
            pause_s = pauses.choose_pause(retry_after_s)
            if pause_s is None:
                told = (
                    f"status {status}: {text[:200]!r}"
                    if status
                    else text[:200].decode(errors="replace")
                )
                raise RewardEndpointError(
                    f"{self.url} gave no answer in {self.patience_s:g} s ({told})."
                )
            time.sleep(pause_s)

    def _answers_probe(self, probe: Any) -> bool:
        """Return whether the server answers the probe with status 200."""
        with self.hold_turn():
            return self._post_once(json.dumps(probe).encode())[0] == 200

    def _post_once(self, body: bytes) -> tuple[int | None, bytes, float]:
        """Post the body once. Return (status, answer, seconds that the server asks to wait). The
        status is None, and the answer the reason, where the server could not be reached.
        """
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.key_file is not None:
            headers["Authorization"] = f"Bearer {Path(self.key_file).read_text().strip()}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return (
                answer.status,
                answer.read(MAX_ANSWER_BYTES),
                parse_retry_after(answer.headers.get("Retry-After")),
            )
        except (OSError, http.client.HTTPException) as error:
            return None, f"{type(error).__name__}: {error}".encode(), 0.0
        finally:
            connection.close()

    @contextlib.contextmanager
    def hold_turn(self) -> Iterator[None]:
        """Wait until this server's limits allow a request, and count the request as running within
        the block.
        """
        folder = _open_limits_dir(self.url)
        held = _lock_free_place(folder, max(1, self.concurrency // _num_machines))
        try:
            if self.requests_per_s is not None:
                _wait_for_rate_slot(folder / "next", _num_machines / self.requests_per_s)
            yield
        finally:
            os.close(held)


@dataclass(frozen=True)
class RewardEndpointAnswer:
    """The answer of a server."""

    answer: Any
    num_retries: int
    latency_s: float  # of the request that was answered


def _open_limits_dir(url: str) -> Path:
    """Return the directory of the files that hold an address's limits, and make it. Raise
    RewardEndpointError where it belongs to another user.
    """
    folder = Path(
        tempfile.gettempdir(),
        f"rlhf-megatron-limits-{os.getuid()}",
        hashlib.sha256(url.encode()).hexdigest(),
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder.parent)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise RewardEndpointError(f"{folder.parent} belongs to another user; remove it.")
    return folder


def _lock_free_place(limits_dir: Path, num_places: int) -> int:
    """Wait for one of `num_places` places and return the descriptor of its locked file; closing the
    descriptor frees the place.
    """
    order = list(range(num_places))
    while True:
        random.shuffle(order)
        for number in order:
            descriptor = os.open(
                limits_dir / f"place-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                os.close(descriptor)
        time.sleep(LOOK_S * random.uniform(0.5, 1.5))


def _wait_for_rate_slot(clock_path: Path, interval_s: float) -> None:
    """Take the next free moment of a clock that all processes of the machine share, and wait for
    that moment. Moments are `interval_s` apart.
    """
    descriptor = os.open(clock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        data = os.pread(descriptor, 8, 0)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        is_of_this_boot = os.fstat(descriptor).st_mtime > time.time() - now
        mine = max(now, struct.unpack("d", data)[0]) if len(data) == 8 and is_of_this_boot else now
        os.pwrite(descriptor, struct.pack("d", mine + interval_s), 0)
    finally:
        os.close(descriptor)
    time.sleep(max(0.0, mine - now))
