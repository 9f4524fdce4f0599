"""Whose layers: the choice, Transformer Engine's names in plain torch, checkpoints from one
naming to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models_build_jobs as jobs
import pytest
import torch
from dist_pool import DistPool
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.transformer.identity_op import IdentityOp

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import (
    drop_extra_state,
    load_sharded_state,
    save_sharded_state,
)
from rlhf_megatron.ranks.models.layer_specs import (
    LayerNormColumnParallelLinear,
    has_transformer_engine,
    resolve_layer_impl,
)
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.rms_norm_layer import RMSNorm
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.parallel_layout import ParallelLayout

TE = MegatronConfig(transformer_impl="transformer_engine")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


def test_the_choice() -> None:
    cpu = torch.device("cpu")
    cuda = torch.device("cuda", 1)
    assert resolve_layer_impl("auto", cpu) == "local"
    assert resolve_layer_impl("local", cuda) == "local"
    assert resolve_layer_impl("transformer_engine", cpu) == "transformer_engine"
    if has_transformer_engine():
        assert (
            resolve_layer_impl("auto", cuda)
            == resolve_layer_impl("transformer_engine", cuda)
            == "transformer_engine"
        )
        return
    assert resolve_layer_impl("auto", cuda) == "local"
    with pytest.raises(
        ValueError,
        match=r"cannot be imported \(transformer_engine is not installed\); pip install .*or use",
    ):
        resolve_layer_impl("transformer_engine", cuda)


def test_the_norm_is_in_the_linear_layer_and_attention_is_ours(world: World) -> None:
    model = build_megatron_model(jobs.hf_config(), world, torch.float32, TE)
    layer = model.chunks[0].decoder.layers[0]
    assert model.impl == "transformer_engine"
    assert isinstance(layer.input_layernorm, IdentityOp) and isinstance(
        layer.pre_mlp_layernorm, IdentityOp
    )
    for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
        assert type(linear) is LayerNormColumnParallelLinear
        assert torch.equal(linear.layer_norm_weight, torch.ones(32))
    attention = model.chunks[0].decoder.layers[0].self_attention
    assert type(attention.q_layernorm) is type(model.chunks[0].decoder.final_layernorm) is RMSNorm
    assert {name for name, _ in layer.named_parameters()} == {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }


def test_norm_then_matrix_by_hand(world: World) -> None:
    linear = (
        build_megatron_model(jobs.hf_config(), world, torch.float32, TE)
        .chunks[0]
        .decoder.layers[0]
        .mlp.linear_fc1
    )
    linear.eps = 0.5
    with torch.no_grad():
        linear.layer_norm_weight.copy_(torch.arange(32.0))
        linear.weight.fill_(0.0)
        linear.weight[0, 1] = 1.0
        linear.weight[1, 2] = 2.0
        out, bias = linear(torch.full((1, 1, 32), 3.0))
    scale = 3 / 9.5**0.5  # mean of squares 9, with eps 9.5
    assert bias is None
    torch.testing.assert_close(
        out[0, 0, :3], torch.tensor([scale, 4 * scale, 0.0]), atol=1e-6, rtol=0
    )


def test_weight_decay_leaves_the_fused_norm_alone(world: World) -> None:
    overrides = get_standard_config_overrides(OptimizerConfig())
    parameters = collect_named_parameters(
        build_megatron_model(jobs.hf_config(), world, torch.float32, TE).chunks
    )
    exempt = {
        name
        for name, parameter in parameters.items()
        if any(
            key.matches(parameter, name) and value.get("wd_mult") == 0.0
            for key, value in overrides.items()
        )
    }
    assert exempt == {name for name in parameters if "norm" in name} and len(exempt) == 4 * 4 + 1


def save(world: World, directory: Path, megatron: MegatronConfig) -> dict[str, Any]:
    model = jobs.loaded_model(jobs.hf_config(), world, megatron)
    save_sharded_state(directory, _sharded(world, model.chunks))
    return {
        n: getattr(p, "sequence_parallel", False)
        for n, p in collect_named_parameters(model.chunks).items()
    }


def load(world: World, directory: Path, megatron: MegatronConfig) -> dict[str, bool]:
    """Whether each parameter, emptied and loaded, is what the weight table gives."""
    model = jobs.loaded_model(jobs.hf_config(), world, megatron)
    want = {name: p.detach().clone() for name, p in collect_named_parameters(model.chunks).items()}
    with torch.no_grad():
        for parameter in collect_named_parameters(model.chunks).values():
            parameter.fill_(torch.nan)
    state = load_sharded_state(directory, _sharded(world, model.chunks))
    for index, chunk in enumerate(model.chunks):
        # what is missed is no tensor, or still nan
        chunk.load_state_dict(state[f"chunk{index}"], strict=False)
    return {
        name: torch.equal(p, want[name])
        for name, p in collect_named_parameters(model.chunks).items()
    }


def _sharded(world: World, chunks: list[Any]) -> dict[str, Any]:
    metadata = {"dp_cp_group": world.dp_cp_group}
    return {
        f"chunk{index}": drop_extra_state(chunk.sharded_state_dict(metadata=metadata))
        for index, chunk in enumerate(chunks)
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((TE, {"tp": 2, "sequence_parallel": True}), (MegatronConfig(), {"pp": 2, "vpp": 2})),
        ((MegatronConfig(), {"tp": 2}), (TE, {"pp": 2, "vpp": 2})),
        ((TE, {"pp": 2}), (TE, {"cp": 2})),
    ],
    ids=["te-to-local", "local-to-te", "te-to-te"],
)
def test_checkpoints_load_under_the_other_names_and_another_layout(
    dist_pool: DistPool, tmp_path: Path, saved: Any, loaded: Any
) -> None:
    marks = dist_pool.run(
        save, **saved[1], timeout_s=300, directory=tmp_path / "checkpoint", megatron=saved[0]
    )
    ranks = dist_pool.run(
        load, **loaded[1], timeout_s=300, directory=tmp_path / "checkpoint", megatron=loaded[0]
    )
    assert all(all(rank.values()) for rank in ranks)
    fused = {name for rank in ranks for name in rank if "linear_" in name and "norm" in name}
    assert len(fused) == (8 if loaded[0] is TE else 0)
    # finalize_model_grads sums the gradients of what is so marked
    if "sequence_parallel" in saved[1]:
        assert all(is_marked == ("norm" in name) for name, is_marked in marks[0].items())
