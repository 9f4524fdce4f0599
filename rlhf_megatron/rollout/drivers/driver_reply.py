"""What a driver answers."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.data import codec
from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    EngineUnreachableError,
    SampleGroups,
)
from rlhf_megatron.rollout.group_columns import GroupColumns

HEARTBEAT = 0  # number of the message, empty, by which a driver says that it is there
_KNOWN_ERRORS: tuple[type[EngineError], ...] = (
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    EngineUnreachableError,
)


@codec.register("Answered", {"error_name": "kind", "error_message": "words"})
@dataclass(frozen=True)
class DriverReply:
    """The samples of each request, or why there are none."""

    groups: tuple[GroupColumns, ...] = ()
    error_name: str = ""  # name of the error's class; "": there is none
    error_message: str = ""

    @staticmethod
    def from_error(error: Exception) -> DriverReply:
        """Make the reply for a failed query; an error that is no known EngineError becomes a
        RuntimeError.
        """
        is_known = type(error) in _KNOWN_ERRORS
        words = str(error) if is_known else f"{type(error).__name__}: {error}"
        return DriverReply(
            error_name=type(error).__name__ if is_known else "RuntimeError", error_message=words
        )

    def read_groups(self) -> SampleGroups:
        """Return the samples of each request. Raise the EngineError of a failed query again, and
        RuntimeError for an error that was no EngineError.
        """
        if self.error_name:
            kind = next(
                (each for each in _KNOWN_ERRORS if each.__name__ == self.error_name), RuntimeError
            )
            raise kind(self.error_message)
        return [group.to_samples() for group in self.groups]
