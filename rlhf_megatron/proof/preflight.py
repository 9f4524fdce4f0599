"""What a configuration names must exist and fit together. Looked at before any process is started."""

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
from rlhf_megatron.recovery.capsule import read_capsule
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.rewards.service.scorer import check_reward, check_sources
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.scheduler.parts import load_parts
from rlhf_megatron.scheduler.run_data import load_data, run_data


def check_run(
    config: RunConfig, replay_from: Path | None = None, last_step: int | None = None, capsule: Path | None = None
) -> None:
    """Nothing is started; the parent of the run directory is made. Raises ConfigError with all problems at once.

    `replay_from`, `last_step`: of a replay, which needs no engine. `capsule`: of a replay of one mini-batch, which
    needs no data either.
    """
    checks: list[Callable[[], object]] = [
        lambda: load_parts(config),
        lambda: check_reward(config.reward),
        lambda: _check_data(config),
        lambda: _check_weights(config),
        lambda: _check_output(config),
        lambda: check_loggers(config.trainer.logger),
    ]
    if capsule is not None:
        checks = [lambda: load_parts(config), lambda: _check_weights(config), lambda: _check_output(config)]
        checks.append(lambda: read_capsule(capsule))
    elif replay_from is not None and last_step is not None:
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


def _check_data(config: RunConfig) -> None:
    """Raises ValueError where prompts, tokenizer, stop strings and vocabulary do not go together."""
    load_parts(config)  # a wrong task is told once, in its words
    sets, tokenizer = load_data(config)
    run_data(config, sets, tokenizer)
    check_sources(config.reward, {item.source for item in (*sets.train, *sets.held_out)})
    vocab_size = int(read_hf_config(Path(config.model.path))["vocab_size"])
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has token ids up to {tokenizer.vocab_size - 1}, but {config.model.path} has a vocabulary of"
            f" {vocab_size}; set model.tokenizer_path to the tokenizer of this model."
        )


def _check_weights(config: RunConfig) -> None:
    """Reads the headers of the weight files. Raises ValueError naming the tensors that are missing or mis-shaped."""
    parts = load_parts(config)
    paths = [config.model.path] if config.model.init_seed is None else []
    if parts.needs_reference and config.reference.path is not None:
        paths.append(config.reference.path)
    for path in map(Path, paths):
        table = table_for(read_hf_config(path), config.actor.megatron.tensor_model_parallel_size)
        HFReader(path).check(table)
    if parts.needs_values and config.critic.path is not None:
        critic = Path(config.critic.path)
        read_value_model(critic, read_hf_config(critic))


def _check_output(config: RunConfig) -> None:
    parent = config.trainer.default_local_dir
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.default_local_dir ({parent}) must be a directory that can be written: {error.strerror}; name"
            " another one."
        ) from error
