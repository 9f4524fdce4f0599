"""Secrets of a configuration: values of free mappings whose name says so are never written
down or shown.

Settings themselves hold no secrets; the environment of the engines, their arguments and the
parameters of a reward may. A run that is started from what was written takes those of the engines'
environment from its own environment; all other ones must be given again.

Also: Keys lie in files that one user can read, never in a configuration.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.schema import RunConfig

REDACTED = "<redacted>"
# each name that ends so is a secret's there
ENVIRONMENTS = "rollout.sglang.env", "reward_model.served.env"
_ALWAYS = re.compile(
    r"(^|_)(apikey|auth|authorization|secret|passwd|passphrase|credentials?)$|password$"
)
_IN_ENVIRONMENT = re.compile(r"(^|_)(key|token|pat)$")
_ELSEWHERE = re.compile(
    r"(^|_)(api|access|secret|private|signing|auth|bearer|hf|hub|session|refresh|admin)_(key|"
    r"token)$|^token$"
)


def is_secret_key(key: str) -> bool:
    """Return whether an entry of a free mapping is a secret, judged by its name, as
    rollout.sglang.env.HF_TOKEN or params.api_key are.

    The `bos_token` of a template and the `answer_key` of a task are none.
    """
    mapping, _, name = key.rpartition(".")
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    words = re.sub(r"[- ]", "_", words).lower()
    return any(
        rule.search(words)
        for rule in (_ALWAYS, _IN_ENVIRONMENT if mapping in ENVIRONMENTS else _ELSEWHERE)
    )


def find_secret_keys(value: Any, key: str) -> list[str]:
    """Return the keys of all secrets in a tree of plain values; `key` is the key path
    of the tree.
    """
    if isinstance(value, Mapping):
        return [
            found
            for name, item in value.items()
            for found in find_secret_keys(item, _join_key(key, name))
        ]
    return [key] if is_secret_key(key) else []


def redact_secrets(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration in which each secret is replaced by "<redacted>"."""
    return _replace_secrets(config, "", lambda key, value: REDACTED)


def reveal_secrets(config: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """Return a copy of the configuration in which redacted secrets of the engines' environment have
    their values from `environment`. Raise ConfigError with all redacted secrets that cannot be
    filled in.
    """
    problems = []

    def look_up_secret(key: str, value: Any) -> Any:
        """Return the value of a secret, from the environment if it was redacted; record a problem
        where that is not possible.
        """
        if value != REDACTED:
            return value
        mapping, _, name = key.rpartition(".")
        is_variable = mapping in ENVIRONMENTS
        if is_variable and name in environment:
            return environment[name]
        where = f"set {name} in the environment" if is_variable else "give it again"
        problems.append(
            ConfigProblem(
                f"{key} is {REDACTED}: a secret that was not written down; {where}, or in the file."
            )
        )
        return value

    result = _replace_secrets(config, "", look_up_secret)
    if problems:
        raise ConfigError(problems)
    return result


def _replace_secrets(value: Any, key: str, make_replacement: Any) -> Any:
    """Return a copy of a tree in which each text that a mapping holds under the name of a secret is
    replaced by `make_replacement(key, text)`.
    """
    if is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(
            value,
            **{
                name: _replace_secrets(item, _join_key(key, name), make_replacement)
                for name, item in items.items()
            },
        )
    if isinstance(value, Mapping):
        return {
            name: make_replacement(_join_key(key, name), item)
            if is_secret_key(_join_key(key, name)) and isinstance(item, str)
            else _replace_secrets(item, _join_key(key, name), make_replacement)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(
            _replace_secrets(item, f"{key}[{index}]", make_replacement)
            for index, item in enumerate(value)
        )
    return value


def _join_key(key: str, name: object) -> str:
    """Return the key path of the entry `name` in the mapping at `key`."""
    return f"{key}.{name}" if key else str(name)


def _open_without_blocking(path: str, flags: int) -> int:
    """Open a file without waiting, so that a pipe without a writer does not block. An opener for
    `open`.
    """
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer


def read_key_file(path: str | None, setting: str) -> str:
    """Return the API key in the file at `path`, or "" if `path` is None. Raise ValueError, with the
    name of the `setting`, where the file cannot be read, does not belong to this user alone, or
    does not hold one line with a key.
    """
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8", opener=_open_without_blocking) as file:
            info = os.fstat(file.fileno())
            if stat.S_IMODE(info.st_mode) & 0o077 or info.st_uid != os.getuid():
                raise ValueError(
                    f"{setting} ({path}) must belong to you and have mode 0600; run chmod"
                    f" 600 {path}."
                )
            key = file.read(4096).strip()
    except OSError as error:
        raise ValueError(
            f"{setting} ({path}) cannot be read: {error.strerror}; correct the path."
        ) from error
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{setting} ({path}) must hold the key, one line of it, and nothing else.")
    return key
