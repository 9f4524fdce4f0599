"""trace.json, and calls to the hosts in it."""

import json
import threading
import time
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.controller.observe.trace import PROCESS_NUMBER, TraceWriter
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.parallel_layout import ParallelLayout

BATCH = TokenBatch(
    torch.tensor([0, 2, 5]), torch.arange(5), torch.tensor([False, True, False, True, True])
)


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def durations(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events if event["ph"] == "X"}


def check_format(events: list[dict[str, Any]]) -> None:
    """Rules of the format, and of this file: the events of a track follow each other."""
    names: dict[int, str] = {}
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        assert (
            event["ph"] in ("X", "M")
            and event["pid"] == PROCESS_NUMBER
            and isinstance(event["name"], str)
        )
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            assert (
                all(isinstance(event[key], int) for key in ("ts", "dur", "tid"))
                and event["dur"] >= 0
            )
            assert event["tid"] in names, "a track is named before its first event"
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(set(names.values())) == len(names) and PROCESS_NUMBER not in names
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, "nothing here overlaps within a track"


def test_steps_and_stages_with_their_times(tmp_path: Path) -> None:
    before = time.time()
    with RunTracker(tmp_path, ("jsonl",), total_steps=2) as tracker:
        with tracker.time_stage("evaluate"):
            pass
        with pytest.raises(KeyError), tracker.track_step(1), tracker.time_stage("generate"):
            time.sleep(0.03)
            raise KeyError
    after = time.time()
    events = read(tmp_path / "trace.json")
    check_format(events)
    found = durations(events)
    assert set(found) == {"evaluate", "generate"}, (
        "a step that failed is no step; its stages are there"
    )
    generate = found["generate"]
    assert (generate["tid"], generate["cat"], generate["args"]) == (1, "stage", {"step": 1})
    assert 30_000 <= generate["dur"] <= (after - before) * 1e6
    # wall clock
    assert before * 1e6 - 1e4 <= found["evaluate"]["ts"] < generate["ts"] <= after * 1e6 + 1e4
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["steps", "stages"]


def test_an_open_trace_is_an_array_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path, "x")
    trace.add_event("a", "stages", "stage", 1.0, 1.5)
    text = path.read_text()
    assert text.startswith("[\n") and text.endswith("},\n")
    assert all(json.loads(line.removesuffix(",")) for line in text.splitlines()[1:])
    check_format(json.loads(text.removesuffix(",\n") + "]"))
    trace.close()
    trace.close()
    trace.add_event("late", "stages", "stage", 2.0, 3.0)
    assert set(durations(read(path))) == {"a"}


@pytest.mark.parametrize("ending", ["closed", "open", "cut", "empty", "bracket"])
def test_a_trace_is_gone_on_with(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "trace.json"
    first = TraceWriter(path, "x")
    first.add_event("a", "stages", "stage", 1.0, 1.5)
    text = path.read_text()
    first.close()
    if ending != "closed":
        path.write_text(
            {"open": text, "cut": text + '{"name": "b", "ph', "empty": "", "bracket": "[\n"}[ending]
        )
    second = TraceWriter(path, "x")
    second.step = 4
    second.add_event("c", "stages", "stage", 2.0, 2.25)
    second.close()
    events = read(path)
    assert set(durations(events)) == ({"c"} if ending in ("empty", "bracket") else {"a", "c"})
    assert durations(events)["c"]["dur"] == 250_000 and durations(events)["c"]["args"] == {
        "step": 4
    }
    assert sum(event["name"] == "process_labels" for event in events) == 1


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with RunTracker(tmp_path, (), total_steps=1) as tracker, tracker.time_stage("generate"):
        pass
    assert list(tmp_path.iterdir()) == []


class SlowPools:
    """A WorkerGroup of two pools, each a thread that sleeps through its calls one after the other,
    once it `may_begin`. The critic's ends after the actor's.
    """

    layout = ParallelLayout(world_size=1)

    def __init__(self) -> None:
        self.layouts = {"actor": self.layout, "critic": self.layout}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.last: dict[str, threading.Thread | None] = dict.fromkeys(self.layouts)
        self.may_begin = threading.Event()
        self.is_closed = False

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        assert token_budget == 99
        return self.broadcast_call(method, **arguments, batch=batch)

    def broadcast_call(self, method: str, seconds: float, **arguments: Any) -> Future[Any]:
        self.calls.append((method, arguments))
        pool = "critic" if method.startswith("critic.") else "actor"
        before = self.last[pool]
        future = Future()

        def run() -> None:
            if before is not None:
                before.join()
            self.may_begin.wait()
            if pool == "critic" and (other := self.last["actor"]) is not None:
                other.join()
            time.sleep(seconds)
            future.set_result(method)

        self.last[pool] = threading.Thread(target=run)
        self.last[pool].start()
        return future

    def close(self) -> None:
        for thread in filter(None, self.last.values()):
            thread.join()
        self.is_closed = True


def test_calls_of_two_pools_are_seen_at_the_same_time(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json", "x")
    pools = SlowPools()
    workers = RoleProxies(pools, trace.record_call)
    trace.step = 3
    start = time.monotonic()
    futures = [
        workers.actor.log_probs(BATCH, 99, seconds=0.02),
        workers.critic.values(BATCH, 99, seconds=0.02),
        workers.reference.log_probs(BATCH, 99, seconds=0.02, with_entropy=False),
        workers.host.send_weights(seconds=0.02, version=7),
    ]
    pools.may_begin.set()
    names = ["actor.log_probs", "critic.values", "reference.log_probs", "host.send_weights"]
    assert [f.result() for f in futures] == names
    pools.close()
    took = time.monotonic() - start
    trace.close()
    assert pools.is_closed and pools.calls[2] == (
        "reference.log_probs",
        {"with_entropy": False, "batch": BATCH},
    )
    assert pools.calls[3] == ("host.send_weights", {"version": 7})
    events = read(tmp_path / "trace.json")
    check_format(events)
    found = durations(events)
    tracks = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert {name: tracks[event["tid"]] for name, event in found.items()} == {
        "actor.log_probs": "actor pool",
        "critic.values": "critic pool",
        "reference.log_probs": "actor pool",
        "host.send_weights": "actor pool",
    }
    assert found["actor.log_probs"]["args"] == {"step": 3, "num_samples": 2, "num_tokens": 5}
    first = found["actor.log_probs"]
    second = found["reference.log_probs"]
    other = found["critic.values"]
    assert second["ts"] >= first["ts"] + first["dur"], (
        "a call waits for the one before it in its pool"
    )
    last = found["host.send_weights"]
    for event in (first, other, second, last):
        assert event["dur"] >= 20_000
    assert first["dur"] + second["dur"] + last["dur"] <= took * 1e6, (
        "time that a call waited is not its own"
    )
    assert other["ts"] < first["ts"] + first["dur"] and other["ts"] + other["dur"] > second["ts"], (
        "pools overlap"
    )


def test_a_call_that_fails_is_seen_and_its_error_goes_on(tmp_path: Path) -> None:
    class Failing(SlowPools):
        def broadcast_call(self, method: str, **arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(ValueError("lost"))
            return future

    trace = TraceWriter(tmp_path / "trace.json", "x")
    with pytest.raises(ValueError, match="lost"):
        RoleProxies(Failing(), trace.record_call).host.refresh_reference().result()
    trace.close()
    assert set(durations(read(tmp_path / "trace.json"))) == {"host.refresh_reference"}
