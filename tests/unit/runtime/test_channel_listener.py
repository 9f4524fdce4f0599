"""Peers without the secret hold up nobody: idle connections, too many of them, and no file
descriptor left.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron.runtime.channel_listener import ChannelListener
from rlhf_megatron.runtime.driver_gate import DriverGate
from rlhf_megatron.runtime.message_channel import MessageChannel, open_channel, open_listener
from rlhf_megatron.runtime.route_store import HELD

SECRET = b"s" * 64
HANDSHAKE_S = 20.0


def answer_twice(channel: MessageChannel, connection: socket.socket, address: str) -> None:
    """Answer each number with its double until the peer ends."""
    try:
        while True:
            channel.send(2 * channel.receive())
    except EOFError:
        channel.close()


@pytest.fixture
def listening_port() -> Iterator[int]:
    listener = open_listener("127.0.0.1")
    greeter = ChannelListener(listener, SECRET, HANDSHAKE_S, answer_twice, max_greetings=4)
    thread = threading.Thread(target=greeter.accept_until_closed)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10.0)
    assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANDSHAKE_S)


def ask(port: int, number: int) -> int:
    channel = open_channel(connect(port), SECRET, HANDSHAKE_S)
    channel.send(number)
    answer = channel.receive(time.monotonic() + HANDSHAKE_S)
    channel.close()
    return int(answer)


def test_idle_peers_hold_up_nobody(listening_port: int) -> None:
    """More of them than are greeted at once, long before the deadline of a handshake."""
    idle = [connect(listening_port) for _ in range(20)]
    start = time.monotonic()
    assert ask(listening_port, 21) == 42
    assert time.monotonic() - start < HANDSHAKE_S / 4
    # the oldest were sent away, the newest four wait on
    for connection in idle[:-4]:
        assert connection.recv(1) == b""
    for connection in idle:
        connection.close()


def test_peers_of_the_run_stay(listening_port: int) -> None:
    """Many of them at a time: what was authenticated does not count as being greeted."""
    channels = [open_channel(connect(listening_port), SECRET, HANDSHAKE_S) for _ in range(12)]
    strangers = [connect(listening_port) for _ in range(8)]
    for number, channel in enumerate(channels):
        channel.send(number)
    assert [one.receive(time.monotonic() + HANDSHAKE_S) for one in channels] == [
        2 * number for number in range(12)
    ]
    for one in (*channels, *strangers):
        one.close()


def test_a_wrong_secret_is_sent_away(listening_port: int) -> None:
    with pytest.raises(ConnectionError):
        open_channel(connect(listening_port), b"x" * 64, HANDSHAKE_S)
    assert ask(listening_port, 1) == 2


FEW_FILES = """
import resource, socket, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from rlhf_megatron.runtime.channel_listener import ChannelListener
from rlhf_megatron.runtime.message_channel import open_listener

def answer(channel, connection, address):
    channel.send(2 * channel.receive())
    channel.close()

listener = open_listener("127.0.0.1")
print(listener.getsockname()[1], flush=True)
ChannelListener(listener, b"s" * 64, 20.0, answer).accept_until_closed()
"""


def test_no_file_descriptor_left(tmp_path: Path) -> None:
    """The process goes on, and a peer of the run comes in."""
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_FILES], stdout=subprocess.PIPE, cwd=tmp_path, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        idle = [connect(port) for _ in range(100)]
        assert ask(port, 4) == 8
        assert process.poll() is None
        for connection in idle:
            connection.close()
    finally:
        process.kill()
        process.wait()


def test_a_route_store_without_file_descriptors_goes_on(tmp_path: Path) -> None:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    process = subprocess.Popen(
        [
            sys.executable,
            *("-m", "rlhf_megatron.runtime.route_store"),
            *(str(tmp_path), "127.0.0.1", str(os.getpid())),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=limit_files,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(SECRET + b"\n")
        process.stdin.flush()
        port = int(process.stdout.readline().decode().rpartition(":")[2])
        idle = [connect(port) for _ in range(120)]
        channel = open_channel(connect(port), SECRET, HANDSHAKE_S)
        channel.send(HELD)
        assert channel.receive(time.monotonic() + HANDSHAKE_S) is not None
        assert process.poll() is None
        for connection in idle:
            connection.close()
    finally:
        process.kill()
        process.wait()


def test_idle_connections_do_not_stop_the_gate_of_drivers() -> None:
    gate = DriverGate("127.0.0.1", SECRET)
    port = int(gate.address.rpartition(":")[2])
    idle = [connect(port) for _ in range(3)]
    start = time.monotonic()
    channel = open_channel(connect(port), SECRET, HANDSHAKE_S)
    assert time.monotonic() - start < 5.0
    channel.close()
    for connection in idle:
        connection.close()
