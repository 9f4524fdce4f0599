"""Planted mistakes: parity sees each, in the quantities that it must show in, and the row
names the tensor.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dist_pool import DistPool
from parity_mistakes import MISTAKES, run_with

from benchmarks.parity.cases import QUICK_CUTS, Recipe, Role
from benchmarks.parity.layouts import LAYOUTS
from benchmarks.parity.measure import Row
from benchmarks.parity.run import Case, make_case, rows_of, run_cell

pytestmark = pytest.mark.dist
FAMILY = "qwen3_untied"
# in four parts, two replicas have the same number of response tokens
CUT = replace(QUICK_CUTS[0], token_budget=128)
ANY_WEIGHT = r"(model\..+|lm_head)\.weight"
ANY_NORM = r"model\.(.+norm|norm)\.weight"
ANY_OF_BODY = r"model\..+\.weight"


@dataclass(frozen=True)
class Planted:
    """A mistake, where it is made, and what of the table shows it."""

    mistake: str
    layout: str
    seen: dict[str, str]  # quantity -> what the tensor of its row is called
    unseen: tuple[str, ...]
    through_checkpoint: bool = False
    role: Role = "actor"


PLANTED = (
    Planted(
        "qkv_one_after_the_other",
        "tp2",
        {
            "update": r"model\.layers\.\d\.self_attn\.[qkv]_proj\.weight",
            "gradient": ANY_WEIGHT,
            "log_probs": "log_probs",
        },
        (),
    ),
    Planted(
        "norms_not_marked",
        "tp2_sequence",
        {"gradient": ANY_NORM, "copies": ANY_NORM + r" \(dp0_cp0_tp1\)"},
        ("log_probs", "entropies"),
    ),
    Planted(
        "each_replica_its_own_count",
        "dp2",
        {"gradient": ANY_WEIGHT},
        ("log_probs", "entropies", "copies"),
    ),
    Planted(
        "labels_shifted_after_the_cut",
        "cp2",
        {"log_probs": "log_probs", "gradient": ANY_WEIGHT},
        ("entropies", "copies"),
    ),
    Planted(
        "weight_decay_on_norms",
        "one_rank",
        {"update": ANY_NORM},
        ("log_probs", "entropies", "gradient"),
    ),
    Planted(
        "one_step_count_for_all",
        "dp2_distributed",
        {"update": ANY_WEIGHT},
        ("log_probs", "entropies", "gradient", "copies"),
        through_checkpoint=True,
    ),
    Planted(
        "head_bias_counted_by_every_tp_rank",
        "tp2_sequence",
        {"value_gradient": "score"},
        ("values", "value_copies"),
        role="critic",
    ),
    Planted(
        "values_of_the_next_row",
        "one_rank",
        {"values": "values", "value_gradient": rf"{ANY_OF_BODY}|score"},
        (),
        role="critic",
    ),
    Planted(
        "value_weights_divided_again",
        "dp2",
        {"value_gradient": rf"{ANY_OF_BODY}|score", "value_grad_norm": r"step \d"},
        ("values", "value_copies"),
        role="critic",
    ),
    Planted(
        "head_gathers_with_summed_gradient",
        "tp2_sequence",
        {"value_gradient": ANY_OF_BODY},
        ("values", "value_copies"),
        role="critic",
    ),
    Planted(
        "values_not_held",
        "one_rank",
        {"value_gradient": rf"{ANY_OF_BODY}|score", "value_update": rf"{ANY_OF_BODY}|score"},
        ("values",),
        role="critic",
    ),
)


@functools.cache
def case_of(role: Role) -> Case:
    return make_case(FAMILY, Recipe(), [CUT], role)


@pytest.fixture(scope="module")
def clean() -> dict[tuple[str, Role], list[Row]]:
    """Rows without a mistake, by layout and role: made on workers that have had one."""
    return {}


def rows(
    dist_pool: DistPool, planted: Planted, mistake: str | None, checkpoints: Path
) -> dict[str, Row]:
    axes = LAYOUTS[planted.layout]
    case = case_of(planted.role)
    directory = checkpoints if planted.through_checkpoint else None
    results = run_cell(
        dist_pool, case, axes, Recipe(), [CUT], job=run_with, mistake=mistake, checkpoints=directory
    )
    return {row.quantity: row for row in rows_of(case, axes, results)}


def test_every_mistake_is_planted() -> None:
    assert {planted.mistake for planted in PLANTED} == set(MISTAKES)


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.mistake for planted in PLANTED])
def test_a_mistake_is_over_the_bar_and_gone_afterwards(
    dist_pool: DistPool, planted: Planted, clean: dict[tuple[str, Role], list[Row]], tmp_path: Path
) -> None:
    found = rows(dist_pool, planted, planted.mistake, tmp_path / "with")
    for quantity, tensor in planted.seen.items():
        assert not found[quantity].ok, found[quantity]
        assert re.fullmatch(tensor, found[quantity].tensor), found[quantity]
    assert not [found[quantity] for quantity in planted.unseen if not found[quantity].ok]
    where = (planted.layout, planted.role)
    if where not in clean:
        clean[where] = list(rows(dist_pool, planted, None, tmp_path / "without").values())
    assert not [row for row in clean[where] if not row.ok], "the same workers without it"
