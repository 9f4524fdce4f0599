"""Turns a configuration of verl into one of ours: maps it section by section, checks the
result, writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config.load import parse_overrides
from rlhf_megatron.config.rules.validate import find_config_problems, find_ignored_settings
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.type_conversion import BROKEN, ConfigConverter
from rlhf_megatron.config.untranslated_settings import UNTRANSLATED
from rlhf_megatron.config.verl_names import has_known_subkeys, suggest_setting
from rlhf_megatron.config.yaml_nodes import LoadedConfig, MappingNode, convert_to_plain, parse_yaml
from rlhf_megatron.jobs.from_verl import (
    verl_algorithm,
    verl_data,
    verl_engines,
    verl_generation,
    verl_sft,
    verl_trainer,
)
from rlhf_megatron.jobs.from_verl.config_draft import (
    ConfigDraft,
    IdleSetting,
    TranslatedValue,
    UntranslatedSetting,
    UserFacts,
    render_commented_yaml,
    translate_remaining_settings,
)
from rlhf_megatron.jobs.from_verl.settings_reader import ValueProblem, WrittenSettings
from rlhf_megatron.jobs.from_verl.verl_settings import VerlSettings


@dataclass(frozen=True)
class ConfigTranslation:
    """The result of a translation. `yaml_text` is the configuration, `untranslated` the settings of
    verl without counterpart, and `problems` the reasons why `yaml_text` cannot run as it is, beside
    the settings that change what is learnt and have no counterpart.
    """

    yaml_text: str
    values: Mapping[str, TranslatedValue]  # our key -> value
    untranslated: tuple[UntranslatedSetting, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    dropped_settings: tuple[tuple[str, str], ...]  # (our key, why it would have no effect)
    idle_settings: tuple[IdleSetting, ...]  # of verl, which the translation left out

    @property
    def is_complete(self) -> bool:
        """Return whether every setting that changes what is learnt was translated."""
        return not any(one.affects_learning for one in self.untranslated)


def translate_verl_config(
    written_settings: WrittenSettings,
    source: str,
    user_facts: UserFacts,
    environment: Mapping[str, str],
    our_overrides: Sequence[str] = (),
    result_name: str = "result",
) -> ConfigTranslation:
    """Translate the settings of verl to a configuration of ours, and check the result. `source`
    names the file in the header; `our_overrides` are overrides of our settings (key=value) over the
    result; `result_name` names the result in messages.

    Raise ConfigError for malformed overrides; problems of the result are returned.
    """
    given = VerlSettings(written_settings, environment)
    if not written_settings.job:
        verl_engines.convert_async_recipe_to_steps(given)
        verl_algorithm.upgrade_correction_settings(given)
    overrides = [
        _flatten_override(override) for override in parse_overrides(our_overrides, layer=0)
    ]
    user_facts = replace(user_facts, reward_name=str(dict(overrides).get("reward.name", "")))
    draft = ConfigDraft(given, user_facts)
    if written_settings.job == "sft":
        verl_sft.translate_supervised_job(draft)
    elif written_settings.job == "eval":
        verl_generation.translate_evaluation_job(draft)
    elif written_settings.job:
        verl_generation.translate_generation_job(draft, written_settings.job)
    else:
        _translate_training_job(draft)
    for key, value in overrides:
        draft.values[key] = TranslatedValue(value, (), False, "given with --set")
        draft.untranslated = [
            one for one in draft.untranslated if one.name != key or not one.is_missing
        ]
    unreadable = [
        UntranslatedSetting(problem.name, None, problem.message, "unreadable_value")
        for problem in given.problems
    ]
    dropped = _remove_idle_values(draft)
    notes = list(dict.fromkeys(given.notes))
    num_idle = len(draft.idle_settings)
    if num_idle:
        notes.append(f"settings that ask for nothing here: {num_idle} (--show-dropped lists them).")
    refused = (*unreadable, *draft.untranslated)
    text = render_commented_yaml(draft.values, refused, dropped, notes, source)
    loaded, problems = _load_yaml_text(text, result_name)  # without the section `untranslated`
    problems = [*(problem.message for problem in given.problems), *problems]
    if not problems:  # else one of these is the reason
        problems = [str(problem) for problem in find_config_problems(loaded)]
    return ConfigTranslation(
        text,
        draft.values,
        tuple(draft.untranslated),
        tuple(notes),
        tuple(problems),
        tuple(dropped),
        tuple(draft.list_dropped_settings()),
    )


def _translate_training_job(draft: ConfigDraft) -> None:
    """Translate all settings of an RL job into the draft."""
    verl_data.translate_model(draft)
    verl_data.translate_data(draft)
    verl_engines.translate_actor_layout(draft)
    verl_trainer.translate_actor_batches(draft)
    verl_trainer.translate_optimizer(draft, "actor")
    verl_algorithm.translate_estimator(draft)
    _translate_critic(draft)
    verl_algorithm.translate_kl_in_reward(draft)
    verl_algorithm.translate_resampling(draft)
    verl_algorithm.translate_group_filter(draft)
    verl_algorithm.translate_policy_loss(draft)
    verl_algorithm.translate_rollout_correction(draft)
    verl_engines.translate_schedule(draft)
    verl_trainer.translate_reference_token_budget(draft)
    verl_engines.translate_reference_layout(draft)
    verl_engines.translate_sampling(draft)
    verl_engines.translate_engines(draft)
    verl_data.translate_reward(draft)
    verl_trainer.translate_trainer(draft)
    translate_remaining_settings(draft)


def _translate_critic(draft: ConfigDraft) -> None:
    """Translate the critic's settings if the estimator needs a critic, else mark them as settings
    that ask for nothing. Record a problem or an untranslated setting where critic.enable
    contradicts the estimator.
    """
    g = draft.verl_settings
    is_wanted = verl_algorithm.estimator_needs_critic(draft)
    if g.peek_value("critic.enable") is not None and g.use_flag("critic.enable") != is_wanted:
        name = g.peek_value("algorithm.adv_estimator")
        if is_wanted:
            message = (
                f"{g.get_written_name('critic.enable')} (false) and algorithm.adv_estimator"
                f" ({name}) contradict each other: it needs a critic's values; choose one without,"
                " such as grpo, or remove critic.enable."
            )
            g.problems.append(ValueProblem(g.get_written_name("critic.enable"), message))
        else:
            draft.leave_untranslated(
                "critic.enable",
                f"there is a critic where the estimator needs values, and {name} needs none",
            )
    g.mark_used("critic.enable")
    if not is_wanted:
        for key in g.list_unused_keys():
            if key.startswith("critic.") or key == "trainer.critic_warmup":
                draft.drop_setting(key, "the estimator needs no critic")
        return
    draft.convert_setting(
        "critic.model.path", "critic.path", lambda value: verl_data.expand_home(draft, value)
    )
    draft.copy_setting("critic.cliprange_value", value=g.use_number("critic.cliprange_value"))
    draft.copy_setting("trainer.critic_warmup")
    verl_trainer.translate_critic_batches(draft)
    verl_trainer.translate_optimizer(draft, "critic")
    verl_engines.translate_critic_layout(draft)
    if g.peek_value("critic.shuffle") in (None, g.peek_value("actor.shuffle")):
        g.mark_used("critic.shuffle")


def _flatten_override(override: MappingNode) -> tuple[str, Any]:
    """Return the full key and the plain value of an override of ours."""
    ((key, node),) = override.items.items()
    while isinstance(node, MappingNode) and len(node.items) == 1:
        ((name, node),) = node.items.items()
        key = f"{key}.{name}"
    return key, convert_to_plain(node)


def _remove_idle_values(draft: ConfigDraft) -> list[tuple[str, str]]:
    """Remove the values that our configuration would ignore, an error here but none in verl, from
    the draft. Return (our key, the reason) for each.
    """
    dropped: list[tuple[str, str]] = []
    while True:
        loaded, problems = _load_yaml_text(render_commented_yaml(draft.values, (), (), (), ""), "")
        idle = {problem.keys[0]: str(problem) for problem in find_ignored_settings(loaded)}
        idle = {
            key: text
            for key, text in idle.items()
            if any(_is_at_or_below(one, key) for one in draft.values)
        }
        if problems or not idle:
            return dropped
        for key, text in idle.items():
            dropped.append((key, text.partition(" would be ignored ")[2].partition("; ")[0]))
            for one in [one for one in draft.values if _is_at_or_below(one, key)]:
                del draft.values[one]


def _is_at_or_below(key: str, parent_key: str) -> bool:
    """Return whether a key is the other key or is inside of it."""
    return key == parent_key or key.startswith(parent_key + ".")


def _load_yaml_text(text: str, source: str) -> tuple[LoadedConfig, list[str]]:
    """Return the configuration that the YAML makes, typed but without the rules between settings,
    and its problems as texts.
    """
    converter = ConfigConverter(suggest_setting, has_known_subkeys)
    root = parse_yaml(text, source, 0)
    assert isinstance(root, MappingNode), "a translation is a mapping of sections"
    sections = {name: node for name, node in root.items.items() if name != UNTRANSLATED}
    config = converter.convert_section(RunConfig, replace(root, items=sections), "", RunConfig())
    assert config is not BROKEN, "a mapping of sections always makes a configuration"
    return LoadedConfig(config, converter.provenance), [
        str(problem) for problem in converter.problems
    ]
