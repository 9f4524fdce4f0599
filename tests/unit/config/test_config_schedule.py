"""Rules of `schedule`: one message for each mistake, none for what may stand together."""

from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.schedule_rules import may_policy_lag
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import RunConfig, ScheduleConfig
from rlhf_megatron.config.show import render_config_yaml

ASYNCHRONOUS = "schedule.name=asynchronous"
STREAMING = "schedule.name=streaming"
CARRY = (
    "schedule.params.tail=carry_over",
    "schedule.params.max_lag=1",
    "schedule.params.oversampling=1.5",
)
CORRECTED = "algorithm.rollout_correction.preset=decoupled_token_is"
WITHOUT = "algorithm.rollout_correction.preset=disabled"
LAGS = (
    "trains on tokens of older policies, and nothing says what is made of them: by default their"
    " ratio starts at 1"
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule.name=synchronous",),
        (STREAMING,),
        (STREAMING, "schedule.params.tail=drop", "schedule.params.oversampling=1.25"),
        (STREAMING, "schedule.params.oversampling=1.25", "algorithm.filter_groups.enable=true"),
        (STREAMING, *CARRY, CORRECTED),
        ("schedule.name=one_step_off", CORRECTED),
        (ASYNCHRONOUS, "schedule.params.max_lag=4", CORRECTED),
        (ASYNCHRONOUS, "algorithm.rollout_correction.preset=bypass_ppo_clip"),
        (ASYNCHRONOUS, "algorithm.rollout_correction.rollout_is=sequence"),
        (ASYNCHRONOUS, WITHOUT),  # chosen, also as the default is
    ],
)
def test_what_may_stand_together(run_file: Path, settings: tuple[str, ...]) -> None:
    loaded = read_run_config(run_file, list(settings))
    assert validate_config(loaded) == []
    again = run_file.with_name("again.yaml")
    again.write_text(render_config_yaml(loaded.config))
    assert (
        read_run_config(again).config == loaded.config
        and validate_config(read_run_config(again)) == []
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((ASYNCHRONOUS,), f"schedule.name (asynchronous) {LAGS}"),
        (("schedule.name=one_step_off",), f"schedule.name (one_step_off) {LAGS}"),
        ((STREAMING, *CARRY), f"schedule.name (streaming) {LAGS}"),
        (
            (STREAMING, "rollout.colocated=true"),
            (
                "schedule.name (streaming) lets engines generate while the trainer works, but"
                " rollout.colocated (true)"
            ),
        ),
        (
            (ASYNCHRONOUS, CORRECTED, "trainer.deterministic=true"),
            "trainer.deterministic (true) cannot hold with schedule.name (asynchronous)",
        ),
        (
            (
                ASYNCHRONOUS,
                CORRECTED,
                "schedule.params.max_lag=20",
                "trainer.total_training_steps=20",
            ),
            (
                "schedule.params.max_lag (20) must be below trainer.total_training_steps (20): it"
                " would bound nothing"
            ),
        ),
        (
            (STREAMING, "schedule.params.oversampling=1.5"),
            (
                "schedule.params ({'oversampling': 1.5}) of streaming start groups that no step"
                " trains on: only algorithm.filter_groups.enable makes room"
            ),
        ),
    ],
)
def test_what_may_not(run_file: Path, settings: tuple[str, ...], message: str) -> None:
    (problem,) = validate_config(read_run_config(run_file, list(settings)))
    assert message in problem


def test_a_choice_of_the_file_is_one_also_below_the_command_line(run_file: Path) -> None:
    run_file.write_text(VALID + "schedule: {name: one_step_off}\n")
    assert len(validate_config(read_run_config(run_file))) == 1
    assert validate_config(read_run_config(run_file, [WITHOUT])) == []


@pytest.mark.parametrize(
    ("name", "params", "lags"),
    [
        ("synchronous", {}, False),
        ("streaming", {}, False),
        ("streaming", {"tail": "drop", "oversampling": 1.5}, False),
        ("streaming", {"tail": "carry_over", "max_lag": 1, "oversampling": 1.5}, True),
        ("one_step_off", {}, True),
        ("asynchronous", {"max_lag": 1}, True),
        ("asynchronus", {}, False),  # there is none of that name, which is all that is to be said
    ],
)
def test_who_may_train_on_old_tokens(name: str, params: dict[str, object], lags: bool) -> None:
    assert may_policy_lag(RunConfig(schedule=ScheduleConfig(name, params))) is lags


@pytest.mark.parametrize(
    ("odd", "count"),
    [("max_lag=many", 1), ("max_lag=true", 1), ("max_lag=-1", 1), ("late=drop", 0)],
)
def test_odd_parameters_are_told_once(run_file: Path, odd: str, count: int) -> None:
    assert (
        len(
            validate_config(
                read_run_config(run_file, [ASYNCHRONOUS, CORRECTED, f"schedule.params.{odd}"])
            )
        )
        == count
    )
