"""Buckets to the bundled server, which reads each from its file: of every medium that has files."""

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Medium
from rlhf_megatron.rollout.delivery.courier import Traffic, tensor_bytes
from rlhf_megatron.rollout.engine import EngineAddress
from rlhf_megatron.rollout.local.client import LocalEngine


class LocalCourier:
    def __init__(self, address: EngineAddress, medium: Medium) -> None:
        self.name = address.name
        self.medium = medium
        self._engine = LocalEngine(address)

    def open(self) -> None:
        pass

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        self._engine.update_weights(manifest)
        return Traffic(tensor_bytes(manifest), tensor_bytes(manifest))

    def close(self) -> None:
        self._engine.close()
