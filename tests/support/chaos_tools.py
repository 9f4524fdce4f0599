"""Run directories and short disturbed runs for the tests of benchmarks/chaos
and benchmarks/soak.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def write_run(run_dir: Path, seconds: float) -> Path:
    """What `compare` reads, of two steps with two samples each and an evaluation before them."""
    (run_dir / "hf").mkdir(parents=True)
    (run_dir / "hf" / "model.safetensors").write_bytes(b"weights")
    rows: list[dict[str, Any]] = [
        {"kind": "evaluation", "step": 0, "seconds": seconds, "val/accuracy": 0.25}
    ]
    for step in (1, 2):
        numbers = {
            "policy/version": step + 1.0,
            "policy/lag": 0.0,
            "actor/loss": 0.3,
            "actor/lr": 1e-3,
        }
        counts = {"rollout/num_samples": 2.0, "actor/num_optimizer_steps": 1.0}
        times = {"timing_s/step": seconds, "perf/tokens_per_s": seconds, "sync/seconds": seconds}
        rows.append(
            {"kind": "step", "step": step, "seconds": seconds, **numbers, **counts, **times}
        )
    samples = [
        {"step": step, "prompt": prompt, "response": "12", "policy_version": step}
        for step in (1, 2)
        for prompt in ("00+00=", "00+01=")
    ]
    for name, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
        (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


SOAK_PROMPTS_BY_STEP = [
    Counter([f"{step}{i:02d}" for i in range(15)] + [f"{step}00"]) for step in (1, 2, 3)
]
"""The prompts of three steps; the first one of a step stands in it twice."""


def soak_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of steps, samples) of a run of three steps that nobody disturbed: 16 prompts, 8
    samples of each.
    """
    rows = [
        {"step": step, "policy/version": step + 1.0, "rollout/num_samples": 128.0}
        for step in range(1, 1 + len(SOAK_PROMPTS_BY_STEP))
    ]
    samples = [
        {"step": step, "prompt": prompt, "policy_version": step}
        for step, prompts in enumerate(SOAK_PROMPTS_BY_STEP, start=1)
        for prompt in prompts.elements()
        for _ in range(8)
    ]
    return rows, samples
