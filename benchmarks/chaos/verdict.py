"""What the soak came to, read from the files of the run: reward, steps, versions, samples,
time that counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chaos.compare import Row, rows_of, samples_of
from benchmarks.chaos.task import SOAK_GROUP_SIZE, SOAK_PROMPTS

LAST_STEPS = 20  # whose mean reward is held against the target
# of each step
COUNTERS = "rollout/engine_restarts", "rollout/engine_failures", "rollout/requests_reissued"


def expected_prompts(config: Path, num_steps: int) -> list[Counter[str]]:
    """The prompts of each step, from the data alone: what a run that was never disturbed draws."""
    from rlhf_megatron.config.load import load_run_config
    from rlhf_megatron.controller.scheduler.training_run import load_run_prompts, make_run_data

    run_config = load_run_config(config, []).config
    stream = make_run_data(
        run_config.data,
        run_config.trainer.seed,
        run_config.rollout.stop,
        *load_run_prompts(run_config.model, run_config.data),
    ).stream
    assert stream is not None
    return [Counter(stream.draw_step_prompts(step).prompts) for step in range(1, num_steps + 1)]


def conservation(
    rows: Sequence[Row], samples: Sequence[Row], prompts: Sequence[Counter[str]]
) -> Iterator[str]:
    """Steps without gap or repetition; one version up a step; each prompt of a step sampled exactly
    as often as asked, by the policy that the step before had left. `rows`: of kind step.
    """
    steps = [row["step"] for row in rows]
    if steps != list(range(1, len(steps) + 1)):
        counts = Counter(steps)
        missing = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
        repeated = [step for step, count in counts.items() if count > 1]
        yield f"steps are not 1 .. {len(steps)}: missing {missing[:5]}, repeated {repeated[:5]}"
        return
    versions = [int(row["policy/version"]) for row in rows]
    if any(after != before + 1 for before, after in pairwise(versions)):
        yield f"versions do not go up by one a step: {versions}"
    by_step: dict[int, list[Row]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    for row, version, expected in zip(rows, versions, prompts, strict=True):
        found = by_step.get(row["step"], [])
        if row["rollout/num_samples"] != SOAK_PROMPTS * SOAK_GROUP_SIZE:
            yield f"step {row['step']} has {row['rollout/num_samples']} samples"
        if Counter(s["prompt"] for s in found) != Counter(
            {p: n * SOAK_GROUP_SIZE for p, n in expected.items()}
        ):
            yield f"step {row['step']}: its {len(found)} samples are not those of its prompts"
        if stale := {s["policy_version"] for s in found} - {version - 1}:
            yield f"step {row['step']}: samples of versions {sorted(stale)}, not {version - 1}"


def read(run_dir: Path, config: Path) -> tuple[dict[str, Any], list[str]]:
    """(figures, problems) of a run directory."""
    rows = [row for row in rows_of(run_dir) if row["kind"] == "step"]
    if not rows:
        return {"steps": 0}, ["no step was made"]
    last = rows[-LAST_STEPS:]
    figures = {
        "steps": len(rows),
        "reward_first": rows[0]["critic/rewards/mean"],
        "reward_last": sum(row["critic/rewards/mean"] for row in last) / len(last),
        "samples": sum(int(row["rollout/num_samples"]) for row in rows),
        "steps_with_masked_samples": sum(row["reward/masked"] > 0 for row in rows),
        "ettr_of_the_run": rows[-1].get("perf/ettr"),
        "productive_s": sum(row["timing_s/step"] for row in rows),
        **{name: sum(row.get(name, 0.0) for row in rows) for name in COUNTERS},
        "checkpoint/num_failed": total(
            [row["checkpoint/num_failed"] for row in rows if "checkpoint/num_failed" in row]
        ),
    }
    return figures, list(
        conservation(rows, samples_of(run_dir), expected_prompts(config, len(rows)))
    )


def total(counts: Sequence[float]) -> float:
    """Of a counter that begins at 0 in each launch."""
    steps = pairwise([0.0, *counts])
    return sum(after - before if after >= before else after for before, after in steps)
