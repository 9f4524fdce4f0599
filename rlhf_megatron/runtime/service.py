"""A host's side of the control channel: a thread that reads it, so that it answers while the main thread is busy."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from rlhf_megatron.runtime.channel import Channel, FrameError
from rlhf_megatron.runtime.failures import describe
from rlhf_megatron.runtime.host import Activity, BuildRoles, Host
from rlhf_megatron.runtime.messages import BUILD, Call, Leave, Ping, Reply, Signalled
from rlhf_megatron.runtime.pool import Pool

logger = logging.getLogger(__name__)

LOST_GRACE_S = 1.0  # for the main thread, after the controller is gone


class Service:
    """Reads the channel in a thread. Pings are answered there; calls wait in a queue for the main thread.

    When the controller says so or is gone and the main thread does not come back in time, the process ends with what
    `exit_code` returns: a thread that sits in a collective cannot be interrupted otherwise.
    """

    def __init__(self, channel: Channel, activity: Activity, exit_code: Callable[[], int]) -> None:
        self._channel = channel
        self._activity = activity
        self._exit_code = exit_code
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._is_left = threading.Event()
        self._reader = threading.Thread(target=self._read, name="control channel", daemon=True)
        self._reader.start()

    def next_call(self) -> Call | None:
        """Waits for it. None: the host shall end."""
        return self._calls.get()

    def answer(self, reply: Reply) -> None:
        """A reply that cannot be encoded becomes a failure. A lost controller is noticed by the reading thread."""
        try:
            try:
                self._channel.send(reply)
            except ValueError as error:
                self._channel.send(Reply(reply.id, failure=describe(error, self._activity.where)))
        except ConnectionError:
            logger.warning("the controller is gone; reply %d is lost", reply.id)

    def tell(self, message: Signalled) -> None:
        """Send a message, from any thread. Raises ConnectionError."""
        self._channel.send(message)

    def leave(self) -> None:
        """The main thread is done."""
        self._is_left.set()
        self._channel.close()
        self._reader.join(timeout=LOST_GRACE_S)  # it must not free a tensor while the interpreter shuts down

    def _read(self) -> None:
        grace_s = LOST_GRACE_S
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Ping):
                    self._channel.send(self._activity.status(message.id))
                elif isinstance(message, Call):
                    self._calls.put(message)
                elif isinstance(message, Leave):
                    logger.info("leaving: %s", message.reason)
                    grace_s = message.grace_s
                    break
                del message  # and its tensors, while the next is waited for
        except (EOFError, FrameError, ConnectionError) as error:
            if not self._is_left.is_set():
                logger.warning("lost the controller: %s", error)
        self._calls.put(None)
        if not self._is_left.wait(grace_s):
            status = self._activity.status(0)
            logger.error("ended in %s, %s:\n  %s", status.method, status.stage, "\n  ".join(status.stack))
            self._channel.close()
            os._exit(self._exit_code())


def serve(service: Service, activity: Activity, join: Callable[[], Pool], build_roles: BuildRoles) -> None:
    """Join the pool, build the roles and run calls until told to leave. On the main thread."""
    host = None
    try:
        with activity.doing("", "joining the pool"):
            host = Host(join(), activity)
        host.build(build_roles)
        service.answer(Reply(BUILD))
    except Exception as error:  # whatever it is, the controller must learn it
        logger.exception("this host did not start")
        service.answer(Reply(BUILD, failure=describe(error, activity.where)))
    while (call := service.next_call()) is not None:
        assert host is not None, "no call comes before the roles stand"
        service.answer(execute(host, call))
        del call  # and its tensors, while the next is waited for
    if host is not None:
        host.close()
    service.leave()


def execute(host: Host, call: Call) -> Reply:
    """Run one call. Never raises: what goes wrong is in the reply."""
    try:
        return Reply(call.id, value=host.call(call))
    except Exception as error:  # whatever it is, the controller must learn it
        logger.exception("%s failed", call.method)
        return Reply(call.id, failure=describe(error, host.pool.where))
