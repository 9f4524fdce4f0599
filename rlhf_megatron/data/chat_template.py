"""A prompt as the chat that a model was trained on, by the template that its tokenizer brings.

The template is a program of a stranger: it runs in a sandbox, with the names that transformers gives it, so that the
same files make the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from rlhf_megatron.data.rows import ChatMessage, Prompt
from rlhf_megatron.data.sandbox import Sandbox, render
from rlhf_megatron.data.tokenizer import Tokenizer

KWARGS = "data.apply_chat_template_kwargs"
OWN_VARIABLES = ("messages", "add_generation_prompt")
DAY = "strftime_now"


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks an assistant's words for transformers; the text is that between the tags."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatFormat:
    """Makes the text of a chat from a prompt."""

    template: jinja2.Template
    variables: Mapping[str, Any]  # special tokens and the user's
    system_prompt: str | None

    def text(self, prompt: Prompt) -> str:
        """The chat up to where the model's answer begins. A text is the one message of a user.

        Raises ValueError where the template refuses the chat, and for two system messages.
        """
        messages = (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt
        if self.system_prompt is not None:
            if messages[0].role == "system":
                raise ValueError(
                    f"the prompt has a system message of its own ({messages[0].content[:40]!r}); remove it, or"
                    " data.system_prompt."
                )
            messages = (ChatMessage("system", self.system_prompt), *messages)
        try:
            return render(
                self.template,
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                **{"tools": None, "documents": None, **self.variables},
            )
        except ValueError as error:
            raise ValueError(
                f"the chat template refuses the prompt ({error}); mend the prompt, data.system_prompt or {KWARGS}."
            ) from error


def make_chat_format(tokenizer: Tokenizer, system_prompt: str | None, kwargs: Mapping[str, Any]) -> ChatFormat:
    """Raises ValueError for a tokenizer without template, a malformed template, and variables that it does not read."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "data.apply_chat_template (true) needs a chat template, and the tokenizer has none: neither"
            " chat_template.jinja nor chat_template in tokenizer_config.json; set model.tokenizer_path to a directory"
            " that has one, or write the chat out in data.prompt_template."
        )
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals[DAY] = _day(kwargs.get(DAY))
    try:
        template = environment.from_string(tokenizer.chat_template)
        known = jinja2.meta.find_undeclared_variables(environment.parse(tokenizer.chat_template))
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"the tokenizer's chat template is malformed ({error}); fetch it again.") from error
    for name in kwargs:
        if name in OWN_VARIABLES:
            raise ValueError(f"{KWARGS}.{name} is set by the trainer; remove it.")
        if name not in known and not (name == DAY and DAY in tokenizer.chat_template):
            own = ", ".join(sorted(known - {*OWN_VARIABLES, *tokenizer.special_tokens, "raise_exception"})) or "none"
            raise ValueError(
                f"{KWARGS}.{name} would be ignored: the chat template reads no such variable (it reads {own}); remove"
                " or correct it."
            )
    variables = {name: value for name, value in kwargs.items() if name != DAY}
    return ChatFormat(template, {**tokenizer.special_tokens, **variables}, system_prompt)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _day(text: Any) -> Callable[[str], str]:
    """The template's clock stands still: prompts that change overnight could not be resumed."""
    try:
        day = None if text is None else date.fromisoformat(str(text))
    except ValueError:
        raise ValueError(f"{KWARGS}.{DAY} ({text!r}) must be a day such as 2025-01-31.") from None

    def strftime_now(form: str) -> str:
        if day is None:
            raise jinja2.TemplateError(
                f"it writes today's date, and prompts must not change from day to day: name one with"
                f" {KWARGS}: {{{DAY}: 2025-01-31}}"
            )
        return day.strftime(form)

    return strftime_now
