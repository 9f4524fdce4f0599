"""A prompt as the chat that a model was trained on, by the template that its tokenizer brings.

The template is a program of a stranger: it runs in a sandbox that limits what it can reach and how
long it runs, with the names that transformers gives it, so that the same files make the same text.
"""

from __future__ import annotations

import contextvars
import json
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rlhf_megatron.data.data_rows import ChatMessage, Prompt
from rlhf_megatron.data.tokenizer import Tokenizer

# turns of loops for one text; those of published models need a few for each message
MAX_STEPS = 1_000_000
STEPS_PER_CALL = 10  # it takes as long
# characters or items that an operation reads or makes: they take memory and time
SIZE_PER_STEP = 500
MAX_SIZE = 10_000_000  # characters or items that one operation makes
MAX_MEMORY_BYTES = 1 << 28  # bytes that a text may take beyond what the process has
REMOVED_BUILTINS = ("random", "lipsum")  # no two runs would read the same prompts
MAX_DIGITS = 64  # of base and exponent in a power: 64 ** 64 has 116 digits
_COUNT_FILTER = "counted by the sandbox"
_SIZE_FILTER = "sized by the sandbox"

_num_steps: contextvars.ContextVar[list[int]] = contextvars.ContextVar("num_steps")

KWARGS_SETTING = "data.apply_chat_template_kwargs"
TRAINER_VARIABLES = ("messages", "add_generation_prompt")
DATE_FUNCTION = "strftime_now"


def render_chat_template(
    template: jinja2.Template, is_bounded: bool = True, **variables: Any
) -> str:
    """Return the rendered text. Raise ValueError with the template's own words where it refuses or
    fails, and where it does too much.

    `is_bounded`: limit the template's memory too. The limit holds for the whole process meanwhile,
    so no other thread may need memory.
    """
    token = _num_steps.set([0])
    try:
        with _limit_memory() if is_bounded else nullcontext():
            return template.render(**variables)
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:
        raise ValueError(str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(
            f"it needs too much memory or calls itself too often ({type(error).__name__})"
        ) from error
    finally:
        _num_steps.reset(token)


@contextmanager
def _limit_memory() -> Iterator[None]:
    """Within the block, limit the memory of the process, so that a template that the sandbox's
    counts miss, such as a text padded to a billion characters, raises MemoryError.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0])
        if Path("/proc/self/statm").exists()
        else None
    )
    if pages is None:
        yield
        return
    room = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (room if limits[1] < 0 else min(room, limits[1]), limits[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered with `render_chat_template`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])  # also not worked out at compile time

    def __init__(self, **options: Any) -> None:
        """Remove the random builtins, and wrap all filters so that their work is counted."""
        super().__init__(**options)
        for name in REMOVED_BUILTINS:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.filters = {name: _wrap_filter(function) for name, function in self.filters.items()}
        self.filters[_COUNT_FILTER] = _count_loop_items
        self.filters[_SIZE_FILTER] = _check_result_size

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse the template and insert the counting filters."""
        return _LimitFilterInserter().visit(super()._parse(source, name, filename))

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for the template, counting its arguments and its result. Raise
        SecurityError over the limits.
        """
        # a recursive loop goes over it without the loop's filter
        if isinstance(called, LoopContext) and args:
            args = (_count_each_item(args[0]), *args[1:])
        _count_argument_sizes(args)
        result = super().call(context, called, *args, **kwargs)
        _count_steps(STEPS_PER_CALL + (len(result) if isinstance(result, range) else 0))
        return _check_result_size(result)

    def call_binop(self, context: Any, operator: str, left_operand: Any, right_operand: Any) -> Any:
        """Compute an operator for the template. Raise SecurityError where the result is or would be
        too large.
        """
        if operator == "**" and not all(
            _is_number(value) and abs(value) <= MAX_DIGITS
            for value in (left_operand, right_operand)
        ):
            raise SecurityError(
                f"{left_operand!r:.20} ** {right_operand!r:.20} is refused: the numbers are above"
                f" {MAX_DIGITS}"
            )
        if operator == "*" and not (_is_number(left_operand) and _is_number(right_operand)):
            _check_size(_measure_operand(left_operand) * _measure_operand(right_operand))
        if operator == "*" and isinstance(left_operand, int) and isinstance(right_operand, int):
            _check_size(left_operand.bit_length() * right_operand.bit_length())
        result = super().call_binop(context, operator, left_operand, right_operand)
        return _check_result_size(result)


class _LimitFilterInserter(NodeTransformer):
    """Puts filters around what a loop goes over, and around what ~ joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Wrap the items of a loop in the counting filter."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNT_FILTER, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Wrap the result of ~ in the size filter."""
        self.generic_visit(node)
        return nodes.Filter(node, _SIZE_FILTER, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context  # which keeps it from being worked out at compile time
def _count_loop_items(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loop, each counted as a step."""
    return _count_each_item(items)


def _count_each_item(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items, each counted as a step."""
    for item in items:
        _count_steps(1)
        yield item


def _count_steps(num_steps: int) -> None:
    """Add to the steps of the text that is being rendered. Raise SecurityError when they are over
    MAX_STEPS; do nothing while a template is compiled.
    """
    steps = _num_steps.get(None)
    if steps is None:  # while a template is compiled
        return
    steps[0] += num_steps
    if steps[0] > MAX_STEPS:
        raise SecurityError(
            f"it takes more than {MAX_STEPS} turns of loops, a call counting {STEPS_PER_CALL}"
        )


def _wrap_filter(filter_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that calls the filter and counts the sizes of its arguments and its result
    as steps. The wrapper takes the context, so that jinja2 does not run it at compile time.
    """
    kind = getattr(getattr(filter_function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    def call_counted_filter(context: Any, *args: Any, **kwargs: Any) -> Any:
        """Check and count the arguments, call the filter, and check its result."""
        passed = {
            "context": context,
            "eval_context": context.eval_ctx,
            "environment": context.environment,
        }
        _count_argument_sizes(args)
        _count_steps(STEPS_PER_CALL)
        for number in (value for value in (*args[1:], *kwargs.values()) if _is_number(value)):
            _check_size(abs(number))
        return _check_result_size(
            filter_function(*([passed[kind]] if kind else []), *args, **kwargs)
        )

    return call_counted_filter


def _count_argument_sizes(values: Iterable[Any]) -> None:
    """Count steps for the size of texts and containers among the arguments."""
    _count_steps(
        sum(len(value) for value in values if isinstance(value, str | bytes | list | tuple | dict))
        // SIZE_PER_STEP
    )


def _check_result_size(value: Any) -> Any:
    """Return the value. Count steps for its size, and raise SecurityError where it is larger than
    MAX_SIZE.
    """
    if isinstance(value, Sized) and not isinstance(value, range):
        _check_size(len(value))
        _count_steps(len(value) // SIZE_PER_STEP)
    return value


def _check_size(size: float) -> None:
    """Raise SecurityError for a size over MAX_SIZE."""
    if size > MAX_SIZE:
        raise SecurityError(f"it makes texts or lists of more than {MAX_SIZE} characters or items")


def _is_number(value: Any) -> bool:
    """Return whether the value is an int, a float or a bool."""
    return isinstance(value, int | float)


def _measure_operand(value: Any) -> float:
    """Return the size that an operand of * contributes: a number's absolute value or a container's
    length, else 1.
    """
    if _is_number(value):
        return abs(value)
    return len(value) if isinstance(value, Sized) else 1


class _GenerationTagExtension(jinja2.ext.Extension):
    """{% generation %} marks an assistant's words for transformers; the text is that
    between the tags.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatFormat:
    """Makes the text of a chat from a prompt."""

    template: jinja2.Template
    variables: Mapping[str, Any]  # special tokens and the user's
    system_prompt: str | None

    def render_prompt(self, prompt: Prompt) -> str:
        """Return the chat as text, up to where the model's answer begins. A prompt that is text
        becomes one message of a user.

        Raise ValueError where the template refuses the chat, and for two system messages.
        """
        messages = (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt
        return self.render_conversation(
            [{"role": message.role, "content": message.content} for message in messages]
        )

    def render_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        has_answer_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_bounded: bool = True,
    ) -> str:
        """Return messages with all their entries as text, with the system prompt and with the
        `tools` that they may call. `has_answer_prompt`: end with the prompt for an answer.
        `is_bounded`: see `render_chat_template`. Raise ValueError as `render_prompt` does.
        """
        if self.system_prompt is not None:
            if messages and messages[0]["role"] == "system":
                raise ValueError(
                    "the prompt has a system message of its own"
                    f" ({messages[0]['content'][:40]!r}); remove it, or data.system_prompt."
                )
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        variables: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return self.render_messages(
                messages, is_bounded, has_answer_prompt=has_answer_prompt, **variables
            )
        except ValueError as error:
            raise ValueError(
                f"the chat template refuses the prompt ({error}); correct the prompt,"
                f" data.system_prompt or {KWARGS_SETTING}."
            ) from error

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        is_bounded: bool = True,
        has_answer_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return messages as text, without adding the system prompt. `variables`: further template
        variables such as `tools`. `is_bounded`: see `render_chat_template`. `has_answer_prompt`:
        end with the prompt for an answer. Raise ValueError with the template's words.
        """
        given = {"tools": None, "documents": None, **self.variables, **variables}
        return render_chat_template(
            self.template,
            is_bounded,
            messages=list(messages),
            add_generation_prompt=has_answer_prompt,
            **given,
        )


def make_chat_format(
    tokenizer: Tokenizer, system_prompt: str | None, template_kwargs: Mapping[str, Any]
) -> ChatFormat:
    """Compile the tokenizer's chat template. Raise ValueError for a tokenizer without a template, a
    malformed template, and `template_kwargs` that the template does not read or that the trainer
    sets.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "data.apply_chat_template (true) needs a chat template, and the tokenizer has none:"
            " neither chat_template.jinja nor chat_template in tokenizer_config.json; set"
            " model.tokenizer_path to a directory that has one, or write the chat out"
            " in data.prompt_template."
        )
    environment = TemplateSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTagExtension, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _dump_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals[DATE_FUNCTION] = _make_date_function(template_kwargs.get(DATE_FUNCTION))
    try:
        with _limit_memory():
            template = environment.from_string(tokenizer.chat_template)
            known = jinja2.meta.find_undeclared_variables(
                environment.parse(tokenizer.chat_template)
            )
    except (jinja2.TemplateError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"the tokenizer's chat template is malformed ({error}); fetch it again."
        ) from error
    for name in template_kwargs:
        if name in TRAINER_VARIABLES:
            raise ValueError(f"{KWARGS_SETTING}.{name} is set by the trainer; remove it.")
        if name not in known and not (
            name == DATE_FUNCTION and DATE_FUNCTION in tokenizer.chat_template
        ):
            own = (
                ", ".join(
                    sorted(
                        known - {*TRAINER_VARIABLES, *tokenizer.special_tokens, "raise_exception"}
                    )
                )
                or "none"
            )
            raise ValueError(
                f"{KWARGS_SETTING}.{name} would be ignored: the chat template reads no such"
                f" variable (it reads {own}); remove or correct it."
            )
    variables = {name: value for name, value in template_kwargs.items() if name != DATE_FUNCTION}
    return ChatFormat(template, {**tokenizer.special_tokens, **variables}, system_prompt)


def _dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON, in place of jinja2's own filter, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_template_error(message: str) -> None:
    """Raise the error that a template reports with raise_exception()."""
    raise jinja2.TemplateError(message)


def _make_date_function(date_text: Any) -> Callable[[str], str]:
    """Return a function strftime_now for templates that always gives the day `date_text`
    (2025-01-31): prompts that change from day to day could not be resumed. With None the function
    raises when a template calls it. Raise ValueError for text that is not a day.
    """
    try:
        day = None if date_text is None else date.fromisoformat(str(date_text))
    except ValueError:
        raise ValueError(
            f"{KWARGS_SETTING}.{DATE_FUNCTION} ({date_text!r}) must be a day such as 2025-01-31."
        ) from None

    def strftime_now(date_format: str) -> str:
        """Return the fixed day in this format. Raise TemplateError where no day was set."""
        if day is None:
            raise jinja2.TemplateError(
                "it writes today's date, and prompts must not change from day to day: name one"
                f" with {KWARGS_SETTING}: {{{DATE_FUNCTION}: 2025-01-31}}"
            )
        return day.strftime(date_format)

    return strftime_now
