"""docs/rewards.md says what is there: rewards, statuses, messages, examples that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from docs_tools import BLOCK, is_said, messages
from places import ROOT

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import REWARDS, RewardSample
from rlhf_megatron.rewards.service.reward_components import load_reward_components
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer

TEXT = (ROOT / "docs" / "rewards.md").read_text()


def test_every_reward_stands_once_in_the_table() -> None:
    cells = re.findall(r"^\| [\w ]+ \| (.+) \|$", TEXT.split("### What is read")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(REWARDS)


def test_quoted_messages_are_in_the_sources() -> None:
    quoted = [text for text in re.findall(r"`([^`\n]+)`", TEXT) if "…" in text]
    assert len(quoted) >= 3
    assert [message for message in quoted if not is_said(message)] == []


def test_statuses_are_in_the_sources() -> None:
    words = re.findall(r"`masked:([a-z_]+)`", TEXT)
    sources = messages()
    assert len(words) >= 6 and [word for word in words if word not in sources] == []


def test_the_composed_example_is_valid() -> None:
    example = next(
        yaml.safe_load(block)["reward"]
        for language, block in BLOCK.findall(TEXT)
        if language == "yaml"
    )
    components = load_reward_components(_config(example))
    assert [one.part_name for one in components.select_for_source("gsm8k")] == [
        "exact_match",
        "format",
        "overlong",
    ]


def test_the_function_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = [block for language, block in BLOCK.findall(TEXT) if language == "python"]
    (tmp_path / "my_rewards.py").write_text(code)
    [example] = [
        b for language, b in BLOCK.findall(TEXT) if language == "yaml" and "my_rewards" in b
    ]
    samples = [
        RewardSample("", text, "7", "s", "stop", 1, '{"difficulty": 3}') for text in (" 7", "8")
    ]
    with make_reward_scorer(_config(yaml.safe_load(example)["reward"]), tmp_path / "log") as scorer:
        assert [result.score for result in scorer(samples)] == pytest.approx([1.0, -0.3])


def _config(section: dict[str, object]) -> RewardConfig:
    from rlhf_megatron.config.type_conversion import build_params

    return build_params(RewardConfig, section, "reward")
