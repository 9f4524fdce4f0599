"""Places of a Ray cluster for the processes of a run, as data: what is asked for, and what to say
where it is not.

One placement group holds them all, so that two runs cannot each wait for what the other has. Its
first bundles are the machines' shares of the ranks: `trainer.n_gpus_per_node` ranks are always on
one machine, as under torchrun. Bundles of the engines follow; colocated engines have none of their
own, and run in those of the ranks.

`assign_engine_seat` says where an engine listens and which devices its server sees, given where Ray
has placed it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_megatron.config.rules.engine_machines import list_engine_part_names
from rlhf_megatron.config.rules.part_rules import find_registered_part, has_engine_setting
from rlhf_megatron.config.schema import (
    RayConfig,
    RolloutConfig,
    ServedRewardModelConfig,
    SGLangConfig,
    TrainerConfig,
)
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.server_process import LOOPBACK, ServerSeat
from rlhf_megatron.rollout.sglang.sglang_environment import (
    VISIBLE_DEVICES,
    MachineGpus,
    check_sglang_environment,
    count_engine_gpus_per_machine,
    runs_on_cpu,
)

# Ray's names
CPU = "CPU"
GPU = "GPU"


@dataclass(frozen=True)
class ResourceBundle:
    """The resources that one machine is to provide."""

    name: str  # in messages: "ranks 0-7", "engine0"
    num_cpus: float
    num_gpus: float = 0
    machine_address: str = ""  # address of the only one that will do; empty: any

    @property
    def resources(self) -> dict[str, float]:
        """Return the amounts by Ray's resource names, without amounts of 0."""
        found = {
            name: amount
            for name, amount in ((CPU, self.num_cpus), (GPU, self.num_gpus))
            if amount > 0
        }
        # every machine has 1 of its own
        return found | ({f"node:{self.machine_address}": 0.001} if self.machine_address else {})

    def __str__(self) -> str:
        """Return the bundle as messages name it: "ranks 0-7: 8 CPU, 8 GPU on 10.0.0.1"."""
        return (
            f"{self.name}: {format_resources(self.resources) or 'nothing'}"
            f"{f' on {self.machine_address}' if self.machine_address else ''}"
        )


def make_rank_bundles(
    trainer: TrainerConfig, ray_config: RayConfig, rollout: RolloutConfig, uses_gpus: bool
) -> tuple[ResourceBundle, ...]:
    """Return one bundle for each machine (trainer.nnodes): bundle i holds the ranks from i x
    n_gpus_per_node on, and the CPUs of the colocated engines there.
    """
    each = trainer.n_gpus_per_node
    num_machines = trainer.nnodes
    shares = [range(machine * each, (machine + 1) * each) for machine in range(num_machines)]
    # dealt out to the machines
    num_parts = len(list_engine_part_names(rollout)) if rollout.colocated else 0
    engines = [len(range(machine, num_parts, num_machines)) for machine in range(num_machines)]
    return tuple(
        ResourceBundle(
            f"ranks {share[0]}-{share[-1]}" if len(share) > 1 else f"rank {share[0]}",
            len(share) * ray_config.num_cpus_per_rank
            + num_colocated * ray_config.num_cpus_per_engine,
            len(share) if uses_gpus else 0,
        )
        for share, num_colocated in zip(shares, engines, strict=True)
    )


def make_engine_bundles(
    rollout: RolloutConfig, ray_config: RayConfig, uses_gpus: bool, gpus_per_part: int = 1
) -> tuple[ResourceBundle, ...]:
    """Return one bundle for each part of the engines that the run starts beside the ranks; () where
    the engines are colocated or run already (rollout.endpoints).
    """
    if rollout.colocated or rollout.endpoints:
        return ()
    num_gpus = gpus_per_part if uses_gpus else 0
    return tuple(
        ResourceBundle(name, ray_config.num_cpus_per_engine, num_gpus)
        for name in list_engine_part_names(rollout)
    )


def make_reward_server_bundles(
    num_servers: int, ray_config: RayConfig, num_gpus: int
) -> tuple[ResourceBundle, ...]:
    """Return one bundle, of `num_gpus` GPUs, for each server of the reward model that runs beside
    the ranks.
    """
    return tuple(
        ResourceBundle(f"reward{index}", ray_config.num_cpus_per_engine, num_gpus)
        for index in range(num_servers)
    )


def make_reward_actor_bundles(ray_config: RayConfig) -> tuple[ResourceBundle, ...]:
    """Return one bundle for each of the ray.reward_actors actors that compute rewards."""
    return tuple(
        ResourceBundle(f"rewards{index}", ray_config.num_cpus_per_reward_actor)
        for index in range(ray_config.reward_actors)
    )


def count_own_cluster_cpus(bundles: Sequence[ResourceBundle], num_cores: int) -> int:
    """Return the number of CPUs that a cluster of this machine declares: the machine's cores, or
    more where the bundles need more. Ray only counts CPUs, and few cores can run many ranks.
    """
    return max(num_cores, math.ceil(sum(bundle.num_cpus for bundle in bundles)))


def describe_shortage(
    bundles: Sequence[ResourceBundle],
    machines: Sequence[Mapping[str, float]],
    waited_s: float,
    is_own_cluster: bool,
) -> str:
    """Return the message for a run that got no room: the bundles, the resources of the machines,
    and the fix.

    `machines` holds the total resources of each machine; `waited_s` is the time that the run has
    waited.
    """
    asked = _sum_resources([bundle.resources for bundle in bundles])
    total = _sum_resources(machines)
    missing = {name: amount for name, amount in asked.items() if amount > total.get(name, 0)}
    # a cluster of this machine does not grow
    limit = "" if is_own_cluster else " (ray.start_timeout_s)"
    lines = [f"the Ray cluster has no place for this run after {waited_s:.0f} s{limit}. Asked for:"]
    lines += [f"  {bundle}" for bundle in bundles]
    lines += ["The cluster has:"]
    lines += [
        f"  machine {n}: {format_resources(machine)}" for n, machine in enumerate(machines)
    ] or ["  no machine"]
    if missing:
        lines.append(
            f"In all {format_resources(asked)} are asked for, and there"
            f" are {format_resources(total) or 'none'}."
        )
    elif any(
        all(_is_machine_too_small(bundle, machine) for machine in machines) for bundle in bundles
    ):
        lines.append("No machine is large enough for each of these shares.")
    else:
        lines.append("There would be room, but others use it.")
    fix = (
        "lower trainer.n_gpus_per_node, trainer.nnodes, rollout.num_engines,"
        " or ray.num_cpus_per_rank"
    )
    join = (
        "set ray.address to a larger cluster" if is_own_cluster else "add machines to the cluster"
    )
    lines.append(
        f"Fix: {fix};"
        f" {join}{'' if missing or is_own_cluster else ', or raise ray.start_timeout_s'}."
    )
    return "\n".join(lines)


def format_resources(resources: Mapping[str, float]) -> str:
    """Return the CPUs and GPUs of `resources` as "8 CPU, 2 GPU", without amounts of 0."""
    return ", ".join(f"{resources[name]:g} {name}" for name in (CPU, GPU) if resources.get(name))


def _is_machine_too_small(bundle: ResourceBundle, machine: Mapping[str, float]) -> bool:
    """Return whether the machine has less of some resource than the bundle needs."""
    return any(amount > machine.get(name, 0) for name, amount in bundle.resources.items())


def _sum_resources(resource_amounts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the CPUs and the GPUs."""
    return {name: sum(part.get(name, 0) for part in resource_amounts) for name in (CPU, GPU)}


class PlacedProcess(Protocol):
    """The place where a process runs; see `ProcessLocation`."""

    @property
    def address(self) -> str:
        """The address of the machine, as the cluster reaches it."""

    @property
    def machine(self) -> str:
        """The id of the machine, as `process_control.read_machine_id` makes it."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that Ray gave to the process, as CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True)
class EngineSeating:
    """The facts that decide about the seat of one engine,
    beside the place that Ray has given it.
    """

    name: str
    driver_machine: str  # as `process_control.read_machine_id`
    rank_locations: tuple[PlacedProcess, ...]  # of the trainer
    must_share_machine: bool  # weights come through memory of the driver's machine
    num_shared_devices: int = 0  # devices that it takes turns with; 0: it has its own, or none
    first_shared_device: int = 0  # of the ranks' devices on its machine
    spans_machines: bool = False  # other parts of it must reach it


def count_gpus_per_part(rollout: RolloutConfig) -> int:
    """Return the number of GPUs that an engine uses on one machine; 0 where its server runs on a
    CPU. Raise ValueError as `check_sglang_environment` does.
    """
    elsewhere = MachineGpus(is_placed_by_launcher=True)
    return (
        count_gpus_per_server(rollout.sglang, elsewhere)
        if has_engine_setting(rollout, "rollout.sglang")
        else 1
    )


def count_gpus_per_server(
    server_config: SGLangConfig | ServedRewardModelConfig, machine: MachineGpus | None = None
) -> int:
    """Return the number of GPUs that a server with these settings uses on one machine; 0 where the
    server runs on a CPU. Raise ValueError as `check_sglang_environment` does.
    """
    arguments: Mapping[str, object] = {}
    if server_config.args:
        arguments = check_sglang_environment(
            server_config.python, server_config.args, server_config.env, machine_gpus=machine
        ).arguments.value_by_option
    if runs_on_cpu(arguments, server_config.env):
        return 0
    return count_engine_gpus_per_machine(arguments)


def must_share_driver_machine(rollout: RolloutConfig) -> bool:
    """Return whether engines must run on the driver's machine, because their weights go through its
    memory. Colocated engines get weights through the memory of their own machine, and may run
    elsewhere.
    """
    kind = find_registered_part("engine", rollout.engine)
    is_elsewhere = (
        kind is not None and kind.build.can_run_elsewhere and rollout.weight_transport != "tensor"
    )
    return not is_elsewhere and not rollout.colocated


def find_part_bundle(num_machines: int, is_colocated: bool, part_index: int) -> int:
    """Return the index of an engine part's bundle in the run's reservation. The first bundles are
    the machines' shares of the ranks, which colocated engine parts take in turn; each other part
    has a bundle after them.
    """
    return part_index % num_machines if is_colocated else num_machines + part_index


def assign_engine_seat(location: PlacedProcess, seating: EngineSeating) -> ServerSeat:
    """Return the seat (address and devices) of an engine that Ray has placed at `location`.

    The engine listens on the loopback address only where the driver and all ranks are on its
    machine. It sees its own devices first, then those of the ranks on its machine, whose memory it
    opens to take weights. Raise EngineError where the engine cannot work there.
    """
    if seating.must_share_machine and location.machine != seating.driver_machine:
        raise EngineError(
            f"{seating.name} was placed on {location.address}, another machine than the driver's,"
            " which weights do not reach: rollout.engine local and rollout.weight_transport tensor"
            " go through the driver's memory; use sglang with process_group or disk, or make room"
            " on the driver's machine."
        )
    others = (seating.driver_machine, *(rank.machine for rank in seating.rank_locations))
    is_alone = not seating.spans_machines and all(machine == location.machine for machine in others)
    is_alone = is_alone or seating.must_share_machine
    of_ranks = [
        device
        for rank in seating.rank_locations
        if rank.machine == location.machine
        for device in rank.devices
    ]
    devices = order_server_devices(seating, location.devices, of_ranks)
    return ServerSeat(
        LOOPBACK if is_alone else location.address,
        {VISIBLE_DEVICES: ",".join(devices)} if devices else {},
    )


def order_server_devices(
    seating: EngineSeating, own_devices: Sequence[str], rank_devices: Sequence[str]
) -> list[str]:
    """Return the devices in the order in which the server counts them, each device once: the
    engine's own or shared devices, then the ranks'. Raise EngineError where colocated engines need
    more devices than the ranks have.
    """
    first = list(own_devices)
    if seating.num_shared_devices and rank_devices:
        end = seating.first_shared_device + seating.num_shared_devices
        if end > len(rank_devices):
            raise EngineError(
                f"{seating.name} takes turns with devices {seating.first_shared_device} to"
                f" {end - 1} of the ranks on its machine, which have {len(rank_devices)}"
                " (rollout.colocated); lower rollout.num_engines or its tp-size."
            )
        first = list(rank_devices[seating.first_shared_device : end])
    return list(dict.fromkeys([*first, *rank_devices]))
