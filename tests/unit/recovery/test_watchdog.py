"""A stage that is late: one report, and an end in time, wherever the controller waits."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tools import Start, toy_runs

from rlhf_megatron.controller.recovery.stage_watchdog import HANG_REPORT, StageWatchdog
from rlhf_megatron.runtime.host_errors import HostError, HostTimeoutError


class Hosts:
    """What a watchdog asks of a WorkerGroup."""

    def __init__(self) -> None:
        self.ended: list[HostError] = []
        self.set_hang_describer = lambda describe: setattr(self, "describe", describe)
        self.abort_with_error = self.ended.append

    def describe_hosts(self) -> list[str]:
        return ["  [actor dp0 pp0 tp0] actor.update: running for 1.0 s"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with toy_runs(tmp_path) as begin:
        yield begin


def wait_for_a_reward() -> None:
    threading.Event().wait(600)


def test_a_late_stage_ends_where_the_main_thread_waits(tmp_path: Path) -> None:
    hosts = Hosts()
    before = signal.getsignal(signal.SIGUSR2)
    with StageWatchdog(20.0, {"score": 0.3}, tmp_path) as watchdog:
        watchdog.set_report_sources(hosts, lambda: ["call 1", "call 2"])
        started = time.monotonic()
        with pytest.raises(HostTimeoutError) as caught, watchdog("score"):
            wait_for_a_reward()
        assert time.monotonic() - started < 300
        message = str(caught.value)
        head, middle = message.split("The controller:\n")
        assert head == (
            "The stage score was not finished within 0.3 s (trainer.stage_timeouts_s.score).\n"
            "The hosts:\n"
            "  [actor dp0 pp0 tp0] actor.update: running for 1.0 s\n"
        )
        stack, calls = middle.split("The last calls to engines:\n")
        assert calls == "  call 1\n  call 2"
        assert re.search(
            r"thread main\n(      .*\n)*.*test_watchdog.py:\d+ wait_for_a_reward\n", stack
        )
        assert (tmp_path / HANG_REPORT).read_text().partition("\n")[2] == message + "\n"
        assert hosts.ended == [caught.value], "the hosts are ended with the same error"
        assert hosts.describe("a late call", []) is caught.value, "there is one report"
    assert signal.getsignal(signal.SIGUSR2) == before


def test_stages_in_time_leave_nothing(tmp_path: Path) -> None:
    hosts = Hosts()
    with StageWatchdog(1.0, {}, tmp_path) as watchdog:
        watchdog.set_report_sources(hosts, list)
        for _ in range(3):
            with watchdog("generate"):
                time.sleep(0.01)
        time.sleep(1.2)  # no stage runs
    assert hosts.ended == [] and not (tmp_path / HANG_REPORT).exists()


def test_a_late_call_outside_of_a_stage_gets_the_same_report(tmp_path: Path) -> None:
    hosts = Hosts()
    with StageWatchdog(5.0, {}, tmp_path) as watchdog:
        watchdog.set_report_sources(hosts, lambda: ["call 1"])
        error = hosts.describe(
            "actor.save was not finished within 2 s (trainer.stage_timeout_s).", ["  [actor] x"]
        )
    lines = str(error).splitlines()
    assert lines[:4] == [
        "actor.save was not finished within 2 s (trainer.stage_timeout_s).",
        "The hosts:",
        "  [actor] x",
        "The controller:",
    ]
    assert lines[-2:] == ["The last calls to engines:", "  call 1"]
    assert (tmp_path / HANG_REPORT).exists()


@pytest.mark.dist
def test_a_stage_over_its_deadline_names_the_stopped_rank(start: Start) -> None:
    run = start("late_stage", "3,3,1")
    assert run.wait() == 3
    report = (run.directory / HANG_REPORT).read_text()
    assert report.partition("\n")[2] in run.console(), "the error has the whole report"
    assert run.console().count("The hosts:") == 1
    head = (
        "The stage update was not finished within 1.5 s (trainer.stage_timeouts_s.update).\n"
        "The hosts:\n"
    )
    assert head + "  [actor dp0 pp0 tp0] toy.hang: running for " in report
    assert re.search(r"\[actor dp0 pp0 tp0\] .* s, in barrier\n", report)
    assert re.search(
        (
            r"\[actor dp0 pp0 tp1\] toy.hang: running for \d+\.\d s\n(      .*\n"
            r")*      .*/runtime_toy.py:"
        ),
        report,
    )
    assert (
        f"[actor dp0 pp0 tp2] does not answer: process {run.pids()['host2']} is stopped"
        " (SIGSTOP, or"
    ) in report
    assert (
        "Look first at [actor dp0 pp0 tp2]: is not where the others are.\nThe controller:\n"
        in report
    )
    assert re.search(r"support/runtime_toy.py:\d+ late_stage\n", report)
    assert report.endswith("The last calls to engines:\n  12:00:00 engine0 generate: 0.25 s\n")
    run.assert_no_orphans(4)
