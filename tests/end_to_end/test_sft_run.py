"""`rlhf-megatron sft`: whole runs on documents and pairs, killed and resumed, in other layouts,
under all launchers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import ONE_RANK, TP2_PP2, Finished, train, write_sections
from forked_runs import SETTINGS, Attempt, ForkServer
from places import MODEL, ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.recovery.checkpoint_export import find_exportable_weights

pytestmark = pytest.mark.dist
SFT = (sys.executable, "-m", "rlhf_megatron", "sft")


def write_config(directory: Path, **sections: Any) -> Path:
    """5 steps of 8 samples on 30 sums, two sources of 20 and 10 rows in shares of 3 to 1: 8 x 5 is
    over an epoch.
    """
    directory.mkdir()
    draw = random.Random(1)

    def rows(name: str, count: int) -> str:
        pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
        made = [
            {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}", "weight": 1 + a % 2}
            for a, b in pairs
        ]
        made = [
            {**row, "chosen": row["answer"], "rejected": row["answer"][::-1] + "0"} for row in made
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        return str(directory / f"{name}.jsonl")

    sources = [
        {
            "name": name,
            "weight": weight,
            "train_files": [rows(name, count)],
            "val_files": [rows(f"{name}_val", 7)],
        }
        for name, weight, count in (("a", 3.0, 20), ("b", 1.0, 10))
    ]
    settings = {
        "extends": str(ROOT / "configs" / "quickstart_sft.yaml"),
        "model": {"path": str(MODEL), "init_seed": 1},
        "data": {"task": None, "train_batch_size": 8, "sources": sources},
        "sft": {"max_length": 12, "weight_key": "weight"},
        "actor": {"ppo_max_token_len_per_gpu": 24, "optim": {"lr": 5e-3, "lr_warmup_steps": 0}},
        "trainer": {
            "experiment_name": "tiny",
            "default_local_dir": str(directory / "runs"),
            "device": "cpu",
            "total_training_steps": 5,
            "test_freq": 2,
        },
    }
    return write_sections(directory, settings, sections)


@pytest.fixture(scope="module")
def alone(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attempt]:
    """The run that nobody disturbs."""
    config = write_config(tmp_path_factory.mktemp("alone") / "run")
    attempt = server.train(config, command="sft")
    assert attempt.code == 0, attempt.console
    return config, attempt


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [
        row[name] for row in rows for name in ("sft/loss", "val/loss", "val/b/loss") if name in row
    ]


def test_a_run_learns_and_says_what_it_wrote(
    alone: tuple[Path, Attempt], capsys: pytest.CaptureFixture[str]
) -> None:
    config, attempt = alone
    summary = attempt.summary()
    rows = attempt.rows()
    assert summary["steps"] == 5 and summary["loss_last"] < summary["loss_first"]
    held_out = [row for row in rows if row["kind"] == "evaluation"]
    assert [row["step"] for row in held_out] == [0, 2, 4, 5]
    assert summary["held_out_loss_after"] == held_out[-1]["val/loss"] < held_out[0]["val/loss"]
    assert {"val/a/loss", "val/b/perplexity"} <= held_out[0].keys()
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["training/epoch"] for row in steps] == pytest.approx(
        [8 * n / 30 for n in range(1, 6)]
    )
    for said in (
        "sft on 30 training and 14 held-out documents",
        "weights: ",
        "state after step 5",
        "summary: ",
    ):
        assert said in attempt.console, attempt.console
    assert find_exportable_weights(attempt.run_dir, 4).step == 4
    assert main(["report", str(attempt.run_dir), "--open", "no"]) == 0
    assert (
        "Supervised and preference training"
        in (attempt.run_dir / "report" / "index.html").read_text()
    )
    assert main(["data", "show", str(config), "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert "--- a 1 of 20: 10 tokens, 4 train" in shown and "⟦" in shown and "<eos>⟧" in shown


def test_a_killed_run_goes_on_bit_for_bit(
    server: ForkServer, alone: tuple[Path, Attempt], tmp_path: Path
) -> None:
    """In the middle of an epoch, before and after an optimizer step that no checkpoint has."""
    faults = ";".join(
        f"kill@{place}"
        for place in ("loop.step_begins:step=4", "actor.after_optimizer_step:step=5")
    )
    config = write_config(tmp_path / "run")
    attempts = server.until_it_ends(config, faults=faults, command="sft")
    assert [attempt.code for attempt in attempts] == [-9, -9, 0], attempts[-1].console
    assert attempts[-1].rows() == alone[1].rows()
    assert attempts[-1].weights() == alone[1].weights()


def test_the_command_and_the_job_agree(
    alone: tuple[Path, Attempt], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(alone[0])]) == 2
    assert (
        "job (sft) is not what the command train runs; use `rlhf-megatron sft`"
        in capsys.readouterr().err
    )


def test_pairs_are_told_apart(server: ForkServer, tmp_path: Path) -> None:
    """DPO against the frozen start: at first no reward, then the better answer has more
    in most pairs.
    """
    config = write_config(tmp_path / "run", sft={"loss_mode": "dpo", "params": {"beta": 0.5}})
    settings = {"actor.optim.lr": 1e-3, "trainer.total_training_steps": 8, "trainer.save_hf": False}
    attempt = server.train(config, settings, command="sft")
    assert attempt.code == 0, attempt.console
    steps = [row for row in attempt.rows() if row["kind"] == "step"]
    assert steps[0]["rewards/margins"] == 0.0 and steps[0]["sft/loss"] > 0.69
    held_out = [row for row in attempt.rows() if row["kind"] == "evaluation"]
    assert (
        held_out[-1]["val/rewards/accuracies"] > 0.8
        and held_out[-1]["val/loss"] < 0.5 * held_out[0]["val/loss"]
    )


def curve(config: Path, settings: dict[str, Any]) -> Finished:
    return train(config, {**SETTINGS, "trainer.runtime": "torchrun", **settings}, launcher=SFT)


@pytest.mark.long
def test_a_layout_changes_nothing(alone: tuple[Path, Attempt], tmp_path: Path) -> None:
    finished = curve(write_config(tmp_path / "run"), TP2_PP2)
    assert finished.exit_code == 0, finished.console
    rows = [
        json.loads(line) for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses(rows) == pytest.approx(losses(alone[1].rows()), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["torchrun", "ray"])
def test_launchers_change_no_bit(alone: tuple[Path, Attempt], runtime: str, tmp_path: Path) -> None:
    finished = curve(write_config(tmp_path / "run"), {**ONE_RANK, "trainer.runtime": runtime})
    assert finished.exit_code == 0, finished.console
    rows = [
        json.loads(line) for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses(rows) == losses(alone[1].rows())
    assert (finished.run_dir / "hf" / "model.safetensors").read_bytes() == alone[1].weights()


@pytest.mark.long
@pytest.mark.parametrize(
    "change", [{"actor.megatron.context_parallel_size": 2}, {}, {"actor.backend": "fsdp"}]
)
def test_more_layouts(alone: tuple[Path, Attempt], change: dict[str, Any], tmp_path: Path) -> None:
    """cp2, dp2, and dp2 under FSDP2, against Megatron's one rank."""
    settings = {**ONE_RANK, "trainer.runtime": "torchrun", "trainer.n_gpus_per_node": 2, **change}
    finished = curve(write_config(tmp_path / "run"), settings)
    assert finished.exit_code == 0, finished.console
    rows = [
        json.loads(line) for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses(rows) == pytest.approx(losses(alone[1].rows()), abs=1e-4)


@pytest.mark.long
def test_experts_over_ranks(server: ForkServer, tmp_path: Path) -> None:
    of_experts = {
        "model.path": str(ROOT / "examples" / "quickstart" / "moe_model"),
        "actor.optim.lr": 1e-3,
    }
    whole = server.train(write_config(tmp_path / "whole"), of_experts, command="sft")
    assert whole.code == 0, whole.console
    ep2 = {**ONE_RANK, "trainer.n_gpus_per_node": 2, "actor.megatron.expert_model_parallel_size": 2}
    finished = curve(
        write_config(tmp_path / "ep2"), {**of_experts, **ep2, "trainer.runtime": "torchrun"}
    )
    assert finished.exit_code == 0, finished.console
    rows = [
        json.loads(line) for line in (finished.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses(rows) == pytest.approx(losses(whole.rows()), abs=1e-4)
