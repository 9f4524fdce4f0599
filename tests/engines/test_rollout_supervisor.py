"""Engines that die, hang, lie or come late: bundled servers in closed batches, so that every bit
can be compared.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_tools import request, tiny_qwen3, weights_of, write_buckets

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import SupervisionSettings
from rlhf_megatron.rollout.fleet.request_balancer import (
    cut_chunks,
    find_unknown_runs,
    select_unknown_chunks,
)
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.local.local_model import load_local_model
from rlhf_megatron.stop import RunStopped, StopRequest

REQUESTS = [
    request((1 + i % 30, 2), tuple(range(100 * i, 100 * i + 4)), 20 + 3 * i) for i in range(12)
]
MAX_NUM_SEQS = 8
Groups = list[list[GeneratedSample]]


class Rig:
    """Two servers, and weights for them: version v is `tiny_qwen3(v)`."""

    def __init__(self, servers: EngineServers, model: Path, transfer: Path) -> None:
        self.servers = servers
        self.model = model
        self.transfer = transfer
        self.version = 0
        self.resynced: list[str] = []
        self._expected: dict[tuple[int, int], Groups] = {}

    def fleet(
        self,
        num_engines: int,
        max_restarts: int = 2,
        connect: Callable[[EngineAddress], InferenceEngine] = LocalEngine,
        is_killing: bool = True,
        stop: StopRequest | None = None,
        retries: int = 2,
    ) -> EngineFleet:
        """Engines that serve the version of the rig."""
        supervision = SupervisionSettings(
            self.servers if is_killing else None, connect, 0.3, 4.0, max_restarts
        )
        fleet = EngineFleet(
            [connect(address) for address in self.servers.addresses[:num_engines]],
            120.0,
            retries,
            supervision=supervision,
            is_isolated=True,
            check_stop=(stop or StopRequest()).raise_if_requested,
        )
        fleet.resync_engines = self.resync
        self.resynced = []
        return fleet

    def sync(
        self,
        fleet: EngineFleet,
        meanwhile: Callable[[], None] = lambda: None,
        is_whole: bool = True,
    ) -> None:
        self.version += 1
        fleet.begin_weight_update(self.version)
        for engine in fleet.live_engines:
            self.send(engine)
        meanwhile()
        fleet.commit_weight_update(self.version, is_whole)

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

    def expected(self, num_engines: int) -> Groups:
        """Each piece decoded in this process by a generator of its own."""
        if (self.version, num_engines) in self._expected:
            return self._expected[self.version, num_engines]
        torch.set_num_threads(1)  # as the servers
        model = load_local_model(self.model, "float32", "cpu", True)
        model.module.load_state_dict(tiny_qwen3(self.version).state_dict())
        groups: Groups = []
        for chunk in cut_chunks(REQUESTS, num_engines, is_isolated=True):
            generator = BatchGenerator(model, MAX_NUM_SEQS, 1 << 16)
            generator.policy_version = self.version
            groups += generator.generate(chunk.requests)
        self._expected[self.version, num_engines] = groups
        return groups

    def signal(self, index: int, number: int) -> None:
        os.kill(self.servers.processes[index].pid, number)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("supervisor")
    (folder / "transfer").mkdir()
    tiny_qwen3(0).save_pretrained(folder / "model")
    with start_local_engines(
        folder / "model",
        2,
        folder,
        transfer_dir=folder / "transfer",
        load_weights=False,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=1 << 16,
        is_deterministic=True,
    ) as servers:
        yield Rig(servers, folder / "model", folder / "transfer")


class Arrivals:
    """`on_groups`: what came, and something that happens when the first groups have."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.indices: list[int] = []

    def __call__(self, first: int, groups: Groups) -> None:
        self.indices += range(first, first + len(groups))
        act = self.act
        self.act = lambda: None
        act()


def generate(fleet: EngineFleet, act: Callable[[], None] = lambda: None) -> Groups:
    """Each group must come once."""
    arrivals = Arrivals(act)
    groups = fleet.generate(REQUESTS, arrivals)
    assert sorted(arrivals.indices) == list(range(len(REQUESTS)))
    return groups


def generate_until(fleet: EngineFleet, rig: Rig, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_done():
        assert generate(fleet) == rig.expected(2)
        assert time.monotonic() < deadline


@pytest.mark.dist
def test_a_closed_batch_gives_the_same_bits_whatever_else_runs(rig: Rig) -> None:
    fleet = rig.fleet(2)
    rig.sync(fleet)
    assert generate(fleet) == rig.expected(2)
    chunks = cut_chunks(REQUESTS, 1, is_isolated=True)
    assert [len(chunk.requests) for chunk in chunks] == [6, 6]
    expected = rig.expected(1)
    engine = fleet.engines[0]
    calls = [threading.Thread(target=engine.generate, args=(REQUESTS[3:9], 60.0)) for _ in range(2)]
    for call in calls:
        call.start()
    assert engine.generate(chunks[1].requests, 60.0) == expected[6:]
    engine.generate(REQUESTS[5:6], 60.0)
    assert engine.generate(chunks[0].requests, 60.0) == expected[:6]
    for call in calls:
        call.join(60)
    assert fleet.take_counters() == dict.fromkeys(
        (
            "rollout/engine_failures",
            "rollout/engine_restarts",
            "rollout/requests_reissued",
            "rollout/driver_restarts",
        ),
        0.0,
    )
    fleet.close()


@pytest.mark.dist
def test_known_groups_are_not_asked_for_and_the_rest_keeps_its_bits(rig: Rig) -> None:
    fleet = rig.fleet(2)
    expected = rig.expected(2)
    # a whole piece and one group of the next
    known = {index: expected[index] for index in (0, 1, 2, 4)}
    arrivals = Arrivals()
    assert fleet.generate(REQUESTS, arrivals, known) == expected
    assert sorted(arrivals.indices) == [3, 5, 6, 7, 8, 9, 10, 11]
    assert len([call for call in fleet.list_recent_calls() if call.verb == "generate"]) == 3
    old = {
        index: [replace(s, policy_version=rig.version - 1) for s in group]
        for index, group in known.items()
    }
    assert fleet.generate(REQUESTS, None, old) == expected
    fleet.close()


def test_what_is_left_to_ask_for() -> None:
    chunks = cut_chunks(REQUESTS, 2, is_isolated=True)
    assert [(chunk.start, len(chunk.requests)) for chunk in chunks] == [
        (0, 3),
        (3, 3),
        (6, 3),
        (9, 3),
    ]
    known = {0, 1, 2, 4, 11}
    closed = select_unknown_chunks(chunks, known, is_isolated=True)
    assert closed == chunks[1:]
    left = select_unknown_chunks(chunks, known, is_isolated=False)
    assert [(c.start, c.requests) for c in left] == [
        (3, REQUESTS[3:4]),
        (5, REQUESTS[5:6]),
        (6, REQUESTS[6:9]),
        (9, REQUESTS[9:11]),
    ]
    assert list(find_unknown_runs(0, 3, known)) == [] and list(find_unknown_runs(9, 3, known)) == [
        range(9, 11)
    ]


@pytest.mark.dist
def test_the_only_engine_is_killed(rig: Rig) -> None:
    fleet = rig.fleet(1)
    rig.sync(fleet)
    before = rig.servers.addresses[0]
    process = rig.servers.processes[0]
    start = time.monotonic()
    assert generate(fleet, lambda: rig.signal(0, signal.SIGKILL)) == rig.expected(1)
    assert time.monotonic() - start < 300
    after = rig.servers.addresses[0]
    assert after.name == before.name and after.token != before.token and after.url != before.url
    assert rig.servers.processes[0].pid != process.pid and process.exit_code == -signal.SIGKILL
    assert rig.resynced == ["engine0"] and fleet.get_served_version() == rig.version
    assert "listening" in process.log.with_suffix(".1.log").read_text()
    assert fleet.take_counters() == {
        "rollout/engine_failures": 1.0,
        "rollout/engine_restarts": 1.0,
        "rollout/driver_restarts": 0.0,
        "rollout/requests_reissued": 6.0,
    }
    assert fleet.take_counters()["rollout/engine_restarts"] == 0.0
    fleet.close()


@pytest.mark.dist
def test_one_engine_hangs_and_the_other_is_killed(rig: Rig) -> None:
    fleet = rig.fleet(2)
    rig.sync(fleet)
    processes = rig.servers.processes

    def trouble() -> None:
        rig.signal(0, signal.SIGSTOP)
        rig.signal(1, signal.SIGKILL)

    assert generate(fleet, trouble) == rig.expected(2)
    # the second may have come up too late to be needed
    generate_until(fleet, rig, lambda: len(fleet.live_engines) == 2)
    assert [process.exit_code for process in processes] == [-signal.SIGKILL] * 2
    counters = fleet.take_counters()
    assert counters["rollout/engine_failures"] == counters["rollout/engine_restarts"] == 2
    assert sorted(rig.resynced) == ["engine0", "engine1"]
    fleet.close()


@pytest.mark.dist
def test_an_engine_dies_in_a_sync(rig: Rig) -> None:
    """The other commits and serves; the dead one is started again in the next generate and
    gets this version.
    """
    fleet = rig.fleet(2)
    rig.sync(fleet, lambda: rig.signal(1, signal.SIGKILL))
    assert [engine.address.name for engine in fleet.live_engines] == [
        "engine0"
    ] and fleet.get_served_version() == rig.version
    generate_until(fleet, rig, lambda: bool(rig.resynced))
    assert (
        rig.resynced == ["engine1"]
        and len(fleet.live_engines) == 2
        and fleet.get_served_version() == rig.version
    )
    fleet.close()


class Refuser(LocalEngine):
    """engine1 refuses a commit, once."""

    is_refusing = False

    def commit_weight_update(self, version: int) -> None:
        if self.address.name == "engine1" and Refuser.is_refusing:
            Refuser.is_refusing = False
            raise EngineRequestError("engine1 answered 400: no")
        super().commit_weight_update(version)


class LateToCommit(LocalEngine):
    """engine1 commits when it is let go, and refuses then, once, where it is told to."""

    may_go = threading.Event()
    is_refusing = False

    def commit_weight_update(self, version: int) -> None:
        if self.address.name == "engine1":
            assert LateToCommit.may_go.wait(120)
            if LateToCommit.is_refusing:
                LateToCommit.is_refusing = False
                raise EngineRequestError("engine1 answered 400: no")
        super().commit_weight_update(version)


@pytest.mark.dist
@pytest.mark.parametrize("is_refusing", [False, True])
def test_new_requests_go_to_an_engine_that_has_committed_while_another_still_does(
    rig: Rig, is_refusing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late one gets no request before it says that it serves the version, and no weights a
    second time; the bits are those of two. The next sync waits for it.
    """
    monkeypatch.setattr(LateToCommit, "may_go", threading.Event())
    monkeypatch.setattr(LateToCommit, "is_refusing", is_refusing)
    monkeypatch.setattr("rlhf_megatron.rollout.fleet.engine_fleet._LATE_COMMIT_WAIT_S", 0.2)
    fleet = rig.fleet(2, connect=LateToCommit)
    rig.sync(fleet, is_whole=False)
    assert [engine.address.name for engine in fleet.live_engines] == [
        "engine0"
    ] and fleet.get_served_version() == rig.version
    assert generate(fleet) == rig.expected(2)
    asked = {call.engine for call in fleet.list_recent_calls() if call.verb == "generate"}
    assert asked == {"engine0"} and rig.resynced == []

    LateToCommit.may_go.set()
    if is_refusing:
        generate_until(fleet, rig, lambda: bool(rig.resynced))
        assert fleet.take_counters()["rollout/engine_failures"] == 1
    rig.sync(fleet)
    assert len(fleet.live_engines) == 2 and fleet.get_served_version() == rig.version
    assert generate(fleet) == rig.expected(2)
    assert {call.engine for call in fleet.list_recent_calls() if call.verb == "generate"} == {
        "engine0",
        "engine1",
    }
    assert rig.resynced == (["engine1"] if is_refusing else [])
    fleet.close()


class SlowServers:
    """A server is started again when it is let go."""

    def __init__(self, servers: EngineServers) -> None:
        self.describe_exit = servers.describe_exit
        self.kill_server = servers.kill_server
        self.is_free = threading.Event()
        self._servers = servers

    def restart_server(self, name: str) -> EngineAddress:
        assert self.is_free.wait(300)
        return self._servers.restart_server(name)


@pytest.mark.dist
def test_one_refuses_a_sync_while_the_other_is_started_again(rig: Rig) -> None:
    """Nobody has the new weights then, but somebody will."""
    fleet = rig.fleet(2, connect=Refuser)
    rig.sync(fleet)
    slow = SlowServers(rig.servers)
    fleet._supervisor._settings = replace(fleet._supervisor._settings, servers=slow)
    assert generate(fleet, lambda: rig.signal(0, signal.SIGKILL)) == rig.expected(2)
    Refuser.is_refusing = True
    rig.sync(fleet)
    assert not fleet.live_engines and not Refuser.is_refusing
    slow.is_free.set()
    generate_until(fleet, rig, lambda: len(fleet.live_engines) == 2)
    assert (
        sorted(rig.resynced) == ["engine0", "engine1"] and fleet.get_served_version() == rig.version
    )
    fleet.close()


class Liar(LocalEngine):
    """Its samples are of the version before, `num_lies` times."""

    num_lies = 0

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> Groups:
        groups = await super().generate_async(requests, timeout_s, name)
        if self.address.name == "engine0" and Liar.num_lies:
            Liar.num_lies -= 1
            return [
                [replace(s, policy_version=s.policy_version - 1) for s in group] for group in groups
            ]
        return groups


@pytest.mark.dist
def test_samples_of_another_version_are_refused(rig: Rig) -> None:
    fleet = rig.fleet(2, connect=Liar)
    rig.sync(fleet)
    Liar.num_lies = 1
    assert generate(fleet) == rig.expected(2)
    assert rig.resynced == ["engine0"]
    counters = fleet.take_counters()
    assert counters["rollout/engine_failures"] == 1 and counters["rollout/engine_restarts"] == 0

    Liar.num_lies = 1_000_000
    fleet = rig.fleet(2, connect=Liar, is_killing=False)
    assert generate(fleet) == rig.expected(2)
    assert rig.resynced == ["engine0"] and len(fleet.live_engines) == 2
    assert generate(fleet) == rig.expected(2)
    assert [engine.address.name for engine in fleet.live_engines] == ["engine1"]
    assert fleet.take_counters()["rollout/engine_failures"] == 2

    fleet = rig.fleet(1, connect=Liar, is_killing=False, retries=9)
    with pytest.raises(
        EngineError, match=rf"no engine is left of 1: engine0 .*of version \[{rig.version - 1}\]"
    ):
        fleet.generate(REQUESTS)
    Liar.num_lies = 0
    fleet.close()


class Late(LocalEngine):
    """engine0 has its answer, hands it over when it is let go, and seems to hang until then."""

    has_answer = threading.Event()
    is_free = threading.Event()
    is_late = threading.Event()

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> Groups:
        groups = await super().generate_async(requests, timeout_s, name)
        if self.address.name == "engine0":
            Late.has_answer.set()
            assert await asyncio.to_thread(Late.is_free.wait, 300)
            Late.is_late.set()
        return groups

    def check_health(self, timeout_s: float = 10.0) -> None:
        if self.address.name == "engine0" and Late.has_answer.is_set():
            raise EngineTimeoutError("engine0 hangs")
        super().check_health(timeout_s)


@pytest.mark.dist
def test_a_late_answer_is_read_by_nobody(rig: Rig) -> None:
    fleet = rig.fleet(2, connect=Late, is_killing=False)
    seen = []

    def on_groups(first: int, groups: Groups) -> None:
        seen.append(first)
        if len(seen) == 3:  # two of engine1's own, and the first that was taken from engine0
            Late.is_free.set()
            assert Late.is_late.wait(300)

    assert fleet.generate(REQUESTS, on_groups) == rig.expected(2)
    assert sorted(seen) == [0, 3, 6, 9] and Late.is_late.is_set()
    assert fleet.take_counters()["rollout/requests_reissued"] == 6
    fleet.close()


@pytest.mark.dist
def test_a_stop_ends_the_wait_and_the_work(rig: Rig) -> None:
    stop = StopRequest()
    fleet = rig.fleet(2, stop=stop)
    start = time.monotonic()
    with pytest.raises(RunStopped, match="SIGTERM to somebody"):
        fleet.generate(REQUESTS * 20, lambda first, groups: stop.request("SIGTERM to somebody"))
    for engine in fleet.engines:  # would wait for its turn
        engine.generate(REQUESTS[:1], 60.0)
    assert time.monotonic() - start < 120
    fleet.close()


@pytest.mark.dist
def test_without_restarts_it_goes_on_with_fewer_and_then_ends(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The last test of the module: no engine lives after it."""
    fleet = rig.fleet(2, max_restarts=0)
    assert generate(fleet, lambda: rig.signal(1, signal.SIGKILL)) == rig.expected(2)
    assert (
        "engine1 is lost, rollout.max_engine_restarts (0) is used up; engines left: 1 of 2"
        in caplog.text
    )
    start = time.monotonic()
    words = (
        r"(?s)no engine is left of 2: engine0 is lost: .*; engine1 is lost: it exited with code -9;"
        r" the end of .*"
    )
    with pytest.raises(EngineError, match=words):
        generate(fleet, lambda: rig.signal(0, signal.SIGKILL))
    with pytest.raises(EngineError, match=words):
        fleet.begin_weight_update(rig.version + 1)
    assert time.monotonic() - start < 300
    fleet.close()
