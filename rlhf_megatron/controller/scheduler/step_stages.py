"""What each line of the loop does, in terms of the two things the controller talks to: the
workers and a fleet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rlhf_megatron import faults
from rlhf_megatron.agents.episode_batch import (
    compute_episode_metrics,
    make_process_rewards,
    make_sampled_tokens,
)
from rlhf_megatron.agents.episode_book import GroupSize
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.run_episodes import RunEpisodes
from rlhf_megatron.config.rules.run_rules import has_reward_model
from rlhf_megatron.config.schema import RunConfig, SamplingConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    EvaluationResult,
    evaluate_sets,
    limit_prompts,
)
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    compute_version_metrics,
    find_non_finite_columns,
    make_valid_sample_mask,
)
from rlhf_megatron.controller.observe.metrics.first_reference_kl import FirstReferenceKLCheck
from rlhf_megatron.controller.observe.metrics.mismatch_check import MismatchCheck
from rlhf_megatron.controller.recovery.nonfinite_skips import NonFiniteSkips
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.controller.recovery.run_checkpointer import require_equal_replicas
from rlhf_megatron.controller.recovery.run_journal import StepJournal
from rlhf_megatron.controller.scheduler.advantage_stage import (
    AdvantageStage,
    compute_correction_columns,
)
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup, RunData
from rlhf_megatron.controller.scheduler.model_rewards import ModelRewardScorer
from rlhf_megatron.controller.scheduler.model_updates import (
    UpdateSettings,
    attach_old_log_probs,
    plan_actor_update,
    plan_critic_update,
    record_actor_routes,
    request_annotations,
    run_role_updates,
    skip_step_with_bad_columns,
)
from rlhf_megatron.controller.scheduler.scored_samples import (
    compute_greedy_length_metrics,
    filter_groups_with_signal,
    has_no_signal,
    make_reward_samples,
    make_scored_batch,
    release_free_memory,
    resample_batch,
    select_groups,
)
from rlhf_megatron.controller.sync.device_turns import DeviceTurns
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    TokenLogProbs,
    TrainBatch,
)
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.engine_interface import GeneratedSample, SamplingParams
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.rollout_requests import (
    build_generate_requests,
    collect_rollout_batch,
    make_sampling_params,
)
from rlhf_megatron.runtime.role_proxies import RoleProxies


@dataclass
class StepStages:
    """One object a run. Every method is one line of the loop page.

    `generate_rollout` hands back what the journal has of a step, with the columns of later stages;
    those pass it on as it is.
    """

    config: RunConfig
    workers: RoleProxies
    fleet: EngineFleet | None  # None in a replay
    run_data: RunData
    setup: AlgorithmSetup
    weight_sync: PolicySync
    scorer: Callable[[Sequence[RewardSample]], list[RewardResult]]
    recorder: RolloutRecorder | None = None
    journal: StepJournal | None = None
    skips: NonFiniteSkips = field(default_factory=NonFiniteSkips)
    episodes: RunEpisodes | None = None  # where samples talk with an environment
    # of trainer and engines, where they share devices
    turns: DeviceTurns = field(default_factory=DeviceTurns)
    # which experts samples met in the engines
    route_files: RouteFileRetention = field(default_factory=RouteFileRetention)
    metric_sources: Sequence[Callable[[], dict[str, float]]] = ()  # metrics that each step adds
    report_progress: Callable[[str], object] = lambda text: None  # what the run does now
    show_note: Callable[[str], object] = lambda text: None  # a line for whoever watches the run

    def __post_init__(self) -> None:
        """Make the objects that live as long as the run: mismatch check, advantage stage and, with
        a reward model, its scorer.
        """
        config = self.config
        self.mismatch_check = MismatchCheck(config.checks, config.is_float32_throughout)
        self._check_first_reference_kl = FirstReferenceKLCheck(
            config.reference.path, config.actor.router_replay != "none", self.show_note
        )
        self.advantage_stage = AdvantageStage(config.algorithm, self.setup)
        self.trained_version = 0  # of the policy that the last batch was given to
        self._update_settings = UpdateSettings.from_run_config(config)
        self._model_rewards: ModelRewardScorer | None = None
        if has_reward_model(config):
            budget = (
                config.reward_model.max_token_len_per_gpu or config.actor.ppo_max_token_len_per_gpu
            )
            self._model_rewards = ModelRewardScorer(
                config.reward_model, budget, self.run_data.tokenizer.decode
            )
        self._step_metrics: dict[str, float] = {}
        self._step_start_time = 0.0
        self._filters_groups = config.algorithm.filter_groups.enable
        # groups that the journal has of the step
        self._journalled_groups: dict[int, list[GeneratedSample]] = {}
        # the same, where the step has episodes
        self._journalled_episodes: dict[int, list[Episode]] = {}
        self._step_episodes: list[Episode] = []  # of all batches of the step so far
        # of the batch that is generated, until it is scored
        self._pending_episodes: list[Episode] = []
        # of the batch that is generated, until it is scored
        self._pending_greedy_rollout: RolloutBatch | None = None
        self._greedy_rollouts: list[RolloutBatch] = []
        # files of all that it generated, also of what is left out
        self._step_route_files: set[str] = set()
        self._is_policy_updated = True  # the engines have not got it
        # the engine's log-probs of the step with the trainer's
        self._has_compared_log_probs = False
        self._is_annotation_journalled = False  # the step, by a former process whose journal has it

    @property
    def policy_version(self) -> int:
        """Return the current version of the policy, the number of weight syncs."""
        return self.weight_sync.policy_version

    @property
    def num_prompts_drawn(self) -> int:
        """Return the number of prompts drawn from the stream so far; 0 in a replay."""
        return self.run_data.stream.num_drawn if self.run_data.stream is not None else 0

    def begin_step(self) -> None:
        """Reset the metrics and records of the step; from now on the stages collect those of a new
        step.
        """
        self._step_metrics = {}
        self._greedy_rollouts = []
        self._step_route_files = set()
        self._has_compared_log_probs = self._is_annotation_journalled = False
        self._step_start_time = time.monotonic()

    def draw_prompts(self, step: int) -> PromptBatch:
        """Begin the step, and draw its prompts from the stream. With `algorithm.filter_groups` the
        prompts are the next ones of the stream, because a step may draw several batches.
        """
        self.begin_step()
        assert self.run_data.stream is not None
        return (
            self.run_data.stream.draw_more_prompts()
            if self._filters_groups
            else self.run_data.stream.draw_step_prompts(step)
        )

    def generate_rollout(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        """Generate the samples of the step's prompts on the engines, or return the step's batch
        from the journal of a former process. Groups that the journal has are not generated again.
        """
        if (found := self._restore_journalled_batch(step)) is not None:
            return found
        if self.episodes is not None:
            journal = self.journal
            self._journalled_episodes = journal.read_episodes(step) if journal is not None else {}
            self._step_episodes = []
            rollout = self._run_episodes(step, prompts, self.episodes, 0)
            release_free_memory()
            return rollout
        self._journalled_groups = self.journal.read_groups(step) if self.journal is not None else {}
        rollout = self._generate_batch(step, prompts, 0)
        release_free_memory()
        return rollout

    def _run_episodes(
        self, step: int, prompts: PromptBatch, episodes: RunEpisodes, batch_number: int
    ) -> RolloutBatch:
        """Run the episodes of a batch of prompts. Groups that are whole go to the journal as they
        come, and groups that the journal has are not run again. `batch_number`: see
        `_generate_batch`.
        """
        journal = self.journal
        begin = batch_number * len(prompts)
        known = {
            index - begin: group
            for index, group in self._journalled_episodes.items()
            if begin <= index < begin + len(prompts)
            and all(
                turn.policy_version == self.policy_version
                for episode in group
                for turn in episode.turns
            )
        }
        num_missing = len(prompts) - len(known)

        def record_groups(groups: Sequence[tuple[int, list[Episode]]]) -> None:
            """Append whole groups to the journal."""
            nonlocal num_missing
            if journal is not None:
                journal.append_episodes(step, [(begin + row, group) for row, group in groups])
            num_missing -= len(groups)
            if num_missing > 0:
                faults.reach_fault_point("rollout.mid_generate")

        self.turns.give_devices_to_engines()
        num_episodes = self.config.rollout.n
        min_group = self.config.rollout.environment.min_group
        groups = episodes.run_groups(
            prompts,
            GroupSize(num_episodes, num_episodes if min_group is None else min_group),
            self.make_sampling_params(SamplingConfig(self.config.rollout.temperature)),
            step,
            known,
            record_groups,
            self.report_progress,
        )
        faults.reach_fault_point("rollout.after_generate")
        self._pending_episodes = [episode for group in groups for episode in group]
        self._step_episodes += self._pending_episodes
        self._step_metrics |= compute_episode_metrics(self._step_episodes)
        return episodes.collect_batch(prompts, groups, self.policy_version)

    def _generate_batch(self, step: int, prompts: PromptBatch, batch_number: int) -> RolloutBatch:
        """Generate a batch of prompts, and a greedy sample for each prompt where the estimator
        needs one. Finished groups go to the journal as they come.

        `batch_number` counts the batches that the step generates, from 0. In the journal the groups
        of a batch come after the groups of the batches before it.
        """
        rollout = self.config.rollout
        params = self.make_sampling_params(SamplingConfig(rollout.temperature))
        seed = self.config.trainer.seed
        requests = build_generate_requests(
            prompts, rollout.n, params, seed, step, self.route_files.directory_and_max_bytes
        )
        if self.setup.needs_greedy_rewards:
            requests += build_generate_requests(
                prompts, 1, self.make_sampling_params(SamplingConfig(temperature=0.0)), seed, step
            )
        begin = batch_number * len(requests)
        known = {
            i - begin: group
            for i, group in self._journalled_groups.items()
            if begin <= i < begin + len(requests)
        }

        num_done = len(known)

        def record_groups(first_group: int, groups: Sequence[Sequence[GeneratedSample]]) -> None:
            """Report progress, and append finished groups, which begin at `first_group` of this
            batch, to the journal.
            """
            nonlocal num_done
            num_done += len(groups)
            self.report_progress(f"generate, {num_done} of {len(requests)} groups")
            if self.journal is not None:
                self.journal.append_groups(step, begin + first_group, groups)

        assert self.fleet is not None
        self.turns.give_devices_to_engines()
        groups = self.fleet.generate(requests, record_groups, known)
        faults.reach_fault_point("rollout.after_generate")
        sampled = groups[: len(prompts)]
        greedy = groups[len(prompts) :]
        self._pending_greedy_rollout = (
            collect_rollout_batch(prompts, greedy, self.run_data.tokenizer) if greedy else None
        )
        return collect_rollout_batch(prompts, sampled, self.run_data.tokenizer)

    def score_rollout(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        """Score the samples; with `algorithm.filter_groups` also generate and score further batches
        until enough groups have signal. Write the scored batch to the journal. A batch from the
        journal, which has its rewards, is returned as it is.
        """
        if isinstance(rollout, ScoredBatch):
            return rollout
        scored = self._score_batch(rollout)
        if self._filters_groups:
            scored, metrics = filter_groups_with_signal(
                scored,
                self.config.algorithm.filter_groups,
                self.config.data.train_batch_size,
                lambda number: self._generate_further_batch(step, number),
            )
            self._step_metrics |= metrics
            self.route_files.record_trained_step(
                step, self._step_route_files.difference(scored.routes or ())
            )
        if self._greedy_rollouts:
            self._step_metrics |= compute_greedy_length_metrics(
                select_groups(self._greedy_rollouts, scored.group_ids)
            )
        self._write_batch_to_journal(step, scored)
        faults.reach_fault_point("loop.after_score")
        return scored

    def _generate_further_batch(self, step: int, batch_number: int) -> ScoredBatch:
        """Draw the next prompts of the stream, generate their samples and score them."""
        assert self.run_data.stream is not None
        prompts = self.run_data.stream.draw_more_prompts()
        if self.episodes is not None:
            rollout = self._run_episodes(step, prompts, self.episodes, batch_number)
        else:
            rollout = self._generate_batch(step, prompts, batch_number)
        return self._score_batch(rollout)

    def _score_batch(self, rollout: RolloutBatch) -> ScoredBatch:
        """Return the samples with rewards, and with the rewards of the greedy samples that were
        generated beside them.
        """
        faults.reach_fault_point("reward.before_score")
        greedy = self._pending_greedy_rollout
        self._pending_greedy_rollout = None
        self._step_route_files.update(rollout.routes or ())
        self.turns.give_devices_to_scorers()
        reader = self.run_data.response_reader
        if self.episodes is not None:
            return self._score_episodes(rollout, self.episodes)
        results = self.scorer(
            make_reward_samples(rollout, reader)
            + (make_reward_samples(greedy, reader) if greedy else [])
        )
        of_greedy = results[len(rollout) :]
        results = results[: len(rollout)]
        if greedy is not None:
            self._greedy_rollouts.append(greedy)
        return make_scored_batch(rollout, results, greedy, of_greedy)

    def _score_episodes(self, rollout: RolloutBatch, episodes: RunEpisodes) -> ScoredBatch:
        """Return the episodes with their rewards; those of turns are paid at the turns' last
        tokens.
        """
        results = self._judge_pending_episodes(rollout, episodes)
        process_rewards = make_process_rewards(rollout, results, episodes.weights.reward_weight)
        return replace(make_scored_batch(rollout, results), process_rewards=process_rewards)

    def _judge_pending_episodes(
        self, rollout: RolloutBatch, episodes: RunEpisodes
    ) -> list[RewardResult]:
        """Return the rewards of the episodes of `rollout`, which have just run."""
        pending = self._pending_episodes
        self._pending_episodes = []
        samples = make_reward_samples(rollout, self.run_data.response_reader)
        return episodes.judge(pending, samples, self.scorer)

    def annotate_step(self, step: int, scored_batch: ScoredBatch) -> AnnotatedBatch:
        """Return the samples with log-probs of the trainer's policy, and with values and the
        reference's log-probs where they are needed. Samples that were annotated early stay as they
        are. Record the samples where the run records its rollouts.

        Raise ValueError where engine and trainer disagree at the first step. Later steps are
        compared while they train. Show a note where policy and reference differ at the first step
        though they are the same model.
        """
        if self._is_annotation_journalled:
            if self._records_routes(step):  # by the process that annotated it, which is gone
                self.turns.give_devices_to_trainer()
                record_actor_routes(self.workers, self._update_settings, scored_batch)
        elif self.recorder:
            self.recorder.write_step(step, scored_batch)
        annotated = (
            scored_batch
            if isinstance(scored_batch, AnnotatedBatch)
            else self.compute_annotations(step, scored_batch)
        )
        self._compare_log_probs(step, annotated, is_before_training=True)
        self._check_first_reference_kl(step, annotated)
        return annotated

    def _compare_log_probs(
        self, step: int, batch: AnnotatedBatch, is_before_training: bool = False
    ) -> None:
        """Compare the engine's log-probs with the trainer's, once a step, and add the metrics to
        the step's. The first step of the process is compared before it trains, which
        `is_before_training` says; later steps are compared in the update.
        """
        is_due = (
            is_before_training == (step == self.mismatch_check.first_step)
            and not self._has_compared_log_probs
        )
        if is_due and batch.old_log_probs is not None:
            self._has_compared_log_probs = True
            self._step_metrics |= self.mismatch_check(
                step, batch, batch.old_log_probs, self.policy_version
            )

    def compute_annotations(self, step: int, scored_batch: ScoredBatch) -> AnnotatedBatch:
        """Return all or some samples of a step with the columns that the models on the hosts
        compute for them.

        Where the engine's log-probs are the old ones and nothing needs the trainer's, or the update
        returns them itself, the trainer's log-probs are computed at the first step only: no run
        begins without a comparison of engine and trainer.
        """
        self.turns.give_devices_to_trainer()
        is_recorded = self._records_routes(step)
        is_needed = self.setup.needs_log_probs and not self._update_returns_old_log_probs(step)
        has_actor = is_needed or is_recorded or step == self.mismatch_check.first_step
        annotated = request_annotations(
            self.workers,
            self._update_settings,
            self.setup,
            scored_batch,
            use_actor=has_actor,
            record_routes=is_recorded,
            reward_scorer=self._model_rewards,
        )
        release_free_memory()
        return annotated

    def _update_returns_old_log_probs(self, step: int) -> bool:
        """Return whether the update of this step itself returns the old log-probs."""
        return self.setup.update_returns_old_log_probs and step > self.config.trainer.critic_warmup

    def _records_routes(self, step: int) -> bool:
        """Return whether the log-prob pass of this step also records the experts that the tokens
        meet, which its updates replay.
        """
        return self.config.actor.router_replay == "r2" and step > self.config.trainer.critic_warmup

    def compute_advantages(self, step: int, batch: AnnotatedBatch) -> TrainBatch:
        """Return the batch with advantages and correction columns. First write the annotated batch
        to the journal, unless it came from there.
        """
        if not self._is_annotation_journalled:
            self._write_batch_to_journal(step, batch)
        train, metrics = self.advantage_stage(batch)
        release_free_memory()
        self._step_metrics |= metrics
        faults.reach_fault_point("loop.after_advantages")
        return train

    def update_models(self, step: int, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Train actor and critic on the batch: epochs x mini-batches, one optimizer step each.
        Return (the batch, with old log-probs where the update returned them; the metrics of the
        step so far).

        With `algorithm.pf_ppo` the models train on samples drawn from `batch` by their reward. A
        batch with numbers that are not finite is not trained on. The critic trains where the batch
        has values; in the first `trainer.critic_warmup` steps it trains alone. Raise
        NonFiniteNumbers where too many updates were skipped, and ReplicasDiffer where replicas
        differ.
        """
        self.turns.give_devices_to_trainer()
        self._is_policy_updated = step > self.config.trainer.critic_warmup
        drawn, metrics = resample_batch(
            batch, self.config.algorithm.pf_ppo, self.config.trainer.seed, step
        )
        self._step_metrics |= metrics
        updates = []
        if self._filters_groups and has_no_signal(batch, self.config.algorithm.filter_groups):
            self._is_policy_updated = False
        elif drawn.values is not None:
            updates.append(plan_critic_update(self.workers, self._update_settings, step, drawn))
        if self._is_policy_updated:
            given = (
                replace(drawn, old_log_probs=None)
                if self._update_returns_old_log_probs(step)
                else drawn
            )
            updates.append(plan_actor_update(self.workers, self._update_settings, step, given))
        self.trained_version = self.policy_version
        if columns := find_non_finite_columns(batch):
            self._is_policy_updated = False
            self._step_metrics |= skip_step_with_bad_columns(
                self.workers, updates, step, self.skips, batch, columns
            )
        else:
            compare = partial(self._compare_log_probs, step, batch)
            old_log_probs: list[TokenLogProbs] = []
            self._step_metrics |= run_role_updates(
                updates, step, self.skips, compare, old_log_probs.append
            )
            if old_log_probs:
                [update_log_probs] = old_log_probs
                batch = self._log_update_log_probs(
                    step,
                    attach_old_log_probs(batch, self._update_settings, step, update_log_probs),
                )
        self._compare_log_probs(step, batch)
        release_free_memory()
        self._step_metrics |= self.route_files.measure_storage(batch.routes)
        self.route_files.record_trained_step(step, batch.routes)
        self._step_metrics |= self._check_replicas_when_due(step)
        for metrics_of in self.metric_sources:
            self._step_metrics |= metrics_of()
        self._step_metrics |= compute_version_metrics(self.trained_version, batch)
        self._step_metrics["rollout/num_samples"] = float(len(batch))
        # a group's id is its place in the stream
        if self.run_data.stream is not None and len(batch):
            self._step_metrics["training/epoch"] = (
                int(batch.group_ids.max()) + 1
            ) / self.run_data.stream.num_items
        return batch, self._step_metrics

    def _log_update_log_probs(self, step: int, batch: TrainBatch) -> TrainBatch:
        """Add the metrics of the old log-probs that the update returned: the comparison with the
        engine's and the rollout correction. Return `batch` unchanged.
        """
        self._has_compared_log_probs = False
        self._compare_log_probs(
            step, batch, is_before_training=step == self.mismatch_check.first_step
        )
        self._step_metrics |= compute_correction_columns(
            batch, make_valid_sample_mask(batch), self.setup.correction, False
        )[1]
        return batch

    def sync_weights(self) -> dict[str, float]:
        """Send the trainer's weights to all engines, verify them, and raise the policy version by
        one. Return all metrics of the step.

        After a step that left the policy as it was, nothing is sent and the version stays.
        Colocated engines get the same version again before they generate.
        """
        self._step_metrics |= (
            self.weight_sync()
            if self._is_policy_updated
            else {"policy/version": float(self.weight_sync.policy_version)}
        )
        self._step_metrics |= self.turns.take_metrics()
        if self.fleet is not None:
            self._step_metrics |= self.fleet.take_counters()
        return self._step_metrics

    def evaluate_held_out(self, is_final: bool = True) -> EvaluationResult | None:
        """Measure held-out accuracy with `rollout.val_kwargs`: over all items where `is_final`,
        else over the first `test_samples` items of each set.

        Return None where the run has no held-out items.
        """
        if not self.run_data.held_out_sets:
            return None
        limit = None if is_final else self.config.trainer.test_samples
        return self.measure_accuracy(limit, self.config.rollout.val_kwargs)

    def measure_accuracy(
        self, num_items: int | None, sampling_config: SamplingConfig
    ) -> EvaluationResult:
        """Generate and score the first `num_items` held-out items of each set (None: all), and
        return the result.
        """
        params = self.make_sampling_params(sampling_config)
        # as the model on the ranks reads them, and scorers those of episodes
        rollouts: list[RolloutBatch] = []

        def generate_groups(prompts: PromptBatch) -> Sequence[Sequence[GeneratedSample]]:
            """Generate the samples of these prompts, and keep them for the reward model where there
            is one.
            """
            assert self.fleet is not None
            self.turns.give_devices_to_engines()
            if self.episodes is not None:
                groups_of_episodes = self._run_held_out_episodes(
                    prompts, sampling_config.n, params, self.episodes
                )
                rollouts.append(
                    self.episodes.collect_batch(prompts, groups_of_episodes, self.policy_version)
                )
                return [
                    [make_sampled_tokens(episode) for episode in group]
                    for group in groups_of_episodes
                ]
            groups = self.fleet.generate(
                build_generate_requests(
                    prompts, sampling_config.n, params, self.config.trainer.seed, -1
                )
            )
            if self._model_rewards is not None:
                rollouts.append(collect_rollout_batch(prompts, groups, self.run_data.tokenizer))
            return groups

        def score_samples(samples: Sequence[RewardSample]) -> list[RewardResult]:
            """Score the samples, and add the scores of the reward model on the hosts where there is
            one.
            """
            self.turns.give_devices_to_scorers()
            if self.episodes is not None:
                results = self._judge_pending_episodes(rollouts[-1], self.episodes)
            else:
                results = self.scorer(samples)
            if self._model_rewards is None:
                return results
            self.turns.give_devices_to_trainer()
            return self._model_rewards.add_model_scores(
                self.workers.reward_model, rollouts.pop(), results
            )

        sets = limit_prompts(self.run_data.held_out_sets, num_items)
        return evaluate_sets(
            sets,
            generate_groups,
            self.run_data.response_reader,
            score_samples,
            self.config.trainer.samples_kept,
        )

    def _run_held_out_episodes(
        self,
        prompts: PromptBatch,
        num_episodes: int,
        params: SamplingParams,
        episodes: RunEpisodes,
    ) -> list[list[Episode]]:
        """Run the episodes of an evaluation, which are judged afterwards."""
        # a group that closed early would have its quickest episodes alone
        groups = episodes.run_groups(prompts, GroupSize(num_episodes, num_episodes), params, -1)
        self._pending_episodes = [episode for group in groups for episode in group]
        return groups

    def save_hf_weights(self, run_dir: Path) -> None:
        """Write the trained weights in Hugging Face layout: the policy's to `run_dir`/hf, and the
        critic's, where there is one, to `run_dir`/hf_critic.
        """
        self.turns.give_devices_to_trainer()
        self.workers.host.save_hf(directory=run_dir / "hf").result()
        if self.setup.needs_values:
            self.workers.critic.save_hf(directory=run_dir / "hf_critic").result()

    def _check_replicas_when_due(self, step: int) -> dict[str, float]:
        """At every `trainer.desync_freq`-th step, compare the weights of the replicas and return
        the metrics; else return {}. Raise ReplicasDiffer.
        """
        freq = self.config.trainer.desync_freq
        if not freq or step % freq:
            return {}
        return require_equal_replicas(self.workers.list_trained_proxies(self.setup.needs_values))

    def _restore_journalled_batch(self, step: int) -> ScoredBatch | None:
        """Return the batch that a former process wrote to the journal for this step, or None. With
        a batch, also restore the step's metrics and the position in the prompt stream.
        """
        found = self.journal.read_latest_batch(step) if self.journal is not None else None
        if self.journal is None or found is None:
            return None
        self._step_metrics |= found.metrics
        if found.num_drawn is not None and self.run_data.stream is not None:
            self.run_data.stream.seek_position(found.num_drawn)
        self._is_annotation_journalled = isinstance(found.batch, AnnotatedBatch)
        self.journal.report_regained_seconds(found.seconds)
        return found.batch

    def _write_batch_to_journal(self, step: int, batch: ScoredBatch) -> None:
        """Begin to write the batch, the metrics and the stream's position to the journal, where
        there is one.
        """
        if self.journal is not None:
            seconds = time.monotonic() - self._step_start_time
            num_drawn = (
                self.run_data.stream.num_drawn
                if self._filters_groups and self.run_data.stream is not None
                else None
            )
            self.journal.begin_batch_write(step, batch, self._step_metrics, seconds, num_drawn)

    def make_sampling_params(self, sampling_config: SamplingConfig) -> SamplingParams:
        """Return the sampling parameters of the engines, with the response length and stop tokens
        of the run.
        """
        return make_sampling_params(
            sampling_config, self.config.data.max_response_length, self.run_data.stop_token_ids
        )
