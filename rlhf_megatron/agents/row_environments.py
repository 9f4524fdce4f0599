"""The environments that rows of the data name in their column `environment`: {name, params}. They
are checked at the start of a run, since a wrong one would otherwise fail in the middle of training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.agents.environment import ENVIRONMENTS
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.data.prompt_items import PromptItem
from rlhf_megatron.registry import load_registry

ENVIRONMENT_COLUMN = "environment"
_KEYS = {"name", "params"}
MAX_PROBLEMS = 8


@dataclass(frozen=True)
class NamedEnvironment:
    """An environment with its parameters, and where it is named."""

    name: str
    params: Mapping[str, Any]
    key: str  # the setting, or the row


def read_row_environment(extra: str) -> Any:
    """Return the column `environment` of a row, None where the row has none. `extra`: the JSON
    object of the row's columns, or "".
    """
    if f'"{ENVIRONMENT_COLUMN}"' not in extra:
        return None
    return json.loads(extra).get(ENVIRONMENT_COLUMN)


def list_row_environments(
    items: Iterable[PromptItem], is_deterministic: bool
) -> list[NamedEnvironment]:
    """Return the environments that these rows name, each once. Raise ConfigError with what is wrong
    with them: no {name, params}, an unknown name, wrong parameters, or, where `is_deterministic`,
    one that does not declare to be deterministic.
    """
    found: dict[str, NamedEnvironment] = {}
    problems: dict[str, None] = {}
    for item in items:
        value = read_row_environment(item.extra)
        if value is None:
            continue
        text = json.dumps(value, sort_keys=True)
        if text in found:
            continue
        key = f"column {ENVIRONMENT_COLUMN} of the row {item.prompt[:60]!r}"
        if not _is_named_environment(value):
            problems[
                f"{key} ({text[:100]}) must be an object with name and params; correct it, or"
                " rename the column."
            ] = None
            continue
        found[text] = NamedEnvironment(value["name"], value.get("params") or {}, key)
        problems |= dict.fromkeys(_check_environment(found[text], is_deterministic))
    if problems:
        raise ConfigError(list(problems)[:MAX_PROBLEMS])
    return list(found.values())


def _is_named_environment(value: object) -> bool:
    """Return whether the value of a column is {name, params}."""
    return (
        isinstance(value, dict)
        and value.keys() <= _KEYS
        and isinstance(value.get("name"), str)
        and isinstance(value.get("params") or {}, dict)
    )


def _check_environment(named: NamedEnvironment, is_deterministic: bool) -> list[str]:
    """Return what is wrong with an environment that a row names."""
    load_registry("environment")
    try:
        entry = ENVIRONMENTS.get(named.name)
    except ValueError as error:
        return [f"{named.key}: {error}"]
    if not entry.build.may_be_named_by_rows:
        return [
            f"{named.key}: the environment {named.name} may not be named by rows of data, since its"
            " params name code that runs; set rollout.environment.name, or register an environment"
            " of your own under another name."
        ]
    problems = []
    try:
        if entry.params is not None:
            build_params(entry.params, named.params, f"{named.key}: params")
        elif named.params:
            problems.append(f"{named.key}: environment {named.name} has no params; remove them.")
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"{named.key}: {error}")
    if is_deterministic and not entry.build.is_deterministic:
        problems.append(
            f"trainer.deterministic (true) cannot hold with the environment {named.name}"
            f" ({named.key}), which does not declare is_deterministic; declare it if its episodes"
            " are functions of task, seed and answers, or set trainer.deterministic: false."
        )
    return problems
