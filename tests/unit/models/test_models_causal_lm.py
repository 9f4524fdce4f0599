"""Models of transformers for the backend fsdp: tensors as files have them, cut in pieces, built without memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.checkpoint.hf_reader import HFReader
from rlhf_megatron.checkpoint.source import random_source
from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.models.causal_lm import build_causal_lm, table_of_files
from rlhf_megatron.models.families.base import family_for, table_for
from rlhf_megatron.models.lora import adapt
from rlhf_megatron.models.table import join, piece, shard_shape, split
from rlhf_megatron.workers.fsdp import _recompute_layers


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gemma"])
def test_tensors_are_what_transformers_writes(tmp_path: Path, family: str) -> None:
    """transformers' own `save_pretrained` is the oracle: experts are one tensor in a module and many in files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dense = {**EXPERT_FAMILIES["mixtral"], "model_type": "gemma", "tie_word_embeddings": True, "head_dim": 16}
    hf_config = EXPERT_FAMILIES.get(family, dense)
    settings = {key: value for key, value in hf_config.items() if key != "model_type"}
    causal = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf_config["model_type"], **settings))
    causal.save_pretrained(tmp_path)
    reader, state = HFReader(tmp_path), causal.state_dict()
    table = table_of_files(hf_config, "vocabulary")
    reader.check(table, strict=True)
    for rule in table:
        stored = reader.hf_tensors(rule)
        whole = rule.to_megatron(*stored)
        assert torch.equal(whole, state[rule.megatron_name]), rule.megatron_name
        assert all(torch.equal(back, one) for back, one in zip(rule.to_hf(whole), stored, strict=True))


def test_a_model_has_no_memory_and_keeps_its_tie_and_what_it_computed() -> None:
    hf_config = {**EXPERT_FAMILIES["qwen3_moe"], "tie_word_embeddings": True}
    model = build_causal_lm(hf_config, "sdpa", "vocabulary", torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.decoder.get_input_embeddings().weight
    frequencies = model.decoder.model.rotary_emb.inv_freq
    assert not frequencies.is_meta and frequencies[0] == 1.0


def test_pieces_are_those_of_fsdp2() -> None:
    """torch.chunk's: seven rows over four ranks are 2, 2, 2, 1; two rows are 1, 1 and nothing for the others."""
    full = torch.arange(14.0).view(7, 2)
    pieces = split("pieces", full, 4)
    assert [len(one) for one in pieces] == [2, 2, 2, 1]
    assert torch.equal(join("pieces", pieces), full)
    assert [piece(2, rank, 4) for rank in range(4)] == [slice(0, 1), slice(1, 2), slice(2, 2), slice(2, 2)]
    rule = next(rule for rule in table_of_files(EXPERT_FAMILIES["mixtral"], "vocabulary") if "embed" in rule.hf[0].name)
    rows = rule.megatron_shape[0]
    assert [shard_shape(rule, 3, rank)[0] for rank in range(3)] == [len(c) for c in torch.empty(rows).chunk(3)]


def test_a_family_of_transformers_has_tensors_and_no_megatron_model() -> None:
    hf_config = {**EXPERT_FAMILIES["mixtral"], "model_type": "olmo2"}
    names = {hf.name for rule in table_for(hf_config) for hf in rule.hf}
    assert "model.layers.0.post_feedforward_layernorm.weight" in names
    critic = {hf.name for rule in table_for(hf_config, head="value") for hf in rule.hf}
    assert critic - names == {"score.weight", "score.bias"} and names - critic <= {"lm_head.weight"}
    with pytest.raises(ValueError, match="no family 'olmo2' here"):
        family_for(hf_config).transformer_arguments(hf_config)


SMALL = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "hidden_size": 16, "num_hidden_layers": 2}


def test_random_weights_of_any_family_have_norms_of_one_and_biases_of_zero() -> None:
    """GPT-2 calls its norms ln_1, and they have biases."""
    hf_config = {**SMALL, "model_type": "gpt2"}
    source = random_source(hf_config, 1)
    found = {rule.hf[0].name: source.hf_tensors(rule)[0] for rule in table_of_files(hf_config, "vocabulary")}
    assert bool((found["transformer.h.1.ln_1.weight"] == 1).all() and (found["transformer.ln_f.bias"] == 0).all())
    assert found["transformer.h.0.attn.c_attn.weight"].std() > 0


def test_what_a_family_cannot_do_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"type 'mpt'.* Set actor.fsdp.attn_implementation to eager"):
        build_causal_lm({**SMALL, "model_type": "mpt"}, "sdpa", "vocabulary", torch.float32)
    gpt2 = build_causal_lm({**SMALL, "model_type": "gpt2"}, "sdpa", "vocabulary", torch.float32)
    with pytest.raises(ValueError, match=r"no linear layers .*; set actor.lora.rank to 0"):
        adapt(gpt2.decoder, LoRAConfig(rank=2))
    with pytest.raises(ValueError, match=r"not recomputed; set actor.fsdp.activation_checkpointing to false"):
        _recompute_layers([torch.nn.Linear(2, 2)], "ctrl")
