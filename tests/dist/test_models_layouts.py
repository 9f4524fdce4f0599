"""The model in every layout equals the model on one rank: log-probs by token, gradients by
parameter, marks.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import models_build_jobs as jobs
import pytest
import torch
from dist_pool import DistPool
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.weight_table import WeightRule, join_shards

TE = MegatronConfig(transformer_impl="transformer_engine")
LOCAL = MegatronConfig(transformer_impl="local")
UNIFORM = MegatronConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
BLOCK = MegatronConfig(
    recompute_granularity="full", recompute_method="block", recompute_num_layers=1
)
SELECTIVE = MegatronConfig(
    recompute_granularity="selective", recompute_modules=("core_attn", "layernorm", "mlp")
)
TE_SELECTIVE = MegatronConfig(
    recompute_granularity="selective",
    recompute_modules=("core_attn", "mlp"),
    transformer_impl="transformer_engine",
)
TE_UNIFORM = MegatronConfig(
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=1,
    transformer_impl="transformer_engine",
)

TP2 = {"tp": 2}
TP2_SEQUENCE = {"tp": 2, "sequence_parallel": True}
PP2 = {"pp": 2}
PP2_VPP2 = {"pp": 2, "vpp": 2}
CP2 = {"cp": 2}


@functools.cache
def one_rank(pool: DistPool, is_tied: bool, data: str, model_type: str) -> dict[str, Any]:
    arguments = {"is_tied": is_tied, "lengths": getattr(jobs, data), "model_type": model_type}
    return pool.run(jobs.forward_and_backward, timeout_s=300, **arguments)[0]


def check(
    pool: DistPool,
    layout: dict[str, Any],
    is_tied: bool = False,
    data: str = "LENGTHS",
    megatron: MegatronConfig = LOCAL,
    model_type: str = "qwen3",
) -> None:
    """Every rank's part of a layout against the model on one rank,
    whose documents are not padded.
    """
    want = one_rank(pool, is_tied, data, model_type)
    arguments = {
        "is_tied": is_tied,
        "lengths": getattr(jobs, data),
        "megatron": megatron,
        "model_type": model_type,
    }
    ranks = pool.run(jobs.forward_and_backward, **layout, timeout_s=300, **arguments)
    for kind in ("evaluated", "trained"):
        _check_log_probs(ranks, want, kind, layout)
    config = jobs.hf_config(model_type, is_tied)
    table = make_weight_table(config, layout.get("tp", 1), _impl(megatron))
    local_table = make_weight_table(config, layout.get("tp", 1))
    names = set()
    for rule, local_rule in zip(table, local_table, strict=True):
        _check_gradient(ranks, want["gradients"][local_rule.megatron_name], rule)
        names.add(rule.megatron_name)
    if is_tied and layout.get("pp", 1) > 1:
        _check_tied_copies(ranks, layout["pp"])
        names.add("output_layer.weight")
    assert names == {name for rank in ranks for name in rank["gradients"]}


def _impl(megatron: MegatronConfig) -> Any:
    return "transformer_engine" if megatron.transformer_impl == "transformer_engine" else "local"


def _check_log_probs(
    ranks: list[dict[str, Any]], want: dict[str, Any], kind: str, layout: dict[str, Any]
) -> None:
    last_stage = [rank for rank in ranks if rank["coordinates"].pp == layout.get("pp", 1) - 1]
    assert all(not rank[kind] for rank in ranks if rank not in last_stage)
    for tp in range(layout.get("tp", 1)):
        shares = [rank[kind] for rank in last_stage if rank["coordinates"].tp == tp]
        assert len(shares) == layout.get("cp", 1)
        for parts, (numbers, expected) in zip(zip(*shares, strict=True), want[kind], strict=True):
            found = torch.cat([part[0] for part in parts])
            assert found.sort().values.equal(numbers), "each token is on one cp rank"
            got = torch.cat([part[1] for part in parts])[found.argsort()]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def _check_gradient(ranks: list[dict[str, Any]], expected: Tensor, rule: WeightRule) -> None:
    owners = [rank for rank in ranks if rule.megatron_name in rank["gradients"]]
    # Unmarked shards would be left out of the gradient norm on all ranks but tp 0.
    assert {rank["marks"][rule.megatron_name] for rank in owners} == {rule.split != "replicated"}
    num_cp = 1 + max(rank["coordinates"].cp for rank in ranks)
    num_tp = 1 + max(rank["coordinates"].tp for rank in ranks)
    assert len(owners) == num_cp * num_tp
    for cp in range(num_cp):
        shards = [
            rank["gradients"][rule.megatron_name] for rank in owners if rank["coordinates"].cp == cp
        ]
        got = join_shards(rule.split, shards)
        assert not bool(got[expected.shape[0] :].any()), (
            "rows of the padded vocabulary have a gradient"
        )
        for shard in shards if rule.split == "replicated" else []:
            assert torch.equal(shard, got), f"{rule.megatron_name} differs between tp ranks"
        error = (got[: expected.shape[0]] - expected).norm() / expected.norm()
        assert error < 2e-5, (rule.megatron_name, float(error))


def _check_tied_copies(ranks: list[dict[str, Any]], num_stages: int) -> None:
    """Both copies of the tied weight carry the sum of both gradients."""
    per_stage = len(ranks) // num_stages
    for first, last in zip(ranks[:per_stage], ranks[-per_stage:], strict=True):
        embedding = first["gradients"]["embedding.word_embeddings.weight"]
        assert torch.equal(embedding, last["gradients"]["output_layer.weight"])


def _id(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items())
    if isinstance(value, MegatronConfig):
        recompute = value.recompute_method or value.recompute_granularity or "keep"
        return f"{value.transformer_impl}-{recompute}"
    return str(value)


def _quick(quick: list[tuple[Any, ...]], *axes: list[Any]) -> list[Any]:
    """All combinations of `axes`; those that are not `quick` are long: parity meets each of their
    values as well.
    """
    cells = list(itertools.product(*axes))
    assert all(cell in cells for cell in quick)
    return [pytest.param(*cell, marks=[pytest.mark.long] * (cell not in quick)) for cell in cells]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "is_tied"),
    _quick(
        [(TP2, False), (TP2_SEQUENCE, True), (PP2, True), (PP2_VPP2, True), (CP2, False)],
        [TP2, TP2_SEQUENCE, PP2, PP2_VPP2, CP2],
        [False, True],
    ),
    ids=_id,
)
def test_each_axis_alone(dist_pool: DistPool, layout: dict[str, Any], is_tied: bool) -> None:
    check(dist_pool, layout, is_tied)


@pytest.mark.dist
@pytest.mark.parametrize("data", ["RAGGED", "EQUAL"])
def test_documents_shorter_than_their_chunks_and_many_of_one_length(
    dist_pool: DistPool, data: str
) -> None:
    check(dist_pool, CP2, data=data)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "megatron"),
    _quick(
        [(TP2_SEQUENCE, SELECTIVE), (PP2_VPP2, BLOCK), (CP2, UNIFORM)],
        [TP2_SEQUENCE, PP2_VPP2, CP2],
        [UNIFORM, BLOCK, SELECTIVE],
    ),
    ids=_id,
)
def test_recompute(dist_pool: DistPool, layout: dict[str, Any], megatron: MegatronConfig) -> None:
    check(dist_pool, layout, megatron=megatron)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "megatron"),
    [
        *(({}, TE), (TP2_SEQUENCE, TE), (PP2_VPP2, TE_SELECTIVE), (CP2, TE_UNIFORM)),
        pytest.param(TP2, TE, marks=pytest.mark.long),
        pytest.param(TP2_SEQUENCE, TE_UNIFORM, marks=pytest.mark.long),
    ],
    ids=_id,
)
def test_layers_named_as_transformer_engine_does(
    dist_pool: DistPool, layout: dict[str, Any], megatron: MegatronConfig
) -> None:
    check(dist_pool, layout, megatron=megatron)


@pytest.mark.dist
@pytest.mark.parametrize("megatron", [LOCAL, TE], ids=_id)
def test_biases_of_the_attention(dist_pool: DistPool, megatron: MegatronConfig) -> None:
    check(dist_pool, TP2_SEQUENCE, megatron=megatron, model_type="qwen2")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "is_tied", "data", "megatron"),
    [
        ({"tp": 2, "pp": 2}, True, "LENGTHS", LOCAL),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, False, "RAGGED", SELECTIVE),
        ({"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}, True, "LENGTHS", TE_UNIFORM),
        ({"pp": 2, "vpp": 2, "cp": 2}, True, "RAGGED", BLOCK),
        ({"cp": 4}, False, "EQUAL", TE_SELECTIVE),
    ],
    ids=_id,
)
def test_axes_together(
    dist_pool: DistPool, layout: dict[str, Any], is_tied: bool, data: str, megatron: MegatronConfig
) -> None:
    check(dist_pool, layout, is_tied, data, megatron)
