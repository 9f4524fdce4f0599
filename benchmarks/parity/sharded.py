"""The same steps in the package's actor, or critic, on the ranks of a layout, and its shards as HF
tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.cases import Cut, Recipe, Role
from benchmarks.parity.layouts import Axes
from benchmarks.parity.measure import TOKEN_QUANTITIES
from benchmarks.parity.routes import assembled, watched
from benchmarks.parity.subjects import HEADS, SUBJECTS, Subject
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.data.batch import CriticValues, TokenLogProbs, TrainBatch, select_samples
from rlhf_megatron.data.replica_plan import ReplicaPlan, restore_sample_order, take_replica_shard
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.runtime.call_dispatch import make_scattered_call
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import find_holder_places, join_shards

HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
BUCKET_SIZE = 4_000  # parameters whose gradients are reduced together, where that overlaps
FIRST = "dp0_cp0_tp0"  # the copy of the model that is compared with the reference


@dataclass(frozen=True)
class RankResult:
    """What a rank hands back. Token columns and norms on leaders only; shards by Megatron name."""

    before: TokenLogProbs | CriticValues | None
    after: TokenLogProbs | CriticValues | None
    plan: ReplicaPlan
    # of the first optimizer step, reduced, before clipping; of one copy of the model
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    grad_norms: list[float]
    routes: list[Tensor]  # rows of `routes`, before the first optimizer step


def run_on_rank(
    world: World,
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    batch: dict[str, Tensor],
    cuts: Sequence[Cut],
    recipe: Recipe,
    megatron: MegatronConfig,
    checkpoints: Path | None = None,
    role: Role = "actor",
) -> list[RankResult]:
    """A job of the worker pool: every cut from the same start.

    `checkpoints`: an empty directory, where the state is saved after the first optimizer step;
    another worker loads it and goes on.
    """

    def run(cut: Cut) -> RankResult:
        subject = SUBJECTS[role](cut, recipe, megatron)
        make_worker = partial(subject.make, hf_config, state, world)
        return _run_cut(
            world, subject, make_worker, train_batch(batch), checkpoints and checkpoints / cut.name
        )

    with _small_buckets():
        return [run(cut) for cut in cuts]


@contextmanager
def _small_buckets() -> Iterator[None]:
    """Of the size that Megatron takes by default there would be one: nothing to overlap, and no
    padding in between.
    """
    from rlhf_megatron.ranks.workers import data_parallel

    kept = data_parallel.DDP_BUCKET_SIZE
    data_parallel.DDP_BUCKET_SIZE = BUCKET_SIZE
    try:
        yield
    finally:
        data_parallel.DDP_BUCKET_SIZE = kept


def _run_cut(
    world: World,
    subject: Subject,
    make_worker: Callable[[], Any],
    batch: TrainBatch,
    checkpoint: Path | None,
) -> RankResult:
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_weights

    worker = make_worker()
    # Megatron has one bucket on the others
    if subject.megatron.overlap_grad_reduce and world.is_first_stage:
        (buffer,) = worker.backend.model.chunks[0].buffers
        assert len(buffer.buckets) > 1, "overlap needs several buckets"
    gradients = _watch_gradients(worker, world)
    budget = subject.cut.token_budget
    plan = _plan(world, batch, budget)
    with watched(
        worker.backend.model.chunks, world, take_replica_shard(batch, plan), plan
    ) as routes:
        before = subject.columns(worker, take_replica_shard(batch, plan), plan)
    norms = []
    for step, (start, stop) in enumerate(subject.cut.mini_batches):
        if step == 1 and checkpoint is not None:
            worker.save(checkpoint)
            worker = make_worker()
            worker.load(checkpoint)
        mini_batch = subject.mini_batch(select_samples(batch, range(start, stop)))
        share = _plan(world, mini_batch, budget)
        update = subject.update(worker, take_replica_shard(mini_batch, share), share)
        norms += [update.grad_norm] if update else []
    # What a weight sync would send now; then the last stage's copy of a tied embedding.
    weights = {
        rule.megatron_name: _copy(shard)
        for rule, shard in worker.export_shards()
        if shard is not None
    }
    after = subject.columns(worker, take_replica_shard(batch, plan), plan)
    weights = {
        name: _copy(p) for name, p in collect_named_weights(worker.backend.model.chunks).items()
    } | weights
    return RankResult(before, after, plan, gradients, weights, norms, routes)


def _watch_gradients(worker: Any, world: World) -> dict[str, Tensor]:
    """Filled when the first optimizer step starts, on the ranks of the first copy of the model."""
    seen: dict[str, Tensor] = {}
    step = worker.backend.optimizer.step

    def watched(*args: Any) -> Any:
        worker.backend.optimizer.step = step
        gradients = _reduced_gradients(worker.backend.model.chunks, world)
        if world.is_first_copy:
            seen.update(gradients)
        return step(*args)

    worker.backend.optimizer.step = watched
    return seen


def _reduced_gradients(chunks: Sequence[Any], world: World) -> dict[str, Tensor]:
    """Global name -> the whole gradient of this rank's shard. All ranks.

    With the distributed optimizer a rank's main gradients are reduced only in its own part of each
    bucket: the parts are gathered from the ranks that share the bucket.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters

    gathered: dict[Any, Tensor] = {}
    for chunk in chunks:
        groups = [(buffer, world.dp_cp_group) for buffer in chunk.buffers]
        groups += [(buffer, world.expert_dp_group) for buffer in chunk.expert_parallel_buffers]
        for buffer, group in groups:
            if buffer.ddp_config.use_distributed_optimizer:
                for bucket in buffer.buckets:
                    whole = _gather(bucket.grad_data, group)
                    for parameter in bucket.params_list:
                        start, stop, _ = buffer.param_index_map[parameter]
                        gathered[parameter] = whole[
                            start - bucket.offset : stop - bucket.offset
                        ].view(parameter.shape)
    parameters = collect_named_parameters(chunks)
    return {
        name: _copy(gathered[p] if p in gathered else _main_grad(p))
        for name, p in parameters.items()
    }


def _main_grad(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad
    return gradient


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, whatever happens to `tensor`."""
    return tensor.detach().to("cpu", copy=True)


def _gather(bucket: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's own part of `bucket`, together."""
    whole = torch.empty_like(bucket)
    dist.all_gather_into_tensor(
        whole, bucket.chunk(group.size())[group.rank()].clone(), group=group
    )
    return whole


def train_batch(columns: dict[str, Tensor]) -> TrainBatch:
    """Token columns (see `cases.make_batch`, `add_past` and `add_values`) as the batch of a step.
    An engine that is not among them agrees with the old policy.
    """
    num_samples = columns["offsets"].numel() - 1
    zeros = torch.zeros(num_samples, dtype=torch.int64)
    texts = ("",) * num_samples
    engine = columns.get("old_log_probs", torch.zeros(columns["token_ids"].numel()))
    return TrainBatch(
        **{"rollout_log_probs": engine, **columns},
        group_ids=zeros,
        sample_ids=torch.arange(num_samples),
        policy_versions=zeros,
        finish_reasons=("stop",) * num_samples,
        prompts=texts,
        responses=texts,
        labels=texts,
        sources=texts,
        extras=texts,
        rewards=zeros.float(),
        reward_statuses=("ok",) * num_samples,
    )


def _plan(world: World, batch: Any, token_budget: int) -> ReplicaPlan:
    """The one that dispatch would send to this rank."""
    scattered = make_scattered_call(0, "update", batch, world.layout, token_budget, {})
    return scattered.replica_plans[world.coordinates.dp]


def assemble(
    results: list[RankResult],
    hf_config: dict[str, Any],
    offsets: Tensor,
    axes: Axes,
    role: Role = "actor",
) -> dict[str, Tensor]:
    """The tensors that `measure` reads, of one cut, from all ranks: see `dumps`."""
    leaders = [result for result in results if result.before is not None]
    plans = [leader.plan for leader in leaders]
    before = restore_sample_order([leader.before for leader in leaders], plans, offsets)
    after = restore_sample_order([leader.after for leader in leaders], plans, offsets)
    assert all(leader.grad_norms == leaders[0].grad_norms for leader in leaders), (
        "replicas differ in gradient norms"
    )
    tensors = {"grad_norms": torch.tensor(leaders[0].grad_norms, dtype=torch.float64)}
    for name in TOKEN_QUANTITIES[role]:
        tensors[name] = getattr(
            after if name.endswith("_after") else before, name.removesuffix("_after")
        )
    if rows := [part for result in results for part in result.routes]:
        tensors["routes"] = assembled(rows, offsets)
    gradients = hf_tensors(
        [result.gradients for result in results], hf_config, axes, role, is_whole=False
    )
    tensors |= {f"gradient/0/{name}": tensor for name, tensor in gradients[FIRST].items()}
    weights = hf_tensors(
        [result.weights for result in results], hf_config, axes, role, is_whole=True
    )
    tensors |= {f"weights/{name}": tensor for name, tensor in weights.pop(FIRST).items()}
    for copy, named in weights.items():
        tensors |= {f"copies/{copy}/{name}": tensor for name, tensor in named.items()}
    return tensors


def hf_tensors(
    shards: list[dict[str, Tensor]],
    hf_config: dict[str, Any],
    axes: Axes,
    role: Role,
    is_whole: bool,
) -> dict[str, dict[str, Tensor]]:
    """Copy -> HF name -> full tensor. FIRST is the model; every other copy must equal it.

    Copies are: each replica and cp rank, what a tp rank holds of tensors that tp does not split,
    experts on other ranks than the first that have them, and the head's tied embedding. `is_whole`
    False: only the ranks of the first copy hold tensors.
    """
    layout = ParallelLayout(axes.num_ranks, axes.tp, axes.pp, axes.cp, ep=axes.ep, etp=axes.etp)
    table = make_weight_table(hf_config, axes.tp, axes.impl, HEADS[role])
    names = {rule.megatron_name for rule in table}
    replicas = list(product(range(axes.dp), range(axes.cp))) if is_whole else [(0, 0)]
    copies: dict[str, dict[str, Tensor]] = {}
    for rule in table:
        if rule.dtype is not None and not is_whole:
            continue  # a buffer has no gradient
        held = {rule.megatron_name: ""}
        if rule.megatron_name == EMBEDDING and HEAD not in names:
            held[HEAD] = "_head"
        if rule.expert is None:
            groups = {
                f"dp{dp}_cp{cp}": [layout.compute_rank(dp, 0, tp, cp) for tp in range(axes.tp)]
                for dp, cp in replicas
            }
        else:
            copy_size = axes.ep * layout.etp
            firsts = [copy * copy_size for copy in range(layout.edp if is_whole else 1)]
            groups = {
                f"experts{first}": [first + place for place in find_holder_places(rule, layout)]
                for first in firsts
            }
        for (name, suffix), (group, places) in product(held.items(), groups.items()):
            ranks = [
                stage * layout.stage_size + place for stage in range(axes.pp) for place in places
            ]
            parts = [shards[rank][name] for rank in ranks if name in shards[rank]]
            if not parts and suffix:
                continue  # one stage holds both: there is no second copy
            assert len(parts) == len(places), (
                f"{name} is on {len(parts)} ranks of {group}, not on {len(places)}"
            )
            fulls = parts if rule.split == "replicated" else [join_shards(rule.split, parts)]
            for tp, full in enumerate(fulls):
                copy = FIRST if group == "experts0" else f"{group}_tp{tp}{suffix}"
                target = copies.setdefault(copy, {})
                target |= {
                    hf.name: t.clone()
                    for hf, t in zip(rule.hf_tensors, rule.to_hf(full), strict=True)
                }
    return copies
