"""Facts of a run that loggers know before its first step, and the versions of what it is made of."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import Scalar, as_yaml, chosen
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.observe.metrics.rates import Workload, workload_of
from rlhf_megatron.observe.report.facts import NO_INFLUENCE

REWARD, LOSS = "critic/rewards/mean", "sft/loss"
MAIN = (  # settings that are shown even at their defaults
    "model.path",
    "model.dtype",
    "data.train_batch_size",
    "actor.megatron.tensor_model_parallel_size",
    "actor.megatron.pipeline_model_parallel_size",
    "actor.megatron.context_parallel_size",
    "actor.optim.lr",
    "actor.mini_batch_size",
    "actor.policy_loss.loss_mode",
    "rollout.n",
    "rollout.temperature",
    "reward.name",
    "algorithm.adv_estimator",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.seed",
    "trainer.total_training_steps",
)


@dataclass(frozen=True)
class RunFacts:
    """Defaults are those of a run of which nothing is known."""

    name: str = "run"
    project: str = ""
    seed: int = 0
    samples_kept: int = 6  # a step
    settings: Mapping[str, Scalar] = field(default_factory=dict)  # by full key: what was set, and the main ones
    config: Mapping[str, Any] = field(default_factory=dict)  # all settings in use, by section
    resumed_from_step: int | None = None  # in the same run directory; None: the files of the run are new
    spell: Callable[[Sequence[int]], str] | None = None  # token ids as text, special tokens shown
    workload: Workload | None = None  # what rates refer to
    curve: str = REWARD  # metric of a step that says how the run goes


def run_facts(config: RunConfig, name: str, tokenizer: Tokenizer, resumed_from_step: int | None = None) -> RunFacts:
    """`name`: of the run directory."""
    return RunFacts(
        name=name,
        project=config.trainer.project_name,
        seed=config.trainer.seed,
        samples_kept=config.trainer.samples_kept,
        settings=chosen(config, MAIN, NO_INFLUENCE),
        config=yaml.safe_load(as_yaml(config)),
        resumed_from_step=resumed_from_step,
        spell=tokenizer.spell,
        workload=workload_of(config),
        curve=REWARD if config.job == "train" else LOSS,
    )


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the interpreter and of `packages`, by distribution name; "not installed" where one is
    missing.
    """
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
