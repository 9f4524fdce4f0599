"""One sender's buckets to several engines. An engine that fails is left out of the rest; the others get all of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.resharding.manifest import BucketManifest
from rlhf_megatron.rollout.engine import Engine, EngineError

logger = logging.getLogger(__name__)


class Delivery:
    """A context manager on a sending rank. Callable with a bucket: returns when all engines that still take part have
    read it.

    No failure of an engine is raised: it would end the training ranks, whose weights are what mends the engine.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.failures: dict[str, str] = {}  # engine name -> what it said first; it has not got everything
        self._engines = tuple(engines)
        self._threads = ThreadPoolExecutor(max(1, len(self._engines)), thread_name_prefix="deliver")

    def __call__(self, manifest: BucketManifest, _: Tensor) -> None:
        standing = [engine for engine in self._engines if engine.address.name not in self.failures]
        futures = [(engine, self._threads.submit(engine.update_weights, manifest)) for engine in standing]
        for engine, future in futures:
            try:
                future.result()  # has the deadline of the client
            except EngineError as error:
                self.failures[engine.address.name] = f"{str(error).rstrip('.')}, while it was given {manifest}."
                logger.warning("%s is left out of this weight sync: %s", engine.address.name, error)
        faults.reach("sync.after_bucket")

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True)
        for engine in self._engines:
            engine.close()
