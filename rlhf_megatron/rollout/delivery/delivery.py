"""One sender's buckets to several engines. An engine that fails is left out of the rest; the others get all of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.resharding.transports.base import Medium
from rlhf_megatron.rollout.delivery.courier import Courier, Traffic
from rlhf_megatron.rollout.engine import EngineError, WeightTransport

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Delivery:
    """A context manager on a sending rank. Callable with a bucket: returns when all engines that still take part have
    read it.

    No failure of an engine is raised: it would end the training ranks, whose weights are what mends the engine.
    """

    def __init__(self, transport: WeightTransport, couriers: Sequence[Courier]) -> None:
        self.failures: dict[str, str] = {}  # engine name -> what it said first; it has not got everything
        self.traffic = Traffic()
        self._transport = transport
        self._couriers = tuple(couriers)
        self._threads = ThreadPoolExecutor(max(1, len(self._couriers)), thread_name_prefix="deliver")

    def choose_medium(self) -> Medium:
        """What buckets lie in. Opens the couriers, since some know then; call it once, on a sender."""
        self._each(lambda courier: courier.open(), "before its first bucket")
        if self._transport == "disk":
            return "disk"
        media = {courier.medium for courier in self._couriers}
        return "device_memory" if media == {"device_memory"} else "shared_memory"

    def __call__(self, manifest: BucketManifest, bucket: Tensor) -> None:
        for traffic in self._each(lambda courier: courier.deliver(manifest, bucket), f"while it was given {manifest}"):
            self.traffic += traffic
        faults.reach("sync.after_bucket")

    def _each(self, act: Callable[[Courier], T], when: str) -> list[T]:
        """At once with all that have not failed: what `act` returned for those that do not fail now."""
        standing = [courier for courier in self._couriers if courier.name not in self.failures]
        futures = [(courier, self._threads.submit(act, courier)) for courier in standing]
        results = []
        for courier, future in futures:
            try:
                results.append(future.result())  # has the deadline of the courier
            except EngineError as error:
                self.failures[courier.name] = f"{str(error).rstrip('.')}, {when}."
                logger.warning("%s is left out of this weight sync: %s", courier.name, error)
        return results

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True)
        for courier in self._couriers:
            courier.close()
