"""Named points: a fault acts where, when and for whom it was planned, once over all processes of
its directory.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron import faults


@pytest.fixture(autouse=True)
def no_plan_is_left() -> Iterator[None]:
    yield
    faults.install_fault_plan("", "controller", Path())


def test_without_a_plan_a_point_does_nothing() -> None:
    assert not faults.reach_fault_point("loop.step_begins")


def test_a_fault_waits_for_its_step_and_passing_and_acts_once(tmp_path: Path) -> None:
    faults.install_fault_plan("mark@loop.step_begins:step=3,nth=2", "controller", tmp_path)
    faults.set_fault_step(2)
    assert not faults.reach_fault_point("loop.step_begins")
    faults.set_fault_step(3)
    assert faults.reach_fault_point("loop.step_begins")
    assert not faults.reach_fault_point("loop.step_begins")
    assert "mark@loop.step_begins by controller" in (tmp_path / "fired0").read_text()


def test_a_fault_of_another_does_not_act(tmp_path: Path) -> None:
    faults.install_fault_plan("mark@actor.before_log_probs:who=rank1", "rank0", tmp_path)
    assert not faults.reach_fault_point("actor.before_log_probs")
    assert not (tmp_path / "fired0").exists()


def test_a_fault_that_acted_before_a_restart_does_not_act_again(tmp_path: Path) -> None:
    for is_first in (True, False):
        faults.install_fault_plan("mark@ckpt.before_data", "rank0", tmp_path)
        assert faults.reach_fault_point("ckpt.before_data") == is_first


def test_a_full_disk_is_an_oserror(tmp_path: Path) -> None:
    faults.install_fault_plan("disk_full@ckpt.mid_data", "rank0", tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        faults.reach_fault_point("ckpt.mid_data")


def test_a_killed_process_is_gone_and_its_mark_is_there(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\nfrom rlhf_megatron import faults\n"
        "faults.install_fault_plan('kill@loop.step_ends', 'controller',"
        f" pathlib.Path({str(tmp_path)!r}))\n"
        "faults.reach_fault_point('loop.step_ends')\nsys.exit(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    assert (tmp_path / "fired0").exists()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("kill", "is not of the form ACTION@POINT"),
        ("kill@nowhere", "there is no point 'nowhere'"),
        ("kill@loop.step_ends:when=3", "unknown ['when']"),
        ("burn@loop.step_ends", "unknown action; known are"),
    ],
)
def test_a_bad_plan_is_refused(tmp_path: Path, plan: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        faults.install_fault_plan(plan, "controller", tmp_path)
    assert words in str(caught.value)
