"""Everything that one simulation depends on: the run, the durations, and a split of GPUs. Pure figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.run import actor_ranks, has_critic, model_parallel_size, needs_reference
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.simulator.durations import ARGUMENTS, Durations
from rlhf_megatron.simulator.lengths import Workload

BEYOND = 1000
"""Steps that a run goes on for behind those that are simulated, so that its end does not show in them."""


@dataclass(frozen=True)
class Split:
    """Who has how many GPUs."""

    trainer_gpus: int
    num_engines: int
    gpus_per_engine: int
    is_colocated: bool = False  # the engines take turns with the trainer on the trainer's

    @property
    def gpus(self) -> int:
        return self.trainer_gpus + (0 if self.is_colocated else self.num_engines * self.gpus_per_engine)

    def __str__(self) -> str:
        engines = f"{self.num_engines} x {self.gpus_per_engine}"
        return f"{self.trainer_gpus} in turns ({engines})" if self.is_colocated else f"{self.trainer_gpus} + {engines}"


@dataclass(frozen=True)
class Plan:
    """Durations of one split, all factors worked in. Seconds a token are of the whole pool."""

    num_steps: int  # that are simulated
    last_step: int  # of the run: no group is begun for a later one
    batch_size: int  # groups
    group_size: int
    num_engines: int
    seconds_a_token: tuple[float, ...]  # [n]: of each response while n run in an engine; one entry more than slots
    prefill_tokens_per_s: float
    score_fixed_s: float
    score_per_sample_s: float
    score_workers: int
    annotate_s_a_token: float
    annotate_fixed_s: float
    advantages_s: float
    update_s_a_token: float
    update_fixed_s: float
    sync_s: float  # with turns, where trainer and engines have the same devices
    recomputes: bool
    least_annotated: int = 1  # samples whose log-probs are worth a call while others are awaited
    most_scored: float = math.inf  # groups after which a step trains on those that teach, though they are too few

    def score_s(self, num_samples: int) -> float:
        """A call for so many."""
        return self.score_fixed_s + self.score_per_sample_s * math.ceil(num_samples / self.score_workers)

    def annotate_s(self, num_tokens: int) -> float:
        return self.annotate_fixed_s + self.annotate_s_a_token * num_tokens

    def update_s(self, num_tokens: int) -> float:
        return self.update_fixed_s + self.update_s_a_token * num_tokens


def slowdown(gpus: int, measured_gpus: int, doubling_efficiency: float) -> float:
    """Seconds a token on `gpus` for one on `measured_gpus`: 1 / (2 e) for twice as many, (1 / (2 e))^2 for four times.

    >>> slowdown(128, 64, 0.95)
    0.5263157894736842
    """
    return (2 * doubling_efficiency) ** -math.log2(gpus / measured_gpus)


def split_of(config: RunConfig, durations: Durations) -> Split:
    """As the run has it."""
    return Split(actor_ranks(config), num_engines(config), gpus_per_engine(config, durations), config.rollout.colocated)


def num_engines(config: RunConfig) -> int:
    return len(config.rollout.endpoints) or config.rollout.num_engines


def gpus_per_engine(config: RunConfig, durations: Durations) -> int:
    if durations.engine.gpus is not None:
        return durations.engine.gpus
    return _argument(config, ("tensor_parallel_size", "tp_size", "tp"), 1) if config.rollout.engine == "sglang" else 1


def _argument(config: RunConfig, names: Sequence[str], default: int) -> int:
    """Of a server, under any spelling that it takes."""
    arguments = {name.replace("-", "_"): value for name, value in config.rollout.sglang.args.items()}
    return next((int(arguments[name]) for name in names if isinstance(arguments.get(name), int)), default)


def slots_of(config: RunConfig, durations: Durations) -> int:
    """Responses that an engine decodes at once. Raises ConfigError where nobody says."""
    if durations.engine.slots is not None:
        return durations.engine.slots
    if config.rollout.engine == "local":
        return config.rollout.max_num_seqs
    if found := _argument(config, ("max_running_requests",), 0):
        return found
    raise ConfigError(
        [
            "engine.slots (null) must be given for rollout.engine sglang: the server makes it of its memory; set it, or"
            " rollout.sglang.args.max_running_requests, to what the server's log names as max_running_requests."
        ]
    )


def measured_gpus(config: RunConfig, durations: Durations) -> int:
    """For which the trainer's durations hold."""
    return durations.trainer.gpus or actor_ranks(config)


def make_plan(config: RunConfig, durations: Durations, split: Split, num_steps: int) -> Plan:
    """Scaling: the trainer's seconds a token go with its GPUs by `slowdown`. What is fixed a call, a step or a sync
    stays, and so does an engine's speed. Raises ConfigError."""
    trainer, score, sync = durations.trainer, durations.score, durations.sync
    filters = config.algorithm.filter_groups
    factor = slowdown(split.trainer_gpus, measured_gpus(config, durations), trainer.doubling_efficiency)
    update = config.actor.ppo_epochs / trainer.update_tokens_per_s
    annotate = 1 / trainer.annotate_tokens_per_s
    if needs_reference(config):
        annotate += 1 / trainer.reference_tokens_per_s
    if has_critic(config):
        epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
        critic = (1 / trainer.critic_tokens_per_s, epochs / trainer.critic_update_tokens_per_s)
        if config.critic.num_ranks:  # in a pool of its own, which does not grow with the actor's
            annotate, update = max(annotate, critic[0] / factor), max(update, critic[1] / factor)
        else:
            annotate, update = annotate + critic[0], update + critic[1]
    slots = slots_of(config, durations)
    decode = durations.engine.decode
    return Plan(
        num_steps=num_steps,
        last_step=num_steps + BEYOND,
        batch_size=config.data.train_batch_size,
        group_size=config.rollout.n,
        num_engines=split.num_engines,
        seconds_a_token=(0.0, *(decode.seconds(count) for count in range(1, slots + 1))),
        prefill_tokens_per_s=durations.engine.prefill_tokens_per_s,
        score_fixed_s=score.fixed_s,
        score_per_sample_s=score.per_sample_s,
        score_workers=score.workers or config.reward.num_workers,
        annotate_s_a_token=annotate * factor,
        annotate_fixed_s=trainer.annotate_fixed_s,
        advantages_s=trainer.advantages_s,
        update_s_a_token=update * factor,
        update_fixed_s=trainer.update_fixed_s,
        sync_s=sync.seconds + ((sync.turns_s or 0.0) if split.is_colocated else 0.0),
        recomputes=sync.recomputes,
        least_annotated=config.actor.mini_batch_size,
        most_scored=filters.max_num_gen_batches * config.data.train_batch_size if filters.enable else math.inf,
    )


def make_workload(config: RunConfig, durations: Durations, seed: int) -> Workload:
    return Workload(
        durations.lengths,
        durations.prompts,
        config.rollout.n,
        config.data.max_response_length,
        config.data.max_prompt_length,
        seed,
        durations.no_signal if config.algorithm.filter_groups.enable else 0.0,
    )


def total_gpus(config: RunConfig, durations: Durations) -> int:
    """Of the run: of the actor's pool and the engines, which share them where they are colocated."""
    return split_of(config, durations).gpus


def splits(config: RunConfig, durations: Durations, gpus: int, most: int) -> list[Split]:
    """At most `most` ways to give `gpus` to trainer and engines, from the fewest engines to the fewest trainer's ranks.

    A trainer has whole replicas; what a split leaves over is idle. Where the durations tell what turns take, trainer
    and engines in turns on all of them are another. Raises ConfigError where there is no way.
    """
    replica, per_engine = model_parallel_size(config), gpus_per_engine(config, durations)
    sizes = range(gpus // replica * replica, 0, -replica)
    every = [Split(size, (gpus - size) // per_engine, per_engine) for size in sizes if gpus - size >= per_engine]
    indices = sorted({round(i * (len(every) - 1) / max(1, most - 1)) for i in range(most)}) if every else []
    found = [every[i] for i in indices]
    if durations.sync.turns_s is not None and gpus >= max(replica, per_engine):
        found.append(Split(gpus // replica * replica, gpus // per_engine, per_engine, is_colocated=True))
    if not found:
        raise ConfigError(
            [
                f"--gpus ({gpus}) must hold a replica of the trainer ({replica}) and an engine ({per_engine}); give"
                f" {replica + per_engine} or more."
            ],
            ARGUMENTS,
        )
    return found
