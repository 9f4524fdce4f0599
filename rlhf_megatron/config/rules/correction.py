"""Rules on `algorithm.rollout_correction`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from rlhf_megatron.config.correction_presets import FILTERS, PRESETS, filter_bounds, importance_bounds, resolved
from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, Idle, idle, rule, wrong
from rlhf_megatron.config.schema import RolloutCorrectionConfig, RunConfig
from rlhf_megatron.config.source import Loaded

SECTION = "algorithm.rollout_correction"
PRESET, MODE, LOSS_TYPE = (f"{SECTION}.{name}" for name in ("preset", "mode", "loss_type"))
IS, IS_BOUNDS, NORM = (f"{SECTION}.rollout_is{name}" for name in ("", "_threshold", "_batch_normalize"))
RS, RS_BOUNDS, VETO = (f"{SECTION}.rollout_{name}" for name in ("rs", "rs_threshold", "token_veto_threshold"))
LOSS_MODE = "actor.policy_loss.loss_mode"


@idle
def idle_correction_settings(config: RunConfig) -> Iterator[Idle]:
    if config.algorithm.rollout_correction.preset not in PRESETS:
        return
    settings = resolved(config.algorithm.rollout_correction)
    yield settings.rollout_is is None, (IS_BOUNDS, NORM), IS, "set that to token or sequence"
    yield not settings.rollout_rs, (RS_BOUNDS,), RS, "name filters there"


@rule
def preset(loaded: Loaded) -> Findings:
    name = loaded.config.algorithm.rollout_correction.preset
    yield wrong(
        name not in PRESETS,
        f"{PRESET} ({name}) must be one of {', '.join(PRESETS)}; {_near(name, tuple(PRESETS))}.",
        (PRESET,),
    )


@rule
def bounds(loaded: Loaded) -> Findings:
    """Filters, and every bound as text."""
    settings = _settings(loaded)
    if settings is None:
        return
    if settings.rollout_is is not None and settings.rollout_is_threshold is not None:
        try:
            importance_bounds(settings.rollout_is_threshold)
        except ValueError as error:
            yield Problem(
                f"{IS_BOUNDS} ({settings.rollout_is_threshold}) {error}; use 2.0 or 0.5_5.0.", (IS_BOUNDS, IS)
            )
    names, texts = settings.rollout_rs or (), settings.rollout_rs_threshold or ()
    for name in names:
        yield wrong(
            name not in FILTERS, f"{RS} ({name}) must be among {', '.join(FILTERS)}; {_near(name, FILTERS)}.", (RS,)
        )
    yield wrong(len(set(names)) != len(names), f"{RS} ({', '.join(names)}) must differ; name each filter once.", (RS,))
    if names and len(names) != len(texts):
        yield Problem(
            f"{RS_BOUNDS} ({len(texts)} entries) must have one entry for each of the {len(names)} filters of {RS}"
            f" ({', '.join(names)}); write them together.",
            (RS_BOUNDS, RS),
        )
        return
    for name, text in zip(names, texts, strict=False):
        try:
            filter_bounds(name, text)
        except ValueError as error:
            usual = "0.5_2.0" if name.endswith("_k1") else "0.01"
            yield Problem(f"{RS_BOUNDS} ({text}) of {name} {error}; use one such as {usual}.", (RS_BOUNDS, RS))
    veto = settings.rollout_token_veto_threshold
    yield wrong(
        veto is not None and not 0 < veto < 1,
        f"{VETO} ({veto}) must be above 0 and below 1: it is the ratio of a token that drops its sequence; use 1e-4"
        " or null.",
        (VETO,),
    )


@rule
def modes(loaded: Loaded) -> Findings:
    settings = _settings(loaded)
    if settings is None:
        return
    loss_mode = loaded.config.actor.policy_loss.loss_mode
    if settings.mode == "decoupled":
        yield wrong(
            loaded.config.algorithm.rollout_correction.loss_type is not None,
            f"{LOSS_TYPE} ({settings.loss_type}) would be ignored because {MODE} is decoupled, where any"
            f" {LOSS_MODE} may stand; remove it, or set mode: bypass.",
            (LOSS_TYPE, MODE),
        )
        return
    yield wrong(
        loss_mode != settings.loss_type,
        f"{LOSS_MODE} ({loss_mode}) must be {settings.loss_type}, which {LOSS_TYPE} asks for{_of(loaded)}; set it,"
        " or use mode: decoupled, where any loss may stand.",
        (LOSS_MODE, LOSS_TYPE, MODE, PRESET),
    )
    yield wrong(
        settings.loss_type == "ppo_clip" and settings.rollout_is is not None,
        f"{IS} ({settings.rollout_is}) must be null with {MODE} bypass and {LOSS_TYPE} ppo_clip, whose ratio is"
        " already that of policy and engine: it would count twice; remove it, or use loss_type: reinforce.",
        (IS, LOSS_TYPE, MODE, PRESET),
    )


def _settings(loaded: Loaded) -> RolloutCorrectionConfig | None:
    """None where `preset` finds the preset unknown."""
    section = loaded.config.algorithm.rollout_correction
    return resolved(section) if section.preset in PRESETS else None


def _of(loaded: Loaded) -> str:
    section = loaded.config.algorithm.rollout_correction
    return f" (preset {section.preset})" if section.loss_type is None and section.preset != "disabled" else ""


def _near(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"use {near[0] if near else known[0]}"
