"""A plan holds everything that one simulation depends on; it is made of a run, durations and a
split of GPUs. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.part_rules import count_ranks_per_engine, has_engine_setting
from rlhf_megatron.config.rules.run_rules import (
    compute_model_parallel_size,
    count_actor_ranks,
    has_critic,
    needs_reference,
)
from rlhf_megatron.config.schema import RolloutConfig, RunConfig
from rlhf_megatron.controller.scheduler.log_prob_passes import (
    needs_log_probs_pass,
    update_returns_old_log_probs,
)
from rlhf_megatron.planning.simulator.durations import (
    ARGUMENTS_SUBJECT,
    RunDurations,
    SimulatedWorkload,
)

NUM_STEPS_BEYOND = 1000
"""Steps that a run has beyond the simulated ones, so that its end does not affect them."""


@dataclass(frozen=True)
class GpuSplit:
    """The GPUs of trainer and engines."""

    trainer_gpus: int
    num_engines: int
    gpus_per_engine: int
    is_colocated: bool = False  # the engines take turns with the trainer on the trainer's

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs in use; colocated engines need none of their own."""
        return self.trainer_gpus + (
            0 if self.is_colocated else self.num_engines * self.gpus_per_engine
        )

    def __str__(self) -> str:
        """Return the split as text, such as "8 + 2 x 4" or "8 in turns (2 x 4)"."""
        engines = f"{self.num_engines} x {self.gpus_per_engine}"
        return (
            f"{self.trainer_gpus} in turns ({engines})"
            if self.is_colocated
            else f"{self.trainer_gpus} + {engines}"
        )


@dataclass(frozen=True)
class SimulationPlan:
    """Durations of one split, all factors worked in. Seconds a token are of the whole pool."""

    num_steps: int  # that are simulated
    last_step: int  # of the run: no group is begun for a later one
    batch_size: int  # groups
    group_size: int
    num_engines: int
    # [n]: of each response while n run in an engine; one entry more than slots
    seconds_per_token: tuple[float, ...]
    prefill_tokens_per_s: float
    score_fixed_s: float
    score_per_sample_s: float
    num_score_workers: int
    annotate_s_per_token: float
    annotate_fixed_s: float
    advantages_s: float
    update_s_per_token: float
    update_fixed_s: float
    sync_s: float  # with turns, where trainer and engines have the same devices
    recomputes_cache: bool
    # samples whose log-probs are worth a call while others are awaited
    min_annotated_samples: int = 1
    # groups after which a step trains on those that teach, though they are too few
    max_scored_groups: float = math.inf

    def compute_score_seconds(self, num_samples: int) -> float:
        """Return the seconds of a scorer call with `num_samples` samples."""
        return self.score_fixed_s + self.score_per_sample_s * math.ceil(
            num_samples / self.num_score_workers
        )

    def compute_annotate_seconds(self, num_tokens: int) -> float:
        """Return the seconds of the log-probs and values of `num_tokens` tokens."""
        return self.annotate_fixed_s + self.annotate_s_per_token * num_tokens

    def compute_update_seconds(self, num_tokens: int) -> float:
        """Return the seconds of an update with `num_tokens` tokens."""
        return self.update_fixed_s + self.update_s_per_token * num_tokens


def compute_slowdown(num_gpus: int, num_measured_gpus: int, doubling_efficiency: float) -> float:
    """Return the seconds a token on `num_gpus` GPUs for each second on `num_measured_gpus`: 1 / (2
    e) for twice as many GPUs, (1 / (2 e))^2 for four times as many, with e = `doubling_efficiency`.

    >>> compute_slowdown(128, 64, 0.95)
    0.5263157894736842
    """
    return (2 * doubling_efficiency) ** -math.log2(num_gpus / num_measured_gpus)


@dataclass(frozen=True)
class SimulationSetup:
    """A run and how long its parts take: what its plans are made of."""

    config: RunConfig
    durations: RunDurations

    @property
    def split(self) -> GpuSplit:
        """Return the split of GPUs that the run's configuration has."""
        is_colocated = self.config.rollout.colocated
        return GpuSplit(
            count_actor_ranks(self.config),
            count_rollout_engines(self.config.rollout),
            self.gpus_per_engine,
            is_colocated,
        )

    @property
    def gpus_per_engine(self) -> int:
        """Return the GPUs of one engine, from the durations or else the run's configuration."""
        if self.durations.engine.gpus is not None:
            return self.durations.engine.gpus
        return count_ranks_per_engine(self.config.rollout)

    @property
    def num_slots(self) -> int:
        """Return the number of responses that an engine decodes at once. Raise ConfigError where
        neither the durations nor the configuration has it.
        """
        rollout = self.config.rollout
        if self.durations.engine.slots is not None:
            return self.durations.engine.slots
        if has_engine_setting(rollout, "rollout.max_num_seqs"):
            return rollout.max_num_seqs
        if found := _read_sglang_argument(rollout, ("max_running_requests",), 0):
            return found
        raise ConfigError(
            [
                "engine.slots (null) must be given for rollout.engine sglang: the server derives"
                " it from its memory; set it, or rollout.sglang.args.max_running_requests, to"
                " max_running_requests of the server's log."
            ]
        )

    @property
    def num_measured_gpus(self) -> int:
        """Return the number of GPUs that the trainer's durations are measured on."""
        return self.durations.trainer.gpus or count_actor_ranks(self.config)

    @property
    def has_log_prob_pass(self) -> bool:
        """Return whether steps have a log-prob pass of the actor, by the run's own rule."""
        actor = self.config.actor
        algorithm = self.config.algorithm
        num_samples = self.config.data.train_batch_size * self.config.rollout.n
        needs = ADV_ESTIMATORS.get(algorithm.adv_estimator).needs
        return needs_log_probs_pass(algorithm, needs) and not update_returns_old_log_probs(
            actor, algorithm, num_samples, needs
        )

    def make_workload(self, seed: int) -> SimulatedWorkload:
        """Return the responses and prompts to simulate, which depend on `seed`."""
        data = self.config.data
        durations = self.durations
        return SimulatedWorkload(
            durations.lengths,
            durations.prompts,
            self.config.rollout.n,
            data.max_response_length,
            data.max_prompt_length,
            seed,
            durations.no_signal if self.config.algorithm.filter_groups.enable else 0.0,
        )

    def make_plan(self, split: GpuSplit, num_steps: int) -> SimulationPlan:
        """Return the plan of a split, with the trainer's seconds a token scaled to its GPUs by
        `compute_slowdown`. Fixed times and the engines' speed are not scaled.

        Raise ConfigError where neither the durations nor the configuration has the number of
        responses that an engine decodes at once.
        """
        config = self.config
        durations = self.durations
        trainer = durations.trainer
        score = durations.score
        sync = durations.sync
        filters = config.algorithm.filter_groups
        factor = compute_slowdown(
            split.trainer_gpus, self.num_measured_gpus, trainer.doubling_efficiency
        )
        update = config.actor.ppo_epochs / trainer.update_tokens_per_s
        annotate = 1 / trainer.annotate_tokens_per_s if self.has_log_prob_pass else 0.0
        if needs_reference(config):
            annotate += 1 / trainer.reference_tokens_per_s
        if has_critic(config):
            epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
            critic = (1 / trainer.critic_tokens_per_s, epochs / trainer.critic_update_tokens_per_s)
            # in a pool of its own, which does not grow with the actor's
            if config.critic.num_ranks:
                annotate = max(annotate, critic[0] / factor)
                update = max(update, critic[1] / factor)
            else:
                annotate = annotate + critic[0]
                update = update + critic[1]
        slots = self.num_slots
        decode = durations.engine.decode
        return SimulationPlan(
            num_steps=num_steps,
            last_step=num_steps + NUM_STEPS_BEYOND,
            batch_size=config.data.train_batch_size,
            group_size=config.rollout.n,
            num_engines=split.num_engines,
            seconds_per_token=(
                0.0,
                *(decode.interpolate_token_seconds(count) for count in range(1, slots + 1)),
            ),
            prefill_tokens_per_s=durations.engine.prefill_tokens_per_s,
            score_fixed_s=score.fixed_s,
            score_per_sample_s=score.per_sample_s,
            num_score_workers=score.workers or config.reward.num_workers,
            annotate_s_per_token=annotate * factor,
            annotate_fixed_s=trainer.annotate_fixed_s if annotate else 0.0,
            advantages_s=trainer.advantages_s,
            update_s_per_token=update * factor,
            update_fixed_s=trainer.update_fixed_s,
            sync_s=sync.seconds + ((sync.turns_s or 0.0) if split.is_colocated else 0.0),
            recomputes_cache=sync.recomputes,
            min_annotated_samples=config.actor.mini_batch_size,
            max_scored_groups=filters.max_num_gen_batches * config.data.train_batch_size
            if filters.enable
            else math.inf,
        )

    def list_splits(self, num_gpus: int, max_splits: int) -> list[GpuSplit]:
        """Return at most `max_splits` ways to divide `num_gpus` between trainer and engines, evenly
        chosen from the fewest engines to the smallest trainer. Where the durations have the time of
        turns, add one more way: trainer and engines in turns on all GPUs.

        A trainer has whole replicas; the GPUs that a split leaves over are idle. Raise ConfigError
        where there is no way.
        """
        replica = compute_model_parallel_size(self.config.actor.megatron)
        per_engine = self.gpus_per_engine
        sizes = range(num_gpus // replica * replica, 0, -replica)
        every = [
            GpuSplit(size, (num_gpus - size) // per_engine, per_engine)
            for size in sizes
            if num_gpus - size >= per_engine
        ]
        indices = (
            sorted(
                {round(i * (len(every) - 1) / max(1, max_splits - 1)) for i in range(max_splits)}
            )
            if every
            else []
        )
        found = [every[i] for i in indices]
        if self.durations.sync.turns_s is not None and num_gpus >= max(replica, per_engine):
            found.append(
                GpuSplit(
                    num_gpus // replica * replica,
                    num_gpus // per_engine,
                    per_engine,
                    is_colocated=True,
                )
            )
        if not found:
            raise ConfigError(
                [
                    f"--gpus ({num_gpus}) must hold a replica of the trainer ({replica}) and an"
                    f" engine ({per_engine}); give {replica + per_engine} or more."
                ],
                ARGUMENTS_SUBJECT,
            )
        return found


def count_rollout_engines(rollout: RolloutConfig) -> int:
    """Return the number of engines: of endpoints where there are any, else `num_engines`."""
    return len(rollout.endpoints) or rollout.num_engines


def _read_sglang_argument(
    rollout: RolloutConfig, argument_names: Sequence[str], default: int
) -> int:
    """Return the first of these server arguments that is an integer, else the default."""
    arguments = {name.replace("-", "_"): value for name, value in rollout.sglang.args.items()}
    return next(
        (int(arguments[name]) for name in argument_names if isinstance(arguments.get(name), int)),
        default,
    )
