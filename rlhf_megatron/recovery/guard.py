"""What holds around every stage of a step: it is timed, it has a deadline, and none begins when the run is to stop.

Between two stages a checkpoint that is complete gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.recovery.keeper import Keeper
from rlhf_megatron.stop import StopRequest

Stage = Callable[[str], AbstractContextManager[None]]  # around a stage of that name


def _no_deadline(stage: str) -> AbstractContextManager[None]:
    return nullcontext()


class StageGuard:
    """Callable: `with guard("generate"): ...`. Raises RunStopped in place of beginning a stage.

    `deadline(stage)`: a context in which the stage has its deadline.
    """

    def __init__(
        self,
        tracker: Tracker,
        stop: StopRequest | None = None,
        deadline: Callable[[str], AbstractContextManager[None]] = _no_deadline,
        keeper: Keeper | None = None,
    ) -> None:
        self.tracker = tracker
        self.stop = stop or StopRequest()
        self.deadline = deadline
        self.keeper = keeper or Keeper()

    @contextmanager
    def __call__(self, stage: str, is_begun: bool = False) -> Iterator[None]:
        """`is_begun`: the stage belongs to the one before, which cannot be left half done."""
        if not is_begun:
            self.stop.check()
            self.keeper.poll()
        with self.deadline(stage), self.tracker.stage(stage):
            yield
