"""One weight sync as a transaction: begin -> stream -> verify -> commit. The policy version counts syncs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from rlhf_megatron.resharding.sender import SendReport
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.rollout.fleet import EngineFleet
from rlhf_megatron.runtime.worker_group import WorkerGroup

NAMES_SHOWN = 5


class Sync(Protocol):
    """What the loop ends a step with, unless the step left the policy as it was."""

    version: int  # of the policy: how many times this was called

    def __call__(self) -> dict[str, float]:
        """Returns metrics, among them the new version."""


class WeightSync:
    """Callable; owned by the controller. An engine that fails on the way is STALE and serves nothing."""

    def __init__(
        self,
        group: WorkerGroup,
        fleet: EngineFleet,
        transfer_dir: Path,
        bucket_bytes: int,
        dtype: str,
        version: int = 0,
    ) -> None:
        self.group = group
        self.fleet = fleet
        self.transfer_dir = transfer_dir
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        self.version = version

    def __call__(self) -> dict[str, float]:
        """Trainer's weights to all engines. Raises EngineError when what stands in an engine is not what was sent."""
        start = time.monotonic()
        version = self.version + 1
        self.fleet.begin_update(version)
        reports: list[SendReport] = self.group.broadcast(
            "host.send_weights",
            version=version,
            engines=[engine.address for engine in self.fleet.live],
            transfer_dir=self.transfer_dir,
            bucket_bytes=self.bucket_bytes,
            dtype=self.dtype,
        ).result()
        sent = {name: value for report in reports for name, value in report.digests.items()}
        for name, digests in self.fleet.weight_digests().items():
            verify(name, sent, digests)
        self.fleet.commit_update(version)
        self.version = version
        return {
            "policy/version": float(version),
            "sync/num_bytes": float(sum(report.num_bytes for report in reports)),
            "sync/seconds": time.monotonic() - start,
        }


def verify(engine: str, sent: dict[str, str], standing: dict[str, str] | None) -> None:
    """What stands in the engine against what was exported, bit for bit. None: the engine cannot tell."""
    if standing is None:
        return
    wrong = sorted(name for name in sent.keys() | standing.keys() if sent.get(name) != standing.get(name))
    if wrong:
        shown = ", ".join(
            f"{n} (sent {sent.get(n, 'nothing')}, stands {standing.get(n, 'nothing')})" for n in wrong[:NAMES_SHOWN]
        )
        raise EngineError(
            f"{engine}: {len(wrong)} of {len(sent)} tensors that stand in it differ from what was exported: {shown}."
            " It is STALE."
        )


class NoSync:
    """Stands for WeightSync where there are no engines: the version still counts."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def __call__(self) -> dict[str, float]:
        self.version += 1
        return {"policy/version": float(self.version)}
