"""What layers keep for the backward pass: the formula against tensors that autograd saves, and what
follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from places import ROOT

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.models import packed_attention
from rlhf_megatron.ranks.models.flash_attention import FlashKernel
from rlhf_megatron.ranks.models.fused_kernel_choice import KernelChoice
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.ranks.workers.peak_memory import (
    TrainedModelSpec,
    estimate_layer_activation_bytes,
    estimate_stage_activation_bytes,
    estimate_state_bytes,
    resolve_memory_settings,
)
from rlhf_megatron.runtime.rank_roles import RoleBuilder
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout

GIB = 1 << 30
GPU = 80 * 10**9
TOKENS = 256
TINY = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}
LATENT = {  # its layers have no experts, of which little was measured
    **EXPERT_FAMILIES["deepseek_v3"],
    "vocab_size": 96,
    "first_k_dense_replace": 3,
    "intermediate_size": 192,
    "max_position_embeddings": 4096,
}
QWEN3_8B = {
    **TINY,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
FULL = MegatronConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


class Flash(torch.autograd.Function):
    """Keeps what flash attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[:2]))
        return out


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


def saved_bytes(world: World, hf_config: dict[str, Any], megatron: MegatronConfig) -> int:
    """Storages that autograd holds on to after a forward pass, parameters not counted."""
    model = build_megatron_model(hf_config, world, torch.float32, megatron)
    for module in model.chunks[0].modules():
        if hasattr(module, "config"):
            module.config.bias_activation_fusion = True  # type: ignore[union-attr]  # as on a GPU
    seen: dict[int, Any] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.chunks[0].parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    positions = torch.arange(TOKENS)
    documents = make_packed_documents(
        torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS, positions
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.chunks[0](
            torch.zeros_like(positions)[None], positions[None], None, packed_seq_params=documents
        )
    return sum(storage.nbytes() for key, storage in seen.items() if key not in own)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "deepseek_v3"])
def test_the_formula_is_what_autograd_saves(
    world: World, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = LATENT if model_type == "deepseek_v3" else {**TINY, "model_type": model_type}
    monkeypatch.setattr(
        packed_attention,
        "choose_flash_kernel",
        lambda *_: FlashKernel(
            KernelChoice("fake"), lambda q, k, v, *_: Flash.apply(q, k, v.contiguous())
        ),
    )
    for megatron in (MegatronConfig(), FULL):
        few, many = (saved_bytes(world, {**tiny, "num_hidden_layers": n}, megatron) for n in (2, 3))
        models = [
            TrainedModelSpec({**tiny, "num_hidden_layers": n}, torch.float32, TOKENS)
            for n in (2, 3)
        ]
        planned = [
            estimate_stage_activation_bytes(model, megatron, ParallelLayout(1), "local", 0)
            for model in models
        ]
        assert many - few == pytest.approx(planned[1] - planned[0], rel=0.03), megatron


def test_a_layer_of_qwen3_8b_is_as_measured() -> None:
    model = TrainedModelSpec(QWEN3_8B, torch.bfloat16, 16384)
    assert estimate_layer_activation_bytes(
        model, ParallelLayout(1), "local"
    ) / GIB == pytest.approx(2.25, rel=0.01)
    assert estimate_layer_activation_bytes(
        model, ParallelLayout(1), "transformer_engine"
    ) / GIB == pytest.approx(2.10, rel=0.01)
    assert estimate_stage_activation_bytes(
        model, MegatronConfig(), ParallelLayout(1), "local", 0
    ) == 36 * estimate_layer_activation_bytes(model, ParallelLayout(1), "local")
    sequence = ParallelLayout(2, tp=2, sequence_parallel=True)
    assert (
        estimate_layer_activation_bytes(model, sequence, "local")
        == estimate_layer_activation_bytes(model, ParallelLayout(1), "local") / 2
    )
    stages = ParallelLayout(4, pp=4)
    kept = [
        estimate_stage_activation_bytes(model, MegatronConfig(), stages, "local", stage)
        for stage in range(4)
    ]
    layer = estimate_layer_activation_bytes(model, ParallelLayout(1), "local")
    assert kept == [37 * layer, 28 * layer, 19 * layer, 9 * layer], (
        "gradients of a layer where there is no head"
    )


def test_states_of_qwen3_8b() -> None:
    model = TrainedModelSpec(QWEN3_8B, torch.bfloat16, 16384)
    assert estimate_state_bytes(model, MegatronConfig(), ParallelLayout(8), 0) == 18 * 8190735360
    shared = MegatronConfig(use_distributed_optimizer=True)
    assert (
        estimate_state_bytes(model, shared, ParallelLayout(8), 0)
        == 6 * 8190735360 + 12 * 8190735360 // 8
    )


@pytest.mark.parametrize(
    ("megatron", "num_ranks", "tokens", "device_bytes", "expected"),
    [
        (
            MegatronConfig(),
            8,
            16384,
            0,
            {"use_distributed_optimizer": False},
        ),  # CPUs keep their bits
        (
            MegatronConfig(recompute_granularity="none"),
            1,
            16384,
            GPU,
            {"use_distributed_optimizer": False},
        ),
        (
            MegatronConfig(tensor_model_parallel_size=2),
            8,
            512,
            GPU,
            {"use_distributed_optimizer": True},
        ),
        (
            MegatronConfig(tensor_model_parallel_size=2),
            8,
            16384,
            GPU,
            {
                "use_distributed_optimizer": True,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
        (
            MegatronConfig(use_distributed_optimizer=False, recompute_granularity="selective"),
            8,
            16384,
            GPU,
            {"use_distributed_optimizer": False, "recompute_granularity": "selective"},
        ),
    ],
)
def test_what_is_left_to_us_fits_the_device(
    megatron: MegatronConfig,
    num_ranks: int,
    tokens: int,
    device_bytes: int,
    expected: dict[str, Any],
) -> None:
    found = resolve_memory_settings(
        megatron, num_ranks, [TrainedModelSpec(QWEN3_8B, torch.bfloat16, tokens)], device_bytes
    )
    cleared = replace(megatron, recompute_granularity=None)
    assert found == replace(cleared, **expected)


def test_the_shipped_qwen3_8b_needs_less_than_72_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_run_config(ROOT / "configs/qwen3_8b.yaml", with_files=False).config
    hf_config = read_hf_config(ROOT / config.model.path)
    assert {**hf_config, **QWEN3_8B, "max_position_embeddings": 40960} == hf_config, (
        "the model that was measured"
    )
    megatron = RoleBuilder(config).with_settled_layouts(GPU).config.actor.megatron
    assert (megatron.use_distributed_optimizer, megatron.recompute_granularity) == (True, "full")
    model = TrainedModelSpec(hf_config, torch.bfloat16, 16384)
    layout = make_parallel_layout(megatron, 8)
    states = estimate_state_bytes(model, megatron, layout, 0)
    kept = estimate_stage_activation_bytes(model, megatron, layout, "local", 0)
    assert 30e9 < states + kept < 45e9 and kept < 5e9, (
        "72 GB less 27 GB, of which the head takes a part"
    )
