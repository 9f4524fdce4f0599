"""What goes wrong on hosts, as the controller raises it."""

from __future__ import annotations

import traceback

from rlhf_megatron.runtime.control_messages import HostFailure


class HostError(RuntimeError):
    """A host failed, died or hung. The message names it by its coordinates."""


class HostCallError(HostError):
    """A call raised on a host. The message has the coordinates, the exception and its
    traceback there.
    """

    def __init__(self, method: str, failure: HostFailure) -> None:
        """Make the message from the failure that the host sent."""
        super().__init__(
            (
                f"{failure.rank_label} {method}: {failure.kind}: {failure.message}\n"
                f"{failure.traceback}"
            ).rstrip()
        )
        self.failure = failure


class HostCallValueError(HostCallError, ValueError):
    """A call raised a ValueError on a host, which the user can fix. The message has no traceback;
    the host's log has it.
    """

    def __init__(self, method: str, failure: HostFailure) -> None:
        """Make the message from the failure that the host sent, without its traceback."""
        RuntimeError.__init__(self, f"{failure.rank_label} {method}: {failure.message}")
        self.failure = failure


class HostLostError(HostError):
    """A host's process ended or its machine became unreachable."""


class HostTimeoutError(HostError):
    """A call or a stage was not finished in time. The message lists the work of each host."""


def make_host_failure(error: BaseException, rank_label: str) -> HostFailure:
    """Return the message that carries `error`, with its traceback, from this host to the
    controller.
    """
    return HostFailure(
        rank_label=rank_label,
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_value_error=isinstance(error, ValueError),
    )


def make_host_call_error(method: str, failure: HostFailure) -> HostCallError:
    """Return the exception for a call that failed on a host: a HostCallValueError, without the
    traceback, if the host raised a ValueError.
    """
    return (
        HostCallValueError(method, failure)
        if failure.is_value_error
        else HostCallError(method, failure)
    )
