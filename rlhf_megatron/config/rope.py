"""Rotary position embeddings (RoFormer, 2104.09864) and their rescalings as config.json describes
them. No torch.

Both spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`, which holds both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_BASE = 10000.0
LARGEST = 1e30  # of a setting: float32 has room for it

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
    },
}
"""The settings of each supported type. Another one is an error: engines that know it would turn
by other angles.
"""
_MSCALES = {"mscale", "mscale_all_dim"}
_LATENT_KEYS: dict[str, set[str]] = {
    "default": set(),
    "yarn": (_KEYS["yarn"] | _MSCALES) - {"attention_factor", "truncate"},
}
"""Those of models with latent attention, whose angles are megatron-core's."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (2306.15595): every angle is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1 (2407.21783): waves longer than original_max_positions / low_freq_factor are
    stretched by `factor`, those shorter than original_max_positions / high_freq_factor are kept,
    the ones between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (2309.00071): dimensions that turn less than `beta_slow` times within the original
    context are stretched by `factor`, those over `beta_fast` are kept, between the two is a ramp;
    cos and sin are times `attention_factor`.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    is_truncated: bool  # the ramp begins and ends at whole dimensions
    # of latent attention: cos and sin are times m(mscale) / m(mscale_all_dim), the softmax's scale
    mscale: float = 1.0
    mscale_all_dim: float = 0.0  # is times m(mscale_all_dim)^2, with m(x) = 0.1 x ln(factor) + 1


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RotaryConfig:
    """The rotary embeddings of a model: base, rescaling, and the share of a head that is rotated.
    Hashable: tables are cached by it.
    """

    base: float
    scaling: RotaryScaling | None = None
    rotated_share: float = 1.0  # of a head's dimensions that turn: the first ones


def read_rotary_config(
    hf_config: Mapping[str, Any], can_be_partial: bool = False, is_latent: bool = False
) -> RotaryConfig:
    """Return the rotary embeddings that a config.json describes. `can_be_partial`: the model family
    may rotate only a part of a head; `is_latent`: the model has latent attention. Raise ValueError
    for a type or setting that is not supported.
    """
    parameters = _read_rope_parameters(hf_config)
    keys = _LATENT_KEYS if is_latent else _KEYS
    kind = _read_rope_type(parameters, tuple(keys))
    unknown = sorted(parameters.keys() - _COMMON - keys[kind])
    if unknown:
        raise ValueError(
            f"rotary embeddings of type {kind!r} have the settings {', '.join(unknown)}, which are"
            " not supported; remove them if they have no effect, or choose another model."
        )
    partial = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if not can_be_partial and partial not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor ({partial!r}) is not supported; it must be 1: choose"
            " another model."
        )
    share = 1.0 if partial is None else _require_number("partial_rotary_factor", partial)
    return RotaryConfig(
        _read_rope_base(hf_config, parameters),
        _read_rope_scaling(kind, parameters, hf_config),
        min(share, 1.0),
    )


def _read_rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not null of the one section, rope_scaling or rope_parameters,
    that holds them. Raise ValueError where both are given and differ.
    """
    sections = []
    for key in ("rope_scaling", "rope_parameters"):
        section = hf_config.get(key) or {}
        if not isinstance(section, Mapping):
            raise ValueError(f"{key} ({section!r}) must be a mapping; mend the file.")
        sections.append({name: value for name, value in section.items() if value is not None})
    scaling, parameters = sections
    if scaling and parameters and {**parameters, **scaling} != parameters:
        raise ValueError(
            f"rope_scaling ({scaling}) and rope_parameters ({parameters}) differ, and programs"
            " disagree about which of them counts; keep one."
        )
    return parameters or scaling


def _read_rope_type(parameters: Mapping[str, Any], supported: tuple[str, ...]) -> str:
    """Return the type of rotary embeddings, "default" where none is given. Raise ValueError for two
    different types or a type that is not supported.
    """
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if key in parameters}
    if len(kinds) > 1:
        raise ValueError(f"rotary embeddings have the types {sorted(kinds)}; keep one.")
    kind = kinds.pop() if kinds else "default"
    if kind == "dynamic":
        raise ValueError(
            "rotary embeddings of type 'dynamic' are not supported: their angles depend on the"
            " length of the text; within the original context length set rope_scaling to null and"
            " max_position_embeddings to that length."
        )
    if kind not in supported:
        raise ValueError(
            f"rotary embeddings of type {kind!r} are not supported; they must be of type"
            f" {', '.join(supported)}: choose another model."
        )
    return kind


def _read_rope_base(hf_config: Mapping[str, Any], parameters: Mapping[str, Any]) -> float:
    """Return rope_theta, or the usual base where the file does not give it. Raise ValueError for
    two different values.
    """
    found = {
        _require_number("rope_theta", section["rope_theta"])
        for section in (parameters, hf_config)
        if section.get("rope_theta") is not None
    }
    if len(found) > 1:
        raise ValueError(
            f"rope_theta is given twice, as {' and '.join(map(str, sorted(found)))}; keep"
            " the right one."
        )
    return found.pop() if found else DEFAULT_BASE


def _read_rope_scaling(
    rope_type: str, parameters: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> RotaryScaling | None:
    """Return the rescaling that the settings of this type describe, or None for the default type.
    Raise ValueError for a missing or impossible number.
    """
    if rope_type == "default":
        return None

    def read_number(key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """Return a setting of the rescaling as a positive number of at least `minimum`, or its
        default.
        """
        return _require_number(
            f"{key} of rotary embeddings of type {rope_type!r}",
            parameters.get(key, default),
            minimum,
        )

    factor = read_number("factor", minimum=1.0)
    if rope_type == "linear":
        return LinearScaling(factor)
    # transformers looks in this order; the last is for files from before the setting.
    places = (
        hf_config.get("original_max_position_embeddings"),
        parameters.get("original_max_position_embeddings"),
        hf_config.get("max_position_embeddings"),
    )
    length = next((place for place in places if place is not None), None)
    original = int(_require_number("original_max_position_embeddings", length, 1.0))
    if rope_type == "llama3":
        low = read_number("low_freq_factor")
        high = read_number("high_freq_factor")
        if low >= high:
            raise ValueError(
                f"low_freq_factor ({low}) must be below high_freq_factor ({high}); mend the file."
            )
        return Llama3Scaling(factor, low, high, original)
    given = sorted(_MSCALES & parameters.keys())
    if len(given) == 1:
        raise ValueError(
            f"{given[0]} without the other of mscale and mscale_all_dim is read in several"
            " ways; give both."
        )
    mscale, all_dim = (
        (read_number(key) for key in ("mscale", "mscale_all_dim")) if given else (1.0, 0.0)
    )
    # The paper's temperature of the softmax, as a factor of cos and sin.
    usual = (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0)
    fast = read_number("beta_fast", 32.0)
    slow = read_number("beta_slow", 1.0)
    if fast < slow:
        raise ValueError(f"beta_fast ({fast}) must not be below beta_slow ({slow}); mend the file.")
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=read_number("attention_factor", usual),
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=bool(parameters.get("truncate", True)),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def _require_number(name: str, value: Any, minimum: float = 0.0) -> float:
    """Return `value` as a float if it is a positive number of at least `minimum` and at most 1e30;
    raise ValueError, with the setting's name, for anything else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= LARGEST or value < minimum:
        rule = f"a number of at least {minimum:g}" if minimum else "a positive number"
        raise ValueError(f"{name} ({value!r}) must be {rule}; mend the file.")
    return float(value)
