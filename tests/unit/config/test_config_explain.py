"""`config explain`, and what is answered to the names that users of other trainers type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.explain import explain_setting
from rlhf_megatron.config.key_paths import list_setting_leaves
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.rules.validate import check_world_size
from rlhf_megatron.config.schema import RunConfig, TrainerConfig
from rlhf_megatron.config.verl_names import ELSEWHERE, suggest_setting

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_a_setting_with_its_value_and_origin() -> None:
    text = explain_setting(
        "actor_rollout_ref.actor.optim.lr", read_run_config(QUICKSTART, ["trainer.seed=9"])
    )
    for line in (
        "actor.optim.lr: peak learning rate",
        "type: number, at least 0",
        "default: 1e-06",
        "value: 0.0002 (",
    ):
        assert f"\n{line}" in f"\n{text}"
    assert "quickstart.yaml:" in text and "verl: actor_rollout_ref.actor.optim.lr" in text
    assert "value: 9 (command line)" in explain_setting(
        "trainer.seed", read_run_config(QUICKSTART, ["trainer.seed=9"])
    )


def test_settings_that_a_rule_holds_together_are_named() -> None:
    text = explain_setting("actor.use_kl_loss")
    assert "goes with: " in text and "actor.kl_loss_coef" in text.partition("goes with: ")[2]
    assert "actor.ppo_mini_batch_size" in explain_setting("actor.mini_batch_size")


def test_every_setting_can_be_explained() -> None:
    for leaf in list_setting_leaves(RunConfig):
        text = explain_setting(leaf.key)
        assert text.startswith(f"{leaf.key}: ") and "\ntype: " in text and "\ndefault: " in text
    assert explain_setting("rollout").startswith("rollout is a section:\nrollout.engine: ")


def test_what_other_trainers_call_it() -> None:
    known = {leaf.key for leaf in list_setting_leaves(RunConfig)}
    for name, here in ELSEWHERE.items():
        assert here.partition(" ")[0] in known
        assert (
            suggest_setting(name).text
            == suggest_setting(f"trainer.{name}").text
            == f"Here it is {here}."
        )
    with pytest.raises(
        ValueError, match=r"learning_rate is no setting. Here it is actor.optim.lr."
    ):
        explain_setting("learning_rate")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "trainer.total_epochs",
            "Here it is trainer.total_training_steps (in steps of the loop: rows of",
        ),
        ("total_epochs", "Here it is trainer.total_training_steps (in steps of the loop: rows of"),
        (
            "trainer.epochs",
            "Here it is trainer.total_training_steps (in steps of the loop: rows of",
        ),
        ("trainer.val_only", "A command does it: rlhf-megatron evaluate RUN.yaml."),
        ("val_only", "A command does it: rlhf-megatron evaluate RUN.yaml."),
        ("total_training_steps", "A key of that name exists as trainer.total_training_steps"),
        ("test_freq", "A key of that name exists as"),
        ("train_files", "A key of that name exists as"),
        ("data.train_file", "Did you mean data.train_files?"),
        ("actor_rollout_ref.actor.optim.lr", "Here it is actor.optim.lr."),
        ("actor_rollout_ref.rollout.name", "Here it is rollout.engine"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "Here it is rollout.sglang.args"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "Here it is actor.mini_batch_size (it counts samples",
        ),
        (
            "ppo_micro_batch_size_per_gpu",
            "Here it is actor.ppo_max_token_len_per_gpu (micro-batches",
        ),
        ("kl_ctrl", "A key of that name exists as algorithm.kl_ctrl."),
    ],
)
def test_names_of_verl_are_answered_with_what_to_write(
    name: str, answer: str, tmp_path: Path
) -> None:
    """By `config explain` and by every command that reads the key, in a file or on
    the command line.
    """
    (tmp_path / "run.yaml").write_text("{}\n")
    if name in ("actor_rollout_ref.actor.optim.lr",):
        assert explain_setting(name).startswith("actor.optim.lr: ")
    else:
        with pytest.raises(
            ValueError, match=f"^{re.escape(name)} is no setting. {re.escape(answer)}"
        ):
            explain_setting(name)
    with pytest.raises(ConfigError, match=re.escape(answer)):
        read_run_config(tmp_path / "run.yaml", [f"{name}=1"])


def test_what_an_engine_that_is_not_there_is_answered_with(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rollout: {engine: vllm}\n")
    with pytest.raises(
        ConfigError, match=r"rollout.engine: unknown engine 'vllm'. Known: local, sglang"
    ):
        load_run_config(tmp_path / "run.yaml")


def test_the_launchers_number_of_processes_is_answered_with_its_variables() -> None:
    (problem,) = check_world_size(RunConfig(trainer=TrainerConfig(nnodes=2, n_gpus_per_node=4)), 2)
    assert (
        "started 2 processes" in problem
        and "NNODES=2 NPROC_PER_NODE=4 launch/torchrun.sh" in problem
    )


def test_a_setting_with_dashes_is_shown_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(tmp_path / "run.yaml"), "--actor.optim.lr=1e-3"])
    assert "a setting is given without dashes: actor.optim.lr=1e-3" in capsys.readouterr().err
