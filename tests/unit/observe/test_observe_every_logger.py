"""Every metric of every row of a run stands in each logger's store as in metrics.jsonl: warm-up,
steps and evaluations, names with run's own words, and numbers that are not finite.

A whole run with all loggers at once is in tests/end_to_end/test_end_to_end_runs.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from logger_stores import (
    READERS,
    SERVICES,
    iter_store_differences,
    offline_environment,
    read_metrics_file,
)
from places import ROOT, SUPPORT

from rlhf_megatron.controller.observe.metrics.metric_catalogue import METRIC_CATALOGUE
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker

NUM_STEPS = 3
WORDS = {
    "source": "openai/gsm8k",
    "name": "math:latency_s",
    "status": "masked:server down",
    "reason": "stop",
    "role": "critic",
    "phase": "sync",
    "stage": "generate",
    "verdict": "no_signal",
    "option": "token_k1",
    "N": "4",
    "k": "2",
}


def list_catalogue_keys(prefixes: tuple[str, ...]) -> list[str]:
    """A key of each name of the catalogue with these beginnings."""
    keys = []
    for name in METRIC_CATALOGUE:
        key = re.sub(r"<(\w+)>", lambda match: WORDS.get(match[1], match[1]), name)
        keys += [key] if key.startswith(prefixes) else []
    return list(dict.fromkeys(keys))


def write_run(run_dir: Path, logger_name: str) -> None:
    """A warm-up, steps and evaluations with all metrics of the catalogue."""
    run_dir.mkdir(parents=True)
    held_out = list_catalogue_keys(("val/",))
    warmup = list_catalogue_keys(("warmup/",))
    of_steps = [key for key in list_catalogue_keys(("",)) if key not in {*held_out, *warmup}]
    facts = RunFacts("run", "a project", config={"actor": {"optim": {"lr": 1e-4}}})
    with RunTracker(run_dir, ("jsonl", logger_name), NUM_STEPS, facts) as tracker:
        for step in (20, 40):
            tracker.log_warmup_step(step, {key: step + i / 7 for i, key in enumerate(warmup)})
        for step in range(NUM_STEPS + 1):
            tracker.log_metrics(
                step,
                "evaluation",
                {key: step - i / 3 for i, key in enumerate(held_out)} | {"timing_s/evaluate": 0.5},
            )
            if step < NUM_STEPS:
                row = {key: (step + 1) * (i + 1) / 11 for i, key in enumerate(of_steps)}
                row["actor/loss"] = (math.nan, 1e-12, -1e12)[step]
                row.pop("timing_s/evaluate", None)
                tracker.log_metrics(step + 1, "step", row)


def test_the_rows_have_every_kind_of_name(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "run", "jsonl")
    keys = {key for key, _ in read_metrics_file(tmp_path / "runs" / "run")}
    assert len(keys) > 200
    assert {"val/openai/gsm8k/best@2_low", "perf/tokens_per_s", "perf/tokens_per_s_update"} <= keys


@pytest.mark.parametrize("logger_name", ["tensorboard", *SERVICES])
def test_every_row_arrives(
    tmp_path: Path, logger_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: services keep threads and processes."""
    pytest.importorskip(logger_name)
    run_dir = tmp_path / "runs" / "run"
    paths = [str(SUPPORT), str(Path(__file__).parent), str(ROOT)]
    code = (
        f"import sys; sys.path[:0] = {paths!r}\n"
        "import logging; logging.basicConfig(level=logging.WARNING)\n"
        f"import {__name__} as t; from pathlib import Path\n"
        f"t.write_run(Path({str(run_dir)!r}), {logger_name!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **offline_environment(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "switched off" not in done.stderr, done.stderr
    num_rows = len([*map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())])
    assert num_rows == 2 + NUM_STEPS + NUM_STEPS + 1
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert list(iter_store_differences(logger_name, run_dir)) == []
    assert set(READERS) == {"tensorboard", *SERVICES}
