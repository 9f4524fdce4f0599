"""Named tables of interchangeable parts: estimators, losses, aggregations, rewards, model families,
engines, and so on.

A part declares, beside its function, the dataclass of its parameters and what it needs, so that a
configuration can be checked against it before any process is started. Ours lie in the package of
their kind, a user's in a plugin.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar

from rlhf_megatron.part_hooks import check_params_class, check_part_class
from rlhf_megatron.part_signatures import find_call_problem

T = TypeVar("T")
Scope = Literal["sample", "group", "step"]

PACKAGES = {
    "engine": "rlhf_megatron.rollout.engine_kinds",
    "balancer": "rlhf_megatron.rollout.engine_kinds",
    "advantage estimator": "rlhf_megatron.algorithms.advantages",
    "policy loss": "rlhf_megatron.algorithms.losses",
    "preference loss": "rlhf_megatron.algorithms.preferences",
    "distillation loss": "rlhf_megatron.algorithms.distillation",
    "aggregation": "rlhf_megatron.algorithms.loss_aggregation",
    "reward": "rlhf_megatron.rewards.scorers",
    "model family": "rlhf_megatron.weights.families",
    "schedule": "rlhf_megatron.controller.scheduler.schedules",
    "logger": "rlhf_megatron.controller.observe.loggers",
    "task": "rlhf_megatron.data.tasks",
    "environment": "rlhf_megatron.agents.environments",
}
"""Kind of part -> what must be imported for those of ours to be registered; none of it imports
torch."""


@dataclass(frozen=True)
class RegistryEntry(Generic[T]):
    """A registered part: `build` is the function or class, `params` its frozen parameter dataclass
    (or None)."""

    name: str
    build: T
    params: type | None
    needs: tuple[str, ...]  # names of the batch columns that the part reads
    # Of an estimator: whose rewards the baseline is made of; "group": several samples a prompt.
    scope: Scope
    aggregation: str | None  # of a policy loss: the one that it is defined with; None: any


class Registry(Generic[T]):
    """Maps a name to a `RegistryEntry`.

    `kind` is the word used in error messages, e.g. "policy loss". `interface` is the base class or
    protocol of parts that are classes, and `params_protocols` describe optional methods and
    attributes of their parameters: users' classes are checked against both. `call_arguments` are
    the names of what a run passes to a part when it calls it, by position, and `attributes_by_name`
    are the attributes of the first argument by their usual names: parts with other signatures are
    refused. None: a part is not called.
    """

    registries_by_kind: ClassVar[dict[str, Registry[Any]]] = {}

    def __init__(
        self,
        kind: str,
        interface: type | None = None,
        params_protocols: tuple[type, ...] = (),
        call_arguments: tuple[str, ...] | None = None,
        attributes_by_name: Mapping[str, str] | None = None,
    ) -> None:
        """Register this registry under `kind` in `registries_by_kind`."""
        self.kind = kind
        self._interface = interface
        self._params_protocols = params_protocols
        self._call_arguments = call_arguments
        self._attributes_by_name = attributes_by_name
        self._entries: dict[str, RegistryEntry[T]] = {}
        Registry.registries_by_kind[kind] = self

    def register(
        self,
        name: str,
        params: type | None = None,
        needs: tuple[str, ...] = (),
        *,
        scope: Scope = "step",
        aggregation: str | None = None,
    ) -> Callable[[T], T]:
        """Return a decorator that registers a part under `name` and returns it unchanged. The
        decorator raises ValueError when `name` is taken by another part, for a class whose hooks
        are wrong, and for a part that cannot be called as a run calls it.
        """

        def add_entry(build: T) -> T:
            """Check the part, add it and return it."""
            if name in self._entries and self._entries[name].build is not build:
                raise ValueError(
                    f"{self.kind} {name!r} is registered already; choose another name."
                )
            self._check_part(name, build, params)
            self._entries[name] = RegistryEntry(name, build, params, needs, scope, aggregation)
            return build

        return add_entry

    def _check_part(self, name: str, build: T, params: type | None) -> None:
        """Raise ValueError where a class or its parameters do not fit the interface of this kind,
        and where a run cannot call the part.
        """
        description = f"{self.kind} {name!r}"
        if self._interface is not None and isinstance(build, type):
            check_part_class(build, self._interface, description)
        if params is not None and params is not build:
            check_params_class(params, self._params_protocols, description)
        # a part that is its own dataclass of parameters is built from what a configuration says
        if self._call_arguments is not None and callable(build) and params is not build:
            problem = find_call_problem(build, self._call_arguments, self._attributes_by_name)
            if problem:
                raise ValueError(f"{description}: {problem}")

    def get(self, name: str) -> RegistryEntry[T]:
        """Return the entry of a name. Raise ValueError that lists the known parts, and says where a
        user's own come from, when the name is unknown.
        """
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self._entries)) or "none"
            raise ValueError(
                f"unknown {self.kind} {name!r}.{hint} Known: {known}. For one of your own, name its"
                " file or module in plugins: (docs/extending.md)."
            )
        return self._entries[name]

    def find(self, name: str) -> RegistryEntry[T] | None:
        """Return the entry of a name, or None when the name is unknown."""
        return self._entries.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, sorted."""
        return iter(sorted(self._entries))


def name_attributes(inputs_type: type) -> dict[str, str]:
    """Return the fields of a dataclass by their names, and by the same without shape suffixes
    (rewards for rewards_B), for `attributes_by_name` of a registry.
    """
    names = [field.name for field in fields(inputs_type)]
    return {re.sub("_[A-Z]+$", "", name): name for name in names} | {name: name for name in names}


def load_registry(kind: str) -> Registry[Any]:
    """Import all of our parts of a kind, and return their registry: for modules that may not import
    the parts by name.
    """
    importlib.import_module(PACKAGES[kind])
    return Registry.registries_by_kind[kind]


def import_package_modules(package: str, search_path: Iterable[str]) -> None:
    """Import every module of a package, so that each registers its parts."""
    for module in pkgutil.iter_modules(search_path):
        importlib.import_module(f"{package}.{module.name}")
