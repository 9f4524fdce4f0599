"""What changed in the configuration of a run that is resumed: refused, recorded, or of no consequence. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlhf_megatron.config.show import as_text

NOT_USED = "not in use"

FIXED = {
    "actor.backend": "the state was made by the former one",
    **dict.fromkeys(
        [f"actor.lora.{name}" for name in ("rank", "alpha", "target_modules")], "the state has the former's matrices"
    ),
    "model.dtype": "the state was made in the former type",
    "sft.in_memory": "the state names its data by the way in which they are read",
    "algorithm.adv_estimator": "it decides which models are trained and what their state is",
}
"""Settings that a run keeps for life, and why. The order of the data is checked on the data itself."""

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
_OF_A_STEP = ("model.", "data.", "actor.", "critic.", "reference.", "reward.", "reward_model.", "algorithm.")
_OF_A_STEP_TOO = (
    *("rollout.n", "rollout.temperature", "rollout.stop"),
    *("trainer.seed", "trainer.critic_warmup", "trainer.total_training_steps"),
)


@dataclass(frozen=True)
class Changes:
    """Setting -> (before, now), as text."""

    layout: Mapping[str, tuple[str, str]]  # allowed; sums are made in another order
    other: Mapping[str, tuple[str, str]]  # allowed and recorded

    @property
    def all(self) -> dict[str, tuple[str, str]]:
        return {**self.layout, **self.other}

    def __str__(self) -> str:
        return ", ".join(f"{key} {before} -> {now}" for key, (before, now) in self.all.items())


def flat(text: str) -> dict[str, str]:
    """Setting -> value as text, of a resolved configuration (`show.as_yaml`), also of another version's."""
    found: dict[str, str] = {}

    def walk(prefix: str, node: Any) -> None:
        if isinstance(node, dict) and node:
            for name, item in node.items():
                walk(f"{prefix}.{name}" if prefix else str(name), item)
        else:
            found[prefix] = as_text(node)

    walk("", yaml.safe_load(text) or {})
    return found


def compare(before: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """Raises ValueError, with all of them at once, where a setting changed that a run must keep."""
    keys = sorted(before.keys() | now.keys())
    pairs = {key: (before.get(key, NOT_USED), now.get(key, NOT_USED)) for key in keys}
    changed = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    refused = [
        f"{key} is {now_value} and was {former}: {FIXED[key]}; set it back, or start anew with --fresh."
        for key, (former, now_value) in changed.items()
        if key in FIXED
    ]
    if refused:
        raise ValueError("this run cannot go on with another configuration: " + " ".join(refused))
    layout = {key: pair for key, pair in changed.items() if key.startswith(OF_LAYOUT)}
    return Changes(layout, {key: pair for key, pair in changed.items() if key not in layout})


def settings_digest(settings: Mapping[str, str], sources: Mapping[str, str] | None = None) -> str:
    """Return a digest of the settings that the batches of a run's steps depend on, for one history of its policy.

    Layout, engines, deadlines and what is written do not count: a step's samples stay right when those change.
    `sources`: digests of plugins, which count.
    """
    kept = {
        key: value
        for key, value in settings.items()
        if not key.startswith(OF_LAYOUT) and (key.startswith(_OF_A_STEP) or key in _OF_A_STEP_TOO)
    }
    if sources:
        kept["plugins"] = ",".join(sorted(sources.values()))
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
