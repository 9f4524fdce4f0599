"""An `InferenceEngine` on a stock SGLang server (0.5.21 or newer, which has the weight-update
session endpoints).

The server itself would serve half-updated weights. So this client keeps the state: from
`begin_weight_update` until a commit that the server's loader confirmed as complete, the engine is
STALE, stays paused, and `generate` is refused.
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
from rlhf_megatron.rollout.engine_interface import (
    MEMORY_PARTS,
    UNSYNCED,
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    EngineUnreachableError,
    GeneratedSample,
    GenerateRequest,
    MemoryPart,
    PauseMode,
    SampleGroups,
    compute_stall_limit_s,
)
from rlhf_megatron.rollout.generate_gate import GenerateGate
from rlhf_megatron.rollout.generation_queries import GenerationQuery, send_query
from rlhf_megatron.rollout.http_client import HttpClient, run_in_event_loop
from rlhf_megatron.rollout.sglang.sglang_samples import (
    ServerLimits,
    fetch_limits,
    fetch_limits_blocking,
    fetch_max_running_samples,
    get_version_prefix,
    make_generate_body,
    make_version_name,
    parse_sample_groups,
)
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import (
    SGLangWeightVerbs,
    combine_all_receipts,
    read_all_receipts,
)
from rlhf_megatron.weights.bucket_manifest import BucketManifest

logger = logging.getLogger(__name__)

ADMIN_TIMEOUT_S = 600.0
ABORT_TIMEOUT_S = 120.0
_ABORT_INTERVAL_S = 0.5
_HEALTH_RETRY_S = 0.5
_MEMORY_TAGS: dict[MemoryPart, tuple[str, ...]] = {
    "weights": ("weights",),
    "kv_cache": ("kv_cache", "cuda_graph"),
}
REQUIRED_PATHS = (
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


@codec.register("SGLangQuestion", {"remaining_s": "left_s", "version_prefix": "prefix"})
@dataclass(frozen=True)
class SGLangGenerationQuery(GenerationQuery):
    """A generate call to an SGLang server, as a value."""

    version: int | None  # of the weights
    name: str  # of the call
    version_prefix: str  # of the names of versions, see `get_version_prefix`

    def encode_body(self) -> bytes:
        """Return the JSON body of the generate call."""
        return msgspec.json.encode(make_generate_body(self.requests, self.version, self.name))

    def decode_answer(self, data: bytes) -> SampleGroups:
        """Return the samples of the server's JSON answer, and write their expert routes to
        files.
        """
        return parse_sample_groups(data, self.requests, self.version_prefix)


class SGLangEngine:
    """An `InferenceEngine`. Weights go through the server's custom-weight-loader hook.

    Only one client of a server, the controller's, may generate, pause and open syncs; others
    deliver buckets.
    """

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.address = address
        self.transfer_dir = transfer_dir
        self._weight_verbs = SGLangWeightVerbs(address, transfer_dir)
        self._admin_http = HttpClient(address)  # verbs that take the admin key
        self._serving_http = HttpClient(address, address.api_key or address.token)  # the others
        self._served_version: int | None = None  # that is served
        self._last_version: int | None = None  # of the last commit
        self._open_sync_version: int | None = None  # of the open sync
        # the server's, of a sync that was begun here and not committed
        self._has_open_session = False
        self._stale_reason: str | None = None
        self._released_parts: set[MemoryPart] = set()
        self._committed_digests: dict[str, str] | None = {}  # of the last commit
        self._generate_gate = GenerateGate()
        self._limits_lock = asyncio.Lock()
        self._pause_mode: PauseMode | None = None  # by `pause_decoding`, until `resume_decoding`
        # what the server was told last, whatever the reason
        self._halt_mode: PauseMode | None = None
        self._limits: ServerLimits | None = None  # asked for once
        # of the checks that went well: as long as a step that they waited for
        self._longest_health_check_s = 0.0

    def require_endpoints(self) -> None:
        """Raise EngineError, with the fix, where the server lacks an endpoint that the run
        needs.
        """
        try:
            paths = self._serving_http.get("/openapi.json", ADMIN_TIMEOUT_S)["paths"]
        except EngineRequestError as error:
            raise EngineError(
                f"{error}; start it without DISABLE_OPENAPI_DOC: it must tell what it can do."
            ) from error
        missing = [path for path in REQUIRED_PATHS if path not in paths]
        if missing:
            raise EngineError(
                f"{self.address.name} ({self.address.url}) has no {', '.join(missing)}; use sglang"
                " 0.5.21 or newer."
            )

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        """Run `generate_async` in the event loop and wait for the samples."""
        return run_in_event_loop(self.generate_async(requests, timeout_s, name), timeout_s)

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        """Generate the samples of each request, waiting during a pause. A call that is aborted
        before it was sent returns empty samples with reason "abort". Raise EngineStaleError where
        the weights are not fit, EngineRequestError for a request above the server's limits,
        EngineTimeoutError, or another EngineError.
        """
        self._require_servable()
        if not any(request.seeds for request in requests):
            return [[] for _ in requests]
        deadline = time.monotonic() + timeout_s
        try:
            async with self._generate_gate.admit_call(timeout_s, name) as is_running:
                if not is_running:
                    aborted = GeneratedSample(
                        (),
                        (),
                        "abort",
                        UNSYNCED if self._served_version is None else self._served_version,
                    )
                    return [[aborted for _ in request.seeds] for request in requests]
                limits = await self._learn_limits(max(0.0, deadline - time.monotonic()))
                limits.check_requests(requests, self.address.name)
                query = SGLangGenerationQuery(
                    self.address,
                    tuple(requests),
                    timeout_s,
                    remaining_s=max(0.0, deadline - time.monotonic()),
                    version=self._served_version,
                    name=name,
                    version_prefix=get_version_prefix(),
                )
                return await send_query(query)
        except TimeoutError as error:
            words = "does not tell its limits" if self._generate_gate.is_open else "is paused"
            raise EngineTimeoutError(
                f"{self.address.name} {words}: no answer within {timeout_s:g} s."
            ) from error

    def abort_calls(self, call_names: Collection[str] = ()) -> None:
        """Abort the calls with these names, or all where `call_names` is empty, in this client and
        on the server.
        """
        self._generate_gate.abort_waiting_calls(call_names)
        if call_names:
            self._weight_verbs.abort_calls(call_names)
        else:
            self._abort_all_requests()

    def get_max_running_samples(self) -> int | None:
        """Ask the server how many samples it decodes at once; None where it does not say."""
        return fetch_max_running_samples(self._serving_http, ADMIN_TIMEOUT_S)

    def pause_decoding(self, mode: PauseMode = "retract") -> None:
        """Halt decoding until `resume_decoding`, also through a weight sync; new calls wait in this
        client. See `InferenceEngine.pause_decoding`.
        """
        self._pause_mode = mode
        self._halt_decoding(mode)

    def resume_decoding(self) -> None:
        """End the pause. A STALE engine stays halted: the requests that wait in it must not go on
        with half of the new weights.
        """
        self._pause_mode = None
        self._continue_if_servable()

    def begin_weight_update(self, version: int, is_full_resync: bool = False) -> None:
        """Open a weight sync on the server, which is STALE and halted from then on. Raise
        EngineError for a version that is not above the last one, while the weights are released, or
        where another run's update is open.
        """
        last = self._last_version
        if last is not None and (version < last or (version == last and not is_full_resync)):
            raise EngineError(
                f"{self.address.name}: version {version} is not above {last}, the last"
                " one it served."
            )
        if "weights" in self._released_parts:
            raise EngineError(
                f"{self.address.name}: its weights are released; resume_memory must come before a"
                " weight sync."
            )
        self._served_version = None
        self._open_sync_version = version
        self._stale_reason = f"a weight sync to version {version} is under way"
        if self._pause_mode != "in_place":
            self._halt_decoding("retract")
        self._flush_prefix_cache()
        try:
            self._admin_http.post("/begin_weight_update", {}, ADMIN_TIMEOUT_S)
        except EngineRequestError as error:  # the session of a failed sync is open
            if self.address.is_attached and not self._has_open_session:
                words = (
                    f"{error} Another run syncs weights with it; give each run servers of its own."
                )
                raise EngineError(words) from error
            self._admin_http.post("/end_weight_update", {}, ADMIN_TIMEOUT_S)
            self._admin_http.post("/begin_weight_update", {}, ADMIN_TIMEOUT_S)
        self._has_open_session = True
        self._remove_receipts()

    def update_weights(self, manifest: BucketManifest) -> None:
        """Make every rank load a bucket from its file. The sync has failed where this raises
        EngineError.
        """
        with self._fail_sync_on_error():
            self._weight_verbs.load_bucket(manifest)

    def commit_weight_update(self, version: int) -> None:
        """Close the weight sync: check that everything came, set the version, flush the prefix
        cache and serve. Do nothing where that version is served already. Raise EngineError where no
        sync to `version` is open or a tensor never came whole.
        """
        if version == self._served_version:
            return  # the answer to the first call was lost
        if version != self._open_sync_version:
            reason = "" if self._stale_reason is None else f" ({self._stale_reason})"
            raise EngineError(f"{self.address.name}: no sync to version {version} is open{reason}.")
        if self.address.has_loader:
            with self._fail_sync_on_error():
                self._weight_verbs.send_order(
                    {"receipts": self._weight_verbs.receipt_prefix}, f"commit of version {version}"
                )
        self._committed_digests = self._read_digests()
        self._admin_http.post("/end_weight_update", {}, ADMIN_TIMEOUT_S)
        self._has_open_session = False
        body = {"new_version": make_version_name(version), "abort_all_requests": False}
        self._admin_http.post("/update_weight_version", body, ADMIN_TIMEOUT_S)
        self._flush_prefix_cache()
        self._remove_receipts()
        self._stale_reason = None
        self._served_version = version
        self._last_version = version
        self._open_sync_version = None
        self._continue_if_servable()

    def get_weight_digests(self) -> dict[str, str] | None:
        """Return the digests by tensor name from the receipts of the open sync, else of the last
        one; None without the run's loader, and where the engine quantises weights. A tensor that
        does not stand whole has a message in place of its digest.
        """
        return self._committed_digests if self._open_sync_version is None else self._read_digests()

    def release_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Halt decoding and free these parts of the server's memory. Without its weights the engine
        is STALE.
        """
        # the server ends itself when it is asked to while it decodes
        self._halt_decoding("retract")
        if "weights" in memory_parts:
            self._served_version = None
            self._open_sync_version = None
            self._stale_reason = "its memory is released"
        tags = [
            tag
            for part in memory_parts
            if part not in self._released_parts
            for tag in _MEMORY_TAGS[part]
        ]
        if tags:
            self._admin_http.post("/release_memory_occupation", {"tags": tags}, ADMIN_TIMEOUT_S)
        self._released_parts.update(memory_parts)

    def resume_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Take the released parts back, and continue decoding where nothing else prevents it.
        Weights that were released stay STALE until the next sync.
        """
        # the server ends itself when asked for others
        gone = [part for part in memory_parts if part in self._released_parts]
        if gone:
            tags = [tag for part in gone for tag in _MEMORY_TAGS[part]]
            self._admin_http.post("/resume_memory_occupation", {"tags": tags}, ADMIN_TIMEOUT_S)
        self._released_parts.difference_update(gone)
        if "weights" in gone:
            self._stale_reason = "its memory was released and the weights have not been sent again"
        self._continue_if_servable()

    def get_held_bytes(self) -> int | None:
        """Return None: SGLang does not say."""
        return None

    def check_health(self, timeout_s: float) -> None:
        """Raise EngineError unless the server's HTTP process answers within `timeout_s`, and its
        scheduler within `compute_stall_limit_s`. It generates a token; while it is halted, or where
        seeds count, its scheduler is asked for its state instead, because SGLang's own health
        request is greedy and would change what the seeds of other requests in the batch draw.
        """
        began_at = time.monotonic()
        limit_s = compute_stall_limit_s(timeout_s, self._longest_health_check_s)
        if self._halt_mode is None and self._limits is None:
            self._limits = fetch_limits_blocking(self._serving_http, limit_s)
        generates = (
            self._halt_mode is None
            and self._limits is not None
            and not self._limits.is_deterministic
        )
        path = "/health_generate" if generates else "/server_info"
        while True:
            # which the HTTP process answers by itself, whatever the scheduler does
            self._serving_http.get("/model_info", timeout_s)
            left_s = began_at + limit_s - time.monotonic()
            try:
                self._serving_http.get(path, max(left_s, _HEALTH_RETRY_S))
                break
            except (EngineRequestError, EngineUnreachableError):
                raise
            except EngineError:  # SGLang itself gives up on a scheduler after 20 s
                if left_s <= 0:
                    raise
                time.sleep(_HEALTH_RETRY_S)
        self._longest_health_check_s = max(
            self._longest_health_check_s, time.monotonic() - began_at
        )

    def get_served_version(self) -> int | None:
        """Return the version of this client's last commit that still holds; None where it never
        synced or is STALE. The server is not asked.
        """
        return self._served_version

    def close(self) -> None:
        """Do nothing: the process's HTTP session keeps the connections."""

    async def _learn_limits(self, timeout_s: float) -> ServerLimits:
        """Return the server's limits; ask for them at the first call, while other calls wait. The
        server answers only while it decodes.
        """
        if self._limits is None:
            async with asyncio.timeout(timeout_s), self._limits_lock:
                if self._limits is None:
                    self._limits = await fetch_limits(self._serving_http, timeout_s)
        return self._limits

    def _require_servable(self) -> None:
        """Raise EngineStaleError where the weights are not fit, EngineError where memory is
        released.
        """
        if self._stale_reason is not None:
            raise EngineStaleError(
                f"{self.address.name} is STALE: {self._stale_reason}; a full weight sync mends it."
            )
        if self._released_parts:
            raise EngineError(
                f"{self.address.name} has no key-value cache: it was released;"
                " resume_memory brings it."
            )

    def _halt_decoding(self, mode: PauseMode) -> None:
        """Halt decoding on the server in this mode, whatever `pause_decoding` set, and make new
        calls wait at the gate.
        """
        self._generate_gate.close_gate()
        if mode == "abort":
            self._abort_all_requests()
            if self._halt_mode is None:
                self._await_running_requests()  # the server would look once a second, and for ever
        self._admin_http.post("/pause_generation", {"mode": mode}, ADMIN_TIMEOUT_S)
        if mode == "abort":  # of which the server sends one more
            self._await_abort_processing()
        self._halt_mode = mode

    def _abort_all_requests(self) -> None:
        """Abort all requests on the server; requests that are paused in place are retracted first,
        or they would end only when the server decodes again.
        """
        if self._halt_mode == "in_place":  # or it would end only when the server decodes again
            self._admin_http.post("/pause_generation", {"mode": "retract"}, ADMIN_TIMEOUT_S)
            self._halt_mode = "retract"
        self._admin_http.post("/abort_request", {"abort_all": True}, ADMIN_TIMEOUT_S)
        self._await_abort_processing()

    def _await_abort_processing(self) -> None:
        """Wait until all ranks have handled an abort, by a question that all of them answer: under
        DP attention an abort takes another way than requests, and would end requests that come
        after it.
        """
        self._admin_http.get("/server_info", ADMIN_TIMEOUT_S)

    def _await_running_requests(self) -> None:
        """Wait until no call runs, repeating the abort. Raise EngineTimeoutError after
        ABORT_TIMEOUT_S.
        """
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        while not self._generate_gate.wait_until_empty(_ABORT_INTERVAL_S):
            if time.monotonic() > deadline:
                raise EngineTimeoutError(
                    f"{self.address.name}: requests run {ABORT_TIMEOUT_S:g} s after an abort."
                )
            self._abort_all_requests()  # one that had passed the gate may have come after the abort

    def _flush_prefix_cache(self) -> None:
        """Empty the prefix cache. The server refuses while requests are paused in place, which keep
        their part of it; that part is stored under the former version, so no other request finds it
        (`make_generate_body`).
        """
        try:
            self._admin_http.post("/flush_cache", {}, ADMIN_TIMEOUT_S)
        except EngineRequestError:
            if self._halt_mode != "in_place":
                raise

    def _continue_if_servable(self) -> None:
        """Continue decoding and open the gate, unless a pause, STALE weights or released memory
        prevent it.
        """
        if self._pause_mode is None and self._stale_reason is None and not self._released_parts:
            self._admin_http.post("/continue_generation", {}, ADMIN_TIMEOUT_S)
            self._halt_mode = None
            self._generate_gate.open_gate()

    @contextmanager
    def _fail_sync_on_error(self) -> Iterator[None]:
        """Mark the open sync as failed, and the engine as STALE, where the block raises
        EngineError.
        """
        try:
            yield
        except EngineError as error:
            if self._open_sync_version is not None:
                self._stale_reason = f"the weight sync failed ({str(error).rstrip('.')})"
                self._served_version = None
                self._open_sync_version = None
            raise

    def _read_digests(self) -> dict[str, str] | None:
        """Return the digests of the current receipts by tensor name; None without the run's loader,
        or, with a warning, where a tensor cannot be compared.
        """
        if not self.address.has_loader:
            return None
        found = combine_all_receipts(
            read_all_receipts(self.transfer_dir, self._weight_verbs.receipt_prefix)
        )
        if found.incomparable_by_key:
            name, why = next(iter(found.incomparable_by_key.items()))
            logger.warning(
                (
                    "%s: what stands in it cannot be compared with what was sent, so it is"
                    " probed: %s: %s"
                ),
                *(self.address.name, name, why),
            )
            return None
        return found.merge_by_tensor_name()

    def _remove_receipts(self) -> None:
        """Remove the receipt files of this engine from the transfer directory."""
        for path in self.transfer_dir.glob(f"{self._weight_verbs.receipt_prefix}*"):
            path.unlink(missing_ok=True)
