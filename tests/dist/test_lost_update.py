"""The share of an update that rounding loses, measured on sharded models: against what the weights
of all ranks, put together, give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import CONFIG, OVERLAPPED, SHARDED, make_actor, share

from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.update_rounding import (
    LostUpdateSums,
    choose_sampled_tensors,
    compute_lost_update_share,
)
from rlhf_megatron.weights.weight_table import WeightRule, join_shards

pytestmark = pytest.mark.dist
MOE = {
    **reference.COMMON,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
LORA = LoRAConfig(rank=4, alpha=12.0)
SCALE = 3.0


@dataclass(frozen=True)
class SentWeights:
    """What a rank sends in a sync, and what the rank knows of it."""

    weights: dict[str, Tensor]  # Megatron name -> shard, as it is before the cast
    masters: dict[str, Tensor]  # Megatron name -> shard, float32
    sums: LostUpdateSums | None


def read_masters(actor: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 weights behind the shards of this rank, put together over data-parallel ranks."""
    if not hasattr(actor.backend, "chunks"):  # fsdp
        return {name: weight.clone() for name, weight in weights.items()}
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.workers.optimizer_state import iterate_parameter_states

    names = {
        id(parameter): name
        for name, parameter in collect_named_parameters(actor.backend.chunks).items()
    }
    masters = {}
    for state in iterate_parameter_states(actor.backend.optimizer.megatron_optimizer):
        name = names[id(state.model_param)]
        part = state.decode_tensors().get("fp32_param", state.model_shard)
        if state.element_range is None:
            masters[name] = part.detach().clone().view(state.model_param.shape)
            continue
        whole = torch.zeros(state.model_param.numel())
        whole[state.element_range] = part.detach().flatten()
        torch.distributed.all_reduce(whole, group=state.sharing_group)
        masters[name] = whole.view(state.model_param.shape)
    return masters


def send_twice(
    world: World,
    state: dict[str, Tensor],
    batch: MiniBatch,
    name: str = "llama",
    backend: str = "megatron",
    dtype: torch.dtype = torch.bfloat16,
    engine_dtype: torch.dtype = torch.bfloat16,
    megatron: dict[str, Any] | None = None,
    lora: LoRAConfig | None = None,
    is_offloaded: bool = False,
) -> list[SentWeights]:
    """A sync, two optimizer steps, and another sync, which is sent once more."""
    if name == "moe":
        reference.HF_CONFIGS[name] = MOE
    config = replace(CONFIG, backend=backend, lora=lora or LoRAConfig())
    settings = megatron or {}
    if world.layout.ep > 1:
        settings = {**settings, "expert_model_parallel_size": world.layout.ep}
        settings |= {"expert_tensor_parallel_size": world.layout.etp}
    actor = make_actor(world, name, state, config, dtype, megatron=settings, bucket_size=20_000)
    shard, plan = share(world, batch, 40)
    sent: list[SentWeights] = []

    def send(version: int) -> LostUpdateSums | None:
        if is_offloaded:
            actor.offload(("gradients", "optimizer"))
        export = actor.export_for_engines(version, engine_dtype)
        weights = {
            rule.megatron_name: tensor.clone()
            for rule, tensor in export.shards
            if tensor is not None
        }
        sums = export.finish_send()
        if is_offloaded:
            actor.onload()
        sent.append(SentWeights(weights, read_masters(actor, weights), sums))
        return sums

    send(1)
    for _ in range(2):
        actor.update(shard, plan, reference.TEMPERATURE, "sft")
    send(2)
    assert lora is not None or send(2) is None, "the version was sent before"
    return sent[:2]


def join_ranks(
    ranks: list[list[SentWeights]], rules: list[WeightRule], kind: str, number: int, ways: int
) -> dict[str, Tensor]:
    """Whole tensors of a sync by name; the first ranks that hold a tensor have all its shards."""
    whole = {}
    for rule in rules:
        name = rule.megatron_name
        shards = [getattr(rank[number], kind) for rank in ranks]
        held = [shard[name] for shard in shards if name in shard]
        whole[name] = (
            held[0] if rule.split == "replicated" else join_shards(rule.split, held[:ways])
        )
    return whole


def share_of_dump(
    ranks: list[list[SentWeights]], ways: int, config: dict[str, Any], engine_dtype: torch.dtype
) -> float:
    """The share from the tensors of the sample as a whole, in float64."""
    table = make_weight_table(config, ways)
    names = choose_sampled_tensors(table)
    rules = [rule for rule in table if rule.megatron_name in names]
    assert len(rules) == 16
    lost = change = 0.0
    sent = [join_ranks(ranks, rules, "weights", number, ways) for number in (0, 1)]
    masters = [join_ranks(ranks, rules, "masters", number, ways) for number in (0, 1)]
    for name in names:
        moved = masters[1][name].double() - masters[0][name].double()
        seen = sent[1][name].to(engine_dtype).double() - sent[0][name].to(engine_dtype).double()
        lost += float((seen - moved).square().sum())
        change += float(moved.square().sum())
    return math.sqrt(lost / change)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model("llama").state_dict().items()}


BF16_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 dp2, sharded, gathered late": {"tp": 2, "dp": 2, "megatron": OVERLAPPED},
    "dp2 in fewer bits on the host": {
        "dp": 2,
        "megatron": {
            **SHARDED,
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
        },
    },
    "cp2, optimizer offloaded": {"cp": 2, "megatron": SHARDED, "is_offloaded": True},
}


@pytest.mark.parametrize("case", BF16_LAYOUTS)
def test_a_sync_measures_what_the_dumped_weights_say(
    dist_pool: DistPool, state: dict[str, Tensor], case: str
) -> None:
    layout = BF16_LAYOUTS[case]
    ranks = dist_pool.run(
        send_twice, state=state, batch=reference.make_batch(), timeout_s=300, **layout
    )
    assert all(rank[0].sums is None for rank in ranks), "there was no sync before the first"
    expected = share_of_dump(
        ranks, layout.get("tp", 1), reference.HF_CONFIGS["llama"], torch.bfloat16
    )
    found = compute_lost_update_share(rank[1].sums for rank in ranks)
    assert found == pytest.approx(expected, rel=1e-6)
    assert 0.05 < expected < 2.0


def test_experts_count_once(dist_pool: DistPool) -> None:
    """Experts over ep 2, the other layers twice, by tp 1 and dp 2 or tp 2."""
    from rlhf_megatron.weights.weight_source import make_random_source

    source = make_random_source(MOE, 3)
    state = {
        hf.name: tensor
        for rule in make_weight_table(MOE)
        for hf, tensor in zip(rule.hf_tensors, source.read_hf_tensors(rule), strict=True)
    }
    job: dict[str, Any] = {"state": state, "batch": reference.make_batch(), "name": "moe"}
    ranks = dist_pool.run(send_twice, **job, dp=2, ep=2, etp=1, megatron=SHARDED, timeout_s=300)
    expected = share_of_dump(ranks, 1, MOE, torch.bfloat16)
    found = compute_lost_update_share(rank[1].sums for rank in ranks)
    assert found == pytest.approx(expected, rel=1e-6)


def test_float32_weights_that_are_cast_and_such_that_are_not(
    dist_pool: DistPool, state: dict[str, Tensor]
) -> None:
    job: dict[str, Any] = {"state": state, "batch": reference.make_batch(), "dtype": torch.float32}
    cast = dist_pool.run(send_twice, **job, tp=2)
    expected = share_of_dump(cast, 2, reference.HF_CONFIGS["llama"], torch.bfloat16)
    found = compute_lost_update_share(rank[1].sums for rank in cast)
    assert found == pytest.approx(expected, rel=1e-6) and expected > 0.05
    exact = dist_pool.run(send_twice, **job, tp=2, engine_dtype=torch.float32)
    assert [sent.sums for rank in exact for sent in rank] == [None] * 4


def test_fsdp_casts_its_float32_weights(dist_pool: DistPool, state: dict[str, Tensor]) -> None:
    from rlhf_megatron.weights.transformers_causal_lm import make_transformers_weight_table

    config = reference.HF_CONFIGS["llama"]
    names = choose_sampled_tensors(make_transformers_weight_table(config, "vocabulary"))
    job: dict[str, Any] = {"state": state, "batch": reference.make_batch(), "backend": "fsdp"}
    ranks = dist_pool.run(send_twice, **job, dp=2)
    lost = change = 0.0
    for before, now in ranks:
        for name in names:
            moved = now.weights[name].double() - before.weights[name].double()
            sent = [one.weights[name].bfloat16().double() for one in (before, now)]
            lost += float((sent[1] - sent[0] - moved).square().sum())
            change += float(moved.square().sum())
    found = compute_lost_update_share(now.sums for _, now in ranks)
    assert found == pytest.approx(math.sqrt(lost / change), rel=1e-6)


def train_adapter(
    world: World, state: dict[str, Tensor], batch: MiniBatch, dtype: torch.dtype
) -> tuple[float, float, dict[str, Tensor], LostUpdateSums | None, bool]:
    """(the largest difference of log-probs between the policy and a reference that became the
    policy, the same after one more step, this rank's weights, the sums of a sync, whether the
    reference came back from its files).
    """
    import tempfile
    from pathlib import Path

    import torch.distributed as dist
    from workers_jobs import StateSource

    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf
    from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend
    from rlhf_megatron.ranks.workers.reference_model import ReferenceModel

    config = replace(CONFIG, backend="fsdp", lora=LORA)
    actor = make_actor(world, "llama", state, config, dtype)
    frozen = FSDPBackend(
        reference.HF_CONFIGS["llama"],
        StateSource(state),
        world,
        dtype,
        config.fsdp,
        is_frozen=True,
        lora=LORA,
    )
    model = ReferenceModel(frozen, 50, config.kernels)
    shard, plan = share(world, batch, 40)

    def difference() -> float:
        pair = [role.log_probs(shard, plan, reference.TEMPERATURE) for role in (actor, model)]
        return (pair[0].log_probs - pair[1].log_probs).abs().max().item()

    for _ in range(3):
        actor.update(shard, plan, reference.TEMPERATURE, "sft")
    model.copy_weights_from(actor.backend)
    at_copy = difference()
    weights = {name: piece.clone() for name, piece in actor.backend.named_weights().items()}
    export = actor.export_for_engines(1, torch.bfloat16)
    list(export.shards)
    sums = export.finish_send()

    folder = [tempfile.mkdtemp() if world.rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    assert frozen.adapter is not None
    matrices = frozen.adapter.gather_matrices()
    if world.rank == 0:
        frozen.adapter.save(Path(folder[0]) / "reference", matrices, "base")
    dist.barrier()
    frozen.adapter.clear()
    is_other = difference() > 1e-3
    model.load_adapter(Path(folder[0]) / "reference")
    is_back = is_other and difference() == at_copy
    export_sharded_model_to_hf(
        frozen.export_shards(),
        frozen.export_world,
        directory=Path(folder[0]) / "merged",
        hf_config=reference.HF_CONFIGS["llama"],
        dtype=dtype,
    )
    dist.barrier()
    model.load_hf(Path(folder[0]) / "merged")  # as checkpoints of earlier versions have it
    is_near = 0.0 < difference() < (1e-4 if dtype == torch.float32 else 0.2)
    has_no_effect = all(
        not matrix.any()
        for name, matrix in frozen.adapter.gather_matrices().items()
        if name.endswith("lora_B.weight")
    )
    model.copy_weights_from(actor.backend)
    is_back = is_back and is_near and has_no_effect and difference() == at_copy
    actor.update(shard, plan, reference.TEMPERATURE, "sft")
    return at_copy, difference(), weights, sums, is_back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_a_reference_with_an_adapter_is_the_policy_bit_for_bit(
    dist_pool: DistPool, state: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """It has the policy's matrices, which come back from its files, too. And the sums of a sync are
    those of all merged weights.
    """
    ranks = dist_pool.run(
        train_adapter, state=state, batch=reference.make_batch(), dtype=dtype, dp=2
    )
    assert [at_copy for at_copy, *_ in ranks] == [0.0, 0.0]
    assert all(later > 0 for _, later, *_ in ranks) and all(rank[4] for rank in ranks)

    weights = {name: torch.cat([rank[2][name] for rank in ranks]) for name in ranks[0][2]}
    lost = change = 0.0
    for name in [name for name in weights if name.endswith("lora_A.weight")]:
        stem = name.removesuffix("lora_A.weight")
        up = weights[f"{stem}lora_B.weight"].double()
        added = SCALE * up @ weights[name].double()
        base = weights[f"{stem}weight"]
        assert base.dtype == dtype
        merged = (base.float() + added.float()).bfloat16().double()
        lost += float((merged - base.bfloat16().double() - added).square().sum())
        change += float(added.square().sum())
    found = compute_lost_update_share(rank[3] for rank in ranks)
    assert found == pytest.approx(math.sqrt(lost / change), rel=1e-3)
