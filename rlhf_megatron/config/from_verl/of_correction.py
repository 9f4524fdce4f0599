"""Section algorithm.rollout_correction: modes, importance weights, rejection filters."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.config.from_verl.draft import Draft

SECTION = "algorithm.rollout_correction"
NAMES = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
DIAGNOSIS = f"{SECTION}.debug_rollout_actor_probs"


def correction(draft: Draft) -> None:
    g = draft.given
    g.ignore(DIAGNOSIS)
    is_bypass = g.has(f"{SECTION}.bypass_mode") and g.flag(f"{SECTION}.bypass_mode")
    veto = f"{SECTION}.rollout_token_veto_threshold"
    wanted = [name for name in ("rollout_is", "rollout_rs") if g.look(f"{SECTION}.{name}") not in (None, "null", "")]
    if not (is_bypass or wanted or g.look(veto)):
        keys = [key for key in g.rest() if key.startswith(f"{SECTION}.")]
        g.ignore(*keys)
        draft.num_off += len(keys)
        return
    note = "bypass_mode there"
    draft.put(f"{SECTION}.mode", "bypass" if is_bypass else "decoupled", (f"{SECTION}.bypass_mode",), note)
    g.ignore(f"{SECTION}.loss_type", *(f"{SECTION}.{name}" for name in NAMES))
    if is_bypass:
        _bypass(draft)
    if "rollout_is" in wanted:
        _weights(draft)
    if "rollout_rs" in wanted:
        _filters(draft)
    if g.get(veto) is not None:
        draft.put(veto, g.number(veto), (veto,))


def _bypass(draft: Draft) -> None:
    """verl's loss_type decides what the loss is; here that is loss_mode, and loss_type only says it again."""
    g, source = draft.given, f"{SECTION}.loss_type"
    kind = str(g.look(source) or "ppo_clip")
    draft.put(source, kind, (source,))
    note = ""
    if kind == "reinforce":
        note = "loss_type asks for it; versions of verl in which bypass mode does not reach the workers ignore it"
    draft.put("actor.policy_loss.loss_mode", kind, (source,), note)
    if kind != "ppo_clip":
        for key in [key for key in draft.values if key.startswith("actor.policy_loss.params.")]:
            del draft.values[key]


def _weights(draft: Draft) -> None:
    g = draft.given
    draft.put(f"{SECTION}.rollout_is", g.look(f"{SECTION}.rollout_is"), (f"{SECTION}.rollout_is",))
    bound = f"{SECTION}.rollout_is_threshold"
    value = g.look(bound) if g.look(bound) is not None else 2.0
    draft.put(bound, str(value), (bound,), "" if g.has(bound) else "verl's default")
    norm = f"{SECTION}.rollout_is_batch_normalize"
    if g.look(norm) is not None:
        draft.put(norm, g.flag(norm), (norm,))


def _filters(draft: Draft) -> None:
    g, source, bound = draft.given, f"{SECTION}.rollout_rs", f"{SECTION}.rollout_rs_threshold"
    names = _listed(g.look(source))
    bounds = _listed(g.look(bound))
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    draft.put(source, names, (source,))
    notes = []
    for name, text in zip(names, bounds, strict=False):
        low, line, high = text.partition("_")
        if (
            name.endswith("_k1")
            and line
            and _number(low)
            and _number(high)
            and abs(_number(low) * _number(high) - 1) > 1e-3
        ):
            other = f"{1 / _number(high):g}_{1 / _number(low):g}"
            notes.append(f"{name}: bounds of the ratio itself; verl's code turns them over and keeps {other}")
    draft.put(bound, bounds, (bound,), "; ".join(notes))


def _listed(value: Any) -> list[str]:
    """A comma-separated text, a list or a number as a list of texts."""
    if value is None:
        return []
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _number(text: str) -> float:
    """0 for what is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0
