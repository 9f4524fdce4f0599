"""The tokens of one episode: what engines sampled stays as it is, and what is new is put behind it.

Each turn a caller hands over the whole conversation, as clients of OpenAI's API do. The messages
that are known already are compared and not encoded again: an answer, encoded from its text, can
have other ids than those that were sampled. The new messages become the ids that the chat template
writes behind the last answer. What a template would change in earlier turns does not count. Where
no ids can be put behind the sampled ones, the join is refused with a reason.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_megatron.agents.template_suffix import SuffixRenderer, TemplateSuffix
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data.chat_template import ChatFormat, make_chat_format
from rlhf_megatron.data.message_content import find_other_part_type, join_text_parts
from rlhf_megatron.data.plain_special_tokens import NOTHING_HIDDEN, HiddenTexts, PlainTextEncoder
from rlhf_megatron.data.tokenizer import Tokenizer

Message = dict[str, Any]
"""An entry of a conversation: "role", "content", and maybe "tool_calls", "tool_call_id", "name",
"reasoning_content".
"""
# entries of messages that the template compares with words of its own
STRUCTURAL_ENTRIES = ("role", "type")
NUM_ANCHOR_TOKENS = 8  # of a cut answer, in front of what is encoded behind it
SHOWN_CHARACTERS = 60


class JoinRefusedError(ValueError):
    """The message says why the new messages cannot be joined to the sampled ids."""


@dataclass(frozen=True)
class DialogueFormat:
    """How messages become tokens."""

    tokenizer: Tokenizer
    chat: ChatFormat | None  # None: plain text, the contents of messages one behind the other
    stop_token_ids: tuple[int, ...]  # ids that end a turn
    add_special_tokens: bool = True  # plain text: begin with what the tokenizer writes before text

    @cached_property
    def stop_texts(self) -> dict[int, str]:
        """Return the text of each id that ends a turn."""
        names = self.tokenizer.special_tokens_by_id
        return {
            token_id: names.get(token_id) or self.tokenizer.decode_with_special_tokens([token_id])
            for token_id in self.stop_token_ids
        }

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """Return the texts of the stop tokens with which a template may end a turn: those that were
        added to the vocabulary. Others, such as a newline of `rollout.stop`, stop an engine and end
        no turn. All count where none was added, and in plain text.
        """
        added_ids = self.tokenizer.added_tokens_by_id
        texts = tuple(text for i, text in self.stop_texts.items() if i in added_ids)
        return texts if texts and self.chat is not None else tuple(self.stop_texts.values())

    @cached_property
    def suffix_renderer(self) -> SuffixRenderer:
        """Return the renderer of what stands behind an answer. It remembers, for all dialogues,
        how the template ends answers.
        """
        assert self.chat is not None, "plain text has no template"
        special_texts = tuple(self.tokenizer.special_tokens_by_id.values())
        return SuffixRenderer(self.chat, self.end_texts, special_texts)

    @cached_property
    def encoder(self) -> PlainTextEncoder:
        """Return the encoder that reads special tokens in the text of messages, and other tokens
        with which the template borders messages, as plain text.
        """
        if self.chat is None:
            return PlainTextEncoder(self.tokenizer)
        added_texts = self.tokenizer.added_tokens_by_id.values()
        border_texts = self.suffix_renderer.find_border_texts(added_texts)
        return PlainTextEncoder(self.tokenizer, border_texts)

    def prepare(self) -> None:
        """Make what the first turns would make, in seconds for a large vocabulary: for a process
        from which the workers of dialogues are forked.
        """
        self.encoder.prepare()


def make_dialogue_format(
    tokenizer: Tokenizer, data: DataConfig, stop_texts: Sequence[str]
) -> DialogueFormat:
    """Return the format of a run's dialogues. `stop_texts`: what ends a turn beside the tokenizer's
    end-of-sequence tokens. Raise ValueError as `make_chat_format` and `make_stop_token_ids` do.
    """
    chat = None
    if data.apply_chat_template:
        chat = make_chat_format(tokenizer, data.system_prompt, data.apply_chat_template_kwargs)
    stop_token_ids = tokenizer.make_stop_token_ids(stop_texts)
    return DialogueFormat(tokenizer, chat, stop_token_ids, data.add_special_tokens)


class Dialogue:
    """The messages and the token ids of one episode."""

    def __init__(
        self,
        dialogue_format: DialogueFormat,
        first_messages: Sequence[Message] = (),
        first_ids: Sequence[int] = (),
    ) -> None:
        """Begin with nothing. `first_ids` are the ids that the data pipeline made of
        `first_messages`, the prompt of a row: they are used as they are when the first call has
        exactly these messages and no tools.
        """
        self._format = dialogue_format
        self._first_messages = list(first_messages)
        self._first_ids = tuple(first_ids)
        self._token_ids: list[int] = []
        self._messages: list[Message] = []
        self._tools_text = ""
        self._num_turns = 0
        self._is_answered = False
        self._ends_with_stop = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all ids so far: prompts and sampled answers."""
        return tuple(self._token_ids)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages that are known, answers included. Do not change them."""
        return tuple(self._messages)

    @property
    def num_turns(self) -> int:
        """Return the number of answers."""
        return self._num_turns

    def append_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Put the new messages of the whole conversation `messages` behind the last answer, and
        return the ids to put behind all ids so far; of the first call these are the whole prompt.

        Raise JoinRefusedError where earlier messages or the tools were changed, where nothing is
        new, and where the template fails or writes no ids that can stand behind the sampled ones;
        the dialogue is then as before. Raise ValueError for messages that are malformed.
        """
        self._check_messages(messages)
        tools_text = json.dumps(list(tools or ()), sort_keys=True)
        if not self._messages:
            ids = self._encode_first_prompt(messages, tools)
            new_messages = messages
        else:
            self._check_past(messages, tools_text)
            new_messages = messages[len(self._messages) :]
            ids = self._encode_new_messages(new_messages, tools)
        self._messages += copy.deepcopy(list(new_messages))
        self._tools_text = tools_text
        self._token_ids += ids
        self._is_answered = False
        return ids

    def append_answer(self, token_ids: Sequence[int], message: Message | None = None) -> Message:
        """Put a sampled answer behind the ids, and return the message for the caller, whose content
        is the answer's text without the stop token and special tokens. Later conversations must
        contain the message. `message`: what the caller is handed in its place, such as one with the
        calls that the text spells.
        """
        assert self._messages and not self._is_answered, "an answer follows a prompt"
        ends_with_stop = bool(token_ids) and token_ids[-1] in self._format.stop_token_ids
        if message is None:
            shown_ids = token_ids[:-1] if ends_with_stop else token_ids
            message = {"role": "assistant", "content": self._format.tokenizer.decode(shown_ids)}
        self._messages.append(copy.deepcopy(message))
        self._token_ids += token_ids
        self._num_turns += 1
        self._is_answered = True
        self._ends_with_stop = ends_with_stop
        return message

    def _encode_first_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        """Return the ids of the first prompt. Raise JoinRefusedError where the template fails."""
        if not messages:
            raise JoinRefusedError("the conversation is empty; send at least one message.")
        if self._first_ids and not tools and list(messages) == self._first_messages:
            return self._first_ids
        dialogue_format = self._format
        if dialogue_format.chat is None:
            _refuse_tools(tools)
            text, hidden = self._join_contents(messages)
            opening_ids = (
                dialogue_format.tokenizer.opening_ids if dialogue_format.add_special_tokens else ()
            )
            return (*opening_ids, *self._encode(text, hidden))
        hidden_messages, hidden_tools, hidden = self._hide_control_texts(messages, tools)
        try:
            text = dialogue_format.suffix_renderer.render_prompt(hidden_messages, hidden_tools)
        except ValueError as error:
            raise JoinRefusedError(str(error)) from error
        return self._encode(text, hidden)

    def _check_messages(self, messages: Sequence[Any]) -> None:
        """Raise ValueError for messages that are malformed, but those that are known."""
        for index, message in enumerate(messages):
            if index < len(self._messages) and message == self._messages[index]:
                continue
            problem = _describe_message_problem(message)
            if problem is not None:
                raise ValueError(f"message {index + 1} of the conversation {problem}")

    def _check_past(self, messages: Sequence[Message], tools_text: str) -> None:
        """Raise JoinRefusedError unless the messages are those that are known and new ones."""
        if not self._is_answered:
            raise JoinRefusedError(
                "the last prompt has no answer yet; one conversation asks for one answer at a time."
            )
        if tools_text != self._tools_text:
            raise JoinRefusedError(
                "the tools were changed within the conversation, and the prompt begins with them;"
                " offer the same tools in each turn."
            )
        for index, (message, known) in enumerate(zip(messages, self._messages, strict=False)):
            if message != known and _identify(message) != _identify(known):
                raise JoinRefusedError(
                    f"message {index + 1} was changed: it was {_show_message(known)}, and is"
                    f" {_show_message(message)} now; sampled ids are kept, so only add messages."
                )
        if len(messages) < len(self._messages):
            raise JoinRefusedError(
                f"the conversation has {len(messages)} messages and had {len(self._messages)}"
                " with the last answer; send all of them."
            )
        if len(messages) == len(self._messages):
            raise JoinRefusedError(
                "nothing is new behind the last answer; add a message to be answered."
            )

    def _encode_new_messages(
        self, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        """Return the ids of the new messages behind the last answer. Raise JoinRefusedError."""
        dialogue_format = self._format
        stop_text = dialogue_format.stop_texts[self._token_ids[-1]] if self._ends_with_stop else ""
        if dialogue_format.chat is None:
            _refuse_tools(tools)
            text, hidden = self._join_contents(new_messages)
            return self._encode_behind(stop_text, text, hidden)
        # the answer's too: a call's id may stand in front of the token that ends the answer
        (answer, *hidden_messages), hidden_tools, hidden = self._hide_control_texts(
            [self._messages[-1], *new_messages], tools
        )
        try:
            suffix = dialogue_format.suffix_renderer.render_suffix(
                self._messages[:-1], answer, hidden_messages, hidden_tools
            )
        except ValueError as error:
            raise JoinRefusedError(str(error)) from error
        if stop_text not in dialogue_format.end_texts:
            if answer.get("tool_calls"):
                raise JoinRefusedError(
                    "the answer was cut before a stop token, and has calls: what of their end was"
                    " sampled is not known; raise data.max_response_length."
                )
            return self._encode_behind("", suffix.closing + suffix.tail, hidden)
        _check_stop(stop_text, suffix)
        return self._encode_behind(suffix.end, suffix.tail, hidden)

    def _hide_control_texts(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[Message], list[Mapping[str, Any]], HiddenTexts]:
        """Return messages and tools without texts of special tokens, and what was hidden. Raise
        JoinRefusedError where that cannot be done.
        """
        values: list[list[Any]] = [list(messages), list(tools or ())]
        try:
            (hidden_messages, hidden_tools), hidden = self._format.encoder.hide_control_texts(
                values, STRUCTURAL_ENTRIES
            )
        except ValueError as error:
            raise JoinRefusedError(str(error)) from error
        return hidden_messages, hidden_tools, hidden

    def _join_contents(self, messages: Sequence[Message]) -> tuple[str, HiddenTexts]:
        """Return the contents of messages one behind the other, without special tokens."""
        text = "".join(join_text_parts(message.get("content")) or "" for message in messages)
        return self._format.encoder.hide_control_texts(text)

    def _encode_behind(self, stop_text: str, text: str, hidden: HiddenTexts) -> tuple[int, ...]:
        """Return the ids of a text behind a stop token, or behind a cut answer for "": a tokenizer
        may write or strip a space at the beginning of a text. Raise JoinRefusedError where the text
        has no ids of its own there.
        """
        if stop_text:
            ids = self._encode_behind_anchor(stop_text, text, hidden)
            if ids is None:
                raise JoinRefusedError(
                    f"the tokenizer joins the stop token {stop_text!r} with the text behind it"
                    f" ({text[:SHOWN_CHARACTERS]!r})."
                )
            return ids
        last_ids = self._token_ids[-NUM_ANCHOR_TOKENS:]
        last_text = self._format.tokenizer.decode_with_special_tokens(last_ids)
        with suppress(JoinRefusedError):  # the last ids are a part of a character
            ids = self._encode_behind_anchor(last_text, text, hidden)
            if ids is not None:
                return ids
        return self._encode(text, hidden)

    def _encode_behind_anchor(
        self, anchor: str, text: str, hidden: HiddenTexts
    ) -> tuple[int, ...] | None:
        """Return the ids of a text as they are behind `anchor`; None where the tokenizer joins the
        two. Raise JoinRefusedError where they cannot be spelled.
        """
        anchor_ids = self._encode(anchor, NOTHING_HIDDEN)
        ids = self._encode(anchor + text, hidden)
        return ids[len(anchor_ids) :] if ids[: len(anchor_ids)] == anchor_ids else None

    def _encode(self, text: str, hidden: HiddenTexts) -> tuple[int, ...]:
        """Return the ids of a text. Raise JoinRefusedError where it cannot be spelled."""
        try:
            return self._format.encoder.encode(text, hidden)
        except ValueError as error:
            raise JoinRefusedError(str(error)) from error


def _check_stop(stop_text: str, suffix: TemplateSuffix) -> None:
    """Raise JoinRefusedError where what stands behind the template's end of an answer cannot stand
    behind the stop token that was sampled.
    """
    if not suffix.end:
        raise JoinRefusedError(
            f"the model ended its answer with {stop_text!r}, and the chat template ends it with no"
            f" token: it goes on with {suffix.tail[:SHOWN_CHARACTERS]!r}."
        )
    if suffix.end != stop_text and not suffix.is_plain_end:
        raise JoinRefusedError(
            f"the model ended its answer with {stop_text!r}, and the chat template begins the next"
            f" message with {suffix.end!r} there."
        )


def _refuse_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise JoinRefusedError for tools in a conversation of plain text."""
    if tools:
        raise JoinRefusedError(
            "tools need a chat template, and this run's prompts are plain text"
            " (data.apply_chat_template is false)."
        )


def _describe_message_problem(message: Any) -> str | None:
    """Return what is wrong with the form of a message, as the end of a sentence, or None."""
    if not isinstance(message, Mapping):
        return f"({str(message)[:SHOWN_CHARACTERS]!r}) must be an object with role and content."
    if not isinstance(message.get("role"), str) or not message["role"]:
        return f"has the role {message.get('role')!r}; it must be a text."
    content = message.get("content")
    part_type = find_other_part_type(content)
    if part_type is not None:
        return f"has a part of the type {part_type!r}; only text is taken."
    if not isinstance(join_text_parts(content), str) and content not in (None, []):
        shown = str(content)[:SHOWN_CHARACTERS]
        return f"has the content {shown!r}; it must be a text or a list of text parts."
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or not all(map(_is_call, calls)):
        shown = str(calls)[:SHOWN_CHARACTERS]
        return f"has the tool_calls {shown!r}; each must be an object with a function's name."
    return None


def _is_call(call: Any) -> bool:
    """Return whether a value is a call of a tool."""
    if not isinstance(call, Mapping):
        return False
    function = call.get("function", call)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _identify(message: Message) -> tuple[Any, ...]:
    """Return what makes two messages the same: the role, the visible text, the calls, and whose
    result a tool's message is. What clients add or drop beside these does not count.
    """
    content = join_text_parts(message.get("content")) or ""
    calls = [_identify_call(call) for call in message.get("tool_calls") or ()]
    result_of = message.get("tool_call_id") if message["role"] == "tool" else None
    return message["role"], content.strip(), calls, result_of


def _identify_call(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the parsed arguments of a call."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return function["name"], arguments


def _show_message(message: Message) -> str:
    """Return a message for an error: its role and the beginning of its text."""
    content = join_text_parts(message.get("content")) or ""
    shown = content if len(content) <= SHOWN_CHARACTERS else content[:SHOWN_CHARACTERS] + " ..."
    calls = [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
    return f"{message['role']} {shown!r}" + (f" with calls of {', '.join(calls)}" if calls else "")
