"""Requests and samples as JSON, on both ends of the local engine's HTTP interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest, SamplingParams, VersionSpan

STALE = " answered 503: STALE"  # part of what a client says where the server refuses for its weights
_FLOATS = ("temperature", "top_p", "min_p")
_INTS = ("max_new_tokens", "top_k", "min_new_tokens")


def requests_to_json(requests: Sequence[GenerateRequest], name: str = "") -> dict[str, Any]:
    """`name`: of the call, for an abort."""
    return {"requests": [asdict(request) for request in requests]} | ({"name": name} if name else {})


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
    unknown = set(params) - {f.name for f in fields(SamplingParams)}
    if unknown:
        raise ValueError(f"unknown sampling parameters {sorted(unknown)}.")
    if "max_new_tokens" not in params:
        raise ValueError("params need max_new_tokens (an integer).")
    for name, value in params.items():
        if name in _FLOATS and type(value) not in (int, float):
            raise ValueError(f"params.{name} must be a number, not {value!r}.")
        if name in _INTS and type(value) is not int:
            raise ValueError(f"params.{name} must be an integer, not {value!r}.")
    params |= {name: float(params[name]) for name in _FLOATS if name in params}
    params["stop_token_ids"] = _ints(params.get("stop_token_ids", []), "stop_token_ids")
    sampling = SamplingParams(**params)
    return GenerateRequest(_ints(raw["prompt_ids"], "prompt_ids"), _ints(raw["seeds"], "seeds"), sampling)


def requests_from_json(body: Any) -> list[GenerateRequest]:
    """Raises ValueError naming what is wrong."""
    if not isinstance(body, dict) or not isinstance(body.get("requests"), list):
        raise ValueError('the body must be {"requests": [...]}.')
    return [_request(raw) for raw in body["requests"]]


def name_from_json(body: dict[str, Any]) -> str:
    """Reads the name of the call; "": none was given. Raises ValueError."""
    name = body.get("name", "")
    if not isinstance(name, str):
        raise ValueError(f"name must be a string, not {name!r}.")
    return name


def names_from_json(body: dict[str, Any]) -> tuple[str, ...]:
    """Reads the names of the calls to abort; (): all. Raises ValueError."""
    names = body.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("names must be a list of strings.")
    return tuple(names)


def samples_to_json(groups: Sequence[Sequence[GeneratedSample]]) -> dict[str, Any]:
    return {"groups": [[asdict(sample) for sample in group] for group in groups]}


def samples_from_json(body: Any) -> list[list[GeneratedSample]]:
    """Raises ValueError when the body is not what `samples_to_json` makes."""
    try:
        return [[_sample(raw) for raw in group] for group in body["groups"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a list of groups of samples: {error!r}") from error


def _sample(raw: dict[str, Any]) -> GeneratedSample:
    spans = tuple(VersionSpan(**span) for span in raw["version_spans"])
    lists = {"token_ids": tuple(raw["token_ids"]), "log_probs": tuple(raw["log_probs"]), "version_spans": spans}
    return GeneratedSample(**{**raw, **lists})
