"""Checks before any process starts that what a configuration names exists and fits together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.checkpoint.value_model import read_value_model
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.observe.loggers import check_loggers
from rlhf_megatron.observe.metrics.names import find
from rlhf_megatron.recovery.capsule import read_capsule
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.rewards.service.scorer import check_reward, check_sources
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.scheduler.parts import load_data, load_parts, run_data


def check_run(
    config: RunConfig, replay_from: Path | None = None, last_step: int | None = None, capsule: Path | None = None
) -> None:
    """Check what the configuration names, before any process starts. Raises ConfigError with all problems at once.

    Only the parent of the run directory is made. `replay_from` and `last_step` name a replay, which needs no engine;
    `capsule` names a replay of one mini-batch, which needs no data either.
    """

    def data() -> None:
        load_parts(config)  # so that a wrong task is told once, by the rule on it
        sets, tokenizer = load_data(config.model, config.data)
        run_data(config.data, config.trainer.seed, config.rollout.stop, sets, tokenizer)
        check_sources(config.reward, {item.source for item in (*sets.train, *sets.held_out)})
        _check_vocabulary(tokenizer.vocab_size, Path(config.model.path))

    def weights() -> None:
        parts, tp = load_parts(config), config.actor.megatron.tensor_model_parallel_size
        if config.model.init_seed is None:
            _check_weights(Path(config.model.path), tp)
        if parts.needs_reference and config.reference.path is not None:
            _check_weights(Path(config.reference.path), tp)
        if parts.needs_values and config.critic.path is not None:
            critic = Path(config.critic.path)
            read_value_model(critic, read_hf_config(critic))

    checks: list[Callable[[], object]] = [
        lambda: load_parts(config),
        weights,
        lambda: _check_output(config.trainer.default_local_dir),
        lambda: _check_metric(config.trainer.keep_best),
    ]
    if capsule is not None:
        checks.append(lambda: read_capsule(capsule))
    else:
        checks[1:1] = [lambda: check_reward(config.reward), data]
        checks.append(lambda: check_loggers(config.trainer.logger))
        if replay_from is not None and last_step is not None:
            checks.append(lambda: Recorder(replay_from / "record").read(last_step))
        else:
            checks.append(EngineSetup.of(config).check)
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)


def _check_metric(name: str | None) -> None:
    if name is not None and find(name) is None:
        raise ValueError(
            f"trainer.keep_best ({name}) is no metric of a run; docs/metrics.md lists them, such as val/accuracy or"
            " critic/rewards/mean."
        )


def _check_vocabulary(num_tokens: int, model: Path) -> None:
    vocab_size = int(read_hf_config(model)["vocab_size"])
    if num_tokens > vocab_size:
        raise ValueError(
            f"the tokenizer has token ids up to {num_tokens - 1}, but {model} has a vocabulary of {vocab_size}; set"
            " model.tokenizer_path to the tokenizer of this model."
        )


def _check_weights(model: Path, tp: int) -> None:
    HFReader(model).check(table_for(read_hf_config(model), tp))


def _check_output(parent: str) -> None:
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir ({parent}) must be a directory that can be written: {error.strerror}; name"
            " another one."
        ) from error
