"""The engine of the simulator: shared decoding, slots, prompts, syncs; against worked numbers
and a plain loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.planning.simulator.durations import DecodeConfig
from rlhf_megatron.planning.simulator.simulated_fleet import RunningGroup, SimulatedEngine


def make(seconds_a_token: list[float], prefill: float = math.inf) -> SimulatedEngine:
    return SimulatedEngine(0, [0.0, *seconds_a_token], prefill)


def group(number: int, *lengths: int, prompt: int = 0) -> RunningGroup:
    return RunningGroup(number, 0, prompt, lengths)


def ends(engine: SimulatedEngine, until: float = math.inf) -> list[tuple[float, int]]:
    """(time, group) of all groups that are done before `until`."""
    found = []
    while (when := engine.find_next_end()) < until:
        found += [(when, done.number) for done in engine.finish_ended_responses(when)]
    return found


def test_two_share_until_the_first_is_done() -> None:
    # 1 s a token alone, 1.5 s with two. Both get 4 tokens in 6 s; the other's 6 more take
    # 1 s each: 12 s.
    engine = make([1.0, 1.5])
    engine.submit_group(0.0, group(0, 4))
    engine.submit_group(0.0, group(1, 10))
    assert ends(engine) == [(6.0, 0), (12.0, 1)]
    assert engine.measure_busy_seconds(20.0) == 12.0


def test_one_that_comes_later_slows_the_other() -> None:
    # alone for 3 s: 3 of 5 tokens; then 2 more at 2 s each: done at 7 s, when the other has 2 of
    # 3: done at 8 s.
    engine = make([1.0, 2.0])
    engine.submit_group(0.0, group(0, 5))
    engine.submit_group(3.0, group(1, 3))
    assert ends(engine) == [(7.0, 0), (8.0, 1)]


def test_what_finds_no_slot_waits_in_order() -> None:
    # two slots at 1 s: lengths 3, 5 | 2, 4. At 3 s the third gets in, done at 5 s like the second;
    # then the fourth.
    engine = make([1.0, 1.0])
    for number, length in enumerate((3, 5, 2, 4)):
        engine.submit_group(0.0, group(number, length))
    assert engine.num_outstanding == 4 and engine.num_running == 2
    assert ends(engine) == [(3.0, 0), (5.0, 1), (5.0, 2), (9.0, 3)]


def test_a_prompt_is_computed_once_for_a_group_and_holds_up_the_others() -> None:
    # 10 prompt tokens a second. Group 0 (20 tokens): decodes from 2 s. Group 1 (10) at 3 s: one
    # token of 0 is made, then all wait until 4 s; the three run at 1 s a token: 0 has 2 more (6 s),
    # 1 has 3 and 5 tokens (7 s, 9 s).
    engine = make([1.0, 1.0, 1.0], prefill=10.0)
    engine.submit_group(0.0, group(0, 3, prompt=20))
    engine.submit_group(3.0, group(1, 3, 5, prompt=10))
    assert ends(engine) == [(6.0, 0), (9.0, 1)]


def test_a_sync_stops_it_and_keys_and_values_are_computed_anew() -> None:
    # 4 of 10 tokens by 4 s; paused to 6 s; 2 prompt + 4 response tokens at 3 a second: 2 s; 6
    # more tokens: 14 s.
    engine = make([1.0], prefill=3.0)
    running = group(7, 10, prompt=0)
    running.num_prompt_tokens = 0
    engine.submit_group(0.0, running)
    running.num_prompt_tokens = 2
    engine.pause_decoding(4.0)
    assert engine.find_next_end() == math.inf
    engine.resume_decoding(6.0, policy_version=3, recomputes_cache=True)
    assert ends(engine) == [(14.0, 7)]
    assert running.first_versions == [0], "its first token is of the version before"
    later = group(8, 1)
    engine.submit_group(20.0, later)
    assert later.first_versions == [3]


def test_without_recomputation_it_just_goes_on() -> None:
    engine = make([1.0], prefill=3.0)
    engine.submit_group(0.0, group(7, 10))
    engine.pause_decoding(4.0)
    engine.resume_decoding(6.0, policy_version=1, recomputes_cache=False)
    assert ends(engine) == [(12.0, 7)]
    assert engine.measure_busy_seconds(12.0) == 10.0


def test_what_is_given_up_frees_its_slots_at_once() -> None:
    # Two slots. Group 0 has 4 and 9 tokens; 1 waits with 2. At 3 s group 0 is given up: 1
    # is done at 5 s.
    engine = make([1.0, 1.0])
    lost = group(0, 4, 9)
    other = group(1, 2)
    engine.submit_group(0.0, lost)
    engine.submit_group(0.0, other)
    engine.abandon_group(3.0, lost)
    assert (engine.num_running, engine.num_outstanding) == (1, 1)
    assert ends(engine) == [(5.0, 1)]
    assert engine.num_outstanding == 0


def test_seconds_a_token_between_measured_points() -> None:
    # 0.010 at 1, 0.020 at 11, 0.030 at 21: a line between, level before the first, on
    # along the last one.
    decode = DecodeConfig(points=((1, 0.010), (11, 0.020), (21, 0.030)))
    assert [decode.interpolate_token_seconds(n) for n in (1, 6, 11, 16, 31)] == pytest.approx(
        [0.010, 0.015, 0.020, 0.025, 0.040]
    )
    assert DecodeConfig(fixed_s=0.01, per_response_s=0.001).interpolate_token_seconds(
        5
    ) == pytest.approx(0.015)
    assert DecodeConfig(points=((4, 0.5),)).interpolate_token_seconds(100) == 0.5


@dataclass
class Plain:
    """A response of the plain loop below."""

    number: int
    left: float
    arrival: float


def plain_loop(
    arrivals: list[tuple[float, int]], rates: list[float], slots: int
) -> dict[int, float]:
    """number -> end: remaining tokens of each are counted down from event to event."""
    coming = [Plain(i, float(length), when) for i, (when, length) in enumerate(arrivals)]
    waiting: list[Plain] = []
    running: list[Plain] = []
    now = 0.0
    found = {}
    while coming or waiting or running:
        while coming and coming[0].arrival <= now:
            waiting.append(coming.pop(0))
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        next_arrival = coming[0].arrival if coming else math.inf
        if not running:
            now = next_arrival
            continue
        pace = rates[len(running) - 1]
        step = min(next_arrival - now, min(one.left for one in running) * pace)
        for one in running:
            one.left -= step / pace
        now = now + step if step < next_arrival - now else next_arrival
        for one in [one for one in running if one.left < 1e-7]:
            running.remove(one)
            found[one.number] = now
    return found


@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 40)), min_size=1, max_size=25),
    st.integers(1, 6),
    st.floats(0.1, 2.0),
    st.floats(0.0, 0.5),
)
@settings(max_examples=150, deadline=None)
def test_as_the_plain_loop(
    arrivals: list[tuple[float, int]], slots: int, fixed: float, more: float
) -> None:
    arrivals = sorted((round(when, 3), length) for when, length in arrivals)
    rates = [fixed + more * n for n in range(1, slots + 1)]
    engine = make(rates)
    found: list[tuple[float, int]] = []
    for number, (when, length) in enumerate(arrivals):
        found += ends(engine, when)
        engine.submit_group(when, group(number, length))
    found += ends(engine)
    expected = plain_loop(arrivals, rates, slots)
    assert {number: when for when, number in found} == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert engine.num_outstanding == engine.num_running == 0
    # Work is conserved: each token of each response was made once, at the pace of the moment.
    assert [when for when, _ in found] == sorted(when for when, _ in found)


def test_as_small_steps_of_time() -> None:
    """0.5 ms at a time, everyone gets its share; three arrivals while others run, slots for all."""
    rates = [0.02, 0.03, 0.05]
    arrivals = {0.0: (0, 30), 0.2: (1, 50), 0.5: (2, 10)}
    engine = make(rates)
    found = []
    for when, (number, length) in arrivals.items():
        found += ends(engine, when)
        engine.submit_group(when, group(number, length))
    found += ends(engine)
    left: dict[int, float] = {}
    stepped = {}
    dt = 0.0005
    for tick in range(10_000):
        left |= {
            number: float(length)
            for when, (number, length) in arrivals.items()
            if round(when / dt) == tick
        }
        if left:
            pace = rates[len(left) - 1]
            left = {number: tokens - dt / pace for number, tokens in left.items()}
            for number in [number for number, tokens in left.items() if tokens <= 1e-9]:
                del left[number]
                stepped[number] = (tick + 1) * dt
    assert {number: when for when, number in found} == pytest.approx(stepped, abs=2e-3)
