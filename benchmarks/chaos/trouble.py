"""What the soak does to a run from outside, and in which mix.

A fifth of the troubles ends the launch, which is then started again: kill -9 of the launcher, of
the controller or of a rank; SIGTERM to one of them; a byte of the newest checkpoint changed, and
then kill -9. The others must be survived by the launch itself. All kinds take turns in an order
that the seed draws, and come at times that it draws.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.program import Launch, Process

# bytes, with a full disk: more than a weight bucket, less than a rank's part of a checkpoint
LARGEST_FILE = 2 << 20
PAUSE_S = 2.0
OUTAGE_S = 3.0
FULL_DISK_S = 20.0
ENDING_SHARE = 5  # one trouble in so many ends the launch
RANKS = ("rank0", "rank1")


@dataclass(frozen=True)
class Scene:
    """What a trouble can reach."""

    launch: Launch
    run_dir: Path
    outage: Path  # while it exists, the reward service is down


@dataclass(frozen=True)
class Done:
    """What was done, and how it is undone after a while, where it is."""

    text: str
    undo: Callable[[], None] | None = None
    undo_after_s: float = 0.0


@dataclass(frozen=True)
class Kind:
    act: Callable[[Scene, random.Random], Done | None]  # None: not possible now
    ends_launch: bool


@dataclass(frozen=True)
class Trouble:
    """`at_s`: since the start of the soak; `seed`: of what is left to chance."""

    at_s: float
    kind: str
    seed: int


def schedule(seconds: float, count: int, seed: int) -> list[Trouble]:
    """`count` troubles in the first nine tenths of `seconds`,
    one in each equal part of that time.
    """
    draw = random.Random(seed)
    endings = [name for name, kind in KINDS.items() if kind.ends_launch]
    others = [name for name, kind in KINDS.items() if not kind.ends_launch]
    num_endings = count // ENDING_SHARE
    kinds = _take(endings, num_endings, draw) + _take(others, count - num_endings, draw)
    draw.shuffle(kinds)
    part = 0.9 * seconds / max(1, count)
    return [
        Trouble(part * (i + draw.random()), kind, draw.randrange(2**31))
        for i, kind in enumerate(kinds)
    ]


def _take(names: list[str], count: int, draw: random.Random) -> list[str]:
    """`count` of `names`, each as often as any other, but for one."""
    shuffled = draw.sample(names, len(names))
    return [shuffled[i % len(shuffled)] for i in range(count)]


def _signal_to(
    roles: tuple[str, ...], number: signal.Signals
) -> Callable[[Scene, random.Random], Done | None]:
    def act(scene: Scene, draw: random.Random) -> Done | None:
        process = scene.launch.find(draw.choice(roles))
        return _send(process, number) if process else None

    return act


def _send(process: Process, number: signal.Signals) -> Done:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    return Done(f"{number.name} to {process.role}")


def _pause(roles: tuple[str, ...]) -> Callable[[Scene, random.Random], Done | None]:
    """SIGSTOP, and SIGCONT before a deadline could notice."""

    def act(scene: Scene, draw: random.Random) -> Done | None:
        process = scene.launch.find(draw.choice(roles))
        if process is None:
            return None
        done = _send(process, signal.SIGSTOP)
        return Done(
            f"{done.text} for {PAUSE_S:g} s", lambda: void(_send(process, signal.SIGCONT)), PAUSE_S
        )

    return act


def void(_: object) -> None:
    """For the value of a call that nobody reads."""


def _corrupt_newest(scene: Scene, draw: random.Random) -> Done | None:
    """One byte of one file of the newest checkpoint, then kill -9 of the controller: the next
    launch falls back.
    """
    controller = scene.launch.find("controller")
    newest = newest_checkpoint(scene.run_dir)
    if controller is None or newest is None:
        return None
    path = draw.choice(
        sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    )
    position = draw.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))
    done = _send(controller, signal.SIGKILL)
    return Done(f"byte {position} of {path.relative_to(scene.run_dir)} changed, {done.text}")


def newest_checkpoint(run_dir: Path, at_least: int = 2) -> Path | None:
    """By name; None: there are fewer than `at_least`. A run cannot fall back from its only one."""
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    return found[-1] if len(found) >= at_least else None


def _reward_outage(scene: Scene, draw: random.Random) -> Done:
    scene.outage.touch()
    return Done(
        f"reward service down for {OUTAGE_S:g} s",
        lambda: scene.outage.unlink(missing_ok=True),
        OUTAGE_S,
    )


def _kill_reward_worker(scene: Scene, draw: random.Random) -> Done | None:
    """One of the processes that score samples; the one that forks them is the oldest."""
    others = sorted((p for p in scene.launch.processes() if p.role == "other"), key=lambda p: p.pid)
    workers = [process for process in others if parent_of(process.pid) in {p.pid for p in others}]
    return _send(draw.choice(workers), signal.SIGKILL) if workers else None


def parent_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _full_disk(scene: Scene, draw: random.Random) -> Done | None:
    """No rank can write a large file: the kernel answers as it does when a quota is used up."""
    ranks = [process for process in scene.launch.processes() if process.role in RANKS]
    for process in ranks:
        limit_files(process.pid, LARGEST_FILE)

    def undo() -> None:
        for process in ranks:
            limit_files(process.pid, resource.RLIM_INFINITY)

    return Done(
        f"ranks cannot write files over {LARGEST_FILE >> 20} MiB for {FULL_DISK_S:g} s",
        undo,
        FULL_DISK_S,
    )


def limit_files(pid: int, num_bytes: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


ENGINES = ("engine0", "engine1")
KINDS: dict[str, Kind] = {
    "kill": Kind(_signal_to(("agent", "controller", *RANKS), signal.SIGKILL), True),
    "terminate": Kind(_signal_to(("agent", "controller", *RANKS), signal.SIGTERM), True),
    "corrupt_newest": Kind(_corrupt_newest, True),
    "kill_engine": Kind(_signal_to(ENGINES, signal.SIGKILL), False),
    "stop_engine": Kind(_signal_to(ENGINES, signal.SIGSTOP), False),
    "pause_engine": Kind(_pause(ENGINES), False),
    "pause_rank": Kind(_pause(RANKS), False),
    "pause_controller": Kind(_pause(("controller",)), False),
    "reward_outage": Kind(_reward_outage, False),
    "kill_reward_worker": Kind(_kill_reward_worker, False),
    "full_disk": Kind(_full_disk, False),
}
