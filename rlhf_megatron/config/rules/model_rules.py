"""Rules on the config.json of a model: sizes that the layout must divide, settings that no
family implements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import OptionalProblems, drop_none, make_problem_if
from rlhf_megatron.config.rules.batch_rules import describe_longest_sample, list_divisors
from rlhf_megatron.config.rules.expert_rules import (
    REPLAY,
    find_expert_bias_problems,
    find_expert_model_problems,
    find_ignored_expert_settings,
    find_router_replay_problems,
    find_shared_expert_problems,
    read_num_experts,
)
from rlhf_megatron.config.rules.layout_rules import FIRST_LAST, check_recompute_layer_count
from rlhf_megatron.config.rules.model_entries import (
    find_entry_type_problems,
    find_layer_list_problems,
    find_token_id_problems,
)
from rlhf_megatron.config.rules.part_rules import has_engine_setting
from rlhf_megatron.config.rules.pipeline_layout_text import MOST_LAYERS, parse_pipeline_layout
from rlhf_megatron.config.rules.run_rules import (
    count_reference_ranks,
    list_learning_pool_layouts,
    list_pool_layouts,
)
from rlhf_megatron.config.schema import MegatronConfig, RolloutConfig, RunConfig
from rlhf_megatron.plugins import find_unloaded_plugins
from rlhf_megatron.registry import load_registry

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
HAS_DP_ATTENTION = (
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "kimi_k2",
    "gpt_oss",
)  # in SGLang
LARGEST_SIZE = 1 << 30  # of a model that some machine can hold


def find_policy_model_problems(
    config: RunConfig, hf_config: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield each reason why the model with this Hugging Face config cannot be the policy, nor the
    critic if the critic starts from the policy's model.
    """
    pools = [
        pool
        for pool in list_learning_pool_layouts(config)
        if pool[0] == "actor.megatron" or config.critic.path is None
    ]
    for problem in drop_none(_check_model_config(config, hf_config, pools)):
        yield replace(problem, text=f"{Path(config.model.path) / 'config.json'}: {problem.text}")


def find_critic_model_problems(
    config: RunConfig, hf_config: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield each reason why the model of critic.path cannot be the critic in the critic's layout.
    critic.path must be set.
    """
    assert config.critic.path is not None
    pools = [*list_learning_pool_layouts(config)][-1:]
    yield from _find_problems_of_model_at(
        config, hf_config, "critic.path", config.critic.path, pools
    )


def find_reward_model_problems(
    config: RunConfig, hf_config: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield each reason why the model of reward_model.path cannot score, in the layout of its own
    ranks or of the actor's. reward_model.path must be set.
    """
    assert config.reward_model.path is not None
    sections = [*list_pool_layouts(config)]
    pools = [one for one in sections if one[0] == "reward_model.megatron"] or sections[:1]
    yield from _find_problems_of_model_at(
        config, hf_config, "reward_model.path", config.reward_model.path, pools
    )


def find_teacher_model_problems(
    config: RunConfig, hf_config: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield each reason why the model of reference.path cannot be the reference or teacher, in the
    layout of its own ranks or of the actor's. reference.path must be set.
    """
    assert config.reference.path is not None
    sections = [*list_pool_layouts(config)]
    pools = sections[-1:] if count_reference_ranks(config) else sections[:1]
    yield from _find_problems_of_model_at(
        config, hf_config, "reference.path", config.reference.path, pools
    )


def _find_problems_of_model_at(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    key: str,
    path: str,
    pools: Sequence[tuple[str, MegatronConfig, int]],
) -> Iterator[ConfigProblem]:
    """Yield each reason why the model at `path`, which the setting `key` names, cannot run in the
    layouts of `pools`. The texts begin with the path of its config.json.
    """
    for problem in drop_none(_check_model_config(config, hf_config, pools)):
        keys = tuple(key if name == "model.path" else name for name in problem.keys)
        yield replace(problem, text=f"{Path(path) / 'config.json'}: {problem.text}", keys=keys)


def _check_model_config(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    pools: Sequence[tuple[str, MegatronConfig, int]],
) -> OptionalProblems:
    """Yield each reason why a model cannot be used here: a model_type without a registered family
    (backend fsdp accepts more), unsupported settings, bad sizes, and layouts of `pools` that do not
    fit. A pool is (key of its megatron section, the section, number of ranks).
    """
    type_problems = [*find_entry_type_problems(hf_config)]
    yield from map(_make_model_problem, type_problems)
    if type_problems:
        return  # the other rules would stumble over them
    yield from map(_make_model_problem, find_token_id_problems(hf_config))
    yield from map(_make_model_problem, find_layer_list_problems(hf_config))
    families = load_registry("model family")
    name = str(hf_config.get("model_type"))
    family = families.find(name)
    if family is None and config.actor.backend == "fsdp":
        yield from _check_transformers_model(config, hf_config)
        return
    if family is None:
        if not find_unloaded_plugins(config.plugins):
            names = ", ".join(families)
            kind = hf_config.get("model_type")
            yield _make_model_problem(
                f"model_type ({kind!r}) must be one of {names}; choose such a model, or"
                " actor.backend fsdp, or name the file that registers a family of your own in"
                " plugins:."
            )
        return
    try:
        unsupported_settings = [*family.build.find_unsupported_settings(hf_config)]
    except ValueError as error:  # it could not read what it looks at
        unsupported_settings = [str(error)]
    problems = [*drop_none(_check_family_model(config, hf_config, pools, unsupported_settings))]
    yield from problems
    try:
        arguments = {} if problems else family.build.make_transformer_arguments(hf_config)
    except ValueError as error:
        yield _make_model_problem(str(error))
        return
    if read_num_experts(hf_config) and arguments.get("add_bias_linear"):
        for section, megatron, _ in pools:
            for text, keys in find_expert_bias_problems(megatron):
                yield _make_model_problem(
                    f"{section}.{text}", *(f"{section}.{key}" for key in keys)
                )
    if arguments.get("softmax_type") == "learnable" and config.rollout.engine == "sglang":
        yield from _check_attention_sinks(
            config.rollout, config.rollout.dtype or config.model.dtype, hf_config
        )


def _check_attention_sinks(
    rollout: RolloutConfig, dtype: str, hf_config: Mapping[str, Any]
) -> OptionalProblems:
    """Yield a problem for each setting with which stock SGLang cannot run a model with attention
    sinks, such as GPT-OSS.
    """
    is_on_cpu = (
        rollout.sglang.args.get("device") == "cpu"
        or rollout.sglang.env.get("SGLANG_USE_CPU_ENGINE") == "1"
    )
    yield make_problem_if(
        is_on_cpu,
        (
            "attention with sinks has no backend of SGLang on a CPU; use rollout.engine: local, or"
            " GPUs for the servers."
        ),
        ("model.path", "rollout.engine"),
    )
    yield make_problem_if(
        dtype != "bfloat16",
        (
            f"SGLang keeps sinks of attention in bfloat16, and rollout.dtype ({dtype}) would be"
            " rounded to it; set rollout.dtype: bfloat16."
        ),
        ("rollout.dtype",),
    )
    yield make_problem_if(
        rollout.quantization,
        (
            "SGLang loads experts with biases as they are, and rollout.quantization"
            f" ({rollout.quantization}) cannot be sent; leave rollout.quantization out."
        ),
        ("rollout.quantization",),
    )
    yield make_problem_if(
        rollout.endpoints,
        (
            "a weight sync sends experts with biases one by one, which servers that the run did not"
            " start may drop without a word; leave rollout.endpoints out."
        ),
        ("rollout.endpoints",),
    )
    yield make_problem_if(
        hf_config.get("swiglu_limit") is None,
        "SGLang needs swiglu_limit, which the file lacks; add swiglu_limit: 7.0 to the file.",
        ("model.path",),
    )


def _check_transformers_model(config: RunConfig, hf_config: Mapping[str, Any]) -> OptionalProblems:
    """Yield the problems of a model whose family only transformers implements, for the backend
    fsdp: bad sizes, experts, or an impossible shape. Whether transformers implements the family
    shows only later, when its tensors are looked for.
    """
    sizes = _read_model_sizes(hf_config)
    for key, value in sizes.items():
        yield make_problem_if(
            value is None,
            f"{key} ({hf_config.get(key)!r}) must be a positive integer.",
            ("model.path",),
        )
    yield make_problem_if(
        read_num_experts(hf_config),
        (
            f"model_type ({hf_config.get('model_type')!r}) has experts, whose tensors have other"
            " names in files than in transformers; choose a dense model, or one with experts that"
            " Megatron trains here."
        ),
        ("model.path",),
    )
    known = {key: value for key, value in sizes.items() if value is not None}
    yield from _check_model_shape(config, known, is_latent=bool(hf_config.get("kv_lora_rank")))


def _check_family_model(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    pools: Sequence[tuple[str, MegatronConfig, int]],
    unsupported_settings: Sequence[str],
) -> OptionalProblems:
    """Yield the problems of a model of a registered family: the `unsupported_settings`, bad sizes,
    layouts that do not divide the model or its experts, router replay, and SGLang's DP attention.
    """
    yield from map(_make_model_problem, unsupported_settings)
    sizes = _read_model_sizes(hf_config)
    for key, value in sizes.items():
        yield make_problem_if(
            value is None,
            (
                f"{key} ({hf_config.get(key)!r}) must be a positive integer that some machine can"
                " hold; mend the file."
            ),
            ("model.path",),
        )
    known = {key: value for key, value in sizes.items() if value is not None}
    for section, megatron, _ in pools:
        if hf_config.get("mlp_bias"):
            yield from _check_recompute_with_biases(section, megatron)
        key = f"{section}.recompute_modules"
        yield make_problem_if(
            "mla_up_proj" in megatron.recompute_modules and not hf_config.get("kv_lora_rank"),
            (
                f"{key} ({list(megatron.recompute_modules)}) has mla_up_proj, which is of latent"
                " attention, and the model has none; remove mla_up_proj."
            ),
            ("model.path", key),
        )
        yield from _check_layout_divides_model(section, megatron, known)
        yield from _check_experts(config, section, megatron, hf_config)
    for text in find_router_replay_problems(config, hf_config):
        yield _make_model_problem(text, "model.path", REPLAY)
    if has_engine_setting(config.rollout, "rollout.sglang"):
        problem = describe_dp_attention_problem(hf_config, config.rollout.sglang.args)
        yield make_problem_if(
            problem, f"rollout.sglang.args: {problem}.", ("model.path", "rollout.sglang.args")
        )
    yield from _check_model_shape(config, known, bool(hf_config.get("kv_lora_rank")))


def describe_dp_attention_problem(
    hf_config: Mapping[str, Any], server_arguments: Mapping[str, object]
) -> str | None:
    """Return why SGLang's DP attention cannot run this model, as a text without a full stop; None
    where the arguments do not ask for DP attention or the model can run with it. `server_arguments`
    holds the server's arguments by name, with dashes or underscores.
    """
    given = {name.replace("_", "-"): value for name, value in server_arguments.items()}
    if not given.get("enable-dp-attention"):
        return None
    if (name := hf_config.get("model_type")) not in HAS_DP_ATTENTION:
        return (
            f"enable-dp-attention is for {', '.join(HAS_DP_ATTENTION)}; SGLang cuts the attention"
            f" of {name} over all ranks whatever they serve, and its log-probs would be wrong"
            " without an error; start it without"
        )
    if hf_config.get("tie_word_embeddings") and not given.get("enable-dp-lm-head"):
        return (
            "enable-dp-attention cuts the embedding over fewer ranks than the head, and in this"
            " model the two are one tensor (tie_word_embeddings: true); add enable-dp-lm-head"
        )
    return None


def _check_experts(
    config: RunConfig,
    section: str,
    megatron: MegatronConfig,
    hf_config: Mapping[str, Any],
) -> OptionalProblems:
    """Yield the problems of a layout for the experts of a model, or settings of experts if the
    model has none. Also refuse a bias update rate for routers without a bias, and layers with and
    without experts mixed under SGLang.
    """
    num = read_num_experts(hf_config)
    width = hf_config.get("moe_intermediate_size") or hf_config.get("intermediate_size")
    found = (
        find_expert_model_problems(num, width if isinstance(width, int) else 0, megatron)
        if num
        else find_ignored_expert_settings(megatron)
    )
    shared = find_shared_expert_problems(
        megatron, "n_routed_experts" in hf_config and hf_config.get("n_shared_experts") != 0
    )
    for text, keys in (*found, *(shared if num else ())):
        yield _make_model_problem(f"{section}.{text}", *(f"{section}.{key}" for key in keys))
    if num and megatron.moe_router_bias_update_rate > 0 and "n_routed_experts" not in hf_config:
        yield _make_model_problem(
            (
                f"{section}.moe_router_bias_update_rate ({megatron.moe_router_bias_update_rate}) is"
                " of routers that pick by a bias, and this model's have none; remove"
                f" {section}.moe_router_bias_update_rate."
            ),
            f"{section}.moe_router_bias_update_rate",
        )
    is_mixed = (
        bool(hf_config.get("mlp_only_layers")) or hf_config.get("decoder_sparse_step", 1) != 1
    )
    if num and is_mixed and config.job == "train" and config.rollout.engine == "sglang":
        yield _make_model_problem(
            (
                "mlp_only_layers and decoder_sparse_step, by which some layers have no experts, are"
                " unknown to SGLang: its log-probs would be wrong without an error; use"
                " rollout.engine: local, or another model."
            ),
            "rollout.engine",
        )


def _check_recompute_with_biases(section: str, megatron: MegatronConfig) -> OptionalProblems:
    """Yield a problem if the layout recomputes the MLP selectively; call this for a model whose
    MLPs have biases, with which megatron-core's backward pass would hang.
    """
    if megatron.recompute_granularity == "selective" and "mlp" in megatron.recompute_modules:
        prefix = f"{section}.recompute_"
        yield _make_model_problem(
            (
                f"mlp_bias (True) and {prefix}modules ({list(megatron.recompute_modules)}) do not"
                " go together: megatron-core's backward pass through a recomputed MLP with biases"
                f" does not end; remove mlp or use {prefix}granularity: full."
            ),
            f"{prefix}modules",
        )


def _make_model_problem(text: str, *keys: str) -> ConfigProblem:
    """Return a problem about model.path and the other `keys`."""
    return ConfigProblem(text, ("model.path", *keys))


def _read_model_sizes(hf_config: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the sizes of a Hugging Face config by name. A size is None where it is missing or is
    not a positive integer of a possible magnitude; optional sizes may be absent from the result,
    but num_key_value_heads defaults to the attention heads.
    """
    sizes: dict[str, int | None] = {}
    for key in (*SIZES, *OPTIONAL_SIZES):
        value = hf_config.get(key)
        if value is None and key in OPTIONAL_SIZES:
            continue
        largest = MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE
        sizes[key] = value if type(value) is int and 0 < value <= largest else None
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return sizes


def _check_layout_divides_model(
    section: str, megatron: MegatronConfig, sizes: Mapping[str, int]
) -> OptionalProblems:
    """Yield a problem for each size of the model that the section's parallel sizes do not divide:
    heads, key-value heads, MLP columns, and layers over pipeline stages and virtual stages. Also
    check recompute_num_layers.
    """
    tp = megatron.tensor_model_parallel_size
    pp = megatron.pipeline_model_parallel_size
    tp_key = f"{section}.tensor_model_parallel_size"
    pp_key = f"{section}.pipeline_model_parallel_size"
    end_layers = {
        f"{section}.{key}": getattr(megatron, key) for key in FIRST_LAST if getattr(megatron, key)
    }
    divisible = (
        ("num_attention_heads", tp_key, tp),
        ("num_key_value_heads", tp_key, tp),
        ("intermediate_size", tp_key, tp),
        *(
            (("num_hidden_layers", pp_key, pp),)
            if not end_layers and megatron.pipeline_model_parallel_layout is None
            else ()
        ),
    )
    yield from _check_layout_layer_count(section, megatron, sizes)
    num_inner_layers = sizes.get("num_hidden_layers", 0) - sum(end_layers.values())
    num_inner_stages = pp - len(end_layers)
    is_uneven = (
        num_inner_stages < 0
        or num_inner_layers < 0
        or (num_inner_layers % num_inner_stages if num_inner_stages else num_inner_layers)
    )
    if end_layers and pp > 1 and num_inner_layers and is_uneven:
        yield ConfigProblem(
            f"num_hidden_layers ({sizes['num_hidden_layers']}) less those of"
            f" {' and '.join(end_layers)} ({' + '.join(map(str, end_layers.values()))}) must be a"
            f" multiple of the stages left ({num_inner_stages}); change {' or '.join(end_layers)}.",
            ("model.path", *end_layers, pp_key),
        )
    for name, key, ways in divisible:
        if ways > 1 and name in sizes and sizes[name] % ways:
            fit = [str(d) for d in list_divisors(sizes[name]) if d < ways]
            yield _make_model_problem(
                (
                    f"{name} ({sizes[name]}) must be a multiple of {key} ({ways});"
                    f" use {' or '.join(fit)}."
                ),
                key,
            )
    vpp = megatron.virtual_pipeline_model_parallel_size
    layers = sizes.get("num_hidden_layers", 0)
    is_even = megatron.pipeline_model_parallel_layout is None
    if (
        is_even
        and vpp is not None
        and vpp > 0
        and pp > 0
        and layers % pp == 0
        and layers % (pp * vpp)
    ):
        fit = [str(d) for d in list_divisors(layers // pp)[1:]]
        yield _make_model_problem(
            (
                f"num_hidden_layers ({layers}) must be a multiple of {pp_key} x"
                f" virtual_pipeline_model_parallel_size ({pp} x {vpp} = {pp * vpp}); set the second"
                f" to {' or '.join([*fit, 'null'])}."
            ),
            pp_key,
            f"{section}.virtual_pipeline_model_parallel_size",
        )
    yield from check_recompute_layer_count(section, megatron, sizes.get("num_hidden_layers", 0))


def _check_layout_layer_count(
    section: str, megatron: MegatronConfig, sizes: Mapping[str, int]
) -> OptionalProblems:
    """Yield a problem if the written pipeline layout has another number of layers than the model.
    Yield nothing without such a layout, or where the layout cannot be parsed.
    """
    if megatron.pipeline_model_parallel_layout is None or "num_hidden_layers" not in sizes:
        return
    try:
        told = sum(parse_pipeline_layout(megatron.pipeline_model_parallel_layout))
    except ValueError:
        return  # another rule says it
    key = f"{section}.pipeline_model_parallel_layout"
    if told != sizes["num_hidden_layers"]:
        yield _make_model_problem(
            (
                f"num_hidden_layers ({sizes['num_hidden_layers']}) must be the {told} layers"
                f" t of {key}."
            ),
            key,
        )


def _check_model_shape(
    config: RunConfig, sizes: Mapping[str, int], is_latent: bool
) -> OptionalProblems:
    """Yield a problem if the heads do not divide by the key-value heads, the hidden size does not
    divide by the heads (except with latent attention or a given head_dim), or the longest sample
    exceeds the model's positions.
    """
    heads = sizes.get("num_attention_heads")
    kv_heads = sizes.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield _make_model_problem(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})."
        )
    if heads and not is_latent and "head_dim" not in sizes and sizes.get("hidden_size", 0) % heads:
        yield _make_model_problem(
            f"hidden_size ({sizes['hidden_size']}) must be a multiple of"
            f" num_attention_heads ({heads})."
        )
    positions = sizes.get("max_position_embeddings")
    longest, text, settings = describe_longest_sample(config)
    if positions and longest > positions:
        shorter = "one" if len(settings) > 1 else "it"
        yield ConfigProblem(
            f"max_position_embeddings ({positions}) must cover {text}); shorten {shorter} by"
            f" {longest - positions}.",
            ("model.path", *settings),
        )
