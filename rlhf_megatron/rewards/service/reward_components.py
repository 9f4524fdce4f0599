"""The rewards that a configuration names, looked up and checked,
and how their scores become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.part_rules import MAIN_REWARD, MODEL_PART, NO_MAIN_REWARD
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.config.type_conversion import resolve_part
from rlhf_megatron.registry import RegistryEntry
from rlhf_megatron.rewards.scorers import OWN_PROCESS, REWARDS, Reward, RewardResult, is_masked
from rlhf_megatron.rewards.scorers.reward_types import PatternSearchingParams


@dataclass(frozen=True)
class RewardComponent:
    """One reward of a run."""

    config_key: str  # where the configuration names it: "reward", "reward.terms[0]"
    part_name: str  # name of its score among the parts; those of one sample differ
    weight: float
    entry: RegistryEntry[Reward]
    params: Any
    written_params: Mapping[str, Any]  # the parameters as the configuration has them

    @cached_property
    def needs_process(self) -> bool:  # asked for each sample
        """Return whether the reward must run in a worker process, as the registration or the params
        say.
        """
        return OWN_PROCESS in self.entry.needs or (
            isinstance(self.params, PatternSearchingParams) and self.params.needs_process
        )


@dataclass(frozen=True)
class RewardComponents:
    """All rewards of a run. A sample is scored by the main one of its source and by all terms."""

    main_component: RewardComponent
    by_source: dict[str, RewardComponent]
    terms: tuple[RewardComponent, ...]
    # True: a reward model on the ranks adds its scores behind the reward stage
    has_later_scores: bool = False

    def __iter__(self) -> Iterator[RewardComponent]:
        """Yield all components: the main one, those of the sources, the terms."""
        yield from (self.main_component, *self.by_source.values(), *self.terms)

    def combine_results(self, source: str, results: Sequence[RewardResult]) -> RewardResult:
        """Return one result for the results of the components of this source, in their order."""
        return combine_results(self.select_for_source(source), results, self.has_later_scores)

    def select_for_source(self, source: str) -> tuple[RewardComponent, ...]:
        """Return the components that score a sample of this source, the main one first."""
        return (self.by_source.get(source, self.main_component), *self.terms)


def load_reward_components(
    config: RewardConfig,
    model_term: RewardTermConfig | None = None,
    has_later_scores: bool = False,
) -> RewardComponents:
    """Return the rewards that the configuration names. `model_term` is a term that scores by the
    run's own reward model; `has_later_scores`: that model is on the ranks, and scores behind the
    reward stage. Raise ConfigError with all unknown names and wrong parameters at once.
    """
    problems: list[str] = []

    def make_component(
        config_key: str, part_name: str, weight: float, name: str, params: dict[str, Any]
    ) -> RewardComponent | None:
        """Return the component of a registered reward, or None after adding its problems to
        `problems`.
        """
        entry, found = resolve_part(REWARDS, name, params, config_key, problems)
        return (
            RewardComponent(config_key, part_name, weight, entry, found, params)
            if entry is not None
            else None
        )

    main = make_component("reward", config.name, 1.0, config.name, config.params)
    by_source = {
        source: make_component(
            f"reward.by_source.{source}", one.name, one.weight, one.name, one.params
        )
        for source, one in config.by_source.items()
    }
    taken = {MAIN_REWARD, config.name, *(one.name for one in config.by_source.values())}
    terms = []
    for i, term in enumerate(config.terms):
        part = _make_unique_name(term.name, taken)
        taken.add(part)
        terms.append(
            make_component(f"reward.terms[{i}]", part, term.weight, term.name, term.params)
        )
    if model_term is not None:
        terms.append(
            make_component(
                MODEL_PART, MODEL_PART, model_term.weight, model_term.name, model_term.params
            )
        )
    if problems:
        raise ConfigError(problems)
    assert main is not None
    return RewardComponents(
        main,
        {source: one for source, one in by_source.items() if one is not None},
        tuple(one for one in terms if one is not None),
        has_later_scores,
    )


def _make_unique_name(name: str, used_names: set[str]) -> str:
    """Return `name`, or where it is used the name with the first free number: format, format_2,
    format_3.
    """
    numbered = (f"{name}_{i}" for i in range(2, len(used_names) + 3))
    return next(candidate for candidate in (name, *numbered) if candidate not in used_names)


def combine_results(
    components: Sequence[RewardComponent],
    results: Sequence[RewardResult],
    has_later_scores: bool = False,
) -> RewardResult:
    """Return one result for a sample's results, the main one first: the weighted sum, and every
    score as a part.

    The main reward decides the status. Where that is malformed or timeout the main reward adds at
    most 0 and the terms still count, so that a response without an answer is paid or fined for its
    format and length as any other. A sample that any component could not score is masked. A
    `wrong_score` maps scores from 0..1 to wrong_score..1. Hints of the results are joined. Where
    the sum has more in it than the main reward, or will have (`has_later_scores`), the main reward
    also is the part `MAIN_REWARD`, unless it is `zero`.
    """
    for result in results:
        if is_masked(result.status):
            return result
    parts = {}
    score = 0.0
    for component, result in zip(components, results, strict=True):
        wrong = getattr(component.params, "wrong_score", 0.0)
        parts[component.part_name] = own = wrong + (1.0 - wrong) * float(result.score)
        parts |= {
            f"{component.part_name}/{name}": float(value) for name, value in result.parts.items()
        }
        score += component.weight * own
    main = components[0]
    is_sum = len(components) > 1 or main.weight != 1.0 or has_later_scores
    if is_sum and main.entry.name != NO_MAIN_REWARD:
        parts[MAIN_REWARD] = parts[main.part_name]
    hints = dict.fromkeys(result.error for result in results if result.error)
    return RewardResult(score, results[0].status, parts, "\n".join(hints))


def get_main_score(result: RewardResult) -> float:
    """Return the main reward of a sample, before its weight and without terms: whether the answer
    is right, as far as the rewards tell. Return the score where it is nothing but the main reward,
    or the main reward is `zero`.
    """
    return result.parts.get(MAIN_REWARD, result.score)
