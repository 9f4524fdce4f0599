"""What sessions are made of: turns, the versions that samples may have, and how much an
engine is given.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rollout_tools import request

from rlhf_megatron.data.expert_route_files import write_route_file
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    GeneratedSample,
    GenerateRequest,
    SampleGroups,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet import chunk_generation
from rlhf_megatron.rollout.fleet.chunk_generation import (
    ServedVersions,
    describe_wrong_spans,
    describe_wrong_version,
)
from rlhf_megatron.rollout.fleet.engine_calls import FairLock, list_sample_names, make_call_name
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import FleetMember
from rlhf_megatron.rollout.fleet.request_balancer import (
    ChunkAssignment,
    EnginePreference,
    LeastOutstandingBalancer,
    OutstandingLoad,
    RequestChunk,
    compute_session_sample_limit,
)
from rlhf_megatron.rollout.local import local_bodies
from rlhf_megatron.rollout.local.local_client import LocalEngine


def test_the_lock_is_one_threads_and_others_get_it_in_order() -> None:
    lock = FairLock()
    order = []
    asked = threading.Event()

    def next_one(name: str) -> None:
        with lock.hold_lock():
            order.append(name)

    threads = [threading.Thread(target=next_one, args=(name,)) for name in "abc"]
    with lock.hold_lock(), lock.hold_lock():
        assert lock.is_held_by_caller
        for index, thread in enumerate(threads):
            thread.start()
            while len(lock._queue) <= index + 1:
                time.sleep(0.001)
        with lock.try_hold_lock(0.0) as is_mine:
            assert is_mine, "whoever has it gets it again"
        found: list[bool] = []

        def try_it() -> None:
            start = time.monotonic()
            with lock.try_hold_lock(0.1) as is_mine:
                found.append(is_mine)
            assert time.monotonic() - start >= 0.1
            asked.set()

        threading.Thread(target=try_it).start()
        assert asked.wait(60) and found == [False]
        assert order == [] and len(lock._queue) == 4
    for thread in threads:
        thread.join(60)
    assert order == ["a", "b", "c"] and not lock.is_held_by_caller and not lock._queue


def test_the_clock_stands_still_while_somebody_has_the_lock() -> None:
    lock = FairLock()
    start_s = time.monotonic()
    start = lock.read_unlocked_clock()
    with lock.hold_lock():
        before = lock.read_unlocked_clock()
        time.sleep(0.2)
        assert lock.read_unlocked_clock() == pytest.approx(before, abs=1e-6)
    time.sleep(0.1)
    passed = lock.read_unlocked_clock() - start
    all_s = time.monotonic() - start_s
    assert 0.1 <= passed <= all_s - 0.2 + 1e-3


def sample(
    spans: tuple[tuple[int, int, int], ...], num_tokens: int, version: int | None = None
) -> GeneratedSample:
    """`spans`: (version, start, end)."""
    found = tuple(VersionSpan(*span) for span in spans)
    first = version if version is not None else found[0].version
    return GeneratedSample((1,) * num_tokens, (0.0,) * num_tokens, "length", first, found)


SERVED = ServedVersions(5, {2, 3, 5})  # version 4 was never served by this fleet
PROBLEMS = {
    "the last version": (sample(((5, 0, 4),), 4), 5, ""),
    "over three syncs": (sample(((2, 0, 1), (3, 1, 2), (5, 2, 4)), 4), 2, ""),
    "it ended before the last sync": (sample(((2, 0, 1), (3, 1, 4)), 4), 2, ""),
    "no spans, and no sync between": (sample((), 4, 5), 5, ""),
    "no token": (sample((), 0, 3), 3, ""),
    "a version that comes later": (
        sample(((5, 0, 2), (6, 2, 4)), 4),
        5,
        r"version \[6\].*asked .* at version 5.* is 5",
    ),
    "weights of before it was asked": (
        sample(((2, 0, 4),), 4),
        3,
        r"version \[2\], though .* at version 3",
    ),
    "a version that nobody has synced": (sample(((3, 0, 2), (4, 2, 4)), 4), 3, r"version \[4\]"),
    "a later token of older weights": (
        sample(((5, 0, 2), (3, 2, 4)), 4),
        3,
        r"of versions \[5, 3\]",
    ),
    "a gap": (sample(((3, 0, 1), (5, 2, 4)), 4), 3, "4 tokens with the versions of"),
    "not to its end": (sample(((3, 0, 3),), 4), 3, "4 tokens with the versions of"),
    "another first version": (
        sample(((3, 0, 4),), 4, 5),
        3,
        r"of version 5 whose tokens are of versions \[3\]",
    ),
    "no spans, but a sync between": (
        sample((), 4, 5),
        3,
        "does not say which tokens came before version 5",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_versions_that_a_sample_can_have(name: str) -> None:
    bad, sent_at, words = PROBLEMS[name]
    good = sample(((sent_at, 0, 1),), 1)
    found = describe_wrong_spans([[good], [good, bad]], sent_at, SERVED)
    assert re.search(words, found) if words else found == ""
    assert describe_wrong_spans([[bad]], None, ServedVersions()) == "", (
        "before the first sync there is nothing to compare"
    )


def test_between_two_syncs_there_is_one_version() -> None:
    group = [sample(((3, 0, 2),), 2), sample(((5, 0, 2),), 2)]
    assert describe_wrong_version([group[:1]], 3) == "" == describe_wrong_version([group], None)
    assert "version [3, 5], the current is 5" in describe_wrong_version([group], 5)


def member(name: str, max_running: int | None) -> FleetMember:
    engine = LocalEngine(EngineAddress(name, "local", "http://127.0.0.1:1", "t" * 32))
    return FleetMember(name, engine, max_running_samples=max_running)


def open_chunk(key: int, num_samples: int) -> RequestChunk:
    return RequestChunk(key, (request((1,), tuple(range(num_samples)), 4),), is_session=True)


def test_a_session_fills_engines_beyond_what_they_decode_at_once() -> None:
    """8 samples a piece; engines that decode 16 at once get 48 and those that do
    not say get 768.
    """
    small = member("engine0", 16)
    silent = member("engine1", None)
    assert compute_session_sample_limit(small) == 48 and compute_session_sample_limit(silent) == 768
    load = OutstandingLoad()
    placed = []
    for key in range(20):
        sent = LeastOutstandingBalancer().place_chunk(open_chunk(key, 8), [small], load, 1)
        if sent is not None:
            load.add_chunk(sent)
            placed.append(key)
    assert placed == [0, 1, 2, 3, 4, 5]
    assert (
        LeastOutstandingBalancer().place_chunk(open_chunk(9, 8), [small, silent], load, 1).member
        is silent
    )  # type: ignore[union-attr]


def test_generate_and_a_session_do_not_take_each_others_places() -> None:
    engine = member("engine0", 4)
    other = member("engine1", 4)
    load = OutstandingLoad()
    for key in range(3):
        load.add_chunk(
            ChunkAssignment(
                open_chunk(key, 4), "engine0", engine.engine.generate_async, engine, engine.engine
            )
        )
    assert LeastOutstandingBalancer().place_chunk(open_chunk(9, 4), [engine], load, 1) is None
    closed = replace(open_chunk(9, 4), is_session=False)
    for _ in range(2):
        sent = LeastOutstandingBalancer().place_chunk(closed, [engine], load, 1)
        assert sent is not None
        load.add_chunk(sent)
    assert LeastOutstandingBalancer().place_chunk(closed, [engine], load, 1) is None, (
        "two pieces of a generate at once"
    )
    assert LeastOutstandingBalancer().place_chunk(closed, [engine, other], load, 1).member is other  # type: ignore[union-attr]
    assert (
        load.count_samples(engine, True),
        load.count_samples(engine, False),
        load.count_all_samples(engine),
    ) == (12, 8, 20)


def test_a_turn_goes_back_to_the_engine_that_has_its_beginning_in_the_cache() -> None:
    """While that engine serves the same version, has room, and has not failed with the turn."""
    engines = [member("engine0", 4), member("engine1", 4)]
    load = OutstandingLoad()
    balancer = LeastOutstandingBalancer()

    def choose(chunk: RequestChunk, version: int = 1) -> str:
        """The name of the engine that the balancer chooses."""
        sent = balancer.place_chunk(chunk, engines, load, version)
        assert sent is not None
        return sent.target_name

    at_first = balancer.place_chunk(open_chunk(0, 4), engines, load, 1)
    assert at_first is not None and at_first.target_name == "engine0"
    load.add_chunk(at_first)
    assert choose(open_chunk(1, 1)) == "engine1", "the engine with less to do"
    preference = EnginePreference("engine0", 1)
    assert choose(replace(open_chunk(1, 1), preference=preference)) == "engine0"
    assert choose(replace(open_chunk(1, 1), preference=preference), version=2) == "engine1"
    gone = EnginePreference("engine7", 1)
    assert choose(replace(open_chunk(1, 1), preference=gone)) == "engine1"
    failed = replace(
        open_chunk(1, 1), preference=preference, failure_by_engine={"engine0": "it died"}
    )
    assert choose(failed) == "engine1"
    for key in range(2, 4):
        load.add_chunk(
            ChunkAssignment(
                open_chunk(key, 4),
                "engine0",
                engines[0].engine.generate_async,
                engines[0],
                engines[0].engine,
            )
        )
    assert choose(replace(open_chunk(1, 1), preference=preference)) == "engine1", "it is full"


def test_a_session_tells_where_a_key_was_generated_and_for_how_long() -> None:
    """The first engine fails with the key; the time of both calls counts."""
    engines = [Refusing(), Refusing()]
    engines[0].routes = ""
    engines[1].address = replace(Refusing.address, name="engine1")
    answers = [GeneratedSample((3,), (-0.5,), "length", 1)]

    async def answer(
        requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        await asyncio.sleep(0.2)
        return [answers]

    engines[1].generate_async = answer  # type: ignore[method-assign]
    fleet = EngineFleet(engines, 60.0, 3)  # type: ignore[arg-type]
    with fleet.open_session(keeps_finished_calls=True) as session:
        assert session.measure_engine_seconds(7) == 0.0
        session.submit_requests(7, [request((1,), (0,), 4)], EnginePreference("engine0", None))
        session.poll_finished()
        until(lambda: session.measure_engine_seconds(7) > 0.05)
        engines[0].is_over.set()
        found: list[tuple[int, SampleGroups]] = []
        until(lambda: bool(found.extend(session.poll_finished()) or found))
        assert found == [(7, [answers])]
        call = session.take_finished_call(7)
        assert call.engine is not None and call.engine.member_name == "engine1"
        assert 0.25 <= call.engine_seconds < 60
        assert session.measure_engine_seconds(7) == 0.0
        with pytest.raises(KeyError):
            session.take_finished_call(7)


def test_turns_that_fail_together_are_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Dozens of turns are at an engine when it ends; another one does them."""
    engines = [Refusing(), Refusing()]
    engines[1].address = replace(Refusing.address, name="engine1")

    async def answer(
        requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        return [[GeneratedSample((3,), (-0.5,), "length", 1)]]

    engines[1].generate_async = answer  # type: ignore[method-assign]
    fleet = EngineFleet(engines, 60.0, 3)  # type: ignore[arg-type]
    caplog.set_level("WARNING", chunk_generation.__name__)
    with fleet.open_session() as session:
        preference = EnginePreference("engine0", None)
        for key in range(40):
            session.submit_requests(key, [request((1,), (0,), 4)], preference)
        keys = {key for key, _ in session.poll_finished()}
        engines[0].is_over.set()
        until(
            lambda: bool(keys.update(key for key, _ in session.poll_finished()) or len(keys) == 40)
        )
    lines = [
        record.getMessage() for record in caplog.records if "engine0 failed" in record.getMessage()
    ]
    assert len(lines) == 1, lines
    counts = [
        re.findall(r"failed with (\d+) samples of (\d+) calls: it was ended", line)
        for line in lines
    ]
    num_failed = sum(int(calls) for [(_, calls)] in counts)
    assert num_failed == fleet.take_counters()["rollout/requests_reissued"] >= 20


def test_a_call_has_a_name_and_its_samples_have_theirs() -> None:
    name = make_call_name(3)
    assert name != make_call_name(3) and list_sample_names(name) == [
        f"{name}-0",
        f"{name}-1",
        f"{name}-2",
    ]
    asked = [request((1,), (1, 2, 3), 4)]
    body = local_bodies.parse_verb_body(
        local_bodies.encode_requests(asked, name), local_bodies.GenerateBody
    )
    assert body.name == name and body.to_requests() == asked
    assert local_bodies.parse_verb_body(
        json.dumps({"names": [name]}).encode(), local_bodies.AbortBody
    ).names == (name,)
    assert local_bodies.parse_verb_body(b"", local_bodies.AbortBody).names == ()
    with pytest.raises(
        ValueError,
        match=r'the body must be {"names": \["..."\]}.*: .*length >= 1 - at `\$.names\[0\]`',
    ):
        local_bodies.parse_verb_body(b'{"names": [""]}', local_bodies.AbortBody)
    with pytest.raises(ValueError, match=r"Expected `str`, got `int` - at `\$.name`"):
        local_bodies.parse_verb_body(b'{"requests": [], "name": 3}', local_bodies.GenerateBody)


class Refusing:
    """An engine that refuses the prompt (0,), and ends others when it is told to."""

    address = EngineAddress("engine0", "local", "http://127.0.0.1:1", "")

    def __init__(self, routes: str = "") -> None:
        """`routes`: a file of the sample that it answers with then; "": it fails."""
        self.is_over = threading.Event()
        self.routes = routes

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        if requests[0].prompt_ids == (0,):
            raise EngineRequestError("the prompt is refused")
        assert await asyncio.to_thread(self.is_over.wait, 60)
        if self.routes:
            return [[GeneratedSample((3,), (-0.5,), "length", 1, routes=self.routes)]]
        raise EngineError("it was ended")

    def abort_calls(self, call_names: Sequence[str] = ()) -> None:
        self.is_over.set()

    def get_max_running_samples(self) -> int:
        return 8

    def get_served_version(self) -> int:
        return 1

    def check_health(self, timeout_s: float) -> None:
        raise EngineError("no answer")


def test_what_a_session_was_closed_for_is_not_hidden_by_who_mends_it() -> None:
    """Key 1 is on its way when 0 ends the session. Then the engine fails; no retries are left to
    send it again.
    """
    fleet = EngineFleet([Refusing()], 60.0, 0)  # type: ignore[list-item]
    session = fleet.open_session()
    session.submit_requests(1, [request((1,), (0,), 4)])
    session.submit_requests(0, [request((0,), (0,), 4)])
    deadline = time.monotonic() + 60
    with session, pytest.raises(EngineRequestError, match="refused"):
        while time.monotonic() < deadline:
            session.poll_finished()
    fleet.set_engine_aside("engine0", "it is gone")
    session.mend_engines()
    assert session.num_running == 0


def test_a_session_that_keeps_failures_goes_on_without_what_no_engine_can_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Key 0 is refused; 1 runs on, and ends when it is aborted. A wake ends a poll that waits."""
    fleet = EngineFleet([Refusing()], 60.0, 0)  # type: ignore[list-item]
    with fleet.open_session(keeps_failures=True) as session:
        session.submit_requests(1, [request((1,), (0,), 4)])
        session.submit_requests(0, [request((0,), (0,), 4)])
        deadline = time.monotonic() + 60
        failures = []
        while not failures and time.monotonic() < deadline:
            assert session.poll_finished() == []
            failures = session.take_failures()
        assert [(key, type(error)) for key, error in failures] == [(0, EngineRequestError)]
        assert session.num_running == 1 and session.take_failures() == []
        session.submit_requests(0, [request((0,), (0,), 4)])
        while not session._generation.failed_chunks:
            assert session.poll_finished() == [] and time.monotonic() < deadline
        session.abort_keys([0])
        session.submit_requests(0, [request((1,), (0,), 4)])
        assert session.take_failures() == [] and session.num_running == 2, (
            "a key that is used again has not failed"
        )
        session.wake_poll()
        monkeypatch.setattr(chunk_generation, "POLL_S", 3600.0)
        session.poll_finished()  # which ends


def test_files_of_an_answer_that_nobody_reads_are_removed(tmp_path: Path) -> None:
    """The first key is aborted as it runs; what comes all the same has its file. The second is
    read and keeps it.
    """
    for number, is_read in enumerate((False, True)):
        name = write_route_file(str(tmp_path), np.ones((1, 2), np.int64))
        engine = Refusing(name)
        with EngineFleet([engine], 60.0, 0).open_session() as session:  # type: ignore[list-item]
            session.submit_requests(number, [request((1,), (0,), 4)])
            session.poll_finished()
            engine.is_over.set()
            if not is_read:
                session.abort_keys([number])
            deadline = time.monotonic() + 60
            found = []
            while not found and Path(name).exists() and time.monotonic() < deadline:
                found = session.poll_finished()
        assert (bool(found), Path(name).exists()) == (is_read, is_read)


def test_a_closed_session_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers come that nobody reads: one before it is closed, one after."""
    monkeypatch.setattr(chunk_generation, "_ABORT_TIMEOUT_S", 0.0)
    names = [write_route_file(str(tmp_path), np.ones((1, 2), np.int64)) for _ in range(2)]
    first, second = engines = [Refusing(name) for name in names]
    monkeypatch.setattr(second, "abort_calls", lambda call_names=(): None)
    session = EngineFleet(engines, 60.0, 0).open_session()  # type: ignore[arg-type]
    for key in range(2):
        session.submit_requests(key, [request((1,), (0,), 4)])
    session.poll_finished()
    first.is_over.set()
    until(lambda: len(session._generation._ended_calls) == 1)
    session.close()
    second.is_over.set()
    until(lambda: not any(map(os.path.exists, names)))


def test_what_an_engine_never_answers_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is aborted, and nothing comes."""
    monkeypatch.setattr(chunk_generation, "_CANCEL_DELAY_S", 0.0)
    engine = Refusing()
    silent = Silent()
    monkeypatch.setattr(engine, "generate_async", silent.generate_async)
    with EngineFleet([engine], 60.0, 0).open_session() as session:  # type: ignore[list-item]
        session.submit_requests(0, [request((1,), (0,), 4)])
        until(lambda: session.poll_finished() == [] and silent.is_running)
        session.abort_keys([0])
        until(lambda: silent.is_cancelled)
        assert session.poll_finished() == [] and not session._generation._ended_calls


class Silent:
    """An engine that never answers."""

    is_running = is_cancelled = False

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        self.is_running = True
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


def test_files_of_groups_that_were_known_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a closed piece of two groups the first is known: both are generated, and the
    first is not read.
    """
    names = [write_route_file(str(tmp_path), np.ones((1, 2), np.int64)) for _ in range(2)]
    engine = Refusing()

    async def both(
        requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        files = names if len(requests) == 2 else [""]
        return [[GeneratedSample((3,), (-0.5,), "length", 1, routes=name)] for name in files]

    monkeypatch.setattr(engine, "generate_async", both)
    fleet = EngineFleet([engine], 60.0, 0, is_isolated=True)  # type: ignore[list-item]
    known = GeneratedSample((3,), (-0.5,), "length", 1)
    found = fleet.generate([request((1,), (0,), 4)] * 3, known_groups={0: [known]})
    assert found[0] == [known] and found[1][0].routes == names[1]
    assert list(map(os.path.exists, names)) == [False, True]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)
