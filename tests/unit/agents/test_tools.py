"""Python functions as tools: their schema by hand, calls, and errors that the model reads."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from rlhf_megatron.agents.calculator import calculate
from rlhf_megatron.agents.tools import (
    Tool,
    ToolLimits,
    ToolResult,
    call_tool,
    make_tool,
    parse_docstring,
)


@dataclass
class Point:
    x: int
    y: float = 1.0


def compute(a: int, operation: Literal["add", "sub"] = "add", at: Point | None = None) -> int:
    """Compute with numbers.

    The result is exact.

    Args:
        a (int): The first
            number.
        operation: What to do: add or sub.

    Returns:
        The result.
    """
    return a + (at.x if at is not None else 0)


async def look_up(names: list[str]) -> dict[str, int]:
    """Look up :code:`names`.

    :param names: The names.
    """
    await asyncio.sleep(0)
    return {name: len(name) for name in names}


def call(tool: Tool, limits: ToolLimits | None = None, /, **arguments: Any) -> ToolResult:
    return asyncio.run(call_tool(tool, arguments, limits or ToolLimits()))


def test_the_schema_of_a_function() -> None:
    function = make_tool(compute).schema["function"]
    assert function["name"] == "compute"
    assert function["description"] == "Compute with numbers.\n\nThe result is exact."
    parameters = function["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }
    assert parameters["properties"]["operation"] == {
        "enum": ["add", "sub"],
        "description": "What to do: add or sub.",
        "default": "add",
    }
    assert parameters["properties"]["at"]["anyOf"][0] == {"$ref": "#/$defs/Point"}
    assert parameters["$defs"]["Point"]["required"] == ["x"]


NUMPY = """Add numbers.

Parameters
----------
a : int
    The first one,
    which comes first.
b : int
    The second.

Returns
-------
int
"""


@pytest.mark.parametrize(
    ("text", "description", "arguments"),
    [
        ("", "", {}),
        ("Only a line.", "Only a line.", {}),
        (NUMPY, "Add numbers.", {"a": "The first one, which comes first.", "b": "The second."}),
        ("Add.\n\n:param a: One.\n:param int b: Two.", "Add.", {"a": "One.", "b": "Two."}),
        ("Add.\n\nArgs:\n    a: One: two.\n\nRaises:\n    b: no", "Add.", {"a": "One: two."}),
        ("Args:\n    a: One.", "", {"a": "One."}),
    ],
)
def test_docstrings_of_three_styles(text: str, description: str, arguments: dict[str, str]) -> None:
    assert parse_docstring(text) == (description, arguments)


def without_annotation(a):
    return a  # type: ignore[no-untyped-def]


def with_many(*values: int) -> int:
    return 1


def with_object(a: Callable[[], int]) -> int:
    return 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_annotation, "the argument a needs a type annotation"),
        (with_many, r"\*values: .*cannot be given by name"),
        (with_object, "the type of a .* has no form in JSON"),
    ],
)
def test_functions_that_no_model_can_call(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_tool(function)


def test_calls_convert_arguments_and_results() -> None:
    assert call(make_tool(compute), a=2, at={"x": 3}).text == "5"
    assert call(make_tool(look_up), names=["a", "bc"]).text == '{"a":1,"bc":2}'
    assert call(make_tool(lambda: "text", "say")).text == "text"
    assert call(make_tool(lambda: Point(1), "point")).text == '{"x":1,"y":1.0}'
    assert "object at" in call(make_tool(lambda: object(), "other")).text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"a": "2"}, "Error: compute, argument a: Expected `int`, got `str`."),
        ({"a": 1, "b": 2}, "Error: compute has no argument b; it has a, operation, at."),
        ({}, "Error: compute needs the argument a."),
        ({"a": 1, "operation": "mul"}, "Error: compute, argument operation: Invalid enum value"),
        ({"a": 1, "at": {"y": 1}}, "Error: compute, argument at: Object missing required field"),
    ],
)
def test_wrong_arguments_are_text_for_the_model(arguments: dict[str, Any], error: str) -> None:
    result = call(make_tool(compute), **arguments)
    assert result.is_error and result.text.startswith(error)


def fail(a: int) -> int:
    """Raise."""
    if a == 1:
        raise SystemExit(3)
    if a == 2:
        raise TimeoutError("of the tool's own")
    raise KeyError("x" * 10_000)


def test_what_a_tool_raises_is_text_for_the_model() -> None:
    tool = make_tool(fail)
    assert call(tool, a=1).text == "Error: SystemExit: 3"
    assert call(tool, a=2).text == "Error: TimeoutError: of the tool's own"
    assert len(call(tool, a=3).text) == 500 and call(tool, a=3).is_error


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def block(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@pytest.mark.parametrize("function", [wait, block])
def test_a_call_that_does_not_come_back_is_ended(function: Callable[..., Any]) -> None:
    tool = make_tool(function)
    result = call(tool, ToolLimits(timeout_s=0.05), seconds=0.5)
    assert result.text == f"Error: {tool.name} did not answer within 0.05 s."
    assert result.is_error and call(tool, seconds=0.0).text == "done"


def test_long_output_is_cut_with_a_note() -> None:
    result = call(make_tool(lambda: "x" * 100, "flood"), ToolLimits(max_output_chars=10))
    assert result.text == "x" * 10 + "\n[cut: the output had 100 characters]"


@pytest.mark.parametrize("made", [len, functools.partial(divmod, 3), object()])
def test_what_is_no_function_with_named_arguments_is_refused(made: Any) -> None:
    with pytest.raises(ValueError):
        make_tool(made)


def only_by_place(x: int, /) -> int:
    return x


def with_defaults(a: float = math.inf, b: int = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
    return "\ud83d half a character"


async def cancels_itself() -> None:
    raise asyncio.CancelledError


def test_values_that_json_lacks_reach_no_schema_and_no_talk() -> None:
    with pytest.raises(ValueError, match="cannot be given by name"):
        make_tool(only_by_place)
    tool = make_tool(with_defaults)
    json.dumps(tool.schema, allow_nan=False)
    assert "default" not in tool.schema["function"]["parameters"]["properties"]["b"]
    result = asyncio.run(call_tool(tool, {}))
    assert result.text == "? half a character" and not result.is_error


def test_a_tool_that_cancels_itself_is_an_error() -> None:
    result = asyncio.run(call_tool(make_tool(cancels_itself), {}))
    assert result.is_error and "cancelled" in result.text


@pytest.mark.parametrize(
    "text", ["1e999", "1e999-1e999", "10**3999*10**400", "10**(10**3999)", "2.0**1e300"]
)
def test_numbers_that_are_too_large_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large|digits"):
        calculate(text)
