"""`rlhf-megatron plan sync`: figures by hand, and the largest models within seconds."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest
from places import ROOT
from table_samples import DEEPSEEK_V3

from rlhf_megatron.cli.commands import _GPU_NAMES, _NETWORK_NAMES
from rlhf_megatron.cli.main import main
from rlhf_megatron.cli.plan.plan_sync import make_planned_engines
from rlhf_megatron.config.schema import RolloutConfig, RunConfig, SGLangConfig
from rlhf_megatron.planning.network_cost import NETWORKS
from rlhf_megatron.planning.plan.gpu_memory import GPU_MEMORY_GB
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.shard_plan import EngineLayout, find_engine_span

RUN = ROOT / "configs" / "qwen3_235b_512_ranks.yaml"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "sync", *arguments]) in (None, 0)
    return capsys.readouterr().out


def test_the_parser_offers_all_gpus_and_networks() -> None:
    assert set(_GPU_NAMES) == GPU_MEMORY_GB.keys() and set(_NETWORK_NAMES) == NETWORKS.keys()


def plan_small_run(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, num_engines: int
) -> str:
    """A small model at tp2 on GPUs that it shares with engines of tp2."""
    hf_config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(hf_config))
    megatron = [
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=1",
        "expert_model_parallel_size=1",
    ]
    unset = ["num_layers_in_first_pipeline_stage=null", "num_layers_in_last_pipeline_stage=null"]
    of_experts = ["moe_router_load_balancing_type=none", "moe_aux_loss_coeff=0.0"]
    return plan(
        capsys,
        str(RUN),
        f"model.path={folder}",
        *(f"actor.megatron.{setting}" for setting in [*megatron, *unset, *of_experts]),
        "actor.megatron.expert_tensor_parallel_size=null",
        "critic.path=null",
        "rollout.colocated=true",
        "rollout.engine_machines=[]",
        "reference.param_offload=true",
        "rollout.weight_transport=tensor",
        f"rollout.num_engines={num_engines}",
        *(
            f"rollout.sglang.args.{s}"
            for s in ("tensor_parallel_size=2", "ep_size=1", "mem_fraction_static=0.5")
        ),
        *arguments,
    )


def test_figures_of_a_small_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """tp2 on two GPUs, to an engine of tp2 on the same ones: each rank's half stays on its GPU, and
    of the norms, which one of the two sends, a copy goes over NVLink.
    """
    picture = tmp_path / "sync.svg"
    layout = ("trainer.nnodes=1", "trainer.n_gpus_per_node=2")
    out = plan_small_run(capsys, tmp_path, *layout, f"--picture={picture}", num_engines=1)
    cut = 2 * (256 * 64 + (64 + 32 + 32) * 64 + 64 * 64 + 3 * 128 * 64)
    norms = 2 * 3 * 64
    assert f"own GPU        {(cut + norms) / 1000:.3g} kB over 2 links" in out
    assert f"NVLink         {norms} B over" in out and "network  " in out
    assert "whole tensors  " not in out
    assert "this run" not in out
    svg = picture.read_text()
    assert svg.startswith("<svg ") and svg.count('class="cell"') == 4


def test_colocated_engines_of_two_machines_take_weights_from_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Engines are dealt to the machines in turns: engine1 is the first one of machine 1, on the
    GPUs of ranks 8 and 9, and nothing leaves a machine.
    """
    layout = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8", "rollout.transfer_dir=/tmp")
    out = plan_small_run(capsys, tmp_path, *layout, num_engines=4)
    senders = {
        engine: int(rank)
        for rank, engine in re.findall(r"rank (\d+) to engine(\d) rank 0: [\d.]+ kB", out)
    }
    assert senders == {"0": 0, "1": 8, "2": 2, "3": 10}, out
    assert re.search(r"^own GPU .* over 8 links$", out, re.MULTILINE), out
    assert not re.search(r"^network .* over ", out, re.MULTILINE), out


def test_the_largest_of_the_shipped_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """59 GB for each rank of an engine at 50 GB/s,
    or each stage's 59 GB to 32 engines by one rank.
    """
    out = plan(capsys, str(RUN))
    assert "floor          1.18 s: engine" in out and "receives 59 GB by network" in out
    assert "whole tensors  38.2" in out
    assert "senders        8 stages x 4 copies x 16 ranks" in out
    assert "this run" not in out  # it goes shard to shard
    out = plan(capsys, str(RUN), "rollout.weight_transport=disk", "rollout.transfer_dir=/tmp")
    assert "this run       sends whole tensors: rollout.weight_transport is disk" in out
    out = plan(capsys, str(RUN), "rollout.quantization=fp8")
    assert "as fp8; trainer" in out and "floor          0.59 s: engine" in out


def test_a_shared_expert_is_cut_as_sglang_cuts_it() -> None:
    """With dense layers; fused with the others of each of the ep parts; whole on every rank that
    DeepEP serves.
    """
    table = make_weight_table({**DEEPSEEK_V3, "num_hidden_layers": 4})
    (rule,) = [
        r for r in table if r.megatron_name.endswith("3.mlp.shared_experts.linear_fc2.weight")
    ]
    (hf,) = rule.hf_tensors  # [7168, 2048]
    for arguments, columns in (
        ({}, 256),
        ({"enforce_shared_experts_fusion": True}, 1024),
        ({"moe_a2a_backend": "deepep"}, 2048),
    ):
        given = {"tp_size": 8, "ep_size": 4, **arguments}
        engine = EngineLayout.from_rollout_config(
            RolloutConfig(engine="sglang", sglang=SGLangConfig(args=given))
        )
        spans = [find_engine_span(rule, hf, engine, rank) for rank in range(8)]
        assert [span.shape_within(hf.shape)[1] for span in spans if span is not None] == [
            columns
        ] * 8, arguments
        assert {span.start for span in spans if span is not None} == set(range(0, 2048, columns))


def test_attached_engines_are_counted() -> None:
    rollout = RolloutConfig(engine="sglang", endpoints=("http://a:1", "http://b:1", "http://c:1"))
    assert make_planned_engines(RunConfig(rollout=rollout)).num_engines == 3


@pytest.mark.long
def test_a_trillion_parameters_take_seconds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Kimi-K2's shape: 384 experts a layer."""
    sizes = {
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
    }
    hf_config = {**DEEPSEEK_V3, **sizes, "n_group": 1, "topk_group": 1}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    out = plan(
        capsys,
        str(RUN),
        f"model.path={tmp_path}",
        "actor.megatron.num_layers_in_first_pipeline_stage=8",
        "actor.megatron.num_layers_in_last_pipeline_stage=5",
        "actor.megatron.moe_router_load_balancing_type=none",
        "actor.megatron.moe_aux_loss_coeff=0.0",
        "critic.path=null",
        "rollout.num_engines=16",
        "rollout.sglang.args.tensor_parallel_size=32",
        "rollout.sglang.args.ep_size=32",
    )
    assert "weights        1.99 TB" in out and "floor" in out
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20
