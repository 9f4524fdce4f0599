"""Receipts of real servers at tp-size 2: what stands is what was sent, also after the session; one
wrong rank is named.

On a CPU SGLang pads heads, expert columns and the vocabulary that two ranks cannot share evenly, so
these models have all of that. Faults are given to one rank by SGLang's own update call, which has a
payload for each.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_tools import digests_of, reference_log_probs, request, write_buckets
from safetensors.torch import save_file
from sglang_ranks import weights_of
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_megatron.data.expert_route_files import map_route_file
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines
from rlhf_megatron.rollout.sglang.sglang_weight_verbs import SGLangWeightVerbs
from rlhf_megatron.weights.bucket_manifest import BucketManifest

pytestmark = [pytest.mark.sglang, pytest.mark.long, needs_sglang]
COMMON: dict[str, Any] = {
    "num_attention_heads": 8,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {
        **COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "attention_bias": False,
    },
    "deepseek_v3": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
    },
}
TELLS_ROUTES: dict[str, dict[str, object]] = {
    name: {"enable_return_routed_experts": True} for name in ("qwen3_moe", "deepseek_v3")
}
LAYER = "model.layers.1"
OF_EXPERT = [f"{LAYER}.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up", "down")]
JOINED = [f"{LAYER}.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
Q_AND_K = [f"{LAYER}.self_attn.{name}_proj.weight" for name in "qk"]


@dataclass
class Server:
    family: str
    model: Path
    transfer: Path
    engine: SGLangEngine
    verbs: SGLangWeightVerbs
    version: int = 0

    def weights(self, seed: int) -> dict[str, Tensor]:
        case = {"family": self.family, "config": MODELS[self.family], "dtype": "float32"}
        return {name: 0.1 * tensor for name, tensor in weights_of(case, seed).items()}

    def begin(self) -> None:
        self.version += 1
        self.engine.begin_weight_update(self.version, is_full_resync=True)

    def buckets(self, weights: dict[str, Tensor]) -> list[BucketManifest]:
        return write_buckets(weights, self.transfer, self.version, num_buckets=4)

    def sync(self, weights: dict[str, Tensor]) -> dict[str, str] | None:
        """All but the commit."""
        self.begin()
        for manifest in self.buckets(weights):
            self.engine.update_weights(manifest)
        return self.engine.get_weight_digests()

    def give(self, of_rank: list[dict[str, Tensor]]) -> None:
        """By SGLang's own call: each rank its own tensors, by value."""
        payloads = [
            base64.b64encode(pickle.dumps(list(tensors.items()))).decode() for tensors in of_rank
        ]
        answer = self.engine._admin_http.post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": payloads, "flush_cache": False},
            300.0,
        )
        assert answer["success"], answer

    def checksums(self) -> Any:
        """SGLang's own, of all that stands in every rank."""
        return self.engine._admin_http.post("/weights_checker", {"action": "checksum"}, 300.0)


@pytest.fixture(scope="module", params=MODELS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    model = folder / "model"
    transfer = folder / "transfer"
    for path in (model, transfer):
        path.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[request.param]))
    with start_sglang_engines(
        model,
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=transfer,
        dtype="float32",
        arguments={
            **CPU_ARGUMENTS,
            **TELLS_ROUTES.get(request.param, {}),
            "context_length": 256,
            "tp_size": 2,
        },
        env={**CPU_ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        startup_timeout_s=STARTUP_S,
    ) as servers:
        engine = SGLangEngine(servers.addresses[0], transfer)
        verbs = SGLangWeightVerbs(servers.addresses[0], transfer, 300.0)
        yield Server(request.param, model, transfer, engine, verbs)
        engine.close()


def test_what_stands_is_what_was_sent_and_what_is_sampled_from(server: Server) -> None:
    """transformers finds the log-probs of the tokens with the same weights."""
    weights = server.weights(1)
    assert server.sync(weights) == digests_of(weights)
    server.engine.commit_weight_update(server.version)
    assert server.engine.get_weight_digests() == digests_of(weights)
    save_file(weights, server.model / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
    asked = [request((1 + i, 2, 130), (7 + i,), 12) for i in range(3)]
    for one, group in zip(asked, server.engine.generate(asked, 300.0), strict=True):
        (sample,) = group
        expected = reference_log_probs(reference, one.prompt_ids, sample.token_ids)
        assert torch.allclose(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("server", TELLS_ROUTES, indirect=True)
def test_the_experts_that_it_tells_are_those_of_transformers(
    server: Server, tmp_path: Path
) -> None:
    weights = server.weights(1)
    server.sync(weights)
    server.engine.commit_weight_update(server.version)
    save_file(weights, server.model / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
    picked: list[Tensor] = []
    numbers = [
        number
        for number, layer in enumerate(reference.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    for layer in (reference.model.layers[number] for number in numbers):
        layer.mlp.experts.register_forward_pre_hook(lambda module, given: picked.append(given[1]))
    asked = [
        replace(request((1 + i, 2, 130), (7 + i,), 12), routes_dir=str(tmp_path)) for i in range(3)
    ]
    for one, (sample,) in zip(asked, server.engine.generate(asked, 300.0), strict=True):
        picked.clear()
        reference(torch.tensor([[*one.prompt_ids, *sample.token_ids[:-1]]]))
        ids = torch.from_numpy(map_route_file(sample.routes, (2,), 2).astype("int64"))[:, numbers]
        assert torch.equal(ids.sort(-1).values, torch.stack(picked, 1).sort(-1).values)


def test_the_end_of_the_session_changes_nothing(server: Server) -> None:
    weights = server.weights(2)
    server.sync(weights)
    within = server.checksums()
    server.engine.commit_weight_update(server.version)
    after = server.checksums()
    assert within == after and len(json.dumps(within)) > 100
    server.begin()
    assert server.checksums() == within
    for manifest in server.buckets(weights):  # nothing is loaded: only looked at
        server.verbs.digest_bucket(manifest)


PLANTED: dict[str, tuple[str, int, list[str]]] = {
    "an expert left out": ("qwen3_moe", 1, OF_EXPERT),
    "q and k swapped": ("qwen2", 0, Q_AND_K),
    "a flipped bit": ("qwen2", 1, [f"{LAYER}.self_attn.o_proj.weight"]),
    "a flipped bit in a bias": ("qwen2", 1, [f"{LAYER}.self_attn.v_proj.bias"]),
    "a flipped bit in a norm": ("qwen3_moe", 0, [f"{LAYER}.self_attn.q_norm.weight"]),
    "a flipped bit in the head": ("qwen3_moe", 1, ["lm_head.weight"]),
    "a stale rank": ("qwen3_moe", 1, []),
    "one of two matrices that are joined": ("deepseek_v3", 1, JOINED),
    "a flipped bit in what keys and values are made of": (
        "deepseek_v3",
        1,
        [f"{LAYER}.self_attn.kv_b_proj.weight"],
    ),
    "a flipped bit in the shared expert": (
        "deepseek_v3",
        1,
        [f"{LAYER}.mlp.shared_experts.down_proj.weight"],
    ),
    "a flipped bit in a bias of the router": (
        "deepseek_v3",
        0,
        [f"{LAYER}.mlp.gate.e_score_correction_bias"],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_one_wrong_rank_is_refused(server: Server, name: str) -> None:
    family, rank, wrong = PLANTED[name]
    if family != server.family:
        pytest.skip(f"planted in {family}")
    weights = server.weights(3)
    old = server.weights(4)
    server.sync(old)
    given = dict(weights)
    if name == "an expert left out":
        given = {key: tensor for key, tensor in weights.items() if key not in wrong}
    elif (
        name == "one of two matrices that are joined"
    ):  # SGLang waits for the second, and loads neither
        del given[wrong[0]]
    elif name == "q and k swapped":
        given |= {Q_AND_K[0]: weights[Q_AND_K[1]], Q_AND_K[1]: weights[Q_AND_K[0]]}
    elif name == "a stale rank":
        given = {"model.norm.weight": old["model.norm.weight"]}
        wrong = list(weights)
    else:
        given[wrong[0]] = flipped(weights[wrong[0]])
    server.give([given, weights] if rank == 0 else [weights, given])
    errors = []
    for manifest in server.buckets(weights):
        try:
            server.verbs.digest_bucket(manifest)
        except EngineError as error:
            errors.append(str(error))
    words = "; ".join(errors)
    if name == "a stale rank":
        assert len(errors) == 4
        assert words.count("tp ranks 0 and 1 hold different values for all of it") > 0
    else:
        assert all(f"tensor '{tensor}': " in words for tensor in wrong) and words.count(
            "tensor '"
        ) == len(wrong), words
    if name in ("a flipped bit in a norm", "a flipped bit in a bias of the router"):
        assert "tp ranks 0 and 1 hold different values for all of it (bucket" in words
    assert server.sync(weights) == digests_of(weights)
    server.engine.commit_weight_update(server.version)


def flipped(tensor: Tensor) -> Tensor:
    """In the last byte, which is in the last rank's rows and columns."""
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    return changed
