"""`Keeper` decides when the state of a run is saved: every `save_freq` steps, and as `save_last` says at the end.

`StageGuard` stands around every stage of a step: it times it, gives it its deadline, and starts none when the run is to
stop; between two stages it commits a checkpoint that is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.recovery.checkpointer import Checkpointer
from rlhf_megatron.recovery.journal import GroupJournal, Journal
from rlhf_megatron.recovery.resume import RunState
from rlhf_megatron.recovery.route_files import RouteFiles
from rlhf_megatron.stop import RunStopped, StopRequest


def saves_state(trainer: TrainerConfig) -> bool:
    """Whether a run can go on once it was told to stop."""
    return bool(trainer.save_freq) or trainer.save_last == "state"


class Keeper:
    """Saves the state of a run through a checkpointer; without one it saves nothing.

    `capture(step)` returns the state after that step. `save_weights` writes those that the hosts have.
    `check_lock` raises when the run directory is not the run's any more.
    """

    def __init__(
        self,
        capture: Callable[[int], RunState] | None = None,
        checkpointer: Checkpointer | None = None,
        journal: Journal | GroupJournal | None = None,
        config: TrainerConfig | None = None,
        save_weights: Callable[[], None] | None = None,
        check_lock: Callable[[], None] = lambda: None,
        route_files: RouteFiles | None = None,
    ) -> None:
        self._capture = capture
        self._check_lock = check_lock
        self._config = config or TrainerConfig(save_last="none")
        self._checkpointer = checkpointer if saves_state(self._config) else None
        self._journal = journal
        self._route_files = route_files
        self._save_weights = save_weights if self._config.save_last == "weights" else None
        self._state: RunState | None = None  # after the last whole step; a later one may be half done
        self._saving: dict[int, RunState] = {}  # states whose checkpoint is not committed, by step
        self._committed_step: int | None = None
        self._metrics: dict[str, float] = {}
        if self._checkpointer is not None:
            self._checkpointer.on_commit = self._committed

    def begin(self, step: int, is_saved: bool) -> None:
        """Take the state after `step`, before the next one begins. With save_freq, a warm-up is on disk then."""
        if self._capture is None:
            return
        self._state = self._capture(step)
        if is_saved:
            self._committed_step = step
        elif self._state.num_warmup_steps and self._checkpointer is not None and self._config.save_freq:
            self._save()
            self._checkpointer.wait()

    def step_done(self, step: int) -> None:
        if self._capture is None:
            return
        self._check_lock()
        self._state = self._capture(step)
        freq, is_last = self._config.save_freq, step == self._config.total_training_steps
        if (freq and step % freq == 0) or (is_last and self._config.save_last == "state"):
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
    def saving_when_stopped(self, stop: StopRequest) -> Iterator[None]:
        """Save the last whole step when the block ends by RunStopped, if the run saves at all and there is time.

        The journal keeps what it has of the step after it.
        """
        try:
            yield
        except RunStopped as stopped:
            if self._state is None:
                raise
            kept = self._keep(self._state.step, self._config.stop_grace_s - stop.seconds)
            if kept is None:
                raise OSError(f"the state after step {self._state.step} could not be saved ({stopped})") from stopped
            raise RunStopped("; ".join([str(stopped), *kept])) from stopped

    def finish(self) -> None:
        """Wait until every save is committed, or has failed with a note."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def _keep(self, step: int, left_s: float) -> list[str] | None:
        """Keep what fits into `left_s` of a run that stops after `step`. Returns it in words, or None where a save
        failed.
        """
        said = []
        if self._save_weights is not None:
            self._save_weights()
            said = [f"the weights after step {step} are written"]
        if self._checkpointer is None:
            return said
        self._checkpointer.wait()
        takes_s = self._checkpointer.save_s
        if self._committed_step != step and takes_s is not None and takes_s > left_s:
            return [
                *said,
                f"the state after step {step} is not saved: the last save took {takes_s:.0f} s, of trainer.stop_grace_s"
                f" {max(0, left_s):.0f} s are left. Started again, the run goes on after step {self._committed_step}",
            ]
        self._save()
        self._checkpointer.wait()
        return [*said, f"the state after step {step} is saved"] if self._committed_step == step else None

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
        if self._route_files is not None:
            self._route_files.saved(step)


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
