"""The loop: generate -> score -> annotate -> advantages -> update -> sync. Read this page first.

Nothing here knows an algorithm, an engine, a launcher or a layout. Each line is a method of `Stages`; what flows
between them stands in `data/batch.py`.
"""

from __future__ import annotations

from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.tracker import Tracker


def run(stages: Stages, tracker: Tracker, total_training_steps: int, test_freq: int, val_before_train: bool) -> None:
    """All steps of a run. The engines serve the current weights when it is called and when it returns."""
    if val_before_train:
        with tracker.stage("evaluate"):
            result = stages.evaluate()
        tracker.evaluation(0, result)

    for step in range(1, total_training_steps + 1):
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
            with tracker.stage("update"):
                stages.update(step, train)
            with tracker.stage("sync"):
                metrics = stages.sync()
            tracker.batch(train, metrics)

        is_last = step == total_training_steps
        if is_last or (test_freq and step % test_freq == 0):
            with tracker.stage("evaluate"):
                result = stages.evaluate(is_final=is_last)
            tracker.evaluation(step, result)
