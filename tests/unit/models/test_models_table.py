"""The weight table: conversions are inverse, shards join, and names and shapes are those
of transformers.
"""

import itertools
from typing import Any

import pytest
import torch
from table_samples import BIASED_LLAMA, FAMILIES, SMALL_QWEN2, SMALL_QWEN3, THREE_KV_HEADS, tied

from rlhf_megatron.config.rope import RotaryConfig
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.families.model_family import pad_vocab_size
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import (
    WeightRule,
    check_tensor_parallel_split,
    find_hf_spans,
    join_shards,
    select_stage_rules,
    split_tensor,
)

QWEN3 = {**SMALL_QWEN3, "rms_norm_eps": 1e-6, "rope_theta": 5000.0}
LLAMA = {**QWEN3, "model_type": "llama", "head_dim": None, "tie_word_embeddings": True}


def distinct(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def every_model() -> Any:
    """Families, tied and untied, each with 4 and with 3 key-value heads; the vocabulary of 21 is
    odd for each tp.
    """
    for (name, family), is_tied in itertools.product(FAMILIES.items(), (False, True)):
        hf_config = tied(family) if is_tied else family
        label = f"{name}{'-tied' if is_tied else ''}"
        for tp_size in (1, 2, 4):
            yield pytest.param(hf_config, tp_size, id=f"{label}-tp{tp_size}")
        yield pytest.param(
            {**hf_config, **THREE_KV_HEADS, "hidden_size": 18, "vocab_size": 20},
            3,
            id=f"{label}-tp3",
        )


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize(("hf_config", "tp_size"), every_model())
def test_round_trips_are_bitwise(hf_config: dict, tp_size: int, impl: Any) -> None:
    table = make_weight_table(hf_config, tp_size, impl)
    check_tensor_parallel_split(table, tp_size)
    for rule in table:
        hf = tuple(distinct(h.shape, 1 + 10_000 * i) for i, h in enumerate(rule.hf_tensors))
        full = rule.to_megatron(*hf)
        assert tuple(full.shape) == rule.megatron_shape
        shards = split_tensor(rule.split, full, tp_size)
        assert len(shards) == tp_size and len({s.shape for s in shards}) == 1
        assert torch.equal(join_shards(rule.split, shards), full)
        for mine, theirs in zip(rule.to_hf(full), hf, strict=True):
            assert torch.equal(mine, theirs), rule.megatron_name
        # And from the Megatron side: padded rows are zero, everything else is free.
        free = distinct(rule.megatron_shape, 7)
        if rule.owner != "layer" and rule.split == "rows":
            free[hf_config["vocab_size"] :] = 0
        assert torch.equal(rule.to_megatron(*rule.to_hf(free)), free), rule.megatron_name
    assert len({rule.megatron_name for rule in table}) == len(table)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(name: str, is_tied: bool) -> None:
    import transformers

    hf_config = {**FAMILIES[name], "rope_theta": 5000.0, "tie_word_embeddings": is_tied}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**hf_config)
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {n: tuple(t.shape) for n, t in model.named_parameters()}
    written = model.config.to_dict()  # as this version of transformers writes it
    for config in (hf_config, written):
        assert {
            hf.name: hf.shape for rule in make_weight_table(config) for hf in rule.hf_tensors
        } == theirs
        assert find_model_family(config).make_gpt_arguments(config)["rotary"] == RotaryConfig(
            5000.0
        )


def rule_of(hf_config: dict, name: str) -> WeightRule:
    return next(
        r for r in make_weight_table(hf_config) if r.megatron_name == f"decoder.layers.0.{name}"
    )


def test_qkv_keeps_a_key_value_group_together() -> None:
    """Two groups of two queries, head_dim 1, hidden 1: q0 q1 k0 v0, q2 q3 k1 v1."""
    hf_config = {
        **QWEN3,
        "hidden_size": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 1,
    }
    rule = next(
        r
        for r in make_weight_table(hf_config)
        if r.megatron_name.endswith("layers.0.self_attention.linear_qkv.weight")
    )
    q, k, v = (
        torch.tensor(x).view(-1, 1) for x in ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0], [100.0, 200.0])
    )
    full = rule.to_megatron(q, k, v)
    assert full.flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    assert split_tensor(rule.split, full, 2)[1].flatten().tolist() == [3, 4, 20, 200]


def test_qkv_bias_is_interleaved_as_the_rows_of_its_weight() -> None:
    """Each bias marks its row: under tp, a rank's biases belong to the rows that it has."""
    weight, bias = (
        rule_of(SMALL_QWEN2, f"self_attention.linear_qkv.{kind}") for kind in ("weight", "bias")
    )
    marks = [torch.arange(1.0, 25.0), torch.arange(101.0, 113.0), torch.arange(201.0, 213.0)]
    rows = weight.to_megatron(*(mark[:, None].expand(-1, 24) for mark in marks))
    for rank in range(4):
        shard = split_tensor("rows", bias.to_megatron(*marks), 4)[rank]
        assert torch.equal(shard, split_tensor("rows", rows, 4)[rank][:, 0])
        k, v = (torch.arange(start + 3.0 * rank, start + 3.0 * rank + 3) for start in (101, 201))
        assert torch.equal(shard, torch.cat([torch.arange(6.0 * rank + 1, 6.0 * rank + 7), k, v]))
    assert bias.fusion_group == weight.fusion_group and bias.num_blocks == 4


def test_gate_and_up_are_split_apart() -> None:
    for kind, tail in (("weight", (24,)), ("bias", ())):
        rule = rule_of(BIASED_LLAMA, f"mlp.linear_fc1.{kind}")
        full = rule.to_megatron(torch.full((40, *tail), 1.0), torch.full((40, *tail), 2.0))
        shard = split_tensor(rule.split, full, 4)[3].view(20, -1)
        assert shard[:, 0].tolist() == [1.0] * 10 + [2.0] * 10


def test_biases_after_a_sum_over_ranks_are_on_every_rank() -> None:
    splits = {
        name: rule_of(BIASED_LLAMA, f"{name}.bias").split
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    }
    assert list(splits.values()) == ["rows", "replicated", "gated_rows", "replicated"]


def test_vocabulary_padding_is_zero_and_dropped() -> None:
    assert [pad_vocab_size(21, n) for n in (1, 2, 4)] == [21, 22, 24]
    rule = make_weight_table(QWEN3, 4)[0]
    full = rule.to_megatron(torch.ones(21, 24))
    assert full[21:].eq(0).all() and full[:21].eq(1).all() and full.shape[0] == 24
    assert rule.to_hf(full)[0].shape == (21, 24)


def test_tied_model_has_no_head_rule_and_stages_cover_the_table() -> None:
    names = [rule.megatron_name for rule in make_weight_table(LLAMA)]
    assert "output_layer.weight" not in names and len(set(names)) == len(names)
    table = make_weight_table(QWEN3)
    stages = [select_stage_rules(table, stage, ParallelLayout(2, pp=2)) for stage in range(2)]
    assert stages[0] + stages[1] == table
    assert stages[0][-1].layer == 1 and stages[1][0].layer == 2
    assert stages[1][-1].megatron_name == "output_layer.weight"
    with pytest.raises(ValueError, match=r"number of layers \(4\) must be a multiple .* \(3\)"):
        select_stage_rules(table, 0, ParallelLayout(3, pp=3))


@pytest.mark.parametrize("hf_config", [QWEN3, LLAMA])
def test_names_under_transformer_engine(hf_config: dict) -> None:
    """Only the two norms before a matrix are called otherwise;
    everything else of a rule is equal.
    """
    local = make_weight_table(hf_config, 2)
    fused = make_weight_table(hf_config, 2, impl="transformer_engine")
    renamed = {a.megatron_name: b.megatron_name for a, b in zip(local, fused, strict=True)}
    changed = {ours: theirs for ours, theirs in renamed.items() if ours != theirs}
    assert changed == {
        f"decoder.layers.{layer}.{ours}": f"decoder.layers.{layer}.{theirs}"
        for layer in range(4)
        for ours, theirs in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        )
    }
    for a, b in zip(local, fused, strict=True):
        assert (
            a.megatron_shape,
            a.hf_tensors,
            a.split,
            a.owner,
            a.layer,
            a.fusion_group,
            a.num_blocks,
        ) == (
            b.megatron_shape,
            b.hf_tensors,
            b.split,
            b.owner,
            b.layer,
            b.fusion_group,
            b.num_blocks,
        )


def test_tensor_parallel_size_must_divide_the_key_value_groups() -> None:
    """9 heads in 3 groups of 64: the 960 rows of qkv would divide by 2, the groups do not."""
    smollm = {
        **LLAMA,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    }
    check_tensor_parallel_split(make_weight_table(smollm, 3), 3)
    with pytest.raises(ValueError, match=r"tensor parallel size 2 .*linear_qkv.* must divide 3"):
        check_tensor_parallel_split(make_weight_table(smollm, 2), 2)


def test_tensor_parallel_size_must_divide_gate_and_up() -> None:
    """Their 12 rows would divide by 4, the 6 of each do not."""
    table = make_weight_table({**QWEN3, "intermediate_size": 6}, 4)
    with pytest.raises(
        ValueError,
        match=r"size 4 .*, first decoder\.layers\.0\.mlp\.linear_fc1\.weight .* with 6 blocks",
    ):
        check_tensor_parallel_split(table, 4)


def test_ranks_behind_the_end_of_a_vocabulary_have_none_of_it() -> None:
    """Five rows, padded to eight, over four ranks."""
    (rule, *_) = make_weight_table({**QWEN3, "vocab_size": 5}, 4)
    assert rule.megatron_shape[0] == 8
    spans = [find_hf_spans(rule, 4, number)[0] for number in range(4)]
    assert [(span.start, span.num_entries) for span in spans] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_transformer_arguments() -> None:
    arguments = find_model_family(QWEN3).make_transformer_arguments(QWEN3)
    assert (
        arguments["kv_channels"] == 6
        and arguments["num_query_groups"] == 4
        and arguments["qk_layernorm"] is True
    )
    llama = find_model_family(LLAMA).make_transformer_arguments(LLAMA)
    assert llama["kv_channels"] == 3 and llama["qk_layernorm"] is False
    biases = {}
    for name, hf_config in FAMILIES.items():
        arguments = find_model_family(hf_config).make_transformer_arguments(hf_config)
        biases[name] = (arguments["add_qkv_bias"], arguments["add_bias_linear"])
    plain = (False, False)
    assert biases == {
        "qwen3": plain,
        "llama": plain,
        "qwen2": (True, False),
        "biased llama": (True, True),
    }
    assert (
        find_model_family(LLAMA).make_gpt_arguments(LLAMA)["share_embeddings_and_output_weights"]
        is True
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias .True. is not supported; it must be False"),
        ({"hidden_act": "gelu"}, "hidden_act .'gelu'. is not supported; it must be 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window .True."),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types .'sliding_attention'. are not",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "type 'dynamic' are not supported",
        ),
        (
            {"hidden_act": "gelu", "attention_dropout": 0.1},
            "hidden_act .* attention_dropout .0.1. is not supported",
        ),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads .8. must be a multiple of num_key_value_heads .3.",
        ),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"model_type": "qwen4"}, "unknown model family 'qwen4'. Did you mean 'qwen"),
        ({"model_type": None}, "no model_type"),
        (
            {"model_type": "qwen2", "qkv_bias": False},
            "qkv_bias .False. is not supported; it must be True",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window .True. is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_weight_table({**QWEN3, **change})


def test_random_weights_depend_on_name_and_seed_only() -> None:
    from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source

    hf_config = {**QWEN3, "initializer_range": 0.5}
    first = dict(generate_random_hf_tensors(hf_config, 7))
    source = make_random_source(hf_config, 7)
    for rule in reversed(make_weight_table(hf_config, 2)):
        for hf, tensor in zip(rule.hf_tensors, source.read_hf_tensors(rule), strict=True):
            assert torch.equal(tensor, first[hf.name])
    assert first["model.norm.weight"].eq(1).all()
    biases = {
        name: tensor
        for name, tensor in generate_random_hf_tensors(BIASED_LLAMA, 7)
        if name.endswith(".bias")
    }
    assert len(biases) == 4 * 7 and all(bias.eq(0).all() for bias in biases.values())
    assert abs(float(first["model.layers.0.mlp.up_proj.weight"].std()) - 0.5) < 0.05
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"], first["model.layers.0.mlp.gate_proj.weight"]
    )
    assert not torch.equal(
        first["lm_head.weight"], dict(generate_random_hf_tensors(hf_config, 8))["lm_head.weight"]
    )
