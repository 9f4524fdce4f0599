"""What the journal gives back after a kill: everything that was whole, bit for bit, and nothing else."""

import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import scored
from places import SUPPORT
from scheduler_samples import train_batch

from rlhf_megatron import faults
from rlhf_megatron.data import codec, direct
from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, TrainBatch, columns_of, gain
from rlhf_megatron.data.routes import write_routes
from rlhf_megatron.recovery.journal import GroupJournal, Journal, routes_in
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.recovery.route_files import RouteFiles
from rlhf_megatron.rollout.engine import GeneratedSample, VersionSpan


def group(first_token: int, num_samples: int = 2) -> list[GeneratedSample]:
    """Samples of unequal length, one of them empty; log-probs that no short decimal holds, in a batch's precision."""
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
    return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", "these")


def files(journal: Journal) -> list[str]:
    return sorted(path.name for path in journal.directory.iterdir())


def written(journal: Journal, *arguments: Any) -> None:
    journal.write(*arguments)
    journal.settle()


def test_groups_come_back_as_they_were(journal: Journal) -> None:
    assert journal.groups(3) == {}
    journal.append(3, 2, [group(10), group(20)])
    journal.append(3, 0, [group(30, num_samples=3)])
    again = Journal(journal.directory, "these")
    assert again.groups(3) == {2: group(10), 3: group(20), 0: group(30, num_samples=3)}
    again.append(3, 1, [group(40)])
    assert set(Journal(journal.directory, "these").groups(3)) == {0, 1, 2, 3}
    assert journal.groups(4) == {}


def test_a_tail_that_was_cut_off_is_dropped_wherever_the_cut_is(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.groups(1)
    journal.append(1, 0, [group(10)])
    path = journal.directory / "step_000001.groups"
    one = path.stat().st_size
    journal.append(1, 1, [group(20)])
    whole = path.read_bytes()
    for cut in range(one, len(whole)):
        path.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert set(journal.groups(1)) == {0}
        assert ("cut off or damaged" in caplog.text) == (cut > one)
        assert path.stat().st_size == one
    journal.append(1, 5, [group(50)])
    assert journal.groups(1) == {0: group(10), 5: group(50)}


def test_every_flipped_byte_is_found(journal: Journal) -> None:
    journal.groups(1)
    journal.append(1, 0, [group(10)])
    journal.append(1, 1, [group(20)])
    path = journal.directory / "step_000001.groups"
    whole = path.read_bytes()
    first = len(whole) // 2
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        found = journal.groups(1)
        assert found == ({} if position < first else {0: group(10)}), position


@pytest.mark.parametrize("batch", [train_batch(), scored_batch(), scored()], ids=["train", "scored", "told"])
def test_batches_come_back_with_what_belongs_to_them(journal: Journal, batch: ScoredBatch) -> None:
    written(journal, 5, batch, {"a/b": 0.1, "c/d": float("nan")}, 2.5)
    found = Journal(journal.directory, "these").batch(5)
    assert found is not None and equal(found.batch, batch)
    assert found.metrics["a/b"] == 0.1 and found.metrics["c/d"] != found.metrics["c/d"]
    assert found.seconds == 2.5


@pytest.mark.parametrize("is_empty", [False, True])
def test_samples_without_their_files_of_routes_are_made_again(journal: Journal, is_empty: bool) -> None:
    names = [write_routes(str(journal.directory / "routes"), np.ones((3, 2), np.int64)) for _ in range(2)]
    routed = [[replace(group(10 * i)[0], routes=name)] for i, name in enumerate(names)]
    journal.append(3, 0, routed)
    written(journal, 5, replace(scored_batch(), routes=(*names, *[""] * (len(scored_batch()) - 2))), {}, 0.0)
    background = GroupJournal(journal.directory, "these")
    background.append(7, [routed[1]])
    assert set(journal.groups(3)) == {0, 1} and journal.batch(5) is not None and set(background.groups()) == {7}
    stray = write_routes(str(journal.directory / "routes"), np.ones((3, 2), np.int64))
    (journal.directory / "routes" / "half.part").touch()
    files = RouteFiles(journal.directory / "routes", is_kept=True)
    RouteFiles(journal.directory / "routes", is_recorded=True).begin(())
    assert Path(stray).exists() and routes_in(journal.directory) == {*names}
    files.begin(routes_in(journal.directory))
    assert sorted(map(str, (journal.directory / "routes").iterdir())) == sorted(names)
    Path(names[1]).unlink()
    if is_empty:
        Path(names[1]).touch()
    assert journal.groups(3) == {0: routed[0]} and journal.batch(5) is None and background.groups() == {}


OLD_FILES = SUPPORT / "old_files"  # as 0.1.0 wrote them before engines told more than text


def test_a_journal_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    directory.mkdir()
    shutil.copy(OLD_FILES / "step_000001.groups", directory)
    found = Journal(directory, "these").groups(1)
    told = [[replace(s, version_spans=(), num_cached_tokens=0, num_retractions=0) for s in group(t)] for t in (10, 20)]
    assert {
        k: [replace(s, log_probs=tuple(map(float, np.float32(s.log_probs)))) for s in v] for k, v in found.items()
    } == {
        0: told[0],
        1: told[1],
    }


def test_a_recorded_step_of_an_earlier_version_is_read() -> None:
    found = Recorder(OLD_FILES).read(1)
    assert found.version_spans is found.num_cached_tokens is found.num_retractions is None
    told = {name: getattr(found, name) for name in ("version_spans", "num_cached_tokens", "num_retractions")}
    assert equal(found, replace(scored(), **told))


def test_the_later_record_takes_the_place_of_the_earlier(journal: Journal) -> None:
    journal.groups(5)
    journal.append(5, 0, [group(10)])
    written(journal, 5, scored_batch(), {}, 0.0)
    assert files(journal) == ["step_000005.scored"]
    written(journal, 5, train_batch(), {}, 0.0)
    assert files(journal) == ["step_000005.train"]


def annotated_after(scored: ScoredBatch) -> AnnotatedBatch:
    return gain(AnnotatedBatch, scored, old_log_probs=-torch.arange(scored.num_tokens).float())


def test_a_column_that_the_scored_batch_has_is_written_once(journal: Journal) -> None:
    scored = scored_batch()
    written(journal, 5, scored, {}, 0.0)
    batch = annotated_after(scored)
    written(journal, 5, batch, {"a": 1.0}, 2.0)
    assert files(journal) == ["step_000005.scored", "step_000005.train"]
    kept = codec.decode((journal.directory / "step_000005.train").read_bytes()[44:])
    assert {name for name, _, _ in columns_of(kept.batch)} == {"old_log_probs", "reward_parts"} - {*kept.shared}
    found = Journal(journal.directory, "these").batch(5)
    assert found is not None and equal(found.batch, batch) and found.metrics == {"a": 1.0}
    journal.drop_through(5)
    assert files(journal) == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["other", "gone"])
def test_an_annotated_batch_without_its_scored_one_is_absent(
    journal: Journal, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scored = scored_batch()
    written(journal, 5, scored, {}, 0.0)
    written(journal, 5, annotated_after(scored), {}, 0.0)
    if is_gone:
        (journal.directory / "step_000005.scored").unlink()
    else:  # of another history of the run, under the same settings
        other = replace(scored, rewards=scored.rewards + 1)
        written(Journal(journal.directory, "these"), 5, other, {}, 0.0)
    with caplog.at_level(logging.WARNING):
        found = Journal(journal.directory, "these").batch(5)
    assert "is lost or another one" in caplog.text
    assert found is None if is_gone else found is not None and equal(found.batch, other)


def test_a_batch_is_written_beside_and_what_it_replaces_stays_until_then(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), direct.write_whole

    def held(*arguments: Any) -> None:
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(direct, "write_whole", held)
    journal.groups(5)
    journal.append(5, 0, [group(10)])
    journal.write(5, scored_batch(), {}, 0.0)
    assert Journal(journal.directory, "these").groups(5) == {0: group(10)} and files(journal) == ["step_000005.groups"]
    threading.Timer(0.1, may_write.set).start()
    assert journal.batch(5) is not None, "who asks waits"
    assert files(journal) == ["step_000005.scored"]


def test_what_goes_wrong_beside_is_raised_by_the_next_call(journal: Journal, tmp_path: Path) -> None:
    faults.install("fail@journal.before_write", "controller", tmp_path / "f")
    try:
        journal.write(5, scored_batch(), {}, 0.0)
        with pytest.raises(RuntimeError, match="injected"):
            journal.append(6, 0, [group(10)])
    finally:
        faults.install("", "controller", tmp_path)


@pytest.mark.parametrize("position", [0, 5, 13, 50, 200, -1])
def test_a_damaged_batch_is_absent(journal: Journal, position: int, caplog: pytest.LogCaptureFixture) -> None:
    written(journal, 5, train_batch(), {}, 0.0)
    path = journal.directory / "step_000005.train"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert journal.batch(5) is None
    assert "step_000005.train is cut off or damaged" in caplog.text


def test_other_settings_have_another_journal(journal: Journal) -> None:
    journal.groups(1)
    journal.append(1, 0, [group(10)])
    written(journal, 2, train_batch(), {}, 0.0)
    other = Journal(journal.directory, "those")
    assert other.groups(1) == {} and other.batch(2) is None


def test_a_step_counts_only_after_whole_steps(journal: Journal) -> None:
    """Step 6 is known to the end and step 7 has rewards: step 8 came from a policy that nobody has any more."""
    written(journal, 6, train_batch(), {}, 0.0)
    written(journal, 7, scored_batch(), {}, 0.0)
    written(journal, 8, train_batch(), {}, 0.0)
    again = Journal(journal.directory, "these")
    assert isinstance(again.batch(6).batch, TrainBatch) and sorted(again._files()) == [6, 7, 8]
    assert not isinstance(again.batch(7).batch, TrainBatch) and sorted(again._files()) == [6, 7]
    assert again.batch(8) is None


def test_a_checkpoint_ends_the_steps_that_it_has(journal: Journal) -> None:
    for step in (4, 5, 6):
        written(journal, step, train_batch(), {}, 0.0)
    journal.groups(7)
    journal.append(7, 0, [group(10)])
    journal.drop_through(5)
    assert sorted(journal._files()) == [6, 7]
    journal.drop_through(7)
    assert files(journal) == []


def test_a_full_disk_costs_the_journal_and_not_the_run(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults.install(
        "disk_full@journal.before_write:nth=2; disk_full@journal.before_write:nth=4", "controller", tmp_path / "f"
    )
    try:
        journal.groups(1)
        with caplog.at_level(logging.WARNING):
            for index in range(3):
                journal.append(1, index, [group(10 * index)])
            assert "No space left" in caplog.text
            written(journal, 2, train_batch(), {}, 0.0)
    finally:
        faults.install("", "controller", tmp_path)
    assert journal.groups(1) == {0: group(0), 2: group(20)} and files(journal) == ["step_000001.groups"]
