"""OmegaConf's `${...}` in values: another key, `${.neighbour}`, `${oc.select:key,default}`, `${oc.env:NAME}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf_megatron.verl.read import hydra_value
from rlhf_megatron.verl.setting import Setting

MISSING: Any = object()
MAX_DEPTH = 16  # of values that point to values
MAX_TEXT = 100_000
_WHOLE = re.compile(r"\$\{([^${}]*(?:\{\})?)\}\s*\Z", re.DOTALL)
_PART = re.compile(r"\$\{([^${}]*)\}")


def resolve(settings: Mapping[str, Setting], name: str, environment: Mapping[str, str]) -> Any:
    """The value of the setting `name`; MISSING where it points to what is not there (or in a circle)."""
    return _resolved(settings, name, settings[name].value, environment, 0)


def _resolved(
    settings: Mapping[str, Setting], name: str, value: Any, environment: Mapping[str, str], depth: int
) -> Any:
    if depth > MAX_DEPTH:
        return MISSING
    if isinstance(value, list):
        items = [_resolved(settings, name, item, environment, depth + 1) for item in value]
        return MISSING if any(item is MISSING for item in items) else items
    if not isinstance(value, str) or "${" not in value:
        return value
    if whole := _WHOLE.match(value):
        return _target(settings, name, whole[1], environment, depth)
    text = value
    while part := _PART.search(text):
        found = _target(settings, name, part[1], environment, depth)
        if found is MISSING or isinstance(found, dict | list) or len(text) > MAX_TEXT:
            return MISSING
        text = text[: part.start()] + str(found) + text[part.end() :]
    return text


def _target(settings: Mapping[str, Setting], name: str, inner: str, environment: Mapping[str, str], depth: int) -> Any:
    kind, colon, arguments = inner.partition(":")
    default: Any = MISSING
    if colon and kind.strip() in ("oc.select", "oc.env"):
        inner, comma, text = arguments.partition(",")
        default = hydra_value(text, "") if comma else None
        if kind.strip() == "oc.env":
            return environment.get(inner.strip(), default)
    elif colon:
        return MISSING
    key = _absolute(name, inner.strip())
    if key in settings:
        return _resolved(settings, key, settings[key].value, environment, depth + 1)
    below = {other[len(key) + 1 :]: other for other in settings if other.startswith(key + ".")}
    if below:
        found = {
            short: _resolved(settings, full, settings[full].value, environment, depth + 1)
            for short, full in below.items()
        }
        return {short: value for short, value in found.items() if value is not MISSING}
    return default


def _absolute(name: str, path: str) -> str:
    """`.x` is beside the key `name`, `..x` one section above."""
    num_points = len(path) - len(path.lstrip("."))
    if not num_points:
        return path
    parts = name.split(".")[:-num_points]
    return ".".join([*parts, path[num_points:]])
