"""The value head: its rules, its place in a model, its numbers. In layouts: test_workers_critic."""

from __future__ import annotations

from collections.abc import Iterator

import models_build_jobs as jobs
import pytest
import torch
from table_samples import SMALL_LLAMA, SMALL_QWEN2, SMALL_QWEN3, tied

from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.output_heads import ValueHead, get_value_head
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import check_tensor_parallel_split, select_stage_rules

FAMILIES = {"qwen3": SMALL_QWEN3, "llama": SMALL_LLAMA, "qwen2": SMALL_QWEN2}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_a_token_classifier(name: str, is_tied: bool) -> None:
    import transformers

    hf_config = {**FAMILIES[name], "tie_word_embeddings": is_tied}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**hf_config, num_labels=1)
        model = transformers.AutoModelForTokenClassification.from_config(config)
    theirs = {n: tuple(t.shape) for n, t in model.named_parameters()}
    for tp_size in (1, 2):
        table = make_weight_table(hf_config, tp_size, head="value")
        check_tensor_parallel_split(table, tp_size)
        assert {hf.name: hf.shape for rule in table for hf in rule.hf_tensors} == theirs


def test_the_head_takes_the_place_of_the_output_layer() -> None:
    for config in (SMALL_QWEN3, tied(SMALL_QWEN3)):
        policy = [
            rule.megatron_name
            for rule in make_weight_table(config)
            if rule.megatron_name != "output_layer.weight"
        ]
        table = make_weight_table(config, head="value")
        assert [rule.megatron_name for rule in table] == [
            *policy,
            "output_layer.weight",
            "output_layer.bias",
        ]
        assert {rule.split for rule in table[-2:]} == {"replicated"}
        assert [
            rule.megatron_name
            for rule in select_stage_rules(table, 1, ParallelLayout(2, pp=2))[-3:]
        ] == [
            "decoder.final_layernorm.weight",
            "output_layer.weight",
            "output_layer.bias",
        ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_critic_has_no_output_layer_and_ties_nothing(world: World, is_tied: bool) -> None:
    chunk = build_megatron_model(
        jobs.hf_config(is_tied=is_tied), world, torch.float32, head="value"
    ).chunks[0]
    assert get_value_head(chunk) is chunk.output_layer and type(chunk.output_layer) is ValueHead
    assert not chunk.share_embeddings_and_output_weights
    behind = {
        name: tuple(p.shape)
        for name, p in collect_named_parameters([chunk]).items()
        if "decoder" not in name
    }
    assert behind == {
        "embedding.word_embeddings.weight": (37, 32),
        "output_layer.weight": (1, 32),
        "output_layer.bias": (1,),
    }
    state = chunk.sharded_state_dict(metadata={"dp_cp_group": world.dp_group})
    assert state["output_layer.weight"].key == "value_head.weight"
    assert state["output_layer.bias"].key == "value_head.bias"
    chunk.post_process = False
    with pytest.raises(ValueError, match="last pipeline stage only"):
        get_value_head(chunk)


def test_values_are_float32_sums_of_rounded_numbers(world: World) -> None:
    """1 + 2^-9 + 2^-20 + 3: in bfloat16, which has 8 bits, the small ones would be lost."""
    head = ValueHead(3, torch.bfloat16, is_sequence_split=False, tp_group=world.tp_group)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 2.0**-9, 2.0**-10]]))
        head.bias.fill_(3.0)
    hidden = torch.tensor(
        [[1.0, 1.0, 2.0**-10], [2.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True
    )
    values = head.compute_values(hidden, torch.arange(2))
    assert values.dtype == torch.float32
    assert values.tolist() == [4 + 2.0**-9 + 2.0**-20, 5.0]
    (values * torch.tensor([3.0, 1.0])).sum().backward()
    assert head.weight.grad is not None and hidden.grad is not None
    assert head.weight.grad.tolist() == [[5.0, 3.0, 3 * 2.0**-10]]
    assert head.bias.grad.tolist() == [4.0]
    assert hidden.grad[1].tolist() == [1.0, 2.0**-9, 2.0**-10]


def test_a_head_without_a_bias_sums_products_only(world: World) -> None:
    head = ValueHead(
        3, torch.float32, is_sequence_split=False, tp_group=world.tp_group, has_bias=False
    )
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 2.0, -0.5]]))
    values = head.compute_values(torch.tensor([[1.0, 1.0, 2.0]]), torch.arange(1))
    assert values.tolist() == [2.0] and [name for name, _ in head.named_parameters()] == ["weight"]
    state = head.sharded_state_dict("output_layer.", (), {"dp_cp_group": world.dp_group})
    assert list(state) == ["output_layer.weight"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_table_without_the_bias_is_that_of_a_sequence_classifier(name: str) -> None:
    import transformers

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**FAMILIES[name], num_labels=1)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    theirs = {n: tuple(t.shape) for n, t in model.named_parameters()}
    table = make_weight_table(FAMILIES[name], 2, head="unbiased_value")
    check_tensor_parallel_split(table, 2)
    assert {hf.name: hf.shape for rule in table for hf in rule.hf_tensors} == theirs


def test_no_rows_have_gradients_that_are_zero(world: World) -> None:
    """And not none: a rank without rows still takes part in the reductions of every parameter."""
    head = ValueHead(3, torch.float32, is_sequence_split=False, tp_group=world.tp_group)
    values = head.compute_values(torch.ones(2, 3), torch.arange(0))
    assert values.shape == (0,)
    values.sum().backward()
    assert head.weight.grad is not None and head.weight.grad.tolist() == [[0.0, 0.0, 0.0]]
    assert head.bias.grad is not None and head.bias.grad.tolist() == [0.0]
