"""A step's groups are generated and scored in the step itself: trainer and engines wait
for each other.

Everything follows from the prompts of the step, so a run in deterministic mode can be
repeated bit for bit.
"""

from __future__ import annotations

from rlhf_megatron.controller.recovery.save_policy import StageContext
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.scheduler.supply.group_ledger import BatchSupply, PromptProgress
from rlhf_megatron.data.batch import ScoredBatch


class ForegroundSupply(BatchSupply):
    """The supply that makes a step's samples in the step: the stages next, generate and score."""

    def __init__(self, stages: StepStages) -> None:
        """Make a supply that calls these stages in each step."""
        self._stages = stages

    def take_batch(self, step: int, enter_stage: StageContext) -> ScoredBatch:
        """Draw the step's prompts, generate and score their samples, and return them."""
        with enter_stage("next"):
            prompts = self._stages.draw_prompts(step)
        with enter_stage("generate"):
            rollout = self._stages.generate_rollout(step, prompts)
        with enter_stage("score"):
            return self._stages.score_rollout(step, rollout)

    def get_progress(self) -> PromptProgress:
        """Return the number of prompts drawn so far; all of them are trained."""
        return PromptProgress(self._stages.num_prompts_drawn)
