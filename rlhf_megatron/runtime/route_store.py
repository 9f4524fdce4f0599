"""Routes by handle: which experts tokens met stays on the machine of the engine that wrote it, up
to 960 bytes a token.

A process beside the engines of a machine hands out the tokens and layers that a rank asks for, over
connections with the handshake and the messages of the control channel, which are there under every
launcher; no byte passes the controller. The files are ordinary ones: the kernel keeps them in
memory and writes them to disk when it needs the room. A store that is started again on its machine
has the same port, so that handles in a journal still lead to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.data import codec, expert_route_files
from rlhf_megatron.data.expert_route_files import ExpertIds, RouteStorageUsage, SelectedRoutes
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit
from rlhf_megatron.runtime import message_channel
from rlhf_megatron.runtime.channel_listener import ChannelListener
from rlhf_megatron.runtime.message_channel import open_listener
from rlhf_megatron.write_errors import write_text_file

logger = logging.getLogger(__name__)

MODULE = "rlhf_megatron.runtime.route_store"
CONNECT_S = 30.0
ANSWER_S = 300.0  # after which a store counts as gone
HELD_S = 30.0  # the same of HELD, which the controller asks in each step
HELD = "held"  # a message; the answer is an `expert_route_files.RouteStorageUsage`


@codec.register("RoutesWanted")
@dataclass(frozen=True)
class RouteRequest:
    """A request for the routes of tokens in a file. `layers` has, for each number of layers that
    the file may have (`num_layers`), the layers to take.
    """

    name: str
    positions: Tensor
    num_layers: tuple[int, ...]
    layers: tuple[Tensor, ...]
    top_k: int


@codec.register("RoutesFound")
@dataclass(frozen=True)
class RouteReply:
    """The answer to `RouteRequest`. `problem` says why there are no routes; "" where there are."""

    num_tokens: int
    ids: Tensor
    problem: str = ""


@codec.register("FilesNamed")
@dataclass(frozen=True)
class RouteFilesRequest:
    """Files to look for, or to remove. The answer is a bool: whether all were there."""

    names: tuple[str, ...]
    is_removal: bool
    are_trained: bool = False


# ---- in ranks, the controller and keepers ----


class RouteStoreClient:
    """Connections of this process to the stores of machines; see
    `data.expert_route_files.RemoteRouteStores`. Thread-safe.
    """

    def __init__(self, secret: bytes) -> None:
        """Hold the run's secret; connections are made when they are needed."""
        self.secret = secret
        self._lock = threading.Lock()
        self._channels: dict[str, message_channel.MessageChannel] = {}
        # stores that did not answer: whether to ask again takes no time
        self._lost_stores: dict[str, bool] = {}

    def select_routes(
        self,
        address: str,
        path: str,
        positions: ExpertIds,
        layers_by_count: Mapping[int, ExpertIds],
        top_k: int,
    ) -> SelectedRoutes:
        """Return the routes of these token positions and layers from a file of the store at
        `address`. `layers_by_count` gives the layers to take, by the number of layers that the file
        may have. Raise ValueError where the store does not answer or does not have the file.
        """
        layers = tuple(torch.from_numpy(wanted) for wanted in layers_by_count.values())
        wanted = RouteRequest(
            path, torch.from_numpy(positions.astype("int32")), tuple(layers_by_count), layers, top_k
        )
        try:
            found = self._send_request(address, wanted)
        except OSError as error:
            raise ValueError(
                f"the store at {address} does not hand out {path} ({error}): its machine or"
                " process is gone, or hangs. The same command goes on from the last checkpoint,"
                " and generates again what is lost."
            ) from error
        assert isinstance(found, RouteReply)
        if found.problem:
            raise ValueError(f"the store at {address}: {found.problem}")
        return SelectedRoutes(found.num_tokens, found.ids.numpy(), num_fetched=found.ids.nbytes)

    def has_intact_routes(self, address: str, paths: Sequence[str]) -> bool:
        """Return whether the store at `address` has all files, undamaged. A store that does not
        answer counts as lost, and is not asked again if that took time.
        """
        if not self._lost_stores.get(address, True):
            return False
        try:
            return bool(
                self._send_request(address, RouteFilesRequest(tuple(paths), is_removal=False))
            )
        except OSError as error:
            if address not in self._lost_stores:
                logger.warning(
                    "the store at %s does not answer (%s): what it has counts as lost",
                    address,
                    error,
                )
            self._lost_stores[address] = isinstance(error, ConnectionRefusedError)
            return False

    def remove_route_files(self, address: str, paths: Sequence[str], is_step_trained: bool) -> None:
        """Remove the files at the store. With `is_step_trained` the store also removes files of a
        former process that no one has asked for. A store that does not answer is ignored.
        """
        with contextlib.suppress(OSError):  # its machine is gone, and they with it
            self._send_request(
                address,
                RouteFilesRequest(tuple(paths), is_removal=True, are_trained=is_step_trained),
            )

    def measure_storage(self, address: str) -> RouteStorageUsage:
        """Return the size of the store's files; an empty usage where the store does not answer."""
        try:
            found = self._send_request(address, HELD)
        except OSError:  # its machine is gone, and what it had with it, or its process hangs
            return RouteStorageUsage()
        assert isinstance(found, RouteStorageUsage)
        return found

    def _send_request(self, address: str, message: object) -> object:
        """Send a message to the store at `address` and return its answer. Connect where there is no
        connection, or where the present one fails. Raise OSError, also where no answer comes in
        time.
        """
        with self._lock:
            known = self._channels.get(address)
            if known is not None:
                try:
                    return self._exchange_message(known, message)
                except (OSError, EOFError):  # it was started again
                    pass
            host, _, port = address.rpartition(":")
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
            self._channels[address] = message_channel.open_channel(
                connected, self.secret, CONNECT_S
            )
            try:
                return self._exchange_message(self._channels[address], message)
            except EOFError as error:
                raise ConnectionError(str(error)) from error

    @staticmethod
    def _exchange_message(connection: message_channel.MessageChannel, message: object) -> object:
        """Send a message and return the answer. Close the connection after an error, so that a late
        answer is not taken for the answer to the next message.
        """
        try:
            connection.send(message)
            return connection.receive(time.monotonic() + (HELD_S if message == HELD else ANSWER_S))
        except (OSError, EOFError):
            connection.close()
            raise


def enable_route_stores(secret: bytes) -> None:
    """Let this process of a run read routes from the stores of other machines."""
    expert_route_files.remote_route_stores = RouteStoreClient(secret)


def get_run_secret() -> bytes:
    """Return the secret that `enable_route_stores` was given in this process."""
    assert isinstance(expert_route_files.remote_route_stores, RouteStoreClient), (
        "this process is of no run"
    )
    return expert_route_files.remote_route_stores.secret


def start_route_store(run_dir: Path, machine_address: str) -> RouteStoreProcess:
    """Start the store of this machine for the run's routes and return its process.
    `enable_route_stores` must come first.
    """
    return RouteStoreProcess((run_dir / "routes").absolute(), machine_address, get_run_secret())


# ---- on a machine with engines ----


class RouteStoreProcess:
    """The store of this machine, as a child of this process. It ends with it, or with `close`."""

    def __init__(self, directory: Path, machine_address: str, secret: bytes) -> None:
        """Start the store as a child process and wait until it listens on `machine_address`, at
        which other machines reach this one. Set the address in os.environ, so that this process and
        its later children write handles of the store. Raise OSError where the store does not start.
        """
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", MODULE, str(directory), machine_address, str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_import_environment(os.environ),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(secret + b"\n")
        self._process.stdin.flush()
        address = self._process.stdout.readline().decode().strip()
        if not address:
            raise OSError(
                f"the store of routes in {directory} could not be started; its message is above."
            )
        self.address = os.environ[expert_route_files.STORE_ENV] = address

    def close(self) -> None:
        """Kill the store and remove its address from os.environ. The files stay. Safe to call
        twice.
        """
        os.environ.pop(expert_route_files.STORE_ENV, None)
        self._process.kill()
        self._process.wait()


class _StoredRouteFiles:
    """The route files of one directory. The object remembers which files of a former process no
    client has asked for yet.
    """

    def __init__(self, directory: Path) -> None:
        """Record the files that are in the directory already as not asked for."""
        self._directory = directory
        self._lock = threading.Lock()
        self._unclaimed_paths = {str(path) for path in directory.glob("*.npy")}

    def answer_request(self, message: object) -> object:
        """Return the answer to a client's message: selected routes, the storage used, or for a
        RouteFilesRequest a bool, after the removal of its files if it asks for that.
        """
        if isinstance(message, RouteRequest):
            return self._select_routes(message)
        if message == HELD:
            return expert_route_files.measure_route_storage(self._directory)
        assert isinstance(message, RouteFilesRequest), (
            f"a store does not answer {type(message).__name__}"
        )
        names = [self._resolve_path(name) for name in message.names]
        if not message.is_removal:
            with self._lock:
                self._unclaimed_paths -= set(names)
            return expert_route_files.has_intact_routes(names)
        with self._lock:
            left, self._unclaimed_paths = (
                (self._unclaimed_paths, set())
                if message.are_trained
                else (set(), self._unclaimed_paths)
            )
        expert_route_files.remove_route_files([*names, *left])
        return True

    def _select_routes(self, request: RouteRequest) -> RouteReply:
        """Return the selected routes, or the problem of the file as text."""
        layers_of = {
            n: layers.numpy() for n, layers in zip(request.num_layers, request.layers, strict=True)
        }
        try:
            found = expert_route_files.select_routes(
                self._resolve_path(request.name),
                request.positions.numpy(),
                layers_of,
                request.top_k,
            )
        except (ValueError, OSError) as error:
            return RouteReply(0, torch.empty(0), str(error))
        return RouteReply(found.num_tokens, torch.from_numpy(found.ids))

    def _resolve_path(self, name: str) -> str:
        """Return the path of the file in this directory, without the folders of `name`: no other
        file is read or removed.
        """
        return str(self._directory / Path(name).name)


def _open_store_listener(port_file: Path, machine_address: str) -> socket.socket:
    """Listen on the port in `port_file`, which the former store of this machine had, if the port is
    free, else on another port.
    """
    with contextlib.suppress(OSError, ValueError):
        port = int(port_file.read_text())
        family = socket.getaddrinfo(machine_address, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((machine_address, port), family=family, backlog=1024)
    return open_listener(machine_address)


def main(directory: Path, machine_address: str, parent_pid: int) -> None:
    """Serve the routes in `directory` until the process `parent_pid`, which started this one, ends.
    Read the secret from stdin, and write the store's address to stdout and its port to a file
    beside the directory.
    """
    end_with_parent(signal.SIGKILL, parent_pid)
    secret = sys.stdin.buffer.readline().strip()
    port_file = directory.parent / f"{directory.name}.{machine_address}.port"
    listener = _open_store_listener(port_file, machine_address)
    files = _StoredRouteFiles(directory)
    port = listener.getsockname()[1]
    write_text_file(port_file, str(port))
    sys.stdout.write(
        f"[{machine_address}]:{port}\n" if ":" in machine_address else f"{machine_address}:{port}\n"
    )
    sys.stdout.flush()
    raise_open_file_limit()
    ChannelListener(
        listener, secret, CONNECT_S, lambda channel, _, address: _answer_requests(channel, files)
    ).accept_until_closed()


def _answer_requests(
    channel: message_channel.MessageChannel, route_files: _StoredRouteFiles
) -> None:
    """Answer the requests of a client until the client ends."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            channel.send(route_files.answer_request(channel.receive()))
    channel.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
