"""Routes by handle: which experts tokens met stays on the machine of the engine that wrote it, up to 960 bytes a token.

A process beside the engines of a machine hands out the tokens and layers that a rank asks for, over connections with
the handshake and the messages of the control channel, which are there under every launcher; no byte passes the
controller. The files are ordinary ones: the kernel keeps them in memory and writes them to disk when it needs the room.
A store that is started again on its machine has the same port, so that handles in a journal still lead to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
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

from rlhf_megatron.data import codec, routes
from rlhf_megatron.data.routes import Held, Ids, Selected
from rlhf_megatron.runtime import channel
from rlhf_megatron.runtime.processes import die_with_parent
from rlhf_megatron.runtime.registration import listen

logger = logging.getLogger(__name__)

MODULE = "rlhf_megatron.runtime.route_store"
CONNECT_S = 30.0
ANSWER_S = 300.0  # after which a store counts as gone
HELD_S = 30.0  # the same of HELD, which the controller asks in each step
HELD = "held"  # a message; the answer is a `routes.Held`


@codec.register
@dataclass(frozen=True)
class RoutesWanted:
    """Tokens of a file, and by the number of layers that it may have the layers."""

    name: str
    positions: Tensor
    num_layers: tuple[int, ...]
    layers: tuple[Tensor, ...]
    top_k: int


@codec.register
@dataclass(frozen=True)
class RoutesFound:
    """The answer to `RoutesWanted`. `problem`: why there is none."""

    num_tokens: int
    ids: Tensor
    problem: str = ""


@codec.register
@dataclass(frozen=True)
class FilesNamed:
    """Files to look for, or to remove. The answer is a bool: whether all were there."""

    names: tuple[str, ...]
    is_removal: bool
    are_trained: bool = False


# ---- in ranks, the controller and keepers ----


class Stores:
    """Connections of this process to the stores of machines; see `data.routes.Elsewhere`. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self._lock = threading.Lock()
        self._channels: dict[str, channel.Channel] = {}
        self._lost: dict[str, bool] = {}  # stores that did not answer: whether to ask again takes no time

    def select(self, address: str, name: str, positions: Ids, layers_of: Mapping[int, Ids], top_k: int) -> Selected:
        """Raises ValueError where the store does not answer, or has no such file."""
        layers = tuple(torch.from_numpy(wanted) for wanted in layers_of.values())
        wanted = RoutesWanted(name, torch.from_numpy(positions.astype("int32")), tuple(layers_of), layers, top_k)
        try:
            found = self._ask(address, wanted)
        except OSError as error:
            raise ValueError(
                f"the store at {address} does not hand out {name} ({error}): its machine or process is gone, or hangs."
                " The same command goes on from the last checkpoint, and generates again what is lost."
            ) from error
        assert isinstance(found, RoutesFound)
        if found.problem:
            raise ValueError(f"the store at {address}: {found.problem}")
        return Selected(found.num_tokens, found.ids.numpy(), num_fetched=found.ids.nbytes)

    def are_there(self, address: str, names: Sequence[str]) -> bool:
        if not self._lost.get(address, True):
            return False
        try:
            return bool(self._ask(address, FilesNamed(tuple(names), is_removal=False)))
        except OSError as error:
            if address not in self._lost:
                logger.warning("the store at %s does not answer (%s): what it has counts as lost", address, error)
            self._lost[address] = isinstance(error, ConnectionRefusedError)
            return False

    def remove(self, address: str, names: Sequence[str], are_trained: bool) -> None:
        with contextlib.suppress(OSError):  # its machine is gone, and they with it
            self._ask(address, FilesNamed(tuple(names), is_removal=True, are_trained=are_trained))

    def held(self, address: str) -> Held:
        try:
            found = self._ask(address, HELD)
        except OSError:  # its machine is gone, and what it had with it, or its process hangs
            return Held()
        assert isinstance(found, Held)
        return found

    def _ask(self, address: str, message: object) -> object:
        """Raises OSError, also where no answer comes in time."""
        with self._lock:
            known = self._channels.get(address)
            if known is not None:
                try:
                    return self._exchange(known, message)
                except (OSError, EOFError):  # it was started again
                    pass
            host, _, port = address.rpartition(":")
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
            self._channels[address] = channel.connect(connected, self.secret, CONNECT_S)
            try:
                return self._exchange(self._channels[address], message)
            except EOFError as error:
                raise ConnectionError(str(error)) from error

    @staticmethod
    def _exchange(connection: channel.Channel, message: object) -> object:
        """What fails ends the connection: a late answer must not be taken for that to the next message."""
        try:
            connection.send(message)
            return connection.receive(time.monotonic() + (HELD_S if message == HELD else ANSWER_S))
        except (OSError, EOFError):
            connection.close()
            raise


def reach_stores(secret: bytes) -> None:
    """Let this process of a run read handles of other machines."""
    routes.elsewhere = Stores(secret)


def run_secret() -> bytes:
    """Return the secret that `reach_stores` was given."""
    assert isinstance(routes.elsewhere, Stores), "this process is of no run"
    return routes.elsewhere.secret


def serve_routes(run_dir: Path, host: str) -> RouteStore:
    """Start the store of this machine, after `reach_stores`."""
    return RouteStore((run_dir / "routes").absolute(), host, run_secret())


# ---- on a machine with engines ----


class RouteStore:
    """The store of this machine, as a child of this process. It ends with it, or with `close`."""

    def __init__(self, directory: Path, host: str, secret: bytes) -> None:
        """`host`: the address of this machine, as others reach it. Processes that this one starts, and itself, write
        handles of the store from now on."""
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", MODULE, str(directory), host, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(secret + b"\n")
        self._process.stdin.flush()
        address = self._process.stdout.readline().decode().strip()
        if not address:
            raise OSError(f"the store of routes in {directory} could not be started; its message is above.")
        self.address = os.environ[routes.STORE_ENV] = address

    def close(self) -> None:
        """Safe to call twice. The files stay."""
        os.environ.pop(routes.STORE_ENV, None)
        self._process.kill()
        self._process.wait()


class _Files:
    """The files of one directory, and those of them that a former process has left and nobody has asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._left = {str(path) for path in directory.glob("*.npy")}

    def answer(self, message: object) -> object:
        if isinstance(message, RoutesWanted):
            return self._selected(message)
        if message == HELD:
            return routes.held(self._directory)
        assert isinstance(message, FilesNamed), f"a store does not answer {type(message).__name__}"
        names = [self._own(name) for name in message.names]
        if not message.is_removal:
            with self._lock:
                self._left -= set(names)
            return routes.are_there(names)
        with self._lock:
            left, self._left = (self._left, set()) if message.are_trained else (set(), self._left)
        routes.remove_routes([*names, *left])
        return True

    def _selected(self, wanted: RoutesWanted) -> RoutesFound:
        layers_of = {n: layers.numpy() for n, layers in zip(wanted.num_layers, wanted.layers, strict=True)}
        try:
            found = routes.select_routes(self._own(wanted.name), wanted.positions.numpy(), layers_of, wanted.top_k)
        except (ValueError, OSError) as error:
            return RoutesFound(0, torch.empty(0), str(error))
        return RoutesFound(found.num_tokens, torch.from_numpy(found.ids))

    def _own(self, name: str) -> str:
        """Return the path of a file of this directory, whatever folders `name` has: nothing else is read or removed."""
        return str(self._directory / Path(name).name)


def _listener(port_file: Path, host: str) -> socket.socket:
    """Listen on the port that the former store of this machine had, where that is free, else on another."""
    with contextlib.suppress(OSError, ValueError):
        port = int(port_file.read_text())
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    return listen(host)


def main(directory: Path, host: str, parent: int) -> None:
    """Serve until the process that started this one ends."""
    die_with_parent(9, parent)
    secret = sys.stdin.buffer.readline().strip()
    port_file = directory.parent / f"{directory.name}.{host}.port"
    listener, files = _listener(port_file, host), _Files(directory)
    port = listener.getsockname()[1]
    port_file.write_text(str(port))
    sys.stdout.write(f"[{host}]:{port}\n" if ":" in host else f"{host}:{port}\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, secret, files), daemon=True).start()


def _serve(connection: socket.socket, secret: bytes, files: _Files) -> None:
    with contextlib.suppress(OSError, EOFError):  # who asks has ended, or does not hold the secret
        asked = channel.accept(connection, secret, CONNECT_S)
        while True:
            asked.send(files.answer(asked.receive()))
    connection.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
