"""rollout.weight_transport process_group, whole tensors: buckets as broadcasts, in a torch process
group of one sender (rank 0) and the ranks of one engine, for engines that take no parts of tensors
(those that do: `links`).

Two senders cannot block one another: an engine works on one request at a time, whose sender
broadcasts all the while in a thread that waits for nothing but this engine.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import (
    WEIGHT_VERB_TIMEOUT_S,
    SGLangWeightVerbs,
)
from rlhf_megatron.rollout.transports.bucket_transport import (
    BucketMemory,
    BucketTransport,
    DeliveryTraffic,
    estimate_traffic_without_receipts,
    sum_receipt_traffic,
)
from rlhf_megatron.rollout.transports.tensor_transport import MappedFilePool
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import JOIN_TIMEOUT_S, HeldSpansByRank
from rlhf_megatron.weights.engine_links import EngineLink, find_address_towards_url

logger = logging.getLogger(__name__)
T = TypeVar("T")

# engines that a rank sends to, so that all is really under way: each takes a share of a GPU
MAX_ENGINES_AT_ONCE = 8
LEAVE_TIMEOUT_S = 10.0
_OTHER_SIDE_TIMEOUT_S = 2.0  # for the side that has not failed to say its part


class EngineProcessGroups:
    """The process groups of this rank with engines, by engine name, kept from sync to sync, and its
    mapped files. Thread-safe.
    """

    def __init__(self) -> None:
        self.file_pool = MappedFilePool()
        # by name of a group: what the ranks of its engine hold
        self.roster_by_group: dict[str, HeldSpansByRank] = {}
        self.send_slots = threading.BoundedSemaphore(MAX_ENGINES_AT_ONCE)
        self._group_by_engine: dict[str, tuple[EngineAddress, EngineLink]] = {}
        self._leave_by_group: dict[str, Callable[[], None]] = {}  # by name of a group
        self._lock = threading.Lock()

    def find_group(self, address: EngineAddress) -> EngineLink | None:
        """Return the kept group with this server, or None. An engine that was started again has
        another address: its old group is dropped.
        """
        with self._lock:
            kept, group = self._group_by_engine.get(address.name, (None, None))
            if kept == address:
                return group
        self.drop_group(address.name)
        return None

    def store_group(
        self,
        address: EngineAddress,
        group: EngineLink,
        leave_on_engine: Callable[[], None] | None = None,
    ) -> None:
        """Keep the group with this server, in place of an older one. `leave_on_engine` makes the
        server leave it; None where another rank does that.
        """
        self.drop_group(address.name)
        with self._lock:
            self._group_by_engine[address.name] = (address, group)
            if leave_on_engine is not None:
                self._leave_by_group[group.name] = leave_on_engine

    def drop_group(self, engine_name: str) -> Callable[[], None]:
        """Drop and abort the group with an engine where something failed; the next sync makes a new
        one. Return a function that makes the server leave the group, and ignores a server that is
        gone or hangs.
        """
        with self._lock:
            _, group = self._group_by_engine.pop(engine_name, (None, None))
            leave = self._leave_by_group.pop(group.name, None) if group is not None else None
        if group is not None:
            self.roster_by_group.pop(group.name, None)
            group.abort()

        def leave_quietly() -> None:
            """Make the server leave the group; ignore its EngineError."""
            with suppress(EngineError):
                if leave is not None:
                    leave()

        return leave_quietly

    def close(self) -> None:
        """Leave all groups, on both sides, and remove the mapped files."""
        self.file_pool.close()
        for name in list(self._group_by_engine):
            with self._lock:
                _, group = self._group_by_engine.get(name, (None, None))
                leave = self._leave_by_group.pop(group.name, None) if group is not None else None
            if leave is not None:
                with suppress(EngineError):
                    leave()
            self.drop_group(name)

    def run_on_both_sides(
        self,
        engine_name: str,
        operation: str,
        engine_request: Callable[[], T],
        local_action: Callable[[], None],
        timeout_s: float,
    ) -> T:
        """Make a request to an engine and run this side's part at once, each in a thread; return
        the engine's answer. Raise EngineError when one fails or the deadline passes; the group is
        then given up on both sides, so that neither waits for the other.
        """
        calls = EngineCallLog()
        asked = calls.start_in_thread(engine_name, "request", engine_request)
        done = calls.start_in_thread(engine_name, "group", local_action)
        both: tuple[Future[Any], ...] = (asked, done)
        finished, running = wait(both, timeout_s, FIRST_EXCEPTION)
        if not running and all(future.exception() is None for future in finished):
            return asked.result()
        leave = self.drop_group(engine_name)
        if asked in finished and not isinstance(asked.exception(), EngineTimeoutError):
            leave()  # the server is free to, and what is under way here ends then
        wait(both, _OTHER_SIDE_TIMEOUT_S)
        words = [
            str(error)
            for future in both
            if future.done() and (error := future.exception()) is not None
        ]
        if not words:
            words = [f"no end within {timeout_s:g} s"]
        raise EngineError(f"{engine_name}, {operation}: {'; '.join(words)}")


def open_engine_group(
    address: EngineAddress, sender: str, num_ranks: int, backend: str, timeout_s: float
) -> EngineLink:
    """Open a new group with an engine, on which this host listens, and return it; both sides must
    still join. Raise EngineError where this host cannot listen.
    """
    name = f"weights-{uuid.uuid4().hex[:12]}-{sender.replace(' ', '-')}-{address.name}"
    own = ""
    try:
        own = find_address_towards_url(address.url)
        return EngineLink.make_inviting_link(name, own, num_ranks, backend, timeout_s)
    except OSError as error:
        raise EngineError(
            f"{address.name}: no process group for weights: {sender} cannot listen on"
            f" {own or 'any address'} towards {address.url}: {error}; see to its network, or use"
            " another rollout.weight_transport."
        ) from error


class ProcessGroupTransport(BucketTransport):
    """Broadcasts buckets to stock SGLang, with or without the run's loader (only the loader writes
    receipts). The group stays for the next sync.
    """

    bucket_memory: BucketMemory = "device_memory"

    def __init__(
        self,
        address: EngineAddress,
        transfer_dir: Path,
        sender: str,
        backend: str,
        process_groups: EngineProcessGroups,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        timeout_s: float = WEIGHT_VERB_TIMEOUT_S,
    ) -> None:
        """Deliver to the engine at `address`. `sender` is the text of the sending rank's
        coordinates, `backend` gloo or nccl, `timeout_s` the deadline of one bucket.
        """
        self.engine_name = address.name
        self._address = address
        self._sender = sender
        self._backend = backend
        self._process_groups = process_groups
        self._join_timeout_s = join_timeout_s
        self._timeout_s = timeout_s
        self._weight_verbs = SGLangWeightVerbs(address, transfer_dir, timeout_s)

    def prepare_sync(self, device_ids: Collection[str] = ("",)) -> None:
        """Open and join a group with this server, unless one is kept. Raise EngineError."""
        if self._process_groups.find_group(self._address) is not None:
            return
        group = open_engine_group(
            self._address,
            self._sender,
            self._address.tp_size + 1,
            self._backend,
            self._join_timeout_s,
        )
        self._process_groups.store_group(
            self._address,
            group,
            lambda: self._weight_verbs.leave_process_group(group.name, LEAVE_TIMEOUT_S),
        )
        place = group.invitation
        what = f"process group {group.name}"
        self._process_groups.run_on_both_sides(
            self.engine_name,
            what,
            lambda: self._weight_verbs.join_process_group(place),
            group.join_group,
            self._join_timeout_s,
        )

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """Broadcast the bucket while the engine takes it, with a limited number of engines at once,
        and return the traffic; with the run's loader check the digests too. Raise EngineError.
        """
        group = self._process_groups.find_group(self._address)
        assert group is not None, "open comes before deliver"
        with self._process_groups.send_slots:  # who has one gives it back by its deadline
            self._process_groups.run_on_both_sides(
                self.engine_name,
                manifest.label,
                lambda: self._weight_verbs.receive_broadcast(manifest, group.name),
                lambda: group.broadcast_bucket(bucket, self._timeout_s),
                self._timeout_s,
            )
        if self._address.has_loader:
            return sum_receipt_traffic(self._weight_verbs.digest_bucket(manifest))
        return estimate_traffic_without_receipts(manifest, self._address.tp_size)
