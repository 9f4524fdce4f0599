"""Fleets of stock SGLang: what goes wrong with requests and servers costs time, but no sample is
lost, doubled or old.

Every sample is compared with the one of a call that nobody disturbed (its seed decides), and its
log-probs with those of transformers on the weights of the current version.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rollout_tools import (
    digests_of,
    reference_log_probs,
    request,
    tiny_qwen3,
    weights_of,
    write_buckets,
)
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python

from benchmarks.chaos.fault_proxy import FaultProxy, ProxyFault
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
)
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import SupervisionSettings
from rlhf_megatron.rollout.fleet.request_balancer import RequestBalancer
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.router.router_balancer import SGLangRouterBalancer
from rlhf_megatron.rollout.router.router_process import prepare_router
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

pytestmark = [pytest.mark.long, pytest.mark.sglang, needs_sglang]
TEXT = tuple(range(2, 30))
# No two begin alike; the first end long before the last, so that what is done when they come
# hits the others.
REQUESTS = [request((i + 1, *TEXT), tuple(range(10 * i, 10 * i + 4)), 8 + 16 * i) for i in range(8)]
SHORT = [replace(asked, params=replace(asked.params, max_new_tokens=8)) for asked in REQUESTS]
Groups = list[list[GeneratedSample]]
Act = Callable[[], object]


class Rig:
    """Servers with a proxy in front of each, and weights for them: version v is `tiny_qwen3(v)`."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        requests: Sequence[GenerateRequest] = REQUESTS,
        request_s: float = 30.0,
        **arguments: object,
    ) -> None:
        self.folder = folder
        self.requests = requests
        self.request_s = request_s
        self.transfer = folder / "transfer"
        self.transfer.mkdir()
        tiny_qwen3(0).save_pretrained(folder / "model")
        env = (
            {**CPU_ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "tp_size" in arguments else CPU_ENV
        )
        self.servers: EngineServers = stack.enter_context(
            start_sglang_engines(
                folder / "model",
                2,
                folder,
                python=str(sglang_python()),
                transfer_dir=self.transfer,
                dtype="float32",
                arguments={**CPU_ARGUMENTS, "context_length": 256, **arguments},
                env=env,
                startup_timeout_s=STARTUP_S,
            )
        )
        self.stack = stack
        self.proxies: dict[str, FaultProxy] = {}
        self.version = 0
        self.resynced: list[str] = []

    def connect(self, address: EngineAddress) -> InferenceEngine:
        proxy = FaultProxy(address, self.transfer, timeout_s=1.2 * self.request_s)
        self.proxies[address.name] = self.stack.enter_context(proxy)
        return connect_engine(proxy.address, self.transfer)

    def fleet(self, balancer: RequestBalancer | None = None, max_restarts: int = 9) -> EngineFleet:
        """Of the servers, with the weights of a new version."""
        supervision = SupervisionSettings(self.servers, self.connect, 1.0, 15.0, max_restarts)
        engines = [self.connect(address) for address in self.servers.addresses]
        fleet = EngineFleet(engines, self.request_s, 4, supervision=supervision, balancer=balancer)
        fleet.resync_engines = self.resync
        self.version += 1
        self.resynced.clear()
        fleet.begin_weight_update(self.version)
        for engine in fleet.live_engines:
            self.send(engine)
        fleet.commit_weight_update(self.version)
        return fleet

    def send(self, engine: InferenceEngine) -> None:
        for manifest in write_buckets(
            weights_of(tiny_qwen3(self.version)), self.transfer, self.version
        ):
            engine.update_weights(manifest)

    def resync(self, engines: Sequence[InferenceEngine]) -> None:
        for engine in engines:
            engine.begin_weight_update(self.version, is_full_resync=True)
            self.send(engine)
            engine.commit_weight_update(self.version)
            self.resynced.append(engine.address.name)

    def plan(self, name: str, kind: str, path: str = "/generate") -> None:
        """It is done to the next request of that path."""
        proxy = self.proxies[name]
        proxy.faults = (ProxyFault(kind, path, nth=proxy.passed[path] + 1, seconds=0.5),)  # type: ignore[arg-type]

    def fired(self) -> list[str]:
        kinds = sorted(fault.kind for proxy in self.proxies.values() for fault, _ in proxy.fired)
        for proxy in self.proxies.values():
            proxy.fired.clear()
        return kinds

    def generate(self, fleet: EngineFleet, act: Act = lambda: None) -> Groups:
        """Each group must come once. `act` is called when the first have come."""
        came: Counter[int] = Counter()

        def on_groups(first: int, groups: Groups) -> None:
            if not came:
                act()
            came.update(range(first, first + len(groups)))

        groups = fleet.generate(self.requests, on_groups)
        assert came == Counter(range(len(self.requests)))
        return groups

    def undisturbed(self, fleet: EngineFleet) -> Groups:
        groups = self.generate(fleet)
        self.prove(groups)
        assert len({sample.token_ids for group in groups for sample in group}) > 20, "seeds count"
        return groups

    def prove(self, groups: Groups) -> None:
        """Against transformers."""
        model = tiny_qwen3(self.version)
        for asked, group in zip(self.requests, groups, strict=True):
            assert len(group) == len(asked.seeds)
            for sample in group:
                expected = reference_log_probs(model, asked.prompt_ids, sample.token_ids)
                assert torch.allclose(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)
                assert sample.policy_version == self.version

    def until_all_serve(self, fleet: EngineFleet, expected: Groups, num_resynced: int = 0) -> None:
        """A server that is started again can come too late to be needed in the call that lost it,
        and one that had given all its samples is missed by the next call. `num_resynced`: engines
        that must have got weights anew.
        """
        for _ in range(200):
            if len(fleet.live_engines) == len(fleet.engines) and len(self.resynced) >= num_resynced:
                return
            check(self.generate(fleet), expected)
        raise AssertionError("an engine has not come back")


def check(groups: Groups, expected: Groups) -> None:
    """The same samples, of the same weights."""
    for group, other in zip(groups, expected, strict=True):
        assert [(s.token_ids, s.policy_version, s.finish_reason) for s in group] == [
            (s.token_ids, s.policy_version, s.finish_reason) for s in other
        ]


def schedulers(pid: int) -> list[int]:
    """The processes of a server that hold the model; the one that speaks HTTP is another."""
    found = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "scheduler" in "".join(child.cmdline())
    ]
    assert found, "SGLang names its processes"
    return [child.pid for child in found]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path_factory.mktemp("two"), stack)


def test_faults_of_requests(two: Rig) -> None:
    """To the balancer's two pieces in flight on the first engine, one after the other."""
    fleet = two.fleet()
    expected = two.undisturbed(fleet)
    for kind in ("delay", "duplicate", "reset", "cut", "error", "old_version", "drop"):
        two.plan("engine0", kind)
        check(two.generate(fleet), expected)
        assert two.fired() == [kind]
        two.until_all_serve(fleet, expected)
        counters = fleet.take_counters()
        num_failures = 0 if kind in ("delay", "duplicate") else 1
        assert counters["rollout/engine_failures"] == num_failures, kind
        assert (counters["rollout/requests_reissued"] > 0) == bool(num_failures), kind
        assert counters["rollout/engine_restarts"] == 0, kind
        assert two.resynced == (["engine0"] if kind == "old_version" else []), kind
        two.resynced.clear()
    fleet.close()


def test_a_killed_server_and_a_stopped_scheduler_are_replaced(two: Rig) -> None:
    """SIGKILL to one server, SIGSTOP to the other's process that holds the model: its HTTP side
    goes on answering.
    """
    fleet = two.fleet()
    expected = two.undisturbed(fleet)
    first, second = two.servers.processes
    acts: list[Act] = [
        lambda: os.killpg(first.pid, signal.SIGKILL),
        lambda: [os.kill(pid, signal.SIGSTOP) for pid in schedulers(second.pid)],
    ]
    for number, (process, act) in enumerate(zip((first, second), acts, strict=True), 1):
        check(two.generate(fleet, act), expected)
        two.until_all_serve(fleet, expected, number)
        assert process.exit_code is not None and fleet.get_served_version() == two.version
        counters = fleet.take_counters()
        assert (counters["rollout/engine_failures"], counters["rollout/engine_restarts"]) == (
            1.0,
            1.0,
        )
    assert two.resynced == ["engine0", "engine1"]
    assert {process.exit_code for process in two.servers.processes} == {None}
    fleet.close()


def test_the_same_through_sglang_router(two: Rig) -> None:
    """Groups stay together, faults of one engine come back to the fleet, and one that is killed and
    started again has another address, which the router is told before anything is sent to it.
    """
    process = prepare_router(str(sglang_python()), {}, two.folder, 60.0)
    router = SGLangRouterBalancer(
        process, max_restarts=1, health_interval_s=1.0, health_timeout_s=15.0
    )
    fleet = two.fleet(balancer=router)
    expected = two.undisturbed(fleet)
    passed = {name: proxy.passed["/generate"] for name, proxy in two.proxies.items()}
    assert min(passed.values()) > 0
    for kind in ("duplicate", "cut", "error", "old_version"):
        two.plan("engine1", kind)
        check(two.generate(fleet), expected)
        assert two.fired() == [kind]
        two.until_all_serve(fleet, expected)
        assert (fleet.take_counters()["rollout/requests_reissued"] > 0) == (kind != "duplicate"), (
            kind
        )
    before = set(router._confirmed_workers)
    lost = two.servers.processes[0]
    two.resynced.clear()
    check(two.generate(fleet, lambda: os.killpg(lost.pid, signal.SIGKILL)), expected)
    two.until_all_serve(fleet, expected, 1)
    check(two.generate(fleet), expected)
    after = set(router._confirmed_workers)
    assert len(after) == 2 and len(after & before) == 1 and two.resynced == ["engine0"]
    assert after == {engine.address.url for engine in fleet.engines}
    counters = fleet.take_counters()
    assert (counters["rollout/engine_failures"], counters["rollout/engine_restarts"]) == (1.0, 1.0)
    fleet.close()
    assert process.process is not None and process.process.exit_code is not None


def test_replicas_with_tensor_parallelism(tmp_path: Path) -> None:
    """A group's samples share their prompt, by the balancer and through the router: one of them
    computes it, the others find all but its last token. Then a rank of one server hangs: it is
    replaced as a whole, and gets the weights.
    """
    with ExitStack() as stack:
        # Seeds would take the prefix cache away on a CPU. One at a time: samples that are computed
        # in one batch do not find one another in the cache.
        settings = {"enable_deterministic_inference": False, "max_running_requests": 1}
        rig = Rig(tmp_path, stack, SHORT, request_s=240.0, tp_size=2, **settings)
        assert [address.tp_size for address in rig.servers.addresses] == [2, 2]
        process = prepare_router(str(sglang_python()), {}, tmp_path, 60.0)
        router = SGLangRouterBalancer(
            process, max_restarts=0, health_interval_s=1.0, health_timeout_s=15.0
        )
        for balancer in (router, None):
            fleet = rig.fleet(balancer)
            for asked, group in zip(rig.requests, rig.undisturbed(fleet), strict=True):
                cached = sorted(sample.num_cached_tokens for sample in group)
                assert cached == [0, *[len(asked.prompt_ids) - 1] * (len(group) - 1)]
            assert min(proxy.passed["/generate"] for proxy in rig.proxies.values()) > 0
            if balancer is not None:
                fleet.close()
        lost = rig.servers.processes[0]
        ranks = schedulers(lost.pid)
        assert len(ranks) == 2
        rig.prove(rig.generate(fleet, lambda: os.kill(ranks[1], signal.SIGSTOP)))
        for _ in range(200):
            if rig.resynced and len(fleet.live_engines) == 2:
                break
            rig.prove(rig.generate(fleet))
        assert (
            rig.resynced == ["engine0"]
            and len(fleet.live_engines) == 2
            and fleet.get_served_version() == rig.version
        )
        assert lost.exit_code is not None and not any(psutil.pid_exists(pid) for pid in ranks)
        assert rig.servers.addresses[0].tp_size == 2
        digests = fleet.get_weight_digests()
        assert (
            digests["engine0"]
            == digests["engine1"]
            == digests_of(weights_of(tiny_qwen3(rig.version)))
        )
        fleet.close()
