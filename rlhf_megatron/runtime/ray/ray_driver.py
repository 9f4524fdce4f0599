"""The Ray launcher: the driver is the controller, and each rank a process that Ray placed.

    driver = controller --- Ray --- places and starts the ranks, and ends them
           `--- control channel --- host 0, host 1, ...       calls, as under torchrun
               (`runtime.remote_worker_group`)
           `--- rendezvous store of the pools                 for torch.distributed

When the driver ends, however it ends, its hosts lose the control channel and end; Ray kills what is
left of the job's processes, and a cluster of this machine ends with it. The secret of the control
channel is drawn here and reaches a rank as an argument of a call, inside the cluster. Who reaches
the cluster runs code in it: `docs/security.md`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlhf_megatron import faults
from rlhf_megatron.config.schema import (
    MegatronConfig,
    RayConfig,
    RolloutConfig,
    ServedRewardModelConfig,
    TrainerConfig,
)
from rlhf_megatron.rewards.service.run_placement import RewardPoolFactory, RunPlacement
from rlhf_megatron.rewards.service.worker_pool import RewardWorkerPool
from rlhf_megatron.rollout.socket_limits import find_interface_towards
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory
from rlhf_megatron.runtime import message_channel
from rlhf_megatron.runtime.host_control import RunDeadlines, run_with_hosts
from rlhf_megatron.runtime.host_errors import HostError, HostLostError
from rlhf_megatron.runtime.process_control import handle_signals_in_thread
from rlhf_megatron.runtime.rank_pools import PoolSpec, find_pool_of_rank
from rlhf_megatron.runtime.rank_process import JobRank, run_rank_process
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.ray.ray_placement import (
    ResourceBundle,
    count_gpus_per_part,
    count_gpus_per_server,
    count_own_cluster_cpus,
    make_engine_bundles,
    make_rank_bundles,
    make_reward_actor_bundles,
    make_reward_server_bundles,
    must_share_driver_machine,
)
from rlhf_megatron.runtime.ray.ray_reward_pool import RayRewardPool, RewardPoolActor
from rlhf_megatron.runtime.role_host import BuildRoles
from rlhf_megatron.runtime.routed_worker_group import RoutedWorkerGroup
from rlhf_megatron.runtime.stop_signals import SIGNALS, ControllerStopHandler, HostStopHandler
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.weights.bound_store import AddressBoundStore

if TYPE_CHECKING:
    from rlhf_megatron.runtime.ray.ray_cluster import (
        ProcessLocation,
        RayCall,
        RayCluster,
        RayObject,
    )

GPU_BACKEND = "cpu:gloo,cuda:nccl"
_FAILED = 1


@dataclass(frozen=True)
class RayJob:
    """The settings and parts of a Ray driver, without the loop."""

    trainer: TrainerConfig
    ray: RayConfig
    rollout: RolloutConfig
    # servers of a reward model, where the run starts some
    served_reward_model: ServedRewardModelConfig | None
    megatron_sections: Sequence[MegatronConfig]  # of all pools
    pools: Sequence[PoolSpec]
    build_roles: BuildRoles  # Ray carries it to the ranks
    log_dir: Path
    deadlines: RunDeadlines
    has_engines: bool  # the loop starts some
    keeps_routes: bool = False  # of samples, in the run directory, which ranks and this process see


@dataclass(frozen=True)
class RankInstructions:
    """The instructions for a rank."""

    job_rank: JobRank
    working_dir: str  # the driver's, from which relative paths of the settings count
    driver_address: str  # of the driver's machine
    control_port: int
    store_port: int
    log_dir: Path
    deadlines: RunDeadlines
    backend: str
    build_roles: BuildRoles
    fault_plan: tuple[str, Path] | None  # plan and directory, for tests


class RayRankProcess:
    """The object in the Ray process of a rank."""

    def serve(self, instructions: RankInstructions, secret: bytes) -> None:
        """Run as the host of a rank until the run ends, on the main thread. Raise ConnectionError
        when the driver cannot be reached.
        """
        with contextlib.suppress(OSError):  # this machine has no such directory
            os.chdir(instructions.working_dir)
        if instructions.fault_plan is not None:
            faults.install_fault_plan(
                instructions.fault_plan[0],
                f"rank{instructions.job_rank.rank}",
                instructions.fault_plan[1],
            )
        if interface := find_interface_towards(instructions.driver_address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        stopping = HostStopHandler(instructions.deadlines.stop_s)
        handle_signals_in_thread(SIGNALS, stopping.handle_signal)
        startup = timedelta(seconds=instructions.deadlines.startup_s)

        def open_pool_store() -> dist.Store:
            """Return a connection to the driver's store, with keys of the rank's pool."""
            store = dist.TCPStore(
                instructions.driver_address,
                instructions.store_port,
                is_master=False,
                timeout=startup,
            )
            return dist.PrefixStore(f"rlhf_megatron/pool/{instructions.job_rank.pool.name}", store)

        is_served = run_rank_process(
            instructions.job_rank,
            (instructions.driver_address, instructions.control_port),
            secret,
            instructions.build_roles,
            open_pool_store,
            instructions.log_dir,
            instructions.deadlines,
            instructions.backend,
            stopping,
            lambda: _FAILED,
        )
        if not is_served:
            raise ConnectionError(
                f"{instructions.job_rank.rank_label} cannot reach the driver"
                f" at {instructions.driver_address}."
            )


def run_ray_driver(
    run_job: Callable[[RoutedWorkerGroup, RunPlacement], int],
    job: RayJob,
    stop_request: StopRequest,
) -> int:
    """Connect to the Ray cluster, or make a cluster of this machine; reserve the bundles, start the
    ranks, call `run_job` with the group of hosts and the placement of the rest of the run, and end
    everything. Return the exit code that `run_job` returns.

    A signal becomes `stop_request`, which `run_job` must look at. Raise ValueError where there is
    no cluster or no room, and the errors that `run_torchrun_controller` raises. Must be called on
    the main thread.
    """
    ray_environment.check_ray_version()
    ray = job.ray
    trainer = job.trainer
    address = ray_environment.find_cluster_address(ray, os.environ)
    if address is None and trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes ({trainer.nnodes}) needs a Ray cluster of that many machines, and"
            " neither ray.address nor RAY_ADDRESS names one; start it with launch/ray_cluster.sh"
            " (`rlhf-megatron launch-scripts launch` writes it), or set trainer.nnodes to 1."
        )
    ray_environment.set_ray_defaults(address, os.environ)
    from rlhf_megatron.runtime.ray.ray_cluster import RayCluster

    stopping = ControllerStopHandler(stop_request, job.deadlines.stop_s)
    # nothing to save yet
    stopping.has_begun = False
    stopping.is_startup = True
    num_cpus = count_own_cluster_cpus(
        _plan_bundles(job, _DeviceCounts(False, 0), ""), os.cpu_count() or 1
    )
    with (
        stopping.install_handlers(),
        make_transfer_directory(tempfile.gettempdir(), 0) as own,  # sockets need a short path
        RayCluster(address, own.path, num_cpus, ray.dashboard) as cluster,
    ):
        devices = _count_devices(job, cluster)
        bundles = _plan_bundles(job, devices, cluster.address)
        cluster.reserve_bundles(bundles, ray.placement == "spread", ray.start_timeout_s)
        try:
            exit_code = _run_on_cluster(cluster, devices, run_job, job, stopping)
        except HostLostError:
            if cluster.is_own:  # they go with the cluster
                _copy_ray_logs(own.path, job.log_dir / "ray")
            raise
    if cluster.is_stuck:
        _exit_process(exit_code)
    return exit_code


def _exit_process(exit_code: int) -> None:
    """End this process at once with `exit_code`: a thread of Ray that is in C++ while the
    interpreter shuts down would crash the process and lose the code.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@dataclass(frozen=True)
class _DeviceCounts:
    has_gpus: bool  # ranks have one each
    gpus_per_engine: int  # GPUs of an engine on one machine; 0 on a CPU
    gpus_per_reward_server: int = 0  # of a server of the reward model


def _count_devices(job: RayJob, cluster: RayCluster) -> _DeviceCounts:
    """Return whether the ranks have GPUs, and the number of GPUs of an engine and of a reward-model
    server.
    """
    kind = job.trainer.device
    has_gpus = kind == "cuda" or (kind == "auto" and cluster.has_gpus)
    if not has_gpus or not job.has_engines:
        return _DeviceCounts(has_gpus, 0)
    of_server = (
        count_gpus_per_server(job.served_reward_model) if job.served_reward_model is not None else 0
    )
    return _DeviceCounts(has_gpus, count_gpus_per_part(job.rollout), of_server)


def _plan_bundles(
    job: RayJob, device_counts: _DeviceCounts, driver_address: str
) -> list[ResourceBundle]:
    """Return the bundles of the reservation, in order: the machines' shares of the ranks, the
    engines, the reward-model servers, the reward actors.

    Where weights go through memory of the driver's machine (transport tensor, the bundled engine),
    the engines and the first share of the ranks are bound to `driver_address`.
    """
    ranks = list(make_rank_bundles(job.trainer, job.ray, job.rollout, device_counts.has_gpus))
    if not job.has_engines:
        return ranks
    engines = make_engine_bundles(
        job.rollout, job.ray, device_counts.has_gpus, device_counts.gpus_per_engine
    )
    rewards = _plan_reward_bundles(job, device_counts)
    if not must_share_driver_machine(job.rollout):
        return [*ranks, *engines, *rewards]
    return (
        [replace(b, machine_address=driver_address) for b in ranks[:1]]
        + ranks[1:]
        + [replace(b, machine_address=driver_address) for b in engines]
        + rewards
    )


def _plan_reward_bundles(job: RayJob, device_counts: _DeviceCounts) -> list[ResourceBundle]:
    """Return the bundles of the reward-model servers, if they are not colocated, and of the reward
    actors.
    """
    served = None if job.rollout.colocated else job.served_reward_model
    return [
        *make_reward_server_bundles(
            served.num_servers if served is not None else 0,
            job.ray,
            device_counts.gpus_per_reward_server,
        ),
        *make_reward_actor_bundles(job.ray),
    ]


def _run_on_cluster(
    cluster: RayCluster,
    device_counts: _DeviceCounts,
    run_job: Callable[[RoutedWorkerGroup, RunPlacement], int],
    job: RayJob,
    stop_handler: ControllerStopHandler,
) -> int:
    """Start the ranks, make the placers of engines and reward-model servers, and call `run_job`
    with the hosts. Return the exit code that `run_job` returns.
    """
    from rlhf_megatron.runtime.ray.ray_engines import RayServerPlacer

    given = message_channel.read_secret(os.environ)
    os.environ.pop(message_channel.SECRET_ENV, None)
    secret = given or message_channel.generate_secret().encode()
    listener = message_channel.open_listener(cluster.address)
    store = AddressBoundStore(cluster.address, 0, is_master=True, wait_for_workers=False)
    order = _make_rank_instructions(
        cluster.address, listener.getsockname()[1], store.port, device_counts, job
    )
    tasks = _start_ranks(cluster, device_counts, job, order, secret)

    def locate_ranks() -> list[ProcessLocation]:
        """Wait until all ranks run, and return where they run, by rank."""
        return [task.ray_object.wait_for_location(job.deadlines.startup_s) for task in tasks]

    engines = RayServerPlacer(
        cluster,
        job.rollout,
        job.trainer.nnodes,
        job.ray.num_cpus_per_engine,
        device_counts.gpus_per_engine,
        locate_ranks,
        ray_environment.make_engine_environment(os.environ),
        b"" if job.keeps_routes else secret,
    )
    is_shared = job.rollout.colocated
    num_cpus = job.ray.num_cpus_per_engine
    servers = RayServerPlacer(
        cluster,
        job.rollout,
        job.trainer.nnodes,
        0 if is_shared else num_cpus,  # no more than one of those that take turns works
        device_counts.gpus_per_reward_server,
        locate_ranks,
        ray_environment.make_engine_environment(os.environ),
        b"",
        first_bundle=len(_plan_bundles(job, device_counts, ""))
        - len(_plan_reward_bundles(job, device_counts)),
    )
    return run_with_hosts(
        lambda group: run_job(
            group, RunPlacement(engines, servers, _choose_reward_pool(cluster, job))
        ),
        listener,
        secret,
        job.pools,
        job.deadlines,
        stop_handler,
        find_lost_host=lambda: _find_lost_rank(tasks),
    )


def _make_rank_instructions(
    driver_address: str,
    control_port: int,
    store_port: int,
    device_counts: _DeviceCounts,
    job: RayJob,
) -> RankInstructions:
    """Return the instructions for rank 0; the instructions of another rank differ only in
    `job_rank`.
    """
    plan = os.environ.get(faults.PLAN_ENV)
    return RankInstructions(
        job_rank=JobRank(0, job.pools[0]),
        working_dir=os.getcwd(),
        driver_address=driver_address,
        control_port=control_port,
        store_port=store_port,
        log_dir=job.log_dir.absolute(),
        deadlines=job.deadlines,
        backend=GPU_BACKEND if device_counts.has_gpus else "gloo",
        build_roles=job.build_roles,
        fault_plan=None if plan is None else (plan, Path(os.environ[faults.DIRECTORY_ENV])),
    )


def _choose_reward_pool(cluster: RayCluster, job: RayJob) -> RewardPoolFactory:
    """Return the factory of the reward workers: a pool of this machine where ray.reward_actors is
    0, else a pool over that many actors.
    """
    ray = job.ray
    if ray.reward_actors == 0:
        return RewardWorkerPool

    def start_reward_actor(actor_index: int) -> RayObject:
        """Start the reward actor of this index in its bundle, and return its handle."""
        return cluster.start_object(
            f"rewards{actor_index}",
            RewardPoolActor,
            (os.getcwd(),),
            bundle_index=actor_index - ray.reward_actors,
            num_cpus=ray.num_cpus_per_reward_actor,
            environment=ray_environment.make_engine_environment(os.environ),
        )

    return partial(RayRewardPool, start_reward_actor, ray.reward_actors)


def _start_ranks(
    cluster: RayCluster,
    device_counts: _DeviceCounts,
    job: RayJob,
    instructions: RankInstructions,
    secret: bytes,
) -> list[RayCall]:
    """Start the processes of all ranks, and return their calls of `serve`, by rank. Each call lasts
    until the run ends.
    """
    environment = ray_environment.make_rank_environment(
        os.environ,
        job.trainer,
        job.ray,
        job.megatron_sections,
        is_one_machine=cluster.is_own,
        uses_gpus=device_counts.has_gpus,
        accelerator_types=cluster.list_accelerator_types(),
    )
    tasks = []
    for rank in range(job.pools[-1].end_rank):
        place = JobRank(rank, find_pool_of_rank(job.pools, rank))
        process = cluster.start_object(
            place.rank_label,
            RayRankProcess,
            bundle_index=rank // job.trainer.n_gpus_per_node,
            num_cpus=job.ray.num_cpus_per_rank,
            num_gpus=1 if device_counts.has_gpus else 0,
            environment=environment,
        )
        tasks.append(process.submit_call("serve", replace(instructions, job_rank=place), secret))
    return tasks


def _copy_ray_logs(ray_dir: Path, target_dir: Path) -> None:
    """Copy the logs of Ray's servers and processes to `target_dir`; ignore errors of the files."""
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(ray_dir / "session_latest" / "logs", target_dir, dirs_exist_ok=True)


def _find_lost_rank(rank_calls: Sequence[RayCall]) -> HostError | None:
    """Return an error with what Ray knows of the first rank whose process has ended, or None while
    all run. For use before all ranks have registered.
    """
    for task in rank_calls:
        if task.is_done:
            where = task.ray_object.name
            try:
                task.wait_for_result(1.0)
            except Exception as error:  # whatever ended it
                return HostLostError(f"{where} did not start: {type(error).__name__}: {error}")
            return HostLostError(f"{where} has ended before all ranks had come; see its log.")
    return None
