"""Python functions as tools that a model may call: their description as JSON schema, calls with
checked arguments, and what the model reads of a result.

    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        \"\"\"
        return a + b

    make_tool(add).schema["function"]["parameters"]["properties"]["a"]
    # {"type": "integer", "description": "The first number."}

An error of a tool is text for the model: a wrong argument, an exception, a limit. It never ends an
episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlhf_megatron.agents.user_code import call_user_code

MAX_ERROR_CHARS = 500  # of an exception, for the model
NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CUT_NOTE = "\n[cut: the output had {num_chars} characters]"

_ARGUMENT_SECTION = re.compile(
    r"^(?:args|arguments|parameters)\s*:?\s*$(?:\n-+\s*$)?", re.IGNORECASE | re.MULTILINE
)
_OTHER_SECTION = re.compile(
    r"^(?:returns?|yields?|raises?|examples?|notes?|see also|references|warnings?)\s*:?\s*$",
    re.IGNORECASE | re.MULTILINE,
)
# "name: text", "name (type): text", and numpy's "name : type" with the text in the next lines
_ARGUMENT = re.compile(r"^(\s*)(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX_ARGUMENT = re.compile(r"^\s*:param (?:[\w\[\], ]+ )?(\w+):\s*(.*)$", re.MULTILINE)


class ToolError(Exception):
    """Raised by a tool that has failed. The model reads the message as it is; of other exceptions
    it reads the class, too.
    """


class ToolArgumentError(ToolError):
    """The arguments of a call are not those that the tool takes."""


@dataclass(frozen=True)
class ToolLimits:
    """What bounds one call of a tool."""

    timeout_s: float = 30.0
    max_output_chars: int = 4000


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call."""

    name: str
    schema: Mapping[str, Any]  # {"type": "function", "function": {name, description, parameters}}
    # called with the arguments by name, once they are checked; plain or async
    function: Callable[..., Any]
    argument_types: Mapping[str, Any] = field(default_factory=dict)
    # True: the tool checks its arguments itself, as those of MCP servers do; False: they are
    # checked against `argument_types`
    has_own_checks: bool = False


@dataclass(frozen=True)
class ToolResult:
    """What became of a call."""

    text: str  # for the model
    is_error: bool
    seconds: float


def make_tool(function: Callable[..., Any], name: str | None = None) -> Tool:
    """Return a function as a tool. Its parameters need type annotations that JSON can hold;
    descriptions come from the docstring (Google's, numpy's or Sphinx's form).

    Raise ValueError for a parameter without an annotation, for *args and **kwargs, and for types
    that JSON does not have.
    """
    tool_name = name or getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not tool_name:
        raise ValueError(
            f"a tool is made of a function or a method, not of {function!r:.100}; define one with"
            " def."
        )
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(
            f"tool {tool_name}: its annotations name what is unknown ({error})."
        ) from error
    description, argument_texts = parse_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    types: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in NAMED_KINDS:
            raise ValueError(
                f"tool {tool_name}: {parameter} cannot be given by name, as models give arguments;"
                " name each argument."
            )
        if parameter.name not in hints:
            raise ValueError(
                f"tool {tool_name}: the argument {parameter.name} needs a type annotation."
            )
        types[parameter.name] = hints[parameter.name]
        schema = _describe_type(tool_name, parameter.name, hints[parameter.name], definitions)
        if parameter.name in argument_texts:
            schema["description"] = argument_texts[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None and _is_plain_value(parameter.default):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": required,
    }
    if definitions:
        parameters["$defs"] = definitions
    function_schema = {"name": tool_name, "description": description, "parameters": parameters}
    return Tool(tool_name, {"type": "function", "function": function_schema}, function, types)


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return (what the function does, argument name -> its description) of a docstring."""
    arguments = {match[1]: match[2].strip() for match in _SPHINX_ARGUMENT.finditer(text)}
    section = _ARGUMENT_SECTION.search(text)
    other = _OTHER_SECTION.search(text)
    ends = [match.start() for match in (section, other) if match is not None]
    ends += [match.start() for match in [re.search(r"^\s*:\w+", text, re.MULTILINE)] if match]
    description = text[: min(ends, default=len(text))].strip()
    if section is not None:
        later = _OTHER_SECTION.search(text, section.end())
        body = text[section.end() : later.start() if later else len(text)]
        arguments |= _parse_argument_lines(body.splitlines())
    return description, arguments


def _parse_argument_lines(lines: Sequence[str]) -> dict[str, str]:
    """Return argument name -> description of the lines of a section of arguments."""
    texts: dict[str, list[str]] = {}
    name = ""
    indent = -1
    for line in lines:
        match = _ARGUMENT.match(line)
        if match and (indent < 0 or len(match[1]) <= indent):
            name = match[2]
            indent = len(match[1])
            # numpy writes the type behind the colon, and the text below
            is_type = not match[1] and not line.rstrip().endswith(".") and " : " in line
            texts[name] = [] if is_type else [match[3].strip()]
        elif name and line.strip():
            texts[name].append(line.strip())
    return {name: " ".join(parts).strip() for name, parts in texts.items() if any(parts)}


def _describe_type(
    tool_name: str, argument: str, argument_type: Any, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON schema of a type, and add what it refers to to `definitions`."""
    try:
        [schema], new_definitions = msgspec.json.schema_components(
            [argument_type], ref_template="#/$defs/{name}"
        )
    except (TypeError, NameError) as error:
        raise ValueError(
            f"tool {tool_name}: the type of {argument} ({argument_type}) has no form in JSON"
            f" ({error}); use str, int, float, bool, list, dict, Literal or a dataclass."
        ) from error
    definitions.update(new_definitions)
    return dict(schema)


def _is_plain_value(value: Any) -> bool:
    """Return whether JSON has the value as it is."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


async def call_tool(
    tool: Tool,
    arguments: Mapping[str, Any],
    limits: ToolLimits = ToolLimits(),
) -> ToolResult:
    """Call a tool and return its result as text, whatever happens: a wrong argument, an exception
    and a call that does not come back are errors that the model reads.
    """
    began = time.monotonic()
    deadline = asyncio.timeout(limits.timeout_s)
    is_error = True
    try:
        checked = arguments if tool.has_own_checks else check_tool_arguments(tool, arguments)
        async with deadline:
            value = await call_user_code(_bind_arguments(tool.function, checked))
        text = format_tool_output(value)
        is_error = False
    except ToolError as error:
        text = f"Error: {error}"
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the episode is over
        text = "Error: the call was cancelled by the tool itself."
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's code may raise anything
        text = f"Error: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        if deadline.expired():
            text = f"Error: {tool.name} did not answer within {limits.timeout_s:g} s."
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate has no tokens
    return ToolResult(cut_output(text, limits.max_output_chars), is_error, time.monotonic() - began)


def _bind_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Callable[[], Any]:
    """Return the call without arguments; it is async where the function is."""
    if inspect.iscoroutinefunction(function):

        async def call_async() -> Any:
            """Call the function and wait for its result."""
            return await function(**arguments)

        return call_async
    return lambda: function(**arguments)


def check_tool_arguments(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments converted to the types of the function. Raise ToolArgumentError that
    names what is unknown, missing or of another type, for the model to read.
    """
    unknown = sorted(set(arguments) - set(tool.argument_types))
    required = tool.schema["function"]["parameters"].get("required", ())
    missing = [name for name in required if name not in arguments]
    argument_names = ", ".join(tool.argument_types) or "none"
    if unknown:
        raise ToolArgumentError(
            f"{tool.name} has no argument {', '.join(unknown)}; it has {argument_names}."
        )
    if missing:
        raise ToolArgumentError(f"{tool.name} needs the argument {', '.join(missing)}.")
    converted_arguments = {}
    for name, value in arguments.items():
        try:
            converted_arguments[name] = msgspec.convert(value, tool.argument_types[name])
        except msgspec.ValidationError as error:
            raise ToolArgumentError(f"{tool.name}, argument {name}: {error}.") from None
    return converted_arguments


def format_tool_output(value: Any) -> str:
    """Return what a tool has returned as text for the model: texts as they are, anything else as
    JSON, and what JSON does not have by its `str`.
    """
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def cut_output(text: str, max_chars: int) -> str:
    """Return the text, cut with a note where it is too long."""
    if len(text) <= max_chars:
        return text
    return text[:max_chars] + CUT_NOTE.format(num_chars=len(text))
