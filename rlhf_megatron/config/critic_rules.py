"""The rules of the section `critic`: contradictions, and settings that would be ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import has_critic
from rlhf_megatron.config.schema import RunConfig


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    no_critic, estimator = not has_critic(config), "algorithm.adv_estimator"
    yield no_critic, ("critic", "trainer.critic_warmup"), estimator, "use one that needs values: gae"
    yield config.critic.num_ranks == 0, ("critic.megatron",), "critic.num_ranks", "give the critic ranks of its own"


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = ()
