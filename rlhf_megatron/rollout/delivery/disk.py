"""Buckets as files that the sender has written; or, without the run's loader, the model directory that they make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Medium
from rlhf_megatron.rollout.delivery.courier import Traffic, traffic_of, unseen_traffic
from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.sglang.verbs import SGLangVerbs


class DiskCourier:
    """To stock SGLang. An engine without the run's loader gets everything at the end, see `load_directory`."""

    medium: Medium = "disk"

    def __init__(self, address: EngineAddress, transfer_dir: Path) -> None:
        self.name = address.name
        self._address = address
        self._verbs = SGLangVerbs(address, transfer_dir)

    def open(self) -> None:
        pass

    def deliver(self, manifest: BucketManifest, bucket: Tensor) -> Traffic:
        if not self._address.has_loader:
            return unseen_traffic(manifest, self._address.tp_size)
        return traffic_of(self._verbs.load(manifest))

    def close(self) -> None:
        self._verbs.close()


def load_directory(engines: Sequence[EngineAddress], directory: Path) -> dict[str, str]:
    """Have those that could not read the buckets one by one load the complete model directory.

    Returns by name what those said that failed.
    """
    failures = {}
    for address in engines:
        if address.has_loader:
            continue
        verbs = SGLangVerbs(address, directory.parent)
        try:
            verbs.load_directory(directory)
        except EngineError as error:
            failures[address.name] = str(error)
        finally:
            verbs.close()
    return failures
