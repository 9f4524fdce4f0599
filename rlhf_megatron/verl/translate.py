"""Turns a configuration of verl into one of ours: maps it section by section, checks the result, writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config.load import parse_overrides
from rlhf_megatron.config.rules.validate import ignored, problems_of
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded, MappingNode, parse, plain
from rlhf_megatron.config.typed import BROKEN, Converter
from rlhf_megatron.config.verl_names import has_known_below, suggest
from rlhf_megatron.verl import algorithm, data, engines, generation, sft, trainer
from rlhf_megatron.verl.draft import Draft, Left, Told, Value, as_yaml, rest
from rlhf_megatron.verl.given import Given
from rlhf_megatron.verl.read import Written


@dataclass(frozen=True)
class Translation:
    """`text`: the YAML. `left`: without counterpart. `problems`: why `text` is not yet a configuration that runs."""

    text: str
    values: Mapping[str, Value]  # our key -> value
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]  # (our key, why it would have no effect)

    @property
    def is_whole(self) -> bool:
        """Whether every setting that changes what is learnt was translated."""
        return not any(one.learns for one in self.left)


def translate(
    written: Written,
    source: str,
    told: Told,
    environment: Mapping[str, str],
    ours: Sequence[str] = (),
    target: str = "result",
) -> Translation:
    """`ours`: overrides of our own settings (key=value) over the result; `target`: its name in messages.

    Raises ConfigError for overrides that are malformed.
    """
    given = Given(written, environment)
    if not written.job:
        engines.as_steps(given)
        algorithm.older_corrections(given)
    overrides = [_flat(override) for override in parse_overrides(ours, layer=0)]
    told = replace(told, reward=str(dict(overrides).get("reward.name", "")))
    draft = Draft(given, told)
    if written.job == "sft":
        sft.supervised(draft)
    elif written.job == "eval":
        generation.evaluation(draft)
    elif written.job:
        generation.generation(draft, written.job)
    else:
        _map(draft)
    for key, value in overrides:
        draft.values[key] = Value(value, (), False, "given with --set")
        draft.left = [one for one in draft.left if one.name or not one.reason.startswith(f"{key}:")]
    dropped = _prune(draft)
    notes = list(dict.fromkeys(given.notes))
    if draft.num_off:
        notes.append(f"settings that ask for nothing here, and are not listed: {draft.num_off}.")
    text = as_yaml(draft.values, draft.left, dropped, notes, source)
    loaded, problems = _loaded(text, target)
    problems = [*given.problems, *problems]
    if not problems:  # else one of these is the reason
        problems = [str(problem) for problem in problems_of(loaded)]
    return Translation(text, draft.values, tuple(draft.left), tuple(notes), tuple(problems), tuple(dropped))


def _map(draft: Draft) -> None:
    data.model(draft)
    data.data(draft)
    engines.actor_layout(draft)
    trainer.actor_batches(draft)
    trainer.optim(draft, "actor")
    algorithm.estimator(draft)
    _critic(draft)
    algorithm.kl_in_reward(draft)
    algorithm.resampling(draft)
    algorithm.group_filter(draft)
    algorithm.policy_loss(draft)
    algorithm.correction(draft)
    engines.schedule(draft)
    trainer.reference_batches(draft)
    engines.reference_layout(draft)
    engines.sampling(draft)
    engines.engines(draft)
    data.reward(draft)
    trainer.trainer(draft)
    rest(draft)


def _critic(draft: Draft) -> None:
    g = draft.given
    is_wanted = algorithm.has_critic(draft)
    if g.look("critic.enable") is not None and g.flag("critic.enable") != is_wanted:
        name = g.look("algorithm.adv_estimator")
        if is_wanted:
            g.problems.append(
                f"{g.name('critic.enable')} (false) and algorithm.adv_estimator ({name}) contradict each other: it"
                " needs a critic's values; choose one without, such as grpo, or remove critic.enable."
            )
        else:
            draft.leave("critic.enable", f"there is a critic where the estimator needs values, and {name} needs none")
    g.ignore("critic.enable")
    if not is_wanted:
        before = len(g.rest())
        g.ignore("critic.*", "trainer.critic_warmup")
        draft.num_off += before - len(g.rest())
        return
    draft.take("critic.model.path", "critic.path", lambda value: data.at_home(draft, value))
    draft.copy("critic.cliprange_value", value=g.number("critic.cliprange_value"))
    draft.copy("trainer.critic_warmup")
    trainer.critic_batches(draft)
    trainer.optim(draft, "critic")
    engines.critic_layout(draft)
    if g.look("critic.shuffle") in (None, g.look("actor.shuffle")):
        g.ignore("critic.shuffle")


def _flat(override: MappingNode) -> tuple[str, Any]:
    """The key and the value of an override of ours."""
    ((key, node),) = override.items.items()
    while isinstance(node, MappingNode) and len(node.items) == 1:
        ((name, node),) = node.items.items()
        key = f"{key}.{name}"
    return key, plain(node)


def _prune(draft: Draft) -> list[tuple[str, str]]:
    """Takes out of the draft what would be ignored: an error here, and no matter in verl. (our key, why) of each."""
    dropped: list[tuple[str, str]] = []
    while True:
        loaded, problems = _loaded(as_yaml(draft.values, (), (), (), ""), "")
        idle = {problem.keys[0]: str(problem) for problem in ignored(loaded)}
        idle = {key: text for key, text in idle.items() if any(_is_at(one, key) for one in draft.values)}
        if problems or not idle:
            return dropped
        for key, text in idle.items():
            dropped.append((key, text.partition(" would be ignored ")[2].partition("; ")[0]))
            for one in [one for one in draft.values if _is_at(one, key)]:
                del draft.values[one]


def _is_at(key: str, other: str) -> bool:
    return key == other or key.startswith(other + ".")


def _loaded(text: str, source: str) -> tuple[Loaded, list[str]]:
    """The YAML as it would be loaded, typed but without the rules between settings."""
    converter = Converter(suggest, has_known_below)
    config = converter.section(RunConfig, parse(text, source, 0), "", RunConfig())
    assert config is not BROKEN, "a mapping of sections always makes a configuration"
    return Loaded(config, converter.provenance), [str(problem) for problem in converter.problems]
