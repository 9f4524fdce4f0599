"""Whatever comes first and whatever is lost: each step gets its batch, within the bound on the lag,
and the run ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runs import Possible, Run, reasons

from rlhf_megatron.controller.scheduler.schedules import Schedule
from rlhf_megatron.controller.scheduler.schedules.asynchronous import AsynchronousSchedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.schedules.one_step_off import OneStepOffSchedule
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import StalePolicy
from rlhf_megatron.controller.scheduler.schedules.streaming import StreamingSchedule
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule

FACTORS = st.sampled_from([1.0, 1.1, 1.25, 1.5, 2.0, 3.0])
ABOVE_1 = st.sampled_from([1.1, 1.25, 1.5, 2.0])
RUNNING = st.one_of(st.none(), st.integers(1, 12))
ASYNCHRONOUS = st.one_of(
    st.builds(
        AsynchronousSchedule,
        st.integers(1, 5),
        st.booleans(),
        st.just("wait"),
        st.just(1.0),
        st.booleans(),
        RUNNING,
    ),
    st.builds(
        AsynchronousSchedule,
        st.integers(1, 5),
        st.booleans(),
        st.sampled_from(["drop", "again"]),
        FACTORS,
        st.booleans(),
        RUNNING,
    ),
)
CARRYING = st.builds(
    lambda factor, lag: StreamingSchedule(factor, "carry_over", lag), ABOVE_1, st.integers(1, 4)
)
STREAMING = st.one_of(
    st.builds(StreamingSchedule, FACTORS, st.just("wait")),
    st.builds(StreamingSchedule, ABOVE_1, st.just("drop")),
    CARRYING,
)
SCHEDULES = st.one_of(
    st.builds(SynchronousSchedule), st.builds(OneStepOffSchedule), STREAMING, ASYNCHRONOUS
)


def any_order(random: Random) -> Callable[[Sequence[Possible]], Possible]:
    return random.choice


def adversary(random: Random) -> Callable[[Sequence[Possible]], Possible]:
    """Some groups end only when nothing else can happen, and events of one kind come first wherever
    they can: a slow trainer, slow rewards, slow engines.
    """
    slow_one_in = random.randint(1, 6)
    order = ["generate", "score", "lose", "update", "sync"]
    random.shuffle(order)

    def choose(possible: Sequence[Possible]) -> Possible:
        def rank(event: Possible) -> tuple[bool, int, float]:
            name, subject = event
            is_slow = name in ("generate", "score") and subject % slow_one_in == 0
            return is_slow, order.index(name), random.random()

        return min(possible, key=rank)

    return choose


ORDERS = st.sampled_from([any_order, adversary])


def checked(run: Run) -> Run:
    """Goes to the end; then what holds for each schedule."""
    flow = run.flow
    schedule = run.schedule
    before = flow.num_steps_left, len(flow.groups_in_flight)
    run.go()
    steps, of_before = before
    assert len(run.batches) == steps
    trained = [number for batch in run.batches for number in batch]
    assert len(set(trained)) == len(trained) == steps * flow.batch_size, "no group trains twice"
    lost = Counter(reasons(flow))
    assert (
        not flow.groups_in_flight and run.num_started + of_before == len(trained) + lost.total()
    ), "all are accounted for"
    # Nothing is begun that no step could train, but for what over-sampling counts on losing
    factor = getattr(schedule, "oversampling", 1.0)
    is_kept = (
        isinstance(schedule, AsynchronousSchedule) or getattr(schedule, "tail", "") == "carry_over"
    )
    rounds = 1 if is_kept else steps  # the others begin each step with so many anew
    spare = rounds * math.floor((factor - 1) * flow.batch_size * (steps if is_kept else 1) + 1e-9)
    assert lost["end"] + lost["tail"] <= spare + of_before
    return run


@settings(max_examples=120, deadline=None)
@given(
    SCHEDULES,
    ORDERS,
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 7),
    st.sampled_from([0, 0, 3, 40]),
)
def test_every_step_gets_a_batch_within_the_bound(
    schedule: Schedule, order: Callable, seed: int, batch_size: int, steps: int, can_lose: int
) -> None:
    run = checked(
        Run(schedule, GroupFlow(batch_size, steps, served_version=0), order(Random(seed)), can_lose)
    )
    if schedule.max_lag == 0:
        assert set(reasons(run.flow)) <= {"tail", "no signal"}, "nothing is left to grow old"


WAITING = st.one_of(
    st.builds(
        AsynchronousSchedule,
        st.integers(1, 5),
        st.booleans(),
        st.just("wait"),
        st.just(1.0),
        st.booleans(),
        RUNNING,
    ),
    CARRYING,
    st.builds(SynchronousSchedule),
    st.builds(OneStepOffSchedule),
)


@settings(max_examples=120, deadline=None)
@given(
    WAITING,
    ORDERS,
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 7),
    st.sampled_from([0, 3, 40]),
)
def test_who_waits_loses_none(
    schedule: Schedule, order: Callable, seed: int, batch_size: int, steps: int, can_lose: int
) -> None:
    """Also where steps leave the policy as it is, and so the version."""
    random = Random(seed)
    still = {step for step in range(1, steps + 1) if random.random() < 0.3}
    run = Run(
        schedule,
        GroupFlow(batch_size, steps, served_version=3),
        order(random),
        can_lose,
        still.__contains__,
    )
    checked(run)
    assert run.num_stale == 0 and set(reasons(run.flow)) <= {"no signal"}
    assert run.num_started == steps * batch_size + run.num_lost


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_batch_is_awaited_exactly_where_groups_would_be_lost(
    groups: list[tuple[int, bool]], batch_size: int, is_new: bool
) -> None:
    """Against a plain count, step by step, of what can train in time after the batch."""
    max_lag = 4
    version = 4 + is_new
    flow = GroupFlow(batch_size, last_step=100, served_version=version)
    for number, (oldest_version, is_scored) in enumerate(groups):
        flow.add_generated_group(number, oldest_version + is_new)
        if is_scored:
            flow.record_scored(number)
    waiting = AsynchronousSchedule(max_lag)

    def num_lost(rest: list[int]) -> int:
        """Of groups with these oldest versions, the oldest first, all done by the next sync."""
        lost = 0
        now = version
        while rest:
            now += 1
            lost += sum(now - one > max_lag for one in rest)
            rest = [one for one in rest if now - one <= max_lag][batch_size:]
        return lost

    versions = sorted(group.oldest_version for group in flow.groups_in_flight.values())
    batch = waiting.select_batch(flow)
    scored = sorted((group.oldest_version, group.number) for group in flow.scored_groups)
    if len(scored) < batch_size:
        assert batch is None
        return
    chosen = [number for _, number in scored[:batch_size]]
    rest = sorted(
        group.oldest_version
        for group in flow.groups_in_flight.values()
        if group.number not in chosen
    )
    if num_lost(versions[batch_size:]) == 0:  # it is possible to lose none
        assert (batch == sorted(chosen)) == (num_lost(rest) == 0)
    assert batch in (None, sorted(chosen))
    if all(is_scored for _, is_scored in groups):
        assert batch is not None, "waiting helps no more"


@settings(max_examples=60, deadline=None)
@given(ASYNCHRONOUS, st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9))
def test_admission_alone_keeps_the_bound_where_groups_are_done_in_order(
    schedule: AsynchronousSchedule, seed: int, batch_size: int, steps: int
) -> None:
    """However fast trainer and engines are: equation 3 of the paper."""
    random = Random(seed)
    speed = {name: random.random() for name in ("generate", "score", "update", "sync")}

    def in_order(possible: Sequence[Possible]) -> Possible:
        first: dict[str, int] = {}
        for name, subject in possible:
            first[name] = min(subject, first.get(name, subject))
        names = list(first)
        name = random.choices(names, [speed[one] for one in names])[0]
        return name, first[name]

    run = checked(Run(schedule, GroupFlow(batch_size, steps, served_version=0), in_order))
    if schedule.oversampling == 1:
        assert run.num_stale == 0 and run.num_started == batch_size * steps
        assert [number for batch in run.batches for number in batch] == list(
            range(batch_size * steps)
        )


@settings(max_examples=80, deadline=None)
@given(
    SCHEDULES,
    ORDERS,
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 25),
)
def test_a_resumed_run_goes_on_with_what_it_finds(
    schedule: Schedule, order: Callable, seed: int, batch_size: int, steps: int, num_known: int
) -> None:
    """Groups of any age, also of a run that had other parameters: what is too old is dropped or
    begun anew, more than can be trained in time leave later, and nobody waits for what cannot be.
    """
    random = Random(seed)
    flow = GroupFlow(
        batch_size, last_step=10 + steps, served_version=9, num_steps_done=10, next_group_number=50
    )
    for number in sorted(random.sample(range(80), num_known)):
        flow.add_generated_group(number, random.randint(0, 9))
    run = Run(schedule, flow, order(random))
    too_old = sum(
        flow.compute_lag(group) > schedule.max_lag for group in flow.groups_in_flight.values()
    )
    checked(run)
    assert run.num_stale >= too_old
    if schedule.stale_policy is StalePolicy.REGENERATE:
        assert "lag" not in reasons(flow)
