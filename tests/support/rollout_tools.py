"""Tiny models, requests and weight buckets for the tests of rollout/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.parity.fused_experts import unfused
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # peaked distributions: log-probs far from uniform
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def tiny_qwen3(seed: int, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=tied)).eval()


def tiny_qwen2(seed: int) -> PreTrainedModel:
    """Biases that are not zero, and angles rescaled fourfold (YaRN)."""
    torch.manual_seed(seed)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=rope)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def tiny_qwen3_moe(seed: int) -> PreTrainedModel:
    """Four experts a layer, two of them for a token."""
    torch.manual_seed(seed)
    of_experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **of_experts, head_dim=16, tie_word_embeddings=False)
    ).eval()


def tiny_llama(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{**SHAPE, "num_key_value_heads": 4, "vocab_size": 700}, tie_word_embeddings=False
    )
    return LlamaForCausalLM(config).eval()


def request(
    prompt: tuple[int, ...],
    seeds: tuple[int, ...],
    max_new_tokens: int,
    temperature: float = 1.0,
    **params: object,
) -> GenerateRequest:
    return GenerateRequest(prompt, seeds, SamplingParams(max_new_tokens, temperature, **params))


def reference_rows(
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    temperature: float = 1.0,
) -> Tensor:
    """[len(response), vocabulary] log_softmax(logits / temperature) of transformers' own forward
    pass, before each token of the response.
    """
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        rows = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    return rows[len(prompt) - 1 : -1]


def reference_log_probs(
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    temperature: float = 1.0,
) -> Tensor:
    """log p of each response token under softmax(logits / temperature)."""
    return picked(reference_rows(model, prompt, response, temperature), response)


def reference_rows_over(
    old: PreTrainedModel,
    new: PreTrainedModel,
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    num_old: int,
) -> Tensor:
    """Rows before the tokens from `num_old` on, where the weights changed after `num_old` tokens
    and keys and values stayed: the last of these tokens is the first that the new model reads.
    """
    ids = torch.tensor([[*prompt, *response]])
    num_read = len(prompt) + num_old - 1
    with torch.no_grad():
        cache = old(ids[:, :num_read], use_cache=True).past_key_values
        return new(ids[:, num_read:], past_key_values=cache).logits[0].float().log_softmax(-1)[:-1]


def picked(rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """The entry of each token in its row."""
    return rows.gather(1, torch.tensor(tokens, dtype=torch.long)[:, None])[:, 0]


def kept(row: Tensor, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Tokens that may be drawn from a row of log-probs: among the `top_k` likeliest, those before
    them having at most `top_p` together, and at least `min_p` times as likely as the likeliest.
    Each rule looks at the whole row.
    """
    order = row.argsort(descending=True).tolist()
    probs = row.exp().double()
    found = set()
    before = 0.0
    for rank, token in enumerate(order):
        p = float(probs[token])
        if (top_k < 0 or rank < top_k) and before <= top_p and p >= min_p * float(probs[order[0]]):
            found.add(token)
        before += p
    return found


def reference_greedy(
    model: PreTrainedModel, prompt: tuple[int, ...], max_new_tokens: int
) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # or token 0 would be taken for padding
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


def assert_same(got: Sequence[GeneratedSample], expected: Sequence[GeneratedSample]) -> None:
    """Same tokens, reasons and versions; log-probs within rounding (other batch shapes
    round otherwise).
    """
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.finish_reason, one.policy_version) == (
            other.token_ids,
            other.finish_reason,
            other.policy_version,
        )
        assert torch.allclose(
            torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-4, rtol=0
        )


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Under the names that files have them under."""
    return unfused(
        {name: value.detach() for name, value in model.named_parameters()}, model.config.model_type
    )


def digests_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: format_digest(digest_tensor(tensor)) for name, tensor in weights.items()}


def write_buckets(
    weights: Mapping[str, Tensor], directory: Path, version: int, num_buckets: int = 2
) -> list[BucketManifest]:
    """The tensors in order, cut into files of raw bytes with their manifests."""
    names = list(weights)
    size = -(-len(names) // num_buckets)
    manifests = []
    for bucket in range(num_buckets):
        raw = b""
        entries = []
        for name in names[bucket * size : (bucket + 1) * size]:
            tensor = weights[name].contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(
                TensorEntry(
                    name, dtype, tuple(tensor.shape), len(raw), format_digest(digest_tensor(tensor))
                )
            )
            raw += tensor.view(-1).view(torch.uint8).numpy().tobytes()
        file = f"v{version}-{bucket}"
        (directory / file).write_bytes(raw)
        manifests.append(
            BucketManifest(version, "actor dp0 pp0 tp0", bucket, file, len(raw), tuple(entries))
        )
    return manifests


def with_entry(manifest: BucketManifest, index: int, **changes: object) -> BucketManifest:
    tensors = list(manifest.tensors)
    tensors[index] = replace(tensors[index], **changes)
    return replace(manifest, tensors=tuple(tensors))
