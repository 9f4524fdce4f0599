"""The scores of a reward model on the hosts become rewards: one a response, one a step of it,
or one a token.

A step ends with the token at which the text of the response so far holds one more separator; the
response's last token ends the last step. Pieces of text are tokens decoded one by one, so that a
separator is found where it is spread over several of them.
"""

# B samples, T tokens of their prompts and responses, N tokens that are scored

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from rlhf_megatron.algorithms.loss_aggregation import sum_by_sequence
from rlhf_megatron.config.rules.part_rules import MODEL_PART
from rlhf_megatron.config.schema import RewardModelConfig
from rlhf_megatron.controller.scheduler.scored_samples import make_scored_batch
from rlhf_megatron.data.batch import (
    CriticValues,
    RolloutBatch,
    ScoredBatch,
    TokenBatch,
    append_next_state_positions,
    find_next_state_positions,
)
from rlhf_megatron.rewards.scorers.reward_types import RewardResult, is_masked
from rlhf_megatron.runtime.role_proxies import RewardModelProxy


@dataclass(frozen=True)
class ModelRewardScorer:
    """The use that a run makes of its reward model's scores. `decode_tokens`: token ids to text."""

    config: RewardModelConfig
    token_budget: int
    decode_tokens: Callable[[Sequence[int]], str]
    _token_texts: dict[int, str] = field(default_factory=dict)

    def request_scores(
        self, reward_model: RewardModelProxy, batch: ScoredBatch
    ) -> PendingScores | None:
        """Start to score a batch on the hosts, and return the pending scores without waiting for
        them. Return None where the batch already has the model's scores, from a record.
        """
        if MODEL_PART in batch.reward_parts:
            return None
        is_scored_T = self.mask_scored_tokens(batch)
        tokens = TokenBatch(batch.offsets, batch.token_ids, batch.response_mask)
        return PendingScores(
            self,
            batch,
            is_scored_T,
            reward_model.values(
                append_next_state_positions(tokens, is_scored_T), self.token_budget
            ),
        )

    def add_model_scores(
        self, reward_model: RewardModelProxy, rollout: RolloutBatch, results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        """Score the samples of `rollout` with the reward model, wait, and return `results` with the
        model's scores added to their scores. Results of masked status stay as they are.
        """
        asked = self.request_scores(reward_model, make_scored_batch(rollout, results))
        assert asked is not None
        rewards = asked.await_scored_batch().rewards.tolist()
        return [
            one if is_masked(one.status) else replace(one, score=reward)
            for one, reward in zip(results, rewards, strict=True)
        ]

    def mask_scored_tokens(self, batch: ScoredBatch) -> Tensor:
        """Return [T] bool: the tokens whose scores count, at least one for each sample (the last
        token of the response, or of the sample where there is no response). Granularity "token"
        marks all response tokens, "step" also the last token of each step.
        """
        if self.config.granularity == "token":
            is_scored_T = batch.response_mask.clone()
        else:
            is_scored_T = torch.zeros_like(batch.response_mask)
        mask = batch.response_mask
        borders = batch.offsets.tolist()
        for begin, end in pairwise(borders):
            of_response = mask[begin:end].nonzero().view(-1).tolist()
            is_scored_T[begin + (of_response[-1] if of_response else end - begin - 1)] = True
            if self.config.granularity == "step":
                ids = batch.token_ids[begin:end][mask[begin:end]].tolist()
                for place in find_step_ends(
                    [self._decode_token(token) for token in ids], self.config.step_separator
                ):
                    is_scored_T[begin + of_response[place]] = True
        return is_scored_T

    def add_scores_to_rewards(
        self, batch: ScoredBatch, is_scored_T: Tensor, scores_T: Tensor
    ) -> ScoredBatch:
        """Return `batch` with the model's scores, normalised and weighted, added to its rewards,
        and with the unweighted scores as the reward part `reward_model`. For granularities other
        than "response" also add the weighted score of each token to `process_rewards`.

        `scores_T`: [T], the scores of the model at the tokens of `is_scored_T`.
        """
        chosen = self.config
        scores_T = (scores_T.double() - chosen.mean) / chosen.std
        scores_T = scores_T.sigmoid() if chosen.activation == "sigmoid" else scores_T
        scores_T = scores_T.masked_fill(~is_scored_T, 0.0)
        if chosen.granularity != "response" and chosen.step_reduction == "mean":
            counts_B = sum_by_sequence(is_scored_T.double(), batch.offsets)
            scores_T = scores_T / torch.repeat_interleave(counts_B, batch.lengths)
        scores_B = sum_by_sequence(scores_T, batch.offsets)
        shares = batch.process_rewards  # of the turns of episodes
        if chosen.granularity != "response":
            paid_T = (chosen.weight * scores_T).float()
            shares = paid_T if shares is None else shares + paid_T
        return replace(
            batch,
            rewards=(batch.rewards.double() + chosen.weight * scores_B).float(),
            reward_parts={**batch.reward_parts, MODEL_PART: scores_B.float()},
            process_rewards=shares,
        )

    def _decode_token(self, token_id: int) -> str:
        """Return the text of one token, decoded once and then cached."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode_tokens([token_id])
        return self._token_texts[token_id]


@dataclass(frozen=True)
class PendingScores:
    """A batch that the hosts score."""

    scorer: ModelRewardScorer
    batch: ScoredBatch
    is_scored_T: Tensor
    values_future: Future[CriticValues]

    def await_scored_batch(self) -> ScoredBatch:
        """Wait for the scores, and return the batch with the scores added to its rewards."""
        scores_T = torch.zeros(self.batch.num_tokens)
        behind_N = find_next_state_positions(self.batch.offsets, self.is_scored_T)
        scores_T[self.is_scored_T] = self.values_future.result().values[behind_N]
        return self.scorer.add_scores_to_rewards(self.batch, self.is_scored_T, scores_T)


def find_step_ends(token_texts: Sequence[str], separator: str) -> list[int]:
    """Return the indices of the token texts that complete a separator; of overlapping separators
    only the first counts.
    """
    found = []
    rest = ""
    for place, piece in enumerate(token_texts):
        rest += piece
        if separator in rest:
            found.append(place)
            rest = rest.rpartition(separator)[2]
        elif len(rest) > len(separator):
            rest = rest[-len(separator) :]
    return found
