"""Rules on the settings of a layout, each with a value on both sides of its border."""

from pathlib import Path
from typing import Any

import pytest
from config_samples import VALID

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.batch_rules import compute_packing_multiple
from rlhf_megatron.config.rules.validate import validate_config, validate_model_config
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.weights.parallel_layout import make_parallel_layout

MEGATRON = "actor.megatron."
ONE_REPLICA = "trainer.n_gpus_per_node=4"


def overrides(settings: dict[str, Any]) -> list[str]:
    """Keys without a dot are Megatron's."""
    return [f"{key if '.' in key else MEGATRON + key}={value}" for key, value in settings.items()]


@pytest.fixture
def problems(tmp_path: Path):  # type: ignore[no-untyped-def]
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return lambda settings: validate_config(read_run_config(path, overrides(settings)))


CP2 = {"context_parallel_size": 2}
CP4 = {"context_parallel_size": 4}
SP = {"sequence_parallel": "true"}
TP1 = {"tensor_model_parallel_size": 1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
BUDGET = "actor.ppo_max_token_len_per_gpu"
REFERENCE = "reference.max_token_len_per_gpu"
OPTIMIZER = {"use_distributed_optimizer": "true"}
SHORT = {"use_precision_aware_optimizer": "true"}
ALL_OVERLAP = OPTIMIZER | {"overlap_grad_reduce": "true", "overlap_param_gather": "true"}


@pytest.mark.parametrize(
    ("wrong", "expected", "right"),
    [
        # 8 ranks in tp2 pp2.
        (CP4, (
            "trainer.nnodes x n_gpus_per_node (1 x 8 = 8) must be a multiple of"
            " actor.megatron.tensor_model_parallel_size x pipeline_model_parallel_size x"
            " context_parallel_size (2 x 2 x 4 = 16); use 16 ranks or another layout."
        ), CP2),
        ({"context_parallel_size": 0},
         "actor.megatron.context_parallel_size (0) must be at least 1; the default is 1.",
         {"context_parallel_size": 1}),
        # Two replicas, then one: what replicas need at least.
        ({"actor.mini_batch_size": 1},
         "actor.mini_batch_size (1 samples) must be at least the data-parallel size (2)",
         CP2 | {"actor.mini_batch_size": 1}),
        ({"warmup.max_steps": 5, "warmup.batch_size": 1},
         "warmup.batch_size (1 samples) must be at least the data-parallel size (2)",
         CP2 | {"warmup.max_steps": 5, "warmup.batch_size": 1}),
        # Virtual stages and sequence parallelism.
        ({"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
         (
             "actor.megatron.virtual_pipeline_model_parallel_size (2) cuts pipeline stages"
             " into chunks, but pipeline_model_parallel_size is 1; use 2 or more stages, or"
             " remove actor.megatron.virtual_pipeline_model_parallel_size."
         ), {"virtual_pipeline_model_parallel_size": 2}),
        ({"virtual_pipeline_model_parallel_size": 1},
         (
             "actor.megatron.virtual_pipeline_model_parallel_size (1) must be at least 2; the"
             " default is null."
         ), {"virtual_pipeline_model_parallel_size": "null"}),
        (SP | TP1, (
            "actor.megatron.sequence_parallel (true) splits tokens over tensor-parallel ranks,"
            " but tensor_model_parallel_size is 1; use 2 or more, or set"
            " actor.megatron.sequence_parallel to false."
        ), SP),
        (CP2 | {"share_prompts": "true"},
         (
             "actor.megatron.share_prompts (true) keeps a prompt whole, but"
             " context_parallel_size (2) cuts it; use 1, or set actor.megatron.share_prompts"
             " to false."
         ), {"share_prompts": "true"}),
        # Distributed optimizer and overlap.
        ({"overlap_param_gather": "true"},
         (
             "actor.megatron.overlap_param_gather (true) needs use_distributed_optimizer,"
             " whose shards it gathers, and overlap_grad_reduce, which cuts parameters into"
             " buckets; set use_distributed_optimizer and overlap_grad_reduce to true, or"
             " actor.megatron.overlap_param_gather to false."
         ), ALL_OVERLAP),
        (OPTIMIZER | {"overlap_param_gather": "true"},
         "set overlap_grad_reduce to true, or actor.megatron.overlap_param_gather to false.",
         OPTIMIZER | {"overlap_grad_reduce": "true"}),
        ({"overlap_grad_reduce": "true", "overlap_param_gather": "true"},
         "set use_distributed_optimizer to true, or actor.megatron.overlap_param_gather to"
         " false.", {"overlap_grad_reduce": "true"}),
        # What the optimizer keeps in fewer bits.
        ({"exp_avg_dtype": "bfloat16"},
         (
             "actor.megatron.exp_avg_dtype (bfloat16) would be ignored without"
             " actor.megatron.use_precision_aware_optimizer; set"
             " actor.megatron.use_precision_aware_optimizer to true."
         ), SHORT | {"exp_avg_dtype": "bfloat16"}),
        (SHORT | {"model.dtype": "float32"},
         (
             "actor.megatron.use_precision_aware_optimizer (true) would be ignored: a float32 model"
             " has no main parameters beside its own; set exp_avg_dtype or exp_avg_sq_dtype"
             " to bfloat16"
         ), SHORT | {"exp_avg_sq_dtype": "bfloat16", "model.dtype": "float32"}),
        # Recomputation.
        ({"recompute_granularity": "full"},
         (
             "actor.megatron.recompute_granularity (full) needs recompute_method and"
             " recompute_num_layers; use recompute_method: uniform and recompute_num_layers: 1"
         ), FULL),
        ({"recompute_granularity": "full", "recompute_method": "block"},
         "actor.megatron.recompute_granularity (full) needs recompute_num_layers; use",
         FULL | {"recompute_method": "block"}),
        ({"recompute_granularity": "full", "recompute_num_layers": 1},
         "actor.megatron.recompute_granularity (full) needs recompute_method; use", FULL),
        (SELECTIVE | {"recompute_modules": "[]"},
         "actor.megatron.recompute_modules ([]) must name at least one module and none twice",
         SELECTIVE),
        (SELECTIVE | {"recompute_modules": "[mlp,core_attn,mlp]"},
         (
             "actor.megatron.recompute_modules (['mlp', 'core_attn', 'mlp']) must name at least one"
             " module and none twice"
         ), SELECTIVE | {"recompute_modules": "[mlp,core_attn,layernorm]"}),
        (SELECTIVE | {"recompute_modules": "[layernorm]", "transformer_impl": "transformer_engine"},
         (
             "actor.megatron.recompute_modules (['layernorm']) has layernorm, which does"
             " nothing for transformer_impl transformer_engine: its norms are parts of the"
             " linear layers; remove layernorm, or use transformer_impl: local."
         ), SELECTIVE | {"recompute_modules": "[layernorm]", "transformer_impl": "local"}),
        # The longest sample has 10 tokens.
        ({BUDGET: 9},
         (
             "actor.ppo_max_token_len_per_gpu (9) must hold the longest sample,"
             " data.max_prompt_length + max_response_length (6 + 4 = 10); use 10 or more."
         ), {BUDGET: 10}),
        (CP2 | {BUDGET: 5},
         (
             "actor.ppo_max_token_len_per_gpu (5 x context_parallel_size 2 = 10) must hold the"
             " longest sample, data.max_prompt_length + max_response_length (6 + 4 = 10, padded to"
             " a multiple of 4: 12); use 6 or more."
         ), CP2 | {BUDGET: 6}),
        (CP2 | SP | {BUDGET: 7}, "(6 + 4 = 10, padded to a multiple of 8: 16); use 8 or more.",
         CP2 | SP | {BUDGET: 8}),
        (SP | {"tensor_model_parallel_size": 4, BUDGET: 11},
         "(6 + 4 = 10, padded to a multiple of 4: 12); use 12 or more.",
         SP | {"tensor_model_parallel_size": 4, BUDGET: 12}),
        (CP2 | {"actor.use_kl_loss": "true", REFERENCE: 5},
         (
             "reference.max_token_len_per_gpu (5 x context_parallel_size 2 = 10) must hold the"
             " longest sample"
         ), CP2 | {"actor.use_kl_loss": "true", REFERENCE: 6}),
        # A machine has 8 of 16 ranks; the second stage starts at rank 8, whatever cp is.
        (CP2 | {"trainer.nnodes": 2},
         (
             "rollout.weight_transport (tensor) does not reach engines on machines [0] of 2 with"
             " ranks (trainer.nnodes): 2 pipeline stages lie on several machines"
         ), CP2 | {"trainer.nnodes": 2, "pipeline_model_parallel_size": 1}),
    ],
)  # fmt: skip
def test_each_rule_on_both_sides(
    problems, wrong: dict[str, Any], expected: str, right: dict[str, Any]
) -> None:  # type: ignore[no-untyped-def]
    found = problems(wrong)
    assert len(found) == 1 and expected in found[0] and "command line" in found[0], found
    assert problems(right) == []


@pytest.mark.parametrize(
    ("wrong", "key", "right"),
    [
        ({"recompute_method": "uniform"}, "recompute_method", FULL),
        ({"recompute_num_layers": 2}, "recompute_num_layers", FULL),
        (
            {"recompute_modules": "[mlp]"},
            "recompute_modules",
            SELECTIVE | {"recompute_modules": "[mlp]"},
        ),
        (FULL | {"recompute_modules": "[mlp]"}, "recompute_modules", FULL),
        (
            SELECTIVE | {"recompute_num_layers": 1},
            "recompute_num_layers",
            SELECTIVE | {"recompute_num_layers": "null"},
        ),
        (
            SELECTIVE | {"recompute_method": "block"},
            "recompute_method",
            SELECTIVE | {"recompute_method": "null"},
        ),
        ({"trainer.n_gpus_per_node": 4} | OPTIMIZER, "use_distributed_optimizer", OPTIMIZER),
        (
            {"trainer.n_gpus_per_node": 4, "overlap_grad_reduce": "true"},
            "overlap_grad_reduce",
            {"overlap_grad_reduce": "true"},
        ),
        # Context-parallel ranks share a copy's optimizer too.
        ({"trainer.n_gpus_per_node": 4} | OPTIMIZER, "use_distributed_optimizer", CP2 | OPTIMIZER),
    ],
)
def test_what_would_be_ignored(
    problems, wrong: dict[str, Any], key: str, right: dict[str, Any]
) -> None:  # type: ignore[no-untyped-def]
    (problem,) = problems(wrong)
    assert problem.startswith(f"{MEGATRON}{key} (") and "would be ignored because" in problem
    assert problems(right) == []


def test_a_later_layer_may_take_replicas_away(tmp_path: Path) -> None:
    """A preset with a distributed optimizer, run on fewer ranks; written beside the number of ranks
    it is an error.
    """
    base = tmp_path / "run.yaml"
    base.write_text(
        VALID.replace(
            "pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 2, " + SHARDS
        )
    )
    loaded = read_run_config(base, [ONE_REPLICA])
    assert validate_config(loaded) == []
    (tmp_path / "resolved.yaml").write_text(render_config_yaml(loaded.config))
    again = read_run_config(tmp_path / "resolved.yaml")
    assert (
        validate_config(again) == [] and not again.config.actor.megatron.use_distributed_optimizer
    )
    base.write_text(base.read_text().replace("n_gpus_per_node: 8", "n_gpus_per_node: 4"))
    found = [
        problem.split(" ")[0].removeprefix(MEGATRON)
        for problem in validate_config(read_run_config(base))
    ]
    assert found == ["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"]


SHARDS = "use_distributed_optimizer: true, overlap_grad_reduce: true, overlap_param_gather: true"


def test_recomputation_of_one_kind_over_a_base_with_the_other(tmp_path: Path) -> None:
    base = tmp_path / "run.yaml"
    full = (
        "pipeline_model_parallel_size: 2, recompute_granularity: full, recompute_method: block,"
        " recompute_num_layers: 1"
    )
    base.write_text(VALID.replace("pipeline_model_parallel_size: 2", full))
    assert validate_config(read_run_config(base)) == []
    selective = read_run_config(base, [f"{MEGATRON}recompute_granularity=selective"])
    assert validate_config(selective) == []
    text = render_config_yaml(selective.config)
    assert "recompute_num_layers" not in text and "recompute_modules" in text


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_budgets_are_rounded_as_the_layout_says(tp: int, cp: int) -> None:
    for sequence_parallel in {False, tp > 1}:
        megatron = MegatronConfig(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sequence_parallel,
        )
        assert (
            compute_packing_multiple(megatron)
            == make_parallel_layout(megatron, tp * cp).packed_multiple
        )


HF_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"recompute_num_layers": 3}, None),  # stages of 6 layers
        ({"recompute_num_layers": 4},
         (
             "actor.megatron.recompute_num_layers (4) must divide the 6 layers of a model chunk (12"
             " / 2) for recompute_method uniform; use 1 or 2 or 3 or 6."
         )),
        ({"recompute_num_layers": 2, "virtual_pipeline_model_parallel_size": 2},
         (
             "(2) must divide the 3 layers of a model chunk (12 / 4) for recompute_method uniform;"
             " use 1 or 3."
         )),
        ({"recompute_num_layers": 6, "recompute_method": "block"}, None),
        ({"recompute_num_layers": 7, "recompute_method": "block"},
         (
             "actor.megatron.recompute_num_layers (7) must be at most the 6 layers of a model chunk"
             " (12 / 2), or the rest would be ignored; use 6."
         )),
    ],
)  # fmt: skip
def test_recomputation_counts_the_layers_of_a_chunk(
    tmp_path: Path, settings: dict[str, Any], expected: str | None
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    loaded = read_run_config(path, overrides(FULL | settings))
    assert validate_config(loaded) == []
    found = validate_model_config(loaded, HF_CONFIG)
    assert len(found) == (expected is not None) and all(expected in problem for problem in found), (
        found
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("override_transformer_config.recompute_granularity",
         "Here it is actor.megatron.recompute_granularity."),
        ("override_transformer_config.recompute_modules",
         "Here it is actor.megatron.recompute_modules."),
        ("override_transformer_config.deallocate_pipeline_outputs",
         "It follows from the layout, since other values fail silently; remove it."),
        ("override_ddp_config.overlap_grad_reduce",
         "Here it is actor.megatron.overlap_grad_reduce."),
        ("expert_model_parallel_size", "Here it is actor.megatron.expert_model_parallel_size."),
        ("override_transformer_config.moe_token_dispatcher_type",
         "Here it is actor.megatron.moe_token_dispatcher_type."),
        ("use_dist_checkpointing",
         "Here it is model.path (weights are read from a directory in Hugging Face layout)."),
        ("sequence_parallell", "Did you mean actor.megatron.sequence_parallel?"),
    ],
)  # fmt: skip
def test_names_of_verl(tmp_path: Path, key: str, hint: str) -> None:
    """On the command line and, with all keys of the section, in a file."""
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    name, _, inner = key.partition(".")
    written = tmp_path / "verl.yaml"
    entry = f"{name}: {{{inner}: 1}}" if inner else f"{name}: 1"
    written.write_text(
        f"extends: run.yaml\nactor_rollout_ref: {{actor: {{megatron: {{{entry}}}}}}}\n"
    )
    for source, words in ((path, [f"actor_rollout_ref.actor.megatron.{key}=1"]), (written, [])):
        with pytest.raises(ConfigError) as caught:
            read_run_config(source, words)
        (problem,) = caught.value.problems
        assert hint in problem, problem


EXPERTS = {
    **HF_CONFIG,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
}
MIXTRAL = {**HF_CONFIG, "num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"}
SGLANG = ["rollout.engine=sglang"]


@pytest.mark.parametrize(
    ("mode", "more", "model", "expected"),
    [
        ("r2", SGLANG, MIXTRAL, None),
        ("r3", [], MIXTRAL, None),
        ("r3", [*SGLANG, "rollout.sglang.args.enable_return_routed_experts=true"], EXPERTS, None),
        ("r2", [], HF_CONFIG,
         "actor.router_replay (r2) is of experts, and the model has none; remove"
         " actor.router_replay."),
        ("r3", [], {**EXPERTS, "num_experts_per_tok": 1},
         "actor.router_replay (r3) needs tokens that meet two experts or more"),
        ("r3", SGLANG, EXPERTS,
         (
             "actor.router_replay (r3) needs servers that tell which experts tokens met;"
             " set rollout.sglang.args"
         )),
        ("r2", ["rollout.routes_gb=2"], EXPERTS,
         "rollout.routes_gb (2) is of files that actor.router_replay r3 alone writes"),
        ("r3", [*SGLANG, "rollout.sglang.args.enable_return_routed_experts=true"], MIXTRAL,
         "actor.router_replay (r3) ends the server of a Mixtral"),
        ("r2", ["actor.megatron.share_prompts=true"], EXPERTS,
         (
             "actor.router_replay (r2) has a route for each token of each sample; set"
             " actor.megatron.share_prompts to false."
         )),
    ],
)  # fmt: skip
def test_routing_is_replayed_where_there_is_one_to_replay(
    tmp_path: Path, mode: str, more: list[str], model: dict[str, Any], expected: str | None
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    loaded = read_run_config(
        path, [f"actor.router_replay={mode}", "actor.megatron.sequence_parallel=true", *more]
    )
    problems = [*validate_config(loaded), *validate_model_config(loaded, model)]
    found = [problem for problem in problems if "router_replay" in problem]
    assert len(found) == (expected is not None) and all(expected in problem for problem in found), (
        found
    )


def test_the_backend_fsdp_replays_no_routing(problems) -> None:  # type: ignore[no-untyped-def]
    assert any(
        "actor.router_replay (r2) is not for actor.backend fsdp" in text
        for text in problems({"actor.backend": "fsdp", "actor.router_replay": "r2"})
    )


FSDP = "actor.backend=fsdp"
TAUGHT = ("job=sft", "sft.loss_mode=forward_kl")
CHATS = ("sft.messages_key=messages", "data.apply_chat_template=true")
TEACHER = ("actor.distillation.loss_mode=reverse_kl", "reference.path=teacher")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("actor.lora.rank=8",), "set actor.backend to fsdp"),
        ((FSDP, "actor.lora.alpha=32"), "set actor.lora.rank to 16"),
        ((FSDP, "actor.lora.rank=8", "actor.lora.target_modules=[]"),
         "target_modules is empty: nothing would train"),
        ((FSDP, "actor.lora.rank=8", "job=reward-model"),
         "is not for job: reward-model, whose head has no adapter"),
        (("actor.distillation.loss_mode=reverse_kl",),
         "learns from a teacher; name its directory as reference.path"),
        ((*TAUGHT, "sft.teacher_key=t"), "name the key of conversations"),
        ((*TAUGHT, *CHATS, "sft.teacher_key=t", "reference.path=teacher"),
         "set sft.teacher_key to null, and the teacher is asked"),
        (("job=sft", "sft.in_memory=false"),
         "reads conversations, plain texts or pairs of JSONL files; set sft.in_memory to true"),
        (("job=sft", *CHATS, "sft.in_memory=false", "data.train_files=[a.parquet]"),
         "a.parquet; set sft.in_memory to true, or name"),
        (("job=sft", *CHATS, "sft.teacher_key=t"), "set sft.loss_mode to forward_kl or"
                                                   " reverse_kl"),
        (("actor.distillation.others_coef=0",), "set actor.distillation.loss_mode to"
                                                " reverse_kl"),
        ((*TEACHER, "actor.distillation.coef=0"), "the teacher is run for nothing"),
        ((*TEACHER, "actor.distillation.params={top_n: 8}"), "top_n"),
        ((*TAUGHT, "actor.distillation.coef=2"), "job"),
        ((*TAUGHT, FSDP), "learns from a teacher; name its directory as reference.path"),
        ((*TAUGHT, FSDP, "reference.path=t", "sft.params={top_k: 0}"),
         "top_k (0) must be at least 1"),
    ],
)  # fmt: skip
def test_adapters_and_teachers(tmp_path: Path, settings: tuple[str, ...], told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    found = validate_config(read_run_config(path, settings))
    assert any(told in text for text in found), found
