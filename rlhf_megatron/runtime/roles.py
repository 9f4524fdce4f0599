"""What stands on a rank of the pool: the roles that the controller can call, built from the configuration.

This is the one place that puts workers, resharding and engine clients together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.parallel.world import World
from rlhf_megatron.resharding.sender import SendReport, send_weights
from rlhf_megatron.rollout.clients import connect
from rlhf_megatron.rollout.engine import EngineAddress
from rlhf_megatron.workers.actor import MegatronActor
from rlhf_megatron.workers.reference import MegatronReference


class HostRole:
    """Methods that are about the rank and not about one model: weight sync, export, reference refresh."""

    def __init__(self, world: World, actor: MegatronActor, reference: MegatronReference | None) -> None:
        self.world = world
        self.actor = actor
        self.reference = reference

    def send_weights(
        self, version: int, engines: list[EngineAddress], transfer_dir: Path, bucket_bytes: int, dtype: str
    ) -> SendReport:
        """Every rank takes part in the gathers; the sender of each pipeline stage feeds all engines."""
        clients = [connect(address) for address in engines]

        def deliver(manifest: Any) -> None:
            for client in clients:
                client.update_weights(manifest)

        return send_weights(
            self.actor.export(),
            self.world,
            version=version,
            dtype=getattr(torch, dtype),
            bucket_bytes=bucket_bytes,
            transfer_dir=transfer_dir,
            deliver=deliver,
        )

    def refresh_reference(self) -> None:
        """The reference becomes the actor as it is now (after a warm-up)."""
        if self.reference is not None:
            self.reference.copy_from(self.actor)


def build_roles(config: RunConfig, world: World) -> dict[str, object]:
    """Role name -> object, on this rank. Called on every rank of the pool."""
    hf_config = json.loads((Path(config.model.path) / "config.json").read_text())
    actor = MegatronActor(config, hf_config, world)
    reference = MegatronReference(config, hf_config, world) if config.actor.use_kl_loss else None
    roles: dict[str, object] = {"actor": actor, "host": HostRole(world, actor, reference)}
    if reference is not None:
        roles["reference"] = reference
    return roles
