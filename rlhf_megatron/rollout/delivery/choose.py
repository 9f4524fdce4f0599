"""The couriers of a sender, by rollout.weight_transport."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.parallel.device import backend
from rlhf_megatron.resharding.plan import ALIGNMENT
from rlhf_megatron.resharding.sender import Place
from rlhf_megatron.rollout.delivery.courier import Courier
from rlhf_megatron.rollout.delivery.disk import DiskCourier
from rlhf_megatron.rollout.delivery.local import LocalCourier
from rlhf_megatron.rollout.delivery.process_group import Groups, ProcessGroupCourier
from rlhf_megatron.rollout.delivery.tensor import TensorCourier
from rlhf_megatron.rollout.engine import EngineAddress, WeightTransport


def alignment_of(transport: WeightTransport) -> int:
    """Of tensors in a bucket, bytes: a broadcast and a safetensors file have no gaps."""
    return ALIGNMENT if transport == "tensor" else 1


def couriers_for(
    transport: WeightTransport, engines: Sequence[EngineAddress], transfer_dir: Path, place: Place, groups: Groups
) -> list[Courier]:
    """One an engine."""
    return [_courier(transport, address, transfer_dir, place, groups) for address in engines]


def _courier(
    transport: WeightTransport, address: EngineAddress, transfer_dir: Path, place: Place, groups: Groups
) -> Courier:
    if address.kind == "local":
        assert transport != "process_group", "config.engine_rules refuses it"
        return LocalCourier(address, "disk" if transport == "disk" else "shared_memory")
    if transport == "process_group":
        return ProcessGroupCourier(address, transfer_dir, str(place.coordinates), backend(place.device), groups)
    if transport == "disk":
        return DiskCourier(address, transfer_dir)
    return TensorCourier(address, transfer_dir, place.device)
