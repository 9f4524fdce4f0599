"""The built model: equal to transformers on one rank (to itself in every layout: test_models_layouts); its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models_build_jobs as jobs
import pytest
import torch
from dist_pool import DistPool
from torch import Tensor

from rlhf_megatron.checkpoint.random_init import RandomSource
from rlhf_megatron.models.attention import packed_documents
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.head import HiddenStatesHead, head_weight
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.world import World, create_world, destroy_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(Layout(1), torch.device("cpu"))
    destroy_world()


def hf_model(config: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").double()
    source = RandomSource(seed=3, std=0.15)
    weights = {hf.name: source.tensor(hf) for rule in table_for(config) for hf in rule.hf}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    return model


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_log_probs_equal_those_of_transformers(world: World, model_type: str, is_tied: bool) -> None:
    config = jobs.hf_config(model_type, is_tied)
    model = jobs.loaded_model(config, world)
    reference = hf_model(config)
    with torch.no_grad():
        got = jobs.run(world, model, forward_only=True)
        batches = jobs.micro_batches(Layout(1), jobs.LENGTHS)
        for (_, log_probs), batch, lengths in zip(got, batches, jobs.LENGTHS, strict=True):
            documents = batch.ids[0, : sum(lengths)].split(lengths)
            want = torch.cat([_log_probs(reference, document) for document in documents])
            torch.testing.assert_close(log_probs.double(), want, atol=2e-5, rtol=0)


def _log_probs(reference: torch.nn.Module, document: Tensor) -> Tensor:
    logits = reference(document[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, document[1:, None])[:, 0]


def test_last_stage_keeps_megatrons_output_layer(world: World) -> None:
    untied = build_model(jobs.hf_config(), world, torch.float32)
    chunk = untied.chunks[0]
    assert type(chunk.output_layer) is HiddenStatesHead
    assert head_weight(chunk) is chunk.output_layer.weight and head_weight(chunk).shape == (37, 32)
    state = chunk.sharded_state_dict(metadata={"dp_cp_group": world.dp_group})
    assert state["output_layer.weight"].global_shape == (37, 32)
    tied = build_model(jobs.hf_config(is_tied=True), world, torch.float32).chunks[0]
    assert tied.output_layer.weight is None
    assert head_weight(tied) is tied.embedding.word_embeddings.weight
    chunk.post_process = False
    with pytest.raises(ValueError, match="last pipeline stage only"):
        head_weight(chunk)


def test_bfloat16_parameters_and_activations(world: World) -> None:
    model = build_model(jobs.hf_config(), world, torch.bfloat16)
    assert {p.dtype for p in model.chunks[0].parameters()} == {torch.bfloat16}
    batch = jobs.micro_batches(Layout(1), jobs.LENGTHS)[0]
    for parameter in model.chunks[0].parameters():
        torch.nn.init.constant_(parameter, 0.01)
    documents = packed_documents(batch.borders, batch.longest, batch.positions)
    hidden = model.chunks[0](batch.ids, batch.positions, None, packed_seq_params=documents)
    assert hidden.dtype == torch.bfloat16


def test_padded_batches_are_refused(world: World) -> None:
    chunk = build_model(jobs.hf_config(), world, torch.float32).chunks[0]
    with pytest.raises(ValueError, match="made by packed_documents"):
        chunk(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None)


def refused(world: World, changes: dict[str, Any]) -> str:
    try:
        build_model({**jobs.hf_config(), **changes}, world, torch.float32)
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
