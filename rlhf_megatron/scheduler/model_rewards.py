"""The scores of a reward model on the hosts become rewards: one a response, one a step of it, or one a token.

A step ends with the token at which the text of the response so far holds one more separator; the response's last token
ends the last step. Pieces of text are tokens decoded one by one, so that a separator is found where it is spread over
several of them.
"""

# B samples, T tokens of their prompts and responses, N tokens that are scored

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from rlhf_megatron.algorithms.aggregate import sequence_sums
from rlhf_megatron.config.rules.parts import MODEL_PART
from rlhf_megatron.config.schema import RewardModelConfig
from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, TokenBatch, Values, places_behind, with_places_behind
from rlhf_megatron.rewards.scorers.base import RewardResult, is_masked
from rlhf_megatron.runtime.proxies import RewardModelProxy
from rlhf_megatron.scheduler.samples import to_scored


@dataclass(frozen=True)
class ModelRewards:
    """The use that a run makes of its reward model's scores. `decode`: token ids to text."""

    config: RewardModelConfig
    token_budget: int
    decode: Callable[[Sequence[int]], str]
    _pieces: dict[int, str] = field(default_factory=dict)

    def ask(self, model: RewardModelProxy, batch: ScoredBatch) -> Asked | None:
        """Have the hosts score a batch; None where it has its scores, from a record."""
        if MODEL_PART in batch.reward_parts:
            return None
        is_scored_T = self.places(batch)
        tokens = TokenBatch(batch.offsets, batch.token_ids, batch.response_mask)
        return Asked(self, batch, is_scored_T, model.values(with_places_behind(tokens, is_scored_T), self.token_budget))

    def added(
        self, model: RewardModelProxy, rollout: RolloutBatch, results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        """`results` of the samples of `rollout`, with the model's scores; masked ones as they are."""
        asked = self.ask(model, to_scored(rollout, results))
        assert asked is not None
        rewards = asked.result().rewards.tolist()
        return [
            one if is_masked(one.status) else replace(one, score=reward)
            for one, reward in zip(results, rewards, strict=True)
        ]

    def places(self, batch: ScoredBatch) -> Tensor:
        """[T] bool: the tokens that are scored, of each sample one at least (the last, where it has no response)."""
        if self.config.granularity == "token":
            is_scored_T = batch.response_mask.clone()
        else:
            is_scored_T = torch.zeros_like(batch.response_mask)
        mask, borders = batch.response_mask, batch.offsets.tolist()
        for begin, end in pairwise(borders):
            of_response = mask[begin:end].nonzero().view(-1).tolist()
            is_scored_T[begin + (of_response[-1] if of_response else end - begin - 1)] = True
            if self.config.granularity == "step":
                ids = batch.token_ids[begin:end][mask[begin:end]].tolist()
                for place in step_ends([self._piece(token) for token in ids], self.config.step_separator):
                    is_scored_T[begin + of_response[place]] = True
        return is_scored_T

    def paid(self, batch: ScoredBatch, is_scored_T: Tensor, scores_T: Tensor) -> ScoredBatch:
        """`batch` with the model's scores in its rewards, and as the part `reward_model` before their weight.

        `scores_T`: [T], as the model gave them at `is_scored_T`.
        """
        chosen = self.config
        scores_T = (scores_T.double() - chosen.mean) / chosen.std
        scores_T = scores_T.sigmoid() if chosen.activation == "sigmoid" else scores_T
        scores_T = scores_T.masked_fill(~is_scored_T, 0.0)
        if chosen.granularity != "response" and chosen.step_reduction == "mean":
            counts_B = sequence_sums(is_scored_T.double(), batch.offsets)
            scores_T = scores_T / torch.repeat_interleave(counts_B, batch.lengths)
        scores_B = sequence_sums(scores_T, batch.offsets)
        shares = None if chosen.granularity == "response" else (chosen.weight * scores_T).float()
        return replace(
            batch,
            rewards=(batch.rewards.double() + chosen.weight * scores_B).float(),
            reward_parts={**batch.reward_parts, MODEL_PART: scores_B.float()},
            process_rewards=shares,
        )

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]


@dataclass(frozen=True)
class Asked:
    """A batch that the hosts score."""

    rewards: ModelRewards
    batch: ScoredBatch
    is_scored_T: Tensor
    call: Future[Values]

    def result(self) -> ScoredBatch:
        """Wait for the scores, and return the batch with them."""
        scores_T = torch.zeros(self.batch.num_tokens)
        behind_N = places_behind(self.batch.offsets, self.is_scored_T)
        scores_T[self.is_scored_T] = self.call.result().values[behind_N]
        return self.rewards.paid(self.batch, self.is_scored_T, scores_T)


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Return the places of the pieces that complete a separator; of overlapping ones the first counts."""
    found, rest = [], ""
    for place, piece in enumerate(pieces):
        rest += piece
        if separator in rest:
            found.append(place)
            rest = rest.rpartition(separator)[2]
        elif len(rest) > len(separator):
            rest = rest[-len(separator) :]
    return found
