"""Runs cases on device cuda with right numbers and compares them with the CPU, figure by figure,
sample by sample.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cuda_rehearsal.cases import BASELINES, SHORT, Baseline, Case, Program
from tools.cuda_rehearsal.environment import REPOSITORY, environment, on_cpu

TIMEOUT_S = 3600.0  # of one run, on a busy machine
# Float32's rounding; figures that are differences of equal numbers are 1e-7 on both sides.
RELATIVE = 1e-4
ABSOLUTE = 1e-5
# Not of the model: time, memory, and how work was spread.
NOT_COMPARED = (
    "timing",
    "perf/",
    "memory/",
    "sync/",
    "checkpoint/",
    "global_seqlen/",
    "seconds",
    "rollout/cached",
    "actor/num_micro",
)
STEPS = "trainer.total_training_steps"
KINDS = ("step", "evaluation", "warmup")


class RunFailedError(Exception):
    """A run did not end well. The message has the end of its output."""


@dataclass(frozen=True)
class Outcome:
    """Of a case. `problems`: none where it passed. `largest`: the largest relative
    difference of a figure.
    """

    name: str
    is_compared: bool
    seconds: float
    problems: tuple[str, ...]
    largest: float = 0.0


def run_baseline(name: str, folder: Path, num_steps: int) -> Path:
    """Returns the directory of the run on the CPU."""
    settings = {
        **SHORT,
        **BASELINES[name].settings,
        **_ranks(1),
        "trainer.device": "cpu",
        STEPS: num_steps,
    }
    return _train(f"cpu-{name}", BASELINES[name], settings, folder, on_cpu())


def run_case(case: Case, folder: Path, built: Path | None, num_steps: int) -> Path:
    """Returns the directory of the run on device cuda. `built`: None for the machine's own GPUs."""
    settings = settings_of(case, folder) | {STEPS: num_steps}
    env = on_cpu() if built is None else environment(built, True, case.num_ranks)
    return _train(_directory(case.name), BASELINES[case.baseline], settings, folder, env)


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    """All settings of a case beside its configuration. `folder`: where the case that it
    resumes has run.
    """
    own: dict[str, Any] = {"trainer.device": "cuda"}
    if case.resumes:
        source = folder / _directory(case.resumes) / "checkpoints" / "step_000001"
        own |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(source)}
    return {
        **SHORT,
        **BASELINES[case.baseline].settings,
        **_ranks(case.num_ranks),
        **own,
        **case.settings,
    }


def differences(found: Path, expected: Path, is_resumed: bool = False) -> list[str]:
    """What differs between two runs, in words. `is_resumed`: `found` has only what comes after
    the first step.
    """
    problems = []
    for kind in KINDS:
        here, there = ({row["step"]: row for row in _rows(run, kind)} for run in (found, expected))
        if not is_resumed and here.keys() != there.keys():
            problems.append(f"{kind} rows of steps {sorted(here)}, on the CPU {sorted(there)}")
        for step in sorted(here.keys() & there.keys()):
            problems += [f"{kind} {step}: {words}" for words in _unlike(here[step], there[step])]
    here, there = (_samples(run) for run in (found, expected))
    wrong = [place for place in here if here[place] != there.get(place)]
    if wrong or not here:
        problems.append(f"{len(wrong)} of {len(here)} samples differ, the first at {wrong[:1]}")
    return problems


def _unlike(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    words = []
    for key in sorted(here.keys() | there.keys()):
        if key.startswith(NOT_COMPARED):
            continue
        a = here.get(key)
        b = there.get(key)
        if isinstance(a, float) and isinstance(b, float):
            if math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                continue
        elif a == b:
            continue
        words.append(f"{key} {a} on cuda, {b} on the CPU")
    return words


def run_program(program: Program, folder: Path, built: Path) -> None:
    words = program.words.format(folder=folder).split()
    _run(
        program.name,
        [sys.executable, "-m", *words],
        folder,
        environment(built, True, program.num_ranks),
    )


def _train(
    name: str, baseline: Baseline, settings: Mapping[str, Any], folder: Path, env: Mapping[str, str]
) -> Path:
    directory = folder / name
    shutil.rmtree(directory, ignore_errors=True)
    own = {**settings, "trainer.default_local_dir": str(folder), "trainer.experiment_name": name}
    words = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    command = [
        sys.executable,
        "-m",
        "rlhf_megatron",
        "train",
        f"configs/{baseline.config}.yaml",
        *words,
    ]
    _run(name, command, folder, env)
    return directory


def _run(name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
    log = folder / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=dict(env),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RunFailedError(f"{name} ended with code {done.returncode} ({log}):\n{end}")


def _ranks(num_ranks: int) -> dict[str, Any]:
    """One machine, and no model parallelism but what a case adds."""
    axes = dict.fromkeys(("tensor_model", "pipeline_model"), 1)
    return {
        "trainer.n_gpus_per_node": num_ranks,
        **{f"actor.megatron.{a}_parallel_size": n for a, n in axes.items()},
    }


def _directory(case: str) -> str:
    return f"cuda-{case.replace(' ', '-')}"


def _rows(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def _samples(run: Path) -> dict[tuple[Any, ...], int]:
    """How often each sample is among those of its step."""
    counts: dict[tuple[Any, ...], int] = {}
    for line in (run / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        place = (row["step"], row["prompt"], row["response"], row["reward"])
        counts[place] = counts.get(place, 0) + 1
    return counts


def largest_difference(found: Path, expected: Path) -> float:
    """The largest relative difference of a compared figure of the steps; below ABSOLUTE
    counts as none.
    """
    there = {row["step"]: row for row in _rows(expected, "step")}
    pairs = [
        (value, there[row["step"]][key])
        for row in _rows(found, "step")
        for key, value in row.items()
        if isinstance(value, float)
        and not key.startswith(NOT_COMPARED)
        and key in there.get(row["step"], {})
    ]
    return max((abs(a - b) / abs(b) for a, b in pairs if b and abs(a - b) > ABSOLUTE), default=0.0)


def rehearse(
    chosen: Sequence[Case | Program],
    folder: Path,
    built: Path | None,
    num_steps: int = 2,
    num_jobs: int = 1,
) -> list[Outcome]:
    """Run all, `num_jobs` at a time, and print a line each. `built`: None for the machine's own
    GPUs, without programs.
    """
    cases = [one for one in chosen if isinstance(one, Case)]
    compared = list(dict.fromkeys(case.baseline for case in cases if case.is_compared))
    with ThreadPoolExecutor(num_jobs) as jobs:
        baselines = {name: jobs.submit(run_baseline, name, folder, num_steps) for name in compared}
        outcomes: dict[str, Future[Outcome]] = {}
        for case in cases:
            waits = (
                outcomes.get(case.resumes),
                baselines.get(case.baseline) if case.is_compared else None,
            )
            outcomes[case.name] = jobs.submit(_outcome, case, folder, built, num_steps, *waits)
        for program in (one for one in chosen if isinstance(one, Program)):
            assert built is not None
            outcomes[program.name] = jobs.submit(_outcome_of, program, folder, built)
        return [future.result() for future in outcomes.values()]


def _outcome(
    case: Case,
    folder: Path,
    built: Path | None,
    num_steps: int,
    resumed: Future[Outcome] | None,
    baseline: Future[Path] | None,
) -> Outcome:
    """`resumed` and `baseline` were submitted before it: no job waits for a later one."""
    start = time.monotonic()
    largest = 0.0
    try:
        if resumed is not None:
            resumed.result()
        found = run_case(case, folder, built, num_steps)
        problems: list[str] = []
        if baseline is not None:
            expected = baseline.result()
            problems = differences(found, expected, bool(case.resumes))
            largest = largest_difference(found, expected)
    except (RunFailedError, subprocess.TimeoutExpired) as error:
        problems = [str(error)]
    outcome = Outcome(
        case.name,
        case.is_compared,
        round(time.monotonic() - start, 1),
        tuple(problems[:10]),
        largest,
    )
    _tell(outcome, f"largest difference {largest:.1e}")
    return outcome


def _outcome_of(program: Program, folder: Path, built: Path) -> Outcome:
    start = time.monotonic()
    problems = []
    try:
        run_program(program, folder, built)
    except (RunFailedError, subprocess.TimeoutExpired) as error:
        problems = [str(error)]
    outcome = Outcome(program.name, False, round(time.monotonic() - start, 1), tuple(problems))
    said = (folder / f"{program.name}.log").read_text(errors="replace").splitlines()
    # not torch's warnings
    _tell(outcome, "".join([line for line in said if not line.startswith("[")][-1:]))
    return outcome


def _tell(outcome: Outcome, words: str) -> None:
    verdict = "FAILED" if outcome.problems else "ok"
    print(f"{verdict:7}{outcome.name:24}{outcome.seconds:6.0f} s  {words}", flush=True)
    for problem in outcome.problems:
        print(f"       {problem}", flush=True)
