"""The simulator against runs that are worked by hand, and what holds for every run.

A small run: 2 groups a step, 1 sample a group, 1 engine with 2 slots at 1 s a token whatever runs,
a call of the scorer takes 0.5 s, the update 2 s, a sync 1 s; prompts and log-probs take no time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.planning.simulator.durations import LengthsConfig, SimulatedWorkload
from rlhf_megatron.planning.simulator.simulated_runs import simulate_run
from rlhf_megatron.planning.simulator.simulation import (
    SimulationHistory,
    compute_simulation_figures,
)
from rlhf_megatron.planning.simulator.simulation_plan import GpuSplit, SimulationPlan

PLAN = SimulationPlan(
    num_steps=2,
    last_step=2,
    batch_size=2,
    group_size=1,
    num_engines=1,
    seconds_per_token=(0.0, 1.0, 1.0),
    prefill_tokens_per_s=float("inf"),
    score_fixed_s=0.5,
    score_per_sample_s=0.0,
    num_score_workers=1,
    annotate_s_per_token=0.0,
    annotate_fixed_s=0.0,
    advantages_s=0.0,
    update_s_per_token=0.0,
    update_fixed_s=2.0,
    sync_s=1.0,
    recomputes_cache=False,
)


def cycle(*lengths: float, group_size: int = 1, no_signal: float = 0.0) -> SimulatedWorkload:
    """Of prompts of one token."""
    responses = LengthsConfig("cycle", values=lengths)
    return SimulatedWorkload(
        responses, LengthsConfig("constant", median=1), group_size, 10**6, 10**6, 1, no_signal
    )


def run(
    plan: SimulationPlan, lengths: SimulatedWorkload, name: str, **params: object
) -> SimulationHistory:
    return simulate_run(
        plan, load_schedule(ScheduleConfig(name, params)), lengths, keeps_details=True
    )


def lines(history: SimulationHistory) -> list[str]:
    short = {"started": "s", "generated": "g", "scored": "r", "annotated": "a", "dropped": "d"}
    return [
        f"{short.get(event.kind, event.kind)}{event.subject_number}"
        for event in history.flow_events
    ]


def ends(history: SimulationHistory) -> list[float]:
    return [step.end_s for step in history.steps]


def test_synchronous() -> None:
    # 3 and 5 tokens: both have come by 5 s, in one piece; rewards 5.5; update 7.5; sync 8.5. Then 2
    # and 4: 4 s more.
    history = run(PLAN, cycle(3, 5, 2, 4), "synchronous")
    assert ends(history) == [8.5, 16.0]
    first = ["s0", "s1", "g0", "g1", "r0", "r1", "taken1", "updated1", "synced1"]
    assert lines(history) == [
        *first,
        "s2",
        "s3",
        "g2",
        "g3",
        "r2",
        "r3",
        "taken2",
        "updated2",
        "synced2",
    ]
    assert [step.lag_counts for step in history.steps] == [Counter({0: 2})] * 2
    # Of 16 s: the trainer worked 2 x (2 + 1), the scorer 2 x 0.5, the engine decoded 5 + 4
    # and was paused 2.
    found = compute_simulation_figures(history, GpuSplit(1, 1, 1), 0)
    assert (found.step_s, found.trainer_idle, found.scorer_idle) == (8.0, 1 - 6 / 16, 1 - 1 / 16)
    assert (found.engines_idle, found.engines_syncing) == (
        pytest.approx(1 - 9 / 16 - 2 / 16),
        2 / 16,
    )
    # Tokens that were trained: 3 + 5 + 2 + 4 and four prompts of one: 18, on 2 GPUs.
    assert found.tokens_per_s == 18 / 16 and found.tokens_per_s_per_gpu == 9 / 16


def test_one_step_off() -> None:
    # Step 1 is taken at 5.5 as above, and 2 and 3 begin: done at 7.5 and 9.5, rewards 8 and 10. The
    # update is done at 7.5, the sync waits for 3: 9.5 to 10.5. Step 2 is scored at 10 and taken at
    # 10.5: update 12.5, sync 13.5.
    history = run(PLAN, cycle(3, 5, 2, 4), "one_step_off")
    assert ends(history) == [10.5, 13.5]
    assert [step.batch_taken_s for step in history.steps] == [5.5, 10.5]
    # 2 comes at 7.5, when the update ends, too: what was told first, at 5.5, is the
    # start of 2 and 3.
    assert lines(history)[:9] == ["s0", "s1", "g0", "r0", "g1", "r1", "taken1", "s2", "s3"]
    assert sorted(lines(history)[9:11]) == ["g2", "updated1"]
    assert lines(history)[11:] == ["r2", "g3", "r3", "synced1", "taken2", "updated2", "synced2"]
    assert [step.lag_counts for step in history.steps] == [Counter({0: 2}), Counter({1: 2})]


def test_asynchronous_with_partial_rollouts() -> None:
    # max_lag 1, 2 slots: four groups begin at 0; 0 (3 tokens) and 1 (5) run, 2 (2) from 3 s to 5 s,
    # 3 (9) from 5 s on. Rewards of 0 at 3.5, of 1 and 2 at 5.5, together. Step 1 (0, 1) at 5.5; two
    # steps in all, so none begins. Update to 7.5, sync to 8.5, during which 3 stands still with 2.5
    # of 9 tokens: it is done at 15, scored at 15.5; step 2.
    history = run(PLAN, cycle(3, 5, 2, 9), "asynchronous", max_lag=1, annotates_early=False)
    assert ends(history) == [8.5, 18.5]
    begun = [
        "s0",
        "s1",
        "s2",
        "s3",
        "g0",
        "r0",
        "g1",
        "g2",
        "r1",
        "taken1",
        "r2",
        "updated1",
        "synced1",
    ]
    assert lines(history) == [*begun, "g3", "r3", "taken2", "updated2", "synced2"]
    assert history.steps[1].lag_counts == Counter({1: 2}), (
        "the first token of 3 is of the version before"
    )
    with_recomputation = replace(PLAN, recomputes_cache=True, prefill_tokens_per_s=1.0, num_steps=2)
    # Prompts of one token, one a second: 0 and 1 hold until 2 s. 0: 5 s; then 2's prompt to 6 s.
    # The rest shifts, too.
    assert ends(run(with_recomputation, cycle(3, 5, 2, 9), "asynchronous", max_lag=1))[1] > 18.5 + 3


def test_streaming_computes_log_probs_while_others_are_generated() -> None:
    # Log-probs take 1 s a token: 0 (3 + 1 tokens) from 3.5 to 7.5. 1 (9) comes at 9, 9.5; its
    # log-probs 10 s: 19.5; update 21.5; sync 22.5. Where they come with the batch: 9.5 +
    # 14 = 23.5; 26.5.
    plan = replace(PLAN, annotate_s_per_token=1.0, num_steps=1, last_step=1)
    history = run(plan, cycle(3, 9), "streaming")
    assert ends(history) == [22.5]
    assert lines(history) == [
        "s0",
        "s1",
        "g0",
        "r0",
        "a0",
        "g1",
        "r1",
        "taken1",
        "updated1",
        "synced1",
    ]
    assert ends(run(plan, cycle(3, 9), "synchronous")) == [26.5]
    # A call for less than a mini-batch of two samples is not made while more are awaited.
    assert ends(run(replace(plan, min_annotated_samples=2), cycle(3, 9), "streaming")) == [26.5]


def test_the_batch_is_taken_while_early_log_probs_are_computed() -> None:
    # 0 (3 + 1 tokens) is annotated from 3.5 to 7.5, 1 (5) is scored at 5.5: taken then, its
    # log-probs from 7.5 to 13.5.
    plan = replace(PLAN, annotate_s_per_token=1.0, num_steps=1, last_step=1)
    history = run(plan, cycle(3, 5), "streaming")
    assert history.steps[0].batch_taken_s == 5.5 and ends(history) == [16.5]
    assert "a0" not in lines(history), "it is no more in flight when its log-probs are there"


def test_a_tail_is_dropped() -> None:
    # 3 groups for 2 places: 0 (3), 1 (9), 2 (2) with 3 slots. 2 and 0 are scored at 2.5 and 3.5:
    # taken; 1 is given up.
    plan = replace(
        PLAN,
        seconds_per_token=(0.0, 1.0, 1.0, 1.0),
        num_steps=1,
        last_step=2,
        min_annotated_samples=9,
    )
    history = run(plan, cycle(3, 9, 2), "streaming", oversampling=1.5, tail="drop")
    assert lines(history)[:8] == ["s0", "s1", "s2", "g2", "r2", "g0", "r0", "taken1"]
    assert lines(history)[8] == "d1" and history.busy_by_step[1].drop_counts == Counter({"tail": 1})
    assert history.steps[0].num_response_tokens == 5
    assert history.engine_loads[0][-1][1] >= 0 and ends(history) == [6.5]


def test_work_goes_to_the_engine_with_the_fewest_samples() -> None:
    # Two engines, 2 samples a group: 0 -> first, 1 -> second, 2 -> first, 3 -> second, whatever
    # their lengths. 1 s a token: 0 (1, 1) by 1 s, 1 (9, 9) by 9 s; the first then does 2 (1, 1) by
    # 2 s, the second 3 (1, 1) by 10 s.
    plan = replace(PLAN, num_engines=2, group_size=2, batch_size=4, num_steps=1, last_step=1)
    history = run(plan, cycle(1, 1, 9, 9, 1, 1, 1, 1, group_size=2), "streaming")
    assert history.steps[0].batch_taken_s == 10.5
    assert [max(count for _, count in load) for load in history.engine_loads] == [2, 2]


def test_the_synchronous_run_gets_pieces_of_groups() -> None:
    # 4 groups, 2 engines: 4 pieces of one group; first and third piece to the first engine. Events
    # come by pieces.
    plan = replace(PLAN, num_engines=2, batch_size=4, num_steps=1, last_step=1)
    history = run(plan, cycle(4, 3, 2, 1), "synchronous")
    assert lines(history)[4:8] == ["g3", "g2", "g1", "g0"]
    # One engine: one piece.
    one = run(
        replace(PLAN, batch_size=4, num_steps=1, last_step=1), cycle(4, 3, 2, 1), "synchronous"
    )
    assert lines(one)[4:8] == ["g0", "g1", "g2", "g3"]


def test_groups_without_signal_are_made_up_for() -> None:
    plan = replace(PLAN, num_steps=3, last_step=3, max_scored_groups=8.0)
    workload = cycle(3, 5, 2, 4, no_signal=0.4)
    teaches = [workload.has_signal(number) for number in range(30)]
    assert 5 < sum(teaches) < 27
    for name in ("synchronous", "streaming"):
        history = run(plan, workload, name)
        dropped = [
            event.subject_number for event in history.flow_events if event.reason == "no signal"
        ]
        assert dropped and not any(teaches[number] for number in dropped), name
        assert all(step.lag_counts.total() == 2 for step in history.steps), name


SCHEDULES = st.sampled_from(
    [
        ScheduleConfig("synchronous"),
        ScheduleConfig("one_step_off"),
        ScheduleConfig("streaming"),
        ScheduleConfig("streaming", {"oversampling": 1.5, "tail": "drop"}),
        ScheduleConfig("streaming", {"oversampling": 1.5, "tail": "carry_over", "max_lag": 1}),
        ScheduleConfig("asynchronous", {"max_lag": 1}),
        ScheduleConfig("asynchronous", {"max_lag": 3}),
        ScheduleConfig("asynchronous", {"max_lag": 2, "partial_rollouts": False}),
        ScheduleConfig("asynchronous", {"max_lag": 1, "late": "again"}),
        ScheduleConfig("asynchronous", {"max_lag": 1, "late": "drop"}),
    ]
)


@given(
    SCHEDULES,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.floats(0.0, 20.0),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_what_holds_for_every_run(
    schedule: ScheduleConfig,
    batch: int,
    engines: int,
    slots: int,
    seed: int,
    update_s: float,
    ends_there: bool,
) -> None:
    plan = replace(
        PLAN,
        num_steps=4,
        last_step=4 if ends_there else 100,
        batch_size=batch,
        num_engines=engines,
        group_size=2,
        seconds_per_token=(0.0, *(0.1 + 0.02 * n for n in range(slots))),
        prefill_tokens_per_s=200.0,
        update_fixed_s=update_s,
        annotate_s_per_token=0.01,
        recomputes_cache=True,
    )
    prompts = LengthsConfig("constant", median=5)
    workload = SimulatedWorkload(
        LengthsConfig("lognormal", median=10, sigma=1.0), prompts, 2, 200, 100, seed
    )
    decides = load_schedule(schedule)
    history = simulate_run(plan, decides, workload, keeps_details=True)
    counts = Counter(event.kind for event in history.flow_events)
    gone = counts["dropped"] + 4 * batch
    assert gone <= counts["started"] and counts["taken"] in (4, 5) and counts["synced"] == 4
    assert all(
        step.lag_counts.total() == 2 * batch and max(step.lag_counts) <= decides.max_lag
        for step in history.steps
    )
    total = history.busy_by_step[-1].time_s
    assert (
        history.busy_by_step[-1].trainer_s <= total + 1e-6 + max(0.0, update_s + 10)
        and history.busy_by_step[-1].scorer_s >= 0
    )
    assert (
        history.busy_by_step[-1].engines_s + engines * history.busy_by_step[-1].paused_s
        <= engines * total + 1e-6
    )
    assert ends(history) == sorted(ends(history))
    # The trainer is at one thing at a time, and so is the scorer.
    for row in ("trainer", "scorer"):
        spans = sorted((s.start_s, s.end_s) for s in history.spans if s.track == row)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(spans)), row


def test_the_same_run_twice_is_the_same() -> None:
    prompts = LengthsConfig("lognormal", median=20, sigma=0.5)
    first, second = (
        run(
            replace(PLAN, num_steps=3, last_step=3, batch_size=5),
            SimulatedWorkload(
                LengthsConfig("pareto", median=30, sigma=0.7), prompts, 1, 500, 100, 3
            ),
            "asynchronous",
            max_lag=2,
        )
        for _ in range(2)
    )
    assert lines(first) == lines(second) and ends(first) == ends(second)
