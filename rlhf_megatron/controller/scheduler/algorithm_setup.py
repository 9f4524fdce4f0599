"""What a configuration names, loaded and checked before a process is started: registered parts,
prompts, tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.agents.row_environments import ENVIRONMENT_COLUMN
from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.rollout_correction.correction_params import CorrectionParams
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rollout_correction_rules import is_bypass_mode
from rlhf_megatron.config.rules import drop_none
from rlhf_megatron.config.rules.part_rules import check_named_parts, try_build_params
from rlhf_megatron.config.rules.run_rules import (
    get_teacher_term,
    has_teacher,
    needs_reference,
    uses_reference_kl,
)
from rlhf_megatron.config.schema import DataConfig, ModelConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationSet
from rlhf_megatron.controller.scheduler.log_prob_passes import (
    needs_log_probs_pass,
    update_returns_old_log_probs,
)
from rlhf_megatron.controller.scheduler.schedules import Schedule, load_schedule
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule
from rlhf_megatron.data.extra_columns import ExtraColumnWriter
from rlhf_megatron.data.item_stream import PromptStream
from rlhf_megatron.data.prompt_items import make_prompt_batch
from rlhf_megatron.data.prompts import PromptSets, load_prompt_sets
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.ranks.workers.actor_losses import (
    parse_correction_params,
    parse_distillation_params,
)


@dataclass(frozen=True)
class AlgorithmSetup:
    """Functions with their parameters, ready to call."""

    estimator: Callable[..., Any]
    estimator_params: Any
    needs_reference: bool
    needs_values: bool = False  # there is a critic
    needs_token_rewards: bool = False  # per-token rewards, also without KL in them
    needs_log_probs: bool = True  # of the trainer's policy before the update, in every step
    # the old log-probs of a step are those of its one update, which tells them afterwards
    update_returns_old_log_probs: bool = False
    correction: CorrectionParams = field(default_factory=CorrectionParams)
    # the engine's log-probs are the old ones, and the loss makes the correction
    is_bypass: bool = False
    needs_sum_squares: bool = False  # of the probabilities of the actor
    needs_greedy_rewards: bool = False  # of one greedy sample a prompt
    schedule: Schedule = field(default_factory=SynchronousSchedule)
    needs_ref_log_probs: bool = True  # of what was sampled, where there is a reference
    teacher_top_k: int = 0  # tokens that the reference tells of each place; 0: it is no teacher


def load_algorithm_setup(config: RunConfig) -> AlgorithmSetup:
    """Load the plugins of the run, and return the registered parts that its configuration names,
    with what they need. Raise ConfigError with all unknown names, wrong parameters and unmet needs.
    """
    load_plugins(config.plugins)
    problems = list(drop_none(check_named_parts(LoadedConfig.from_config(config))))
    if problems:
        raise ConfigError(problems)
    estimator = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    num_samples = config.data.train_batch_size * config.rollout.n
    return AlgorithmSetup(
        estimator.build,
        try_build_params("advantage estimator", estimator.name, config.algorithm.params),
        needs_reference(config),
        needs_values="values" in estimator.needs,
        needs_token_rewards="token_rewards" in estimator.needs,
        needs_log_probs=needs_log_probs_pass(config.algorithm, estimator.needs),
        update_returns_old_log_probs=update_returns_old_log_probs(
            config.actor, config.algorithm, num_samples, estimator.needs
        ),
        correction=parse_correction_params(config.algorithm.rollout_correction),
        is_bypass=is_bypass_mode(config.algorithm.rollout_correction),
        needs_sum_squares="sum_squares" in estimator.needs,
        needs_greedy_rewards="greedy_rewards" in estimator.needs,
        schedule=load_schedule(config.schedule),
        needs_ref_log_probs=uses_reference_kl(config),
        teacher_top_k=parse_distillation_params(*get_teacher_term(config)).top_k
        if has_teacher(config)
        else 0,
    )


@dataclass(frozen=True)
class RunData:
    """The prompts and the tokenizer of the controller."""

    stream: PromptStream | None  # None in a replay
    held_out_sets: tuple[EvaluationSet, ...]
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    template_prefix: str = ""  # what the chat template writes of each answer

    @property
    def response_reader(self) -> ResponseReader:
        """Return the reader of what the texts of responses do not show."""
        return ResponseReader(self.tokenizer, self.template_prefix)


def load_run_prompts(
    model_config: ModelConfig,
    data_config: DataConfig,
    spells_labels: bool = False,
    keeps_messages: bool = False,
) -> tuple[PromptSets, Tokenizer]:
    """Return (prompt sets, tokenizer) of a run. `spells_labels`: whether the run warms up on
    labels. `keeps_messages`: whether its samples are episodes of several turns.

    Raise ValueError for what a user can fix. No process is started.
    """
    tokenizer = load_tokenizer(model_config.tokenizer_path or model_config.path, model_config.path)
    # the column that says which environment a row's episodes have must not get lost
    required_columns = {ENVIRONMENT_COLUMN: "rollout.environment"} if keeps_messages else {}
    extra_writer = ExtraColumnWriter(data_config.extra_columns, required_columns)
    sets = load_prompt_sets(data_config, tokenizer, spells_labels, extra_writer, keeps_messages)
    return sets, tokenizer


def make_run_data(
    data_config: DataConfig,
    seed: int,
    stop_strings: Sequence[str],
    prompt_sets: PromptSets,
    tokenizer: Tokenizer,
) -> RunData:
    """Return the prompt stream, held-out sets, tokenizer and stop tokens of the controller. `seed`
    shuffles the prompts where `data_config` has no seed. `stop_strings` are the strings that end
    answers.

    Raise ValueError for a stop string that is not one token.
    """
    return RunData(
        stream=PromptStream(
            prompt_sets.sources,
            data_config.train_batch_size,
            data_config.shuffle,
            seed if data_config.seed is None else data_config.seed,
        ),
        held_out_sets=tuple(_make_evaluation_sets(prompt_sets)),
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.make_stop_token_ids(stop_strings),
        template_prefix=prompt_sets.template_prefix,
    )


def _make_evaluation_sets(prompt_sets: PromptSets) -> Iterator[EvaluationSet]:
    """Yield an evaluation set for each held-out set. Group ids count over all sets, so that no two
    prompts share the seeds of their samples.
    """
    first = 0
    for held_out in prompt_sets.held_out_sets:
        yield EvaluationSet(held_out.name, make_prompt_batch(held_out.items, first))
        first += len(held_out.items)
