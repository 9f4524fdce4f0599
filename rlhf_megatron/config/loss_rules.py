"""The rules of the policy loss and its aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import has_critic
from rlhf_megatron.config.schema import LossAggMode, RunConfig

LOSS, MODE, FACTOR = "actor.policy_loss.loss_mode", "actor.loss_agg_mode", "actor.loss_scale_factor"
WITH_FACTOR: LossAggMode = "seq-mean-token-sum-norm"
OWN_MODES: dict[str, LossAggMode] = dict.fromkeys(("geo_mean", "gspo", "sapo"), "seq-mean-token-mean")
"""Policy loss -> the aggregation that its paper defines it with."""


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    modes = {config.actor.loss_agg_mode, config.critic.loss_agg_mode if has_critic(config) else None}
    yield WITH_FACTOR not in modes, (FACTOR,), MODE, f"set that to {WITH_FACTOR}"


def own_aggregation(loaded: Loaded) -> Iterator[Problem]:
    """A mode that nobody chose would train another objective than the loss is known for; one that is written stands."""
    name, mode = loaded.config.actor.policy_loss.loss_mode, loaded.config.actor.loss_agg_mode
    own = OWN_MODES.get(name, mode)
    if mode != own and not loaded.is_set(MODE):
        yield Problem(
            f"{MODE} ({mode}, the default) must be chosen for {LOSS} {name}, which its paper defines with {own}; set"
            f" {MODE}: {own}, or write {mode} where that is meant.",
            (LOSS, MODE),
        )


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (own_aggregation,)
