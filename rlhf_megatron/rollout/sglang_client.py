"""`Engine` on a stock SGLang server (0.5.21 or newer: it needs the weight-update session endpoints)."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import (
    UNSYNCED,
    EngineAddress,
    EngineError,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
)
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang_server.loader import LOAD_FORMAT

ADMIN_TIMEOUT_S = 600.0


class SGLangEngine:
    """See `rollout.engine.Engine`. Weights go through the server's custom-weight-loader hook."""

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.address = address
        self.transfer_dir = transfer_dir
        self._http = HttpClient(address)
        self._version: int | None = None
        self._pending: int | None = None

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[list[GeneratedSample]]:
        prompts = [list(request.prompt_ids) for request in requests for _ in request.seeds]
        sampling = [_sampling(request.params, seed) for request in requests for seed in request.seeds]
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        answers = self._http.post("/generate", body, timeout_s)
        if len(answers) != len(prompts):
            raise EngineError(f"{self.address.name}: {len(answers)} samples for {len(prompts)} asked for.")
        samples = iter([_sample(answer) for answer in answers])
        return [[next(samples) for _ in request.seeds] for request in requests]

    def abort(self) -> None:
        self._http.post("/abort_request", {"abort_all": True}, ADMIN_TIMEOUT_S)

    def pause(self) -> None:
        self._http.post("/pause_generation", {"mode": "retract"}, ADMIN_TIMEOUT_S)

    def resume(self) -> None:
        self._http.post("/continue_generation", {}, ADMIN_TIMEOUT_S)

    def begin_update(self, version: int, full_resync: bool = False) -> None:
        if self._version is not None and (version < self._version or (version == self._version and not full_resync)):
            raise EngineError(f"{self.address.name}: version {version} is not above {self._version}, which it serves.")
        self.pause()
        self._http.post("/flush_cache", {}, ADMIN_TIMEOUT_S)
        self._http.post("/begin_weight_update", {}, ADMIN_TIMEOUT_S)
        for receipt in self.transfer_dir.glob(f"receipt-{self.address.name}-*"):
            receipt.unlink()
        self._version, self._pending = None, version

    def update_weights(self, manifest: BucketManifest) -> None:
        receipt = f"receipt-{self.address.name}-{uuid.uuid4().hex}"
        order = json.dumps({"manifest": manifest.to_json(), "receipt": receipt}).encode()
        tensor = torch.frombuffer(bytearray(order), dtype=torch.uint8)
        # The server's own wire format is a pickle of (name, tensor) pairs; this one holds the order and no weights.
        payload = base64.b64encode(pickle.dumps([("order", tensor)])).decode()
        body = {
            "serialized_named_tensors": [payload] * self.address.tp_size,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
            "weight_version": str(manifest.version),
        }
        answer = self._http.post("/update_weights_from_tensor", body, ADMIN_TIMEOUT_S)
        if not answer.get("success", False):
            raise EngineError(f"{self.address.name}: {answer.get('message', answer)}; it is STALE.")
        for rank in range(self.address.tp_size):
            path = self.transfer_dir / f"{receipt}.{rank}"
            if not path.exists():
                raise EngineError(f"{self.address.name}: tp rank {rank} wrote no receipt for bucket {manifest.bucket}.")
            error = json.loads(path.read_text())["error"]
            if error:
                raise EngineError(f"{self.address.name}, tp rank {rank}: {error}; the engine is STALE.")

    def commit_update(self, version: int) -> None:
        self._http.post("/end_weight_update", {}, ADMIN_TIMEOUT_S)
        body = {"new_version": str(version), "abort_all_requests": False}
        self._http.post("/update_weight_version", body, ADMIN_TIMEOUT_S)
        self._http.post("/flush_cache", {}, ADMIN_TIMEOUT_S)
        self.resume()
        self._version, self._pending = version, None

    def weight_digests(self) -> dict[str, str] | None:
        """From the receipts of the last update; None for servers with tensor parallelism."""
        digests: dict[str, str] = {}
        for path in self.transfer_dir.glob(f"receipt-{self.address.name}-*.0"):
            receipt = json.loads(path.read_text())
            if receipt["digests"] is None:
                return None
            digests |= {name: value or "not found" for name, value in receipt["digests"].items()}
        return digests

    def release_memory(self) -> None:
        self._http.post("/release_memory_occupation", {}, ADMIN_TIMEOUT_S)

    def resume_memory(self) -> None:
        self._http.post("/resume_memory_occupation", {}, ADMIN_TIMEOUT_S)

    def health(self, timeout_s: float) -> None:
        self._http.get("/health_generate", timeout_s)

    def version(self) -> int | None:
        return self._version

    def close(self) -> None:
        self._http.close()


def _sampling(params: SamplingParams, seed: int) -> dict[str, Any]:
    """`sampling_seed` counts only on servers started with --enable-deterministic-inference."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": seed,
        "skip_special_tokens": False,
    }


def _sample(answer: dict[str, Any]) -> GeneratedSample:
    meta = answer["meta_info"]
    tokens = meta["output_token_logprobs"]
    version = str(meta.get("weight_version", ""))
    reason = meta["finish_reason"]["type"]
    return GeneratedSample(
        token_ids=tuple(int(entry[1]) for entry in tokens),
        log_probs=tuple(float(entry[0]) for entry in tokens),
        finish_reason=reason if reason in ("stop", "length") else "abort",
        policy_version=int(version) if version.isdigit() else UNSYNCED,
    )
