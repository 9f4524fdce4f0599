"""The built model: equal to transformers on one rank (to itself in every layout:
test_models_layouts); its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models_build_jobs as jobs
import pytest
import torch
from dist_pool import DistPool
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.output_heads import HiddenStatesHead, get_head_weight
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_source import RandomWeightSource


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


def hf_model(config: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager"
    ).double()
    source = RandomWeightSource(seed=3, std=0.15)
    weights = {
        hf.name: source.make_random_tensor(hf)
        for rule in make_weight_table(config)
        for hf in rule.hf_tensors
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= (
        {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    )
    return model


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_log_probs_equal_those_of_transformers(
    world: World, model_type: str, is_tied: bool
) -> None:
    config = jobs.hf_config(model_type, is_tied)
    model = jobs.loaded_model(config, world)
    reference = hf_model(config)
    with torch.no_grad():
        got = jobs.run(world, model, forward_only=True)
        batches = jobs.micro_batches(ParallelLayout(1), jobs.LENGTHS)
        for (_, log_probs), batch, lengths in zip(got, batches, jobs.LENGTHS, strict=True):
            documents = batch.ids[0, : sum(lengths)].split(lengths)
            want = torch.cat([_log_probs(reference, document) for document in documents])
            torch.testing.assert_close(log_probs.double(), want, atol=2e-5, rtol=0)


def _log_probs(reference: torch.nn.Module, document: Tensor) -> Tensor:
    logits = reference(document[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, document[1:, None])[:, 0]


def test_last_stage_keeps_megatrons_output_layer(world: World) -> None:
    untied = build_megatron_model(jobs.hf_config(), world, torch.float32)
    chunk = untied.chunks[0]
    assert type(chunk.output_layer) is HiddenStatesHead
    assert get_head_weight(chunk) is chunk.output_layer.weight and get_head_weight(chunk).shape == (
        37,
        32,
    )
    state = chunk.sharded_state_dict(metadata={"dp_cp_group": world.dp_group})
    assert state["output_layer.weight"].global_shape == (37, 32)
    tied = build_megatron_model(jobs.hf_config(is_tied=True), world, torch.float32).chunks[0]
    assert tied.output_layer.weight is None
    assert get_head_weight(tied) is tied.embedding.word_embeddings.weight
    chunk.post_process = False
    with pytest.raises(ValueError, match="last pipeline stage only"):
        get_head_weight(chunk)


def test_bfloat16_parameters_and_activations(world: World) -> None:
    model = build_megatron_model(jobs.hf_config(), world, torch.bfloat16)
    assert {p.dtype for p in model.chunks[0].parameters()} == {torch.bfloat16}
    batch = jobs.micro_batches(ParallelLayout(1), jobs.LENGTHS)[0]
    for parameter in model.chunks[0].parameters():
        torch.nn.init.constant_(parameter, 0.01)
    documents = make_packed_documents(batch.borders, batch.longest, batch.positions)
    hidden = model.chunks[0](batch.ids, batch.positions, None, packed_seq_params=documents)
    assert hidden.dtype == torch.bfloat16


def test_padded_batches_are_refused(world: World) -> None:
    chunk = build_megatron_model(jobs.hf_config(), world, torch.float32).chunks[0]
    with pytest.raises(ValueError, match="made by make_packed_documents"):
        chunk(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None)


def refused(world: World, changes: dict[str, Any], megatron: MegatronConfig | None = None) -> str:
    try:
        build_megatron_model({**jobs.hf_config(), **changes}, world, torch.float32, megatron)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_sizes_that_do_not_divide_are_all_named(dist_pool: DistPool) -> None:
    changes = {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1}
    message = dist_pool.run(refused, tp=2, pp=2, changes=changes)[0]
    assert "num_layers (3) must be a multiple of pipeline_model_parallel_size (2)" in message
    assert "num_attention_heads (3) must be a multiple of tensor_model_parallel_size (2)" in message
    assert "num_query_groups (1)" in message and "ffn_hidden_size" not in message


@pytest.mark.dist
def test_layers_are_spread_over_stages_and_their_chunks(dist_pool: DistPool) -> None:
    message = dist_pool.run(refused, pp=2, vpp=2, changes={"num_hidden_layers": 6}, timeout_s=300)[
        0
    ]
    wanted = (
        "num_layers (6) must be a multiple of pipeline_model_parallel_size"
        " x virtual_pipeline_model_parallel_size"
    )
    assert message.startswith(wanted + " (2 x 2)")


def full(method: Any, num_layers: int | None) -> MegatronConfig:
    return MegatronConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=num_layers
    )


def test_recompute_that_would_run_past_a_chunk_or_be_ignored_is_refused(world: World) -> None:
    assert "recompute_num_layers (3) must divide the layers of a model chunk (4 =" in refused(
        world, {}, full("uniform", 3)
    )
    assert "(5) must be at most the layers of a model chunk (4 =" in refused(
        world, {}, full("block", 5)
    )
    assert "full recompute needs recompute_method (None)" in refused(world, {}, full(None, 1))
    assert "recompute_num_layers (None)" in refused(world, {}, full("block", None))
    assert refused(world, {}, full("uniform", 2)) == refused(world, {}, full("block", 3)) == ""
    fused = MegatronConfig(
        recompute_granularity="selective",
        recompute_modules=("layernorm", "mlp"),
        transformer_impl="transformer_engine",
    )
    assert "recompute_modules (layernorm, mlp) must not have layernorm" in refused(world, {}, fused)


def calls_of_a_step(world: World, megatron: MegatronConfig) -> dict[str, list[int]]:
    """How often each layer's modules run in forward and backward of one micro-batch."""
    model = jobs.loaded_model(jobs.hf_config(), world, megatron)
    layers = model.chunks[0].decoder.layers
    modules = ("input_layernorm", "self_attention", "self_attention.core_attention", "mlp")
    calls = {name: [0] * len(layers) for name in modules}

    def count(name: str, index: int) -> Any:
        def hook(*unused: Any) -> None:
            calls[name][index] += 1

        return hook

    for index, layer in enumerate(layers):
        for name in modules:
            layer.get_submodule(name).register_forward_hook(count(name, index))
    jobs.with_gradient_buffers(model, world)
    jobs.run(world, model, forward_only=False, lengths=[[5, 3]])
    return calls


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({}, {}),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
            "all",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            "first",
        ),
        ({"recompute_granularity": "selective"}, {"self_attention.core_attention"}),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
            {"input_layernorm"},
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, {"mlp"}),
    ],
    ids=["keep", "uniform", "block", "core_attn", "layernorm", "mlp"],
)
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_what_is_computed_again_is_what_was_asked_for(
    world: World, impl: Any, settings: Any, again: Any
) -> None:
    if impl == "transformer_engine" and "layernorm" in settings.get("recompute_modules", ()):
        return  # refused, see above
    for name, calls in calls_of_a_step(
        world, MegatronConfig(transformer_impl=impl, **settings)
    ).items():
        if again == "all":
            assert calls == [2, 2, 2, 2]
        elif again == "first":
            assert calls == [2, 1, 1, 1]
        else:
            assert calls == [2 if name in again else 1] * 4, name
