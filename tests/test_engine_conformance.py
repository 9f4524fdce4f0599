"""What every engine promises, run against each. An engine joins by a line in STARTERS."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rollout_tools import (
    assert_same,
    digests_of,
    reference_greedy,
    reference_log_probs,
    request,
    tiny_qwen2,
    tiny_qwen3,
    weights_of,
    with_entry,
    write_buckets,
)
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from table_samples import StateSource
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_megatron.checkpoint.load_model import load_hf, local_shards
from rlhf_megatron.models.attention import packed_documents
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.head import head_weight
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.world import create_world, destroy_world
from rlhf_megatron.rollout.engine import Engine, EngineError, EngineTimeoutError, GeneratedSample
from rlhf_megatron.rollout.local_client import LocalEngine
from rlhf_megatron.rollout.process import start_local_engines
from rlhf_megatron.rollout.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang_process import start_sglang_engines

PROMPT = (1, 2, 3, 4)
LONG = 200  # tokens of a response that takes a while


@dataclass
class Server:
    engine: Engine
    transfer_dir: Path
    version: int  # of the last sync


def start_local(model: Path, folder: Path) -> Iterator[Server]:
    transfer = folder / "transfer"
    transfer.mkdir()
    with start_local_engines(model, 1, folder, transfer_dir=transfer, startup_timeout_s=120) as servers:
        yield Server(LocalEngine(servers.addresses[0]), transfer, -1)


def start_sglang(model: Path, folder: Path) -> Iterator[Server]:
    transfer = folder / "transfer"
    transfer.mkdir()
    arguments = {**CPU_ARGUMENTS, "load_format": "auto", "context_length": 256}
    with start_sglang_engines(
        model,
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=transfer,
        dtype="float32",
        arguments=arguments,
        env=CPU_ENV,
        startup_timeout_s=STARTUP_S,
    ) as servers:
        yield Server(SGLangEngine(servers.addresses[0], transfer), transfer, -1)


STARTERS: dict[str, Callable[[Path, Path], Iterator[Server]]] = {"local": start_local, "sglang": start_sglang}
ENGINES = [
    pytest.param("local", marks=pytest.mark.dist),
    pytest.param("sglang", marks=[pytest.mark.dist, pytest.mark.sglang, needs_sglang]),
]


@pytest.fixture(scope="module", params=ENGINES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("conformance")
    tiny_qwen3(1).save_pretrained(folder / "model")
    running = STARTERS[request.param](folder / "model", folder)
    yield next(running)
    next(running, None)


@pytest.fixture
def synced(server: Server) -> Iterator[tuple[Server, PreTrainedModel]]:
    """The server with weights of `tiny_qwen3(1)` from a fresh sync."""
    sync(server, tiny_qwen3(1))
    yield server, tiny_qwen3(1)
    server.engine.resume()


def sync(server: Server, model: PreTrainedModel) -> None:
    sync_weights(server, weights_of(model))


def sync_weights(server: Server, weights: Mapping[str, Tensor]) -> None:
    server.version += 1
    server.engine.begin_update(server.version)
    for manifest in write_buckets(weights, server.transfer_dir, server.version):
        server.engine.update_weights(manifest)
    server.engine.commit_update(server.version)


def in_thread(engine: Engine, *requests: object) -> tuple[threading.Thread, list[list[list[GeneratedSample]]]]:
    """The results appear in the list; it stays empty where the engine refused."""
    out: list[list[list[GeneratedSample]]] = []

    def generate() -> None:
        with contextlib.suppress(EngineError):
            out.append(engine.generate(requests, 60))

    thread = threading.Thread(target=generate)
    thread.start()
    return thread, out


def test_serves_before_a_sync_with_its_own_weights(server: Server) -> None:
    if server.version == -1:
        assert server.engine.version() is None
        (sample,) = server.engine.generate([request(PROMPT, (1,), 5, 0.0)], 60)[0]
        assert sample.token_ids == reference_greedy(tiny_qwen3(1), PROMPT, 5)
        assert sample.policy_version == -1


def test_greedy_and_log_probs(synced: tuple[Server, PreTrainedModel]) -> None:
    server, model = synced
    requests = [request(PROMPT[: 1 + i], (5, 6), 6 + i, t) for i, t in enumerate((0.0, 0.7, 1.0))]
    groups = server.engine.generate(requests, 60)
    for sent, group in zip(requests, groups, strict=True):
        assert len(group) == 2
        for got in group:
            temperature = sent.params.temperature or 1.0
            expected = reference_log_probs(model, sent.prompt_ids, got.token_ids, temperature)
            assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
            assert got.finish_reason == "length" and got.policy_version == server.version
    assert groups[0][0].token_ids == reference_greedy(model, PROMPT[:1], 6)
    assert server.engine.generate([], 60) == []


def test_seeds(synced: tuple[Server, PreTrainedModel]) -> None:
    engine = synced[0].engine
    first, second = engine.generate([request(PROMPT, (1, 2, 3, 4), 16), request(PROMPT, (4, 3), 16)], 60)
    assert len({sample.token_ids for sample in first}) == 4
    assert_same(second, [first[3], first[2]])


def test_stop_token(synced: tuple[Server, PreTrainedModel]) -> None:
    server, model = synced
    free = reference_greedy(model, PROMPT, 12)
    stop = free[4]
    end = free.index(stop)
    (got,) = server.engine.generate([request(PROMPT, (1,), 12, 0.0, stop_token_ids=(stop,))], 60)[0]
    assert got.token_ids == free[: end + 1]
    assert got.finish_reason == "stop" and len(got.log_probs) == end + 1


def test_too_long_a_request_is_refused_with_numbers(synced: tuple[Server, PreTrainedModel]) -> None:
    with pytest.raises(EngineError, match="256"):
        synced[0].engine.generate([request(PROMPT, (1,), 300)], 60)
    synced[0].engine.health(10)


def test_pause_abort_resume(synced: tuple[Server, PreTrainedModel]) -> None:
    engine = synced[0].engine
    engine.pause()
    thread, out = in_thread(engine, request(PROMPT, (1, 2), 8))
    thread.join(0.7)
    assert thread.is_alive() and not out
    engine.resume()
    thread.join(30)
    assert [sample.finish_reason for sample in out[0][0]] == ["length"] * 2
    engine.pause()
    thread, out = in_thread(engine, request(PROMPT, (1, 2), 8))
    time.sleep(0.5)
    engine.abort()
    engine.resume()
    thread.join(30)
    assert [sample.finish_reason for sample in out[0][0]] == ["abort"] * 2


def test_abort_keeps_a_prefix(synced: tuple[Server, PreTrainedModel]) -> None:
    engine = synced[0].engine
    (full,) = engine.generate([request(PROMPT, (9,), LONG)], 60)[0]
    thread, out = in_thread(engine, request(PROMPT, (9,), LONG))
    time.sleep(0.1)
    engine.abort()
    thread.join(30)
    (sample,) = out[0][0]
    assert sample.token_ids == full.token_ids[: len(sample.token_ids)]
    assert sample.finish_reason == ("length" if len(sample.token_ids) == LONG else "abort")


def test_a_sync_changes_what_is_served(synced: tuple[Server, PreTrainedModel]) -> None:
    server, old = synced
    new = tiny_qwen3(2)
    sync(server, new)
    assert server.engine.version() == server.version
    (got,) = server.engine.generate([request(PROMPT, (1,), 10, 0.0)], 60)[0]
    assert got.token_ids == reference_greedy(new, PROMPT, 10) != reference_greedy(old, PROMPT, 10)
    expected = reference_log_probs(new, PROMPT, got.token_ids)
    assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
    assert got.policy_version == server.version
    assert server.engine.weight_digests() == digests_of(weights_of(new))
    assert not list(server.transfer_dir.glob("receipt*"))


def test_requests_in_flight_go_on_with_the_new_weights(synced: tuple[Server, PreTrainedModel]) -> None:
    server, old = synced
    new = tiny_qwen3(2)
    for delay in (0.1, 0.3, 0.05, 1.0, 0.02):  # until the sync meets the requests half-way
        sync(server, old)
        before = server.version
        thread, out = in_thread(server.engine, request(PROMPT, (1, 2), LONG, 0.0))
        time.sleep(delay)
        is_running = thread.is_alive()
        sync(server, new)
        thread.join(60)
        if is_running and out and all(sample.policy_version == before for sample in out[0][0]):
            break
    else:
        pytest.fail("no delay let the sync meet the requests half-way")
    for sample in out[0][0]:
        assert len(sample.token_ids) == LONG and sample.finish_reason == "length"
        assert sample.token_ids[0] == reference_greedy(old, PROMPT, 1)[0]
        prefix = (*PROMPT, *sample.token_ids[:-1])
        assert sample.token_ids[-1:] == reference_greedy(new, prefix, 1)  # recomputed with what stands now


def test_a_failed_sync_makes_it_stale_until_a_full_one(synced: tuple[Server, PreTrainedModel]) -> None:
    server, engine = synced[0], synced[0].engine
    version = server.version + 1
    first, second = write_buckets(weights_of(tiny_qwen3(3)), server.transfer_dir, version)
    engine.begin_update(version)
    with pytest.raises(EngineError):
        engine.generate([request(PROMPT, (1,), 4)], 60)
    engine.update_weights(first)
    with pytest.raises(EngineError, match="digest"):
        engine.update_weights(with_entry(second, 0, digest="0" * 16))
    with pytest.raises(EngineError):
        engine.commit_update(version)
    assert engine.version() is None
    with pytest.raises(EngineError, match="STALE"):
        engine.generate([request(PROMPT, (1,), 4)], 60)
    sync(server, tiny_qwen3(3))
    (got,) = engine.generate([request(PROMPT, (1,), 6, 0.0)], 60)[0]
    assert got.token_ids == reference_greedy(tiny_qwen3(3), PROMPT, 6)


def test_an_incomplete_sync_is_not_committed(synced: tuple[Server, PreTrainedModel]) -> None:
    server, engine = synced[0], synced[0].engine
    version = server.version + 1
    engine.begin_update(version)
    engine.update_weights(write_buckets(weights_of(tiny_qwen3(3)), server.transfer_dir, version)[0])
    with pytest.raises(EngineError):
        engine.commit_update(version)
    with pytest.raises(EngineError, match="STALE"):
        engine.generate([request(PROMPT, (1,), 4)], 60)


def test_an_old_version_is_refused(synced: tuple[Server, PreTrainedModel]) -> None:
    server = synced[0]
    for version in (server.version, server.version - 1):
        with pytest.raises(EngineError):
            server.engine.begin_update(version)
    assert server.engine.version() == server.version


def test_the_same_version_again_as_a_full_resync(synced: tuple[Server, PreTrainedModel]) -> None:
    server = synced[0]
    server.engine.begin_update(server.version, full_resync=True)
    for manifest in write_buckets(weights_of(tiny_qwen3(4)), server.transfer_dir, server.version):
        server.engine.update_weights(manifest)
    server.engine.commit_update(server.version)
    assert server.engine.version() == server.version


def test_release_and_resume_memory(synced: tuple[Server, PreTrainedModel]) -> None:
    server, engine = synced[0], synced[0].engine
    engine.release_memory()
    engine.resume_memory()
    sync(server, tiny_qwen3(5))
    (got,) = engine.generate([request(PROMPT, (1,), 6, 0.0)], 60)[0]
    assert got.token_ids == reference_greedy(tiny_qwen3(5), PROMPT, 6)


def test_a_deadline_is_kept(synced: tuple[Server, PreTrainedModel]) -> None:
    engine = synced[0].engine
    engine.pause()
    start = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=r"no answer within 0\.5 s"):
        engine.generate([request(PROMPT, (1,), 4)], 0.5)
    assert time.monotonic() - start < 3
    engine.resume()
    engine.health(10)
    assert engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"


@pytest.mark.parametrize("kind", ENGINES)
def test_biases_and_rescaled_angles_are_the_trainers(kind: str, tmp_path: Path) -> None:
    """A Qwen2 model: the engine's log-probs are those of the trainer's Megatron model, whose weights it was sent."""
    served, trained = tiny_qwen2(1), tiny_qwen2(2)
    served.save_pretrained(tmp_path / "model")
    hf_config = {**trained.config.to_dict(), "model_type": "qwen2"}
    table = table_for(hf_config)
    chunk = build_model(hf_config, create_world(Layout(1), torch.device("cpu")), torch.float32).chunks[0]
    load_hf([chunk], table, StateSource(weights_of(trained)), 0, 1)
    weights = {
        hf.name: tensor
        for rule, shard in local_shards([chunk], table)
        for hf, tensor in zip(rule.hf, rule.to_hf(shard), strict=True)
    }

    def trainers_log_probs(prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([[*prompt, *response]])
        length = ids.shape[1]
        document = packed_documents(torch.tensor([0, length], dtype=torch.int32), length, torch.arange(length))
        with torch.no_grad():
            hidden = chunk(ids, torch.arange(length)[None], None, packed_seq_params=document)[0]
            log_p = (hidden @ head_weight(chunk).T).log_softmax(-1)
        return log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]

    running = STARTERS[kind](tmp_path / "model", tmp_path)
    try:
        server = next(running)
        sync_weights(server, weights)
        assert server.engine.weight_digests() == digests_of(weights_of(trained))
        groups = server.engine.generate([request(PROMPT, (1, 2), LONG), request(PROMPT[:2], (3,), 20)], 60)
        for prompt, group in zip((PROMPT, PROMPT[:2]), groups, strict=True):
            for got in group:
                expected = trainers_log_probs(prompt, got.token_ids)
                assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
                assert got.policy_version == server.version
        next(running, None)
    finally:
        running.close()
        destroy_world()
