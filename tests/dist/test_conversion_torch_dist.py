"""torch_dist written here without a model is loaded by megatron-core's own loader, sharded, and
read back from its own writer, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from megatron.core import dist_checkpointing
from safetensors.torch import save_file
from table_samples import SMALL_QWEN3, random_state

from benchmarks.parity.cases import EXPERT_FAMILIES, make_state
from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_weights, load_weights_on_rank
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import drop_extra_state, save_sharded_state
from rlhf_megatron.ranks.models.megatron_model_builder import MegatronModel, build_megatron_model
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.conversion.conversion_targets import TorchDistTarget
from rlhf_megatron.weights.conversion.conversion_writer import convert_model
from rlhf_megatron.weights.conversion.stored_model import open_stored_model
from rlhf_megatron.weights.conversion.weight_comparison import verify_weight_bits
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.weight_source import WeightSource

EXPERTS_AND_STAGES = {"tp": 2, "sequence_parallel": True, "pp": 2, "ep": 2, "etp": 1}
CONFIGS = {
    "dense": {**SMALL_QWEN3, "vocab_size": 22},
    "qwen3_moe": EXPERT_FAMILIES["qwen3_moe"],
    "deepseek_v3": EXPERT_FAMILIES["deepseek_v3"],
}


def build(
    config: dict[str, Any], world: World, source: WeightSource
) -> tuple[MegatronModel, dict[str, Any]]:
    """A model with the source's weights, and its sharded state under the keys of its chunks."""
    model = build_megatron_model(config, world, torch.bfloat16)
    load_weights_on_rank(model.chunks, make_weight_table(config, world.layout.tp), source, world)
    metadata = {"dp_cp_group": world.dp_cp_group}
    states = [
        drop_extra_state(chunk.sharded_state_dict(metadata=metadata)) for chunk in model.chunks
    ]
    return model, {f"model{number}": state for number, state in enumerate(states)}


def load(world: World, config: dict[str, Any], hf: Path, directory: Path) -> list[str]:
    """Weights that megatron-core's own loader gets wrong."""
    model, state = build(config, world, open_stored_model(hf).source)
    wanted = {
        name: tensor.detach().clone()
        for name, tensor in collect_named_weights(model.chunks).items()
    }
    with torch.no_grad():
        for tensor in collect_named_weights(model.chunks).values():
            tensor.fill_(torch.nan)
    loaded = dist_checkpointing.load(state, str(directory))
    for number, chunk in enumerate(model.chunks):
        # what is missed is no tensor, or still nan
        chunk.load_state_dict(loaded[f"model{number}"], strict=False)
    return [
        name
        for name, tensor in collect_named_weights(model.chunks).items()
        if not torch.equal(tensor, wanted[name])
    ]


def save(world: World, config: dict[str, Any], hf: Path, directory: Path) -> None:
    _, state = build(config, world, open_stored_model(hf).source)
    save_sharded_state(directory, state)


def write_hf(directory: Path, config: dict[str, Any]) -> Path:
    name = next((name for name, own in EXPERT_FAMILIES.items() if own is config), None)
    state = random_state(config) if name is None else make_state(name)
    directory.mkdir()
    kept = {key: "e_score" in key for key in state}
    save_file(
        {k: t if kept[k] else t.bfloat16() for k, t in state.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "axes", "is_stacked"),
    [
        ("dense", {"tp": 2, "pp": 2, "vpp": 2}, True),
        ("qwen3_moe", EXPERTS_AND_STAGES, False),
        ("deepseek_v3", EXPERTS_AND_STAGES, False),
    ],
)
def test_both_ways(
    dist_pool: DistPool, tmp_path: Path, family: str, axes: dict[str, Any], is_stacked: bool
) -> None:
    config = CONFIGS[family]
    hf = write_hf(tmp_path / "hf", config)
    source = open_stored_model(hf)
    items = source.make_conversion_items()
    convert_model(
        source, items, TorchDistTarget(source, items, "local", is_stacked), tmp_path / "ours", 2
    )
    release = tmp_path / "ours" / "release"
    wrong = dist_pool.run(load, **axes, timeout_s=300, config=config, hf=hf, directory=release)
    assert wrong == [[]] * len(wrong)
    dist_pool.run(save, **axes, timeout_s=300, config=config, hf=hf, directory=tmp_path / "theirs")
    verify_weight_bits(
        source, items, open_stored_model(tmp_path / "theirs", is_strict=True, config_directory=hf)
    )
