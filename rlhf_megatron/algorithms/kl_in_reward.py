"""KL against the reference as a part of each token's reward, and the controllers of its weight.

"Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593, section 2): the reward of a
response is its score minus kl_coef times the sum of its tokens' KL estimates, each at its own
token; the weight may follow a target.

Units: a token's KL is in nats (`losses/kl_estimators.py`). A controller is fed, and `target_kl` is,
nats **a response**: summed over its tokens, averaged over the samples, as in the paper. (verl feeds
nats a token to the same formula: a target_kl from there must be multiplied by the usual response
length.)
"""

# B samples, T packed tokens, N response tokens of valid samples

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    find_true_positions,
    repeat_per_sample_length,
)
from rlhf_megatron.algorithms.loss_aggregation import sum_by_sequence

BLOCK_TOKENS = 65536  # tokens
MAX_RELATIVE_ERROR = 0.2  # of the relative distance from the target, the paper's


def make_token_rewards(
    rewards_B: Tensor,
    is_valid_B: Tensor,
    response_mask_T: Tensor,
    offsets: Tensor,
    kl_T: Tensor | None,
    kl_coef: float,
    process_rewards_T: Tensor | None = None,
) -> Tensor:
    """Return the rewards of the tokens, [T] float32: -kl_coef * kl on every response token, plus
    the sample's score on its last one; 0 elsewhere. The shares of the score that
    `process_rewards_T` pays at tokens are paid there and not on the last one: rewards of steps, as
    in arXiv 2211.14275.

    All rewards are 0 for a sample of masked status. A response without tokens has nowhere to put
    its score, and nothing to train: `advantage_estimator.compute_sample_rewards` gives such a
    sample its plain score. `kl_T` may hold anything outside of `response_mask_T`. Raise ValueError
    where a weight is set and there is no KL.
    """
    if kl_T is None and kl_coef != 0:
        raise ValueError(
            f"kl_coef ({kl_coef}) needs a KL column; run the reference, or use a weight of 0."
        )
    trains_T = _mask_trained_tokens(response_mask_T, is_valid_B, offsets)
    last_S, has_tokens_B = _find_last_trained_positions(trains_T, offsets)
    scores_S = rewards_B[has_tokens_B].double()
    rewards_T = torch.zeros(response_mask_T.numel(), device=rewards_B.device)
    if kl_T is not None:
        # memory that stays in a cache is several times faster
        for start in range(0, rewards_T.numel(), BLOCK_TOKENS):
            block = slice(start, start + BLOCK_TOKENS)
            costs_T = kl_T[block].double().mul_(kl_coef).masked_fill_(~trains_T[block], 0.0)
            torch.sub(rewards_T[block], costs_T, out=rewards_T[block])
        scores_S -= kl_coef * kl_T[last_S].double()
    if process_rewards_T is not None:
        shares_T = process_rewards_T.masked_fill(~trains_T, 0.0)
        rewards_T += shares_T
        others_T = shares_T.index_fill(0, last_S, 0.0)  # what the last token is paid anyway
        scores_S -= sum_by_sequence(others_T, offsets)[has_tokens_B].double()
    rewards_T[last_S] = scores_S.float()
    return rewards_T


def _mask_trained_tokens(response_mask_T: Tensor, is_valid_B: Tensor, offsets: Tensor) -> Tensor:
    """Return a mask of the response tokens of valid samples, [T] bool."""
    if bool(is_valid_B.all()):
        return response_mask_T
    return response_mask_T & repeat_per_sample_length(is_valid_B, offsets.diff())


def _find_last_trained_positions(trains_T: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the last token that trains of each sample that has one, and which
    samples have one, [B] bool.
    """
    places_N = find_true_positions(trains_T)
    ends_B = torch.searchsorted(places_N, offsets)
    has_tokens_B = ends_B.diff() > 0
    return places_N[ends_B[1:][has_tokens_B] - 1], has_tokens_B


@dataclass(frozen=True)
class MeanKL:
    """Over the response tokens of valid samples; 0 where there are none."""

    nats_per_response: float  # nats; what a controller is fed
    nats_per_token: float  # nats; metric actor/reward_kl_penalty
    num_samples: int  # valid ones


def compute_mean_kl(
    kl_T: Tensor, is_valid_B: Tensor, response_mask_T: Tensor, offsets: Tensor
) -> MeanKL:
    """Return the mean KL of a response and of a token over the valid samples. `kl_T` may hold
    anything outside of `response_mask_T` and in samples of masked status.
    """
    trains_T = _mask_trained_tokens(response_mask_T, is_valid_B, offsets)
    total = sum_by_sequence(kl_T.masked_fill(~trains_T, 0.0), offsets).sum().item()
    num_samples = int(is_valid_B.sum())
    num_tokens = int(trains_T.sum())
    return MeanKL(total / max(num_samples, 1), total / max(num_tokens, 1), num_samples)


class KLController:
    """The weight of the KL term: `kl_coef` is that of the current step, `update` makes
    that of the next.

    adaptive (arXiv 1909.08593, section 2.2; the paper's gain of 0.1 is num_samples / horizon,
    as in its code):
    coef *= 1 + clip(kl / target_kl - 1, +-0.2) * num_samples / horizon
    """

    def __init__(
        self,
        kind: Literal["fixed", "adaptive"],
        kl_coef: float,
        target_kl: float = 0.1,
        horizon: int = 10000,
    ) -> None:
        """Raise ValueError for an unknown kind, and for an adaptive one with a number that is not
        above 0.
        """
        if kind not in ("fixed", "adaptive"):
            raise ValueError(f"unknown KL controller {kind!r}; known: fixed, adaptive.")
        if kind == "adaptive" and not (kl_coef > 0 and target_kl > 0 and horizon > 0):
            raise ValueError(
                f"kl_coef ({kl_coef}), target_kl ({target_kl}) and horizon ({horizon}) of an"
                " adaptive KL controller must be above 0: it multiplies the weight by the distance"
                " from the target."
            )
        self.kind = kind
        self.kl_coef = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Set `kl_coef` for the next step. `mean_kl`: nats a response of the step that used
        `kl_coef`, over its `num_samples` samples. A fixed weight does not change.

        Raise ValueError when `mean_kl` is not finite, or so many samples at once would turn the
        weight's sign.
        """
        if self.kind == "fixed":
            return
        if not math.isfinite(mean_kl):
            raise ValueError(
                f"the mean KL of a response ({mean_kl}) must be a number; look at the"
                " reference's log-probs."
            )
        error = min(max(mean_kl / self.target_kl - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        factor = 1.0 + error * num_samples / self.horizon
        if factor <= 0:
            raise ValueError(
                f"horizon ({self.horizon} samples) must be above {MAX_RELATIVE_ERROR} x the"
                f" samples of a step ({num_samples}), or the weight of the KL term turns negative;"
                f" use {num_samples} or more."
            )
        self.kl_coef *= factor

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint keeps, which is exact also as JSON."""
        return {"coef": self.kl_coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take over the weight of a checkpoint, unless the weight is fixed: then the
        configuration's counts, so that a resumed run can change it.
        """
        if self.kind == "adaptive":
            self.kl_coef = state["coef"]
