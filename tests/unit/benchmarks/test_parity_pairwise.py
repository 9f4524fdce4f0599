"""The cover that `make test` runs: that it covers, by the package's own rules of what a
layout can be.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from itertools import combinations, product
from typing import Any

import pytest

from benchmarks.parity.cases import DENSE_FAMILIES, FAMILIES
from benchmarks.parity.layouts import (
    COVER_RANKS,
    CRITIC_VALUES,
    LAYOUTS,
    TE,
    VALUES,
    Axes,
    cover,
    critic_cells,
    critic_cover,
    divides,
    in_turns,
    is_possible,
)
from benchmarks.parity.pairwise import pairs_of, pairwise
from benchmarks.replay_layouts import CONFIG, in_layout
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config, validate_model_config
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import check_tensor_parallel_split

Pairs = set[frozenset[tuple[str, Any]]]


def pairs(cell: dict[str, Any]) -> Pairs:
    """The pairs of (axis, value) of a cell, but for families with ways of recomputing."""
    every = {frozenset(pair) for pair in combinations(cell.items(), 2)}
    return {pair for pair in every if {axis for axis, _ in pair} != {"family", "recompute"}}


@functools.cache
def can_be_split(family: str, tp: int) -> bool:
    try:
        check_tensor_parallel_split(make_weight_table(FAMILIES[family], tp), tp)
    except ValueError:
        return False
    return True


def can_be(cell: dict[str, Any]) -> bool:
    """By what refuses it in the package, and by what would be ignored."""
    num_ranks = cell["tp"] * cell["pp"] * cell["cp"] * cell["dp"]
    try:
        ParallelLayout(
            num_ranks, cell["tp"], cell["pp"], cell["cp"], cell["vpp"], cell["sequence_parallel"]
        )
    except ValueError:
        return False
    has_nothing_to_reduce = cell["dp"] == cell["cp"] == 1
    has_norms_inside = cell["impl"] == "transformer_engine" and cell["recompute"] == "layernorm_mlp"
    return (
        num_ranks <= COVER_RANKS
        and can_be_split(cell["family"], cell["tp"])
        and FAMILIES[cell["family"]]["num_hidden_layers"] % (cell["pp"] * cell["vpp"]) == 0
        and not (has_nothing_to_reduce and (cell["distributed"] or cell["overlap"]))
        and not has_norms_inside
    )


def test_every_pair_that_can_be_is_in_the_cover() -> None:
    axes = {"family": tuple(DENSE_FAMILIES), **VALUES}
    cells = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    possible: Pairs = set().union(*(pairs(cell) for cell in cells if can_be(cell)))
    covered: Pairs = set()
    for family, layout in cover(DENSE_FAMILIES):
        cell = {"family": family, **{axis: getattr(layout, axis) for axis in VALUES}}
        assert can_be(cell), cell
        covered |= pairs(cell)
    assert covered == possible
    seen = {item for pair in possible for item in pair}
    assert seen == {(axis, value) for axis, values in axes.items() for value in values}, (
        "each value is possible"
    )


def test_every_layout_has_a_critic_and_every_family_meets_every_value_with_one() -> None:
    def met(cells: set[tuple[str, str]]) -> set[tuple[str, str, Any]]:
        """(family, axis, value)."""
        return {
            (family, axis, value)
            for family, name in cells
            for axis, value in asdict(LAYOUTS[name]).items()
            if axis != "recompute"
        }

    of_actor = {
        (family, name)
        for name, axes in LAYOUTS.items()
        for family in FAMILIES
        if divides(axes, FAMILIES[family])
    }
    of_critic = critic_cells(list(LAYOUTS.values()), FAMILIES)
    assert of_critic <= of_actor and {name for _, name in of_critic} == set(LAYOUTS)
    assert met(of_critic) == met(of_actor) and len(of_critic) < len(of_actor) / 4
    assert critic_cells([Axes(tp=2)], {"one": FAMILIES["qwen3_tied"]}) == {("one", "tp2")}


def test_the_short_cover_of_the_critic() -> None:
    """Every pair of values of the axes but the ways of recomputing, and every family."""
    cells = critic_cover(DENSE_FAMILIES)
    values = [
        dict(zip(CRITIC_VALUES, row, strict=True)) for row in product(*CRITIC_VALUES.values())
    ]
    possible: Pairs = set().union(
        *(pairs(cell) for cell in values if can_be({"family": "qwen3_tied", **cell}))
    )
    covered: Pairs = set().union(
        *(pairs({axis: getattr(axes, axis) for axis in VALUES}) for _, axes in cells)
    )
    assert covered == possible
    assert {family for family, _ in cells} == set(DENSE_FAMILIES)
    assert all(
        divides(axes, FAMILIES[family]) and axes.num_ranks <= COVER_RANKS for family, axes in cells
    )


def test_a_cover_by_hand() -> None:
    """Of a, b, c with two values each: any two of the four rows (a b c) = 000 011 101 110 differ in
    two columns, and all pairs occur. Where 1 1 is not allowed for a and b, the pair is left out.
    """
    axes = dict.fromkeys("abc", (0, 1))
    cells = pairwise(axes, lambda cell: True, cost=lambda cell: 0.0)
    assert [tuple(cell.values()) for cell in cells] == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    cells = pairwise(axes, lambda cell: cell["a"] + cell["b"] < 2, cost=lambda cell: 0.0)
    covered = {pair for cell in cells for pair in pairs_of(cell)}
    assert len(covered) == 11 and ("a", 1, "b", 1) not in covered


def test_the_cheaper_of_equals_comes_first() -> None:
    cells = pairwise({"a": (0, 1), "b": (0, 1)}, lambda cell: True, cost=lambda cell: -cell["a"])
    assert [tuple(cell.values()) for cell in cells] == [(1, 0), (1, 1), (0, 0), (0, 1)]


def test_names_of_layouts() -> None:
    every = {
        "tp": 2,
        "sequence_parallel": True,
        "pp": 2,
        "vpp": 2,
        "cp": 2,
        "dp": 2,
        "distributed": True,
    }
    axes = Axes(**every, overlap=True, recompute="full", impl="transformer_engine")
    assert (
        axes.name
        == "tp2_sequence_pp2_vpp2_cp2_dp2_distributed_overlap_recompute_full_transformer_engine"
    )
    assert (Axes().name, Axes(recompute="mlp").name) == ("one_rank", "one_rank_recompute_mlp")
    assert all(
        name == axes.name and name.replace("_", "").isalnum() for name, axes in LAYOUTS.items()
    )


def test_the_list_has_what_the_documents_promise() -> None:
    """Layouts of 1, 2 and 4 ranks, eight and more of 8, and every family in several of each."""
    by_ranks = {
        ranks: [axes for axes in LAYOUTS.values() if axes.num_ranks == ranks]
        for ranks in (1, 2, 4, 8)
    }
    assert len(by_ranks[8]) >= 8
    for ranks, layouts in by_ranks.items():
        for family, hf_config in FAMILIES.items():
            assert sum(divides(axes, hf_config) for axes in layouts) >= 2, (family, ranks)
    for axes in LAYOUTS.values():
        assert any(divides(axes, hf_config) for hf_config in FAMILIES.values()), (
            f"no family for {axes.name}"
        )
    for axis, values in VALUES.items():
        assert {getattr(axes, axis) for axes in by_ranks[8]} >= set(values) - {"layernorm_mlp"}, (
            axis
        )


def test_a_run_accepts_every_layout() -> None:
    """By the rules on settings, with the quickstart's other settings and each model that
    can be split so.
    """
    for axes in LAYOUTS.values():
        loaded = read_run_config(CONFIG, in_layout(axes))
        assert validate_config(loaded) == [], axes.name
        for family, hf_config in FAMILIES.items():
            assert validate_model_config(loaded, hf_config) == [] or not divides(axes, hf_config), (
                axes.name,
                family,
            )


@pytest.mark.parametrize(
    "axes",
    [
        Axes(vpp=2),
        Axes(sequence_parallel=True),
        Axes(tp=2, pp=2, distributed=True),
        Axes(tp=2, overlap=True),
        Axes(impl="transformer_engine", recompute="layernorm_mlp"),
    ],
    ids=lambda axes: axes.name,
)
def test_a_run_refuses_what_the_cover_leaves_out(axes: Axes) -> None:
    assert not is_possible(axes)
    assert validate_config(read_run_config(CONFIG, in_layout(axes)))


def test_layouts_in_turns_meet_every_family() -> None:
    """As the rehearsal takes them: of one and two ranks, without Transformer Engine's."""
    small = [axes for axes in LAYOUTS.values() if axes.num_ranks <= 2 and axes.impl != TE]
    cells = in_turns(small, FAMILIES)
    assert [axes for _, axes in cells] == small
    assert {family for family, _ in cells} == FAMILIES.keys()
    assert all(divides(axes, FAMILIES[family]) for family, axes in cells)
