"""Files and directories that others prepared, and what others may read of ours."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron.controller.observe.run_dir import LOCK_FILE, acquire_run_lock, open_run_dir
from rlhf_megatron.rollout.fleet.server_process import (
    HIDDEN_TOKEN,
    ServerProcess,
    write_private_file,
    write_token_file,
)
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory
from rlhf_megatron.weights.hf_reader import HFReader

STRANGER = 12345  # an id that nobody has


@pytest.fixture
def open_mask() -> Iterator[None]:
    """Files would be open to all, if nobody took care."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_and_buffers_are_ours_alone(tmp_path: Path, open_mask: None) -> None:
    write_token_file(tmp_path / "token")
    write_private_file(tmp_path / "settings.yaml", "api-key: x")
    with make_transfer_directory(tmp_path, 1) as transfer:
        assert mode(transfer.path) == 0o700 and mode(transfer.path / "owner.lock") == 0o600
    assert mode(tmp_path / "token") == mode(tmp_path / "settings.yaml") == 0o600


def test_a_token_is_not_written_through_a_link_or_into_an_open_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "token").symlink_to(victim)
    token = write_token_file(tmp_path / "token")
    assert victim.read_text() == "precious" and not (tmp_path / "token").is_symlink()
    (tmp_path / "token").chmod(0o666)
    descriptor = os.open(tmp_path / "token", os.O_RDONLY)  # a stranger who opened it before
    again = write_token_file(tmp_path / "token")
    assert os.read(descriptor, 100).decode() == token != again
    os.close(descriptor)


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    run = tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    (run / LOCK_FILE).symlink_to(victim)
    with pytest.raises(ValueError, match=r"run\.lock is a link"):
        acquire_run_lock(run)
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_the_run_directory_of_another_user_is_refused() -> None:
    parent = Path(tempfile.mkdtemp())  # pytest's own is closed to the user below
    try:
        parent.chmod(0o755)
        run = parent / "run"
        run.mkdir()
        os.chown(run, STRANGER, -1)
        run.chmod(0o777)
        pid = os.fork()
        if pid == 0:  # as a user who is neither root nor the owner
            try:
                os.setuid(STRANGER + 1)
                open_run_dir(str(parent), "run", lambda path: True)
                os._exit(1)
            except ValueError as error:
                os._exit(0 if f"belongs to another user (id {STRANGER})" in str(error) else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not (run / LOCK_FILE).exists()
    finally:
        shutil.rmtree(parent)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", ".."]
)
def test_an_index_of_weights_names_plain_files(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": file}})
    )
    with pytest.raises(ValueError, match="must be a plain name in the same directory"):
        HFReader(tmp_path)


@pytest.mark.dist
def test_a_servers_log_is_private_and_loses_its_token(tmp_path: Path, open_mask: None) -> None:
    token = "s3cret-" * 5
    log = tmp_path / "engine0.log"
    code = f"print('args: key={token} admin={token}', flush=True); import time; time.sleep(600)"
    process = ServerProcess("engine0", [sys.executable, "-c", code], log, {}, token)
    try:
        deadline = time.monotonic() + 60
        while "args" not in process.read_log_tail():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (
            process.read_log_tail() == f"args: key={HIDDEN_TOKEN} admin={HIDDEN_TOKEN}"
            and token in log.read_text()
        )
        process.hide_token_in_log()
        stars = "*" * len(token)
        assert log.read_text() == f"args: key={stars} admin={stars}\n" and mode(log) == 0o600
    finally:
        process.stop()
