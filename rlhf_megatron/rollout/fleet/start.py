"""Start the engines of a run, or attach to running ones, and make the fleet; planned faults kill or stop one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.rules.run import actor_ranks
from rlhf_megatron.config.schema import ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.parallel.device import num_devices
from rlhf_megatron.parallel.layout import layout_of
from rlhf_megatron.resharding.manifest import DTYPE_BYTES
from rlhf_megatron.resharding.shards import num_copies
from rlhf_megatron.rollout.drivers.pool import Drivers, counts
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.fleet.process import EngineServers, Place, Progress, here
from rlhf_megatron.rollout.fleet.supervisor import Supervision
from rlhf_megatron.rollout.kinds import balancer_kind, engine_kind
from rlhf_megatron.rollout.sglang.attach import AttachedEngines
from rlhf_megatron.rollout.sglang.environment import Machine

MIB = 1 << 20


@dataclass(frozen=True)
class EngineSetup:
    """The settings by which a run's engines are checked, started or attached to."""

    rollout: RolloutConfig
    model: ModelConfig
    trainer: TrainerConfig
    num_senders: int  # buffers of weights at once: one a pipeline stage, for each copy of it that serves engines
    num_tokens: int  # of the longest sample

    @classmethod
    def of(cls, config: RunConfig) -> EngineSetup:
        megatron, num_engines = config.actor.megatron, len(config.rollout.endpoints) or config.rollout.num_engines
        pp = megatron.pipeline_model_parallel_size
        copies = num_copies(layout_of(megatron, actor_ranks(config)))
        num_senders = pp * max(1, min(copies, num_engines))
        num_tokens = config.data.max_prompt_length + config.data.max_response_length
        return cls(config.rollout, config.model, config.trainer, num_senders, num_tokens)

    @property
    def dtype(self) -> str:
        """Name of the engines' weight type."""
        return self.rollout.dtype or self.model.dtype

    def transfer_parent(self, run_dir: Path) -> str | Path | None:
        """The parent of the transfer directory; None: `make_transfer_dir` finds room in memory."""
        return self.rollout.transfer_dir or (run_dir if self.rollout.weight_transport == "disk" else None)

    def transfer_bytes(self) -> int:
        """Room that all senders need in the transfer directory, bytes: two buffers each, or two versions of the
        weights; for broadcasts, none."""
        if self.rollout.weight_transport == "process_group":
            return 0
        if self.rollout.weight_transport == "disk":
            table = table_for(read_hf_config(Path(self.model.path)))
            return 2 * sum(prod(hf.shape) for rule in table for hf in rule.hf) * DTYPE_BYTES[self.dtype]
        return 2 * self.num_senders * self.rollout.update_weights_bucket_megabytes * MIB

    @property
    def is_placed(self) -> bool:
        """Whether the launcher says where servers run, and gives them their devices there."""
        return self.trainer.runtime == "ray" or self.trainer.nnodes > 1 or bool(self.rollout.engine_machines)

    def machine(self, is_placed: bool = False) -> Machine:
        """This machine's GPUs: the trainer's ranks take the first of them. `is_placed`: see there."""
        if is_placed:
            return Machine(is_shared=self.rollout.colocated, has_others=True)
        num_trainer = 0 if self.trainer.device == "cpu" else self.trainer.n_gpus_per_node
        return Machine(num_devices(), num_trainer, self.rollout.colocated)

    def check(self) -> None:
        """Raise ValueError where there is no environment for servers, or running ones do not fit. Starts and changes
        nothing."""
        balancer_kind(self.rollout.router).check(self.rollout)
        engine_kind(self.rollout.engine).check(self)

    def start(
        self, run_dir: Path, transfer_dir: Path, progress: Progress | None, place: Place = here
    ) -> EngineServers | AttachedEngines:
        """Servers of `rollout.engine`, where `place` says, without weights: the first sync brings them. Raises
        EngineError."""
        balancer_kind(self.rollout.router).check(self.rollout)  # servers take a minute to start
        return engine_kind(self.rollout.engine).start(self, run_dir, transfer_dir, progress, place)

    def fleet(
        self,
        servers: EngineServers | AttachedEngines,
        run_dir: Path,
        transfer_dir: Path,
        should_stop: Callable[[], None],
    ) -> EngineFleet:
        """Make a supervised fleet of the servers. Attached ones are neither killed nor started again. `should_stop`:
        see EngineFleet. WeightSync sets its `resync`.
        """
        rollout = self.rollout
        balancer = balancer_kind(rollout.router)
        gates = [address.drivers if balancer.asks_engines else "" for address in servers.addresses]
        num_drivers = counts(gates, rollout.num_drivers)
        make_client = partial(engine_kind(rollout.engine).connect, transfer_dir=transfer_dir)
        own = None if isinstance(servers, AttachedEngines) else servers
        limits = (rollout.health_interval_s, rollout.health_timeout_s, rollout.max_engine_restarts)
        return EngineFleet(
            [make_client(address) for address in servers.addresses],
            rollout.request_timeout_s,
            rollout.request_retries,
            supervision=Supervision(own, make_client, *limits),
            balancer=balancer.build(self, run_dir),
            is_closed=self.trainer.deterministic,
            should_stop=should_stop,
            drivers=Drivers(*num_drivers) if any(num_drivers) else None,
        )


def register_engine_faults(servers: EngineServers | AttachedEngines) -> None:
    """The actions kill_engine and stop_engine of this process's plan; nothing without one."""
    faults.add_action("kill_engine", _signal_first(servers, signal.SIGKILL))
    faults.add_action("stop_engine", _signal_first(servers, signal.SIGSTOP))


def _signal_first(servers: EngineServers | AttachedEngines, number: int) -> Callable[[faults.Fault], None]:
    def act(fault: faults.Fault) -> None:
        live = [process for process in servers.processes if process.exit_code is None]
        if live:
            live[0].send_signal(number)

    return act
