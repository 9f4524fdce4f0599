"""FP8 rollouts on real engines: what stands in them is what `quantise_to_fp8` makes of the
trainer's weights, and they compute with the numbers that this stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rollout_tools import reference_log_probs
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from sync_tools import REQUESTS, change_weights, trainer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.rollout.engine_interface import WeightTransport
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.quantised_weights import (
    FP8_BLOCK,
    dequantise_fp8,
    is_stored_in_fp8,
    quantise_to_fp8,
)
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

pytestmark = pytest.mark.dist
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
OF_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 100,
    "decoder_sparse_step": 1,
}


def write_model(directory: Path, has_experts: bool) -> Path:
    torch.manual_seed(1)
    model = (
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SHAPE, **OF_EXPERTS, mlp_only_layers=[], norm_topk_prob=True)
        )
        if has_experts
        else Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    )
    model.save_pretrained(directory)
    return directory


@contextmanager
def syncing(
    group: InlineWorkerGroup,
    servers: EngineServers,
    transfer: Path,
    dtype: str,
    transport: WeightTransport,
) -> Iterator[WeightSync]:
    fleet = EngineFleet([connect_engine(servers.addresses[0], transfer)], 120.0, 0)
    yield WeightSync(RoleProxies(group).host, fleet, transfer, 400_000, dtype, transport=transport)


def weights_of(group: InlineWorkerGroup) -> dict[str, Tensor]:
    """The trainer's, by Hugging Face names: one rank holds all."""
    assert group._host is not None
    export = group._host._roles["actor"].export_shards()  # type: ignore[attr-defined]
    return {
        hf.name: t.clone()
        for rule, whole in export
        for hf, t in zip(rule.hf_tensors, rule.to_hf(whole), strict=True)
    }


def check(
    sync: WeightSync, weights: dict[str, Tensor], model: Path, dtype: torch.dtype, bar: float
) -> None:
    """By digests of blocks and scales, and by the log-probs of what is sampled, which plain
    weights do not have.
    """
    (engine,) = sync.fleet.live_engines
    expected = dict[str, Tensor]()
    numbers = dict[str, Tensor]()
    for name, plain in weights.items():
        own = plain.to(dtype)
        expected[name] = numbers[name] = own
        if is_stored_in_fp8(name):
            expected[name], expected[f"{name}_scale_inv"] = quantise_to_fp8(own)
            numbers[name] = dequantise_fp8(*quantise_to_fp8(own), FP8_BLOCK, dtype)
    assert engine.get_weight_digests() == {
        name: format_digest(digest_tensor(tensor)) for name, tensor in expected.items()
    }
    apart, plain_apart = (largest_difference(sync, model, given) for given in (numbers, weights))
    print(
        f"log-probs: {apart:.3g} from those of the numbers that stand, {plain_apart:.3g} from"
        " those of plain weights"
    )
    assert apart <= bar < 0.5 * plain_apart, (apart, plain_apart)


def largest_difference(sync: WeightSync, model: Path, weights: dict[str, Tensor]) -> float:
    """Between log-probs of the engine and of transformers with these weights, in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    target = dict(reference.named_parameters())
    fused = dict[str, list[Tensor]]()
    with torch.no_grad():
        for name, values in weights.items():
            if ".experts." not in name:
                target[name].copy_(values)
                continue
            prefix, _, rest = name.partition(".experts.")
            matrix = "down_proj" if "down" in rest else "gate_up_proj"
            fused.setdefault(f"{prefix}.experts.{matrix}", []).append(values.float())
        for name, parts in fused.items():
            target[name].copy_(torch.cat(parts).view(target[name].shape))
    worst = 0.0
    for asked, samples in zip(REQUESTS, sync.fleet.generate(REQUESTS), strict=True):
        wanted = reference_log_probs(reference, asked.prompt_ids, samples[0].token_ids)
        worst = max(worst, float((torch.tensor(samples[0].log_probs) - wanted).abs().max()))
    return worst


@pytest.mark.parametrize("has_experts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_bundled_engine(tmp_path: Path, has_experts: bool) -> None:
    """Shard to shard from memory and over a process group; a block that changes on
    the way is named.
    """
    model = write_model(tmp_path / "model", has_experts)
    transfer = tmp_path / "transfer"
    transfer.mkdir()
    how = {"transfer_dir": transfer, "load_weights": False, "quantization": "fp8"}
    with trainer(model) as group, start_local_engines(model, 1, tmp_path, **how) as servers:  # type: ignore[arg-type]
        change_weights(group, 3)
        weights = weights_of(group)
        for transport in ("tensor", "process_group") if not has_experts else ("tensor",):
            with syncing(group, servers, transfer, "float32", transport) as sync:  # type: ignore[arg-type]
                sync.policy_version = int(transport == "process_group")  # of the engine
                metrics = sync()
                assert (
                    metrics["sync/bytes_moved"]
                    == metrics["sync/bytes_needed"]
                    == metrics["sync/num_bytes"]
                )
                check(sync, weights, model, torch.float32, bar=1e-4)
        assert metrics["sync/num_bytes"] < 0.4 * sum(
            4 * tensor.numel() for tensor in weights.values()
        )


@pytest.mark.sglang
@pytest.mark.long
@needs_sglang
@pytest.mark.parametrize("transport", ["tensor", "process_group"])
def test_stock_sglang_at_tp2(tmp_path: Path, transport: WeightTransport) -> None:
    """Its own FP8 layers and loader; the products are those of tools/sglang_cpu, since SGLang's
    need AMX kernels.
    """
    model = write_model(tmp_path / "model", has_experts=False)
    transfer = tmp_path / "transfer"
    transfer.mkdir()
    with (
        trainer(model) as group,
        start_sglang_engines(
            model,
            1,
            tmp_path,
            python=str(sglang_python()),
            transfer_dir=transfer,
            dtype="bfloat16",
            quantization="fp8",
            arguments={**CPU_ARGUMENTS, "context_length": 256, "tp_size": 2},
            env={**CPU_ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
            startup_timeout_s=STARTUP_S,
        ) as servers,
        syncing(group, servers, transfer, "bfloat16", transport) as sync,
    ):
        for seed in (3, 4):
            change_weights(group, seed)
            metrics = sync()
            assert 0 < metrics["sync/bytes_moved"] <= 1.05 * metrics["sync/bytes_needed"]
            check(sync, weights_of(group), model, torch.bfloat16, bar=0.05)
