"""What runs on every rank in the tests of the workers; results are put together in
the test process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import workers_reference as reference
from torch import Tensor

from rlhf_megatron.config.schema import ActorConfig, MegatronConfig, OptimConfig, PolicyLossConfig
from rlhf_megatron.data.batch import Batch, MiniBatch, TokenLogProbs
from rlhf_megatron.data.replica_plan import ReplicaPlan, take_replica_shard
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.call_dispatch import plan_scattered_call
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule, join_shards

OPTIM = OptimConfig(
    lr=reference.LR,
    eps=reference.EPS,
    weight_decay=reference.WEIGHT_DECAY,
    betas=reference.BETAS,
    clip_grad=reference.CLIP,
)
CONFIG = ActorConfig(
    optim=OPTIM,
    policy_loss=PolicyLossConfig(
        "ppo_clip",
        {
            "clip_ratio_low": reference.CLIP_LOW,
            "clip_ratio_high": reference.CLIP_HIGH,
            "clip_ratio_c": reference.CLIP_C,
        },
    ),
    entropy_coeff=reference.ENTROPY_COEFF,
    use_kl_loss=True,
    kl_loss_coef=reference.KL_COEF,
    kl_loss_type="k3",
    log_prob_chunk_size=50,
)


SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class StateSource:
    """Weights out of a transformers state dict."""

    state: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.state)

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        return tuple(self.state[tensor.name] for tensor in rule.hf_tensors)


@dataclass(frozen=True)
class RankResult:
    """What a rank hands back. Batches and updates on leaders only."""

    log_probs: TokenLogProbs | None
    updates: list[UpdateResult | None]
    # megatron name -> shard, after the last step, clipped; put together over replicas
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]  # megatron name -> shard
    plan: ReplicaPlan


def megatron_of(world: World, settings: dict[str, Any]) -> MegatronConfig:
    """The layout of `world`, and settings that are no part of a layout."""
    layout = world.layout
    return MegatronConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        **settings,
    )


def make_actor(
    world: World,
    name: str,
    state: dict[str, Tensor],
    config: ActorConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    num_steps: int = 100,
    megatron: dict[str, Any] | None = None,
    bucket_size: int | None = None,
) -> Any:
    """`bucket_size`: parameters of a gradient bucket, for small models to have several."""
    from rlhf_megatron.ranks.workers import data_parallel
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase

    phases = {"rl": TrainingPhase(config.optim, num_steps)}
    config = replace(config, megatron=megatron_of(world, megatron or {}))
    data_parallel.DDP_BUCKET_SIZE = bucket_size
    try:
        source = StateSource(state)
        if config.backend == "fsdp":
            from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend

            backend = FSDPBackend(
                reference.HF_CONFIGS[name], source, world, dtype, config.fsdp, lora=config.lora
            )
            return ActorModel(backend, config, phases)
        return ActorModel(
            MegatronBackend(reference.HF_CONFIGS[name], source, world, dtype, config.megatron),
            config,
            phases,
        )
    finally:
        data_parallel.DDP_BUCKET_SIZE = None


def share(world: World, batch: Batch, token_budget: int) -> tuple[Batch, ReplicaPlan]:
    plan = plan_scattered_call(batch, world.layout, token_budget)[world.coordinates.dp]
    return take_replica_shard(batch, plan), plan


def shards(
    worker: Any, head: HeadKind = "vocabulary"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients, weights) of this rank. All ranks: a distributed optimizer's gradients
    are put together.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.workers.optimizer_state import iterate_parameter_states

    if not hasattr(worker.backend, "chunks"):  # fsdp
        weights = {
            rule.megatron_name: piece.clone()
            for rule, piece in worker.export_shards()
            if piece is not None
        }
        return {
            name: grad.clone() for name, grad in worker.backend.named_gradients().items()
        }, weights
    # as the local layers call them
    table = make_weight_table(worker.backend.hf_config, worker.world.layout.tp, head=head)
    names = {
        own.megatron_name: rule.megatron_name
        for own, rule in zip(worker.backend.table, table, strict=True)
    }
    weights = {
        rule.megatron_name: shard.clone()
        for rule, shard in worker.export_shards()
        if shard is not None
    }
    parameters = collect_named_parameters(worker.backend.model.chunks)
    grads = {id(parameter): parameter.main_grad.clone() for parameter in parameters.values()}
    for held in iterate_parameter_states(worker.backend.optimizer.megatron_optimizer):
        if held.element_range is not None:
            whole = torch.zeros_like(grads[id(held.model_param)]).flatten()
            if held.main_param is not None and held.main_param.grad is not None:
                whole[held.element_range] = held.main_param.grad
            torch.distributed.all_reduce(whole, group=held.sharing_group)
            grads[id(held.model_param)] = whole.view(held.model_param.shape)
    return (
        {names[name]: grads[id(parameters[name])] for name in weights if name in parameters},
        {names[name]: shard for name, shard in weights.items()},
    )


def train_family(world: World, hf_config: dict[str, Any], **arguments: Any) -> RankResult:
    """`train` for a model of another family, told by its config.json."""
    reference.HF_CONFIGS["another"] = hf_config
    return train(world, name="another", **arguments)


def train(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: MiniBatch,
    loss: str,
    token_budget: int = 40,
    num_steps: int = reference.STEPS,
    directory: Path | None = None,
    is_loading: bool = False,
    dtype: torch.dtype = torch.float32,
    config: ActorConfig = CONFIG,
    megatron: dict[str, Any] | None = None,
    bucket_size: int | None = None,
    save_after: int | None = None,
    in_rows: bool = False,
) -> RankResult:
    """Log-probs, then optimizer steps on one mini-batch. `directory`: load from it first, or save
    to it at the end, or after `save_after` steps. `in_rows`: documents as of a family under FSDP2
    that cannot be packed.
    """
    actor = make_actor(
        world, name, state, config, dtype, megatron=megatron, bucket_size=bucket_size
    )
    if in_rows:
        actor.backend.model.find_max_over_ranks = actor.backend._all_reduce_max
    if directory is not None and is_loading:
        actor.load(directory)
    shard, plan = share(world, batch, token_budget)
    log_probs = actor.log_probs(
        shard, plan, reference.TEMPERATURE, with_entropy=True, with_sum_squares=True
    )
    updates = []
    for step in range(num_steps + 1):
        if (
            directory is not None
            and not is_loading
            and step == (num_steps if save_after is None else save_after)
        ):
            actor.save(directory)
        if step < num_steps:
            updates.append(actor.update(shard, plan, reference.TEMPERATURE, loss))
    return RankResult(log_probs, updates, *shards(actor), plan)


def whole(
    results: Sequence[Any],
    name: str,
    tp: int,
    copies: int,
    kind: str,
    head: HeadKind = "vocabulary",
) -> dict[str, Tensor]:
    """HF name -> full tensor, from the first of `copies` (dp x cp) sets of shards. `kind`:
    "grads" or "weights".
    """
    full = {}
    for rule in make_weight_table(reference.HF_CONFIGS[name], tp, head=head):
        holders = [getattr(r, kind) for r in results if rule.megatron_name in getattr(r, kind)]
        assert len(holders) == tp * copies, f"{rule.megatron_name} is on {len(holders)} ranks"
        tensor = join_shards(rule.split, [holder[rule.megatron_name] for holder in holders[:tp]])
        full |= {
            hf.name: part for hf, part in zip(rule.hf_tensors, rule.to_hf(tensor), strict=True)
        }
    return full


def summed(results: Sequence[Any], step: int) -> UpdateResult:
    """The update of all replicas."""
    leaders = [r.updates[step] for r in results if r.updates[step] is not None]
    assert len({u.grad_norm for u in leaders}) == 1, "replicas report different gradient norms"
    return replace(leaders[0], sums={k: sum(u.sums[k] for u in leaders) for k in leaders[0].sums})
