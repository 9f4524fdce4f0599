"""A supply in the background: what is trained when, how old it is, and every way out of it."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from supply_tools import (
    LIMIT_S,
    Bench,
    Hasty,
    HeldSession,
    expected_log_probs,
    in_thread,
    lag_of,
    make_requests,
    stream_of,
    until,
)

from rlhf_megatron.config.schema import FilterGroupsConfig
from rlhf_megatron.controller.recovery.run_journal import GroupJournal
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.supply.group_ledger import FinishedGroup, ScoredGroup
from rlhf_megatron.data.batch import AnnotatedBatch
from rlhf_megatron.stop import RunStopped, StopRequest


def supply_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("supply-")]


def test_one_step_off_trains_on_what_the_policy_before_has_sampled() -> None:
    """Batches of 2. The second one is generated while the first is trained, and the
    sync waits for it.
    """
    bench = Bench("one_step_off", last_step=3)
    with bench.supply:
        bench.session.end(1, 0)
        assert bench.take(1) == [0, 1]
        until(lambda: bench.session.submitted == [0, 1, 2, 3])
        with in_thread(bench.sync) as is_synced:
            bench.session.end(2)
            assert not is_synced.wait(0.3), "group 3 is generated"
            assert bench.version == 1
            bench.session.end(3)
        batch = bench.take_batch(2)
        assert batch.group_ids.tolist() == [2, 2, 3, 3] and lag_of(batch, bench.version) == 1
        bench.session.end(4, 5)
        bench.sync()
        assert lag_of(bench.take_batch(3), bench.version) == 1
        bench.sync()
    others = [line for line in bench.log if not line.startswith(("scored", "generated", "updated"))]
    assert others == [
        *(
            "started group 0",
            "started group 1",
            "taken step 1",
            "started group 2",
            "started group 3",
        ),
        *(
            "synced step 1",
            "taken step 2",
            "started group 4",
            "started group 5",
            "synced step 2",
            "taken step 3",
        ),
        "synced step 3",
    ]
    assert bench.log[2:4] == ["generated group 1", "generated group 0"]
    assert bench.session.is_closed and supply_threads() == []


def test_a_sync_does_not_wait_for_engines_that_are_gone() -> None:
    """They will end nothing before they get the new weights."""
    bench = Bench("one_step_off", is_serving=lambda: False)
    with bench.supply:
        bench.session.end(0, 1)
        bench.take(1)
        bench.sync()
        assert bench.version == 2


@pytest.mark.parametrize("params", [{"max_lag": 1}, {"max_lag": 3}, {"max_lag": 2, "late": "drop"}])
def test_no_sample_is_older_than_the_bound_and_no_prompt_trains_twice(
    params: dict[str, object],
) -> None:
    """40 steps of 3 groups; each ends after a random time, some over several syncs."""
    session = HeldSession()
    bench = Bench("asynchronous", params, session=session, batch_size=3, last_step=40)
    is_over = threading.Event()
    draw = random.Random(5)

    def work() -> None:
        while not is_over.wait(0.001):
            session.end_one(lambda running: draw.choice(running[-8:]))

    trained: list[int] = []
    with bench.supply, in_thread(work):
        for step in range(1, 41):
            batch = bench.take_batch(step)
            assert lag_of(batch, bench.version) <= params["max_lag"]
            trained += batch.group_ids[::2].tolist()
            assert (batch.group_ids[::2] == batch.group_ids[1::2]).all()
            bench.sync()
        is_over.set()
    assert len(trained) == len(set(trained)) == 120
    dropped = [int(line.split()[2]) for line in bench.log if "dropped" in line and "(lag)" in line]
    assert not {*dropped} & {*trained}
    assert {*trained, *dropped} == {*range(len(trained) + len(dropped))}, "none is lost"
    if params.get("late") != "drop":
        assert dropped == []


@pytest.mark.parametrize("late", ["drop", "again"])
def test_samples_that_come_as_their_group_is_given_up_are_nobodys(late: str) -> None:
    """Groups 2 and 0 end together. The step takes 2, which leaves 0 too old, while the samples of 0
    are on their way from the session to the ledger. The run goes on, with the next group or with a
    second attempt at 0.
    """

    class Held(GroupJournal):
        """Stands between the session and the ledger."""

        def __init__(self) -> None:
            self.has_come = threading.Event()
            self.may_go_on = threading.Event()

        def write_prompt_groups(self, group: int, samples_by_request: object) -> None:
            if group == 0 and not self.may_go_on.is_set():
                self.has_come.set()
                assert self.may_go_on.wait(LIMIT_S)

    journal = Held()
    bench = Bench(
        "asynchronous", {"max_lag": 1, "late": late}, journal=journal, batch_size=1, last_step=4
    )
    with bench.supply:
        bench.session.end(1)
        assert bench.take(1) == [1]
        bench.sync()
        until(lambda: bench.session.submitted == [0, 1, 2])
        bench.session.end(2, 0)
        assert bench.take(2) == [2] and journal.has_come.wait(LIMIT_S)
        journal.may_go_on.set()
        bench.sync()
        then = [0, 3] if late == "again" else [3, 4]
        until(lambda: bench.session.submitted[3:] == then)
        assert bench.session.aborted == [], "the engines were done with it"
        for step, number in enumerate(then, 3):
            bench.session.end(number)
            assert bench.take(step) == [number]
            bench.sync()
    assert bench.log.count("generated group 0") == (late == "again"), "of the second attempt"


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_held_session_ends_only_what_still_runs(is_aborted: bool) -> None:
    """Another thread takes a group's samples, or aborts it,
    between the test's look and its word.
    """
    session = HeldSession()
    others = []
    session.submit_requests(7, make_requests(stream_of().fetch_prompts([7]), 1)[0])

    def choose(running: list[int]) -> int:
        others.append(
            threading.Thread(
                target=session.abort_keys if is_aborted else session.poll_finished,
                args=([7],) * is_aborted,
            )
        )
        others[0].start()
        others[0].join(0.2)
        return running[0]

    session.end_one(choose)
    others[0].join(LIMIT_S)
    session.end_one(lambda running: pytest.fail(f"{running} cannot end"))
    assert session.num_running == 0 and session.poll_finished() == []


def test_early_annotations_are_those_of_the_whole_batch() -> None:
    """Batches of 4 groups, pieces of 2 samples at least: a group each, in the order in
    which they come.
    """
    bench = Bench("streaming", batch_size=4, last_step=2)
    with bench.supply:
        with in_thread(
            lambda: until(lambda: "annotated group 3" in bench.log) or bench.session.end(0, 1, 2)
        ):
            bench.session.end(3)
            batch = bench.take_batch(1)
        assert isinstance(batch, AnnotatedBatch) and batch.old_log_probs is not None
        assert batch.group_ids[::2].tolist() == [0, 1, 2, 3], "in the order of the batch"
        assert torch.equal(batch.old_log_probs, expected_log_probs(1, batch))
        assert bench.pieces[0] == 2 and sum(bench.pieces) == 8


FILTER = FilterGroupsConfig(enable=True, max_num_gen_batches=3)


def test_groups_without_signal_give_way_to_others() -> None:
    """Groups 0, 2 and 3 have one answer each: 4 and 5 take their places."""
    bench = Bench(
        "one_step_off", filter_groups=FILTER, session=HeldSession(is_free=True), last_step=1
    )
    bench.session.answers = {0: ("1", "1"), 2: ("9", "9"), 3: ("1", "1")}
    with bench.supply:
        taken = bench.take(1)
        metrics = bench.supply.take_metrics()
    assert taken == [1, 4] or taken == [1, 5]
    assert metrics["schedule/dropped_no_signal"] == 3 and metrics["filter_groups/num_groups"] == 2
    assert "dropped group 0 (no signal)" in bench.log
    assert bench.supply.take_metrics() == {}


def test_a_step_trains_on_what_there_is_when_its_batches_are_used_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """3 batches of 2 groups, of which one has signal."""
    bench = Bench(
        "one_step_off", filter_groups=FILTER, session=HeldSession(is_free=True), last_step=1
    )
    bench.session.answers = {number: ("1", "1") for number in range(50) if number != 4}
    with caplog.at_level(logging.WARNING), bench.supply:
        assert bench.take(1) == [4]
    words = (
        "1 of 2 groups differ in the main reward after 3 batches (max_num_gen_batches); the step"
        " trains on those."
    )
    assert words in caplog.text


def test_a_limit_of_batches_does_not_leave_old_groups_behind() -> None:
    """4 groups were scored since step 1, which is the limit, and three can train. But step 2 is the
    last that may have group 0, which is still generated and began with version 1: it is waited for.
    """
    filters = FilterGroupsConfig(enable=True, max_num_gen_batches=2)
    bench = Bench("asynchronous", {"max_lag": 1}, filter_groups=filters)
    bench.session.answers = {4: ("1", "1")}
    with bench.supply:
        bench.session.end(1, 2)
        assert bench.take(1) == [1, 2]
        bench.sync()
        bench.session.end(3, 4, 5)
        bench.session.end(6)  # which takes the place of 4
        until(lambda: bench.log.count("scored group 6"))
        with in_thread(lambda: bench.session.end(0)):
            assert bench.take(2) == [0, 3]


def test_a_step_without_any_signal_has_groups_that_teach_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(
        "one_step_off", filter_groups=FILTER, session=HeldSession(is_free=True), last_step=2
    )
    bench.session.answers = dict.fromkeys(range(50), ("9", "9"))
    with caplog.at_level(logging.WARNING), bench.supply:
        assert bench.take(1) == [0, 1]
        assert bench.supply.take_metrics()["filter_groups/num_groups"] == 0
        bench.sync(is_new=False)
        assert len(bench.take(2)) == 2, "the next step has groups of its own"
    assert (
        "0 of 2 groups differ in the main reward after 3 batches (max_num_gen_batches); no update"
        in caplog.text
    )


def test_an_error_of_either_thread_is_raised_where_samples_are_awaited() -> None:
    def broken(groups: Sequence[FinishedGroup]) -> list[ScoredGroup]:
        raise ValueError("the reward is broken")

    bench = Bench("one_step_off", score=broken)
    with pytest.raises(ValueError, match="the reward is broken"), bench.supply:
        bench.session.end(0)
        bench.take(1)
    assert bench.session.is_closed and supply_threads() == []
    bench = Bench("one_step_off")
    bench.session.error = OSError("no engine is left")
    with pytest.raises(OSError, match="no engine is left"), bench.supply:
        bench.take(1)
    assert bench.session.is_closed and supply_threads() == []


def test_an_error_ends_a_sync_that_waits() -> None:
    bench = Bench("one_step_off")
    with pytest.raises(OSError, match="no engine is left"), bench.supply:
        bench.session.end(0, 1)
        bench.take(1)
        bench.session.error = OSError("no engine is left")
        bench.sync()
    assert bench.version == 1 and supply_threads() == []


def test_a_run_that_is_to_stop_does_not_wait_for_samples() -> None:
    def stop() -> None:
        if bench.session.num_mended == 3:  # engines get their weights while samples are awaited
            raise RunStopped("enough")

    bench = Bench("asynchronous", should_stop=stop)
    with pytest.raises(RunStopped, match="enough"), bench.supply:
        bench.take(1)
    assert bench.session.is_closed and supply_threads() == []


def test_a_run_that_is_to_stop_does_not_wait_with_its_sync() -> None:
    """The step is finished, so that its state can be saved; groups 2 and 3 still run."""
    stop = StopRequest()
    bench = Bench("one_step_off", should_stop=stop.raise_if_requested)
    with bench.supply:
        bench.session.end(0, 1)
        bench.take(1)
        with in_thread(bench.sync) as is_synced:
            assert not is_synced.wait(0.2)
            stop.request("enough")
        assert bench.version == 2 and bench.supply.get_progress().untrained_positions == (2, 3)
        with pytest.raises(RunStopped, match="enough"):
            bench.take(2)


def test_progress_names_the_groups_that_are_not_trained() -> None:
    bench = Bench("one_step_off")
    with bench.supply:
        bench.session.end(0, 1)
        assert bench.take(1) == [0, 1]
        assert bench.supply.get_progress().untrained_positions == (0, 1, 2, 3), (
            "the update of the first two is to come"
        )
        bench.session.end(2, 3)
        bench.sync()
        until(lambda: bench.supply.get_progress().num_drawn == 6)
        assert bench.supply.get_progress().untrained_positions == (2, 3, 4, 5)


def test_a_group_that_is_too_old_is_generated_anew() -> None:
    """Group 1 runs over the sync, is given up and started from the new weights; its samples are
    of these alone.
    """
    bench = Bench(Hasty(), last_step=2, batch_size=1)
    with bench.supply:
        bench.session.end(0)
        assert bench.take(1) == [0]
        until(lambda: bench.session.submitted == [0, 1])
        bench.sync()
        until(lambda: bench.session.submitted == [0, 1, 1])
        assert bench.session.aborted == [1]
        bench.session.end(1)
        batch = bench.take_batch(2)
        assert batch.group_ids.tolist() == [1, 1] and lag_of(batch, bench.version) == 0
        assert bench.supply.take_metrics()["schedule/started_again"] == 1
    assert "started group 1 (again)" in bench.log


@dataclass(frozen=True)
class Idle(Hasty):
    def count_groups_to_start(self, flow: GroupFlow) -> int:
        return 0


@dataclass(frozen=True)
class Empty(Hasty):
    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        return []


def test_a_batch_without_groups_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"Empty\(.* makes a batch of no group for step 1; let its batch return None",
    ):
        Bench(Empty())


def test_a_schedule_that_starts_nothing_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"Idle\(.*starts no group and makes no batch of the 0 groups that can train",
    ):
        Bench(Idle())


@dataclass(frozen=True)
class InOrder(Hasty):
    """Three groups at a time train in their order, two a step."""

    max_lag: int = 1
    annotates_early: bool = True

    def count_groups_to_start(self, flow: GroupFlow) -> int:
        return max(0, min(3 - len(flow.groups_in_flight), flow.num_groups_needed))

    def select_groups_to_annotate(self, flow: GroupFlow) -> Sequence[int]:
        return [
            group.number
            for group in flow.scored_groups
            if not (group.is_annotated or flow.is_training)
        ]

    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        first = sorted(flow.groups_in_flight)[:2]
        return first if len(first) == 2 and {*first} <= {*flow.scored_order} else None

    def find_stale_groups(self, flow: GroupFlow) -> Sequence[int]:
        return ()


def test_what_was_annotated_for_another_policy_is_annotated_again() -> None:
    """Group 2 has log-probs before 0, which trains in its place: they are of step 1, and it
    trains at step 2.
    """
    bench = Bench(InOrder(), last_step=2)

    def end_slowly() -> None:
        for i, number in enumerate([1, 2, 0]):
            until(lambda i=i: len(bench.pieces) == i)
            bench.session.end(number)

    with bench.supply:
        with in_thread(end_slowly):
            assert bench.take(1) == [0, 1] and bench.pieces == [2, 2, 2]
        bench.sync()
        with in_thread(lambda: until(lambda: len(bench.pieces) == 4) or bench.session.end(3)):
            batch = bench.take_batch(2)
    assert batch.group_ids[::2].tolist() == [2, 3] and lag_of(batch, bench.version) == 1
    assert isinstance(batch, AnnotatedBatch) and batch.old_log_probs is not None
    assert torch.equal(batch.old_log_probs, expected_log_probs(2, batch))
    assert bench.pieces == [2] * 5
