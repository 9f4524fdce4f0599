"""Running SGLang servers that a run uses and does not own (`rollout.endpoints`): looked at, taken for this run alone,
given back as they can go on serving.

They are never killed nor started again. What a killed run has left behind in one, an open weight update and a pause,
is put right by the next run that takes it. The lease is needed: without it two runs could load weights into one server
within one sync, and each would take the other's samples for its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_megatron.rollout.engine import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    GeneratedSample,
    GenerateRequest,
)
from rlhf_megatron.rollout.fleet.process import Progress, ServerProcess
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.attached_server import (
    Expected,
    Found,
    compare_model,
    dtype_problem,
    look,
    vocabulary_problem,
)
from rlhf_megatron.rollout.sglang.client import SGLangEngine
from rlhf_megatron.rollout.sglang.samples import limits_of
from rlhf_megatron.rollout.sglang.weights import SGLangVerbs

LEASE_S = 60.0
SLOTS = ("rlhf_megatron-lease-a", "rlhf_megatron-lease-b")
_CALL_S = 120.0  # a server that loads weights answers late
_VERDICT_S = 30.0
_RETRY_S = 1.0


class Lease:
    """Held from `acquire` to `release`, renewed by a thread. `epoch` counts the times that it was held anew: another
    run can have used the server between two of them."""

    def __init__(self, http: HttpClient, seconds: float = LEASE_S) -> None:
        """`http`: with the key of verbs that take no admin key."""
        self.epoch = 0
        self._http = http
        self._seconds = seconds
        self._renewed = 0.0  # when the last session that was opened was asked for
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, deadline: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until nobody else holds it; `waiting` is called every moment. `deadline`: of time.monotonic().

        Raises EngineError: at the deadline, or where the server fails.
        """
        while True:
            sent = _now()
            if self._open(SLOTS[0]):
                if self._open(SLOTS[1]):
                    break
                self._close(SLOTS[0])
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._http.address.url} is in use by another run; stop that run, or give this one servers of its"
                    f" own (a run that was killed is forgotten after {self._seconds:g} s)."
                )
            waiting()
            time.sleep(_RETRY_S)
        self.epoch, self._renewed = self.epoch + 1, sent
        self._thread = threading.Thread(target=self._keep, name=f"lease-{self._http.address.name}", daemon=True)
        self._thread.start()

    def current(self) -> int:
        """The epoch. Where the last renewal is too long ago, e.g. after this process was stopped, waits for the next
        one. Raises EngineError where the lease is lost."""
        with self._changed:
            if self._changed.wait_for(lambda: _now() - self._renewed < self._seconds, _VERDICT_S):
                return self.epoch
        raise EngineError(
            f"{self._http.address.name} ({self._http.address.url}): this run has lost its lease of the server, which"
            " another run may use now."
        )

    def release(self) -> None:
        """Safe to call twice. Does not raise where the server is gone."""
        self._stopped.set()
        if self._thread is None:
            return
        self._thread.join(_RETRY_S)
        self._thread = None
        for slot in SLOTS:
            with contextlib.suppress(EngineError):
                self._close(slot, _VERDICT_S)

    def _keep(self) -> None:
        """Renews the lease, in its thread. A session that was asked for within `seconds` of the other one came while
        that one stood, or before whoever asked later: no other run had both, also where the server answers late."""
        turn, pause = 0, self._seconds / 6
        while not self._stopped.wait(pause):
            sent, is_renewed = 0.0, False
            with contextlib.suppress(EngineError):
                self._close(SLOTS[turn])
                sent = _now()
                is_renewed = self._open(SLOTS[turn])
            pause = self._seconds / 6 if is_renewed else _RETRY_S
            if is_renewed:
                turn = 1 - turn  # never before: while this session is not there again, the other one is the lease
                with self._changed:
                    self.epoch += sent - self._renewed >= self._seconds
                    self._renewed = sent
                    self._changed.notify_all()

    def _open(self, slot: str) -> bool:
        body = {"session_id": slot, "capacity_of_str_len": 0, "timeout": self._seconds}
        try:
            return bool(self._http.post("/open_session", body, _CALL_S) == slot)
        except EngineRequestError as error:
            if "Failed to open the session" in str(error):
                return False
            raise

    def _close(self, slot: str, timeout_s: float = _CALL_S) -> None:
        self._http.post("/close_session", {"session_id": slot}, timeout_s)


def _now() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


logger = logging.getLogger(__name__)

UNFINISHED = "unfinished"  # weight version of a server that was left in the middle of a weight update
_TAKE_S = LEASE_S + 30.0  # so long may the lease of a run that was killed stand
_VERB_S = 60.0
_GIVE_BACK_S = 30.0


def addresses_of(endpoints: Sequence[str], api_key: str, admin_key: str) -> list[EngineAddress]:
    """Nothing is asked yet. Without an admin key that of `--api-key` does for all, as on the server."""
    token = admin_key or api_key
    return [
        EngineAddress(f"engine{index}", "sglang", url.rstrip("/"), token, api_key=api_key if api_key != token else "")
        for index, url in enumerate(endpoints)
    ]


def look_at_all(addresses: Sequence[EngineAddress], expected: Expected) -> list[Found]:
    """Changes nothing on the servers. Raises EngineError with everything that is wrong, of all of them."""
    with ThreadPoolExecutor(len(addresses)) as threads:
        futures = [threads.submit(look, address, expected) for address in addresses]
    problems: list[str] = []
    found: list[Found] = []
    for address, future in zip(addresses, futures, strict=True):
        try:
            found.append(future.result())
        except EngineError as error:
            problems.append(f"rollout.endpoints: {error}")
            continue
        problems += [_say(address, problem) for problem in found[-1].problems]
    if problems:
        raise EngineError("\n".join(problems))
    return found


class AttachedEngine(SGLangEngine):
    """A client that trusts a server only as far as this run has had it all the time since the last weight sync."""

    def __init__(self, address: EngineAddress, transfer_dir: Path, lease: Lease | None) -> None:
        super().__init__(address, transfer_dir)
        self._lease = lease
        self._epoch = -1  # of the lease at the last sync

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> list[list[GeneratedSample]]:
        groups = super().generate(requests, timeout_s, name)
        if not self._is_held():
            raise EngineError(f"{self.address.name}: another run may have used {self.address.url} meanwhile.")
        return groups

    def commit_update(self, version: int) -> None:
        """Digests and receipts have told what stands in it: from here on nobody else may have had it."""
        super().commit_update(version)
        if self._lease is not None:
            self._epoch = self._lease.current()

    def version(self) -> int | None:
        return super().version() if self._is_held() else None

    def _is_held(self) -> bool:
        return self._lease is None or self._lease.current() == self._epoch or super().version() is None


class AttachedEngines:
    """A context manager: all servers are given back when it ends. See `fleet.process.EngineServers`."""

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        expected: Expected,
        transfer_dir: Path,
        progress: Progress | None = None,
    ) -> None:
        """Takes all servers, waiting for the lease of a run that was killed. Raises EngineError; none is held then."""
        self._transfer_dir = transfer_dir
        self._progress = progress
        self._taken: list[_Taken] = []
        found = look_at_all(addresses, expected)
        try:
            for address, facts in zip(addresses, found, strict=True):
                self._take(address, facts, expected)
        except BaseException:
            self.stop()
            raise

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        return tuple(taken.address for taken in self._taken)

    @property
    def processes(self) -> tuple[ServerProcess, ...]:
        """Empty: the servers are not this run's processes."""
        return ()

    def connect(self, address: EngineAddress) -> AttachedEngine:
        """The controller's client of one of them."""
        lease = next(taken.lease for taken in self._taken if taken.address.name == address.name)
        return AttachedEngine(address, self._transfer_dir, lease)

    def stop(self) -> None:
        """Give all back. Safe to call twice; does not raise where a server is gone."""
        while self._taken:
            _give_back(self._taken.pop())

    def __enter__(self) -> AttachedEngines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _take(self, address: EngineAddress, facts: Found, expected: Expected) -> None:
        for warning in facts.warnings:
            logger.warning("%s", _say(address, warning))
        lease = None
        if facts.has_sessions:
            lease = self._lease(address)
        else:
            logger.warning("%s", _say(address, "it has no /open_session: nothing keeps another run from using it."))
        self._taken.append(_Taken(address, lease))
        address = replace(address, tp_size=facts.tp_size)
        _recover(address)
        SGLangEngine(address, self._transfer_dir).probe()
        model = _ask_loader(address, self._transfer_dir) if facts.lists_loader else None
        vocab_size = limits_of(HttpClient(address, address.api_key or address.token), _VERB_S).vocab_size
        problems = list(compare_model(model or {}, expected)) + list(vocabulary_problem(vocab_size, expected))
        if model is not None and model["dtype"] != expected.dtype and facts.dtype is None:
            problems.append(dtype_problem(model["dtype"], expected))
        if problems:
            raise EngineError("\n".join(_say(address, problem) for problem in problems))
        if model is None:
            logger.warning("%s", _say(address, _without_loader(facts, self._transfer_dir)))
        self._taken[-1] = _Taken(replace(address, has_loader=model is not None), lease)

    def _lease(self, address: EngineAddress) -> Lease:
        http = HttpClient(address, address.api_key or address.token)
        lease, start = Lease(http), time.monotonic()
        words = f"another run has it, or had it when it was killed a moment ago; waiting {_TAKE_S:g} s for it"
        told: list[str] = []

        def waiting() -> None:
            if not told:
                told.append(words)
                logger.warning("%s", _say(address, words))
            if self._progress is not None:
                self._progress(address.name, time.monotonic() - start, words)

        try:
            lease.acquire(start + _TAKE_S, waiting)
        except EngineError as error:
            raise EngineError(f"rollout.endpoints: {error}") from error
        return lease


@dataclass(frozen=True)
class _Taken:
    address: EngineAddress
    lease: Lease | None


def _say(address: EngineAddress, problem: str) -> str:
    return f"rollout.endpoints ({address.url}): {problem.rstrip('.')}."


def _without_loader(facts: Found, transfer_dir: Path) -> str:
    if facts.lists_loader:
        return (
            "its weight loader does not answer, since it cannot reach the transfer directory"
            f" ({transfer_dir}); set rollout.transfer_dir to the RLHF_MEGATRON_TRANSFER_DIR that it was started with,"
            " and run both as one user. Weights go by SGLang's own update calls, and a probe follows each sync"
        )
    return (
        "it was started without --custom-weight-loader: weights go by SGLang's own update calls, and a probe follows"
        " each sync instead of digests of what stands in it"
    )


def _recover(address: EngineAddress) -> None:
    """Out of what a run that was killed has left: requests, an open weight update, a pause. Raises EngineError."""
    http = HttpClient(address)
    try:
        http.post("/abort_request", {"abort_all": True}, _VERB_S)
        _end_update(http, _VERB_S)
        http.post("/continue_generation", {}, _VERB_S)
    except EngineRequestError as error:
        if " answered 401" not in str(error) and " answered 403" not in str(error):
            raise
        raise EngineError(
            f"rollout.endpoints: {address.url} refuses the admin key; name a file that holds its --admin-api-key in"
            " rollout.sglang.admin_api_key_file (readable by you alone)."
        ) from error


def _end_update(http: HttpClient, timeout_s: float) -> None:
    """Close the weight update that is open, if one is. What stands in the server then is part of two policies."""
    try:
        http.post("/end_weight_update", {}, timeout_s)
    except EngineRequestError as error:
        if "no weight-update session is open" not in str(error):
            raise
        return
    http.post("/update_weight_version", {"new_version": UNFINISHED, "abort_all_requests": False}, timeout_s)


def _ask_loader(address: EngineAddress, transfer_dir: Path) -> dict[str, Any] | None:
    """Asks the loader in each rank for its model; None where no receipt of it arrives here."""
    http = HttpClient(address)
    http.post("/begin_weight_update", {}, _VERB_S)
    try:
        receipts = SGLangVerbs(address, transfer_dir, _VERB_S).order({"describe": True}, "question for its model")
    except EngineError as error:
        logger.debug("%s", error)
        return None
    finally:
        http.post("/end_weight_update", {}, _VERB_S)
    return dict(receipts[0]["model"])


def _give_back(taken: _Taken) -> None:
    """It goes on serving, with the weights that it has."""
    http = HttpClient(taken.address)
    try:
        http.post("/abort_request", {"abort_all": True}, _GIVE_BACK_S)
        _end_update(http, _GIVE_BACK_S)
        http.post("/continue_generation", {}, _GIVE_BACK_S)
    except EngineError as error:
        logger.warning("%s could not be given back: %s", taken.address.url, error)
    finally:
        if taken.lease is not None:
            taken.lease.release()
