"""What a step of the supervised jobs does, in terms of a model's two verbs: log_probs (or values) and update.

Nothing here knows a backend, a launcher or a layout. `Answers` learns documents; `Preferences` learns pairs, and
`Rewards` a model that scores them.
"""

# P pairs, B documents, T tokens

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_megatron.algorithms.aggregate import metric_weights, sequence_sums
from rlhf_megatron.algorithms.preferences import PREFERENCE_LOSSES, Pairs
from rlhf_megatron.config.schema import ActorConfig, SFTConfig
from rlhf_megatron.config.typed import params_from_mapping
from rlhf_megatron.data.batch import MiniBatch, TokenBatch, ValueMiniBatch, with_places_behind
from rlhf_megatron.data.samples import DocumentSource, SampleBatch, SampleSet
from rlhf_megatron.evaluation.intervals import wilson_interval
from rlhf_megatron.runtime.proxies import ActorProxy, CriticProxy, ReferenceProxy, Workers
from rlhf_megatron.scheduler.mini_batches import supervised_mini_batch
from rlhf_megatron.workers.contract import UpdateResult


@dataclass(frozen=True)
class Figures:
    """Sums over some samples, and what they are divided by."""

    sums: dict[str, float]
    count: float

    def means(self) -> dict[str, float]:
        return {name: value / max(self.count, 1.0) for name, value in self.sums.items()}


def added(parts: Sequence[Figures]) -> Figures:
    """Add up the figures of all parts."""
    names = parts[0].sums if parts else ()
    return Figures({name: sum(part.sums[name] for part in parts) for name in names}, sum(part.count for part in parts))


class Learner(Protocol):
    """How a job learns, and what it measures."""

    def update(self, batch: SampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        """Make one optimizer step over the samples. Returns metrics: "sft/loss", which the step made smaller."""

    def measure(self, batch: SampleBatch) -> Figures:
        """Return the loss without learning."""


@dataclass(frozen=True)
class Answers:
    """The negative log-prob of what trains, over one denominator of the whole mini-batch."""

    actor: ActorProxy
    token_budget: int
    mode: str = "token-mean"  # registered aggregation
    scale_factor: float | None = None

    def update(self, batch: SampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        mini_batch = supervised_mini_batch(batch.tokens, self.mode, self.scale_factor, batch.weights)
        result = _updated(self.actor, mini_batch, self.token_budget)
        return result, {"sft/loss": result.sums["actor/loss"]}

    def measure(self, batch: SampleBatch) -> Figures:
        """Return nats, over the tokens that train; weights of samples do not count."""
        found = self.actor.log_probs(batch.tokens, self.token_budget, temperature=1.0).result()
        return Figures({"loss": -float(found.log_probs.double().sum())}, float(batch.tokens.response_mask.sum()))


@dataclass(frozen=True)
class Distillation(Answers):
    """A divergence from the teacher's most likely tokens, at the places that train. Measured as answers are."""

    teacher: ReferenceProxy | None = None  # asked where the rows do not bring what it told
    teacher_budget: int = 0
    top_k: int = 16

    def update(self, batch: SampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        told = batch.taught
        if told is None:
            assert self.teacher is not None, "its maker gives it one"
            asked = self.teacher.top_log_probs(batch.tokens, self.teacher_budget, temperature=1.0, count=self.top_k)
            told = asked.result()
        mini_batch = replace(
            supervised_mini_batch(batch.tokens, self.mode, self.scale_factor, batch.weights),
            teacher_ids=told.teacher_ids,
            teacher_log_probs=told.teacher_log_probs,
        )
        result = _updated(self.actor, mini_batch, self.token_budget, "distillation")
        return result, {"sft/loss": result.sums["actor/loss"]}


@dataclass(frozen=True)
class Preferences:
    """A preference loss: its slopes by the log-probs of both answers become the loss weights of their tokens."""

    actor: ActorProxy
    reference: ReferenceProxy | None  # None: the loss needs none
    loss: Callable[[Pairs, Any], Any]
    params: Any
    token_budget: int
    reference_budget: int

    def update(self, batch: SampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        figures, slopes_B = self._looked_at(batch)
        tokens = batch.tokens
        weights_T = -torch.repeat_interleave(slopes_B, tokens.lengths) * tokens.response_mask
        mini_batch = MiniBatch(
            offsets=tokens.offsets,
            token_ids=tokens.token_ids,
            response_mask=tokens.response_mask,
            loss_weights=weights_T.float(),
            metric_weights=metric_weights(tokens.response_mask, int(tokens.response_mask.sum())),
        )
        means = figures.means()
        return _updated(self.actor, mini_batch, self.token_budget), {"sft/loss": means.pop("loss"), **means}

    def measure(self, batch: SampleBatch) -> Figures:
        return self._looked_at(batch)[0]

    def _looked_at(self, batch: SampleBatch) -> tuple[Figures, Tensor]:
        """Figures of the pairs, and [B] float64 slopes of the mean weighted loss by the log-prob of each document."""
        tokens = batch.tokens
        asked = [self.actor.log_probs(tokens, self.token_budget, temperature=1.0)]
        if self.reference is not None:
            asked.append(self.reference.log_probs(tokens, self.reference_budget, temperature=1.0))
        sums = [sequence_sums(call.result().log_probs, tokens.offsets).double().view(-1, 2) for call in asked]
        policy = sums[0].requires_grad_()
        reference = sums[1] if len(sums) > 1 else torch.zeros_like(sums[0])
        counts = sequence_sums(tokens.response_mask.float(), tokens.offsets).double().view(-1, 2)
        figures, slopes = _of_pairs(self.loss, self.params, policy, reference, counts, batch.weights)
        chosen, rejected = policy.detach().sum(0).tolist()
        of_policy = {"logps/chosen": chosen, "logps/rejected": rejected}
        return Figures(figures.sums | of_policy, figures.count), slopes


@dataclass(frozen=True)
class Rewards:
    """A loss of pairs of rewards. A document's reward is the value of the state behind its last token."""

    model: CriticProxy
    loss: Callable[[Pairs, Any], Any]
    params: Any
    token_budget: int

    def update(self, batch: SampleBatch) -> tuple[UpdateResult, dict[str, float]]:
        tokens, figures, slopes_B = self._looked_at(batch)
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
        means = figures.means()
        result = self.model.update(mini_batch, self.token_budget, loss="linear").result()
        return result, {"sft/loss": means.pop("loss"), **means}

    def measure(self, batch: SampleBatch) -> Figures:
        return self._looked_at(batch)[1]

    def _looked_at(self, batch: SampleBatch) -> tuple[TokenBatch, Figures, Tensor]:
        """The documents with their rewards' places, figures, and slopes as `Preferences` has them."""
        tokens = with_places_behind(batch.tokens)
        values = self.model.values(tokens, self.token_budget).result().values
        rewards = sequence_sums(values, tokens.offsets).double().view(-1, 2).requires_grad_()
        zeros, ones = torch.zeros_like(rewards), torch.ones_like(rewards)
        return tokens, *_of_pairs(self.loss, self.params, rewards, zeros, ones, batch.weights)


def _of_pairs(
    loss: Callable[[Pairs, Any], Any], params: Any, scores: Tensor, reference: Tensor, counts: Tensor, weights: Tensor
) -> tuple[Figures, Tensor]:
    """Figures of P pairs, and [B] float64 slopes of the mean weighted loss by each score.

    `scores`, with grad, `reference` and `counts`: [P, 2], the chosen answer first.
    """
    found = loss(Pairs(*[matrix[:, k] for matrix in (scores, reference, counts) for k in (0, 1)]), params)
    weighted_P = found.loss_P * weights.double()
    (slopes,) = torch.autograd.grad(weighted_P.sum() / len(weights), scores)
    margins_P = found.chosen_rewards_P - found.rejected_rewards_P
    means = {
        "loss": weighted_P.detach(),
        "rewards/chosen": found.chosen_rewards_P,
        "rewards/rejected": found.rejected_rewards_P,
        "rewards/margins": margins_P,
        "rewards/accuracies": (margins_P > 0).double(),
    }
    return Figures({name: float(column.sum()) for name, column in means.items()}, len(weights)), slopes.flatten()


def _updated(actor: ActorProxy, mini_batch: MiniBatch, token_budget: int, loss: str = "sft") -> UpdateResult:
    return actor.update(mini_batch, token_budget, temperature=1.0, loss=loss).result()


def make_learner(
    sft: SFTConfig,
    actor: ActorConfig,
    reference_budget: int | None,
    is_pairs: bool,
    is_reward_model: bool,
    teacher_top_k: int,
    workers: Workers,
) -> Learner:
    """Make the learner that `sft.loss_mode` names. Raises ValueError for parameters that the loss does not have.

    `reference_budget`: tokens of a micro-batch, where it is not the actor's; `teacher_top_k`: 0 where there is no
    teacher.
    """
    budget = actor.ppo_max_token_len_per_gpu
    of_reference = reference_budget or budget
    if not is_pairs:
        factor = sft.max_length if actor.loss_scale_factor is None else actor.loss_scale_factor
        answers = (workers.actor, budget, actor.loss_agg_mode, factor)
        if not teacher_top_k:
            return Answers(*answers)
        return Distillation(*answers, workers.reference, of_reference, teacher_top_k)
    entry = PREFERENCE_LOSSES.get(sft.loss_mode)
    params = params_from_mapping(entry.params, sft.params, "sft.params") if entry.params is not None else None
    if is_reward_model:
        return Rewards(workers.learning_reward_model, entry.build, params, budget)
    reference = workers.reference if "ref_log_probs" in entry.needs else None
    return Preferences(workers.actor, reference, entry.build, params, budget, of_reference)


ACCURACY = "rewards/accuracies"


def held_out_metrics(
    learner: Learner, sets: Sequence[DocumentSource], batch_size: int, limit: int | None
) -> dict[str, float]:
    """Losses and perplexities of the held-out sets, of the first `limit` samples of each (None: all), and of all
    together; what a preference loss measures beside."""
    by_set = {one.name: added([learner.measure(part) for part in _parts(one.items, batch_size, limit)]) for one in sets}
    metrics: dict[str, float] = {}
    for prefix, figures in (("val", added(list(by_set.values()))), *((f"val/{n}", f) for n, f in by_set.items())):
        means = figures.means()
        metrics |= {f"{prefix}/{name}": value for name, value in means.items()}
        if ACCURACY in means:
            ends = wilson_interval(means[ACCURACY], figures.count)
            metrics |= dict(zip((f"{prefix}/{ACCURACY}_low", f"{prefix}/{ACCURACY}_high"), ends, strict=True))
        if isinstance(learner, Answers):
            metrics[f"{prefix}/perplexity"] = math.exp(min(means["loss"], 700.0))
    return metrics


def _parts(items: SampleSet, batch_size: int, limit: int | None) -> Iterator[SampleBatch]:
    count = len(items) if limit is None else min(limit, len(items))
    for first in range(0, count, batch_size):
        yield items.batch(range(first, min(first + batch_size, count)))
