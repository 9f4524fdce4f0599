"""What goes wrong on hosts, as the controller raises it."""

from __future__ import annotations

import traceback

from rlhf_megatron.runtime.messages import Failure


class HostError(RuntimeError):
    """A host failed, died or hung. The message names it by its coordinates."""


class RemoteError(HostError):
    """A call raised on a host. The message has the coordinates, the exception and its traceback there."""

    def __init__(self, method: str, failure: Failure) -> None:
        super().__init__(f"{failure.where} {method}: {failure.kind}: {failure.message}\n{failure.traceback}".rstrip())
        self.failure = failure


class RemoteValueError(RemoteError, ValueError):
    """The same for what a user can fix: without the traceback, which stands in the host's log."""

    def __init__(self, method: str, failure: Failure) -> None:
        RuntimeError.__init__(self, f"{failure.where} {method}: {failure.message}")
        self.failure = failure


class HostLostError(HostError):
    """A host's process ended or its machine became unreachable."""


class HostTimeoutError(HostError):
    """A call or a stage was not finished in time. The message lists what each host was doing."""


def describe(error: BaseException, where: str) -> Failure:
    """Return `error`, being handled on a host, as a message."""
    return Failure(
        where=where,
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        is_value_error=isinstance(error, ValueError),
    )


def as_error(method: str, failure: Failure) -> RemoteError:
    return RemoteValueError(method, failure) if failure.is_value_error else RemoteError(method, failure)
