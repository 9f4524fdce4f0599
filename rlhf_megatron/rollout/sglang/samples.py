"""Requests to a stock SGLang server and its answers, in the words of `rollout.engine`. Refused is what would end the
server, or bring other log-probs than asked for; an answer is checked field by field."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from rlhf_megatron.rollout.engine import (
    UNSYNCED,
    EngineRequestError,
    FinishReason,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.calls import sample_names
from rlhf_megatron.rollout.http import HttpClient

_TOP_P_OF_ONE = 1e-6  # below the probability of the likeliest token of any vocabulary
_NOT_A_NUMBER = "NaN happened"  # SGLang's words; it ends such a sample with a stop token that nobody drew


def generate_body(requests: Sequence[GenerateRequest], version: int | None, name: str = "") -> dict[str, Any]:
    """One entry a sample: SGLang's own `n` would give all samples of a group one seed. `version`: of the weights; the
    prefix cache is looked up under it, so that no keys of other weights are found. `name`: of the call."""
    return {
        **({"rid": sample_names(name)} if name else {}),
        "input_ids": [list(request.prompt_ids) for request in requests for _ in request.seeds],
        "sampling_params": [_sampling(request.params, seed) for request in requests for seed in request.seeds],
        "return_logprob": True,
        "extra_key": f"version {version}",
    }


def _sampling(params: SamplingParams, seed: int) -> dict[str, Any]:
    """`sampling_seed` counts only on servers started with --enable-deterministic-inference. `min_new_tokens` is left
    out: it is refused before. A batch of nothing but `top_k` 1 gets log-probs of temperature 1 from SGLang, so that cut
    is made with `top_p`."""
    is_greedy = params.temperature == 0
    is_single = params.top_k == 1 and not is_greedy
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": _TOP_P_OF_ONE if is_single else params.top_p,
        "top_k": -1 if is_single else params.top_k,
        "min_p": 0.0 if is_greedy else params.min_p,
        "stop_token_ids": list(params.stop_token_ids),
        "sampling_seed": seed,
        "skip_special_tokens": False,
    }


def groups_of(answers: Any, requests: Sequence[GenerateRequest]) -> list[list[GeneratedSample]]:
    """The samples of each request. Raises ValueError naming the sample, the field and what stands there."""
    num_samples = sum(len(request.seeds) for request in requests)
    if not isinstance(answers, list) or len(answers) != num_samples:
        found = f"{len(answers)} samples" if isinstance(answers, list) else repr(answers)[:200]
        raise ValueError(f"{found} for {num_samples} asked for.")
    samples = []
    for index, answer in enumerate(answers):
        try:
            samples.append(_sample(answer))
        except ValueError as error:
            raise ValueError(f"sample {index} of {num_samples}: {error}") from error
    rest = iter(samples)
    return [[next(rest) for _ in request.seeds] for request in requests]


class _Reason(msgspec.Struct):
    type: FinishReason
    matched: Any = None


class _Token(msgspec.Struct, array_like=True):
    log_prob: float
    token_id: int


class _Span(msgspec.Struct):
    start: int
    end: int
    version: str | int = ""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Meta(msgspec.Struct):
    """Some answers to aborted requests lack the counts, and the list of tokens where there is none."""

    finish_reason: _Reason
    output_token_logprobs: list[_Token] | None = None
    completion_tokens: int | None = None
    cached_tokens: _Count = 0
    num_retractions: _Count = 0
    weight_version: str | int = ""
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


def _sample(raw: Any) -> GeneratedSample:
    answer = msgspec.convert(raw, _Answer)
    meta = answer.meta_info
    reason = meta.finish_reason.type
    if meta.finish_reason.matched == _NOT_A_NUMBER:
        raise ValueError(f"meta_info.finish_reason.matched is {_NOT_A_NUMBER!r}: the model's output is not a number.")
    tokens = meta.output_token_logprobs or []
    if meta.output_token_logprobs is None and reason != "abort":
        raise ValueError("meta_info.output_token_logprobs is missing.")
    for index, token in enumerate(tokens):
        if not math.isfinite(token.log_prob):
            raise ValueError(
                f"meta_info.output_token_logprobs[{index}]: the log-prob of token {token.token_id} is"
                f" {token.log_prob!r}, not a finite number."
            )
    if reason != "abort" and meta.completion_tokens != len(tokens):
        raise ValueError(
            f"meta_info.output_token_logprobs has {len(tokens)} entries, completion_tokens is"
            f" {meta.completion_tokens!r}."
        )
    token_ids = tuple(token.token_id for token in tokens)
    if answer.output_ids is not None and tuple(answer.output_ids[: len(tokens)]) != token_ids:
        raise ValueError("output_ids and meta_info.output_token_logprobs name different tokens.")
    spans = _spans(meta.weight_versions or [], len(tokens))
    return GeneratedSample(
        token_ids=token_ids,
        log_probs=tuple(token.log_prob for token in tokens),
        finish_reason=reason,
        policy_version=spans[0].version if spans else _version(meta.weight_version),
        version_spans=spans,
        num_cached_tokens=meta.cached_tokens,
        num_retractions=meta.num_retractions,
    )


def version_name(version: int) -> str:
    """The name under which this process tells a server the version of its weights: no other process says the same, so
    that samples of weights which another run has brought are not taken for those of this one."""
    return f"{_own_prefix(os.getpid())}{version}"


@lru_cache(1)
def _own_prefix(process: int) -> str:
    return f"{secrets.token_hex(4)}-{process}-"


def _version(text: Any) -> int:
    """UNSYNCED for weights that this process has not brought."""
    prefix, number = _own_prefix(os.getpid()), str(text)
    return int(number[len(prefix) :]) if number.startswith(prefix) else UNSYNCED


def _spans(raw: Sequence[_Span], num_tokens: int) -> tuple[VersionSpan, ...]:
    """SGLang can say more tokens of aborted samples than it sends: the last span is cut. (): servers that do not say,
    or no tokens."""
    spans: list[VersionSpan] = []
    end = 0
    for span in raw:
        cut = min(span.end, num_tokens)
        if span.start != end:
            raise ValueError(f"meta_info.weight_versions is {raw}: token {span.start} does not follow on.")
        if cut > span.start:
            spans.append(VersionSpan(_version(span.version), span.start, cut))
        end = span.end
    if spans and spans[-1].end != num_tokens:
        raise ValueError(f"meta_info.weight_versions ends at token {spans[-1].end} of {num_tokens}.")
    return tuple(spans)


_RANGE = re.compile(r"valid range is \[0, (\d+)\)")
_MAX_RUNNING = "effective_max_running_requests_per_dp"
_NO_TOKEN = (1 << 31) - 1


@dataclass(frozen=True)
class Limits:
    """The limits of one server, as it says itself."""

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
