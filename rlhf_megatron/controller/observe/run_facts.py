"""Facts of a run that loggers know before its first step,
and the versions of what it is made of.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import Scalar, render_config_yaml, select_notable_settings
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    PerformanceBasis,
    make_performance_basis,
)
from rlhf_megatron.controller.observe.report.run_overview import SETTINGS_WITHOUT_INFLUENCE
from rlhf_megatron.data.tokenizer import Tokenizer

REWARD_KEY = "critic/rewards/mean"
LOSS_KEY = "sft/loss"
MAIN_SETTINGS = (  # settings that are shown even at their defaults
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

    run_name: str = "run"
    project_name: str = ""
    seed: int = 0
    num_samples_logged: int = 6  # a step
    # by full key: what was set, and the main ones
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # all settings in use, by section
    # in the same run directory; None: the files of the run are new
    resumed_from_step: int | None = None
    # token ids as text, special tokens shown
    decode_tokens: Callable[[Sequence[int]], str] | None = None
    performance_basis: PerformanceBasis | None = None  # what rates refer to
    curve_metric: str = REWARD_KEY  # metric of a step that says how the run goes


def make_run_facts(
    config: RunConfig, run_name: str, tokenizer: Tokenizer, resumed_from_step: int | None = None
) -> RunFacts:
    """Collect the facts of a run for its loggers. `run_name` is the name of the run directory."""
    return RunFacts(
        run_name=run_name,
        project_name=config.trainer.project_name,
        seed=config.trainer.seed,
        num_samples_logged=config.trainer.samples_kept,
        settings=select_notable_settings(config, MAIN_SETTINGS, SETTINGS_WITHOUT_INFLUENCE),
        config=yaml.safe_load(render_config_yaml(config)),
        resumed_from_step=resumed_from_step,
        decode_tokens=tokenizer.decode_with_special_tokens,
        performance_basis=make_performance_basis(config),
        curve_metric=REWARD_KEY if config.job == "train" else LOSS_KEY,
    )


def read_package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the interpreter and of `packages`, by distribution name; "not
    installed" where a package is missing.
    """
    return {
        "python": platform.python_version(),
        **{name: _read_package_version(name) for name in packages},
    }


def _read_package_version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
