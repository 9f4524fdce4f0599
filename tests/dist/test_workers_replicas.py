"""Ranks that hold the same tensors: what differs is found, with its rank and name; what
does not is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import OVERLAPPED, SHARDED, make_actor, share

from rlhf_megatron import faults
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.rank_reports import ReplicaDifference, ReplicaReport
from rlhf_megatron.ranks.workers.replica_check import compute_tensor_digest, split_by_majority

NAME = "qwen3_tied"
EMBEDDING = "embedding.word_embeddings.weight"
MOVES = {torch.float32: 1e-3, torch.bfloat16: 0.0625}
NORM = "decoder.layers.3.input_layernorm.weight"


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model(NAME).state_dict().items()}


def checked(
    world: World,
    state: dict[str, Tensor],
    rank: int,
    name: str,
    dtype: torch.dtype = torch.float32,
    megatron: dict[str, Any] | None = None,
) -> tuple[ReplicaReport, ReplicaReport]:
    """Reports after two updates, and after `name` ("parameter" or "parameter moment") moved a
    little on one rank.
    """
    actor = make_actor(world, NAME, state, dtype=dtype, megatron=megatron)
    shard, plan = share(world, reference.make_batch(), 40)
    for _ in range(2):
        assert not getattr(
            actor.update(shard, plan, reference.TEMPERATURE, "sft"), "is_skipped", False
        )
    before = actor.check_replicas()
    if world.rank == rank:
        _tensor(actor, name).detach().view(-1)[3] += MOVES[dtype]
    return before, actor.check_replicas()


def _tensor(actor: Any, name: str) -> Tensor:
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.workers.optimizer_state import iterate_parameter_states

    parameters = collect_named_parameters(actor.backend.chunks)
    name, _, moment = name.partition(" ")
    if not moment:
        return parameters[name]
    (held,) = [
        h
        for h in iterate_parameter_states(actor.backend.optimizer.megatron_optimizer)
        if h.model_param is parameters[name]
    ]
    return held.decode_tensors()[moment]


DP = "data parallel"
TP = "tensor parallel"
TIED = "tied embedding"
CASES: dict[str, tuple[dict[str, Any], int, str, str, str, tuple[str, ...]]] = {
    "dp3": ({"dp": 3}, 1, EMBEDDING, EMBEDDING, DP, ("dp1 pp0 tp0",)),
    "dp2, a moment": (
        {"dp": 2},
        0,
        f"{NORM} exp_avg",
        f"{NORM} exp_avg",
        DP,
        ("dp0 pp0 tp0", "dp1 pp0 tp0"),
    ),
    "tp2": ({"tp": 2}, 1, NORM, NORM, TP, ("dp0 pp0 tp0", "dp0 pp0 tp1")),
    "tp2, sequence parallel, a shared-out moment": (
        {"tp": 2, "sequence_parallel": True, "megatron": SHARDED},
        0,
        f"{NORM} exp_avg_sq",
        f"{NORM} exp_avg_sq",
        TP,
        ("dp0 pp0 tp0", "dp0 pp0 tp1"),
    ),
    "pp2": ({"pp": 2}, 1, "output_layer.weight", EMBEDDING, TIED, ("dp0 pp0 tp0", "dp0 pp1 tp0")),
    "cp2, sharded, bf16": (
        {"cp": 2, "megatron": SHARDED, "dtype": torch.bfloat16},
        1,
        NORM,
        NORM,
        DP,
        ("dp0 pp0 tp0", "dp0 pp0 cp1 tp0"),
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout, rank, changed, tensor, group, ranks", CASES.values(), ids=CASES.keys()
)
def test_a_changed_tensor_is_found_and_named(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    layout: dict[str, Any],
    rank: int,
    changed: str,
    tensor: str,
    group: str,
    ranks: tuple[str, ...],
) -> None:
    results = dist_pool.run(checked, state=state, rank=rank, name=changed, timeout_s=300, **layout)
    assert [report.differences for before, report in results for report in [before]] == [()] * len(
        results
    )
    (found,) = [difference for _, report in results for difference in report.differences]
    assert (found.tensor, found.group, found.ranks, found.num_ranks) == (
        tensor,
        group,
        ranks,
        len(results),
    )
    if group == TIED:
        assert found.max_abs_diff is None
    else:
        assert found.max_abs_diff == pytest.approx(
            MOVES[layout.get("dtype", torch.float32)], rel=1e-3
        )


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout, num_tensors",
    [
        # 4 layers of 8 parameters (4 of them norms), embedding, last norm; tp ranks have also the
        # norms' moments alike.
        ({"tp": 2, "dp": 2, "megatron": OVERLAPPED}, 34 + 1 + 2 * 17),
        # Two layers a rank with 4 norms each, and the last norm on the last stage, each
        # with two moments.
        ({"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}, 8 * 3 + 1),
    ],
    ids=["tp2 dp2 overlapped", "tp2 sequence pp2 vpp2"],
)
def test_sound_replicas_are_alike(
    dist_pool: DistPool, state: dict[str, Tensor], layout: dict[str, Any], num_tensors: int
) -> None:
    results = dist_pool.run(checked, state=state, rank=-1, name="", timeout_s=300, **layout)
    assert all(
        report.differences == () and report.bad_parameters == ()
        for pair in results
        for report in pair
    )
    assert all(report.num_tensors == num_tensors for report in results[0]), "of the first rank"


def marked(world: World, state: dict[str, Tensor], directory: Path) -> ReplicaReport:
    faults.install_fault_plan(
        "mark@actor.after_optimizer_step:who=rank1,nth=2", f"rank{world.rank}", directory
    )
    try:
        actor = make_actor(world, NAME, state)
        shard, plan = share(world, reference.make_batch(), 40)
        for _ in range(2):
            actor.update(shard, plan, reference.TEMPERATURE, "sft")
        report: ReplicaReport = actor.check_replicas()
        return report
    finally:
        faults.install_fault_plan("", "", directory)


@pytest.mark.dist
def test_a_fault_plan_makes_a_replica_differ(
    dist_pool: DistPool, state: dict[str, Tensor], tmp_path: Path
) -> None:
    first, _ = dist_pool.run(marked, dp=2, state=state, directory=tmp_path, timeout_s=300)
    (found,) = first.differences
    assert str(found).startswith(
        f"{EMBEDDING}: dp0 pp0 tp0 and dp1 pp0 tp0 differ from each other (data parallel), by"
    )


def test_a_difference_names_the_minority() -> None:
    found = ReplicaDifference("a.weight", DP, ("dp2 pp0 tp0",), 4, 0.001)
    assert (
        str(found)
        == "a.weight: dp2 pp0 tp0 differs from the other 3 (data parallel), by up to 0.001"
    )


def test_majority() -> None:
    assert split_by_majority([5, 5, 7, 5]) == (5, [2])
    assert split_by_majority([7, 5]) == (None, [0, 1])
    assert split_by_majority([1, 1, 2, 2]) == (None, [0, 1, 2, 3])
    assert split_by_majority([4, 4]) == (4, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 4097, 70_001])
def test_a_digest_sees_every_place_and_is_that_of_the_bytes(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    value = int(compute_tensor_digest(tensor))
    moved = torch.cat([torch.zeros(1, dtype=dtype), tensor])[1:]  # the same bytes at an odd address
    assert (
        int(compute_tensor_digest(moved)) == value
        and int(compute_tensor_digest(tensor.clone())) == value
    )
    for place in {0, count // 2, count - 1} & set(range(count)):
        changed = tensor.clone()
        changed[place] += 1
        assert int(compute_tensor_digest(changed)) != value
    if count > 40_000:  # rows trade places
        size = 8192 * 8 // tensor.element_size()
        if count >= 2 * size:
            swapped = torch.cat([tensor[size : 2 * size], tensor[:size], tensor[2 * size :]])
            assert int(compute_tensor_digest(swapped)) != value


def test_a_digest_is_the_sum_that_its_description_says() -> None:
    """4 words, summed, have the factor 3 f; the 4 bytes after them, weighed by place, 5 f;
    all modulo 2^64.
    """
    # 36 bytes: 4 words and 4 bytes
    tensor = torch.tensor([1, 2, 3, 255, 0, 0, 7, 9, 1], dtype=torch.int32)
    words = [1 + (2 << 32), 3 + (255 << 32), 0, 7 + (9 << 32)]
    tail = 1 * 1
    factor = -7046029254386353131
    expected = (sum(words) * 3 * factor + tail * 5 * factor) % 2**64
    assert int(compute_tensor_digest(tensor)) % 2**64 == expected
