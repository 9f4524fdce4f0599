"""Where each value of a configuration came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.schema import RunConfig


@dataclass(frozen=True)
class Origin:
    """A place where a value was written. A higher `layer` wins over a lower one."""

    source: str  # "default", "command line", or a file
    line: int | None = None  # counted from 1
    layer: int = -1  # -1: default; then the files, a base before what extends it; the command line is last

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Loaded:
    """A configuration and the origins of all values that somebody wrote (full key path -> origin)."""

    config: RunConfig
    provenance: Mapping[str, Origin] = field(default_factory=dict)

    @staticmethod
    def of(config: RunConfig) -> Loaded:
        """A configuration made in code: what differs from the defaults counts as set."""
        default = RunConfig()
        keys = [key for key in leaf_keys(RunConfig) if value_of(config, key) != value_of(default, key)]
        return Loaded(config, {key: Origin("code", layer=0) for key in keys})

    @staticmethod
    def of_nothing() -> Loaded:
        """All defaults."""
        return Loaded(RunConfig(), {})

    def origin(self, key: str) -> Origin:
        """Origin of a key, or of the innermost mapping around it; DEFAULT when nobody wrote it."""
        while key:
            if key in self.provenance:
                return self.provenance[key]
            key = key.rpartition(".")[0]
        return DEFAULT

    def set_keys(self, prefix: str) -> list[str]:
        """The keys at or below `prefix` that somebody wrote, each once: a written mapping is given by its entries."""
        below = [key for key in self.provenance if key == prefix or key.startswith(prefix + ".")]
        return [key for key in below if not any(other.startswith(key + ".") for other in below)]

    def is_set(self, key: str) -> bool:
        """Whether somebody wrote this key or one below it."""
        return bool(self.set_keys(key))

    def layer(self, key: str) -> int:
        """The layer that decided `key`; -1 when it stands at its default."""
        return max((self.provenance[k].layer for k in self.set_keys(key)), default=-1)
