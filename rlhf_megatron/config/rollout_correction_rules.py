"""`algorithm.rollout_correction`: presets by name, texts of bounds as numbers, and the rules
on the section.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
)
from rlhf_megatron.config.schema import RolloutCorrectionConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

FILTERS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_ONE = re.compile(rf"\s*({_NUMBER})\s*\Z")
_TWO = re.compile(rf"\s*({_NUMBER})_({_NUMBER})\s*\Z")

_NONE: Mapping[str, Any] = MappingProxyType(
    {
        "mode": "decoupled",
        "loss_type": "ppo_clip",
        "rollout_is": None,
        "rollout_is_threshold": "2.0",
        "rollout_is_batch_normalize": False,
        "rollout_rs": (),
        "rollout_rs_threshold": (),
        "rollout_token_veto_threshold": None,
    }
)
_TOKEN = {"rollout_is": "token"}
_SEQUENCE = {"rollout_is": "sequence"}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO = {"rollout_rs": ("seq_mean_k1",), "rollout_rs_threshold": ("0.999_1.001",)}
_K3 = {"rollout_rs": ("seq_mean_k3",), "rollout_rs_threshold": ("0.01",)}
_PRODUCT = {"rollout_rs": ("seq_sum_k1",), "rollout_rs_threshold": ("0.5_2.0",)}
_CLIP = {"mode": "bypass", "loss_type": "ppo_clip"}
_PG = {"mode": "bypass", "loss_type": "reinforce"}

_OVER_NONE: dict[str, Mapping[str, Any]] = {
    "disabled": {},  # metrics only
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_SEQUENCE, **_PRODUCT},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE, **_GEO},
    "decoupled_geo_rs_token_tis": {**_TOKEN, **_GEO},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE, **_K3},
    "decoupled_k3_rs_token_tis": {**_TOKEN, **_K3},
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": {**_CLIP, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_CLIP, **_K3},
    "bypass_pg_is": {**_PG, **_SEQUENCE},
    "bypass_pg_token_icepop": {**_PG, **_ICEPOP},
    "bypass_pg_geo_rs": {**_PG, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_PG, **_SEQUENCE, **_GEO},
    "bypass_pg_geo_rs_token_tis": {**_PG, **_TOKEN, **_GEO},
}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: {**_NONE, **settings} for name, settings in _OVER_NONE.items()}
)

SECTION = "algorithm.rollout_correction"
PRESET, MODE, LOSS_TYPE = (f"{SECTION}.{name}" for name in ("preset", "mode", "loss_type"))
IS, IS_BOUNDS, NORM = (
    f"{SECTION}.rollout_is{name}" for name in ("", "_threshold", "_batch_normalize")
)
RS, RS_BOUNDS, VETO = (
    f"{SECTION}.rollout_{name}" for name in ("rs", "rs_threshold", "token_veto_threshold")
)
LOSS_MODE = "actor.policy_loss.loss_mode"


def resolve_rollout_correction(section: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """Return the section with each null replaced by the value of its preset, so that no setting
    that matters is null any more.

    Filters and their bounds are one setting: a configuration that sets filters must set their
    bounds too, and gets none from the preset. Raise KeyError for an unknown preset, which the rules
    report before.
    """
    preset = dict(PRESETS[section.preset])
    if section.rollout_rs is not None:
        preset["rollout_rs_threshold"] = ()
    given = {f.name: getattr(section, f.name) for f in fields(section) if f.name != "preset"}
    return replace(
        section, **preset | {name: value for name, value in given.items() if value is not None}
    )


def is_bypass_mode(section: RolloutCorrectionConfig) -> bool:
    """Return whether the log-probs that the engine reported take the place of the old policy's."""
    return resolve_rollout_correction(section).mode == "bypass"


def parse_importance_bounds(text: str) -> tuple[float | None, float]:
    """Return (lower bound, upper bound) of importance weights; the lower bound is None where
    weights are truncated at one number. Raise ValueError, without the setting's name, for other
    texts.
    """
    if one := _parse_positive_number(text):
        return None, one
    low, high = _parse_number_pair(text) or (0.0, 0.0)
    if not 0 < low < high:
        raise ValueError(
            "must be one number above 0, where weights are cut, or LOW_HIGH, outside of"
            " which they are 0"
        )
    return low, high


def parse_filter_bounds(filter_name: str, text: str) -> tuple[float | None, float]:
    """Return (lower bound, upper bound) of a rejection filter: of the ratio for k1 filters, and
    (None, upper bound) for k2 and k3. Raise ValueError, without the setting's name, for other
    texts.
    """
    if not filter_name.endswith("_k1"):
        if one := _parse_positive_number(text):
            return None, one
        raise ValueError(
            "must be one number above 0, an upper bound: k2 and k3 are 0 where engine and"
            " trainer agree"
        )
    one = _parse_positive_number(text)
    low, high = _parse_number_pair(text) or ((1 / one, one) if one else (0.0, 0.0))
    if not 0 < low < high:
        raise ValueError(
            "must be bounds of the ratio, LOW_HIGH with LOW below HIGH, or one number x above"
            " 1 for 1/x_x"
        )
    return low, high


def _parse_positive_number(text: str) -> float | None:
    """Return a finite number above 0 from a text; None for any other text."""
    match = _ONE.match(text)
    value = float(match[1]) if match else 0.0
    return value if 0 < value < math.inf else None


def _parse_number_pair(text: str) -> tuple[float, float] | None:
    """Return the two numbers of a text "LOW_HIGH"; None for any other text, or if HIGH
    is infinite.
    """
    match = _TWO.match(text)
    if not match or math.isinf(float(match[2])):
        return None
    return float(match[1]), float(match[2])


@register_idle_rule
def list_idle_correction_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield two entries, which say whether the bounds of importance weights and the bounds of
    rejection filters are ignored because no weights or filters are chosen. Yield nothing for an
    unknown preset.
    """
    if config.algorithm.rollout_correction.preset not in PRESETS:
        return
    settings = resolve_rollout_correction(config.algorithm.rollout_correction)
    yield settings.rollout_is is None, (IS_BOUNDS, NORM), IS, "set {switch} to token or sequence"
    yield not settings.rollout_rs, (RS_BOUNDS,), RS, "name filters in {switch}"


@register_rl_rule
def check_correction_preset(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem, with the nearest name, if the preset of the rollout correction
    is unknown.
    """
    name = loaded.config.algorithm.rollout_correction.preset
    yield make_problem_if(
        name not in PRESETS,
        (
            f"{PRESET} ({name}) must be one of"
            f" {', '.join(PRESETS)}; {_suggest_nearest_name(name, tuple(PRESETS))}."
        ),
        (PRESET,),
    )


@register_rl_rule
def check_correction_bounds(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the rollout correction's bounds and filters: texts that are no bounds,
    unknown or repeated filters, another number of bounds than of filters, and a veto threshold
    outside of (0, 1).
    """
    settings = _resolve_known_preset(loaded)
    if settings is None:
        return
    if settings.rollout_is is not None and settings.rollout_is_threshold is not None:
        try:
            parse_importance_bounds(settings.rollout_is_threshold)
        except ValueError as error:
            yield ConfigProblem(
                f"{IS_BOUNDS} ({settings.rollout_is_threshold}) {error}; use 2.0 or 0.5_5.0.",
                (IS_BOUNDS, IS),
            )
    names = settings.rollout_rs or ()
    texts = settings.rollout_rs_threshold or ()
    for name in names:
        yield make_problem_if(
            name not in FILTERS,
            (
                f"{RS} ({name}) must be among"
                f" {', '.join(FILTERS)}; {_suggest_nearest_name(name, FILTERS)}."
            ),
            (RS,),
        )
    yield make_problem_if(
        len(set(names)) != len(names),
        f"{RS} ({', '.join(names)}) must differ; name each filter once.",
        (RS,),
    )
    if names and len(names) != len(texts):
        yield ConfigProblem(
            (
                f"{RS_BOUNDS} ({len(texts)} entries) must have one entry for each of the"
                f" {len(names)} filters of {RS} ({', '.join(names)}); write names and bounds"
                " together."
            ),
            (RS_BOUNDS, RS),
        )
        return
    for name, text in zip(names, texts, strict=False):
        try:
            parse_filter_bounds(name, text)
        except ValueError as error:
            usual = "0.5_2.0" if name.endswith("_k1") else "0.01"
            yield ConfigProblem(
                f"{RS_BOUNDS} ({text}) of {name} {error}; use one such as {usual}.", (RS_BOUNDS, RS)
            )
    veto = settings.rollout_token_veto_threshold
    yield make_problem_if(
        veto is not None and not 0 < veto < 1,
        (
            f"{VETO} ({veto}) must be above 0 and below 1: it is the ratio of a token that drops"
            " its sequence; use 1e-4 or null."
        ),
        (VETO,),
    )


@register_rl_rule
def check_correction_mode(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the rollout correction's mode: a loss_type beside mode decoupled, which
    ignores it, or, in mode bypass, a policy loss that is not loss_type, or importance weights that
    count the ratio twice.
    """
    settings = _resolve_known_preset(loaded)
    if settings is None:
        return
    loss_mode = loaded.config.actor.policy_loss.loss_mode
    if settings.mode == "decoupled":
        yield make_problem_if(
            loaded.config.algorithm.rollout_correction.loss_type is not None,
            (
                f"{LOSS_TYPE} ({settings.loss_type}) would be ignored because {MODE} is decoupled,"
                f" where any {LOSS_MODE} may stand; remove {LOSS_TYPE}, or set mode: bypass."
            ),
            (LOSS_TYPE, MODE),
        )
        return
    yield make_problem_if(
        loss_mode != settings.loss_type,
        (
            f"{LOSS_MODE} ({loss_mode}) must be {settings.loss_type}, which {LOSS_TYPE} asks"
            f" for{_describe_preset(loaded)}; set {LOSS_MODE} to that loss, or use mode:"
            " decoupled, where any loss may stand."
        ),
        (LOSS_MODE, LOSS_TYPE, MODE, PRESET),
    )
    yield make_problem_if(
        settings.loss_type == "ppo_clip" and settings.rollout_is is not None,
        (
            f"{IS} ({settings.rollout_is}) must be null with {MODE} bypass and {LOSS_TYPE}"
            " ppo_clip, whose ratio is already that of policy and engine: it would count twice;"
            f" remove {IS}, or use loss_type: reinforce."
        ),
        (IS, LOSS_TYPE, MODE, PRESET),
    )


def _resolve_known_preset(loaded: LoadedConfig) -> RolloutCorrectionConfig | None:
    """Return the resolved section of the rollout correction, or None for an unknown preset, which
    another rule reports.
    """
    section = loaded.config.algorithm.rollout_correction
    return resolve_rollout_correction(section) if section.preset in PRESETS else None


def _describe_preset(loaded: LoadedConfig) -> str:
    """Return " (preset NAME)" if the loss_type comes from a preset that the configuration names,
    else "".
    """
    section = loaded.config.algorithm.rollout_correction
    return (
        f" (preset {section.preset})"
        if section.loss_type is None and section.preset != "disabled"
        else ""
    )


def _suggest_nearest_name(name: str, known_names: tuple[str, ...]) -> str:
    """Return "use NAME" with the known name that is nearest to `name`, or the first known name."""
    near = difflib.get_close_matches(name, known_names, n=1)
    return f"use {near[0] if near else known_names[0]}"
