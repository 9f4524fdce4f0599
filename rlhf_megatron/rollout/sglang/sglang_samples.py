"""Requests to a stock SGLang server and its answers, in the words of `rollout.engine`. Refused is
what would end the server, or bring other log-probs than asked for; an answer is checked
field by field.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from rlhf_megatron.data.expert_route_files import write_route_file
from rlhf_megatron.rollout.engine_interface import (
    SCORING_RULE,
    UNSYNCED,
    EngineRequestError,
    FinishReason,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    TokenColumn,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.engine_calls import list_sample_names
from rlhf_megatron.rollout.http_client import HttpClient, run_in_event_loop

_TOP_P_OF_ONE = 1e-6  # below the probability of the likeliest token of any vocabulary
# SGLang's words; it ends such a sample with a stop token that nobody drew
_NAN_REASON = "NaN happened"

_VOCAB_RANGE_PATTERN = re.compile(r"valid range is \[0, (\d+)\)")
_MAX_RUNNING_KEY = "effective_max_running_requests_per_dp"
_IMPOSSIBLE_TOKEN = (1 << 31) - 1


def make_generate_body(
    requests: Sequence[GenerateRequest], version: int | None, call_name: str = ""
) -> dict[str, Any]:
    """Return the JSON body of a generate call, with one entry for each sample: SGLang's own `n`
    would give all samples of a group one seed. `version` is the weights' version; the prefix cache
    is looked up under it, so that no keys of other weights are found. `call_name` gives the samples
    request ids, by which they can be aborted.
    """
    is_scored = any(request.params.max_new_tokens == 0 for request in requests)
    return {
        **({"rid": list_sample_names(call_name)} if call_name else {}),
        "input_ids": [request.prompt_ids for request in requests for _ in request.seeds],
        "sampling_params": [
            _make_sampling_settings(request.params, seed)
            for request in requests
            for seed in request.seeds
        ],
        "return_logprob": True,
        **(
            {
                "logprob_start_len": [
                    _get_first_scored_position(r) for r in requests for _ in r.seeds
                ]
            }
            if is_scored
            else {}
        ),
        **(
            {"return_routed_experts": True}
            if any(request.routes_dir for request in requests)
            else {}
        ),
        "extra_key": f"version {version}",
    }


def _get_first_scored_position(request: GenerateRequest) -> int:
    """Return the position from which the server must return log-probs of the prompt so that they
    cover the `num_given` last tokens (the first position lacks a log-prob of its own); -1 where
    nothing is scored.
    """
    return (
        len(request.prompt_ids) - request.num_given - 1
        if request.params.max_new_tokens == 0
        else -1
    )


def _make_sampling_settings(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return SGLang's sampling settings of one sample. `sampling_seed` counts only on servers
    started with --enable-deterministic-inference. `min_new_tokens` is left out, since such requests
    are refused before. A batch of nothing but `top_k` 1 gets log-probs of temperature 1 from
    SGLang, so that cut is made with `top_p`.
    """
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


def parse_sample_groups(
    data: bytes, requests: Sequence[GenerateRequest], version_prefix: str = ""
) -> list[list[GeneratedSample]]:
    """Return the samples of each request from the JSON that a server sent, and write their expert
    routes to files. `version_prefix` is `get_version_prefix` of the process that brought the
    weights; "": this process. Raise ValueError naming the sample, the field and its value.
    """
    num_samples = sum(len(request.seeds) for request in requests)
    try:
        answers = _ANSWER_DECODER.decode(data)
    except msgspec.MsgspecError:
        answers = json.loads(data)  # in Python's way, to say what is wrong, and of which sample
    if not isinstance(answers, list) or len(answers) != num_samples:
        found = f"{len(answers)} samples" if isinstance(answers, list) else repr(answers)[:200]
        raise ValueError(f"{found} for {num_samples} asked for.")
    samples = []
    asked = [request for request in requests for _ in request.seeds]
    for index, (answer, request) in enumerate(zip(answers, asked, strict=True)):
        try:
            samples.append(
                _read_sample_and_write_routes(
                    answer, request, version_prefix or get_version_prefix()
                )
            )
        except ValueError as error:
            raise ValueError(f"sample {index} of {num_samples}: {error}") from error
    rest = iter(samples)
    return [[next(rest) for _ in request.seeds] for request in requests]


class _FinishReasonAnswer(msgspec.Struct):
    type: FinishReason
    matched: Any = None


class _TokenAnswer(msgspec.Struct, array_like=True):
    log_prob: float
    token_id: Annotated[int, msgspec.Meta(lt=1 << 31)]


class _VersionSpanAnswer(msgspec.Struct):
    start: int
    end: int
    version: str | int = ""


_Count = Annotated[int, msgspec.Meta(ge=0)]


Rows = TypeVar("Rows")  # [[log-prob, token id, null], ...]: bytes of JSON, or read


class _MetaInfoAnswer(msgspec.Struct, Generic[Rows]):
    """Some answers to aborted requests lack the counts,
    and the list of tokens where there is none.
    """

    finish_reason: _FinishReasonAnswer
    output_token_logprobs: Rows = None  # type: ignore[assignment]
    # where the request is to be scored
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    completion_tokens: int | None = None
    cached_tokens: _Count = 0
    num_retractions: _Count = 0
    weight_version: str | int = ""
    weight_versions: list[_VersionSpanAnswer] | None = None
    routed_experts: str | None = None  # base64 of int32 [tokens - 1, layers, experts], prompt first


class _SampleAnswer(msgspec.Struct, Generic[Rows]):
    meta_info: _MetaInfoAnswer[Rows]
    output_ids: list[int] | None = None


_ANSWER_DECODER = msgspec.json.Decoder(list[_SampleAnswer[msgspec.Raw]])


def _read_token_columns(
    rows: msgspec.Raw | list[_TokenAnswer] | None,
) -> tuple[list[int], array[int], array[float]] | None:
    """Return the token ids as a list and as an array, and the log-probs; None where the server sent
    none. The rows are parsed as one flat list, because a list for each row of a long response costs
    more than its numbers.
    """
    if isinstance(rows, msgspec.Raw):
        flat = msgspec.json.decode(b"[%b]" % bytes(rows).translate(None, b"[]"))
        log_probs = flat[::3]
        ids = flat[1::3]
        texts = flat[2::3]
        if len(log_probs) == texts.count(None):
            with suppress(TypeError, OverflowError):
                return ids, array("i", ids), array("d", log_probs)
        try:
            rows = msgspec.json.decode(rows, type=list[_TokenAnswer] | None)
        except msgspec.ValidationError as error:
            raise ValueError(
                str(error).replace("`$", "`$.meta_info.output_token_logprobs")
            ) from None
    if rows is None:
        return None
    ids = [row.token_id for row in rows]
    return ids, array("i", ids), array("d", (row.log_prob for row in rows))


def _read_scored_tokens(
    meta: _MetaInfoAnswer[Any], request: GenerateRequest
) -> tuple[list[int], array[int], array[float]]:
    """Return the token ids, as a list and as an array, and the log-probs of the given tokens. Raise
    ValueError where the server did not score just these.
    """
    rows = (meta.input_token_logprobs or [])[-request.num_given :]
    wanted = request.prompt_ids[-request.num_given :]
    ids = [token for _, token, _ in rows]
    values = [value for value, _, _ in rows if value is not None]
    if tuple(ids) != tuple(wanted) or len(values) != len(ids):
        raise ValueError(
            f"meta_info.input_token_logprobs tells of {len(values)} of {len(wanted)}"
            " tokens to score."
        )
    return ids, array("i", ids), array("d", values)


def _read_sample_and_write_routes(
    raw_answer: Any, request: GenerateRequest, version_prefix: str
) -> GeneratedSample:
    """Return the sample of an SGLang answer, and write its expert routes to a file. A weight
    version without `version_prefix` becomes UNSYNCED. Raise ValueError where the answer disagrees
    with itself, lacks a field, or has a log-prob that is not finite.
    """
    answer = (
        raw_answer
        if isinstance(raw_answer, _SampleAnswer)
        else msgspec.convert(raw_answer, _SampleAnswer[list[_TokenAnswer] | None])
    )
    meta = answer.meta_info
    reason = meta.finish_reason.type
    if meta.finish_reason.matched == _NAN_REASON:
        raise ValueError(
            f"meta_info.finish_reason.matched is {_NAN_REASON!r}: the model's output is"
            " not a number."
        )
    is_scored = request.params.max_new_tokens == 0 and reason != "abort"
    found = (
        _read_scored_tokens(meta, request)
        if is_scored
        else _read_token_columns(meta.output_token_logprobs)
    )
    if found is None and reason != "abort":
        raise ValueError("meta_info.output_token_logprobs is missing.")
    ids, token_ids, values = found or ([], array("i"), array("d"))
    log_probs = np.asarray(values)
    if not np.isfinite(log_probs).all():
        index = int(np.isfinite(log_probs).argmin())
        raise ValueError(
            f"meta_info.output_token_logprobs[{index}]: the log-prob of token {ids[index]} is"
            f" {values[index]!r}, not a finite number."
        )
    if reason != "abort" and not is_scored and meta.completion_tokens != len(ids):
        raise ValueError(
            f"meta_info.output_token_logprobs has {len(ids)} entries, completion_tokens"
            f" is {meta.completion_tokens!r}."
        )
    if answer.output_ids is not None and not is_scored and answer.output_ids[: len(ids)] != ids:
        raise ValueError("output_ids and meta_info.output_token_logprobs name different tokens.")
    spans = (
        ()
        if is_scored
        else _parse_version_spans(meta.weight_versions or [], len(ids), version_prefix)
    )
    return GeneratedSample(
        token_ids=TokenColumn(np.asarray(token_ids)),
        log_probs=TokenColumn(log_probs),
        finish_reason=reason,
        policy_version=spans[0].version
        if spans
        else _parse_version(meta.weight_version, version_prefix),
        version_spans=spans,
        num_cached_tokens=meta.cached_tokens,
        num_retractions=meta.num_retractions,
        routes=_write_sample_routes(meta, request, len(token_ids)),
    )


def _write_sample_routes(
    meta: _MetaInfoAnswer[Any], request: GenerateRequest, num_tokens: int
) -> str:
    """Write the experts that the sample's tokens met to a file, and return its path; "" where none
    are wanted, and for aborted samples, which are generated again and whose routes may be of other
    tokens than were sent. Layers without experts are zeros, and rows of tokens that SGLang lost:
    readers of the file treat both as no routes. Raise ValueError where routes are missing or do not
    fit.
    """
    if not request.routes_dir or meta.finish_reason.type == "abort":
        return ""
    if meta.routed_experts is None:
        raise ValueError(
            "meta_info.routed_experts is missing; start the server with"
            " --enable-return-routed-experts (rollout.sglang.args.enable_return_routed_experts)."
        )
    ids = np.frombuffer(base64.b64decode(meta.routed_experts, validate=True), dtype="<i4")
    num_read = len(request.prompt_ids) + num_tokens - 1
    if num_read == 0 or ids.size % num_read:
        raise ValueError(f"meta_info.routed_experts has {ids.size} ids for {num_read} tokens.")
    routes = ids.reshape(num_read, -1)
    return write_route_file(request.routes_dir, routes, request.routes_bytes) if ids.size else ""


def make_version_name(version: int) -> str:
    """Return the name under which this process sets a server's version of the weights. No other
    process uses it, so that samples from weights of another run are not taken for this run's.
    """
    return f"{get_version_prefix()}{version}"


def get_version_prefix() -> str:
    """Return the prefix of this process's version names."""
    return _make_version_prefix(os.getpid())


@lru_cache(1)
def _make_version_prefix(pid: int) -> str:
    """Return a random prefix for this process, the same at each call; a forked process gets
    another.
    """
    return f"{secrets.token_hex(4)}-{pid}-"


def _parse_version(text: Any, version_prefix: str) -> int:
    """Return the version in a version name; UNSYNCED where the name lacks the prefix, because
    another process brought the weights.
    """
    number = str(text)
    return int(number[len(version_prefix) :]) if number.startswith(version_prefix) else UNSYNCED


def _parse_version_spans(
    raw_spans: Sequence[_VersionSpanAnswer], num_tokens: int, version_prefix: str
) -> tuple[VersionSpan, ...]:
    """Return the version spans of the tokens that were sent; () for servers that report none, or no
    tokens. SGLang can report more tokens of aborted samples than it sends: the last span is cut.
    Raise ValueError where the spans have gaps or end early.
    """
    spans: list[VersionSpan] = []
    end = 0
    for span in raw_spans:
        cut = min(span.end, num_tokens)
        if span.start != end:
            raise ValueError(
                f"meta_info.weight_versions is {raw_spans}: token {span.start} does not follow on."
            )
        if cut > span.start:
            spans.append(VersionSpan(_parse_version(span.version, version_prefix), span.start, cut))
        end = span.end
    if spans and spans[-1].end != num_tokens:
        raise ValueError(
            f"meta_info.weight_versions ends at token {spans[-1].end} of {num_tokens}."
        )
    return tuple(spans)


@dataclass(frozen=True)
class ServerLimits:
    """The limits of one server, as the server reports them."""

    vocab_size: int | None  # None: it does not say; ids are not checked then
    is_deterministic: bool

    def check_requests(self, requests: Sequence[GenerateRequest], server_name: str) -> None:
        """Raise EngineRequestError, with the value and the fix, for the first request that the
        server cannot serve.
        """
        for request in requests:
            problem = self._find_request_problem(request)
            if problem:
                raise EngineRequestError(f"{server_name}: {problem}")

    def _find_request_problem(self, request: GenerateRequest) -> str:
        """Return why the server cannot serve the request; "" where it can."""
        params = request.params
        if not request.prompt_ids:
            return "the prompt is empty: there is nothing to continue. Give it at least one token."
        if self.vocab_size is not None:
            for token in (min(request.prompt_ids), max(request.prompt_ids)):
                if not 0 <= token < self.vocab_size:
                    return (
                        f"token {token} of the prompt is not in the vocabulary of the engine's"
                        f" model (0 .. {self.vocab_size - 1}); prompts must be made with"
                        " its tokenizer."
                    )
        if params.max_new_tokens < 0:
            return f"max_new_tokens is {params.max_new_tokens}; it must be at least 0."
        if params.max_new_tokens == 0 and (
            request.num_given < 1 or params.temperature != 1 or request.routes_dir
        ):
            return SCORING_RULE
        if params.min_new_tokens > 0:
            return (
                f"min_new_tokens is {params.min_new_tokens}: SGLang bars stop tokens with the"
                " tokenizer, which a server that takes token ids does not load. Leave it at 0, or"
                " use the local engine."
            )
        if params.min_p > 0 and params.temperature > 0 and self.is_deterministic:
            return (
                f"min_p is {params.min_p:g}: SGLang has no seeded draw with min_p. Start it without"
                " enable_deterministic_inference, or set min_p to 0."
            )
        return ""


async def fetch_limits(http: HttpClient, timeout_s: float) -> ServerLimits:
    """Ask the server for its limits, in the loop of `rollout.http_client`. Raise EngineError."""
    info = (await http.send("GET", "/server_info", None, timeout_s)).parse_body()
    is_deterministic = isinstance(info, dict) and info.get("enable_deterministic_inference") is True
    return ServerLimits(await _probe_vocab_size(http, timeout_s), is_deterministic)


def fetch_limits_blocking(http: HttpClient, timeout_s: float) -> ServerLimits:
    """Ask the server for its limits as `fetch_limits` does, from a thread outside the loop, and
    wait for them.
    """
    return run_in_event_loop(fetch_limits(http, timeout_s), 2 * timeout_s)


def fetch_max_running_samples(http: HttpClient, timeout_s: float) -> int | None:
    """Ask the server how many samples it decodes at once, over all its data-parallel ranks; None
    where it does not say. Raise EngineError.
    """
    info = http.get("/server_info", timeout_s)
    states = info.get("internal_states") if isinstance(info, dict) else None
    found: list[Any] = [
        state.get(_MAX_RUNNING_KEY) for state in states or () if isinstance(state, dict)
    ]
    return (
        sum(found) if found and all(type(count) is int and count > 0 for count in found) else None
    )


async def _probe_vocab_size(http: HttpClient, timeout_s: float) -> int | None:
    """Return the vocabulary's size, learnt from the server's refusal of a token that no model has,
    since no endpoint reports it; None where the refusal does not say.
    """
    body = {
        "input_ids": [[0]],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [[_IMPOSSIBLE_TOKEN]],
    }
    try:
        (await http.send("POST", "/generate", json.dumps(body), timeout_s)).parse_body()
    except EngineRequestError as error:
        found = _VOCAB_RANGE_PATTERN.search(str(error))
        return int(found[1]) if found else None
    return None
