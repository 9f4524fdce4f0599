"""Runs on the backend fsdp: PPO (warm-up, reference, critic, verified syncs) killed and run on, and
exported; LoRA.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import ONE_RANK, write_config
from forked_runs import ForkServer
from places import MODEL
from safetensors.torch import load_file, save_file
from test_sft_run import curve, losses
from test_sft_run import write_config as write_supervised

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.recovery.checkpoint_export import find_exportable_weights
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.lora_adapter import WEIGHTS, MergedLoraSource
from rlhf_megatron.weights.weight_source import make_random_source

# tests/dist/test_fsdp_actor.py resumes bit for bit, too
pytestmark = [pytest.mark.dist, pytest.mark.long]
SETTINGS: dict[str, Any] = {
    "actor.backend": "fsdp",
    "actor.use_kl_loss": True,
    "algorithm.adv_estimator": "gae",
    "trainer.total_training_steps": 3,
    "trainer.test_freq": 0,
}


def test_a_run_that_was_killed_goes_on_and_is_exported(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "killed").mkdir()
    with ForkServer(tmp_path) as server:
        alone = server.train(write_config(tmp_path / "alone"), SETTINGS)
        assert alone.code == 0, alone.console
        faults = "kill@actor.after_optimizer_step:step=3"
        first, last = server.until_it_ends(
            write_config(tmp_path / "killed"), SETTINGS, faults=faults
        )
    assert (first.code, last.code) == (-signal.SIGKILL, 0), last.console
    assert last.rows() == alone.rows()
    assert last.weights() == alone.weights()
    steps = [row for row in alone.rows() if row["kind"] == "step"]
    assert (
        len({row["actor/grad_norm"] for row in steps})
        == len({row["critic/grad_norm"] for row in steps})
        == 3
    )

    find_exportable_weights(alone.run_dir).write_hf_directory(tmp_path / "exported", "float32")
    assert (tmp_path / "exported" / "model.safetensors").stat().st_size > 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    written = load_file(alone.run_dir / "hf" / "model.safetensors")
    assert exported.keys() == written.keys()
    assert all(bool((exported[name] == tensor.float()).all()) for name, tensor in written.items())
    assert (
        len(find_exportable_weights(alone.run_dir, role="critic").model.weight_table)
        == len(exported) + 2
    )


def test_adapters_learn_by_rewards_and_leave_the_base_alone(tmp_path: Path) -> None:
    """GRPO with LoRA and a reference: engines sample from the merged weights, which
    verified syncs bring.
    """
    settings = {**SETTINGS, "actor.lora.rank": 4, "algorithm.adv_estimator": "grpo"}
    with ForkServer(tmp_path) as server:
        run = server.train(write_config(tmp_path), settings)
    assert run.code == 0, run.console
    adapted = find_exportable_weights(run.run_dir)
    exported = adapted.write_hf_directory(tmp_path / "exported", "float32")
    merged, written = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "exported", run.run_dir / "hf")
    )
    assert exported == len(merged) and all(
        torch.equal(merged[name], written[name].float()) for name in merged
    )
    assert main(["export", str(run.run_dir), "--adapter", "--out", str(tmp_path / "adapter")]) == 0
    matrices = load_file(tmp_path / "adapter" / WEIGHTS)
    assert all(bool((matrix != 0).any()) for matrix in matrices.values())
    assert isinstance(adapted.model.source, MergedLoraSource)
    first = make_random_source(adapted.model.hf_config, 1)  # model.init_seed
    for rule in adapted.model.weight_table:
        (kept,) = adapted.model.source.source.read_hf_tensors(rule)
        (begun,) = first.read_hf_tensors(rule)
        assert torch.equal(kept, begun), rule.megatron_name
        is_merged = (
            f"base_model.model.{rule.megatron_name.removesuffix('weight')}lora_A.weight" in matrices
        )
        assert torch.equal(kept, merged[rule.hf_tensors[0].name]) != is_merged


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_supervised_jobs_with_adapters(tmp_path: Path, loss: str) -> None:
    """At one rank and inline; DPO's reference is the base."""
    settings: dict[str, Any] = {
        "actor.backend": "fsdp",
        "actor.lora.rank": 8,
        "actor.optim.lr": 1e-2,
    }
    if loss == "dpo":
        settings |= {"sft.loss_mode": "dpo", "sft.params": {"beta": 0.5}}
    with ForkServer(tmp_path) as server:
        run = server.train(write_supervised(tmp_path / "run"), settings, command="sft")
    assert run.code == 0, run.console
    steps = [row for row in run.rows() if row["kind"] == "step"]
    assert steps[-1]["sft/loss"] < steps[0]["sft/loss"]
    assert loss == "sft" or (
        steps[0]["rewards/margins"] == 0.0 and steps[-1]["rewards/margins"] > 0.0
    )


@pytest.mark.parametrize("is_held", [True, False])
def test_a_supervised_job_that_was_killed_goes_on_bit_for_bit(
    tmp_path: Path, is_held: bool
) -> None:
    """In the middle of an epoch; the other one reads pairs of files that it does not hold."""
    settings: dict[str, Any] = {"actor.backend": "fsdp"}
    if not is_held:
        settings |= {"sft.in_memory": False, "sft.loss_mode": "dpo", "sft.params": {"beta": 0.5}}
    faults = "kill@actor.after_optimizer_step:step=5"
    with ForkServer(tmp_path) as server:
        alone = server.train(write_supervised(tmp_path / "alone"), settings, command="sft")
        assert alone.code == 0, alone.console
        config = write_supervised(tmp_path / "killed")
        first, last = server.until_it_ends(config, settings, faults=faults, command="sft")
    assert (first.code, last.code) == (-signal.SIGKILL, 0), last.console
    assert last.rows() == alone.rows()
    assert last.weights() == alone.weights()


def test_launchers_change_no_bit(tmp_path: Path) -> None:
    """Two ranks under torchrun and under Ray."""
    settings = {**ONE_RANK, "actor.backend": "fsdp", "trainer.n_gpus_per_node": 2}
    runs = []
    for runtime in ("torchrun", "ray"):
        finished = curve(
            write_supervised(tmp_path / runtime), {**settings, "trainer.runtime": runtime}
        )
        assert finished.exit_code == 0, finished.console
        rows = [
            json.loads(line)
            for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()
        ]
        runs.append((losses(rows), (finished.run_dir / "hf" / "model.safetensors").read_bytes()))
    assert len(runs[0][0]) > 5 and runs[0] == runs[1]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_student_comes_near_its_teacher(tmp_path: Path, backend: str) -> None:
    """The teacher is another run's model; the student begins elsewhere. In a run of RL whose
    rewards do not count each step learns from the divergence alone (tests/dist/test_distillation.py
    has its gradient).
    """
    rows = {"actor.backend": backend, "actor.optim.lr": 1e-2}
    with ForkServer(tmp_path) as server:
        teacher = server.train(write_supervised(tmp_path / "teacher"), rows, command="sft")
        assert teacher.code == 0, teacher.console
        settings = {
            **rows,
            "sft.loss_mode": "forward_kl",
            "sft.params": {"top_k": 4},
            "model.init_seed": 2,
        }
        settings |= {
            "reference.path": str(teacher.run_dir / "hf"),
            "trainer.total_training_steps": 10,
        }
        student = server.train(write_supervised(tmp_path / "student"), settings, command="sft")
        of_term = {"loss_mode": "reverse_kl", "others_coef": 0.0, "params": {"top_k": 4}}
        settings = {
            **SETTINGS,
            **rows,
            "actor.use_kl_loss": False,
            "algorithm.adv_estimator": "grpo",
        }
        settings |= {f"actor.distillation.{name}": value for name, value in of_term.items()}
        settings |= {
            "reference.path": str(teacher.run_dir / "hf"),
            "trainer.total_training_steps": 10,
        }
        (tmp_path / "policy").mkdir()
        policy = server.train(write_config(tmp_path / "policy"), settings)
    assert student.code == policy.code == 0, student.console + policy.console
    losses = [row["sft/loss"] for row in student.rows() if row["kind"] == "step"]
    assert losses[-1] < 0.5 * losses[0]
    told = [row for row in policy.rows() if row["kind"] == "step"]
    assert len(told) == 10 and all(
        row["actor/distillation_loss"] > 0 < row["actor/grad_norm"] for row in told
    )


OWN_POOL = {
    "trainer.runtime": "torchrun",
    "trainer.n_gpus_per_node": 3,
    "reference.num_ranks": 2,
    "reference.megatron.tensor_model_parallel_size": 2,
}


@pytest.mark.parametrize("command", ["sft", "train"])
def test_a_teacher_of_another_size_tells_the_same_on_ranks_of_its_own(
    tmp_path: Path, command: str
) -> None:
    """One rank learns from a deeper model, which stands beside it, or at tp2 on two ranks more."""
    hf_config = {**read_hf_config(MODEL), "num_hidden_layers": 3, "intermediate_size": 64}
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text(json.dumps(hf_config))
    shutil.copy(MODEL / "tokenizer.json", teacher)
    source = make_random_source(hf_config, 5)
    save_file(
        {
            t.name: x
            for rule in make_weight_table(hf_config)
            for t, x in zip(rule.hf_tensors, source.read_hf_tensors(rule), strict=True)
        },
        teacher / "model.safetensors",
    )
    settings: dict[str, Any] = {
        "reference.path": str(teacher),
        "actor.megatron.tensor_model_parallel_size": 1,
    }
    if command == "sft":
        settings |= {
            "sft.loss_mode": "forward_kl",
            "sft.params": {"top_k": 4},
            "trainer.n_gpus_per_node": 1,
        }
    else:
        settings |= {
            **SETTINGS,
            "actor.backend": "megatron",
            "actor.use_kl_loss": False,
            "algorithm.adv_estimator": "grpo",
        }
        settings |= {
            "actor.distillation.loss_mode": "reverse_kl",
            "actor.distillation.params": {"top_k": 4},
        }
    found = []
    with ForkServer(tmp_path) as server:
        for name, pool in (("shared", {}), ("own", OWN_POOL)):
            (tmp_path / name).mkdir()
            write = write_supervised if command == "sft" else write_config
            config = write(tmp_path / name / "run") if command == "sft" else write(tmp_path / name)
            run = server.train(config, settings | pool, command=command)
            assert run.code == 0, run.console
            found.append([row for row in run.rows() if row["kind"] == "step"])
    key = "sft/loss" if command == "sft" else "actor/distillation_loss"
    assert len(found[0]) == len(found[1]) >= 3
    for one, other in zip(*found, strict=True):
        assert other[key] == pytest.approx(one[key], rel=1e-4)
    assert found[0][0][key] > 0.01


def test_a_family_that_only_transformers_has_learns_by_rewards(tmp_path: Path) -> None:
    """OLMo 2: sampled by the bundled engine, synced under the model's own names, exported."""
    own = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "initializer_range": 0.06}
    hf_config = {**read_hf_config(MODEL), **own}
    model = tmp_path / "olmo2"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(hf_config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model)
    settings = {
        **SETTINGS,
        "model.path": str(model),
        "algorithm.adv_estimator": "grpo",
        "actor.use_kl_loss": False,
    }
    with ForkServer(tmp_path) as server:
        run = server.train(write_config(tmp_path), settings)
    assert run.code == 0, run.console
    steps = [row for row in run.rows() if row["kind"] == "step"]
    assert len(steps) == 3 and all(
        row["training/rollout_log_probs_diff_max"] < 1e-4 for row in steps
    )
    assert "model.layers.0.post_feedforward_layernorm.weight" in load_file(
        run.run_dir / "hf" / "model.safetensors"
    )
