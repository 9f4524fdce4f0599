"""Several engines as one: order, each sample once, failures, deadlines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_tools import assert_same, request, tiny_qwen3, weights_of, write_buckets

from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    EngineRequestError,
    GeneratedSample,
    GenerateRequest,
    SampleGroups,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.request_balancer import cut_chunks
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines

pytestmark = pytest.mark.dist
REQUESTS = [
    request((1 + i % 30, 2), tuple(range(100 * i, 100 * i + 8)), 100 + i) for i in range(24)
]


def test_cut_keeps_groups_whole_and_in_order() -> None:
    for num_engines, most in ((1, 512), (2, 48), (3, 32)):
        chunks = cut_chunks(REQUESTS, num_engines)
        assert [r for chunk in chunks for r in chunk.requests] == REQUESTS
        assert [chunk.start for chunk in chunks] == [
            REQUESTS.index(chunk.requests[0]) for chunk in chunks
        ]
        assert all(chunk.num_samples <= most for chunk in chunks)
    assert len(cut_chunks(REQUESTS, 1)) == 1
    assert [c.num_samples for c in cut_chunks([request((1,), tuple(range(600)), 1)] * 2, 1)] == [
        600,
        600,
    ]
    assert cut_chunks([], 2) == []


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "model"
    tiny_qwen3(1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[GeneratedSample]]:
    """The samples of an undisturbed generator."""
    from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
    from rlhf_megatron.rollout.local.local_model import load_local_model

    return BatchGenerator(
        load_local_model(model_dir, "float32", "cpu", True), 64, 1 << 16
    ).generate(REQUESTS)


@pytest.fixture
def servers(model_dir: Path, tmp_path: Path) -> Iterator[EngineServers]:
    with start_local_engines(
        model_dir, 2, tmp_path, transfer_dir=tmp_path, max_num_seqs=16
    ) as started:
        yield started


class Impatient(LocalEngine):
    """An engine for whose samples nobody waits longer than a second."""

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        return await super().generate_async(requests, 1.0, name)


def fleet_of(
    servers: EngineServers, retries: int = 2, second: type[LocalEngine] = LocalEngine
) -> EngineFleet:
    first_address, second_address = servers.addresses
    return EngineFleet([LocalEngine(first_address), second(second_address)], 120.0, retries)


def check(got: list[list[GeneratedSample]], expected: list[list[GeneratedSample]]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


def test_a_sync_then_a_killed_engine_then_none_left(
    servers: EngineServers, expected: list[list[GeneratedSample]], tmp_path: Path
) -> None:
    fleet = fleet_of(servers)
    fleet.begin_weight_update(4)
    with pytest.raises(EngineError, match="STALE"):
        fleet.generate(REQUESTS[:1])
    for engine in fleet.live_engines:
        for manifest in write_buckets(weights_of(tiny_qwen3(1)), tmp_path, 4):
            engine.update_weights(manifest)
    fleet.commit_weight_update(4)
    assert fleet.get_served_version() == 4
    synced = [[replace(sample, policy_version=4) for sample in group] for group in expected]
    check(fleet.generate(REQUESTS), synced)

    killer = threading.Timer(0.15, os.kill, (servers.processes[0].pid, signal.SIGKILL))
    killer.start()
    check(fleet.generate(REQUESTS), synced)
    killer.join()
    check(fleet.generate(REQUESTS), synced)
    assert [engine.address.name for engine in fleet.live_engines] == ["engine1"]
    assert fleet.get_served_version() == 4

    with pytest.raises(EngineRequestError, match="vocabulary"):
        fleet.generate([request((1,), (1,), 2), request((77,), (1,), 2)])
    os.kill(servers.processes[1].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"no engine is left of 2: .*engine0.*engine1"):
        fleet.generate(REQUESTS)
    fleet.close()


def test_a_stopped_engine_then_a_sync_then_no_weights(
    servers: EngineServers, expected: list[list[GeneratedSample]], tmp_path: Path
) -> None:
    fleet = fleet_of(servers, second=Impatient)
    os.kill(servers.processes[1].pid, signal.SIGSTOP)
    check(fleet.generate(REQUESTS), expected)
    assert [engine.address.name for engine in fleet.live_engines] == ["engine0"]
    os.kill(servers.processes[1].pid, signal.SIGCONT)
    fleet.begin_weight_update(1)
    assert len(fleet.live_engines) == 2
    for engine in fleet.live_engines:
        for manifest in write_buckets(weights_of(tiny_qwen3(1)), tmp_path, 1):
            engine.update_weights(manifest)
    fleet.commit_weight_update(1)
    digests = fleet.get_weight_digests()
    assert digests["engine0"] == digests["engine1"] is not None

    fleet.engines[1].begin_weight_update(2)
    with pytest.raises(EngineError, match="different versions"):
        fleet.get_served_version()
    fleet.close()

    fleet = fleet_of(servers, retries=1)
    fleet.release_memory()
    with pytest.raises(
        EngineError, match=r"failed 2 times \(rollout.request_retries is 1\): .*memory is released"
    ):
        fleet.generate(REQUESTS[:2])
    fleet.close()


def test_a_fleet_needs_an_engine() -> None:
    with pytest.raises(ValueError, match=r"rollout\.num_engines"):
        EngineFleet([], 1.0, 1)
