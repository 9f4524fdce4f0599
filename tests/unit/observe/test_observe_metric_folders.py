"""No metric is another's folder: stores that keep a file a metric, such as MLflow's, cannot have
`a/b` beside `a/b/c`. Names that are made of a run's own words are among those that are looked at.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import ROOT
from report_samples import step_row, write_run_dir
from scheduler_samples import train_batch

from rlhf_megatron.algorithms.advantages.gdpo import _compute_part_statistics
from rlhf_megatron.algorithms.metric_names import PLACEHOLDERS, make_single_key_part
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult, SetResult
from rlhf_megatron.controller.evaluation.sample_figures import SampleFigure
from rlhf_megatron.controller.observe.line_file import read_step_rows
from rlhf_megatron.controller.observe.metrics.batch_metrics import compute_reward_metrics
from rlhf_megatron.controller.observe.metrics.former_metric_names import (
    FORMER_METRIC_NAMES,
    find_current_name,
)
from rlhf_megatron.controller.observe.metrics.metric_catalogue import (
    METRIC_CATALOGUE,
    find_metric,
    make_source_key_part,
)
from rlhf_megatron.controller.observe.report.run_files import read_run_files
from rlhf_megatron.controller.observe.tracker import RunTracker, compute_evaluation_metrics
from rlhf_megatron.controller.recovery.checkpoint_export import find_best_step

# last parts of names of the catalogue, which a run may use as names of its own
LAST_PARTS = sorted(
    {
        re.sub(r"<[kN]>", "4", part)
        for name in METRIC_CATALOGUE
        for part in name.split("/")
        if not re.fullmatch(r"<\w+>", part)
    }
)
RUN_WORDS = list(
    dict.fromkeys(
        [
            *LAST_PARTS,
            *(
                "openai/gsm8k",
                "openai",
                "gsm8k",
                "math",
                "math/latency_s",
                "math/mean",
                "math/mean@4",
            ),
            *(
                "openai/reward",
                "openai/reward/mean",
                "masked:a/b",
                "masked",
                "masked:a",
                "rewards/chosen",
            ),
            *("", "/data/a.parquet", "a//b", "..", "../..", ".", "a/./b", "mean_", "mean__", "_"),
        ]
    )
)
NUMBERS = ("2", "4", "16")


def find_folders(keys: Iterable[str]) -> list[tuple[str, str]]:
    """(metric, another below it) of all pairs."""
    known = set(keys)
    return sorted(
        (folder, key)
        for key in known
        for folder in itertools.accumulate(key.split("/")[:-1], lambda a, b: f"{a}/{b}")
        if folder in known
    )


def list_values(placeholder: str) -> list[str]:
    """What a run may write in place of <placeholder>."""
    if placeholder == "source":
        return sorted(map(make_source_key_part, RUN_WORDS))
    if placeholder in ("k", "N"):
        return [*NUMBERS, "N"]
    words = [make_single_key_part(word) for word in RUN_WORDS]
    pattern = PLACEHOLDERS[placeholder][0]
    allowed = [word for word in words if re.fullmatch(pattern, word)]
    return sorted({*allowed, *(word for word in pattern.split("|") if word.isalpha())})


def iter_keys(name: str) -> Iterator[str]:
    """The keys that a name of the catalogue stands for."""
    parts = re.split(r"<(\w+)>", name)
    choices = [list_values(part) if i % 2 else [part] for i, part in enumerate(parts)]
    for words in itertools.product(*choices):
        yield "".join(words)


def test_no_name_of_the_catalogue_is_the_folder_of_another() -> None:
    keys = [key for name in METRIC_CATALOGUE for key in iter_keys(name)]
    assert len(keys) > 1000
    assert find_folders(keys) == []


def test_the_search_sees_folders() -> None:
    assert find_folders(["a", "a/b", "a/bc", "ab"]) == [("a", "a/b"), ("a", "a/bc")]
    assert find_folders(["a/b", "a/c/d", "a/b/c/d"]) == [("a/b", "a/b/c/d")]


def test_no_metric_of_a_step_is_the_folder_of_another() -> None:
    """With several components a reward has parts as math and math/latency_s."""
    count = len(RUN_WORDS)
    batch = replace(
        train_batch(count),
        sources=tuple(RUN_WORDS),
        reward_statuses=("ok", *(f"masked:{word}" for word in RUN_WORDS[1:])),
        reward_parts={word: torch.ones(count) for word in RUN_WORDS},
    )
    keys = list(compute_reward_metrics(batch))
    for word in RUN_WORDS:
        keys += _compute_part_statistics(word, torch.ones(2))
    assert find_folders(keys) == []
    assert [key for key in keys if find_metric(key) is None] == []
    assert len(set(keys)) == len(keys)


def test_no_metric_of_an_evaluation_is_the_folder_of_another() -> None:
    sets = tuple(
        SetResult(
            name, 20, 4, 1, 0.5, 0.2, ((1, 0.5), (2, 0.75), (4, 0.9)), 0.4, 0.7, 12.0, 0.1,
            tuple(SampleFigure(kind, k, 0.5, 0.4, 0.6)
                  for kind in ("best", "worst", "maj") for k in (2, 4)), 0.25,
        )
        for name in RUN_WORDS
    )  # fmt: skip
    keys = compute_evaluation_metrics(EvaluationResult(0.5, 0.4, 0.6, 40, 12.0, (), sets, 0.25))
    assert find_folders(keys) == []
    assert [key for key in keys if find_metric(key) is None] == []
    assert {"val/openai/gsm8k/best@4", "val/openai/gsm8k/best@4_low"} <= set(keys)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("openai/gsm8k", "openai/gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "DigitalLearningGmbH/MATH-lighteval"),
        ("accuracy", "accuracy_"),
        ("accuracy_", "accuracy__"),
        ("openai/mean@4", "openai/mean@4_"),
        ("/data/a.parquet", "_/data/a.parquet"),
        ("../x", ".._/x"),
        ("", "_"),
    ],
)
def test_a_source_keeps_its_name_unless_a_metric_has_it(source: str, part: str) -> None:
    assert make_source_key_part(source) == part


@pytest.mark.parametrize(
    ("former", "current"),
    [
        ("perf/tokens_per_s/update", "perf/tokens_per_s_update"),
        ("perf/tokens_per_s/generate", "perf/tokens_per_s_generate"),
        ("perf/tokens_per_s", "perf/tokens_per_s"),
        ("val/openai/gsm8k/best@16/low", "val/openai/gsm8k/best@16_low"),
        ("val/openai/gsm8k/maj@4/high", "val/openai/gsm8k/maj@4_high"),
        ("val/openai/gsm8k/low", "val/openai/gsm8k/low"),
        ("reward/part/math/latency_s", "reward/part/math:latency_s"),
        ("reward/part/math", "reward/part/math"),
        ("gdpo/math/exact/std", "gdpo/math:exact/std"),
        ("gdpo/math/std", "gdpo/math/std"),
        ("actor/pg_loss", "actor/pg_loss"),
    ],
)
def test_former_names_are_read_as_the_names_of_today(former: str, current: str) -> None:
    assert find_current_name(former) == current
    assert find_current_name(current) == current, "a name of today stays"


FORMER_ROW = {"perf/tokens_per_s": 3.0, "perf/tokens_per_s/update": 5.0}


def test_a_former_run_is_read_under_the_names_of_today(tmp_path: Path) -> None:
    """By the report and the comparison, and by what resumes, exports and api.Run."""
    run_dir = tmp_path / "run"
    write_run_dir(run_dir, [step_row(1, 0.5, **FORMER_ROW)])
    written = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert "perf/tokens_per_s/update" in written
    (row,) = read_run_files(run_dir).steps
    (same_row,) = read_step_rows(run_dir)
    for found in (row.metrics, same_row):
        assert found["perf/tokens_per_s_update"] == 5.0 and found["perf/tokens_per_s"] == 3.0
        assert "perf/tokens_per_s/update" not in found


def test_the_document_lists_every_former_name() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = [f"| `{former}` | `{current}` |" for former, current in FORMER_METRIC_NAMES.items()]
    assert [row for row in rows if row not in text] == []
    for former, current in FORMER_METRIC_NAMES.items():
        assert former not in METRIC_CATALOGUE, former
        assert current in METRIC_CATALOGUE or current.count("<") > 1 or ":" in current, current


def test_a_resumed_run_watches_a_metric_by_its_former_name(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run_dir(run_dir, [step_row(1, 0.5, **FORMER_ROW)])
    with RunTracker(tmp_path, (), 3, watched_metric="perf/tokens_per_s/update") as tracker:
        tracker.restore_from_rows(read_step_rows(run_dir))
        tracker.log_metrics(2, "step", {"perf/tokens_per_s_update": 7.0})
    assert tracker.watched_values == {1: 5.0, 2: 7.0}
    assert find_best_step(tracker.watched_values, [1, 2], "perf/tokens_per_s/update") == 2
