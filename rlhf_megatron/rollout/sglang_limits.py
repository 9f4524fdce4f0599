"""What would end a stock SGLang server, or bring other log-probs than asked for: refused before it is sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.rollout.engine import EngineRequestError, GenerateRequest
from rlhf_megatron.rollout.http import HttpClient

_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
_MAX_RUNNING = "effective_max_running_requests_per_dp"
_NO_TOKEN = (1 << 31) - 1


@dataclass(frozen=True)
class Limits:
    """Of one server, as it says itself."""

    vocab_size: int | None  # None: it does not say; ids are not checked then
    is_deterministic: bool

    def check(self, requests: Sequence[GenerateRequest], name: str) -> None:
        """Raises EngineRequestError with the value and the fix."""
        for request in requests:
            problem = self._problem(request)
            if problem:
                raise EngineRequestError(f"{name}: {problem}")

    def _problem(self, request: GenerateRequest) -> str:
        params = request.params
        if not request.prompt_ids:
            return "the prompt is empty: there is nothing to continue. Give it at least one token."
        if self.vocab_size is not None:
            for token in (min(request.prompt_ids), max(request.prompt_ids)):
                if not 0 <= token < self.vocab_size:
                    return (
                        f"token {token} of the prompt is not in the vocabulary of the engine's model (0 .."
                        f" {self.vocab_size - 1}); prompts must be made with its tokenizer."
                    )
        if params.max_new_tokens < 1:
            return f"max_new_tokens is {params.max_new_tokens}; it must be at least 1."
        if params.min_new_tokens > 0:
            return (
                f"min_new_tokens is {params.min_new_tokens}: SGLang bars stop tokens with the tokenizer, which a server"
                " that takes token ids does not load. Leave it at 0, or use the local engine."
            )
        if params.min_p > 0 and params.temperature > 0 and self.is_deterministic:
            return (
                f"min_p is {params.min_p:g}: SGLang has no seeded draw with min_p. Start it without"
                " enable_deterministic_inference, or set min_p to 0."
            )
        return ""


def limits_of(http: HttpClient, timeout_s: float) -> Limits:
    """Ask the server. Raises EngineError."""
    info = http.get("/server_info", timeout_s)
    is_deterministic = isinstance(info, dict) and info.get("enable_deterministic_inference") is True
    return Limits(_vocab_size(http, timeout_s), is_deterministic)


def max_running_of(http: HttpClient, timeout_s: float) -> int | None:
    """Samples that the server decodes at once, over its data-parallel ranks; None: it does not say. Raises
    EngineError."""
    info = http.get("/server_info", timeout_s)
    states = info.get("internal_states") if isinstance(info, dict) else None
    found: list[Any] = [state.get(_MAX_RUNNING) for state in states or () if isinstance(state, dict)]
    return sum(found) if found and all(type(count) is int and count > 0 for count in found) else None


def _vocab_size(http: HttpClient, timeout_s: float) -> int | None:
    """No endpoint tells it, but the refusal of a token that no model has does."""
    body = {
        "input_ids": [[0]],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [[_NO_TOKEN]],
    }
    try:
        http.post("/generate", body, timeout_s)
    except EngineRequestError as error:
        found = _RANGE.search(str(error))
        return int(found[1]) if found else None
    return None
