"""The axis list: every layout that is compared with the unsharded reference. A new one is
one line here.

A family is left out of a layout that it cannot have (`divides`); every other cell is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.parity.pairwise import Cell, greedy, pairwise
from rlhf_megatron.config.rules.expert_rules import read_num_experts
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.weights.weight_table import LayerImpl

RECOMPUTE: dict[str | None, dict[str, Any]] = {
    None: {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "full_block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "layernorm_mlp": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "mlp"),
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe")},
    "latent": {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "moe")},
}
"""What an Axes calls a way of recomputing -> settings."""


@dataclass(frozen=True)
class Axes:
    """A layout and the settings that change who computes and keeps what. dp is what the
    ranks hold beside.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False  # distributed optimizer
    # of the gradient reduction; with `distributed` also of the parameter gather
    overlap: bool = False
    on_host: bool = False  # the optimizer's state
    in_few_bits: bool = False  # the same; not in LAYOUTS, since moments are rounded
    recompute: str | None = None  # a key of RECOMPUTE
    impl: LayerImpl = "local"
    ep: int = 1
    etp: int = 0  # 0: as tp
    is_gathered: bool = False  # tokens reach experts by all-gather, not all-to-all
    is_grouped: bool = False  # all experts of a rank are multiplied at once
    overlaps_shared: bool = False  # shared experts run while tokens are on their way
    first_layers: int = 0  # of the first stage; 0: as many as the others have
    chunk_layers: tuple[int, ...] = ()  # of every model chunk

    @property
    def of_experts(self) -> bool:
        """Whether only a model with experts can have it."""
        is_there = (
            self.ep > 1
            or self.etp > 0
            or self.is_gathered
            or self.is_grouped
            or self.overlaps_shared
        )
        return is_there or self.recompute in ("moe", "latent")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def name(self) -> str:
        """ "tp2_sequence_pp2_vpp2_dp2_distributed_overlap_recompute_full": safe in a file name."""
        parts = [
            f"tp{self.tp}" if self.tp > 1 else "",
            "sequence" if self.sequence_parallel else "",
        ]
        sizes = {"pp": self.pp, "vpp": self.vpp, "cp": self.cp, "ep": self.ep}
        parts += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        parts += [f"etp{self.etp}"] if self.etp else []
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        parts += [f"first{self.first_layers}"] if self.first_layers else []
        parts += [f"chunks{'_'.join(map(str, self.chunk_layers))}"] if self.chunk_layers else []
        parts += ["allgather"] if self.is_gathered else []
        parts += ["grouped"] if self.is_grouped else []
        parts += ["shared_overlap"] if self.overlaps_shared else []
        if self.num_ranks == 1:
            parts.append("one_rank")
        parts += ["distributed" if self.distributed else "", "overlap" if self.overlap else ""]
        parts += ["on_host"] if self.on_host else []
        parts += ["in_few_bits"] if self.in_few_bits else []
        parts += [
            f"recompute_{self.recompute}" if self.recompute else "",
            self.impl if self.impl != "local" else "",
        ]
        return "_".join(part for part in parts if part)

    @property
    def megatron(self) -> MegatronConfig:
        """The settings as a user would write them."""
        return MegatronConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
            context_parallel_size=self.cp,
            sequence_parallel=self.sequence_parallel,
            use_distributed_optimizer=self.distributed,
            overlap_grad_reduce=self.overlap,
            optimizer_cpu_offload=self.on_host,
            use_precision_aware_optimizer=self.in_few_bits,
            exp_avg_dtype="bfloat16" if self.in_few_bits else "float32",
            exp_avg_sq_dtype="bfloat16" if self.in_few_bits else "float32",
            overlap_param_gather=self.overlap and self.distributed,
            transformer_impl=self.impl,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp or None,
            moe_token_dispatcher_type="allgather" if self.is_gathered else "alltoall",
            moe_grouped_gemm=self.is_grouped,
            moe_shared_expert_overlap=self.overlaps_shared,
            num_layers_in_first_pipeline_stage=self.first_layers or None,
            pipeline_model_parallel_layout=f"E{'|'.join('t' * n for n in self.chunk_layers)}L"
            if self.chunk_layers
            else None,
            **RECOMPUTE[self.recompute],
        )


def divides(axes: Axes, hf_config: Mapping[str, Any]) -> bool:
    """Whether a model of that config.json can be split so (and recomputed: megatron-core cannot an
    MLP with biases).
    """
    heads = hf_config["num_key_value_heads"]
    layers = hf_config["num_hidden_layers"]
    is_recomputable = not hf_config.get("mlp_bias") or "mlp" not in axes.megatron.recompute_modules
    if axes.recompute == "latent" and "kv_lora_rank" not in hf_config:
        return False
    if axes.overlaps_shared and not hf_config.get("n_shared_experts"):
        return False
    if read_num_experts(hf_config):
        needs_sequence = axes.tp > 1 and not axes.sequence_parallel
        if hf_config["model_type"] == "gpt_oss" and (axes.etp or axes.tp) > 1:
            return False  # experts with biases are not split
        if needs_sequence or "mlp" in axes.megatron.recompute_modules:
            return False
    elif axes.of_experts:
        return False
    is_even = (
        axes.first_layers > 0
        or sum(axes.chunk_layers) == layers
        or layers % (axes.pp * axes.vpp) == 0
    )
    return heads % axes.tp == 0 and is_even and is_recomputable


TE: LayerImpl = "transformer_engine"
_ONE = (
    Axes(),
    Axes(impl=TE),
    Axes(recompute="full"),
    Axes(recompute="full_block"),
    Axes(recompute="core_attn"),
    Axes(recompute="layernorm_mlp"),
    Axes(recompute="mlp", impl=TE),
)
_TWO = (
    Axes(tp=2),
    Axes(tp=2, sequence_parallel=True),
    Axes(tp=2, sequence_parallel=True, impl=TE),
    Axes(tp=2, sequence_parallel=True, recompute="full"),
    Axes(tp=2, sequence_parallel=True, recompute="layernorm_mlp"),
    Axes(tp=2, sequence_parallel=True, recompute="mlp", impl=TE),
    Axes(pp=2),
    Axes(pp=2, recompute="full"),
    Axes(pp=2, vpp=2),
    Axes(pp=2, vpp=2, recompute="core_attn"),
    Axes(dp=2),
    Axes(dp=2, overlap=True),
    Axes(dp=2, distributed=True),
    Axes(dp=2, distributed=True, overlap=True),
    Axes(dp=2, distributed=True, overlap=True, on_host=True),
    Axes(cp=2),
    Axes(cp=2, impl=TE),
    Axes(cp=2, recompute="core_attn"),
    Axes(cp=2, distributed=True),
    Axes(cp=2, distributed=True, overlap=True, recompute="full"),
)
# tp 3 and 4 are for families whose key-value heads divide by them.
_THREE = (
    Axes(tp=3),
    Axes(tp=3, sequence_parallel=True),
    Axes(tp=3, sequence_parallel=True, impl=TE),
)
_FOUR = (
    Axes(tp=2, pp=2),
    Axes(tp=2, sequence_parallel=True, pp=2, vpp=2),
    Axes(tp=2, sequence_parallel=True, pp=2, vpp=2, recompute="full", impl=TE),
    Axes(tp=2, sequence_parallel=True, cp=2),
    Axes(tp=2, cp=2, distributed=True, recompute="layernorm_mlp"),
    Axes(tp=2, sequence_parallel=True, dp=2, distributed=True),
    Axes(tp=2, sequence_parallel=True, dp=2, distributed=True, overlap=True, impl=TE),
    Axes(tp=4, sequence_parallel=True),
    Axes(pp=4),
    Axes(pp=2, vpp=2, cp=2),
    Axes(pp=2, vpp=2, dp=2, distributed=True, overlap=True),
    Axes(cp=4),
    Axes(dp=2, cp=2, distributed=True, overlap=True),
    Axes(dp=4, distributed=True),
)
_EIGHT = (
    Axes(tp=2, pp=2, dp=2),
    Axes(tp=2, sequence_parallel=True, pp=2, vpp=2, dp=2, distributed=True, overlap=True),
    Axes(tp=2, sequence_parallel=True, pp=2, cp=2),
    Axes(tp=2, sequence_parallel=True, pp=2, cp=2, recompute="full", impl=TE),
    Axes(tp=2, sequence_parallel=True, dp=2, cp=2, distributed=True),
    Axes(pp=2, vpp=2, dp=2, cp=2, distributed=True, overlap=True),
    Axes(tp=2, sequence_parallel=True, pp=4, recompute="core_attn"),
    Axes(pp=2, cp=4, impl=TE),
)
_EXPERTS = (
    Axes(recompute="moe"),
    Axes(recompute="latent"),
    Axes(tp=2, sequence_parallel=True, etp=1, recompute="latent"),
    Axes(cp=2, ep=2, recompute="latent"),
    Axes(ep=2, dp=2),
    Axes(ep=2, dp=2, distributed=True, overlap=True),
    Axes(ep=2, dp=2, distributed=True, on_host=True),
    Axes(ep=2, dp=2, recompute="full"),
    Axes(ep=2, dp=2, overlaps_shared=True, recompute="moe"),
    Axes(tp=2, sequence_parallel=True, ep=2, etp=1, overlaps_shared=True),
    Axes(dp=2, is_grouped=True, distributed=True, overlap=True),
    Axes(ep=2, dp=2, is_grouped=True, impl=TE, distributed=True, overlap=True),
    Axes(etp=2, dp=2, is_grouped=True),
    Axes(tp=2, sequence_parallel=True, ep=2, etp=1, is_grouped=True, recompute="moe"),
    Axes(tp=2, sequence_parallel=True, is_gathered=True),
    Axes(tp=2, sequence_parallel=True, etp=1),
    Axes(tp=2, sequence_parallel=True, etp=1, distributed=False, recompute="moe"),
    Axes(etp=2, dp=2),
    Axes(etp=2, dp=2, distributed=True),
    Axes(tp=2, sequence_parallel=True, ep=2, etp=1),
    Axes(tp=2, sequence_parallel=True, ep=2, etp=1, is_gathered=True, recompute="full"),
    Axes(cp=2, ep=2),
    Axes(cp=2, ep=2, is_gathered=True, distributed=True),
    Axes(pp=2, first_layers=1),
    Axes(pp=2, vpp=2, chunk_layers=(1, 1, 1, 1)),
    Axes(pp=2, chunk_layers=(3, 1), ep=2, dp=2),
    Axes(pp=2, ep=2, dp=2),
    Axes(pp=2, vpp=2, ep=2, dp=2),
    Axes(pp=2, first_layers=3, ep=2, dp=2, distributed=True),
    Axes(tp=2, sequence_parallel=True, pp=2, ep=2, etp=1),
    Axes(tp=2, sequence_parallel=True, ep=2, dp=2),
    Axes(tp=2, sequence_parallel=True, ep=4, etp=1, dp=2),
    Axes(tp=2, sequence_parallel=True, ep=2, etp=1, dp=2, distributed=True, overlap=True),
    Axes(cp=2, tp=2, sequence_parallel=True, ep=2, etp=1),
    Axes(ep=2, etp=2, dp=4),
    Axes(ep=2, dp=4, distributed=True),
    Axes(tp=2, sequence_parallel=True, pp=2, ep=4, etp=1, dp=2, distributed=True, overlap=True),
    Axes(tp=2, sequence_parallel=True, pp=2, vpp=2, cp=2, ep=2),
)
"""Of models with experts; but for the stages of unequal depth."""
LAYOUTS: dict[str, Axes] = {
    axes.name: axes for axes in (*_ONE, *_TWO, *_THREE, *_FOUR, *_EIGHT, *_EXPERTS)
}


def in_turns(
    layouts: Iterable[Axes], families: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Axes]]:
    """(family, layout): each layout with one of the families that can have it, which take turns."""
    cells = []
    uses = dict.fromkeys(families, 0)
    for axes in layouts:
        fitting = [family for family, config in families.items() if divides(axes, config)]
        if fitting:
            family = min(fitting, key=lambda one: uses[one])
            uses[family] += 1
            cells.append((family, axes))
    return cells


VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "pp": (1, 2),
    "vpp": (1, 2),
    "cp": (1, 2),
    "dp": (1, 2),
    "distributed": (False, True),
    "overlap": (False, True),
    "recompute": (None, "full", "core_attn", "layernorm_mlp"),
    "impl": ("local", TE),
}
"""Axis -> the values that the pairwise cover combines."""
COVER_RANKS = 4  # of a cell of the cover


def is_possible(axes: Axes) -> bool:
    """Whether every axis has what it needs: virtual stages stages,
    a split sequence tp, and so on.
    """
    return (
        (axes.vpp == 1 or axes.pp > 1)
        and (axes.tp > 1 or not axes.sequence_parallel)
        and (axes.dp * axes.cp > 1 or not (axes.distributed or axes.overlap))
        and not (
            axes.impl == TE and axes.recompute == "layernorm_mlp"
        )  # its norms are parts of linear layers
    )


def cover(families: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Axes]]:
    """Cells (family, layout) in which every two values of VALUES and `families` meet that can in
    COVER_RANKS ranks.

    But for families and ways of recomputing: that would double the cells, and what is recomputed is
    the same code.
    """

    def axes_of(cell: Cell) -> Axes:
        return Axes(**{axis: value for axis, value in cell.items() if axis != "family"})

    def is_allowed(cell: Cell) -> bool:
        axes = axes_of(cell)
        return (
            axes.num_ranks <= COVER_RANKS
            and is_possible(axes)
            and divides(axes, families[cell["family"]])
        )

    cells = pairwise(
        {"family": tuple(families), **VALUES},
        is_allowed,
        cost=lambda cell: axes_of(cell).num_ranks,
        apart=[frozenset(("family", "recompute"))],
    )
    return [(cell["family"], axes_of(cell)) for cell in cells]


def critic_cells(
    layouts: Sequence[Axes], families: Mapping[str, Mapping[str, Any]]
) -> set[tuple[str, str]]:
    """(family, name of a layout) where the critic is compared too: every layout, and in
    it few families.

    So many that every family meets every value of every axis that it meets in the actor's cells,
    but for ways of recomputing. All cells would take half as long again, for a body that
    is the actor's.
    """
    cells = [
        {"family": family, "layout": axes.name, **asdict(axes)}
        for axes in layouts
        for family, hf_config in families.items()
        if divides(axes, hf_config)
    ]
    chosen = greedy(
        cells, apart=[frozenset(("family", other)) for other in ("layout", "recompute")]
    )
    return {(cell["family"], cell["layout"]) for cell in chosen}


CRITIC_VALUES = {**VALUES, "recompute": (None, "full")}


def critic_cover(families: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Axes]]:
    """Cells of a short proof of the critic: every two values of CRITIC_VALUES meet; the
    families take turns.
    """

    def is_allowed(cell: Cell) -> bool:
        axes = Axes(**cell)
        return axes.num_ranks <= COVER_RANKS and is_possible(axes)

    layouts = [
        Axes(**cell)
        for cell in pairwise(CRITIC_VALUES, is_allowed, cost=lambda cell: Axes(**cell).num_ranks)
    ]
    waiting = list(families)
    cells = []
    for axes in layouts:
        family = next(name for name in waiting if divides(axes, families[name]))
        waiting.remove(family)
        waiting.append(family)
        cells.append((family, axes))
    return cells
