"""The assistant's turns of a conversation as tokens that train, by what the chat template
itself writes.

A turn is what `render(messages[: i + 1])` has behind `render(messages[:i])` with the prompt for an
answer: just what the model will have to write. Where the template only ever appends, the whole chat
is one document with all turns in it. Where it rewrites earlier turns (it cuts their thinking, or
ends the last one with another token), each turn becomes a document of its own. A template that does
neither is refused with the first text that differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.data.tokenizer import Tokenizer

Message = Mapping[str, Any]
RenderConversation = Callable[[Sequence[Message], bool], str]
"""(messages, with the prompt for an answer) -> text. Raises ValueError where the
template refuses them.
"""
SHOWN_CHARACTERS = 30  # characters of a text in messages
THINK_BEGIN = "<think>"
THINK_END = "</think>"


@dataclass(frozen=True)
class TokenDocument:
    """Token ids, and which of them train."""

    token_ids: tuple[int, ...]
    # [begin, end) of each stretch of tokens that train, ascending
    trained_spans: tuple[tuple[int, int], ...]

    @property
    def num_trained(self) -> int:
        """Return the number of tokens that train."""
        return sum(end - begin for begin, end in self.trained_spans)


@dataclass(frozen=True)
class ConversationDocuments:
    """The documents of one conversation, and what is to be told of it."""

    documents: tuple[TokenDocument, ...]
    is_single_document: bool  # one document with all turns
    # turns that the template ends without a stop token; an end-of-sequence token was put there
    num_stops_added: int
    num_thoughts_lost: int  # turns whose reasoning_content, or <think>, the template leaves out


@dataclass(frozen=True)
class _TurnSpan:
    """Characters [begin, end) of a text that the model writes."""

    message: Message
    begin: int
    end: int


def tokenize_conversation(
    messages: Sequence[Message], render: RenderConversation, tokenizer: Tokenizer
) -> ConversationDocuments:
    """Return the documents of a conversation, in which the assistant's turns train. Raise
    ValueError where the conversation has no turn of an assistant, or where the tokens of its turns
    cannot be determined.

    The latter is a template that rewrites even the turn itself, that leaves out an answer or a tool
    call, or a turn that begins or ends inside of a token.
    """
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not indices:
        raise ValueError(
            "the conversation has no message of an assistant, so nothing trains; remove the row"
        )
    stops = [
        tokenizer.decode_with_special_tokens([token_id]) for token_id in tokenizer.eos_token_ids
    ]
    prompts = [render(messages[:i], True) for i in indices]
    answered = [render(messages[: i + 1], False) for i in indices]
    for i, prompt, text in zip(indices, prompts, answered, strict=True):
        if not text.startswith(prompt):
            raise ValueError(f"message {i + 1}: {_describe_prompt_difference(prompt, text)}")
    whole = render(messages, False)
    turns = [
        _TurnSpan(messages[i], len(prompt), len(text))
        for i, prompt, text in zip(indices, prompts, answered, strict=True)
    ]
    said = [
        text[: _find_turn_end(text, turn, stops)]
        for text, turn in zip(answered, turns, strict=True)
    ]
    is_whole = all(whole.startswith(text) for text in said)
    if is_whole:
        found = [
            _tokenize_document(
                whole[: _find_turn_end(whole, turns[-1], stops)], turns, prompts, stops, tokenizer
            )
        ]
    else:
        following = [
            _render_with_next_message(messages, i, text, render)
            for i, text in zip(indices, answered, strict=True)
        ]
        found = [
            _tokenize_document(
                text[: _find_turn_end(text, turn, stops)], [turn], [prompt], stops, tokenizer
            )
            for turn, prompt, text in zip(turns, prompts, following, strict=True)
        ]
    return ConversationDocuments(
        documents=tuple(document for document, _ in found),
        is_single_document=is_whole,
        num_stops_added=sum(added for _, added in found),
        num_thoughts_lost=sum(
            _has_lost_reasoning(turn.message, text[turn.begin :])
            for turn, text in zip(turns, said, strict=True)
        ),
    )


def _render_with_next_message(
    messages: Sequence[Message], message_index: int, text: str, render: RenderConversation
) -> str:
    """Return `text`, which ends with message `message_index`, with the text that the template puts
    behind it when the next message is rendered too: the token of the next role may be a stop token.
    Return `text` alone where the template rewrites it.
    """
    longer = (
        render(messages[: message_index + 2], False) if message_index + 1 < len(messages) else text
    )
    return longer if longer.startswith(text) else text


def _describe_prompt_difference(prompt: str, text: str) -> str:
    """Return the error message, with the first text that differs, for a template that renders a
    conversation which does not begin with the prompt.
    """
    at = next(
        (i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b),
        min(len(prompt), len(text)),
    )
    return (
        "the chat template writes another text before the answer than it gives the model to"
        f" answer: the prompt goes on with {prompt[at : at + SHOWN_CHARACTERS]!r}, the"
        f" conversation with {text[at : at + SHOWN_CHARACTERS]!r} (after"
        f" {text[max(0, at - SHOWN_CHARACTERS) : at]!r}); what would be trained is not what will"
        " be asked. Use rows of prompt and answer, or another template"
    )


def _find_turn_end(text: str, turn: _TurnSpan, stops: Sequence[str]) -> int:
    """Return the position in `text` where the model's words end: behind the last stop token of the
    turn, before the text that the template puts between turns.

    Where a token of the next role is a stop token, it counts as the model's own, too.
    """
    found = sorted(
        at + len(stop)
        for stop in stops
        if stop
        for at in _iterate_stop_positions(stop, text, turn.begin, turn.end)
    )
    while len(found) > 1 and not _remove_stops(stops, text[found[-2] : found[-1]]).strip():
        found.pop()  # the model has stopped before
    if found:
        return found[-1]
    following = [turn.end + len(stop) for stop in stops if text.startswith(stop, turn.end)]
    return max(following, default=turn.end)


def _iterate_stop_positions(stop: str, text: str, begin: int, end: int) -> Iterator[int]:
    """Yield each position of `stop` in text[begin:end]."""
    at = text.find(stop, begin, end)
    while at >= 0:
        yield at
        at = text.find(stop, at + 1, end)


def _remove_stops(stops: Sequence[str], text: str) -> str:
    """Return the text without stop tokens."""
    for stop in stops:
        text = text.replace(stop, "")
    return text


def _tokenize_document(
    text: str,
    turns: Sequence[_TurnSpan],
    prompts: Sequence[str],
    stops: Sequence[str],
    tokenizer: Tokenizer,
) -> tuple[TokenDocument, int]:
    """Return the document of `text`, and the number of stop tokens (0 or 1) that were put behind
    it. Raise ValueError as `tokenize_conversation` does.
    """
    ids, offsets = tokenizer.encode_with_offsets(text)
    spans = []
    has_stop = True
    for turn, prompt, prompt_ids in zip(
        turns, prompts, tokenizer.encode_texts(prompts), strict=True
    ):
        end = _find_turn_end(text, turn, stops)
        _check_content_rendered(turn.message, text[turn.begin : end])
        begin_token = _find_token_at(turn.begin, ids, offsets, text)
        end_token = _find_token_at(end, ids, offsets, text)
        if ids[:begin_token] != prompt_ids:
            raise ValueError(
                f"the prompt before {text[turn.begin : turn.begin + SHOWN_CHARACTERS]!r} has other"
                f" token ids alone (...{list(prompt_ids[-3:])}) than with its answer"
                f" (...{list(ids[:begin_token][-3:])}): the tokenizer joins"
                f" {prompt[-SHOWN_CHARACTERS:]!r} with what follows"
            )
        if begin_token < end_token:
            spans.append((begin_token, end_token))
        has_stop = any(text.endswith(stop, turn.begin, end) for stop in stops)
    if not has_stop:  # of the last turn; behind another one stands what the template puts there
        ids = (*ids, tokenizer.eos_token_id)
        spans = [*spans[:-1], (spans[-1][0] if spans else len(ids) - 1, len(ids))]
    if not spans:
        raise ValueError(
            "no token of the conversation trains: its answers are empty; remove the row"
        )
    return TokenDocument(ids, tuple(spans)), int(not has_stop)


def _find_token_at(
    position: int, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str
) -> int:
    """Return the index of the first token that begins at or behind a character. Raise ValueError
    where the character lies inside of a token.
    """
    for index in range(_bisect_token_ends(position, offsets), len(offsets)):
        begin, end = offsets[index]
        if begin >= position:
            return index
        if begin < position < end:
            raise ValueError(
                f"a turn begins or ends inside of the token {text[begin:end]!r} (id {ids[index]}),"
                f" after {text[max(0, begin - SHOWN_CHARACTERS) : begin]!r}"
            )
    return len(offsets)


def _bisect_token_ends(position: int, offsets: Sequence[tuple[int, int]]) -> int:
    """Return an index before which every token ends at or before the character, by bisection."""
    low = 0
    high = len(offsets)
    while low < high:
        middle = (low + high) // 2
        if offsets[middle][1] <= position:
            low = middle + 1
        else:
            high = middle
    return low


def _check_content_rendered(message: Message, turn_text: str) -> None:
    """Raise ValueError where the template left out the message's answer or a tool call."""
    content = message.get("content") or ""
    visible = content.rpartition(THINK_END)[2].strip() if isinstance(content, str) else ""
    missing = [visible] if visible not in turn_text else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        _check_argument_spelling(function.get("arguments"), turn_text)
        missing += [
            leaf
            for leaf in _iterate_call_values(function)
            if all(form not in turn_text for form in _list_text_spellings(leaf))
        ]
    if missing:
        what = (
            "a tool call" if message.get("tool_calls") and missing[0] != visible else "the answer"
        )
        raise ValueError(
            f"the chat template leaves out or changes {what} ({missing[0][:SHOWN_CHARACTERS]!r} is"
            f" not in {turn_text[: 3 * SHOWN_CHARACTERS]!r}); use a template that writes it, or"
            " change the row"
        )


def _list_text_spellings(text: str) -> tuple[str, ...]:
    """Return a text as it is, and as JSON writes it between quotes, with and without ASCII
    escapes.
    """
    return text, *(json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))


def _check_argument_spelling(arguments: Any, turn_text: str) -> None:
    """Raise ValueError where the template wrote a call's arguments as a quoted string within JSON,
    or as Python prints an object.
    """
    is_text = isinstance(arguments, str)
    if is_text:
        wrong_spellings = [f'"{form}"' for form in _list_text_spellings(arguments)[1:]]
    elif arguments:
        wrong_spellings = [str(arguments)]
    else:
        wrong_spellings = []
    spelling = next((text for text in wrong_spellings if text in turn_text), None)
    if spelling:
        right_form = "an object" if is_text else "JSON text"
        raise ValueError(
            f"the chat template writes arguments of a tool call as {spelling[:SHOWN_CHARACTERS]};"
            f" write them as {right_form} in the row"
        )


def _iterate_call_values(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a tool call, and each text and number of its arguments, which are an object
    or its JSON.
    """
    yield str(function.get("name", ""))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            yield arguments
            return
    pending = [arguments]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += [*value.values()]
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, str) or (
            isinstance(value, int | float) and not isinstance(value, bool)
        ):
            yield str(value)


def _has_lost_reasoning(message: Message, turn_text: str) -> bool:
    """Return whether the template left out the message's reasoning: `reasoning_content` or the text
    in <think>.
    """
    thoughts = message.get("reasoning_content")
    content = message.get("content") or ""
    if thoughts is None and isinstance(content, str):
        thoughts = content.rpartition(THINK_END)[0].rpartition(THINK_BEGIN)[2]
    return (
        isinstance(thoughts, str) and bool(thoughts.strip()) and thoughts.strip() not in turn_text
    )
