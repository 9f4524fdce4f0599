"""What `train` and `config check` look at before any process starts: whether what a
configuration names exists.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from rlhf_megatron.agents.row_environments import list_row_environments
from rlhf_megatron.config.rules import PreflightCheck
from rlhf_megatron.config.rules.environment_rules import are_labels_for_scorers
from rlhf_megatron.config.rules.run_rules import (
    count_actor_ranks,
    has_critic,
    has_reward_model,
    has_served_model,
    has_teacher,
    learns_from_pairs,
    needs_reference,
)
from rlhf_megatron.config.schema import (
    ActorConfig,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    SFTConfig,
    TrainerConfig,
)
from rlhf_megatron.config.secrets import reveal_secrets
from rlhf_megatron.controller.observe.loggers import check_logger_setups
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.recovery.skip_capsule import read_skip_capsule
from rlhf_megatron.controller.scheduler.algorithm_setup import load_run_prompts, make_run_data
from rlhf_megatron.controller.settings_checks import list_settings_checks
from rlhf_megatron.controller.supervised.supervised_run import load_supervised_data
from rlhf_megatron.data.prompts import check_source_rows
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.data.vocabulary_size import require_all_tokens_known
from rlhf_megatron.device import count_devices
from rlhf_megatron.rewards.service.response_reading import describe_configured_reading
from rlhf_megatron.rewards.service.reward_model_servers import check_model_servers
from rlhf_megatron.rewards.service.reward_scorer import (
    check_reward_labels,
    check_rewards_load,
    check_sources_exist,
)
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import require_whole_fp8_blocks
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from rlhf_megatron.weights.shard_plan import EngineLayout
from rlhf_megatron.weights.value_model import (
    open_scoring_model,
    open_value_model,
    warn_of_dropped_bias,
)
from rlhf_megatron.weights.weight_table import HeadKind

_NOT_PROMPT_FIELDS = ("max_response_length", "train_batch_size", "shuffle", "seed")
DATA_KEYS = tuple(f"data.{f.name}" for f in fields(DataConfig) if f.name not in _NOT_PROMPT_FIELDS)
TOKENIZER_KEYS = ("model.path", "model.tokenizer_path", "rollout.stop")
ENGINE_KEYS = tuple(
    f"rollout.{name}"
    for name in (
        "engine",
        "num_engines",
        "endpoints",
        "router",
        "colocated",
        "dtype",
        "quantization",
        "weight_transport",
        "sglang",
    )
)


def list_preflight_checks(
    recorded_run_dir: Path | None = None,
    last_step: int | None = None,
    capsule_dir: Path | None = None,
    report_line: Callable[[str], object] = lambda line: None,
) -> list[PreflightCheck]:
    """Return the checks that `load_run_config` makes before any process starts, beside the rules.

    `recorded_run_dir` and `last_step` name a replay, which needs no engine; `capsule_dir` names a
    replay of one mini-batch, which needs no data either. `report_line` is called with what is to
    be said of the responses that the rewards read.
    """
    found = [
        *list_settings_checks(),
        PreflightCheck(("rollout.sglang.env",), lambda c: reveal_secrets(c, os.environ)),
        PreflightCheck(
            ("model",),
            lambda c: _check_weight_headers(
                None if c.model.init_seed is not None or c.job == "reward-model" else c.model.path,
                c.actor,
            ),
        ),
        PreflightCheck(
            ("model.path", "reference"),
            lambda c: _check_weight_headers(
                c.reference.path if needs_reference(c) else None, c.actor
            ),
        ),
        PreflightCheck(
            ("reference.path", "model.tokenizer_path"),
            lambda c: (
                _check_teacher_tokenizer(c.reference.path, c.model) if has_teacher(c) else None
            ),
        ),
        PreflightCheck(
            ("model.path", "sft.use_head_bias"),
            lambda c: (
                _check_trained_head(c.model.path, c.sft)
                if c.job == "reward-model" and c.model.init_seed is None
                else None
            ),
        ),
        PreflightCheck(
            ("critic.path",),
            lambda c: _check_critic_weights(c.critic.path if has_critic(c) else None),
        ),
        PreflightCheck(
            ("reward_model.path",),
            lambda c: _check_reward_model_weights(
                c.reward_model.path if has_reward_model(c) else None
            ),
        ),
        PreflightCheck(
            ("reward_model", "rollout.sglang"),
            lambda c: (
                check_model_servers(
                    EngineSetup.from_config(reveal_secrets(c, os.environ)), c.reward_model
                )
                if has_served_model(c)
                else None
            ),
        ),
        PreflightCheck(
            ("trainer.default_local_dir",),
            lambda c: _check_output_directory(Path(c.trainer.default_local_dir)),
        ),
        PreflightCheck(
            ("trainer.device", "trainer.n_gpus_per_node"), lambda c: _check_devices(c.trainer)
        ),
    ]
    if capsule_dir is not None:
        return [*found, PreflightCheck((), lambda c: read_skip_capsule(capsule_dir))]
    data = PreflightCheck(
        (*DATA_KEYS, *TOKENIZER_KEYS, "sft"),
        lambda c: (
            _check_document_data(c.model, c.data, c.sft, learns_from_pairs(c))
            if c.job != "train"
            else _check_prompt_data(
                c.model,
                c.data,
                c.reward,
                c.rollout.stop,
                has_warmup=c.warmup.max_steps > 0,
                report_line=report_line,
                environment=c.rollout.environment,
                is_deterministic=c.trainer.deterministic,
            )
        ),
        PreflightCheck(
            DATA_KEYS, lambda c: check_source_rows(c.data) if c.job == "train" else None
        ),
    )
    found[2:2] = [PreflightCheck(("reward",), lambda c: check_rewards_load(c.reward)), data]
    found.append(
        PreflightCheck(("trainer.logger",), lambda c: check_logger_setups(c.trainer.logger))
    )
    if recorded_run_dir is not None and last_step is not None:
        return [
            *found,
            PreflightCheck(
                (), lambda c: RolloutRecorder(recorded_run_dir / "record").read_step(last_step)
            ),
        ]
    return [
        *found,
        PreflightCheck(
            ("model.path", *ENGINE_KEYS),
            lambda c: (
                _check_engines(
                    EngineSetup.from_config(reveal_secrets(c, os.environ)),
                    c.actor,
                    count_actor_ranks(c),
                )
                if c.job == "train"
                else None
            ),
        ),
    ]


def _check_engines(engine_setup: EngineSetup, actor: ActorConfig, num_ranks: int) -> None:
    """Check that the engine servers can be started, and that FP8 blocks stay whole on all ranks."""
    engine_setup.check_servers()
    check_fp8_blocks(engine_setup, actor, num_ranks)


def check_fp8_blocks(engine_setup: EngineSetup, actor: ActorConfig, num_ranks: int) -> None:
    """Raise ValueError where a rank of the trainer or of an engine would cut a matrix within an FP8
    block. `num_ranks` is the number of the actor's ranks. Nothing is checked without quantization.
    """
    if engine_setup.rollout.quantization is not None:
        is_whole = actor.backend == "fsdp"  # it sends whole tensors
        layout = ParallelLayout(1) if is_whole else make_parallel_layout(actor.megatron, num_ranks)
        table = make_weight_table(read_hf_config(Path(engine_setup.model.path)))
        require_whole_fp8_blocks(
            table, layout, EngineLayout.from_rollout_config(engine_setup.rollout)
        )


def _check_document_data(
    model: ModelConfig, data: DataConfig, sft: SFTConfig, is_pairs: bool
) -> None:
    """Load the documents or pairs of a supervised run, and check its tokenizer against the model's
    vocabulary.
    """
    _, tokenizer = load_supervised_data(model, data, sft, is_pairs)
    _check_vocabulary_size(tokenizer.vocab_size, Path(model.path))


def _check_prompt_data(
    model: ModelConfig,
    data: DataConfig,
    reward: RewardConfig,
    stop_strings: Sequence[str],
    has_warmup: bool,
    report_line: Callable[[str], object],
    environment: EnvironmentConfig,
    is_deterministic: bool,
) -> None:
    """Load the prompts, and check stop strings, reward sources, labels, the environments that rows
    name, and the tokenizer's vocabulary. Report what the rewards read of responses beyond their
    text.
    """
    has_episodes = environment.name is not None
    sets, tokenizer = load_run_prompts(model, data, has_warmup, has_episodes)
    make_run_data(data, 0, stop_strings, sets, tokenizer)
    items = (*sets.train_items, *sets.held_out_items)
    if has_episodes:
        list_row_environments(items, is_deterministic)
    check_sources_exist(reward, {item.source for item in items})
    if are_labels_for_scorers(environment):
        check_reward_labels(reward, ((item.source, item.label, item.extra) for item in items))
    _check_vocabulary_size(tokenizer.vocab_size, Path(model.path))
    token_names = [*tokenizer.special_tokens_by_id.values()]
    for line in describe_configured_reading(reward, sets.list_response_prefixes(), token_names):
        report_line(line)


def _check_critic_weights(critic_path: str | None) -> None:
    """Check that the critic's weight files can be opened as a value model."""
    if critic_path is not None:
        open_value_model(
            Path(critic_path), make_weight_table(read_hf_config(Path(critic_path)), head="value")
        )
        warn_of_dropped_bias(Path(critic_path))


def _check_trained_head(model_path: str, sft: SFTConfig) -> None:
    """Check that the model from which the job reward-model starts has no bias of the head that the
    run would drop.
    """
    head: HeadKind = "value" if sft.use_head_bias else "unbiased_value"
    path = Path(model_path)
    open_value_model(path, make_weight_table(read_hf_config(path), head=head))


def _check_reward_model_weights(reward_model_path: str | None) -> None:
    """Check that the reward model's weight files can be opened as a scoring model."""
    if reward_model_path is not None:
        open_scoring_model(
            Path(reward_model_path),
            make_weight_table(read_hf_config(Path(reward_model_path)), head="value"),
        )
        warn_of_dropped_bias(Path(reward_model_path))


def _check_devices(trainer: TrainerConfig) -> None:
    """Raise ValueError where this machine has fewer GPUs than the run needs. Nothing is checked
    with runtime ray (Ray checks its own devices) or on cpu.
    """
    wanted = trainer.n_gpus_per_node
    found = count_devices()
    if (
        trainer.runtime == "ray"
        or trainer.device == "cpu"
        or (trainer.device == "auto" and not found)
    ):
        return
    if not found:
        raise ValueError(
            "trainer.device (cuda) needs a GPU, and torch finds none here; use auto or cpu, or"
            " look at `rlhf-megatron doctor`."
        )
    if wanted > found:
        raise ValueError(
            f"trainer.n_gpus_per_node ({wanted}) must be at most the number of GPUs that torch"
            f" finds here ({found}); use {found}, trainer.device: cpu, or look"
            " at CUDA_VISIBLE_DEVICES."
        )


def _check_teacher_tokenizer(teacher_path: str | None, model: ModelConfig) -> None:
    """Raise ValueError where the teacher's tokenizer has another vocabulary than the student's: the
    teacher names tokens by their ids. A teacher without a tokenizer file is not checked.
    """
    if teacher_path is None or not (Path(teacher_path) / "tokenizer.json").is_file():
        return
    student = model.tokenizer_path or model.path
    if not load_tokenizer(student, model.path).has_same_vocabulary(
        load_tokenizer(teacher_path, teacher_path)
    ):
        raise ValueError(
            f"the teacher at reference.path ({teacher_path}) has other tokens than {student}: it"
            " tells ids, which stand for other texts there; name a teacher with the"
            " same tokenizer."
        )


def _check_vocabulary_size(num_tokens: int, model_path: Path) -> None:
    """Raise ValueError where the tokenizer has more token ids than the model's vocabulary."""
    vocab_size = int(read_hf_config(model_path)["vocab_size"])
    require_all_tokens_known(num_tokens, vocab_size, str(model_path))


def _check_weight_headers(model_path: str | None, actor: ActorConfig) -> None:
    """Read the headers of the weight files. Raise ValueError naming missing tensors and wrong
    shapes. Nothing is checked where `model_path` is None.
    """
    if model_path is not None:
        table = make_weight_table(
            read_hf_config(Path(model_path)), actor.megatron.tensor_model_parallel_size
        )
        HFReader(Path(model_path)).check_against_table(table)


def _check_output_directory(output_dir: Path) -> None:
    """Raise ValueError where a file cannot be written in the innermost directory of `output_dir`
    that exists; the others are made when the run starts.
    """
    try:
        there = next(
            path
            for path in (output_dir.absolute(), *output_dir.absolute().parents)
            if path.exists()
        )
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir ({output_dir}) must be a directory that can be written:"
            f" {error.strerror}; name another one."
        ) from error
