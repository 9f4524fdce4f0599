"""Start the engines of a run, or attach to running ones, and make the fleet; planned faults
kill or stop one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.config.rules.batch_rules import compute_longest_rollout
from rlhf_megatron.config.rules.run_rules import count_actor_ranks
from rlhf_megatron.config.schema import ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhf_megatron.device import count_devices
from rlhf_megatron.rollout.drivers.driver_pool import DriverPool, choose_driver_counts
from rlhf_megatron.rollout.engine_kinds import get_balancer_kind, get_engine_kind
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import SupervisionSettings
from rlhf_megatron.rollout.fleet.server_process import (
    EngineServers,
    LaunchPlacement,
    StartProgress,
    launch_here,
)
from rlhf_megatron.rollout.sglang.attached_engines import AttachedEngines
from rlhf_megatron.rollout.sglang.sglang_environment import MachineGpus
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import make_parallel_layout
from rlhf_megatron.weights.shard_plan import count_serving_copies

MIB = 1 << 20


@dataclass(frozen=True)
class EngineSetup:
    """The settings by which a run's engines are checked, started or attached to."""

    rollout: RolloutConfig
    model: ModelConfig
    trainer: TrainerConfig
    # buffers of weights at once: one a pipeline stage, for each copy of it that serves engines
    num_senders: int
    max_sample_tokens: int  # of the longest sample

    @classmethod
    def from_config(cls, config: RunConfig) -> EngineSetup:
        """Return the engine setup of a run's configuration, with the number of weight senders and
        the length of the longest sample computed from it.
        """
        megatron = config.actor.megatron
        num_engines = len(config.rollout.endpoints) or config.rollout.num_engines
        pp = megatron.pipeline_model_parallel_size
        copies = count_serving_copies(make_parallel_layout(megatron, count_actor_ranks(config)))
        num_senders = pp * max(1, min(copies, num_engines))
        num_tokens = compute_longest_rollout(config)
        return cls(config.rollout, config.model, config.trainer, num_senders, num_tokens)

    @property
    def dtype(self) -> str:
        """Name of the engines' weight type."""
        return self.rollout.dtype or self.model.dtype

    def get_transfer_parent(self, run_dir: Path) -> str | Path | None:
        """Return the directory in which to make the transfer directory; None:
        `make_transfer_directory` finds room in memory.
        """
        return self.rollout.transfer_dir or (
            run_dir if self.rollout.weight_transport == "disk" else None
        )

    def compute_transfer_bytes(self) -> int:
        """Return the bytes that all senders need together in the transfer directory: two buffers
        for each sender; two versions of the weights for transport disk; 0 for process_group.
        """
        if self.rollout.weight_transport == "process_group":
            return 0
        if self.rollout.weight_transport == "disk":
            table = make_weight_table(read_hf_config(Path(self.model.path)))
            return (
                2
                * sum(prod(hf.shape) for rule in table for hf in rule.hf_tensors)
                * DTYPE_BYTES[self.dtype]
            )
        return 2 * self.num_senders * self.rollout.update_weights_bucket_megabytes * MIB

    @property
    def is_placed_by_launcher(self) -> bool:
        """Return whether the launcher decides on which machines servers run and which devices they
        get.
        """
        return (
            self.trainer.runtime == "ray"
            or self.trainer.nnodes > 1
            or bool(self.rollout.engine_machines)
        )

    def make_machine_gpus(self, is_placed_by_launcher: bool = False) -> MachineGpus:
        """Describe this machine's GPUs for servers: the trainer's ranks use the first of them. With
        `is_placed_by_launcher` the description leaves machines and devices to the launcher.
        """
        if is_placed_by_launcher:
            return MachineGpus(is_shared=self.rollout.colocated, is_placed_by_launcher=True)
        num_trainer = 0 if self.trainer.device == "cpu" else self.trainer.n_gpus_per_node
        return MachineGpus(count_devices(), num_trainer, self.rollout.colocated)

    def check_servers(self) -> None:
        """Raise ValueError where servers or the balancer could not be started, or the servers of
        rollout.endpoints do not fit. Start and change nothing.
        """
        get_balancer_kind(self.rollout.router).check_rollout(self.rollout)
        get_engine_kind(self.rollout.engine).check_setup(self)

    def start_servers(
        self,
        run_dir: Path,
        transfer_dir: Path,
        progress: StartProgress | None,
        placement: LaunchPlacement = launch_here,
    ) -> EngineServers | AttachedEngines:
        """Check the balancer, then start servers of `rollout.engine` without weights, where
        `placement` puts them, or attach to running ones. The first sync brings the weights. Raise
        EngineError, and ValueError for the balancer.
        """
        # servers take a minute to start
        get_balancer_kind(self.rollout.router).check_rollout(self.rollout)
        return get_engine_kind(self.rollout.engine).start_servers(
            self, run_dir, transfer_dir, progress, placement
        )

    def make_fleet(
        self,
        servers: EngineServers | AttachedEngines,
        run_dir: Path,
        transfer_dir: Path,
        check_stop: Callable[[], None],
    ) -> EngineFleet:
        """Make a supervised fleet of the servers, with its balancer and drivers started. Attached
        servers are neither killed nor started again. `check_stop`: see EngineFleet. WeightSync sets
        its `resync_engines`.
        """
        rollout = self.rollout
        balancer = get_balancer_kind(rollout.router)
        gates = [
            address.drivers if balancer.sends_to_engines else "" for address in servers.addresses
        ]
        num_local_drivers, num_drivers_per_machine = choose_driver_counts(
            gates, rollout.num_drivers
        )
        make_client = partial(
            get_engine_kind(rollout.engine).make_client, transfer_dir=transfer_dir
        )
        own_servers = None if isinstance(servers, AttachedEngines) else servers
        supervision = SupervisionSettings(
            servers=own_servers,
            make_client=make_client,
            health_interval_s=rollout.health_interval_s,
            health_timeout_s=rollout.health_timeout_s,
            max_restarts=rollout.max_engine_restarts,
            num_restarts_before=0 if own_servers is None else own_servers.num_start_restarts,
        )
        clients = [make_client(address) for address in servers.addresses]
        request_balancer = balancer.build_balancer(self, run_dir)
        driver_pool: DriverPool | None = None
        if num_local_drivers or num_drivers_per_machine:
            driver_pool = DriverPool(num_local_drivers, num_drivers_per_machine)
        return EngineFleet(
            clients,
            rollout.request_timeout_s,
            rollout.request_retries,
            supervision=supervision,
            balancer=request_balancer,
            is_isolated=self.trainer.deterministic,
            check_stop=check_stop,
            driver_pool=driver_pool,
        )


def register_engine_faults(servers: EngineServers | AttachedEngines) -> None:
    """Define the fault actions kill_engine and stop_engine of this process's fault plan: they send
    SIGKILL or SIGSTOP to the first server that runs. Without a plan nothing ever triggers them.
    """
    faults.define_fault_action("kill_engine", _make_signal_action(servers, signal.SIGKILL))
    faults.define_fault_action("stop_engine", _make_signal_action(servers, signal.SIGSTOP))


def _make_signal_action(
    servers: EngineServers | AttachedEngines, signal_number: int
) -> Callable[[faults.PlannedFault], None]:
    """Return a fault action that sends this signal to the first server that runs."""

    def signal_first_live(fault: faults.PlannedFault) -> None:
        """Send the signal to the first server that runs; do nothing where none runs."""
        live = [process for process in servers.processes if process.exit_code is None]
        if live:
            live[0].send_signal(signal_number)

    return signal_first_live
