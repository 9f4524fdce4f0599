"""The same steps in the package's actor on the ranks of a layout, and its shards as Hugging Face tensors again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.cases import Cut, Recipe
from benchmarks.parity.layouts import Axes
from rlhf_megatron.config.schema import ActorConfig, OptimConfig, PolicyLossConfig
from rlhf_megatron.data.batch import LogProbs, TrainBatch, select
from rlhf_megatron.data.plan import ReplicaPlan, plan_replicas, restore, take
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Rule, join
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.world import World
from rlhf_megatron.scheduler.mini_batches import mini_batches

HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class StateSource:
    """Weights out of a dict of Hugging Face tensors."""

    state: dict[str, Tensor]

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(self.state[tensor.name] for tensor in rule.hf)


@dataclass(frozen=True)
class RankResult:
    """What a rank hands back. Log-probs on leaders only; shards by Megatron name."""

    before: LogProbs | None
    after: LogProbs | None
    plan: ReplicaPlan
    gradients: list[dict[str, Tensor]]  # of each optimizer step, before clipping
    weights: dict[str, Tensor]
    grad_norms: list[float]  # on leaders


def run_on_rank(
    world: World,
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    batch: dict[str, Tensor],
    cuts: Sequence[Cut],
    recipe: Recipe,
) -> list[RankResult]:
    """A job of the worker pool: every cut from the same start."""
    return [_run_cut(world, hf_config, state, batch, cut, recipe) for cut in cuts]


def _run_cut(
    world: World,
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    columns: dict[str, Tensor],
    cut: Cut,
    recipe: Recipe,
) -> RankResult:
    from rlhf_megatron.checkpoint.load_model import named_parameters
    from rlhf_megatron.workers.actor import MegatronActor, Phase

    config = actor_config(recipe, cut)
    phases = {"rl": Phase(config.optim, len(cut.mini_batches))}
    actor = MegatronActor(hf_config, StateSource(state), world, torch.float32, config, phases)
    gradients = _watch_gradients(actor)
    batch = _train_batch(columns)
    plan = _plan(world, batch, cut.token_budget)
    before = actor.log_probs(take(batch, plan), plan, recipe.temperature, with_entropy=True)
    norms = []
    for start, stop in cut.mini_batches:
        part = select(batch, range(start, stop))
        (mini_batch,) = mini_batches(part, len(part), cut.loss_agg_mode, use_shuffle=False, seed=0, step=0, epoch=0)
        share = _plan(world, mini_batch, cut.token_budget)
        update = actor.update(take(mini_batch, share), share, recipe.temperature, "policy")
        norms += [update.grad_norm] if update else []
    after = actor.log_probs(take(batch, plan), plan, recipe.temperature)
    weights = {name: p.detach().clone() for name, p in named_parameters(actor.model.chunks).items()}
    return RankResult(before, after, plan, gradients, weights, norms)


def actor_config(recipe: Recipe, cut: Cut) -> ActorConfig:
    """The settings as a user would write them."""
    return ActorConfig(
        optim=OptimConfig(
            lr=recipe.lr,
            eps=recipe.adam_eps,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            clip_grad=recipe.max_grad_norm,
        ),
        policy_loss=PolicyLossConfig(
            "ppo_clip",
            {
                "clip_ratio_low": recipe.clip_low,
                "clip_ratio_high": recipe.clip_high,
                "clip_ratio_c": recipe.dual_clip,
            },
        ),
        loss_agg_mode=cut.loss_agg_mode,
        entropy_coeff=recipe.entropy_coef,
        use_kl_loss=True,
        kl_loss_coef=recipe.kl_coef,
        kl_loss_type="k3",
        log_prob_chunk_size=50,
    )


def _watch_gradients(actor: Any) -> list[dict[str, Tensor]]:
    """A list that grows with each optimizer step: the gradients that it starts from."""
    from rlhf_megatron.checkpoint.load_model import named_parameters

    seen: list[dict[str, Tensor]] = []
    step = actor.optimizer.step

    def watched() -> Any:
        seen.append({name: p.main_grad.clone() for name, p in named_parameters(actor.model.chunks).items()})
        return step()

    actor.optimizer.step = watched
    return seen


def _train_batch(columns: dict[str, Tensor]) -> TrainBatch:
    num_samples = columns["offsets"].numel() - 1
    zeros, texts = torch.zeros(num_samples, dtype=torch.int64), ("",) * num_samples
    return TrainBatch(
        **columns,
        rollout_log_probs=columns["old_log_probs"],
        group_ids=zeros,
        sample_ids=torch.arange(num_samples),
        policy_versions=zeros,
        finish_reasons=("stop",) * num_samples,
        prompts=texts,
        responses=texts,
        labels=texts,
        sources=texts,
        rewards=zeros.float(),
        reward_statuses=("ok",) * num_samples,
    )


def _plan(world: World, batch: Any, token_budget: int) -> ReplicaPlan:
    plans = plan_replicas(batch.lengths.tolist(), world.layout.dp, token_budget, world.layout.tp)
    return plans[world.coordinates.dp]


def assemble(results: list[RankResult], hf_config: dict[str, Any], axes: Axes) -> dict[str, Tensor]:
    """The tensors that `measure` reads, of one cut, from all ranks: see `dumps`."""
    leaders = [result for result in results if result.before is not None]
    plans = [leader.plan for leader in leaders]
    before = restore([leader.before for leader in leaders], plans)
    after = restore([leader.after for leader in leaders], plans)
    assert all(leader.grad_norms == leaders[0].grad_norms for leader in leaders), "replicas differ in gradient norms"
    tensors = {
        "log_probs": before.log_probs,
        "entropies": before.entropies,
        "log_probs_after": after.log_probs,
        "grad_norms": torch.tensor(leaders[0].grad_norms, dtype=torch.float64),
    }
    for step in range(len(results[0].gradients)):
        gradients = _hf_tensors([result.gradients[step] for result in results], hf_config, axes)
        tensors |= {f"gradient/{step}/{name}": tensor for name, tensor in gradients["dp0_tp0"].items()}
    weights = _hf_tensors([result.weights for result in results], hf_config, axes)
    tensors |= {f"weights/{name}": tensor for name, tensor in weights.pop("dp0_tp0").items()}
    for copy, named in weights.items():
        tensors |= {f"copies/{copy}/{name}": tensor for name, tensor in named.items()}
    return tensors


def _hf_tensors(shards: list[dict[str, Tensor]], hf_config: dict[str, Any], axes: Axes) -> dict[str, dict[str, Tensor]]:
    """Copy -> HF name -> full tensor. "dp0_tp0" is the model; every other copy must equal it.

    Copies are: each replica, what a tp rank holds of tensors that tp does not split, and the head's tied embedding.
    """
    layout = Layout(axes.num_ranks, axes.tp, axes.pp)
    copies: dict[str, dict[str, Tensor]] = {}
    table = table_for(hf_config, axes.tp)
    names = {rule.megatron_name for rule in table}
    for rule in table:
        held = {rule.megatron_name: ""}
        if rule.megatron_name == EMBEDDING and HEAD not in names:
            held[HEAD] = "_head"
        for name, suffix in held.items():
            for dp in range(axes.dp):
                ranks = [rank for rank in layout.replica(dp) if name in shards[rank]]
                parts = [shards[rank][name] for rank in ranks]
                if not parts and suffix:
                    continue  # one stage holds both: there is no second copy
                assert len(parts) == axes.tp, f"{name} is on {len(parts)} ranks of replica {dp}, not on {axes.tp}"
                fulls = parts if rule.split == "replicated" else [join(rule.split, parts)]
                for tp, full in enumerate(fulls):
                    target = copies.setdefault(f"dp{dp}_tp{tp}{suffix}", {})
                    target |= {hf.name: t.clone() for hf, t in zip(rule.hf, rule.to_hf(full), strict=True)}
    return copies
