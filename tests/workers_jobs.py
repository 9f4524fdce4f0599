"""What runs on every rank in the tests of the workers; results are put together in the test process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import workers_reference as reference
from torch import Tensor

from rlhf_megatron.config.schema import ActorConfig, OptimConfig, PolicyLossConfig
from rlhf_megatron.data.batch import LogProbs, MiniBatch
from rlhf_megatron.data.plan import ReplicaPlan, plan_replicas, take
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Rule, join
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.contract import UpdateResult

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


@dataclass(frozen=True)
class StateSource:
    """Weights out of a transformers state dict."""

    state: dict[str, Tensor]

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(self.state[tensor.name] for tensor in rule.hf)


@dataclass(frozen=True)
class RankResult:
    """What a rank hands back. Batches and updates on leaders only."""

    log_probs: LogProbs | None
    updates: list[UpdateResult | None]
    grads: dict[str, Tensor]  # megatron name -> shard, after the last step, clipped
    weights: dict[str, Tensor]  # megatron name -> shard
    plan: ReplicaPlan


def make_actor(
    world: World,
    name: str,
    state: dict[str, Tensor],
    config: ActorConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    num_steps: int = 100,
) -> Any:
    from rlhf_megatron.workers.actor import MegatronActor, Phase

    phases = {"rl": Phase(config.optim, num_steps)}
    return MegatronActor(reference.HF_CONFIGS[name], StateSource(state), world, dtype, config, phases)


def share(world: World, batch: MiniBatch, token_budget: int) -> tuple[MiniBatch, ReplicaPlan]:
    layout = world.layout
    plan = plan_replicas(
        batch.lengths.tolist(),
        layout.dp,
        token_budget * layout.cp,
        document_multiple=layout.document_multiple,
        packed_multiple=layout.packed_multiple,
        micro_batch_multiple=layout.micro_batch_multiple,
    )[world.coordinates.dp]
    return take(batch, plan), plan


def shards(actor: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients, weights) of this rank."""
    from rlhf_megatron.checkpoint.load_model import named_parameters

    parameters = named_parameters(actor.model.chunks)
    weights = {rule.megatron_name: shard.clone() for rule, shard in actor.export()}
    return {name: parameters[name].main_grad.clone() for name in weights}, weights


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
) -> RankResult:
    """Log-probs, then optimizer steps on one mini-batch. `directory`: load from it first, or save to it at the end."""
    actor = make_actor(world, name, state, config, dtype)
    if directory is not None and is_loading:
        actor.load(directory)
    shard, plan = share(world, batch, token_budget)
    log_probs = actor.log_probs(shard, plan, reference.TEMPERATURE, with_entropy=True)
    updates = [actor.update(shard, plan, reference.TEMPERATURE, loss) for _ in range(num_steps)]
    grads, weights = shards(actor)
    if directory is not None and not is_loading:
        actor.save(directory)
    return RankResult(log_probs, updates, grads, weights, plan)


def whole(results: list[RankResult], name: str, tp: int, dp: int, kind: str) -> dict[str, Tensor]:
    """HF name -> full tensor, from the shards of replica 0. `kind`: "grads" or "weights"."""
    full = {}
    for rule in table_for(reference.HF_CONFIGS[name], tp):
        holders = [getattr(r, kind) for r in results if rule.megatron_name in getattr(r, kind)]
        assert len(holders) == tp * dp, f"{rule.megatron_name} is on {len(holders)} ranks"
        tensor = join(rule.split, [holder[rule.megatron_name] for holder in holders[:tp]])
        full |= {hf.name: part for hf, part in zip(rule.hf, rule.to_hf(tensor), strict=True)}
    return full


def summed(results: list[RankResult], step: int) -> UpdateResult:
    """The update of all replicas."""
    leaders = [r.updates[step] for r in results if r.updates[step] is not None]
    assert len({u.grad_norm for u in leaders}) == 1, "replicas report different gradient norms"
    return replace(leaders[0], sums={k: sum(u.sums[k] for u in leaders) for k in leaders[0].sums})
