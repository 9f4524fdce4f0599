"""The rules of the section `reward`: sources, weights, lengths, settings that nothing reads."""

from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.rewards.service.reward_scorer import check_sources_exist

SOURCES = VALID.replace(
    "task: addition",
    "sources: [{name: add, task: few_shot_addition}, {name: mul, task: few_shot_addition}]",
)
FORMAT = "{name: format, params: {pattern: x}}"


@pytest.fixture
def problems(tmp_path: Path):
    """What is wrong with a base file and overrides."""

    def of(base: str, *overrides: str) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_text(base)
        return validate_config(read_run_config(path, list(overrides)))

    return of


@pytest.mark.parametrize(
    "overrides",
    [
        [f"reward.by_source={{add: {FORMAT}}}"],
        ["reward.name=math_verify", "reward.num_workers=2", "reward.timeout_s=1"],
        ["reward.params={pattern: '#### (.*)'}", "reward.num_workers=2"],
        ["reward.terms=[{name: function, params: {path: 'a:b'}}]", "reward.num_workers=2"],
        ["reward.terms=[{name: overlong, weight: 0, params: {max_len: 4, buffer: 1}}]"],
    ],
)
def test_valid_rewards(problems, overrides: list[str]) -> None:
    assert problems(SOURCES, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"reward.by_source={{ad: {FORMAT}}}"],
            (
                "reward.by_source has a reward for 'ad', but the data sources of this run are"
                " 'add', 'mul'; did you mean 'add'?"
            ),
        ),
        (
            ["reward.name=code", "reward.timeout_s=2"],
            (
                "reward.timeout_s (2) ends a sample before code ends a test of 6 s; raise it to"
                " what all tests of a sample may take, 60 for instance."
            ),
        ),
        ([f"reward.by_source={{other: {FORMAT}}}"], "are 'add', 'mul'; rename or remove 'other'."),
        (
            [f"reward.by_source={{add: {FORMAT}, mul: {FORMAT}}}", "reward.name=math_verify"],
            "reward.name (math_verify) would be ignored because reward.by_source is",
        ),
        (
            ["reward.num_workers=2"],
            (
                "reward.num_workers (2) would be ignored because reward.name is exact_match;"
                " remove reward.num_workers, or name a reward that runs in a process of its"
                " own, such as math_verify or function."
            ),
        ),
        (
            [
                "reward.timeout_s=2",
                "reward.terms=[{name: overlong, params: {max_len: 4, buffer: 1}}]",
            ],
            "reward.timeout_s (2.0) would be ignored",
        ),
        (
            ["reward.terms=[{name: character_share, weight: .inf}]"],
            (
                "reward.terms[0].weight (inf) must be at most 1000000.0: it would drown everything"
                " else in float32"
            ),
        ),
        (
            ["reward.by_source={add: {name: exact_match, weight: .inf}}"],
            "reward.by_source.add.weight (inf) must be at most 1000000.0",
        ),
        (
            ["reward.terms=[{name: overlong, params: {max_len: 8, buffer: 4}}]"],
            (
                "reward.terms[0]: overlong acts on responses from 4 tokens on, but none has more"
                " than data.max_response_length (4); lower its parameters."
            ),
        ),
    ],
)
def test_rules(problems, overrides: list[str], expected: str) -> None:
    [problem] = problems(SOURCES, *overrides)
    assert expected in problem


def test_a_later_layer_may_switch_processes_off(problems) -> None:
    base = f"{SOURCES}\nreward: {{name: math_verify, timeout_s: 1.0}}\n"
    assert problems(base) == [] and problems(base, "reward.name=exact_match") == []


def test_sources_that_are_known_once_the_data_is_read() -> None:
    config = RewardConfig(by_source={"gsm8k": RewardTermConfig("exact_match")})
    check_sources_exist(config, ["gsm8k", "math"])
    with pytest.raises(
        ConfigError,
        match="has a reward for 'gsm8k', but the data sources of this run are 'gsm_8k'; did",
    ):
        check_sources_exist(config, ["gsm_8k"])
