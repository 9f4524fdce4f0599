"""What the journal gives back after a kill: everything that was whole, bit for bit,
and nothing else.
"""

import logging
import shutil
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import scored
from episode_samples import make_episode, make_turn
from places import SUPPORT
from scheduler_samples import train_batch

from rlhf_megatron import faults
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.controller.recovery.run_journal import (
    GroupJournal,
    StepJournal,
    find_journalled_routes,
)
from rlhf_megatron.data import codec, direct_file_io
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    ScoredBatch,
    TrainBatch,
    add_columns,
    iterate_columns,
)
from rlhf_megatron.data.expert_route_files import write_route_file
from rlhf_megatron.rollout.engine_interface import GeneratedSample, VersionSpan


def group(first_token: int, num_samples: int = 2) -> list[GeneratedSample]:
    """Samples of unequal length, one of them empty; log-probs that no short decimal holds, in a
    batch's precision.
    """
    return [
        GeneratedSample(
            tuple(range(first_token, first_token + 3 * i)),
            tuple(float(np.float32(-1.0 / (first_token + k + 3))) for k in range(3 * i)),
            ("stop", "length")[i % 2],
            7 + i,
            (VersionSpan(7 + i, 0, 2), VersionSpan(8 + i, 2, 3 * i)) if i else (),
            first_token,
            2 * i,
        )
        for i in range(num_samples)
    ]


def scored_batch() -> ScoredBatch:
    batch = train_batch()
    names = ScoredBatch.__dataclass_fields__
    return ScoredBatch(**{name: getattr(batch, name) for name in names})


def equal(a: ScoredBatch, b: ScoredBatch) -> bool:
    if type(a) is not type(b):
        return False
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__]
    return all(same(x, y) for x, y in pairs)


def same(x: object, y: object) -> bool:
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    return (
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
    )


@pytest.fixture
def journal(tmp_path: Path) -> StepJournal:
    return StepJournal(tmp_path / "journal", "these")


def files(journal: StepJournal) -> list[str]:
    return sorted(path.name for path in journal.directory.iterdir())


def written(journal: StepJournal, *arguments: Any) -> None:
    journal.begin_batch_write(*arguments)
    journal.wait_for_write()


def test_groups_come_back_as_they_were(journal: StepJournal) -> None:
    assert journal.read_groups(3) == {}
    journal.append_groups(3, 2, [group(10), group(20)])
    journal.append_groups(3, 0, [group(30, num_samples=3)])
    again = StepJournal(journal.directory, "these")
    assert again.read_groups(3) == {2: group(10), 3: group(20), 0: group(30, num_samples=3)}
    again.append_groups(3, 1, [group(40)])
    assert set(StepJournal(journal.directory, "these").read_groups(3)) == {0, 1, 2, 3}
    assert journal.read_groups(4) == {}


def test_a_tail_that_was_cut_off_is_dropped_wherever_the_cut_is(
    journal: StepJournal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.read_groups(1)
    journal.append_groups(1, 0, [group(10)])
    path = journal.directory / "step_000001.groups"
    one = path.stat().st_size
    journal.append_groups(1, 1, [group(20)])
    whole = path.read_bytes()
    for cut in range(one, len(whole)):
        path.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert set(journal.read_groups(1)) == {0}
        assert ("cut off or damaged" in caplog.text) == (cut > one)
        assert path.stat().st_size == one
    journal.append_groups(1, 5, [group(50)])
    assert journal.read_groups(1) == {0: group(10), 5: group(50)}


def test_every_flipped_byte_is_found(journal: StepJournal) -> None:
    journal.read_groups(1)
    journal.append_groups(1, 0, [group(10)])
    journal.append_groups(1, 1, [group(20)])
    path = journal.directory / "step_000001.groups"
    whole = path.read_bytes()
    first = len(whole) // 2
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        found = journal.read_groups(1)
        assert found == ({} if position < first else {0: group(10)}), position


def two_episodes(first_token: int) -> list[Episode]:
    """One of two turns over a weight sync, and one that failed before any turn."""
    spans = ((7, 0, 1), (8, 1, 2))
    turns = [make_turn(2, 3, 7), make_turn(4, 6, 7, spans, "length")]
    ids = [1, 2, first_token, 4, 5, 6]
    messages = '[{"role": "user", "content": "\u00e4"}]'
    metrics = {"moves": 2.0}
    whole = make_episode(
        ids, turns, "max_turns", turn_rewards=(0.1, 1 / 3), metrics=metrics, messages=messages
    )
    return [whole, make_episode([1, 2], [], "environment_failed", reward=None, error="gone")]


def same_episodes(found: list[Episode], expected: list[Episode]) -> bool:
    return len(found) == len(expected) and all(
        same(getattr(one, field.name), getattr(other, field.name))
        for one, other in zip(found, expected, strict=True)
        for field in fields(Episode)
    )


def test_groups_of_episodes_come_back_as_they_were(journal: StepJournal) -> None:
    assert journal.read_episodes(3) == {}
    journal.append_episodes(3, [(2, two_episodes(10)), (0, two_episodes(20))])
    again = StepJournal(journal.directory, "these")
    found = again.read_episodes(3)
    assert set(found) == {0, 2} and same_episodes(found[2], two_episodes(10))
    assert same_episodes(found[0], two_episodes(20))
    again.append_episodes(3, [(1, two_episodes(30))])
    assert set(StepJournal(journal.directory, "these").read_episodes(3)) == {0, 1, 2}
    assert StepJournal(journal.directory, "others").read_episodes(3) == {}, "other settings"


def test_a_piece_that_was_cut_off_gives_its_whole_groups_and_can_be_written_again(
    journal: StepJournal, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever the cut is; a group that stands there twice counts once."""
    journal.read_episodes(1)
    journal.append_episodes(1, [(0, two_episodes(10))])
    path = journal.directory / "step_000001.groups"
    one = path.stat().st_size
    journal.append_episodes(1, [(1, two_episodes(20)), (2, two_episodes(30))])
    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        for cut in range(one, len(whole), 7):
            path.write_bytes(whole[:cut])
            known = set(journal.read_episodes(1))
            assert known in ({0}, {0, 1})
    assert "cut off or damaged" in caplog.text
    path.write_bytes(whole[: one + (len(whole) - one) // 2 + 9])
    assert set(journal.read_episodes(1)) == {0, 1}
    journal.append_episodes(1, [(1, two_episodes(40)), (2, two_episodes(50))])
    found = journal.read_episodes(1)
    assert set(found) == {0, 1, 2} and same_episodes(found[1], two_episodes(40))


def test_groups_of_samples_and_of_episodes_are_strangers(journal: StepJournal) -> None:
    """A run that has an environment now had none before, or the other way round."""
    journal.read_groups(1)
    journal.append_groups(1, 0, [group(10)])
    journal.append_episodes(1, [(1, two_episodes(20))])
    assert set(journal.read_groups(1)) == {0} and set(journal.read_episodes(1)) == {1}
    assert find_journalled_routes(journal.directory) == set()


@pytest.mark.parametrize(
    "batch", [train_batch(), scored_batch(), scored()], ids=["train", "scored", "told"]
)
def test_batches_come_back_with_what_belongs_to_them(
    journal: StepJournal, batch: ScoredBatch
) -> None:
    written(journal, 5, batch, {"a/b": 0.1, "c/d": float("nan")}, 2.5)
    found = StepJournal(journal.directory, "these").read_latest_batch(5)
    assert found is not None and equal(found.batch, batch)
    assert found.metrics["a/b"] == 0.1 and found.metrics["c/d"] != found.metrics["c/d"]
    assert found.seconds == 2.5


@pytest.mark.parametrize("is_empty", [False, True])
def test_samples_without_their_files_of_routes_are_made_again(
    journal: StepJournal, is_empty: bool
) -> None:
    names = [
        write_route_file(str(journal.directory / "routes"), np.ones((3, 2), np.int64))
        for _ in range(2)
    ]
    routed = [[replace(group(10 * i)[0], routes=name)] for i, name in enumerate(names)]
    journal.append_groups(3, 0, routed)
    written(
        journal,
        5,
        replace(scored_batch(), routes=(*names, *[""] * (len(scored_batch()) - 2))),
        {},
        0.0,
    )
    background = GroupJournal(journal.directory, "these")
    background.write_prompt_groups(7, [routed[1]])
    assert (
        set(journal.read_groups(3)) == {0, 1}
        and journal.read_latest_batch(5) is not None
        and set(background.read_prompt_groups()) == {7}
    )
    stray = write_route_file(str(journal.directory / "routes"), np.ones((3, 2), np.int64))
    (journal.directory / "routes" / "half.part").touch()
    files = RouteFileRetention(journal.directory / "routes", has_journal=True)
    RouteFileRetention(journal.directory / "routes", is_recorded=True).remove_unneeded_files(())
    assert Path(stray).exists() and find_journalled_routes(journal.directory) == {*names}
    files.remove_unneeded_files(find_journalled_routes(journal.directory))
    assert sorted(map(str, (journal.directory / "routes").iterdir())) == sorted(names)
    Path(names[1]).unlink()
    if is_empty:
        Path(names[1]).touch()
    assert (
        journal.read_groups(3) == {0: routed[0]}
        and journal.read_latest_batch(5) is None
        and background.read_prompt_groups() == {}
    )


OLD_FILES = SUPPORT / "old_files"  # as 0.1.0 wrote them before engines told more than text


def test_a_journal_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    directory.mkdir()
    shutil.copy(OLD_FILES / "step_000001.groups", directory)
    found = StepJournal(directory, "these").read_groups(1)
    told = [
        [replace(s, version_spans=(), num_cached_tokens=0, num_retractions=0) for s in group(t)]
        for t in (10, 20)
    ]
    assert {
        k: [replace(s, log_probs=tuple(map(float, np.float32(s.log_probs)))) for s in v]
        for k, v in found.items()
    } == {
        0: told[0],
        1: told[1],
    }


def test_a_recorded_step_of_an_earlier_version_is_read() -> None:
    found = RolloutRecorder(OLD_FILES).read_step(1)
    assert found.version_spans is found.num_cached_tokens is found.num_retractions is None
    told = {
        name: getattr(found, name)
        for name in ("version_spans", "num_cached_tokens", "num_retractions")
    }
    assert equal(found, replace(scored(), **told))


def test_the_later_record_takes_the_place_of_the_earlier(journal: StepJournal) -> None:
    journal.read_groups(5)
    journal.append_groups(5, 0, [group(10)])
    written(journal, 5, scored_batch(), {}, 0.0)
    assert files(journal) == ["step_000005.scored"]
    written(journal, 5, train_batch(), {}, 0.0)
    assert files(journal) == ["step_000005.train"]


def annotated_after(scored: ScoredBatch) -> AnnotatedBatch:
    return add_columns(
        AnnotatedBatch, scored, old_log_probs=-torch.arange(scored.num_tokens).float()
    )


def test_a_column_that_the_scored_batch_has_is_written_once(journal: StepJournal) -> None:
    scored = scored_batch()
    written(journal, 5, scored, {}, 0.0)
    batch = annotated_after(scored)
    written(journal, 5, batch, {"a": 1.0}, 2.0)
    assert files(journal) == ["step_000005.scored", "step_000005.train"]
    kept = codec.decode_message((journal.directory / "step_000005.train").read_bytes()[44:])
    assert {name for name, _, _ in iterate_columns(kept.batch)} == {
        "old_log_probs",
        "reward_parts",
    } - {*kept.shared}
    found = StepJournal(journal.directory, "these").read_latest_batch(5)
    assert found is not None and equal(found.batch, batch) and found.metrics == {"a": 1.0}
    journal.forget_through_step(5)
    assert files(journal) == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["other", "gone"])
def test_an_annotated_batch_without_its_scored_one_is_absent(
    journal: StepJournal, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scored = scored_batch()
    written(journal, 5, scored, {}, 0.0)
    written(journal, 5, annotated_after(scored), {}, 0.0)
    if is_gone:
        (journal.directory / "step_000005.scored").unlink()
    else:  # of another history of the run, under the same settings
        other = replace(scored, rewards=scored.rewards + 1)
        written(StepJournal(journal.directory, "these"), 5, other, {}, 0.0)
    with caplog.at_level(logging.WARNING):
        found = StepJournal(journal.directory, "these").read_latest_batch(5)
    assert "is lost or another one" in caplog.text
    assert found is None if is_gone else found is not None and equal(found.batch, other)


def test_a_batch_is_written_beside_and_what_it_replaces_stays_until_then(
    journal: StepJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = direct_file_io.write_large_file_atomically

    def held(*arguments: Any) -> None:
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(direct_file_io, "write_large_file_atomically", held)
    journal.read_groups(5)
    journal.append_groups(5, 0, [group(10)])
    journal.begin_batch_write(5, scored_batch(), {}, 0.0)
    assert StepJournal(journal.directory, "these").read_groups(5) == {0: group(10)} and files(
        journal
    ) == ["step_000005.groups"]
    threading.Timer(0.1, may_write.set).start()
    assert journal.read_latest_batch(5) is not None, "who asks waits"
    assert files(journal) == ["step_000005.scored"]


def test_what_goes_wrong_beside_is_raised_by_the_next_call(
    journal: StepJournal, tmp_path: Path
) -> None:
    faults.install_fault_plan("fail@journal.before_write", "controller", tmp_path / "f")
    try:
        journal.begin_batch_write(5, scored_batch(), {}, 0.0)
        with pytest.raises(RuntimeError, match="injected"):
            journal.append_groups(6, 0, [group(10)])
    finally:
        faults.install_fault_plan("", "controller", tmp_path)


@pytest.mark.parametrize("position", [0, 5, 13, 50, 200, -1])
def test_a_damaged_batch_is_absent(
    journal: StepJournal, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    written(journal, 5, train_batch(), {}, 0.0)
    path = journal.directory / "step_000005.train"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert journal.read_latest_batch(5) is None
    assert "step_000005.train is cut off or damaged" in caplog.text


def test_other_settings_have_another_journal(journal: StepJournal) -> None:
    journal.read_groups(1)
    journal.append_groups(1, 0, [group(10)])
    written(journal, 2, train_batch(), {}, 0.0)
    other = StepJournal(journal.directory, "those")
    assert other.read_groups(1) == {} and other.read_latest_batch(2) is None


def test_a_step_counts_only_after_whole_steps(journal: StepJournal) -> None:
    """Step 6 is known to the end and step 7 has rewards: step 8 came from a policy that
    nobody has any more.
    """
    written(journal, 6, train_batch(), {}, 0.0)
    written(journal, 7, scored_batch(), {}, 0.0)
    written(journal, 8, train_batch(), {}, 0.0)
    again = StepJournal(journal.directory, "these")
    assert isinstance(again.read_latest_batch(6).batch, TrainBatch) and sorted(
        again._find_step_files()
    ) == [6, 7, 8]
    assert not isinstance(again.read_latest_batch(7).batch, TrainBatch) and sorted(
        again._find_step_files()
    ) == [6, 7]
    assert again.read_latest_batch(8) is None


def test_a_checkpoint_ends_the_steps_that_it_has(journal: StepJournal) -> None:
    for step in (4, 5, 6):
        written(journal, step, train_batch(), {}, 0.0)
    journal.read_groups(7)
    journal.append_groups(7, 0, [group(10)])
    journal.forget_through_step(5)
    assert sorted(journal._find_step_files()) == [6, 7]
    journal.forget_through_step(7)
    assert files(journal) == []


def test_a_full_disk_costs_the_journal_and_not_the_run(
    journal: StepJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults.install_fault_plan(
        "disk_full@journal.before_write:nth=2; disk_full@journal.before_write:nth=4",
        "controller",
        tmp_path / "f",
    )
    try:
        journal.read_groups(1)
        with caplog.at_level(logging.WARNING):
            for index in range(3):
                journal.append_groups(1, index, [group(10 * index)])
            assert "No space left" in caplog.text
            written(journal, 2, train_batch(), {}, 0.0)
    finally:
        faults.install_fault_plan("", "controller", tmp_path)
    assert journal.read_groups(1) == {0: group(0), 2: group(20)} and files(journal) == [
        "step_000001.groups"
    ]
