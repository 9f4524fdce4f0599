"""Checkpoint directories as files: what is found out about a damaged one, what a kill leaves,
what is removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_megatron import faults
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore
from rlhf_megatron.weights.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
    FileRecord,
    make_file_records,
    parse_checkpoint_manifest,
)

FILES = {
    "actor/__0_0.distcp": b"weights" * 50,
    "actor/.metadata": b"where",
    "run_state.batch": b"\x00\x01\x02",
}
CONTROLLER_POINTS = ("ckpt.before_commit", "ckpt.after_rename", "ckpt.after_commit")


def fill(directory: Path, files: dict[str, bytes] = FILES) -> list[FileRecord]:
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    return [
        FileRecord(name, len(data), hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]


def make(store: CheckpointStore, step: int) -> Path:
    files = fill(store.begin_checkpoint(step))
    return store.commit_checkpoint(
        step,
        policy_version=step + 1,
        layouts={"actor": "tp2"},
        versions={"torch": "2"},
        files=files,
    ).path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def verify(path: Path) -> None:
    CheckpointStore(path.parent).verify_checkpoint(path)


def problem(path: Path) -> str:
    with pytest.raises(ValueError) as raised:
        verify(path)
    return str(raised.value)


def test_a_checkpoint_has_its_name_when_it_is_complete(store: CheckpointStore) -> None:
    partial = store.begin_checkpoint(10)
    assert [entry.name for entry in store.directory.iterdir()] == [
        ".step_000010.partial"
    ] and store.find_newest() is None
    found = store.commit_checkpoint(10, 11, {"actor": "tp2"}, {"torch": "2"}, fill(partial))
    assert found.path == store.directory / "step_000010" and not partial.exists()
    assert (store.directory / "latest").read_text() == "step_000010\n"
    again = CheckpointStore(store.directory).find_newest()
    assert again is not None and again.path == found.path
    manifest = again.manifest
    assert (manifest.step, manifest.policy_version, manifest.layouts) == (10, 11, {"actor": "tp2"})
    assert manifest.num_bytes == 350 + 5 + 3
    assert {record.path for record in manifest.files} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_damage_to_a_file_is_named(store: CheckpointStore, name: str) -> None:
    path = make(store, 1)
    file = path / name
    data = FILES[name]
    for position in range(len(data)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert f"{name} was changed" in problem(path)
    file.write_bytes(data[:-1])
    assert f"{name} has {len(data) - 1} bytes instead of {len(data)}" in problem(path)
    file.unlink()
    assert f"{name} is missing" in problem(path)
    (path / "other").write_bytes(data)
    file.symlink_to("../other" if "/" in name else "other")
    assert f"{name} is a link" in problem(path) and "other is not named" in problem(path)
    (path / "other").unlink()
    file.unlink()
    os.mkfifo(file)
    assert f"{name} is a link or no plain file" in problem(path)
    file.unlink()
    file.write_bytes(data)
    verify(path)


def test_any_changed_byte_of_a_manifest_is_found(store: CheckpointStore) -> None:
    path = make(store, 1)
    file = path / MANIFEST
    data = file.read_bytes()
    for position in range(len(data)):
        for bit in (1, 0x20):
            text = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            with pytest.raises(ValueError):
                parse_checkpoint_manifest(text.decode())
    file.write_bytes(data[:-1])
    assert f"{MANIFEST}: it was changed" in problem(path)
    file.write_bytes(b"\xff" + data)
    assert f"{MANIFEST} cannot be read" in problem(path)
    file.unlink()
    assert f"{MANIFEST} is missing" in problem(path)
    (path.parent / "elsewhere").write_bytes(data)
    file.symlink_to("../elsewhere")
    assert f"{MANIFEST} is not a plain file" in problem(path)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../step_000001/run_state.batch",
        "actor/../run_state.batch",
        "./run_state.batch",
        "",
        "a//b",
        "a\\b",
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(store: CheckpointStore, name: str) -> None:
    """Its own digest fits: somebody wrote it on purpose."""
    path = make(store, 1)
    manifest = parse_checkpoint_manifest((path / MANIFEST).read_text())
    evil = replace(manifest, files=(*manifest.files, FileRecord(name, 3, "0" * 64)))
    (path / MANIFEST).write_text(evil.serialise())
    assert f"{name!r} is not a plain relative path" in problem(path)


def test_what_no_manifest_says_is_refused() -> None:
    good = CheckpointManifest(1, 2, {}, {}, (FileRecord("a", 1, "x"),))
    assert parse_checkpoint_manifest(good.serialise()) == good
    twice = replace(good, files=good.files * 2)
    for text, message in [
        (twice.serialise(), "a is named twice"),
        (replace(good, step=-1).serialise(), "-1 is not a whole number"),
        (replace(good, step=True).serialise(), "True is not a whole number"),
        (replace(good, layouts={"actor": 3}).serialise(), ("does not map names to text")),  # type: ignore[dict-item]
        (
            good.serialise().replace('"format_version": 1', '"format_version": 2'),
            "its format_version is 2",
        ),
        (
            '{"format": "rlhf_megatron.checkpoint", "format_version": 1}',
            "an entry is missing",
        ),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "no manifest of this format"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_checkpoint_manifest(text)


def test_a_directory_under_another_name_or_behind_a_link_is_refused(store: CheckpointStore) -> None:
    path = make(store, 1)
    path.rename(path.with_name("step_000002"))
    assert "its manifest is of step 1" in problem(path.with_name("step_000002"))
    path.symlink_to("step_000002")
    assert "is not a directory" in problem(path)


def test_the_newest_good_one_is_found_behind_broken_ones(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        make(store, step)
    (store.directory / "step_000003" / "actor" / ".metadata").write_bytes(b"WHERE")
    (store.directory / "step_000002" / "run_state.batch").unlink()
    (store.directory / ".step_000004.partial").mkdir()
    with caplog.at_level(logging.WARNING):
        found = CheckpointStore(store.directory).find_newest()
    assert found is not None and found.manifest.step == 1
    broken = [record.getMessage() for record in caplog.records]
    assert [text.split(" ")[1].split("/")[-1] for text in broken[:2]] == [
        "step_000003",
        "step_000002",
    ]
    assert (
        "latest names 'step_000003'; the newest good checkpoint is step_000001" in broken[2]
        and len(broken) == 3
    )
    assert "actor/.metadata was changed" in broken[0] and "run_state.batch is missing" in broken[1]
    (store.directory / "step_000001" / MANIFEST).unlink()
    with pytest.raises(ValueError, match="3 checkpoints and none of them is good") as raised:
        CheckpointStore(store.directory).find_newest()
    assert all(f"step_00000{step}" in str(raised.value) for step in (1, 2, 3))


@pytest.mark.parametrize("latest", ["step_000001", "../../etc", "\x00\xff" * 3, "x" * 10_000, None])
def test_latest_is_not_trusted(
    store: CheckpointStore, latest: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        make(store, step)
    file = store.directory / "latest"
    file.unlink()
    if latest is not None:
        file.write_text(latest)
    found = store.find_newest()
    assert found is not None and found.manifest.step == 2
    assert "the newest good checkpoint is step_000002" in caplog.text


def test_a_good_checkpoint_is_never_overwritten_and_a_broken_one_moved_aside(
    store: CheckpointStore,
) -> None:
    path = make(store, 1)
    with pytest.raises(ValueError, match="never overwritten"):
        store.begin_checkpoint(1)
    (path / "run_state.batch").unlink()
    make(store, 1)
    verify(path)
    assert (
        store.directory / "broken_step_000001.1" / MANIFEST
    ).exists() and store.list_steps() == [1]


def test_files_that_are_not_as_recorded_are_not_committed(store: CheckpointStore) -> None:
    files = fill(store.begin_checkpoint(1))
    (store.directory / ".step_000001.partial" / "run_state.batch").write_bytes(b"")
    with pytest.raises(ValueError, match=r"run_state.batch has 0 bytes instead of 3"):
        store.commit_checkpoint(1, 1, {}, {}, files)
    assert store.find_newest() is None
    store.abandon_checkpoint(1)
    store.abandon_checkpoint(1)
    assert list(store.directory.iterdir()) == []


def test_files_of_another_machine_may_appear_late(store: CheckpointStore) -> None:
    """As over NFS, which shows a directory as it was a while ago."""
    patient = CheckpointStore(store.directory, settle_s=20.0)
    partial = patient.begin_checkpoint(1)
    files = fill(partial)
    (partial / "actor").rename(store.directory / "late")
    timer = threading.Timer(0.5, lambda: (store.directory / "late").rename(partial / "actor"))
    timer.start()
    try:
        verify(patient.commit_checkpoint(1, 1, {}, {}, files).path)
    finally:
        timer.join()


def test_old_ones_go_and_broken_ones_do_not_count(store: CheckpointStore) -> None:
    for step in range(1, 7):
        make(store, step)
    (store.directory / "step_000006" / "run_state.batch").unlink()
    # the same size: only its digest tells
    (store.directory / "step_000004" / "run_state.batch").write_bytes(b"xxx")
    assert CheckpointStore(store.directory).prune_old_checkpoints(0) == []
    assert CheckpointStore(store.directory).prune_old_checkpoints(2) == [2, 1]
    assert store.list_steps() == [6, 5, 4, 3]
    assert CheckpointStore(store.directory).prune_old_checkpoints(1) == [4, 3]
    assert store.list_steps() == [6, 5]
    (store.directory / "step_000005" / "run_state.batch").unlink()
    make(store, 7)
    assert CheckpointStore(store.directory).prune_old_checkpoints(1) == [6, 5]
    assert CheckpointStore(store.directory).prune_old_checkpoints(
        1
    ) == [] and store.list_steps() == [7]


def test_the_best_checkpoint_is_kept_beside_the_newest(store: CheckpointStore) -> None:
    for step in range(1, 6):
        make(store, step)
    assert store.prune_old_checkpoints(2, best_step=2) == [3, 1] and store.list_steps() == [5, 4, 2]
    assert store.prune_old_checkpoints(2, best_step=4) == [2] and store.list_steps() == [5, 4]


def test_links_keep_a_file_that_is_pruned_elsewhere(store: CheckpointStore) -> None:
    make(store, 1)
    partial = store.begin_checkpoint(2)
    os.link(store.directory / "step_000001" / "run_state.batch", partial / "run_state.batch")
    (partial / "rng").mkdir()
    (partial / "rng" / "rank0").write_bytes(b"r")
    kept = FileRecord("run_state.batch", 3, hashlib.sha256(b"\x00\x01\x02").hexdigest())
    path = store.commit_checkpoint(2, 2, {}, {}, [kept, *make_file_records(partial / "rng")]).path
    assert store.prune_old_checkpoints(1) == [1]
    verify(path)
    assert (path / "run_state.batch").read_bytes() == b"\x00\x01\x02"


def killed_at(point: str, work_dir: Path, store: CheckpointStore) -> None:
    """Saves step 2 in a process that is killed at `point`, like a power cut as far as other
    processes see it.
    """
    child = os.fork()
    if child == 0:
        try:
            faults.install_fault_plan(f"kill@{point}", "controller", work_dir)
            make(store, 2)
            store.prune_old_checkpoints(1)
        finally:
            os._exit(3)  # it was not killed
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (
        f"{point} was never reached"
    )


@pytest.mark.parametrize("point", CONTROLLER_POINTS)
def test_a_kill_at_any_point_leaves_a_good_checkpoint(
    store: CheckpointStore, tmp_path: Path, point: str
) -> None:
    make(store, 1)
    killed_at(point, tmp_path / "faults", store)
    after = CheckpointStore(store.directory)
    found = after.find_newest()
    has_name = point != "ckpt.before_commit"
    assert found is not None and found.manifest.step == (2 if has_name else 1)
    assert (store.directory / "latest").read_text().strip() == (
        "step_000002" if point == "ckpt.after_commit" else "step_000001"
    )
    assert [path.name for path in after.remove_unfinished()] == (
        [] if has_name else [".step_000002.partial"]
    )
    assert after.list_steps() == ([2, 1] if has_name else [1])
    if not has_name:
        make(after, 2)
    assert after.prune_old_checkpoints(1) == [1] and after.find_newest() is not None


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make(store, step)

    def cut_off(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", cut_off)
    with pytest.raises(KeyboardInterrupt):
        store.prune_old_checkpoints(1)
    monkeypatch.undo()
    after = CheckpointStore(store.directory)
    assert after.list_steps() == [2]
    assert [path.name for path in after.remove_unfinished()] == [".step_000001.removed"]
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["latest", "step_000002"]


def test_a_full_disk_at_the_commit_changes_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    make(store, 1)
    files = fill(store.begin_checkpoint(2))
    faults.install_fault_plan("disk_full@ckpt.before_commit", "controller", tmp_path / "faults")
    try:
        with pytest.raises(OSError, match="No space left"):
            store.commit_checkpoint(2, 2, {}, {}, files)
    finally:
        faults.install_fault_plan("", "controller", tmp_path)
    store.abandon_checkpoint(2)
    found = store.find_newest()
    assert found is not None and found.manifest.step == 1
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["latest", "step_000001"]


def test_a_full_disk_after_the_rename_is_a_warning(
    store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, 1)
    faults.install_fault_plan("disk_full@ckpt.after_rename", "controller", tmp_path / "faults")
    try:
        make(store, 2)
    finally:
        faults.install_fault_plan("", "controller", tmp_path)
    found = store.find_newest()
    assert (
        found is not None and found.manifest.step == 2 and "latest was not updated" in caplog.text
    )
