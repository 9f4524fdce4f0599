"""A Ray cluster as this package uses it: places for processes, objects in them, and an end that
leaves nothing behind.

The only file that imports ray. Ray places and supervises processes; calls of a run go over the
control channel (`runtime.remote_worker_group`), weights over transports, and neither through Ray's
object store. What a process holds is a plain class, so nothing else in the package knows that it
runs under Ray. `ray_environment.set_ray_defaults` must come before the import of this module.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import services, worker
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_megatron.runtime.process_control import ChildProcess, find_children, read_machine_id
from rlhf_megatron.runtime.ray.ray_environment import find_visible_device_index
from rlhf_megatron.runtime.ray.ray_placement import ResourceBundle, describe_shortage
from rlhf_megatron.runtime.server_keepers import LateAnswerError, RemoteProcessLostError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray's least; only calls go through it
GROWS_S = 10.0  # for a cluster of this machine to count what it has
CLOSE_S = 10.0
POLL_S = 0.1
KNOCK_S = 10.0
GPU = "GPU"


@dataclass(frozen=True)
class ProcessLocation:
    """The place in the cluster where a process runs."""

    address: str  # of its machine, as the cluster reaches it
    machine: str  # as `process_control.read_machine_id`
    pid: int
    devices: tuple[str, ...]  # that Ray gave it, as CUDA_VISIBLE_DEVICES names them


def locate_process() -> ProcessLocation:
    """Return the machine, the process number and the devices of this process, which must be part of
    a Ray cluster.
    """
    devices = ray.get_runtime_context().get_accelerator_ids().get(GPU, [])
    return ProcessLocation(
        ray.util.get_node_ip_address(), read_machine_id(), os.getpid(), tuple(map(str, devices))
    )


class _ObjectActor:
    """An actor: one object of a plain class. Its calls run on the main thread,
    one after the other.
    """

    def __init__(self, make_object: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Set LOCAL_RANK to the index of the device that Ray gave this process, where Ray gave one,
        and make the object.
        """
        if devices := locate_process().devices:
            os.environ["LOCAL_RANK"] = str(
                find_visible_device_index(devices[0], os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            )
        self._object = make_object(*arguments)

    def whereabouts(self) -> ProcessLocation:
        """Return the place where the actor's process runs."""
        return locate_process()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call the object's method and return its result."""
        return getattr(self._object, method)(*arguments)


class RayObject:
    """An object in a process of its own, somewhere in the cluster. Thread-safe."""

    def __init__(self, name: str, actor: Any) -> None:
        """Take over a Ray actor that was started, and ask it where it runs."""
        self.name = name
        self._actor = actor
        self._location_reference = actor.whereabouts.remote()  # before a call that lasts

    def wait_for_location(self, timeout_s: float) -> ProcessLocation:
        """Wait until the process runs, and return where it runs. Raise the errors that
        `call_method` raises.
        """
        return self._wait_for_result(self._location_reference, "start", timeout_s)

    def call_method(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the object's method in its process and return the result. Raise the exception that
        the method raises there, RemoteProcessLostError where the process has ended, or
        LateAnswerError after `timeout_s`.
        """
        return self._wait_for_result(self._actor.call.remote(method, arguments), method, timeout_s)

    def submit_call(self, method: str, *arguments: Any) -> RayCall:
        """Make the same call without waiting, and return a handle of the answer."""
        return RayCall(self, method, self._actor.call.remote(method, arguments))

    def kill(self) -> None:
        """Kill the object's process with SIGKILL; the children of that process must end with it.
        Safe to call twice.
        """
        with contextlib.suppress(RayError, ValueError):  # the cluster is gone, and it with it
            ray.kill(self._actor, no_restart=True)

    def _wait_for_result(self, reference: Any, method: str, timeout_s: float) -> Any:
        """Wait for the result of a Ray task, and turn Ray's exceptions into those that
        `call_method` raises.
        """
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise LateAnswerError(
                f"{self.name}: no answer to {method} within {timeout_s:g} s."
            ) from error
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except RayError as error:
            raise RemoteProcessLostError(f"{self.name}: {_join_first_lines(error)}") from error


@dataclass(frozen=True)
class RayCall:
    """A call of a RayObject's method that was made and may not have an answer yet."""

    ray_object: RayObject
    method: str
    reference: Any

    def wait_for_result(self, timeout_s: float) -> Any:
        """Wait for the call's result and return it. Raise the errors that `RayObject.call_method`
        raises.
        """
        return self.ray_object._wait_for_result(self.reference, self.method, timeout_s)

    @property
    def is_done(self) -> bool:
        """Return whether the call has an answer, or has failed because the process ended."""
        return bool(ray.wait([self.reference], timeout=0)[0])


class RayCluster:
    """A connection to a running Ray cluster, or to a cluster of this machine that ends with this
    process. A context manager.

    `address` is HOST:PORT or "auto"; None starts a cluster. `directory` is for the sockets and logs
    of a cluster that is started, and readable by this user only. Signal handlers stay as they were.
    """

    def __init__(
        self, address: str | None, directory: Path, num_cpus: int, has_dashboard: bool = False
    ) -> None:
        """Start a cluster on this machine where `address` is None, else connect to the cluster
        there. Raise ValueError where no cluster answers.
        """
        self.is_own = address is None
        # it was left though it did not answer: threads of Ray still wait for it
        self.is_stuck = False
        self._placement_group: PlacementGroup | None = None
        self._bundles: Sequence[ResourceBundle] = ()
        self._objects: list[RayObject] = []
        with _restore_signal_handlers():
            if address is None:
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=has_dashboard,
                    dashboard_host=LOOPBACK,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(directory),
                )
            else:
                try:
                    _check_cluster_listens(address)
                    ray.init(address=address, log_to_driver=False, configure_logging=False)
                except (
                    OSError,
                    OverflowError,
                    RuntimeError,
                    RayError,
                ) as error:  # of a port; of connection and token
                    raise ValueError(
                        f"ray.address ({address}): no Ray cluster answers there:"
                        f" {_join_first_lines(error)}. Start one (launch/ray_cluster.sh), give"
                        " this shell the cluster's token, or leave ray.address and RAY_ADDRESS out"
                        " for a cluster of this machine."
                    ) from error
        # of this process's machine
        self.address = LOOPBACK if self.is_own else ray.util.get_node_ip_address()
        self._raylet_children = _find_raylet_children() if self.is_own else []

    @property
    def has_gpus(self) -> bool:
        """Return whether any machine of the cluster has a GPU."""
        return ray.cluster_resources().get(GPU, 0) > 0

    def list_machine_resources(self) -> list[dict[str, float]]:
        """Return the total resources of each living machine of the cluster, by Ray's resource
        names.
        """
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def list_accelerator_types(self) -> list[str]:
        """Return the kinds of accelerators in the cluster, sorted, under Ray's names: "H200"."""
        prefix = "accelerator_type:"
        return sorted(
            {
                name.removeprefix(prefix)
                for m in self.list_machine_resources()
                for name in m
                if name.startswith(prefix)
            }
        )

    def reserve_bundles(
        self, bundles: Sequence[ResourceBundle], is_spread: bool, timeout_s: float
    ) -> None:
        """Reserve room for all bundles at once, on different machines where possible if
        `is_spread`, and wait for the room.

        Raise ValueError where there is no room within `timeout_s`; a cluster of this machine does
        not grow, and gets GROWS_S at most. Call it once.
        """
        assert self._placement_group is None, "one reservation a run"
        self._bundles = bundles
        # Ray refuses empty ones
        resources = [bundle.resources or {"CPU": 0.001} for bundle in bundles]
        self._placement_group = placement_group(
            resources, strategy="SPREAD" if is_spread else "PACK"
        )
        limit_s = min(timeout_s, GROWS_S) if self.is_own else timeout_s
        began = time.monotonic()
        deadline = began + limit_s
        is_told = False
        # signals act in between
        while not self._placement_group.wait(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise ValueError(
                    describe_shortage(
                        bundles,
                        self.list_machine_resources(),
                        time.monotonic() - began,
                        self.is_own,
                    )
                )
            if not is_told and time.monotonic() > began + GROWS_S:
                is_told = True
                asked = "; ".join(map(str, bundles))
                logger.warning(
                    "waiting for room in the Ray cluster, up to %g s (ray.start_timeout_s): %s",
                    limit_s,
                    asked,
                )

    def start_object(
        self,
        name: str,
        make_object: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        bundle_index: int,
        num_cpus: float,
        num_gpus: float = 0,
        environment: Mapping[str, str],
    ) -> RayObject:
        """Run `make_object(*arguments)` in a new process in the bundle `bundle_index` of the
        reservation (-1 is the last). Return the object's handle at once.

        Ray takes `num_gpus` GPUs from the bundle and shows them to the process; with 0 the process
        sees the GPUs that `environment` names. Ray pickles `make_object` and `arguments` and keeps
        them: pass secrets by `RayObject.call_method` instead.
        """
        assert self._placement_group is not None, "reserve comes first"
        number = bundle_index % len(self._bundles)
        place = PlacementGroupSchedulingStrategy(
            self._placement_group, placement_group_bundle_index=number
        )
        actor = ray.remote(_ObjectActor).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            scheduling_strategy=place,
            runtime_env={"env_vars": dict(environment)},
        )
        made = RayObject(name, actor.remote(make_object, arguments))
        self._objects.append(made)
        return made

    def close(self) -> None:
        """Kill the processes that were started here, free the reservation and leave the cluster.
        Safe to call twice.

        Takes CLOSE_S at most, since a cluster that has lost one of its servers does not answer any
        more; `is_stuck` is True then.
        """
        if ray.is_initialized():
            self._leave_cluster_in_time()
        # where that was killed its agents would notice it after a minute only
        for child in self._raylet_children:
            child.kill()

    def _leave_cluster_in_time(self) -> None:
        """Leave the cluster in a thread. After CLOSE_S without an end set `is_stuck`, and kill the
        servers of a cluster that this process made.
        """
        leaving = threading.Thread(target=self._leave_cluster, name="leaving Ray", daemon=True)
        with _restore_signal_handlers():
            leaving.start()
            leaving.join(CLOSE_S)
        if leaving.is_alive():
            self.is_stuck = True
            logger.error("the Ray cluster does not answer; left without giving the room back")
            atexit.unregister(ray.shutdown)  # it would wait again
            if self.is_own and (node := worker._global_node) is not None:
                node.kill_all_processes(check_alive=False, allow_graceful=False)

    def _leave_cluster(self) -> None:
        """Kill the processes that were started here, free the reservation, and leave Ray."""
        for made in self._objects:
            made.kill()
        with contextlib.suppress(RayError):
            if self._placement_group is not None:
                remove_placement_group(self._placement_group)
        ray.shutdown()

    def __enter__(self) -> RayCluster:
        """Return the cluster."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the cluster; see `close`."""
        self.close()


def _find_raylet_children() -> list[ChildProcess]:
    """Return the children of the raylet that this process has started: Ray's agents, and idle
    workers.
    """
    node = worker._global_node
    started: list[Any] = [] if node is None else node.all_processes.get("raylet", [])
    return [child for server in started for child in find_children(server.process.pid)]


def _check_cluster_listens(address: str) -> None:
    """Raise OSError where no server listens at the cluster's address. Ray itself would try for
    minutes.
    """
    found = services.canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError("Ray knows of none on this machine")
    host, _, port = found.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S):
        pass


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after the block, if this is the main thread: Ray replaces the
    handler of SIGTERM when it starts.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _join_first_lines(error: BaseException) -> str:
    """Return the first three lines of an error's message in one line, without the page of advice
    that Ray appends.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])
