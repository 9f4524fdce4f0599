"""Loss terms of routers against an unsharded reference in float64,
whatever splits the mini-batch.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from dist_pool import DistPool

from benchmarks.parity.cases import CUTS, Recipe
from benchmarks.parity.layouts import Axes
from benchmarks.parity.run import Case, make_case, rows_of, run_cell, settle

pytestmark = pytest.mark.dist
SP: dict[str, Any] = {"sequence_parallel": True}
CUT = replace(CUTS[1], token_budget=64)  # many micro-batches; the last mini-batch has one sample
BY_SAMPLE = Recipe(balancing="seq_aux_loss", aux_coef=0.6, z_coef=0.02, bias_rate=1e-3)
BY_MINI_BATCH = replace(BY_SAMPLE, balancing="global_aux_loss")
UNBIASED: dict[str, Any] = {"bias_rate": 0.0}  # of routers that pick by their scores alone
CELLS: list[tuple[str, Recipe, Axes]] = [
    ("glm4_moe", BY_SAMPLE, Axes(cp=2, ep=2)),
    ("qwen3_moe", replace(BY_MINI_BATCH, **UNBIASED), Axes(tp=2, **SP, ep=2, etp=1)),
    ("glm4_moe", BY_MINI_BATCH, Axes(pp=2, ep=2, dp=2, recompute="full")),
]
LONG: list[tuple[str, Recipe, Axes]] = [
    ("qwen3_moe", replace(BY_SAMPLE, **UNBIASED), Axes()),
    (
        "qwen3_moe",
        replace(BY_SAMPLE, **UNBIASED),
        Axes(tp=2, **SP, cp=2, ep=2, etp=1, recompute="moe"),
    ),
    ("glm4_moe", BY_SAMPLE, Axes(pp=2, vpp=2, ep=2, dp=2, distributed=True)),
    ("glm4_moe", BY_MINI_BATCH, Axes(tp=2, **SP, recompute="full_block")),
]


@functools.cache
def case_of(family: str, recipe: Recipe) -> Case:
    return make_case(family, recipe, [CUT])


@pytest.mark.parametrize(
    "family, recipe, axes",
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG)],
    ids=[f"{family}-{recipe.balancing}-{axes.name}" for family, recipe, axes in [*CELLS, *LONG]],
)
def test_terms_of_routers_do_not_depend_on_how_a_mini_batch_is_split(
    dist_pool: DistPool, family: str, recipe: Recipe, axes: Axes
) -> None:
    """Filler, padding and no-op samples count in no term; biases have moved as the reference's."""
    case = case_of(family, recipe)
    misses = [row for row in settle(dist_pool, case, axes, recipe, [CUT])[0] if not row.ok]
    assert not misses, misses


def test_a_gradient_without_the_terms_is_over_the_bar(dist_pool: DistPool) -> None:
    case = case_of("glm4_moe", BY_SAMPLE)
    axes = Axes()
    found = {
        row.quantity: row
        for row in rows_of(case, axes, run_cell(dist_pool, case, axes, Recipe(), [CUT]))
    }
    assert found["log_probs"].ok and not found["gradient"].ok
    assert found["update"].tensor.endswith("e_score_correction_bias")
