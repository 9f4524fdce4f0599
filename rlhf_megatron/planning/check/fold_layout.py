"""Smaller layouts that keep what a large one is made of, for a machine with few processes.
Pure integers.

docs/check.md tells in which order axes are made smaller, and what becomes of a critic's pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config.rules.expert_rules import TERMS
from rlhf_megatron.config.rules.layout_rules import FIRST_LAST
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.weights.parallel_layout import make_parallel_layout

AXIS_KEYS = {
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
"""In the order in which they are made smaller."""


RunPool = tuple[str, MegatronConfig, int]
"""A pool of the run: key of its layout ("critic.megatron"), the layout, ranks.
See `config.rules.megatron_sections`.
"""


@dataclass(frozen=True)
class FoldedPool:
    """The layout of a pool on this machine."""

    megatron: MegatronConfig
    dp: int

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the pool."""
        return self.dp * count_replica_ranks(self.megatron)

    def __str__(self) -> str:
        """Return the layout as text, such as "tp2 pp2 dp1"."""
        return str(make_parallel_layout(self.megatron, self.num_ranks))


@dataclass(frozen=True)
class FoldedRun:
    """The layouts of one run on this machine."""

    name: str  # of its files: "shape", "replicas"
    actor: FoldedPool
    critic: FoldedPool | None  # None: no critic, or in the actor's pool
    differences: tuple[str, ...]  # from the run's own layouts, a sentence each

    @property
    def pools(self) -> tuple[FoldedPool, ...]:
        """Return the actor's pool, and the critic's where it has one."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all pools."""
        return sum(pool.num_ranks for pool in self.pools)

    def __str__(self) -> str:
        """Return the layouts as text, such as "tp2 pp2 dp1" or "tp2 pp2 dp1, critic tp2 pp1
        dp1".
        """
        return ", critic ".join(map(str, self.pools))


def make_unsharded_layout(megatron: MegatronConfig) -> MegatronConfig:
    """Return the layout that `megatron` must equal in its results: one rank, megatron-core's own
    layers, no recomputation, and the loss terms of `megatron`.
    """
    return MegatronConfig(
        transformer_impl="local", **{key: getattr(megatron, key) for key in TERMS}
    )


def count_replica_ranks(megatron: MegatronConfig) -> int:
    """Return the number of ranks that hold one copy of the model."""
    m = megatron
    return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size


def fold_layouts(pools: Sequence[RunPool], max_processes: int) -> tuple[FoldedRun, ...]:
    """Return one folded run, or two where the first has no room for the replicas of a pool that has
    several.

    `pools`: the pools of the run, the actor's first. Raise ValueError when `max_processes` is below
    1.
    """
    if max_processes < 1:
        raise ValueError(f"--max-processes is {max_processes}; it must be at least 1.")
    moved = (
        ("the critic is in the actor's pool, for want of a second process",)
        if len(pools) > max_processes
        else ()
    )
    pools = pools[:1] if moved else pools
    several = [num_ranks > count_replica_ranks(megatron) for _, megatron, num_ranks in pools]
    shares = _share_processes(
        [count_replica_ranks(megatron) for _, megatron, _ in pools], max_processes
    )
    smaller = [
        _shrink_layout(megatron, share)
        for (_, megatron, _), share in zip(pools, shares, strict=True)
    ]
    left = max_processes - sum(map(count_replica_ranks, smaller))
    dps = []
    for megatron, has_several in zip(smaller, several, strict=True):
        dps.append(2 if has_several and count_replica_ranks(megatron) <= left else 1)
        left -= (dps[-1] - 1) * count_replica_ranks(megatron)
    layouts = [_make_folded_run("shape", pools, smaller, dps, moved)]
    wanted = [2 if has_several else 1 for has_several in several]
    if dps != wanted:
        sizes = [
            dp * count_replica_ranks(megatron)
            for dp, (_, megatron, _) in zip(wanted, pools, strict=True)
        ]
        shares = _share_processes(sizes, max_processes)
        more = [min(dp, share) for dp, share in zip(wanted, shares, strict=True)]
        smaller = [
            _shrink_layout(pool[1], share // dp)
            for pool, share, dp in zip(pools, shares, more, strict=True)
        ]
        if any(dp > before for dp, before in zip(more, dps, strict=True)):
            layouts.append(_make_folded_run("replicas", pools, smaller, more, moved))
    return tuple(layouts)


def _share_processes(pool_sizes: Sequence[int], max_processes: int) -> list[int]:
    """Return the number of processes of each pool, of which there are one or two; at least 1
    each.
    """
    if len(pool_sizes) == 1:
        return [max_processes]
    if sum(pool_sizes) <= max_processes:
        return list(pool_sizes)
    few = min(*pool_sizes, max_processes // 2)
    return (
        [few, max_processes - few] if pool_sizes[0] < pool_sizes[1] else [max_processes - few, few]
    )


def _shrink_layout(megatron: MegatronConfig, max_ranks: int) -> MegatronConfig:
    """Return the layout with axes made smaller, in the order of AXIS_KEYS, until a replica fits
    into `max_ranks`: first down to 2, then to 1.
    """
    for floor in (2, 1):
        for name in AXIS_KEYS.values():
            size = getattr(megatron, name)
            others = count_replica_ranks(megatron) // getattr(megatron, name)
            fitting = [n for n in range(floor, size) if size % n == 0 and n * others <= max_ranks]
            if size > floor and size * others > max_ranks:
                megatron = _replace_setting(megatron, name, max(fitting, default=floor))
    return megatron


def _make_folded_run(
    run_name: str,
    pools: Sequence[RunPool],
    shrunk_layouts: Sequence[MegatronConfig],
    dp_sizes: Sequence[int],
    differences: tuple[str, ...],
) -> FoldedRun:
    """Return the folded run of these layouts and data-parallel sizes, with its differences from the
    run's own layouts added to `differences`.
    """
    folded = []
    for (section, true, num_ranks), megatron, dp in zip(
        pools, shrunk_layouts, dp_sizes, strict=True
    ):
        megatron, more = _fold_pool(megatron, dp, true, num_ranks // count_replica_ranks(true))
        prefix = f"{section.partition('.')[0]}: " if len(pools) > 1 or differences else ""
        differences += tuple(prefix + text for text in more)
        folded.append(FoldedPool(megatron, dp))
    return FoldedRun(run_name, folded[0], folded[1] if len(folded) > 1 else None, differences)


def _fold_pool(
    megatron: MegatronConfig, dp_size: int, run_layout: MegatronConfig, run_dp_size: int
) -> tuple[MegatronConfig, list[str]]:
    """Return (a pool's folded layout, without settings that it cannot have; sentences on how it
    differs from the pool's own layout).
    """
    megatron = _fold_expert_axes(megatron, dp_size, run_layout)
    axes = {**AXIS_KEYS, "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
    differences = [
        f"{axis} is {getattr(megatron, key)} instead of {getattr(run_layout, key)}"
        for axis, key in axes.items()
        if getattr(megatron, key) != getattr(run_layout, key)
    ]
    told = [
        key
        for key in (*FIRST_LAST, "pipeline_model_parallel_layout")
        if getattr(megatron, key) is not None
    ]
    if told:
        differences.append(f"{' and '.join(told)} off: all stages have as many layers")
    for key in told:
        megatron = _replace_setting(megatron, key, None)
    if dp_size != run_dp_size:
        differences.append(f"dp is {dp_size} instead of {run_dp_size}")
    for names, off, needed in _list_impossible_settings(megatron, dp_size):
        is_on = [key for key in names if getattr(megatron, key) != off]
        if is_on:
            differences.append(f"{' and '.join(is_on)} off, for want of {needed}")
        for key in is_on:
            megatron = _replace_setting(megatron, key, off)
    return megatron, differences


def _fold_expert_axes(
    megatron: MegatronConfig, dp_size: int, run_layout: MegatronConfig
) -> MegatronConfig:
    """Return the layout with the largest etp and ep that divide the ranks of a stage, or of a
    replica where tokens are gathered.
    """
    tp = megatron.tensor_model_parallel_size
    true_ep = run_layout.expert_model_parallel_size
    ranks = (
        tp
        * megatron.context_parallel_size
        * (1 if run_layout.moe_token_dispatcher_type == "allgather" else dp_size)
    )
    etp = run_layout.expert_tensor_parallel_size
    if etp is not None:
        fitting = [
            size
            for size in range(2, etp + 1)
            if etp % size == 0 and ranks % (size * min(true_ep, 2)) == 0
        ]
        etp = max(fitting, default=1)
    ep = max(
        size
        for size in range(1, true_ep + 1)
        if true_ep % size == 0 and ranks % (size * (etp or tp)) == 0
    )
    return replace(megatron, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)


def _list_impossible_settings(
    megatron: MegatronConfig, dp_size: int
) -> list[tuple[tuple[str, ...], Any, str]]:
    """Return (settings, their value when off, what they need) of the settings that this smaller
    layout cannot have.
    """
    needs: dict[str, tuple[Any, Any, str]] = {  # key -> (on, off, what it needs)
        "moe_token_dispatcher_type": ("flex", "alltoall", "a GPU"),
        "moe_permute_fusion": (True, False, "a GPU"),
        "use_precision_aware_optimizer": (True, False, "bfloat16 weights"),
        "exp_avg_dtype": ("bfloat16", "float32", "a wider bar"),
        "exp_avg_sq_dtype": ("bfloat16", "float32", "a wider bar"),
    }
    found: list[tuple[tuple[str, ...], Any, str]] = [
        ((key,), off, needed)
        for key, (on, off, needed) in needs.items()
        if getattr(megatron, key) == on
    ]
    if megatron.pipeline_model_parallel_size == 1:
        found.append((("virtual_pipeline_model_parallel_size",), None, "two pipeline stages"))
    if megatron.tensor_model_parallel_size == 1:
        found.append((("sequence_parallel",), False, "two tensor-parallel ranks"))
    if dp_size * megatron.context_parallel_size == 1:
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        found.append((names, False, "two ranks with the same shard"))
    return found


def _replace_setting(megatron: MegatronConfig, setting_name: str, value: Any) -> MegatronConfig:
    """Return the layout with one setting changed."""
    changes: dict[str, Any] = {setting_name: value}
    return replace(megatron, **changes)
