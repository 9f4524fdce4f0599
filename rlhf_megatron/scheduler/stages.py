"""What each line of the loop does, in terms of the two things the controller talks to: a WorkerGroup and a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhf_megatron.algorithms.advantages.base import AdvantageInputs
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    LogProbs,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    TokenBatch,
    TrainBatch,
    gain,
)
from rlhf_megatron.data.prompts import PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rewards.base import RewardSample
from rlhf_megatron.rollout.engine import GeneratedSample, SamplingParams
from rlhf_megatron.rollout.fleet import EngineFleet
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.batch_metrics import response_lengths, valid_samples
from rlhf_megatron.scheduler.evaluation import EvaluationResult, EvaluationSet, evaluate, first_items
from rlhf_megatron.scheduler.generation import build_requests, collect
from rlhf_megatron.scheduler.mini_batches import mini_batches
from rlhf_megatron.scheduler.mismatch_check import MismatchCheck
from rlhf_megatron.scheduler.plugins import Plugins
from rlhf_megatron.scheduler.recorder import Recorder


@dataclass(frozen=True)
class RunData:
    """What the controller reads prompts and text with."""

    stream: PromptStream | None  # None in a replay
    held_out: tuple[EvaluationSet, ...]
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]


class Stages:
    """One object a run. Every method is one line of the loop page."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        fleet: EngineFleet | None,
        data: RunData,
        plugins: Plugins,
        weight_sync: Callable[[], dict[str, float]],
        recorder: Recorder | None,
    ) -> None:
        self.config = config
        self.group = group
        self.fleet = fleet
        self.data = data
        self.plugins = plugins
        self.weight_sync = weight_sync
        self.recorder = recorder
        self.mismatch = MismatchCheck(config.checks, config.model.dtype, config.rollout.dtype)
        self._step_metrics: dict[str, float] = {}

    def next_prompts(self, step: int) -> PromptBatch:
        self._step_metrics = {}
        assert self.data.stream is not None
        return self.data.stream.next(step)

    def generate(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        rollout = self.config.rollout
        params = self._sampling(rollout.temperature)
        requests = build_requests(prompts, rollout.n, params, self.config.trainer.seed, step)
        assert self.fleet is not None
        return collect(prompts, self.fleet.generate(requests), self.data.tokenizer)

    def score(self, rollout: RolloutBatch) -> ScoredBatch:
        results = self.plugins.reward(reward_samples(rollout))
        names = sorted({name for result in results for name in result.parts})
        return gain(
            ScoredBatch,
            rollout,
            rewards=torch.tensor([result.score for result in results], dtype=torch.float32),
            reward_statuses=tuple(result.status for result in results),
            reward_parts={name: torch.tensor([r.parts.get(name, 0.0) for r in results]) for name in names},
        )

    def annotate(self, step: int, scored: ScoredBatch) -> AnnotatedBatch:
        """Log-probs of the trainer's policy and, where the loss needs it, of the reference."""
        if self.recorder:
            self.recorder.write(step, scored)
        actor = self._log_probs("actor", scored, with_entropy=True)
        self._step_metrics |= self.mismatch(step, scored, actor.log_probs)
        reference = self._log_probs("reference", scored, with_entropy=False) if self.plugins.needs_reference else None
        return gain(
            AnnotatedBatch,
            scored,
            old_log_probs=actor.log_probs,
            entropies=actor.entropies,
            ref_log_probs=reference.log_probs if reference else None,
        )

    def advantages(self, batch: AnnotatedBatch) -> TrainBatch:
        outputs = self.plugins.estimator(
            AdvantageInputs(
                rewards_B=batch.rewards,
                group_ids_B=batch.group_ids,
                is_valid_B=valid_samples(batch),
                response_mask_T=batch.response_mask,
                offsets=batch.offsets,
                values_T=batch.values,
            ),
            self.plugins.estimator_params,
        )
        self._step_metrics |= outputs.metrics
        return gain(TrainBatch, batch, advantages=outputs.advantages_T, returns=outputs.returns_T)

    def update(self, step: int, batch: TrainBatch) -> dict[str, float]:
        """Epochs x mini-batches, one optimizer step each. Returns metrics averaged over them."""
        actor = self.config.actor
        results = []
        for epoch in range(actor.ppo_epochs):
            for mini_batch in mini_batches(
                batch,
                actor.mini_batch_size,
                actor.loss_agg_mode,
                actor.shuffle,
                self.config.trainer.seed,
                step,
                epoch,
            ):
                results.append(
                    self.group.scatter(
                        "actor.update",
                        mini_batch,
                        token_budget=actor.ppo_max_token_len_per_gpu,
                        temperature=self.config.rollout.temperature,
                        loss="policy",
                    ).result()
                )
        count = len(results)
        metrics = {name: sum(r.sums[name] for r in results) / count for name in results[0].sums}
        metrics["actor/grad_norm"] = sum(r.grad_norm for r in results) / count
        metrics["actor/lr"] = results[-1].lr
        metrics["actor/num_optimizer_steps"] = float(count)
        metrics["actor/num_skipped_steps"] = float(sum(r.is_skipped for r in results))
        metrics["actor/num_epochs"] = float(actor.ppo_epochs)
        metrics["rollout/num_samples"] = float(len(batch))
        self._step_metrics |= metrics
        return self._step_metrics

    def sync(self) -> dict[str, float]:
        """Trainer's weights to all engines, verified; the policy version goes up by one."""
        self._step_metrics |= self.weight_sync()
        return self._step_metrics

    def evaluate(self, is_final: bool = True) -> EvaluationResult | None:
        """Held-out accuracy with `rollout.val_kwargs`; all items at the ends of a run, `test_samples` a set between.

        None where the run has no held-out items.
        """
        if not self.data.held_out:
            return None
        limit = None if is_final else self.config.trainer.test_samples
        sampling = self.config.rollout.val_kwargs
        return self.accuracy(limit, sampling.temperature, sampling.n)

    def accuracy(self, num_items: int | None, temperature: float, num_samples: int) -> EvaluationResult:
        """Mean score of the first `num_items` held-out items of each set (None: all)."""
        params = self._sampling(temperature)

        def generate(prompts: PromptBatch) -> Sequence[Sequence[GeneratedSample]]:
            assert self.fleet is not None
            return self.fleet.generate(build_requests(prompts, num_samples, params, self.config.trainer.seed, -1))

        sets = first_items(self.data.held_out, num_items)
        return evaluate(sets, generate, self.data.tokenizer.decode, self.plugins.reward)

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(self.config.data.max_response_length, temperature, self.data.stop_token_ids)

    def _log_probs(self, role: str, batch: ScoredBatch, with_entropy: bool) -> LogProbs:
        budget = self.config.reference.max_token_len_per_gpu if role == "reference" else None
        return self.group.scatter(
            f"{role}.log_probs",
            TokenBatch(batch.offsets, batch.token_ids, batch.response_mask),
            token_budget=budget or self.config.actor.ppo_max_token_len_per_gpu,
            temperature=self.config.rollout.temperature,
            with_entropy=with_entropy,
        ).result()


def reward_samples(rollout: RolloutBatch) -> list[RewardSample]:
    """What the reward reads of each sample."""
    columns = (rollout.prompts, rollout.responses, rollout.labels, rollout.sources, rollout.finish_reasons)
    lengths = response_lengths(rollout).tolist()
    return [RewardSample(*values) for values in zip(*columns, lengths, rollout.extras, strict=True)]


class ReplayStages(Stages):
    """The same trainer over recorded rollouts: no engine, nothing is generated or evaluated."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        plugins: Plugins,
        recorder: Recorder,
        tokenizer: Tokenizer,
        weight_sync: Callable[[], dict[str, float]],
    ) -> None:
        data = RunData(None, (), tokenizer, ())
        super().__init__(config, group, None, data, plugins, weight_sync, None)
        self.source = recorder

    def next_prompts(self, step: int) -> PromptBatch:
        self._step_metrics = {}
        return PromptBatch((), (), (), (), (), ())

    def generate(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        return self.source.read(step)

    def score(self, rollout: RolloutBatch) -> ScoredBatch:
        assert isinstance(rollout, ScoredBatch)
        return rollout

    def evaluate(self, is_final: bool = True) -> EvaluationResult | None:
        return None
