"""When the state of a run is saved: after every `save_freq` steps, after the last one, and when the run is to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.recovery.checkpointer import RunState
from rlhf_megatron.stop import RunStopped


class Saves(Protocol):
    """What a Keeper asks of `checkpointer.Checkpointer`."""

    on_commit: Callable[[int], None]

    def save(self, state: RunState) -> None:
        """Begin a checkpoint of the hosts as they are now; nothing where that step has one."""

    def poll(self) -> dict[str, float]:
        """Commit one whose files are complete. Metrics of what was committed."""

    def wait(self) -> None:
        """Finish what is in flight."""


class Journals(Protocol):
    """What a Keeper asks of `journal.Journal` or `supply.group_journal.GroupJournal`."""

    def saved(self, state: RunState) -> None:
        """There is a checkpoint of it: forget what no run will need that goes on from there."""


class Keeper:
    """Owned by the controller. Without a checkpointer it keeps nothing.

    `capture(step)`: the state after that step, as it stands now.
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
        """The run stands after `step` and has not begun the next one. A warm-up is on disk when this returns."""
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
        """Of checkpoints, since the last time."""
        self.poll()
        metrics, self._metrics = self._metrics, {}
        return metrics

    @contextmanager
    def saving_when_stopped(self) -> Iterator[None]:
        """A run that ends by RunStopped in here has its last whole step on disk, if anything is ever saved.

        What the journal has of the step after it stays there.
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
        """All that was begun is committed, or has failed and was said so."""
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
