"""The parts of a model's answer: text, thoughts, and calls of tools.

A format of answers turns the text that a model wrote into these parts. Nothing of the text is lost:
a call that cannot be read is kept as text, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_megatron.agents.answer_formats.call_texts import Tools
from rlhf_megatron.registry import Registry

# the length that Mistral's templates demand; letters and digits only
CALL_ID_LENGTH = 9
# more calls of one answer are not read: the text behind the last of them is one broken call
MAX_CALLS = 128


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: `f` with {"x": 1}.

    `call_id` is the model's own where its format has ids, else it is made from the answer's text
    and the place of the call, so that the same answer always gives the same ids.
    """

    name: str
    arguments: dict[str, Any]
    call_id: str


@dataclass(frozen=True)
class BrokenCall:
    """A call that cannot be read: what the model wrote, and why it is no call. The reason is a
    sentence for the model.
    """

    text: str
    reason: str


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer, without the marks of its format."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    broken_calls: tuple[BrokenCall, ...]


class AnswerFormat(Protocol):
    """Reads the answers of models that write calls in one format."""

    name: str

    def parse_answer(
        self, text: str, is_reasoning_open: bool = False, tools: Tools | None = None
    ) -> ParsedAnswer:
        """Return the parts of an answer.

        `text`: the answer with special tokens shown. `is_reasoning_open`: the prompt has opened the
        thought already ("<think>\\n" at its end). `tools`: the tools that the prompt described, in
        OpenAI's form; a format without types takes the types of arguments from their schemas.
        """
        ...


# a part is a class that is made with the texts of the tokens that end an answer
ANSWER_FORMATS: Registry[Callable[[Sequence[str]], AnswerFormat]] = Registry(
    "answer format", interface=AnswerFormat, call_arguments=("end_texts",)
)


class AnswerParts:
    """Collects the parts of an answer in the order in which they stand in its text."""

    def __init__(self, text: str) -> None:
        """Take the whole text, from which ids of calls are made."""
        self._text_digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
        self._contents: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._broken_calls: list[BrokenCall] = []

    def is_full(self) -> bool:
        """Return whether the answer has as many calls, with broken ones, as are read."""
        return len(self._calls) + len(self._broken_calls) >= MAX_CALLS

    def add_unread_rest(self, text: str) -> None:
        """Add the text behind the last call that is read, as one broken call."""
        self.add_broken_call(text, f"an answer has at most {MAX_CALLS} calls")

    def add_content(self, text: str) -> None:
        """Add text between the marks of the format."""
        self._contents.append(text)

    def add_thought(self, text: str) -> None:
        """Add a thought."""
        self._thoughts.append(text.strip())

    def add_call(self, name: str, arguments: dict[str, Any], call_id: str = "") -> None:
        """Add a call. An id is made where the model wrote none, or wrote it twice."""
        if not call_id or any(call_id == call.call_id for call in self._calls):
            call_id = self._make_call_id()
        self._calls.append(ToolCall(name, arguments, call_id))

    def add_broken_call(self, text: str, reason: str) -> None:
        """Add a call that cannot be read."""
        self._broken_calls.append(BrokenCall(text.strip(), reason))

    def build(self) -> ParsedAnswer:
        """Return the answer. White space at marks of the format is dropped; an answer without
        marks keeps its text as it is.
        """
        if self._thoughts or self._calls or self._broken_calls:
            stripped = (text.strip() for text in self._contents)
            content = "\n".join(text for text in stripped if text)
        else:
            content = "".join(self._contents)
        reasoning = "\n".join(text for text in self._thoughts if text)
        return ParsedAnswer(content, reasoning, tuple(self._calls), tuple(self._broken_calls))

    def _make_call_id(self) -> str:
        """Return the id of the next call."""
        digest = self._text_digest.copy()
        digest.update(b"\0%d" % len(self._calls))
        return digest.hexdigest()[:CALL_ID_LENGTH]


def make_assistant_message(answer: ParsedAnswer) -> dict[str, Any]:
    """Return an answer as an assistant's message in OpenAI's form, with arguments as objects. The
    entries reasoning_content and tool_calls are there where the answer has a thought and calls.

    Broken calls stand at the end of the content, as the model wrote them.
    """
    broken_texts = [call.text for call in answer.broken_calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(text for text in (answer.content, *broken_texts) if text),
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message
