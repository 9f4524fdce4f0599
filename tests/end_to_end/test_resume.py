"""Runs that are killed and started again, against a run that was left alone: bit for bit the same,
nothing done twice.

Two steps are an epoch of the data, and a checkpoint falls on its end.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import greedy_score, write_config, write_rows
from forked_runs import Attempt, ForkServer, asked_seeds
from places import ROOT

from rlhf_megatron.api import Run
from rlhf_megatron.controller.recovery.checkpoint_export import find_exportable_weights
from rlhf_megatron.data.seeds import derive_seed

pytestmark = pytest.mark.dist

# In the order in which they are met; each costs one process.
KILLS = [
    "ckpt.before_commit:nth=1",  # of the warm-up: nothing is on disk yet, and the run begins anew
    "ckpt.after_rename:nth=1",  # the same one has its name, `latest` says nothing
    "loop.after_score:step=1",
    "evaluate.before:step=2",  # while step 2, the end of an epoch, is written
    "rollout.after_generate:step=4",
    "actor.after_optimizer_step:step=4",
    "sync.before_commit:step=4",
    "journal.before_write:step=5,nth=3",  # rewards are known, the samples are journalled
    "evaluate.before:step=5",
]


def make_config(directory: Path) -> Path:
    directory.mkdir()
    train = write_rows(directory / "train.jsonl", 8, seed=1)
    val = write_rows(directory / "val.jsonl", 20, seed=2)
    return write_config(
        directory, {"task": None, "train_files": [str(train)], "val_files": [str(val)]}
    )


def seeds_of(step: int) -> set[int]:
    """Of the 4 prompts x 4 samples of a step of the configuration's seed 1."""
    return {
        derive_seed(1, step, group, i) for group in range(4 * step - 4, 4 * step) for i in range(4)
    }


@pytest.fixture(scope="module")
def alone(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attempt]:
    """The run that nobody disturbs."""
    config = make_config(tmp_path_factory.mktemp("alone") / "run")
    attempt = server.train(config)
    assert attempt.code == 0, attempt.console
    seeds = asked_seeds(config)
    assert all(seeds[seed] == 1 for step in range(1, 6) for seed in seeds_of(step))
    return config, attempt


def copy_of(
    alone: tuple[Path, Attempt], directory: Path, *, without: tuple[str, ...]
) -> tuple[Path, Path]:
    """(configuration, run directory) of a copy of the run, less some of its files."""
    config, attempt = alone
    run_dir = directory / "runs" / "tiny"
    shutil.copytree(attempt.run_dir, run_dir)
    for name in without:
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = config.read_text().replace(str(config.parent / "runs"), str(directory / "runs"))
    (directory / "tiny.yaml").write_text(
        text.replace(str(config.parent / "transfer"), str(directory))
    )
    base = config.parent / yaml_extends(config)
    (directory / "tiny.yaml").write_text(
        (directory / "tiny.yaml").read_text().replace(yaml_extends(config), str(base))
    )
    return directory / "tiny.yaml", run_dir


def yaml_extends(config: Path) -> str:
    return next(
        line.split(": ")[1]
        for line in config.read_text().splitlines()
        if line.startswith("extends")
    )


def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_left_alone(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run")
    plan = "; ".join(f"kill@{point}" for point in KILLS)
    attempts = server.until_it_ends(config, faults=plan)
    last = attempts[-1]
    undisturbed = alone[1]
    assert last.code == 0, last.console
    fired = sorted(path.name for path in (tmp_path / "run" / "faults").iterdir())
    assert fired == sorted(f"fired{n}" for n in range(len(KILLS))), "every fault acted"
    assert [attempt.code for attempt in attempts[:-1]] == [-signal.SIGKILL] * len(KILLS)
    assert last.rows() == undisturbed.rows()
    assert last.weights() == undisturbed.weights()
    rng = "checkpoints/step_000005/rng/rank0.safetensors"
    assert (last.run_dir / rng).read_bytes() == (undisturbed.run_dir / rng).read_bytes()
    for name in ("samples.jsonl", "held_out_samples.jsonl", "mismatch.jsonl"):
        assert (last.run_dir / name).read_bytes() == (undisturbed.run_dir / name).read_bytes()
    steps = [start["resumed_from_step"] for start in last.starts()]
    assert (
        steps[:3] == [None, 0, 0]
        and steps[3:] == sorted(steps[3:])
        and set(steps[3:]) <= {0, 2, 4, 5}
    )
    summary = last.summary()
    assert (summary["num_attempts"], summary["resumed_from_step"], summary["steps"]) == (
        len(KILLS),
        steps[-1],
        5,
    )
    assert (tmp_path / "run" / "runs" / "tiny.1").is_dir(), "the attempt that left no checkpoint"
    same = (
        "accuracy_before",
        "accuracy_after",
        "reward_first",
        "reward_last",
        "log_prob_max_abs_diff",
    )
    assert all(summary[name] == undisturbed.summary()[name] for name in same)
    asked = asked_seeds(config)
    assert all(asked[seed] == 1 for step in range(1, 6) for seed in seeds_of(step)), (
        "nothing was generated twice"
    )
    assert not list((last.run_dir / "journal").iterdir())
    lines = [
        json.loads(line) for line in (last.run_dir / "attempts.jsonl").read_text().splitlines()
    ]
    assert (
        lines[-1]["kind"] == "end"
        and lines[-1]["reason"] == "complete"
        and lines[-2]["kind"] == "start"
    )


def test_groups_that_had_come_are_not_generated_again(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    config = make_config(tmp_path / "run")
    attempts = server.until_it_ends(config, faults="kill@rollout.mid_generate:step=3")
    assert [attempt.code for attempt in attempts] == [-signal.SIGKILL, 0], attempts[-1].console
    assert attempts[-1].rows() == alone[1].rows() and attempts[-1].weights() == alone[1].weights()
    asked = asked_seeds(config)
    once = [seed for seed in seeds_of(3) if asked[seed] == 1]
    assert len(once) >= 8, "at least the half that had come"
    assert all(asked[seed] == 1 for step in (1, 2, 4, 5) for seed in seeds_of(step))


def test_a_run_that_is_asked_to_stop_saves_the_step_that_is_whole(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    """In step 3 before its update, and in step 4 in the middle of it."""
    config = make_config(tmp_path / "run")
    plan = "term@loop.after_score:step=3; term@actor.before_optimizer_step:step=4"
    first = server.train(config, faults=plan)
    assert (
        first.code == 75
        and "SIGTERM to the controller; the state after step 2 is saved" in first.console
    )
    second = server.train(config, faults=plan)
    assert second.code == 75 and "the state after step 4 is saved" in second.console, second.console
    last = server.train(config, faults=plan)
    assert last.code == 0, last.console
    assert last.rows() == alone[1].rows() and last.weights() == alone[1].weights()
    assert [start["resumed_from_step"] for start in last.starts()] == [None, 2, 4]
    asked = asked_seeds(config)
    assert all(asked[seed] == 1 for step in range(1, 6) for seed in seeds_of(step))
    ends = [
        json.loads(line) for line in (last.run_dir / "attempts.jsonl").read_text().splitlines()
    ][1::2]
    assert [end["reason"].partition(":")[0] for end in ends] == ["stopped", "stopped", "complete"]


def test_a_complete_run_says_so_and_is_left_as_it_is(
    server: ForkServer, alone: tuple[Path, Attempt]
) -> None:
    config, attempt = alone
    before = {path: path.stat().st_mtime_ns for path in attempt.run_dir.rglob("*")}
    again = server.train(config)
    assert again.code == 0 and "is already complete: 5 steps were made" in again.console
    assert {path: path.stat().st_mtime_ns for path in attempt.run_dir.rglob("*")} == before


def test_a_finished_run_is_exported_with_the_score_that_it_had(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    config, attempt = alone
    out = Run(attempt.run_dir).export(tmp_path / "model")
    assert (out / "model.safetensors").read_bytes() == attempt.weights()
    assert (out / "config.json").read_bytes() == (
        attempt.run_dir / "hf" / "config.json"
    ).read_bytes()
    assert greedy_score(out, config.parent / "val.jsonl") == attempt.rows()[-1]["val/accuracy"]
    older = Run(attempt.run_dir).export(tmp_path / "older", step=4, dtype="bfloat16")
    assert (older / "model.safetensors").stat().st_size < 0.6 * len(attempt.weights())
    with pytest.raises(ValueError, match="has no checkpoint of step 3; there are 2, 4, 5"):
        Run(attempt.run_dir).export(tmp_path / "none", step=3)
    assert f"weights: {attempt.run_dir / 'hf'}" in attempt.console
    assert (
        f"state after step 5: {attempt.run_dir / 'checkpoints' / 'step_000005'}" in attempt.console
    )


def test_a_complete_run_that_is_asked_for_its_weights_writes_them(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    config, run_dir = copy_of(alone, tmp_path, without=("hf",))
    again = server.train(config)
    assert again.code == 0 and "is already complete" in again.console, again.console
    assert (run_dir / "hf" / "model.safetensors").read_bytes() == alone[1].weights()


def test_what_a_changed_configuration_does(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    config, run_dir = copy_of(alone, tmp_path, without=("summary.json", "checkpoints/step_000005"))
    refused = {
        "model.dtype": ("bfloat16", "model.dtype is bfloat16 and was float32"),
        "data.train_batch_size": (8, "data.train_batch_size (8) must be 4"),
        "data.shuffle": (False, "data.shuffle is false and was true"),
        "trainer.total_training_steps": (3, "nothing is left to do"),
    }
    for key, (value, said) in refused.items():
        attempt = server.train(config, {key: value})
        assert attempt.code == 1 and said in attempt.console, attempt.console
    changed = server.train(config, {"actor.optim.min_lr": 1e-4})
    assert changed.code == 0, changed.console
    start = changed.starts()[-1]
    assert start["resumed_from_step"] == 4 and start["changes"]["actor.optim.min_lr"] == [
        "0.0",
        "0.0001",
    ]
    assert "changed: actor.optim.min_lr 0.0 -> 0.0001, " in changed.console
    rows = changed.rows()
    undisturbed = alone[1].rows()
    # step 5 of 5 has a share of (1 + cos(5 pi / 6)) / 2 = 0.0669873 of 2e-4 - min_lr above min_lr
    rates = rows[-2].pop("actor/lr"), undisturbed[-2].pop("actor/lr")
    assert rates == pytest.approx((1.0669873e-4, 1.3397460e-5))
    assert rows[:-1] == undisturbed[:-1] and changed.weights() != alone[1].weights()
    superseded = sorted(path.name for path in (run_dir / "superseded" / "attempt_001").iterdir())
    assert superseded == [
        "held_out_samples.jsonl",
        "hf",
        "metrics.jsonl",
        "mismatch.jsonl",
        "samples.jsonl",
    ]
    moved = [
        json.loads(line)
        for line in (run_dir / "superseded/attempt_001/metrics.jsonl").read_text().splitlines()
    ]
    assert [(row["kind"], row["step"]) for row in moved] == [("step", 5), ("evaluation", 5)]
    further = server.train(config, {"trainer.total_training_steps": 6})
    assert further.code == 0 and further.summary()["steps"] == 6, further.console
    assert json.loads((run_dir / "superseded/attempt_002/summary.json").read_text())["steps"] == 5


def without_verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Health is judged by the steps of one run directory."""
    return [
        {key: value for key, value in row.items() if not key.startswith("health/")} for row in rows
    ]


def test_a_new_directory_from_a_checkpoint_of_another_run(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    config, run_dir = copy_of(alone, tmp_path, without=("summary.json",))
    from_path = {"trainer.resume_mode": "resume_path", "trainer.experiment_name": "branch"}
    source = {"trainer.resume_from_path": str(run_dir / "checkpoints" / "step_000004")}
    branch = server.train(config, {**from_path, **source})
    assert branch.code == 0, branch.console
    rows = branch.rows()
    undisturbed = alone[1].rows()
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("evaluation", 4),
        ("step", 5),
        ("evaluation", 5),
    ]
    assert without_verdicts(rows[-2:]) == without_verdicts(undisturbed[-2:])
    assert branch.weights() == alone[1].weights()
    source = {"trainer.resume_from_path": str(run_dir / "checkpoints" / "step_000005")}
    nothing = server.train(config, {**from_path, **source, "trainer.experiment_name": "other"})
    assert nothing.code == 1 and "nothing is left to do" in nothing.console


def test_a_broken_checkpoint_is_passed_by_and_none_that_is_good_is_an_error(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    """The journal's later steps belong to a history that is gone: they are not used."""
    config, run_dir = copy_of(
        alone, tmp_path, without=("summary.json", "hf", "checkpoints/step_000005")
    )
    flip(run_dir / "checkpoints" / "step_000004" / "run_state.batch")
    older = server.train(config)
    assert older.code == 0 and "step_000004 is not good" in older.console, older.console
    assert older.starts()[-1]["resumed_from_step"] == 2
    assert older.rows() == alone[1].rows() and older.weights() == alone[1].weights()
    (run_dir / "summary.json").unlink()
    for path in (run_dir / "checkpoints").glob("step_*"):
        flip(path / "run_state.batch")
    none = server.train(config)
    assert none.code == 1 and "none of them is good" in none.console
    fresh = server.train(config, None, "--fresh")
    assert fresh.code == 0 and "held a former run" in fresh.console
    assert fresh.weights() == alone[1].weights()


def test_critic_reference_and_kl_controller_go_on_too(server: ForkServer, tmp_path: Path) -> None:
    """PPO whose KL weight follows its target, after a warm-up that reference and critic start from.

    In step 1 the critic learns alone: the policy version stays.
    """
    settings = {
        "trainer.total_training_steps": 4,
        "trainer.critic_warmup": 1,
        "critic.num_ranks": 0,
        "critic.optim.lr": 1e-4,
        "algorithm.params": {"gamma": 1.0, "lam": 0.95},
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl": {
            "type": "adaptive",
            "kl_coef": 0.2,
            "target_kl": 1e-6,
            "horizon": 160,
        },
    }
    plan = "; ".join(
        f"kill@{point}"
        for point in (
            "loop.step_ends:step=1",
            "loop.after_advantages:step=3",
            "actor.after_optimizer_step:step=4",
        )
    )
    runs = []
    for name, faults in (("alone", ""), ("killed", plan)):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, base=ROOT / "configs" / "quickstart_ppo.yaml")
        attempts = server.until_it_ends(config, settings, faults=faults)
        assert attempts[-1].code == 0, attempts[-1].console
        runs.append(attempts)
    alone = runs[0][-1]
    killed = runs[1][-1]
    assert (len(runs[0]), len(runs[1])) == (1, 4)
    assert killed.rows() == alone.rows() and killed.weights() == alone.weights()
    critic = "hf_critic/model.safetensors"
    assert (killed.run_dir / critic).read_bytes() == (alone.run_dir / critic).read_bytes()
    find_exportable_weights(killed.run_dir, role="critic").write_hf_directory(tmp_path / "critic")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "critic" / name).read_bytes() == (
            killed.run_dir / "hf_critic" / name
        ).read_bytes()
    steps = [row for row in killed.rows() if row["kind"] == "step"]
    assert len({row["actor/reward_kl_penalty_coeff"] for row in steps}) == 4, (
        "the weight moves in every step"
    )
    assert [row["policy/version"] for row in steps] == [2, 3, 4, 5]
    reference = killed.run_dir / "checkpoints" / "step_000004" / "reference" / "model.safetensors"
    assert reference.is_file() and reference.read_bytes() != killed.weights()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
