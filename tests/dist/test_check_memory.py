"""The memory that `rlhf-megatron check` plans is what real actors and critics hold, to the byte,
on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
from check_memory_jobs import CASES, Case, held, planned
from dist_pool import DistPool

from rlhf_megatron.weights.parallel_layout import make_parallel_layout


@pytest.fixture(scope="module")
def plans() -> dict[str, list[dict[str, Any]]]:
    return dict(zip(map(str, CASES), planned(), strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_what_workers_hold(
    case: Case, plans: dict[str, list[dict[str, Any]]], dist_pool: DistPool
) -> None:
    axes = {
        name: getattr(case.axes, name)
        for name in ("tp", "pp", "dp", "cp", "vpp", "sequence_parallel")
    }
    found = dist_pool.run(held, **axes, case=case, timeout_s=300)
    layout = make_parallel_layout(case.axes.megatron, case.axes.num_ranks)
    stages = plans[str(case)]
    expected = []
    for rank in range(case.axes.num_ranks):
        place = layout.locate_rank(rank)
        stage = stages[place.pp]
        shard = place.dp * layout.cp + place.cp
        plain = {name: stage[name] for name in ("num_parameters", "parameters", "gradients")}
        expected.append(
            {**plain, **{name: stage[name][shard] for name in ("main_parameters", "moments")}}
        )
    assert found == expected
    assert all(stage["num_ranks"] == case.axes.num_ranks / case.axes.pp for stage in stages)


def test_bytes_counted_by_hand(plans: dict[str, list[dict[str, Any]]]) -> None:
    """Counted by hand: qwen3 of 4 layers, hidden 24, 8 heads of 6 in 4 groups, ffn 40, 21 tokens,
    untied, bfloat16.
    """
    layer = 24 * (8 + 4 + 4) * 6 + 8 * 6 * 24 + 3 * 24 * 40 + 2 * 24 + 2 * 6
    count = 4 * layer + 24 + 2 * 21 * 24
    (stage,) = plans["qwen3 bfloat16 dp2"]
    assert stage["num_parameters"] == count
    assert (stage["parameters"], stage["gradients"], stage["reference"]) == (
        2 * count,
        4 * count,
        2 * count,
    )
    assert (stage["main_parameters"], stage["moments"]) == ([4 * count] * 2, [8 * count] * 2)
    (shared,) = plans["qwen3 bfloat16 dp2_distributed_overlap"]
    assert sum(shared["moments"]) == 8 * count, (
        "the shards of the two replicas are the whole, without padding"
    )
    (short,) = plans["qwen3 bfloat16 dp2_distributed_in_few_bits"]
    assert (sum(short["main_parameters"]), sum(short["moments"])) == (2 * count, 4 * count)
    assert shared["parameters"] > 2 * count and shared["parameters"] % 256 == 0
    first, last = plans["tied qwen3 bfloat16 pp2 critic"]
    assert first["num_parameters"] == 2 * layer + 21 * 24
    assert last["num_parameters"] == 2 * layer + 24 + (24 + 1), (
        "a value head, and no copy of the embedding"
    )
