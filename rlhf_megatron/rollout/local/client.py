"""The bundled server as an `Engine`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlhf_megatron.data import codec
from rlhf_megatron.parallel.links import Invitation
from rlhf_megatron.resharding.buffers import Segment
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.messages import Exchange
from rlhf_megatron.rollout.engine import (
    MEMORY_PARTS,
    UNSYNCED,
    EngineAddress,
    EngineError,
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
from rlhf_megatron.rollout.local import wire
from rlhf_megatron.rollout.questions import Question, ask

_HEALTH_S = 10.0


@codec.register
@dataclass(frozen=True)
class LocalQuestion(Question):
    name: str  # of the call

    def body(self) -> bytes:
        return wire.requests_to_json(self.requests, self.name)

    def read(self, data: bytes) -> Groups:
        return wire.samples_from_json(data)


class LocalEngine:
    """Thread-safe client of `rollout.local.server`. `admin_timeout_s`: deadline of every verb but `generate`."""

    def __init__(self, address: EngineAddress, admin_timeout_s: float = 120.0) -> None:
        self.address = address
        self._http = HttpClient(address)
        self._gate = Gate()
        self._admin_timeout_s = admin_timeout_s

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = "") -> Groups:
        return run(self.generate_async(requests, timeout_s, name), timeout_s)

    async def generate_async(self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = "") -> Groups:
        deadline = time.monotonic() + timeout_s
        try:
            async with self._gate.passing(timeout_s, name) as is_running:
                if not is_running:
                    return [[GeneratedSample((), (), "abort", UNSYNCED) for _ in one.seeds] for one in requests]
                left = max(0.0, deadline - time.monotonic())
                return await ask(LocalQuestion(self.address, tuple(requests), timeout_s, left, name))
        except TimeoutError as error:
            words = f"{self.address.name} ({self.address.url}/generate): no connection within {timeout_s:g} s."
            raise EngineTimeoutError(words) from error
        except EngineError as error:
            if wire.STALE in str(error):
                raise EngineStaleError(str(error)) from error
            raise

    def abort(self, names: Collection[str] = ()) -> None:
        self._gate.abort(names)
        self._admin("/abort", {"names": list(names)} if names else None)

    def max_running(self) -> int | None:
        found = self.info().get("max_num_seqs")
        return found if type(found) is int else None

    def pause(self, mode: PauseMode = "retract") -> None:
        self._admin("/pause", {"mode": mode})

    def resume(self) -> None:
        self._admin("/resume")

    def begin_update(self, version: int, full_resync: bool = False) -> None:
        self._admin("/begin_weight_update", {"version": version, "full_resync": full_resync})

    def update_weights(self, manifest: BucketManifest) -> None:
        self._http.post("/update_weights", manifest.to_json(), self._admin_timeout_s)

    def open_weights(self, manifest: BucketManifest, memory: Sequence[Segment]) -> None:
        """Load weights as `update_weights` does, from device memory that the engine opens."""
        body = {"manifest": msgspec.Raw(manifest.to_json().encode()), "memory": memory}
        self._http.post("/open_weights", msgspec.json.encode(body).decode(), self._admin_timeout_s)

    def join_link(self, invitation: Invitation, sender: str, num_senders: int, timeout_s: float) -> None:
        """Make the engine the last rank of a group with the ranks of a copy. Returns when all have joined."""
        body = {"invitation": invitation, "sender": sender, "num_senders": num_senders}
        self._http.post("/join_link", msgspec.json.encode(body).decode(), timeout_s)

    def take_weights(self, manifest: BucketManifest, exchange: Exchange, timeout_s: float) -> None:
        """Load weights as `update_weights` does, from what the ranks of that copy send meanwhile."""
        body = {"manifest": msgspec.Raw(manifest.to_json().encode()), "exchange": exchange}
        self._http.post("/take_weights", msgspec.json.encode(body).decode(), timeout_s)

    def leave_link(self, name: str, timeout_s: float) -> None:
        self._http.post("/leave_link", {"name": name}, timeout_s)

    def commit_update(self, version: int) -> None:
        self._admin("/commit_weight_update", {"version": version})

    def weight_digests(self) -> dict[str, str] | None:
        return self._admin("/weight_digests")

    def release_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        self._admin("/release_memory", {"parts": list(parts)})

    def resume_memory(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        self._admin("/resume_memory", {"parts": list(parts)})

    def held_bytes(self) -> int | None:
        held = self.info()["memory"]
        return int(held["weights_bytes"] + held["kv_cache_bytes"])

    def health(self, timeout_s: float = _HEALTH_S) -> None:
        self._http.get("/health", timeout_s)

    def info(self) -> dict[str, Any]:
        """The server's description of itself: kind, dtype, device, limits, capabilities, version, stale, stale_reason,
        pause_mode, released parts, memory."""
        return self._http.get("/info", self._admin_timeout_s)

    def version(self) -> int | None:
        return self.info()["version"]

    def close(self) -> None:
        pass

    def _admin(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._http.post(path, body or {}, self._admin_timeout_s)
