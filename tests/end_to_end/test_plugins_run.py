"""Every example of docs/extending.md, in a folder outside of the repository, trains a
step in one run.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from end_to_end_tools import DP2, train, write_config
from places import MODEL, ROOT

EXAMPLE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {
    *(
        "estimator",
        "loss",
        "aggregation",
        "reward",
        "family",
        "engine",
        "schedule",
        "balancer",
        "logger",
        "task",
        "environment",  # registered, but not used: its samples are no single answers
    ),
}
NAMED = {
    "algorithm.adv_estimator": "mean_of_step",
    "algorithm.params": {"scale": 0.5},
    "actor.policy_loss": {"loss_mode": "soft_clip", "params": {}},
    "actor.loss_agg_mode": "by_root_length",
    "reward.name": "digits",
    "reward.params": {},
    "rollout.engine": "counting",
    "rollout.router": "round_robin",
    "rollout.num_engines": 2,
    "schedule.name": "one_batch",
    "trainer.logger": ["jsonl", "lines"],
    "trainer.total_training_steps": 1,
}


def examples(directory: Path) -> list[str]:
    """The files of the page, written below `directory`."""
    directory.mkdir()
    found = EXAMPLE.findall((ROOT / "docs/extending.md").read_text())
    for name, text in found:
        (directory / name).write_text(text)
    return [name for name, _ in found]


def seed_oss(directory: Path) -> Path:
    """The tests' model, with a config.json of another family."""
    shutil.copytree(MODEL, directory)
    path = directory / "config.json"
    biases = {"attention_bias": False, "attention_out_bias": False, "mlp_bias": False}
    config = json.loads(path.read_text()) | biases | {"model_type": "seed_oss"}
    path.write_text(json.dumps(config | {"architectures": ["SeedOssForCausalLM"]}))
    return directory


@pytest.mark.dist
def test_one_plugin_of_each_kind_trains_a_step(tmp_path: Path) -> None:
    names = examples(tmp_path / "parts")
    assert {name.removesuffix(".py") for name in names} == KINDS
    config = write_config(tmp_path, {"task": "counting"})
    config.write_text(
        config.read_text() + f"plugins: [{', '.join(f'parts/{name}' for name in names)}]\n"
    )
    settings = {
        **DP2,
        **NAMED,
        "model.path": str(seed_oss(tmp_path / "model")),
        "trainer.save_freq": 1,
    }
    run = train(config, settings)
    assert run.exit_code == 0, run.console[-3000:]
    (row,) = run.rows("step")
    assert row["step"] == 1 and "actor/ppo_kl" in row and 0 < row["critic/rewards/mean"] <= 1
    assert "step 1" in (run.run_dir / "lines.txt").read_text()
    assert run.left_over() == []

    (tmp_path / "parts/logger.py").write_text(
        (tmp_path / "parts/logger.py").read_text() + "\n# changed\n"
    )
    again = train(config, {**settings, "trainer.total_training_steps": 2})
    assert again.exit_code == 0, again.console[-3000:]
    starts = [
        json.loads(line) for line in (again.run_dir / "attempts.jsonl").read_text().splitlines()
    ]
    (changes,) = [start["changes"] for start in starts if start.get("changes")]
    before, now = changes[f"source of {tmp_path / 'parts/logger.py'}"]
    assert before != now and len(before) == len(now) == 16
