"""The loop: generate -> score -> annotate -> advantages -> update -> sync. Read this page first.

Nothing here knows an algorithm, an engine, a launcher or a layout. Each line is a method of `Stages`; what flows
between them stands in `data/batch.py`.
"""

from __future__ import annotations

from rlhf_megatron import faults
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.tracker import Tracker


def run(
    stages: Stages,
    tracker: Tracker,
    total_training_steps: int,
    test_freq: int,
    val_before_train: bool,
    steps_done: int = 0,
) -> None:
    """The steps after `steps_done`. The engines serve the current weights when it is called and when it returns."""
    if val_before_train and steps_done == 0:
        with tracker.stage("evaluate"):
            result = stages.evaluate()
        tracker.evaluation(0, result)

    for step in range(steps_done + 1, total_training_steps + 1):
        faults.set_step(step)
        faults.reach("loop.step_begins")
        with tracker.step(step):
            with tracker.stage("next"):
                prompts = stages.next_prompts(step)
            with tracker.stage("generate"):
                rollout = stages.generate(step, prompts)
            with tracker.stage("score"):
                scored = stages.score(rollout)
            with tracker.stage("annotate"):
                annotated = stages.annotate(step, scored)
            with tracker.stage("advantages"):
                train = stages.advantages(annotated)
            faults.reach("loop.after_advantages")
            with tracker.stage("update"):
                stages.update(step, train)
            with tracker.stage("sync"):
                metrics = stages.sync()
            tracker.batch(train, metrics)
        faults.reach("loop.step_ends")

        is_last = step == total_training_steps
        if is_last or (test_freq and step % test_freq == 0):
            faults.reach("evaluate.before")
            with tracker.stage("evaluate"):
                result = stages.evaluate(is_final=is_last)
            tracker.evaluation(step, result)
