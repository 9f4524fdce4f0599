"""What a run's rates refer to: its devices, layouts and models. Nothing here changes during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.engine_rules import num_engines
from rlhf_megatron.config.rules import actor_ranks, critic_ranks, has_critic, world_size
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.pools import pools_of


@dataclass(frozen=True)
class Workload:
    """Counts are of ranks: of GPUs, or of processes on a machine without."""

    num_devices: int  # of the trainer, and of engines that have devices of their own
    num_actor_ranks: int
    num_critic_ranks: int  # those of the actor where the critic has none of its own
    actor_layout: Layout
    token_budget: int  # of a micro-batch of the log-probs, on one rank
    max_prompt_length: int
    critic_epochs: int
    policy: Mapping[str, Any] = field(default_factory=dict)  # its config.json; empty: not known
    critic: Mapping[str, Any] = field(default_factory=dict)
    device_peak_tflops: float | None = None  # as the configuration says; None: by the device's name


def workload_of(config: RunConfig) -> Workload:
    """Raises ValueError for a bad layout."""
    actor, critic, rollout = config.actor, config.critic, config.rollout
    engine_ranks = 0 if rollout.colocated else num_engines(config) * int(str(rollout.sglang.args.get("tp-size", 1)))
    return Workload(
        num_devices=world_size(config) + engine_ranks,
        num_actor_ranks=actor_ranks(config),
        num_critic_ranks=critic_ranks(config) or actor_ranks(config),
        actor_layout=pools_of(config)[0].layout,
        token_budget=actor.ppo_max_token_len_per_gpu,
        max_prompt_length=config.data.max_prompt_length,
        critic_epochs=critic.ppo_epochs or actor.ppo_epochs,
        policy=_hf_config(config.model.path),
        critic=_hf_config(critic.path or config.model.path) if has_critic(config) else {},
        device_peak_tflops=config.trainer.device_peak_tflops,
    )


def _hf_config(path: str) -> Mapping[str, Any]:
    return read_hf_config(Path(path)) if (Path(path) / "config.json").is_file() else {}
