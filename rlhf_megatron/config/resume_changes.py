"""What changed in the configuration of a run that is resumed: refused, recorded, or of no
consequence. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlhf_megatron.config.former_defaults import FORMER_DEFAULTS
from rlhf_megatron.config.show import format_yaml_value

NOT_USED = "not in use"

FIXED = {
    "actor.backend": "the state was made by the former one",
    **dict.fromkeys(
        [f"actor.lora.{name}" for name in ("rank", "alpha", "target_modules")],
        "the state has the former's matrices",
    ),
    "model.dtype": "the state was made in the former type",
    "sft.use_head_bias": "the state has the head of the former setting",
    "sft.in_memory": "the state names its data by the way in which they are read",
    "algorithm.adv_estimator": "it decides which models are trained and what their state is",
}
"""Settings that a run keeps for life, and why.
The order of the data is checked on the data itself.
"""

OF_DATA_ORDER = ("data.", "trainer.seed")
OF_LAYOUT = (
    "actor.megatron.",
    "critic.megatron.",
    "critic.num_ranks",
    "reward_model.megatron.",
    "reward_model.num_ranks",
    "reference.megatron.",
    "reference.num_ranks",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.runtime",
)
_OF_A_STEP = (
    "model.",
    "data.",
    "actor.",
    "critic.",
    "reference.",
    "reward.",
    "reward_model.",
    "algorithm.",
)
OF_EPISODES = "rollout.environment."
_NOT_OF_EPISODES = ("rollout.environment.num_workers", "rollout.environment.max_concurrent")
_OF_A_STEP_TOO = (
    *("rollout.n", "rollout.temperature", "rollout.stop"),
    *("trainer.seed", "trainer.critic_warmup", "trainer.total_training_steps"),
)


@dataclass(frozen=True)
class ConfigChanges:
    """The changes of a run's settings: setting -> (value before, value now), as text."""

    layout_changes: Mapping[str, tuple[str, str]]  # allowed; sums are made in another order
    other_changes: Mapping[str, tuple[str, str]]  # allowed and recorded

    @property
    def all_changes(self) -> dict[str, tuple[str, str]]:
        """Return the changes of the layout and of all other settings in one mapping."""
        return {**self.layout_changes, **self.other_changes}

    def __str__(self) -> str:
        """Return all changes in one line, "key before -> now"."""
        return ", ".join(
            f"{key} {before} -> {now}" for key, (before, now) in self.all_changes.items()
        )


def flatten_config_yaml(text: str) -> dict[str, str]:
    """Return setting -> value as text, from the YAML of a resolved configuration
    (`show.render_config_yaml`); the YAML may come from another version of this package.
    """
    found: dict[str, str] = {}

    def collect_settings(prefix: str, node: Any) -> None:
        """Add the settings of a YAML node to the result under keys that begin with `prefix`."""
        if isinstance(node, dict) and node:
            for name, item in node.items():
                collect_settings(f"{prefix}.{name}" if prefix else str(name), item)
        else:
            found[prefix] = format_yaml_value(node)

    collect_settings("", yaml.safe_load(text) or {})
    return found


def compare_run_settings(previous: Mapping[str, str], current: Mapping[str, str]) -> ConfigChanges:
    """Return the changes between the settings of a run before and now, each setting -> value as
    text. Raise ValueError, with all of them at once, where settings changed that a run must keep.
    """
    keys = sorted(previous.keys() | current.keys())
    pairs = {key: (previous.get(key, NOT_USED), current.get(key, NOT_USED)) for key in keys}
    changed = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    refused = [
        (
            f"{key} is {now_value} and was {former}: {FIXED[key]}; set it back, or start anew"
            " with --fresh."
        )
        for key, (former, now_value) in changed.items()
        if key in FIXED
    ]
    if refused:
        raise ValueError("this run cannot go on with another configuration: " + " ".join(refused))
    layout = {key: pair for key, pair in changed.items() if key.startswith(OF_LAYOUT)}
    return ConfigChanges(layout, {key: pair for key, pair in changed.items() if key not in layout})


def compute_settings_digest(
    settings: Mapping[str, str], plugin_digests: Mapping[str, str] | None = None
) -> str:
    """Return a digest of the settings that determine the batches of a run's steps, for one history
    of its policy.

    Layout, engines, deadlines and outputs do not count: the samples of a step stay right when those
    change. A setting that an earlier version did not have does not count with its former default,
    so a journal of that version stays usable. The digests of plugins in `plugin_digests` count.
    """
    implied = {
        (former.key, format_yaml_value(former.value))
        for former in FORMER_DEFAULTS
        if former.is_new_setting
    }
    has_episodes = settings.get(f"{OF_EPISODES}name", "null") != "null"
    prefixes = (*_OF_A_STEP, OF_EPISODES) if has_episodes else _OF_A_STEP
    settings_of_steps = {
        key: value
        for key, value in settings.items()
        if not key.startswith((*OF_LAYOUT, *_NOT_OF_EPISODES))
        and (key.startswith(prefixes) or key in _OF_A_STEP_TOO)
        and (key, value) not in implied
    }
    if plugin_digests:
        settings_of_steps["plugins"] = ",".join(sorted(plugin_digests.values()))
    return hashlib.sha256(json.dumps(settings_of_steps, sort_keys=True).encode()).hexdigest()[:16]
