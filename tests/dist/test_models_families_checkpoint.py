"""Sharded checkpoints of models with biases load under another layout; biases after a sum are
marked for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from table_samples import StateSource, random_state

from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters, load_hf_weights
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import (
    drop_extra_state,
    load_sharded_state,
    save_sharded_state,
)
from rlhf_megatron.ranks.models.megatron_model_builder import MegatronModel, build_megatron_model
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.torch_dist_source import TorchDistSource

SIZES = {
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA = {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
QWEN2 = {**SIZES, "model_type": "qwen2", "num_key_value_heads": 3}


def built(config: dict[str, Any], world: World) -> MegatronModel:
    model = build_megatron_model(config, world, torch.float32)
    source = StateSource(random_state(config))
    load_hf_weights(
        model.chunks,
        make_weight_table(config, world.layout.tp),
        source,
        world.coordinates.tp,
        world.layout.tp,
    )
    return model


def save(world: World, config: dict[str, Any], directory: Path) -> list[str]:
    """Writes the model; the parameters whose gradients are summed over ranks that
    split the sequence.
    """
    model = built(config, world)
    metadata = {"dp_cp_group": world.dp_cp_group}
    save_sharded_state(
        directory, drop_extra_state(model.chunks[0].sharded_state_dict(metadata=metadata))
    )
    return [
        n
        for n, p in collect_named_parameters(model.chunks).items()
        if getattr(p, "sequence_parallel", False)
    ]


def load(world: World, config: dict[str, Any], directory: Path) -> dict[str, bool]:
    """Whether each parameter, emptied and loaded, is what the weight table gives."""
    model = built(config, world)
    want = {name: p.detach().clone() for name, p in collect_named_parameters(model.chunks).items()}
    with torch.no_grad():
        for parameter in collect_named_parameters(model.chunks).values():
            parameter.fill_(torch.nan)
    (chunk,) = model.chunks
    state = drop_extra_state(chunk.sharded_state_dict(metadata={"dp_cp_group": world.dp_cp_group}))
    # what is missed is no tensor, or still nan
    chunk.load_state_dict(load_sharded_state(directory, state), strict=False)
    return {
        name: torch.equal(p, want[name])
        for name, p in collect_named_parameters(model.chunks).items()
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "saved", "loaded", "num_biases"),
    [
        (LLAMA, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, 4),
        (QWEN2, {"tp": 3, "sequence_parallel": True}, {}, 1),
    ],
    ids=["biased-llama", "qwen2"],
)
def test_checkpoints_of_biases(
    dist_pool: DistPool,
    tmp_path: Path,
    config: dict[str, Any],
    saved: Any,
    loaded: Any,
    num_biases: int,
) -> None:
    directory = tmp_path / "checkpoint"
    marked = dist_pool.run(save, **saved, timeout_s=300, config=config, directory=directory)
    replicated = [rule for rule in make_weight_table(config) if rule.split == "replicated"]
    assert all(
        sorted(names) == sorted(rule.megatron_name for rule in replicated) for names in marked
    )
    source = TorchDistSource(directory)
    state = StateSource(random_state(config))
    for rule in make_weight_table(config):  # one process, whatever layout wrote it
        for found, wanted in zip(
            source.read_hf_tensors(rule), state.read_hf_tensors(rule), strict=True
        ):
            assert torch.equal(found, wanted), rule.megatron_name
        assert source.get_dtype_name(rule) == "float32"
    ranks = dist_pool.run(load, **loaded, timeout_s=300, config=config, directory=directory)
    assert all(all(rank.values()) for rank in ranks), ranks
    biases = {name for rank in ranks for name in rank if name.endswith(".bias")}
    assert len(biases) == num_biases * config["num_hidden_layers"]
