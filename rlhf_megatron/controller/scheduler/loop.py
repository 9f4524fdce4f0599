"""The loop: take -> annotate -> advantages -> update -> sync. Read this page first.

Nothing here knows an algorithm, an engine, a launcher, a layout or a schedule. A supply hands out
the samples of a step: made in that step (`supply/foreground.py`: next -> generate -> score), or
meanwhile, by other threads (`supply/background.py`). Every other line is a method of `StepStages`;
what flows between them stands in `data/batch.py`.

After a kill the loop is entered again at the step after the last checkpoint:
a stage that the journal has already hands back what was finished, and the stages behind
it pass that on.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron import faults
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.save_policy import SavePolicy, StageGuard
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.scheduler.supply.group_ledger import BatchSupply


@dataclass(frozen=True)
class LoopPlan:
    """The steps of a run, and where it evaluates."""

    last_step: int
    num_steps_done: int = 0  # before this process
    test_freq: int = 0  # steps between evaluations; 0: none but the last
    val_before_train: bool = False
    has_start_evaluation: bool = False  # the evaluation after `num_steps_done` stands

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after `step`: at step 0 with `val_before_train`, at every
        `test_freq`-th step, and always after the last step.
        """
        if step == 0:
            return self.val_before_train
        return step == self.last_step or bool(self.test_freq and step % self.test_freq == 0)


def run_training_loop(
    stages: StepStages,
    supply: BatchSupply,
    tracker: RunTracker,
    stage_guard: StageGuard,
    save_policy: SavePolicy,
    plan: LoopPlan,
) -> None:
    """Run the steps after `plan.num_steps_done`, with their saves and evaluations. The engines
    serve the current weights when this function is called and when it returns.

    Raise RunStopped between two stages when the run was asked to stop: always before an update, or
    after the weight sync that follows it.
    """
    if plan.is_evaluation_due(plan.num_steps_done) and not plan.has_start_evaluation:
        _run_evaluation_stage(stages, tracker, stage_guard, plan, plan.num_steps_done)

    for step in range(plan.num_steps_done + 1, plan.last_step + 1):
        faults.set_fault_step(step)
        faults.reach_fault_point("loop.step_begins")
        with tracker.track_step(step):
            scored = supply.take_batch(step, stage_guard)
            with stage_guard("annotate"):
                annotated = stages.annotate_step(step, scored)
            with stage_guard("advantages"):
                train = stages.compute_advantages(step, annotated)
            with stage_guard("update"):
                train, _ = stages.update_models(step, train)
            with stage_guard("sync", is_continuation=True), supply.sync_window():
                metrics = stages.sync_weights()
            tracker.set_step_batch(
                train,
                metrics | supply.take_metrics() | save_policy.take_metrics(),
                stages.trained_version,
            )
        save_policy.save_if_due(step)
        faults.reach_fault_point("loop.step_ends")
        if plan.is_evaluation_due(step):
            _run_evaluation_stage(stages, tracker, stage_guard, plan, step)


def _run_evaluation_stage(
    stages: StepStages, tracker: RunTracker, stage_guard: StageGuard, plan: LoopPlan, step: int
) -> None:
    """Evaluate and log the result: all held-out items at step 0 and after the last step, else
    `test_samples` of each set.
    """
    faults.reach_fault_point("evaluate.before")
    with stage_guard("evaluate"):
        result = stages.evaluate_held_out(is_final=step in (0, plan.last_step))
    tracker.log_evaluation(step, result)
