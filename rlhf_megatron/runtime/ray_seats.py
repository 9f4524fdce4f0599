"""Where an engine under Ray listens and which devices its server sees, given where it was placed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.rollout.process import LOOPBACK, Seat
from rlhf_megatron.rollout.sglang_devices import VISIBLE, on_cpu
from rlhf_megatron.rollout.sglang_environment import check_sglang


class Spot(Protocol):
    """Where a process runs; see `runtime.ray.Whereabouts`."""

    @property
    def address(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def devices(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Seating:
    """What decides about the seat of one engine, beside the place that Ray has given it."""

    name: str
    driver_machine: str  # as `processes.machine_id`
    ranks: tuple[Spot, ...]  # of the trainer
    must_share_machine: bool  # weights come through memory of the driver's machine
    num_shared: int = 0  # devices that it takes turns with; 0: it has its own, or none
    first_shared: int = 0  # of the ranks' devices on its machine


def gpus_per_engine(config: RunConfig) -> int:
    """GPUs that Ray is asked for; 0: its server runs on a CPU. Raises ValueError as `check_sglang`."""
    rollout = config.rollout
    if rollout.engine == "local":
        return 1
    sglang = rollout.sglang
    arguments = check_sglang(sglang.python, sglang.args, sglang.env).arguments.values if sglang.args else {}
    if on_cpu(arguments, sglang.env):
        return 0
    return int(str(arguments.get("tp-size", 1))) * int(str(arguments.get("gpu-id-step", 1)))


def must_share_machine(config: RunConfig) -> bool:
    """Whether engines can only work on the driver's machine: weights reach them through its memory."""
    return config.rollout.engine == "local" or config.rollout.weight_transport == "tensor"


def bundle_of_engine(config: RunConfig, index: int) -> int:
    """Number of its bundle in the run's reservation (`ray_places`): one a machine for the ranks, which colocated
    engines take in turns, then one an engine."""
    num_machines = config.trainer.nnodes
    return index % num_machines if config.rollout.colocated else num_machines + index


def seat_of(own: Spot, seating: Seating) -> Seat:
    """The seat of an engine that Ray has placed at `own`.

    It listens to its machine only where driver and ranks are on it too. It sees its own devices first, then those of
    the ranks on its machine, whose memory it opens to take weights. Raises EngineError where it cannot work there.
    """
    if seating.must_share_machine and own.machine != seating.driver_machine:
        raise EngineError(
            f"{seating.name} was placed on {own.address}, another machine than the driver's, which weights do not"
            " reach: rollout.engine local and rollout.weight_transport tensor go through the driver's memory; use"
            " sglang with process_group or disk, or make room on the driver's machine."
        )
    is_alone = seating.must_share_machine or all(
        machine == own.machine for machine in (seating.driver_machine, *(rank.machine for rank in seating.ranks))
    )
    of_ranks = [device for rank in seating.ranks if rank.machine == own.machine for device in rank.devices]
    devices = visible_devices(seating, own.devices, of_ranks)
    return Seat(LOOPBACK if is_alone else own.address, {VISIBLE: ",".join(devices)} if devices else {})


def visible_devices(seating: Seating, own: Sequence[str], of_ranks: Sequence[str]) -> list[str]:
    """In the order in which the server counts them, each once. Raises EngineError where engines that take turns with
    the ranks are too many for their devices."""
    first = list(own)
    if seating.num_shared and of_ranks:
        end = seating.first_shared + seating.num_shared
        if end > len(of_ranks):
            raise EngineError(
                f"{seating.name} takes turns with devices {seating.first_shared} to {end - 1} of the ranks on its"
                f" machine, which have {len(of_ranks)} (rollout.colocated); lower rollout.num_engines or its tp-size."
            )
        first = list(of_ranks[seating.first_shared : end])
    return list(dict.fromkeys([*first, *of_ranks]))
