"""Rules between settings, with the model, with the world size and with files."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from config_samples import VALID

from benchmarks.parity.cases import EXPERT_FAMILIES
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.key_paths import list_leaf_keys, list_section_keys
from rlhf_megatron.config.load import load_run_config, parse_overrides, read_run_config
from rlhf_megatron.config.rules.validate import (
    check_world_size,
    validate_config,
    validate_model_config,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.verl_names import RENAMED_SECTIONS, VERL_NAMES

HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


def test_the_base_of_these_tests_is_valid(run_file: Path) -> None:
    loaded = read_run_config(run_file)
    assert (
        validate_config(loaded) == []
        and validate_config(loaded.config) == []
        and validate_model_config(loaded, HF_CONFIG) == []
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.n_gpus_per_node=6"],
         (
             "trainer.nnodes x n_gpus_per_node (1 x 6 = 6) must be a multiple of"
             " actor.megatron.tensor_model_parallel_size x pipeline_model_parallel_size x"
             " context_parallel_size (2 x 2 x 1 = 4); use 4 or 8 ranks or another layout."
         )),
        (["trainer.n_gpus_per_node=2"], "(1 x 2 = 2) must be a multiple of"),
        (["trainer.runtime=inline"],
         (
             "trainer.runtime (inline) has one rank, but trainer.nnodes x n_gpus_per_node is 8; set"
             " both to 1 or use runtime: torchrun."
         )),
        (["actor.mini_batch_size=100"],
         (
             "actor.mini_batch_size (100 samples) must divide data.train_batch_size x rollout.n (32"
             " x 16 = 512 samples a step); use 64 or 128."
         )),
        (["actor.mini_batch_size=1024"], "(32 x 16 = 512 samples a step); use 512."),
        (["actor.mini_batch_size=1"],
         "actor.mini_batch_size (1 samples) must be at least the data-parallel size (2)"),
        (["warmup.max_steps=5", "warmup.batch_size=1"],
         "warmup.batch_size (1 samples) must be at least the data-parallel size (2)"),
        (["actor.ppo_max_token_len_per_gpu=9"],
         (
             "actor.ppo_max_token_len_per_gpu (9) must hold the longest sample,"
             " data.max_prompt_length + max_response_length (6 + 4 = 10); use 10 or more."
         )),
        (["rollout.max_num_batched_tokens=9"],
         "rollout.max_num_batched_tokens (9) must hold the longest sample"),
        (["actor.use_kl_loss=true", "reference.max_token_len_per_gpu=9"],
         "reference.max_token_len_per_gpu (9) must hold"),
        (["rollout.temperature=0"],
         (
             "rollout.temperature (0.0) must be at least 0.01: the loss needs log-probs of the"
             " distribution that was sampled"
         )),
        (["rollout.temperature=.inf"], "rollout.temperature (inf) must be at most 100"),
        (["rollout.top_p=0.9"],
         (
             "rollout.top_p (0.9) must be 1.0: the trainer's log-probs are those of the"
             " full distribution"
         )),
        (["rollout.top_k=50"], "rollout.top_k (50) must be -1: the trainer's"),
        (["rollout.min_p=0.1"], "rollout.min_p (0.1) must be 0.0: the trainer's"),
        (["rollout.engine=sglang", "rollout.sglang.args={enable-deterministic-inference: true}",
          "rollout.val_kwargs={temperature: 1.0, min_p: 0.1}"],
          (
              "rollout.val_kwargs.min_p (0.1) cannot be used where SGLang draws by seeds"
              " (rollout.sglang.args.enable_deterministic_inference); set min_p to 0 and use top_p,"
              " or give up the seeds."
          )),
        (["rollout.val_kwargs.n=4"], "rollout.val_kwargs.n (4) must be 1 at temperature 0"),
        (["trainer.nnodes=2", "actor.megatron.pipeline_model_parallel_size=2"],
         (
             "rollout.weight_transport (tensor) does not reach engines on machines [0] of 2 with"
             " ranks (trainer.nnodes): 2 pipeline stages lie on several machines"
         )),
        (["actor.megatron.pipeline_model_parallel_layout=Et|tt"],
         "actor.megatron.pipeline_model_parallel_layout ('Et|tt') must be E, then layers t"),
        (["actor.megatron.pipeline_model_parallel_layout=Et|t|tL"],
         (
             "actor.megatron.pipeline_model_parallel_layout ('Et|t|tL') has 3 chunks;"
             " pipeline_model_parallel_size x virtual_pipeline_model_parallel_size must be as"
             " many, and is 2."
         )),
        (["rollout.stop=[a,a]"], "rollout.stop (['a', 'a']) must be distinct, non-empty strings."),
        (["rollout.n=1", "actor.mini_batch_size=32"],
         "rollout.n (1) must be at least 2 for algorithm.adv_estimator grpo"),
        (["rollout.engine=sglang", "rollout.sglang.args={--tp-size: 2}"],
         "rollout.sglang.args.--tp-size must be written without leading dashes; use tp-size."),
        (["model.dtype=bfloat16", "rollout.dtype=float32"],
         "rollout.dtype (float32) must not be wider than model.dtype (bfloat16)"),
        (["actor.use_kl_loss=true", "actor.kl_loss_coef=0"],
         "actor.kl_loss_coef (0) must be above 0 with actor.use_kl_loss"),
        (["data.train_files=[/a]"],
         "data.train_files (['/a']) and data.task (addition) exclude each other"),
        (["data.task=null", "data.val_files=[a]"],
         "data.train_files ([]) must name a JSONL file; give one, or name a data.task."),
        (["data.task=null", "data.train_files=[a]"], "data.val_files ([]) must name a JSONL file"),
        (["warmup.max_steps=5", "warmup.stop_accuracy=0.5"],
         "warmup.test_freq (20) must be at most warmup.max_steps (5)"),
        (["actor.optim.lr_decay_style=linear", "actor.optim.min_lr=1e-3"],
         "actor.optim.min_lr (0.001) must not be above actor.optim.lr (1e-06); lower"
         " actor.optim.min_lr."),
        (["actor.optim.lr_decay_style=linear", "actor.optim.lr_warmup_steps=80"],
         (
             "actor.optim.lr_warmup_steps (80) must be below the run's optimizer steps (80) for"
             " lr_decay_style linear; warm up for 8 steps or run longer."
         )),
        (["actor.optim.lr_decay_style=cosine", "actor.optim.lr_decay_steps=9",
          "actor.optim.lr_warmup_steps=9"],
          "actor.optim.lr_warmup_steps (9) must be below actor.optim.lr_decay_steps (9)"),
        (["actor.optim.weight_decay_end=0.001"],
         "actor.optim.weight_decay_end (0.001) must be at least actor.optim.weight_decay (0.01)"),
        (["trainer.experiment_name=../x"],
         "trainer.experiment_name ('../x') must be one plain directory name"),
        (["trainer.logger=[jsonl,jsonl]"], "trainer.logger (['jsonl', 'jsonl']) must differ"),
        (["trainer.logger=[jsonl,nosuch]"],
         (
             "trainer.logger: unknown logger 'nosuch'. Known: console, jsonl, mlflow, swanlab,"
             " tensorboard, wandb."
         )),
        (["actor.optim.lr=-1"],
         "actor.optim.lr (-1.0) must be at least 0 and below 1; the default is 1e-06."),
        (["actor.optim.betas=[0.9,1]"],
         "actor.optim.betas (1.0) must be at least 0 and below 1; the default is [0.9, 0.95]."),
        (["actor.optim.eps=0"], "actor.optim.eps (0.0) must be at least 1e-30: it is 0 in float32"),
        (["actor.entropy_coeff=-0.1"],
         "actor.entropy_coeff (-0.1) must be at least 0 and below 1; the default is 0.0."),
        (["trainer.test_freq=-1"], "trainer.test_freq (-1) must be at least 0; the default is 10."),
        (["trainer.stage_timeout_s=0"],
         (
             "trainer.stage_timeout_s (0.0) must be at least 0.001: clocks are not finer; the"
             " default is 1800.0."
         )),
        (["model.path=''"], "model.path ('') must name a model directory; give one."),
    ],
)  # fmt: skip
def test_a_contradiction_is_one_problem(
    run_file: Path, overrides: list[str], expected: str
) -> None:
    found = validate_config(read_run_config(run_file, overrides))
    assert (
        len(found) == 1
        and expected in found[0]
        and found[0].endswith("]")
        and "command line" in found[0]
    )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor.kl_loss_coef=0.001"], "actor.kl_loss_coef"),  # even at its default value
        (["actor.kl_loss_type=k1"], "actor.kl_loss_type"),
        (["reference.path=model"], "reference.path"),
        (["rollout.sglang.args.tp-size=2"], "rollout.sglang.args.tp-size"),
        (["rollout.engine=sglang", "rollout.max_num_seqs=2"], "rollout.max_num_seqs"),
        (["data.prompt_key=q"], "data.prompt_key"),
        (["warmup.optim.lr=1e-3"], "warmup.optim.lr"),
        (["actor.optim.lr_decay_steps=9"], "actor.optim.lr_decay_steps"),
        (["checks.log_prob_mean_kl=1"], "checks.log_prob_mean_kl"),
        (
            ["model.dtype=bfloat16", "checks.log_prob_max_abs_diff=1"],
            "checks.log_prob_max_abs_diff",
        ),
        (["trainer.test_freq=30"], "trainer.test_freq"),
    ],
)
def test_a_setting_that_would_be_ignored_is_an_error(
    run_file: Path, overrides: list[str], key: str
) -> None:
    (problem,) = validate_config(read_run_config(run_file, overrides))
    assert problem.startswith(f"{key} (") and "would be ignored because" in problem


def test_a_later_layer_may_switch_off_what_an_earlier_one_set(
    tmp_path: Path, run_file: Path
) -> None:
    base = tmp_path / "kl.yaml"
    base.write_text(
        "extends: run.yaml\nactor: {use_kl_loss: true, kl_loss_coef: 0.1}\n"
        "reference: {param_offload: true}\n"
    )
    assert validate_config(read_run_config(base)) == []
    assert validate_config(read_run_config(base, ["actor.use_kl_loss=false"])) == []
    again = validate_config(
        read_run_config(base, ["actor.use_kl_loss=false", "actor.kl_loss_coef=0.2"])
    )
    assert [problem.split(" ")[0] for problem in again] == ["actor.kl_loss_coef"]


def test_without_provenance_what_differs_from_the_default_is_set(run_file: Path) -> None:
    config = read_run_config(run_file).config
    assert validate_config(replace(config, actor=replace(config.actor, kl_loss_coef=0.5))) == [
        "actor.kl_loss_coef (0.5) would be ignored because actor.use_kl_loss is false; remove"
        " actor.kl_loss_coef, or set actor.use_kl_loss to true."
    ]


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        ({"model_type": "gpt2"}, [],
         (
             "model_type ('gpt2') must be one of deepseek_v3, glm4_moe, gpt_oss, kimi_k2, llama,"
             " mistral, mixtral, qwen2, qwen3"
         )),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96},
         ["actor.megatron.tensor_model_parallel_size=4"],
         (
             "num_attention_heads (6) must be a multiple of"
             " actor.megatron.tensor_model_parallel_size (4); use 1 or 2 or 3."
         )),
        ({}, ["actor.megatron.tensor_model_parallel_size=4"],
         (
             "num_key_value_heads (2) must be a multiple of"
             " actor.megatron.tensor_model_parallel_size (4); use 1 or 2."
         )),
        ({"num_key_value_heads": None, "intermediate_size": 383}, [],
         (
             "intermediate_size (383) must be a multiple of"
             " actor.megatron.tensor_model_parallel_size (2); use 1."
         )),
        ({"num_hidden_layers": 5}, [],
         (
             "num_hidden_layers (5) must be a multiple of"
             " actor.megatron.pipeline_model_parallel_size (2); use 1."
         )),
        ({"num_hidden_layers": 5}, ["actor.megatron.pipeline_model_parallel_layout=Ett|ttL"],
         (
             "num_hidden_layers (5) must be the 4 layers t"
             " of actor.megatron.pipeline_model_parallel_layout."
         )),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "hidden_size": 96}, [],
         "num_attention_heads (6) must be a multiple of num_key_value_heads (4)."),
        ({"max_position_embeddings": 9}, [],
         (
             "max_position_embeddings (9) must cover data.max_prompt_length + max_response_length"
             " (6 + 4 = 10); shorten one by 1."
         )),
        ({"hidden_size": 130}, [],
         "hidden_size (130) must be a multiple of num_attention_heads (4)."),
        ({"vocab_size": "32"}, [],
         "vocab_size ('32') must be a positive integer that some machine can hold; mend the file."),
        ({"model_type": "qwen3", "attention_bias": True}, [],
         "attention_bias (True) is not supported; it must be False"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, [],
         "rotary embeddings of type 'dynamic' are not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, [],
         "rotary embeddings of type 'longrope' are not supported"),
        ({"hidden_act": "gelu"}, [], "hidden_act ('gelu') is not supported; it must be 'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, [],
         "layer_types ['sliding_attention'] are not supported"),
        ({"layer_types": ["full_attention"] * 3}, [],
         (
             "layer_types has 3 entries and must have one for each of the num_hidden_layers (4);"
             " mend the file."
         )),
        ({"layer_types": "full_attention"}, [],
         "layer_types ('full_attention') must be a list; mend the file."),
        ({"eos_token_id": -1}, [],
         (
             "eos_token_id (-1) must be a token, 0 to 31, or a list of such: no response would end;"
             " write the id of the token that ends one."
         )),
        ({"eos_token_id": 32}, [], "eos_token_id (32) must be a token, 0 to 31"),
        ({"eos_token_id": [1, 32]}, [], "eos_token_id ([1, 32]) must be a token, 0 to 31"),
        ({"eos_token_id": "2"}, [], "eos_token_id ('2') must be a token, 0 to 31"),
        ({"eos_token_id": True}, [], "eos_token_id (True) must be a token, 0 to 31"),
        ({"tie_word_embeddings": "yes"}, [],
         "tie_word_embeddings ('yes') must be true or false; mend the file."),
        ({"tie_word_embeddings": 1}, [], "tie_word_embeddings (1) must be true or false"),
        ({"attention_bias": "no"}, [], "attention_bias ('no') must be true or false"),
        ({"num_experts_per_tok": "2"}, [],
         "num_experts_per_tok ('2') must be a whole number, 0 or more; mend the file."),
        ({"sliding_window": 0.5}, [], "sliding_window (0.5) must be a whole number"),
        ({"rope_theta": "1e6"}, [], "rope_theta ('1e6') must be a finite number"),
        ({"rope_theta": 1e400}, [], "rope_theta (inf) must be a finite number"),
        ({"rms_norm_eps": [1]}, [], "rms_norm_eps ([1]) must be a finite number"),
        ({"torch_dtype": 16}, [], "torch_dtype (16) must be a text"),
        ({"rope_scaling": "yarn"}, [], "rope_scaling ('yarn') must be an object"),
        ({"architectures": "Qwen3"}, [], "architectures ('Qwen3') must be a list"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit(
    run_file: Path, changes: dict[str, Any], overrides: list[str], expected: str
) -> None:
    found = validate_model_config(read_run_config(run_file, overrides), {**HF_CONFIG, **changes})
    assert any(f"model/config.json: {expected}" in problem for problem in found), found
    assert len(found) <= 2


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": None},
        {"eos_token_id": [0, 31]},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": None, "tie_word_embeddings": None, "rope_scaling": None},
        {"pad_token_id": -1},
    ],
)
def test_what_published_models_have(run_file: Path, changes: dict[str, Any]) -> None:
    assert not validate_model_config(read_run_config(run_file), {**HF_CONFIG, **changes})


def test_an_entry_that_a_family_cannot_read_is_a_problem(run_file: Path) -> None:
    """find_unsupported_settings of a family may raise ValueError itself."""
    entries = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 0}
    found = validate_model_config(read_run_config(run_file), {**HF_CONFIG, **entries})
    assert any("num_experts_per_tok is 0; it must be a positive integer" in text for text in found)


def test_what_a_gpt_oss_cannot_have(run_file: Path) -> None:
    """Experts with biases over tensor-parallel ranks, and servers that would not compute
    with its weights.
    """
    given = [
        "actor.megatron.sequence_parallel=true",
        "rollout.engine=sglang",
        "rollout.quantization=fp8",
    ]
    given += ["rollout.sglang.args={device: cpu}", "rollout.endpoints=['http://127.0.0.1:1']"]
    found = validate_model_config(read_run_config(run_file, given), EXPERT_FAMILIES["gpt_oss"])
    expected = (
        (
            "actor.megatron.expert_tensor_parallel_size (2, null: as"
            " tensor_model_parallel_size) must be 1"
        ),
        (
            "attention with sinks has no backend of SGLang on a CPU; use rollout.engine: local, or"
            " GPUs for the servers."
        ),
        "rollout.dtype (float32) would be rounded to it; set rollout.dtype: bfloat16.",
        "rollout.quantization (fp8) cannot be sent; leave rollout.quantization out.",
        (
            "which servers that the run did not start may drop without a word; leave"
            " rollout.endpoints out."
        ),
        "SGLang needs swiglu_limit, which the file lacks; add swiglu_limit: 7.0 to the file.",
    )
    assert len(found) == len(expected) and all(map(str.__contains__, found, expected)), found
    mended = [
        "actor.megatron.sequence_parallel=true",
        "actor.megatron.expert_tensor_parallel_size=1",
    ]
    assert (
        validate_model_config(read_run_config(run_file, mended), EXPERT_FAMILIES["gpt_oss"]) == []
    )
    mended += ["rollout.engine=sglang", "rollout.dtype=bfloat16"]
    given_limit = {**EXPERT_FAMILIES["gpt_oss"], "swiglu_limit": 7.0}
    assert validate_model_config(read_run_config(run_file, mended), given_limit) == []


def test_dp_attention_is_for_families_that_sglang_has_it_for(run_file: Path) -> None:
    asked = [
        "rollout.engine=sglang",
        "rollout.sglang.args={tp_size: 4, dp-size: 2, enable_dp_attention: true}",
    ]
    (found,) = validate_model_config(
        read_run_config(run_file, asked), {**HF_CONFIG, "model_type": "llama"}
    )
    assert "SGLang cuts the attention of llama over all ranks whatever they serve, " in found
    untied = {**HF_CONFIG, "tie_word_embeddings": False}
    assert validate_model_config(read_run_config(run_file, asked), untied) == []
    assert (
        "add enable-dp-lm-head"
        in validate_model_config(
            read_run_config(run_file, asked), {**untied, "tie_word_embeddings": True}
        )[0]
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            "{tp_size: 4, dp-size: 3, enable_dp_attention: true}",
            "dp-size (3) must divide tp-size (4); use one of 1, 2, 4.",
        ),
        (
            "{tp: 4, dp-size: 8, enable_dp_attention: true}",
            "dp-size (8) must divide tp-size (4); use one of 1, 2, 4.",
        ),
        (
            "{tp_size: 4, expert-parallel-size: 3}",
            "expert-parallel-size (3) must divide tp-size (4); use one of 1, 2, 4.",
        ),
        (
            "{tp_size: 4, dp_size: 2.5, enable_dp_attention: true}",
            "dp_size (2.5) must be a whole number from 1.",
        ),
        ("{tp_size: 0}", "tp_size (0) must be a whole number from 1."),
        (
            "{tp_size: 4, enable_dp_attention: true}",
            "enable_dp_attention (True) needs dp-size, the number of groups of",
        ),
        (
            "{tp_size: 4, enable_dp_lm_head: true}",
            "enable_dp_lm_head (True) needs enable-dp-attention; set it, with",
        ),
        ("{tp_size: 4, moe_dense_tp_size: 2}", "moe_dense_tp_size (2) must be 1 or tp-size (4)."),
        (
            "{tp_size: 4, data_parallel_size: 2}",
            "data_parallel_size (2) cannot be: copies of the model in one server",
        ),
    ],
    ids=lambda value: value if value.startswith("{") else "",
)
def test_sizes_with_which_sglang_would_not_start_are_refused(
    run_file: Path, args: str, words: str
) -> None:
    config = read_run_config(run_file, ["rollout.engine=sglang", f"rollout.sglang.args={args}"])
    (found,) = [problem for problem in validate_config(config) if "rollout.sglang.args" in problem]
    assert f"rollout.sglang.args.{words}" in found


def test_plain_rope_is_accepted(run_file: Path) -> None:
    rope = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert validate_model_config(read_run_config(run_file), {**HF_CONFIG, **rope}) == []


def test_world_size(run_file: Path) -> None:
    config = read_run_config(run_file, ["trainer.nnodes=2"]).config
    assert check_world_size(config, 16) == []
    (problem,) = check_world_size(config, 4)
    assert (
        "4 processes" in problem
        and "2 x 8 = 16" in problem
        and "NNODES=2 NPROC_PER_NODE=8 launch/torchrun.sh" in problem
    )


def test_files(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def problems(*overrides: str) -> list[str]:
        try:
            load_run_config(run_file, overrides)
        except ConfigError as error:
            return [
                problem.rpartition(" [")[0].replace(f"{tmp_path}/", "")
                for problem in error.problems
            ]
        return []

    assert problems() == [
        "model.path (model) is not a directory; correct it, or make or fetch the model first."
    ]
    model = tmp_path / "model"
    model.mkdir()
    assert problems() == [
        (
            "model.path (model) has no *.safetensors; put weights there, or set model.init_seed for"
            " random ones."
        ),
        "model.path (model) has no config.json; name a model in Hugging Face layout.",
        (
            "model.path (model) has no tokenizer.json; set model.tokenizer_path to a"
            " directory that has."
        ),
    ]
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text("{")
    (problem,) = problems("model.init_seed=1")
    assert problem.startswith("model/config.json cannot be read as JSON")
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    assert problems("model.init_seed=1") == []
    (model / "model.safetensors").write_bytes(b"")
    assert problems() == []
    assert problems("model.tokenizer_path=other", "rollout.transfer_dir=gone") == [
        (
            "model.tokenizer_path (other) has no tokenizer.json; set model.tokenizer_path to a"
            " directory that has."
        ),
        "rollout.transfer_dir (gone) must be a directory; make it or remove the key.",
    ]
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "model.safetensors").write_bytes(b"")
    (reference / "config.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": 64}))
    assert problems("actor.use_kl_loss=true", "reference.path=reference") == [
        "reference.path: vocab_size (64) must be that of model.path (32); choose a reference of"
        " the same architecture."
    ]


def test_tables_name_existing_settings_only() -> None:
    known = {*list_leaf_keys(RunConfig), *list_section_keys(RunConfig)}
    free = tuple(f"{key}." for key in known if key.endswith(("params", "args")))
    for entry in VERL_NAMES:
        assert entry.target is None or entry.target in known or entry.target.startswith(free), entry
        assert entry.name not in known, entry  # a key that exists is never looked up here
        assert entry.target or entry.note, entry
    assert {new for _, new in RENAMED_SECTIONS} <= known
    assert len({entry.name for entry in VERL_NAMES}) == len(VERL_NAMES)


def test_every_setting_is_described_and_can_be_overridden() -> None:
    def sections(cls: type) -> list[type]:
        below = [f.default_factory for f in fields(cls) if isinstance(f.default_factory, type)]  # type: ignore[misc]
        return [cls, *(s for b in below if is_dataclass(b) for s in sections(b))]

    for section in sections(RunConfig):
        assert all(f.metadata.get("doc") for f in fields(section)), section
    assert len(parse_overrides([f"{key}=1" for key in list_leaf_keys(RunConfig)], 0)) == len(
        list_leaf_keys(RunConfig)
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer.seed=9223372036854775808",
            "must be at most 9223372036854775807: generators take 64 bits",
        ),
        ("rollout.temperature=1e-320", "must be at least 0.01: the loss needs log-probs"),
        ("rollout.val_kwargs.temperature=1e-320", "must be at least 0.01, or 0 for greedy"),
        (
            "rollout.request_timeout_s=1e308",
            "must be at most 31536000: nobody waits longer than a year",
        ),
        ("trainer.stage_timeouts_s.update=1e-320", "must be at least 0.001: clocks are not finer"),
        ("rollout.update_weights_bucket_megabytes=10000000000", "must be at most 1048576: 1 TiB"),
        ("rollout.num_engines=100000", "must be at most 4096: each is a process"),
        ("actor.ppo_epochs=1000000000", "must be at most 1000: more passes only fit the noise"),
        (
            "checks.log_prob_max_abs_diff=1e308",
            "must be at most 10000.0: log-probs never differ so much",
        ),
        (
            "trainer.experiment_name='a\\nb'",
            "must be a name of printable characters, 200 bytes at most",
        ),
        (
            f"trainer.project_name={'x' * 300}",
            "must be a name of printable characters, 200 bytes at most",
        ),
        (f"actor.optim.clip_grad=1{'0' * 400}", "must be at most 1000000.0"),
        (f"data.train_batch_size=1{'0' * 400}", "must be at most 10000000: the controller holds"),
        ("data.train_batch_size=9999991", "must divide data.train_batch_size"),  # a prime
    ],
)
def test_an_absurd_value_is_refused_with_the_reason(
    run_file: Path, override: str, expected: str
) -> None:
    override = override.replace("'a\\nb'", '"a\\nb"')
    found = validate_config(read_run_config(run_file, [override]))
    assert len(found) == 1 and expected in found[0] and override.partition("=")[0] in found[0], (
        found
    )
