"""Two runs on the same rollouts, figure by figure. Pure but for the files that it reads.

docs/check.md has the table of figures, errors and bars. x is the layout, y one unsharded rank, `start` the weights
before the first step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

LOSS, NORM, NATS, VALUES, UPDATE = 1e-4, 1e-4, 1e-5, 1e-4, 1e-3
EXACT = 0.0
QUANTISED = 0.3  # nats, of an engine that holds FP8: a sampled token's log-prob, at most

LEFT_OUT = (
    *("kind", "step", "seconds", "timing_*", "perf/*", "sync/*", "val/*", "training/*", "warmup/accuracy"),
    *("global_seqlen/*", "health/*"),
)
"""Times, what one of the two runs has no engine for, tokens of a replica, verdicts on the other metrics."""

OF_VALUES = ("critic/values/", "critic/returns/", "critic/advantages/", "critic/vpred_mean", "critic/vf_explained_var")
"""What a critic's rounding error reaches; without one, advantages do not depend on the layout."""

IN_NATS = ("actor/", "rollout_corr/")
OF_ROUTERS = ("/load_balancing_loss", "/z_loss")  # of the actor and of a critic
_NO_MEANS = ("actor/lr", "actor/num_")


@dataclass(frozen=True)
class Row:
    """One figure of a layout against one rank."""

    quantity: str  # name of a metric, or "update"
    where: str  # "step 2", or the name of a tensor
    value: float
    one_rank: float
    error: float
    bar: float

    @property
    def is_ok(self) -> bool:
        return self.error <= self.bar  # not so for a NaN


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl that training wrote: warm-up and steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] in ("warmup", "step")]


def compare_metrics(
    found: Sequence[Mapping[str, Any]], one_rank: Sequence[Mapping[str, Any]], log_prob_bar: float
) -> list[Row]:
    """Rows of every metric that both runs have. `log_prob_bar`: checks.log_prob_max_abs_diff."""
    rows = []
    for mine, theirs in zip(found, one_rank, strict=True):
        assert (mine["kind"], mine["step"]) == (theirs["kind"], theirs["step"])
        where = f"{'warm-up ' if mine['kind'] == 'warmup' else ''}step {mine['step']}"
        for name in mine:
            if name in theirs and not any(fnmatchcase(name, pattern) for pattern in LEFT_OUT):
                rows.append(_metric_row(name, where, mine, theirs))
        name = "training/rollout_log_probs_diff_max"
        if name in mine:
            worst = max(mine[name], theirs[name])
            rows.append(Row("engine_against_trainer", where, mine[name], theirs[name], worst, log_prob_bar))
    return rows


def compare_weights(
    found: Mapping[str, Tensor], one_rank: Mapping[str, Tensor], start: Callable[[str], Tensor], prefix: str = ""
) -> list[Row]:
    """The update of every tensor. `start`: its value before the first step; `prefix`: of the names in the rows.

    Raises ValueError for other tensors.
    """
    if found.keys() != one_rank.keys():
        raise ValueError(f"only one of the runs has the tensors {sorted(found.keys() ^ one_rank.keys())}.")
    rows = []
    for name, theirs in one_rank.items():
        before = start(name).double()
        mine, update = found[name].double() - before, theirs.double() - before
        size = float(update.norm())
        distance = float((mine - update).norm())
        error = distance / size if size else (math.inf if distance else 0.0)
        rows.append(Row("update", prefix + name, float(mine.norm()), size, error, UPDATE))
    return rows


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory in Hugging Face layout."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def trains_nothing(steps: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> Iterator[str]:
    """Reasons why an agreement would mean nothing."""
    for step in steps:
        if step["kind"] != "step":
            continue
        if not _largest_advantage(step) > 0:
            yield f"step {step['step']} has no advantages: all rewards of each group are equal."
        for role in ("actor", "critic"):
            norm = step.get(f"{role}/grad_norm", 1.0 if role == "critic" else 0.0)  # not every run has a critic
            if not norm > 0:
                yield f"step {step['step']} has the gradient norm {norm} of the {role}."
    still = [row.where for row in rows if row.quantity == "update" and row.one_rank == 0 and not _has_no_gradient(row)]
    if still:
        yield f"{len(still)} tensors did not move, such as {still[0]}."


def _has_no_gradient(row: Row) -> bool:
    """Whether it is a bias by which routers pick: `moe_router_bias_update_rate` alone moves it, and is 0 unless set."""
    return row.where.endswith(".e_score_correction_bias")


def worst(rows: Sequence[Row]) -> list[Row]:
    """The row of each quantity that is nearest to its bar, or farthest over it; in order of appearance."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.quantity not in found or _closeness(row) > _closeness(found[row.quantity]):
            found[row.quantity] = row
    return list(found.values())


def _closeness(row: Row) -> float:
    """Error over bar; a NaN is infinitely far over it."""
    if math.isnan(row.error):
        return math.inf
    return row.error / row.bar if row.bar else (math.inf if row.error else 0.0)


def _metric_row(name: str, where: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Row:
    x, y = float(mine[name]), float(theirs[name])
    error, bar = abs(x - y), EXACT
    if name.endswith("grad_norm"):
        error, bar = abs(x - y) / abs(y) if y else (math.inf if x else 0.0), NORM
    elif name in ("actor/loss", "actor/pg_loss"):
        bar = LOSS * _largest_advantage(theirs)
    elif name.startswith(("actor/pg_clipfrac", "critic/vf_clipfrac")):
        bar = 2.0 / (theirs["response_length/mean"] * theirs["rollout/num_samples"])
    elif name in ("warmup/loss", "critic/vf_loss") or name.endswith(OF_ROUTERS) or _is_mean_in_nats(name):
        bar = NATS * max(1.0, abs(y))
    elif "critic/values/mean" in theirs and name.startswith(OF_VALUES):
        bar = VALUES * max(1.0, abs(y))
    return Row(name, where, x, y, error, bar)


def _is_mean_in_nats(name: str) -> bool:
    return name.startswith(IN_NATS) and not name.startswith(_NO_MEANS)


def _largest_advantage(step: Mapping[str, Any]) -> float:
    return max(abs(step["critic/advantages/max"]), abs(step["critic/advantages/min"]))
