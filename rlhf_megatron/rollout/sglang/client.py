"""`Engine` on a stock SGLang server (0.5.21 or newer: it needs the weight-update session endpoints).

The server itself would serve half-updated weights. So this client keeps the state: from `begin_update` until a commit
that the server's loader confirmed as complete, the engine is STALE, stays paused, and `generate` is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlhf_megatron.data import codec
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import (
    MEMORY_PARTS,
    UNSYNCED,
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    GeneratedSample,
    GenerateRequest,
    Groups,
    MemoryPart,
    PauseMode,
)
from rlhf_megatron.rollout.gate import Gate
from rlhf_megatron.rollout.http import HttpClient, run
from rlhf_megatron.rollout.questions import Question, ask
from rlhf_megatron.rollout.sglang.samples import (
    Limits,
    ask_limits,
    generate_body,
    groups_of,
    limits_of,
    max_running_of,
    own_prefix,
    version_name,
)
from rlhf_megatron.rollout.sglang.weights import SGLangVerbs, read_all, standing_of

logger = logging.getLogger(__name__)

ADMIN_TIMEOUT_S = 600.0
ABORT_TIMEOUT_S = 120.0
_ABORT_AGAIN_S = 0.5
_TAGS: dict[MemoryPart, tuple[str, ...]] = {"weights": ("weights",), "kv_cache": ("kv_cache", "cuda_graph")}
NEEDED = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/update_weight_version",
    "/release_memory_occupation",
)


@codec.register
@dataclass(frozen=True)
class SGLangQuestion(Question):
    version: int | None  # of the weights
    name: str  # of the call
    prefix: str  # of the names of versions, see `own_prefix`

    def body(self) -> bytes:
        return msgspec.json.encode(generate_body(self.requests, self.version, self.name))

    def read(self, data: bytes) -> Groups:
        return groups_of(data, self.requests, self.prefix)


class SGLangEngine:
    """An `Engine`. Weights go through the server's custom-weight-loader hook.

    Only one client of a server, the controller's, may generate, pause and open syncs; others deliver buckets.
    """

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.address = address
        self.transfer_dir = transfer_dir
        self._verbs = SGLangVerbs(address, transfer_dir)
        self._http = HttpClient(address)  # verbs that take the admin key
        self._serving = HttpClient(address, address.api_key or address.token)  # the others
        self._version: int | None = None  # that is served
        self._last_version: int | None = None  # of the last commit
        self._pending: int | None = None  # of the open sync
        self._has_session = False  # the server's, of a sync that was begun here and not committed
        self._stale_reason: str | None = None
        self._released: set[MemoryPart] = set()
        self._digests: dict[str, str] | None = {}  # of the last commit
        self._gate = Gate()
        self._asks = asyncio.Lock()
        self._paused: PauseMode | None = None  # by `pause`, until `resume`
        self._halted: PauseMode | None = None  # what the server was told last, whatever the reason
        self._limits: Limits | None = None  # asked for once

    def probe(self) -> None:
        """Raises EngineError naming what this server cannot do and what would."""
        try:
            paths = self._serving.get("/openapi.json", ADMIN_TIMEOUT_S)["paths"]
        except EngineRequestError as error:
            raise EngineError(f"{error}; start it without DISABLE_OPENAPI_DOC: it must tell what it can do.") from error
        missing = [path for path in NEEDED if path not in paths]
        if missing:
            raise EngineError(
                f"{self.address.name} ({self.address.url}) has no {', '.join(missing)}; use sglang 0.5.21 or newer."
            )

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = "") -> Groups:
        return run(self.generate_async(requests, timeout_s, name), timeout_s)

    async def generate_async(self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = "") -> Groups:
        self._require_fit()
        if not any(request.seeds for request in requests):
            return [[] for _ in requests]
        deadline = time.monotonic() + timeout_s
        try:
            async with self._gate.passing(timeout_s, name) as is_running:
                if not is_running:
                    aborted = GeneratedSample((), (), "abort", UNSYNCED if self._version is None else self._version)
                    return [[aborted for _ in request.seeds] for request in requests]
                limits = await self._learn_limits(max(0.0, deadline - time.monotonic()))
                limits.check(requests, self.address.name)
                left = max(0.0, deadline - time.monotonic())
                how = (self._version, name, own_prefix())
                return await ask(SGLangQuestion(self.address, tuple(requests), timeout_s, left, *how))
        except TimeoutError as error:
            words = "does not tell its limits" if self._gate.is_open else "is paused"
            raise EngineTimeoutError(f"{self.address.name} {words}: no answer within {timeout_s:g} s.") from error

    def abort(self, names: Collection[str] = ()) -> None:
        self._gate.abort(names)
        if names:
            self._verbs.abort_calls(names)
        else:
            self._abort_all()

    def max_running(self) -> int | None:
        return max_running_of(self._serving, ADMIN_TIMEOUT_S)

    def pause(self, mode: PauseMode = "retract") -> None:
        self._paused = mode
        self._halt(mode)

    def resume(self) -> None:
        """A STALE engine stays halted: what waits in it must not go on with half of the new weights."""
        self._paused = None
        self._settle()

    def begin_update(self, version: int, full_resync: bool = False) -> None:
        last = self._last_version
        if last is not None and (version < last or (version == last and not full_resync)):
            raise EngineError(f"{self.address.name}: version {version} is not above {last}, the last one it served.")
        if "weights" in self._released:
            raise EngineError(
                f"{self.address.name}: its weights are released; resume_memory must come before a weight sync."
            )
        self._version, self._pending = None, version
        self._stale_reason = f"a weight sync to version {version} is under way"
        if self._paused != "in_place":
            self._halt("retract")
        self._flush()
        try:
            self._http.post("/begin_weight_update", {}, ADMIN_TIMEOUT_S)
        except EngineRequestError as error:  # the session of a failed sync is open
            if self.address.is_attached and not self._has_session:
                words = f"{error} Another run syncs weights with it; give each run servers of its own."
                raise EngineError(words) from error
            self._http.post("/end_weight_update", {}, ADMIN_TIMEOUT_S)
            self._http.post("/begin_weight_update", {}, ADMIN_TIMEOUT_S)
        self._has_session = True
        self._remove_receipts()

    def update_weights(self, manifest: BucketManifest) -> None:
        with self._loading():
            self._verbs.load(manifest)

    def commit_update(self, version: int) -> None:
        if version == self._version:
            return  # the answer to the first call was lost
        if version != self._pending:
            reason = "" if self._stale_reason is None else f" ({self._stale_reason})"
            raise EngineError(f"{self.address.name}: no sync to version {version} is open{reason}.")
        if self.address.has_loader:
            with self._loading():
                self._verbs.order({"receipts": self._verbs.receipt_prefix}, f"commit of version {version}")
        self._digests = self._read_digests()
        self._http.post("/end_weight_update", {}, ADMIN_TIMEOUT_S)
        self._has_session = False
        body = {"new_version": version_name(version), "abort_all_requests": False}
        self._http.post("/update_weight_version", body, ADMIN_TIMEOUT_S)
        self._flush()
        self._remove_receipts()
        self._stale_reason = None
        self._version, self._last_version, self._pending = version, version, None
        self._settle()

    def weight_digests(self) -> dict[str, str] | None:
        """Digests by the receipts of the running sync, else of the last one; None without the run's loader, and where
        the engine quantises weights. A tensor that does not stand whole has words in place of its digest."""
        return self._digests if self._pending is None else self._read_digests()

    def release_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        self._halt("retract")  # the server ends itself when it is asked to while it decodes
        if "weights" in parts:
            self._version, self._pending = None, None
            self._stale_reason = "its memory is released"
        tags = [tag for part in parts if part not in self._released for tag in _TAGS[part]]
        if tags:
            self._http.post("/release_memory_occupation", {"tags": tags}, ADMIN_TIMEOUT_S)
        self._released.update(parts)

    def resume_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        gone = [part for part in parts if part in self._released]  # the server ends itself when asked for others
        if gone:
            tags = [tag for part in gone for tag in _TAGS[part]]
            self._http.post("/resume_memory_occupation", {"tags": tags}, ADMIN_TIMEOUT_S)
        self._released.difference_update(gone)
        if "weights" in gone:
            self._stale_reason = "its memory was released and the weights have not been sent again"
        self._settle()

    def held_bytes(self) -> int | None:
        return None

    def health(self, timeout_s: float) -> None:
        """While halted the scheduler is asked for its state, since it generates nothing then. The same where seeds
        count: SGLang's own question is greedy, and in the batch of others it would change what their seeds draw."""
        if self._halted is None and self._limits is None:
            self._limits = limits_of(self._serving, timeout_s)
        generates = self._halted is None and self._limits is not None and not self._limits.is_deterministic
        self._serving.get("/health_generate" if generates else "/server_info", timeout_s)

    def version(self) -> int | None:
        return self._version

    def close(self) -> None:
        pass

    async def _learn_limits(self, timeout_s: float) -> Limits:
        """The server answers the question only while it decodes. One call asks, others wait for it."""
        if self._limits is None:
            async with asyncio.timeout(timeout_s), self._asks:
                if self._limits is None:
                    self._limits = await ask_limits(self._serving, timeout_s)
        return self._limits

    def _require_fit(self) -> None:
        if self._stale_reason is not None:
            raise EngineStaleError(f"{self.address.name} is STALE: {self._stale_reason}; a full weight sync mends it.")
        if self._released:
            raise EngineError(f"{self.address.name} has no key-value cache: it was released; resume_memory brings it.")

    def _halt(self, mode: PauseMode) -> None:
        """Stop decoding, whatever `pause` said. What comes from now on waits at the gate."""
        self._gate.close()
        if mode == "abort":
            self._abort_all()
            if self._halted is None:
                self._await_ends()  # the server would look once a second, and for ever
        self._http.post("/pause_generation", {"mode": mode}, ADMIN_TIMEOUT_S)
        if mode == "abort":  # of which the server sends one more
            self._await_abort()
        self._halted = mode

    def _abort_all(self) -> None:
        if self._halted == "in_place":  # or it would end only when the server decodes again
            self._http.post("/pause_generation", {"mode": "retract"}, ADMIN_TIMEOUT_S)
            self._halted = "retract"
        self._http.post("/abort_request", {"abort_all": True}, ADMIN_TIMEOUT_S)
        self._await_abort()

    def _await_abort(self) -> None:
        """Ask what all ranks answer: under DP attention an abort takes another way than requests do, and would end some
        that come after it."""
        self._http.get("/server_info", ADMIN_TIMEOUT_S)

    def _await_ends(self) -> None:
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        while not self._gate.wait_until_empty(_ABORT_AGAIN_S):
            if time.monotonic() > deadline:
                raise EngineTimeoutError(f"{self.address.name}: requests run {ABORT_TIMEOUT_S:g} s after an abort.")
            self._abort_all()  # one that had passed the gate may have come after the abort

    def _flush(self) -> None:
        """Empty the prefix cache. The server refuses while something is paused in place, which keeps its part of it;
        that part has the name of the version before, so nobody else gets it (`generate_body`)."""
        try:
            self._http.post("/flush_cache", {}, ADMIN_TIMEOUT_S)
        except EngineRequestError:
            if self._halted != "in_place":
                raise

    def _settle(self) -> None:
        if self._paused is None and self._stale_reason is None and not self._released:
            self._http.post("/continue_generation", {}, ADMIN_TIMEOUT_S)
            self._halted = None
            self._gate.open()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """The sync has failed where this fails; out of a session nothing was loaded."""
        try:
            yield
        except EngineError as error:
            if self._pending is not None:
                self._stale_reason = f"the weight sync failed ({str(error).rstrip('.')})"
                self._version, self._pending = None, None
            raise

    def _read_digests(self) -> dict[str, str] | None:
        if not self.address.has_loader:
            return None
        found = standing_of(read_all(self.transfer_dir, self._verbs.receipt_prefix))
        if found.unlike:
            name, why = next(iter(found.unlike.items()))
            logger.warning(
                "%s: what stands in it cannot be compared with what was sent, so it is probed: %s: %s",
                *(self.address.name, name, why),
            )
            return None
        return found.by_name()

    def _remove_receipts(self) -> None:
        for path in self.transfer_dir.glob(f"{self._verbs.receipt_prefix}*"):
            path.unlink(missing_ok=True)
