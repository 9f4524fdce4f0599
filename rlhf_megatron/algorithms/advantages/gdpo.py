"""Several rewards, each normalised in its group before they are added up.

"GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization"
(arXiv 2601.05242). Normalising the sum, as GRPO does, gives different mixes of rewards one
advantage. With reward parts k of weight w_k

    A = whiten(sum over k of w_k (r_k - mean_g,k) / (std_g,k + eps))        over the response tokens
        of the step
"""

# B samples

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    RewardKeys,
    count_response_tokens,
    spread_over_response_tokens,
)
from rlhf_megatron.algorithms.advantages.response_tokens import whiten_sample_advantages
from rlhf_megatron.algorithms.metric_names import make_single_key_part
from rlhf_megatron.algorithms.prompt_groups import PromptGroups, compute_group_advantages
from rlhf_megatron.lazy import Tensor, torch


@dataclass(frozen=True)
class GDPOParams:
    # names of reward parts: a reward's name, or name/part of what it returns
    gdpo_reward_keys: tuple[str, ...]
    gdpo_reward_weights: tuple[float, ...] = ()  # one a key; none given: 1 each
    norm_adv_by_std_in_grpo: bool = True  # divide each part by its group's standard deviation
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        """Raise ValueError for repeated or missing keys, weights that do not match them, and a
        negative epsilon.
        """
        keys = self.gdpo_reward_keys
        weights = self.gdpo_reward_weights
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(
                f"gdpo_reward_keys ({list(keys)}) must be distinct names, at least one; name"
                " reward parts."
            )
        if weights and len(weights) != len(keys):
            raise ValueError(
                f"gdpo_reward_weights ({list(weights)}) must be one a key ({len(keys)}:"
                f" {', '.join(keys)}); add or remove some, or leave them out for 1 each."
            )
        if weights and not (all(map(isfinite, weights)) and any(weights)):
            raise ValueError(
                f"gdpo_reward_weights ({list(weights)}) must be numbers, not all 0; 1.0 is usual."
            )
        if self.epsilon < 0:
            raise ValueError(f"epsilon ({self.epsilon}) must not be negative; 1e-6 is usual.")

    @property
    def reward_keys(self) -> RewardKeys:
        """Return the reward parts that the estimator reads, and the names of the parameters that
        set them.
        """
        weights = "" if self.gdpo_reward_weights else "gdpo_reward_weights"
        return RewardKeys("gdpo_reward_keys", self.gdpo_reward_keys, weights)


@ADV_ESTIMATORS.register("gdpo", GDPOParams, needs=("reward_parts", "group_ids"), scope="group")
def gdpo(inputs: AdvantageInputs, params: GDPOParams) -> AdvantageOutputs:
    """Return one advantage for each sample, on all its response tokens: the weighted sum of its
    reward parts, each normalised in its group, whitened over the step.

    A part that a sample does not have (another data source's) adds 0 to the sum, and the sample is
    out of that part's statistics. A group with one valid sample is in no statistic, and 0. Metrics
    gdpo/<key>/{mean,std,max,min} of each part. Raise ValueError for a name/part that its reward
    does not return.
    """
    metrics: dict[str, float] = {}
    total_B = torch.zeros(
        inputs.is_valid_B.shape, dtype=torch.float64, device=inputs.is_valid_B.device
    )
    weights = params.gdpo_reward_weights or (1.0,) * len(params.gdpo_reward_keys)
    for key, weight in zip(params.gdpo_reward_keys, weights, strict=True):
        part_B = _select_reward_part(inputs, key)
        if part_B is not None:
            has_part_B = inputs.is_valid_B & ~part_B.isnan()
            metrics |= _compute_part_statistics(key, part_B[has_part_B])
            epsilon = params.epsilon if params.norm_adv_by_std_in_grpo else None
            total_B += weight * compute_group_advantages(
                part_B, inputs.group_ids_B, has_part_B, epsilon
            )
    groups = PromptGroups.from_ids(inputs.group_ids_B, inputs.is_valid_B)
    is_kept_B = inputs.is_valid_B & (groups.count_valid_samples() > 1)[groups.index_B]
    lengths_B = count_response_tokens(inputs.response_mask_T, inputs.offsets)
    advantages_B = whiten_sample_advantages(total_B, lengths_B, is_kept_B)
    return AdvantageOutputs(
        spread_over_response_tokens(advantages_B, inputs.response_mask_T, inputs.offsets),
        metrics=metrics,
    )


def _compute_part_statistics(reward_key: str, part_B: Tensor) -> dict[str, float]:
    """Return the metrics of a reward part over the samples that have it; {} where no sample has
    it.
    """
    if not part_B.numel():
        return {}
    part_B = part_B.double()
    prefix = f"gdpo/{make_single_key_part(reward_key)}"
    return {
        f"{prefix}/mean": part_B.mean().item(),
        f"{prefix}/std": part_B.std().item() if part_B.numel() > 1 else 0.0,
        f"{prefix}/max": part_B.max().item(),
        f"{prefix}/min": part_B.min().item(),
    }


def _select_reward_part(inputs: AdvantageInputs, reward_key: str) -> Tensor | None:
    """Return the reward part of each sample, [B]; None where no sample of this step was scored by
    the reward that `reward_key` names. Raise ValueError where that reward returned no such part.
    """
    if reward_key in inputs.reward_parts:
        return inputs.reward_parts[reward_key]
    reward, _, part = reward_key.partition("/")
    if part and reward in inputs.reward_parts:
        known = ", ".join(sorted(inputs.reward_parts))
        raise ValueError(
            f"gdpo_reward_keys has {reward_key!r}, but reward {reward!r} returned no part {part!r}"
            " for any sample of this step; let it return that for every sample, or use one"
            f" of {known}."
        )
    return None
