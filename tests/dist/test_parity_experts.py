"""Models with experts against float64: a few layouts here, all of them in `make parity`; and
planted mistakes.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
from dist_pool import DistPool, JobError
from parity_mistakes import run_with

from benchmarks.parity.cases import QUICK_CUTS, Recipe, Role
from benchmarks.parity.layouts import TE, Axes
from benchmarks.parity.run import Case, make_case, rows_of, run_cell, settle

pytestmark = pytest.mark.dist
CUT = replace(QUICK_CUTS[0], token_budget=128)
SP: dict[str, Any] = {"sequence_parallel": True}
ANY_EXPERT = r"model\.layers\.\d\.(mlp|block_sparse_moe)\.experts\.\d\.\w+\.weight"
ANY = r".+\.weight"
FORWARD = {"log_probs", "entropies", "routes"}
OVER_TP = Axes(tp=2, **SP, ep=2, etp=1)
CELLS: list[tuple[str, Axes, Role]] = [
    ("qwen3_moe", Axes(tp=2, **SP, ep=2, etp=1), "actor"),
    ("qwen3_moe_plain", Axes(pp=2, ep=2, dp=2, chunk_layers=(1, 3), distributed=True), "actor"),
    ("mixtral", Axes(cp=2, ep=2, recompute="moe"), "actor"),
    ("glm4_moe", Axes(tp=2, **SP, ep=2, etp=1, overlaps_shared=True), "actor"),
    ("deepseek_v3", Axes(tp=2, **SP, ep=2, etp=1, impl=TE, is_grouped=True), "actor"),
    ("gpt_oss", Axes(), "actor"),
    ("gpt_oss", Axes(tp=2, **SP, ep=2, etp=1), "actor"),
]
LONG: list[tuple[str, Axes, Role]] = [
    ("gpt_oss", Axes(tp=2, **SP, etp=1, dp=2, distributed=True, overlap=True), "actor"),
    ("gpt_oss", Axes(tp=2, **SP, pp=2, ep=2, etp=1), "actor"),
    ("gpt_oss", Axes(cp=2, tp=2, **SP, ep=4, etp=1, recompute="moe"), "actor"),
    ("gpt_oss", Axes(pp=2, first_layers=1, ep=2, dp=2, recompute="full"), "critic"),
    ("gpt_oss", Axes(ep=2, dp=2, is_grouped=True, distributed=True), "actor"),
    (
        "gpt_oss",
        Axes(ep=2, dp=2, is_grouped=True, impl=TE, distributed=True, overlap=True),
        "actor",
    ),
    ("qwen3_moe", Axes(pp=2, vpp=2, chunk_layers=(1, 1, 1, 1)), "actor"),
    (
        "qwen3_moe",
        Axes(pp=2, first_layers=1),
        "actor",
    ),  # the layers of the first stage have no experts
    ("qwen3_moe", Axes(tp=2, **SP, ep=2, etp=1, dp=2, distributed=True, overlap=True), "critic"),
    ("qwen3_moe_plain", Axes(etp=2, dp=2, distributed=True), "actor"),
    ("mixtral", Axes(tp=2, **SP, pp=2, ep=2, etp=1), "critic"),
    ("glm4_moe", Axes(pp=2, first_layers=1, dp=2, ep=2, distributed=True), "actor"),
    ("glm4_moe", Axes(cp=2, tp=2, **SP, ep=2, etp=1, recompute="moe"), "actor"),
    ("mixtral", Axes(tp=2, **SP, etp=1, is_gathered=True), "actor"),
    ("deepseek_v3", Axes(cp=2, ep=2, recompute="latent"), "actor"),
    ("deepseek_v3", Axes(tp=2, **SP, pp=2, first_layers=1, ep=2, etp=1), "critic"),
    (
        "qwen3_moe",
        Axes(dp=2, is_grouped=True, distributed=True, overlap=True, recompute="moe"),
        "actor",
    ),
    ("moonlight", Axes(cp=2, tp=2, **SP, ep=2, etp=1), "actor"),
    ("glm4_moe", Axes(tp=2, **SP, ep=2, etp=1, impl=TE), "actor"),
    ("moonlight", Axes(tp=2, **SP, pp=2, impl=TE, recompute="latent"), "actor"),
    ("moonlight", Axes(ep=2, dp=2, pp=2, distributed=True), "actor"),
]


@functools.cache
def case_of(family: str, role: Role = "actor") -> Case:
    return make_case(family, Recipe(), [CUT], role)


@pytest.mark.parametrize(
    "family, axes, role",
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG)],
    ids=[f"{family}-{axes.name}-{role}" for family, axes, role in [*CELLS, *LONG]],
)
def test_experts_are_as_near_to_float64_as_float32_transformers(
    dist_pool: DistPool, family: str, axes: Axes, role: Role
) -> None:
    """A token that went to another expert would be over the bar in that expert's gradient."""
    case = case_of(family, role)
    misses = [row for row in settle(dist_pool, case, axes, Recipe(), [CUT])[0] if not row.ok]
    assert not misses, misses


def test_a_replica_without_samples_takes_part_with_one_token(dist_pool: DistPool) -> None:
    """Latent attention takes as many rows of the tables of positions as a
    micro-batch has tokens.
    """
    cut = replace(QUICK_CUTS[1], mini_batches=((22, 23),))
    axes = Axes(dp=2)
    case = make_case("moonlight", Recipe(), [cut])
    misses = [row for row in settle(dist_pool, case, axes, Recipe(), [cut])[0] if not row.ok]
    assert not misses, misses


PLANTED: list[tuple[str, str, Axes, dict[str, str], set[str]]] = [
    # The forward pass is right: half of the tokens are missing in the gradients of experts.
    (
        "experts_reduced_as_dense_layers",
        "qwen3_moe",
        Axes(tp=2, **SP, etp=1),
        {"gradient": ANY_EXPERT},
        FORWARD,
    ),
    # Gradients are right as well: replicas are clipped by a norm that lacks half of the experts.
    (
        "experts_counted_on_the_first_tp_rank",
        "glm4_moe",
        OVER_TP,
        {"grad_norm": "step 0"},
        {*FORWARD, "gradient"},
    ),
    (
        "expert_bias_dropped",
        "glm4_moe",
        OVER_TP,
        {"routes": r"router \d", "log_probs": "log_probs"},
        set(),
    ),
    (
        "position_keys_not_summed",
        "deepseek_v3",
        OVER_TP,
        {"gradient": r"model\.layers\.\d\.(self_attn\.kv_a_proj_with_mqa|input_layernorm)\.weight"},
        {"log_probs"},
    ),
    (
        "experts_off_by_one",
        "qwen3_moe",
        Axes(dp=2, ep=2),
        {"log_probs": "log_probs", "gradient": ANY},
        set(),
    ),
]
PARTS = r"model\.layers\.\d\..+"
LONG_PLANTED: list[tuple[str, str, Axes, dict[str, str], set[str]]] = [
    ("experts_summed_over_tp", "qwen3_moe", OVER_TP, {"gradient": ANY_EXPERT}, FORWARD),
    ("experts_summed_over_tp", "gpt_oss", OVER_TP, {"gradient": r".+\.experts\.\d\.\w+"}, FORWARD),
    (
        "sinks_counted_on_the_first_tp_rank",
        "gpt_oss",
        OVER_TP,
        {"grad_norm": "step 0"},
        {*FORWARD, "gradient"},
    ),
    (
        "window_one_longer",
        "gpt_oss",
        Axes(cp=2, ep=2),
        {"log_probs": "log_probs", "gradient": PARTS},
        set(),
    ),
    (
        "window_in_the_other_layers",
        "gpt_oss",
        Axes(pp=2),
        {"log_probs": "log_probs", "gradient": PARTS},
        set(),
    ),
    ("gate_and_up_taken_as_halves", "gpt_oss", Axes(dp=2, ep=2), {"log_probs": "log_probs"}, set()),
    (
        "gate_and_up_swapped",
        "qwen3_moe",
        Axes(dp=2, ep=2),
        {"log_probs": "log_probs", "gradient": ANY},
        set(),
    ),
    (
        "experts_of_the_neighbour",
        "qwen3_moe",
        Axes(cp=2, ep=2),
        {"routes": r"router \d", "gradient": ANY},
        set(),
    ),
]


@pytest.mark.parametrize(
    "mistake, family, axes, seen, unseen",
    [*PLANTED, *(pytest.param(*planted, marks=pytest.mark.long) for planted in LONG_PLANTED)],
    ids=[f"{mistake}-{family}" for mistake, family, *_ in [*PLANTED, *LONG_PLANTED]],
)
def test_a_mistake_with_experts_is_over_the_bar(
    dist_pool: DistPool,
    mistake: str,
    family: str,
    axes: Axes,
    seen: dict[str, str],
    unseen: set[str],
) -> None:
    case = case_of(family)
    results = run_cell(dist_pool, case, axes, Recipe(), [CUT], job=run_with, mistake=mistake)
    found = {row.quantity: row for row in rows_of(case, axes, results)}
    for quantity, tensor in seen.items():
        assert not found[quantity].ok and re.fullmatch(tensor, found[quantity].tensor), found[
            quantity
        ]
    assert all(found[quantity].ok for quantity in unseen)


@pytest.mark.long
def test_a_mistake_is_over_the_bar_in_all_orders_of_the_hidden_units(dist_pool: DistPool) -> None:
    """What is over the bar by rounding is not, once a layout has run in several; one that hides
    in a norm stays.
    """
    case = case_of("glm4_moe")
    mistake = "experts_counted_on_the_first_tp_rank"
    rows, runs = settle(dist_pool, case, OVER_TP, Recipe(), [CUT], job=run_with, mistake=mistake)
    assert len(runs) == 8 and [row.quantity for row in rows if not row.ok][-1] == "grad_norm", rows


def test_a_bias_that_is_added_in_place_is_an_error(dist_pool: DistPool) -> None:
    """megatron-core's own second matrix of an expert, at one rank."""
    with pytest.raises(JobError, match="is being modified inplace"):
        case = case_of("gpt_oss")
        mistake = "expert_biases_added_in_place"
        run_cell(dist_pool, case, Axes(), Recipe(), [CUT], job=run_with, mistake=mistake)
