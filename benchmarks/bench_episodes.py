"""Episodes with an environment: what a slow step costs the others, and what a turn costs.

    python -m benchmarks.bench_episodes [--episodes 200] [--repetitions 3] [--num-workers 2]

Workers, controller and messages are those of a run; the engines answer after a time that is given.

`slow steps`: 5 % of the episodes have a step of 5 s, asleep (plain function, or async) or computing
in Python (`burning`, which has no bar: it takes a core). The ratio is of the others' mean
seconds a turn, from an answer of the policy to the next request and back, over the same rows
without slow steps; runs in turns, and all slow steps begin while the others run.
`whole path`: turns a second, and CPU milliseconds a turn of all processes, with engines and steps
that take no time.
Writes benchmarks/results/episodes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common import ROOT, significant, spread, write_result
from benchmarks.episode_engines import Engines
from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_messages import EpisodeLimits
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_runner import FreeEpisodeRunner
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.rollout.engine_interface import SamplingParams

MODEL = ROOT / "examples" / "quickstart" / "model"
LIMITS = EpisodeLimits(max_turns=100, max_tokens=4096, max_turn_tokens=4, max_prompt_tokens=16)
PLUGIN = str(ROOT / "benchmarks" / "paced_environment.py")
DIALOGUE = {
    "tokenizer_path": str(MODEL),
    "model_path": str(MODEL),
    "stop": [],
    "data": {"apply_chat_template": False, "add_special_tokens": False},
}
QUESTION_MARK = 16  # its id
NUM_TURNS = 20
STEP_S = 0.05
TURN_S = 0.05  # of the engine
SLOW_S = 5.0
SLOW_SHARE = 0.05


@dataclass(frozen=True)
class Pace:
    """How long an episode takes."""

    num_turns: int
    step_s: float = 0.0
    slow_s: float = 0.0  # of the first step; 0: it is as the others
    is_burning: bool = False  # the slow step computes in place of sleeping


@dataclass(frozen=True)
class SlowCase:
    environment: str
    is_burning: bool
    has_bar: bool


SLOW_CASES = {
    "plain": SlowCase("paced", False, True),
    "async": SlowCase("paced_async", False, True),
    "burning": SlowCase("paced", True, False),
}


def run_paces(
    environment: str, paces: Sequence[Pace], num_workers: int, turn_s: float
) -> tuple[list[Episode], float, float]:
    """The episodes of these paces, wall seconds, and CPU seconds of all processes, without their
    start. All go on at once.
    """
    entry = {"name": environment, "params": {}, "key": "rollout.environment"}
    count = len(paces)
    prompts = PromptBatch(
        ((QUESTION_MARK,),) * count,
        ("?",) * count,
        tuple(json.dumps(asdict(pace)) for pace in paces),
        ("paced",) * count,
        tuple(range(count)),
        ("",) * count,
    )
    settings = EpisodeSettings(environment, {}, LIMITS, 600.0, count, 1)
    engines = Engines(turn_s=lambda key, request: turn_s)
    before_s = _children_s()
    with (
        tempfile.TemporaryDirectory() as folder,
        EpisodeWorkerPool([entry], DIALOGUE, num_workers, Path(folder) / "log") as pool,
    ):
        pool.start()
        runner = FreeEpisodeRunner(engines, pool, settings)
        began, own_s = time.perf_counter(), time.process_time()
        groups = runner.run_episodes(
            prompts,
            GroupSize(1, 1),
            SamplingParams(LIMITS.max_turn_tokens),
            0,
            {},
            lambda groups: None,
            lambda text: None,
        )
        wall_s = time.perf_counter() - began
        own_s = time.process_time() - own_s
    episodes = [episode for [episode] in groups]
    assert {episode.end for episode in episodes} == {"done"}, "the benchmark's episodes end well"
    return episodes, wall_s, own_s + _children_s() - before_s


def _children_s() -> float:
    """CPU seconds of processes that have ended, with their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_slow_steps(case: SlowCase, args: argparse.Namespace) -> dict[str, Any]:
    num_slow = max(1, int(args.episodes * SLOW_SHARE))
    slow_places = set(range(0, args.episodes, args.episodes // num_slow))
    seconds: dict[str, list[float]] = {"clean": [], "slow": []}
    for repetition in range(args.repetitions + 1):
        for name in seconds:
            slow_s = SLOW_S if name == "slow" else 0.0
            paces = [
                Pace(NUM_TURNS, STEP_S, slow_s if place in slow_places else 0.0, case.is_burning)
                for place in range(args.episodes)
            ]
            episodes, _, _ = run_paces(case.environment, paces, args.num_workers, TURN_S)
            others = [
                episode.seconds / NUM_TURNS
                for place, episode in enumerate(episodes)
                if place not in slow_places
            ]
            if repetition:  # the first is to warm up
                seconds[name].append(mean(others))
    return {
        "ratio": significant(median(seconds["slow"]) / median(seconds["clean"])),
        "ratios": [
            significant(slow / clean)
            for slow, clean in zip(seconds["slow"], seconds["clean"], strict=True)
        ],
        "has_bar": case.has_bar,
        "clean_turn_s": spread(seconds["clean"]),
        "slow_turn_s": spread(seconds["slow"]),
    }


def measure_whole_path(environment: str, args: argparse.Namespace) -> dict[str, Any]:
    """With as many turns again, so that the start of the processes takes itself out."""
    turns_a_second = []
    cpu_ms = []
    for repetition in range(args.repetitions + 1):
        _, short_s, short_cpu_s = run_paces(
            environment, [Pace(NUM_TURNS)] * args.episodes, args.num_workers, 0.0
        )
        _, long_s, long_cpu_s = run_paces(
            environment, [Pace(3 * NUM_TURNS)] * args.episodes, args.num_workers, 0.0
        )
        num_turns = 2 * NUM_TURNS * args.episodes
        if repetition:
            turns_a_second.append(num_turns / (long_s - short_s))
            cpu_ms.append((long_cpu_s - short_cpu_s) / num_turns * 1e3)
    return {"turns_a_second": spread(turns_a_second), "cpu_ms_a_turn": spread(cpu_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=200, help="all of them go on at once")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=2)
    args = parser.parse_args()
    load_plugins([PLUGIN])
    slow_steps = {}
    for name, case in SLOW_CASES.items():
        slow_steps[name] = measure_slow_steps(case, args)
        print(name, slow_steps[name], flush=True)
    whole_path = {}
    for environment in ("paced", "paced_async"):
        whole_path[environment] = measure_whole_path(environment, args)
        print(environment, whole_path[environment], flush=True)
    command = f"python -m benchmarks.bench_episodes --episodes {args.episodes}"
    result = {**vars(args), "slow_steps": slow_steps, "whole_path": whole_path}
    print(f"wrote {write_result('episodes', command, result)}")


if __name__ == "__main__":
    main()
