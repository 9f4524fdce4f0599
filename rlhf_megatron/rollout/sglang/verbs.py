"""What is asked of a stock SGLang server in a weight sync: by senders, and by the controller at its end."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.parallel.device_sharing import pickle_shared
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.process_group import UpdateGroup
from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.calls import sample_names
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.receipts import Receipt, check
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT

TIMEOUT_S = 600.0
_TENSOR = "/update_weights_from_tensor"


class SGLangVerbs:
    """Thread-safe. All raise EngineError, also where the server answers 200 and no success."""

    def __init__(self, address: EngineAddress, transfer_dir: Path, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: deadline of each call."""
        self.address = address
        self.timeout_s = timeout_s
        self.receipt_prefix = f"receipt-{address.name}-"
        self._transfer_dir = transfer_dir
        self._http = HttpClient(address)

    def load(self, manifest: BucketManifest, bucket: Tensor | None = None) -> list[Receipt]:
        """Have every rank read a bucket, from its file or from `bucket`, device memory, and load it. Raises EngineError
        too where it does not stand as it was sent."""
        order, what = manifest.to_json(), _words(manifest)
        receipts = self.order({"manifest": order}, what, bucket)
        check(self.address.name, manifest, receipts, lambda: self.order({"compare": order}, what, bucket))
        return receipts

    def digest(self, manifest: BucketManifest) -> list[Receipt]:
        """The same for a bucket that the ranks have loaded from somewhere else."""
        receipts = self.order({"digest": manifest.to_json()}, _words(manifest))
        check(self.address.name, manifest, receipts)
        return receipts

    def order(self, order: dict[str, Any], what: str, bucket: Tensor | None = None) -> list[Receipt]:
        """Have the run's loader carry out an order in every rank; returns the ranks' receipts.

        `bucket`: device memory that goes with it.
        """
        name = self.receipt_prefix + uuid.uuid4().hex
        text = json.dumps({**order, "receipt": name, "directory": self._transfer_dir.name}).encode()
        tensors = [("order", torch.frombuffer(bytearray(text), dtype=torch.uint8))]
        if bucket is not None:
            tensors.append(("bucket", bucket))
        # The server's own wire format is a pickle of (name, tensor) pairs. Each rank opens device memory by itself.
        payloads = [base64.b64encode(pickle_shared(tensors)).decode() for _ in range(self.address.tp_size)]
        body = {"serialized_named_tensors": payloads, "load_format": LOAD_FORMAT, "flush_cache": False}
        self._post(_TENSOR, body, what)
        return [self._receipt(name, rank, what) for rank in range(self.address.tp_size)]

    def abort_calls(self, names: Collection[str]) -> None:
        """End what runs of generate calls of these names. A server forgets a sample as it ends."""
        for sample in (sample for name in names for sample in sample_names(name)):
            self._http.post("/abort_request", {"rid": sample}, self.timeout_s)

    def load_by_value(self, manifest: BucketManifest, bucket: Tensor) -> None:
        """A bucket inside the request, for servers without the run's loader."""
        pairs = [(entry.name, _part(bucket, entry).cpu().clone()) for entry in manifest.tensors]
        payload = base64.b64encode(pickle.dumps(pairs)).decode()
        body = {"serialized_named_tensors": [payload] * self.address.tp_size, "flush_cache": False}
        self._post(_TENSOR, body, _words(manifest))

    def load_directory(self, directory: Path) -> None:
        """A whole model directory, which the server can read, also where it was started with load-format dummy."""
        body = {"model_path": str(directory), "load_format": "auto", "flush_cache": False}
        self._post("/update_weights_from_disk", body, f"weights of {directory.name}")

    def join(self, group: UpdateGroup) -> None:
        """Its ranks become the ranks after 0 of the group. Returns when they have, so this side must be joining."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend_name,
        }
        self._post("/init_weights_update_group", body, f"process group {group.name}")

    def leave(self, name: str, timeout_s: float) -> None:
        """It ends its part of the group."""
        self._post("/destroy_weights_update_group", {"group_name": name}, f"process group {name}", timeout_s)

    def receive(self, manifest: BucketManifest, group_name: str) -> None:
        """Take the broadcast of a bucket, which must be under way, and load it."""
        body = {
            "names": [entry.name for entry in manifest.tensors],
            "dtypes": [entry.dtype for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        self._post("/update_weights_from_distributed", body, _words(manifest))

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: dict[str, Any], what: str, timeout_s: float | None = None) -> None:
        answer = self._http.post(path, body, self.timeout_s if timeout_s is None else timeout_s)
        if not isinstance(answer, dict) or not answer.get("success", False):
            said = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise EngineError(f"{self.address.name}, {what}: {said}")

    def _receipt(self, name: str, rank: int, what: str) -> Receipt:
        path = self._transfer_dir / f"{name}.{rank}"
        if not path.exists():
            raise EngineError(f"{self.address.name}, {what}: tp rank {rank} wrote no receipt.")
        receipt: Receipt = json.loads(path.read_text())
        if receipt["error"]:
            raise EngineError(f"{self.address.name} tp rank {rank}, {what}: {receipt['error']} The engine is STALE.")
        return receipt


def _words(manifest: BucketManifest) -> str:
    return f"bucket {manifest.bucket} of {manifest.sender}"


def _part(bucket: Tensor, entry: Any) -> Tensor:
    raw = bucket[entry.offset : entry.offset + entry.num_bytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)
