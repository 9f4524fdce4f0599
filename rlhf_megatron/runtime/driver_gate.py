"""Drivers on machines with engines: a gate there starts one for each connection that the controller makes to it.

The answers of these engines are read on their machine, and cross the network as columns, a third of their bytes. A gate
lives in the keeper of the machine's engines and shares its address with theirs (`EngineAddress.drivers`).
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time

from rlhf_megatron.rollout.drivers import pool
from rlhf_megatron.runtime import channel
from rlhf_megatron.runtime.registration import listen

logger = logging.getLogger(__name__)

_GREET_S = 10.0


class DriverGate:
    """The gate of this machine, a thread of this process."""

    def __init__(self, host: str, secret: bytes) -> None:
        """`host`: the address of this machine, as the controller reaches it."""
        self._secret = secret
        self._listener = listen(host)
        self._drivers: dict[int, subprocess.Popen[bytes]] = {}
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, name="driver-gate", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                with connection:
                    asked = channel.accept(connection, self._secret, _GREET_S)
                    self._start(connection, asked.receive(time.monotonic() + _GREET_S))
            except (OSError, EOFError) as error:  # who asks has ended, or does not hold the secret
                logger.warning("no driver was started: %s", error)
                time.sleep(_GREET_S / 100)

    def _start(self, connection: socket.socket, number: int) -> None:
        if (former := self._drivers.get(number)) is not None:  # it may hang
            former.kill()
            former.wait()
        self._drivers[number] = pool.start_process(connection, number)
        logger.info("driver%d is process %d", number, self._drivers[number].pid)


def reach_gates(secret: bytes) -> None:
    """Let the controller, which this process is, have drivers on the machines of its engines."""

    def reach(address: str, number: int) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_GREET_S)
        channel.connect(connection, secret, _GREET_S).send(number)
        connection.setblocking(False)
        return connection

    pool.reach = reach
