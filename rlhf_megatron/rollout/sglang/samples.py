"""Requests to a stock SGLang server and its answers, in the words of `rollout.engine`.

Refuses what would end the server, or bring other log-probs than asked for.

What an answer must have is checked here, field by field: an engine that answers nonsense is told from our mistakes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def _sample(answer: Any) -> GeneratedSample:
    if not isinstance(answer, dict):
        raise ValueError(f"must be an object, not {repr(answer)[:200]}.")
    meta = _field(answer, "meta_info", dict)
    reason = _field(meta, "finish_reason", dict, "meta_info.").get("type")
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"meta_info.finish_reason.type is {reason!r}, not stop, length or abort.")
    if meta["finish_reason"].get("matched") == _NOT_A_NUMBER:
        raise ValueError(f"meta_info.finish_reason.matched is {_NOT_A_NUMBER!r}: the model's output is not a number.")
    token_ids, log_probs = _tokens(meta, reason)
    sent = answer.get("output_ids")
    if isinstance(sent, list) and tuple(sent[: len(token_ids)]) != token_ids:
        raise ValueError("output_ids and meta_info.output_token_logprobs name different tokens.")
    spans = _spans(meta, len(token_ids))
    return GeneratedSample(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=reason,
        policy_version=spans[0].version if spans else _version(meta.get("weight_version", "")),
        version_spans=spans,
        num_cached_tokens=_count(meta, "cached_tokens"),
        num_retractions=_count(meta, "num_retractions"),
    )


def _field(answer: dict[str, Any], name: str, kind: type, place: str = "") -> Any:
    if name not in answer:
        raise ValueError(f"{place}{name} is missing.")
    if not isinstance(answer[name], kind):
        raise ValueError(f"{place}{name} is {repr(answer[name])[:200]}.")
    return answer[name]


def _count(meta: dict[str, Any], name: str) -> int:
    """0 where the server does not say: some answers to aborted requests lack it."""
    value = meta.get(name, 0)
    if type(value) is not int or value < 0:
        raise ValueError(f"meta_info.{name} is {value!r}.")
    return value


def _tokens(meta: dict[str, Any], reason: FinishReason) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Reads token ids and log-probs. SGLang sends no list for a sample that was aborted before its first token."""
    entries = meta.get("output_token_logprobs", [] if reason == "abort" else None)
    if not isinstance(entries, list):
        raise ValueError("meta_info.output_token_logprobs is missing.")
    ids: list[int] = []
    log_probs: list[float] = []
    for index, entry in enumerate(entries):
        place = f"meta_info.output_token_logprobs[{index}]"
        if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int:
            raise ValueError(f"{place} is {repr(entry)[:200]}, not [log-prob, token id, ...].")
        if type(entry[0]) not in (int, float) or not math.isfinite(entry[0]):
            raise ValueError(f"{place}: the log-prob of token {entry[1]} is {entry[0]!r}, not a finite number.")
        log_probs.append(float(entry[0]))
        ids.append(entry[1])
    said = meta.get("completion_tokens")
    if reason != "abort" and said != len(ids):
        raise ValueError(f"meta_info.output_token_logprobs has {len(ids)} entries, completion_tokens is {said!r}.")
    return tuple(ids), tuple(log_probs)


def _version(text: Any) -> int:
    """Versions are numbers from the first sync on."""
    return int(text) if str(text).isdigit() else UNSYNCED


def _spans(meta: dict[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Reads spans. SGLang can say more tokens of aborted samples than it sends: the last span is cut. (): servers that
    do not say, or no tokens."""
    raw = meta.get("weight_versions") or []
    if not isinstance(raw, list):
        raise ValueError(f"meta_info.weight_versions is {repr(raw)[:200]}.")
    spans: list[VersionSpan] = []
    end = 0
    for index, entry in enumerate(raw):
        if not isinstance(entry, dict) or any(type(entry.get(name)) is not int for name in ("start", "end")):
            raise ValueError(f"meta_info.weight_versions[{index}] is {repr(entry)[:200]}.")
        start, cut = entry["start"], min(entry["end"], num_tokens)
        if start != end:
            raise ValueError(f"meta_info.weight_versions is {repr(raw)[:200]}: token {start} does not follow on.")
        if cut > start:
            spans.append(VersionSpan(_version(entry.get("version")), start, cut))
        end = entry["end"]
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
