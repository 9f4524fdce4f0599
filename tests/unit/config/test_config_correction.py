"""Rules of `algorithm.rollout_correction`: one message for each mistake, none for what may
stand together.
"""

from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rollout_correction_rules import (
    PRESETS,
    parse_filter_bounds,
    parse_importance_bounds,
)
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.show import render_config_yaml

SECTION = "algorithm.rollout_correction"
REINFORCE = "actor.policy_loss.loss_mode=reinforce"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


def over(*settings: str) -> list[str]:
    return [
        setting if "." in setting.partition("=")[0] else f"{SECTION}.{setting}"
        for setting in settings
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_may_stand(run_file: Path, preset: str) -> None:
    loss = [REINFORCE] if preset.startswith("bypass_pg") else []
    loaded = read_run_config(run_file, over(f"preset={preset}", *loss))
    assert validate_config(loaded) == []
    again = run_file.with_name("again.yaml")
    again.write_text(render_config_yaml(loaded.config))
    assert (
        read_run_config(again).config == loaded.config
        and validate_config(read_run_config(again)) == []
    )


@pytest.mark.parametrize(
    "settings",
    [
        over("rollout_is=token"),
        over("rollout_is=sequence", "rollout_is_threshold=3", "rollout_is_batch_normalize=true"),
        over("rollout_is=token", "rollout_is_threshold=0.5_5"),
        over(
            "rollout_rs=[token_k1, seq_max_k3]",
            "rollout_rs_threshold=[2, 1e-1]",
            "rollout_token_veto_threshold=1e-4",
        ),
        over("preset=decoupled_k3_rs_token_tis", "rollout_is_threshold=4.0"),
        over("mode=bypass"),
        over(
            "mode=bypass",
            "loss_type=reinforce",
            REINFORCE,
            "rollout_is=token",
            "rollout_is_batch_normalize=true",
        ),
        over("preset=bypass_ppo_clip", "algorithm.use_kl_in_reward=true"),
        over("rollout_is=token", REINFORCE),  # decoupled: any loss
    ],
)
def test_what_may_stand_together(run_file: Path, settings: list[str]) -> None:
    assert validate_config(read_run_config(run_file, settings)) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["preset=decoupled_token_iss"],
         f"{SECTION}.preset (decoupled_token_iss) must be one of disabled, decoupled_token_is, "),
        (["rollout_is_threshold=3.0"],
         (
             f"{SECTION}.rollout_is_threshold (3.0) would be ignored because"
             f" {SECTION}.rollout_is is null; remove {SECTION}.rollout_is_threshold, or set"
             f" {SECTION}.rollout_is to token or sequence."
         )),
        (["rollout_is_batch_normalize=true"],
         (
             f"{SECTION}.rollout_is_batch_normalize (true) would be ignored because"
             f" {SECTION}.rollout_is is null"
         )),
        (["rollout_rs_threshold=[2.0]"],
         (
             f"{SECTION}.rollout_rs_threshold (['2.0']) would be ignored because"
             f" {SECTION}.rollout_rs is null; remove {SECTION}.rollout_rs_threshold, or name"
             f" filters in {SECTION}.rollout_rs."
         )),
        (["rollout_is=token", "rollout_is_threshold=5_0.5"],
         (
             f"{SECTION}.rollout_is_threshold (5_0.5) must be one number above 0, where weights are"
             " cut, or LOW_HIGH, outside of which they are 0; use 2.0 or 0.5_5.0."
         )),
        (["rollout_is=token", "rollout_is_threshold=0"],
         f"{SECTION}.rollout_is_threshold (0) must be one number above 0"),
        (["rollout_rs=[token_k4]", "rollout_rs_threshold=[2.0]"],
         f"{SECTION}.rollout_rs (token_k4) must be among token_k1, token_k2,"),
        (["rollout_rs=[seq_max_k1]", "rollout_rs_threshold=[2.0]"],
         f"{SECTION}.rollout_rs (seq_max_k1) must be among"),
        (["rollout_rs=[token_k2, token_k2]", "rollout_rs_threshold=[2.0, 3.0]"],
         f"{SECTION}.rollout_rs (token_k2, token_k2) must differ; name each filter once."),
        (["rollout_rs=[token_k1, token_k2]", "rollout_rs_threshold=[2.0]"],
         (
             f"{SECTION}.rollout_rs_threshold (1 entries) must have one entry for each of"
             " the 2 filters"
         )),
        (["preset=decoupled_geo_rs", "rollout_rs=[token_k1]"],
         (
             f"{SECTION}.rollout_rs_threshold (0 entries) must have one entry for each of"
             " the 1 filters"
         )),
        (["rollout_rs=[token_k1]", "rollout_rs_threshold=[0.5]"],
         (
             f"{SECTION}.rollout_rs_threshold (0.5) of token_k1 must be bounds of the ratio,"
             " LOW_HIGH with LOW below HIGH, or one number x above 1 for 1/x_x; use one such"
             " as 0.5_2.0."
         )),
        (["rollout_rs=[seq_mean_k3]", "rollout_rs_threshold=['0.1_0.2']"],
         (
             f"{SECTION}.rollout_rs_threshold (0.1_0.2) of seq_mean_k3 must be one number above 0,"
             " an upper bound"
         )),
        (["rollout_token_veto_threshold=1.0"],
         f"{SECTION}.rollout_token_veto_threshold (1.0) must be above 0 and below 1"),
        (["rollout_token_veto_threshold=0"],
         f"{SECTION}.rollout_token_veto_threshold (0.0) must be above 0 and below 1"),
        (["loss_type=reinforce"],
         (
             f"{SECTION}.loss_type (reinforce) would be ignored because {SECTION}.mode is"
             " decoupled, where any actor.policy_loss.loss_mode may stand; remove"
             f" {SECTION}.loss_type, or set mode: bypass."
         )),
        (["preset=bypass_pg_is"],
         (
             "actor.policy_loss.loss_mode (ppo_clip) must be reinforce, which"
             f" {SECTION}.loss_type asks for (preset bypass_pg_is); set"
             " actor.policy_loss.loss_mode to that loss, or use mode: decoupled, where any"
             " loss may stand."
         )),
        (["mode=bypass", "actor.policy_loss.loss_mode=gpg"],
         f"actor.policy_loss.loss_mode (gpg) must be ppo_clip, which {SECTION}.loss_type asks for"),
        (["mode=bypass", "rollout_is=token"],
         (
             f"{SECTION}.rollout_is (token) must be null with {SECTION}.mode bypass and"
             f" {SECTION}.loss_type ppo_clip, whose ratio is already that of policy and engine:"
             f" it would count twice; remove {SECTION}.rollout_is, or use loss_type: reinforce."
         )),
    ],
)  # fmt: skip
def test_a_mistake_is_one_problem(run_file: Path, settings: list[str], expected: str) -> None:
    found = validate_config(read_run_config(run_file, over(*settings)))
    assert len(found) == 1 and found[0].startswith(expected), found


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-2", "nan", "inf", "1_2_3", "2_1", "0_2", "1e999", "1_1e999", "2_2", "_"],
)
def test_texts_that_are_no_bounds(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_importance_bounds(text)
    for name in ("token_k1", "seq_max_k2"):
        with pytest.raises(ValueError, match="must be"):
            parse_filter_bounds(name, text)


def test_texts_that_are() -> None:
    assert parse_importance_bounds("2") == (None, 2.0) and parse_importance_bounds(
        " 0.5_5.0 ".strip()
    ) == (0.5, 5.0)
    assert parse_filter_bounds("token_k1", "0.5_5.0") == (0.5, 5.0) and parse_filter_bounds(
        "seq_sum_k1", "4"
    ) == (0.25, 4.0)
    assert parse_filter_bounds("seq_mean_k3", "1e-2") == (None, 0.01)


def test_verls_names_lead_here(run_file: Path) -> None:
    with pytest.raises(ValueError, match=rf"Here it is {SECTION}.mode") as error:
        read_run_config(run_file, over("bypass_mode=true"))
    assert "bypass where it is true" in str(error.value)
