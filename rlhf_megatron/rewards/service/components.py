"""The rewards that a configuration names, looked up and checked, and how their scores become one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.parts import MODEL_PART
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.config.typed import look_up
from rlhf_megatron.registry import Entry
from rlhf_megatron.rewards.scorers import OWN_PROCESS, REWARDS, Reward, RewardResult, is_masked
from rlhf_megatron.rewards.scorers.base import Searching


@dataclass(frozen=True)
class Component:
    """One reward of a run."""

    key: str  # where the configuration names it: "reward", "reward.terms[0]"
    part: str  # name of its score among the parts; those of one sample differ
    weight: float
    entry: Entry[Reward]
    params: Any
    written: Mapping[str, Any]  # the parameters as the configuration has them

    @cached_property
    def needs_process(self) -> bool:  # asked for each sample
        return OWN_PROCESS in self.entry.needs or (isinstance(self.params, Searching) and self.params.needs_process)


@dataclass(frozen=True)
class Components:
    """All rewards of a run. A sample is scored by the main one of its source and by all terms."""

    main: Component
    by_source: dict[str, Component]
    terms: tuple[Component, ...]

    def __iter__(self) -> Iterator[Component]:
        yield from (self.main, *self.by_source.values(), *self.terms)

    def of(self, source: str) -> tuple[Component, ...]:
        """Return the components that score a sample, the main one first."""
        return (self.by_source.get(source, self.main), *self.terms)


def load_components(config: RewardConfig, model: RewardTermConfig | None = None) -> Components:
    """`model`: a term that scores by the run's own reward model. Raises ConfigError with all unknown names and wrong
    parameters at once."""
    problems: list[str] = []

    def component(key: str, part: str, weight: float, name: str, params: dict[str, Any]) -> Component | None:
        entry, found = look_up(REWARDS, name, params, key, problems)
        return Component(key, part, weight, entry, found, params) if entry is not None else None

    main = component("reward", config.name, 1.0, config.name, config.params)
    by_source = {
        source: component(f"reward.by_source.{source}", one.name, one.weight, one.name, one.params)
        for source, one in config.by_source.items()
    }
    taken = {config.name, *(one.name for one in config.by_source.values())}
    terms = []
    for i, term in enumerate(config.terms):
        part = _free_name(term.name, taken)
        taken.add(part)
        terms.append(component(f"reward.terms[{i}]", part, term.weight, term.name, term.params))
    if model is not None:
        terms.append(component(MODEL_PART, MODEL_PART, model.weight, model.name, model.params))
    if problems:
        raise ConfigError(problems)
    assert main is not None
    return Components(
        main,
        {source: one for source, one in by_source.items() if one is not None},
        tuple(one for one in terms if one is not None),
    )


def _free_name(name: str, taken: set[str]) -> str:
    """`name`, or with the first number that makes it a new one: format, format_2, format_3."""
    numbered = (f"{name}_{i}" for i in range(2, len(taken) + 3))
    return next(candidate for candidate in (name, *numbered) if candidate not in taken)


def combine(components: Sequence[Component], results: Sequence[RewardResult]) -> RewardResult:
    """Join the results of a sample's components, the main one first: the weighted sum, and every score as a part.

    The main reward decides the status. Where that is malformed or timeout it adds at most 0 and the terms still
    count, so that a response without an answer is paid or fined for its format and length as any other. A sample that
    any component could not score is masked. A `wrong_score` stretches scores from 0 to 1 to wrong_score to 1.
    """
    for result in results:
        if is_masked(result.status):
            return result
    parts = {}
    score = 0.0
    for component, result in zip(components, results, strict=True):
        wrong = getattr(component.params, "wrong_score", 0.0)
        parts[component.part] = own = wrong + (1.0 - wrong) * float(result.score)
        parts |= {f"{component.part}/{name}": float(value) for name, value in result.parts.items()}
        score += component.weight * own
    return RewardResult(score, results[0].status, parts)
