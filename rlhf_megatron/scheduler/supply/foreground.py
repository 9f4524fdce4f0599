"""A step's groups are generated and scored in the step itself: trainer and engines wait for each other.

Everything follows from the prompts of the step, so a run in deterministic mode can be repeated bit for bit.
"""

from __future__ import annotations

from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.recovery.keeper import Stage
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.supply.ledger import Progress, Supply


class Foreground(Supply):
    """The supply that makes a step's samples in the step: the stages next, generate and score."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def take(self, step: int, stage: Stage) -> ScoredBatch:
        with stage("next"):
            prompts = self._stages.next_prompts(step)
        with stage("generate"):
            rollout = self._stages.generate(step, prompts)
        with stage("score"):
            return self._stages.score(step, rollout)

    def progress(self) -> Progress:
        return Progress(self._stages.num_drawn)
