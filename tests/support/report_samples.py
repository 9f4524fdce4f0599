"""Run directories of a few hand-written lines, and a reader of report pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

CONFIG = """\
model:
  path: models/tiny
data:
  train_batch_size: 4
actor:
  megatron:
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
  optim:
    lr: 0.001
rollout:
  engine: local
  num_engines: 1
  n: 2
algorithm:
  adv_estimator: grpo
trainer:
  nnodes: 1
  n_gpus_per_node: 4
  seed: {seed}
  total_training_steps: 4
"""
EDGES = (0.0, 1e-6, 1e-5, 1e-4)


def step_row(step: int, reward: float, **more: Any) -> dict[str, Any]:
    metrics = {
        "critic/rewards/mean": reward,
        "critic/rewards/std": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "rollout/num_samples": 8.0,
        "reward/masked": 0.0,
        "timing_s/generate": 3.0,
        "timing_s/update": 1.0,
        "timing_s/step": 4.5,
        "actor/grad_norm": 2.0,
    }
    return {"kind": "step", "step": step, "seconds": 4.5 * step, **metrics, **more}


def evaluation_row(
    step: int, accuracy: float, low: float, high: float, **more: Any
) -> dict[str, Any]:
    values = {
        "val/accuracy": accuracy,
        "val/accuracy_low": low,
        "val/accuracy_high": high,
        "val/num_items": 100.0,
        "val/binary_scores": 1.0,
    }
    return {"kind": "evaluation", "step": step, "seconds": 4.5 * step, **values, **more}


def sample(step: int, kind: str = "best", **more: Any) -> dict[str, Any]:
    texts = {
        "prompt": f"1+{step}=",
        "response": str(step + 1),
        "label": str(step + 1),
        "source": "sums",
    }
    facts = {"reward": 1.0, "status": "ok", "parts": {"right": 1.0}, "finish_reason": "stop"}
    facts |= {
        "num_tokens": 2,
        "policy_version": step,
        "version_spans": (),
        "num_cached_tokens": 3,
        "num_retractions": 0,
    }
    return {"step": step, "kind": kind, **texts, **facts, **more}


def mismatch_line(
    step: int, counts: Mapping[str, Sequence[int]], version: int | None = None
) -> dict[str, Any]:
    groups = [
        {
            "policy_version": step if version is None else version,
            "finish_reason": reason,
            "counts": list(found),
            "num_tokens": sum(found),
            "mean": 2e-6,
            "p99": 9e-6,
            "max": 1e-5 * step,
        }
        for reason, found in counts.items()
    ]
    worst = {
        "token": "7",
        "token_id": 9,
        "position": 1,
        "trainer": -0.5,
        "engine": -0.5 - 1e-5 * step,
    }
    worst |= {"difference": 1e-5 * step, "context": "3+4=", "sample_id": 5, "policy_version": step}
    return {
        "step": step,
        "edges": list(EDGES),
        "groups": groups,
        "worst": [{**worst, "finish_reason": "stop"}],
    }


def write_run_dir(
    path: Path, rows: Sequence[Mapping[str, Any]] = (), seed: int = 1, **files: Any
) -> Path:
    """`files`: samples and mismatch as lists of lines, trace as text, summary as an object; each
    only if given.
    """
    path.mkdir(parents=True)
    rows = rows or [evaluation_row(0, 0.2, 0.1, 0.3), step_row(1, 0.25), step_row(2, 0.75)]
    write_lines(path / "metrics.jsonl", rows)
    (path / "config.yaml").write_text(CONFIG.format(seed=seed))
    for name in ("samples", "mismatch"):
        if name in files:
            write_lines(path / f"{name}.jsonl", files[name])
    if "trace" in files:
        (path / "trace.json").write_text(files["trace"])
    if "summary" in files:
        (path / "summary.json").write_text(json.dumps(files["summary"]))
    return path


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Page(HTMLParser):
    """Reads a page as a browser does: text outside of scripts, attributes, and the data."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside: list[str] = []
        self.feed(html)
        self.close()
        self.text = " ".join(self.text.split())
        assert not self._inside, f"these tags are not closed: {self._inside}"
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "input", "img", "br"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            self.scripts[-1] += data
        elif "style" not in self._inside:
            self.text += data

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]

    def series(self, chart: str) -> list[dict[str, Any]]:
        """The curves of a chart, each with its steps."""
        return [{**s, "x": self.data["axes"][s["x"]]} for s in self.data["charts"][chart]["series"]]
