"""What `plan memory` and `plan layout` print, against sums made anew and by hand."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from table_samples import DEEPSEEK_V3

from benchmarks import bench_plan
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.schema import MegatronConfig, RolloutConfig, RunConfig, SGLangConfig
from rlhf_megatron.planning.check.memory_table import RunMemory
from rlhf_megatron.planning.plan.gpu_memory import (
    GB,
    GIB,
    count_cache_elements_per_token,
    plan_engine_memory,
)
from rlhf_megatron.planning.plan.layout_search import (
    LayoutRequest,
    explain_no_fit,
    iterate_layout_plans,
    select_fitting_plans,
)
from rlhf_megatron.planning.plan.memory_phases import (
    estimate_host_bytes,
    iterate_other_pool_phases,
    list_step_phases,
)
from rlhf_megatron.ranks.workers.memory_plan import StageMemory
from rlhf_megatron.ranks.workers.peak_memory import (
    ModelElementCounts,
    TrainedModelSpec,
    estimate_state_bytes,
)
from rlhf_megatron.weights.bucket_plan import StageTraffic
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import select_stage_rules

QWEN3_8B = read_hf_config(ROOT / "examples" / "qwen3_8b")


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (
            DEEPSEEK_V3,
            ParallelLayout(
                512, tp=4, pp=16, ep=32, etp=1, num_first_stage_layers=3, num_last_stage_layers=2
            ),
        ),
        ({**QWEN3_8B, "vocab_size": 151937}, ParallelLayout(16, tp=4, pp=2)),
        (QWEN3_8B, ParallelLayout(1)),
    ],
)
def test_sizes_are_those_of_the_weight_table(
    config: dict[str, Any], layout: ParallelLayout
) -> None:
    """Rule by rule, with the vocabulary padded for tp."""
    sizes = ModelElementCounts.from_model(TrainedModelSpec(config, torch.bfloat16, 1))
    table = make_weight_table(config, layout.tp)
    for stage in {0, 1 % layout.pp, layout.pp - 1}:
        experts = others = 0
        for rule in select_stage_rules(table, stage, layout):
            count = math.prod(rule.megatron_shape)
            experts += 0 if rule.expert is None else count
            others += (
                0
                if rule.expert is not None
                else count // (1 if rule.split == "replicated" else layout.tp)
            )
        assert sizes.count_stage_elements(layout, stage) == (
            experts // layout.ep // layout.etp,
            others,
        )


def test_an_engine_by_hand() -> None:
    """Qwen3-8B at tp 8: 36 layers, one of 8 key-value heads of 128 a rank, in bfloat16; latent
    vectors are not cut.
    """
    table = make_weight_table(QWEN3_8B)
    whole = sum(math.prod(hf.shape) for rule in table for hf in rule.hf_tensors)
    norms = sum(rule.megatron_shape[0] for rule in table if rule.split == "replicated")
    rollout = RolloutConfig(
        engine="sglang", sglang=SGLangConfig(args={"tp-size": 8, "mem-fraction-static": 0.5})
    )
    found = plan_engine_memory(table, QWEN3_8B, "bfloat16", rollout, 80 * GB)
    assert found.bytes_per_token == 36 * 2 * 128 * 2 and found.weight_bytes == 2 * (
        (whole - norms) // 8 + norms
    )
    assert found.num_cache_tokens == (40 * GB - found.weight_bytes) // found.bytes_per_token
    assert count_cache_elements_per_token(DEEPSEEK_V3, 16) == 61 * (512 + 64)


def test_groups_of_ranks_with_requests_of_their_own_hold_attention_whole_and_other_tokens() -> None:
    """DeepSeek-V3 at tp 16, with and without DP attention of 16 groups, in bfloat16."""
    table = make_weight_table(DEEPSEEK_V3)
    of_groups = [
        hf
        for rule in table
        for hf in rule.hf_tensors
        if rule.split != "replicated" and ".self_attn." in hf.name
    ]
    of_groups += [
        hf for rule in table for hf in rule.hf_tensors if hf.name == "model.embed_tokens.weight"
    ]
    once, again = (
        plan_engine_memory(
            table,
            DEEPSEEK_V3,
            "bfloat16",
            RolloutConfig(engine="sglang", sglang=SGLangConfig(args={"tp-size": 16, **arguments})),
            141 * GB,
        )
        for arguments in ({}, {"dp-size": 16, "enable-dp-attention": True})
    )
    assert again.weight_bytes - once.weight_bytes == 2 * sum(
        math.prod(hf.shape) - math.prod(hf.shape) // 16 for hf in of_groups
    )
    assert once.bytes_per_token == 61 * (512 + 64) * 2 == 16 * again.bytes_per_token


def test_layouts_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    model = TrainedModelSpec(QWEN3_8B, torch.bfloat16, 8192)
    question = LayoutRequest(model, ModelElementCounts.from_model(model), 8, 80 * GB, 64)
    found = list(iterate_layout_plans(question))
    fits = select_fitting_plans(found, question.max_rank_bytes)
    assert fits and all(plan.peak_bytes <= 60 * GB for plan in fits)
    first = fits[0]
    assert first.ranks_per_copy == min(
        plan.ranks_per_copy for plan in found if plan.peak_bytes <= 60 * GB
    )
    megatron = MegatronConfig(use_distributed_optimizer=True)
    stages = range(first.layout.pp)
    assert first.state_bytes in [
        estimate_state_bytes(model, megatron, first.layout, stage) for stage in stages
    ]
    pipelined = next(
        plan
        for plan in found
        if plan.layout.pp == 4 and plan.layout.tp == 1 and plan.layout.cp == 1
    )
    assert pipelined.bubble_fraction == 3 / (64 // 2 + 3) and pipelined.tp_bytes == 0
    assert pipelined.pp_bytes == 2 * 4096 * 2 * 8192
    words = [
        "plan",
        "layout",
        str(ROOT / "examples" / "qwen3_8b"),
        "--gpus",
        "8",
        "--samples",
        "64",
        "--most",
        "3",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{len(fits)} of" in lines[0] and str(first.layout) in lines[2] and len(lines) == 6


def test_what_cannot_fit_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    model = TrainedModelSpec(DEEPSEEK_V3, torch.bfloat16, 32768)
    question = LayoutRequest(model, ModelElementCounts.from_model(model), 8, 80 * GB, 64)
    found = list(iterate_layout_plans(question))
    assert not select_fitting_plans(found, question.max_rank_bytes)
    least = min(found, key=lambda plan: plan.peak_bytes)
    assert f"the nearest is {least.layout} with {least.peak_bytes / GIB:.1f} GiB" in explain_no_fit(
        question, found
    )
    assert (
        main(
            [
                "plan",
                "layout",
                str(ROOT / "examples" / "deepseek_v3"),
                "--gpus",
                "8",
                "--seq",
                "32768",
            ]
        )
        == 1
    )
    assert "nothing fits into 55.9 GiB a GPU" in capsys.readouterr().err


def test_an_optimizer_on_the_host_and_a_critic_by_hand() -> None:
    """What optimizer_cpu_offload moves is in no phase of a GPU; actor and critic keep
    activations by turns.
    """
    given = {
        "stage": 0,
        "num_ranks": 8,
        "num_parameters": 10,
        "parameters": 20,
        "gradients": 40,
        "reference": 20,
    }
    own = StageMemory(**given, main_parameters=(5, 4), moments=(10, 9), is_optimizer_on_host=True)
    critic = replace(own, is_optimizer_on_host=False)
    traffic = StageTraffic(
        stage=0, num_buckets=1, gathered_bytes=1, sent_bytes=1, peak_buffer_bytes=7
    )
    memory = RunMemory((own,), (critic,), False, (), False, (traffic,), None, (3,), (11,))
    config = RunConfig()
    found = {
        phase.name: phase.total_bytes
        for phase in list_step_phases(memory, 0, None, is_colocated=False)
    }
    states = 20 + 40 + (20 + 40 + 15)
    assert found == {
        "generate": states,
        "log-probs": states,
        "update": states + 11,
        "sync": states + 7,
    }
    shared = replace(config.rollout, colocated=True)
    ranks = config.trainer.n_gpus_per_node
    host = estimate_host_bytes(shared, ranks, memory)
    assert host["optimizer"] == 15 * ranks and host["trainer while engines generate"] == 20 * ranks


@pytest.mark.parametrize("is_colocated", [False, True])
def test_a_reward_model_that_the_host_keeps_is_on_the_gpus_while_it_scores(
    is_colocated: bool,
) -> None:
    own = StageMemory(0, 8, 10, 20, 40, (5,), (10,), 20)
    traffic = StageTraffic(
        stage=0, num_buckets=1, gathered_bytes=1, sent_bytes=1, peak_buffer_bytes=7
    )
    memory = RunMemory(
        (own,),
        (),
        False,
        (),
        False,
        (traffic,),
        None,
        (3,),
        (),
        (50,),
        is_reward_model_on_host=True,
    )
    found = {
        phase.name: phase.bytes_by_use for phase in list_step_phases(memory, 0, None, is_colocated)
    }
    assert [name for name, parts in found.items() if "reward model" in parts] == ["rewards"]
    assert sum(found["rewards"].values()) == 75 + 50
    assert estimate_host_bytes(RunConfig().rollout, 8, memory)["reward model"] == 8 * 50


def test_models_with_ranks_of_their_own_by_hand() -> None:
    """A critic trains there; a reference, or teacher, and a reward model hold parameters alone."""
    own = StageMemory(0, 8, 10, 20, 40, (5,), (10,), 20)
    memory = RunMemory((own,), (own,), True, (), False, (), None, (3,), (11,), (7, 6), False, (9,))
    found = [
        (name, phase.name, phase.total_bytes)
        for name, phase in iterate_other_pool_phases(memory, has_reward_model_pool=False)
    ]
    assert found == [
        ("critic stage 0 (8 ranks)", "update", 75 + 11),
        ("reference stage 0", "forward", 9),
    ]
    found = [
        (name, phase.name, phase.total_bytes)
        for name, phase in iterate_other_pool_phases(memory, has_reward_model_pool=True)
    ][2:]
    assert found == [("reward model stage 0", "forward", 7), ("reward model stage 1", "forward", 6)]


def plan(*words: str) -> tuple[int, str]:
    return rlhf_megatron("plan", *words)


def rlhf_megatron(*words: str) -> tuple[int, str]:
    """The command in a process of its own: megatron-core is changed in it."""
    command = [sys.executable, "-m", "rlhf_megatron", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return ended.returncode, ended.stdout + ended.stderr


def plan_memory(*words: str, config: Path = ROOT / "configs" / "qwen3_8b.yaml") -> tuple[int, str]:
    return plan("memory", str(config), *words)


@pytest.mark.dist
def test_memory_by_phase(tmp_path: Path) -> None:
    """Engines have the GPU in their turn and the trainer in its own; a GPU is a line
    in the picture.
    """
    picture = tmp_path / "plan.svg"
    code, text = plan_memory("--gpu", "h100-80g", "--picture", str(picture))
    assert code == 0, text
    for phase in ("generate", "log-probs", "update", "sync"):
        assert f"stage 0 (8 ranks) {phase}" in text
    generate = next(line for line in text.splitlines() if " generate " in line)
    assert "48.43: engine weights" in generate and "moments" not in generate  # 0.65 of 80 GB
    assert "host memory of a machine: trainer while engines generate" in text
    assert picture.read_text().count("<rect") > 8
    code, text = plan_memory("--gpu", "a100-40g")
    assert code == 1 and "does not fit: stage 0" in text


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "configs" / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_recipe_says_what_the_command_says(recipe: Path) -> None:
    """The largest phase that its first lines name, the engine's weights and cache, a sync, a step
    and its shares.
    """
    head = recipe.read_text().partition("\nmodel:")[0]
    gpu = re.search(r"plan memory \S+ --gpu (\S+)", head)
    phase = re.search(r"(log-probs|update) takes? ([\d.]+) GiB", head)
    engine = re.search(r"weights take ([\d.]+) GiB; its cache holds ([\d,]+) tokens", head)
    assert gpu is not None and phase is not None and engine is not None, head
    code, text = plan_memory("--gpu", gpu[1], config=recipe)
    assert code == 0 and "Warning" not in text, text
    totals = [float(number) for number in re.findall(rf"ranks\) {phase[1]} +([\d.]+):", text)]
    assert abs(max(totals) - float(phase[2])) < 0.06  # both are rounded
    found = re.search(r"weights ([\d.]+), cache [\d.]+, which is (\d+) tokens", text)
    assert found is not None and abs(float(found[1]) - float(engine[1])) < 0.06
    assert round(int(found[2]), -3) == int(engine[2].replace(",", ""))
    sync = re.search(
        r"sync takes ([\d.]+) s at least:\n# +rlhf-megatron plan sync (\S+) --network (\S+)", head
    )
    assert sync is not None and ROOT / sync[2] == recipe, head
    code, text = plan("sync", str(recipe), "--network", sync[3])
    assert code == 0 and f"floor          {float(sync[1]):.2f} s" in text, text
    shares = r"step takes (\d+) s as planned; the trainer works (\d+) % of it, engines (\d+) %:"
    planned = re.search(rf"{shares}\n# +rlhf-megatron (simulate .*)", head)
    assert planned is not None and planned[4].startswith(
        f"simulate configs/recipes/{recipe.name} --gpu {gpu[1]} "
    )
    code, text = rlhf_megatron(*planned[4].split())
    step = re.search(r"step ([\d.]+) s in the mean", text)
    idle = re.search(r"idle: trainer ([\d.]+)%, engines ([\d.]+)%", text)
    assert step is not None and idle is not None, text
    assert abs(float(step[1]) - int(planned[1])) < 0.51
    works = [int(planned[number]) for number in (2, 3)]
    assert all(abs(100 - float(idle[number]) - works[number - 1]) < 0.51 for number in (1, 2))
    assert min(works) >= 20, "neither side waits for the other most of the time"


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("model", bench_plan.MODELS)
def test_the_largest_shapes_take_four_gigabytes_at_most(model: str, tmp_path: Path) -> None:
    """DeepSeek-V3 and Kimi-K2: sync, memory, layouts,
    and a conversion of an index without files.
    """
    found = bench_plan.run(model, tmp_path)
    assert len(found) == 4 and all(
        row["peak_gb"] <= 4 and row["lines"] > 3 for row in found.values()
    ), found
