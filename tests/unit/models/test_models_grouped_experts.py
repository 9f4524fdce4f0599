"""Experts as grouped products, against one product after the other; their names, and kernels that
are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_weights
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import drop_extra_state
from rlhf_megatron.ranks.models import transformer_config
from rlhf_megatron.ranks.models.grouped_experts import apply_grouped_linear, pad_expert_groups
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


def test_groups_are_filled_up_to_sixteens() -> None:
    """3, 0, 16 and 17 tokens: groups of 16, 16, 16 and 32 rows."""
    places, ends = pad_expert_groups(torch.tensor([3, 0, 16, 17]), 36)
    assert ends.tolist() == [16, 32, 48, 80] and ends.dtype == torch.int32
    assert places.tolist() == [*range(3), *range(32, 48), *range(48, 65)]


@pytest.mark.parametrize(
    "counts", [(5, 0, 20, 7), (0, 0, 0, 0)], ids=["an expert without tokens", "no tokens"]
)
def test_products_and_gradients_are_those_of_each_expert(counts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    num_tokens = sum(counts)
    tokens = torch.randn(num_tokens, 8, requires_grad=True)
    weights = [torch.randn(12, 8, requires_grad=True) for _ in counts]
    places, ends = pad_expert_groups(torch.tensor(counts), num_tokens)
    filled = torch.zeros(int(ends[-1]) + 16, 8).index_copy(0, places, tokens)
    found = apply_grouped_linear(filled, ends, weights).index_select(0, places)
    expected = torch.cat([x @ w.t() for x, w in zip(tokens.split(counts), weights, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn_like(found)
    of_found, of_expected = (
        torch.autograd.grad(y, [tokens, *weights], cotangent) for y in (found, expected)
    )
    for one, other, count in zip(of_found, of_expected, (1, *counts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert count or not one.any(), "exactly zero where no token came"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"moe_token_dispatcher_type": "flex"},
            r"\(flex\) needs DeepEP, which runs on CUDA only, .*; use alltoall",
        ),
        (
            {"moe_permute_fusion": True},
            r"\(true\) needs Transformer Engine 2.1 or newer, .* is cpu; set it to false",
        ),
    ],
)
def test_kernels_that_are_not_there_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    megatron = MegatronConfig(**change)
    # one rank shares nothing out
    monkeypatch.setattr(transformer_config, "_check_expert_settings", lambda *_: None)
    with pytest.raises(ValueError, match=message):
        build_megatron_model(EXPERT_FAMILIES["qwen3_moe"], world, torch.float32, megatron)
    with pytest.raises(
        ValueError, match=r"cannot be used \(\w+ is not installed\); .*(git clone|pip install)"
    ):
        transformer_config._check_required_packages(megatron, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_grouped_experts_have_transformer_engines_names(world: World, family: str) -> None:
    """Tables, files and checkpoints know them under those of experts one after the other."""
    megatron = MegatronConfig(transformer_impl="transformer_engine", moe_grouped_gemm=True)
    chunk = build_megatron_model(EXPERT_FAMILIES[family], world, torch.float32, megatron).chunks[0]
    names = {name for name, _ in chunk.named_parameters()}
    assert {
        f"decoder.layers.3.mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(8)
    } <= names
    assert not any("local_experts" in name for name in names)
    table = make_weight_table(EXPERT_FAMILIES[family], 1, "transformer_engine")
    assert collect_named_weights([chunk]).keys() == {rule.megatron_name for rule in table}
    metadata = {"dp_cp_group": world.dp_cp_group}
    other = build_megatron_model(
        EXPERT_FAMILIES[family], world, torch.float32, replace(megatron, moe_grouped_gemm=False)
    )
    found, expected = (
        {
            entry.key
            for entry in drop_extra_state(each.sharded_state_dict(metadata=metadata)).values()
        }
        for each in (chunk, other.chunks[0])
    )
    assert found == expected


def test_no_object_of_transformer_engine_goes_into_a_checkpoint() -> None:
    """Its grouped experts have one an expert, under a name with a number."""
    objects = dict.fromkeys(
        ("a.linear_fc1._extra_state", "a.linear_fc1._extra_state7", "b._extra_state12"), None
    )
    assert drop_extra_state({**objects, "a.linear_fc1.weight7": 1}) == {"a.linear_fc1.weight7": 1}


@pytest.mark.parametrize(
    "family, impl", [("qwen3_moe", "local"), ("gpt_oss", "transformer_engine")]
)
def test_grouped_experts_are_those_one_after_the_other(
    world: World, family: str, impl: Any
) -> None:
    """Outputs and all gradients, of experts with biases and without,
    some of which no token meets.
    """
    torch.manual_seed(1)
    counts = torch.tensor([5, 0, 20, 3, 0, 2, 9, 1])
    hidden = torch.randn(40, 64)
    probs = torch.rand(40)
    weights: dict[str, torch.Tensor] = {}
    found = []
    for is_grouped in (False, True):
        megatron = MegatronConfig(transformer_impl=impl, moe_grouped_gemm=is_grouped)
        chunk = build_megatron_model(
            EXPERT_FAMILIES[family], world, torch.float32, megatron
        ).chunks[0]
        parameters = {
            name: p
            for name, p in collect_named_weights([chunk]).items()
            if ".3.mlp.experts." in name
        }
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.setdefault(name, torch.randn_like(parameter)))
        inputs = [hidden.clone().requires_grad_(), probs.clone().requires_grad_()]
        output, _ = chunk.decoder.layers[3].mlp.experts(inputs[0], counts, inputs[1])
        output.square().mean().backward()
        grads = {
            name: torch.zeros(()) if p.grad is None else p.grad for name, p in parameters.items()
        }
        found.append(
            [
                output.detach(),
                *(each.grad for each in inputs),
                *(grads[name] for name in sorted(grads)),
            ]
        )
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert (one - other).norm() <= 2e-6 * one.norm()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_no_layer_keeps_the_graph_of_a_pass_that_is_over(world: World, dispatcher: str) -> None:
    """Under full recompute it would keep the layer's input, and the input's gradient."""
    how: Any = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    megatron = MegatronConfig(moe_token_dispatcher_type=dispatcher, **how)  # type: ignore[arg-type]
    chunk = build_megatron_model(
        EXPERT_FAMILIES["qwen3_moe"], world, torch.float32, megatron
    ).chunks[0]
    positions = torch.arange(8)
    documents = make_packed_documents(torch.tensor([0, 8], dtype=torch.int32), 8, positions)
    out = chunk(
        torch.zeros_like(positions)[None], positions[None], None, packed_seq_params=documents
    )
    out.sum().backward()
    kept = [
        module.mlp.token_dispatcher
        for module in chunk.decoder.layers
        if hasattr(module.mlp, "token_dispatcher")
    ]
    assert len(kept) == 3
    for each in kept:
        alive = [
            name
            for name, value in vars(each).items()
            if torch.is_tensor(value) and value.grad_fn is not None
        ]
        assert not alive
