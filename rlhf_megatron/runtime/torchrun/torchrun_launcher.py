"""The torchrun launcher: every rank is a host, and rank 0 starts the controller beside itself.

    torchrun agent --- host 0 --- controller        A process ends when its parent does.
                   |-- host 1                       Control channel: controller <-> every host.
                   `-- host 2 ...                   Rendezvous store: in the agent of node 0;
                                                    addresses and exit codes.

The first ranks are the actor's pool; the critic's, where it has one, are the last
(`runtime.rank_pools`). Each pool is a torch world of its own, and one ends with the other.

When the controller exits with code c, so does every host. When a host dies the controller says
which and exits; then the other hosts leave. The secret of the control channel comes from the
environment or a file (`runtime.message_channel`); without either it is drawn here and passed
through the rendezvous store, which torch does not authenticate: run several nodes on a private
network. What a signal does: `runtime.stop_signals`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.runtime import message_channel
from rlhf_megatron.runtime.host_control import RunDeadlines, run_with_hosts
from rlhf_megatron.runtime.process_control import (
    AGENT_ENV,
    handle_signals_in_thread,
    read_machine_id,
)
from rlhf_megatron.runtime.rank_pools import PoolSpec, find_pool_of_rank
from rlhf_megatron.runtime.rank_process import JobRank, run_rank_process
from rlhf_megatron.runtime.role_host import BuildRoles
from rlhf_megatron.runtime.routed_worker_group import RoutedWorkerGroup
from rlhf_megatron.runtime.stop_signals import (
    SIGNALS,
    STOP_LIMIT_ENV,
    ControllerStopHandler,
    HostStopHandler,
)
from rlhf_megatron.runtime.torchrun import forked_ranks
from rlhf_megatron.runtime.torchrun.agent_arguments import format_stop_limit, make_agent_arguments
from rlhf_megatron.runtime.torchrun.control_store import (
    ADDRESS_KEY,
    EXIT_CODE_KEY,
    EXIT_CODE_POLL_S,
    RANK_0_KEY,
    SECRET_KEY,
    make_exit_code_waiter,
    open_rendezvous_store,
    wait_for_keepers,
)
from rlhf_megatron.stop import StopRequest

logger = logging.getLogger(__name__)

OTHERS_FOUND_S = 60.0  # more than an agent takes to find out that another node has ended
_LISTENER_ENV = "RLHF_MEGATRON_CONTROL_FD"
_PARENT_ENV = "RLHF_MEGATRON_CONTROL_PARENT"
_SETTINGS = "control/settings"  # key in the store
_RANK_ENV = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ROLE_",
    "GROUP_",
)


def launch_single_node(
    arguments: Sequence[str],
    num_processes: int,
    module: str = "rlhf_megatron",
    stop_s: float = RunDeadlines.stop_s,
) -> NoReturn:
    """Replace this process by torchrun's agent, which runs `python -m module arguments` on
    `num_processes` ranks of this machine. Does not return. `stop_s` is the time that the run may
    take to stop.
    """
    environment = make_import_environment(os.environ)
    environment[STOP_LIMIT_ENV] = format_stop_limit(stop_s)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    command = [sys.executable, "-m", "rlhf_megatron.runtime.torchrun.agent"]
    command += make_agent_arguments(num_processes, module, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the agent takes them
    os.execve(sys.executable, command, environment)


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_torchrun_host(
    build_roles: BuildRoles,
    pools: Sequence[PoolSpec],
    controller_arguments: Sequence[str],
    log_dir: Path,
    deadlines: RunDeadlines,
    backend: str = "gloo",
    setting_lines: Sequence[str] = (),
    controller_descriptors: Sequence[int] = (),
    keeper_machines: Sequence[int] = (),
) -> int:
    """Run as a rank under torchrun, in the pool of the rank, until the run ends. Return the exit
    code of the controller. Call it before CUDA is used.

    Rank 0 starts the controller as `python controller_arguments`; that program calls
    `run_torchrun_controller`. From then on this process writes to log_dir/rank<N>.log. `backend` is
    that of the pool's process group. `setting_lines` are "key: value" lines that must be the same
    on all ranks. `controller_descriptors` are open files that the controller inherits.
    `keeper_machines` are the machines with engines, without the controller's; the first rank of
    such a machine starts its keeper, with the controller's arguments.

    Raise ValueError when torchrun's number of ranks is not that of `pools`, ConfigError when
    settings differ.
    """
    _check_num_ranks(pools)
    rank = int(os.environ["RANK"])
    agent = os.environ.pop(AGENT_ENV, None)  # another launcher has none
    end_with_parent(
        signal.SIGTERM if rank == 0 else signal.SIGKILL, None if agent is None else int(agent)
    )
    store = open_rendezvous_store("control", deadlines.startup_s)
    _check_same_settings(store, rank, setting_lines)
    secret = message_channel.read_secret(os.environ)
    os.environ.pop(message_channel.SECRET_ENV, None)
    if rank == 0:
        is_alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1" and not keeper_machines
        process, exit_code = _start_controller(
            store, secret, controller_arguments, controller_descriptors, is_alone
        )
        stopping = HostStopHandler(deadlines.stop_s, process)
    else:
        exit_code = make_exit_code_waiter(store)
        stopping = HostStopHandler(deadlines.stop_s)
    handle_signals_in_thread(SIGNALS, stopping.handle_signal)
    place = JobRank(rank, find_pool_of_rank(pools, rank))
    # rank 0 has made the run directory when this is set
    controller = store.get(ADDRESS_KEY).decode()
    secret = secret or bytes(store.get(SECRET_KEY))
    _start_machine_keeper(keeper_machines, controller, secret, controller_arguments)
    host, _, port = controller.rpartition(":")
    is_served = run_rank_process(
        place,
        (host, int(port)),
        secret,
        build_roles,
        lambda: open_rendezvous_store(f"pool/{place.pool.name}", deadlines.startup_s),
        log_dir,
        deadlines,
        backend,
        stopping,
        exit_code,
    )
    code = exit_code() if is_served else 1
    if rank == 0:
        wait_for_keepers(
            store, [m for m in keeper_machines if m >= int(os.environ.get("GROUP_WORLD_SIZE", "1"))]
        )
    return code


def _check_num_ranks(pools: Sequence[PoolSpec]) -> None:
    """Raise ValueError where torchrun's number of ranks is not the number that the pools need."""
    if (world_size := int(os.environ["WORLD_SIZE"])) != pools[-1].end_rank:
        raise ValueError(
            f"torchrun started {world_size} ranks, but {' and '.join(map(str, pools))} need"
            f" {pools[-1].end_rank}; change NNODES x NPROC_PER_NODE, or trainer.nnodes"
            " x trainer.n_gpus_per_node."
        )


def _start_machine_keeper(
    machines: Sequence[int], controller_address: str, secret: bytes, arguments: Sequence[str]
) -> None:
    """Start the keeper of this machine, if it is in `machines` and this is its first rank."""
    machine = int(os.environ.get("GROUP_RANK", "0"))
    if machine in machines and os.environ["LOCAL_RANK"] == "0":
        from rlhf_megatron.runtime.torchrun.machine_keeper import start_keeper_process

        start_keeper_process(
            machine, controller_address, secret, arguments, _make_environment_without_rank()
        )


def run_torchrun_controller(
    run_job: Callable[[RoutedWorkerGroup], int],
    pools: Sequence[PoolSpec],
    deadlines: RunDeadlines,
    stop_request: StopRequest | None = None,
) -> int:
    """Run as the controller that `run_torchrun_host` started: wait for the hosts, call `run_job`
    with them, end the hosts. Return the exit code that `run_job` returns. Must be called on the
    main thread.

    A signal, to this process or to a host, becomes `stop_request`, which `run_job` must look at.
    Raise the exceptions that `run_job` raises; HostError for failures on hosts, which is a
    ValueError too where a user can fix it; SystemExit(128 + n) for a signal without `stop_request`
    or before `run_job` has begun, for a second signal, and when `run_job` does not end in time.
    """
    secret = message_channel.read_secret(os.environ)
    assert secret is not None, "the host that started this process gave it the secret"
    os.environ.pop(message_channel.SECRET_ENV)
    listener = socket.socket(fileno=int(os.environ.pop(_LISTENER_ENV)))
    parent = int(os.environ.pop(_PARENT_ENV))
    stopping = ControllerStopHandler(stop_request or StopRequest(), deadlines.stop_s, parent)
    with stopping.install_handlers():
        end_with_parent(signal.SIGTERM, parent)
        return run_with_hosts(
            run_job,
            listener,
            secret,
            pools,
            deadlines,
            stopping,
            is_stoppable=stop_request is not None,
        )


def _make_environment_without_rank() -> dict[str, str]:
    """Return the environment of this rank without torchrun's variables, for a process that is no
    rank.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*_RANK_ENV, "TORCHELASTIC_"))
    }


def _check_same_settings(store: dist.Store, rank: int, setting_lines: Sequence[str]) -> None:
    """Publish the setting lines on rank 0; on another rank raise ConfigError where its lines differ
    from rank 0's. Nodes read their own files, which may differ.
    """
    if rank == 0:
        store.set(_SETTINGS, "\0".join(setting_lines))
        return
    if not setting_lines:
        return
    try:
        theirs = bytes(store.get(_SETTINGS)).decode().split("\0")
    except (
        dist.DistNetworkError
    ):  # node 0 has ended; this node's agent finds that out, ends this rank and says so
        time.sleep(OTHERS_FOUND_S)
        raise SystemExit(1) from None
    pairs = itertools.zip_longest(setting_lines, theirs, fillvalue="nothing")
    different = [f"{ours} here, but {other} on rank 0" for ours, other in pairs if ours != other]
    if different:
        raise ConfigError(
            [f"{line}; start all nodes with the same files and arguments." for line in different]
        )


def _start_controller(
    store: dist.Store,
    secret: bytes | None,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    is_single_node: bool,
) -> tuple[subprocess.Popen[bytes], Callable[[], int]]:
    """Start the controller process and publish its address in the store, and the secret where none
    was given. Return the process, and a function that waits for its exit code.
    """
    address = "127.0.0.1" if is_single_node else os.environ["MASTER_ADDR"]
    listener = message_channel.open_listener(address)
    if secret is None:
        secret = message_channel.generate_secret().encode()
        store.set(SECRET_KEY, secret.decode())
    environment = make_import_environment(_make_environment_without_rank())
    environment[message_channel.SECRET_ENV] = secret.decode()
    environment[_LISTENER_ENV] = str(listener.fileno())
    environment[_PARENT_ENV] = str(os.getpid())
    passed = [listener.fileno(), *descriptors]
    if forked_ranks.is_forked_rank():
        live = partial(forked_ranks.run_as_program, arguments, environment)
        process: subprocess.Popen[bytes] = forked_ranks.ForkedProcess("controller", live, passed)
    else:
        process = subprocess.Popen([sys.executable, *arguments], env=environment, pass_fds=passed)
    port = listener.getsockname()[1]
    listener.close()

    published: Future[int] = Future()

    def publish_exit_code() -> None:
        """Wait for the controller's end, in a thread, and publish its exit code in the store and
        the future.
        """
        code = process.wait()
        code = 128 - code if code < 0 else code
        with contextlib.suppress(RuntimeError):  # the store is gone: so are the others
            store.set(EXIT_CODE_KEY, str(code))
        # torchrun ends all ranks, and the store, as soon as this one has failed
        if code != 0 and not is_single_node:
            time.sleep(5 * EXIT_CODE_POLL_S)
        published.set_result(code)

    threading.Thread(target=publish_exit_code, name="controller", daemon=True).start()
    store.set(RANK_0_KEY, f"{read_machine_id()} {os.getpid()}")
    store.set(ADDRESS_KEY, f"{address}:{port}")
    return process, published.result
