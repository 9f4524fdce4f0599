"""Answers as they grow: a choice is drawn in parts where it is streamed or may end at a text, else at once.

A part goes on from the tokens so far with the same seed, so a choice is the same however it is cut, and one that loses
its engine goes on at another one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.data.tokenizer import UNKNOWN, Tokenizer
from rlhf_megatron.rollout.engine import FinishReason, GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.fleet.work import spans_of
from rlhf_megatron.serving.backend import Backend
from rlhf_megatron.serving.bodies import Ask

STREAMED = (1, 2, 4, 8)  # tokens of the first parts of a stream; the last number is that of all others
UNTIL_STOP = (32, 64, 128)  # likewise where a text may end it
TOOL_CALL = "<tool_call>"  # Hermes' form, which Qwen has too
_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """The new part of a choice. `text` leaves out what may still become a stop or a call of a tool."""

    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: tuple[tuple[int, int, int], ...]  # version, first token, end; counted from the start of the choice
    finish_reason: FinishReason | None = None  # None: it goes on


class Text:
    """The text of a choice, given out as far as it is certain."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], hides_from: str = "") -> None:
        """`hides_from`: what begins with it is given out at the end alone."""
        self._tokenizer = tokenizer
        self._stops = stops
        self._hides_from = hides_from
        self._ids: list[int] = []
        self._num_given = 0  # characters

    def add(self, token_ids: Sequence[int], is_last: bool) -> tuple[str, int | None]:
        """New text, and how many of all tokens the answer has where a stop ends it."""
        start = len(self._ids)
        self._ids += token_ids
        whole = self._tokenizer.decode(self._ids)
        if any(stop in whole for stop in self._stops):
            for count in range(start + 1, len(self._ids) + 1):
                text = self._tokenizer.decode(self._ids[:count])
                found = [text.find(stop) for stop in self._stops if stop in text]
                if found:
                    return self._given(text, min(found)), count
        return self._given(whole, len(whole) if is_last else self._certain(whole)), None

    def _certain(self, whole: str) -> int:
        end = len(whole.rstrip(UNKNOWN))  # a character of which bytes are missing shows so
        marks = [*self._stops, *([self._hides_from] if self._hides_from else [])]
        for mark in marks:
            sizes = range(min(len(mark) - 1, end), 0, -1)
            end -= next((size for size in sizes if mark.startswith(whole[end - size : end])), 0)
        hidden = whole.find(self._hides_from) if self._hides_from else -1
        return end if hidden < 0 else min(end, hidden)

    def _given(self, whole: str, end: int) -> str:
        new = whole[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return new


def seed_of(ask: Ask, prompt: int, choice: int) -> int:
    return derive_seed(ask.seed, prompt, choice)


async def whole_choices(backend: Backend, tokenizer: Tokenizer, ask: Ask, prompt: int) -> list[Part]:
    """All choices of a prompt, drawn at once: nothing can end one but the engine."""
    seeds = tuple(seed_of(ask, prompt, choice) for choice in range(ask.n))
    samples = await backend.ask(GenerateRequest(ask.prompts[prompt], seeds, ask.params))
    return [
        replace(_part(s, 0), text=tokenizer.decode(_shown(s, ask.params.stop_token_ids)), finish_reason=s.finish_reason)
        for s in samples
    ]


async def growing_choice(
    backend: Backend, tokenizer: Tokenizer, ask: Ask, prompt: int, choice: int
) -> AsyncIterator[Part]:
    """One choice, a part at a time; the last one has a finish reason."""
    sizes = STREAMED if ask.is_stream else UNTIL_STOP
    text = Text(tokenizer, ask.stops, TOOL_CALL if ask.has_tools else "")
    given: tuple[int, ...] = ()
    most = ask.params.max_new_tokens
    for number in range(most):
        size = min(sizes[min(number, len(sizes) - 1)], most - len(given))
        request = GenerateRequest(
            (*ask.prompts[prompt], *given),
            (seed_of(ask, prompt, choice),),
            replace(ask.params, max_new_tokens=size),
            len(given),
        )
        (sample,) = await backend.ask(request)
        is_full = len(given) + len(sample.token_ids) >= most
        is_last = sample.finish_reason == "stop" or is_full
        new, num_kept = text.add(_shown(sample, ask.params.stop_token_ids), is_last)
        if num_kept is not None:
            sample = _cut(sample, num_kept - len(given))
        reason: FinishReason = "stop" if num_kept is not None or sample.finish_reason == "stop" else "length"
        is_last = is_last or num_kept is not None
        yield replace(_part(sample, len(given)), text=new, finish_reason=reason if is_last else None)
        if is_last:
            return
        given = (*given, *sample.token_ids)


def joined(parts: Sequence[Part]) -> Part:
    """The parts of a choice as one."""
    spans: list[tuple[int, int, int]] = []
    for version, start, end in (span for part in parts for span in part.spans):
        if spans and spans[-1][0] == version:
            start = spans.pop()[1]
        spans.append((version, start, end))
    return Part(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.token_ids),
        tuple(value for part in parts for value in part.log_probs),
        tuple(spans),
        parts[-1].finish_reason,
    )


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before calls of tools, and these in OpenAI's form; the text as it is where there is none."""
    calls = []
    for found in _CALLS.finditer(text):
        try:
            call = json.loads(found[1])
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError):
            return text, []
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return (text[: text.index(TOOL_CALL)].rstrip(), calls) if calls else (text, [])


def _shown(sample: GeneratedSample, stop_token_ids: Sequence[int]) -> Sequence[int]:
    """Return a sample's tokens without the one that stopped it."""
    ids = sample.token_ids
    return ids[:-1] if sample.finish_reason == "stop" and ids and ids[-1] in stop_token_ids else ids


def _part(sample: GeneratedSample, first: int) -> Part:
    spans = tuple((span.version, first + span.start, first + span.end) for span in spans_of(sample))
    return Part("", sample.token_ids, sample.log_probs, spans)


def _cut(sample: GeneratedSample, count: int) -> GeneratedSample:
    spans = tuple(replace(s, end=min(s.end, count)) for s in spans_of(sample) if s.start < count)
    kept = {"token_ids": sample.token_ids[:count], "log_probs": sample.log_probs[:count], "version_spans": spans}
    return replace(sample, **kept)  # type: ignore[arg-type]
