"""Is a running SGLang server one that this run can train with: reached, let in, of a version that will do, of the same
model, tokenizer and weight type, without what stands against training.

Only looks; what it asks changes nothing on the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_megatron.config.rules.engines import is_this_machine
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineRequestError, EngineTimeoutError
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.environment import check_version, unfit
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT

LOOK_TIMEOUT_S = 60.0
ALIASES = {"half": "float16", "float": "float32"}  # of weight types
NOT_OF_THE_MODEL = (  # what may differ between the config.json of server and run
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


@dataclass(frozen=True)
class Expected:
    """The model and settings of the run, which its servers must fit."""

    model_path: Path
    tokenizer_path: Path
    dtype: str  # of the engine's weights
    is_deterministic: bool = False  # trainer.deterministic
    num_tokens: int = 0  # of the longest sample


@dataclass(frozen=True)
class Found:
    """A server's description of itself."""

    tp_size: int
    lists_loader: bool  # it was started with the run's weight loader
    has_sessions: bool  # a lease can be taken
    dtype: str | None  # None: it does not say
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())


def look(address: EngineAddress, expected: Expected) -> Found:
    """Ask the server and compare. Raises EngineError where it is none, or does not let the run in; what does not fit is
    in `problems`."""
    http = HttpClient(address, address.api_key or address.token)
    info, model = _info(http, "/server_info", "tp_size"), _info(http, "/model_info", "model_path")
    paths = _paths(http)
    problems: list[str] = []
    warnings: list[str] = []
    try:
        warning = check_version(str(info.get("version")), "the server")
        warnings += [warning] if warning is not None else []
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    problems += [f"its {name} is {value!r}: {why}; {fix}" for name, value, why, fix in unfit(info)]
    dtype = _dtype(info)
    problems += [*_of_model(model, expected), *_of_tokenizer(info, expected), *_of_settings(info, expected)]
    if dtype is not None and dtype != expected.dtype:
        problems.append(dtype_problem(dtype, expected))
    if info.get("enable_deterministic_inference") is not True and not expected.is_deterministic:
        warnings.append(
            "it ignores the seed of a sample, since it was started without --enable-deterministic-inference: samples of"
            " a group differ, but a run does not repeat."
        )
    if (
        address.url.startswith("http:")
        and not is_this_machine(urlsplit(address.url).hostname or "")
        and (address.token or address.api_key)
    ):
        warnings.append("its keys go over the network in clear, since the address begins with http; use https.")
    loaders = info.get("custom_weight_loader") or []
    return Found(
        tp_size=int(info["tp_size"]),
        lists_loader=LOAD_FORMAT in loaders,
        has_sessions="/open_session" in paths and "/close_session" in paths,
        dtype=dtype,
        warnings=tuple(warnings),
        problems=tuple(problems),
    )


def dtype_problem(dtype: str, expected: Expected) -> str:
    return (
        f"its weights are {dtype}, but rollout.dtype (or model.dtype) is {expected.dtype}; start it with --dtype"
        f" {expected.dtype}, or set rollout.dtype"
    )


def compare_model(found: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """Yields the problem where `found`, by the names of config.json, is another model than the run's."""
    ours = read_json(expected.model_path / "config.json")
    names = [name for name in found if name in ours and name not in NOT_OF_THE_MODEL]
    different = [name for name in names if None not in (found[name], ours[name]) and found[name] != ours[name]]
    if different:
        parts = ", ".join(f"{name} {_short(found[name])} instead of {_short(ours[name])}" for name in different)
        yield f"it serves another model than model.path ({expected.model_path}): {parts}; start it with that model"


def vocabulary_problem(vocab_size: int | None, expected: Expected) -> Iterator[str]:
    """`vocab_size`: of the server."""
    if vocab_size is not None:
        yield from compare_model({"vocab_size": vocab_size}, expected)


def read_json(path: Path) -> dict[str, Any]:
    """{} for what cannot be read."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _info(http: HttpClient, path: str, must_have: str) -> dict[str, Any]:
    """Raises EngineError with the fix."""
    url = http.address.url
    try:
        answer = http.get(path, LOOK_TIMEOUT_S)
    except EngineRequestError as error:
        if " answered 401" in str(error) or " answered 403" in str(error):
            fix = (
                "put its --api-key into the file" if http.address.api_key else "name a file that holds its --api-key in"
            )
            raise EngineError(
                f"{url} refuses the key; {fix} rollout.sglang.api_key_file (readable by you alone)."
            ) from error
        raise EngineError(f"{url} is not an SGLang server ({error}); correct the address.") from error
    except EngineTimeoutError as error:
        raise EngineError(f"{error} Is it stuck? Start it again, or correct the address.") from error
    except EngineError as error:
        if "no connection" in str(error):
            raise EngineError(f"{error} Start the server first, or correct the address.") from error
        raise EngineError(f"{url} is not an SGLang server ({error}); correct the address.") from error
    if not isinstance(answer, dict) or must_have not in answer:
        raise EngineError(
            f"{url} is not an SGLang server: its {path} says {_short(answer)}; correct the address (a router is not a"
            " server either: name the servers behind it)."
        )
    return answer


def _paths(http: HttpClient) -> set[str]:
    try:
        return set(http.get("/openapi.json", LOOK_TIMEOUT_S)["paths"])
    except EngineRequestError as error:
        raise EngineError(f"{error}; start it without DISABLE_OPENAPI_DOC: it must tell what it can do.") from error


def _dtype(info: Mapping[str, Any]) -> str | None:
    name = str(info.get("dtype"))
    return None if name == "auto" else ALIASES.get(name, name)


def _of_model(model: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """Compares what the server tells, and its own config.json where that can be read here."""
    ours = read_json(expected.model_path / "config.json")
    theirs, wanted = model.get("architectures"), ours.get("architectures")
    if theirs and wanted and set(theirs).isdisjoint(wanted):
        names = f"{', '.join(theirs)} instead of {', '.join(wanted)}"
        yield f"it serves another model than model.path ({expected.model_path}): {names}; start it with that model"
        return
    readable = read_json(Path(str(model["model_path"])) / "config.json")
    yield from compare_model({**readable, "model_type": model.get("model_type")}, expected)


def _of_tokenizer(info: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """A server that was started with --skip-tokenizer-init has none; else its end-of-sequence tokens end samples."""
    if info.get("skip_tokenizer_init"):
        return
    path = Path(str(info.get("tokenizer_path")))
    theirs, ours = (read_json(place / "tokenizer.json") for place in (path, expected.tokenizer_path))
    if theirs and ours and theirs.get("model") != ours.get("model"):
        yield (
            f"it has another tokenizer ({path}) than the run ({expected.tokenizer_path}); start it with"
            f" --tokenizer-path {expected.tokenizer_path}, or with --skip-tokenizer-init"
        )


def _of_settings(info: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    if expected.is_deterministic:
        if info.get("device") == "cpu":
            yield (
                "trainer.deterministic needs batch-invariant kernels, which SGLang has not on a CPU; set"
                " trainer.deterministic: false"
            )
        elif info.get("enable_deterministic_inference") is not True:
            yield "trainer.deterministic is set; start it with --enable-deterministic-inference"
    room = info.get("max_total_num_tokens")
    if isinstance(room, int) and room < expected.num_tokens:
        yield (
            f"its key-value cache has room for {room} tokens, the longest sample has {expected.num_tokens}"
            " (data.max_prompt_length + max_response_length); start it with more (--mem-fraction-static,"
            " --max-total-tokens), or lower them"
        )
    longest = info.get("context_length")
    if isinstance(longest, int) and longest < expected.num_tokens:
        yield (
            f"its --context-length is {longest}, the longest sample has {expected.num_tokens} tokens"
            " (data.max_prompt_length + max_response_length); start it with more, or lower them"
        )


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."
