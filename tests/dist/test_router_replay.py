"""Replayed routing against transformers whose tokens are made to meet the same experts, whatever
splits the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from router_replay_jobs import recorded_before, told_by_engine
from torch import Tensor

from benchmarks.parity.cases import CUTS, FAMILIES, Recipe, make_batch, make_state
from benchmarks.parity.forced_routes import shifted
from benchmarks.parity.layouts import Axes
from benchmarks.parity.reference import make_model, policy_columns
from benchmarks.parity.router_reference import Routers
from benchmarks.parity.run import Case, make_case, rows_of, run_cell
from rlhf_megatron.config.rules.expert_rules import read_num_experts

pytestmark = pytest.mark.dist
SP: dict[str, Any] = {"sequence_parallel": True}
CUT = replace(CUTS[1], token_budget=64)  # many micro-batches; the last mini-batch has one sample
UNROUTED = (3, 9)  # samples whose engine told of no token, and of the first half only
CELLS: list[tuple[str, str, Axes]] = [
    ("r3", "qwen3_moe", Axes(tp=2, **SP, ep=2, etp=1)),
    ("r3", "deepseek_v3", Axes(cp=2, ep=2, recompute="full")),
    ("r2", "qwen3_moe", Axes(dp=2, ep=2, recompute="moe")),
    ("r2", "deepseek_v3", Axes(pp=2)),
]
LONG: list[tuple[str, str, Axes]] = [
    ("r3", "qwen3_moe", Axes(pp=2, vpp=2, recompute="full")),
    ("r3", "mixtral", Axes(tp=2, **SP, is_gathered=True)),
    ("r3", "gpt_oss", Axes(tp=2, **SP, ep=2, etp=1, recompute="full")),
    ("r2", "gpt_oss", Axes(cp=2, ep=2)),
    ("r3", "glm4_moe", Axes(tp=2, **SP, pp=2, ep=2, etp=1)),
    ("r3", "qwen3_moe", Axes(pp=2, vpp=2, ep=2, dp=2, distributed=True)),
    ("r2", "deepseek_v3", Axes(recompute="full")),
    ("r2", "qwen3_moe", Axes(cp=2, tp=2, **SP, ep=2, etp=1, recompute="moe")),
    ("r2", "glm4_moe", Axes(pp=2, vpp=2, ep=2, dp=2, recompute="full")),
    ("r2", "qwen3_moe", Axes(dp=4, ep=2, distributed=True)),
]


def live_routes(family: str, state: dict[str, Tensor]) -> Tensor:
    """[T, layers with experts, top-k] of transformers; -1 of last tokens."""
    model = make_model(FAMILIES[family], state, torch.float64)
    batch = make_batch()
    routers = Routers(model, FAMILIES[family])
    with torch.no_grad():
        policy_columns(model, batch, range(batch["offsets"].numel() - 1), Recipe())
    return routers.routes(batch["offsets"].diff().tolist())


@functools.cache
def engine_case(family: str) -> Case:
    routes = live_routes(family, make_state(family))
    offsets = make_batch()["offsets"]
    routes = shifted(routes, read_num_experts(FAMILIES[family]))
    none, half = (slice(int(offsets[sample]), int(offsets[sample + 1])) for sample in UNROUTED)
    routes[none] = -1
    routes[(half.start + half.stop) // 2 : half.stop] = -1
    return make_case(family, Recipe(), [CUT], routes=routes)


@functools.cache
def before(family: str) -> dict[str, Tensor]:
    """The model whose routes are recorded: its routers pick each expert's neighbour."""
    is_router = ("gate.weight", "router.weight", "router.bias", "e_score_correction_bias")
    return {
        name: t.roll(1, 0) if name.endswith(is_router) else t
        for name, t in make_state(family).items()
    }


@functools.cache
def recorded_case(family: str) -> Case:
    return make_case(family, Recipe(), [CUT], routes=live_routes(family, before(family)))


def run_replayed(
    pool: DistPool, mode: str, family: str, axes: Axes, directory: Path, planted: int = 0
) -> dict[str, bool]:
    """quantity -> whether it is within parity's bar."""
    job: Callable[..., Any]
    if mode == "r3":
        case = engine_case(family)
        job = told_by_engine
        arguments = {"directory": directory, "planted": planted}
    else:
        case = recorded_case(family)
        job = recorded_before
        arguments = {"before": before(family)}
    found = rows_of(case, axes, run_cell(pool, case, axes, Recipe(), [CUT], job=job, **arguments))
    print(*found, sep="\n")
    return {row.quantity: row.ok for row in found}


@pytest.mark.parametrize(
    "mode, family, axes",
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG)],
    ids=[f"{mode}-{family}-{axes.name}" for mode, family, axes in [*CELLS, *LONG]],
)
def test_updates_meet_the_given_experts(
    dist_pool: DistPool, tmp_path: Path, mode: str, family: str, axes: Axes
) -> None:
    """R3: in log-probs too. R2: ids follow their tokens out of other micro-batches,
    from other ranks.
    """
    found = run_replayed(dist_pool, mode, family, axes, tmp_path)
    if mode == "r2":  # its log-probs are those of its own routing
        found = {
            name: ok for name, ok in found.items() if name in ("gradient", "grad_norm", "update")
        }
        assert len(found) == 3
    assert all(found.values()), found


def test_routes_of_the_token_before_are_caught(dist_pool: DistPool, tmp_path: Path) -> None:
    found = run_replayed(dist_pool, "r3", "qwen3_moe", Axes(), tmp_path, planted=1)
    assert not found["log_probs"] and not found["gradient"], found
