"""Folding a large run to a tiny one: which layouts, which model, which settings; nothing that
matters is lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from table_samples import BIASED_LLAMA, DEEPSEEK_V3, LLAMA3_ROPE, SMALL_LLAMA, SMALL_QWEN2

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run_rules import count_critic_ranks, list_pool_layouts
from rlhf_megatron.config.rules.validate import validate_model_config
from rlhf_megatron.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    MegatronConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.planning.check.fold_config import (
    choose_layers_per_chunk,
    fold_model_config,
    fold_recompute,
    fold_run_config,
)
from rlhf_megatron.planning.check.fold_layout import (
    FoldedPool,
    FoldedRun,
    count_replica_ranks,
    fold_layouts,
    make_unsharded_layout,
)
from rlhf_megatron.planning.check.layout_proof import (
    ModelConfigs,
    fold_model_configs,
    write_addition_prompts,
    write_tiny_model,
)
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import require_whole_fp8_blocks
from rlhf_megatron.weights.parallel_layout import make_parallel_layout
from rlhf_megatron.weights.shard_plan import EngineLayout
from rlhf_megatron.weights.weight_table import check_tensor_parallel_split

CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.stem != "quickstart_fsdp"
)  # not Megatron
LARGE = MegatronConfig(
    tensor_model_parallel_size=4,
    sequence_parallel=True,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=2,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
WITH_CP = replace(LARGE, pipeline_model_parallel_size=2, context_parallel_size=4)
QWEN3_32B, QWEN3_235B = (
    json.loads((ROOT / "examples" / name / "config.json").read_text())
    for name in ("qwen3_32b", "qwen3_235b_a22b")
)


def names(layouts: tuple[FoldedRun, ...]) -> list[str]:
    return [f"{layout.name}: {layout}" for layout in layouts]


def fold(megatron: MegatronConfig, ranks: int, processes: int) -> tuple[FoldedRun, ...]:
    """Of a run with one pool."""
    return fold_layouts([("actor.megatron", megatron, ranks)], processes)


@pytest.mark.parametrize(
    ("megatron", "ranks", "processes", "expected"),
    [
        (LARGE, 64, 64, ["shape: tp4 sequence pp4 vpp2 dp2"]),
        (LARGE, 64, 32, ["shape: tp4 sequence pp4 vpp2 dp2"]),
        (
            LARGE,
            64,
            16,
            ["shape: tp4 sequence pp4 vpp2 dp1", "replicas: tp2 sequence pp4 vpp2 dp2"],
        ),
        (LARGE, 64, 8, ["shape: tp2 sequence pp4 vpp2 dp1", "replicas: tp2 sequence pp2 vpp2 dp2"]),
        (LARGE, 64, 4, ["shape: tp2 sequence pp2 vpp2 dp1", "replicas: tp1 pp2 vpp2 dp2"]),
        (LARGE, 64, 2, ["shape: tp1 pp2 vpp2 dp1", "replicas: tp1 pp1 dp2"]),
        (LARGE, 64, 1, ["shape: tp1 pp1 dp1"]),
        (LARGE, 16, 16, ["shape: tp4 sequence pp4 vpp2 dp1"]),
        (
            WITH_CP,
            64,
            16,
            ["shape: tp4 sequence pp2 vpp2 cp2 dp1", "replicas: tp2 sequence pp2 vpp2 cp2 dp2"],
        ),
        (
            WITH_CP,
            64,
            8,
            ["shape: tp2 sequence pp2 vpp2 cp2 dp1", "replicas: tp2 sequence pp2 vpp2 dp2"],
        ),
        (MegatronConfig(tensor_model_parallel_size=6), 6, 4, ["shape: tp3 pp1 dp1"]),
        (MegatronConfig(tensor_model_parallel_size=3), 12, 16, ["shape: tp3 pp1 dp2"]),
        (MegatronConfig(), 8, 16, ["shape: tp1 pp1 dp2"]),
    ],
)
def test_layouts(megatron: MegatronConfig, ranks: int, processes: int, expected: list[str]) -> None:
    """cp is made smaller first, then tp, then pp; to 1 only when 2 is not small enough."""
    assert names(fold(megatron, ranks, processes)) == expected


def test_differences_say_everything_that_was_folded() -> None:
    shape, replicas = fold(LARGE, 64, 8)
    assert shape.differences == (
        "tp is 2 instead of 4",
        "dp is 1 instead of 4",
        (
            "use_distributed_optimizer and overlap_grad_reduce and overlap_param_gather off, for"
            " want of two ranks with the same shard"
        ),
    )
    assert replicas.differences == (
        "tp is 2 instead of 4",
        "pp is 2 instead of 4",
        "dp is 2 instead of 4",
    )
    assert (
        replicas.actor.megatron.overlap_param_gather
        and not shape.actor.megatron.use_distributed_optimizer
    )
    (same,) = fold(LARGE, 32, 32)
    assert same.differences == () and same.actor.megatron == LARGE
    with pytest.raises(ValueError, match="--max-processes is 0; it must be at least 1"):
        fold(LARGE, 64, 0)


def test_every_folded_layout_fits_and_can_be() -> None:
    for tp, pp, cp, dp, processes in itertools.product(
        (1, 2, 3, 8), (1, 2, 6), (1, 2, 4), (1, 5), (1, 2, 3, 7, 16, 40)
    ):
        true = MegatronConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            virtual_pipeline_model_parallel_size=3 if pp > 1 else None,
            sequence_parallel=tp > 1,
        )
        for folded in fold(true, tp * pp * cp * dp, processes):
            m = folded.actor.megatron
            make_parallel_layout(m, folded.num_ranks)  # raises for what cannot be
            assert folded.num_ranks <= processes
            for size, small in (
                (tp, m.tensor_model_parallel_size),
                (pp, m.pipeline_model_parallel_size),
            ):
                assert size % small == 0 or (small == 2 < size), "a divisor, or 2 of an odd number"
            is_smaller = count_replica_ranks(m) < count_replica_ranks(true)
            assert is_smaller == any(
                f"{axis} is" in d for d in folded.differences for axis in ("tp", "pp", "cp")
            )


MODELS: dict[str, Mapping[str, Any]] = {
    "qwen3": QWEN3_32B,
    "tied qwen2": {**SMALL_QWEN2, "tie_word_embeddings": True, "num_hidden_layers": 16},
    "odd vocabulary": {**QWEN3_32B, "vocab_size": 151_643},
    "llama 3": {**SMALL_LLAMA, "rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 8},
    "biases": {**BIASED_LLAMA, "num_hidden_layers": 8},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("processes", [1, 4, 8, 16, 32])
def test_the_tiny_model_is_of_the_same_kind_and_fits(name: str, processes: int) -> None:
    model = MODELS[name]
    layouts = fold(LARGE, 64, processes)
    tiny = fold_model_config(model, [LARGE], [layout.actor.megatron for layout in layouts])
    true, small = (find_model_family(m).make_transformer_arguments(m) for m in (model, tiny))
    sizes = {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    }
    assert {k: v for k, v in small.items() if k not in sizes} == {
        k: v for k, v in true.items() if k not in sizes
    }
    gpt, tiny_gpt = (find_model_family(m).make_gpt_arguments(m) for m in (model, tiny))
    assert tiny_gpt == gpt, "rotary embeddings, their scaling, and whether embeddings are tied"
    assert (small["num_attention_heads"] > small["num_query_groups"]) == (
        true["num_attention_heads"] > true["num_query_groups"]
    )
    for layout in layouts:
        tp = layout.actor.megatron.tensor_model_parallel_size
        check_tensor_parallel_split(make_weight_table(tiny, tp), tp)
        run = RunConfig(
            actor=ActorConfig(megatron=layout.actor.megatron),
            data=DataConfig(max_prompt_length=8, max_response_length=8),
        )
        assert not validate_model_config(run, tiny)
        assert tp == 1 or (tiny["vocab_size"] % tp == 0) == (int(model["vocab_size"]) % 4 == 0)
    assert (
        sum(
            hf.shape[0] * hf.shape[-1] for rule in make_weight_table(tiny) for hf in rule.hf_tensors
        )
        < 3e6
    ), "not tiny"


def test_experts_fold() -> None:
    """512 ranks in tp4 ep32 etp1 pp8 to 8: pp and tp stay parallel, and so do experts, over
    two replicas too.
    """
    true = MegatronConfig(
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        pipeline_model_parallel_size=8,
        num_layers_in_first_pipeline_stage=11,
        num_layers_in_last_pipeline_stage=11,
        expert_model_parallel_size=32,
        expert_tensor_parallel_size=1,
    )
    model = {
        **QWEN3_32B,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "mlp_only_layers": [3],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    }
    layouts = fold(true, 512, 8)
    shapes = [str(layout) for layout in layouts]
    assert shapes == ["tp2 sequence pp4 ep2 etp1 dp1", "tp2 sequence pp2 ep4 etp1 dp2"]
    assert "ep is 2 instead of 32" in layouts[0].differences
    assert any(
        text.endswith("_last_pipeline_stage off: all stages have as many layers")
        for text in layouts[0].differences
    )
    tiny = fold_model_config(model, [true], [layout.actor.megatron for layout in layouts])
    small = find_model_family(tiny).make_transformer_arguments(tiny)
    assert (small["num_moe_experts"], small["moe_router_topk"], small["moe_layer_freq"][:2]) == (
        8,
        2,
        [0, 1],
    )
    for layout in layouts:
        trainer = TrainerConfig(n_gpus_per_node=layout.num_ranks)
        data = DataConfig(max_prompt_length=8, max_response_length=8)
        actor = ActorConfig(megatron=layout.actor.megatron)
        run = RunConfig(
            actor=actor, data=data, trainer=trainer, rollout=RolloutConfig(engine="local")
        )
        assert not validate_model_config(run, tiny)
    wide = replace(true, expert_tensor_parallel_size=None, expert_model_parallel_size=2)
    assert [str(layout) for layout in fold(wide, 512, 4)][:1] == ["tp2 sequence pp2 dp1"]
    on_gpus = replace(
        true,
        moe_token_dispatcher_type="flex",
        moe_permute_fusion=True,
        use_precision_aware_optimizer=True,
        exp_avg_dtype="bfloat16",
    )
    for layout in fold(on_gpus, 512, 8):
        folded = layout.actor.megatron
        assert (folded.moe_token_dispatcher_type, folded.moe_permute_fusion) == ("alltoall", False)
        assert (folded.use_precision_aware_optimizer, folded.exp_avg_dtype) == (False, "float32")
        assert "moe_token_dispatcher_type off, for want of a GPU" in layout.differences
    gathered = replace(true, moe_token_dispatcher_type="allgather", expert_model_parallel_size=4)
    assert all(
        layout.actor.megatron.expert_model_parallel_size == 2 for layout in fold(gathered, 512, 8)
    )


@pytest.mark.parametrize(
    "model", [QWEN3_32B, QWEN3_235B, DEEPSEEK_V3], ids=lambda model: str(model["model_type"])
)
def test_ranks_hold_whole_blocks_where_engines_hold_fp8(model: Mapping[str, Any]) -> None:
    """A tiny model of head size 8 would be cut within blocks."""
    true = replace(LARGE, virtual_pipeline_model_parallel_size=None)
    if model is not QWEN3_32B:
        true = replace(true, expert_model_parallel_size=8, expert_tensor_parallel_size=2)
    layouts = fold(true, 64, 16)
    of_actor = [layout.actor.megatron for layout in layouts]
    for folded, layout in zip(of_actor, layouts, strict=True):
        where = make_parallel_layout(folded, layout.num_ranks)
        assert where.tp > 1
        tiny = make_weight_table(fold_model_config(model, [true], of_actor, "fp8"))
        require_whole_fp8_blocks(tiny, where, EngineLayout(1, 1))
        assert any(hf.shape[0] >= 2 * 128 for rule in tiny for hf in rule.hf_tensors)
        with pytest.raises(ValueError, match="a scale for each 128 x 128"):
            require_whole_fp8_blocks(
                make_weight_table(fold_model_config(model, [true], of_actor)),
                where,
                EngineLayout(1, 1),
            )


@pytest.mark.parametrize("rank", [1536, None])
def test_latent_attention_folds(rank: int | None) -> None:
    """512 ranks of DeepSeek-V3 to 8: groups of experts, dense layers first, narrow queries or not;
    no frozen layers.
    """
    true = MegatronConfig(
        tensor_model_parallel_size=8,
        sequence_parallel=True,
        pipeline_model_parallel_size=8,
        num_layers_in_first_pipeline_stage=6,
        num_layers_in_last_pipeline_stage=7,
        expert_model_parallel_size=64,
        expert_tensor_parallel_size=1,
    )
    layouts = fold(true, 512, 8)
    tiny = fold_model_config(
        {**DEEPSEEK_V3, "q_lora_rank": rank}, [true], [layout.actor.megatron for layout in layouts]
    )
    small = find_model_family(tiny).make_transformer_arguments(tiny)
    assert (small["q_lora_rank"], small["v_head_dim"], small["kv_channels"]) == (rank and 24, 8, 24)
    assert (
        small["moe_router_num_groups"],
        small["moe_router_topk"],
        small["moe_layer_freq"][:2],
    ) == (2, 2, [0, 1])
    assert (small["rope_type"], small["rotary_scaling_factor"], small["mscale_all_dim"]) == (
        "yarn",
        40.0,
        1.0,
    )
    assert "num_nextn_predict_layers" not in tiny
    for layout in layouts:
        actor = ActorConfig(megatron=layout.actor.megatron)
        data = DataConfig(max_prompt_length=8, max_response_length=8)
        trainer = TrainerConfig(n_gpus_per_node=layout.num_ranks)
        run = RunConfig(
            actor=actor, data=data, trainer=trainer, rollout=RolloutConfig(engine="local")
        )
        assert not validate_model_config(run, tiny)
        tp = layout.actor.megatron.tensor_model_parallel_size
        check_tensor_parallel_split(make_weight_table(tiny, tp), tp, 1)


def test_sizes_of_the_tiny_model() -> None:
    """64 heads in 8 groups over tp 4: two groups a rank, of 2 queries each. 16 layers a stage:
    one a chunk of 8.
    """
    tiny = fold_model_config(
        QWEN3_32B, [LARGE], [layout.actor.megatron for layout in fold(LARGE, 64, 16)]
    )
    assert (
        tiny["num_hidden_layers"],
        tiny["num_attention_heads"],
        tiny["num_key_value_heads"],
    ) == (8, 16, 8)
    assert (tiny["head_dim"], tiny["hidden_size"]) == (8, 16 * 8 + 16), (
        "5120 is not 64 x 128 either"
    )
    assert tiny["vocab_size"] == 32 and tiny["rope_theta"] == 1_000_000


@pytest.mark.parametrize(
    ("method", "count", "expected"),
    [("uniform", 1, (1, 1)), ("uniform", 4, (2, 2)), ("block", 3, (2, 1)), ("block", 8, (2, 2))],
)
def test_recompute_fits_the_tiny_model(method: Any, count: int, expected: tuple[int, int]) -> None:
    """(layers a chunk, recompute_num_layers). 64 layers in 8 chunks: block of 8 is all of a chunk,
    of 3 only a part.
    """
    true = replace(
        LARGE, recompute_granularity="full", recompute_method=method, recompute_num_layers=count
    )
    (folded,) = fold(true, 32, 32)
    assert choose_layers_per_chunk(true, 64, 8) == expected[0]
    assert fold_recompute(folded.actor.megatron, true, 64).recompute_num_layers == expected[1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_configuration_folds_to_one_that_breaks_no_rule(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_run_config(path, with_files=False).config
    if (
        ".cache" in Path(config.model.path).parts
        and not (Path(config.model.path) / "config.json").is_file()
    ):
        pytest.skip(f"{config.model.path} has not been fetched")
    hf_config = json.loads((Path(config.model.path) / "config.json").read_text())
    pools = list(list_pool_layouts(config))
    trues = [megatron for _, megatron, _ in pools]
    models = ModelConfigs(hf_config, hf_config)
    write_addition_prompts(tmp_path, 1)
    for processes in (1, 4, 16, 64):
        layouts = fold_layouts(pools, processes)
        tiny = fold_model_configs(
            trues, models, layouts, config.critic.path is not None, config.rollout.quantization
        )
        write_tiny_model(tmp_path / "model", tiny.policy)
        for folded in layouts:
            small = fold_run_config(config, folded, tmp_path)
            path = tmp_path / f"{folded.name}.yaml"
            path.write_text(render_config_yaml(small))
            loaded = load_run_config(path).config
            assert loaded == small, "the file says the same"
            one_rank = fold_run_config(
                config,
                FoldedRun(
                    folded.name,
                    FoldedPool(make_unsharded_layout(folded.actor.megatron), 1),
                    None,
                    (),
                ),
                tmp_path,
            )
            placed = {name: getattr(loaded.critic, name) for name in ("num_ranks", "megatron")}
            alone = replace(one_rank, critic=replace(one_rank.critic, **placed))
            assert replace(loaded, actor=alone.actor, trainer=alone.trainer) == alone, (
                "only the layouts differ"
            )
            for name in (
                "policy_loss",
                "loss_agg_mode",
                "entropy_coeff",
                "use_kl_loss",
                "kl_loss_type",
                "shuffle",
            ):
                assert getattr(loaded.actor, name) == getattr(config.actor, name)
            # nothing is generated again
            kept = replace(config.algorithm, filter_groups=loaded.algorithm.filter_groups)
            assert (
                loaded.algorithm == kept
                and loaded.rollout.temperature == config.rollout.temperature
            )
            assert (count_critic_ranks(loaded) > 0) == (
                count_critic_ranks(config) > 0 and processes > 1
            )


CRITIC = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


@pytest.mark.parametrize(
    ("actor", "critic", "processes", "expected"),
    [
        ((LARGE, 64), (CRITIC, 8), 64, ["shape: tp4 sequence pp4 vpp2 dp2, critic tp2 pp2 dp2"]),
        ((LARGE, 16), (CRITIC, 4), 20, ["shape: tp4 sequence pp4 vpp2 dp1, critic tp2 pp2 dp1"]),
        # 16 + 4 do not fit: the critic keeps its 4, the actor has 12, of which it can use 8.
        ((LARGE, 16), (CRITIC, 4), 16, ["shape: tp2 sequence pp4 vpp2 dp1, critic tp2 pp2 dp1"]),
        # What is left goes to a second replica, the actor's first; what it is not enough for, to
        # a further run.
        ((CRITIC, 8), (CRITIC, 8), 12, [
            "shape: tp2 pp2 dp2, critic tp2 pp2 dp1",
            "replicas: tp1 pp2 dp2, critic tp1 pp2 dp2",
        ]),
        ((CRITIC, 8), (LARGE, 16), 8, [
            "shape: tp2 pp2 dp1, critic tp2 sequence pp2 vpp2 dp1",
            "replicas: tp1 pp2 dp2, critic tp2 sequence pp2 vpp2 dp1",
        ]),
        ((CRITIC, 4), (CRITIC, 4), 4, ["shape: tp1 pp2 dp1, critic tp1 pp2 dp1"]),
        ((CRITIC, 4), (CRITIC, 4), 3, ["shape: tp1 pp2 dp1, critic tp1 pp1 dp1"]),
        ((MegatronConfig(), 4), (MegatronConfig(), 4), 3,
         ["shape: tp1 pp1 dp2, critic tp1 pp1 dp1"]),
        ((CRITIC, 4), (CRITIC, 4), 1, ["shape: tp1 pp1 dp1"]),
    ],
)  # fmt: skip
def test_layouts_of_two_pools(
    actor: tuple[MegatronConfig, int],
    critic: tuple[MegatronConfig, int],
    processes: int,
    expected: list[str],
) -> None:
    layouts = fold_layouts([("actor.megatron", *actor), ("critic.megatron", *critic)], processes)
    assert names(layouts) == expected
    for layout in layouts:
        assert layout.num_ranks <= processes
        for true, pool, name in zip(
            (actor, critic), layout.pools, ("actor", "critic"), strict=False
        ):
            is_same = pool.megatron == true[0] and pool.num_ranks == true[1]
            assert is_same == (
                not [text for text in layout.differences if text.startswith(f"{name}: ")]
            )
    is_shared = any("the critic is in the actor's pool" in text for text in layouts[0].differences)
    assert is_shared == (processes == 1)


def test_tiny_models_of_two_pools_fit_both() -> None:
    """The critic of three stages of a model of 12 layers, recomputed in twos; and one of
    another family.
    """
    critic = MegatronConfig(
        pipeline_model_parallel_size=3,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=2,
    )
    actor = MegatronConfig(tensor_model_parallel_size=4)
    for path in (None, "critic"):
        config = RunConfig(
            actor=ActorConfig(megatron=actor),
            critic=CriticConfig(path=path, num_ranks=3, megatron=critic),
            algorithm=AlgorithmConfig(adv_estimator="gae"),
            trainer=TrainerConfig(n_gpus_per_node=7),
        )
        pools = list(list_pool_layouts(config))
        layouts = fold_layouts(pools, 16)
        policy = {**QWEN3_32B, "num_hidden_layers": 12, "num_key_value_heads": 4}
        models = ModelConfigs(policy, {**SMALL_LLAMA, "num_hidden_layers": 12} if path else policy)
        tiny = fold_model_configs(
            [megatron for _, megatron, _ in pools], models, layouts, path is not None
        )
        assert tiny.critic["num_hidden_layers"] == 6, "two layers a stage"
        assert (tiny.policy["model_type"], tiny.critic["model_type"]) == (
            "qwen3",
            "llama" if path else "qwen3",
        )
        assert (
            tiny.policy["num_key_value_heads"] % 4 == 0
            and tiny.policy["vocab_size"] == tiny.critic["vocab_size"]
        )
        assert (tiny.policy == tiny.critic) == (path is None)
        assert not validate_model_config(config, tiny.policy)
