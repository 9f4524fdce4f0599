"""What the models on the hosts do in a step: they annotate its samples (log-probs, entropies,
values) and learn from them in epochs x mini-batches, one optimizer step each.
"""

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
from rlhf_megatron.config.rollout_correction_rules import is_bypass_mode
from rlhf_megatron.config.rules.batch_rules import compute_longest_rollout
from rlhf_megatron.config.schema import ActorConfig, CriticConfig, RunConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import NonFiniteColumn
from rlhf_megatron.controller.recovery.nonfinite_skips import NonFiniteSkips
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup
from rlhf_megatron.controller.scheduler.mini_batches import (
    iterate_mini_batch_indices,
    make_actor_mini_batch,
    make_critic_mini_batch,
    make_token_selection_mask,
)
from rlhf_megatron.controller.scheduler.model_rewards import ModelRewardScorer
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    MiniBatch,
    ScoredBatch,
    TokenBatch,
    TokenLogProbs,
    TrainBatch,
    add_columns,
    make_token_index,
    select_samples,
)
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.role_proxies import RoleProxies, TrainedProxy

METRICS_WITHOUT_UPDATE = {
    "actor/num_epochs": 0.0,
    "actor/num_optimizer_steps": 0.0,
    "actor/num_skipped_steps": 0.0,
}
CALLS_IN_FLIGHT = 2  # of a role: one that runs and one that waits, so that a pool is never idle


@dataclass(frozen=True)
class RoleUpdate:
    """The training of one role in a step. `send_update` still takes mini-batch, token
    budget and capsule.
    """

    proxy: TrainedProxy
    send_update: partial[Future[UpdateResult]]
    num_epochs: int
    token_budget: int
    # of all epochs, from the first; keeps none that it has made
    make_mini_batches: Callable[[], Iterator[TokenBatch]]
    select_samples: Callable[[int], TrainBatch]  # number of a mini-batch -> its samples

    def remake_mini_batch(self, mini_batch_number: int) -> TokenBatch:
        """Make the mini-batch of this number again, and all mini-batches before it."""
        return next(islice(self.make_mini_batches(), mini_batch_number, None))


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of a run that annotations and updates read."""

    actor: ActorConfig
    critic: CriticConfig  # what it leaves null is as in `actor`
    temperature: float
    seed: int
    loss_scale_factor: float  # tokens, of seq-mean-token-sum-norm
    reference_token_budget: int  # tokens of a micro-batch
    use_engine_log_probs: bool  # in place of the trainer's before the update

    @classmethod
    def from_run_config(cls, config: RunConfig) -> UpdateSettings:
        """Read the settings from `config`: where the loss scale factor is null, use the largest
        length of a sample behind its prompt, be it one answer or an episode; where the reference
        has no token budget, use the actor's.
        """
        factor = config.actor.loss_scale_factor
        longest_response = compute_longest_rollout(config) - config.data.max_prompt_length
        budget = config.actor.ppo_max_token_len_per_gpu
        return cls(
            config.actor,
            config.critic,
            config.rollout.temperature,
            config.trainer.seed,
            longest_response if factor is None else factor,
            config.reference.max_token_len_per_gpu or budget,
            is_bypass_mode(config.algorithm.rollout_correction),
        )

    @property
    def critic_token_budget(self) -> int:
        """Return the tokens of a micro-batch of the critic; the actor's where the critic has no
        setting of its own.
        """
        return self.critic.ppo_max_token_len_per_gpu or self.actor.ppo_max_token_len_per_gpu


def plan_actor_update(
    workers: RoleProxies, settings: UpdateSettings, step: int, batch: TrainBatch
) -> RoleUpdate:
    """Plan the policy's update of a step over `batch`, without sending anything. The mini-batches
    are made when they are iterated.
    """
    actor = settings.actor
    seed = settings.seed
    iterate_indices = partial(
        iterate_mini_batch_indices,
        len(batch),
        actor.ppo_epochs,
        actor.mini_batch_size,
        actor.shuffle,
        seed,
        step,
    )
    read = replace(
        batch, values=None, returns=None, entropies=None, sum_squares=None, process_rewards=None
    )

    def make_mini_batch(mini_batch_number: int, sample_indices: list[int]) -> MiniBatch:
        """Return the samples of these indices as mini-batch `mini_batch_number`, with the tokens
        that the loss selects.
        """
        part = select_samples(read, sample_indices)
        is_picked = make_token_selection_mask(
            part, actor.policy_loss, seed, step, mini_batch_number
        )
        return make_actor_mini_batch(
            part,
            actor.loss_agg_mode,
            settings.loss_scale_factor,
            is_picked,
            settings.use_engine_log_probs,
        )

    return RoleUpdate(
        workers.actor,
        partial(workers.actor.update, temperature=settings.temperature, loss="policy"),
        actor.ppo_epochs,
        actor.ppo_max_token_len_per_gpu,
        lambda: (
            make_mini_batch(number, samples) for number, samples in enumerate(iterate_indices())
        ),
        lambda number: select_samples(batch, next(islice(iterate_indices(), number, None))),
    )


def attach_old_log_probs(
    batch: TrainBatch, settings: UpdateSettings, step: int, old_log_probs: TokenLogProbs
) -> TrainBatch:
    """Return `batch` with the old log-probs and entropies that the update of its only mini-batch
    returned. `old_log_probs` are in the order of that mini-batch, and are put back in the order of
    `batch`.
    """
    actor = settings.actor
    sample_indices = next(
        iterate_mini_batch_indices(
            len(batch), 1, actor.mini_batch_size, actor.shuffle, settings.seed, step
        )
    )
    places = make_token_index(batch.offsets, sample_indices)
    assert old_log_probs.entropies is not None, "an update tells both"
    columns = [
        torch.zeros(batch.num_tokens).index_copy_(0, places, c)
        for c in (old_log_probs.log_probs, old_log_probs.entropies)
    ]
    return replace(batch, old_log_probs=columns[0], entropies=columns[1])


def plan_critic_update(
    workers: RoleProxies, settings: UpdateSettings, step: int, batch: TrainBatch
) -> RoleUpdate:
    """Plan the critic's update of a step over `batch`, without sending anything. The samples come
    in the same order as in the actor's update.
    """
    actor = settings.actor
    critic = settings.critic
    num_epochs = critic.ppo_epochs or actor.ppo_epochs
    size = critic.mini_batch_size or actor.mini_batch_size
    mode = critic.loss_agg_mode or actor.loss_agg_mode
    iterate_indices = partial(
        iterate_mini_batch_indices,
        len(batch),
        num_epochs,
        size,
        actor.shuffle,
        settings.seed,
        step,
    )
    read = replace(
        batch,
        process_rewards=None,
        entropies=None,
        sum_squares=None,
        correction_weights=None,
        is_kept=None,
    )
    read = replace(read, old_log_probs=None, ref_log_probs=None)

    return RoleUpdate(
        workers.critic,
        partial(workers.critic.update),
        num_epochs,
        settings.critic_token_budget,
        lambda: (
            make_critic_mini_batch(select_samples(read, samples), mode, settings.loss_scale_factor)
            for samples in iterate_indices()
        ),
        lambda number: select_samples(batch, next(islice(iterate_indices(), number, None))),
    )


def request_annotations(
    workers: RoleProxies,
    settings: UpdateSettings,
    setup: AlgorithmSetup,
    scored_batch: ScoredBatch,
    use_actor: bool = True,
    record_routes: bool = False,
    reward_scorer: ModelRewardScorer | None = None,
) -> AnnotatedBatch:
    """Return `scored_batch` with the columns of the actor (none without `use_actor`) and, where
    estimator and loss need them, of the critic, the reference and the teacher. With `record_routes`
    the ranks keep the experts that the samples meet in the actor, where routing is replayed.
    `reward_scorer` adds the scores of a reward model on the hosts to the samples' rewards.

    All calls are made before the first result is awaited: models in different pools work at the
    same time. In one pool they run in the order actor, critic, reference, reward model.
    """
    tokens = _make_token_batch(scored_batch, record_routes)
    budget = settings.actor.ppo_max_token_len_per_gpu
    temperature = settings.temperature
    asked = {"with_sum_squares": True} if setup.needs_sum_squares else {}
    actor = critic = reference = teacher = None
    if use_actor:
        actor = workers.actor.log_probs(
            tokens, budget, temperature=temperature, with_entropy=True, **asked
        )
    if setup.needs_values:
        critic = workers.critic.values(tokens, settings.critic_token_budget)
    if setup.needs_reference and setup.needs_ref_log_probs:
        reference = workers.reference.log_probs(
            tokens, settings.reference_token_budget, temperature=temperature, with_entropy=False
        )
    if setup.teacher_top_k:
        teacher = workers.reference.top_log_probs(
            tokens,
            settings.reference_token_budget,
            temperature=temperature,
            count=setup.teacher_top_k,
        )
    asked_model = (
        reward_scorer.request_scores(workers.reward_model, scored_batch)
        if reward_scorer is not None
        else None
    )
    by_actor = actor.result() if actor else None
    return add_columns(
        AnnotatedBatch,
        asked_model.await_scored_batch() if asked_model is not None else scored_batch,
        old_log_probs=by_actor.log_probs if by_actor else None,
        entropies=by_actor.entropies if by_actor else None,
        sum_squares=by_actor.sum_squares if by_actor else None,
        values=critic.result().values if critic else None,
        ref_log_probs=reference.result().log_probs if reference else None,
        teacher_ids=teacher.result().teacher_ids if teacher else None,
        teacher_log_probs=teacher.result().teacher_log_probs if teacher else None,
    )


def record_actor_routes(workers: RoleProxies, settings: UpdateSettings, batch: ScoredBatch) -> None:
    """Run a log-prob pass of the actor whose only purpose is that the ranks keep the experts that
    the samples meet before the update, as in `request_annotations`. The log-probs are dropped.
    """
    budget = settings.actor.ppo_max_token_len_per_gpu
    workers.actor.log_probs(
        _make_token_batch(batch, record_routes=True), budget, temperature=settings.temperature
    ).result()


def _make_token_batch(batch: ScoredBatch, record_routes: bool) -> TokenBatch:
    """Return the tokens and routes of `batch`, with the sample ids only where routes are
    recorded.
    """
    sample_ids = batch.sample_ids if record_routes else None
    return TokenBatch(
        batch.offsets,
        batch.token_ids,
        batch.response_mask,
        sample_ids=sample_ids,
        routes=batch.routes,
    )


def run_role_updates(
    updates: Sequence[RoleUpdate],
    step: int = 0,
    skips: NonFiniteSkips | None = None,
    on_ranks_busy: Callable[[], None] = lambda: None,
    on_old_log_probs: Callable[[TokenLogProbs], None] = lambda old_log_probs: None,
) -> dict[str, float]:
    """Train each role, and return metrics averaged over its optimizer steps. Call `on_ranks_busy`
    once the ranks have work, and `on_old_log_probs` with the old log-probs of each result that has
    them.

    Roles take turns, one mini-batch each, as long as they have mini-batches: one pool runs them in
    that order. Roles in pools of their own work at the same time. At most CALLS_IN_FLIGHT
    mini-batches of a role are out at once. `skips` counts each outcome; when its limit is reached,
    nothing more is sent and NonFiniteNumbers is raised.
    """
    skips = skips or NonFiniteSkips()
    runs = [_RoleUpdateRun(update, step, skips) for update in updates]
    to_send = [(run, update.make_mini_batches()) for run, update in zip(runs, updates, strict=True)]
    while to_send and not skips.is_limit_reached:
        for turn in list(to_send):
            run, mini_batches = turn
            if not run.send_next(mini_batches):
                to_send.remove(turn)
        if all(run.num_sent == 1 for run in runs):
            on_ranks_busy()
    metrics = dict(METRICS_WITHOUT_UPDATE)
    for run in runs:
        run.await_all_results()
    skips.report_skipped_updates(
        step,
        [(run.role_skips, run.update.select_samples, run.update.remake_mini_batch) for run in runs],
    )
    for result in (result for run in runs for result in run.results):
        if result.old_log_probs is not None:
            on_old_log_probs(result.old_log_probs)
    for run in runs:
        metrics |= average_update_metrics(run.update.proxy.role, run.update.num_epochs, run.results)
    return metrics


class _RoleUpdateRun:
    """The calls of one role in a step."""

    def __init__(self, update: RoleUpdate, step: int, skips: NonFiniteSkips) -> None:
        """Begin the update of one role in a step, and its count of skips; nothing is sent yet."""
        self.update = update
        self.results: list[UpdateResult] = []
        self.num_sent = 0
        self.role_skips = skips.begin_role(
            step, update.proxy, update.token_budget, dict(update.send_update.keywords)
        )
        self._all_skips = skips
        self._send_update = partial(update.send_update, capsule=self.role_skips.capsule_directory)
        self._pending_results: deque[Future[UpdateResult]] = deque()

    def send_next(self, mini_batches: Iterator[TokenBatch]) -> bool:
        """Make and send the next mini-batch, after waiting for the oldest result where
        CALLS_IN_FLIGHT are out. Return whether there was a next mini-batch; when the limit of skips
        is reached, nothing is sent. No reference to the mini-batch is kept: only one is in memory
        at a time.
        """
        mini_batch = next(mini_batches, None)
        if mini_batch is None or self._all_skips.is_limit_reached:
            return mini_batch is not None
        if len(self._pending_results) == CALLS_IN_FLIGHT:
            self._await_oldest_result()
        self._pending_results.append(self._send_update(mini_batch, self.update.token_budget))
        self.num_sent += 1
        return True

    def await_all_results(self) -> None:
        """Wait until all mini-batches that were sent are done."""
        while self._pending_results:
            self._await_oldest_result()

    def _await_oldest_result(self) -> None:
        """Wait for the oldest mini-batch that is out, count its outcome in the skips, and keep its
        result.
        """
        result = self._pending_results.popleft().result()
        self._all_skips.count_update(self.role_skips, len(self.results), result)
        self.results.append(result)
        if self.update.proxy.role == "actor":
            faults.reach_fault_point("update.after_mini_batch")


def skip_step_with_bad_columns(
    workers: RoleProxies,
    updates: Sequence[RoleUpdate],
    step: int,
    skips: NonFiniteSkips,
    batch: TrainBatch,
    bad_columns: Sequence[NonFiniteColumn],
) -> dict[str, float]:
    """Skip the update of a step whose batch has numbers that are not finite in `bad_columns`;
    called in place of `run_role_updates`. Return metrics that count all mini-batches as skipped.
    """
    roles = {update.proxy.role: update for update in updates}
    skips.skip_whole_step(workers, step, list(roles), batch, bad_columns)
    metrics = dict(METRICS_WITHOUT_UPDATE)
    for role, update in roles.items():
        count = float(sum(1 for _ in update.make_mini_batches()))
        metrics |= {
            f"{role}/num_optimizer_steps": count,
            f"{role}/num_skipped_steps": count,
            f"{role}/num_epochs": 0.0,
        }
    return metrics


def average_update_metrics(
    role: str, num_epochs: int, results: Sequence[UpdateResult]
) -> dict[str, float]:
    """Return the metrics of a role: means over the optimizer steps that were not skipped (nan where
    all were), the last learning rate, and counts of optimizer steps, skipped steps and epochs.
    Needs at least one result.
    """
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
