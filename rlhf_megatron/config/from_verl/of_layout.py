"""Parallel layouts: that of the actor, and which others can be its own."""

from __future__ import annotations

from rlhf_megatron.config.from_verl.draft import Draft
from rlhf_megatron.config.from_verl.of_batches import SIZES
from rlhf_megatron.config.keys import field_types
from rlhf_megatron.config.schema import MegatronConfig

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
FREE = "override_transformer_config"
SHARED = (*SIZES, "virtual_pipeline_model_parallel_size")


def actor_layout(draft: Draft) -> None:
    g = draft.given
    if str(g.get("actor.strategy") or "megatron") != "megatron":
        g.notes.append(
            f"actor.strategy is {g.look('actor.strategy')}: the trainer here is always Megatron; choose"
            " actor.megatron.tensor_model_parallel_size and its neighbours for memory."
        )
    ulysses = "actor.ulysses_sequence_parallel_size"
    if g.get(ulysses) not in (None, 1):
        draft.put("actor.megatron.context_parallel_size", g.whole(ulysses), (ulysses,), "ranks that split a sample")
    _layout(draft, "actor.megatron")


def critic_layout(draft: Draft) -> None:
    """In the actor's pool, as in verl, unless the user gives it ranks of its own."""
    for name in SHARED:
        key, of_actor = f"critic.megatron.{name}", f"actor.megatron.{name}"
        if draft.given.has(key) and _size(draft, key) != _size(draft, of_actor):
            draft.leave(key, "the critic has the actor's ranks and layout; for others give it critic.num_ranks")
        draft.given.ignore(key)
    draft.given.ignore("critic.megatron.*")


def reference_layout(draft: Draft) -> None:
    g = draft.given
    for name in SHARED:
        key = f"reference.megatron.{name}"
        if g.has(key) and _size(draft, key) != _size(draft, f"actor.megatron.{name}"):
            draft.leave(key, "the reference shares the actor's layout")
    for source in ("reference.megatron.param_offload", "reference.fsdp_config.param_offload"):
        if g.get(source) is not None:
            draft.put("reference.param_offload", g.flag(source), (source,))
    g.ignore("reference.megatron.*")


def _size(draft: Draft, key: str) -> object:
    value = draft.given.look(key)
    return 1 if value is None else value


def _layout(draft: Draft, section: str) -> None:
    g = draft.given
    for name in SIZES:
        draft.copy(f"{section}.{name}")
    virtual = f"{section}.virtual_pipeline_model_parallel_size"
    if g.get(virtual) not in (None, 1):
        draft.put(virtual, g.whole(virtual), (virtual,))
    parallel, tp = f"{section}.sequence_parallel", g.whole(f"{section}.tensor_model_parallel_size")
    g.ignore(parallel)
    if tp is not None and tp > 1:
        draft.put(parallel, g.flag(parallel), (parallel,))
    shared = f"{section}.use_distributed_optimizer"
    draft.copy(shared, value=g.flag(shared))
    known = field_types(MegatronConfig)
    for free in ("override_transformer_config", "override_ddp_config"):
        for name in known:
            source, key = f"{section}.{free}.{name}", f"{section}.{name}"
            if g.get(source) is not None and not g.has(key):
                draft.put(key, g.get(source), (source,))
    _checkpointing(draft, section)


def _checkpointing(draft: Draft, section: str) -> None:
    """verl's one switch, where no granularity is given beside it."""
    source, granularity = "model.enable_gradient_checkpointing", f"{section}.recompute_granularity"
    is_wanted = draft.given.has(source) and draft.given.flag(source)
    draft.given.ignore(source)
    if is_wanted and granularity not in draft.values and not draft.given.has(f"{section}.{FREE}.{RECOMPUTE[0]}"):
        values = ("full", "uniform", 1)
        for name, value in zip(RECOMPUTE[:3], values, strict=True):
            draft.put(f"{section}.{name}", value, (source,), "each layer by itself" if name == RECOMPUTE[0] else "")
