"""Answers as they grow: a choice is drawn in parts where it is streamed or may end at a
text, else at once.

A part goes on from the tokens so far with the same seed, so a choice is the same however it is cut,
and one that loses its engine goes on at another one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.data.tokenizer import UNKNOWN_TOKEN_TEXT, Tokenizer
from rlhf_megatron.jobs.serving.openai_requests import CheckedRequest
from rlhf_megatron.jobs.serving.serving_backend import ServingBackend
from rlhf_megatron.rollout.engine_interface import FinishReason, GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.fleet.chunk_generation import get_version_spans

# tokens of the first parts of a stream; the last number is that of all others
STREAMED = 1, 2, 4, 8
UNTIL_STOP = (32, 64, 128)  # likewise where a text may end it
TOOL_CALL = "<tool_call>"  # Hermes' form, which Qwen has too
_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ChoicePart:
    """The new part of a choice. `text` leaves out characters that may still become a stop text or a
    tool call.
    """

    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    # version, first token, end; counted from the start of the choice
    version_spans: tuple[tuple[int, int, int], ...]
    finish_reason: FinishReason | None = None  # None: it goes on


class GrowingText:
    """The text of a choice as its tokens come, released as far as it is certain."""

    def __init__(
        self, tokenizer: Tokenizer, stop_texts: Sequence[str], withheld_mark: str = ""
    ) -> None:
        """Begin without text. Text from `withheld_mark` on, if that is not "", is released only at
        the end.
        """
        self._tokenizer = tokenizer
        self._stop_texts = stop_texts
        self._withheld_mark = withheld_mark
        self._token_ids: list[int] = []
        self._num_released_chars = 0  # characters

    def append_tokens(self, token_ids: Sequence[int], is_last: bool) -> tuple[str, int | None]:
        """Append tokens, and return (the text that is now certain, None). Where a stop text ends
        the choice, return (the rest of the text before the stop, the number of all tokens that the
        choice keeps). `is_last` releases all text.
        """
        start = len(self._token_ids)
        self._token_ids += token_ids
        whole = self._tokenizer.decode(self._token_ids)
        if any(stop in whole for stop in self._stop_texts):
            for count in range(start + 1, len(self._token_ids) + 1):
                text = self._tokenizer.decode(self._token_ids[:count])
                found = [text.find(stop) for stop in self._stop_texts if stop in text]
                if found:
                    return self._release_text(text, min(found)), count
        return self._release_text(
            whole, len(whole) if is_last else self._find_certain_end(whole)
        ), None

    def _find_certain_end(self, text: str) -> int:
        """Return the number of characters that can be released: without incomplete characters, the
        beginning of a stop text, and text from the withheld mark on.
        """
        # a character of which bytes are missing shows so
        end = len(text.rstrip(UNKNOWN_TOKEN_TEXT))
        marks = [*self._stop_texts, *([self._withheld_mark] if self._withheld_mark else [])]
        for mark in marks:
            sizes = range(min(len(mark) - 1, end), 0, -1)
            end -= next((size for size in sizes if mark.startswith(text[end - size : end])), 0)
        hidden = text.find(self._withheld_mark) if self._withheld_mark else -1
        return end if hidden < 0 else min(end, hidden)

    def _release_text(self, text: str, end_char: int) -> str:
        """Return the text that was not released before, up to `end_char`, and count it
        as released.
        """
        new = text[self._num_released_chars : end_char]
        self._num_released_chars = max(self._num_released_chars, end_char)
        return new


def derive_choice_seed(request: CheckedRequest, prompt_index: int, choice_index: int) -> int:
    """Return the seed of a choice, derived from the request's seed, the prompt and the number of
    the choice.
    """
    return derive_seed(request.seed, prompt_index, choice_index)


async def generate_whole_choices(
    backend: ServingBackend, tokenizer: Tokenizer, request: CheckedRequest, prompt_index: int
) -> list[ChoicePart]:
    """Return all choices of a prompt, generated in one request: use this where only the engine can
    end a choice.
    """
    seeds = tuple(
        derive_choice_seed(request, prompt_index, choice) for choice in range(request.num_choices)
    )
    samples = await backend.generate_samples(
        GenerateRequest(request.prompts[prompt_index], seeds, request.sampling_params)
    )
    return [
        replace(
            _make_choice_part(s, 0),
            text=tokenizer.decode(_drop_stop_token(s, request.sampling_params.stop_token_ids)),
            finish_reason=s.finish_reason,
        )
        for s in samples
    ]


async def generate_choice_parts(
    backend: ServingBackend,
    tokenizer: Tokenizer,
    checked_request: CheckedRequest,
    prompt_index: int,
    choice_index: int,
) -> AsyncIterator[ChoicePart]:
    """Yield one choice part by part, in order; the last part has a finish reason. Each part is a
    request that continues the tokens before, so a stop text can end the choice.
    """
    sizes = STREAMED if checked_request.is_stream else UNTIL_STOP
    text = GrowingText(
        tokenizer, checked_request.stop_texts, TOOL_CALL if checked_request.has_tools else ""
    )
    given: tuple[int, ...] = ()
    most = checked_request.sampling_params.max_new_tokens
    for number in range(most):
        size = min(sizes[min(number, len(sizes) - 1)], most - len(given))
        request = GenerateRequest(
            (*checked_request.prompts[prompt_index], *given),
            (derive_choice_seed(checked_request, prompt_index, choice_index),),
            replace(checked_request.sampling_params, max_new_tokens=size),
            len(given),
        )
        (sample,) = await backend.generate_samples(request)
        is_full = len(given) + len(sample.token_ids) >= most
        is_last = sample.finish_reason == "stop" or is_full
        new, num_kept = text.append_tokens(
            _drop_stop_token(sample, checked_request.sampling_params.stop_token_ids), is_last
        )
        if num_kept is not None:
            sample = _truncate_sample(sample, num_kept - len(given))
        reason: FinishReason = (
            "stop" if num_kept is not None or sample.finish_reason == "stop" else "length"
        )
        is_last = is_last or num_kept is not None
        yield replace(
            _make_choice_part(sample, len(given)),
            text=new,
            finish_reason=reason if is_last else None,
        )
        if is_last:
            return
        given = (*given, *sample.token_ids)


def join_choice_parts(parts: Sequence[ChoicePart]) -> ChoicePart:
    """Return the parts of a choice as one part, with neighbouring spans of the same
    version joined.
    """
    spans: list[tuple[int, int, int]] = []
    for version, start, end in (span for part in parts for span in part.version_spans):
        if spans and spans[-1][0] == version:
            start = spans.pop()[1]
        spans.append((version, start, end))
    return ChoicePart(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.token_ids),
        tuple(value for part in parts for value in part.log_probs),
        tuple(spans),
        parts[-1].finish_reason,
    )


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the tool calls in a text, and the calls in OpenAI's form; the whole
    text and [] where there is no call or one is malformed.
    """
    calls = []
    for found in _CALLS.finditer(text):
        try:
            call = json.loads(found[1])
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError):
            return text, []
        calls.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )
    return (text[: text.index(TOOL_CALL)].rstrip(), calls) if calls else (text, [])


def _drop_stop_token(sample: GeneratedSample, stop_token_ids: Sequence[int]) -> Sequence[int]:
    """Return a sample's tokens without the token that stopped it."""
    ids = sample.token_ids
    return ids[:-1] if sample.finish_reason == "stop" and ids and ids[-1] in stop_token_ids else ids


def _make_choice_part(sample: GeneratedSample, first_token: int) -> ChoicePart:
    """Return a sample as a part without text and finish reason, whose version spans count from the
    start of the choice; `first_token` is the number of the sample's first token there.
    """
    spans = tuple(
        (span.version, first_token + span.start, first_token + span.end)
        for span in get_version_spans(sample)
    )
    return ChoicePart("", sample.token_ids, sample.log_probs, spans)


def _truncate_sample(sample: GeneratedSample, num_tokens: int) -> GeneratedSample:
    """Return the first `num_tokens` tokens of a sample, with their log-probs and version spans."""
    spans = tuple(
        replace(s, end=min(s.end, num_tokens))
        for s in get_version_spans(sample)
        if s.start < num_tokens
    )
    kept = {
        "token_ids": sample.token_ids[:num_tokens],
        "log_probs": sample.log_probs[:num_tokens],
        "version_spans": spans,
    }
    return replace(sample, **kept)  # type: ignore[arg-type]
