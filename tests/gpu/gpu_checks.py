"""What one rank must do right on a device, as functions: they raise AssertionError and return what
they measured.

`check(device, dtype)` is called by the tests of this directory (with CUDA in bfloat16, and on the
CPU, so that every line runs without a GPU too) and by benchmarks/gpu_check.py where pytest is
missing. This file does not import pytest.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_samples import (
    CONFIG,
    VALUE_CLIP,
    attention_by_document,
    make_batch,
    make_value_batch,
    policy_loss,
    reference_log_probs,
    reference_values,
    relative_error,
    restored,
    rounded_critic_weights,
    rounded_weights,
    sampled_batch,
    share,
    value_loss,
    with_noise,
)
from torch import Tensor

Figures = dict[str, float]
LR = 1e-3


class MissingPackageError(Exception):
    """A check cannot run here. The message names what is missing."""


@dataclass(frozen=True)
class Bounds:
    """Of differences to the float32 reference with the same (rounded) weights."""

    log_prob_max: float  # largest |difference|, nats
    log_prob_p50: float
    log_prob_p99: float
    mean_kl: float  # k3 estimate over the tokens, nats
    grad_norm: float  # relative
    attention: float  # relative L2 error of outputs and gradients


# bfloat16 keeps 8 bits: a rounding is up to 2^-9 = 0.2 %, and a log-prob passes some dozens of
# them. Its bounds are three to five times what the CPU shows (largest 0.04, median 0.009, gradient
# norm 0.5 %, attention 0.4 %), and within those at which a run stops (config.schema.CheckConfig). A
# wrong mask, position or weight is far beyond.
BOUNDS = {
    torch.float32: Bounds(1e-4, 1e-5, 1e-4, 1e-8, 1e-4, 1e-5),
    torch.bfloat16: Bounds(0.2, 2e-2, 0.15, 1e-3, 0.02, 0.015),
}


def need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"needs {', '.join(missing)}")


def check_training_step(
    device: torch.device, dtype: torch.dtype, num_samples: int = 8, **megatron: bool
) -> Figures:
    """Log-probs, loss and gradient norm of an actor against the plain model; then supervised
    steps that learn.
    """
    need("megatron")
    from rlhf_megatron.data.batch import select_samples

    bounds = BOUNDS[dtype]
    batch = select_samples(make_batch(), range(num_samples))
    weights = {name: tensor.requires_grad_() for name, tensor in rounded_weights(dtype).items()}
    expected = reference_log_probs(weights, batch)
    batch = replace(batch, old_log_probs=with_noise(expected.detach(), batch.response_mask))
    loss = policy_loss(expected, batch)
    grads = torch.autograd.grad(loss, list(weights.values()))
    grad_norm = float(torch.stack([grad.norm() for grad in grads]).norm())
    with one_rank_actor(device, dtype, **megatron) as (actor, _):
        shard, plan = share(batch)
        found = actor.log_probs(shard, plan, 1.0, with_entropy=True)
        figures = compare_log_probs(
            restored(found, plan, batch).log_probs, expected.detach(), batch.response_mask, bounds
        )
        update = actor.update(shard, plan, 1.0)
        supervised = [actor.update(shard, plan, 1.0, "sft").sums["actor/loss"] for _ in range(5)]
    figures["loss_error"] = abs(update.sums["actor/loss"] - loss.item())
    figures["grad_norm_error"] = abs(update.grad_norm - grad_norm) / grad_norm
    figures["supervised_loss_first"] = supervised[0]
    figures["supervised_loss_last"] = supervised[-1]
    assert math.isfinite(update.sums["actor/loss"]) and not update.is_skipped
    assert figures["loss_error"] <= bounds.log_prob_p50, figures
    assert figures["grad_norm_error"] <= bounds.grad_norm, figures
    assert supervised[-1] < 0.9 * supervised[0], f"five supervised steps do not learn: {supervised}"
    return figures


def check_experts(
    device: torch.device, dtype: torch.dtype, impl: str = "local", **megatron: bool
) -> Figures:
    """Log-probs and gradient norm of a model with experts under these settings, against its
    experts one by one.
    """
    is_te = impl != "local" or "moe_permute_fusion" in megatron
    need("megatron", *(["transformer_engine"] if is_te and device.type == "cuda" else []))
    if "moe_permute_fusion" in megatron and device.type != "cuda":
        raise MissingPackageError("needs CUDA")
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    hf_config = {**CONFIG, **experts, "norm_topk_prob": True}
    batch = make_batch()
    found = []
    for settings in ({}, megatron):
        with one_rank_actor(device, dtype, hf_config, transformer_impl=impl, **settings) as (
            actor,
            _,
        ):
            shard, plan = share(batch)
            log_probs = restored(actor.log_probs(shard, plan, 1.0), plan, batch).log_probs
            found.append((log_probs, actor.update(shard, plan, 1.0, "sft").grad_norm))
    (expected, norm), (log_probs, found_norm) = found
    figures = compare_log_probs(log_probs, expected, batch.response_mask, BOUNDS[dtype])
    figures["grad_norm_error"] = abs(found_norm - norm) / norm
    assert figures["grad_norm_error"] <= BOUNDS[dtype].grad_norm, figures
    return figures


def check_critic_step(device: torch.device, dtype: torch.dtype) -> Figures:
    """Values, loss and gradient norm of a critic against the plain model; then steps that learn."""
    need("megatron")
    bounds = BOUNDS[dtype]
    weights = rounded_critic_weights(dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    expected = reference_values(leaves, make_batch())
    batch = make_value_batch(expected.detach())
    loss = value_loss(expected, batch)
    grad_norm = float(
        torch.stack(
            [grad.norm() for grad in torch.autograd.grad(loss, list(leaves.values()))]
        ).norm()
    )
    with one_rank_critic(device, dtype) as critic:
        shard, plan = share(batch)
        values = restored(critic.values(shard, plan), plan, batch).values
        update = critic.update(shard, plan)
        losses = [critic.update(shard, plan).sums["critic/vf_loss"] for _ in range(5)]
    scale = float(expected.detach()[batch.response_mask].std())
    figures = {
        "value_max_error": float((values - expected.detach()).abs().max()) / scale,
        "loss_error": abs(update.sums["critic/vf_loss"] - loss.item()) / loss.item(),
        "grad_norm_error": abs(update.grad_norm - grad_norm) / grad_norm,
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }
    assert values.dtype == torch.float32 and not update.is_skipped
    assert figures["value_max_error"] <= bounds.log_prob_max, figures
    assert figures["loss_error"] <= bounds.grad_norm, figures
    assert figures["grad_norm_error"] <= bounds.grad_norm, figures
    assert losses[-1] < 0.9 * losses[0], f"five steps do not learn: {losses}"
    return figures


def check_attention(
    device: torch.device, dtype: torch.dtype, has_sinks: bool = False, window: int | None = None
) -> Figures:
    """PackedAttention against scaled_dot_product_attention in float64, document by document,
    forward and backward; with sinks, against their formula.
    """
    need("megatron")
    from rlhf_megatron.ranks.models import packed_attention
    from rlhf_megatron.ranks.models.flash_attention import choose_flash_kernel

    lengths = [1, 2, 3, 3, 17, 64, 128, 200]
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, 64) for heads in (4, 2, 2, 4)]
    q, k, v, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    leaves = [tensor.to(device).requires_grad_() for tensor in (q, k, v)]
    borders = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    documents = packed_attention.make_packed_documents(borders, max(lengths), positions)
    config = SimpleNamespace(
        context_parallel_size=1,
        attention_dropout=0.0,
        kv_channels=64,
        num_attention_heads=4,
        tensor_model_parallel_size=1,
        params_dtype=dtype,
        softmax_type="learnable" if has_sinks else "vanilla",
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=None,
    )
    core = packed_attention.PackedAttention(config).to(device)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    names = ["output", "grad_q", "grad_k", "grad_v"]
    sinks = None
    if core.softmax_offset is not None:
        core.softmax_offset.data = torch.randn(4, generator=generator).to(device, dtype)
        sinks = core.softmax_offset.detach().cpu().double().requires_grad_()
        leaves = [*leaves, core.softmax_offset]
        exact = [*exact, sinks]
        names = [*names, "grad_sinks"]
    out = core(*leaves[:3], packed_seq_params=documents)
    grads = torch.autograd.grad((out * weight.to(device)).sum(), leaves)
    expected = attention_by_document(*exact[:3], lengths, sinks, window)
    expected_grads = torch.autograd.grad((expected * weight.double()).sum(), exact)
    figures = {
        f"{name}_error": relative_error(value, truth)
        for name, value, truth in zip(
            names, (out, *grads), (expected, *expected_grads), strict=True
        )
    }
    assert max(figures.values()) <= BOUNDS[dtype].attention, figures
    if device.type == "cuda" and dtype != torch.float32:
        kernel = choose_flash_kernel(leaves[0].device, dtype, 64, has_sinks)
        assert (kernel.sink_attention_call if has_sinks else kernel.attention_call) is not None, (
            f"torch {torch.__version__}: {kernel.choice.why_not}"
        )
    return figures


def check_offload(
    device: torch.device, dtype: torch.dtype, use_distributed_optimizer: bool = False
) -> Figures:
    """Weights and moments go to host memory and come back bit for bit; the device's memory
    falls meanwhile.
    """
    need("megatron")
    from rlhf_megatron.device import measure_device_memory

    batch = make_batch()
    with one_rank_actor(device, dtype, use_distributed_optimizer=use_distributed_optimizer) as (
        actor,
        _,
    ):
        shard, plan = share(batch)
        actor.update(shard, plan, 1.0, "sft")  # moments that are not zero
        log_probs = actor.log_probs(shard, plan, 1.0).log_probs
        tensors = [
            tensor for _, tensor in actor.export_shards()
        ] + actor.backend.optimizer.list_state_tensors()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        before = measure_device_memory(device).allocated_bytes
        actor.offload(("gradients", "optimizer"))
        assert measure_device_memory(device).allocated_bytes <= before
        actor.offload()
        away = measure_device_memory(device).allocated_bytes
        assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
        actor.onload()
        assert torch.equal(actor.log_probs(shard, plan, 1.0).log_probs, log_probs)
        assert all(tensor.device.type == device.type for tensor in tensors)
        assert all(torch.equal(now.cpu(), then) for now, then in zip(tensors, kept, strict=True))
        update = actor.update(shard, plan, 1.0, "sft")
    assert not update.is_skipped
    if device.type == "cuda":
        assert before - away >= 0.9 * num_bytes, f"{before - away} bytes were freed of {num_bytes}"
    return {"num_bytes": num_bytes, "device_bytes_before": before, "device_bytes_away": away}


def check_sync(device: torch.device, dtype: torch.dtype) -> Figures:
    """The actor's weights to a local engine on the same device, which opens their memory (on a CPU
    it reads files):
    digests are equal, log-probs of what it samples too.
    """
    need("megatron", "transformers", "aiohttp")
    from rlhf_megatron.device import get_shareable_device_id
    from rlhf_megatron.rollout.engine_interface import GenerateRequest, SamplingParams
    from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups
    from rlhf_megatron.rollout.transports.tensor_transport import LocalTensorTransport
    from rlhf_megatron.rollout.transports.weight_delivery import deliver_weights

    generator = torch.Generator().manual_seed(3)
    prompts = [
        tuple(torch.randint(0, CONFIG["vocab_size"], (n,), generator=generator).tolist())
        for n in (1, 5, 9, 30)
    ]
    requests = [GenerateRequest(prompt, (1, 2, 3, 4), SamplingParams(24)) for prompt in prompts]
    with (
        one_rank_actor(device, dtype) as (actor, world),
        tempfile.TemporaryDirectory() as folder,
        local_engine(Path(folder), device, dtype) as engine,
    ):
        engine.begin_weight_update(1)
        report = deliver_weights(
            actor.export_shards(),
            world,
            EngineProcessGroups(),
            version=1,
            engines=[engine.address],
            transfer_dir=Path(folder),
            bucket_bytes=1 << 20,
            engine_dtype=str(dtype).removeprefix("torch."),
            transport_kind="tensor",
        )
        transport = LocalTensorTransport(engine)
        transport.prepare_sync([get_shareable_device_id(device)])
        standing = engine.get_weight_digests()
        engine.commit_weight_update(1)
        groups = engine.generate(requests, 120.0)
        batch, reported = sampled_batch(prompts, groups)
        shard, plan = share(batch)
        found = restored(actor.log_probs(shard, plan, 1.0), plan, batch).log_probs
    assert not report.failures, report.failures
    assert transport.bucket_memory == ("shared_memory" if device.type == "cpu" else "device_memory")
    assert report.digests and standing == report.digests, (
        "what stands in the engine is not what was exported"
    )
    assert report.num_bytes == sum(
        tensor.nbytes for tensor in rounded_weights(dtype, dtype).values()
    )
    return {
        "num_bytes": report.num_bytes,
        **compare_log_probs(reported, found, batch.response_mask, BOUNDS[dtype]),
    }


def check_groups_of_one(device: torch.device, dtype: torch.dtype) -> Figures:
    """Sums in groups of one rank take next to no memory of a GPU: NCCL's buffers would be half a
    gigabyte each.
    """
    need("megatron")
    from rlhf_megatron.device import measure_device_memory

    with one_rank_actor(device, dtype) as (_, world):
        groups = [world.tp_group, world.pp_group, world.dp_cp_group, world.model_parallel_group]
        before = measure_device_memory(device).used_bytes
        for group in groups:
            torch.distributed.all_reduce(torch.ones(1, device=device), group=group)
        taken = measure_device_memory(device).used_bytes - before
    assert taken <= len(groups) * 64 << 20, f"{taken >> 20} MiB for {len(groups)} groups"
    return {"num_bytes": taken}


CHECKS: dict[str, Callable[[torch.device, torch.dtype], Figures]] = {
    "training_step": check_training_step,
    "training_step_optimizer_cpu_offload": partial(check_training_step, optimizer_cpu_offload=True),
    "training_step_in_few_bits": partial(check_training_step, use_precision_aware_optimizer=True),
    "experts_grouped": partial(check_experts, moe_grouped_gemm=True),
    "experts_grouped_by_transformer_engine": partial(
        check_experts, impl="transformer_engine", moe_grouped_gemm=True
    ),
    "experts_sorted_by_transformer_engine": partial(check_experts, moe_permute_fusion=True),
    "critic_step": check_critic_step,
    "attention": check_attention,
    "attention_with_sinks": partial(check_attention, has_sinks=True),
    "attention_with_sinks_and_window": partial(check_attention, has_sinks=True, window=16),
    "offload": check_offload,
    "offload_distributed_optimizer": partial(check_offload, use_distributed_optimizer=True),
    "groups_of_one": check_groups_of_one,
    "sync": check_sync,
}


@contextmanager
def one_rank_actor(
    device: torch.device, dtype: torch.dtype, hf_config: dict[str, Any] = CONFIG, **megatron: Any
) -> Iterator[tuple[Any, Any]]:
    """(actor, world) with seeded weights; the world ends with the block. `megatron`: of
    its MegatronConfig.
    """
    from rlhf_megatron.config.schema import ActorConfig, MegatronConfig, OptimConfig
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
    from rlhf_megatron.weights.parallel_layout import ParallelLayout
    from rlhf_megatron.weights.weight_source import make_random_source

    world = create_world(ParallelLayout(1), device)
    try:
        optim = OptimConfig(lr=LR)
        config = ActorConfig(
            megatron=MegatronConfig(**megatron), optim=optim, log_prob_chunk_size=256
        )
        source = make_random_source(hf_config, 1)
        phases = {"rl": TrainingPhase(optim, 100)}
        backend = MegatronBackend(hf_config, source, world, dtype, config.megatron)
        yield ActorModel(backend, config, phases), world
    finally:
        destroy_world()


@contextmanager
def one_rank_critic(device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """A critic with seeded weights; its world ends with the block."""
    from rlhf_megatron.config.schema import CriticConfig, MegatronConfig, OptimConfig
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.ranks.workers.critic import CriticModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
    from rlhf_megatron.weights.parallel_layout import ParallelLayout
    from rlhf_megatron.weights.value_model import add_value_head
    from rlhf_megatron.weights.weight_source import make_random_source

    world = create_world(ParallelLayout(1), device)
    try:
        optim = OptimConfig(lr=LR)
        std = CONFIG["initializer_range"]
        config = CriticConfig(optim=optim, cliprange_value=VALUE_CLIP, value_head_init_std=std)
        source = make_random_source(CONFIG, 1)
        phases = {"rl": TrainingPhase(optim, 100)}
        first = add_value_head(source, std, 1)
        backend = MegatronBackend(CONFIG, first, world, dtype, MegatronConfig(), "value")
        yield CriticModel(backend, config, phases, seed=1)
    finally:
        destroy_world()


@contextmanager
def local_engine(folder: Path, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """The client of an engine without weights that takes buckets from `folder`."""
    from rlhf_megatron.rollout.local.local_client import LocalEngine
    from rlhf_megatron.rollout.local.local_launch import start_local_engines

    (folder / "config.json").write_text(json.dumps(CONFIG))
    servers = start_local_engines(
        folder,
        1,
        folder,
        transfer_dir=folder,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        load_weights=False,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
    )
    with servers:
        engine = LocalEngine(servers.addresses[0])
        try:
            yield engine
        finally:
            engine.close()


def compare_log_probs(found: Tensor, expected: Tensor, mask: Tensor, bounds: Bounds) -> Figures:
    """Figures of the differences at `mask`; raises AssertionError past the bounds."""
    difference = (found.float().cpu() - expected.float().cpu())[mask]
    absolute = difference.abs()
    figures = {
        "log_prob_max": float(absolute.max()),
        "log_prob_p50": float(absolute.quantile(0.5)),
        "log_prob_p99": float(absolute.quantile(0.99)),
        "mean_kl": float((difference.exp() - 1 - difference).mean()),
    }
    for name, value in figures.items():
        assert value <= getattr(bounds, name), (
            f"{name} {value:.3g} is over {getattr(bounds, name):g}: {figures}"
        )
    return figures
