"""The rules of the section `algorithm`: contradictions, and settings that would be ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.schema import RunConfig

SWITCH = "algorithm.use_kl_in_reward"
COEF, TARGET, HORIZON, TYPE = (f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "target_kl", "horizon", "type"))
MAX_ERROR = 0.2  # the largest step of the adaptive controller, see algorithms/kl_in_reward.py


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    algorithm = config.algorithm
    is_off = not algorithm.use_kl_in_reward
    yield is_off, ("algorithm.kl_ctrl", "algorithm.kl_penalty"), SWITCH, "set it to true"
    is_fixed = not is_off and algorithm.kl_ctrl.type == "fixed"
    yield is_fixed, (TARGET, HORIZON), TYPE, "set that to adaptive"


def kl_weight(loaded: Loaded) -> Iterator[Problem]:
    """A weight of 0 costs a forward pass of the reference and does nothing; the adaptive one would stay there."""
    algorithm = loaded.config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield Problem(
            f"{COEF} (0) must be above 0 with {SWITCH}, or the reference is run for nothing; give it a weight such as"
            f" 0.001 or set use_kl_in_reward: false.",
            (COEF, SWITCH),
        )


def kl_horizon(loaded: Loaded) -> Iterator[Problem]:
    """coef *= 1 +- 0.2 samples / horizon must keep its sign."""
    c = loaded.config
    control, samples = c.algorithm.kl_ctrl, c.data.train_batch_size * c.rollout.n
    if not c.algorithm.use_kl_in_reward or control.type != "adaptive" or control.horizon < 1:
        return
    if MAX_ERROR * samples >= control.horizon:
        yield Problem(
            f"{HORIZON} ({control.horizon} samples) must be above {MAX_ERROR} x the samples of a step"
            f" (data.train_batch_size x rollout.n = {c.data.train_batch_size} x {c.rollout.n} = {samples}), or one step"
            f" can turn the sign of the KL term; use {10 * samples}.",
            (HORIZON, "data.train_batch_size", "rollout.n"),
        )


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (kl_weight, kl_horizon)
