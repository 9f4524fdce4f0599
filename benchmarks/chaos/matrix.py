"""One case: start, wait for the fault, for the end,
start again until the run is complete, compare.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.cases import Case
from benchmarks.chaos.compare import differences
from benchmarks.chaos.program import Launch
from benchmarks.chaos.task import GROUP_SIZE, LAYOUTS, overrides, place, run_dir_of
from rlhf_megatron.faults import DIRECTORY_ENV, PLAN_ENV, parse_fault_plan

MAX_RESTARTS = 2
LAUNCH_S = 300.0  # deadline of one launch; it takes 15 s on a quiet machine
END_S = 10.0  # for the last process of a launch to be gone when the program has ended
GENERATED = re.compile(r"generated (\d+) samples of (\d+) prompts")  # in an engine's log


@dataclass
class Outcome:
    """What came of a case. `problems` empty: it held."""

    name: str
    plan: str
    # of each fault of the plan that happened: who did what and when
    fired: list[str] = field(default_factory=list)
    # of each launch; None: past its deadline
    exit_codes: list[int | None] = field(default_factory=list)
    restarts: int = 0
    seconds: float = 0.0
    # step, of each launch that has a run directory
    resumed_from: list[int | None] = field(default_factory=list)
    num_repeated: int = 0  # samples of training that were generated more than once
    seconds_to_end: float | None = None  # from the fault to the end of the disturbed launch
    is_equal: bool = False  # bit for bit, or by state where the case says so
    orphans: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def undisturbed(config: Path, layout: str, directory: Path, settings: Mapping[str, Any]) -> Path:
    """The run directory of a run that is left alone. Raises RuntimeError when it fails."""
    prepare(directory)
    launch = _start(config, layout, directory, settings, {})
    try:
        code = launch.wait(LAUNCH_S)
    finally:
        launch.kill()
    if code != 0:
        raise RuntimeError(
            f"the undisturbed run in {directory} ended with {code}:\n{tail(launch.console)}"
        )
    return run_dir_of(directory)


def prepare(directory: Path) -> None:
    """An empty directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def run_case(case: Case, config: Path, reference: Path, directory: Path) -> Outcome:
    """Never raises for what the case shows: that stands in the outcome."""
    prepare(directory)
    outcome = Outcome(case.name, case.plan)
    start = time.monotonic()
    plan = {PLAN_ENV: case.plan, DIRECTORY_ENV: str(directory / "faults")}
    for attempt in range(1 + MAX_RESTARTS):
        launch = _start(config, case.layout, directory, case.settings, plan)
        try:
            _watch(case, launch, outcome, directory / "faults", is_first=attempt == 0)
        finally:
            launch.kill()
        outcome.restarts = attempt
        if launch.exit_code == 0 or outcome.problems:
            break
    outcome.seconds = round(time.monotonic() - start, 1)
    outcome.problems += _judge(case, outcome, reference, directory)
    outcome.problems += [
        f"left in the transfer directory: {p.name}" for p in (directory / "transfer").iterdir()
    ]
    return outcome


def _start(
    config: Path, layout: str, directory: Path, settings: Mapping[str, Any], env: Mapping[str, str]
) -> Launch:
    values = {**LAYOUTS[layout], **place(directory), **settings}
    return Launch([str(config), *overrides(values)], directory, directory / "console", env)


def _watch(case: Case, launch: Launch, outcome: Outcome, faults: Path, is_first: bool) -> None:
    """Until the launch has ended: the signal from outside, the deadline, what is left."""
    fired_at: float | None = None

    def watch() -> None:
        nonlocal fired_at
        if fired_at is None and fired(faults):
            fired_at = time.monotonic()
            if case.from_outside is not None:
                target = launch.find(case.from_outside.role)
                if target is None:
                    outcome.problems.append(
                        f"there is no {case.from_outside.role} to send a signal to"
                    )
                else:
                    os.kill(target.pid, case.from_outside.number)

    code = launch.wait(LAUNCH_S, watch if is_first else None)
    outcome.exit_codes.append(code)
    if code is None:
        living = ", ".join(f"{process.role} ({process.pid})" for process in launch.processes())
        outcome.problems.append(f"still runs after {LAUNCH_S:.0f} s: {living}")
        return
    if is_first and fired_at is not None:
        outcome.seconds_to_end = round(time.monotonic() - fired_at, 1)
    left = launch.left_over(END_S)
    outcome.orphans += [f"{process.role}: {process.command[:200]}" for process in left]


def fired(faults: Path) -> list[str]:
    """The markers of the faults of a plan that have happened, in the order of the plan."""
    return [path.read_text().strip() for path in sorted(faults.glob("fired*"))]


def _judge(case: Case, outcome: Outcome, reference: Path, directory: Path) -> list[str]:
    """What is wrong with how the launches went and with what the run came to."""
    problems = []
    first = outcome.exit_codes[0]
    outcome.fired = fired(directory / "faults")
    if len(outcome.fired) < len(parse_fault_plan(case.plan)):
        problems.append(f"{len(outcome.fired)} of the faults of the plan have fired")
    elif case.first_exit is None and first == 0:
        problems.append("the disturbed launch ended with 0, as if nothing had happened")
    elif case.first_exit is not None and first not in case.first_exit:
        problems.append(
            f"the disturbed launch ended with {first}, not"
            f" with {' or '.join(map(str, case.first_exit))}"
        )
    if outcome.orphans:
        problems.append(f"{len(outcome.orphans)} processes were left")
    text = said(directory)
    problems += [f"nothing was said of {words!r}" for words in case.said if words not in text]
    if outcome.exit_codes[-1] != 0:
        problems.append(
            f"not complete after {outcome.restarts} restarts:\n{tail(directory / 'console')}"
        )
        return problems
    run_dir = run_dir_of(directory)
    outcome.resumed_from = resumed_from(run_dir)
    if (
        case.has_checkpoint
        and outcome.restarts
        and (len(outcome.resumed_from) < 2 or None in outcome.resumed_from[1:])
    ):
        problems.append(f"it did not go on from a checkpoint: {outcome.resumed_from}")
    outcome.num_repeated = num_generated(run_dir) - num_generated(reference)
    if not 0 <= outcome.num_repeated <= case.may_repeat:
        problems.append(
            f"{outcome.num_repeated} samples more were generated than needed, not {case.may_repeat}"
        )
    try:
        different = differences(reference, run_dir, case.is_bitwise)
    except (OSError, ValueError, KeyError) as error:
        different = [f"cannot be compared: {type(error).__name__}: {error}"]
    outcome.is_equal = not different
    return problems + different


def resumed_from(run_dir: Path) -> list[int | None]:
    """Of each launch, by attempts.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    return [line["resumed_from_step"] for line in lines if line["kind"] == "start"]


def num_generated(run_dir: Path) -> int:
    """Samples of training that the engines of all launches have answered with, by their logs; an
    evaluation asks for one sample a prompt. What an engine that was killed had under
    way has no line.
    """
    logs = [path.read_text(errors="replace") for path in (run_dir / "engines").glob("*.log")]
    found = [map(int, match) for log in logs for match in GENERATED.findall(log)]
    return sum(samples for samples, prompts in found if samples == GROUP_SIZE * prompts)


def said(directory: Path) -> str:
    """The console, and the hang report where there is one."""
    report = run_dir_of(directory) / "hang_report.txt"
    return (directory / "console").read_text(errors="replace") + (
        report.read_text() if report.exists() else ""
    )


def tail(path: Path, num_lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def signal_name(code: int | None) -> str:
    """An exit code for people."""
    if code is None:
        return "deadline"
    return signal.Signals(-code).name if code < 0 else str(code)
