"""Whole runs that began with an earlier version of the package: resumed, they end as they would
have ended there.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end_tools import ONE_RANK, train, write_config, write_rows, write_sections
from forked_runs import SETTINGS, Attempt, ForkServer
from older_checkpoints import remove_settings
from places import MODEL, ROOT

pytestmark = pytest.mark.dist

KEY = "actor.optim.lr_decay_ends"
STAYS = "actor.optim.lr_decay_ends stays at_last_step because "
SFT = {"trainer.total_training_steps": 4, "actor.optim.lr_decay_style": "linear"}
# SFT with the rate 1e-3
FORMER_RATES = [7.5e-4, 5e-4, 2.5e-4, 0.0]
RATES = [8e-4, 6e-4, 4e-4, 2e-4]


def write_sft_config(directory: Path) -> Path:
    """Four steps of 4 samples."""
    directory.mkdir()
    draw = random.Random(1)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(16)]
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in pairs]
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "extends": str(ROOT / "configs" / "quickstart_sft.yaml"),
        "model": {"path": str(MODEL), "init_seed": 1},
        "data": {
            "task": None,
            "train_batch_size": 4,
            "train_files": [str(path)],
            "val_files": [str(path)],
        },
        "sft": {"max_length": 12},
        "actor": {"ppo_max_token_len_per_gpu": 24, "optim": {"lr": 1e-3, "lr_warmup_steps": 0}},
        "trainer": {
            "experiment_name": "tiny",
            "default_local_dir": str(directory / "runs"),
            "device": "cpu",
        },
    }
    return write_sections(directory, settings, {})


def list_rates(rows: list[dict[str, Any]]) -> list[float]:
    return [row["actor/lr"] for row in rows if row["kind"] == "step"]


@pytest.fixture(scope="module")
def former(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    """The run as the earlier version would have made it, from its first step to its last."""
    config = write_sft_config(tmp_path_factory.mktemp("former") / "run")
    attempt = server.train(config, {**SFT, KEY: "at_last_step"}, command="sft")
    assert attempt.code == 0, attempt.console
    assert list_rates(attempt.rows()) == pytest.approx(FORMER_RATES)
    return attempt


def begin_older_run(server: ForkServer, directory: Path) -> Path:
    """The configuration of a run that the earlier version has begun, and that has a checkpoint of
    its second step.
    """
    config = write_sft_config(directory)
    settings = {**SFT, KEY: "at_last_step"}
    attempt = server.train(config, settings, faults="kill@ckpt.after_commit:nth=1", command="sft")
    assert attempt.code == -9, attempt.console
    remove_settings(attempt.run_dir / "checkpoints" / "step_000002", KEY)
    return config


def test_a_new_run_trains_in_each_step(server: ForkServer, tmp_path: Path) -> None:
    config = write_sft_config(tmp_path / "run")
    attempt = server.train(config, SFT, command="sft")
    assert list_rates(attempt.rows()) == pytest.approx(RATES)
    losses = [row["val/loss"] for row in attempt.rows() if row["kind"] == "evaluation"]
    assert len(losses) == 3 and len(set(losses)) == 3
    assert "stays" not in attempt.console


def test_a_run_of_one_step_trains(server: ForkServer, tmp_path: Path) -> None:
    only_step = {"trainer.total_training_steps": 1, "trainer.save_freq": 1, "trainer.test_freq": 0}
    settings = {**SFT, **only_step}
    attempt = server.train(write_sft_config(tmp_path / "run"), settings, command="sft")
    assert attempt.code == 0, attempt.console
    assert list_rates(attempt.rows()) == pytest.approx([5e-4])
    losses = [row["val/loss"] for row in attempt.rows() if row["kind"] == "evaluation"]
    assert len(losses) == 2 and losses[0] != losses[1]


def test_an_older_run_ends_as_it_would_have(
    server: ForkServer, former: Attempt, tmp_path: Path
) -> None:
    config = begin_older_run(server, tmp_path / "run")
    resumed = server.train(config, SFT, command="sft")
    assert resumed.code == 0, resumed.console
    assert STAYS in resumed.console and f"set {KEY}=after_last_step" in resumed.console
    assert resumed.console.count("stays") == 1
    assert resumed.rows() == former.rows()
    assert resumed.weights() == former.weights()
    assert not resumed.starts()[-1].get("changes")
    for written in (resumed.run_dir, resumed.run_dir / "checkpoints" / "step_000004"):
        settings = yaml.safe_load((written / "config.yaml").read_text())
        assert settings["actor"]["optim"]["lr_decay_ends"] == "at_last_step"
    # more steps stretch the decay of the former formula: step 5 of 8 is at 5/8
    longer = server.train(config, {**SFT, "trainer.total_training_steps": 8}, command="sft")
    assert longer.code == 0 and STAYS in longer.console, longer.console
    assert list_rates(longer.rows())[4:] == pytest.approx([3.75e-4, 2.5e-4, 1.25e-4, 0.0])


def test_what_the_user_sets_is_a_change(server: ForkServer, tmp_path: Path) -> None:
    config = begin_older_run(server, tmp_path / "run")
    resumed = server.train(config, {**SFT, KEY: "after_last_step"}, command="sft")
    assert resumed.code == 0, resumed.console
    assert "stays" not in resumed.console
    assert resumed.starts()[-1]["changes"][KEY] == ["at_last_step", "after_last_step"]
    assert list_rates(resumed.rows()) == pytest.approx([*FORMER_RATES[:2], *RATES[2:]])


def test_a_run_from_an_older_checkpoint(
    server: ForkServer, former: Attempt, tmp_path: Path
) -> None:
    config = begin_older_run(server, tmp_path / "run")
    settings = {
        **SFT,
        "trainer.experiment_name": "other",
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(tmp_path / "run/runs/tiny/checkpoints/step_000002"),
    }
    other = server.train(config, settings, command="sft")
    assert other.code == 0 and STAYS in other.console, other.console
    assert list_rates(other.rows()) == pytest.approx(FORMER_RATES[2:])
    assert other.weights() == former.weights()


def test_an_older_run_with_rollouts(server: ForkServer, tmp_path: Path) -> None:
    """Two of four steps, one optimizer step each, after a warm-up."""
    (tmp_path / "run").mkdir()
    files = {
        name: [str(write_rows(tmp_path / "run" / f"{name}.jsonl", 8, seed=1))]
        for name in ("train_files", "val_files")
    }
    config = write_config(tmp_path / "run", {"task": None, **files})
    settings = {"trainer.total_training_steps": 4, "actor.optim.lr": 1e-3}
    settings |= {"actor.optim.lr_decay_style": "linear"}
    begun = server.train(
        config, {**settings, KEY: "at_last_step"}, faults="kill@ckpt.after_commit:nth=2"
    )
    assert begun.code == -9, begun.console
    remove_settings(begun.run_dir / "checkpoints" / "step_000002", KEY)
    resumed = server.train(config, settings)
    assert resumed.code == 0 and STAYS in resumed.console, resumed.console
    assert list_rates(resumed.rows()) == pytest.approx(FORMER_RATES)


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["torchrun", "ray"])
def test_all_launchers_keep_it(
    server: ForkServer, former: Attempt, runtime: str, tmp_path: Path
) -> None:
    config = begin_older_run(server, tmp_path / "run")
    settings = {**SETTINGS, **SFT, **ONE_RANK, "trainer.runtime": runtime}
    resumed = train(config, settings, launcher=(sys.executable, "-m", "rlhf_megatron", "sft"))
    assert resumed.exit_code == 0 and resumed.console.count(STAYS) == 1, resumed.console
    assert list_rates(resumed.rows("step")) == pytest.approx(FORMER_RATES)
    assert (resumed.run_dir / "hf" / "model.safetensors").read_bytes() == former.weights()
