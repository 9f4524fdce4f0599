"""A trainer of one rank, an engine behind a fault proxy, and weight syncs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rollout_tools import request, tiny_qwen3
from transformers import PreTrainedModel

from benchmarks.chaos.fault_proxy import FaultProxy, ProxyFault
from rlhf_megatron.config.schema import ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhf_megatron.controller.sync.engine_probe import EngineWeightProbe
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.ranks.parallel.world import destroy_world
from rlhf_megatron.rollout.engine_interface import GenerateRequest, InferenceEngine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies

DENSE = partial(tiny_qwen3, 1, tied=False)
BUCKET_BYTES = 100_000  # several buckets; the parts of an attention block stay in one
PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (3,)]
# never comes, but has the proxy keep the first bucket it sees
KEEPS_OLD = ProxyFault("old_bucket", nth=1 << 40)
REQUESTS: list[GenerateRequest] = [request((1 + i, 2), (10 * i, 10 * i + 1), 12) for i in range(8)]


def write_model(directory: Path, make: Callable[[], PreTrainedModel] = DENSE) -> Path:
    make().save_pretrained(directory)
    return directory


def config_of(model: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        rollout=RolloutConfig(request_timeout_s=120.0),
        trainer=TrainerConfig(runtime="inline", n_gpus_per_node=1, device="cpu"),
    )


@contextmanager
def trainer(model: Path) -> Iterator[InlineWorkerGroup]:
    """The hosts of a run: one, in this process."""
    from rlhf_megatron.runtime.rank_roles import RoleBuilder

    group = InlineWorkerGroup(RoleBuilder(config_of(model)))
    try:
        yield group
    finally:
        group.close()
        destroy_world(is_default_group_ended=True)


def change_weights(group: InlineWorkerGroup, seed: int) -> None:
    """As an update would: every number of every tensor."""
    torch.manual_seed(seed)
    assert group._host is not None
    actor = group._host._roles["actor"]
    with torch.no_grad():
        for _, tensor in actor.export_shards():  # type: ignore[attr-defined]
            tensor.add_(0.05 * torch.randn_like(tensor))


@dataclass
class Rig:
    """One engine behind a proxy, alone in a fleet, and the syncs that give it the
    trainer's weights.
    """

    kind: str
    group: InlineWorkerGroup
    proxy: FaultProxy
    fleet: EngineFleet
    sync: WeightSync
    probe: EngineWeightProbe
    straight: Callable[[], InferenceEngine]  # a fresh client that goes around the proxy

    def plan(self, *faults: ProxyFault) -> None:
        """From now on; nothing else is planned."""
        self.proxy.damaged.clear()
        self.proxy.faults = (KEEPS_OLD, *faults)


def probe_of(config: RunConfig, group: InlineWorkerGroup) -> EngineWeightProbe:
    length = config.data.max_response_length
    budget = config.actor.ppo_max_token_len_per_gpu
    return EngineWeightProbe(
        config.checks,
        config.is_float32_throughout,
        config.rollout,
        length,
        budget,
        RoleProxies(group).actor,
        PROMPTS,
    )


def rig_of(
    kind: str,
    group: InlineWorkerGroup,
    proxy: FaultProxy,
    connect: Callable[[], InferenceEngine],
    straight: Callable[[], InferenceEngine],
    transfer_dir: Path,
    model: Path,
) -> Rig:
    fleet = EngineFleet([connect()], 60.0, 1)
    probe = probe_of(config_of(model), group)
    sync = WeightSync(
        RoleProxies(group).host, fleet, transfer_dir, BUCKET_BYTES, "float32", probe_engine=probe
    )
    proxy.faults = (KEEPS_OLD,)
    return Rig(kind, group, proxy, fleet, sync, probe, straight)
