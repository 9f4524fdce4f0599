"""Templates that come with a tokenizer are programs of strangers: what they can reach, and how long they may run.

jinja2's immutable sandbox keeps them from Python's internals and from changing what they are given. It does not bound
their work: loops inside of loops, macros that call themselves and powers of large numbers would hold a run for ever.
Here each turn of a loop and each call counts, and the sizes of what arithmetic makes are limited.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # turns of loops for one text; those of published models need a few for each message
STEPS_OF_CALL = 10  # it takes as long
MAX_SIZE = 10_000_000  # characters or items that one operation makes
MAX_DIGITS = 64  # of base and exponent in a power: 64 ** 64 has 116 digits
_COUNTED, _SIZED = "counted by the sandbox", "sized by the sandbox"

_num_steps: contextvars.ContextVar[list[int]] = contextvars.ContextVar("num_steps")


def render(template: jinja2.Template, **variables: Any) -> str:
    """The text. Raises ValueError with the template's own words where it refuses, fails, or does too much."""
    token = _num_steps.set([0])
    try:
        return template.render(**variables)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ValueError(str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it needs too much memory or calls itself too often ({type(error).__name__})") from error
    finally:
        _num_steps.reset(token)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered with `render`."""

    intercepted_binops = frozenset(["+", "*", "**"])  # also not worked out at compile time

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_COUNTED] = _counted
        self.filters[_SIZED] = _sized

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(called, LoopContext) and args:  # a recursive loop goes over it without the loop's filter
            args = (_turns(args[0]), *args[1:])
        result = super().call(context, called, *args, **kwargs)
        _count(STEPS_OF_CALL + (len(result) if isinstance(result, range) else 0))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not all(_is_number(value) and abs(value) <= MAX_DIGITS for value in (left, right)):
            raise SecurityError(f"{left!r:.20} ** {right!r:.20} is refused: the numbers are above {MAX_DIGITS}")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            _check_size(_length(left) * _length(right))
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right.bit_length())
        return _sized(super().call_binop(context, operator, left, right))


class _Bounds(NodeTransformer):
    """Puts filters around what a loop goes over, and around what ~ joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, _SIZED, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context  # which keeps it from being worked out at compile time
def _counted(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    return _turns(items)


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _count(1)
        yield item


def _count(number: int) -> None:
    steps = _num_steps.get(None)
    if steps is None:  # while a template is compiled
        return
    steps[0] += number
    if steps[0] > MAX_STEPS:
        raise SecurityError(f"it takes more than {MAX_STEPS} turns of loops, a call counting {STEPS_OF_CALL}")


def _sized(value: Any) -> Any:
    if isinstance(value, Sized):
        _check_size(len(value))
    return value


def _check_size(size: float) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"it makes texts or lists of more than {MAX_SIZE} characters or items")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _length(value: Any) -> float:
    return abs(value) if _is_number(value) else len(value) if isinstance(value, Sized) else 1
