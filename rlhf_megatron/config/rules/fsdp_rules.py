"""Rules of the trainer backend fsdp: settings of the other backend, and what it does not do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rule,
)
from rlhf_megatron.config.rules.expert_rules import REPLAY
from rlhf_megatron.config.rules.run_rules import compute_model_parallel_size, list_pool_layouts
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

BACKEND = "actor.backend"


@register_idle_rule
def list_idle_backend_settings(config: RunConfig) -> Iterable[IdleSettings]:
    """Return an entry for each group of settings that only one trainer backend (megatron or fsdp)
    reads; its first value says whether the configuration ignores that group.
    """
    is_fsdp = config.actor.backend == "fsdp"
    of_lora = tuple(f"actor.lora.{name}" for name in ("alpha", "target_modules", "path"))
    return (
        (not is_fsdp, ("actor.fsdp", "actor.lora"), BACKEND, "set {switch} to fsdp"),
        (is_fsdp and not config.actor.lora.rank, of_lora, "actor.lora.rank", "set {switch} to 16"),
        (
            is_fsdp,
            _list_changed_settings("actor.megatron", config.actor.megatron),
            BACKEND,
            "set {switch} to megatron",
        ),
        (
            is_fsdp,
            _list_changed_settings("critic.megatron", config.critic.megatron),
            BACKEND,
            "set {switch} to megatron",
        ),
        (
            is_fsdp,
            _list_changed_settings("reward_model.megatron", config.reward_model.megatron),
            BACKEND,
            "set {switch} to megatron",
        ),
        (
            is_fsdp,
            _list_changed_settings("reference.megatron", config.reference.megatron),
            BACKEND,
            "set {switch} to megatron",
        ),
    )


def _list_changed_settings(section: str, megatron: MegatronConfig) -> tuple[str, ...]:
    """Return the keys of a megatron section whose values differ from the defaults."""
    plain = MegatronConfig()
    names = [field.name for field in fields(MegatronConfig)]
    return tuple(
        f"{section}.{name}" for name in names if getattr(megatron, name) != getattr(plain, name)
    )


@register_rule
def check_fsdp_backend(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each feature that the backend fsdp does not support but the configuration
    uses: model parallelism, router replay, colocated engines. Also check the LoRA settings.
    """
    config = loaded.config
    is_fsdp = config.actor.backend == "fsdp"
    for section, megatron, _ in list_pool_layouts(config):
        size = compute_model_parallel_size(megatron)
        yield make_problem_if(
            is_fsdp and size > 1,
            (
                f"{section} cuts a model over {size} ranks, but under {BACKEND} fsdp each rank is a"
                " replica; set its tensor_model_parallel_size, pipeline_model_parallel_size and"
                " context_parallel_size to 1."
            ),
            (BACKEND, section),
        )
    yield make_problem_if(
        is_fsdp and config.actor.router_replay != "none",
        (
            f"actor.router_replay ({config.actor.router_replay}) is not for {BACKEND} fsdp, which"
            " has no models with experts; set actor.router_replay to none, or use megatron."
        ),
        (BACKEND, REPLAY),
    )
    yield make_problem_if(
        is_fsdp and config.rollout.colocated,
        (
            f"rollout.colocated (true) is not for {BACKEND} fsdp: its memory is not given to"
            " engines; set rollout.colocated to false, or use megatron."
        ),
        (BACKEND, "rollout.colocated"),
    )
    lora = config.actor.lora
    yield make_problem_if(
        lora.rank > 0 and config.job == "reward-model",
        (
            f"actor.lora.rank ({lora.rank}) is not for job: reward-model, whose head has no"
            " adapter; set actor.lora.rank to 0."
        ),
        ("actor.lora.rank", "job"),
    )
    yield make_problem_if(
        lora.rank > 0 and not lora.target_modules,
        "actor.lora.target_modules is empty: nothing would train; write [all-linear].",
        ("actor.lora.target_modules",),
    )
