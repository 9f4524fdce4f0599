"""Rules of the section `algorithm`: one message for each mistake,
none for what may stand together.
"""

from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.algorithms import kl_in_reward
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.algorithm_rules import MAX_ERROR
from rlhf_megatron.config.rules.validate import validate_config

KL = "algorithm.use_kl_in_reward=true"
ADAPTIVE = "algorithm.kl_ctrl.type=adaptive"
DRAWS = "algorithm.pf_ppo.enable=true"
FILTER = "algorithm.filter_groups.enable=true"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


# also with the group estimator of the sample run: its rewards become sums of token rewards
@pytest.mark.parametrize(
    "overrides",
    [
        [KL],
        [KL, "algorithm.kl_penalty=abs", "algorithm.kl_ctrl.kl_coef=0.1"],
        [KL, ADAPTIVE, "algorithm.kl_ctrl.target_kl=6", "algorithm.kl_ctrl.horizon=103"],
        [KL, "actor.use_kl_loss=true"],  # both at once
        [
            FILTER,
            "algorithm.filter_groups.metric=exact_match",
            "algorithm.filter_groups.max_num_gen_batches=3",
        ],
        [DRAWS, "algorithm.pf_ppo.weight_pow=0.5"],
        [DRAWS, "algorithm.pf_ppo.reweight_method=max_min"],
    ],
)
def test_what_may_stand_together(run_file: Path, overrides: list[str]) -> None:
    assert validate_config(read_run_config(run_file, overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.kl_ctrl.kl_coef=0.001"],
         (
             "algorithm.kl_ctrl.kl_coef (0.001) would be ignored because"
             " algorithm.use_kl_in_reward is false; remove algorithm.kl_ctrl.kl_coef, or set"
             " algorithm.use_kl_in_reward to true."
         )),
        (["algorithm.kl_penalty=k3"],
         "algorithm.kl_penalty (k3) would be ignored because algorithm.use_kl_in_reward is false"),
        (["algorithm.kl_ctrl.target_kl=6"],
         (
             "algorithm.kl_ctrl.target_kl (6.0) would be ignored because"
             " algorithm.use_kl_in_reward is false"
         )),
        ([KL, "algorithm.kl_ctrl.target_kl=6"],
         (
             "algorithm.kl_ctrl.target_kl (6.0) would be ignored because"
             " algorithm.kl_ctrl.type is fixed; remove algorithm.kl_ctrl.target_kl, or set"
             " algorithm.kl_ctrl.type to adaptive."
         )),
        ([KL, "algorithm.kl_ctrl.horizon=6"],
         "algorithm.kl_ctrl.horizon (6) would be ignored because algorithm.kl_ctrl.type is fixed"),
        ([KL, "algorithm.kl_ctrl.kl_coef=0"],
         (
             "algorithm.kl_ctrl.kl_coef (0) must be above 0 with algorithm.use_kl_in_reward, or the"
             " reference is run for nothing"
         )),
        ([KL, ADAPTIVE, "algorithm.kl_ctrl.kl_coef=0"],
         "algorithm.kl_ctrl.kl_coef (0) must be above 0"),
        ([KL, ADAPTIVE, "algorithm.kl_ctrl.horizon=102"],
         (
             "algorithm.kl_ctrl.horizon (102 samples) must be above 0.2 x the samples of a step"
             " (data.train_batch_size x rollout.n = 32 x 16 = 512), or one step can turn the sign"
             " of the KL term; use 5120."
         )),
        (["algorithm.filter_groups.metric=exact_match"],
         (
             "algorithm.filter_groups.metric (exact_match) would be ignored because"
             " algorithm.filter_groups.enable is false; remove algorithm.filter_groups.metric,"
             " or set algorithm.filter_groups.enable to true."
         )),
        (["algorithm.filter_groups.max_num_gen_batches=3"],
         (
             "algorithm.filter_groups.max_num_gen_batches (3) would be ignored because"
             " algorithm.filter_groups.enable is false"
         )),
        ([FILTER, "algorithm.filter_groups.metric=exact_mach"],
         (
             "algorithm.filter_groups.metric ('exact_mach') must be one of 'main_reward', 'reward',"
             " 'exact_match'; did you mean 'exact_match'?"
         )),
        ([FILTER, "algorithm.filter_groups.metric=x"],
         (
             "algorithm.filter_groups.metric ('x') must be one of 'main_reward', 'reward',"
             " 'exact_match'; name one of them."
         )),
        ([FILTER, "algorithm.filter_groups.max_num_gen_batches=0"],
         "algorithm.filter_groups.max_num_gen_batches (0) must be at least 1; the default is 10."),
        ([FILTER, "rollout.n=1", "actor.mini_batch_size=32", "algorithm.adv_estimator=remax"],
         "rollout.n (1) must be at least 2 with algorithm.filter_groups.enable"),
        (["algorithm.pf_ppo.weight_pow=3"],
         (
             "algorithm.pf_ppo.weight_pow (3.0) would be ignored because"
             " algorithm.pf_ppo.enable is false; remove algorithm.pf_ppo.weight_pow, or set"
             " algorithm.pf_ppo.enable to true."
         )),
        (["algorithm.pf_ppo.reweight_method=max_min"],
         (
             "algorithm.pf_ppo.reweight_method (max_min) would be ignored because"
             " algorithm.pf_ppo.enable is false"
         )),
        ([DRAWS, "algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.weight_pow=3"],
         (
             "algorithm.pf_ppo.weight_pow (3.0) would be ignored because"
             " algorithm.pf_ppo.reweight_method is max_min; remove"
             " algorithm.pf_ppo.weight_pow, or set algorithm.pf_ppo.reweight_method to pow."
         )),
        ([DRAWS, "algorithm.pf_ppo.weight_pow=-1"],
         "algorithm.pf_ppo.weight_pow (-1.0) must be at least 0; the default is 2.0."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_problem(run_file: Path, overrides: list[str], expected: str) -> None:
    found = validate_config(read_run_config(run_file, overrides))
    assert len(found) == 1 and found[0].startswith(expected), found


def test_the_command_line_may_switch_off_what_a_file_sets_up(run_file: Path) -> None:
    with run_file.open("a") as file:
        file.write(
            "algorithm: {use_kl_in_reward: true, kl_ctrl: {type: adaptive, target_kl: 3,"
            " horizon: 9999}}\n"
        )
    assert validate_config(read_run_config(run_file)) == []
    assert validate_config(read_run_config(run_file, ["algorithm.use_kl_in_reward=false"])) == []
    assert validate_config(read_run_config(run_file, ["algorithm.kl_ctrl.type=fixed"])) == []


def test_the_rule_of_the_horizon_is_that_of_the_controller() -> None:
    assert MAX_ERROR == kl_in_reward.MAX_RELATIVE_ERROR
    for horizon, is_good in ((103, True), (102, False)):
        controller = kl_in_reward.KLController("adaptive", 0.1, 1.0, horizon)
        try:
            controller.update(0.0, 512)
        except ValueError:
            assert not is_good
        else:
            assert is_good and controller.kl_coef > 0
