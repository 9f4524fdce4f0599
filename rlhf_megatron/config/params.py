"""The parameters of a registered part: a free mapping of the configuration into the part's own dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rlhf_megatron.config.convert import BROKEN, Converter
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.keys import join, leaves, nearest
from rlhf_megatron.config.provenance import DEFAULT, Loaded
from rlhf_megatron.config.source import lift

P = TypeVar("P")


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
