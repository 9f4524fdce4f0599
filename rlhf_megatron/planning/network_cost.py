"""What a weight sync costs on a named network: bytes over each link, the busiest one, and the time
that it needs at least. Pure arithmetic on a plan; bandwidths are the makers' figures, of
one direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.shard_plan import EngineLayout, StageLinkBytes, count_serving_copies

MEDIA = ("own GPU", "NVLink", "network")


@dataclass(frozen=True)
class NetworkBandwidths:
    """Machines of GPUs that are alike. Bytes a second of one GPU, in each direction."""

    gpus_per_machine: int  # a machine
    memory_bytes_per_s: float  # of a GPU with itself: read and written
    nvlink_bytes_per_s: float
    network_bytes_per_s: float  # of its share of the machine's network

    def get_bytes_per_s(self, medium: str) -> float:
        """Return the bandwidth of a medium of MEDIA, in bytes a second of one GPU."""
        return {
            "own GPU": self.memory_bytes_per_s,
            "NVLink": self.nvlink_bytes_per_s,
            "network": self.network_bytes_per_s,
        }[medium]


NETWORKS = {
    "a100-8x200g": NetworkBandwidths(8, 1.0e12, 300e9, 25e9),
    "h100-8x400g": NetworkBandwidths(8, 1.6e12, 450e9, 50e9),
    "h200-8x400g": NetworkBandwidths(8, 2.4e12, 450e9, 50e9),
    "h20-8x400g": NetworkBandwidths(8, 2.0e12, 450e9, 50e9),
    "b200-8x400g": NetworkBandwidths(8, 4.0e12, 900e9, 50e9),
}


@dataclass(frozen=True)
class EngineGroup:
    """Engines that are alike, one rank a GPU: colocated, dealt to the trainer's machines in turns;
    else in order on machines behind the trainer's.
    """

    layout: EngineLayout
    num_engines: int
    is_colocated: bool = False


@dataclass(frozen=True)
class BusiestEndpoint:
    """The GPU with the most bytes over a medium in one direction."""

    medium: str
    is_sending: bool
    endpoint: str
    num_bytes: int
    seconds: float


@dataclass
class SyncNetworkCost:
    """The bytes that travel, by medium."""

    network: NetworkBandwidths
    # (sending rank, "engine2 rank 3")
    bytes_by_link: dict[str, Counter[tuple[int, str]]] = field(default_factory=dict)
    sent_bytes: dict[str, Counter[int]] = field(default_factory=dict)
    received_bytes: dict[str, Counter[str]] = field(default_factory=dict)

    def sum_bytes(self, medium: str) -> int:
        """Return the bytes that travel over a medium, all links together."""
        return sum(self.bytes_by_link[medium].values())

    def find_busiest_endpoints(self) -> Iterator[BusiestEndpoint]:
        """Yield, for each medium that is used, the rank that sends most and the engine rank that
        receives most.
        """
        for medium in MEDIA:
            speed = self.network.get_bytes_per_s(medium)
            if self.sent_bytes[medium]:
                rank, num_bytes = self.sent_bytes[medium].most_common(1)[0]
                yield BusiestEndpoint(medium, True, f"rank {rank}", num_bytes, num_bytes / speed)
                name, num_bytes = self.received_bytes[medium].most_common(1)[0]
                yield BusiestEndpoint(medium, False, name, num_bytes, num_bytes / speed)

    def find_slowest_endpoint(self) -> BusiestEndpoint:
        """Return the endpoint that takes longest, which is how long the sync takes at least: media
        and GPUs work at once.
        """
        return max(self.find_busiest_endpoints(), key=lambda one: one.seconds)


def compute_sync_cost(
    stage_links: Sequence[StageLinkBytes],
    layout: ParallelLayout,
    engines: EngineGroup,
    network: NetworkBandwidths,
) -> SyncNetworkCost:
    """Return the bytes of a weight sync from shard to shard. An engine is served by one copy of
    each stage; the copies take turns over the engines, those of a machine over the colocated
    engines there.
    """
    cost = _make_empty_cost(network)
    for engine in range(engines.num_engines):
        copy_index = _choose_serving_copy(engine, layout, engines, network)
        first_gpu = _find_first_gpu(engine, layout, engines, network)
        for stage, found in enumerate(stage_links):
            first = stage * layout.stage_size + copy_index * layout.copy_size
            for (place, target), num_bytes in found.bytes_by_link.items():
                name = f"engine{engine} rank {target}"
                _add_transfer(cost, first + place, name, first_gpu + target, num_bytes)
    return cost


def _count_trainer_machines(layout: ParallelLayout, network: NetworkBandwidths) -> int:
    """Return the number of machines that the trainer's ranks fill."""
    return -(-layout.world_size // network.gpus_per_machine)


def _find_first_gpu(
    engine_index: int, layout: ParallelLayout, engines: EngineGroup, network: NetworkBandwidths
) -> int:
    """Return the number of an engine's first GPU, counted through all machines."""
    gpus = network.gpus_per_machine
    num_machines = _count_trainer_machines(layout, network)
    if not engines.is_colocated:
        return num_machines * gpus + engine_index * engines.layout.tp
    turn, machine = divmod(engine_index, num_machines)
    return machine * gpus + turn * engines.layout.tp


def _choose_serving_copy(
    engine_index: int, layout: ParallelLayout, engines: EngineGroup, network: NetworkBandwidths
) -> int:
    """Return the number of the copy that serves an engine, as `assign_engines_to_copies` of the
    transports does: a colocated engine is served by a copy that its machine holds whole.
    """
    num_copies = count_serving_copies(layout)
    turn, machine = divmod(engine_index, _count_trainer_machines(layout, network))
    first_rank = machine * network.gpus_per_machine
    ranks = range(first_rank, first_rank + network.gpus_per_machine)
    first_of_last_stage = layout.world_size - layout.stage_size
    local_copies = [
        copy_index
        for copy_index in range(num_copies)
        if copy_index * layout.copy_size in ranks
        and first_of_last_stage + (copy_index + 1) * layout.copy_size - 1 in ranks
    ]
    if not engines.is_colocated or not local_copies:
        return engine_index % num_copies
    return local_copies[turn % len(local_copies)]


def estimate_broadcast_seconds(
    stage_bytes: Sequence[int], engines: EngineGroup, network: NetworkBandwidths
) -> float:
    """Return the seconds that broadcasts of whole tensors need at least, with engines on machines
    of their own: the first rank of each stage sends its stage to every engine, and each engine rank
    receives all stages.
    """
    return (
        max(max(stage_bytes) * engines.num_engines, sum(stage_bytes)) / network.network_bytes_per_s
    )


def _make_empty_cost(network: NetworkBandwidths) -> SyncNetworkCost:
    """Return a cost without any transfer."""
    return SyncNetworkCost(
        network,
        {medium: Counter() for medium in MEDIA},
        {medium: Counter() for medium in MEDIA},
        {medium: Counter() for medium in MEDIA},
    )


def _add_transfer(
    cost: SyncNetworkCost, sender_rank: int, receiver_name: str, receiver_gpu: int, num_bytes: int
) -> None:
    """Add the bytes that a rank sends to a rank of an engine to `cost`, under the medium between
    their GPUs. A rank's own number is that of its GPU.
    """
    gpus = cost.network.gpus_per_machine
    if receiver_gpu == sender_rank:
        medium = "own GPU"
    elif receiver_gpu // gpus == sender_rank // gpus:
        medium = "NVLink"
    else:
        medium = "network"
    cost.bytes_by_link[medium][sender_rank, receiver_name] += num_bytes
    cost.sent_bytes[medium][sender_rank] += num_bytes
    cost.received_bytes[medium][receiver_name] += num_bytes
