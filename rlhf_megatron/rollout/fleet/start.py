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
from rlhf_megatron.config.schema import ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhf_megatron.config.secrets import read_key
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.parallel.device import num_devices
from rlhf_megatron.resharding.manifest import DTYPE_BYTES
from rlhf_megatron.rollout.engine import Engine, EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.balancer import Balancer
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.fleet.process import EngineServers, Place, Progress, here
from rlhf_megatron.rollout.fleet.supervisor import Supervision
from rlhf_megatron.rollout.kinds import BALANCERS, engine_kind
from rlhf_megatron.rollout.router.balancer import SGLangRouter
from rlhf_megatron.rollout.router.process import check_router, prepare_router
from rlhf_megatron.rollout.sglang.attach import AttachedEngines, addresses_of, look_at_all
from rlhf_megatron.rollout.sglang.attached_server import Expected
from rlhf_megatron.rollout.sglang.environment import Machine
from rlhf_megatron.rollout.sglang.process import start_sglang_engines

MIB = 1 << 20


@dataclass(frozen=True)
class EngineSetup:
    """The settings by which a run's engines are checked, started or attached to."""

    rollout: RolloutConfig
    model: ModelConfig
    trainer: TrainerConfig
    num_senders: int  # ranks that send weights: one a pipeline stage
    num_tokens: int  # of the longest sample

    @classmethod
    def of(cls, config: RunConfig) -> EngineSetup:
        num_senders = config.actor.megatron.pipeline_model_parallel_size
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

    def machine(self, is_placed: bool = False) -> Machine:
        """This machine's GPUs: the trainer's ranks take the first of them. `is_placed`: somebody else says where
        servers run, and gives them their devices there."""
        if is_placed:
            return Machine(is_shared=self.rollout.colocated)
        num_trainer = 0 if self.trainer.device == "cpu" else self.trainer.n_gpus_per_node
        return Machine(num_devices(), num_trainer, self.rollout.colocated)

    def check(self) -> None:
        """Raise ValueError where there is no environment for servers, or running ones do not fit. Starts and changes
        nothing."""
        rollout = self.rollout
        if rollout.router == "sglang":
            check_router(rollout.sglang.python, rollout.sglang.env)
        if rollout.endpoints:
            try:
                look_at_all(self._attached(), self._expected())
            except EngineError as error:
                raise ValueError(str(error)) from error
        else:
            engine_kind(rollout.engine).check(self)

    def start(
        self, run_dir: Path, transfer_dir: Path, progress: Progress | None, place: Place = here
    ) -> EngineServers | AttachedEngines:
        """Servers of `rollout.engine`, where `place` says, without weights: the first sync brings them. Raises
        EngineError."""
        rollout = self.rollout
        if rollout.router == "sglang":
            check_router(rollout.sglang.python, rollout.sglang.env)  # servers take a minute to start
        if rollout.endpoints:
            return AttachedEngines(self._attached(), self._expected(), transfer_dir, progress)
        return engine_kind(rollout.engine).start(self, run_dir, transfer_dir, progress, place)

    def start_sglang(
        self,
        run_dir: Path,
        transfer_dir: Path,
        progress: Progress | None,
        key: str | None = None,
        place: Place = here,
    ) -> EngineServers:
        """Stock SGLang servers. `key`: of all of them; None: one each."""
        rollout = self.rollout
        return start_sglang_engines(
            self.model.path,
            rollout.num_engines,
            run_dir,
            python=rollout.sglang.python,
            transfer_dir=transfer_dir,
            dtype=self.dtype,
            arguments=rollout.sglang.args,
            env=rollout.sglang.env,
            startup_timeout_s=rollout.startup_timeout_s,
            deterministic=self.trainer.deterministic,
            machine=self.machine(is_placed=place is not here),
            is_one_machine=self.trainer.nnodes == 1,
            key=key,
            progress=progress,
            place=place,
        )

    def sglang_router(self, run_dir: Path) -> Balancer:
        """sglang-router, started. Raises ValueError and EngineError."""
        rollout = self.rollout
        process = prepare_router(rollout.sglang.python, rollout.sglang.env, run_dir, rollout.startup_timeout_s)
        limits = (rollout.max_engine_restarts, rollout.health_interval_s, rollout.health_timeout_s)
        return SGLangRouter(process, *limits)

    def fleet(
        self,
        servers: EngineServers | AttachedEngines,
        run_dir: Path,
        transfer_dir: Path,
        should_stop: Callable[[], None],
    ) -> EngineFleet:
        """Those servers as one, supervised; attached ones are neither killed nor started again. `should_stop`: see
        EngineFleet. Its `resync` is set by WeightSync."""
        rollout = self.rollout
        limits = (rollout.health_interval_s, rollout.health_timeout_s)
        make_client: Callable[[EngineAddress], Engine]
        if isinstance(servers, AttachedEngines):
            make_client, supervision = servers.connect, Supervision(None, None, *limits)
        else:
            make_client = partial(engine_kind(rollout.engine).connect, transfer_dir=transfer_dir)
            supervision = Supervision(servers, make_client, *limits, rollout.max_engine_restarts)
        return EngineFleet(
            [make_client(address) for address in servers.addresses],
            rollout.request_timeout_s,
            rollout.request_retries,
            supervision=supervision,
            balancer=BALANCERS.get(rollout.router).build(self, run_dir),
            is_closed=self.trainer.deterministic,
            should_stop=should_stop,
        )

    def _attached(self) -> list[EngineAddress]:
        """The running servers. Raises ValueError for a key file that will not do."""
        sglang = self.rollout.sglang
        api_key = read_key(sglang.api_key_file, "rollout.sglang.api_key_file")
        admin_key = read_key(sglang.admin_api_key_file, "rollout.sglang.admin_api_key_file")
        return addresses_of(self.rollout.endpoints, api_key, admin_key)

    def _expected(self) -> Expected:
        return Expected(
            model_path=Path(self.model.path),
            tokenizer_path=Path(self.model.tokenizer_path or self.model.path),
            dtype=self.dtype,
            is_deterministic=self.trainer.deterministic,
            num_tokens=self.num_tokens,
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
