"""Schedules by hand: what each decides after every event of short runs, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_runs import Run, reasons, scripted, texts

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.controller.scheduler.schedules import SCHEDULES, Schedule, load_schedule
from rlhf_megatron.controller.scheduler.schedules.asynchronous import AsynchronousSchedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.one_step_off import OneStepOffSchedule
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import StalePolicy, SyncPolicy
from rlhf_megatron.controller.scheduler.schedules.streaming import StreamingSchedule
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule


def play(schedule: Schedule, batch_size: int, last_step: int, *script: str) -> Run:
    """The whole run, by its events."""
    return Run(
        schedule, GroupFlow(batch_size, last_step, served_version=0), scripted(*script), can_lose=9
    ).go()


def halted(schedule: Schedule, batch_size: int, last_step: int, *script: str) -> Run:
    """The run after these events."""
    run = Run(
        schedule, GroupFlow(batch_size, last_step, served_version=0), scripted(*script), can_lose=9
    )
    run.ask()
    for line in script:
        for _ in range(2 if line.startswith("done") else 1):
            run.happen(*run.choose(run.possible()))
    return run


def brief(run: Run) -> str:
    """The ledger in short: "+0 +1 g1 s1 a1 T1 -0:tail u1 S1"."""
    signs = {
        "started": "+",
        "generated": "g",
        "scored": "s",
        "annotated": "a",
        "dropped": "-",
        "taken": "T",
    }
    signs |= {"updated": "u", "synced": "S"}
    return " ".join(
        f"{signs[e.kind]}{e.subject_number}{':' if e.reason else ''}{e.reason.split(' ')[0]}"
        for e in run.flow.events
    )


def test_synchronous() -> None:
    """Two groups a step; none is started while a step is trained."""
    run = play(
        SynchronousSchedule(),
        2,
        2,
        *("done 1", "done 0", "update 1", "sync 1"),
        *("done 2", "done 3", "update 2", "sync 2"),
    )
    assert brief(run) == "+0 +1 g1 s1 g0 s0 T1 u1 S1 +2 +3 g2 s2 g3 s3 T2 u2 S2"
    assert run.batches == [[0, 1], [2, 3]] and run.lags == [[0, 0], [0, 0]]


def test_synchronous_makes_up_for_a_group_without_signal() -> None:
    run = play(
        SynchronousSchedule(),
        2,
        1,
        "generate 0",
        "lose 0",
        "done 2",
        "done 1",
        "update 1",
        "sync 1",
    )
    assert brief(run) == "+0 +1 g0 -0:no +2 g2 s2 g1 s1 T1 u1 S1"


def test_one_step_off() -> None:
    """The next batch is started when a step begins. Step 2's sync waits for group 3, and step 3
    trains on what was done by then. The last step starts nothing.
    """
    run = play(
        OneStepOffSchedule(),
        *(2, 3),
        *("done 0", "done 1"),  # step 1 is taken, 2 and 3 are started from version 0
        *(
            "done 2",
            "update 1",
            "done 3",
            "sync 1",
        ),  # the sync waits for 3; then step 2: lag 1; 4, 5 of version 1
        *("done 4", "done 5", "update 2", "sync 2"),
        *("update 3", "sync 3"),
    )
    assert brief(run) == (
        "+0 +1 g0 s0 g1 s1 T1 +2 +3 g2 s2 u1 g3 s3 S1 T2 +4 +5 g4 s4 g5 s5 u2 S2 T3 u3 S3"
    )
    assert run.lags == [[0, 0], [1, 1], [1, 1]]


def test_one_step_off_starts_nothing_that_the_sync_would_wait_for() -> None:
    """Group 1 is lost after the update: its successor is started from the new weights."""
    run = halted(OneStepOffSchedule(), 1, 3, "done 0", "generate 1", "update 1", "lose 1")
    assert brief(run) == "+0 g0 s0 T1 +1 g1 u1 -1:no"
    run.happen("sync", 1)
    assert brief(run).endswith("-1:no S1 +2") and run.flow.groups_in_flight[2].oldest_version == 1


def test_streaming_annotates_what_is_done() -> None:
    """Group 1 gets its log-probs while 0 is generated;
    the last of a step gets them with the batch.
    """
    run = play(
        StreamingSchedule(),
        2,
        2,
        "done 1",
        "done 0",
        "update 1",
        "sync 1",
        "done 2",
        "done 3",
        "update 2",
        "sync 2",
    )
    assert brief(run) == "+0 +1 g1 s1 a1 g0 s0 T1 u1 S1 +2 +3 g2 s2 a2 g3 s3 T2 u2 S2"
    assert run.lags == [[0, 0], [0, 0]]


def test_streaming_waits_for_those_that_were_started_first() -> None:
    """Three for two. 2 is done before 1 and is no substitute for it: what is quick has no
    advantage. It is one for 0, which has no signal.
    """
    patient = StreamingSchedule(oversampling=1.5)
    run = halted(patient, 2, 1, "done 2", "done 0")
    assert brief(run) == "+0 +1 +2 g2 s2 g0 s0 a0", "2 may not train, so it gets no log-probs"
    run.happen("generate", 1)
    run.happen("score", 1)
    assert brief(run).endswith("g1 s1 T1 -2:tail")
    run = halted(patient, 2, 1, "done 2", "generate 0", "lose 0", "done 1")
    assert brief(run) == "+0 +1 +2 g2 s2 g0 -0:no +3 a2 g1 s1 T1 -3:tail"


def test_streaming_drops_the_slowest() -> None:
    run = play(
        StreamingSchedule(1.5, "drop"),
        2,
        2,
        "done 2",
        "done 1",
        "update 1",
        "sync 1",
        "done 5",
        "done 4",
        *END_2,
    )
    assert (
        brief(run)
        == "+0 +1 +2 g2 s2 a2 g1 s1 T1 -0:tail u1 S1 +3 +4 +5 g5 s5 a5 g4 s4 T2 -3:tail u2 S2"
    )
    assert run.batches == [[1, 2], [4, 5]] and run.lags == [[0, 0], [0, 0]]


END_2 = ("update 2", "sync 2")


def test_streaming_carries_the_slowest_over() -> None:
    """1.5 x 2 = 3 groups in flight. Step 1 leaves 0 running; it goes on over the sync. 3 and 4 are
    done before it, but step 2 is the last that may train it (lag 1), and waits. Step 3 needs one
    more beside 4: 5, and no third.
    """
    run = play(
        StreamingSchedule(1.5, "carry_over", max_lag=1),
        *(2, 3),
        *("done 2", "done 1", "update 1", "sync 1"),
        *("done 3", "done 4", "done 0", "update 2", "sync 2"),
        *("done 5", "update 3", "sync 3"),
    )
    assert brief(run) == (
        "+0 +1 +2 g2 s2 a2 g1 s1 T1 u1 S1 +3 +4 g3 s3 a3 g4 s4 a4 g0 s0 T2 u2 S2 +5 a4 g5"
        " s5 T3 u3 S3"
    )
    assert run.batches == [[1, 2], [0, 3], [4, 5]] and run.lags == [[0, 0], [1, 0], [1, 0]]
    assert not reasons(run.flow), "none is lost"


def test_asynchronous_is_as_far_ahead_as_the_lag_allows() -> None:
    """One group a step and instant generation: step k is max_lag steps behind its weights
    from step 3 on.
    """
    steps = [line for k in range(1, 6) for line in (f"update {k}", f"sync {k}")]
    run = play(
        AsynchronousSchedule(max_lag=2, annotates_early=False),
        *(1, 5),
        *("done 0", "done 1", "done 2"),  # 3 x 1 groups before a step is trained: lags 0, 1, 2
        *steps[:2],
        *("done 3", *steps[2:4]),  # each sync makes room for one
        *("done 4", *steps[4:]),
    )
    assert brief(run) == (
        "+0 +1 +2 g0 s0 T1 g1 s1 g2 s2 u1 S1 T2 +3 g3 s3 u2 S2 T3 +4 g4 s4 u3 S3 T4 u4 S4 T5 u5 S5"
    )
    assert run.lags == [[0], [1], [2], [2], [2]]


def test_groups_of_lag_zero_are_started_before_a_step_is_taken() -> None:
    """Two groups a step, max_lag 1: four at the first, none more while both steps' groups are in
    flight or trained.
    """
    run = halted(AsynchronousSchedule(max_lag=1), 2, 9, "done 0", "done 1")
    assert brief(run) == "+0 +1 +2 +3 g0 s0 a0 g1 s1 T1", (
        "2 in flight of version 0 are trained by version 1"
    )
    run.happen("update", 1)
    assert len(run.flow.groups_in_flight) == 2, (
        "an update frees nothing: the next sync's version is theirs"
    )
    run.happen("sync", 1)
    assert [group.oldest_version for group in run.flow.groups_in_flight.values()] == [0, 0, 1, 1]


WAITS_FOR_0 = ("done 1", "update 1", "sync 1", "done 2")


def test_asynchronous_waits_for_a_group_that_would_be_late() -> None:
    """One group a step, max_lag 1. 1 overtakes 0; 2 may not: version 1 is the last
    that may train 0.
    """
    run = halted(AsynchronousSchedule(max_lag=1), 1, 3, *WAITS_FOR_0)
    assert brief(run) == "+0 +1 g1 s1 T1 u1 S1 +2 g2 s2 a2"
    run.happen("generate", 0)
    run.happen("score", 0)
    assert run.batches == [[1], [0]] and run.lags == [[0], [1]]


def test_early_log_probs_are_for_the_next_batch() -> None:
    """0 is of version 0, and step 3 is the last that may train it. 3 is enough for a batch by its
    number and gets its log-probs, though it is held back for 0; 4 is beyond a batch and gets none.
    """
    run = halted(
        AsynchronousSchedule(max_lag=2),
        1,
        9,
        "done 1",
        "update 1",
        "sync 1",
        "done 2",
        "update 2",
        "sync 2",
    )
    assert brief(run) == "+0 +1 +2 g1 s1 T1 u1 S1 +3 g2 s2 T2 u2 S2 +4"
    run.happen("generate", 3)
    run.happen("score", 3)
    assert brief(run).endswith("S2 +4 g3 s3 a3")
    run.happen("generate", 4)
    run.happen("score", 4)
    assert (
        brief(run).endswith("a3 g4 s4") and run.schedule.select_groups_to_annotate(run.flow) == ()
    )
    assert (
        list(
            AsynchronousSchedule(max_lag=2, annotates_early=False).select_groups_to_annotate(
                run.flow
            )
        )
        == []
    )


def test_asynchronous_drops_a_group_that_is_late() -> None:
    """2 makes step 2. Version 2 will train next, so 0 (of version 0) can no more; 3 and 4 take its
    and 2's place.
    """
    run = halted(AsynchronousSchedule(max_lag=1, late="drop"), 1, 4, *WAITS_FOR_0)
    assert brief(run) == "+0 +1 g1 s1 T1 u1 S1 +2 g2 s2 T2 -0:lag +3"
    assert run.schedule.stale_policy is StalePolicy.DROP


def test_asynchronous_begins_a_late_group_anew() -> None:
    run = halted(AsynchronousSchedule(max_lag=1, late="again"), 1, 4, *WAITS_FOR_0)
    assert brief(run) == "+0 +1 g1 s1 T1 u1 S1 +2 g2 s2 T2 +0:again"
    assert (
        run.flow.groups_in_flight[0].oldest_version == 1
        and run.schedule.stale_policy is StalePolicy.REGENERATE
    )


def test_a_batch_has_the_oldest_tokens() -> None:
    """0 is begun anew from version 1, so 3 of the same age goes after it by number, and 2 (of
    version 1, too) between; with groups of versions 1, 0, 1 the one of version 0 goes first,
    whatever its number and its place in line.
    """
    flow = GroupFlow(2, 9, served_version=1, num_steps_done=1)
    for number, version in ((4, 1), (5, 0), (6, 1)):
        flow.add_generated_group(number, version)
        flow.record_scored(number)
    assert AsynchronousSchedule(late="drop").select_batch(flow) == [4, 5]
    assert AsynchronousSchedule(late="wait").select_batch(flow) == [4, 5]
    flow = GroupFlow(2, 9, served_version=1, num_steps_done=1)
    for number in (6, 5, 4):
        flow.add_generated_group(number, 1)
        flow.record_scored(number)
    assert AsynchronousSchedule().select_batch(flow) == [4, 5]


def test_without_partial_rollouts_the_sync_waits_and_nothing_is_started_before_it() -> None:
    whole = AsynchronousSchedule(max_lag=1, partial_rollouts=False)
    assert (
        whole.sync_policy is SyncPolicy.WAIT
        and AsynchronousSchedule().sync_policy is SyncPolicy.CONTINUE
    )
    run = halted(whole, 1, 9, "done 0", "update 1")
    assert run.possible() == [("generate", 1)]
    run.happen("generate", 1)
    assert run.possible() == [("score", 1), ("lose", 1), ("sync", 1)], "its rewards may come later"


def test_no_more_groups_run_than_allowed() -> None:
    """2 of the 6 that max_lag 2 allows."""
    run = halted(AsynchronousSchedule(max_lag=2, max_running_groups=2), 2, 9, "generate 1")
    assert brief(run) == "+0 +1 g1 +2"


def test_oversampling_counts_on_losses() -> None:
    """1.25 x 4 x 2 steps = 10 groups; while a step is trained 1.25 x 4 x 1 = 5."""
    flow = GroupFlow(4, 9, served_version=0)
    greedy = AsynchronousSchedule(max_lag=1, late="drop", oversampling=1.25)
    assert greedy.count_groups_to_start(flow) == 10
    flow.start_groups(10)
    for number in range(4):
        flow.record_generated(number, 0)
        flow.record_scored(number)
    flow.record_batch_taken([0, 1, 2, 3])
    assert len(flow.groups_in_flight) == 6 and greedy.count_groups_to_start(flow) == 0
    flow.record_dropped(9, "no signal")
    assert greedy.count_groups_to_start(flow) == 0
    flow.record_dropped(8, "no signal")
    assert greedy.count_groups_to_start(flow) == 1


def test_the_last_steps_start_no_more_than_they_train() -> None:
    flow = GroupFlow(4, 10, served_version=9, num_steps_done=9)
    assert AsynchronousSchedule(max_lag=3).count_groups_to_start(flow) == 4
    assert (
        OneStepOffSchedule().count_groups_to_start(flow)
        == SynchronousSchedule().count_groups_to_start(flow)
        == StreamingSchedule().count_groups_to_start(flow)
        == 4
    )
    assert (
        AsynchronousSchedule(max_lag=3, late="drop", oversampling=1.5).count_groups_to_start(flow)
        == 6
    )
    assert StreamingSchedule(1.5, "carry_over", 1).count_groups_to_start(flow) == 4, (
        "which loses none"
    )
    done = GroupFlow(4, 10, served_version=10, num_steps_done=10)
    every = [SCHEDULES.get(name).build() for name in SCHEDULES]  # type: ignore[call-arg]
    assert [schedule.count_groups_to_start(done) for schedule in every] == [0, 0, 0, 0]


def test_oversampling_is_of_whole_groups() -> None:
    """1.1 x 10 is 11, though 1.1 in floating point times 10 is a bit more; 1.15 x 20 is 23, though
    it is a bit less.
    """
    assert (
        StreamingSchedule(1.1, "drop").count_groups_to_start(GroupFlow(10, 5, served_version=0))
        == 11
    )
    assert (
        StreamingSchedule(1.15, "drop").count_groups_to_start(GroupFlow(20, 5, served_version=0))
        == 23
    )
    assert (
        StreamingSchedule(1.5, "drop").count_groups_to_start(GroupFlow(3, 5, served_version=0)) == 4
    )


def test_what_is_left_at_the_end_is_dropped() -> None:
    run = halted(AsynchronousSchedule(max_lag=1, late="drop", oversampling=2.0), 1, 1, "done 1")
    assert (
        texts(run.flow)[-2:] == ["taken step 1", "dropped group 0 (end)"]
        and not run.flow.groups_in_flight
    )


def test_the_ledger_counts_by_version() -> None:
    flow = GroupFlow(2, 9, served_version=4, num_steps_done=4, next_group_number=7)
    assert (
        flow.start_groups(2) == [7, 8]
        and flow.num_by_oldest_version == {4: 2}
        and flow.num_running == 2
    )
    flow.add_generated_group(3, 2)
    assert (
        flow.num_by_oldest_version == {2: 1, 4: 2}
        and list(flow.num_by_oldest_version) == [2, 4]
        and flow.num_running == 2
    )
    flow.record_generated(7, 3)
    flow.record_scored(7)
    assert (
        flow.num_by_oldest_version == {2: 1, 3: 1, 4: 1}
        and flow.num_running == 1
        and flow.scored_order == [7]
    )
    flow.restart_group(7)
    assert (
        flow.num_by_oldest_version == {2: 1, 4: 2}
        and flow.num_running == 2
        and flow.scored_order == []
    )
    assert list(flow.groups_in_flight) == [7, 8, 3], "in the order in which they were started"
    flow.record_dropped(3, "lag")
    assert flow.num_by_oldest_version == {4: 2} and flow.num_groups_needed == 8
    with pytest.raises(AssertionError, match="5 steps are still to be taken"):
        flow.drop_remaining_groups()


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "asynchronous",
            {"max_lag": 0},
            r"max_lag \(0\) must be at least 1; use schedule.name: streaming for lag 0",
        ),
        ("asynchronous", {"oversampling": 1.5}, r"oversampling \(1.5\) must be 1 with late: wait"),
        (
            "asynchronous",
            {"oversampling": 0.5, "late": "drop"},
            r"oversampling \(0.5\) must be at least 1",
        ),
        (
            "asynchronous",
            {"max_running_groups": 0},
            r"max_running_groups \(0\) must be at least 1; use null",
        ),
        (
            "asynchronous",
            {"late": "agin"},
            r"schedule.params.late \('agin'\) must be one of .*; did you mean again",
        ),
        ("asynchronous", {"max_lagg": 1}, r"schedule.params.max_lagg.*max_lag"),
        ("streaming", {"tail": "drop"}, r"oversampling \(1.0\) must be above 1 with tail: drop"),
        ("streaming", {"max_lag": 1}, r"max_lag \(1\) must be 0 with tail: wait"),
        (
            "streaming",
            {"tail": "carry_over", "oversampling": 2.0},
            r"max_lag \(0\) must be at least 1 with tail: carry_over",
        ),
        (
            *("streaming", {"tail": "carry_over", "oversampling": 2.5, "max_lag": 1}),
            r"oversampling \(2.5\) must be at most max_lag \+ 1 \(2\)",
        ),
        ("streaming", {"oversampling": float("inf")}, r"oversampling \(inf\) must be at least 1"),
        (
            "synchronous",
            {"max_lag": 1},
            r"schedule.params .* must be empty: schedule 'synchronous' has no parameters",
        ),
        ("one_step_off", {"on_sync": "wait"}, r"schedule 'one_step_off' has no parameters"),
        ("one_step_of", {}, r"unknown schedule 'one_step_of'. Did you mean 'one_step_off'\?"),
    ],
)
def test_wrong_parameters(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_schedule(ScheduleConfig(name, params))


def test_schedules_by_name() -> None:
    assert list(SCHEDULES) == ["asynchronous", "one_step_off", "streaming", "synchronous"]
    made = load_schedule(
        ScheduleConfig("asynchronous", {"max_lag": 4, "late": "drop", "oversampling": 1.2})
    )
    assert made == AsynchronousSchedule(max_lag=4, late="drop", oversampling=1.2)
    assert load_schedule(ScheduleConfig("streaming")) == StreamingSchedule()
    assert isinstance(load_schedule(ScheduleConfig("one_step_off")), OneStepOffSchedule)
    assert isinstance(load_schedule(ScheduleConfig()), SynchronousSchedule)
