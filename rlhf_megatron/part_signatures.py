"""Checks that a run can call the parts of users: a part with other arguments would fail at the
first call, hours after the start, or mask every sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

_POSITIONAL_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def find_call_problem(
    part: Callable[..., Any],
    argument_names: Sequence[str],
    attributes_by_name: Mapping[str, str] | None = None,
    may_yield: bool = False,
) -> str:
    """Return why a run cannot call the part, with the fix, or "".

    `argument_names`: what the run passes, by position; `attributes_by_name`: the attributes of the
    first argument by their usual names, so that an argument of such a name expects something else;
    `may_yield`: the part may be a generator. Nothing is said of a part without a signature, such as
    some functions in C.
    """
    signature = _read_signature(part)
    if signature is None:
        return ""
    name = getattr(part, "__name__", type(part).__name__)
    call = f"{name}({', '.join(argument_names)})"
    written = f"{name}{_format_argument_names(signature)}"
    if problem := _try_to_bind(signature, argument_names):
        return (
            f"{written} is called as {call}: {problem}; it must take these arguments and need no"
            " others."
        )
    if inspect.iscoroutinefunction(part):
        return f"{written} is async, and is called as {call} for its result; write a function."
    if inspect.isgeneratorfunction(part) and not may_yield:
        return f"{written} is a generator, and is called as {call} for its result; return that."
    first_names = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in _POSITIONAL_KINDS
    ][: len(argument_names)]
    attributes = attributes_by_name or {}
    wrong_names = [name for name in first_names if name in attributes]
    if wrong_names:
        first = f"{argument_names[0]}.{attributes[wrong_names[0]]}"
        return (
            f"{written} is called as {call}, so that {', '.join(wrong_names)} would not be what the"
            f" name says; write `{call}`, and read {first}."
        )
    return ""


def list_method_problems(part: type, interface: type, hook_names: Collection[str]) -> list[str]:
    """Return a sentence for each method of a class that cannot be called as the interface's method
    of that name. `hook_names`: the names to look at.
    """
    return [
        problem
        for name in sorted(hook_names)
        if (problem := _find_method_problem(part, interface, name))
    ]


def _find_method_problem(part: type, interface: type, name: str) -> str:
    """Return why the part's method of this name cannot be called as the interface's, or ""."""
    ours = inspect.getattr_static(interface, name, None)
    theirs = inspect.getattr_static(part, name, None)
    if ours is theirs or not inspect.isroutine(ours) or not inspect.isroutine(theirs):
        return ""  # inherited, a property, or set at creation
    expected = _read_signature(getattr(interface, name))
    actual = _read_signature(getattr(part, name))
    if expected is None or actual is None:
        return ""
    argument_names = [
        parameter.name
        for parameter in expected.parameters.values()
        if parameter.kind in _POSITIONAL_KINDS
    ]
    keyword_names = [
        parameter.name
        for parameter in expected.parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    is_called_on_object = inspect.isfunction(ours)
    if is_called_on_object and isinstance(theirs, staticmethod | classmethod):
        argument_names = argument_names[1:]
    problem = _try_to_bind(actual, argument_names, keyword_names)
    if not problem:
        return ""
    shown = [argument for argument in [*argument_names, *keyword_names] if argument != "self"]
    method = f"{part.__qualname__}.{name}"
    return (
        f"{method}{_format_argument_names(actual)} is called as {name}({', '.join(shown)}):"
        f" {problem}; take these arguments."
    )


def _read_signature(part: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of the part, or None where Python has none."""
    try:
        # what a decorator wraps is not what is called
        return inspect.signature(part, follow_wrapped=False)
    except (ValueError, TypeError):
        return None


def _try_to_bind(
    signature: inspect.Signature, argument_names: Sequence[str], keyword_names: Sequence[str] = ()
) -> str:
    """Return why these arguments cannot be passed, in Python's words, or ""."""
    try:
        signature.bind(*argument_names, **dict.fromkeys(keyword_names))
    except TypeError as error:
        return str(error)
    return ""


def _format_argument_names(signature: inspect.Signature) -> str:
    """Return the arguments in parentheses, without types and defaults."""
    return f"({', '.join(_iterate_argument_words(signature))})"


def _iterate_argument_words(signature: inspect.Signature) -> Iterator[str]:
    """Yield each argument as a signature writes it, without type and default."""
    has_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            yield "*"
        has_star = has_star or parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.KEYWORD_ONLY,
        )
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield f"*{parameter.name}"
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield f"**{parameter.name}"
        else:
            yield parameter.name
