"""Each family as megatron-core builds it: log-probs are those of transformers, biases and
rescaled angles count.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from table_samples import LLAMA3_ROPE, THREE_KV_HEADS, StateSource, random_state
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters, load_hf_weights
from rlhf_megatron.ranks.models.megatron_model_builder import MegatronModel, build_megatron_model
from rlhf_megatron.ranks.models.output_heads import get_head_weight
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import LayerImpl

LENGTHS = (120, 7, 33)
COMMON = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}
QWEN2 = {**COMMON, "model_type": "qwen2"}
LLAMA = {**COMMON, "model_type": "llama"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "qwen2, tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen2, yarn": {**QWEN2, "rope_scaling": YARN},
    "llama, llama3": {**LLAMA, "rope_scaling": LLAMA3_ROPE},
    "llama, linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, 3 heads": {**LLAMA, **THREE_KV_HEADS, "head_dim": 10},
    "llama, biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, biased attention": {**LLAMA, "attention_bias": True},
    "llama, biased MLP": {**LLAMA, "mlp_bias": True},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "qwen3, yarn": {**COMMON, "model_type": "qwen3", "head_dim": 12, "rope_scaling": YARN},
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


def built(
    config: dict[str, Any], state: dict[str, Tensor], world: World, impl: LayerImpl = "local"
) -> MegatronModel:
    model = build_megatron_model(
        config, world, torch.float32, MegatronConfig(transformer_impl=impl)
    )
    load_hf_weights(model.chunks, make_weight_table(config, 1, impl), StateSource(state), 0, 1)
    return model


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(37, (length,), generator=generator) for length in LENGTHS]


def ours(model: MegatronModel) -> Tensor:
    """Log-probs of all documents, forwarded as one packed micro-batch."""
    ids = torch.cat(documents())[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    packed = make_packed_documents(borders, max(LENGTHS), positions)
    hidden = model.chunks[0](ids, positions, None, packed_seq_params=packed)[0]
    log_p = (hidden @ get_head_weight(model.chunks[0]).T).log_softmax(-1)
    rows = torch.cat(
        [torch.arange(start, stop - 1) for start, stop in itertools.pairwise(borders.tolist())]
    )
    return log_p[rows].gather(1, ids[0, rows + 1, None])[:, 0]


def of_transformers(config: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
    """In float64, one document at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    their_config = AutoConfig.for_model(**copy.deepcopy(config))
    model = AutoModelForCausalLM.from_config(their_config, attn_implementation="eager").double()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and missing == (
        ["lm_head.weight"] if config["tie_word_embeddings"] else []
    )
    found = []
    for ids in documents():
        log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(log_p.gather(1, ids[1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_log_probs_equal_those_of_transformers(world: World, name: str, impl: LayerImpl) -> None:
    state = random_state(MODELS[name])
    got = ours(built(MODELS[name], state, world, impl))
    torch.testing.assert_close(
        got.double(), of_transformers(MODELS[name], state), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize(
    "name", [name for name, config in MODELS.items() if "rope_scaling" in config]
)
@torch.no_grad()
def test_rescaling_counts(world: World, name: str) -> None:
    """Or the equality above would hold for a model that ignores it."""
    state = random_state(MODELS[name])
    scaled, plain = (
        ours(built(config, state, world))
        for config in (MODELS[name], MODELS[name] | {"rope_scaling": None})
    )
    assert (scaled - plain).abs().max() > 0.01


@pytest.mark.parametrize(
    "name, num_biases",
    [("llama, biased", 7), ("llama, biased attention", 4), ("llama, biased MLP", 3)],
)
def test_every_bias_has_a_gradient_as_in_transformers(
    world: World, name: str, num_biases: int
) -> None:
    config = MODELS[name]
    state = random_state(config)
    model = built(config, state, world)
    ours(model).sum().backward()
    got = {}
    parameters = collect_named_parameters(model.chunks)
    for rule in make_weight_table(config):
        parts = rule.to_hf(parameters[rule.megatron_name].grad)
        got |= {hf.name: part for hf, part in zip(rule.hf_tensors, parts, strict=True)}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in state.items()}
    torch.func.functional_call(_Sum(config), leaves, ()).backward()
    assert sum(name.endswith("bias") for name in got) == 2 * num_biases
    for name, leaf in leaves.items():
        assert leaf.grad.norm() > 0
        error = (got[name] - leaf.grad).norm() / leaf.grad.norm()
        assert error < 1e-5, (name, float(error))


def test_recomputing_an_mlp_with_biases_is_refused(world: World) -> None:
    """megatron-core's backward pass would not end."""
    config = MODELS["llama, biased"]
    for modules in (("mlp",), ("layernorm", "mlp")):
        megatron = MegatronConfig(recompute_granularity="selective", recompute_modules=modules)
        with pytest.raises(ValueError, match="must not have mlp for an MLP with biases"):
            build_megatron_model(config, world, torch.float32, megatron)
        for change in ({"attention_bias": False, "mlp_bias": False}, {"mlp_bias": False}):
            build_megatron_model(config | change, world, torch.float32, megatron)
    megatron = MegatronConfig(
        recompute_granularity="selective", recompute_modules=("layernorm", "core_attn")
    )
    build_megatron_model(config, world, torch.float32, megatron)


class _Sum(torch.nn.Module):
    """The sum of all log-probs in transformers, parameters under their own names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        their = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation="eager"
        ).double()
        self.model = their.model
        self.lm_head = their.lm_head

    def forward(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for ids in documents():
            log_p = self.lm_head(self.model(ids[None]).last_hidden_state)[0, :-1].log_softmax(-1)
            total = total + log_p.gather(1, ids[1:, None]).sum()
        return total
