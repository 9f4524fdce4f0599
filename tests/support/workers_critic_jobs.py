"""What runs on every rank in the tests of the critic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from torch import Tensor
from workers_jobs import OPTIM, StateSource, megatron_of, shards, share

from rlhf_megatron.config.schema import CriticConfig, FSDPConfig
from rlhf_megatron.data.batch import CriticValues, TokenBatch, ValueMiniBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult

CONFIG = CriticConfig(optim=OPTIM, cliprange_value=reference.VALUE_CLIP, value_head_init_std=0.1)
SEED = 11


@dataclass(frozen=True)
class CriticResult:
    """What a rank hands back. Values and updates on leaders only; shards by Megatron name."""

    values: CriticValues | None
    updates: list[UpdateResult | None]
    grads: dict[str, Tensor]  # after the last step, clipped; put together over replicas
    weights: dict[str, Tensor]
    plan: ReplicaPlan


def make_critic(
    world: World,
    name: str,
    source: Any,
    dtype: torch.dtype = torch.float32,
    config: CriticConfig = CONFIG,
    megatron: dict[str, Any] | None = None,
    bucket_size: int | None = None,
    hf_config: dict[str, Any] | None = None,
    fsdp: FSDPConfig | None = None,
) -> Any:
    """`source`: of weights. `hf_config`: in place of that of `name`. `fsdp`: settings of that
    backend; None: Megatron.

    `bucket_size`: parameters of a gradient bucket, for small models to have several.
    """
    from rlhf_megatron.ranks.workers import data_parallel
    from rlhf_megatron.ranks.workers.critic import CriticModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
    from rlhf_megatron.weights.value_model import add_value_head

    phases = {"rl": TrainingPhase(config.optim, 100)}
    settings = megatron_of(world, megatron or {})
    data_parallel.DDP_BUCKET_SIZE = bucket_size
    try:
        first = add_value_head(source, config.value_head_init_std, SEED)
        arguments = (hf_config or reference.HF_CONFIGS[name], first, world, dtype)
        if fsdp is not None:
            from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend

            return CriticModel(FSDPBackend(*arguments, fsdp, "value"), config, phases, SEED)
        backend = MegatronBackend(*arguments, settings, "value")
        return CriticModel(backend, config, phases, SEED)
    finally:
        data_parallel.DDP_BUCKET_SIZE = None


def train_critic(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: ValueMiniBatch,
    num_steps: int = reference.STEPS,
    directory: Path | None = None,
    is_loading: bool = False,
    dtype: torch.dtype = torch.float32,
    megatron: dict[str, Any] | None = None,
    bucket_size: int | None = None,
    mistake: str | None = None,
    save_after: int | None = None,
    fsdp: FSDPConfig | None = None,
) -> CriticResult:
    """Values, then optimizer steps on one mini-batch. `directory`: load from it first, or save to
    it at the end, or after `save_after` steps.
    """
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            MISTAKES[mistake](patch)
        how = {"megatron": megatron, "bucket_size": bucket_size, "fsdp": fsdp}
        critic = make_critic(world, name, StateSource(state), dtype, **how)
        if directory is not None and is_loading:
            critic.load(directory)
        shard, plan = share(world, batch, 40)
        values = critic.values(shard, plan)
        updates = []
        for step in range(num_steps + 1):
            if (
                directory is not None
                and not is_loading
                and step == (num_steps if save_after is None else save_after)
            ):
                critic.save(directory)
            if step < num_steps:
                updates.append(critic.update(shard, plan))
        return CriticResult(values, updates, *shards(critic, "value"), plan)


def head_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """The head is marked as the norms are, though each tp rank has its whole gradient already."""
    from rlhf_megatron.ranks.models.output_heads import ValueHead

    init = ValueHead.__init__

    def __init__(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.weight.sequence_parallel = self.bias.sequence_parallel = True

    patch.setattr(ValueHead, "__init__", __init__)


def body_summed_over_tp(patch: pytest.MonkeyPatch) -> None:
    """The hidden states' gradient is summed over tp on its way back, though it is
    complete on each rank.
    """
    from rlhf_megatron.ranks.models import output_heads

    gather = output_heads.gather_from_sequence_parallel_region

    def summing(hidden: Tensor, tensor_parallel_output_grad: bool, group: Any) -> Tensor:
        return gather(hidden, tensor_parallel_output_grad=True, group=group)

    patch.setattr(output_heads, "gather_from_sequence_parallel_region", summing)


def head_not_summed_over_cp(patch: pytest.MonkeyPatch) -> None:
    """Each context-parallel rank trains the head on its own rows."""
    from rlhf_megatron.ranks.models.output_heads import ValueHead

    values = ValueHead.compute_values

    def of_the_first(self: Any, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        result = values(self, hidden_SH, rows_R)
        is_first = torch.distributed.get_rank() == 0
        return result if is_first else values(_Frozen(self), hidden_SH, rows_R)

    patch.setattr(ValueHead, "compute_values", of_the_first)


class _Frozen:
    def __init__(self, head: Any) -> None:
        self.weight = head.weight.detach()
        self.bias = head.bias.detach()
        self.sequence_parallel = head.sequence_parallel


def value_after_the_token(patch: pytest.MonkeyPatch) -> None:
    """The returns of a token are held against the value of the state behind it."""
    from rlhf_megatron.ranks.workers import critic

    pack = critic.pack_batch

    def shifted(batch: ValueMiniBatch, *arguments: Any) -> Any:
        moved = ValueMiniBatch(**{**vars(batch), "returns": batch.returns.roll(1)})
        return pack(moved, *arguments)

    patch.setattr(critic, "pack_batch", shifted)


MISTAKES = {
    f.__name__: f
    for f in (
        head_summed_over_tp,
        body_summed_over_tp,
        head_not_summed_over_cp,
        value_after_the_token,
    )
}


def score(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: TokenBatch,
    fsdp: FSDPConfig | None = None,
) -> tuple[CriticValues | None, ReplicaPlan]:
    """The scores of a frozen model that is in host memory between its calls;
    of the second of two.
    """
    from rlhf_megatron.ranks.workers.frozen_model import FrozenRewardModel
    from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.weights.value_model import add_value_head

    arguments = (
        reference.HF_CONFIGS[name],
        add_value_head(StateSource(state), 0.0, SEED),
        world,
        torch.float32,
    )
    backend: Any
    if fsdp is not None:
        backend = FSDPBackend(*arguments, fsdp, "value", is_frozen=True)
    else:
        backend = MegatronBackend(*arguments, megatron_of(world, {}), "value", is_frozen=True)
    model = FrozenRewardModel(backend, "reward_model", is_offloaded=fsdp is None)
    shard, plan = share(world, batch, 40)
    model.values(shard, plan)
    return model.values(shard, plan), plan
