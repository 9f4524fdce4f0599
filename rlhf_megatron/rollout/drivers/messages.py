"""What a driver answers."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.data import codec
from rlhf_megatron.rollout.columns import GroupColumns
from rlhf_megatron.rollout.engine import (
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    EngineUnreachableError,
    Groups,
)

BEAT = 0  # number of the message, empty, by which a driver says that it is there
_KINDS: tuple[type[EngineError], ...] = (
    EngineError,
    EngineRequestError,
    EngineStaleError,
    EngineTimeoutError,
    EngineUnreachableError,
)


@codec.register
@dataclass(frozen=True)
class Answered:
    """The samples of each request, or why there are none."""

    groups: tuple[GroupColumns, ...] = ()
    kind: str = ""  # name of the error's class; "": there is none
    words: str = ""

    @staticmethod
    def failed(error: Exception) -> Answered:
        is_known = type(error) in _KINDS
        words = str(error) if is_known else f"{type(error).__name__}: {error}"
        return Answered(kind=type(error).__name__ if is_known else "RuntimeError", words=words)

    def read(self) -> Groups:
        """Raises what the question has raised; RuntimeError for what is no EngineError."""
        if self.kind:
            kind = next((each for each in _KINDS if each.__name__ == self.kind), RuntimeError)
            raise kind(self.words)
        return [group.samples() for group in self.groups]
