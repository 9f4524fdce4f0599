"""Running SGLang servers that a run uses and does not own (`rollout.endpoints`): looked at, taken,
given back as they can go on serving. They are never killed nor started again.

A server is for one run at a time. Nothing keeps another run away, but the name of a version
(`sglang_samples.make_version_name`) shows which samples come from another run's weights, and a run
does not join a weight update that is open.
"""

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

from rlhf_megatron.config.rules.engine_rules import is_local_host
from rlhf_megatron.config.rules.model_rules import describe_dp_attention_problem
from rlhf_megatron.config.secrets import read_key_file
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
)
from rlhf_megatron.rollout.fleet.server_process import ServerProcess
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_environment import (
    check_sglang_version,
    find_unfit_arguments,
)
from rlhf_megatron.rollout.sglang.sglang_samples import fetch_limits_blocking
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import SGLangWeightVerbs

if TYPE_CHECKING:
    from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup

logger = logging.getLogger(__name__)

_SAMPLE_SETTINGS = (
    "data.max_prompt_length + data.max_response_length, or rollout.environment.max_tokens in place"
    " of the latter"
)

INSPECT_TIMEOUT_S = 60.0
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # of weight types
IGNORED_CONFIG_KEYS = (  # what may differ between the config.json of server and run
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

# weight version of a server that was left in the middle of a weight update
UNFINISHED_VERSION = "unfinished"
_OPEN_UPDATE_WAIT_S = 90.0  # so long may a weight update be open that another run has begun
_VERB_TIMEOUT_S = 60.0
_RELEASE_TIMEOUT_S = 30.0
_RETRY_S = 1.0


@dataclass(frozen=True)
class ServerRequirements:
    """The model and settings of the run, which its servers must fit."""

    model_path: Path
    tokenizer_path: Path
    dtype: str  # of the engine's weights
    is_deterministic: bool = False  # trainer.deterministic
    max_sample_tokens: int = 0  # of the longest sample


@dataclass(frozen=True)
class ServerDescription:
    """A server's description of itself."""

    tp_size: int
    lists_loader: bool  # it was started with the run's weight loader
    dtype: str | None  # None: it does not say
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())


def inspect_server(address: EngineAddress, requirements: ServerRequirements) -> ServerDescription:
    """Read the server's description of itself and compare it with what the run needs. What does not
    fit stands in `problems` of the result. Raise EngineError where the address is no SGLang server,
    or it refuses the key.
    """
    http = HttpClient(address, address.api_key or address.token)
    info = _fetch_info(http, "/server_info", "tp_size")
    model = _fetch_info(http, "/model_info", "model_path")
    problems: list[str] = []
    warnings: list[str] = []
    try:
        warning = check_sglang_version(str(info.get("version")), "the server")
        warnings += [warning] if warning is not None else []
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    problems += [
        f"its {name} is {value!r}: {why}; {fix}"
        for name, value, why, fix in find_unfit_arguments(info)
    ]
    if problem := describe_dp_attention_problem(
        read_json_or_empty(requirements.model_path / "config.json"), info
    ):
        problems.append(problem)
    name = str(info.get("dtype"))
    dtype = None if name == "auto" else DTYPE_ALIASES.get(name, name)
    problems += [
        *_find_served_model_problems(model, requirements),
        *_find_tokenizer_problems(info, requirements),
        *_find_settings_problems(info, requirements),
    ]
    if dtype is not None and dtype != requirements.dtype:
        problems.append(describe_dtype_problem(dtype, requirements))
    has_loader = LOAD_FORMAT in (info.get("custom_weight_loader") or ())
    is_seeded = info.get("enable_deterministic_inference") is True
    if not is_seeded and not requirements.is_deterministic:
        warnings.append(
            "it ignores the seed of a sample, since it was started without"
            " --enable-deterministic-inference: samples of a group differ, but a run does"
            " not repeat."
        )
    if (
        address.url.startswith("http:")
        and not is_local_host(urlsplit(address.url).hostname or "")
        and (address.token or address.api_key)
    ):
        warnings.append(
            "its keys go over the network in clear, since the address begins with http; use https."
        )
    # see loader.draw_apart
    if info.get("enable_dp_attention") is True and not is_seeded and not has_loader:
        problems.append(
            "its ranks under DP attention draw with the same random numbers, so that samples of a"
            f" group would be the same; start it with --custom-weight-loader {LOAD_FORMAT}"
            " or --enable-deterministic-inference"
        )
    return ServerDescription(
        tp_size=int(info["tp_size"]),
        lists_loader=has_loader,
        dtype=dtype,
        warnings=tuple(warnings),
        problems=tuple(problems),
    )


def describe_dtype_problem(dtype: str, requirements: ServerRequirements) -> str:
    """Return the message for a server whose weight type is `dtype` instead of the run's."""
    return (
        f"its weights are {dtype}, but rollout.dtype (or model.dtype) is {requirements.dtype};"
        f" start it with --dtype {requirements.dtype}, or set rollout.dtype"
    )


def find_model_problems(
    server_config: Mapping[str, Any], requirements: ServerRequirements
) -> Iterator[str]:
    """Yield a message where `server_config`, by the names of config.json, differs from the run's
    model. Keys that only one side has are not compared.
    """
    ours = read_json_or_empty(requirements.model_path / "config.json")
    names = [name for name in server_config if name in ours and name not in IGNORED_CONFIG_KEYS]
    different = [
        name
        for name in names
        if None not in (server_config[name], ours[name]) and server_config[name] != ours[name]
    ]
    if different:
        parts = ", ".join(
            f"{name} {_shorten_text(server_config[name])} instead of {_shorten_text(ours[name])}"
            for name in different
        )
        yield (
            f"it serves another model than model.path ({requirements.model_path}): {parts}; start"
            " it with that model"
        )


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; {} where the file cannot be read or holds no object."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _fetch_info(http: HttpClient, path: str, required_key: str) -> dict[str, Any]:
    """Return the JSON object that the server answers at `path`. Raise EngineError with the fix
    where there is no server, a wrong key, or an answer without `required_key`.
    """
    url = http.address.url
    try:
        answer = http.get(path, INSPECT_TIMEOUT_S)
    except EngineRequestError as error:
        if " answered 401" in str(error) or " answered 403" in str(error):
            fix = (
                "put its --api-key into the file"
                if http.address.api_key
                else "name a file that holds its --api-key in"
            )
            raise EngineError(
                f"{url} refuses the key; {fix} rollout.sglang.api_key_file (readable by you alone)."
            ) from error
        raise EngineError(
            f"{url} is not an SGLang server ({error}); correct the address."
        ) from error
    except EngineTimeoutError as error:
        raise EngineError(
            f"{error} Is it stuck? Start it again, or correct the address."
        ) from error
    except EngineError as error:
        if "no connection" in str(error):
            raise EngineError(f"{error} Start the server first, or correct the address.") from error
        raise EngineError(
            f"{url} is not an SGLang server ({error}); correct the address."
        ) from error
    if not isinstance(answer, dict) or required_key not in answer:
        raise EngineError(
            f"{url} is not an SGLang server: its {path} says {_shorten_text(answer)}; correct the"
            " address (a router is not a server either: name the servers behind it)."
        )
    return answer


def _find_served_model_problems(
    model_info: Mapping[str, Any], requirements: ServerRequirements
) -> Iterator[str]:
    """Yield the problems of the served model, by the server's architectures, and by its own
    config.json where this machine can read that.
    """
    ours = read_json_or_empty(requirements.model_path / "config.json")
    theirs = model_info.get("architectures")
    wanted = ours.get("architectures")
    if theirs and wanted and set(theirs).isdisjoint(wanted):
        names = f"{', '.join(theirs)} instead of {', '.join(wanted)}"
        yield (
            f"it serves another model than model.path ({requirements.model_path}): {names}; start"
            " it with that model"
        )
        return
    readable = read_json_or_empty(Path(str(model_info["model_path"])) / "config.json")
    yield from find_model_problems(
        {**readable, "model_type": model_info.get("model_type")}, requirements
    )


def _find_tokenizer_problems(
    server_info: Mapping[str, Any], requirements: ServerRequirements
) -> Iterator[str]:
    """Yield a problem where the server has another tokenizer than the run, whose end-of-sequence
    tokens would end samples. A server that was started with --skip-tokenizer-init has none.
    """
    if server_info.get("skip_tokenizer_init"):
        return
    path = Path(str(server_info.get("tokenizer_path")))
    theirs, ours = (
        read_json_or_empty(place / "tokenizer.json")
        for place in (path, requirements.tokenizer_path)
    )
    if theirs and ours and theirs.get("model") != ours.get("model"):
        yield (
            f"it has another tokenizer ({path}) than the run ({requirements.tokenizer_path});"
            f" start it with --tokenizer-path {requirements.tokenizer_path}, or"
            " with --skip-tokenizer-init"
        )


def _find_settings_problems(
    server_info: Mapping[str, Any], requirements: ServerRequirements
) -> Iterator[str]:
    """Yield the problems of a server that is not deterministic where the run must be, or whose
    cache or context is too small for the longest sample.
    """
    if requirements.is_deterministic:
        if server_info.get("device") == "cpu":
            yield (
                "trainer.deterministic needs batch-invariant kernels, which SGLang has not on a"
                " CPU; set trainer.deterministic: false"
            )
        elif server_info.get("enable_deterministic_inference") is not True:
            yield "trainer.deterministic is set; start it with --enable-deterministic-inference"
    room = server_info.get("max_total_num_tokens")
    if isinstance(room, int) and room < requirements.max_sample_tokens:
        yield (
            f"its key-value cache has room for {room} tokens, the longest sample has"
            f" {requirements.max_sample_tokens} ({_SAMPLE_SETTINGS}); start it with more"
            " (--mem-fraction-static, --max-total-tokens), or lower these settings"
        )
    longest = server_info.get("context_length")
    if isinstance(longest, int) and longest < requirements.max_sample_tokens:
        yield (
            f"its --context-length is {longest}, the longest sample has"
            f" {requirements.max_sample_tokens} tokens ({_SAMPLE_SETTINGS}); start it with more, or"
            " lower these settings"
        )


def _shorten_text(value: object) -> str:
    """Return the text of the value, with at most 80 characters."""
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."


def resolve_endpoints(setup: EngineSetup) -> tuple[list[EngineAddress], ServerRequirements]:
    """Return the addresses of the servers in rollout.endpoints, and the requirements that they must
    fit. Ask no server. Raise ValueError for a key file that cannot be used.
    """
    sglang = setup.rollout.sglang
    model = setup.model
    api_key = read_key_file(sglang.api_key_file, "rollout.sglang.api_key_file")
    admin_key = read_key_file(sglang.admin_api_key_file, "rollout.sglang.admin_api_key_file")
    tokenizer_path = Path(model.tokenizer_path or model.path)
    is_deterministic = setup.trainer.deterministic
    expected = ServerRequirements(
        Path(model.path), tokenizer_path, setup.dtype, is_deterministic, setup.max_sample_tokens
    )
    return make_endpoint_addresses(setup.rollout.endpoints, api_key, admin_key), expected


def make_endpoint_addresses(
    endpoints: Sequence[str], api_key: str, admin_key: str
) -> list[EngineAddress]:
    """Return the addresses of these servers without asking them. An empty admin key means that
    `api_key` serves for all verbs, as on the server.
    """
    token = admin_key or api_key
    return [
        EngineAddress(
            f"engine{index}",
            "sglang",
            url.rstrip("/"),
            token,
            api_key=api_key if api_key != token else "",
        )
        for index, url in enumerate(endpoints)
    ]


def inspect_all_servers(
    addresses: Sequence[EngineAddress], requirements: ServerRequirements
) -> list[ServerDescription]:
    """Inspect all servers at once and return their descriptions; change nothing on them. Raise
    EngineError with all problems of all servers.
    """
    with ThreadPoolExecutor(len(addresses)) as threads:
        futures = [threads.submit(inspect_server, address, requirements) for address in addresses]
    problems: list[str] = []
    found: list[ServerDescription] = []
    for address, future in zip(addresses, futures, strict=True):
        try:
            found.append(future.result())
        except EngineError as error:
            problems.append(f"rollout.endpoints: {error}")
            continue
        problems += [_format_problem(address, problem) for problem in found[-1].problems]
    if problems:
        raise EngineError("\n".join(problems))
    return found


class AttachedEngines:
    """Running servers that the run uses without owning them. A context manager that gives all
    servers back at its end, with the interface of `server_process.EngineServers` that a fleet
    needs.
    """

    processes: tuple[ServerProcess, ...] = ()  # the servers are not this run's

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        requirements: ServerRequirements,
        transfer_dir: Path,
    ) -> None:
        """Inspect and take all servers. Raise EngineError where one does not fit; all are given
        back then.
        """
        self.addresses: tuple[EngineAddress, ...] = ()
        found = inspect_all_servers(addresses, requirements)
        try:
            for address, facts in zip(addresses, found, strict=True):
                self.addresses += (address,)
                self.addresses = (
                    *self.addresses[:-1],
                    _attach_server(address, facts, requirements, transfer_dir),
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give all servers back: abort requests, end an open weight update, continue generation.
        Safe to call twice; log a warning where a server is gone.
        """
        addresses = self.addresses
        self.addresses = ()
        for address in addresses:
            _release_server(address)

    def __enter__(self) -> AttachedEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _attach_server(
    address: EngineAddress,
    description: ServerDescription,
    requirements: ServerRequirements,
    transfer_dir: Path,
) -> EngineAddress:
    """Recover the server from an earlier run, check its model and loader, and return its address
    with the facts that were learnt. Log warnings. Raise EngineError where it does not fit.
    """
    for warning in description.warnings:
        logger.warning("%s", _format_problem(address, warning))
    address = replace(address, tp_size=description.tp_size, is_attached=True)
    _recover_server(address)
    SGLangEngine(address, transfer_dir).require_endpoints()
    model = _fetch_loader_model(address, transfer_dir) if description.lists_loader else None
    vocab_size = fetch_limits_blocking(
        HttpClient(address, address.api_key or address.token), _VERB_TIMEOUT_S
    ).vocab_size
    known = [model or {}, {} if vocab_size is None else {"vocab_size": vocab_size}]
    problems = [problem for found in known for problem in find_model_problems(found, requirements)]
    if model is not None and model["dtype"] != requirements.dtype and description.dtype is None:
        problems.append(describe_dtype_problem(model["dtype"], requirements))
    if problems:
        raise EngineError("\n".join(_format_problem(address, problem) for problem in problems))
    if model is None:
        logger.warning(
            "%s", _format_problem(address, _explain_missing_loader(description, transfer_dir))
        )
    takes_parts = model is not None and not model.get("is_quantised", True)
    return replace(address, has_loader=model is not None, takes_parts=takes_parts)


def _format_problem(address: EngineAddress, problem: str) -> str:
    """Return the problem as a sentence that names the server's address."""
    return f"rollout.endpoints ({address.url}): {problem.rstrip('.')}."


def _explain_missing_loader(description: ServerDescription, transfer_dir: Path) -> str:
    """Return the warning for a server whose weight loader is missing or does not answer."""
    if description.lists_loader:
        return (
            "its weight loader does not answer, since it cannot reach the transfer directory"
            f" ({transfer_dir}); set rollout.transfer_dir to the RLHF_MEGATRON_TRANSFER_DIR that"
            " it was started with, and run both as one user. Weights go by SGLang's own update"
            " calls, and a probe follows each sync"
        )
    return (
        "it was started without --custom-weight-loader: weights go by SGLang's own update calls,"
        " and a probe follows each sync instead of digests of what stands in it"
    )


def _recover_server(address: EngineAddress) -> None:
    """Clean up what a killed run may have left on the server: abort requests, end an open weight
    update (after waiting for another run's end of it), and end a pause. Raise EngineError.
    """
    http = HttpClient(address)
    try:
        http.post("/abort_request", {"abort_all": True}, _VERB_TIMEOUT_S)
        if not _try_begin_update(http):
            logger.warning(
                "%s",
                _format_problem(
                    address,
                    f"a weight update is open in it; waiting {_OPEN_UPDATE_WAIT_S:g} s for its end",
                ),
            )
            deadline = time.monotonic() + _OPEN_UPDATE_WAIT_S
            while time.monotonic() < deadline and not _try_begin_update(http):
                time.sleep(_RETRY_S)
        _end_open_update(http, _VERB_TIMEOUT_S)
        http.post("/continue_generation", {}, _VERB_TIMEOUT_S)
    except EngineRequestError as error:
        if " answered 401" not in str(error) and " answered 403" not in str(error):
            raise
        raise EngineError(
            f"rollout.endpoints: {address.url} refuses the admin key; name a file that holds its"
            " --admin-api-key in rollout.sglang.admin_api_key_file (readable by you alone)."
        ) from error


def _try_begin_update(http: HttpClient) -> bool:
    """Begin a weight update on the server. Return False where one is open already, of a run that
    works or was killed; True where one was begun now.
    """
    try:
        http.post("/begin_weight_update", {}, _VERB_TIMEOUT_S)
    except EngineRequestError as error:
        if " answered 400" not in str(error):
            raise
        return False
    return True


def _end_open_update(http: HttpClient, timeout_s: float) -> None:
    """Close the weight update that is open, if there is one, and name the server's version
    "unfinished", since it then holds parts of two policies.
    """
    try:
        http.post("/end_weight_update", {}, timeout_s)
    except EngineRequestError as error:
        if "no weight-update session is open" not in str(error):
            raise
        return
    http.post(
        "/update_weight_version",
        {"new_version": UNFINISHED_VERSION, "abort_all_requests": False},
        timeout_s,
    )


def _fetch_loader_model(address: EngineAddress, transfer_dir: Path) -> dict[str, Any] | None:
    """Ask the loader in each rank for its model, and return the description of the first rank; None
    where no receipt arrives in the transfer directory.
    """
    http = HttpClient(address)
    http.post("/begin_weight_update", {}, _VERB_TIMEOUT_S)
    try:
        receipts = SGLangWeightVerbs(address, transfer_dir, _VERB_TIMEOUT_S).send_order(
            {"describe": True}, "question for its model"
        )
    except EngineError as error:
        logger.debug("%s", error)
        return None
    finally:
        http.post("/end_weight_update", {}, _VERB_TIMEOUT_S)
    return dict(receipts[0]["model"])


def _release_server(address: EngineAddress) -> None:
    """Abort the server's requests, end an open weight update and continue generation, so that it
    can serve others. Log a warning where that fails.
    """
    http = HttpClient(address)
    try:
        http.post("/abort_request", {"abort_all": True}, _RELEASE_TIMEOUT_S)
        _end_open_update(http, _RELEASE_TIMEOUT_S)
        http.post("/continue_generation", {}, _RELEASE_TIMEOUT_S)
    except EngineError as error:
        logger.warning("%s could not be given back: %s", address.url, error)
