"""A run's configuration and model at a tiny size: algorithm, losses, optimizer, layout and model
family stay the same.

What a layout can get wrong in the large model it can get wrong in the tiny one too. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config import schema
from rlhf_megatron.config.rules.expert_rules import KEYS
from rlhf_megatron.config.rules.pipeline_layout_text import count_model_chunks
from rlhf_megatron.config.rules.run_rules import has_critic, needs_reference
from rlhf_megatron.planning.check.fold_layout import FoldedRun
from rlhf_megatron.weights.families.family_lookup import find_model_family
from rlhf_megatron.weights.quantised_weights import FP8_BLOCK

NUM_STEPS = 2
NUM_PROMPTS = 8
MAX_SAMPLES = 4
MAX_PROMPT = 8
MAX_RESPONSE = 8
TOKEN_BUDGET = 2 * (MAX_PROMPT + MAX_RESPONSE)  # a rank's: several micro-batches an optimizer step
LEARNING_RATE = 1e-3
# of Adam: below, an element whose gradient is rounding noise moves by a whole learning rate
MIN_EPS = 1e-5
# least: behind a head of zeros nothing else would learn in the first optimizer step
VALUE_HEAD_STD = 0.1
FP8_MEDIAN = 0.1  # nats, that FP8 may change a sampled token's log-prob by in the median
VOCAB_CHUNK = 8  # columns of the head at a time: several chunks of the tiny vocabulary

HEAD_DIM = 8
INITIALIZER_RANGE = 0.06  # wide enough for the probabilities of tokens to differ
MIN_VOCAB_SIZE = 32  # holds the tokens of the character tokenizer
MAX_QUERIES_PER_GROUP = 3
TINY_MODEL_SETTINGS: dict[str, Any] = {
    "torch_dtype": "float32",
    "dtype": None,
    "bos_token_id": None,  # these three are of the character tokenizer
    "eos_token_id": 1,
    "pad_token_id": 0,
}

CHANGES_IN_EVERY_FOLD = (
    (
        "float32 in trainer and engine, so that layouts agree to rounding error;"
        " rollout.quantization stays"
    ),
    "the bundled local engine, one server; the synchronous schedule, whatever the run's is",
    (
        f"a tiny model of the same family with random weights; {NUM_PROMPTS} prompts of the"
        f" addition task with up to {MAX_SAMPLES} samples; prompts of 4 to {MAX_PROMPT} tokens,"
        f" responses of up to {MAX_RESPONSE}"
    ),
    (
        "the reward is the share of digits in a response, so that groups have different rewards"
        " from the first step"
    ),
    (
        f"learning rate {LEARNING_RATE:g} (schedules keep their style), Adam epsilon {MIN_EPS:g} or"
        " more, at most 2 mini-batches a step and 2 epochs, 2 warm-up steps where the run"
        " has a warm-up"
    ),
    (
        f"a critic's first value head is random, of deviation {VALUE_HEAD_STD:g} or more, and the"
        " policy learns from the first step (critic_warmup 0)"
    ),
)
"""What every folded run changes, whatever the layout."""


def fold_run_config(
    config: schema.RunConfig, folded_run: FoldedRun, directory: Path
) -> schema.RunConfig:
    """Return the configuration of a folded run. `directory` holds its models and data.

    Two configurations that differ only in `folded_run` train the same.
    """
    # of a step
    num_ranks = folded_run.num_ranks
    num_samples = NUM_PROMPTS * min(config.rollout.n, MAX_SAMPLES)
    true_samples = config.data.train_batch_size * config.rollout.n

    def fold_mini_batch_size(run_mini_batch_size: int) -> int:
        """Return a mini-batch size that makes two mini-batches a step where the run has several,
        else one.
        """
        return num_samples // 2 if true_samples > run_mini_batch_size else num_samples

    # The run's own bound is one on float32.
    checks = (
        schema.CheckConfig(log_prob_max_abs_diff=config.checks.log_prob_max_abs_diff)
        if config.is_float32_throughout
        else None
    )
    if config.rollout.quantization is not None:
        checks = schema.CheckConfig(log_prob_p50_abs_diff=FP8_MEDIAN)
    return schema.RunConfig(
        model=schema.ModelConfig(
            path=str(directory / "model"),
            dtype="float32",
            init_seed=1 if config.model.init_seed is None else config.model.init_seed,
        ),
        data=schema.DataConfig(
            train_files=(str(directory / "train.jsonl"),),
            val_files=(str(directory / "val.jsonl"),),
            max_prompt_length=MAX_PROMPT,
            max_response_length=MAX_RESPONSE,
            train_batch_size=NUM_PROMPTS,
            shuffle=config.data.shuffle,
            seed=config.data.seed,
        ),
        actor=_fold_actor(config.actor, folded_run.actor.megatron, fold_mini_batch_size),
        critic=_fold_critic(config.critic, folded_run, directory, fold_mini_batch_size)
        if has_critic(config)
        else schema.CriticConfig(),
        reference=_fold_reference(config.reference, directory)
        if needs_reference(config)
        else schema.ReferenceConfig(),
        rollout=schema.RolloutConfig(
            engine="local",
            quantization=config.rollout.quantization,
            n=min(config.rollout.n, MAX_SAMPLES),
            temperature=config.rollout.temperature,
            stop=("+", "-", "*"),  # responses of different lengths
            max_num_seqs=NUM_PROMPTS * MAX_SAMPLES,
            max_num_batched_tokens=2 * NUM_PROMPTS * MAX_SAMPLES * (MAX_PROMPT + MAX_RESPONSE),
            update_weights_bucket_megabytes=1,
        ),
        reward=schema.RewardConfig(name="character_share"),
        algorithm=_fold_algorithm(config.algorithm, num_samples),
        warmup=_fold_warmup(config.warmup),
        checks=checks or schema.CheckConfig(),
        trainer=schema.TrainerConfig(
            experiment_name=folded_run.name,
            default_local_dir=str(directory),
            runtime="torchrun" if num_ranks > 1 else "inline",
            nnodes=1,
            n_gpus_per_node=num_ranks,
            device="cpu",
            seed=config.trainer.seed,
            total_training_steps=NUM_STEPS,
            val_before_train=False,
            test_freq=0,
            save_hf=True,
            save_last="none",
            logger=("jsonl",),
        ),
    )


def _fold_actor(
    actor: schema.ActorConfig,
    megatron: schema.MegatronConfig,
    fold_mini_batch_size: Callable[[int], int],
) -> schema.ActorConfig:
    """Return the actor's settings at the tiny size, with the folded layout."""
    return replace(
        actor,
        megatron=megatron,
        optim=_fold_optim(actor.optim),
        mini_batch_size=fold_mini_batch_size(actor.mini_batch_size),
        ppo_epochs=min(actor.ppo_epochs, 2),
        ppo_max_token_len_per_gpu=TOKEN_BUDGET,
        log_prob_chunk_size=VOCAB_CHUNK,
    )


def _fold_critic(
    critic: schema.CriticConfig,
    folded_run: FoldedRun,
    directory: Path,
    fold_mini_batch_size: Callable[[int], int],
) -> schema.CriticConfig:
    """Return the critic's settings at the tiny size, with the folded layout."""
    return replace(
        critic,
        path=None if critic.path is None else str(directory / "critic"),
        value_head_init_std=max(critic.value_head_init_std, VALUE_HEAD_STD),
        num_ranks=0 if folded_run.critic is None else folded_run.critic.num_ranks,
        megatron=schema.MegatronConfig()
        if folded_run.critic is None
        else folded_run.critic.megatron,
        optim=_fold_optim(critic.optim),
        mini_batch_size=None
        if critic.mini_batch_size is None
        else fold_mini_batch_size(critic.mini_batch_size),
        ppo_epochs=None if critic.ppo_epochs is None else min(critic.ppo_epochs, 2),
        ppo_max_token_len_per_gpu=None
        if critic.ppo_max_token_len_per_gpu is None
        else 2 * TOKEN_BUDGET,
    )


def _fold_reference(reference: schema.ReferenceConfig, directory: Path) -> schema.ReferenceConfig:
    """Return the reference's settings at the tiny size, on the actor's ranks."""
    return replace(
        reference,
        path=None if reference.path is None else str(directory / "reference"),
        num_ranks=0,  # the proof has it on the actor's ranks
        megatron=schema.MegatronConfig(),
        max_token_len_per_gpu=None if reference.max_token_len_per_gpu is None else 2 * TOKEN_BUDGET,
    )


def _fold_algorithm(algorithm: schema.AlgorithmConfig, num_samples: int) -> schema.AlgorithmConfig:
    """Return the algorithm with a KL horizon far longer than a step, which the adaptive KL
    controller needs, and without group filter: a replay has no engine to generate other groups.
    """
    control = replace(algorithm.kl_ctrl, horizon=max(algorithm.kl_ctrl.horizon, 10 * num_samples))
    return replace(algorithm, kl_ctrl=control, filter_groups=schema.FilterGroupsConfig())


def _fold_optim(optim: schema.OptimConfig) -> schema.OptimConfig:
    """Return the optimizer's settings with the learning rate and epsilon of folded runs."""
    return replace(
        optim,
        lr=LEARNING_RATE,
        eps=max(optim.eps, MIN_EPS),
        min_lr=LEARNING_RATE * optim.min_lr / optim.lr if optim.lr else 0.0,
        lr_warmup_steps=min(optim.lr_warmup_steps, 1),
        lr_decay_steps=None,
    )


def _fold_warmup(warmup: schema.WarmupConfig) -> schema.WarmupConfig:
    """Return a warm-up of two steps, or none where the run has none."""
    if warmup.max_steps == 0:
        return schema.WarmupConfig()
    return schema.WarmupConfig(
        max_steps=2,
        batch_size=NUM_PROMPTS,
        test_freq=2,
        test_samples=NUM_PROMPTS,
        optim=_fold_optim(warmup.optim),
    )


def fold_model_config(
    hf_config: Mapping[str, Any],
    run_layouts: Sequence[schema.MegatronConfig],
    tiny_layouts: Sequence[schema.MegatronConfig],
    quantization: str | None = None,
) -> dict[str, Any]:
    """Return config.json of a tiny model that fits all layouts `tiny_layouts`. `run_layouts`: the
    run's own layouts, one for each pool. With `quantization` each rank's parts of matrices are
    whole FP8 blocks.

    Raise ValueError for a model that has no family here.
    """
    head_dim, unit = (HEAD_DIM, 4) if quantization is None else FP8_BLOCK
    sizes = find_model_family(hf_config).make_transformer_arguments(hf_config)
    true_tp = run_layouts[0].tensor_model_parallel_size
    tp = math.lcm(*(megatron.tensor_model_parallel_size for megatron in tiny_layouts))
    chunks = math.lcm(*map(count_model_chunks, tiny_layouts))
    groups = tp * (2 if sizes["num_query_groups"] > true_tp else 1)
    heads = groups * _fold_queries_per_group(
        sizes["num_attention_heads"] // sizes["num_query_groups"]
    )
    is_square = sizes["hidden_size"] == sizes["num_attention_heads"] * sizes["kv_channels"]
    hidden = heads * head_dim + (0 if is_square else 2 * head_dim)
    num_layers = chunks * max(
        choose_layers_per_chunk(true, sizes["num_layers"], chunks) for true in run_layouts
    )
    small: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": hidden,
        "intermediate_size": _round_up_to_multiple(
            3 * hidden // 2, unit * math.lcm(tp, *map(_expert_tensor_parallel_size, tiny_layouts))
        ),
        "vocab_size": _choose_vocab_size(int(hf_config["vocab_size"]) % true_tp == 0, tp),
    }
    if hf_config.get("head_dim") is not None or not is_square:
        small["head_dim"] = head_dim
    if hf_config.get("layer_types"):
        small["layer_types"] = list(hf_config["layer_types"])[:num_layers]
    if sizes.get("window_size"):
        small["sliding_window"] = MAX_PROMPT  # so that responses are longer than it
    if "num_moe_experts" in sizes:
        small |= _fold_experts(hf_config, sizes, tiny_layouts, 3 * head_dim, unit)
    if sizes.get("multi_latent_attention"):
        narrow = {
            "q_lora_rank": hf_config.get("q_lora_rank") and 24,
            "head_dim": None,
            "qk_head_dim": None,
        }
        small |= {
            **narrow,
            "kv_lora_rank": 16,
            "v_head_dim": head_dim,
            "qk_nope_head_dim": head_dim,
        }
        small |= {"qk_rope_head_dim": 2 * head_dim, "num_nextn_predict_layers": None}
    kept = {key: value for key, value in hf_config.items() if not key.startswith("_")}
    # logits as wide at any width
    small["initializer_range"] = INITIALIZER_RANGE * math.sqrt(HEAD_DIM / head_dim)
    return {
        key: value
        for key, value in {**kept, **TINY_MODEL_SETTINGS, **small}.items()
        if value is not None
    }


def _expert_tensor_parallel_size(megatron: schema.MegatronConfig) -> int:
    """Return the tensor-parallel size of experts, which is that of the other layers where it is not
    set.
    """
    return megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size


def _fold_experts(
    hf_config: Mapping[str, Any],
    model_arguments: Mapping[str, Any],
    tiny_layouts: Sequence[schema.MegatronConfig],
    min_width: int,
    width_multiple: int,
) -> dict[str, Any]:
    """Return the settings of the experts of a tiny model: at least two experts a rank, in at most
    two groups, and one or two experts a token; where not all layers have experts, the first has
    none.
    """
    per_token = min(model_arguments["moe_router_topk"], 2)
    num = 2 * math.lcm(
        per_token, *(megatron.expert_model_parallel_size for megatron in tiny_layouts)
    )
    has_dense = not all(model_arguments["moe_layer_freq"])
    width = width_multiple * math.lcm(
        *map(_expert_tensor_parallel_size, tiny_layouts),
        *(megatron.tensor_model_parallel_size for megatron in tiny_layouts),
    )
    groups = 2 if model_arguments.get("moe_router_num_groups") and per_token == 2 else 1
    small = {
        **dict.fromkeys(KEYS, num),
        **dict.fromkeys(("num_experts_per_tok", "experts_per_token"), per_token),
        "moe_intermediate_size": _round_up_to_multiple(min_width, width),
        "mlp_only_layers": [0] if has_dense else [],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": int(has_dense),
        "n_group": groups,
        "topk_group": 1,
    }
    return {key: value for key, value in small.items() if key in hf_config}


def fold_recompute(
    tiny_layout: schema.MegatronConfig, run_layout: schema.MegatronConfig, num_layers: int
) -> schema.MegatronConfig:
    """Return `tiny_layout` with a recompute_num_layers that fits the tiny model. `num_layers`: the
    layers of the run's own model.
    """
    count = run_layout.recompute_num_layers
    if run_layout.recompute_granularity != "full" or count is None:
        return tiny_layout
    is_every_layer = count * count_model_chunks(run_layout) >= num_layers
    few = 1 if run_layout.recompute_method == "block" and not is_every_layer else min(count, 2)
    return replace(
        tiny_layout,
        recompute_num_layers=min(
            few, choose_layers_per_chunk(run_layout, num_layers, count_model_chunks(tiny_layout))
        ),
    )


def choose_layers_per_chunk(
    run_layout: schema.MegatronConfig, num_layers: int, num_tiny_chunks: int
) -> int:
    """Return the number of layers of a chunk of the tiny model: two where the large model has
    several and they matter or cost little, else one.
    """
    are_grouped = (
        run_layout.recompute_granularity == "full" and (run_layout.recompute_num_layers or 1) > 1
    )
    are_cut = run_layout.recompute_granularity == "full" and run_layout.recompute_method == "block"
    return (
        2
        if num_layers > count_model_chunks(run_layout)
        and (are_grouped or are_cut or num_tiny_chunks <= 2)
        else 1
    )


def _fold_queries_per_group(run_queries_per_group: int) -> int:
    """Return the run's number of query heads a group where it is small, else 2 or 3, even or odd as
    the run's.
    """
    return (
        run_queries_per_group
        if run_queries_per_group <= MAX_QUERIES_PER_GROUP
        else 2 + run_queries_per_group % 2
    )


def _choose_vocab_size(is_divisible: bool, tp_size: int) -> int:
    """Return the vocabulary size of the tiny model: a multiple of `tp_size` where that of the run
    is one, else one more.
    """
    if is_divisible or tp_size == 1:
        return _round_up_to_multiple(MIN_VOCAB_SIZE, tp_size)
    return _round_up_to_multiple(MIN_VOCAB_SIZE, tp_size) + 1


def _round_up_to_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
