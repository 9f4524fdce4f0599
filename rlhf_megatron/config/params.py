"""The parameters of a registered part: a free mapping of the configuration into the part's own dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.keys import join, leaves, nearest
from rlhf_megatron.config.source import DEFAULT, Loaded, lift
from rlhf_megatron.config.typed import BROKEN, Converter
from rlhf_megatron.registry import Entry, Registry

P = TypeVar("P")
T = TypeVar("T")


def params_from_mapping(cls: type[P], mapping: Mapping[str, Any], where: str, loaded: Loaded | None = None) -> P:
    """An instance of the dataclass `cls`, as strictly checked as the configuration itself.

    `where` is the key path of the mapping ("actor.policy_loss.params"). With `loaded`, messages name file and line.
    Raises ConfigError with all unknown names, wrong types, missing values and what `cls.__post_init__` refuses.
    """
    known = [join(where, leaf.key) for leaf in leaves(cls)]
    converter = Converter(lambda key: nearest(key, known))
    params = converter.section(cls, lift(mapping, DEFAULT), where)
    if converter.problems:
        origins = loaded or Loaded.of_nothing()
        problems = []
        for problem in converter.problems:
            origin = origins.origin(problem.keys[0])
            problems.append(replace(problem, where="" if origin is DEFAULT else str(origin)))
        raise ConfigError(problems)
    assert params is not BROKEN
    return params


def look_up(
    registry: Registry[T], name: str, params: Mapping[str, Any], key: str, problems: list[str], field: str = "params"
) -> tuple[Entry[T], Any] | tuple[None, None]:
    """(entry, its parameters) of the part that `key` names, or a pair of None and what is wrong added to `problems`."""
    try:
        entry = registry.get(name)
        if params and entry.params is None:
            problems.append(f"{key}.{field} ({params}) must be empty: {registry.kind} {name!r} has no parameters.")
        return entry, (params_from_mapping(entry.params, params, f"{key}.{field}") if entry.params else None)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"{key}: {error}")
    return None, None
