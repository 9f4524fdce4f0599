"""`config from-verl`: verl's ways to let engines and trainer work at the same time, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_from_verl import BASE, learning, loads, translated, values

CORRECTION = "algorithm.rollout_correction"
FULLY = (
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=2",
    "async_training.partial_rollout=False",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "trainer.total_training_steps=null",
    "rollout.total_rollout_steps=12900",
    "rollout.test_freq=5",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=4",
    "actor_rollout_ref.hybrid_engine=False",
    "async_training.checkpoint_engine.enable=True",
)


def test_fully_async(tmp_path: Path) -> None:
    """Between two syncs: 4 x 2 x 16 = 128 prompts; 12900 // 128 = 100 steps. 0.5 of a step ahead
    is a lag of 1.
    """
    result = translated(BASE, *FULLY)
    found = values(result)
    assert found["schedule.name"] == "asynchronous"
    assert (
        found["schedule.params.max_lag"] == 1 and found["schedule.params.partial_rollouts"] is False
    )
    assert found["data.train_batch_size"] == 128 and found["actor.mini_batch_size"] == 16 * 4
    assert found["trainer.total_training_steps"] == 100 and found["trainer.test_freq"] == 5
    assert (
        found[f"{CORRECTION}.mode"] == "bypass" and found[f"{CORRECTION}.loss_type"] == "ppo_clip"
    )
    assert found["rollout.num_engines"] == 2, "4 devices / tensor parallelism 2 of verl's default"
    copies = values(translated(BASE, *FULLY, "actor_rollout_ref.rollout.data_parallel_size=2"))
    assert copies["rollout.num_engines"] == 2 and "rollout.sglang.args.dp_size" not in copies, (
        "each copy is an engine"
    )
    assert found["rollout.weight_transport"] == "process_group" and "rollout.colocated" not in found
    assert not result.problems and result.is_complete
    assert any(
        "128 prompts = trigger_parameter_sync_step 4 x require_batches 2 x" in note
        for note in result.notes
    )
    assert (
        "in whole syncs: 0.5 of a step's prompts there"
        in result.values["schedule.params.max_lag"].note
    )
    loads(result, tmp_path / "run.yaml")


def test_fully_async_by_its_defaults() -> None:
    """staleness 0.1, 4 rounds of one mini-batch, partial rollouts, the engine's log-probs."""
    found = values(translated(BASE, "async_training.require_batches=1"))
    assert found["data.train_batch_size"] == 64 and found["schedule.params.max_lag"] == 1
    assert (
        found["schedule.params.partial_rollouts"] is True
        and found[f"{CORRECTION}.mode"] == "bypass"
    )
    assert found["rollout.num_engines"] == 4 and found["trainer.total_training_steps"] == 50


def test_fully_async_without_old_tokens_and_with_log_probs_of_the_trainer() -> None:
    found = values(translated(BASE, *FULLY, "async_training.staleness_threshold=0"))
    assert found["schedule.name"] == "streaming" and "schedule.params.max_lag" not in found
    section = "async_training.use_rollout_log_probs=False"
    found = values(translated(BASE, *FULLY, section, "async_training.staleness_threshold=3"))
    assert found["schedule.params.max_lag"] == 3
    assert found[f"{CORRECTION}.preset"] == "disabled" and f"{CORRECTION}.mode" not in found
    found = values(translated(BASE, *FULLY, section, f"{CORRECTION}.rollout_is=token"))
    assert found[f"{CORRECTION}.rollout_is"] == "token" and f"{CORRECTION}.preset" not in found


def test_a_loss_that_bypass_mode_does_not_have() -> None:
    result = translated(BASE, *FULLY, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    (line,) = learning(result)
    assert line.startswith(
        "async_training.use_rollout_log_probs: gspo with the engine's log-probs for old ones"
    )
    assert values(result)["actor.policy_loss.loss_mode"] == "gspo"


@pytest.mark.parametrize(
    ("settings", "lag", "late"),
    [
        ((), 1, "drop"),
        (("+trainer.v1.separate_async.num_warmup_batches=3",), 3, "drop"),
        (("+trainer.v1.separate_async.num_warmup_batches=0",), 1, "drop"),
        (
            (
                "+trainer.v1.separate_async.num_warmup_batches=5",
                "trainer.v1.sampler.max_off_policy_threshold=2",
                "trainer.v1.sampler.max_off_policy_strategy=wait",
            ),
            *(2, "wait"),
        ),
    ],
)
def test_separate_async(settings: tuple[str, ...], lag: int, late: str) -> None:
    result = translated(
        BASE, "trainer.use_v1=True", "trainer.v1.trainer_mode=separate_async", *settings
    )
    found = values(result)
    assert found["schedule.name"] == "asynchronous"
    assert found["schedule.params.max_lag"] == lag and found["schedule.params.late"] == late
    assert found[f"{CORRECTION}.preset"] == "disabled" and "rollout.colocated" not in found
    assert result.is_complete and not result.problems


def test_a_mode_that_shares_devices_has_no_counterpart() -> None:
    result = translated(BASE, "trainer.v1.trainer_mode=colocate_async")
    (line,) = learning(result)
    assert line.startswith("trainer.v1.trainer_mode: who shares devices takes turns here")
    assert "schedule.name" not in result.values and values(result)["rollout.colocated"] is True
    result = translated(BASE, "trainer.use_v1=True", "trainer.v1.trainer_mode=sync")
    assert result.is_complete and "schedule.name" not in result.values


def test_one_step_off() -> None:
    """Its file says no more than that engines have devices of their own."""
    result = translated(
        BASE,
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.hybrid_engine=False",
    )
    found = values(result)
    assert found["schedule.name"] == "one_step_off" and found["rollout.num_engines"] == 1
    assert (
        found[f"{CORRECTION}.preset"] == "disabled" and result.is_complete and not result.problems
    )
    whole = translated(BASE, "rollout.nnodes=0", "rollout.n_gpus_per_node=8")
    assert "schedule.name" not in whole.values and values(whole)["rollout.colocated"] is True
