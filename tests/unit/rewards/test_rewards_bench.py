"""The reward benchmark spoils what it says, and finds a wrong status or score."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.bench_rewards import WORKLOADS, check, spoil
from benchmarks.run_all import reward_rows
from rlhf_megatron.rewards.scorers import RewardResult
from rlhf_megatron.rewards.scorers.reward_types import make_masked_result

GOOD = RewardResult(0.5)
OF_KIND = {
    "hanging": RewardResult(0.0, "timeout"),
    "raising": make_masked_result("KeyError"),
    "garbage": make_masked_result("bad_result"),
}
OF_KIND["killing"] = make_masked_result("worker_died")


def test_one_in_a_hundred_of_each_kind() -> None:
    workload = WORKLOADS["function"]
    samples = workload.make(300, 0)
    spoilt, where = spoil(samples, workload.bad, seed=1)
    assert Counter(bad.kind for bad in where.values()) == {
        "hanging": 3,
        "raising": 3,
        "garbage": 3,
        "killing": 3,
    }
    changed = {place for place in range(300) if spoilt[place] != samples[place]}
    assert changed == set(where) and len({spoilt[place].response for place in changed}) == 12


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_samples_differ(name: str) -> None:
    samples = WORKLOADS[name].make(500, 0)
    assert len({(sample.response, sample.label) for sample in samples}) == 500


def test_every_wrong_status_or_score_is_found() -> None:
    workload = WORKLOADS["function"]
    _, where = spoil(workload.make(300, 0), workload.bad, seed=1)
    results = [OF_KIND[where[place].kind] if place in where else GOOD for place in range(300)]
    counts = check([GOOD] * 300, results, where)
    assert counts["good"] == {"ok": 288} and counts["hanging"] == {"timeout": 3}
    assert counts["raising"] == {"masked:KeyError": 3} and counts["garbage"] == {
        "masked:bad_result": 3
    }
    assert counts["killing"] == {"masked:worker_died": 3}
    bad = min(where)
    good = min(set(range(300)) - set(where))
    for place, wrong in (
        (bad, GOOD),
        (bad, make_masked_result("other")),
        (good, RewardResult(0.0)),
        (good, make_masked_result("KeyError")),
    ):
        with pytest.raises(
            ValueError,
            match=rf"1 samples have a wrong status or score, the first of them \[\({place},",
        ):
            check([GOOD] * 300, [*results[:place], wrong, *results[place + 1 :]], where)


def test_rows_of_the_table() -> None:
    rows = reward_rows(
        {
            "workloads": {
                "a": {"ratio": 1.2, "is_burning": False},
                "b": {"ratio": 6.0, "is_burning": True},
            }
        }
    )
    assert [(row.what, row.ratio, row.bar) for row in rows] == [
        ("a, wall time", 1.2, 1.3),
        ("b, wall time", 6.0, None),
    ]
