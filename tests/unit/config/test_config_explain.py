"""`config explain`, and what is answered to the names that users of other trainers type."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.explain import explain
from rlhf_megatron.config.keys import leaves
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.verl_names import ELSEWHERE, suggest

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_a_setting_with_its_value_and_origin() -> None:
    text = explain("actor_rollout_ref.actor.optim.lr", read_run_config(QUICKSTART, ["trainer.seed=9"]))
    for line in ("actor.optim.lr: peak learning rate", "type: number, at least 0", "default: 1e-06", "value: 0.0002 ("):
        assert f"\n{line}" in f"\n{text}"
    assert "quickstart.yaml:" in text and "verl: actor_rollout_ref.actor.optim.lr" in text
    assert "value: 9 (command line)" in explain("trainer.seed", read_run_config(QUICKSTART, ["trainer.seed=9"]))


def test_settings_that_a_rule_holds_together_are_named() -> None:
    text = explain("actor.use_kl_loss")
    assert "goes with: " in text and "actor.kl_loss_coef" in text.partition("goes with: ")[2]
    assert "actor.ppo_mini_batch_size" in explain("actor.mini_batch_size")


def test_every_setting_can_be_explained() -> None:
    for leaf in leaves(RunConfig):
        text = explain(leaf.key)
        assert text.startswith(f"{leaf.key}: ") and "\ntype: " in text and "\ndefault: " in text
    assert explain("rollout").startswith("rollout is a section:\nrollout.engine: ")


def test_what_other_trainers_call_it() -> None:
    known = {leaf.key for leaf in leaves(RunConfig)}
    for name, here in ELSEWHERE.items():
        assert here.partition(" ")[0] in known or here.startswith("a command: ")
        assert suggest(name).text == suggest(f"trainer.{name}").text == f"Here it is {here}."
    with pytest.raises(ValueError, match=r"learning_rate is no setting. Here it is actor.optim.lr."):
        explain("learning_rate")


def test_a_setting_with_dashes_is_shown_without(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(tmp_path / "run.yaml"), "--actor.optim.lr=1e-3"])
    assert "a setting is given without dashes: actor.optim.lr=1e-3" in capsys.readouterr().err
