"""Where a run stands between two steps: what the controller must know to go on, beside the weights on the hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_megatron.data import codec
from rlhf_megatron.data.stream import PromptCursor


@codec.register
@dataclass(frozen=True)
class RunState:
    """After `step` and before the next one. Seeds of samples and shuffles follow from (trainer.seed, step)."""

    step: int  # 0: after the warm-up, or before anything
    policy_version: int  # weight syncs so far; these weights are that version also when they are sent again
    cursor: PromptCursor | None  # of the prompt stream
    kl: dict[str, float] = field(default_factory=dict)  # of the controller of the KL term in the reward; {}: none
    num_warmup_steps: int = 0
    warmup_accuracy: float | None = None
    num_consecutive_skips: int = 0  # optimizer steps in a row with non-finite gradients
    productive_s: float = 0.0  # time in steps, evaluations and warm-up that this state came from
    architecture: dict[str, str] = field(default_factory=dict)  # of the policy: entries of its config.json, as JSON
    untrained: tuple[int, ...] = ()  # positions of the stream before the cursor whose groups were in flight
