"""Turns the texts of requests into token ids beside the event loop, within limits on characters.

One long prompt must neither hold up the other requests nor take the machine's memory. A text is
bounded by characters before anything reads it: the longest one that the model takes has as many
characters as its tokens can have. Characters that are being tokenized are bounded over all
requests; what finds no room waits, and what could never have room is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.http_guard import SharedBudget
from rlhf_megatron.jobs.serving.openai_requests import (
    ChatRequest,
    CheckedRequest,
    CompletionRequest,
    RequestError,
    ServedModel,
    check_request,
)

DEFAULT_MOST_CHARACTERS = 2_000_000  # that are tokenized at once, over all requests
MOST_STOPS = 64  # stop texts of a request
MOST_STOP_CHARACTERS = 1000  # of one of them


class PromptEncoder:
    """Checks requests and tokenizes their prompts in threads. For one event loop."""

    def __init__(
        self, served_model: ServedModel, most_characters: int = DEFAULT_MOST_CHARACTERS
    ) -> None:
        """Bound the texts of requests by what the model takes, and all texts that are tokenized at
        once by `most_characters`.
        """
        self._served_model = served_model
        self._most_characters = most_characters
        # a text with more characters has more tokens than the model takes
        self.most_prompt_characters = (
            served_model.max_tokens * served_model.tokenizer.longest_token_characters
        )
        self._free_characters = SharedBudget(most_characters)

    async def encode_request(self, body: ChatRequest | CompletionRequest) -> CheckedRequest:
        """Return the request with its prompts as token ids, as `check_request` does. Raise
        RequestError also for texts with more characters than the model or the server takes.
        """
        num_characters = self._check_characters(body)
        async with self._free_characters.hold(num_characters):
            # the tokenizer lets go of Python's lock while it works, so the event loop goes on
            return await asyncio.to_thread(check_request, body, self._served_model)

    def _check_characters(self, body: ChatRequest | CompletionRequest) -> int:
        """Return the characters of all texts of a request. Raise RequestError where they are too
        many.
        """
        _check_stops(body)
        if isinstance(body, ChatRequest):
            texts = list(iterate_texts([body.messages, body.tools, body.chat_template_kwargs]))
            longest = num_characters = sum(map(len, texts))
        else:
            prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            lengths = [len(prompt) for prompt in prompts if isinstance(prompt, str)]
            longest = max(lengths, default=0)
            num_characters = sum(lengths)
        if longest > self.most_prompt_characters:
            raise RequestError(
                f"the prompt has {longest} characters, more than the"
                f" {self._served_model.max_tokens} tokens that the model takes can have"
                f" ({self.most_prompt_characters}); shorten it.",
                code="context_length_exceeded",
            )
        if num_characters > self._most_characters:
            raise RequestError(
                f"the texts of the request have {num_characters} characters, and the server"
                f" tokenizes {self._most_characters} at once (--max-characters); ask for less at"
                " once.",
                413,
            )
        return num_characters


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield all texts within lists and objects of a request, keys of objects too."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item


def _check_stops(body: ChatRequest | CompletionRequest) -> None:
    """Raise RequestError for more or longer stop texts than a server should look for in every
    answer.
    """
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    if len(stops) > MOST_STOPS or any(len(stop) > MOST_STOP_CHARACTERS for stop in stops):
        raise RequestError(
            f"stop may name {MOST_STOPS} texts of {MOST_STOP_CHARACTERS} characters each."
        )
