"""Two runs on the same rollouts, figure by figure. Pure but for the files that it reads.

docs/check.md has the table of figures, errors and bars. x is the layout, y one unsharded rank,
`start` the weights before the first step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-4
NATS_TOLERANCE = 1e-5
VALUES_TOLERANCE = 1e-4
UPDATE_TOLERANCE = 1e-3
EXACT_TOLERANCE = 0.0
QUANTISED_TOLERANCE = 0.3  # nats, of an engine that holds FP8: a sampled token's log-prob, at most

IGNORED_METRICS = (
    *(
        "kind",
        "step",
        "seconds",
        "timing_*",
        "perf/*",
        "sync/*",
        "val/*",
        "training/*",
        "warmup/accuracy",
        "policy/lost_update_share",
    ),
    *("global_seqlen/*", "health/*"),
)
"""Times, what one of the two runs has no engine for, tokens of a replica, verdicts on the
other metrics.
"""

VALUE_METRIC_PREFIXES = (
    "critic/values/",
    "critic/returns/",
    "critic/advantages/",
    "critic/vpred_mean",
    "critic/vf_explained_var",
)
"""What a critic's rounding error reaches; without one, advantages do not depend on the layout."""

NATS_METRIC_PREFIXES = ("actor/", "rollout_corr/")
ROUTER_METRIC_SUFFIXES = ("/load_balancing_loss", "/z_loss")  # of the actor and of a critic
_NOT_MEAN_PREFIXES = ("actor/lr", "actor/num_")


@dataclass(frozen=True)
class ComparisonRow:
    """One figure of a layout against one rank."""

    quantity: str  # name of a metric, or "update"
    where: str  # "step 2", or the name of a tensor
    value: float
    one_rank: float
    error: float
    bar: float

    @property
    def is_ok(self) -> bool:
        """Return whether the error is within the bar; False for a NaN."""
        return self.error <= self.bar  # not so for a NaN


def read_training_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl that training wrote: warm-up and steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] in ("warmup", "step")]


def compare_metrics(
    layout_rows: Sequence[Mapping[str, Any]],
    one_rank_rows: Sequence[Mapping[str, Any]],
    log_prob_bar: float,
) -> list[ComparisonRow]:
    """Return a row for every metric that both runs have, of every step, except IGNORED_METRICS, and
    a row for engine against trainer. `log_prob_bar`: checks.log_prob_max_abs_diff.
    """
    rows = []
    for mine, theirs in zip(layout_rows, one_rank_rows, strict=True):
        assert (mine["kind"], mine["step"]) == (theirs["kind"], theirs["step"])
        where = f"{'warm-up ' if mine['kind'] == 'warmup' else ''}step {mine['step']}"
        for name in mine:
            if name in theirs and not any(
                fnmatchcase(name, pattern) for pattern in IGNORED_METRICS
            ):
                rows.append(_compare_metric(name, where, mine, theirs))
        name = "training/rollout_log_probs_diff_max"
        if name in mine:
            worst = max(mine[name], theirs[name])
            rows.append(
                ComparisonRow(
                    "engine_against_trainer", where, mine[name], theirs[name], worst, log_prob_bar
                )
            )
    return rows


def compare_weights(
    layout_weights: Mapping[str, Tensor],
    one_rank_weights: Mapping[str, Tensor],
    get_start_tensor: Callable[[str], Tensor],
    name_prefix: str = "",
) -> list[ComparisonRow]:
    """Return a row for the update of every tensor, from its value before the first step
    (`get_start_tensor`). `name_prefix` is put before the names in the rows.

    Raise ValueError where the runs have different tensors.
    """
    if layout_weights.keys() != one_rank_weights.keys():
        raise ValueError(
            "only one of the runs has the"
            f" tensors {sorted(layout_weights.keys() ^ one_rank_weights.keys())}."
        )
    rows = []
    for name, theirs in one_rank_weights.items():
        before = get_start_tensor(name).double()
        mine = layout_weights[name].double() - before
        update = theirs.double() - before
        size = float(update.norm())
        distance = float((mine - update).norm())
        error = _divide_or_inf(distance, size)
        rows.append(
            ComparisonRow(
                "update", name_prefix + name, float(mine.norm()), size, error, UPDATE_TOLERANCE
            )
        )
    return rows


def read_hf_weights(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory in Hugging Face layout, by name."""
    from safetensors.torch import load_file

    return {
        name: value
        for file in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def find_reasons_for_no_training(
    metric_rows: Sequence[Mapping[str, Any]], comparison_rows: Sequence[ComparisonRow]
) -> Iterator[str]:
    """Yield reasons why an agreement would mean nothing: no advantages, no gradient, or tensors
    that did not move.
    """
    for step in metric_rows:
        if step["kind"] != "step":
            continue
        if not _find_largest_advantage(step) > 0:
            yield f"step {step['step']} has no advantages: all rewards of each group are equal."
        for role in ("actor", "critic"):
            # not every run has a critic
            norm = step.get(f"{role}/grad_norm", 1.0 if role == "critic" else 0.0)
            if not norm > 0:
                yield f"step {step['step']} has the gradient norm {norm} of the {role}."
    still = [
        row.where
        for row in comparison_rows
        if row.quantity == "update" and row.one_rank == 0 and not _is_router_bias(row)
    ]
    if still:
        yield f"{len(still)} tensors did not move, such as {still[0]}."


def _is_router_bias(row: ComparisonRow) -> bool:
    """Return whether the row is of a bias by which routers pick: `moe_router_bias_update_rate`
    alone moves it, and is 0 unless set.
    """
    return row.where.endswith(".e_score_correction_bias")


def select_worst_rows(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return for each quantity the row that is nearest to its bar, or farthest over it, in order of
    appearance.
    """
    found: dict[str, ComparisonRow] = {}
    for row in rows:
        if row.quantity not in found or _error_over_bar(row) > _error_over_bar(found[row.quantity]):
            found[row.quantity] = row
    return list(found.values())


def _error_over_bar(row: ComparisonRow) -> float:
    """Return error / bar; infinity for a NaN."""
    if math.isnan(row.error):
        return math.inf
    return _divide_or_inf(row.error, row.bar)


def _divide_or_inf(numerator: float, denominator: float) -> float:
    """Return the quotient; dividing by 0 gives infinity, and 0 by 0 gives 0."""
    if denominator:
        return numerator / denominator
    return math.inf if numerator else 0.0


def _compare_metric(
    metric_name: str,
    row_location: str,
    layout_metrics: Mapping[str, Any],
    one_rank_metrics: Mapping[str, Any],
) -> ComparisonRow:
    """Return the row of one metric, with the error and the bar of its kind."""
    x = float(layout_metrics[metric_name])
    y = float(one_rank_metrics[metric_name])
    error = abs(x - y)
    bar = EXACT_TOLERANCE
    if metric_name.endswith("grad_norm"):
        error = _divide_or_inf(abs(x - y), abs(y))
        bar = NORM_TOLERANCE
    elif metric_name in ("actor/loss", "actor/pg_loss"):
        bar = LOSS_TOLERANCE * _find_largest_advantage(one_rank_metrics)
    elif metric_name.startswith(("actor/pg_clipfrac", "critic/vf_clipfrac")):
        bar = 2.0 / (
            one_rank_metrics["response_length/mean"] * one_rank_metrics["rollout/num_samples"]
        )
    elif (
        metric_name in ("warmup/loss", "critic/vf_loss")
        or metric_name.endswith(ROUTER_METRIC_SUFFIXES)
        or _is_mean_in_nats(metric_name)
    ):
        bar = NATS_TOLERANCE * max(1.0, abs(y))
    elif "critic/values/mean" in one_rank_metrics and metric_name.startswith(VALUE_METRIC_PREFIXES):
        bar = VALUES_TOLERANCE * max(1.0, abs(y))
    return ComparisonRow(metric_name, row_location, x, y, error, bar)


def _is_mean_in_nats(metric_name: str) -> bool:
    """Return whether the metric is a mean in nats, by its name."""
    return metric_name.startswith(NATS_METRIC_PREFIXES) and not metric_name.startswith(
        _NOT_MEAN_PREFIXES
    )


def _find_largest_advantage(metrics: Mapping[str, Any]) -> float:
    """Return the largest absolute advantage of the step."""
    return max(abs(metrics["critic/advantages/max"]), abs(metrics["critic/advantages/min"]))
