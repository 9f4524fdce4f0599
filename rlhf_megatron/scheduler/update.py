"""What the models on the hosts do in a step: they annotate its samples (log-probs, entropies, values) and learn from
them in epochs x mini-batches, one optimizer step each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from rlhf_megatron import faults
from rlhf_megatron.config.correction import is_bypass
from rlhf_megatron.config.schema import ActorConfig, CriticConfig, RunConfig
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    LogProbs,
    MiniBatch,
    ScoredBatch,
    TokenBatch,
    TrainBatch,
    gain,
    select,
    token_index,
)
from rlhf_megatron.observe.metrics.batch import BadColumn
from rlhf_megatron.recovery.skips import Skips
from rlhf_megatron.runtime.proxies import TrainedProxy, Workers
from rlhf_megatron.scheduler.mini_batches import of_epochs, picked, weighed, weighed_values
from rlhf_megatron.scheduler.model_rewards import ModelRewards
from rlhf_megatron.scheduler.parts import Parts
from rlhf_megatron.workers.contract import UpdateResult

NOTHING_MADE = {"actor/num_epochs": 0.0, "actor/num_optimizer_steps": 0.0, "actor/num_skipped_steps": 0.0}
CALLS_IN_FLIGHT = 2  # of a role: one that runs and one that waits, so that a pool is never idle


@dataclass(frozen=True)
class RoleUpdate:
    """The training of one role in a step. `send` still takes mini-batch, token budget and capsule."""

    worker: TrainedProxy
    send: partial[Future[UpdateResult]]
    num_epochs: int
    token_budget: int
    mini_batches: Callable[[], Iterator[TokenBatch]]  # of all epochs, from the first; keeps none that it has made
    samples_of: Callable[[int], TrainBatch]  # number of a mini-batch -> its samples

    def mini_batch(self, number: int) -> TokenBatch:
        """Made anew."""
        return next(islice(self.mini_batches(), number, None))


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of a run that annotations and updates read."""

    actor: ActorConfig
    critic: CriticConfig  # what it leaves null is as in `actor`
    temperature: float
    seed: int
    loss_scale_factor: float  # tokens, of seq-mean-token-sum-norm
    reference_budget: int  # tokens of a micro-batch
    has_engine_log_probs: bool  # in place of the trainer's before the update

    @classmethod
    def of(cls, config: RunConfig) -> UpdateSettings:
        factor, budget = config.actor.loss_scale_factor, config.actor.ppo_max_token_len_per_gpu
        return cls(
            config.actor,
            config.critic,
            config.rollout.temperature,
            config.trainer.seed,
            config.data.max_response_length if factor is None else factor,
            config.reference.max_token_len_per_gpu or budget,
            is_bypass(config.algorithm.rollout_correction),
        )

    @property
    def critic_budget(self) -> int:
        return self.critic.ppo_max_token_len_per_gpu or self.actor.ppo_max_token_len_per_gpu


def actor_update(workers: Workers, settings: UpdateSettings, step: int, batch: TrainBatch) -> RoleUpdate:
    """The policy's update of a step."""
    actor, seed = settings.actor, settings.seed
    order = (len(batch), actor.ppo_epochs, actor.mini_batch_size, actor.shuffle, seed, step)
    read = replace(batch, values=None, returns=None, entropies=None, sum_squares=None, process_rewards=None)

    def mini_batch(number: int, samples: list[int]) -> MiniBatch:
        part = select(read, samples)
        is_picked = picked(part, actor.policy_loss, seed, step, number)
        return weighed(part, actor.loss_agg_mode, settings.loss_scale_factor, is_picked, settings.has_engine_log_probs)

    return RoleUpdate(
        workers.actor,
        partial(workers.actor.update, temperature=settings.temperature, loss="policy"),
        actor.ppo_epochs,
        actor.ppo_max_token_len_per_gpu,
        lambda: (mini_batch(number, samples) for number, samples in enumerate(of_epochs(*order))),
        lambda number: select(batch, next(islice(of_epochs(*order), number, None))),
    )


def with_own(batch: TrainBatch, settings: UpdateSettings, step: int, own: LogProbs) -> TrainBatch:
    """`batch` with what the update of its one mini-batch told, in the order of that one's samples."""
    actor = settings.actor
    order = (len(batch), 1, actor.mini_batch_size, actor.shuffle, settings.seed, step)
    places = token_index(batch.offsets, next(of_epochs(*order)))
    assert own.entropies is not None, "an update tells both"
    columns = [torch.zeros(batch.num_tokens).index_copy_(0, places, c) for c in (own.log_probs, own.entropies)]
    return replace(batch, old_log_probs=columns[0], entropies=columns[1])


def critic_update(workers: Workers, settings: UpdateSettings, step: int, batch: TrainBatch) -> RoleUpdate:
    """The critic's update of a step; its order of samples is the actor's."""
    actor, critic = settings.actor, settings.critic
    num_epochs = critic.ppo_epochs or actor.ppo_epochs
    size, mode = critic.mini_batch_size or actor.mini_batch_size, critic.loss_agg_mode or actor.loss_agg_mode
    order = (len(batch), num_epochs, size, actor.shuffle, settings.seed, step)
    read = replace(batch, process_rewards=None, entropies=None, sum_squares=None, correction_weights=None, is_kept=None)
    read = replace(read, old_log_probs=None, ref_log_probs=None)

    return RoleUpdate(
        workers.critic,
        partial(workers.critic.update),
        num_epochs,
        settings.critic_budget,
        lambda: (
            weighed_values(select(read, samples), mode, settings.loss_scale_factor) for samples in of_epochs(*order)
        ),
        lambda number: select(batch, next(islice(of_epochs(*order), number, None))),
    )


def annotate(
    workers: Workers,
    settings: UpdateSettings,
    parts: Parts,
    scored: ScoredBatch,
    has_actor: bool = True,
    is_recorded: bool = False,
    rewards: ModelRewards | None = None,
) -> AnnotatedBatch:
    """Columns of the actor (without `has_actor` none) and, where estimator and loss need them, of the critic and the
    reference. `is_recorded`: ranks keep the experts that the samples meet in the actor, where routing is replayed.
    `rewards`: what a reward model on the hosts adds to the samples' rewards.

    All calls are made before the first result is awaited: pools of their own work at the same time. In one pool they
    run in the order actor, critic, reference, reward model.
    """
    tokens = _tokens(scored, is_recorded)
    budget, temperature = settings.actor.ppo_max_token_len_per_gpu, settings.temperature
    asked = {"with_sum_squares": True} if parts.needs_sum_squares else {}
    actor = critic = reference = teacher = None
    if has_actor:
        actor = workers.actor.log_probs(tokens, budget, temperature=temperature, with_entropy=True, **asked)
    if parts.needs_values:
        critic = workers.critic.values(tokens, settings.critic_budget)
    if parts.needs_reference and parts.needs_ref_log_probs:
        reference = workers.reference.log_probs(
            tokens, settings.reference_budget, temperature=temperature, with_entropy=False
        )
    if parts.teacher_top_k:
        teacher = workers.reference.top_log_probs(
            tokens, settings.reference_budget, temperature=temperature, count=parts.teacher_top_k
        )
    asked_model = rewards.ask(workers.reward_model, scored) if rewards is not None else None
    by_actor = actor.result() if actor else None
    return gain(
        AnnotatedBatch,
        asked_model.result() if asked_model is not None else scored,
        old_log_probs=by_actor.log_probs if by_actor else None,
        entropies=by_actor.entropies if by_actor else None,
        sum_squares=by_actor.sum_squares if by_actor else None,
        values=critic.result().values if critic else None,
        ref_log_probs=reference.result().log_probs if reference else None,
        teacher_ids=teacher.result().teacher_ids if teacher else None,
        teacher_log_probs=teacher.result().teacher_log_probs if teacher else None,
    )


def record_routes(workers: Workers, settings: UpdateSettings, batch: ScoredBatch) -> None:
    """Have the ranks keep the experts that samples meet in the actor before its update, as `annotate` does."""
    budget = settings.actor.ppo_max_token_len_per_gpu
    workers.actor.log_probs(_tokens(batch, is_recorded=True), budget, temperature=settings.temperature).result()


def _tokens(batch: ScoredBatch, is_recorded: bool) -> TokenBatch:
    sample_ids = batch.sample_ids if is_recorded else None
    columns = (batch.offsets, batch.token_ids, batch.response_mask)
    return TokenBatch(*columns, sample_ids=sample_ids, routes=batch.routes)


def run_updates(
    updates: Sequence[RoleUpdate],
    step: int = 0,
    skips: Skips | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    on_own: Callable[[LogProbs], None] = lambda own: None,
) -> dict[str, float]:
    """Train each role. Returns metrics averaged over its optimizer steps. `meanwhile` is called once the ranks have
    work, `on_own` with each `UpdateResult.own`.

    Roles take turns, one mini-batch each, as long as they have any: that is the order in which one pool runs them.
    Pools of their own work at the same time. A role's next mini-batch goes out when its last but one is done.
    `skips` sees each outcome; once it has had enough nothing is sent any more, and NonFiniteNumbers raised.
    """
    skips = skips or Skips()
    runs = [_RoleRun(update, step, skips) for update in updates]
    to_send = [(run, update.mini_batches()) for run, update in zip(runs, updates, strict=True)]
    while to_send and not skips.is_over:
        for turn in list(to_send):
            run, mini_batches = turn
            if not run.send(mini_batches):
                to_send.remove(turn)
        if all(run.num_sent == 1 for run in runs):
            meanwhile()
    metrics = dict(NOTHING_MADE)
    for run in runs:
        run.finish()
    skips.settle(step, [(run.skips, run.update.samples_of, run.update.mini_batch) for run in runs])
    for result in (result for run in runs for result in run.results):
        if result.own is not None:
            on_own(result.own)
    for run in runs:
        metrics |= update_metrics(run.update.worker.role, run.update.num_epochs, run.results)
    return metrics


class _RoleRun:
    """The calls of one role in a step."""

    def __init__(self, update: RoleUpdate, step: int, skips: Skips) -> None:
        self.update = update
        self.results: list[UpdateResult] = []
        self.num_sent = 0
        self.skips = skips.begin(step, update.worker, update.token_budget, dict(update.send.keywords))
        self._all_skips = skips
        self._send = partial(update.send, capsule=self.skips.place)
        self._waiting: deque[Future[UpdateResult]] = deque()

    def send(self, mini_batches: Iterator[TokenBatch]) -> bool:
        """Send the next one. Return whether there was one. It is made here and kept nowhere: one stands at a time."""
        mini_batch = next(mini_batches, None)
        if mini_batch is None or self._all_skips.is_over:
            return mini_batch is not None
        if len(self._waiting) == CALLS_IN_FLIGHT:
            self._take()
        self._waiting.append(self._send(mini_batch, self.update.token_budget))
        self.num_sent += 1
        return True

    def finish(self) -> None:
        while self._waiting:
            self._take()

    def _take(self) -> None:
        result = self._waiting.popleft().result()
        self._all_skips.seen(self.skips, len(self.results), result)
        self.results.append(result)
        if self.update.worker.role == "actor":
            faults.reach("update.after_mini_batch")


def leave_out(
    workers: Workers,
    updates: Sequence[RoleUpdate],
    step: int,
    skips: Skips,
    batch: TrainBatch,
    columns: Sequence[BadColumn],
) -> dict[str, float]:
    """Skip the step, in place of `run_updates`, for a batch with `columns` that are not finite. Returns the metrics
    of skipped steps.
    """
    roles = {update.worker.role: update for update in updates}
    skips.leave_out(workers, step, list(roles), batch, columns)
    metrics = dict(NOTHING_MADE)
    for role, update in roles.items():
        count = float(sum(1 for _ in update.mini_batches()))
        metrics |= {f"{role}/num_optimizer_steps": count, f"{role}/num_skipped_steps": count, f"{role}/num_epochs": 0.0}
    return metrics


def update_metrics(role: str, num_epochs: int, results: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over the optimizer steps that were made, nan where none was; counts, the last lr, under the role's name."""
    made = [result for result in results if not result.is_skipped]
    count = len(made) or math.nan
    return {
        **{name: sum(result.sums[name] for result in made) / count for name in results[0].sums},
        f"{role}/grad_norm": sum(result.grad_norm for result in made) / count,
        f"{role}/lr": results[-1].lr,
        f"{role}/num_optimizer_steps": float(len(results)),
        f"{role}/num_skipped_steps": float(len(results) - len(made)),
        f"{role}/num_epochs": float(num_epochs),
    }
