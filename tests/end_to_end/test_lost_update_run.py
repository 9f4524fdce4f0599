"""Runs whose engines have coarser weights than the trainer: the share of the update that they do
not see, the warning, and a KL of 0 at the first step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import write_config
from forked_runs import Attempt, ForkServer

from rlhf_megatron.cli.main import main

pytestmark = pytest.mark.dist
SHARE = "policy/lost_update_share"
SHORT: dict[str, Any] = {"trainer.test_freq": 0, "trainer.save_freq": 0, "trainer.save_hf": False}
BF16 = {"model.dtype": "bfloat16"}
FSDP = {"actor.backend": "fsdp"}
LORA = {**FSDP, "actor.lora.rank": 4}
WITH_KL = {"algorithm.use_kl_in_reward": True, "actor.use_kl_loss": True}
NOTE = "the policy differs from its reference before the first update"


def steps_of(run: Attempt) -> list[dict[str, Any]]:
    assert run.code == 0, run.console
    return [row for row in run.rows() if row["kind"] == "step"]


def test_kl_is_zero_at_the_first_step_after_a_warm_up(tmp_path: Path) -> None:
    """The reference is a copy of the warmed-up policy; with LoRA of its matrices, too."""
    backends = {"megatron": {}, "fsdp": FSDP, "lora": LORA}
    with ForkServer(tmp_path) as server:
        for dtype in ("bfloat16", "float32"):
            for name, backend in backends.items():
                directory = tmp_path / f"{name}_{dtype}"
                directory.mkdir()
                settings = {**SHORT, **WITH_KL, **backend, "model.dtype": dtype}
                settings |= {"trainer.total_training_steps": 1}
                run = server.train(write_config(directory), settings)
                (step,) = steps_of(run)
                label = f"{name} in {dtype}"
                assert step["actor/reward_kl_penalty"] == step["actor/kl_loss"] == 0.0, label
                assert NOTE not in run.console, label


def test_a_run_warns_once_of_an_adapter_that_its_engines_cannot_see(tmp_path: Path) -> None:
    settings = {**SHORT, **LORA, **BF16, "actor.lora.alpha": 8.0, "warmup.max_steps": 0}
    settings |= {"actor.optim.lr": 1e-5, "actor.optim.lr_decay_style": "constant"}
    settings |= {"trainer.total_training_steps": 3}
    with ForkServer(tmp_path) as server:
        run = server.train(write_config(tmp_path), settings)
        shares = [step[SHARE] for step in steps_of(run)]
        assert 0.9 < shares[2] < shares[1] < shares[0] < 1.0, "the adapter grows"
        warnings = [
            line for line in run.console.splitlines() if "WARNING: the engines lack" in line
        ]
        assert len(warnings) == 1
        assert "lack 99% of the adapter's change (policy/lost_update_share 0.99" in warnings[0]
        assert "set rollout.dtype to float32" in warnings[0] and "actor.optim.lr" in warnings[0]

        (tmp_path / "wide").mkdir()
        wide = server.train(
            write_config(tmp_path / "wide"), {**settings, "rollout.dtype": "float32"}
        )
    assert all(0.0 < step[SHARE] < 1e-2 for step in steps_of(wide)), (
        "merged in float32 and not rounded"
    )
    assert "WARNING: the engines lack" not in wide.console


def test_full_training_reports_a_share_without_a_warning(tmp_path: Path) -> None:
    """On engines of their own and on engines that share the trainer's devices, where the float32
    weights are in host memory while weights are sent.
    """
    settings = {**SHORT, **BF16, "actor.optim.lr_decay_style": "constant"}
    found = []
    with ForkServer(tmp_path) as server:
        for is_colocated in (False, True):
            directory = tmp_path / f"colocated_{is_colocated}"
            directory.mkdir()
            run = server.train(
                write_config(directory),
                {**settings, "rollout.colocated": is_colocated, "trainer.total_training_steps": 3},
            )
            found.append([step[SHARE] for step in steps_of(run)])
            assert "the engines lack" not in run.console
    assert found[0] == found[1]
    assert all(share > 0.1 for share in found[0])


@pytest.mark.long
@pytest.mark.parametrize("backend", ["megatron", "lora"])
def test_a_run_that_was_killed_goes_on_with_the_same_shares_and_reference(
    tmp_path: Path, backend: str
) -> None:
    """The first sync of the second process is the one before its first step. The reference is the
    warmed-up policy, bit for bit: with LoRA the checkpoint has its matrices.
    """
    settings = {**BF16, **WITH_KL, **({} if backend == "megatron" else LORA)}
    settings |= {"trainer.total_training_steps": 4, "trainer.test_freq": 0}
    (tmp_path / "alone").mkdir()
    (tmp_path / "killed").mkdir()
    with ForkServer(tmp_path) as server:
        alone = server.train(write_config(tmp_path / "alone"), settings)
        faults = "kill@actor.after_optimizer_step:step=3"
        first, last = server.until_it_ends(
            write_config(tmp_path / "killed"), settings, faults=faults
        )
    assert (first.code, last.code) == (-signal.SIGKILL, 0), last.console
    assert last.rows() == alone.rows()
    assert last.weights() == alone.weights()
    steps = steps_of(alone)
    assert steps[0]["actor/kl_loss"] == 0.0 and all(SHARE in step for step in steps[:3])


@pytest.mark.long
def test_a_run_that_starts_from_an_adapter_has_a_reference_with_the_adapter(tmp_path: Path) -> None:
    settings = {**SHORT, **LORA, **BF16, **WITH_KL, "trainer.total_training_steps": 1}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with ForkServer(tmp_path) as server:
        first = server.train(write_config(tmp_path / "first"), {**settings, "trainer.save_freq": 1})
        assert first.code == 0, first.console
        adapter = tmp_path / "adapter"
        assert main(["export", str(first.run_dir), "--adapter", "--out", str(adapter)]) == 0
        settings |= {"warmup.max_steps": 0, "actor.lora.path": str(adapter)}
        (step,) = steps_of(server.train(write_config(tmp_path / "second"), settings))
    assert step["actor/reward_kl_penalty"] == step["actor/kl_loss"] == 0.0


@pytest.mark.long
def test_a_run_that_goes_on_without_its_warm_up_is_told_to_restore_it(tmp_path: Path) -> None:
    """Its checkpoint has a reference with an adapter, and a run without a warm-up has none."""
    settings = {**SHORT, **LORA, **WITH_KL, "trainer.save_freq": 1}
    with ForkServer(tmp_path) as server:
        config = write_config(tmp_path)
        first = server.train(config, {**settings, "trainer.total_training_steps": 1})
        assert first.code == 0, first.console
        second = server.train(
            config, {**settings, "trainer.total_training_steps": 2, "warmup.max_steps": 0}
        )
    assert second.code != 0
    assert "restore the settings of warmup, actor.lora and reference.path" in second.console
