"""The bundled server as an `InferenceEngine`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlhf_megatron.data import codec
from rlhf_megatron.rollout.engine_interface import (
    MEMORY_PARTS,
    UNSYNCED,
    EngineAddress,
    EngineError,
    EngineStaleError,
    EngineTimeoutError,
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
from rlhf_megatron.rollout.local import local_bodies
from rlhf_megatron.weights.bucket_buffers import LentSegment
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import BucketExchange
from rlhf_megatron.weights.engine_links import LinkInvitation

_HEALTH_TIMEOUT_S = 10.0


@codec.register("LocalQuestion", {"remaining_s": "left_s"})
@dataclass(frozen=True)
class LocalGenerationQuery(GenerationQuery):
    """A generate call to a bundled server, as a value."""

    name: str  # of the call

    def encode_body(self) -> bytes:
        """Return the JSON body of the generate call."""
        return local_bodies.encode_requests(self.requests, self.name)

    def decode_answer(self, data: bytes) -> SampleGroups:
        """Return the samples of the server's JSON answer."""
        return local_bodies.decode_samples(data)


class LocalEngine:
    """Thread-safe client of `rollout.local.local_server`: an `InferenceEngine`. `admin_timeout_s`
    is the deadline of every verb but `generate`.
    """

    def __init__(self, address: EngineAddress, admin_timeout_s: float = 120.0) -> None:
        self.address = address
        self._http = HttpClient(address)
        self._generate_gate = GenerateGate()
        self._admin_timeout_s = admin_timeout_s

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        """Run `generate_async` in the event loop and wait for the samples."""
        return run_in_event_loop(self.generate_async(requests, timeout_s, name), timeout_s)

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        """Generate the samples of each request, waiting during a pause. A call that is aborted
        before it was sent returns empty samples with reason "abort". Raise EngineTimeoutError,
        EngineStaleError where the weights are not fit, or another EngineError.
        """
        deadline = time.monotonic() + timeout_s
        try:
            async with self._generate_gate.admit_call(timeout_s, name) as is_running:
                if not is_running:
                    return [
                        [GeneratedSample((), (), "abort", UNSYNCED) for _ in one.seeds]
                        for one in requests
                    ]
                left = max(0.0, deadline - time.monotonic())
                return await send_query(
                    LocalGenerationQuery(self.address, tuple(requests), timeout_s, left, name)
                )
        except TimeoutError as error:
            words = (
                f"{self.address.name} ({self.address.url}/generate): no connection within"
                f" {timeout_s:g} s."
            )
            raise EngineTimeoutError(words) from error
        except EngineError as error:
            if local_bodies.STALE_ANSWER in str(error):
                raise EngineStaleError(str(error)) from error
            raise

    def abort_calls(self, call_names: Collection[str] = ()) -> None:
        """Abort the calls with these names, or all where `call_names` is empty, in this client and
        on the server.
        """
        self._generate_gate.abort_waiting_calls(call_names)
        self._post_admin_verb("/abort", {"names": list(call_names)} if call_names else None)

    def get_max_running_samples(self) -> int | None:
        """Return the server's max_num_seqs; None where it does not report one."""
        found = self.fetch_server_info().get("max_num_seqs")
        return found if type(found) is int else None

    def pause_decoding(self, mode: PauseMode = "retract") -> None:
        """Pause decoding on the server; see `InferenceEngine.pause_decoding`."""
        self._post_admin_verb("/pause", {"mode": mode})

    def resume_decoding(self) -> None:
        """End the pause on the server."""
        self._post_admin_verb("/resume")

    def begin_weight_update(self, version: int, is_full_resync: bool = False) -> None:
        """Open a weight sync on the server; see `InferenceEngine.begin_weight_update`."""
        self._post_admin_verb(
            "/begin_weight_update", {"version": version, "full_resync": is_full_resync}
        )

    def update_weights(self, manifest: BucketManifest) -> None:
        """Make the server load a bucket from its file in the transfer directory."""
        self._http.post("/update_weights", manifest.encode_json(), self._admin_timeout_s)

    def load_lent_weights(self, manifest: BucketManifest, segments: Sequence[LentSegment]) -> None:
        """Make the server load a bucket from device memory that this machine lends; it opens the
        segments.
        """
        body = {"manifest": msgspec.Raw(manifest.encode_json().encode()), "memory": segments}
        self._http.post("/open_weights", msgspec.json.encode(body).decode(), self._admin_timeout_s)

    def join_link(
        self, invitation: LinkInvitation, sender: str, num_senders: int, timeout_s: float
    ) -> None:
        """Make the server join a process group, as its last rank, with the ranks of one copy of the
        trainer's model. Return when all have joined.
        """
        body = {"invitation": invitation, "sender": sender, "num_senders": num_senders}
        self._http.post("/join_link", msgspec.json.encode(body).decode(), timeout_s)

    def receive_weights(
        self, manifest: BucketManifest, exchange: BucketExchange, timeout_s: float
    ) -> None:
        """Make the server load a bucket from the messages that the ranks of the copy send over
        their link meanwhile.
        """
        body = {"manifest": msgspec.Raw(manifest.encode_json().encode()), "exchange": exchange}
        self._http.post("/take_weights", msgspec.json.encode(body).decode(), timeout_s)

    def leave_link(self, link_name: str, timeout_s: float) -> None:
        """Make the server leave the link of this name."""
        self._http.post("/leave_link", {"name": link_name}, timeout_s)

    def commit_weight_update(self, version: int) -> None:
        """Close the weight sync on the server, which serves `version` from then on."""
        self._post_admin_verb("/commit_weight_update", {"version": version})

    def get_weight_digests(self) -> dict[str, str] | None:
        """Return the digest of each tensor that the server holds, by Hugging Face tensor name."""
        return self._post_admin_verb("/weight_digests")

    def release_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Free the weights, the key-value cache or both on the server."""
        self._post_admin_verb("/release_memory", {"parts": list(memory_parts)})

    def resume_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Take these parts of the memory back on the server."""
        self._post_admin_verb("/resume_memory", {"parts": list(memory_parts)})

    def get_held_bytes(self) -> int | None:
        """Return the bytes of weights and key-value cache that the server holds."""
        held = self.fetch_server_info()["memory"]
        return int(held["weights_bytes"] + held["kv_cache_bytes"])

    def check_health(self, timeout_s: float = _HEALTH_TIMEOUT_S) -> None:
        """Raise EngineError unless the server answers within `timeout_s`, and its decoding loop
        gets on: the loop is dead, or while something waits no step of it has ended for longer than
        `compute_stall_limit_s`.
        """
        progress = self._http.get("/health", timeout_s)
        name = self.address.name
        if not progress["is_running"]:
            raise EngineError(f"{name}: its decoding loop has ended.")
        limit_s = compute_stall_limit_s(timeout_s, progress["longest_step_s"])
        if progress["seconds_without_step"] > limit_s:
            raise EngineError(
                f"{name}: requests wait, and no step has ended for"
                f" {progress['seconds_without_step']:.0f} s; the longest one took"
                f" {progress['longest_step_s']:.1f} s."
            )

    def fetch_server_info(self) -> dict[str, Any]:
        """Return the server's description of itself: kind, dtype, device, limits, capabilities,
        version, stale, stale_reason, pause_mode, released parts, memory.
        """
        return self._http.get("/info", self._admin_timeout_s)

    def get_served_version(self) -> int | None:
        """Return the version that the server serves; None where it was never synced or is STALE."""
        return self.fetch_server_info()["version"]

    def close(self) -> None:
        """Do nothing: the process's HTTP session keeps the connections."""

    def _post_admin_verb(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Post a verb with this JSON body, within `admin_timeout_s`, and return the parsed
        answer.
        """
        return self._http.post(path, body or {}, self._admin_timeout_s)
