"""What each line of the loop does, in terms of the two things the controller talks to: the workers and a fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.config.rules.run import has_reward_model
from rlhf_megatron.config.schema import RunConfig, SamplingConfig
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    LogProbs,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    TrainBatch,
)
from rlhf_megatron.evaluation.evaluation import EvaluationResult, evaluate, first_items
from rlhf_megatron.observe.metrics.batch import bad_columns, valid_samples, version_metrics
from rlhf_megatron.observe.metrics.mismatch import MismatchCheck
from rlhf_megatron.recovery.checkpointer import check_replicas
from rlhf_megatron.recovery.journal import Journal
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.recovery.route_files import RouteFiles
from rlhf_megatron.recovery.skips import Skips
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.engine import GeneratedSample, SamplingParams
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.requests import build_requests, collect, sampling_params
from rlhf_megatron.runtime.proxies import Workers
from rlhf_megatron.scheduler.advantages import AdvantageStage, correction_columns
from rlhf_megatron.scheduler.model_rewards import ModelRewards
from rlhf_megatron.scheduler.parts import Parts, RunData
from rlhf_megatron.scheduler.samples import (
    filtered,
    give_back_memory,
    greedy_length_metrics,
    of_groups,
    resampled,
    reward_samples,
    teaches_nothing,
    to_scored,
)
from rlhf_megatron.scheduler.update import (
    UpdateSettings,
    actor_update,
    annotate,
    critic_update,
    leave_out,
    record_routes,
    run_updates,
    with_own,
)
from rlhf_megatron.sync.colocation import Turns
from rlhf_megatron.sync.weight_sync import Sync


@dataclass
class Stages:
    """One object a run. Every method is one line of the loop page.

    `generate` hands back what the journal has of a step, with the columns of later stages; those pass it on as it is.
    """

    config: RunConfig
    workers: Workers
    fleet: EngineFleet | None  # None in a replay
    data: RunData
    parts: Parts
    weight_sync: Sync
    scorer: Callable[[Sequence[RewardSample]], list[RewardResult]]
    recorder: Recorder | None = None
    journal: Journal | None = None
    skips: Skips = field(default_factory=Skips)
    turns: Turns = field(default_factory=Turns)  # of trainer and engines, where they share devices
    route_files: RouteFiles = field(default_factory=RouteFiles)  # which experts samples met in the engines
    watches: Sequence[Callable[[], dict[str, float]]] = ()  # metrics that each step adds
    say: Callable[[str], object] = lambda text: None  # what the run does now

    def __post_init__(self) -> None:
        config = self.config
        self.mismatch = MismatchCheck(config.checks, config.is_exact)
        self.advantage_stage = AdvantageStage(config.algorithm, self.parts)
        self.trained_version = 0  # of the policy that the last batch was given to
        self._settings = UpdateSettings.of(config)
        self._model_rewards: ModelRewards | None = None
        if has_reward_model(config):
            budget = config.reward_model.max_token_len_per_gpu or config.actor.ppo_max_token_len_per_gpu
            self._model_rewards = ModelRewards(config.reward_model, budget, self.data.tokenizer.decode)
        self._step_metrics: dict[str, float] = {}
        self._step_began = 0.0
        self._is_filtered = config.algorithm.filter_groups.enable
        self._known: dict[int, list[GeneratedSample]] = {}  # groups that the journal has of the step
        self._greedy: RolloutBatch | None = None  # of the batch that is generated, until it is scored
        self._greedy_of_step: list[RolloutBatch] = []
        self._routes_of_step: set[str] = set()  # files of all that it generated, also of what is left out
        self._is_policy_new = True  # the engines have not got it
        self._is_compared = False  # the engine's log-probs of the step with the trainer's
        self._is_annotated = False  # the step, by a former process whose journal has it

    @property
    def version(self) -> int:
        """The version of the policy."""
        return self.weight_sync.version

    @property
    def num_drawn(self) -> int:
        """Prompts of the stream so far."""
        return self.data.stream.num_drawn if self.data.stream is not None else 0

    def begin(self) -> None:
        """A step: what the stages say from now on is of it."""
        self._step_metrics = {}
        self._greedy_of_step = []
        self._routes_of_step = set()
        self._is_compared = self._is_annotated = False
        self._step_began = time.monotonic()

    def next_prompts(self, step: int) -> PromptBatch:
        self.begin()
        assert self.data.stream is not None
        return self.data.stream.more() if self._is_filtered else self.data.stream.next(step)

    def generate(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        if (found := self._journalled(step)) is not None:
            return found
        self._known = self.journal.groups(step) if self.journal is not None else {}
        rollout = self._generate(step, prompts, 0)
        give_back_memory()
        return rollout

    def _generate(self, step: int, prompts: PromptBatch, batch_number: int) -> RolloutBatch:
        """`batch_number`: of those that the step has generated, counted from 0. Its groups stand behind those of the
        batches before it in the journal.
        """
        rollout = self.config.rollout
        params = self.sampling(SamplingConfig(rollout.temperature))
        seed = self.config.trainer.seed
        requests = build_requests(prompts, rollout.n, params, seed, step, self.route_files.place)
        if self.parts.needs_greedy_rewards:
            requests += build_requests(prompts, 1, self.sampling(SamplingConfig(temperature=0.0)), seed, step)
        begin = batch_number * len(requests)
        known = {i - begin: group for i, group in self._known.items() if begin <= i < begin + len(requests)}

        num_done = len(known)

        def on_groups(first: int, groups: Sequence[Sequence[GeneratedSample]]) -> None:
            nonlocal num_done
            num_done += len(groups)
            self.say(f"generate, {num_done} of {len(requests)} groups")
            if self.journal is not None:
                self.journal.append(step, begin + first, groups)

        assert self.fleet is not None
        self.turns.to_engines()
        groups = self.fleet.generate(requests, on_groups, known)
        faults.reach("rollout.after_generate")
        sampled, greedy = groups[: len(prompts)], groups[len(prompts) :]
        self._greedy = collect(prompts, greedy, self.data.tokenizer) if greedy else None
        return collect(prompts, sampled, self.data.tokenizer)

    def score(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        if isinstance(rollout, ScoredBatch):
            return rollout
        scored = self._score(rollout)
        if self._is_filtered:
            scored, metrics = filtered(
                scored,
                self.config.algorithm.filter_groups,
                self.config.data.train_batch_size,
                lambda number: self._another(step, number),
            )
            self._step_metrics |= metrics
            self.route_files.trained(step, self._routes_of_step.difference(scored.routes or ()))
        if self._greedy_of_step:
            self._step_metrics |= greedy_length_metrics(of_groups(self._greedy_of_step, scored.group_ids))
        self._write_journal(step, scored)
        faults.reach("loop.after_score")
        return scored

    def _another(self, step: int, batch_number: int) -> ScoredBatch:
        """The next prompts of the stream, generated and scored."""
        assert self.data.stream is not None
        return self._score(self._generate(step, self.data.stream.more(), batch_number))

    def _score(self, rollout: RolloutBatch) -> ScoredBatch:
        faults.reach("reward.before_score")
        greedy, self._greedy = self._greedy, None
        self._routes_of_step.update(rollout.routes or ())
        self.turns.to_scorers()
        results = self.scorer(reward_samples(rollout) + (reward_samples(greedy) if greedy else []))
        results, of_greedy = results[: len(rollout)], results[len(rollout) :]
        if greedy is not None:
            self._greedy_of_step.append(greedy)
        return to_scored(rollout, results, greedy, of_greedy)

    def annotate(self, step: int, scored: ScoredBatch) -> AnnotatedBatch:
        """Log-probs of the trainer's policy; values and the reference's log-probs where they are needed. What was
        annotated while others were awaited stays as it is.

        Raises ValueError where engine and trainer disagree at the first step. Later ones are compared as they train.
        """
        if self._is_annotated:
            if self._is_recorded(step):  # by the process that annotated it, which is gone
                self.turns.to_trainer()
                record_routes(self.workers, self._settings, scored)
        elif self.recorder:
            self.recorder.write(step, scored)
        annotated = scored if isinstance(scored, AnnotatedBatch) else self.annotated(step, scored)
        self._compare(step, annotated, is_first=True)
        return annotated

    def _compare(self, step: int, batch: AnnotatedBatch, is_first: bool = False) -> None:
        """Compare the engine's log-probs with the trainer's, once a step: at the first one before it trains."""
        is_due = is_first == (step == self.mismatch.first_step) and not self._is_compared
        if is_due and batch.old_log_probs is not None:
            self._is_compared = True
            self._step_metrics |= self.mismatch(step, batch, batch.old_log_probs, self.version)

    def annotated(self, step: int, scored: ScoredBatch) -> AnnotatedBatch:
        """Some samples or all of a step, with what the models say of them.

        Where the engine's log-probs are the old ones and nothing needs the trainer's, or the update tells them itself,
        these are computed at the first step only: no run begins without a comparison of engine and trainer.
        """
        self.turns.to_trainer()
        is_recorded = self._is_recorded(step)
        is_needed = self.parts.needs_log_probs and not self._is_own(step)
        has_actor = is_needed or is_recorded or step == self.mismatch.first_step
        asked = (self._settings, self.parts, scored, has_actor, is_recorded, self._model_rewards)
        annotated = annotate(self.workers, *asked)
        give_back_memory()
        return annotated

    def _is_own(self, step: int) -> bool:
        """Whether the update of a step makes the old log-probs itself."""
        return self.parts.is_own and step > self.config.trainer.critic_warmup

    def _is_recorded(self, step: int) -> bool:
        """Whether the log-probs of a step are there to record the experts that its updates' tokens meet, too."""
        return self.config.actor.router_replay == "r2" and step > self.config.trainer.critic_warmup

    def advantages(self, step: int, batch: AnnotatedBatch) -> TrainBatch:
        if not self._is_annotated:
            self._write_journal(step, batch)
        train, metrics = self.advantage_stage(batch)
        give_back_memory()
        self._step_metrics |= metrics
        faults.reach("loop.after_advantages")
        return train

    def update(self, step: int, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Epochs x mini-batches, one optimizer step each. Returns the batch, with the columns that the update told
        where the old log-probs are its own, and metrics averaged over them.

        Trained on are samples of `batch`, drawn by their reward where `algorithm.pf_ppo` asks for it.
        A batch with numbers that are not finite is not trained on. Raises NonFiniteNumbers, ReplicasDiffer.
        There is a critic where the batch has values. In the first `trainer.critic_warmup` steps it learns alone.
        """
        self.turns.to_trainer()
        self._is_policy_new = step > self.config.trainer.critic_warmup
        drawn, metrics = resampled(batch, self.config.algorithm.pf_ppo, self.config.trainer.seed, step)
        self._step_metrics |= metrics
        updates = []
        if self._is_filtered and teaches_nothing(batch, self.config.algorithm.filter_groups):
            self._is_policy_new = False
        elif drawn.values is not None:
            updates.append(critic_update(self.workers, self._settings, step, drawn))
        if self._is_policy_new:
            given = replace(drawn, old_log_probs=None) if self._is_own(step) else drawn
            updates.append(actor_update(self.workers, self._settings, step, given))
        self.trained_version = self.version
        if columns := bad_columns(batch):
            self._is_policy_new = False
            self._step_metrics |= leave_out(self.workers, updates, step, self.skips, batch, columns)
        else:
            compare = partial(self._compare, step, batch)
            own: list[LogProbs] = []
            self._step_metrics |= run_updates(updates, step, self.skips, compare, own.append)
            if own:
                batch = self._told(step, with_own(batch, self._settings, step, *own))
        self._compare(step, batch)
        give_back_memory()
        self._step_metrics |= self.route_files.metrics(batch.routes)
        self.route_files.trained(step, batch.routes)
        self._step_metrics |= self._check_replicas(step)
        for metrics_of in self.watches:
            self._step_metrics |= metrics_of()
        self._step_metrics |= version_metrics(self.trained_version, batch)
        self._step_metrics["rollout/num_samples"] = float(len(batch))
        if self.data.stream is not None and len(batch):  # a group's id is its place in the stream
            self._step_metrics["training/epoch"] = (int(batch.group_ids.max()) + 1) / self.data.stream.num_prompts
        return batch, self._step_metrics

    def _told(self, step: int, batch: TrainBatch) -> TrainBatch:
        """The metrics of log-probs that the update told; a first step's are those of a resumed run, too."""
        self._is_compared = False
        self._compare(step, batch, is_first=step == self.mismatch.first_step)
        self._step_metrics |= correction_columns(batch, valid_samples(batch), self.parts.correction, False)[1]
        return batch

    def sync(self) -> dict[str, float]:
        """Trainer's weights to all engines, verified; the policy version goes up by one.

        After a step that trained the critic only, nothing is sent and the version stays. Colocated engines get that
        one again before they generate.
        """
        self._step_metrics |= (
            self.weight_sync() if self._is_policy_new else {"policy/version": float(self.weight_sync.version)}
        )
        self._step_metrics |= self.turns.take_metrics()
        if self.fleet is not None:
            self._step_metrics |= self.fleet.take_counters()
        return self._step_metrics

    def evaluate(self, is_final: bool = True) -> EvaluationResult | None:
        """Held-out accuracy with `rollout.val_kwargs`; all items at the ends of a run, `test_samples` a set between.

        None where the run has no held-out items.
        """
        if not self.data.held_out:
            return None
        limit = None if is_final else self.config.trainer.test_samples
        return self.accuracy(limit, self.config.rollout.val_kwargs)

    def accuracy(self, num_items: int | None, sampling: SamplingConfig) -> EvaluationResult:
        """Mean score of the first `num_items` held-out items of each set (None: all)."""
        params = self.sampling(sampling)
        rollouts: list[RolloutBatch] = []  # as the model on the ranks reads them

        def generate(prompts: PromptBatch) -> Sequence[Sequence[GeneratedSample]]:
            assert self.fleet is not None
            self.turns.to_engines()
            groups = self.fleet.generate(build_requests(prompts, sampling.n, params, self.config.trainer.seed, -1))
            if self._model_rewards is not None:
                rollouts.append(collect(prompts, groups, self.data.tokenizer))
            return groups

        def score(samples: Sequence[RewardSample]) -> list[RewardResult]:
            self.turns.to_scorers()
            results = self.scorer(samples)
            if self._model_rewards is None:
                return results
            self.turns.to_trainer()
            return self._model_rewards.added(self.workers.reward_model, rollouts.pop(), results)

        sets = first_items(self.data.held_out, num_items)
        return evaluate(sets, generate, self.data.tokenizer.decode, score)

    def save_hf(self, run_dir: Path) -> None:
        """Trained weights in Hugging Face layout: the policy's, and the critic's where there is one."""
        self.turns.to_trainer()
        self.workers.host.save_hf(directory=run_dir / "hf").result()
        if self.parts.needs_values:
            self.workers.critic.save_hf(directory=run_dir / "hf_critic").result()

    def _check_replicas(self, step: int) -> dict[str, float]:
        freq = self.config.trainer.desync_freq
        if not freq or step % freq:
            return {}
        return check_replicas(self.workers.learning(self.parts.needs_values))

    def _journalled(self, step: int) -> ScoredBatch | None:
        """Return what a former process had of this step, after bringing the controller to where that one had left
        it.
        """
        found = self.journal.batch(step) if self.journal is not None else None
        if self.journal is None or found is None:
            return None
        self._step_metrics |= found.metrics
        if found.num_drawn is not None and self.data.stream is not None:
            self.data.stream.go_to(found.num_drawn)
        self._is_annotated = isinstance(found.batch, AnnotatedBatch)
        self.journal.on_regained(found.seconds)
        return found.batch

    def _write_journal(self, step: int, batch: ScoredBatch) -> None:
        if self.journal is not None:
            seconds = time.monotonic() - self._step_began
            num_drawn = self.data.stream.num_drawn if self._is_filtered and self.data.stream is not None else None
            self.journal.write(step, batch, self._step_metrics, seconds, num_drawn)

    def sampling(self, sampling: SamplingConfig) -> SamplingParams:
        return sampling_params(sampling, self.config.data.max_response_length, self.data.stop_token_ids)
