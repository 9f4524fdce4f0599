"""The modes of the rollout correction that split_pure.py enumerates, and what they do to one
sample, in plain numbers.

The plain formulas share nothing with the package: bounds are read from their texts here, and
everything is as docs/rollout_correction.md says it, a token or a sample at a time.
"""

# T tokens of the batch

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.config.rollout_correction_rules import (
    FILTERS,
    PRESETS,
    is_bypass_mode,
    resolve_rollout_correction,
)
from rlhf_megatron.config.schema import RolloutCorrectionConfig
from rlhf_megatron.data.batch import TrainBatch

# of log r, a sample in turn: so every filter keeps some tokens and rejects others
SCALES = 1e-4, 0.02, 0.5
BOUNDS: Mapping[str, str] = {
    "token_k1": "0.7_1.6",
    "token_k2": "0.05",
    "token_k3": "0.04",
    "seq_sum_k1": "0.8_1.1",
    "seq_sum_k2": "0.3",
    "seq_sum_k3": "0.4",
    "seq_mean_k1": "0.97_1.02",
    "seq_mean_k2": "0.05",
    "seq_mean_k3": "0.06",
    "seq_max_k2": "0.2",
    "seq_max_k3": "0.25",
}
VETO = 0.6
EXTREME = 20.0  # of an exponent


@dataclass(frozen=True)
class Mode:
    """A correction by name, and the losses that it may stand with (None: any)."""

    name: str
    section: RolloutCorrectionConfig
    losses: tuple[str, ...] | None


def modes() -> Iterator[Mode]:
    """Every preset that corrects anything; every filter alone; veto; weights of both levels that
    are cut, made 0, and divided by their mean; and all at once.
    """
    for name, preset in PRESETS.items():
        if preset["mode"] == "bypass":
            yield Mode(name, RolloutCorrectionConfig(name), (str(preset["loss_type"]),))
        elif name != "disabled":
            yield Mode(name, RolloutCorrectionConfig(name), None)
    rejections = {
        **{name: _filters(name) for name in FILTERS},
        "veto": {"rollout_token_veto_threshold": VETO},
    }
    weights = {
        "token weights, batch norm": _weights("token", "1.4", True),
        "sequence weights, batch norm": _weights("sequence", "1.4", True),
        "sequence icepop": _weights("sequence", "0.5_2.0", False),
        "everything": {
            **_weights("sequence", "0.4_3.0", True),
            **_filters("seq_mean_k1", "token_k3", "seq_max_k2"),
            **rejections["veto"],
        },
    }
    for name, settings in (rejections | weights).items():
        yield Mode(
            f"decoupled, {name}", RolloutCorrectionConfig(mode="decoupled", **settings), None
        )
        for loss in ("ppo_clip", "reinforce") if name in rejections else ("reinforce",):
            section = RolloutCorrectionConfig(mode="bypass", loss_type=loss, **settings)
            yield Mode(f"bypass, {name}", section, (loss,))


def _filters(*names: str) -> dict[str, Any]:
    return {"rollout_rs": names, "rollout_rs_threshold": tuple(BOUNDS[name] for name in names)}


def _weights(level: str, threshold: str, use_batch_norm: bool) -> dict[str, Any]:
    return {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": use_batch_norm,
    }


def with_engine(
    batch: TrainBatch, log_probs_T: Tensor, section: RolloutCorrectionConfig
) -> TrainBatch:
    """`batch` from an engine that is off by SCALES from the policy that the mode compares it with.

    `log_probs_T`: of the moving policy, which bypass mode looks at. The policy before the update is
    close to it there.
    """
    generator = torch.Generator().manual_seed(23)
    noise, step = torch.randn(2, batch.num_tokens, generator=generator)
    scale_T = torch.tensor(SCALES)[torch.arange(len(batch)) % len(SCALES)].repeat_interleave(
        batch.lengths
    )
    mask = batch.response_mask
    assert batch.old_log_probs is not None
    if not is_bypass_mode(section):
        return replace(batch, rollout_log_probs=(batch.old_log_probs + scale_T * noise) * mask)
    moving_T = log_probs_T.float()
    return replace(
        batch,
        rollout_log_probs=(moving_T + scale_T * noise) * mask,
        old_log_probs=(moving_T + 0.1 * scale_T * step) * mask,
    )


def plain_weights(logs: Sequence[float], section: RolloutCorrectionConfig) -> list[float]:
    """Of one sample's tokens, from log r of each; not divided by a mean."""
    settings = resolve_rollout_correction(section)
    if settings.rollout_is is None:
        return [1.0] * len(logs)
    low, high = _bounds(str(settings.rollout_is_threshold))
    ratios = [_exp(sum(logs) if settings.rollout_is == "sequence" else log) for log in logs]
    return [min(r, high) if low is None else r * (low <= r <= high) for r in ratios]


def plain_kept(logs: Sequence[float], section: RolloutCorrectionConfig) -> list[bool]:
    """Of one sample's tokens: whether all filters and the veto let them pass."""
    settings = resolve_rollout_correction(section)
    kept = [True] * len(logs)
    for name, text in zip(
        settings.rollout_rs or (), settings.rollout_rs_threshold or (), strict=True
    ):
        passes = _passing(logs, name, text)
        kept = [a and b for a, b in zip(kept, passes, strict=True)]
    veto = settings.rollout_token_veto_threshold
    return (
        [False] * len(logs) if veto is not None and any(_exp(log) < veto for log in logs) else kept
    )


def plain_mean(samples: Sequence[Sequence[float]], section: RolloutCorrectionConfig) -> float:
    """What batch normalisation divides by: the mean weight of the tokens that are kept, or of the
    sequences of which any is. `samples`: log r of the policy before the update. 1 where nothing
    is normalised.
    """
    settings = resolve_rollout_correction(section)
    if not settings.rollout_is_batch_normalize:
        return 1.0
    found: list[float] = []
    for logs in samples:
        pairs = zip(plain_weights(logs, section), plain_kept(logs, section), strict=True)
        of_kept = [weight for weight, is_kept in pairs if is_kept]
        found += of_kept[:1] if settings.rollout_is == "sequence" else of_kept
    return sum(found) / len(found)


def _passing(logs: Sequence[float], name: str, text: str) -> list[bool]:
    level, kind = name.rsplit("_", 1)
    low, high = _bounds(text)
    if kind == "k1":
        means = {
            "token": logs,
            "seq_sum": [sum(logs)] * len(logs),
            "seq_mean": [_mean(logs)] * len(logs),
        }[level]
        assert low is not None, f"{name} {text}"
        return [low <= math.exp(log) <= high for log in means]
    each = [log * log / 2 if kind == "k2" else _exp(log) - 1 - log for log in logs]
    whole = {"seq_sum": sum(each), "seq_mean": _mean(each), "seq_max": max(each, default=0.0)}
    return [(value if level == "token" else whole[level]) <= high for value in each]


def _bounds(text: str) -> tuple[float | None, float]:
    parts = [float(part) for part in text.split("_")]
    return (parts[0], parts[1]) if len(parts) == 2 else (None, parts[0])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _exp(log: float) -> float:
    return math.exp(min(max(log, -EXTREME), EXTREME))
