"""A host's side of the control channel: a thread that reads it, so that it answers while the main
thread is busy.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from rlhf_megatron.runtime.control_messages import (
    BUILD,
    HostSignalNotice,
    LeaveRequest,
    RoleCall,
    RoleCallReply,
    StatusRequest,
)
from rlhf_megatron.runtime.host_errors import make_host_failure
from rlhf_megatron.runtime.message_channel import FrameError, MessageChannel
from rlhf_megatron.runtime.rank_pools import PoolMember
from rlhf_megatron.runtime.role_host import BuildRoles, MainThreadActivity, RoleHost

logger = logging.getLogger(__name__)

LOST_GRACE_S = 1.0  # for the main thread, after the controller is gone


class HostService:
    """A thread that reads the control channel. It answers status requests, and queues calls for the
    main thread.

    When the controller tells the host to leave or is gone, and the main thread does not come back
    in time, the process ends with the code that `get_exit_code` returns: a thread that is inside a
    collective cannot be interrupted otherwise.
    """

    def __init__(
        self,
        channel: MessageChannel,
        activity: MainThreadActivity,
        get_exit_code: Callable[[], int],
    ) -> None:
        """Start the thread that reads the channel. `get_exit_code` returns the exit code for a
        process whose main thread does not come back.
        """
        self._channel = channel
        self._activity = activity
        self._get_exit_code = get_exit_code
        self._calls: queue.SimpleQueue[RoleCall | None] = queue.SimpleQueue()
        self._has_left = threading.Event()
        self._reader = threading.Thread(
            target=self._read_channel, name="control channel", daemon=True
        )
        self._reader.start()

    def wait_for_call(self) -> RoleCall | None:
        """Wait for the next call and return it; None means that the host must end."""
        return self._calls.get()

    def send_reply(self, reply: RoleCallReply) -> None:
        """Send the reply of a call. A reply that cannot be encoded becomes a failure. A lost
        controller raises nothing here; the reading thread notices it.
        """
        try:
            try:
                self._channel.send(reply)
            except ValueError as error:
                self._channel.send(
                    RoleCallReply(
                        reply.id, failure=make_host_failure(error, self._activity.rank_label)
                    )
                )
        except ConnectionError:
            logger.warning("the controller is gone; reply %d is lost", reply.id)

    def send_signal_notice(self, message: HostSignalNotice) -> None:
        """Send the notice to the controller, from any thread. Raise ConnectionError where the
        controller is gone.
        """
        self._channel.send(message)

    def leave_run(self) -> None:
        """Close the channel and wait for the reading thread. The main thread calls it when its work
        is done.
        """
        self._has_left.set()
        self._channel.close()
        # it must not free a tensor while the interpreter shuts down
        self._reader.join(timeout=LOST_GRACE_S)

    def _read_channel(self) -> None:
        """Read messages, in a thread, until the controller tells this host to leave or is gone:
        answer status requests, queue calls. Then put None into the queue, and end the process if
        the main thread does not leave in time.
        """
        grace_s = LOST_GRACE_S
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, StatusRequest):
                    self._channel.send(self._activity.make_status(message.id))
                elif isinstance(message, RoleCall):
                    self._calls.put(message)
                elif isinstance(message, LeaveRequest):
                    logger.info("leaving: %s", message.reason)
                    grace_s = message.grace_s
                    break
                del message  # and its tensors, while the next is waited for
        except (EOFError, FrameError, ConnectionError) as error:
            if not self._has_left.is_set():
                logger.warning("lost the controller: %s", error)
        self._calls.put(None)
        if not self._has_left.wait(grace_s):
            status = self._activity.make_status(0)
            logger.error(
                "ended in %s, %s:\n  %s", status.method, status.stage, "\n  ".join(status.stack)
            )
            self._channel.close()
            os._exit(self._get_exit_code())


def serve_role_calls(
    service: HostService,
    activity: MainThreadActivity,
    join_pool: Callable[[], PoolMember],
    build_roles: BuildRoles,
) -> None:
    """Join the pool, build the roles, and run calls until the controller tells this host to leave.
    Send the controller a failure of the start as the reply to BUILD. Must be called on the main
    thread.
    """
    host = None
    try:
        with activity.enter_stage("", "joining the pool"):
            host = RoleHost(join_pool(), activity)
        host.build_roles(build_roles)
        service.send_reply(RoleCallReply(BUILD))
    except Exception as error:  # whatever it is, the controller must learn it
        logger.exception("this host did not start")
        service.send_reply(
            RoleCallReply(BUILD, failure=make_host_failure(error, activity.rank_label))
        )
    while (call := service.wait_for_call()) is not None:
        assert host is not None, "no call comes before the roles stand"
        service.send_reply(execute_call(host, call))
        del call  # and its tensors, while the next is waited for
    if host is not None:
        host.close_roles()
    service.leave_run()


def execute_call(host: RoleHost, call: RoleCall) -> RoleCallReply:
    """Run one call and return its reply. A failure is in the reply; no Exception is raised."""
    try:
        return RoleCallReply(call.id, value=host.run_call(call))
    except Exception as error:  # whatever it is, the controller must learn it
        logger.exception("%s failed", call.method)
        return RoleCallReply(call.id, failure=make_host_failure(error, host.pool.rank_label))
