"""Checks the hooks of users' classes: a method under a hook's former name would never be called,
and nobody would know.

A hook is a public method, property or attribute of a base class or protocol that a user's class
overrides or brings. `former_hooks.tsv` of `rlhf_megatron.extend` has their former names. Classes of
this package are not checked at run time.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rlhf_megatron.part_signatures import list_method_problems

logger = logging.getLogger(__name__)

FORMER_HOOKS_FILE = Path(__file__).parent / "extend" / "former_hooks.tsv"
_BASES_WITHOUT_HOOKS: tuple[Any, ...] = (object, Protocol, Generic)
_checked_classes: weakref.WeakSet[type] = weakref.WeakSet()

Function = TypeVar("Function", bound=Callable[..., Any])


def required_hook(function: Function) -> Function:
    """Decorator of a method of a base class that does not work before a subclass overrides it."""
    function.__dict__["is_required_hook"] = True
    return function


def list_hooks(base: type) -> set[str]:
    """Return the public names that a class declares, its bases' included."""
    return {name for owner in _list_owners(base) for name in _list_own_names(owner)}


def check_part_class(part: type, interface: type, description: str) -> None:
    """Check a class that is registered as a part of a kind.

    `interface`: the base class or protocol of that kind; `description`: of the part, for messages.
    Raises ValueError for hooks under their former names, for hooks that the part lacks, and for
    methods that cannot be called as the interface's.
    """
    if _is_of_this_package(part):
        return
    problems = _find_former_hooks(part, interface)
    missing_hooks = _find_missing_hooks(part, interface) - _list_renamed_hooks(part, interface)
    if missing_hooks:
        problems.append(
            f"{part.__qualname__} lacks {', '.join(sorted(missing_hooks))}; define them, or derive"
            f" from {interface.__name__} of rlhf_megatron.extend for those that have a default."
        )
    problems += list_method_problems(part, interface, list_hooks(interface))
    _checked_classes.add(part)
    _warn_of_near_names(part, list_hooks(interface), description)
    if problems:
        raise ValueError(f"{description}: {' '.join(problems)}")


def check_params_class(params: type, protocols: tuple[type, ...], description: str) -> None:
    """Check a dataclass of parameters, whose optional hooks `protocols` describe. Raises ValueError
    for former names, and for methods that cannot be called as the protocol's."""
    if _is_of_this_package(params):
        return
    problems = [text for protocol in protocols for text in _find_former_hooks(params, protocol)]
    for protocol in protocols:
        problems += list_method_problems(params, protocol, list_hooks(protocol))
    _checked_classes.add(params)
    hooks = {name for protocol in protocols for name in list_hooks(protocol)}
    _warn_of_near_names(params, hooks, description)
    if problems:
        raise ValueError(f"{description}: {' '.join(dict.fromkeys(problems))}")


def list_user_subclasses() -> set[type]:
    """Return all classes of users that derive from a base class with former hooks.

    Only modules that are loaded are looked at: without its base a class does not exist.
    """
    subclasses: set[type] = set()
    for module_name, class_name in _read_former_hooks():
        base = getattr(sys.modules.get(module_name), class_name, None)
        if isinstance(base, type):
            subclasses.update(_list_all_subclasses(base))
    return {subclass for subclass in subclasses if not _is_of_this_package(subclass)}


def find_subclass_problems(former_subclasses: set[type]) -> list[str]:
    """Check the classes of users that are new since `former_subclasses`.

    Returns a sentence for each problem. The classes are clients, balancers and others that no
    registry sees; registered ones were checked before.
    """
    problems = []
    new_classes = list_user_subclasses() - former_subclasses - set(_checked_classes)
    for new_class in sorted(new_classes, key=_name_class):
        _checked_classes.add(new_class)
        problems += _find_former_hooks(new_class, new_class)
        package_bases = filter(_is_of_this_package, new_class.__mro__)
        hooks = {name for base in package_bases for name in list_hooks(base)}
        _warn_of_near_names(new_class, hooks, f"class {_name_class(new_class)}")
    return problems


@lru_cache(maxsize=1)
def _read_former_hooks() -> dict[tuple[str, str], dict[str, str]]:
    """Return (module, class) -> former hook -> hook."""
    hooks: dict[tuple[str, str], dict[str, str]] = {}
    for line in FORMER_HOOKS_FILE.read_text(encoding="utf-8").splitlines()[1:]:
        module_name, class_name, former_hook, hook = line.split("\t")
        hooks.setdefault((module_name, class_name), {})[former_hook] = hook
    return hooks


def _get_former_hooks(part: type, interface: type) -> dict[str, str]:
    """Return former hook -> hook of the interface, and of each class of this package that the part
    derives from."""
    table = _read_former_hooks()
    owners = [*_list_owners(interface), *_list_owners(part)]
    return {
        former_hook: hook
        for owner in owners
        for former_hook, hook in table.get((owner.__module__, owner.__qualname__), {}).items()
    }


def _find_former_hooks(part: type, interface: type) -> list[str]:
    former_hooks = _get_former_hooks(part, interface)
    return [
        f"{owner.__qualname__}.{name} is {former_hooks[name]} now and would never be called;"
        " rename it."
        for owner in _list_user_owners(part)
        for name in sorted(_list_own_names(owner) & former_hooks.keys())
    ]


def _list_renamed_hooks(part: type, interface: type) -> set[str]:
    """Hooks that the part has under their former names: they are told of once."""
    former_hooks = _get_former_hooks(part, interface)
    return {former_hooks[name] for name in list_hooks(part) & former_hooks.keys()}


def _find_missing_hooks(part: type, interface: type) -> set[str]:
    if hasattr(part, "__getattr__"):
        return set()  # it may have anything
    if interface in part.__mro__:
        return {
            name
            for name in list_hooks(interface)
            if _is_required(inspect.getattr_static(part, name, None))
        }
    return list_hooks(interface) - list_hooks(part) - _list_names_set_at_creation(part)


def _is_required(member: object) -> bool:
    function = member.fget if isinstance(member, property) else member
    return getattr(function, "is_required_hook", False)


def _warn_of_near_names(part: type, hooks: set[str], description: str) -> None:
    """Warn of a name that is one letter away from a hook's: most probably the hook was meant."""
    for owner in _list_user_owners(part):
        own_names = _list_own_names(owner)
        for name in sorted(own_names - hooks):
            near_hooks = [
                hook for hook in sorted(hooks - own_names) if _is_one_letter_away(name, hook)
            ]
            if near_hooks:
                logger.warning(
                    "%s: %s.%s is one letter away from the hook %s; rename it if that was meant.",
                    description,
                    owner.__qualname__,
                    name,
                    near_hooks[0],
                )


def _is_one_letter_away(name: str, other: str) -> bool:
    """Tell whether one letter added, dropped or changed, or two neighbours exchanged, makes one
    name the other."""
    if name == other or abs(len(name) - len(other)) > 1:
        return False
    start = 0
    while start < min(len(name), len(other)) and name[start] == other[start]:
        start += 1
    rest = name[start:]
    other_rest = other[start:]
    if len(rest) == len(other_rest):
        is_exchanged = rest[:2] == other_rest[:2][::-1] and rest[2:] == other_rest[2:]
        return rest[1:] == other_rest[1:] or is_exchanged
    return rest[1:] == other_rest or rest == other_rest[1:]


def _list_owners(part: type) -> list[type]:
    return [owner for owner in part.__mro__ if owner not in _BASES_WITHOUT_HOOKS]


def _list_user_owners(part: type) -> Iterator[type]:
    """The class and its bases that are not of this package."""
    return (owner for owner in _list_owners(part) if not _is_of_this_package(owner))


def _list_own_names(owner: type) -> set[str]:
    """Public names that the class itself has, fields without a default included."""
    names = {*vars(owner), *_read_annotations(owner)}
    return {name for name in names if not name.startswith("_")}


def _read_annotations(owner: type) -> dict[str, Any]:
    """Return the annotations of the class itself. They are not evaluated: names may be missing."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(owner)


def _list_names_set_at_creation(part: type) -> set[str]:
    """Names that the code of `__init__` or `__post_init__` uses: it may set such attributes."""
    creators = [getattr(part, name, None) for name in ("__init__", "__post_init__")]
    return {
        name
        for creator in creators
        if (code := getattr(creator, "__code__", None)) is not None
        for name in code.co_names
    }


def _list_all_subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(base)
    for subclass in subclasses:
        yield subclass
        yield from _list_all_subclasses(subclass)


def _name_class(part: type) -> str:
    return part.__qualname__


def _is_of_this_package(part: type) -> bool:
    return part.__module__.split(".")[0] == __name__.split(".")[0]
