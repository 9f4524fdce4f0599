"""Engines of a run: the servers that are started for it, or that it attaches to, and the fleet that they make.

Also: Planned faults of engines (`faults`): the first one that lives is killed or stopped, with its process group.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import read_key
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.parallel.device import has_accelerator, num_devices
from rlhf_megatron.resharding.manifest import DTYPE_BYTES
from rlhf_megatron.rollout.clients import connect
from rlhf_megatron.rollout.engine import Engine, EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.balancer import Balancer
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.fleet.process import EngineServers, Place, Progress, here, start_local_engines
from rlhf_megatron.rollout.fleet.supervisor import Supervision
from rlhf_megatron.rollout.router.process import check_router, prepare_router
from rlhf_megatron.rollout.sglang.attach import AttachedEngines, addresses_of, look_at_all
from rlhf_megatron.rollout.sglang.attached_server import Expected
from rlhf_megatron.rollout.sglang.environment import check_sglang
from rlhf_megatron.rollout.sglang.places import Machine
from rlhf_megatron.rollout.sglang.process import start_sglang_engines

MIB = 1 << 20


def engine_dtype(config: RunConfig) -> str:
    """Name of the engine's weight type."""
    return config.rollout.dtype or config.model.dtype


def transfer_parent(config: RunConfig, run_dir: Path) -> str | Path | None:
    """Where the transfer directory is made; None: where `make_transfer_dir` finds room in memory."""
    rollout = config.rollout
    return rollout.transfer_dir or (run_dir if rollout.weight_transport == "disk" else None)


def transfer_bytes(config: RunConfig) -> int:
    """Room that all senders need in the transfer directory, bytes: of each two buffers, or two versions of the weights;
    for broadcasts, none."""
    if config.rollout.weight_transport == "process_group":
        return 0
    if config.rollout.weight_transport == "disk":
        numbers = sum(prod(hf.shape) for rule in table_for(read_hf_config(Path(config.model.path))) for hf in rule.hf)
        return 2 * numbers * DTYPE_BYTES[engine_dtype(config)]
    num_senders = config.actor.megatron.pipeline_model_parallel_size
    return 2 * num_senders * config.rollout.update_weights_bucket_megabytes * MIB


def machine_of(config: RunConfig, is_placed: bool = False) -> Machine:
    """This machine's GPUs: the trainer's ranks take the first of them. `is_placed`: somebody else says where servers
    run, and gives them their devices there."""
    trainer = config.trainer
    if is_placed:
        return Machine(is_shared=config.rollout.colocated)
    num_trainer = 0 if trainer.device == "cpu" else trainer.n_gpus_per_node
    return Machine(num_devices(), num_trainer, config.rollout.colocated)


def check_engines(config: RunConfig) -> None:
    """Nothing is started or changed. Raises ValueError: no environment for servers, or running ones that do not fit."""
    rollout = config.rollout
    if rollout.router == "sglang":
        check_router(rollout.sglang.python, rollout.sglang.env)
    if rollout.endpoints:
        try:
            look_at_all(_attached(config), _expected(config))
        except EngineError as error:
            raise ValueError(str(error)) from error
    elif rollout.engine == "sglang":
        check_sglang(
            rollout.sglang.python,
            rollout.sglang.args,
            rollout.sglang.env,
            deterministic=config.trainer.deterministic,
            num_engines=rollout.num_engines,
            machine=machine_of(config, is_placed=config.trainer.runtime == "ray"),
        )


def start_engines(
    config: RunConfig, run_dir: Path, transfer_dir: Path, progress: Progress | None, place: Place = here
) -> EngineServers | AttachedEngines:
    """Servers of `rollout.engine`, where `place` says, without weights: the first sync brings them. Raises
    EngineError."""
    rollout = config.rollout
    if rollout.router == "sglang":
        check_router(rollout.sglang.python, rollout.sglang.env)  # servers take a minute to start
    if rollout.endpoints:
        return AttachedEngines(_attached(config), _expected(config), transfer_dir, progress)
    if rollout.engine == "sglang":
        return start_sglang(config, run_dir, transfer_dir, progress, place=place)
    use_cuda = config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_accelerator())
    return start_local_engines(
        config.model.path,
        rollout.num_engines,
        run_dir,
        transfer_dir=transfer_dir,
        dtype=engine_dtype(config),
        device="cuda" if use_cuda else "cpu",
        load_weights=False,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        deterministic=config.trainer.deterministic,
        startup_timeout_s=rollout.startup_timeout_s,
        progress=progress,
        place=place,
    )


def start_sglang(
    config: RunConfig,
    run_dir: Path,
    transfer_dir: Path,
    progress: Progress | None,
    key: str | None = None,
    place: Place = here,
) -> EngineServers:
    """Stock SGLang servers. `key`: of all of them; None: one each."""
    rollout = config.rollout
    return start_sglang_engines(
        config.model.path,
        rollout.num_engines,
        run_dir,
        python=rollout.sglang.python,
        transfer_dir=transfer_dir,
        dtype=engine_dtype(config),
        arguments=rollout.sglang.args,
        env=rollout.sglang.env,
        startup_timeout_s=rollout.startup_timeout_s,
        deterministic=config.trainer.deterministic,
        machine=machine_of(config, is_placed=place is not here),
        is_one_machine=config.trainer.nnodes == 1,
        key=key,
        progress=progress,
        place=place,
    )


def _attached(config: RunConfig) -> list[EngineAddress]:
    """The running servers. Raises ValueError for a key file that will not do."""
    sglang = config.rollout.sglang
    api_key = read_key(sglang.api_key_file, "rollout.sglang.api_key_file")
    admin_key = read_key(sglang.admin_api_key_file, "rollout.sglang.admin_api_key_file")
    return addresses_of(config.rollout.endpoints, api_key, admin_key)


def _expected(config: RunConfig) -> Expected:
    model = config.model
    return Expected(
        model_path=Path(model.path),
        tokenizer_path=Path(model.tokenizer_path or model.path),
        dtype=engine_dtype(config),
        is_deterministic=config.trainer.deterministic,
        num_tokens=config.data.max_prompt_length + config.data.max_response_length,
    )


def make_router(config: RunConfig, run_dir: Path) -> Balancer:
    """sglang-router, started. Raises ValueError and EngineError."""
    from rlhf_megatron.rollout.router.balancer import SGLangRouter

    rollout = config.rollout
    process = prepare_router(rollout.sglang.python, rollout.sglang.env, run_dir, rollout.startup_timeout_s)
    limits = (rollout.max_engine_restarts, rollout.health_interval_s, rollout.health_timeout_s)
    return SGLangRouter(process, *limits)


def make_fleet(
    config: RunConfig,
    servers: EngineServers | AttachedEngines,
    run_dir: Path,
    transfer_dir: Path,
    should_stop: Callable[[], None],
) -> EngineFleet:
    """Those servers as one, supervised; attached ones are neither killed nor started again. `should_stop`: see
    EngineFleet. Its `resync` is set by WeightSync."""
    balancer = make_router(config, run_dir) if config.rollout.router == "sglang" else None
    rollout = config.rollout
    limits = (rollout.health_interval_s, rollout.health_timeout_s)
    make_client: Callable[[EngineAddress], Engine]
    if isinstance(servers, AttachedEngines):
        make_client, supervision = servers.connect, Supervision(None, None, *limits)
    else:
        make_client = partial(connect, transfer_dir=transfer_dir)
        supervision = Supervision(servers, make_client, *limits, rollout.max_engine_restarts)
    return EngineFleet(
        [make_client(address) for address in servers.addresses],
        rollout.request_timeout_s,
        rollout.request_retries,
        supervision=supervision,
        balancer=balancer,
        is_closed=config.trainer.deterministic,
        should_stop=should_stop,
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
