"""What `train` and `config check` look at before any process starts: whether what a configuration names exists."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.checkpoint.value_model import read_value_model, scoring_model
from rlhf_megatron.config.rules import Check
from rlhf_megatron.config.rules.run import (
    actor_ranks,
    has_critic,
    has_pairs,
    has_reward_model,
    has_served_model,
    has_teacher,
    needs_reference,
)
from rlhf_megatron.config.schema import ActorConfig, DataConfig, ModelConfig, RewardConfig, SFTConfig, TrainerConfig
from rlhf_megatron.config.secrets import revealed
from rlhf_megatron.data.prompts import read_all
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.observe.loggers import check_loggers
from rlhf_megatron.observe.metrics.names import find
from rlhf_megatron.parallel.device import num_devices
from rlhf_megatron.parallel.layout import Layout, layout_of
from rlhf_megatron.recovery.capsule import read_capsule
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.resharding.quantised import require_whole_blocks
from rlhf_megatron.resharding.shards import EngineLayout
from rlhf_megatron.rewards.service.model_servers import check_served
from rlhf_megatron.rewards.service.scorer import check_labels, check_reward, check_sources
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.scheduler.parts import load_data, run_data
from rlhf_megatron.supervised.run import load_job_data

_NOT_OF_PROMPTS = ("max_response_length", "train_batch_size", "shuffle", "seed")
OF_DATA = tuple(f"data.{f.name}" for f in fields(DataConfig) if f.name not in _NOT_OF_PROMPTS)
OF_TOKENIZER = ("model.path", "model.tokenizer_path", "rollout.stop")
OF_ENGINES = tuple(
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


def checks_of_run(
    replay_from: Path | None = None, last_step: int | None = None, capsule: Path | None = None
) -> list[Check]:
    """Return the checks that `load_run_config` makes before any process starts, beside the rules.

    `replay_from` and `last_step` name a replay, which needs no engine; `capsule` names a replay of one mini-batch,
    which needs no data either.
    """
    found = [
        Check(("rollout.sglang.env",), lambda c: revealed(c, os.environ)),
        Check(("model",), lambda c: _check_weights(None if c.model.init_seed is not None else c.model.path, c.actor)),
        Check(
            ("model.path", "reference"),
            lambda c: _check_weights(c.reference.path if needs_reference(c) else None, c.actor),
        ),
        Check(
            ("reference.path", "model.tokenizer_path"),
            lambda c: _check_teacher(c.reference.path, c.model) if has_teacher(c) else None,
        ),
        Check(("critic.path",), lambda c: _check_critic(c.critic.path if has_critic(c) else None)),
        Check(("reward_model.path",), lambda c: _check_scoring(c.reward_model.path if has_reward_model(c) else None)),
        Check(
            ("reward_model", "rollout.sglang"),
            lambda c: (
                check_served(EngineSetup.of(revealed(c, os.environ)), c.reward_model) if has_served_model(c) else None
            ),
        ),
        Check(("trainer.default_local_dir",), lambda c: _check_output(Path(c.trainer.default_local_dir))),
        Check(("trainer.keep_best",), lambda c: _check_metric(c.trainer.keep_best)),
        Check(("trainer.device", "trainer.n_gpus_per_node"), lambda c: _check_devices(c.trainer)),
    ]
    if capsule is not None:
        return [*found, Check((), lambda c: read_capsule(capsule))]
    data = Check(
        (*OF_DATA, *OF_TOKENIZER, "sft"),
        lambda c: (
            _check_documents(c.model, c.data, c.sft, has_pairs(c))
            if c.job != "train"
            else _check_data(c.model, c.data, c.reward, c.rollout.stop, has_warmup=c.warmup.max_steps > 0)
        ),
        Check(OF_DATA, lambda c: read_all(c.data) if c.job == "train" else None),
    )
    found[1:1] = [Check(("reward",), lambda c: check_reward(c.reward)), data]
    found.append(Check(("trainer.logger",), lambda c: check_loggers(c.trainer.logger)))
    if replay_from is not None and last_step is not None:
        return [*found, Check((), lambda c: Recorder(replay_from / "record").read(last_step))]
    return [
        *found,
        Check(
            ("model.path", *OF_ENGINES),
            lambda c: (
                _check_engines(EngineSetup.of(revealed(c, os.environ)), c.actor, actor_ranks(c))
                if c.job == "train"
                else None
            ),
        ),
    ]


def _check_engines(setup: EngineSetup, actor: ActorConfig, num_ranks: int) -> None:
    setup.check()
    check_blocks(setup, actor, num_ranks)


def check_blocks(setup: EngineSetup, actor: ActorConfig, num_ranks: int) -> None:
    """Raises ValueError where ranks of the trainer or of an engine cut a matrix within a block of FP8. `num_ranks`: of
    the actor.
    """
    if setup.rollout.quantization is not None:
        is_whole = actor.backend == "fsdp"  # it sends whole tensors
        layout = Layout(1) if is_whole else layout_of(actor.megatron, num_ranks)
        table = table_for(read_hf_config(Path(setup.model.path)))
        require_whole_blocks(table, layout, EngineLayout.of(setup.rollout))


def _check_documents(model: ModelConfig, data: DataConfig, sft: SFTConfig, is_pairs: bool) -> None:
    _, tokenizer = load_job_data(model, data, sft, is_pairs)
    _check_vocabulary(tokenizer.vocab_size, Path(model.path))


def _check_data(
    model: ModelConfig, data: DataConfig, reward: RewardConfig, stop: Sequence[str], has_warmup: bool
) -> None:
    sets, tokenizer = load_data(model, data, has_warmup)
    run_data(data, 0, stop, sets, tokenizer)
    items = (*sets.train, *sets.held_out)
    check_sources(reward, {item.source for item in items})
    check_labels(reward, ((item.source, item.label, item.extra) for item in items))
    _check_vocabulary(tokenizer.vocab_size, Path(model.path))


def _check_critic(path: str | None) -> None:
    if path is not None:
        read_value_model(Path(path), table_for(read_hf_config(Path(path)), head="value"))


def _check_scoring(path: str | None) -> None:
    if path is not None:
        scoring_model(Path(path), table_for(read_hf_config(Path(path)), head="value"))


def _check_devices(trainer: TrainerConfig) -> None:
    """Check this machine's devices; Ray checks its own."""
    wanted, found = trainer.n_gpus_per_node, num_devices()
    if trainer.runtime == "ray" or trainer.device == "cpu" or (trainer.device == "auto" and not found):
        return
    if not found:
        raise ValueError(
            "trainer.device (cuda) needs a GPU, and torch finds none here; use auto or cpu, or look at"
            " `rlhf-megatron doctor`."
        )
    if wanted > found:
        raise ValueError(
            f"trainer.n_gpus_per_node ({wanted}) must be at most the number of GPUs that torch finds here ({found});"
            f" use {found}, trainer.device: cpu, or look at CUDA_VISIBLE_DEVICES."
        )


def _check_metric(name: str | None) -> None:
    if name is not None and find(name) is None:
        raise ValueError(
            f"trainer.keep_best ({name}) is no metric of a run; docs/metrics.md lists them, such as val/accuracy or"
            " critic/rewards/mean."
        )


def _check_teacher(path: str | None, model: ModelConfig) -> None:
    """A teacher names tokens by their ids: they must be the student's. Not looked at where it has no tokenizer."""
    if path is None or not (Path(path) / "tokenizer.json").is_file():
        return
    student = model.tokenizer_path or model.path
    if not load_tokenizer(student, model.path).has_tokens_of(load_tokenizer(path, path)):
        raise ValueError(
            f"the teacher at reference.path ({path}) has other tokens than {student}: it tells ids, which stand for"
            " other texts there; name a teacher with the same tokenizer."
        )


def _check_vocabulary(num_tokens: int, model: Path) -> None:
    vocab_size = int(read_hf_config(model)["vocab_size"])
    if num_tokens > vocab_size:
        raise ValueError(
            f"the tokenizer has token ids up to {num_tokens - 1}, but {model} has a vocabulary of {vocab_size}; set"
            " model.tokenizer_path to the tokenizer of this model."
        )


def _check_weights(path: str | None, actor: ActorConfig) -> None:
    """Read the headers of the weight files. Raises ValueError naming missing tensors and wrong shapes."""
    if path is not None:
        table = table_for(read_hf_config(Path(path)), actor.megatron.tensor_model_parallel_size)
        HFReader(Path(path)).check(table)


def _check_output(parent: Path) -> None:
    """Look at the innermost directory that there is; the others are made when the run starts."""
    try:
        there = next(path for path in (parent.absolute(), *parent.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir ({parent}) must be a directory that can be written: {error.strerror}; name"
            " another one."
        ) from error
