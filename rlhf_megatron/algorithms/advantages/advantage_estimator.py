"""What an advantage estimator is: a pure function of a step's rewards. A new estimator is one
new file here.

    @ADV_ESTIMATORS.register("grpo", GRPOParams, needs=("rewards", "group_ids"))
    def grpo(inputs: AdvantageInputs, params: GRPOParams) -> AdvantageOutputs: ...

`needs` names batch columns. All estimators treat a sample of masked status alike (advantage 0, left
out of every statistic) and so a group with one sample left (no baseline, advantage 0).
"""

# B samples, T packed tokens

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlhf_megatron.algorithms.loss_aggregation import sum_by_sequence
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.lazy import Tensor, np, torch
from rlhf_megatron.part_signatures import find_call_problem
from rlhf_megatron.registry import Registry, name_attributes


@dataclass(frozen=True)
class AdvantageInputs:
    """Columns of a whole step; sample i owns tokens offsets[i] : offsets[i + 1]."""

    # float32, scores; undefined where not valid. An estimator of whole samples reads sample_rewards
    rewards_B: Tensor
    group_ids_B: Tensor  # int64; the samples of one prompt share it
    is_valid_B: Tensor  # bool; False: masked status
    response_mask_T: Tensor  # bool
    offsets: Tensor  # [B + 1] int64
    token_rewards_T: Tensor | None = None  # float32, per-token stream (after KL-in-reward)
    values_T: Tensor | None = None  # float32, critic
    # name -> [B] float32, terms before their weights
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    # float32, of the greedy sample of each sample's prompt; nan: masked status
    greedy_rewards_B: Tensor | None = None
    log_probs_T: Tensor | None = None  # float32, trainer's policy at the start of the update
    rollout_log_probs_T: Tensor | None = None  # float32, as the engine reported
    # float32, sum of the squared probabilities of the trainer's policy
    sum_squares_T: Tensor | None = None


@dataclass(frozen=True)
class AdvantageOutputs:
    advantages_T: Tensor  # float32, 0 outside of response_mask_T
    # float32, what a critic learns; None where the estimator has none
    returns_T: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # keys of algorithms/metric_names.py


@dataclass(frozen=True)
class RewardKeys:
    """The property `reward_keys` of the parameters of an estimator that needs "reward_parts" in
    place of rewards.
    """

    setting: str  # the parameter with the names
    names: tuple[str, ...]  # parts of the reward that it reads
    weights: str  # the parameter that would weigh them; "" where it is given


AdvantageEstimator = Callable[[AdvantageInputs, Any], AdvantageOutputs]
ADV_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    call_arguments=("inputs", "params"),
    attributes_by_name=name_attributes(AdvantageInputs),
)


def compute_sample_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return what each sample earned, [B] float64, 0 where not valid: the sum of its token rewards
    where there are any, else its score. This is the only way by which KL in the reward reaches
    estimators of whole samples.

    A response without tokens had nowhere to put its score, and no KL to pay: its reward is its
    score.
    """
    rewards_B = inputs.rewards_B.to(torch.float64)
    if inputs.token_rewards_T is not None:
        paid_T = inputs.token_rewards_T.masked_fill(~inputs.response_mask_T, 0.0)
        has_tokens_B = count_response_tokens(inputs.response_mask_T, inputs.offsets) > 0
        rewards_B = torch.where(has_tokens_B, sum_by_sequence(paid_T, inputs.offsets), rewards_B)
    return rewards_B.masked_fill(~inputs.is_valid_B, 0.0)


GroupEstimator = Callable[[Tensor, PromptGroups, AdvantageInputs, Any], Tensor]


def register_group_estimator(
    name: str, params: type | None = None
) -> Callable[[GroupEstimator], AdvantageEstimator]:
    """Return a decorator that registers an estimator of whole samples. The estimator takes
    (`compute_sample_rewards`, groups, inputs, parameters) and returns [B] advantages, which the
    wrapper spreads over all response tokens of each sample. The decorator raises ValueError for a
    function with other arguments.
    """

    def register_estimator(estimate: GroupEstimator) -> AdvantageEstimator:
        """Register the estimator, wrapped to take and return columns of a step."""
        if problem := find_call_problem(estimate, ("rewards_B", "groups", "inputs", "params")):
            raise ValueError(f"{ADV_ESTIMATORS.kind} {name!r}: {problem}")

        @functools.wraps(estimate)
        def estimate_step(inputs: AdvantageInputs, params: Any) -> AdvantageOutputs:
            """Estimate the advantage of each sample and spread it over the sample's response
            tokens.
            """
            groups = PromptGroups.from_ids(inputs.group_ids_B, inputs.is_valid_B)
            advantages_B = estimate(compute_sample_rewards(inputs), groups, inputs, params)
            return AdvantageOutputs(
                spread_over_response_tokens(advantages_B, inputs.response_mask_T, inputs.offsets)
            )

        return ADV_ESTIMATORS.register(name, params, needs=("rewards", "group_ids"), scope="group")(
            estimate_step
        )

    return register_estimator


def spread_over_response_tokens(
    advantages_B: Tensor, response_mask_T: Tensor, offsets: Tensor
) -> Tensor:
    """Return [T] float32: each sample's advantage on its response tokens, 0 elsewhere."""
    return repeat_per_sample_length(advantages_B.float(), offsets.diff()).masked_fill_(
        ~response_mask_T, 0.0
    )


def count_response_tokens(response_mask_T: Tensor, offsets: Tensor) -> Tensor:
    """Return the number of True entries of each sample, [B] int64, without making another column a
    token.
    """
    if response_mask_T.device.type != "cpu":
        return torch.searchsorted(find_true_positions(response_mask_T), offsets).diff()
    mask = response_mask_T.numpy()
    borders = pairwise(offsets.tolist())
    return torch.tensor(
        [int(np.count_nonzero(mask[start:stop])) for start, stop in borders], dtype=torch.int64
    )


def find_true_positions(mask_T: Tensor) -> Tensor:
    """Return the indices of the True entries, int64. On a CPU numpy's search is used, which is
    several times as fast as torch's.
    """
    if mask_T.device.type != "cpu":
        return mask_T.nonzero().view(-1)
    return torch.from_numpy(np.flatnonzero(mask_T.numpy()))


def repeat_per_sample_length(column_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Return each sample's entry repeated as often as its length says: [B] -> [sum of lengths]."""
    if column_B.device.type != "cpu":
        return column_B.repeat_interleave(lengths_B)
    # numpy copies runs, where torch gathers by an index of every token: 50 times as fast at 2000
    # tokens a sample.
    return torch.from_numpy(np.repeat(column_B.numpy(), lengths_B.numpy()))
