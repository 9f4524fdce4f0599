"""Rules of the section `schedule`: what a schedule needs of the rest of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.schema import RunConfig

NAME = "schedule.name"
SYNCHRONOUS = "synchronous"


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """See `config.ignored`."""
    yield from ()


def shared_devices(loaded: Loaded) -> Iterator[Problem]:
    """Who takes turns cannot work at the same time."""
    c = loaded.config
    if c.rollout.colocated and c.schedule.name != SYNCHRONOUS:
        yield Problem(
            f"{NAME} ({c.schedule.name}) lets engines generate while the trainer works, but rollout.colocated (true)"
            f" lets them take turns with the same devices; set {NAME}: {SYNCHRONOUS}, or rollout.colocated: false.",
            (NAME, "rollout.colocated"),
        )


def determinism(loaded: Loaded) -> Iterator[Problem]:
    """What a step trains on depends on who was done first."""
    c = loaded.config
    if c.trainer.deterministic and c.schedule.name != SYNCHRONOUS:
        yield Problem(
            f"trainer.deterministic (true) cannot hold with {NAME} ({c.schedule.name}): what a step trains on depends"
            f" on which groups were done first; set {NAME}: {SYNCHRONOUS}, or deterministic: false.",
            (NAME, "trainer.deterministic"),
        )


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (shared_devices, determinism)
