"""What goes wrong in a session costs time, but no key is lost or doubled, and each token's
version stays right.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from rollout_tools import request, tiny_qwen3
from session_tools import FITS, Groups, Poller, Rig, Work, prove
from test_rollout_session import MAX_NUM_SEQS, await_ends, rig_of, work_of

from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    EngineRequestError,
    GenerateRequest,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.engine_supervisor import MemberState
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines

pytestmark = [pytest.mark.dist, pytest.mark.long]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServers, Path]]:
    folder = tmp_path_factory.mktemp("faults")
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
    ) as started:
        yield started, folder / "transfer"


def finish(
    rig: Rig, work: Work, first: int, poller: Poller, is_mending: bool = True
) -> dict[int, Groups]:
    """Wait as a controller does, proving all; both engines serve then."""
    session = poller.session
    found = poller.wait_for(work, session.mend_engines if is_mending else lambda: None)
    if is_mending:
        poller.wait(lambda: len(rig.fleet.live_engines) == 2, session.mend_engines)
    poller.end()
    proof = prove(work, found, range(first - 1, rig.version + 1))
    assert proof.right <= FITS and proof.num_wrong_fits < 0.05 * proof.num_pairs
    assert session.num_running == 0
    return found


def kill(rig: Rig, index: int, number: int = signal.SIGKILL) -> None:
    os.kill(rig.servers.processes[index].pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_dies_or_hangs_and_comes_back_by_mend(
    servers: tuple[EngineServers, Path], number: int
) -> None:
    """What hangs is found by the health watch, and killed."""
    rig = rig_of(servers)
    first = rig.version
    work = work_of(24)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 2)
        rig.sync()
        kill(rig, 0, number)
        finish(rig, work, first, poller)
    assert rig.resynced == ["engine0"]
    counters = rig.fleet.take_counters()
    assert counters["rollout/engine_failures"] == counters["rollout/engine_restarts"] == 1
    assert counters["rollout/requests_reissued"] >= 1
    rig.fleet.close()


def test_all_engines_are_killed_and_a_sync_brings_them_back(
    servers: tuple[EngineServers, Path],
) -> None:
    """Nobody mends: work waits for the weights of the next sync. That both died is found by
    their processes.
    """
    rig = rig_of(servers)
    first = rig.version
    work = work_of(12)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 2)
        kill(rig, 0)
        kill(rig, 1)
        poller.wait(lambda: len(rig.fleet._supervisor.list_members(MemberState.STALE)) == 2)
        num_came = len(poller.results)
        time.sleep(0.5)
        assert len(poller.results) == num_came and rig.fleet.live_engines == ()
        rig.sync()
        assert len(rig.fleet.live_engines) == 2 and rig.resynced == []
        finish(rig, work, first, poller, is_mending=False)
    rig.fleet.close()


def test_an_engine_dies_in_a_sync_and_work_goes_on(servers: tuple[EngineServers, Path]) -> None:
    rig = rig_of(servers)
    first = rig.version
    work = work_of(24)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 2)
        rig.sync(meanwhile=lambda: kill(rig, 1))
        assert [engine.address.name for engine in rig.fleet.live_engines] == ["engine0"]
        finish(rig, work, first, poller)
    assert rig.resynced == ["engine1"]
    rig.fleet.close()


def test_a_sync_fails_on_one_engine(servers: tuple[EngineServers, Path]) -> None:
    """Its requests fail there, are sent to the other one, and none of its half-updated weights
    makes a token.
    """
    rig = rig_of(servers)
    first = rig.version
    work = work_of(24)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 2)
        rig.sync(spoil="engine0")
        assert [engine.address.name for engine in rig.fleet.live_engines] == ["engine1"]
        poller.wait(lambda: len(poller.results) >= 8)
        assert [engine.address.name for engine in rig.fleet.live_engines] == ["engine1"], (
            "it waits for a sync or for mend"
        )
        finish(rig, work, first, poller)
    assert rig.resynced == ["engine0"]
    assert rig.fleet.take_counters()["rollout/engine_restarts"] == 0
    rig.fleet.close()


class Liar(LocalEngine):
    """Its next answer says versions that cannot be."""

    lies: ClassVar[list[str]] = []

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> Groups:
        groups = await super().generate_async(requests, timeout_s, name)
        if self.address.name == "engine0" and Liar.lies:
            shift = {"old": -1, "new": 1}[Liar.lies.pop()]
            last = groups[-1][-1]
            spans = tuple(
                VersionSpan(span.version + shift, span.start, span.end)
                for span in last.version_spans
            )
            groups[-1][-1] = replace(
                last, policy_version=last.policy_version + shift, version_spans=spans
            )
        return groups


@pytest.mark.parametrize("lie", ["old", "new"])
def test_an_engine_of_another_version_is_stale(
    servers: tuple[EngineServers, Path], lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_of(servers, Liar)
    first = rig.version
    work = work_of(16)
    Liar.lies = [lie]
    with rig.fleet.open_session() as session:
        finish(rig, work, first, Poller(session, work))
    assert rig.resynced == ["engine0"] and not Liar.lies
    assert (
        "engine0 has not got the current weights: engine0 returned samples of version"
        in caplog.text
    )
    assert rig.fleet.take_counters()["rollout/engine_failures"] == 1
    rig.fleet.close()


def test_a_long_sync_ends_no_request_and_an_engine_that_hangs_does(
    servers: tuple[EngineServers, Path],
) -> None:
    """request_timeout_s is of the time in which engines can work. Without a health watch that would
    find it first.
    """
    rig = rig_of(servers, request_timeout_s=6.0, health_interval_s=600.0)
    first = rig.version
    work = work_of(8)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 1)
        rig.sync(hold_s=8.0)
        found = poller.wait_for(work)
        assert set(rig.fleet.take_counters().values()) == {0.0}
        assert any(
            len(s.version_spans) == 2
            for groups in found.values()
            for group in groups
            for s in group
        )
        prove(work, found, range(first, rig.version + 1))
        kill(rig, 0, signal.SIGSTOP)
        start = time.monotonic()
        more = work_of(4, first=50)
        poller.submit(more)
        poller.wait(lambda: len(poller.results) == len(work) + len(more))
        assert 6 <= time.monotonic() - start < 100
        kill(rig, 0, signal.SIGCONT)
        poller.wait(lambda: len(rig.fleet.live_engines) == 2, session.mend_engines)
        poller.end()
    counters = rig.fleet.take_counters()
    assert counters["rollout/engine_failures"] == 1 and counters["rollout/requests_reissued"] >= 1
    rig.fleet.close()


def test_an_evaluation_beside_a_session_holds_up_neither(
    servers: tuple[EngineServers, Path],
) -> None:
    """Also where the session has far more work than engines have room for;
    and a sync afterwards.
    """
    rig = rig_of(servers)
    first = rig.version
    work = work_of(80, 8)
    requests = [request((1 + i, 2), (i, i + 1), 40) for i in range(12)]
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 2)
        before = len(poller.results)
        groups = rig.fleet.generate(requests)
        during = len(poller.results) - before
        assert during > 0 and session.num_running > 8, (
            "the evaluation did not wait for the end of all"
        )
        assert [len(group) for group in groups] == [2] * 12
        proof = prove({0: requests}, {0: groups}, [rig.version, rig.version - 1])
        assert proof.right <= FITS < proof.wrong and proof.num_spans == {1: 24}
        rig.sync()
        assert {s.policy_version for group in rig.fleet.generate(requests) for s in group} == {
            rig.version
        }
        finish(rig, work, first, poller)
    assert set(rig.fleet.take_counters().values()) == {0.0}
    rig.fleet.close()


def test_a_failed_evaluation_leaves_the_session_alone(servers: tuple[EngineServers, Path]) -> None:
    rig = rig_of(servers)
    first = rig.version
    work = work_of(16)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 1)
        with pytest.raises(EngineRequestError, match="vocabulary"):
            rig.fleet.generate([request((1,), (1,), 100), request((77,), (1,), 2)])
        finish(rig, work, first, poller)
    assert set(rig.fleet.take_counters().values()) == {0.0}
    rig.fleet.close()


def test_what_is_aborted_frees_its_engines(servers: tuple[EngineServers, Path]) -> None:
    """Each engine has many times what it decodes at once; when all of it is given up, a new key
    comes at once.
    """
    rig = rig_of(servers)
    long = work_of(40, 8, 240)
    short = work_of(1, first=900)
    with rig.fleet.open_session() as session:
        poller = Poller(session, long)
        poller.wait(lambda: len(poller.results) >= 1)
        poller.abort(long)
        poller.submit(short)
        poller.wait(lambda: poller.came[-1:] == [900])
        assert poller.came_after_abort == {900} and session.num_running == 0
        calls = [call for call in rig.fleet.list_recent_calls() if call.verb == "abort"]
        assert {call.engine for call in calls} == {"engine0", "engine1"}
        await_ends(rig.fleet, 5.0)
        assert rig.reasons["abort"] > 40, "of 96 that were on their way"
        poller.end()
    assert set(rig.fleet.take_counters().values()) == {0.0}
    rig.fleet.close()


def test_a_wrong_request_and_engines_that_are_gone_raise(
    servers: tuple[EngineServers, Path],
) -> None:
    """The last test of the module: no engine lives after it."""
    rig = rig_of(servers, is_killing=False)
    rig.fleet.resync_engines = None
    work = work_of(8)
    with rig.fleet.open_session() as session:
        session.submit_requests(1, [request((77,), (1,), 2)])
        with pytest.raises(EngineRequestError, match="vocabulary"):
            while True:
                session.poll_finished()
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 1)
        kill(rig, 0)
        kill(rig, 1)
        with pytest.raises(EngineError, match=r"no engine is left of 2: .*engine0.*engine1"):
            poller.wait(lambda: False)
        poller.end()
    rig.fleet.close()
