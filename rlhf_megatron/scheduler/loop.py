"""The loop: take -> annotate -> advantages -> update -> sync. Read this page first.

Nothing here knows an algorithm, an engine, a launcher, a layout or a schedule. A supply hands out the samples of a
step: made in that step (`supply/foreground.py`: next -> generate -> score), or meanwhile, by other threads
(`supply/background.py`). Every other line is a method of `Stages`; what flows between them stands in `data/batch.py`.

After a kill the loop is entered again at the step after the last checkpoint:
a stage that the journal has already hands back what was finished, and the stages behind it pass that on.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron import faults
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.recovery.keeper import Keeper, StageGuard
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.supply.ledger import Supply


@dataclass(frozen=True)
class LoopPlan:
    """The steps of a run, and where it evaluates."""

    last_step: int
    steps_done: int = 0  # before this process
    test_freq: int = 0  # steps between evaluations; 0: none but the last
    val_before_train: bool = False
    is_evaluated: bool = False  # the evaluation after `steps_done` stands

    def is_evaluation_due(self, step: int) -> bool:
        if step == 0:
            return self.val_before_train
        return step == self.last_step or bool(self.test_freq and step % self.test_freq == 0)


def run(stages: Stages, supply: Supply, tracker: Tracker, stage: StageGuard, keeper: Keeper, plan: LoopPlan) -> None:
    """The steps after `plan.steps_done`. The engines serve the current weights when it is called and when it returns.

    Raises RunStopped between two stages when the run was asked to stop: always before an update, or after its sync.
    """
    if plan.is_evaluation_due(plan.steps_done) and not plan.is_evaluated:
        _evaluate(stages, tracker, stage, plan, plan.steps_done)

    for step in range(plan.steps_done + 1, plan.last_step + 1):
        faults.set_step(step)
        faults.reach("loop.step_begins")
        with tracker.step(step):
            scored = supply.take(step, stage)
            with stage("annotate"):
                annotated = stages.annotate(step, scored)
            with stage("advantages"):
                train = stages.advantages(step, annotated)
            with stage("update"):
                train, _ = stages.update(step, train)
            with stage("sync", is_begun=True), supply.syncing():
                metrics = stages.sync()
            tracker.batch(train, metrics | supply.take_metrics() | keeper.take_metrics(), stages.trained_version)
        keeper.step_done(step)
        faults.reach("loop.step_ends")
        if plan.is_evaluation_due(step):
            _evaluate(stages, tracker, stage, plan, step)


def _evaluate(stages: Stages, tracker: Tracker, stage: StageGuard, plan: LoopPlan, step: int) -> None:
    """Evaluate, on all held-out items before the first step and after the last."""
    faults.reach("evaluate.before")
    with stage("evaluate"):
        result = stages.evaluate(is_final=step in (0, plan.last_step))
    tracker.evaluation(step, result)
