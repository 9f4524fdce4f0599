"""Engines for the conformance suite. One server of a kind serves all files of the suite; it ends
with its last test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from rollout_tools import tiny_qwen2, tiny_qwen3, tiny_qwen3_moe, weights_of, write_buckets
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, TWO_RANKS, needs_sglang, sglang_python
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
)
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

PROMPT = (1, 2, 3, 4)
LONG = 200  # tokens of a response that takes a while
VOCAB = 32
END = 9  # the end-of-sequence token of the second model's configuration
WAIT_S = 60.0
T = TypeVar("T")
_MIDWAY_TRIES = 12


@dataclass
class Server:
    kind: str
    engine: InferenceEngine
    transfer_dir: Path
    version: int  # of the last sync
    # of a seed; that of seed 1 is what it was started with
    model: Callable[[int], PreTrainedModel] = tiny_qwen3
    num_caches: int = 1  # of prompts: it serves them in turn


Starter = Callable[[Path, Path], Iterator[Server]]


def start_local(model: Path, folder: Path) -> Iterator[Server]:
    transfer = folder / "transfer"
    transfer.mkdir()
    with start_local_engines(
        model, 1, folder, transfer_dir=transfer, startup_timeout_s=120
    ) as servers:
        yield Server("local", LocalEngine(servers.addresses[0]), transfer, -1)


def start_sglang(model: Path, folder: Path, **arguments: object) -> Iterator[Server]:
    transfer = folder / "transfer"
    transfer.mkdir()
    with start_sglang_engines(
        model,
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=transfer,
        dtype="float32",
        arguments={**CPU_ARGUMENTS, "load_format": "auto", "context_length": 256, **arguments},
        env={**CPU_ENV, **(TWO_RANKS if "tp_size" in arguments else {})},
        startup_timeout_s=STARTUP_S,
    ) as servers:
        num_caches = int(str(arguments.get("dp_size", 1)))
        yield Server(
            "sglang",
            SGLangEngine(servers.addresses[0], transfer),
            transfer,
            -1,
            num_caches=num_caches,
        )


start_dp_attention = partial(start_sglang, tp_size=2, dp_size=2, enable_dp_attention=True)


def with_end(make: Callable[[int], PreTrainedModel], seed: int) -> PreTrainedModel:
    """The model of a seed, whose configuration has an end-of-sequence token."""
    model = make(seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = END
    return model


# On a CPU stock SGLang has no prefix cache while seeds count: the second server has the one and
# not the other.
Kinds = Mapping[str, tuple[Starter, Callable[[int], PreTrainedModel]]]
SEEDED: Kinds = {
    "local": (start_local, tiny_qwen3),
    "sglang": (start_sglang, tiny_qwen3),
    "sglang_dp_attention": (start_dp_attention, tiny_qwen3_moe),
}
UNSEEDED: Kinds = {
    "local": (start_local, partial(with_end, tiny_qwen2)),
    "sglang": (
        partial(start_sglang, enable_deterministic_inference=False),
        partial(with_end, tiny_qwen2),
    ),
    "sglang_dp_attention": (
        partial(start_dp_attention, enable_deterministic_inference=False),
        partial(with_end, tiny_qwen3_moe),
    ),
}
_OF_SGLANG = [pytest.mark.dist, pytest.mark.sglang, needs_sglang]
ENGINES = [
    pytest.param("local", marks=pytest.mark.dist),
    pytest.param("sglang", marks=_OF_SGLANG),
    pytest.param("sglang_dp_attention", marks=[*_OF_SGLANG, pytest.mark.long]),
]
LONG_ENGINES = [
    ENGINES[0],
    pytest.param("sglang", marks=[*_OF_SGLANG, pytest.mark.long]),
    ENGINES[2],
]

_running: dict[tuple[str, str], tuple[Iterator[Server], Server]] = {}


def use_server(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with which seeds count."""
    return _use(request, factory, SEEDED)


def use_unseeded_server(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with which they do not, and whose model has an end-of-sequence token."""
    return _use(request, factory, UNSEEDED)


def _use(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, kinds: Kinds
) -> Iterator[Server]:
    key = (str(request.fixturename), request.param)
    if key not in _running:
        folder = factory.mktemp("conformance")
        start, model = kinds[request.param]
        model(1).save_pretrained(folder / "model")
        iterator = start(folder / "model", folder)
        _running[key] = (iterator, replace(next(iterator), model=model))
    yield _running[key][1]
    if not _is_used_later(request.session.items, str(request.node.path), key):
        iterator, server = _running.pop(key)
        server.engine.close()
        next(iterator, None)


def _is_used_later(items: list[pytest.Item], path: str, key: tuple[str, str]) -> bool:
    """By a file after this one. Files of the suite alone are looked at: others have fixtures of
    the same names.
    """
    files = list(dict.fromkeys(str(item.path) for item in items))
    later = {
        file
        for file in files[files.index(path) + 1 :]
        if Path(file).name.startswith("test_engine_conformance")
    }
    return any(
        str(item.path) in later
        and hasattr(item, "callspec")
        and item.callspec.params.get(key[0]) == key[1]
        for item in items
    )


def sync(server: Server, seed: int) -> None:
    """Send the weights of the server's model of that seed."""
    sync_weights(server, weights_of(server.model(seed)))


def sync_weights(server: Server, weights: Mapping[str, Tensor]) -> None:
    server.version += 1
    server.engine.begin_weight_update(server.version)
    for manifest in write_buckets(weights, server.transfer_dir, server.version):
        server.engine.update_weights(manifest)
    server.engine.commit_weight_update(server.version)


class Call:
    """One request that runs in a thread. `group` is empty where the engine refused, and
    `error` says why.
    """

    def __init__(self, engine: InferenceEngine, request: GenerateRequest, name: str = "") -> None:
        self.group: list[GeneratedSample] = []
        self.error = ""
        self._thread = threading.Thread(target=self._run, args=(engine, request, name), daemon=True)
        self._thread.start()

    def _run(self, engine: InferenceEngine, request: GenerateRequest, name: str) -> None:
        try:
            (self.group,) = engine.generate([request], WAIT_S, name)
        except EngineError as error:
            self.error = str(error)

    def runs_after(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self._thread.is_alive()

    def samples(self) -> list[GeneratedSample]:
        """Wait for them."""
        assert not self.runs_after(WAIT_S), "no answer"
        assert not self.error, self.error
        return self.group


def midway(attempt: Callable[[float], tuple[int, T]]) -> T:
    """The result of the first attempt that met a response in its middle. `attempt(delay)` says
    where it met it after `delay` seconds (-1: before its first token, 0: midway, 1: after its end):
    nothing tells how far an engine is.
    """
    delay = 0.1
    for _ in range(_MIDWAY_TRIES):
        place, result = attempt(delay)
        if place == 0:
            return result
        delay *= 0.6 if place > 0 else 1.7
    pytest.fail("no delay met the response in its middle")
