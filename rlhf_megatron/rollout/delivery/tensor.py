"""Buckets in memory of the same host: mapped files, which the engine reads, or device memory, which it opens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.parallel.device_sharing import can_share, device_id
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Medium
from rlhf_megatron.rollout.delivery.courier import Traffic, traffic_of, unseen_traffic
from rlhf_megatron.rollout.engine import EngineAddress
from rlhf_megatron.rollout.sglang.verbs import SGLangVerbs


class TensorCourier:
    """To stock SGLang."""

    def __init__(self, address: EngineAddress, transfer_dir: Path, device: torch.device) -> None:
        """`device`: of the sender."""
        self.name = address.name
        self.medium: Medium = "shared_memory" if address.has_loader else "device_memory"
        self._address = address
        self._device = device
        self._verbs = SGLangVerbs(address, transfer_dir)

    def open(self) -> None:
        """A rank that does not see the sender's device would end its server when it is told to open memory there: so
        each is asked first, and gets mapped files then."""
        if self._address.has_loader and can_share(self._device):
            receipts = self._verbs.order({"describe": True}, "question for its devices")
            mine = device_id(self._device)
            if all(mine in receipt["devices"] for receipt in receipts):
                self.medium = "device_memory"

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        if not self._address.has_loader:
            self._verbs.load_by_value(manifest, bucket)
            return unseen_traffic(manifest, self._address.tp_size)
        shared = bucket if bucket.device.type != "cpu" else None
        return traffic_of(self._verbs.load(manifest, shared))

    def close(self) -> None:
        self._verbs.close()
