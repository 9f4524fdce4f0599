"""`SavePolicy` decides when the state of a run is saved: every `save_freq` steps, and as
`save_last` says at the end.

`StageGuard` stands around every stage of a step: it times it, gives it its deadline, and starts
none when the run is to stop; between two stages it commits a checkpoint that is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.resume_point import RunState
from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.controller.recovery.run_checkpointer import RunCheckpointer
from rlhf_megatron.controller.recovery.run_journal import GroupJournal, StepJournal
from rlhf_megatron.stop import RunStopped, StopRequest


def is_run_state_saved(trainer: TrainerConfig) -> bool:
    """Return whether the run saves its state, so that it can go on after it was stopped."""
    return bool(trainer.save_freq) or trainer.save_last == "state"


class SavePolicy:
    """Saves the state of a run through a checkpointer; without one it saves nothing.

    `capture(step)` returns the state after that step. `save_weights` writes those that the hosts
    have. `check_run_dir_lock` raises when the run directory is not the run's any more.
    """

    def __init__(
        self,
        capture_state: Callable[[int], RunState] | None = None,
        checkpointer: RunCheckpointer | None = None,
        journal: StepJournal | GroupJournal | None = None,
        trainer_config: TrainerConfig | None = None,
        save_weights: Callable[[], None] | None = None,
        check_run_dir_lock: Callable[[], None] = lambda: None,
        route_files: RouteFileRetention | None = None,
    ) -> None:
        """Make the policy. `capture_state(step)` returns the state after that step; None: nothing
        is ever saved. `checkpointer` is used only where the settings save the state, `save_weights`
        only where save_last is weights. `check_run_dir_lock` raises when the run directory is no
        longer this run's.
        """
        self._capture_state = capture_state
        self._check_run_dir_lock = check_run_dir_lock
        self._trainer_config = trainer_config or TrainerConfig(save_last="none")
        self._checkpointer = checkpointer if is_run_state_saved(self._trainer_config) else None
        self._journal = journal
        self._route_files = route_files
        self._save_weights = save_weights if self._trainer_config.save_last == "weights" else None
        # after the last whole step; a later one may be half done
        self._last_state: RunState | None = None
        # states whose checkpoint is not committed, by step
        self._pending_states: dict[int, RunState] = {}
        self._committed_step: int | None = None
        self._metrics: dict[str, float] = {}
        if self._checkpointer is not None:
            self._checkpointer.commit_callback = self._handle_commit

    def record_initial_state(self, step: int, is_saved: bool) -> None:
        """Capture the state after `step`, before the next step begins. With save_freq, also save
        the result of a warm-up, and wait for it. `is_saved`: this step has a checkpoint already.
        """
        if self._capture_state is None:
            return
        self._last_state = self._capture_state(step)
        if is_saved:
            self._committed_step = step
        elif (
            self._last_state.num_warmup_steps
            and self._checkpointer is not None
            and self._trainer_config.save_freq
        ):
            self._begin_checkpoint_of_last_state()
            self._checkpointer.wait_for_save()

    def save_if_due(self, step: int) -> None:
        """Capture the state after `step`, and begin a checkpoint at every `save_freq`-th step, and
        at the last step where save_last is state. Raise where the run directory is no longer this
        run's.
        """
        if self._capture_state is None:
            return
        self._check_run_dir_lock()
        self._last_state = self._capture_state(step)
        freq = self._trainer_config.save_freq
        is_last = step == self._trainer_config.total_training_steps
        if (freq and step % freq == 0) or (is_last and self._trainer_config.save_last == "state"):
            self._begin_checkpoint_of_last_state()

    def commit_if_written(self) -> None:
        """Commit a checkpoint whose files are complete."""
        if self._checkpointer is not None:
            self._metrics |= self._checkpointer.commit_if_written()

    def take_metrics(self) -> dict[str, float]:
        """Commit a checkpoint whose files are complete, and return the metrics of checkpoints since
        the last call.
        """
        self.commit_if_written()
        metrics = self._metrics
        self._metrics = {}
        return metrics

    @contextmanager
    def save_when_stopped(self, stop_request: StopRequest) -> Iterator[None]:
        """Save the last whole step when the block ends by RunStopped, if the run saves at all and
        there is time. Then raise RunStopped again, with what was saved in its message, or OSError
        where a save failed.

        The journal keeps what it has of the step after it.
        """
        try:
            yield
        except RunStopped as stopped:
            if self._last_state is None:
                raise
            kept = self._save_before_stop(
                self._last_state.step,
                self._trainer_config.stop_grace_s - stop_request.seconds_since_request,
            )
            if kept is None:
                raise OSError(
                    f"the state after step {self._last_state.step} could not be saved ({stopped})"
                ) from stopped
            raise RunStopped("; ".join([str(stopped), *kept])) from stopped

    def wait_for_saves(self) -> None:
        """Wait until every save is committed, or has failed with a note."""
        if self._checkpointer is not None:
            self._checkpointer.wait_for_save()

    def _save_before_stop(self, step: int, remaining_seconds: float) -> list[str] | None:
        """Save the weights and the state of a run that stops after `step`, as its settings say. The
        state is not saved where the last save took longer than `remaining_seconds`. Return what was
        saved, in words, or None where a save failed.
        """
        said = []
        if self._save_weights is not None:
            self._save_weights()
            said = [f"the weights after step {step} are written"]
        if self._checkpointer is None:
            return said
        self._checkpointer.wait_for_save()
        takes_s = self._checkpointer.last_save_seconds
        if self._committed_step != step and takes_s is not None and takes_s > remaining_seconds:
            return [
                *said,
                (
                    f"the state after step {step} is not saved: the last save took {takes_s:.0f} s,"
                    f" of trainer.stop_grace_s {max(0, remaining_seconds):.0f} s are left. Started"
                    f" again, the run goes on after step {self._committed_step}"
                ),
            ]
        self._begin_checkpoint_of_last_state()
        self._checkpointer.wait_for_save()
        return (
            [*said, f"the state after step {step} is saved"]
            if self._committed_step == step
            else None
        )

    def _begin_checkpoint_of_last_state(self) -> None:
        """Begin the checkpoint of the last captured state, unless its step is committed already.
        Keep the state until the checkpoint is committed.
        """
        assert self._last_state is not None
        if self._checkpointer is not None and self._committed_step != self._last_state.step:
            self._pending_states[self._last_state.step] = self._last_state
            self._checkpointer.begin_save(self._last_state)

    def _handle_commit(self, step: int) -> None:
        """Remove the journal entries and route files that the checkpoint just committed makes
        unnecessary.
        """
        self._committed_step = step
        state = self._pending_states.get(step)
        self._pending_states = {
            later: kept for later, kept in self._pending_states.items() if later > step
        }
        if self._journal is not None and state is not None:
            self._journal.forget_saved(state)
        if self._route_files is not None:
            self._route_files.remove_files_through_step(step)


StageContext = Callable[[str], AbstractContextManager[None]]  # around a stage of that name


def _make_null_deadline(stage: str) -> AbstractContextManager[None]:
    """Return a context without a deadline."""
    return nullcontext()


class StageGuard:
    """Callable: `with guard("generate"): ...`. Raises RunStopped in place of beginning a stage.

    `make_deadline(stage)`: a context in which the stage has its deadline.
    """

    def __init__(
        self,
        tracker: RunTracker,
        stop_request: StopRequest | None = None,
        make_deadline: Callable[[str], AbstractContextManager[None]] = _make_null_deadline,
        save_policy: SavePolicy | None = None,
    ) -> None:
        """Make the guard of a run's stages. `make_deadline(stage)` returns the context in which a
        stage has its deadline; the default has none.
        """
        self.tracker = tracker
        self.stop_request = stop_request or StopRequest()
        self.make_deadline = make_deadline
        self.save_policy = save_policy or SavePolicy()

    @contextmanager
    def __call__(self, stage: str, is_continuation: bool = False) -> Iterator[None]:
        """Run the block as a stage, timed and with its deadline. Raise RunStopped before it where
        the run was asked to stop, and commit a complete checkpoint; neither with `is_continuation`,
        for a stage that belongs to the stage before, which cannot stop half done.
        """
        if not is_continuation:
            self.stop_request.raise_if_requested()
            self.save_policy.commit_if_written()
        with self.make_deadline(stage), self.tracker.time_stage(stage):
            yield
