"""Rules on the config.json of a model: sizes that the layout must divide, settings that no family implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, told, wrong
from rlhf_megatron.config.rules.batches import divisors_of, longest_sample
from rlhf_megatron.config.rules.experts import (
    REPLAY,
    num_experts,
    of_biases,
    of_dense_model,
    of_experts,
    of_replay,
    of_shared,
)
from rlhf_megatron.config.rules.layouts import FIRST_LAST, recompute_of_model
from rlhf_megatron.config.rules.parts import reads
from rlhf_megatron.config.rules.run import learning_sections, megatron_sections, reference_ranks
from rlhf_megatron.config.rules.stages import MOST_LAYERS, parse_layout
from rlhf_megatron.config.schema import MegatronConfig, RolloutConfig, RunConfig
from rlhf_megatron.plugins import not_loaded
from rlhf_megatron.registry import parts_of

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
HAS_DP_ATTENTION = ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "gpt_oss")  # in SGLang
LARGEST_SIZE = 1 << 30  # of a model that some machine can hold


def model_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Every reason why this model cannot be the policy; nor the critic, where that starts as the policy."""
    pools = [pool for pool in learning_sections(config) if pool[0] == "actor.megatron" or config.critic.path is None]
    for problem in told(_problems(config, hf_config, pools)):
        yield replace(problem, text=f"{Path(config.model.path) / 'config.json'}: {problem.text}")


def critic_model_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Every reason why the model of critic.path cannot be the critic, in the last pool of those that learn."""
    assert config.critic.path is not None
    pools = [*learning_sections(config)][-1:]
    yield from _of_other_model(config, hf_config, "critic.path", config.critic.path, pools)


def reward_model_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Every reason why the model of reward_model.path cannot score, in its own pool or the actor's."""
    assert config.reward_model.path is not None
    sections = [*megatron_sections(config)]
    pools = [one for one in sections if one[0] == "reward_model.megatron"] or sections[:1]
    yield from _of_other_model(config, hf_config, "reward_model.path", config.reward_model.path, pools)


def teacher_problems(config: RunConfig, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Every reason why the model of reference.path cannot teach, in its own pool or the actor's."""
    assert config.reference.path is not None
    sections = [*megatron_sections(config)]
    pools = sections[-1:] if reference_ranks(config) else sections[:1]
    yield from _of_other_model(config, hf_config, "reference.path", config.reference.path, pools)


def _of_other_model(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    key: str,
    path: str,
    pools: Sequence[tuple[str, MegatronConfig, int]],
) -> Iterator[Problem]:
    for problem in told(_problems(config, hf_config, pools)):
        keys = tuple(key if name == "model.path" else name for name in problem.keys)
        yield replace(problem, text=f"{Path(path) / 'config.json'}: {problem.text}", keys=keys)


def _problems(
    config: RunConfig, hf_config: Mapping[str, Any], pools: Sequence[tuple[str, MegatronConfig, int]]
) -> Findings:
    families, name = parts_of("model family"), str(hf_config.get("model_type"))
    family = families.find(name)
    if family is None and config.actor.backend == "fsdp":
        yield from _of_transformers(config, hf_config)
        return
    if family is None:
        if not not_loaded(config.plugins):
            names, kind = ", ".join(families), hf_config.get("model_type")
            yield _problem(f"model_type ({kind!r}) must be one of {names}; choose such a model, or actor.backend fsdp.")
        return
    found = [*told(_of_family(config, hf_config, pools, family.build.unsupported(hf_config)))]
    yield from found
    try:
        arguments = {} if found else family.build.transformer_arguments(hf_config)
    except ValueError as error:
        yield _problem(str(error))
        return
    if num_experts(hf_config) and arguments.get("add_bias_linear"):
        for section, megatron, _ in pools:
            for text, keys in of_biases(megatron):
                yield _problem(f"{section}.{text}", *(f"{section}.{key}" for key in keys))
    if arguments.get("softmax_type") == "learnable" and config.rollout.engine == "sglang":
        yield from _of_sinks(config.rollout, config.rollout.dtype or config.model.dtype, hf_config)


def _of_sinks(rollout: RolloutConfig, dtype: str, hf_config: Mapping[str, Any]) -> Findings:
    """Find what stock SGLang cannot do with GPT-OSS."""
    is_on_cpu = rollout.sglang.args.get("device") == "cpu" or rollout.sglang.env.get("SGLANG_USE_CPU_ENGINE") == "1"
    yield wrong(
        is_on_cpu,
        "attention with sinks has no backend of SGLang on a CPU; use rollout.engine: local, or GPUs for the servers.",
        ("model.path", "rollout.engine"),
    )
    yield wrong(
        dtype != "bfloat16",
        f"SGLang keeps sinks of attention in bfloat16, and rollout.dtype ({dtype}) would be rounded to it; set"
        " rollout.dtype: bfloat16.",
        ("rollout.dtype",),
    )
    yield wrong(
        rollout.quantization,
        f"SGLang loads experts with biases as they are, and rollout.quantization ({rollout.quantization}) cannot be"
        " sent; leave it out.",
        ("rollout.quantization",),
    )
    yield wrong(
        rollout.endpoints,
        "a weight sync sends experts with biases one by one, which servers that the run did not start may drop without"
        " a word; leave rollout.endpoints out.",
        ("rollout.endpoints",),
    )
    yield wrong(
        hf_config.get("swiglu_limit") is None,
        "SGLang needs swiglu_limit, which the file lacks; add it (7.0).",
        ("model.path",),
    )


def _of_transformers(config: RunConfig, hf_config: Mapping[str, Any]) -> Findings:
    """A family that only transformers has; that it has it is seen when its tensors are looked for."""
    sizes = _sizes(hf_config)
    for key, value in sizes.items():
        yield wrong(value is None, f"{key} ({hf_config.get(key)!r}) must be a positive integer.", ("model.path",))
    yield wrong(
        num_experts(hf_config),
        f"model_type ({hf_config.get('model_type')!r}) has experts, whose tensors have other names in files than in"
        " transformers; choose a dense model, or one with experts that Megatron trains here.",
        ("model.path",),
    )
    known = {key: value for key, value in sizes.items() if value is not None}
    yield from _shape(config, known, is_latent=bool(hf_config.get("kv_lora_rank")))


def _of_family(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    pools: Sequence[tuple[str, MegatronConfig, int]],
    unsupported: Iterator[str],
) -> Findings:
    yield from map(_problem, unsupported)
    sizes = _sizes(hf_config)
    for key, value in sizes.items():
        yield wrong(
            value is None,
            f"{key} ({hf_config.get(key)!r}) must be a positive integer that some machine can hold; mend the file.",
            ("model.path",),
        )
    known = {key: value for key, value in sizes.items() if value is not None}
    for section, megatron, num_ranks in pools:
        if hf_config.get("mlp_bias"):
            yield from _recompute_of_biases(section, megatron)
        key = f"{section}.recompute_modules"
        yield wrong(
            "mla_up_proj" in megatron.recompute_modules and not hf_config.get("kv_lora_rank"),
            f"{key} ({list(megatron.recompute_modules)}) has mla_up_proj, which is of latent attention, and the model"
            " has none; remove it.",
            ("model.path", key),
        )
        yield from _layout(section, megatron, known)
        yield from _experts(config, section, megatron, num_ranks, hf_config)
    for text in of_replay(config, hf_config):
        yield _problem(text, "model.path", REPLAY)
    if reads(config.rollout, "rollout.sglang"):
        problem = dp_attention_problem(hf_config, config.rollout.sglang.args)
        yield wrong(problem, f"rollout.sglang.args: {problem}.", ("model.path", "rollout.sglang.args"))
    yield from _shape(config, known, bool(hf_config.get("kv_lora_rank")))


def dp_attention_problem(hf_config: Mapping[str, Any], arguments: Mapping[str, object]) -> str | None:
    """Says why SGLang's DP attention cannot be; None: it is not asked for, or it can. `arguments`: of the server, by
    name, with dashes or underscores.
    """
    given = {name.replace("_", "-"): value for name, value in arguments.items()}
    if not given.get("enable-dp-attention"):
        return None
    if (name := hf_config.get("model_type")) not in HAS_DP_ATTENTION:
        return (
            f"enable-dp-attention is for {', '.join(HAS_DP_ATTENTION)}; SGLang cuts the attention of {name} over all"
            " ranks whatever they serve, and its log-probs would be wrong without an error; start it without"
        )
    if hf_config.get("tie_word_embeddings") and not given.get("enable-dp-lm-head"):
        return (
            "enable-dp-attention cuts the embedding over fewer ranks than the head, and in this model the two are one"
            " tensor (tie_word_embeddings: true); add enable-dp-lm-head"
        )
    return None


def _experts(
    config: RunConfig, section: str, m: MegatronConfig, num_ranks: int, hf_config: Mapping[str, Any]
) -> Findings:
    num, pp = num_experts(hf_config), m.pipeline_model_parallel_size
    if pp < 1:
        return  # other rules say it
    width = hf_config.get("moe_intermediate_size") or hf_config.get("intermediate_size")
    found = of_experts(num, width if isinstance(width, int) else 0, num_ranks // pp, m) if num else of_dense_model(m)
    shared = of_shared(m, "n_routed_experts" in hf_config and hf_config.get("n_shared_experts") != 0)
    for text, keys in (*found, *(shared if num else ())):
        yield _problem(f"{section}.{text}", *(f"{section}.{key}" for key in keys))
    if num and m.moe_router_bias_update_rate > 0 and "n_routed_experts" not in hf_config:
        yield _problem(
            f"{section}.moe_router_bias_update_rate ({m.moe_router_bias_update_rate}) is of routers that pick by a"
            " bias, and this model's have none; remove it.",
            f"{section}.moe_router_bias_update_rate",
        )
    is_mixed = bool(hf_config.get("mlp_only_layers")) or hf_config.get("decoder_sparse_step", 1) != 1
    if num and is_mixed and config.job == "train" and config.rollout.engine == "sglang":
        yield _problem(
            "mlp_only_layers and decoder_sparse_step, by which some layers have no experts, are unknown to SGLang: its"
            " log-probs would be wrong without an error; use rollout.engine: local, or another model.",
            "rollout.engine",
        )


def _recompute_of_biases(section: str, m: MegatronConfig) -> Findings:
    if m.recompute_granularity == "selective" and "mlp" in m.recompute_modules:
        prefix = f"{section}.recompute_"
        yield _problem(
            f"mlp_bias (True) and {prefix}modules ({list(m.recompute_modules)}) do not go together: megatron-core's"
            f" backward pass through a recomputed MLP with biases does not end; remove mlp or use {prefix}granularity:"
            " full.",
            f"{prefix}modules",
        )


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, ("model.path", *keys))


def _sizes(hf_config: Mapping[str, Any]) -> dict[str, int | None]:
    """Checked sizes; None where one is missing or is no positive integer. Optional ones may be absent."""
    sizes: dict[str, int | None] = {}
    for key in (*SIZES, *OPTIONAL_SIZES):
        value = hf_config.get(key)
        if value is None and key in OPTIONAL_SIZES:
            continue
        largest = MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE
        sizes[key] = value if type(value) is int and 0 < value <= largest else None
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return sizes


def _layout(section: str, m: MegatronConfig, sizes: Mapping[str, int]) -> Findings:
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    tp_key, pp_key = f"{section}.tensor_model_parallel_size", f"{section}.pipeline_model_parallel_size"
    told = {f"{section}.{key}": getattr(m, key) for key in FIRST_LAST if getattr(m, key)}
    divisible = (
        ("num_attention_heads", tp_key, tp),
        ("num_key_value_heads", tp_key, tp),
        ("intermediate_size", tp_key, tp),
        *((("num_hidden_layers", pp_key, pp),) if not told and m.pipeline_model_parallel_layout is None else ()),
    )
    yield from _layers_of_text(section, m, sizes)
    left, inner = sizes.get("num_hidden_layers", 0) - sum(told.values()), pp - len(told)
    if told and pp > 1 and left and (inner < 0 or left < 0 or (left % inner if inner else left)):
        yield _problem(
            f"num_hidden_layers ({sizes['num_hidden_layers']}) less those of {' and '.join(told)}"
            f" ({' + '.join(map(str, told.values()))}) must be a multiple of the stages left ({inner}); change these.",
            *told,
            pp_key,
        )
    for name, key, ways in divisible:
        if ways > 1 and name in sizes and sizes[name] % ways:
            fit = [str(d) for d in divisors_of(sizes[name]) if d < ways]
            yield _problem(f"{name} ({sizes[name]}) must be a multiple of {key} ({ways}); use {' or '.join(fit)}.", key)
    vpp, layers = m.virtual_pipeline_model_parallel_size, sizes.get("num_hidden_layers", 0)
    is_even = m.pipeline_model_parallel_layout is None
    if is_even and vpp is not None and vpp > 0 and pp > 0 and layers % pp == 0 and layers % (pp * vpp):
        fit = [str(d) for d in divisors_of(layers // pp)[1:]]
        yield _problem(
            f"num_hidden_layers ({layers}) must be a multiple of {pp_key} x virtual_pipeline_model_parallel_size ({pp}"
            f" x {vpp} = {pp * vpp}); set the second to {' or '.join([*fit, 'null'])}.",
            pp_key,
            f"{section}.virtual_pipeline_model_parallel_size",
        )
    yield from recompute_of_model(section, m, sizes.get("num_hidden_layers", 0))


def _layers_of_text(section: str, m: MegatronConfig, sizes: Mapping[str, int]) -> Findings:
    if m.pipeline_model_parallel_layout is None or "num_hidden_layers" not in sizes:
        return
    try:
        told = sum(parse_layout(m.pipeline_model_parallel_layout))
    except ValueError:
        return  # another rule says it
    key = f"{section}.pipeline_model_parallel_layout"
    if told != sizes["num_hidden_layers"]:
        yield _problem(f"num_hidden_layers ({sizes['num_hidden_layers']}) must be the {told} layers t of {key}.", key)


def _shape(config: RunConfig, sizes: Mapping[str, int], is_latent: bool) -> Findings:
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield _problem(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}).")
    if heads and not is_latent and "head_dim" not in sizes and sizes.get("hidden_size", 0) % heads:
        yield _problem(f"hidden_size ({sizes['hidden_size']}) must be a multiple of num_attention_heads ({heads}).")
    positions = sizes.get("max_position_embeddings")
    longest, text, settings = longest_sample(config)
    if positions and longest > positions:
        shorter = "one" if len(settings) > 1 else "it"
        yield _problem(
            f"max_position_embeddings ({positions}) must cover {text}); shorten {shorter} by {longest - positions}.",
            *settings,
        )
