"""Rules on a layout for a model with experts, and on what only such a model reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import OptionalProblems, make_problem_if, register_rule
from rlhf_megatron.config.rules.part_rules import find_registered_part
from rlhf_megatron.config.rules.run_rules import list_pool_layouts
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

EP = "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"
DISPATCHER = "moe_token_dispatcher_type"
GROUPED = "moe_grouped_gemm"
PERMUTED = "moe_permute_fusion"
OVERLAP = "moe_shared_expert_overlap"
BALANCE = "moe_router_load_balancing_type"
COEFF = "moe_aux_loss_coeff"
Z_COEFF = "moe_z_loss_coeff"
BIAS_RATE = "moe_router_bias_update_rate"
REPLAY = "actor.router_replay"
ROUTES = "rollout.routes_gb"
SHARED = "share_prompts"
KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json that say how many experts a layer has."""

TERMS = (BALANCE, COEFF, Z_COEFF, BIAS_RATE)
"""Settings that change what is learnt, and no part of a layout."""

LayoutProblem = tuple[str, tuple[str, ...]]
"""A problem with its fix, and the keys of a layout that it is about."""


def read_num_experts(hf_config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer of a Hugging Face config, or 0 for a dense model."""
    return next((int(hf_config[key]) for key in KEYS if isinstance(hf_config.get(key), int)), 0)


def find_expert_layout_problems(
    num_experts: int, expert_width: int, num_stage_ranks: int, megatron: MegatronConfig
) -> Iterator[LayoutProblem]:
    """Yield the problems of a layout for a model with experts: those of the model, and those of the
    settings alone. A layer has `num_experts` experts, each with `expert_width` columns;
    `num_stage_ranks` is the number of ranks of a pipeline stage over all replicas.
    """
    yield from find_expert_model_problems(num_experts, expert_width, megatron)
    yield from find_expert_setting_problems(num_stage_ranks, megatron)


def find_expert_model_problems(
    num_experts: int, expert_width: int, megatron: MegatronConfig
) -> Iterator[LayoutProblem]:
    """Yield the problems of a layout that follow from the model's experts: `num_experts` a layer,
    each with `expert_width` columns. Yield nothing for parallel sizes below 1, which other rules
    report.
    """
    tp = megatron.tensor_model_parallel_size
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    tp_key = "tensor_model_parallel_size"
    if min(tp, ep, etp) < 1:
        return  # other rules say it
    if tp > 1 and not megatron.sequence_parallel:
        yield (
            (
                f"{tp_key} ({tp}) needs sequence_parallel for a model with experts: megatron-core"
                " refuses to train them without; set sequence_parallel to true."
            ),
            (tp_key, "sequence_parallel"),
        )
    if num_experts % ep:
        fit = " or ".join(
            str(d) for d in range(1, min(ep, num_experts) + 1) if num_experts % d == 0
        )
        yield f"{EP} ({ep}) must divide the experts of a layer ({num_experts}); use {fit}.", (EP,)
    if expert_width % etp:
        key = ETP if megatron.expert_tensor_parallel_size else tp_key
        yield (
            f"{ETP} ({etp}) must divide the columns of an expert ({expert_width}); use 1.",
            (ETP, key),
        )
    if "mlp" in megatron.recompute_modules and megatron.recompute_granularity == "selective":
        yield (
            (
                "recompute_modules has mlp, which megatron-core leaves out for layers with experts;"
                " use moe for these."
            ),
            ("recompute_modules",),
        )


def find_expert_setting_problems(
    num_stage_ranks: int, megatron: MegatronConfig
) -> Iterator[LayoutProblem]:
    """Yield the problems of a layout's settings of experts that no model could mend; nothing where
    these settings have their defaults, and for parallel sizes below 1, which other rules report.
    `num_stage_ranks` is the number of ranks of a pipeline stage over all replicas.
    """
    tp = megatron.tensor_model_parallel_size
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    if min(tp, ep, etp) < 1:
        return
    if num_stage_ranks > 0 and num_stage_ranks % (ep * etp):
        yield (
            (
                f"{EP} x {ETP} ({ep} x {etp} = {ep * etp}) must divide the ranks of a pipeline"
                f" stage ({num_stage_ranks} over all replicas); use smaller ones or more ranks."
            ),
            (EP, ETP),
        )
    if megatron.moe_token_dispatcher_type == "allgather" and tp * megatron.context_parallel_size % (
        ep * etp
    ):
        yield (
            (
                f"{DISPATCHER} (allgather) needs as many tokens on all ranks that share experts,"
                f" but {EP} x {ETP} ({ep} x {etp}) reaches over replicas, which have samples of"
                " their own; use alltoall."
            ),
            (DISPATCHER, EP, ETP),
        )
    if megatron.moe_token_dispatcher_type == "flex" and ep * etp == 1:
        yield (
            (
                f"{DISPATCHER} (flex) needs experts that several ranks share out ({EP} x {ETP} is"
                " 1); use alltoall."
            ),
            (DISPATCHER, EP, ETP),
        )
    if megatron.moe_shared_expert_overlap and megatron.moe_token_dispatcher_type != "alltoall":
        yield (
            (
                f"{OVERLAP} (true) needs {DISPATCHER} alltoall, not"
                f" {megatron.moe_token_dispatcher_type}; set {OVERLAP} to false."
            ),
            (OVERLAP, DISPATCHER),
        )
    yield from _find_router_loss_problems(megatron)


def find_expert_bias_problems(megatron: MegatronConfig) -> Iterator[LayoutProblem]:
    """Yield a problem if the layout splits experts over tensor-parallel ranks; call it for a model
    whose experts have biases, which megatron-core does not split.
    """
    etp = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size
    if etp > 1:
        yield (
            (
                f"{ETP} ({etp}, null: as tensor_model_parallel_size) must be 1 for experts with"
                " biases, which megatron-core does not split; set {ETP} to 1, and share the"
                f" experts out by {EP}."
            ),
            (ETP, "tensor_model_parallel_size"),
        )


def find_shared_expert_problems(
    megatron: MegatronConfig, has_shared_experts: bool
) -> Iterator[LayoutProblem]:
    """Yield a problem if moe_shared_expert_overlap is on and the model has no shared experts."""
    if megatron.moe_shared_expert_overlap and not has_shared_experts:
        yield (
            (
                f"{OVERLAP} (true) would be ignored: the model has no shared experts; set {OVERLAP}"
                " to false."
            ),
            (OVERLAP,),
        )


@register_rule
def check_expert_settings(loaded: LoadedConfig) -> OptionalProblems:
    """Yield the problems of each pool's settings of experts that no model could mend."""
    c = loaded.config
    for section, megatron, num_ranks in list_pool_layouts(c):
        pp = megatron.pipeline_model_parallel_size
        cp = megatron.context_parallel_size
        replica = pp * cp * megatron.tensor_model_parallel_size
        if replica < 1:
            continue  # other rules say it
        num_stage_ranks = 0 if num_ranks % replica else num_ranks // pp  # 0: other rules say it
        for text, keys in find_expert_setting_problems(num_stage_ranks, megatron):
            yield ConfigProblem(f"{section}.{text}", tuple(f"{section}.{key}" for key in keys))
        yield from _check_dispatch_kernels(section, megatron, c)


def _check_dispatch_kernels(
    section: str, megatron: MegatronConfig, config: RunConfig
) -> OptionalProblems:
    """Yield problems of the dispatcher flex and of fused permutation: their kernels run on GPUs
    alone, and flex sends bfloat16 alone.
    """
    dispatcher = f"{section}.{DISPATCHER}"
    is_flex = megatron.moe_token_dispatcher_type == "flex"
    yield make_problem_if(
        is_flex and config.model.dtype != "bfloat16",
        (
            f"{dispatcher} (flex) sends bfloat16 only, and model.dtype is {config.model.dtype}; use"
            " alltoall, or model.dtype bfloat16."
        ),
        (dispatcher, "model.dtype"),
    )
    for is_used, key, value, other in (
        (is_flex, dispatcher, "flex", "use alltoall"),
        (
            megatron.moe_permute_fusion,
            f"{section}.{PERMUTED}",
            "true",
            f"set {section}.{PERMUTED} to false",
        ),
    ):
        yield make_problem_if(
            is_used and config.trainer.device == "cpu",
            f"{key} ({value}) has kernels for CUDA only, and trainer.device is cpu; {other}.",
            (key, "trainer.device"),
        )


@register_rule
def check_router_replay_settings(loaded: LoadedConfig) -> OptionalProblems:
    """Yield the problems of actor.router_replay that no model could mend: shared prompts, servers
    that do not tell routes, and rollout.routes_gb without replay mode r3.
    """
    c = loaded.config
    mode = c.actor.router_replay
    engine = c.rollout.engine
    yield make_problem_if(
        mode != "r3" and c.rollout.routes_gb,
        (
            f"{ROUTES} ({c.rollout.routes_gb or 0:g}) is of files that {REPLAY} r3 alone writes,"
            f" not {mode}; remove {ROUTES}."
        ),
        (ROUTES, REPLAY),
    )
    yield make_problem_if(
        mode != "none" and c.actor.megatron.share_prompts,
        (
            f"{REPLAY} ({mode}) has a route for each token of each sample; set"
            f" actor.megatron.{SHARED} to false."
        ),
        (REPLAY, f"actor.megatron.{SHARED}"),
    )
    if mode != "r3" or find_registered_part("engine", engine) is None:
        return
    arguments = {name.replace("_", "-"): value for name, value in c.rollout.sglang.args.items()}
    yield make_problem_if(
        engine == "sglang"
        and not c.rollout.endpoints
        and arguments.get("enable-return-routed-experts") is not True,
        (
            f"{REPLAY} (r3) needs servers that tell which experts tokens met; set"
            " rollout.sglang.args.enable_return_routed_experts: true."
        ),
        (REPLAY, "rollout.sglang.args"),
    )
    yield make_problem_if(
        engine not in ("local", "sglang"),
        (
            f"{REPLAY} (r3) needs rollout.engine local or sglang, not {engine}; use r2, which asks"
            " nothing of engines."
        ),
        (REPLAY, "rollout.engine"),
    )


def find_router_replay_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each reason why `actor.router_replay` cannot work with this model."""
    mode = config.actor.router_replay
    if mode == "none":
        return
    if not read_num_experts(hf_config):
        yield f"{REPLAY} ({mode}) is of experts, and the model has none; remove {REPLAY}."
    elif hf_config.get("num_experts_per_tok", 2) == 1:
        yield (
            f"{REPLAY} ({mode}) needs tokens that meet two experts or more (num_experts_per_tok is"
            f" 1); remove {REPLAY}."
        )
    elif (
        mode == "r3"
        and config.rollout.engine == "sglang"
        and hf_config.get("model_type") == "mixtral"
    ):
        yield (
            f"{REPLAY} (r3) ends the server of a Mixtral, whose routers do not know their layer;"
            " use r2, or rollout.engine: local."
        )


def _find_router_loss_problems(megatron: MegatronConfig) -> Iterator[LayoutProblem]:
    """Yield the problems of the routers' losses: a balancing type without a coefficient, a
    coefficient without a balancing type, and losses or bias updates together with share_prompts.
    """
    is_balanced = megatron.moe_router_load_balancing_type != "none"
    if is_balanced and megatron.moe_aux_loss_coeff == 0:
        yield (
            f"{BALANCE} ({megatron.moe_router_load_balancing_type}) needs a {COEFF} above 0.",
            (BALANCE, COEFF),
        )
    if megatron.moe_aux_loss_coeff > 0 and not is_balanced:
        yield (
            (
                f"{COEFF} ({megatron.moe_aux_loss_coeff}) needs {BALANCE}: seq_aux_loss (of each"
                " sample) or global_aux_loss (of the mini-batch). megatron-core's aux_loss is not"
                " there: it depends on how samples are packed."
            ),
            (COEFF, BALANCE),
        )
    given = {
        key: getattr(megatron, key) for key in (COEFF, Z_COEFF, BIAS_RATE) if getattr(megatron, key)
    }
    if megatron.share_prompts and given:
        yield (
            (
                f"{SHARED} (true) would count a prompt once for all its samples in the routers'"
                f" losses and loads; set {SHARED} to false, or to"
                f" 0: {', '.join(f'{key} ({value:g})' for key, value in given.items())}."
            ),
            (SHARED, *given),
        )


def find_ignored_expert_settings(megatron: MegatronConfig) -> Iterator[LayoutProblem]:
    """Yield a problem for each setting of experts that differs from its default; call it for a
    model without experts, which would ignore such settings.
    """
    given = {
        EP: megatron.expert_model_parallel_size > 1,
        ETP: megatron.expert_tensor_parallel_size is not None,
        DISPATCHER: megatron.moe_token_dispatcher_type != "alltoall",
        GROUPED: megatron.moe_grouped_gemm,
        PERMUTED: megatron.moe_permute_fusion,
        OVERLAP: megatron.moe_shared_expert_overlap,
        BALANCE: megatron.moe_router_load_balancing_type != "none",
        COEFF: megatron.moe_aux_loss_coeff != 0,
        Z_COEFF: megatron.moe_z_loss_coeff is not None,
        BIAS_RATE: megatron.moe_router_bias_update_rate != 0,
        "recompute_modules": megatron.recompute_granularity == "selective"
        and "moe" in megatron.recompute_modules,
    }
    for key, is_given in given.items():
        if is_given:
            yield (
                (
                    f"{key} ({getattr(megatron, key)}) is of experts, and the model has"
                    f" none; remove {key}."
                ),
                (key,),
            )
