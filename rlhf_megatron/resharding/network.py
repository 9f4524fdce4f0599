"""What a weight sync costs on a named network: bytes over each link, the busiest one, and the time that it needs at
least. Pure arithmetic on a plan; bandwidths are the makers' figures, of one direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.shards import EngineLayout, StageLinks, num_copies


@dataclass(frozen=True)
class Network:
    """Machines of GPUs that are alike. Bytes a second of one GPU, in each direction."""

    gpus: int  # a machine
    memory: float  # of a GPU with itself: read and written
    nvlink: float
    network: float  # of its share of the machine's network

    def speed(self, medium: str) -> float:
        return {"own GPU": self.memory, "NVLink": self.nvlink, "network": self.network}[medium]


MEDIA = ("own GPU", "NVLink", "network")
NETWORKS = {
    "a100-8x200g": Network(8, 1.0e12, 300e9, 25e9),
    "h100-8x400g": Network(8, 1.6e12, 450e9, 50e9),
    "h200-8x400g": Network(8, 2.4e12, 450e9, 50e9),
    "h20-8x400g": Network(8, 2.0e12, 450e9, 50e9),
    "b200-8x400g": Network(8, 4.0e12, 900e9, 50e9),
}


@dataclass(frozen=True)
class Engines:
    """Engines that are alike, one rank a GPU, in the trainer's own order or on machines behind the trainer's."""

    layout: EngineLayout
    count: int
    is_colocated: bool = False


@dataclass(frozen=True)
class Busiest:
    """The GPU with the most bytes over a medium in one direction."""

    medium: str
    is_sending: bool
    who: str
    num_bytes: int
    seconds: float


@dataclass
class Cost:
    """The bytes that travel, by medium."""

    network: Network
    links: dict[str, Counter[tuple[int, str]]] = field(default_factory=dict)  # (sending rank, "engine2 rank 3")
    sent: dict[str, Counter[int]] = field(default_factory=dict)
    received: dict[str, Counter[str]] = field(default_factory=dict)

    def total(self, medium: str) -> int:
        return sum(self.links[medium].values())

    def busiest(self) -> Iterator[Busiest]:
        """One a medium and direction that is used."""
        for medium in MEDIA:
            speed = self.network.speed(medium)
            if self.sent[medium]:
                rank, num_bytes = self.sent[medium].most_common(1)[0]
                yield Busiest(medium, True, f"rank {rank}", num_bytes, num_bytes / speed)
                name, num_bytes = self.received[medium].most_common(1)[0]
                yield Busiest(medium, False, name, num_bytes, num_bytes / speed)

    def floor(self) -> Busiest:
        """Return the link that takes longest: media and GPUs work at once."""
        return max(self.busiest(), key=lambda one: one.seconds)


def cost_of(stages: Sequence[StageLinks], layout: Layout, engines: Engines, network: Network) -> Cost:
    """The cost shard to shard: an engine is served by one copy of each stage, the copies in turn."""
    cost = _empty(network)
    copies = num_copies(layout)
    for engine in range(engines.count):
        for stage, found in enumerate(stages):
            first = stage * layout.stage_size + engine % copies * layout.copy_size
            for (place, target), num_bytes in found.by_link.items():
                _add(cost, first + place, engine, target, num_bytes, layout, engines)
    return cost


def seconds_whole(stage_bytes: Sequence[int], engines: Engines, network: Network) -> float:
    """Seconds that broadcasts of whole tensors need at least, engines apart: the first rank of each stage sends its
    stage to every engine, each rank of which takes all stages."""
    return max(max(stage_bytes) * engines.count, sum(stage_bytes)) / network.network


def _empty(network: Network) -> Cost:
    return Cost(
        network,
        {medium: Counter() for medium in MEDIA},
        {medium: Counter() for medium in MEDIA},
        {medium: Counter() for medium in MEDIA},
    )


def _add(cost: Cost, rank: int, engine: int, target: int, num_bytes: int, layout: Layout, engines: Engines) -> None:
    gpus = cost.network.gpus
    place = engine * engines.layout.tp + target
    if not engines.is_colocated:
        place += -(-layout.world_size // gpus) * gpus
    medium = "own GPU" if place == rank else "NVLink" if place // gpus == rank // gpus else "network"
    name = f"engine{engine} rank {target}"
    cost.links[medium][rank, name] += num_bytes
    cost.sent[medium][rank] += num_bytes
    cost.received[medium][name] += num_bytes
