"""What a step of the supervised jobs does, in terms of a model's two verbs: log_probs (or
values) and update.

Nothing here knows a backend, a launcher or a layout. `AnswerLearner` learns documents;
`PreferenceLearner` learns pairs, and `RewardModelLearner` a model that scores them.
"""

# P pairs, B documents, T tokens

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_megatron.algorithms.loss_aggregation import compute_metric_weights, sum_by_sequence
from rlhf_megatron.algorithms.preferences import PREFERENCE_LOSSES, PreferencePairs
from rlhf_megatron.config.schema import ActorConfig, SFTConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.controller.evaluation.confidence_intervals import compute_wilson_interval
from rlhf_megatron.controller.observe.metrics.metric_catalogue import make_source_key_part
from rlhf_megatron.controller.scheduler.mini_batches import make_supervised_mini_batch
from rlhf_megatron.data.batch import (
    MiniBatch,
    TokenBatch,
    ValueMiniBatch,
    append_next_state_positions,
)
from rlhf_megatron.data.document_samples import DocumentSampleBatch, SampleSet, SampleSource
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.role_proxies import ActorProxy, CriticProxy, ReferenceProxy, RoleProxies

ACCURACY = "rewards/accuracies"


@dataclass(frozen=True)
class LossSums:
    """Sums over some samples, and what they are divided by."""

    sums: dict[str, float]
    denominator: float

    def compute_means(self) -> dict[str, float]:
        """Return the sums divided by the denominator, or by 1 where it is smaller."""
        return {name: value / max(self.denominator, 1.0) for name, value in self.sums.items()}


def add_loss_sums(loss_sums: Sequence[LossSums]) -> LossSums:
    """Add the sums and the denominators of all parts."""
    names = loss_sums[0].sums if loss_sums else ()
    return LossSums(
        {name: sum(part.sums[name] for part in loss_sums) for name in names},
        sum(part.denominator for part in loss_sums),
    )


class SupervisedLearner(Protocol):
    """How a job learns, and what it measures."""

    def update_model(self, batch: DocumentSampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        """Make one optimizer step over the samples. Return (the result of the update, metrics:
        "sft/loss", the loss that the step minimised, and others).
        """

    def measure_loss(self, batch: DocumentSampleBatch) -> LossSums:
        """Return the loss of the samples, without learning."""


@dataclass(frozen=True)
class AnswerLearner:
    """The negative log-prob of what trains, over one denominator of the whole mini-batch."""

    actor: ActorProxy
    token_budget: int
    loss_agg_mode: str = "token-mean"  # registered aggregation
    scale_factor: float | None = None

    def update_model(self, batch: DocumentSampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        """Make one optimizer step on the negative log-probs of the documents. Return (result,
        metrics).
        """
        mini_batch = make_supervised_mini_batch(
            batch.tokens, self.loss_agg_mode, self.scale_factor, batch.weights
        )
        result = _update_actor(self.actor, mini_batch, self.token_budget)
        return result, {"sft/loss": result.sums["actor/loss"]}

    def measure_loss(self, batch: DocumentSampleBatch) -> LossSums:
        """Return the negative log-probs in nats, over the tokens that train; weights of samples do
        not count.
        """
        found = self.actor.log_probs(batch.tokens, self.token_budget, temperature=1.0).result()
        return LossSums(
            {"loss": -float(found.log_probs.double().sum())},
            float(batch.tokens.response_mask.sum()),
        )


@dataclass(frozen=True)
class DistillationLearner(AnswerLearner):
    """A divergence from the teacher's most likely tokens, at the places that train. Measured
    as answers are.
    """

    teacher: ReferenceProxy | None = None  # asked where the rows do not bring what it told
    teacher_token_budget: int = 0
    top_k: int = 16

    def update_model(self, batch: DocumentSampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        """Make one optimizer step towards the teacher's most likely tokens, which come from the
        rows or from the teacher. Return (result, metrics).
        """
        told = batch.teacher_columns
        if told is None:
            assert self.teacher is not None, "its maker gives it one"
            asked = self.teacher.top_log_probs(
                batch.tokens, self.teacher_token_budget, temperature=1.0, count=self.top_k
            )
            told = asked.result()
        mini_batch = replace(
            make_supervised_mini_batch(
                batch.tokens, self.loss_agg_mode, self.scale_factor, batch.weights
            ),
            teacher_ids=told.teacher_ids,
            teacher_log_probs=told.teacher_log_probs,
        )
        result = _update_actor(self.actor, mini_batch, self.token_budget, "distillation")
        return result, {"sft/loss": result.sums["actor/loss"]}


@dataclass(frozen=True)
class PreferenceLearner:
    """A preference loss: its slopes by the log-probs of both answers become the loss weights
    of their tokens.
    """

    actor: ActorProxy
    reference: ReferenceProxy | None  # None: the loss needs none
    pair_loss: Callable[[PreferencePairs, Any], Any]
    loss_params: Any
    token_budget: int
    reference_token_budget: int

    def update_model(self, batch: DocumentSampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        """Make one optimizer step on the pairs, weighting the tokens of each document by the slope
        of the pair loss. Return (result, metrics).
        """
        figures, slopes_B = self._compute_pair_loss(batch)
        tokens = batch.tokens
        weights_T = -torch.repeat_interleave(slopes_B, tokens.lengths) * tokens.response_mask
        mini_batch = MiniBatch(
            offsets=tokens.offsets,
            token_ids=tokens.token_ids,
            response_mask=tokens.response_mask,
            loss_weights=weights_T.float(),
            metric_weights=compute_metric_weights(
                tokens.response_mask, int(tokens.response_mask.sum())
            ),
        )
        means = figures.compute_means()
        return _update_actor(self.actor, mini_batch, self.token_budget), {
            "sft/loss": means.pop("loss"),
            **means,
        }

    def measure_loss(self, batch: DocumentSampleBatch) -> LossSums:
        """Return the loss and rewards of the pairs, without learning."""
        return self._compute_pair_loss(batch)[0]

    def _compute_pair_loss(self, batch: DocumentSampleBatch) -> tuple[LossSums, Tensor]:
        """Return (loss and rewards of the pairs; [B] float64: the slope of the mean weighted loss
        by the log-prob of each document).
        """
        tokens = batch.tokens
        asked = [self.actor.log_probs(tokens, self.token_budget, temperature=1.0)]
        if self.reference is not None:
            asked.append(
                self.reference.log_probs(tokens, self.reference_token_budget, temperature=1.0)
            )
        sums = [
            sum_by_sequence(call.result().log_probs, tokens.offsets).double().view(-1, 2)
            for call in asked
        ]
        policy = sums[0].requires_grad_()
        reference = sums[1] if len(sums) > 1 else torch.zeros_like(sums[0])
        counts = sum_by_sequence(tokens.response_mask.float(), tokens.offsets).double().view(-1, 2)
        figures, slopes = _compute_loss_and_slopes(
            self.pair_loss, self.loss_params, policy, reference, counts, batch.weights
        )
        chosen, rejected = policy.detach().sum(0).tolist()
        of_policy = {"logps/chosen": chosen, "logps/rejected": rejected}
        return LossSums(figures.sums | of_policy, figures.denominator), slopes


@dataclass(frozen=True)
class RewardModelLearner:
    """A loss of pairs of rewards. A document's reward is the value of the state behind
    its last token.
    """

    critic: CriticProxy
    pair_loss: Callable[[PreferencePairs, Any], Any]
    loss_params: Any
    token_budget: int

    def update_model(self, batch: DocumentSampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        """Make one optimizer step of the reward model on the pairs. Return (result, metrics)."""
        tokens, figures, slopes_B = self._compute_pair_loss(batch)
        weights_T = torch.repeat_interleave(slopes_B, tokens.lengths) * tokens.response_mask
        nothing_T = torch.zeros(len(tokens.token_ids))
        mini_batch = ValueMiniBatch(
            offsets=tokens.offsets,
            token_ids=tokens.token_ids,
            response_mask=tokens.response_mask,
            loss_weights=weights_T.float(),
            metric_weights=nothing_T,
            old_values=nothing_T,
            returns=nothing_T,
        )
        means = figures.compute_means()
        result = self.critic.update(mini_batch, self.token_budget, loss="linear").result()
        return result, {"sft/loss": means.pop("loss"), **means}

    def measure_loss(self, batch: DocumentSampleBatch) -> LossSums:
        """Return the loss and rewards of the pairs, without learning."""
        return self._compute_pair_loss(batch)[1]

    def _compute_pair_loss(self, batch: DocumentSampleBatch) -> tuple[TokenBatch, LossSums, Tensor]:
        """Return (the documents, with the positions at which their rewards are read; loss and
        rewards of the pairs; [B] float64: the slope of the mean weighted loss by the reward of each
        document).
        """
        tokens = append_next_state_positions(batch.tokens)
        values = self.critic.values(tokens, self.token_budget).result().values
        rewards = sum_by_sequence(values, tokens.offsets).double().view(-1, 2).requires_grad_()
        zeros = torch.zeros_like(rewards)
        ones = torch.ones_like(rewards)
        return tokens, *_compute_loss_and_slopes(
            self.pair_loss, self.loss_params, rewards, zeros, ones, batch.weights
        )


def _compute_loss_and_slopes(
    pair_loss: Callable[[PreferencePairs, Any], Any],
    loss_params: Any,
    scores: Tensor,
    reference_scores: Tensor,
    token_counts: Tensor,
    pair_weights: Tensor,
) -> tuple[LossSums, Tensor]:
    """Return (loss and rewards of P pairs; [B] float64: the slope of the mean weighted loss by each
    score).

    `scores`, with grad, `reference_scores` and `token_counts`: [P, 2], the chosen answer first.
    """
    found = pair_loss(
        PreferencePairs(
            *[matrix[:, k] for matrix in (scores, reference_scores, token_counts) for k in (0, 1)]
        ),
        loss_params,
    )
    weighted_P = found.loss_P * pair_weights.double()
    (slopes,) = torch.autograd.grad(weighted_P.sum() / len(pair_weights), scores)
    margins_P = found.chosen_rewards_P - found.rejected_rewards_P
    means = {
        "loss": weighted_P.detach(),
        "rewards/chosen": found.chosen_rewards_P,
        "rewards/rejected": found.rejected_rewards_P,
        "rewards/margins": margins_P,
        "rewards/accuracies": (margins_P > 0).double(),
    }
    return LossSums(
        {name: float(column.sum()) for name, column in means.items()}, len(pair_weights)
    ), slopes.flatten()


def _update_actor(
    actor: ActorProxy, mini_batch: MiniBatch, token_budget: int, loss: str = "sft"
) -> UpdateResult:
    """Make one optimizer step of the actor, wait for it and return the result."""
    return actor.update(mini_batch, token_budget, temperature=1.0, loss=loss).result()


def make_supervised_learner(
    sft: SFTConfig,
    actor: ActorConfig,
    reference_token_budget: int | None,
    is_pairs: bool,
    is_reward_model: bool,
    teacher_top_k: int,
    workers: RoleProxies,
) -> SupervisedLearner:
    """Make the learner that `sft.loss_mode` names. Raise ValueError for parameters that the loss
    does not have.

    `reference_token_budget`: tokens of a micro-batch of the reference, None for the actor's;
    `teacher_top_k`: 0 where there is no teacher.
    """
    budget = actor.ppo_max_token_len_per_gpu
    of_reference = reference_token_budget or budget
    if not is_pairs:
        factor = sft.max_length if actor.loss_scale_factor is None else actor.loss_scale_factor
        if not teacher_top_k:
            return AnswerLearner(workers.actor, budget, actor.loss_agg_mode, factor)
        return DistillationLearner(
            workers.actor,
            budget,
            actor.loss_agg_mode,
            factor,
            teacher=workers.reference,
            teacher_token_budget=of_reference,
            top_k=teacher_top_k,
        )
    entry = PREFERENCE_LOSSES.get(sft.loss_mode)
    params = (
        build_params(entry.params, sft.params, "sft.params") if entry.params is not None else None
    )
    if is_reward_model:
        return RewardModelLearner(workers.learning_reward_model, entry.build, params, budget)
    reference = workers.reference if "ref_log_probs" in entry.needs else None
    return PreferenceLearner(workers.actor, reference, entry.build, params, budget, of_reference)


def compute_held_out_metrics(
    learner: SupervisedLearner,
    document_sources: Sequence[SampleSource],
    batch_size: int,
    max_samples: int | None,
) -> dict[str, float]:
    """Return metrics val/* of all held-out sets together and of each set: loss, perplexity of
    documents, and the rewards of pairs. Measure the first `max_samples` samples of each set (None:
    all).
    """
    by_set = {
        one.name: add_loss_sums(
            [
                learner.measure_loss(part)
                for part in _iterate_batches(one.items, batch_size, max_samples)
            ]
        )
        for one in document_sources
    }
    metrics: dict[str, float] = {}
    for prefix, figures in (
        ("val", add_loss_sums(list(by_set.values()))),
        *((f"val/{make_source_key_part(name)}", figures) for name, figures in by_set.items()),
    ):
        means = figures.compute_means()
        metrics |= {f"{prefix}/{name}": value for name, value in means.items()}
        if ACCURACY in means:
            ends = compute_wilson_interval(means[ACCURACY], figures.denominator)
            metrics |= dict(
                zip((f"{prefix}/{ACCURACY}_low", f"{prefix}/{ACCURACY}_high"), ends, strict=True)
            )
        if isinstance(learner, AnswerLearner):
            metrics[f"{prefix}/perplexity"] = math.exp(min(means["loss"], 700.0))
    return metrics


def _iterate_batches(
    sample_set: SampleSet, batch_size: int, max_samples: int | None
) -> Iterator[DocumentSampleBatch]:
    """Yield the first `max_samples` samples of a set (None: all) in batches."""
    count = len(sample_set) if max_samples is None else min(max_samples, len(sample_set))
    for first in range(0, count, batch_size):
        yield sample_set.make_batch(range(first, min(first + batch_size, count)))
