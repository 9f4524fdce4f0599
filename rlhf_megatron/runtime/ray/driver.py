"""The Ray launcher: the driver is the controller, and each rank a process that Ray placed.

    driver = controller --- Ray --- places and starts the ranks, and ends them
           `--- control channel --- host 0, host 1, ...       calls, as under torchrun (`runtime.remote`)
           `--- rendezvous store of the pools                 for torch.distributed

When the driver ends, however it ends, its hosts lose the control channel and end; Ray kills what is left of the job's
processes, and a cluster of this machine ends with it. The secret of the control channel is drawn here and reaches a
rank as an argument of a call, inside the cluster. Who reaches the cluster runs code in it: `docs/security.md`.
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
from rlhf_megatron.config.schema import MegatronConfig, RayConfig, RolloutConfig, ServedConfig, TrainerConfig
from rlhf_megatron.parallel.bound_store import BoundStore
from rlhf_megatron.resharding.transfer_dir import make_transfer_dir
from rlhf_megatron.rewards.service.places import MakePool, Places
from rlhf_megatron.rewards.service.pool import WorkerPool
from rlhf_megatron.rollout.sockets import interface_towards
from rlhf_megatron.runtime import channel, registration
from rlhf_megatron.runtime.controller import Deadlines, control
from rlhf_megatron.runtime.failures import HostError, HostLostError
from rlhf_megatron.runtime.host import BuildRoles
from rlhf_megatron.runtime.pool import PoolSpec, pool_of_rank
from rlhf_megatron.runtime.processes import on_signals
from rlhf_megatron.runtime.rank import RankPlace, run_rank
from rlhf_megatron.runtime.ray import environment as ray_environment
from rlhf_megatron.runtime.ray.places import (
    Bundle,
    cpus_of_own_cluster,
    engine_bundles,
    gpus_of_part,
    gpus_per_server,
    must_share_machine,
    rank_bundles,
    reward_bundles,
    server_bundles,
)
from rlhf_megatron.runtime.ray.rewards import Part, RayWorkers
from rlhf_megatron.runtime.routed import RoutedGroups
from rlhf_megatron.runtime.stopping import SIGNALS, ControllerStop, HostStop
from rlhf_megatron.stop import StopRequest

if TYPE_CHECKING:
    from rlhf_megatron.runtime.ray.cluster import Cluster, RemoteObject, Task, Whereabouts

GPU_BACKEND = "cpu:gloo,cuda:nccl"
_FAILED = 1


@dataclass(frozen=True)
class RayJob:
    """The parts of a driver beside the loop."""

    trainer: TrainerConfig
    ray: RayConfig
    rollout: RolloutConfig
    served: ServedConfig | None  # servers of a reward model, where the run starts some
    megatrons: Sequence[MegatronConfig]  # of all pools
    pools: Sequence[PoolSpec]
    build_roles: BuildRoles  # Ray carries it to the ranks
    log_dir: Path
    deadlines: Deadlines
    has_engines: bool  # the loop starts some
    keeps_routes: bool = False  # of samples, in the run directory, which ranks and this process see


@dataclass(frozen=True)
class RankOrder:
    """The instructions for a rank."""

    place: RankPlace
    directory: str  # the driver's, from which relative paths of the settings count
    address: str  # of the driver's machine
    control_port: int
    store_port: int
    log_dir: Path
    deadlines: Deadlines
    backend: str
    build_roles: BuildRoles
    faults: tuple[str, Path] | None  # plan and directory, for tests


class RankProcess:
    """A rank, in a process of the cluster."""

    def serve(self, order: RankOrder, secret: bytes) -> None:
        """Live as the host, on the main thread. Raises ConnectionError when it cannot reach the driver."""
        with contextlib.suppress(OSError):  # this machine has no such directory
            os.chdir(order.directory)
        if order.faults is not None:
            faults.install(order.faults[0], f"rank{order.place.rank}", order.faults[1])
        if interface := interface_towards(order.address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        stopping = HostStop(order.deadlines.stop_s)
        on_signals(SIGNALS, stopping.on_signal)
        startup = timedelta(seconds=order.deadlines.startup_s)

        def pool_store() -> dist.Store:
            store = dist.TCPStore(order.address, order.store_port, is_master=False, timeout=startup)
            return dist.PrefixStore(f"rlhf_megatron/pool/{order.place.pool.name}", store)

        is_served = run_rank(
            order.place,
            (order.address, order.control_port),
            secret,
            order.build_roles,
            pool_store,
            order.log_dir,
            order.deadlines,
            order.backend,
            stopping,
            lambda: _FAILED,
        )
        if not is_served:
            raise ConnectionError(f"{order.place.where} cannot reach the driver at {order.address}.")


def run_driver(run: Callable[[RoutedGroups, Places], int], job: RayJob, stop: StopRequest) -> int:
    """Connect to the cluster, or make one; reserve, start the ranks, `run`, end all. Returns what `run` does, which is
    given the hosts, and where the rest of the run stands.

    A signal becomes `stop`, which `run` is to look at. Raises ValueError where there is no cluster or no room in it,
    and as `run_controller` of the torchrun launcher. On the main thread.
    """
    ray_environment.check_installed()
    ray, trainer = job.ray, job.trainer
    address = ray_environment.address_of(ray, os.environ)
    if address is None and trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes ({trainer.nnodes}) needs a Ray cluster of that many machines, and neither"
            " ray.address nor RAY_ADDRESS names one; start it with launch/ray_cluster.sh, or set trainer.nnodes to 1."
        )
    ray_environment.prepare(address, os.environ)
    from rlhf_megatron.runtime.ray.cluster import Cluster

    stopping = ControllerStop(stop, job.deadlines.stop_s)
    stopping.has_begun, stopping.is_startup = False, True  # nothing to save yet
    num_cpus = cpus_of_own_cluster(_bundles(job, _Devices(False, 0), ""), os.cpu_count() or 1)
    with (
        stopping.installed(),
        make_transfer_dir(tempfile.gettempdir(), 0) as own,  # sockets need a short path
        Cluster(address, own.path, num_cpus, ray.dashboard) as cluster,
    ):
        devices = _devices(job, cluster)
        bundles = _bundles(job, devices, cluster.address)
        cluster.reserve(bundles, ray.placement == "spread", ray.start_timeout_s)
        try:
            exit_code = _run_on(cluster, devices, run, job, stopping)
        except HostLostError:
            if cluster.is_own:  # they go with the cluster
                _keep_logs(own.path, job.log_dir / "ray")
            raise
    if cluster.is_stuck:
        _end_process(exit_code)
    return exit_code


def _end_process(exit_code: int) -> None:
    """A thread of Ray's that is in C++ while the interpreter shuts down crashes the process, and its code is lost."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@dataclass(frozen=True)
class _Devices:
    has_gpus: bool  # ranks have one each
    of_engine: int  # GPUs of an engine on one machine; 0 on a CPU
    of_server: int = 0  # of a server of the reward model


def _devices(job: RayJob, cluster: Cluster) -> _Devices:
    kind = job.trainer.device
    has_gpus = kind == "cuda" or (kind == "auto" and cluster.has_gpus)
    if not has_gpus or not job.has_engines:
        return _Devices(has_gpus, 0)
    of_server = gpus_per_server(job.served) if job.served is not None else 0
    return _Devices(has_gpus, gpus_of_part(job.rollout), of_server)


def _bundles(job: RayJob, devices: _Devices, driver_address: str) -> list[Bundle]:
    """The machines' shares of the ranks, then the engines', then those of the rewards. Where weights go through memory
    of the driver's machine (transport tensor, the bundled engine), the engines and the ranks that send are on it."""
    ranks = list(rank_bundles(job.trainer, job.ray, job.rollout, devices.has_gpus))
    if not job.has_engines:
        return ranks
    engines = engine_bundles(job.rollout, job.ray, devices.has_gpus, devices.of_engine)
    rewards = _of_rewards(job, devices)
    if not must_share_machine(job.rollout):
        return [*ranks, *engines, *rewards]
    return (
        [replace(b, machine=driver_address) for b in ranks[:1]]
        + ranks[1:]
        + [replace(b, machine=driver_address) for b in engines]
        + rewards
    )


def _of_rewards(job: RayJob, devices: _Devices) -> list[Bundle]:
    served = None if job.rollout.colocated else job.served
    return [
        *server_bundles(served.num_servers if served is not None else 0, job.ray, devices.of_server),
        *reward_bundles(job.ray),
    ]


def _run_on(
    cluster: Cluster,
    devices: _Devices,
    run: Callable[[RoutedGroups, Places], int],
    job: RayJob,
    stopping: ControllerStop,
) -> int:
    from rlhf_megatron.runtime.ray.engines import RayEngines

    given = channel.given_secret(os.environ)
    os.environ.pop(channel.SECRET_ENV, None)
    secret = given or channel.new_secret().encode()
    listener = registration.listen(cluster.address)
    store = BoundStore(cluster.address, 0, is_master=True, wait_for_workers=False)
    order = _order(cluster.address, listener.getsockname()[1], store.port, devices, job)
    tasks = _start_ranks(cluster, devices, job, order, secret)

    def ranks() -> list[Whereabouts]:
        return [task.process.whereabouts(job.deadlines.startup_s) for task in tasks]

    engines = RayEngines(
        cluster,
        job.rollout,
        job.trainer.nnodes,
        job.ray.num_cpus_per_engine,
        devices.of_engine,
        ranks,
        ray_environment.of_engines(os.environ),
        b"" if job.keeps_routes else secret,
    )
    is_shared, num_cpus = job.rollout.colocated, job.ray.num_cpus_per_engine
    servers = RayEngines(
        cluster,
        job.rollout,
        job.trainer.nnodes,
        0 if is_shared else num_cpus,  # no more than one of those that take turns works
        devices.of_server,
        ranks,
        ray_environment.of_engines(os.environ),
        b"",
        first_bundle=len(_bundles(job, devices, "")) - len(_of_rewards(job, devices)),
    )
    return control(
        lambda group: run(group, Places(engines, servers, _reward_workers(cluster, job))),
        listener,
        secret,
        job.pools,
        job.deadlines,
        stopping,
        find_lost=lambda: _lost(tasks),
    )


def _order(address: str, control_port: int, store_port: int, devices: _Devices, job: RayJob) -> RankOrder:
    """The order for the first rank; those of the others differ in their place."""
    plan = os.environ.get(faults.PLAN_ENV)
    return RankOrder(
        place=RankPlace(0, job.pools[0]),
        directory=os.getcwd(),
        address=address,
        control_port=control_port,
        store_port=store_port,
        log_dir=job.log_dir.absolute(),
        deadlines=job.deadlines,
        backend=GPU_BACKEND if devices.has_gpus else "gloo",
        build_roles=job.build_roles,
        faults=None if plan is None else (plan, Path(os.environ[faults.DIRECTORY_ENV])),
    )


def _reward_workers(cluster: Cluster, job: RayJob) -> MakePool:
    ray = job.ray
    if ray.reward_actors == 0:
        return WorkerPool

    def begin(index: int) -> RemoteObject:
        return cluster.start(
            f"rewards{index}",
            Part,
            (os.getcwd(),),
            bundle=index - ray.reward_actors,
            num_cpus=ray.num_cpus_per_reward_actor,
            environment=ray_environment.of_engines(os.environ),
        )

    return partial(RayWorkers, begin, ray.reward_actors)


def _start_ranks(cluster: Cluster, devices: _Devices, job: RayJob, order: RankOrder, secret: bytes) -> list[Task]:
    """Start the ranks and return their tasks, by rank. Each task lasts until the run ends."""
    environment = ray_environment.of_ranks(
        os.environ,
        job.trainer,
        job.ray,
        job.megatrons,
        is_one_machine=cluster.is_own,
        uses_gpus=devices.has_gpus,
        kinds=cluster.accelerators(),
    )
    tasks = []
    for rank in range(job.pools[-1].end):
        place = RankPlace(rank, pool_of_rank(job.pools, rank))
        process = cluster.start(
            place.where,
            RankProcess,
            bundle=rank // job.trainer.n_gpus_per_node,
            num_cpus=job.ray.num_cpus_per_rank,
            num_gpus=1 if devices.has_gpus else 0,
            environment=environment,
        )
        tasks.append(process.submit("serve", replace(order, place=place), secret))
    return tasks


def _keep_logs(directory: Path, kept: Path) -> None:
    """Copy the logs of Ray's servers and processes to those of the ranks."""
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(directory / "session_latest" / "logs", kept, dirs_exist_ok=True)


def _lost(tasks: Sequence[Task]) -> HostError | None:
    """A rank that ended before all had registered, with what Ray knows of it."""
    for task in tasks:
        if task.is_done:
            where = task.process.name
            try:
                task.result(1.0)
            except Exception as error:  # whatever ended it
                return HostLostError(f"{where} did not start: {type(error).__name__}: {error}")
            return HostLostError(f"{where} has ended before all ranks had come; see its log.")
    return None
