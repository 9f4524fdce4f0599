"""`Keeper` decides when the state of a run is saved: every `save_freq` steps, after the last, and when the run stops.

`StageGuard` stands around every stage of a step: it times it, gives it its deadline, and starts none when the run is to
stop; between two stages it commits a checkpoint that is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.recovery.checkpointer import RunState
from rlhf_megatron.stop import RunStopped, StopRequest


class Saves(Protocol):
    """The part of `checkpointer.Checkpointer` that a Keeper calls."""

    on_commit: Callable[[int], None]

    def save(self, state: RunState) -> None:
        """Begin a checkpoint of the hosts as they are now, unless that step has one."""

    def poll(self) -> dict[str, float]:
        """Commit a checkpoint whose files are complete. Returns metrics of what was committed."""

    def wait(self) -> None:
        """Finish what is in flight."""


class Journals(Protocol):
    """The part of `journal.Journal` and `supply.group_journal.GroupJournal` that a Keeper calls."""

    def saved(self, state: RunState) -> None:
        """Forget what a run that goes on from the checkpoint of `state` does not need."""


class Keeper:
    """Saves the state of a run through a checkpointer; without one it saves nothing.

    `capture(step)` returns the state after that step.
    """

    def __init__(
        self,
        capture: Callable[[int], RunState] | None = None,
        checkpointer: Saves | None = None,
        journal: Journals | None = None,
        config: TrainerConfig | None = None,
    ) -> None:
        self._capture = capture
        self._save_freq = config.save_freq if config is not None else 0
        self._last_step = config.total_training_steps if config is not None else 0
        self._checkpointer = checkpointer if self._save_freq else None
        self._journal = journal
        self._state: RunState | None = None  # after the last whole step; a later one may be half done
        self._saving: dict[int, RunState] = {}  # states whose checkpoint is not committed, by step
        self._committed_step: int | None = None
        self._metrics: dict[str, float] = {}
        if self._checkpointer is not None:
            self._checkpointer.on_commit = self._committed

    def begin(self, step: int, is_saved: bool) -> None:
        """Take the state after `step`, before the next one begins. A warm-up is on disk when this returns."""
        if self._capture is None:
            return
        self._state = self._capture(step)
        if is_saved:
            self._committed_step = step
        elif self._state.num_warmup_steps and self._checkpointer is not None:
            self._save()
            self._checkpointer.wait()

    def step_done(self, step: int) -> None:
        if self._capture is None:
            return
        self._state = self._capture(step)
        if self._save_freq and (step % self._save_freq == 0 or step == self._last_step):
            self._save()

    def poll(self) -> None:
        """Commit a checkpoint whose files are complete."""
        if self._checkpointer is not None:
            self._metrics |= self._checkpointer.poll()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of checkpoints since the last call."""
        self.poll()
        metrics, self._metrics = self._metrics, {}
        return metrics

    @contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """Save the last whole step when the block ends by RunStopped, if the run saves at all.

        The journal keeps what it has of the step after it.
        """
        try:
            yield
        except RunStopped as stopped:
            if self._checkpointer is None or self._state is None:
                raise
            self._save()
            self._checkpointer.wait()
            if self._committed_step != self._state.step:
                raise OSError(f"the state after step {self._state.step} could not be saved ({stopped})") from stopped
            raise RunStopped(f"{stopped}; the state after step {self._state.step} is saved") from stopped

    def finish(self) -> None:
        """Wait until every save is committed, or has failed with a note."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def _save(self) -> None:
        assert self._state is not None
        if self._checkpointer is not None and self._committed_step != self._state.step:
            self._saving[self._state.step] = self._state
            self._checkpointer.save(self._state)

    def _committed(self, step: int) -> None:
        self._committed_step = step
        state = self._saving.get(step)
        self._saving = {later: kept for later, kept in self._saving.items() if later > step}
        if self._journal is not None and state is not None:
            self._journal.saved(state)


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
        """Run a stage. `is_begun`: it belongs to the stage before, which cannot stop half done."""
        if not is_begun:
            self.stop.check()
            self.keeper.poll()
        with self.deadline(stage), self.tracker.stage(stage):
            yield
