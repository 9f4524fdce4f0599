"""The matrix: at which point, to whom, what, in which layout, and what must come of it.

A plan may only reach processes that pass a named point. The launcher's agent passes none: there the
point waits for two seconds, and the signal comes from outside (`from_outside`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from benchmarks.chaos.task import NUM_STEPS, SAMPLES
from rlhf_megatron.faults import POINTS
from rlhf_megatron.stop import STOPPED_EXIT_CODE

# that is disturbed: the checkpoint of step 2 stands, since there is one save at a time; that
# of 4 may not yet
STEP = 5
LAST_EVALUATION = 4  # before step 1, after steps 2 and 4, and at the end
WAIT_S = 2.0  # at a point, for the signal from outside
KILLED = -signal.SIGKILL
FAILED = 1  # the controller's
HANG_S = 20.0  # deadline of a stage in which somebody hangs; the stage takes a fraction of a second
# How often a process passes a point until the step STEP reaches it (see task.py: two optimizer
# steps, four buckets a weight sync, a sync before the first step, checkpoints after
# steps 2, 4 and 6).
_NTH = {
    "driver.before_reply": 2,
    "actor.before_log_probs": STEP,
    "update.after_mini_batch": 2 * STEP - 1,
    "actor.before_optimizer_step": 2 * STEP,
    "actor.after_optimizer_step": 2 * STEP - 1,
    "sync.after_bucket": 4 * STEP + 2,
    "ckpt.before_data": 2,
    "ckpt.mid_data": 2,
    "ckpt.before_commit": 2,
    "ckpt.after_rename": 2,
    "ckpt.after_commit": 2,
    "evaluate.before": LAST_EVALUATION,
}
# that the undisturbed run must have as well
REFERENCE_SETTINGS = "trainer.deterministic", "rollout.num_engines"
ENGINE_POINTS = (
    "rollout.mid_generate",
    "sync.after_begin",
    "sync.before_commit",
    "evaluate.before",
)


@dataclass(frozen=True)
class FromOutside:
    """A signal to the process of a role, when the fault of the plan has fired."""

    role: str
    number: int


@dataclass(frozen=True)
class Case:
    """One disturbed run."""

    name: str
    layout: str
    plan: str
    from_outside: FromOutside | None = None
    # allowed codes of the disturbed launch; None: any but 0
    first_exit: tuple[int, ...] | None = None
    said: tuple[str, ...] = ()  # by the console or the hang report of the disturbed launch
    settings: dict[str, Any] = field(default_factory=dict)
    is_bitwise: bool = True  # False: not in deterministic mode, compared by state
    # False: the fault comes before the first one, and the run starts anew
    has_checkpoint: bool = True

    @property
    def may_repeat(self) -> int:
        """Samples of training that may be generated again: those under way. The others are
        in the journal.
        """
        if not self.has_checkpoint:
            return NUM_STEPS * SAMPLES
        is_generating = any(
            point in self.plan
            for point in ("rollout.mid_generate", "journal.before_write", "driver.")
        )
        return SAMPLES if is_generating else 0


def passed_by(point: str) -> str:
    """controller, rank or driver."""
    return POINTS[point].partition(":")[0]


def who_passes(point: str) -> tuple[str, ...]:
    """At tp2: roles. One rank of a pipeline stage sends the weights."""
    if passed_by(point) == "controller":
        return ("controller",)
    if passed_by(point) == "driver":
        return ("driver0",)
    return ("rank0",) if point == "sync.after_bucket" else ("rank0", "rank1")


def when(point: str) -> str:
    """The argument of a plan that picks the disturbed step."""
    return f"nth={_NTH[point]}" if point in _NTH else f"step={STEP}"


def needed_by(point: str) -> dict[str, Any]:
    """Settings without which nobody passes there. They do not change the bits."""
    if passed_by(point) == "driver":
        return {"rollout.num_drivers": 2}
    return {"rollout.colocated": True} if point.startswith("turns.") else {}


def kills() -> Iterator[Case]:
    """kill -9 of every kind of process at every point it passes."""
    for point in POINTS:
        plan = f"kill@{point}:{when(point)}"
        settings = needed_by(point)
        codes = (0,) if passed_by(point) == "driver" else (KILLED,)
        yield Case(f"inline/kill/{point}", "inline", plan, first_exit=codes, settings=settings)
    for point in POINTS:
        for who in who_passes(point):
            # rank 0 hands on the controller's code
            codes = {"rank1": (FAILED,), "driver0": (0,)}.get(who)
            plan = f"kill@{point}:who={who},{when(point)}"
            settings = needed_by(point)
            yield Case(f"tp2/kill_{who}/{point}", "tp2", plan, first_exit=codes, settings=settings)
    for point, who, moment in (
        ("rollout.mid_generate", "controller", None),
        ("actor.before_optimizer_step", "rank3", None),
        ("sync.after_bucket", "rank2", f"nth={2 * STEP + 1}"),  # a stage has two buckets
        ("ckpt.mid_data", "rank0", None),
        ("ckpt.before_commit", "controller", None),
    ):
        yield Case(
            f"tp2_pp2/kill_{who}/{point}",
            "tp2_pp2",
            f"kill@{point}:who={who},{moment or when(point)}",
        )


def early_and_often() -> Iterator[Case]:
    """Before there is anything to resume from, in the first checkpoint, and twice in a row."""
    for point in (
        "actor.before_log_probs",
        "ckpt.mid_data",
        "ckpt.before_commit",
        "ckpt.after_rename",
    ):
        yield Case(
            f"inline/kill_first/{point}",
            "inline",
            f"kill@{point}:nth=1",
            first_exit=(KILLED,),
            has_checkpoint=point == "ckpt.after_rename",
        )
    for first, second in (
        ("loop.after_score", "loop.after_advantages"),
        ("sync.after_begin", "sync.after_commit"),
    ):
        plan = f"kill@{first}:step={STEP}; kill@{second}:step={STEP}"
        yield Case(f"inline/kill_twice/{first}", "inline", plan, first_exit=(KILLED,))
    first = f"who=rank1,nth={2 * STEP - 1}"
    second = f"who=controller,step={STEP + 1}"
    plan = f"kill@actor.after_optimizer_step:{first}; kill@loop.step_ends:{second}"
    yield Case("tp2/kill_twice/actor.after_optimizer_step", "tp2", plan)


def engines() -> Iterator[Case]:
    """The engine dies or hangs: the run goes on without a restart."""
    for layout in ("inline", "tp2"):
        for point in ENGINE_POINTS:
            plan = f"kill_engine@{point}:{when(point)}"
            yield Case(f"{layout}/kill_engine/{point}", layout, plan, first_exit=(0,))
    yield Case(
        "tp2/stop_engine/rollout.mid_generate",
        "tp2",
        f"stop_engine@rollout.mid_generate:{when('rollout.mid_generate')}",
        first_exit=(0,),
        settings={"rollout.health_timeout_s": 5.0},
    )


def colocated() -> Iterator[Case]:
    """Trainer and engines take turns with the same devices; `kills` has the changes of turns. An
    engine dies in each of them, also beside one that is generating; a stop comes in the engines'
    turn and in the trainer's.
    """
    alone = {"rollout.colocated": True}
    points = ("turns.before_restore", "turns.before_stream", "turns.after_stream", *ENGINE_POINTS)
    for point in points:
        plan = f"kill_engine@{point}:{when(point)}"
        yield Case(
            f"tp2/colocated/kill_engine/{point}", "tp2", plan, first_exit=(0,), settings=alone
        )
    plan = f"kill_engine@rollout.mid_generate:{when('rollout.mid_generate')}"
    beside = alone | {"rollout.num_engines": 2}
    yield Case(
        "tp2/colocated/kill_engine_of_two/rollout.mid_generate",
        "tp2",
        plan,
        None,
        (0,),
        settings=beside,
    )
    for point in (
        "rollout.mid_generate",
        "loop.after_score",
        "update.after_mini_batch",
        "loop.step_ends",
    ):
        plan = f"term@{point}:{when(point)}"
        yield Case(
            f"tp2/colocated/term/{point}",
            "tp2",
            plan,
            first_exit=(STOPPED_EXIT_CODE,),
            settings=alone,
        )


def hangs() -> Iterator[Case]:
    """A rank is stopped: the deadline of its stage names it, the run ends, and goes on when it is
    started again.
    """
    for point, stage in (
        ("actor.before_optimizer_step", "update"),
        ("actor.before_log_probs", "annotate"),
    ):
        yield Case(
            f"tp2/stop_rank1/{point}",
            "tp2",
            f"stop@{point}:who=rank1,{when(point)}",
            first_exit=(FAILED,),
            said=("tp1]", "does not answer", stage),
            settings={"trainer.stage_timeouts_s": {stage: HANG_S}},
        )


def requests_to_stop() -> Iterator[Case]:
    """SIGTERM: the state is saved, the exit code says so, the next launch goes on."""
    stopped = (STOPPED_EXIT_CODE,)
    for point in ("rollout.mid_generate", "actor.before_optimizer_step", "loop.step_ends"):
        who = passed_by(point)
        yield Case(
            f"inline/term/{point}", "inline", f"term@{point}:{when(point)}", first_exit=stopped
        )
        for role in ("rank0", "rank1") if who == "rank" else ("controller",):
            plan = f"term@{point}:who={role},{when(point)}"
            yield Case(f"tp2/term_{role}/{point}", "tp2", plan, first_exit=stopped)
    for role in ("agent", "rank1"):
        for point in ("loop.after_score", "update.after_mini_batch"):
            plan = f"delay@{point}:{when(point)},seconds={WAIT_S:g}"
            outside = FromOutside(role, signal.SIGTERM)
            yield Case(
                f"tp2/term_{role}_from_outside/{point}", "tp2", plan, outside, first_exit=stopped
            )


def agents() -> Iterator[Case]:
    """kill -9 of the launcher: everything below it ends."""
    for point in ("rollout.mid_generate", "actor.before_optimizer_step", "ckpt.mid_data"):
        plan = f"delay@{point}:{when(point)},seconds={WAIT_S:g}"
        yield Case(
            f"tp2/kill_agent/{point}",
            "tp2",
            plan,
            FromOutside("agent", signal.SIGKILL),
            first_exit=(KILLED,),
        )


def by_state() -> Iterator[Case]:
    """Not in deterministic mode: steps, versions, prompts and the number of samples are
    exact all the same.
    """
    loose = {"trainer.deterministic": False, "rollout.num_engines": 2}
    for point, who in (
        ("rollout.mid_generate", "controller"),
        ("actor.before_optimizer_step", "rank1"),
        ("sync.before_commit", "controller"),
        ("ckpt.before_commit", "controller"),
    ):
        plan = f"kill@{point}:who={who},{when(point)}"
        yield Case(
            f"tp2/by_state/kill_{who}/{point}", "tp2", plan, settings=loose, is_bitwise=False
        )
    plan = f"kill_engine@rollout.mid_generate:{when('rollout.mid_generate')}"
    yield Case(
        "tp2/by_state/kill_engine/rollout.mid_generate",
        "tp2",
        plan,
        None,
        (0,),
        settings=loose,
        is_bitwise=False,
    )


def matrix() -> list[Case]:
    """All cases, the cheap layout first."""
    cases = [
        *kills(),
        *early_and_often(),
        *engines(),
        *colocated(),
        *hangs(),
        *requests_to_stop(),
        *agents(),
        *by_state(),
    ]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    order = ("inline", "tp2", "tp2_pp2")
    return sorted(cases, key=lambda case: order.index(case.layout))


def fits(name: str, patterns: list[str]) -> bool:
    """Whether one of the patterns (shell style, or a part of the name) fits; without any: True."""
    return not patterns or any(pattern in name or fnmatch(name, pattern) for pattern in patterns)


def choose(patterns: list[str], layouts: list[str]) -> list[Case]:
    """Cases whose name fits, in one of the layouts (none given: all)."""
    return [
        case
        for case in matrix()
        if (not layouts or case.layout in layouts) and fits(case.name, patterns)
    ]
