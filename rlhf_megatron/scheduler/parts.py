"""What a configuration names, loaded and checked before a process is started: registered parts, prompts, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.rollout_correction.params import CorrectionParams
from rlhf_megatron.config.correction import is_bypass
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules import told
from rlhf_megatron.config.rules.parts import params_of, parts
from rlhf_megatron.config.rules.run import has_kl, has_teacher, needs_reference, teaching
from rlhf_megatron.config.schema import DataConfig, ModelConfig, RunConfig
from rlhf_megatron.config.source import Loaded
from rlhf_megatron.data.items import prompt_batch
from rlhf_megatron.data.prompts import PromptSets, load_prompts
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.evaluation.evaluation import EvaluationSet
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.scheduler.passes import is_own, needs_log_probs
from rlhf_megatron.scheduler.schedules import Schedule, load_schedule
from rlhf_megatron.scheduler.schedules.synchronous import Synchronous
from rlhf_megatron.workers.losses import correction_params, distillation_params


@dataclass(frozen=True)
class Parts:
    """Functions with their parameters, ready to call."""

    estimator: Callable[..., Any]
    estimator_params: Any
    needs_reference: bool
    needs_values: bool = False  # there is a critic
    needs_token_rewards: bool = False  # per-token rewards, also without KL in them
    needs_log_probs: bool = True  # of the trainer's policy before the update, in every step
    is_own: bool = False  # the old log-probs of a step are those of its one update, which tells them afterwards
    correction: CorrectionParams = field(default_factory=CorrectionParams)
    is_bypass: bool = False  # the engine's log-probs are the old ones, and the loss makes the correction
    needs_sum_squares: bool = False  # of the probabilities of the actor
    needs_greedy_rewards: bool = False  # of one greedy sample a prompt
    schedule: Schedule = field(default_factory=Synchronous)
    needs_ref_log_probs: bool = True  # of what was sampled, where there is a reference
    teacher_top_k: int = 0  # tokens that the reference tells of each place; 0: it is no teacher


def load_parts(config: RunConfig) -> Parts:
    """Runs the plugins of the run. Raises ConfigError with all unknown names, wrong parameters and unmet needs."""
    load_plugins(config.plugins)
    problems = list(told(parts(Loaded.of(config))))
    if problems:
        raise ConfigError(problems)
    estimator = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    num_samples = config.data.train_batch_size * config.rollout.n
    return Parts(
        estimator.build,
        params_of("advantage estimator", estimator.name, config.algorithm.params),
        needs_reference(config),
        needs_values="values" in estimator.needs,
        needs_token_rewards="token_rewards" in estimator.needs,
        needs_log_probs=needs_log_probs(config.algorithm, estimator.needs),
        is_own=is_own(config.actor, config.algorithm, num_samples, estimator.needs),
        correction=correction_params(config.algorithm.rollout_correction),
        is_bypass=is_bypass(config.algorithm.rollout_correction),
        needs_sum_squares="sum_squares" in estimator.needs,
        needs_greedy_rewards="greedy_rewards" in estimator.needs,
        schedule=load_schedule(config.schedule),
        needs_ref_log_probs=has_kl(config),
        teacher_top_k=distillation_params(*teaching(config)).top_k if has_teacher(config) else 0,
    )


@dataclass(frozen=True)
class RunData:
    """The prompts and the tokenizer of the controller."""

    stream: PromptStream | None  # None in a replay
    held_out: tuple[EvaluationSet, ...]
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]


def load_data(model: ModelConfig, data: DataConfig, spells_labels: bool = False) -> tuple[PromptSets, Tokenizer]:
    """Prompts and tokenizer of a run; `spells_labels`: it warms up on labels.

    Raises ValueError for what a user can fix; starts nothing.
    """
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.path)
    return load_prompts(data, tokenizer, spells_labels), tokenizer


def run_data(data: DataConfig, seed: int, stop: Sequence[str], sets: PromptSets, tokenizer: Tokenizer) -> RunData:
    """Collect what the controller of a run reads. `seed`: of the order where `data` has none. `stop`: strings that
    end answers.

    Raises ValueError for a stop string that is not one token.
    """
    return RunData(
        stream=PromptStream(
            sets.sources, data.train_batch_size, data.shuffle, seed if data.seed is None else data.seed
        ),
        held_out=tuple(_evaluation_sets(sets)),
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.stop_ids(stop),
    )


def _evaluation_sets(sets: PromptSets) -> Iterator[EvaluationSet]:
    """Group ids count over all sets, so that no two prompts share the seeds of their samples."""
    first = 0
    for held_out in sets.held_out_sets:
        yield EvaluationSet(held_out.name, prompt_batch(held_out.items, first))
        first += len(held_out.items)
