"""A function of the user's own, named by a dotted path or a file: the way to a reward without
touching this package.

It may be async. It gets, as keyword arguments, those of prompt, response, label, source, extra,
finish_reason, num_tokens and response_prefix that its signature has, also by verl's names, and
`kwargs`. `label` is text, `ground_truth` the label as the row has it. It returns a number, or a
mapping with the number "score" and further numbers for metrics.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

from rlhf_megatron.data.data_rows import JSON_LABEL_KEY
from rlhf_megatron.data.extra_columns import parse_extra
from rlhf_megatron.import_folders import add_import_folder, add_working_directory
from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint
from rlhf_megatron.rewards.scorers.reward_types import (
    FIELDS_BY_VERL_NAME,
    OWN_PROCESS,
    REWARDS,
    BadResultError,
    RewardResult,
    RewardSample,
    read_response,
)

# only where the signature names them: a function that passes **kwargs on knows nothing of them
ONLY_BY_NAME = ("response_prefix",)
NOT_OFFERED = ("special_tokens",)  # skip_special_tokens decides whether the response has them
GIVEN = (*(f.name for f in fields(RewardSample) if f.name not in NOT_OFFERED), *FIELDS_BY_VERL_NAME)
_FILES_LOCK = threading.Lock()  # environments import their tools in threads
NO_METRIC = (str, list, tuple, dict, type(None))
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class FunctionParams:
    path: str  # "package.module:function" or "path/to/file.py:function" (beside the YAML file)
    kwargs: dict[str, Any] = field(default_factory=dict)  # further keyword arguments
    max_memory_gib: float = 4.0  # that the worker process may use
    # that it asks itself: each sample takes a turn of its limits, and is masked if late
    server: RewardEndpoint | None = None
    skip_special_tokens: bool = True  # false: `response` has its special tokens
    response_pattern: ClassVar[str | None] = None
    reads_response_prefix: ClassVar[bool] = False  # the function may take it by name

    def __post_init__(self) -> None:
        """Raise ValueError for a path without a function, a memory limit out of range, or kwargs
        with the names of a sample's fields.
        """
        module, _, name = self.path.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(
                f"path ({self.path!r}) must name a module and a function in it; write"
                " package.module:function or path/to/file.py:function."
            )
        if not self.max_memory_gib > 0:
            raise ValueError(
                f"max_memory_gib ({self.max_memory_gib}) must be above 0; 4 is the default."
            )
        clash = sorted(set(self.kwargs) & set(GIVEN))
        if clash:
            raise ValueError(
                f"kwargs ({clash}) must not have the names of what a sample has; rename them."
            )

    @property
    def waits_s(self) -> float | None:
        """Return the seconds that a sample may wait for the function's server, after which it is
        masked; None without a server.
        """
        return None if self.server is None else self.server.max_wait_s

    def prepare(self) -> None:
        """Import the module and check the function's signature. Raise ValueError on failure."""
        load_user_function(self.path, tuple(self.kwargs))


@cache
def load_user_function(
    path: str, kwargs: tuple[str, ...]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Import the module or file of `path` once. Return the function, and the names of the sample's
    fields that it takes. `kwargs` are the names of the further arguments. Raise ValueError where
    there is no such function, or its signature does not fit.
    """
    function = import_user_function(path)
    return function, _find_accepted_fields(path, function, kwargs)


def import_user_function(path: str) -> Callable[..., Any]:
    """Import the module or file of `path`, "package.module:function" or "path/to/file.py:function",
    and return the function. Raise ValueError where there is none.
    """
    module_name, _, name = path.rpartition(":")
    module = (
        _import_file(path, module_name)
        if module_name.endswith(".py")
        else _import_module(path, module_name)
    )
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"path ({path!r}): the module has no {name!r}; its functions"
            f" are {', '.join(known) or 'none'}."
        )
    if not callable(function):
        raise ValueError(
            f"path ({path!r}): {name!r} is a {type(function).__name__}, and must be a function."
        )
    return cast(Callable[..., Any], function)


def _import_module(path: str, name: str) -> Any:
    """Import a module by its dotted name, with the working directory on sys.path. Raise ValueError
    where the module does not exist; errors that the module raises pass.
    """
    add_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # something that the module itself imports: its traceback tells
        raise ValueError(
            f"path ({path!r}): there is no module {error.name!r} in {os.getcwd()} or among the"
            " installed packages; correct it, or name the file: path/to/file.py:function."
        ) from error


def _import_file(path: str, file: str) -> ModuleType:
    """Import a Python file as a module of its stem, with its folder on sys.path. Raise ValueError
    where the file does not exist.
    """
    location = Path(file).expanduser().resolve()
    if not location.is_file():
        raise ValueError(f"path ({path!r}): {location} is not a file; correct the path.")
    with _FILES_LOCK:
        return _execute_file(location)


@cache
def _execute_file(location: Path) -> ModuleType:
    """Execute a Python file once in this process, so that its functions share what it holds."""
    add_import_folder(str(location.parent))  # so that the file may import its neighbours
    spec = importlib.util.spec_from_file_location(location.stem, location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[location.stem] = module
    spec.loader.exec_module(module)
    return module


def _find_accepted_fields(
    path: str, function: Callable[..., Any], kwargs: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the sample's fields that a function takes. Raise ValueError where it
    needs an argument that is neither a field nor in `kwargs`, or does not take one of `kwargs`.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in NAMED}
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    missing = [name for name in needed if name not in (*GIVEN, *kwargs) or name not in names]
    if missing:
        raise ValueError(
            f"path ({path!r}): the function needs {', '.join(missing)}, which a sample does not"
            f" have; it may take {', '.join(GIVEN)} by name, and what stands in kwargs."
        )
    unused = [name for name in kwargs if name not in names]
    if unused and not takes_all:
        raise ValueError(
            f"path ({path!r}): the function does not take {', '.join(unused)} of kwargs;"
            " remove that."
        )
    return tuple(
        name
        for name in GIVEN
        if name in names or (takes_all and name not in (*FIELDS_BY_VERL_NAME, *ONLY_BY_NAME))
    )


@REWARDS.register("function", FunctionParams, needs=(OWN_PROCESS,))
def score_by_user_function(sample: RewardSample, params: FunctionParams) -> RewardResult:
    """Score with the user's function. The worker masks a sample for which the function raises; the
    policy is not blamed.
    """
    call, names = load_user_function(params.path, tuple(params.kwargs))
    sample = replace(sample, response=read_response(sample, params))
    given: dict[str, Any] = {
        name: getattr(sample, FIELDS_BY_VERL_NAME.get(name, name)) for name in names
    }
    if {"extra", "extra_info", "ground_truth"} & given.keys():
        extra = parse_extra(sample.extra)
        label = json.loads(sample.label) if extra.pop(JSON_LABEL_KEY, False) else sample.label
        parsed = {"extra": extra, "ground_truth": label}
        if "extra_info" in given:
            info = extra.get("extra_info")
            parsed["extra_info"] = {} if info is None else info
        given |= {name: value for name, value in parsed.items() if name in given}
    with params.server.hold_turn() if params.server is not None else nullcontext():
        value = call(**given, **params.kwargs)
        return convert_user_result(
            _get_event_loop().run_until_complete(value) if inspect.iscoroutine(value) else value
        )


@cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop for async functions, made at the first call."""
    return asyncio.new_event_loop()


def convert_user_result(value: object) -> RewardResult:
    """Return the RewardResult for the value that a user's function returned: a number, or a mapping
    with "score". Other numbers of the mapping become parts; text, lists, mappings and None are left
    out. Raise BadResultError where the score or a part is no number.
    """
    if not isinstance(value, Mapping):
        return RewardResult(_convert_number("what the function returned", value))
    if "score" not in value:
        raise BadResultError(
            f"what the function returned has no 'score', only {sorted(map(str, value))}."
        )
    others = {
        name: part
        for name, part in value.items()
        if name != "score" and not isinstance(part, NO_METRIC)
    }
    parts = {str(name): _convert_number(str(name), part) for name, part in others.items()}
    return RewardResult(_convert_number("score", value["score"]), parts=parts)


def _convert_number(name: str, value: object) -> float:
    """Return a number or boolean, also of numpy or torch, as a plain number. Raise BadResultError
    for others; text is no number, even if it reads as one.
    """
    try:
        plain = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):  # an array of several
        plain = None
    if not isinstance(plain, int | float):
        raise BadResultError(
            f"{name} ({value!r:.80}) must be a number, not {type(value).__name__}."
        )
    return plain if isinstance(plain, int) and not isinstance(plain, bool) else float(plain)
