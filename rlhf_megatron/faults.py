"""Faults on purpose: named points of a run at which a test kills, stops or delays a process.

A plan is text, `ACTION@POINT[:key=value,...]`, several separated by semicolons:

    kill@ckpt.before_commit:step=4; stop@actor.before_optimizer_step:who=rank1,nth=3;
        delay@sync.after_bucket:seconds=2

`who` is "controller" (also of an inline run), "rank0", "rank1" ..., "driver0" ... of the job;
without it whoever comes first acts.
`step` is the step of the loop, known on the controller; `nth` counts how often this process has
passed the point. Each fault acts once, also over restarts: a file in the directory of the plan
marks it as done before it acts. Without a plan a point costs one comparison.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PLAN_ENV = "RLHF_MEGATRON_FAULTS"
DIRECTORY_ENV = "RLHF_MEGATRON_FAULTS_DIR"

POINTS = {
    "loop.step_begins": "controller: before the prompts of a step are drawn",
    "rollout.mid_generate": (
        "controller: some groups of the step are taken and journalled, others are not yet"
    ),
    "driver.before_reply": "driver: an engine has answered, the controller has not got it",
    "rollout.after_generate": "controller: all groups have come",
    "reward.before_score": "controller: before the rewards are computed",
    "loop.after_score": "controller: rewards are known",
    "actor.before_log_probs": "rank: before the forward pass of log-probs",
    "loop.after_advantages": "controller: the batch to train on is complete",
    "update.after_mini_batch": "controller: one mini-batch of the actor is done",
    "actor.before_optimizer_step": "rank: gradients are complete",
    "actor.after_optimizer_step": "rank: parameters are new",
    "sync.after_begin": "controller: engines are STALE, nothing was sent",
    "sync.after_bucket": "rank: a sender has delivered a bucket",
    "sync.before_commit": "controller: all weights were sent and verified",
    "sync.after_commit": "controller: engines serve the new version",
    "turns.before_restore": (
        "controller: colocated engines have released their memory, the trainer is away"
    ),
    "turns.before_stream": (
        "controller: colocated, gradients and optimizer state are away, the engines have no memory"
    ),
    "turns.after_stream": (
        "controller: colocated, all of the trainer is away, the engines have no cache"
    ),
    "loop.step_ends": "controller: metrics of the step are written",
    "ckpt.before_data": "rank: before the first byte of a checkpoint",
    "ckpt.mid_data": "rank: while its files are written",
    "ckpt.before_commit": "controller: all files are complete, the directory has not got its name",
    "ckpt.after_rename": "controller: the directory has its name, `latest` names another",
    "ckpt.after_commit": "controller: `latest` names it; old ones have not been removed",
    "journal.before_write": "controller: before a stage is journalled",
    "evaluate.before": "controller: before an evaluation",
}
"""Where a fault can act, and who passes there."""

# the action of points where the caller itself does the damage (a NaN, a changed parameter)
MARK = "mark"
_ITEM = re.compile(r"(?P<action>\w+)@(?P<point>[\w.]+)(?::(?P<arguments>.*))?", re.DOTALL)

# made by the controller (`define_fault_action`) when its engines run
EXTRA_ACTIONS = "kill_engine", "stop_engine"


@dataclass(frozen=True)
class PlannedFault:
    """One entry of a plan."""

    action: str
    point: str
    process_name: str | None = None
    step: int | None = None
    nth: int | None = None
    seconds: float = 3600.0  # of delay


def parse_fault_plan(text: str) -> tuple[PlannedFault, ...]:
    """Return the faults of a plan's text. Raise ValueError for a malformed entry."""
    faults = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"fault {item!r} is not of the form ACTION@POINT[:key=value,...].")
        if match["point"] not in POINTS:
            raise ValueError(
                f"fault {item!r}: there is no point {match['point']!r}; the points"
                f" are {sorted(POINTS)}."
            )
        given = dict(pair.split("=", 1) for pair in (match["arguments"] or "").split(",") if pair)
        if unknown := given.keys() - {"who", "step", "nth", "seconds"}:
            raise ValueError(
                f"fault {item!r}: unknown {sorted(unknown)}; known are who, step, nth, seconds."
            )
        faults.append(
            PlannedFault(
                match["action"],
                match["point"],
                given.get("who"),
                int(given["step"]) if "step" in given else None,
                int(given["nth"]) if "nth" in given else None,
                float(given.get("seconds", PlannedFault.seconds)),
            )
        )
    return tuple(faults)


class FaultPlan:
    """The faults of a run, as one process sees them."""

    def __init__(
        self, faults: tuple[PlannedFault, ...], process_name: str, directory: Path
    ) -> None:
        """Raise ValueError for an unknown action. `process_name`: "controller", "rank0", ...;
        `directory`: holds a file for each fault that has acted.
        """
        self.step: int | None = None  # set by the loop
        self.actions: dict[str, Callable[[PlannedFault], None]] = dict(_ACTIONS)
        for fault in faults:
            if fault.action not in {*self.actions, MARK, *EXTRA_ACTIONS}:
                known = sorted({*self.actions, MARK, *EXTRA_ACTIONS})
                raise ValueError(
                    f"fault {fault.action}@{fault.point}: unknown action; known are {known}."
                )
        self._faults = faults
        self._process_name = process_name
        self._directory = directory
        self._num_passes: Counter[str] = Counter()

    def reach_point(self, point: str) -> bool:
        """Count a pass of this point, and act on each planned fault that waits for it. Return True
        where a `mark` fault waits: the caller must then do the damage.
        """
        assert point in POINTS, f"{point} is not a named point"
        self._num_passes[point] += 1
        is_marked = False
        for number, fault in enumerate(self._faults):
            if fault.point != point or fault.process_name not in (None, self._process_name):
                continue
            if fault.step not in (None, self.step) or fault.nth not in (
                None,
                self._num_passes[point],
            ):
                continue
            if not self._claim_fault(number, fault):
                continue
            if fault.action == MARK:
                is_marked = True
            else:
                self.actions[fault.action](fault)
        return is_marked

    def _claim_fault(self, fault_index: int, fault: PlannedFault) -> bool:
        """Mark the fault as done, by a file. Return True for the only process that may act on it,
        once in the life of the directory.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(
                self._directory / f"fired{fault_index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600
            )
        except FileExistsError:
            return False
        text = (
            f"{fault.action}@{fault.point} by {self._process_name}, process {os.getpid()},"
            f" at {time.time():.3f}\n"
        )
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
        os.close(descriptor)
        return True


def _make_signal_action(signal_number: int) -> Callable[[PlannedFault], None]:
    """Return an action that sends this process a signal."""
    return lambda fault: os.kill(os.getpid(), signal_number)


def _raise_disk_full(fault: PlannedFault) -> None:
    """Raise the OSError of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"(injected at {fault.point})")


def _raise_injected_error(fault: PlannedFault) -> None:
    """Raise RuntimeError."""
    raise RuntimeError(f"injected at {fault.point}")


_ACTIONS: dict[str, Callable[[PlannedFault], None]] = {
    "kill": _make_signal_action(signal.SIGKILL),
    "stop": _make_signal_action(signal.SIGSTOP),
    "term": _make_signal_action(signal.SIGTERM),
    "delay": lambda fault: time.sleep(fault.seconds),
    "disk_full": _raise_disk_full,
    "fail": _raise_injected_error,
}

_plan: FaultPlan | None = None


def install_fault_plan(text: str, process_name: str, directory: Path) -> None:
    """Make `text` the fault plan of this process; empty text removes the plan. Raise ValueError for
    a malformed plan. For cli/ and tests.
    """
    global _plan
    _plan = FaultPlan(parse_fault_plan(text), process_name, directory) if text.strip() else None


def install_fault_plan_from_env(process_name: str) -> None:
    """Make the plan in the environment, which a test has set, the fault plan of this process; do
    nothing without one.
    """
    if PLAN_ENV in os.environ:
        install_fault_plan(os.environ[PLAN_ENV], process_name, Path(os.environ[DIRECTORY_ENV]))


def define_fault_action(action_name: str, action: Callable[[PlannedFault], None]) -> None:
    """Define the action of one of EXTRA_ACTIONS from now on; do nothing without a plan."""
    assert action_name in EXTRA_ACTIONS, action_name
    if _plan is not None:
        _plan.actions[action_name] = action


def set_fault_step(step: int) -> None:
    """Set the step of the loop, which planned faults can name. Called by the controller."""
    if _plan is not None:
        _plan.step = step


def reach_fault_point(point: str) -> bool:
    """Act on the planned faults that wait at this named point. Return True where a `mark` fault
    waits: the caller must then do the damage. Always False without a plan.
    """
    return _plan is not None and _plan.reach_point(point)
