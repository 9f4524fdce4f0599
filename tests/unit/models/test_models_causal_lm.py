"""Models of transformers for the backend fsdp: tensors as files have them, cut in pieces, built
without memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.ranks.workers.fsdp_backend import _enable_layer_recompute
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.lora import add_lora_layers
from rlhf_megatron.weights.transformers_causal_lm import (
    build_causal_lm,
    make_transformers_weight_table,
)
from rlhf_megatron.weights.weight_source import make_random_source
from rlhf_megatron.weights.weight_table import (
    compute_shard_shape,
    join_shards,
    slice_piece,
    split_tensor,
)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gemma"])
def test_tensors_are_what_transformers_writes(tmp_path: Path, family: str) -> None:
    """transformers' own `save_pretrained` is the oracle: experts are one tensor in a module and
    many in files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    dense = {
        **EXPERT_FAMILIES["mixtral"],
        "model_type": "gemma",
        "tie_word_embeddings": True,
        "head_dim": 16,
    }
    hf_config = EXPERT_FAMILIES.get(family, dense)
    settings = {key: value for key, value in hf_config.items() if key != "model_type"}
    causal = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(hf_config["model_type"], **settings)
    )
    causal.save_pretrained(tmp_path)
    reader = HFReader(tmp_path)
    state = causal.state_dict()
    table = make_transformers_weight_table(hf_config, "vocabulary")
    reader.check_against_table(table, is_strict=True)
    for rule in table:
        stored = reader.read_hf_tensors(rule)
        whole = rule.to_megatron(*stored)
        assert torch.equal(whole, state[rule.megatron_name]), rule.megatron_name
        assert all(
            torch.equal(back, one) for back, one in zip(rule.to_hf(whole), stored, strict=True)
        )


def test_a_model_has_no_memory_and_keeps_its_tie_and_what_it_computed() -> None:
    hf_config = {**EXPERT_FAMILIES["qwen3_moe"], "tie_word_embeddings": True}
    model = build_causal_lm(hf_config, "sdpa", "vocabulary", torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.output_layer.weight is model.decoder.get_input_embeddings().weight
    frequencies = model.decoder.model.rotary_emb.inv_freq
    assert not frequencies.is_meta and frequencies[0] == 1.0


def test_pieces_are_those_of_fsdp2() -> None:
    """torch.chunk's: seven rows over four ranks are 2, 2, 2, 1; two rows are 1, 1 and nothing
    for the others.
    """
    full = torch.arange(14.0).view(7, 2)
    pieces = split_tensor("pieces", full, 4)
    assert [len(one) for one in pieces] == [2, 2, 2, 1]
    assert torch.equal(join_shards("pieces", pieces), full)
    assert [slice_piece(2, rank, 4) for rank in range(4)] == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 2),
        slice(2, 2),
    ]
    rule = next(
        rule
        for rule in make_transformers_weight_table(EXPERT_FAMILIES["mixtral"], "vocabulary")
        if "embed" in rule.hf_tensors[0].name
    )
    rows = rule.megatron_shape[0]
    assert [compute_shard_shape(rule, 3, rank)[0] for rank in range(3)] == [
        len(c) for c in torch.empty(rows).chunk(3)
    ]


def test_a_family_of_transformers_has_tensors_and_no_megatron_model() -> None:
    hf_config = {**EXPERT_FAMILIES["mixtral"], "model_type": "olmo2"}
    names = {hf.name for rule in make_weight_table(hf_config) for hf in rule.hf_tensors}
    assert "model.layers.0.post_feedforward_layernorm.weight" in names
    critic = {
        hf.name for rule in make_weight_table(hf_config, head="value") for hf in rule.hf_tensors
    }
    assert critic - names == {"score.weight", "score.bias"} and names - critic <= {"lm_head.weight"}
    with pytest.raises(ValueError, match="no family 'olmo2' here"):
        find_model_family(hf_config).make_transformer_arguments(hf_config)


SMALL = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "hidden_size": 16,
    "num_hidden_layers": 2,
}


def test_random_weights_of_any_family_have_norms_of_one_and_biases_of_zero() -> None:
    """GPT-2 calls its norms ln_1, and they have biases."""
    hf_config = {**SMALL, "model_type": "gpt2"}
    source = make_random_source(hf_config, 1)
    found = {
        rule.hf_tensors[0].name: source.read_hf_tensors(rule)[0]
        for rule in make_transformers_weight_table(hf_config, "vocabulary")
    }
    assert bool(
        (found["transformer.h.1.ln_1.weight"] == 1).all()
        and (found["transformer.ln_f.bias"] == 0).all()
    )
    assert found["transformer.h.0.attn.c_attn.weight"].std() > 0


def test_what_a_family_cannot_do_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"type 'mpt'.* Set actor.fsdp.attn_implementation to eager"
    ):
        build_causal_lm({**SMALL, "model_type": "mpt"}, "sdpa", "vocabulary", torch.float32)
    gpt2 = build_causal_lm({**SMALL, "model_type": "gpt2"}, "sdpa", "vocabulary", torch.float32)
    with pytest.raises(ValueError, match=r"no linear layers .*; set actor.lora.rank to 0"):
        add_lora_layers(gpt2.decoder, LoRAConfig(rank=2))
    with pytest.raises(
        ValueError, match=r"not recomputed; set actor.fsdp.activation_checkpointing to false"
    ):
        _enable_layer_recompute([torch.nn.Linear(2, 2)], "ctrl")
