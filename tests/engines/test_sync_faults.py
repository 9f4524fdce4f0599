"""Planted faults of a weight sync, on every kind of engine: refused, the tensor named, and no token
from such weights.

Trainer (Megatron), engine (a server process) and syncs are those of a run; a proxy between them
does the damage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rollout_tools import assert_same, tiny_qwen3_moe
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from sync_tools import (
    BUCKET_BYTES,
    DENSE,
    REQUESTS,
    Rig,
    change_weights,
    rig_of,
    trainer,
    write_model,
)

from benchmarks.chaos.fault_proxy import FaultProxy, ProxyFault
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies

pytestmark = pytest.mark.dist
OF_SGLANG = [pytest.mark.sglang, needs_sglang]
TP2 = {"tp_size": 2}
DP_ATTENTION = {**TP2, "dp_size": 2, "enable_dp_attention": True}
each_kind = pytest.mark.parametrize(
    ("model", "rig"),
    [
        pytest.param(DENSE, ("local", {}), id="local"),
        pytest.param(DENSE, ("sglang", {}), id="sglang", marks=OF_SGLANG),
        pytest.param(DENSE, ("sglang", TP2), id="sglang-tp2", marks=[*OF_SGLANG, pytest.mark.long]),
        pytest.param(
            partial(tiny_qwen3_moe, 1),
            ("sglang", DP_ATTENTION),
            id="sglang-dp-attention",
            marks=[*OF_SGLANG, pytest.mark.long],
        ),
    ],
    indirect=True,
)
TENSOR = r"(embed_tokens|lm_head|norm|proj|gate)\.weight"


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sync") / "model", getattr(request, "param", DENSE))


@pytest.fixture(scope="module")
def group(model: Path) -> Iterator[InlineWorkerGroup]:
    with trainer(model) as started:
        yield started


def start(
    kind: str, model: Path, folder: Path, num_engines: int, **arguments: Any
) -> EngineServers:
    (folder / "transfer").mkdir()
    if kind == "local":
        return start_local_engines(
            model, num_engines, folder, transfer_dir=folder / "transfer", load_weights=False
        )
    return start_sglang_engines(
        model,
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=folder / "transfer",
        dtype="float32",
        arguments={**CPU_ARGUMENTS, "context_length": 256, **arguments},
        env={**CPU_ENV, **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if arguments else {})},
        startup_timeout_s=STARTUP_S,
    )


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest,
    model: Path,
    group: InlineWorkerGroup,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """With the trainer's weights in the engine, as version 1."""
    kind, arguments = request.param
    folder = tmp_path_factory.mktemp(kind)
    transfer = folder / "transfer"
    with (
        start(kind, model, folder, 1, **arguments) as servers,
        FaultProxy(servers.addresses[0], transfer) as proxy,
    ):
        found = rig_of(
            kind,
            group,
            proxy,
            lambda: connect_engine(proxy.address, transfer),
            lambda: connect_engine(servers.addresses[0], transfer),
            transfer,
            model,
        )
        found.sync()
        yield found
        found.fleet.close()


ALWAYS = 1 << 40
PLANTED = {
    "a dropped bucket": ProxyFault("drop_bucket", nth=2),
    "an update that changes nothing": ProxyFault("drop_bucket"),
    "half of an update": ProxyFault("half_bucket"),
    "swapped names": ProxyFault("swap_names"),
    "swapped rows": ProxyFault("swap_rows", nth=2),
    "swapped rows that agree with the manifest": ProxyFault("swap_rows", nth=2, is_hidden=True),
    "a flipped bit": ProxyFault("flip_byte"),
    "a flipped bit that agrees with the manifest": ProxyFault("flip_byte", is_hidden=True),
    "a bucket of an old version": ProxyFault("old_bucket"),
    "a bucket of an old version that says it is new": ProxyFault("old_bucket", is_hidden=True),
}


@each_kind
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_refused_until_a_full_sync(
    rig: Rig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig.fleet.engines[0]
    version = rig.sync.policy_version
    change_weights(rig.group, seed=version)
    fault = PLANTED[name]
    rig.plan(replace(fault, nth=rig.proxy.num_buckets + fault.nth, times=ALWAYS))
    with caplog.at_level(logging.WARNING):
        rig.sync()
    assert rig.fleet.live_engines == () and rig.proxy.damaged
    refusals = [
        r.getMessage() for r in caplog.records if "not got the current weights" in r.getMessage()
    ]
    assert len(refusals) == 1 and any(tensor in refusals[0] for tensor in rig.proxy.damaged), (
        refusals
    )

    assert engine.get_served_version() is None  # not one token, by whatever way
    with pytest.raises(EngineError, match=TENSOR):
        rig.fleet.generate(REQUESTS)  # tries to mend it, with the same fault in its way
    with pytest.raises(EngineError, match="STALE"):
        engine.generate(REQUESTS, 10.0)
    stranger = rig.straight()
    # SGLang is paused
    with pytest.raises(EngineError, match="STALE" if rig.kind == "local" else "no answer"):
        stranger.generate(REQUESTS[:1], 3.0)
    stranger.close()

    rig.plan()
    rig.sync()
    samples = [sample for group in rig.fleet.generate(REQUESTS) for sample in group]
    assert {sample.policy_version for sample in samples} == {rig.sync.policy_version}
    rig.probe(engine)  # the trainer finds its own log-probs in what is sampled


@each_kind
def test_an_engine_is_mended_before_it_serves(rig: Rig) -> None:
    """A fault that does not come again: the next generate gives the weights once more, and
    only then asks.
    """
    change_weights(rig.group, seed=200)
    rig.plan(ProxyFault("swap_names", nth=rig.proxy.num_buckets + 2))
    rig.sync()
    assert rig.fleet.live_engines == () and len(rig.proxy.damaged) == 2
    samples = [sample for group in rig.fleet.generate(REQUESTS) for sample in group]
    assert {sample.policy_version for sample in samples} == {rig.sync.policy_version}
    rig.probe(rig.fleet.engines[0])


@each_kind
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_probe_finds_wrong_weights_in_an_engine_without_digests(
    rig: Rig, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.fleet.engines[0]
    if rig.kind == "sglang":
        # as if nothing in it could be compared
        monkeypatch.setattr(engine, "get_weight_digests", lambda: None)
        monkeypatch.setattr(
            "rlhf_megatron.rollout.sglang.sglang_weight_verbs.check_loaded_bucket",
            lambda *arguments: None,
        )
    hidden = ProxyFault("no_digests", "/weight_digests", times=ALWAYS)
    wrong = ProxyFault("swap_names", nth=rig.proxy.num_buckets + 1, times=ALWAYS)
    rig.plan(hidden, *([wrong] if is_wrong else []))
    change_weights(rig.group, seed=100)
    if is_wrong:
        with pytest.raises(
            EngineError, match=r"the worst is token \d+ at place \d+ after prompt \d: log-prob -\d"
        ):
            rig.sync()
        assert engine.get_served_version() is None
        with pytest.raises(EngineError, match="STALE"):
            engine.generate(REQUESTS, 10.0)
        with pytest.raises(EngineError):
            rig.fleet.generate(REQUESTS)
        rig.plan()
    rig.sync()
    assert engine.get_served_version() == rig.sync.policy_version
    rig.plan()


@each_kind
def test_a_resync_gives_the_same_version_again(rig: Rig) -> None:
    engine = rig.fleet.engines[0]
    before = rig.fleet.generate(REQUESTS)
    version = rig.sync.policy_version
    rig.sync.resync_engines([engine])
    assert engine.get_served_version() == rig.sync.policy_version == version
    for one, other in zip(rig.fleet.generate(REQUESTS), before, strict=True):
        assert_same(one, other)
    rig.plan(ProxyFault("flip_byte", nth=rig.proxy.num_buckets + 1))
    with pytest.raises(EngineError, match=TENSOR):
        rig.sync.resync_engines([engine])
    assert engine.get_served_version() is None
    rig.plan()
    rig.sync.resync_engines([engine])
    assert engine.get_served_version() == version


@each_kind
def test_faults_of_requests_lose_double_and_age_no_sample(rig: Rig) -> None:
    """A connection that breaks before or in the answer, an answer that is 500 or says that it is of
    the version before, a request that comes twice or late.
    """
    expected = rig.fleet.generate(REQUESTS)
    for kind in ("reset", "old_version", "duplicate", "delay", "cut", "error"):
        rig.plan(ProxyFault(kind, "/generate", nth=rig.proxy.passed["/generate"] + 1, seconds=0.2))
        fired = len(rig.proxy.fired)
        got = rig.fleet.generate(REQUESTS)
        assert [fault.kind for fault, _ in rig.proxy.fired[fired:]] == [kind]
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    rig.plan()


@pytest.fixture(scope="module")
def two(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineServers, Path]]:
    folder = tmp_path_factory.mktemp("two")
    with start("local", model, folder, 2) as servers:
        yield servers, folder / "transfer"


def test_an_engine_that_never_answers_a_commit_is_set_aside(
    two: tuple[EngineServers, Path], group: InlineWorkerGroup
) -> None:
    servers, transfer = two
    drop = ProxyFault("drop", "/commit_weight_update")
    with FaultProxy(servers.addresses[0], transfer, [drop], timeout_s=30.0) as proxy:
        fleet = EngineFleet(
            [LocalEngine(proxy.address, 2.0), LocalEngine(servers.addresses[1])], 60.0, 1
        )
        sync = WeightSync(RoleProxies(group).host, fleet, transfer, BUCKET_BYTES, "float32")
        sync()
        assert [engine.address.name for engine in fleet.live_engines] == ["engine1"]
        assert {s.policy_version for samples in fleet.generate(REQUESTS) for s in samples} == {
            sync.policy_version
        }
        fleet.close()


def test_one_engine_that_fails_leaves_the_others_to_commit(
    two: tuple[EngineServers, Path], group: InlineWorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """engine0 gets a damaged bucket, then it is killed in one, for good; engine1 goes on, and so
    does the trainer.
    """
    servers, transfer = two
    with FaultProxy(servers.addresses[0], transfer, kill_engine=servers.processes[0].stop) as proxy:
        engines = [LocalEngine(proxy.address, 20.0), LocalEngine(servers.addresses[1])]
        fleet = EngineFleet(engines, 60.0, 2)
        sync = WeightSync(
            RoleProxies(group).host, fleet, transfer, BUCKET_BYTES, "float32", policy_version=10
        )
        sync()
        assert len(fleet.live_engines) == 2
        expected = fleet.generate(REQUESTS)

        proxy.faults = (
            ProxyFault("reset", "/generate", nth=2),
            ProxyFault("old_version", "/generate", nth=3),
        )
        for one, other in zip(fleet.generate(REQUESTS), expected, strict=True):
            assert_same(one, other)

        proxy.faults = (
            ProxyFault("duplicate", "/update_weights", times=99),
            ProxyFault("duplicate", "/commit_weight_update", times=99),
            ProxyFault("delay", "/begin_weight_update", times=99, seconds=0.2),
        )
        sync()
        assert len(fleet.live_engines) == 2, "a request that comes twice, or late, does no harm"

        with caplog.at_level(logging.WARNING):
            proxy.faults = (ProxyFault("swap_rows", nth=proxy.num_buckets + 2),)
            sync()
            assert [engine.address.name for engine in fleet.live_engines] == ["engine1"]
            assert (
                engines[0].get_served_version() is None
                and engines[1].get_served_version() == sync.policy_version
            )
            nth = proxy.passed["/update_weights"] + 2
            proxy.faults = (ProxyFault("kill_engine", "/update_weights", nth=nth),)
            sync()
        assert [engine.address.name for engine in fleet.live_engines] == ["engine1"]
        assert "engine0" in caplog.text and "while it was given bucket 1 of" in caplog.text
        for one, other in zip(fleet.generate(REQUESTS), expected, strict=True):
            assert_same(
                one, [replace(sample, policy_version=sync.policy_version) for sample in other]
            )
        fleet.close()


def test_the_proxy_stays_on_loopback(tmp_path: Path) -> None:
    from rlhf_megatron.rollout.engine_interface import EngineAddress

    with pytest.raises(ValueError, match=r"loopback; engine0 is at http://10\.0\.0\.1:1"):
        FaultProxy(EngineAddress("engine0", "local", "http://10.0.0.1:1", "t" * 32), tmp_path)
