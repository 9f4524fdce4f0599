"""Translates what decides what is learnt: estimator, policy loss, KL terms, entropy,
rollout correction.

Names and parameters of estimators and losses are those that are registered.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.key_paths import has_field_default, list_leaf_keys, resolve_field_types
from rlhf_megatron.config.rules.part_rules import find_registered_part
from rlhf_megatron.config.schema import ActorConfig, AlgorithmConfig, RunConfig
from rlhf_megatron.jobs.from_verl.config_draft import ConfigDraft
from rlhf_megatron.jobs.from_verl.verl_settings import VerlSettings
from rlhf_megatron.registry import Registry, load_registry

LOSSES = {"vanilla": "ppo_clip"}
KL_TYPES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_SECTIONS = ("actor.policy_loss", "actor")
LOSS_KEYS = (
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
)
ESTIMATOR_KEYS = (
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "gdpo_reward_keys",
    "gdpo_reward_weights",
)

OF_THE_REWARD = ("seq_reward", "seq_final_reward")
OF_THE_SCORER = ("acc", "score")
NO_LIMIT = 1000  # batches that a step may generate, where verl has none

SECTION = "algorithm.rollout_correction"
# of rollout_rs until 0.7.0
LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

NAMES = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)
DIAGNOSIS = f"{SECTION}.debug_rollout_actor_probs"


def find_estimator_name(draft: ConfigDraft) -> str:
    """Return our name of the file's advantage estimator; "" where none of that name is
    registered.
    """
    name = str(draft.verl_settings.peek_value("algorithm.adv_estimator")).lower()
    plain = name.removeprefix("advantageestimator.").removesuffix("_vectorized")
    return plain if plain in ADV_ESTIMATORS else ""


def estimator_needs_critic(draft: ConfigDraft) -> bool:
    """Return whether the file's advantage estimator is registered here and needs a
    critic's values.
    """
    name = find_estimator_name(draft)
    return bool(name) and "values" in ADV_ESTIMATORS.get(name).needs


def translate_estimator(draft: ConfigDraft) -> None:
    """Translate the advantage estimator and its parameters; leave an unknown one untranslated."""
    key = "algorithm.adv_estimator"
    g = draft.verl_settings
    name = find_estimator_name(draft)
    if not name:
        draft.leave_untranslated(
            key, _describe_unknown_part(ADV_ESTIMATORS, g.peek_value(key)), "estimator"
        )
        return
    draft.copy_setting(
        key, value=name, note=f"{g.peek_value(key)} there" if name != g.peek_value(key) else ""
    )
    kind = ADV_ESTIMATORS.get(name).params
    for parameter in _list_parameter_names(kind):
        _translate_parameter(
            draft, kind, parameter, "algorithm.params", (f"algorithm.{parameter}",)
        )
    keys = "algorithm.gdpo_reward_keys"
    scorer = draft.user_facts.reward_name or _find_scorer_name(g)
    if name == "gdpo" and scorer and isinstance(g.peek_value(keys), list):
        ours = [scorer if one == "score" else f"{scorer}/{one}" for one in g.use_value(keys)]
        draft.set_value(
            "algorithm.params.gdpo_reward_keys",
            ours,
            (keys,),
            "what the scorer returns is a part of it here",
        )
    for parameter in ESTIMATOR_KEYS:
        source = f"algorithm.{parameter}"
        if g.is_written(source) and parameter not in _list_parameter_names(kind):
            draft.drop_setting(source, f"the estimator {name} does not read it, in verl either")


def translate_resampling(draft: ConfigDraft) -> None:
    """Translate the switch of PF-PPO, which verl has beside the section and we have in it."""
    source = "algorithm.use_pf_ppo"
    key = "algorithm.pf_ppo.enable"
    if (
        draft.verl_settings.is_written(source)
        and draft.verl_settings.use_flag(source)
        and key in list_leaf_keys(RunConfig)
    ):
        draft.set_value(key, True, (source,))


def _find_scorer_name(verl_settings: VerlSettings) -> str:
    """Return our name of the scorer that the file names, "function"; "" where it names none."""
    return "function" if verl_settings.peek_value("reward.custom_reward_function.path") else ""


def translate_group_filter(draft: ConfigDraft) -> None:
    """Translate the metric and the limit of the group filter. verl's metrics are results of a
    reward function, ours the reward and its parts; verl's limit of 0 has no end, ours becomes a
    large number.
    """
    g = draft.verl_settings
    section = "algorithm.filter_groups"
    metric = f"{section}.metric"
    batches = f"{section}.max_num_gen_batches"
    generated = "data.gen_batch_size"
    name = g.peek_value(metric)
    if name in OF_THE_REWARD:
        draft.set_value(metric, "reward", (metric,), f"{name} there")
    elif name in OF_THE_SCORER:
        part = draft.user_facts.reward_name or _find_scorer_name(g)
        note = (
            f"{name} there: what the scorer says, without the penalty for length; the name"
            " of reward.name"
        )
        value = (
            f"function/{name}" if part == "function" and name == "acc" else part or "exact_match"
        )
        draft.set_value(metric, value, (metric,), note)
    wanted = g.peek_value("data.train_batch_size")
    at_once = g.peek_value(generated)
    limit = g.peek_value(batches)
    is_filtered = g.is_true(f"{section}.enable")
    if limit in (0, "0"):
        draft.set_value(
            batches, NO_LIMIT, (batches,), "0, no limit, there; every wait has a limit here"
        )
    elif (
        is_filtered
        and isinstance(at_once, int)
        and isinstance(wanted, int)
        and isinstance(limit, int)
    ):
        note = (
            f"batches of {wanted} prompts (data.train_batch_size) here, of {at_once}"
            " (gen_batch_size) there"
        )
        draft.set_value(
            batches,
            -(-limit * at_once // wanted),
            (batches, generated),
            note if at_once != wanted else "",
        )
    if is_filtered:
        g.mark_used(generated)


def translate_kl_in_reward(draft: ConfigDraft) -> None:
    """Translate the KL term in the reward. An adaptive target, in nats a token in verl, becomes
    nats a response if the user has given the usual response length, else it stays untranslated.
    """
    g = draft.verl_settings
    draft.copy_setting("algorithm.use_kl_in_reward", value=g.use_flag("algorithm.use_kl_in_reward"))
    _translate_kl_type(draft, "algorithm.kl_penalty", KL_TYPES, AlgorithmConfig, "kl_penalty")
    for name in ("type", "kl_coef", "horizon"):
        draft.copy_setting(f"algorithm.kl_ctrl.{name}")
    source = "algorithm.kl_ctrl.target_kl"
    is_adaptive = (
        g.peek_value("algorithm.kl_ctrl.type") == "adaptive"
        and g.peek_value("algorithm.use_kl_in_reward") is True
    )
    target = g.use_number(source)
    length = draft.user_facts.response_length
    if not is_adaptive or target is None:
        return
    if length is None:
        draft.leave_untranslated(
            source,
            (
                "nats a token there, nats a response here: tell the usual tokens of a response with"
                " --response-length N"
            ),
            "missing",
        )
        return
    note = f"nats a response here, nats a token there: {target:g} x {length} tokens"
    draft.set_value(source, float(f"{target * length:.12g}"), (source,), note)


def translate_policy_loss(draft: ConfigDraft) -> None:
    """Translate the policy loss with its parameters, aggregation, entropy bonus and KL loss; leave
    an unknown loss untranslated. Parameters of other losses are only counted, as verl ignores them
    too.
    """
    g = draft.verl_settings
    key = "actor.policy_loss.loss_mode"
    written = str(g.peek_value(key))
    name = LOSSES.get(written, written)
    for one in ("actor.entropy_coeff", "actor.kl_loss_coef"):
        draft.copy_setting(one, value=g.use_number(one))
    is_used = g.use_flag("actor.use_kl_loss")
    is_weightless = g.peek_value("actor.kl_loss_coef") == 0
    note = "its weight kl_loss_coef is 0: without the reference, whose KL would only be shown"
    draft.copy_setting(
        "actor.use_kl_loss",
        value=is_used and not is_weightless,
        note=note if is_used and is_weightless else "",
    )
    _translate_kl_type(draft, "actor.kl_loss_type", KL_TYPES, ActorConfig, "kl_loss_type")
    _translate_aggregation(draft, name)
    if name not in POLICY_LOSSES:
        draft.leave_untranslated(key, _describe_unknown_part(POLICY_LOSSES, written), "policy_loss")
        return
    draft.copy_setting(key, value=name, note=f"{written} there" if name != written else "")
    kind = POLICY_LOSSES.get(name).params
    known = _list_parameter_names(kind)
    for parameter in known:
        sources = tuple(f"{section}.{parameter}" for section in LOSS_SECTIONS)
        _translate_parameter(draft, kind, parameter, "actor.policy_loss.params", sources)
    _translate_clip_ratio(draft, known)
    for section in LOSS_SECTIONS:
        for source in (
            f"{section}.{parameter}"
            for parameter in (*LOSS_KEYS, *_list_parameters_of_all_losses())
        ):
            if g.is_written(source) and source.rpartition(".")[2] not in (*known, "clip_ratio"):
                draft.drop_setting(source, f"the loss {written} does not read it, in verl either")


def _translate_clip_ratio(draft: ConfigDraft, loss_parameters: list[str]) -> None:
    """Translate actor.clip_ratio, which sets both sides at once, for sides that have no value of
    their own. verl's own defaults of the two sides hide it, unless they are cleared.
    """
    g = draft.verl_settings
    source = "actor.clip_ratio"
    g.mark_used(source)
    if not g.is_written(source) or "clip_ratio_low" not in loss_parameters:
        return
    for side in ("low", "high"):
        of_side = f"actor.clip_ratio_{side}"
        if g.is_written(of_side) and g.peek_value(of_side) is not None:
            continue
        value = g.use_number(source)
        note = ""
        if value is not None and value != g.peek_value(of_side) and not g.is_written(of_side):
            note = (
                f"as it says; verl's default clip_ratio_{side} ({g.peek_value(of_side)}) hides it"
                " in its newer versions"
            )
        draft.set_value(f"actor.policy_loss.params.clip_ratio_{side}", value, (source,), note)


def _translate_aggregation(draft: ConfigDraft, loss_name: str) -> None:
    """Translate loss_agg_mode. A loss that verl always averages in one way gets that mode, with a
    note; an unknown mode stays untranslated.
    """
    source = "actor.loss_agg_mode"
    key = "actor.loss_agg_mode"
    own = (
        entry.aggregation
        if (entry := find_registered_part("policy loss", str(loss_name))) is not None
        else None
    )
    if own is not None and loss_name != "gspo":
        note = f"{loss_name} averages in this way, in verl whatever loss_agg_mode says"
        draft.set_value(key, own, (source, "actor.policy_loss.loss_mode"), note)
        return
    choices = list(load_registry("aggregation"))
    if own is not None and draft.verl_settings.peek_value(source) in choices:
        note = f"as verl 0.9.1 reads it; until 0.9.0 {loss_name} averaged by {own} whatever it said"
        draft.set_value(key, draft.verl_settings.peek_value(source), (source,), note)
    elif draft.verl_settings.peek_value(source) in choices:
        draft.copy_setting(source)
    else:
        draft.leave_untranslated(source, f"not there; there are {', '.join(choices)}", "loss_terms")


def _translate_kl_type(
    draft: ConfigDraft, source: str, our_names: dict[str, str], section_class: type, field_name: str
) -> None:
    """Translate the name of a KL estimator to ours; a "+", the gradient of k2, is the same in both.
    An unknown name that the file sets stays untranslated.
    """
    written = str(draft.verl_settings.peek_value(source))
    base = written.removesuffix("+")
    plus = "+" if written.endswith("+") else ""
    value = our_names.get(base, base) + plus
    choices = get_args(resolve_field_types(section_class)[field_name])
    if value in choices:
        draft.copy_setting(source, value=value, note=f"{written} there" if value != written else "")
    elif draft.verl_settings.is_written(source):
        draft.leave_untranslated(
            source,
            f"not there; there are {', '.join(map(str, choices))}",
            "loss_terms" if _is_kl_term_used(draft, source) else "",
        )


def _is_kl_term_used(draft: ConfigDraft, source: str) -> bool:
    """Return whether the KL term that this setting belongs to, in the actor's loss or in the
    reward, is switched on.
    """
    switch = "actor.use_kl_loss" if source.startswith("actor") else "algorithm.use_kl_in_reward"
    return draft.verl_settings.peek_value(switch) is True


def _list_parameter_names(params_class: type | None) -> list[str]:
    """Return the field names of a parameter dataclass; [] for None."""
    return [field.name for field in fields(params_class)] if params_class is not None else []


def _list_parameters_of_all_losses() -> set[str]:
    """Return the parameter names of all registered policy losses."""
    return {
        one
        for name in POLICY_LOSSES
        for one in _list_parameter_names(POLICY_LOSSES.get(name).params)
    }


def _translate_parameter(
    draft: ConfigDraft, params_class: type | None, name: str, section: str, sources: Iterable[str]
) -> None:
    """Set a parameter of a part from the first of `sources` that the file sets, or from verl's
    default where that differs from ours. Mark all sources as used.
    """
    assert params_class is not None, "a part without parameters has none to set"
    sources = tuple(sources)
    source = next((one for one in sources if draft.verl_settings.is_written(one)), None)
    source = source or next(
        (one for one in sources if draft.verl_settings.peek_value(one) is not None), None
    )
    if source is None:
        return
    value = draft.verl_settings.use_value(source)
    for key in sources:
        draft.verl_settings.mark_used(key)
    ours: Any = getattr(params_class, name, None) if has_field_default(params_class, name) else None
    note = ""
    if name == "clip_ratio_low" and isinstance(value, int | float) and value > 1:
        note = f"{value} there: no bound, as with 1, since a ratio is never below 0"
        value = 1.0
    if value is not None and (draft.verl_settings.is_written(source) or value != ours):
        draft.set_value(f"{section}.{name}", value, (source,), note)


def _describe_unknown_part(registry: Registry[Any], name: Any) -> str:
    """Return that no part of this name is registered, with the nearest name and all names."""
    near = difflib.get_close_matches(str(name), list(registry), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no {registry.kind} of that name is registered; {hint}there are {', '.join(registry)}"


def upgrade_correction_settings(verl_settings: VerlSettings) -> None:
    """Rename the rollout correction settings of verl 0.5 to 0.7.0 to those of 0.7.1 and later, in
    place. Settings that cannot be renamed stay.
    """
    cap = "actor.tis_imp_ratio_cap"
    former = "algorithm.rollout_is"
    if (
        verl_settings.is_written(cap)
        and (bound := verl_settings.use_number(cap)) is not None
        and bound > 0
    ):
        _assume_correction_settings(
            verl_settings, cap, rollout_is="token", rollout_is_threshold=bound
        )
    upper = (
        verl_settings.use_number(f"{former}_threshold")
        if verl_settings.is_written(f"{former}_threshold")
        else None
    )  # of 0.6.0
    level = verl_settings.peek_value(f"{former}_level") or "token"
    lower = verl_settings.peek_value(f"{former}_threshold_lower")
    is_mask = verl_settings.peek_value(f"{former}_mode") == "mask"
    if (
        upper
        and verl_settings.is_written(former)
        and verl_settings.use_flag(former)
        and (is_mask or level != "geometric")
    ):
        bounds = f"{lower or 1 / upper:g}_{upper:g}"
        if level == "geometric":  # its weights differ from 1 by no more than the bounds do
            _assume_correction_settings(
                verl_settings,
                f"{former}_threshold",
                rollout_rs=LEVELS[level],
                rollout_rs_threshold=bounds,
            )
        else:
            _assume_correction_settings(
                verl_settings,
                f"{former}_threshold",
                rollout_is=level,
                rollout_is_threshold=bounds if is_mask else upper,
            )
        veto = f"{former}_veto_threshold"
        _assume_correction_settings(
            verl_settings,
            veto,
            rollout_token_veto_threshold=verl_settings.use_value(veto)
            if verl_settings.is_written(veto)
            else 1e-4,
        )
        verl_settings.mark_used(
            *(f"{former}{rest}" for rest in ("_level", "_threshold_lower", "_mode"))
        )
    elif not (
        upper and verl_settings.is_written(former) and verl_settings.use_flag(former)
    ):  # only metrics
        verl_settings.mark_used(
            former,
            *(
                f"{former}_{rest}"
                for rest in ("level", "threshold_lower", "mode", "veto_threshold")
            ),
        )
    kind = f"{SECTION}.rollout_rs"
    bound_key = f"{SECTION}.rollout_rs_threshold"
    if verl_settings.peek_value(kind) in LEVELS:  # 0.6.1 to 0.7.0
        high = (
            verl_settings.use_number(bound_key)
            if verl_settings.peek_value(bound_key) is not None
            else None
        )
        high = high or verl_settings.use_number(f"{SECTION}.rollout_is_threshold") or 2.0
        low = verl_settings.peek_value(f"{bound_key}_lower") or 1 / high
        _assume_correction_settings(
            verl_settings, kind, rollout_rs=LEVELS[verl_settings.peek_value(kind)]
        )
        verl_settings.assume_value(
            bound_key,
            f"{low:g}_{high:g}",
            bound_key if verl_settings.is_written(bound_key) else kind,
        )
    verl_settings.mark_used(f"{bound_key}_lower")
    gradient = f"{SECTION}.use_policy_gradient"
    if verl_settings.is_written(gradient) and not verl_settings.is_written(f"{SECTION}.loss_type"):
        _assume_correction_settings(
            verl_settings,
            gradient,
            loss_type="reinforce" if verl_settings.use_flag(gradient) else "ppo_clip",
        )


def _assume_correction_settings(verl_settings: VerlSettings, source: str, **values: object) -> None:
    """Set settings of the rollout correction that follow from the setting `source`, and mark
    `source` as used.
    """
    verl_settings.mark_used(source)
    for name, value in values.items():
        verl_settings.assume_value(f"{SECTION}.{name}", value, source)


def translate_rollout_correction(draft: ConfigDraft) -> None:
    """Translate the rollout correction: mode, importance weights, rejection filters and veto. Where
    the file corrects nothing, only count its settings.
    """
    g = draft.verl_settings
    g.mark_used(DIAGNOSIS)
    is_bypass = g.is_written(f"{SECTION}.bypass_mode") and g.use_flag(f"{SECTION}.bypass_mode")
    veto = f"{SECTION}.rollout_token_veto_threshold"
    wanted = [
        name
        for name in ("rollout_is", "rollout_rs")
        if g.peek_value(f"{SECTION}.{name}") not in (None, "null", "")
    ]
    if not (is_bypass or wanted or g.peek_value(veto)):
        keys = [key for key in g.list_unused_keys() if key.startswith(f"{SECTION}.")]
        for key in keys:
            draft.drop_setting(key, "nothing is corrected: no weights, no filter, no bypass")
        return
    if (
        is_bypass
        and "rollout_is" in wanted
        and g.peek_value(f"{SECTION}.loss_type") in (None, "ppo_clip")
    ):
        wanted.remove("rollout_is")
        g.notes.append(
            "rollout_is weighs nothing in bypass mode with ppo_clip, in verl either: the ratio is"
            " that already."
        )
    note = "bypass_mode there"
    draft.set_value(
        f"{SECTION}.mode", "bypass" if is_bypass else "decoupled", (f"{SECTION}.bypass_mode",), note
    )
    g.mark_used(f"{SECTION}.loss_type", *(f"{SECTION}.{name}" for name in NAMES))
    if is_bypass:
        _translate_bypass_mode(draft)
    if "rollout_is" in wanted:
        _translate_importance_weights(draft)
    if "rollout_rs" in wanted:
        _translate_rejection_filters(draft)
    draft.convert_setting(veto, convert_value=lambda _: g.use_number(veto))


def _translate_bypass_mode(draft: ConfigDraft) -> None:
    """Translate the loss of bypass mode. verl's loss_type decides the loss; here loss_mode does,
    and loss_type must agree, so both are set. Parameters of another loss are dropped.
    """
    g = draft.verl_settings
    source = f"{SECTION}.loss_type"
    kind = str(g.peek_value(source) or "ppo_clip")
    draft.set_value(source, kind, (source,))
    note = ""
    if kind == "reinforce":
        note = (
            "loss_type asks for it; versions of verl in which bypass mode does not reach the"
            " workers ignore it"
        )
    draft.set_value("actor.policy_loss.loss_mode", kind, (source,), note)
    if kind != "ppo_clip":
        for key in [key for key in draft.values if key.startswith("actor.policy_loss.params.")]:
            del draft.values[key]


def _translate_importance_weights(draft: ConfigDraft) -> None:
    """Translate the importance weights, their bound (verl's default of 2 if not set), and their
    normalization.
    """
    g = draft.verl_settings
    draft.set_value(
        f"{SECTION}.rollout_is", g.peek_value(f"{SECTION}.rollout_is"), (f"{SECTION}.rollout_is",)
    )
    bound = f"{SECTION}.rollout_is_threshold"
    value = g.peek_value(bound) if g.peek_value(bound) is not None else 2.0
    draft.set_value(bound, str(value), (bound,), "" if g.is_written(bound) else "verl's default")
    norm = f"{SECTION}.rollout_is_batch_normalize"
    draft.convert_setting(norm, convert_value=lambda _: g.use_flag(norm))


def _translate_rejection_filters(draft: ConfigDraft) -> None:
    """Translate the rejection filters and their bounds, with a note where verl's code inverts the
    bounds of a ratio.
    """
    g = draft.verl_settings
    source = f"{SECTION}.rollout_rs"
    bound = f"{SECTION}.rollout_rs_threshold"
    names = _split_into_texts(g.peek_value(source))
    bounds = _split_into_texts(g.peek_value(bound))
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    draft.set_value(source, names, (source,))
    notes = []
    for name, text in zip(names, bounds, strict=False):
        low, line, high = text.partition("_")
        if (
            name.endswith("_k1")
            and line
            and _parse_number_or_zero(low)
            and _parse_number_or_zero(high)
            and abs(_parse_number_or_zero(low) * _parse_number_or_zero(high) - 1) > 1e-3
        ):
            other = f"{1 / _parse_number_or_zero(high):g}_{1 / _parse_number_or_zero(low):g}"
            notes.append(
                f"{name}: bounds of the ratio itself; verl's code turns them over and keeps {other}"
            )
    draft.set_value(bound, bounds, (bound,), "; ".join(notes))


def _split_into_texts(value: Any) -> list[str]:
    """Return a comma-separated text, a list or a number as a list of texts; [] for None."""
    if value is None:
        return []
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def _parse_number_or_zero(text: str) -> float:
    """Return a text as a number, or 0 for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return 0.0
