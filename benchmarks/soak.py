"""`python -m benchmarks.soak --minutes 10 --faults 20 --seed 1`: learning goes on whatever
happens to it.

A small task is learnt on two ranks with two engines while seeded random troubles come from outside
(the kinds and their mix: benchmarks/chaos/trouble.py). A launch that ends is started again. At the
end the run is asked to stop, and:
the reward has reached its target; steps, versions and samples are exactly those of a run that
nobody disturbed; nothing is left: no process, port, file in shared memory or the temporary
directory, and no file descriptor was leaked; and ETTR, the time of the steps that count over wall
time since the first launch, is at least 0.8.

Results: benchmarks/results/soak.json. The exit code is 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos import verdict
from benchmarks.chaos.leaks import (
    FileCounts,
    listening_ports,
    new_entries,
    shared_memory,
    temporary_entries,
)
from benchmarks.chaos.matrix import signal_name, tail
from benchmarks.chaos.program import Launch
from benchmarks.chaos.task import LAYOUTS, NAME, overrides, write_soak
from benchmarks.chaos.trouble import KINDS, Done, Scene, Trouble, newest_checkpoint, schedule
from benchmarks.common import RESULTS, ROOT, write_result
from rlhf_megatron.stop import STOPPED_EXIT_CODE

DIRECTORY = ROOT / "runs" / "soak"
REWARD_TARGET = 0.9
ETTR_BAR = 0.8
POLL_S = 0.2
STEADY_STEPS = 3  # that a launch must have made before it is disturbed, and between two troubles
STOP_S = 90.0  # deadline of the end
END_S = 10.0  # for all processes of a launch to be gone
STARTUP_S = 300.0  # deadline of the first step of a launch


@dataclass
class LaunchRecord:
    """A launch and how it ended."""

    started_s: float  # since the start of the soak
    first_step_s: float | None = None  # after its start
    ended_s: float | None = None
    exit_code: int | None = None
    cause: str | None = None  # the trouble that ended it


@dataclass
class Event:
    at_s: float
    kind: str
    text: str


@dataclass
class Soak:
    """The supervisor: starts, disturbs, starts again."""

    config: Path
    directory: Path
    troubles: list[Trouble]
    seconds: float
    launches: list[LaunchRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    file_counts: FileCounts = field(default_factory=FileCounts)

    def __post_init__(self) -> None:
        self.run_dir = self.directory / "runs" / NAME
        self._start = time.monotonic()
        self._undo: list[tuple[float, Done]] = []
        self._seen_size = 0
        self._steps_seen = 0
        self._cause: str | None = None
        self.launch = self._launch()

    @property
    def now(self) -> float:
        return time.monotonic() - self._start

    def run(self) -> None:
        """Until the time is over; then the end."""
        try:
            while self.now < self.seconds and not self.problems:
                self._poll()
                time.sleep(POLL_S)
            self._finish()
        finally:
            self.launch.kill()

    def _launch(self) -> Launch:
        self._steps_seen = 0
        self._cause = None
        self.launches.append(LaunchRecord(round(self.now, 1)))
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        values = {**LAYOUTS["tp2"], "trainer.default_local_dir": str(self.directory / "runs")}
        arguments = [str(self.config), *overrides(values)]
        return Launch(
            arguments, self.directory, self.directory / "console", {"TMPDIR": str(temporary)}
        )

    def _poll(self) -> None:
        self._count_steps()
        for due, done in [item for item in self._undo if item[0] <= self.now]:
            self._undo.remove((due, done))
            assert done.undo is not None
            done.undo()
        if self.launch.exit_code is not None:
            self._ended()
            if not self.problems:
                self.launch = self._launch()
        elif self._steps_seen == 0 and self.launch.seconds > STARTUP_S:
            self.problems.append(
                f"no step within {STARTUP_S:.0f} s of a launch:\n{tail(self.launch.console)}"
            )
        elif self._steps_seen >= STEADY_STEPS and self._cause is None:
            self.file_counts.add(self.launch.processes(), self.now)
            if self.troubles and self.troubles[0].at_s <= self.now:
                self._disturb(self.troubles[0])

    def _count_steps(self) -> None:
        """Steps of this launch, by the growth of the file that has a row for each."""
        path = self.run_dir / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size > self._seen_size:
            self._steps_seen += 1
            record = self.launches[-1]
            record.first_step_s = record.first_step_s or round(self.now - record.started_s, 1)
        self._seen_size = size

    def _disturb(self, trouble: Trouble) -> None:
        kind = KINDS[trouble.kind]
        if kind.ends_launch and (self._undo or newest_checkpoint(self.run_dir, at_least=1) is None):
            return  # nothing to go on from yet, or the disk is full: the state could not be saved
        scene = Scene(self.launch, self.run_dir, self.directory / "outage")
        done = kind.act(scene, random.Random(trouble.seed))
        if done is None:
            return  # tried again at the next poll
        self.troubles.pop(0)
        self.events.append(Event(round(self.now, 1), trouble.kind, done.text))
        print(f"{self.now:6.0f} s  {trouble.kind}: {done.text}", flush=True)
        self._steps_seen = 1
        if kind.ends_launch:
            self._cause = trouble.kind
        if done.undo is not None:
            self._undo.append((self.now + done.undo_after_s, done))

    def _ended(self) -> None:
        record = self.launches[-1]
        record.ended_s = round(self.now, 1)
        record.exit_code = self.launch.exit_code
        record.cause = self._cause
        left = self.launch.left_over(END_S)
        self.launch.kill()
        print(
            (
                f"{self.now:6.0f} s  ended: {signal_name(record.exit_code)}"
                f" ({record.cause or 'by itself'})"
            ),
            flush=True,
        )
        self.problems += [f"left over: {process.role} {process.command[:200]}" for process in left]
        if record.cause is None:
            self.problems.append(
                f"it ended by itself with {record.exit_code}:\n{tail(self.launch.console, 40)}"
            )
        elif record.cause == "terminate" and record.exit_code != STOPPED_EXIT_CODE:
            self.problems.append(f"SIGTERM: exit code {record.exit_code}, not {STOPPED_EXIT_CODE}")

    def _finish(self) -> None:
        """Ask it to stop. A launch that is being started is let come to its first step before."""
        for _, done in self._undo:
            assert done.undo is not None
            done.undo()
        self.seconds = float("inf")
        while not self.problems and (self._cause is not None or self._steps_seen < STEADY_STEPS):
            self._poll()
            time.sleep(POLL_S)
        if self.problems:
            return
        ports = listening_ports([process.pid for process in self.launch.processes()])
        self._cause = "end"
        os.kill(self.launch.pid, signal.SIGTERM)
        if self.launch.wait(STOP_S) != STOPPED_EXIT_CODE:
            self.problems.append(
                f"the end: exit code {self.launch.exit_code}:\n{tail(self.launch.console, 40)}"
            )
        self._ended()
        still = ports & listening_ports(None)
        self.problems += [f"port {port} still listens" for port in sorted(still)]


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """(result, problems)."""
    directory = args.directory.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    config = write_soak(directory, args.seed)
    memory = shared_memory()
    troubles = schedule(60 * args.minutes, args.faults, args.seed)
    soak = Soak(config, directory, list(troubles), 60 * args.minutes)
    soak.run()
    wall_s = soak.now
    figures, problems = verdict.read(soak.run_dir, config)
    problems = soak.problems + problems
    figures["ettr"] = figures.get("productive_s", 0.0) / wall_s
    problems += [f"{len(soak.troubles)} troubles were never made"] * bool(soak.troubles)
    if figures.get("reward_last", 0.0) < REWARD_TARGET:
        problems.append(f"reward {figures.get('reward_last')} has not reached {REWARD_TARGET}")
    if figures["ettr"] < ETTR_BAR:
        problems.append(f"ETTR {figures['ettr']:.3f} is below {ETTR_BAR}")
    problems += [f"left in shared memory: {name}" for name in new_entries(memory, shared_memory())]
    problems += [
        f"left in the temporary directory: {name}" for name in temporary_entries(directory / "tmp")
    ]
    problems += soak.file_counts.problems()
    result = {
        "seed": args.seed,
        "minutes": args.minutes,
        "wall_s": round(wall_s, 1),
        "reward_target": REWARD_TARGET,
        "ettr_bar": ETTR_BAR,
        **figures,
        "file_descriptors": soak.file_counts.table(),
        "troubles": [asdict(event) for event in soak.events],
        "launches": [asdict(launch) for launch in soak.launches],
        "problems": problems,
    }
    return result, problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--directory", type=Path, default=DIRECTORY, help="of the run (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "soak.json", help="result file (%(default)s)"
    )
    args = parser.parse_args(argv)
    result, problems = run(args)
    command = " ".join(["python -m benchmarks.soak", *(sys.argv[1:] if argv is None else argv)])
    path = write_result(args.out.stem, command, result, args.out.parent)
    print("\n".join(f"FAIL {problem}" for problem in problems))
    print(
        f"{result['steps']} steps, {len(result['troubles'])} troubles, {len(result['launches'])}"
        f" launches, reward {result.get('reward_last', 0.0):.3f}, ETTR {result['ettr']:.3f},"
        f" {len(problems)} problems; {path}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
