"""Rewards in whole runs: a user's function with a term beside it, and one that fails."""

from pathlib import Path

import pytest
import yaml
from end_to_end_tools import DP2, ONE_RANK, train, write_config

pytestmark = pytest.mark.dist

MINE = '''
def share(response, label, scale):
    """Some credit for each digit of the label."""
    print(f"scoring {response!r}")
    return {"score": scale * (response[:1] == label), "length": len(response)}


def broken(response, label):
    return {}[label]
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    path = write_config(tmp_path)
    settings = yaml.safe_load(path.read_text())
    settings["reward"] = {"name": "function", "num_workers": 2}
    path.write_text(yaml.safe_dump(settings))
    return path


def reward(function: str, **params: object) -> dict[str, object]:
    return {"reward.params": {"path": f"mine.py:{function}", **params}}


def test_a_run_with_a_function_of_ones_own(config: Path) -> None:
    """The mean reward of a step is the sum of its parts; what the function prints has a file."""
    terms = [{"name": "overlong", "weight": 0.5, "params": {"max_len": 4, "buffer": 2}}]
    settings = ONE_RANK | reward("share", kwargs={"scale": 2.0}) | {"reward.terms": terms}
    run = train(config, settings)
    assert run.exit_code == 0, run.console
    steps = run.rows("step")
    assert len(steps) == 2
    for row in steps:
        whole = row["reward/part/function"] + 0.5 * row["reward/part/overlong"]
        assert (
            row["critic/rewards/mean"] == pytest.approx(whole, abs=1e-5)
            and row["reward/part/overlong"] <= 0
        )
        assert 0 < row["reward/part/function:length"] <= 4
        assert row["reward/status/ok"] == 1.0
    assert "scoring '" in (run.run_dir / "rewards.log").read_text()
    assert run.left_over() == []


def test_a_run_whose_reward_fails_stops(config: Path) -> None:
    run = train(config, DP2 | reward("broken"))
    assert run.exit_code == 1, run.console
    console = " ".join(run.console.split())
    assert (
        "rewards failed (100.0%), more than reward.max_error_rate (0.1), and the policy is"
        " not to blame"
    ) in console
    assert "Most of them: masked:KeyError" in console and "return {}[label]" in console
    assert run.left_over() == []


def test_a_function_that_is_not_there_is_told_before_anything_is_started(config: Path) -> None:
    run = train(config, ONE_RANK | reward("absent"))
    assert run.exit_code == 2 and not run.run_dir.exists()
    assert "the module has no 'absent'; its functions are share, broken." in run.console
    assert "mine.py:absent'" in run.console
