"""Covariance of log-prob and advantage, token by token: what makes the entropy fall.

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617,
equation 10). Over the tokens of a mini-batch that train:

    cov_t = (log_probs_t - mean log_probs) (A_t - mean A)

The paper takes the log-probs of the forward pass at hand, and so the means of whatever that pass
holds. Here they are those of the old policy, over the whole mini-batch, and known before the
update: the choice does not depend on how the mini-batch is cut. In the first optimizer step after a
rollout both are the same.
"""

# T tokens of a mini-batch, N of them that train

from __future__ import annotations

from rlhf_megatron.algorithms.losses.policy_loss import TokenPickInputs
from rlhf_megatron.lazy import Tensor, torch


def compute_token_covariances(inputs: TokenPickInputs) -> tuple[Tensor, Tensor]:
    """Return the indices [N] int64 of the tokens that train, and their covariances [N] float64."""
    index_N = inputs.trains_T.nonzero().squeeze(1)
    log_probs_N = inputs.old_log_probs_T[index_N].double()
    advantages_N = inputs.advantages_T[index_N].double()
    if not index_N.numel():
        return index_N, log_probs_N
    return index_N, (log_probs_N - log_probs_N.mean()) * (advantages_N - advantages_N.mean())


def count_picked_tokens(share: float, num_tokens: int) -> int:
    """Return `share` x `num_tokens`, rounded down; at least 1 where there are any tokens."""
    return min(max(int(share * num_tokens), 1), num_tokens)


def make_index_mask(index: Tensor, like_T: Tensor) -> Tensor:
    """Return a mask of the size of `like_T`, [T] bool, True at `index`."""
    is_picked_T = torch.zeros_like(like_T, dtype=torch.bool)
    is_picked_T[index] = True
    return is_picked_T


def check_token_share(name: str, share: float) -> None:
    """Raise ValueError unless `share` is in (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(
            f"{name} ({share}) must be in (0, 1], a share of the tokens; 0.0002 is usual."
        )
