"""Families with experts: their tables against transformers' files, what is refused, and where
experts stand.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from safetensors.torch import load_file

from benchmarks.parity.cases import EXPERT_FAMILIES, make_state
from benchmarks.parity.fused_experts import fused, unfused
from benchmarks.parity.reference import make_model
from benchmarks.parity.subjects import StateSource
from rlhf_megatron.config.rules.expert_rules import (
    find_expert_layout_problems,
    find_ignored_expert_settings,
    find_shared_expert_problems,
)
from rlhf_megatron.config.rules.pipeline_layout_text import parse_pipeline_layout
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    FORWARD_PASSES,
    count_model_flops,
)
from rlhf_megatron.ranks.models.transformer_config import format_pipeline_layout
from rlhf_megatron.rollout.local.weight_receiver import iterate_parameter_slices
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import (
    check_tensor_parallel_split,
    collect_stored_shapes,
    find_hf_spans,
    find_holder_places,
    join_shards,
    select_stage_rules,
    split_tensor,
)

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
}
NO_RULE = "this family does not know what that means"


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_table_has_the_tensors_that_transformers_saves(family: str, tmp_path: Path) -> None:
    hf_config = EXPERT_FAMILIES[family]
    state = make_state(family)
    model = make_model(hf_config, state, torch.float32)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    # files of GPT-OSS have the experts of a layer in one tensor
    on_disk = unfused(stored, hf_config["model_type"])
    tied = {"lm_head.weight"} if hf_config["tie_word_embeddings"] else set()
    table = make_weight_table(hf_config)
    assert {hf.name: hf.shape for rule in table for hf in rule.hf_tensors} == {
        name: tuple(tensor.shape) for name, tensor in on_disk.items() if name not in tied
    }
    assert collect_stored_shapes(hf for rule in table for hf in rule.hf_tensors) == {
        name: tuple(tensor.shape) for name, tensor in stored.items() if name not in tied
    }
    # transformers' own config.json is understood, every key of it
    written = model.config.to_dict()
    assert not list(find_model_family(written).find_unsupported_settings(written))
    assert [rule.hf_tensors for rule in make_weight_table(written)] == [
        rule.hf_tensors for rule in table
    ]
    # what the local engine serves stands under the same names
    served = {name: part.tensor for name, part in iterate_parameter_slices(model)}
    assert served.keys() == on_disk.keys() - tied
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in served.items())
    assert unfused(fused(state), hf_config["model_type"]).keys() == state.keys()


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_are_split_by_etp_and_the_rest_by_tp(family: str) -> None:
    state = make_state(family)
    table = make_weight_table(EXPERT_FAMILIES[family], 2)
    check_tensor_parallel_split(table, 2, 4)
    for rule in table:
        full = rule.to_megatron(*(state[hf.name] for hf in rule.hf_tensors))
        shards = split_tensor(rule.split, full, 4 if rule.expert is not None else 2)
        assert torch.equal(join_shards(rule.split, shards), full), rule.megatron_name
        for hf, tensor in zip(rule.hf_tensors, rule.to_hf(full), strict=True):
            assert torch.equal(tensor, state[hf.name]), hf.name
        for number, shard in enumerate(
            shards if rule.split != "replicated" and rule.owner == "layer" else ()
        ):
            for hf, span, part in zip(
                rule.hf_tensors,
                find_hf_spans(rule, len(shards), number),
                rule.to_hf(shard),
                strict=True,
            ):
                assert torch.equal(
                    part, state[hf.name].narrow(span.dim, span.start, span.num_entries)
                ), hf.name
    with pytest.raises(ValueError, match=r"size 5 does not divide \d+ tensors, first .*experts"):
        check_tensor_parallel_split(table, 2, 5)


def test_a_routers_bias_stays_float32_in_a_half_precision_model(tmp_path: Path) -> None:
    """From a file into a bfloat16 model, and out of it in a sync of bfloat16."""
    from rlhf_megatron.ranks.checkpoint.model_weights import (
        iterate_local_shards,
        load_weights_on_rank,
    )
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf

    hf_config = EXPERT_FAMILIES["glm4_moe"]
    state = make_state("glm4_moe")
    world = create_world(ParallelLayout(1), torch.device("cpu"))
    try:
        model = build_megatron_model(hf_config, world, torch.bfloat16)
        table = make_weight_table(hf_config)
        load_weights_on_rank(model.chunks, table, StateSource(state), world)
        shards = iterate_local_shards(model.chunks, table)
        export_sharded_model_to_hf(
            shards, world, directory=tmp_path / "hf", hf_config=hf_config, dtype=torch.bfloat16
        )
    finally:
        destroy_world()
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        is_bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_bias else torch.bfloat16), name
        assert torch.equal(tensor, state[name] if is_bias else state[name].bfloat16()), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 4, "topk_group": 2}, r"num_experts_per_tok / topk_group \(2 / 2\) must be 2"),
        ({"norm_topk_prob": False}, r"norm_topk_prob \(False\) is not supported"),
        ({"scoring_func": "softmax"}, r"scoring_func \('softmax'\) is not supported"),
    ],
)
def test_routing_that_megatron_does_otherwise_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_weight_table({**EXPERT_FAMILIES["glm4_moe"], **change})


def test_gate_and_up_of_an_expert_are_cut_apart() -> None:
    rule = next(
        r
        for r in make_weight_table(EXPERT_FAMILIES["mixtral"])
        if r.megatron_name.endswith("experts.5.linear_fc1.weight")
    )
    w1 = torch.arange(4.0)[:, None]
    w3 = torch.arange(10.0, 14.0)[:, None]
    assert [hf.name.rpartition("experts.")[2] for hf in rule.hf_tensors] == [
        "5.w1.weight",
        "5.w3.weight",
    ]
    assert split_tensor(rule.split, rule.to_megatron(w1, w3), 2)[1].flatten().tolist() == [
        2,
        3,
        12,
        13,
    ]
    assert rule.fusion_group.endswith("block_sparse_moe.experts.5") and (
        rule.expert,
        rule.num_experts,
    ) == (5, 8)


def test_places_of_experts_and_of_their_copies() -> None:
    """16 ranks, tp2 pp2: a stage has 8, which are two copies of ep2 x etp2 ranks."""
    layout = ParallelLayout(16, tp=2, pp=2, sequence_parallel=True, ep=2, etp=2)
    assert (layout.dp, layout.edp, layout.copy_size, layout.stage_size) == (4, 2, 4, 8)
    assert [layout.compute_ep_rank(rank) for rank in range(8, 16)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.compute_etp_rank(rank) for rank in range(8, 16)] == [0, 1] * 4
    assert (
        str(layout) == "tp2 sequence pp2 ep2 dp4"
        and str(ParallelLayout(2, tp=2, etp=1)) == "tp2 pp1 etp1 dp1"
    )
    table = make_weight_table(EXPERT_FAMILIES["mixtral"])
    fc2 = [
        rule
        for rule in table
        if rule.layer == 0 and rule.megatron_name.endswith("linear_fc2.weight")
    ]
    assert [list(find_holder_places(rule, layout)) for rule in fc2] == [[0, 1]] * 4 + [[2, 3]] * 4
    router = next(rule for rule in table if rule.megatron_name.endswith("router.weight"))
    proj = next(rule for rule in table if rule.megatron_name.endswith("linear_proj.weight"))
    assert (list(find_holder_places(router, layout)), list(find_holder_places(proj, layout))) == (
        [0],
        [0, 1],
    )
    # tp wider than all experts together: ranks of one tp group hold a copy
    assert ParallelLayout(4, tp=4, ep=1, etp=2).copy_size == 4
    with pytest.raises(
        ValueError, match=r"ranks of a pipeline stage \(4\) must be a multiple of .*\(8 x 1 = 8\)"
    ):
        ParallelLayout(4, ep=8)


def test_layers_of_stages() -> None:
    def stage_depths(num_layers: int, pp: int, **ends: int) -> tuple[int, ...]:
        return ParallelLayout(pp, pp=pp, **ends).split_layers_into_chunks(num_layers)

    assert stage_depths(8, 4) == (2, 2, 2, 2) and stage_depths(5, 1) == (5,)
    assert stage_depths(94, 8, num_first_stage_layers=11, num_last_stage_layers=11) == (
        11,
        *[12] * 6,
        11,
    )
    assert stage_depths(61, 4, num_last_stage_layers=13) == (16, 16, 16, 13)
    assert (
        stage_depths(4, 2, num_first_stage_layers=3)
        == (3, 1)
        == stage_depths(4, 2, num_first_stage_layers=3, num_last_stage_layers=1)
    )
    with pytest.raises(
        ValueError,
        match=r"number of layers \(61\) must be a multiple of the pipeline parallel size \(4\)",
    ):
        stage_depths(61, 4)
    with pytest.raises(
        ValueError, match=r"\(12 and 0; 0: not set\) must be a multiple of the other stages \(3\)"
    ):
        stage_depths(61, 4, num_first_stage_layers=12)
    table = make_weight_table({**EXPERT_FAMILIES["mixtral"], "num_hidden_layers": 5})
    layers = [
        {
            rule.layer
            for rule in select_stage_rules(
                table, stage, ParallelLayout(2, pp=2, num_first_stage_layers=2)
            )
        }
        for stage in range(2)
    ]
    assert layers == [{None, 0, 1}, {2, 3, 4, None}]


@pytest.mark.parametrize(
    ("text", "pp"),
    [("Et*3|t*4|t*3L", 3), ("Ett|(tt|)*2,t*3L", 2), ("E(t|tt|)*3tL", 7), ("Et*61L", 1)],
)
def test_layers_of_chunks_as_megatron_core_has_them(text: str, pp: int) -> None:
    """Each chunk's layers, and which stage each layer is on, with several chunks a stage, too."""
    theirs = PipelineParallelLayerLayout(text, pp)
    vpp = theirs.virtual_pipeline_model_parallel_size
    layout = ParallelLayout(pp, pp=pp, vpp=vpp, layers_of_chunks=parse_pipeline_layout(text))
    num_layers = sum(layout.layers_of_chunks)
    assert format_pipeline_layout(layout).replace("|", "").count("t") == num_layers
    stage_of = {}
    for stage, chunk in itertools.product(range(pp), range(vpp)):
        before = sum(row.count(LayerType.decoder) for row in chunks_before(theirs, stage, chunk))
        own = theirs.layout[stage][chunk].count(LayerType.decoder)
        assert layout.split_layers_into_chunks(num_layers)[chunk * pp + stage] == own
        stage_of |= dict.fromkeys(range(before, before + own), stage)
    assert layout.map_layers_to_stages(num_layers) == tuple(
        stage_of[layer] for layer in range(num_layers)
    )
    with pytest.raises(
        ValueError, match=rf"has {num_layers} layers \(t\), the model has {num_layers + 1}"
    ):
        layout.split_layers_into_chunks(num_layers + 1)


def chunks_before(
    theirs: PipelineParallelLayerLayout, stage: int, chunk: int
) -> list[list[LayerType]]:
    """In the order of the model: all stages of the chunks before, then the stages
    before in this one.
    """
    return [
        theirs.layout[other][number]
        for number in range(chunk + 1)
        for other in range(len(theirs.layout) if number < chunk else stage)
    ]


@pytest.mark.parametrize(
    "text", ["", "tt|tL", "Et||tL", "Ett|mL", "Ett", "Et*99999L", "(((", "E(t*99999)*99999L"]
)
def test_a_layout_that_is_not_built_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"pipeline_model_parallel_layout \(.*\) must be E, then layers t"
    ):
        parse_pipeline_layout(text)


def test_a_layout_of_absurd_length_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="must be E, then layers t"):
            parse_pipeline_layout(f"E({'t|' * 300})*99999tL")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_large_table_is_whole() -> None:
    """Kimi-K2's 70,000 tensors and more: 61 layers of 512 experts."""
    table = make_weight_table({**QWEN3_30B, "num_hidden_layers": 61, "num_experts": 512}, 8)
    assert sum(len(rule.hf_tensors) for rule in table) > 93_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 4}, f"n_group: {NO_RULE}"),
        ({"shared_expert_intermediate_size": 64}, f"shared_expert_intermediate_size: {NO_RULE}"),
        ({"use_sliding_window": True}, r"use_sliding_window \(True\) is not supported"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is over num_experts \(8\)"),
        ({"num_experts": 0}, "num_experts is 0; it must be a positive integer"),
        ({"num_local_experts": 4}, r"num_experts and num_local_experts \(\[8, 4\]\) mean the same"),
        ({"attention_bias": True}, r"attention_bias \(True\) is not supported"),
    ],
)
def test_what_a_family_does_not_know_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_weight_table({**EXPERT_FAMILIES["qwen3_moe"], **change})


def test_mistral_has_no_sliding_window() -> None:
    model = {**EXPERT_FAMILIES["mixtral"], "model_type": "mistral"}
    for change in ({}, {"sliding_window": 4096}):
        with pytest.raises(
            ValueError, match=r"sliding_window \(.*4096\) is not supported; it must be null"
        ):
            make_weight_table({**model, **change})
    assert (
        make_weight_table({**model, "sliding_window": None})[-1].megatron_name
        == "output_layer.weight"
    )


def test_layers_with_experts_follow_the_config() -> None:
    def layers(**change: Any) -> list[int]:
        hf_config = {**EXPERT_FAMILIES["qwen3_moe"], **change}
        found: list[int] = find_model_family(hf_config).make_transformer_arguments(hf_config)[
            "moe_layer_freq"
        ]
        return found

    assert layers() == [0, 1, 1, 1] and layers(mlp_only_layers=[]) == [1, 1, 1, 1]
    assert layers(mlp_only_layers=[1], decoder_sparse_step=2) == [0, 0, 0, 1]


MOE = MegatronConfig(
    tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=4
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_parallel": False}, "tensor_model_parallel_size (2) needs sequence_parallel"),
        ({"expert_model_parallel_size": 3}, "must divide the experts of a layer (8); use 1 or 2."),
        (
            {"expert_tensor_parallel_size": 5},
            "expert_tensor_parallel_size (5) must divide the columns of an expert (32)",
        ),
        (
            {"expert_tensor_parallel_size": 8},
            "(4 x 8 = 32) must divide the ranks of a pipeline stage (16 over",
        ),
        (
            {"moe_token_dispatcher_type": "allgather"},
            "allgather) needs as many tokens on all ranks",
        ),
        (
            {
                "moe_token_dispatcher_type": "flex",
                "expert_model_parallel_size": 1,
                "expert_tensor_parallel_size": 1,
            },
            "moe_token_dispatcher_type (flex) needs experts that several ranks share out",
        ),
        (
            {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "flex"},
            "moe_shared_expert_overlap (true) needs moe_token_dispatcher_type alltoall, not flex",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
            "use moe for these",
        ),
        (
            {"share_prompts": True, "moe_z_loss_coeff": 0.1},
            "losses and loads; set share_prompts to false, or to 0: moe_z_loss_coeff (0.1).",
        ),
        (
            {"moe_aux_loss_coeff": 0.01},
            "moe_aux_loss_coeff (0.01) needs moe_router_load_balancing_type: seq_aux_loss",
        ),
        (
            {"moe_router_load_balancing_type": "global_aux_loss"},
            "moe_router_load_balancing_type (global_aux_loss) needs a moe_aux_loss_coeff above 0.",
        ),
    ],
)
def test_layouts_that_experts_cannot_have(change: dict[str, Any], message: str) -> None:
    assert not list(find_expert_layout_problems(8, 32, 16, MOE))
    found = [
        text
        for text, _ in find_expert_layout_problems(8, 32, 16, dataclasses.replace(MOE, **change))
    ]
    assert found and any(message in text for text in found), found


def test_shared_experts_overlap_where_there_are_some() -> None:
    settings = MegatronConfig(moe_shared_expert_overlap=True)
    assert not list(find_shared_expert_problems(settings, has_shared_experts=True))
    assert (
        "(true) would be ignored: the model has no shared experts"
        in next(find_shared_expert_problems(settings, has_shared_experts=False))[0]
    )


def test_a_dense_model_reads_no_setting_of_experts() -> None:
    settings = MegatronConfig(
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.1,
    )
    assert [keys for _, keys in find_ignored_expert_settings(settings)] == [
        ("expert_model_parallel_size",),
        ("expert_tensor_parallel_size",),
        ("moe_aux_loss_coeff",),
        ("moe_z_loss_coeff",),
    ]
    assert not list(find_ignored_expert_settings(MegatronConfig()))


def test_flops_count_the_experts_that_a_token_meets() -> None:
    """One layer of hidden 4, 2 heads of 2, 2 of 6 experts with 3 columns; one token."""
    tiny = {
        **QWEN3_30B,
        "vocab_size": 8,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 2,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    }
    attention = 4 * 2 * (2 * 2 + 2 * 1)
    router = 4 * 6
    experts = 2 * 3 * 4 * 3
    scores = 4 * 1 * 2 * 2 * 0.5
    head = 2 * 4 * 8
    expected = 2 * (attention + router + experts) + scores + head
    assert count_model_flops(tiny, torch.tensor([1]), 1, FORWARD_PASSES) == expected
