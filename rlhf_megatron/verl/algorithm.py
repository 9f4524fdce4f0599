"""Translates what decides what is learnt: estimator, policy loss, KL terms, entropy, rollout correction.

Names and parameters of estimators and losses are those that are registered.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.keys import field_types, has_default, leaf_keys
from rlhf_megatron.config.rules.parts import entry_of
from rlhf_megatron.config.schema import ActorConfig, AlgorithmConfig, RunConfig
from rlhf_megatron.registry import Registry, parts_of
from rlhf_megatron.verl.draft import Draft
from rlhf_megatron.verl.given import Given

LOSSES = {"vanilla": "ppo_clip"}
KL_TYPES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_SECTIONS = ("actor.policy_loss", "actor")
LOSS_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
ESTIMATOR_KEYS = ("gamma", "lam", "norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights")

OF_THE_REWARD, OF_THE_SCORER = ("seq_reward", "seq_final_reward"), ("acc", "score")
NO_LIMIT = 1000  # batches that a step may generate, where verl has none


def estimator_of(draft: Draft) -> str:
    """Our name of the advantage estimator; "" where none of that name is registered."""
    name = str(draft.given.look("algorithm.adv_estimator")).lower()
    plain = name.removeprefix("advantageestimator.").removesuffix("_vectorized")
    return plain if plain in ADV_ESTIMATORS else ""


def has_critic(draft: Draft) -> bool:
    name = estimator_of(draft)
    return bool(name) and "values" in ADV_ESTIMATORS.get(name).needs


def estimator(draft: Draft) -> None:
    key, g = "algorithm.adv_estimator", draft.given
    name = estimator_of(draft)
    if not name:
        draft.leave(key, _unknown(ADV_ESTIMATORS, g.look(key)), learns=True)
        return
    draft.copy(key, value=name, note=f"{g.look(key)} there" if name != g.look(key) else "")
    kind = ADV_ESTIMATORS.get(name).params
    for parameter in _parameters(kind):
        _parameter(draft, kind, parameter, "algorithm.params", (f"algorithm.{parameter}",))
    keys, scorer = "algorithm.gdpo_reward_keys", draft.told.reward or _scorer_of(g)
    if name == "gdpo" and scorer and isinstance(g.look(keys), list):
        ours = [scorer if one == "score" else f"{scorer}/{one}" for one in g.get(keys)]
        draft.put("algorithm.params.gdpo_reward_keys", ours, (keys,), "what the scorer returns is a part of it here")
    for parameter in ESTIMATOR_KEYS:
        source = f"algorithm.{parameter}"
        if g.has(source) and parameter not in _parameters(kind):
            g.ignore(source)
            draft.num_off += 1  # verl's estimator of that name does not read it either


def resampling(draft: Draft) -> None:
    """verl's switch stands beside the section, ours in it."""
    source, key = "algorithm.use_pf_ppo", "algorithm.pf_ppo.enable"
    if draft.given.has(source) and draft.given.flag(source) and key in leaf_keys(RunConfig):
        draft.put(key, True, (source,))


def _scorer_of(g: Given) -> str:
    """Our name of the scorer that the file names; "" where it names none."""
    return "function" if g.look("reward.custom_reward_function.path") else ""


def group_filter(draft: Draft) -> None:
    """verl names what a reward function returns; ours are the reward and its parts. Its 0 generates without end."""
    g, section = draft.given, "algorithm.filter_groups"
    metric, batches, generated = f"{section}.metric", f"{section}.max_num_gen_batches", "data.gen_batch_size"
    name = g.look(metric)
    if name in OF_THE_REWARD:
        draft.put(metric, "reward", (metric,), f"{name} there")
    elif name in OF_THE_SCORER:
        part = draft.told.reward or _scorer_of(g)
        note = f"{name} there: what the scorer says, without the penalty for length; the name of reward.name"
        value = f"function/{name}" if part == "function" and name == "acc" else part or "exact_match"
        draft.put(metric, value, (metric,), note)
    wanted, at_once, limit = g.look("data.train_batch_size"), g.look(generated), g.look(batches)
    is_filtered = g.is_on(f"{section}.enable")
    if limit in (0, "0"):
        draft.put(batches, NO_LIMIT, (batches,), "0, no limit, there; every wait has a limit here")
    elif is_filtered and isinstance(at_once, int) and isinstance(wanted, int) and isinstance(limit, int):
        note = f"batches of {wanted} prompts (data.train_batch_size) here, of {at_once} (gen_batch_size) there"
        draft.put(batches, -(-limit * at_once // wanted), (batches, generated), note if at_once != wanted else "")
    if is_filtered:
        g.ignore(generated)


def kl_in_reward(draft: Draft) -> None:
    g = draft.given
    draft.copy("algorithm.use_kl_in_reward", value=g.flag("algorithm.use_kl_in_reward"))
    _choice(draft, "algorithm.kl_penalty", KL_TYPES, AlgorithmConfig, "kl_penalty")
    for name in ("type", "kl_coef", "horizon"):
        draft.copy(f"algorithm.kl_ctrl.{name}")
    source = "algorithm.kl_ctrl.target_kl"
    is_adaptive = g.look("algorithm.kl_ctrl.type") == "adaptive" and g.look("algorithm.use_kl_in_reward") is True
    target, length = g.number(source), draft.told.response_length
    if not is_adaptive or target is None:
        return
    if length is None:
        draft.leave(
            source,
            "nats a token there, nats a response here: tell the usual tokens of a response with --response-length N",
            learns=True,
        )
        return
    note = f"nats a response here, nats a token there: {target:g} x {length} tokens"
    draft.put(source, float(f"{target * length:.12g}"), (source,), note)


def policy_loss(draft: Draft) -> None:
    g, key = draft.given, "actor.policy_loss.loss_mode"
    written = str(g.look(key))
    name = LOSSES.get(written, written)
    for one in ("actor.entropy_coeff", "actor.kl_loss_coef"):
        draft.copy(one, value=g.number(one))
    is_used, is_weightless = g.flag("actor.use_kl_loss"), g.look("actor.kl_loss_coef") == 0
    note = "its weight kl_loss_coef is 0: without the reference, whose KL would only be shown"
    draft.copy("actor.use_kl_loss", value=is_used and not is_weightless, note=note if is_used and is_weightless else "")
    _choice(draft, "actor.kl_loss_type", KL_TYPES, ActorConfig, "kl_loss_type")
    _aggregation(draft, name)
    if name not in POLICY_LOSSES:
        draft.leave(key, _unknown(POLICY_LOSSES, written), learns=True)
        return
    draft.copy(key, value=name, note=f"{written} there" if name != written else "")
    kind = POLICY_LOSSES.get(name).params
    known = _parameters(kind)
    for parameter in known:
        sources = tuple(f"{section}.{parameter}" for section in LOSS_SECTIONS)
        _parameter(draft, kind, parameter, "actor.policy_loss.params", sources)
    _clip_ratio(draft, known)
    for section in LOSS_SECTIONS:
        for source in (f"{section}.{parameter}" for parameter in (*LOSS_KEYS, *_other_parameters())):
            if g.has(source) and source.rpartition(".")[2] not in (*known, "clip_ratio"):
                g.ignore(source)
                draft.num_off += 1  # verl's loss of that name does not read it either


def _clip_ratio(draft: Draft, known: list[str]) -> None:
    """Translate a clip ratio that sets both sides at once. verl's own defaults of the two sides hide it, unless they
    are cleared.
    """
    g, source = draft.given, "actor.clip_ratio"
    g.ignore(source)
    if not g.has(source) or "clip_ratio_low" not in known:
        return
    for side in ("low", "high"):
        of_side = f"actor.clip_ratio_{side}"
        if g.has(of_side) and g.look(of_side) is not None:
            continue
        value, note = g.number(source), ""
        if value is not None and value != g.look(of_side) and not g.has(of_side):
            note = f"as it says; verl's default clip_ratio_{side} ({g.look(of_side)}) hides it in its newer versions"
        draft.put(f"actor.policy_loss.params.clip_ratio_{side}", value, (source,), note)


def _aggregation(draft: Draft, loss: str) -> None:
    source, key = "actor.loss_agg_mode", "actor.loss_agg_mode"
    own = entry.aggregation if (entry := entry_of("policy loss", str(loss))) is not None else None
    if own is not None and loss != "gspo":
        note = f"{loss} averages in this way, in verl whatever loss_agg_mode says"
        draft.put(key, own, (source, "actor.policy_loss.loss_mode"), note)
        return
    choices = list(parts_of("aggregation"))
    if own is not None and draft.given.look(source) in choices:
        note = f"as verl 0.9.1 reads it; until 0.9.0 {loss} averaged by {own} whatever it said"
        draft.put(key, draft.given.look(source), (source,), note)
    elif draft.given.look(source) in choices:
        draft.copy(source)
    else:
        draft.leave(source, f"not there; there are {', '.join(choices)}", learns=True)


def _choice(draft: Draft, source: str, names: dict[str, str], section: type, field: str) -> None:
    """An estimator of KL by its name here; one with a "+" has the gradient of k2 in both."""
    written = str(draft.given.look(source))
    base, plus = written.removesuffix("+"), "+" if written.endswith("+") else ""
    value, choices = names.get(base, base) + plus, get_args(field_types(section)[field])
    if value in choices:
        draft.copy(source, value=value, note=f"{written} there" if value != written else "")
    elif draft.given.has(source):
        draft.leave(source, f"not there; there are {', '.join(map(str, choices))}", learns=_is_used(draft, source))


def _is_used(draft: Draft, source: str) -> bool:
    switch = "actor.use_kl_loss" if source.startswith("actor") else "algorithm.use_kl_in_reward"
    return draft.given.look(switch) is True


def _parameters(kind: type | None) -> list[str]:
    return [field.name for field in fields(kind)] if kind is not None else []


def _other_parameters() -> set[str]:
    return {one for name in POLICY_LOSSES for one in _parameters(POLICY_LOSSES.get(name).params)}


def _parameter(draft: Draft, kind: type | None, name: str, section: str, sources: Iterable[str]) -> None:
    """A parameter of a part from the first of `sources` that is written, or from verl's default where ours differs."""
    assert kind is not None, "a part without parameters has none to set"
    sources = tuple(sources)
    source = next((one for one in sources if draft.given.has(one)), None)
    source = source or next((one for one in sources if draft.given.look(one) is not None), None)
    if source is None:
        return
    value = draft.given.get(source)
    draft.given.ignore(*sources)
    ours: Any = getattr(kind, name, None) if has_default(kind, name) else None
    note = ""
    if name == "clip_ratio_low" and isinstance(value, int | float) and value > 1:
        value, note = 1.0, f"{value} there: no bound, as with 1, since a ratio is never below 0"
    if value is not None and (draft.given.has(source) or value != ours):
        draft.put(f"{section}.{name}", value, (source,), note)


def _unknown(registry: Registry[Any], name: Any) -> str:
    near = difflib.get_close_matches(str(name), list(registry), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no {registry.kind} of that name is registered; {hint}there are {', '.join(registry)}"


SECTION = "algorithm.rollout_correction"
LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}  # of rollout_rs until 0.7.0


def older_corrections(given: Given) -> None:
    """Brings rollout correction of verl 0.5 to 0.7.0 under the names of 0.7.1 and later; what cannot be stays."""
    cap, former = "actor.tis_imp_ratio_cap", "algorithm.rollout_is"
    if given.has(cap) and (bound := given.number(cap)) is not None and bound > 0:
        _assume(given, cap, rollout_is="token", rollout_is_threshold=bound)
    upper = given.number(f"{former}_threshold") if given.has(f"{former}_threshold") else None  # of 0.6.0
    level, lower = given.look(f"{former}_level") or "token", given.look(f"{former}_threshold_lower")
    is_mask = given.look(f"{former}_mode") == "mask"
    if upper and given.has(former) and given.flag(former) and (is_mask or level != "geometric"):
        bounds = f"{lower or 1 / upper:g}_{upper:g}"
        if level == "geometric":  # its weights differ from 1 by no more than the bounds do
            _assume(given, f"{former}_threshold", rollout_rs=LEVELS[level], rollout_rs_threshold=bounds)
        else:
            _assume(given, f"{former}_threshold", rollout_is=level, rollout_is_threshold=bounds if is_mask else upper)
        veto = f"{former}_veto_threshold"
        _assume(given, veto, rollout_token_veto_threshold=given.get(veto) if given.has(veto) else 1e-4)
        given.ignore(*(f"{former}{rest}" for rest in ("_level", "_threshold_lower", "_mode")))
    elif not (upper and given.has(former) and given.flag(former)):  # only metrics
        given.ignore(former, *(f"{former}_{rest}" for rest in ("level", "threshold_lower", "mode", "veto_threshold")))
    kind, bound_key = f"{SECTION}.rollout_rs", f"{SECTION}.rollout_rs_threshold"
    if given.look(kind) in LEVELS:  # 0.6.1 to 0.7.0
        high = given.number(bound_key) if given.look(bound_key) is not None else None
        high = high or given.number(f"{SECTION}.rollout_is_threshold") or 2.0
        low = given.look(f"{bound_key}_lower") or 1 / high
        _assume(given, kind, rollout_rs=LEVELS[given.look(kind)])
        given.assume(bound_key, f"{low:g}_{high:g}", bound_key if given.has(bound_key) else kind)
    given.ignore(f"{bound_key}_lower")
    gradient = f"{SECTION}.use_policy_gradient"
    if given.has(gradient) and not given.has(f"{SECTION}.loss_type"):
        _assume(given, gradient, loss_type="reinforce" if given.flag(gradient) else "ppo_clip")


def _assume(given: Given, source: str, **values: object) -> None:
    given.ignore(source)
    for name, value in values.items():
        given.assume(f"{SECTION}.{name}", value, source)


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
    if is_bypass and "rollout_is" in wanted and g.look(f"{SECTION}.loss_type") in (None, "ppo_clip"):
        wanted.remove("rollout_is")
        g.notes.append(
            "rollout_is weighs nothing in bypass mode with ppo_clip, in verl either: the ratio is that already."
        )
    note = "bypass_mode there"
    draft.put(f"{SECTION}.mode", "bypass" if is_bypass else "decoupled", (f"{SECTION}.bypass_mode",), note)
    g.ignore(f"{SECTION}.loss_type", *(f"{SECTION}.{name}" for name in NAMES))
    if is_bypass:
        _bypass(draft)
    if "rollout_is" in wanted:
        _weights(draft)
    if "rollout_rs" in wanted:
        _filters(draft)
    draft.take(veto, as_ours=lambda _: g.number(veto))


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
    draft.take(norm, as_ours=lambda _: g.flag(norm))


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
