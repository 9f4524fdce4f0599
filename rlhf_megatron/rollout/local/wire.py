"""Requests and samples as JSON, on both ends of the local engine's HTTP interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest, SamplingParams


def requests_to_json(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    return {"requests": [asdict(request) for request in requests]}


def _ints(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{name} must be a list of integers.")
    return tuple(value)


def _request(raw: Any) -> GenerateRequest:
    if (
        not isinstance(raw, dict)
        or set(raw) != {"prompt_ids", "seeds", "params"}
        or not isinstance(raw["params"], dict)
    ):
        raise ValueError('a request must be {"prompt_ids": [...], "seeds": [...], "params": {...}}.')
    params = dict(raw["params"])
    unknown = set(params) - {"max_new_tokens", "temperature", "stop_token_ids"}
    if unknown:
        raise ValueError(f"unknown sampling parameters {sorted(unknown)}.")
    max_new_tokens, temperature = params.get("max_new_tokens"), params.get("temperature", 1.0)
    if type(max_new_tokens) is not int or type(temperature) not in (int, float):
        raise ValueError("params need max_new_tokens (an integer) and temperature (a number).")
    stop = _ints(params.get("stop_token_ids", []), "stop_token_ids")
    sampling = SamplingParams(max_new_tokens, float(temperature), stop)
    return GenerateRequest(_ints(raw["prompt_ids"], "prompt_ids"), _ints(raw["seeds"], "seeds"), sampling)


def requests_from_json(body: Any) -> list[GenerateRequest]:
    """Raises ValueError naming what is wrong."""
    if not isinstance(body, dict) or not isinstance(body.get("requests"), list):
        raise ValueError('the body must be {"requests": [...]}.')
    return [_request(raw) for raw in body["requests"]]


def samples_to_json(groups: Sequence[Sequence[GeneratedSample]]) -> dict[str, Any]:
    return {"groups": [[list(vars(sample).values()) for sample in group] for group in groups]}


def samples_from_json(body: Any) -> list[list[GeneratedSample]]:
    """Raises ValueError when the body is not what `samples_to_json` makes."""
    try:
        return [[GeneratedSample(tuple(ids), tuple(lps), *rest) for ids, lps, *rest in g] for g in body["groups"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a list of groups of samples: {error!r}") from error
