"""Who may write to a run directory, and what stays in it:
the lock, a former run, attempts.jsonl.
"""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_megatron.controller.observe.line_file import RunAttempts, read_attempt_lines
from rlhf_megatron.controller.observe.run_dir import RunLock, acquire_run_lock, open_run_dir
from rlhf_megatron.stop import RunStopped


def never(path: Path) -> bool:
    return False


def test_a_second_run_in_one_directory_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    first = open_run_dir(str(tmp_path), "x", never)
    (first.path / "metrics.jsonl").write_text("kept")
    program = (
        "import sys; from rlhf_megatron.controller.observe.run_dir import open_run_dir\n"
        "open_run_dir(sys.argv[1], 'x', lambda path: False)"
    )
    second = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert second.returncode == 1
    said = second.stderr.splitlines()[-1]
    owner = json.loads((first.path / "run.lock").read_text())
    assert (
        f"in use by process {os.getpid()} on {os.uname().nodename}, since {owner['started']}"
        in said
    )
    assert (first.path / "metrics.jsonl").read_text() == "kept" and len(
        list(tmp_path.iterdir())
    ) == 1
    first.lock.release()
    third = open_run_dir(str(tmp_path), "x", never)
    assert third.former_run_path == tmp_path / "x.1" and sorted(
        p.name for p in third.path.iterdir()
    ) == ["logs", "run.lock"]
    assert sorted(p.name for p in third.former_run_path.iterdir()) == ["logs", "metrics.jsonl"]


def test_the_lock_outlives_its_taker_in_a_child_that_inherits_it(tmp_path: Path) -> None:
    lock = acquire_run_lock(tmp_path)
    child = subprocess.Popen(["sleep", "60"], pass_fds=lock.descriptors)
    lock.release()  # as when this process is killed
    try:
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} "):
            acquire_run_lock(tmp_path)
    finally:
        child.kill()
        child.wait()
    again = acquire_run_lock(tmp_path)
    assert (
        RunLock.take_over_inherited(
            tmp_path, [os.dup(each) for each in again.descriptors]
        ).acquired_at
        == again.acquired_at
    )


def test_a_lock_file_that_was_deleted_admits_no_second_run(tmp_path: Path) -> None:
    lock = acquire_run_lock(tmp_path)
    (tmp_path / "run.lock").unlink()
    with pytest.raises(ValueError, match="is in use by process"):
        acquire_run_lock(tmp_path)
    lock.verify_ownership()
    owner = json.loads((tmp_path / "run.lock").read_text())
    assert (owner["pid"], owner["since"]) == (os.getpid(), lock.acquired_at)
    with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} "):
        acquire_run_lock(tmp_path)
    lock.release()
    acquire_run_lock(tmp_path).release()


def test_a_run_notices_that_its_directory_is_another_runs(tmp_path: Path) -> None:
    lock = acquire_run_lock(tmp_path / "x")
    fcntl.flock(lock.descriptors[1], fcntl.LOCK_UN)  # as on NFS, which has no locks of directories
    (tmp_path / "x" / "run.lock").unlink()
    acquire_run_lock(tmp_path / "x")
    with pytest.raises(ValueError, match="another run has taken it"):
        lock.verify_ownership()
    (tmp_path / "x").rename(tmp_path / "y")
    (tmp_path / "x").mkdir()
    with pytest.raises(ValueError, match="was moved or deleted"):
        lock.verify_ownership()


def test_a_directory_that_only_a_refused_start_left_is_used(tmp_path: Path) -> None:
    acquire_run_lock(tmp_path / "x").release()
    assert open_run_dir(str(tmp_path), "x", never).former_run_path is None


def test_a_run_that_goes_on_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "kept").touch()
    opened = open_run_dir(str(tmp_path), "x", lambda path: (path / "kept").exists())
    assert opened.former_run_path is None and (opened.path / "kept").exists()


def test_attempts_have_a_start_and_an_end_unless_they_were_killed(tmp_path: Path) -> None:
    with RunAttempts(tmp_path).record_attempt(100.0, None):
        pass
    with (
        pytest.raises(RunStopped),
        RunAttempts(tmp_path).record_attempt(200.0, 4, changes={"actor.optim.lr": ["1.0", "2.0"]}),
    ):
        raise RunStopped("SIGTERM to [controller]")
    with (tmp_path / "attempts.jsonl").open("a") as file:
        # killed, here in a write
        file.write('{"kind": "start", "time": 300.0, "resumed_from_step": 4}\n{"kind": "en')
    attempts = RunAttempts(tmp_path)
    assert attempts.num_attempts == 3 and attempts.first_start_time == 100.0
    with pytest.raises(ValueError, match="no"), attempts.record_attempt(400.0, 6):
        raise ValueError("no")
    lines = read_attempt_lines(tmp_path)
    assert [
        (line["kind"], line.get("resumed_from_step"), line.get("reason")) for line in lines
    ] == [
        ("start", None, None),
        ("end", None, "complete"),
        ("start", 4, None),
        ("end", None, "stopped: SIGTERM to [controller]"),
        ("start", 4, None),
        ("start", 6, None),
        ("end", None, "failed: no"),
    ]
    assert lines[2]["changes"] == {"actor.optim.lr": ["1.0", "2.0"]} and "changes" not in lines[0]
