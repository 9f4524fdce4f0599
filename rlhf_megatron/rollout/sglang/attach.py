"""Running SGLang servers that a run uses and does not own (`rollout.endpoints`): looked at, taken, given back as they
can go on serving. They are never killed nor started again.

A server is for one run at a time. Nothing keeps another one away, but samples of weights that another run has brought
are told by the name of their version (`samples.version_name`), and a weight update that is open is not joined."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlhf_megatron.config.rules.engines import is_this_machine
from rlhf_megatron.config.rules.model import dp_attention_problem
from rlhf_megatron.config.secrets import read_key
from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineRequestError, EngineTimeoutError
from rlhf_megatron.rollout.fleet.process import ServerProcess
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.client import SGLangEngine
from rlhf_megatron.rollout.sglang.environment import check_version, unfit
from rlhf_megatron.rollout.sglang.samples import limits_of
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT
from rlhf_megatron.rollout.sglang.weights import SGLangVerbs

if TYPE_CHECKING:
    from rlhf_megatron.rollout.fleet.start import EngineSetup

logger = logging.getLogger(__name__)

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
    dtype: str | None  # None: it does not say
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())


def look(address: EngineAddress, expected: Expected) -> Found:
    """Ask the server and compare. Raises EngineError where it is none, or does not let the run in; what does not fit is
    in `problems`."""
    http = HttpClient(address, address.api_key or address.token)
    info, model = _info(http, "/server_info", "tp_size"), _info(http, "/model_info", "model_path")
    problems: list[str] = []
    warnings: list[str] = []
    try:
        warning = check_version(str(info.get("version")), "the server")
        warnings += [warning] if warning is not None else []
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    problems += [f"its {name} is {value!r}: {why}; {fix}" for name, value, why, fix in unfit(info)]
    if problem := dp_attention_problem(read_json(expected.model_path / "config.json"), info):
        problems.append(problem)
    name = str(info.get("dtype"))
    dtype = None if name == "auto" else ALIASES.get(name, name)
    problems += [*_of_model(model, expected), *_of_tokenizer(info, expected), *_of_settings(info, expected)]
    if dtype is not None and dtype != expected.dtype:
        problems.append(dtype_problem(dtype, expected))
    has_loader = LOAD_FORMAT in (info.get("custom_weight_loader") or ())
    is_seeded = info.get("enable_deterministic_inference") is True
    if not is_seeded and not expected.is_deterministic:
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
    if info.get("enable_dp_attention") is True and not is_seeded and not has_loader:  # see loader.draw_apart
        problems.append(
            "its ranks under DP attention draw with the same random numbers, so that samples of a group would be the"
            f" same; start it with --custom-weight-loader {LOAD_FORMAT} or --enable-deterministic-inference"
        )
    return Found(
        tp_size=int(info["tp_size"]),
        lists_loader=has_loader,
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


def read_json(path: Path) -> dict[str, Any]:
    """{} for what cannot be read."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _info(http: HttpClient, path: str, must_have: str) -> dict[str, Any]:
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


UNFINISHED = "unfinished"  # weight version of a server that was left in the middle of a weight update
_TAKE_S = 90.0  # so long may a weight update be open that another run has begun
_VERB_S = 60.0
_GIVE_BACK_S = 30.0
_RETRY_S = 1.0


def endpoints_of(setup: EngineSetup) -> tuple[list[EngineAddress], Expected]:
    """The running servers of a run, and what they must fit. Raises ValueError for a key file that will not do."""
    sglang, model = setup.rollout.sglang, setup.model
    api_key = read_key(sglang.api_key_file, "rollout.sglang.api_key_file")
    admin_key = read_key(sglang.admin_api_key_file, "rollout.sglang.admin_api_key_file")
    tokenizer_path = Path(model.tokenizer_path or model.path)
    is_deterministic = setup.trainer.deterministic
    expected = Expected(Path(model.path), tokenizer_path, setup.dtype, is_deterministic, setup.num_tokens)
    return addresses_of(setup.rollout.endpoints, api_key, admin_key), expected


def addresses_of(endpoints: Sequence[str], api_key: str, admin_key: str) -> list[EngineAddress]:
    """Make the addresses without asking the servers. Without an admin key that of `--api-key` serves for all, as on
    the server.
    """
    token = admin_key or api_key
    return [
        EngineAddress(f"engine{index}", "sglang", url.rstrip("/"), token, api_key=api_key if api_key != token else "")
        for index, url in enumerate(endpoints)
    ]


def look_at_all(addresses: Sequence[EngineAddress], expected: Expected) -> list[Found]:
    """Changes nothing on the servers. Raises EngineError with everything that is wrong, of all of them."""
    with ThreadPoolExecutor(len(addresses)) as threads:
        futures = [threads.submit(look, address, expected) for address in addresses]
    problems: list[str] = []
    found: list[Found] = []
    for address, future in zip(addresses, futures, strict=True):
        try:
            found.append(future.result())
        except EngineError as error:
            problems.append(f"rollout.endpoints: {error}")
            continue
        problems += [_say(address, problem) for problem in found[-1].problems]
    if problems:
        raise EngineError("\n".join(problems))
    return found


class AttachedEngines:
    """A context manager: all servers are given back when it ends. See `fleet.process.EngineServers`."""

    processes: tuple[ServerProcess, ...] = ()  # the servers are not this run's

    def __init__(self, addresses: Sequence[EngineAddress], expected: Expected, transfer_dir: Path) -> None:
        """Takes all servers. Raises EngineError; all are given back then."""
        self.addresses: tuple[EngineAddress, ...] = ()
        found = look_at_all(addresses, expected)
        try:
            for address, facts in zip(addresses, found, strict=True):
                self.addresses += (address,)
                self.addresses = (*self.addresses[:-1], _take(address, facts, expected, transfer_dir))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give all back. Safe to call twice; does not raise where a server is gone."""
        addresses, self.addresses = self.addresses, ()
        for address in addresses:
            _give_back(address)

    def __enter__(self) -> AttachedEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _take(address: EngineAddress, facts: Found, expected: Expected, transfer_dir: Path) -> EngineAddress:
    for warning in facts.warnings:
        logger.warning("%s", _say(address, warning))
    address = replace(address, tp_size=facts.tp_size, is_attached=True)
    _recover(address)
    SGLangEngine(address, transfer_dir).probe()
    model = _ask_loader(address, transfer_dir) if facts.lists_loader else None
    vocab_size = limits_of(HttpClient(address, address.api_key or address.token), _VERB_S).vocab_size
    known = [model or {}, {} if vocab_size is None else {"vocab_size": vocab_size}]
    problems = [problem for found in known for problem in compare_model(found, expected)]
    if model is not None and model["dtype"] != expected.dtype and facts.dtype is None:
        problems.append(dtype_problem(model["dtype"], expected))
    if problems:
        raise EngineError("\n".join(_say(address, problem) for problem in problems))
    if model is None:
        logger.warning("%s", _say(address, _without_loader(facts, transfer_dir)))
    takes_parts = model is not None and not model.get("is_quantised", True)
    return replace(address, has_loader=model is not None, takes_parts=takes_parts)


def _say(address: EngineAddress, problem: str) -> str:
    return f"rollout.endpoints ({address.url}): {problem.rstrip('.')}."


def _without_loader(facts: Found, transfer_dir: Path) -> str:
    if facts.lists_loader:
        return (
            "its weight loader does not answer, since it cannot reach the transfer directory"
            f" ({transfer_dir}); set rollout.transfer_dir to the RLHF_MEGATRON_TRANSFER_DIR that it was started with,"
            " and run both as one user. Weights go by SGLang's own update calls, and a probe follows each sync"
        )
    return (
        "it was started without --custom-weight-loader: weights go by SGLang's own update calls, and a probe follows"
        " each sync instead of digests of what stands in it"
    )


def _recover(address: EngineAddress) -> None:
    """Out of what a run that was killed has left: requests, an open weight update, a pause. Raises EngineError."""
    http = HttpClient(address)
    try:
        http.post("/abort_request", {"abort_all": True}, _VERB_S)
        if not _could_begin(http):
            logger.warning("%s", _say(address, f"a weight update is open in it; waiting {_TAKE_S:g} s for its end"))
            deadline = time.monotonic() + _TAKE_S
            while time.monotonic() < deadline and not _could_begin(http):
                time.sleep(_RETRY_S)
        _end_update(http, _VERB_S)
        http.post("/continue_generation", {}, _VERB_S)
    except EngineRequestError as error:
        if " answered 401" not in str(error) and " answered 403" not in str(error):
            raise
        raise EngineError(
            f"rollout.endpoints: {address.url} refuses the admin key; name a file that holds its --admin-api-key in"
            " rollout.sglang.admin_api_key_file (readable by you alone)."
        ) from error


def _could_begin(http: HttpClient) -> bool:
    """False: a weight update is open, by a run that works or one that was killed. True: none was, but one is now."""
    try:
        http.post("/begin_weight_update", {}, _VERB_S)
    except EngineRequestError as error:
        if " answered 400" not in str(error):
            raise
        return False
    return True


def _end_update(http: HttpClient, timeout_s: float) -> None:
    """Close the weight update that is open, if one is. What stands in the server then is part of two policies."""
    try:
        http.post("/end_weight_update", {}, timeout_s)
    except EngineRequestError as error:
        if "no weight-update session is open" not in str(error):
            raise
        return
    http.post("/update_weight_version", {"new_version": UNFINISHED, "abort_all_requests": False}, timeout_s)


def _ask_loader(address: EngineAddress, transfer_dir: Path) -> dict[str, Any] | None:
    """Asks the loader in each rank for its model; None where no receipt of it arrives here."""
    http = HttpClient(address)
    http.post("/begin_weight_update", {}, _VERB_S)
    try:
        receipts = SGLangVerbs(address, transfer_dir, _VERB_S).order({"describe": True}, "question for its model")
    except EngineError as error:
        logger.debug("%s", error)
        return None
    finally:
        http.post("/end_weight_update", {}, _VERB_S)
    return dict(receipts[0]["model"])


def _give_back(address: EngineAddress) -> None:
    http = HttpClient(address)
    try:
        http.post("/abort_request", {"abort_all": True}, _GIVE_BACK_S)
        _end_update(http, _GIVE_BACK_S)
        http.post("/continue_generation", {}, _GIVE_BACK_S)
    except EngineError as error:
        logger.warning("%s could not be given back: %s", address.url, error)
