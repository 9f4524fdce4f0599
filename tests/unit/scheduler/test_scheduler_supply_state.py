"""What a supply keeps for a later process, and what that makes of it; what the threads tell the
ledger too late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_samples import scored
from supply_tools import (
    NUM_SAMPLES,
    READER,
    TOKENIZER,
    Bench,
    Hasty,
    HeldSession,
    make_requests,
    right_or_wrong,
    stream_of,
)
from watched_foreground import WatchedForeground

from rlhf_megatron.config.schema import FilterGroupsConfig, ScheduleConfig
from rlhf_megatron.controller.recovery.resume_point import RunState, check_schedule_can_resume
from rlhf_megatron.controller.recovery.run_journal import GroupJournal
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.supply.background_supply import ResumedGroups
from rlhf_megatron.controller.scheduler.supply.group_ledger import (
    EngineOrder,
    FinishedGroup,
    GroupLedger,
    PromptProgress,
)
from rlhf_megatron.controller.scheduler.supply.supply_factory import find_resumable_groups
from rlhf_megatron.controller.scheduler.supply.supply_threads import (
    EngineDriver,
    GroupScorer,
    RecentErrorBound,
)
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.data.item_stream import StreamCursor
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.reward_scorer import RewardErrorRateError
from rlhf_megatron.rollout.engine_interface import GeneratedSample, VersionSpan


def finished(number: int, *versions: int, routes: str = "") -> FinishedGroup:
    """Two samples of as many tokens as there are versions. `routes`: the file of both."""
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    sample = GeneratedSample(
        (3,) * len(versions), (-0.375,) * len(versions), "stop", versions[0], spans, routes=routes
    )
    return FinishedGroup(number, stream_of().fetch_prompts([number]), [[sample] * NUM_SAMPLES])


def journal_with(directory: Path, *groups: FinishedGroup) -> GroupJournal:
    journal = GroupJournal(directory, "these")
    for group in groups:
        journal.write_prompt_groups(group.number, group.samples)
    return journal


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    greedy = finished(5, 2)
    both = FinishedGroup(9, greedy.prompts, [*finished(9, 1, 2, 2).samples, [greedy.samples[0][0]]])
    journal_with(tmp_path, finished(4, 3), both)
    (tmp_path / ".group_00000007.samples.17.part").write_bytes(b"half")
    found = GroupJournal(tmp_path, "these").read_prompt_groups()
    assert found == {4: finished(4, 3).samples, 9: both.samples}
    assert names(tmp_path) == ["group_00000004.samples", "group_00000009.samples"]
    assert GroupJournal(tmp_path, "others").read_prompt_groups() == {}


def test_a_damaged_group_is_absent(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, finished(4, 3), finished(5, 3))
    path = tmp_path / "group_00000004.samples"
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:40],
        b"",
        whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
        whole + b"x",
    ):
        path.write_bytes(damaged)
        assert set(journal.read_prompt_groups()) == {5}


def test_a_checkpoint_lets_go_of_what_was_trained_before_it(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, *(finished(number, 1) for number in (0, 1, 2, 3, 6, 7)))
    journal.forget_saved(
        RunState(2, 3, StreamCursor(num_drawn=6, batch_size=2, order=""), untrained=(1, 3, 4))
    )
    assert [name[6:14] for name in names(tmp_path)] == [
        "00000001",
        "00000003",
        "00000006",
        "00000007",
    ]


def test_a_later_process_goes_on_with_what_its_checkpoint_has_not_trained(tmp_path: Path) -> None:
    """Six prompts were drawn, 1, 3 and 4 of them not trained; the policy is version 5. Group 3 has
    a token of version 6, which is no more; 8 and 10 were started after the checkpoint; 2 was
    trained before it.
    """
    groups = [finished(1, 4, 5), finished(2, 5), finished(3, 5, 6), finished(8, 5), finished(10, 6)]
    journal = journal_with(tmp_path, *groups)
    found = find_resumable_groups(
        journal, stream_of(), PromptProgress(6, (1, 3, 4)), policy_version=5
    )
    assert found.num_drawn == 9
    assert [group.number for group in found.generated_groups] == [1, 8] and found.lost_numbers == (
        3,
        4,
        6,
        7,
    )
    assert found.generated_groups[0].prompts.group_ids == (1,) and found.generated_groups[
        0
    ].prompts.prompts == ("1",)
    assert len(names(tmp_path)) == 2
    assert find_resumable_groups(
        None, stream_of(), PromptProgress(6, (1, 3)), policy_version=5
    ) == ResumedGroups(6, (), (1, 3))


def test_groups_of_other_settings_do_not_wait_for_these_to_come_back(tmp_path: Path) -> None:
    """Policies of the same version, made with other settings, are others. So is a
    damaged file of one.
    """
    journal_with(tmp_path, finished(1, 5), finished(8, 5))
    (tmp_path / "group_00000009.samples").write_bytes(b"half")
    assert (
        find_resumable_groups(
            GroupJournal(tmp_path, "others"), stream_of(), PromptProgress(6, (1,)), policy_version=5
        ).generated_groups
        == ()
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize("is_filtered", [False, True])
def test_groups_in_flight_do_not_go_on_in_a_synchronous_run(is_filtered: bool) -> None:
    state = RunState(2, 3, StreamCursor(num_drawn=4, batch_size=2, order=""))
    check_schedule_can_resume(ScheduleConfig("synchronous"), is_filtered, state)
    with pytest.raises(
        ValueError, match=r"schedule.name \(synchronous\) cannot go on .* and 1 of them not trained"
    ):
        check_schedule_can_resume(
            ScheduleConfig("synchronous"), is_filtered, replace(state, untrained=(3,))
        )


def test_what_is_known_is_not_generated_and_what_is_lost_is() -> None:
    """Batches of two from groups 1, 3 (known), 2, 4 (lost) and then 5."""
    found = ResumedGroups(5, (finished(1, 5), finished(3, 4)), (2, 4))
    session = HeldSession(is_free=True)
    bench = Bench(
        "one_step_off", session=session, version=5, steps_done=2, last_step=5, resumed_groups=found
    )
    with bench.supply:
        assert bench.supply.get_progress().untrained_positions == (1, 2, 3, 4)
        assert bench.take(3) == [1, 3] and 1 not in session.submitted
        bench.sync()
        assert bench.take(4) == [2, 4]
        bench.sync()
        assert bench.take(5) == [5, 6]
        bench.sync()
    assert session.submitted == [2, 4, 5, 6]
    assert bench.supply.get_progress().untrained_positions == ()


def test_a_known_group_that_is_too_old_is_dropped() -> None:
    """Its tokens are of version 3, the policy that trains next is 5, the bound 1."""
    found = ResumedGroups(2, (finished(0, 3), finished(1, 4)))
    bench = Bench(
        "one_step_off",
        session=HeldSession(is_free=True),
        version=5,
        steps_done=2,
        resumed_groups=found,
    )
    with bench.supply:
        assert bench.take(3) == [1, 2]
        assert bench.supply.take_metrics()["schedule/dropped_lag"] == 1
    assert "dropped group 0 (lag)" in bench.log


def test_samples_of_a_group_that_was_started_again_are_not_taken_for_the_new_ones() -> None:
    """Group 1 is too old after the sync. Its first samples come after that, its first rewards
    would, too. The files that engines wrote for them are left out with the next batch.
    """
    ledger = GroupLedger(GroupFlow(1, 5, 1), Hasty())
    ledger.restore_groups(0)
    assert [(order.kind, order.number) for order in ledger.take_orders()] == [
        ("submit", 0),
        ("submit", 1),
    ]
    score = GroupScorer(READER, right_or_wrong, FilterGroupsConfig())
    groups = [finished(0, 1), finished(1, 1, routes="old")]
    ledger.record_generated(groups[0], attempt=0)
    ledger.groups_to_score.clear()  # as the thread does that has them scored
    ledger.record_scored(groups[:1], score(groups[:1]))
    taken = ledger.take_pending_batch()
    assert (
        taken is not None
        and [group.number for group in taken.groups] == [0]
        and ledger.take_pending_batch() is None
    )
    assert taken.unused_route_files == ()
    ledger.record_generated(groups[1], attempt=0)
    ledger.record_update()
    ledger.record_sync(2)
    orders = [
        (order.kind, order.number, order.attempt, order.served_version)
        for order in ledger.take_orders()
    ]
    assert orders == [
        ("submit", 2, 0, 1),
        ("submit", 1, 1, 2),
        ("abort", 2, 0, 2),
        ("submit", 2, 1, 2),
    ]
    ledger.record_scored(groups[1:], score(groups[1:]))
    ledger.record_generated(finished(1, 1, routes="late"), attempt=0)
    assert (
        not ledger.flow.scored_order
        and ledger.flow.num_running == 2
        and ledger.groups_to_score == []
    )
    again = finished(1, 2, routes="new")
    ledger.record_generated(again, attempt=1)
    assert ledger.groups_to_score == [again]
    ledger.record_scored([again], score([again]))
    taken = ledger.take_pending_batch()
    assert taken is not None and set(taken.unused_route_files) == {"old", "late"}
    assert taken.groups[0].batch.routes == ("new",) * NUM_SAMPLES


def test_files_of_a_batch_that_no_group_teaches_stay_and_those_of_others_do_not() -> None:
    """Without signal group 0 trains where nothing else can, and is left out where group 1
    has come, too.
    """
    for num_groups, left_out in ((1, set()), (2, {"file 0"})):
        ledger = GroupLedger(GroupFlow(1, 5, 1), Hasty(), max_scored=num_groups)
        ledger.restore_groups(0)
        groups = [finished(number, 1, routes=f"file {number}") for number in range(num_groups)]
        for group in groups:
            ledger.record_generated(group, attempt=0)
        score = GroupScorer(READER, right_or_wrong, FilterGroupsConfig())
        found = [replace(one, has_signal=one.number > 0) for one in score(groups)]
        ledger.record_scored(groups, found)
        taken = ledger.take_pending_batch()
        assert taken is not None and set(taken.unused_route_files) == left_out
        assert {*(taken.groups[0].batch.routes or ())} == {f"file {num_groups - 1}"}


def test_what_is_given_up_before_it_was_submitted_never_is() -> None:
    """Group 1 was started and dropped since the driver looked; 2 was started, given up and
    started again.
    """
    ledger = GroupLedger(GroupFlow(1, 5, 1), Hasty())
    session = HeldSession()
    driver = EngineDriver(ledger, session, stream_of().fetch_prompts, make_requests, None)
    order = [
        ("submit", 0, 0),
        ("submit", 1, 0),
        ("submit", 2, 0),
        ("abort", 1, 0),
        ("abort", 2, 0),
        ("submit", 2, 1),
    ]
    driver.follow_orders([EngineOrder(kind, number, attempt, 1) for kind, number, attempt in order])
    assert session.submitted == [0, 2] and session.aborted == []
    driver.follow_orders(
        [
            EngineOrder("abort", 0, 0, 1),
            EngineOrder("abort", 2, 1, 1),
            EngineOrder("submit", 0, 1, 2),
        ]
    )
    assert session.submitted == [0, 2, 0] and session.aborted == [0, 2]


def test_seeds_are_of_the_version_that_a_group_is_started_with() -> None:
    prompt = stream_of().fetch_prompts([7])
    (first,), (same,), (other,) = (make_requests(prompt, version)[0] for version in (1, 1, 2))
    assert first == same and set(first.seeds).isdisjoint(other.seeds)


def test_a_greedy_sample_gives_its_reward_to_the_group() -> None:
    ids = {text: (*TOKENIZER.encode(text), TOKENIZER.eos_token_id) for text in "19"}
    samples = {text: GeneratedSample(of, (-0.5, -0.5), "stop", 1) for text, of in ids.items()}
    group = FinishedGroup(
        3, stream_of().fetch_prompts([3]), [[samples["9"], samples["9"]], [samples["1"]]]
    )
    (found,) = GroupScorer(READER, right_or_wrong, FilterGroupsConfig(enable=True))([group])
    assert found.batch.rewards.tolist() == [0.0, 0.0] and found.batch.greedy_rewards is not None
    assert found.batch.greedy_rewards.tolist() == [1.0, 1.0] and len(found.batch) == 2
    assert (
        found.greedy_rollout is not None
        and found.greedy_rollout.responses == ("1",)
        and not found.has_signal
    )


def test_failures_of_rewards_count_over_the_samples_of_a_batch() -> None:
    """Of the last 8: two may fail (0.25), three may not; they come two at a time."""
    statuses = iter(
        ["ok", "ok", "masked:x", "masked:x", *["ok"] * 6, "masked:x", "ok", "masked:x", "masked:x"]
    )

    def score(samples: list[RewardSample]) -> list[RewardResult]:
        return [RewardResult(0.0, next(statuses)) for _ in samples]

    last = RecentErrorBound(score, 8, 0.25, "log")
    sample = RewardSample("", "", "", "s", "stop", 1, "")
    for _ in range(6):
        assert len(last([sample, sample])) == 2
    with pytest.raises(RewardErrorRateError, match=r"3 of 8 rewards failed"):
        last([sample, sample])


class Made:
    """Batches of two groups, the second of which comes first."""

    num_prompts_drawn = 0
    policy_version = 1
    on_generated: Callable[[Sequence[int]], None]

    def draw_prompts(self, step: int) -> PromptBatch:
        return stream_of(batch_size=2).draw_step_prompts(step)

    def generate_rollout(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        for number in reversed(prompts.group_ids):
            self.on_generated((number,))
        return replace(
            scored(), group_ids=torch.tensor([prompts.group_ids[0]] * 2 + [prompts.group_ids[1]])
        )

    def score_rollout(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        assert isinstance(rollout, ScoredBatch)
        return rollout


def test_a_synchronous_run_has_its_ledger_too() -> None:
    made = Made()
    lines = []
    stages = []

    def stage(name: str) -> AbstractContextManager[None]:
        stages.append(name)
        return nullcontext()

    schedule = load_schedule(ScheduleConfig("synchronous"))
    with WatchedForeground(
        made, GroupFlow(2, 2, 1), schedule, lambda events: lines.extend(map(str, events))
    ) as supply:
        for step in (1, 2):
            assert supply.take_batch(step, stage).group_ids.tolist() == [
                2 * step - 2,
                2 * step - 2,
                2 * step - 1,
            ]
            with supply.sync_window():
                made.policy_version += 1
    assert stages == ["next", "generate", "score"] * 2
    assert lines == [
        *("started group 0", "started group 1", "generated group 1", "generated group 0"),
        *("scored group 0", "scored group 1", "taken step 1", "updated step 1", "synced step 1"),
        *("started group 2", "started group 3", "generated group 3", "generated group 2"),
        *("scored group 2", "scored group 3", "taken step 2", "updated step 2", "synced step 2"),
    ]


class MadeOfTwo(Made):
    """Group 1 has no signal: another batch is generated, of which 2 is enough."""

    def score_rollout(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        self.on_generated((2, 3))
        return replace(scored(), group_ids=torch.tensor([0, 0, 2]))


def test_what_a_synchronous_filter_leaves_out_leaves_the_ledger() -> None:
    made = MadeOfTwo()
    lines = []
    schedule = load_schedule(ScheduleConfig("synchronous"))
    supply = WatchedForeground(
        made, GroupFlow(2, 2, 1), schedule, lambda events: lines.extend(map(str, events))
    )
    supply.take_batch(1, lambda name: nullcontext())
    with supply.sync_window():
        made.policy_version += 1
    assert lines[4:] == [
        *("started group 2", "started group 3", "generated group 2", "generated group 3"),
        *(f"scored group {number}" for number in range(4)),
        *(
            "dropped group 1 (no signal)",
            "dropped group 3 (tail)",
            "taken step 1",
            "updated step 1",
            "synced step 1",
        ),
    ]
