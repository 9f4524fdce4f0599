"""Rules of the section `ray`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.schema import RunConfig

RUNTIME = "trainer.runtime"


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """See `config.ignored`."""
    yield config.trainer.runtime != "ray", ("ray",), RUNTIME, "set that to ray"


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = ()
