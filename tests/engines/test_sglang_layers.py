"""What stands in the ranks of stock SGLang's own models, put together: every layout, and faults
planted in one rank.

One process builds all of them, rank by rank (sglang_ranks.py): no server, no process groups.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

import pytest
from places import SUPPORT
from sglang_tools import CPU_ENV, needs_sglang, sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.long, needs_sglang]
TIMEOUT_S = 900.0
LAYER = "model.layers.1"
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def case(
    family: str,
    tp: int,
    kv: int,
    *,
    ep: int = 1,
    tied: bool = False,
    dtype: str = "float32",
    **fault: Any,
) -> Any:
    config = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "num_attention_heads": 8,
        "num_key_value_heads": kv,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 131,  # is divided by no number of ranks
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "head_dim": 16,
    }
    if family == "qwen3_moe":
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    if family == "gpt_oss":
        config |= {
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        }
    if family in ("deepseek_v3", "glm4_moe"):
        config |= {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        }
    if family == "deepseek_v3":
        del config["head_dim"]
        config |= {
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
        }
    found: dict[str, Any] = {"family": family, "tp": tp, "ep": ep, "dtype": dtype, "config": config}
    return {**found, "fault": fault} if fault else found


def in_blocks(family: str, tp: int, ep: int, trainer: dict[str, int]) -> Any:
    """FP8, with sizes that blocks of 128 divide."""
    found = case(family, tp, 8 if family == "deepseek_v3" else 4, ep=ep, dtype="bfloat16")
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "head_dim": 64,
    }
    latent = {
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    }
    for name, value in {**sizes, **latent}.items():
        if name in found["config"]:
            found["config"][name] = value
    return {**found, "quantization": "fp8", "trainer": trainer}


RIGHT = {
    "qwen2, biases, tied head": case("qwen2", 2, 2, tied=True),
    "qwen2, biases, bfloat16": case("qwen2", 4, 4, dtype="bfloat16"),
    "qwen3, one key-value head for two ranks": case("qwen3", 2, 1),
    "qwen3, two key-value heads for eight ranks, tied head": case("qwen3", 8, 2, tied=True),
    "qwen3, one rank": case("qwen3", 1, 4),
    "llama": case("llama", 4, 8, dtype="bfloat16"),
    "qwen3_moe": case("qwen3_moe", 2, 2),
    "qwen3_moe, four ranks, one key-value head": case("qwen3_moe", 4, 1, dtype="bfloat16"),
    "qwen3_moe, experts on two ranks of four": case("qwen3_moe", 4, 4, ep=2),
    "qwen3_moe, experts on four ranks": case("qwen3_moe", 4, 4, ep=4),
    "deepseek_v3, the shared expert is one more": case("deepseek_v3", 2, 8, dtype="bfloat16"),
    "deepseek_v3, experts on two ranks of four": case("deepseek_v3", 4, 8, ep=2),
    "glm4_moe, the shared expert is one more": case("glm4_moe", 4, 2, dtype="bfloat16"),
}
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"
EXPERT = f"{LAYER}.mlp.experts.5"
Q_AND_K = [f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight"]
OF_EXPERT = [f"{EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down")]
WRONG: dict[str, tuple[Any, int, list[str]]] = {
    "an expert left out": (
        case("qwen3_moe", 2, 2, rank=1, kind="leave_out", names=OF_EXPERT),
        1,
        OF_EXPERT,
    ),
    "an expert left out where another rank holds its other half": (
        case("qwen3_moe", 4, 4, ep=2, rank=3, kind="leave_out", names=OF_EXPERT),
        3,
        OF_EXPERT,
    ),
    "q and k swapped": (
        case("qwen3", 2, 8, rank=0, kind="swap", swap=Q_AND_K, names=Q_AND_K),
        0,
        Q_AND_K,
    ),
    "a flipped bit in rows": (
        case("qwen3", 4, 2, rank=2, kind="flip", parameter=f"{MLP}.gate_up_proj.weight", byte=1),
        2,
        [f"{MLP}.gate_proj.weight"],
    ),
    "a flipped bit in columns": (
        case(
            "qwen2",
            4,
            4,
            rank=3,
            kind="flip",
            parameter=f"{MLP}.down_proj.weight",
            byte=-3,
            dtype="bfloat16",
        ),
        3,
        [f"{MLP}.down_proj.weight"],
    ),
    "a flipped bit in one of two copies of a head": (
        case("qwen3", 4, 2, rank=1, kind="flip", parameter=f"{ATTENTION}.qkv_proj.weight", byte=-1),
        1,
        [f"{ATTENTION}.v_proj.weight"],
    ),
    "a flipped bit in the shared expert": (
        case(
            "deepseek_v3", 2, 8, rank=1, kind="flip", parameter=f"{MLP}.experts.w2_weight", byte=-1
        ),
        1,
        [f"{MLP}.shared_experts.down_proj.weight"],
    ),
    "a flipped bit in what is made of a matrix": (
        case("deepseek_v3", 4, 8, rank=2, kind="flip", parameter=f"{ATTENTION}.w_vc", byte=-1),
        2,
        [f"{ATTENTION}.kv_b_proj.weight"],
    ),
    "a flipped bit in the second of two matrices that are joined": (
        case(
            "deepseek_v3",
            1,
            8,
            rank=0,
            kind="flip",
            parameter=f"{ATTENTION}.fused_qkv_a_proj_with_mqa.weight",
            byte=-1,
        ),
        0,
        [f"{ATTENTION}.kv_a_proj_with_mqa.weight"],
    ),
    "a flipped bit in a bias": (
        case("qwen2", 2, 2, rank=1, kind="flip", parameter=f"{ATTENTION}.qkv_proj.bias", byte=0),
        1,
        [f"{ATTENTION}.q_proj.bias"],
    ),
}
STALE = case("qwen3_moe", 4, 2, rank=2, kind="stale")
TP2_EP2 = {"world_size": 2, "tp": 2, "ep": 2, "etp": 1}
SHARDS = {  # from trainers of other layouts: (case, senders)
    "to the attention of two groups": (
        {**case("qwen3_moe", 4, 4, ep=2), "dp": 2, "others": {}, "trainer": TP2_EP2},
        2,
    ),
    "to the attention of two groups, tied head": (
        {
            **case("qwen3_moe", 4, 4, ep=2, tied=True),
            "dp": 2,
            "others": {"enable_dp_lm_head": True},
            "trainer": TP2_EP2,
        },
        2,
    ),
    "to the latent attention of four groups": (
        {
            **case("deepseek_v3", 4, 8, ep=4),
            "dp": 4,
            "others": {
                "moe_dense_tp_size": 1,
                "enable_dp_lm_head": True,
                "enforce_shared_experts_fusion": True,
            },
            "trainer": TP2_EP2,
        },
        2,
    ),
    "to the attention of two groups, dense layers": (
        {**case("glm4_moe", 2, 4), "dp": 2, "others": {"moe_dense_tp_size": 1}, "trainer": TP2_EP2},
        2,
    ),
    "tp2 to tp2": ({**case("qwen3", 2, 4), "trainer": {"world_size": 2, "tp": 2}}, 2),
    "tp4 to tp2, biases": (
        {**case("qwen2", 2, 4, tied=True), "trainer": {"world_size": 4, "tp": 4}},
        4,
    ),
    "tp2 to tp8 of two key-value heads": (
        {**case("qwen3", 8, 2), "trainer": {"world_size": 2, "tp": 2}},
        2,
    ),
    "tp2 ep2 to tp2 ep2, tied head": (
        {
            **case("qwen3_moe", 2, 2, ep=2, tied=True),
            "trainer": {"world_size": 2, "tp": 2, "ep": 2, "etp": 1},
        },
        2,
    ),
    "ep4 to tp2, tied head, bfloat16": (
        {
            **case("qwen3_moe", 2, 4, tied=True, dtype="bfloat16"),
            "trainer": {"world_size": 4, "ep": 4},
        },
        4,
    ),
    "tp2 ep2 to tp4, latent attention": (
        {**case("deepseek_v3", 4, 8), "trainer": {"world_size": 2, "tp": 2, "ep": 2, "etp": 1}},
        2,
    ),
    "FP8, tp2 to tp2": (in_blocks("qwen3", 2, 1, trainer={"world_size": 2, "tp": 2}), 2),
    "FP8, ep2 etp2 to tp2 ep1": (
        in_blocks("qwen3_moe", 2, 1, trainer={"world_size": 4, "tp": 2, "ep": 2, "etp": 2}),
        4,
    ),
    "FP8, latent attention, tp2 ep2 to tp2": (
        in_blocks("deepseek_v3", 2, 1, trainer={"world_size": 2, "tp": 2, "ep": 2, "etp": 1}),
        2,
    ),
    "FP8, tp2 ep2 to tp2 ep2": (
        in_blocks("qwen3_moe", 2, 2, trainer={"world_size": 2, "tp": 2, "ep": 2, "etp": 1}),
        2,
    ),
    "GPT-OSS, tp2 ep2 to tp2": (
        {
            **case("gpt_oss", 2, 4, dtype="bfloat16"),
            "trainer": {"world_size": 2, "tp": 2, "ep": 2, "etp": 1},
        },
        2,
    ),
    "GPT-OSS, ep2 to tp2, whose kernels want matrices turned": (
        {
            **case("gpt_oss", 2, 4, dtype="bfloat16"),
            "runner": "triton_kernel",
            "trainer": {"world_size": 2, "ep": 2},
        },
        2,
    ),
    "GPT-OSS, ep2 to tp4 ep2": (
        {**case("gpt_oss", 4, 4, ep=2, dtype="bfloat16"), "trainer": {"world_size": 2, "ep": 2}},
        2,
    ),
    "ep2 etp2 to tp4 ep2": (
        {**case("qwen3_moe", 4, 4, ep=2), "trainer": {"world_size": 4, "tp": 2, "ep": 2, "etp": 2}},
        4,
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {
        **RIGHT,
        **{name: found for name, (found, _, _) in WRONG.items()},
        "a stale rank": STALE,
    }
    cases |= {name: found for name, (found, _) in SHARDS.items()}
    done = subprocess.run(
        [
            sglang_python(),
            SUPPORT / "sglang_ranks.py",
            tmp_path_factory.mktemp("ranks"),
            "--as-on-a-gpu",
        ],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **CPU_ENV},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    return dict(zip(cases, json.loads(line.removeprefix("RESULTS ")), strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_digests_are_those_that_were_sent(name: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[name]
    assert found["errors"] == [] and found["equal"]
    assert found["incomplete"] == [None] * RIGHT[name]["tp"]
    if RIGHT[name]["tp"] == 1:
        assert found["num_bytes_standing"] == found["num_bytes"]
    else:  # norms, the gate and some heads are in several ranks, all else in one
        assert found["num_bytes"] < found["num_bytes_standing"] < 1.7 * found["num_bytes"]


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_in_one_rank_is_named(name: str, results: dict[str, dict[str, Any]]) -> None:
    _, rank, tensors = WRONG[name]
    errors = results[name]["errors"]
    words = "; ".join(errors)
    for tensor in tensors:
        assert words.count(f"tensor '{tensor}': ") == 1
    assert (
        words.count("tensor '")
        == words.count(f"tp rank {rank} holds other values than the bucket")
        == len(tensors)
    )
    assert all(
        error.startswith("engine0, bucket ") and error.endswith("The engine is STALE.")
        for error in errors
    )


def test_a_stale_rank_is_named(results: dict[str, dict[str, Any]]) -> None:
    errors = results["a stale rank"]["errors"]
    assert len(errors) == 5  # every bucket
    for error in errors:
        assert (
            error.count("tp rank 2 holds other values than the bucket")
            == error.count("tensor '")
            == 3
        )
        assert re.search(r"(\d+) of \1 tensors do not stand in it", error)


@pytest.mark.parametrize("name", SHARDS)
def test_shards_of_a_trainer_come_to_the_ranks_that_have_them(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    """Bit for bit by receipt; each rank takes what stands in it, and that is what the plan says."""
    found = results[name]
    print(f"{name}: {found['seconds']} s of CPU time, moved {found['moved']}")
    trainer = SHARDS[name][0]["trainer"]
    num_senders = SHARDS[name][1]
    assert found["equal"] and all(found["as_stock"]) and found["num_senders"] == num_senders
    # else experts are shared out, each whole
    assert (found["num_parts"] > 0) == (trainer.get("tp", 1) > 1)
    assert found["planned"] == found["moved"] == found["needed"]


def test_a_bias_that_a_second_rank_adds_is_named(results: dict[str, dict[str, Any]]) -> None:
    """Ranks that share an expert of GPT-OSS add up what they compute, so only one of them may have
    its last bias.
    """
    assert results["GPT-OSS, tp2 ep2 to tp2"]["added_twice"] == [
        [],
        [f"{LAYER}.mlp.experts.0.down_proj_bias"],
    ]
