"""GPT-OSS: sinks and windows of attention, experts as entries of fused tensors, and what its
family refuses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity.cases import EXPERT_FAMILIES, make_state
from benchmarks.parity.fused_experts import fused
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.rules.expert_rules import find_expert_bias_problems
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    FORWARD_PASSES,
    count_model_flops,
)
from rlhf_megatron.ranks.models.flash_attention import SequenceBorders, make_sink_attention
from rlhf_megatron.ranks.models.packed_attention import _attend_by_length, make_packed_documents
from rlhf_megatron.weights.conversion.logit_comparison import verify_layer_outputs
from rlhf_megatron.weights.conversion.stored_model import open_stored_model
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.quantised_weights import dequantise_mxfp4

TINY = EXPERT_FAMILIES["gpt_oss"]
EXPERTS = "model.layers.1.mlp.experts"


def write(directory: Path, state: dict[str, Tensor], hf_config: dict[str, Any] = TINY) -> Path:
    directory.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(hf_config))
    (directory / "tokenizer.json").write_text("{ }")
    return directory


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (3, True), (3, False)])
def test_attention_by_its_formula(window: int | None, has_sinks: bool) -> None:
    """Softmax over the keys that a token sees and its head's sink, in documents of unequal length,
    with gradients.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 7, 5, 7, 1]
    heads = 4
    groups = 2
    dim = 8
    scale = 0.3
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    total = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    query, key, value, sinks, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in (
            (total, heads, dim),
            (total, groups, dim),
            (total, groups, dim),
            (heads,),
            (total, heads, dim),
        )
    )
    documents = make_packed_documents(borders.int(), max(lengths), positions)
    found = _attend_by_length(
        query, key, value, documents, scale, window, sinks if has_sinks else None
    )
    rows = []
    for start, length in zip(borders.tolist(), lengths, strict=False):
        for token in range(length):
            first = 0 if window is None else max(0, token - window + 1)
            for head in range(heads):
                keys, values = (
                    x[start + first : start + token + 1, head // 2] for x in (key, value)
                )
                logits = scale * keys @ query[start + token, head]
                shares = torch.cat([logits, sinks[head : head + 1]]) if has_sinks else logits
                rows.append(shares.softmax(0)[: len(values)] @ values)
    wanted = torch.stack(rows).view(total, heads, dim)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    leaves = (query, key, value, sinks) if has_sinks else (query, key, value)
    mine, theirs = (
        torch.autograd.grad((out * weights.detach()).sum(), leaves) for out in (found, wanted)
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_arguments_of_megatron_core() -> None:
    arguments = find_model_family(TINY).make_transformer_arguments(TINY)
    assert arguments["window_size"] == (5, 0), "megatron-core counts the tokens before a token"
    assert arguments["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert (
        arguments["add_bias_linear"]
        and arguments["add_qkv_bias"]
        and not arguments["moe_router_pre_softmax"]
    )
    assert (
        arguments["softmax_type"] == "learnable" and arguments["activation_func_clamp_value"] == 7.0
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": None}, "layer_types must be in the file"),
        ({"rope_parameters": None}, "rope_scaling must be in the file"),
        ({"layer_types": ["full_attention"] * 3}, "of each of 4 layers; mend the file"),
        (
            {"layer_types": ["chunked_attention"] * 4},
            "must name sliding_attention or full_attention",
        ),
        ({"sliding_window": 0}, "sliding_window (0) must be a positive number of tokens"),
        ({"swiglu_limit": 6.0}, "swiglu_limit (6.0) is not supported; it must be 7.0"),
        ({"swiglu_alpha": 1.7}, "swiglu_alpha: this family does not know"),
        ({"attention_bias": False}, "attention_bias (False) is not supported; it must be True"),
        (
            {"experts_per_token": 4},
            "experts_per_token (4) and num_experts_per_tok (2) mean the same number",
        ),
        (
            {"initial_context_length": 64},
            "initial_context_length (64) and original_max_position_embeddings (32)",
        ),
    ],
)
def test_what_the_family_refuses(change: dict[str, Any], message: str) -> None:
    hf_config = {**TINY, **change}
    found = list(find_model_family(hf_config).find_unsupported_settings(hf_config))
    assert any(message in text for text in found), found
    with pytest.raises(ValueError, match=r"config\.json"):
        make_weight_table(hf_config)


def test_config_json_of_the_hub() -> None:
    more = {
        "experts_per_token": 2,
        "initial_context_length": 32,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
    }
    rope = {key: value for key, value in TINY["rope_parameters"].items() if key != "rope_theta"}
    hub = {**TINY, **more, "rope_parameters": None, "rope_scaling": rope, "rope_theta": 10000.0}
    assert not list(find_model_family(hub).find_unsupported_settings(hub))
    assert make_weight_table(hub)[-1].megatron_name == "output_layer.weight"


def test_experts_with_biases_are_not_split() -> None:
    (found,) = find_expert_bias_problems(MegatronConfig(tensor_model_parallel_size=2))
    assert (
        "must be 1 for experts with biases" in found[0]
        and "expert_tensor_parallel_size" in found[1]
    )
    assert not list(
        find_expert_bias_problems(
            MegatronConfig(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
        )
    )


def test_flops_of_a_window_are_those_of_the_tokens_in_it() -> None:
    """One of two layers has a window of 3; 4 heads of 16, one sample of 10 tokens."""
    pair = {
        **TINY,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
    }
    wide = {**pair, "layer_types": ["full_attention"] * 2}
    narrow, full = (
        count_model_flops(one, torch.tensor([10]), 1, FORWARD_PASSES) for one in (pair, wide)
    )
    assert narrow is not None and full is not None
    assert full - narrow == 2 * 4 * 32 * (10 * 10 / 2 - (3 * 3 / 2 + 7 * 3))


def test_an_expert_is_read_alone_and_a_wrong_number_of_them_is_named(tmp_path: Path) -> None:
    state = make_state("gpt_oss")
    reader = HFReader(write(tmp_path / "hf", fused(state)))
    table = make_weight_table(TINY)
    reader.check_against_table(table, is_strict=True)
    rule = next(rule for rule in table if rule.layer == 1 and rule.expert == 5)
    assert torch.equal(reader.read_hf_tensors(rule)[0], state[f"{EXPERTS}.5.gate_up_proj"])
    few = {
        name: tensor[:6] if name == f"{EXPERTS}.down_proj" else tensor
        for name, tensor in fused(state).items()
    }
    with pytest.raises(
        ValueError,
        match=r"experts\.down_proj in .* has shape \(6, 32, 64\), expected \(8, 32, 64\)",
    ):
        HFReader(write(tmp_path / "few", few)).check_against_table(table)
    del few[f"{EXPERTS}.down_proj"]
    with pytest.raises(
        ValueError, match=r"tensor model.layers.1.mlp.experts.down_proj \(8, 32, 64\) is missing"
    ):
        HFReader(write(tmp_path / "none", few)).check_against_table(table)


def test_mxfp4_becomes_bfloat16_expert_by_expert(tmp_path: Path) -> None:
    """As OpenAI publishes the weights: matrices of experts in MXFP4, their biases and all
    else in bfloat16.
    """
    generator = torch.Generator().manual_seed(3)
    plain = {name: tensor.bfloat16() for name, tensor in fused(make_state("gpt_oss")).items()}
    quantised = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = quantised.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = dequantise_mxfp4(blocks, scales, torch.bfloat16)
    config = {
        **TINY,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    source = write(tmp_path / "mxfp4", quantised, {**config, "torch_dtype": "bfloat16"})
    assert main(["convert", str(source), "--out", str(tmp_path / "out"), "--verify"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == plain.keys() and all(
        torch.equal(found[name], plain[name]) for name in plain
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    reference = open_stored_model(source)
    assert any(
        "the largest of 32 experts" in line
        for line in verify_layer_outputs(reference, open_stored_model(tmp_path / "out"))
    )
    swapped = {**plain, f"{EXPERTS}.down_proj_bias": plain[f"{EXPERTS}.down_proj_bias"].roll(1, 0)}
    with pytest.raises(ValueError, match=r"computes other outputs .* in model\.layers\.1"):
        verify_layer_outputs(reference, open_stored_model(write(tmp_path / "swapped", swapped)))
    with pytest.raises(ValueError, match="are not written in FP8; use bfloat16"):
        reference.make_conversion_items("fp8")


def test_entries_of_two_types_do_not_make_one_tensor(tmp_path: Path) -> None:
    from rlhf_megatron.weights.conversion.conversion_targets import HFTarget

    model = open_stored_model(write(tmp_path / "hf", fused(make_state("gpt_oss"))))
    items = model.make_conversion_items()
    number = next(n for n, item in enumerate(items) if item.rule.expert == 3)
    mixed = [*items[:number], replace(items[number], dtype="bfloat16"), *items[number + 1 :]]
    with pytest.raises(
        ValueError, match=r"gate_up_proj are float32 and bfloat16; give one type for all weights"
    ):
        HFTarget(model, mixed)


class PlainPasses:
    """What kernels of flash attention compute, of one document, in plain torch: the base of the
    shares is given.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, *settings)
        logs = scores.logsumexp(-1)
        return torch.einsum("nts,snd->tnd", (scores - logs[..., None]).exp(), value), logs

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        logs: Tensor,
        *settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = inputs
        shares = (self._scores(query, key, *settings) - logs[..., None]).exp()
        means = (grad * output).sum(-1).T[..., None]
        of_scores = shares * (torch.einsum("tnd,snd->nts", grad, value) - means) * settings[1]
        of_query = torch.einsum("nts,snd->tnd", of_scores, key)
        of_key = torch.einsum("nts,tnd->snd", of_scores, query)
        return of_query, of_key, torch.einsum("nts,tnd->snd", shares, grad)

    def _scores(
        self, query: Tensor, key: Tensor, borders: SequenceBorders, scale: float, window: int | None
    ) -> Tensor:
        before = torch.arange(len(query))[:, None] - torch.arange(len(key))
        is_seen = (before >= 0) & (before < (window or len(key)))
        return (scale * torch.einsum("tnd,snd->nts", query, key)).masked_fill(~is_seen, -torch.inf)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_around_a_kernel_that_has_none(window: int | None) -> None:
    """Against the path by lengths, outputs and gradients: one that forgot what the sink takes would
    be off in all.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = ((9, 4, 8), (9, 4, 8), (9, 4, 8), (4,))
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    query, key, value, sinks = leaves
    borders = torch.tensor([0, 9], dtype=torch.int32)
    documents = make_packed_documents(borders, 9, torch.arange(9))
    wanted = _attend_by_length(query, key, value, documents, 0.4, window, sinks)
    found = make_sink_attention(PlainPasses())(
        query, key, value, SequenceBorders(borders, borders, 9, 9), 0.4, window, sinks
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    weights = torch.randn(9, 4, 8, generator=generator)
    mine, theirs = (torch.autograd.grad((out * weights).sum(), leaves) for out in (found, wanted))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
