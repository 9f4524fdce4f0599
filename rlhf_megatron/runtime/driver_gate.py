"""Drivers on machines with engines: a gate there starts one for each connection that the
controller makes to it.

The answers of these engines are read on their machine, and cross the network as columns, a third of
their bytes. A gate lives in the keeper of the machine's engines and shares its address with
theirs (`EngineAddress.drivers`).
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time

from rlhf_megatron.rollout.drivers import driver_pool
from rlhf_megatron.runtime import message_channel
from rlhf_megatron.runtime.channel_listener import ChannelListener
from rlhf_megatron.runtime.message_channel import open_listener

logger = logging.getLogger(__name__)

_GREET_S = 10.0


class DriverGate:
    """A thread that starts a driver on this machine for each connection of the controller."""

    def __init__(self, machine_address: str, secret: bytes) -> None:
        """Listen on a free port of `machine_address`, the address at which the controller reaches
        this machine, and accept connections in a thread.
        """
        listener = open_listener(machine_address)
        self._lock = threading.Lock()
        self._drivers: dict[int, subprocess.Popen[bytes]] = {}
        self.address = f"{machine_address}:{listener.getsockname()[1]}"
        gate = ChannelListener(listener, secret, _GREET_S, self._serve_controller)
        threading.Thread(target=gate.accept_until_closed, name="driver-gate", daemon=True).start()

    def _serve_controller(
        self, channel: message_channel.MessageChannel, connection: socket.socket, address: str
    ) -> None:
        """Start the driver that the controller asks for on its connection, of which this process
        keeps no copy.
        """
        with connection:
            try:
                driver_number = channel.receive(time.monotonic() + _GREET_S)
                self._start_driver(connection, driver_number)
            except (OSError, EOFError) as error:  # the controller has ended
                logger.warning("no driver was started for %s: %s", address, error)

    def _start_driver(self, connection: socket.socket, driver_number: int) -> None:
        """Start the driver process of this number on the connection, and kill the former driver of
        the number.
        """
        with self._lock:
            if (former := self._drivers.get(driver_number)) is not None:  # it may hang
                former.kill()
                former.wait()
            driver = driver_pool.start_driver_process(connection, driver_number)
            self._drivers[driver_number] = driver
        logger.info("driver%d is process %d", driver_number, driver.pid)


def enable_remote_drivers(secret: bytes) -> None:
    """Let the controller, which is this process, start drivers on the machines of its engines."""

    def connect_to_gate(gate_address: str, driver_number: int) -> socket.socket:
        """Connect to a machine's gate, ask for the driver of this number, and return the
        non-blocking socket on which that driver listens.
        """
        host, _, port = gate_address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_GREET_S)
        message_channel.open_channel(connection, secret, _GREET_S).send(driver_number)
        connection.setblocking(False)
        return connection

    driver_pool.connect_through_gate = connect_to_gate
