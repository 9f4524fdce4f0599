"""`rlhf-megatron reward-model`: whole runs on pairs in two layouts; the model that they write,
in transformers.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import ONE_RANK, TP2_PP2, train, write_sections
from end_to_end_tools import write_config as write_rl_config
from forked_runs import ForkServer
from places import MODEL
from reward_model_tools import Scored
from safetensors.torch import load_file, save_file
from sglang_tools import needs_sglang

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.dist


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Of two answers of three digits the one with the larger sum of digits is better."""
    draw = random.Random(seed)
    rows = []
    while len(rows) < count:
        answers = sorted(
            (f"{draw.randrange(1000):03d}" for _ in range(2)), key=lambda a: sum(map(int, a))
        )
        if len({sum(map(int, answer)) for answer in answers}) == 2:
            prompt = f"{draw.randrange(100):02d}+{draw.randrange(100):02d}="
            rows.append({"prompt": prompt, "rejected": answers[0], "chosen": answers[1]})
    return rows


def steps(count: int) -> dict[str, Any]:
    """Settings of a run that evaluates at its end."""
    return {"trainer.total_training_steps": count, "trainer.test_freq": count}


def write_config(directory: Path, num_pairs: int, **sections: Any) -> Path:
    directory.mkdir(exist_ok=True)
    for name, count, seed in (("train", num_pairs, 1), ("val", 300, 2)):
        (directory / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in pairs(count, seed))
        )
    settings = {
        "job": "reward-model",
        "model": {"path": str(MODEL), "init_seed": 1, "dtype": "float32"},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "val_files": [str(directory / "val.jsonl")],
            "train_batch_size": 32,
        },
        "sft": {"loss_mode": "bradley_terry", "max_length": 12},
        "actor": {"ppo_max_token_len_per_gpu": 512, "optim": {"lr": 3e-3, "lr_warmup_steps": 5}},
        "trainer": {
            "experiment_name": "tiny",
            "default_local_dir": str(directory / "runs"),
            "device": "cpu",
            "n_gpus_per_node": 1,
            "total_training_steps": 2,
            "save_hf": True,
        },
    }
    return write_sections(directory, settings, sections)


def curve(rows: list[dict[str, Any]]) -> list[float]:
    return [
        row[name]
        for row in rows
        for name in ("sft/loss", "val/loss", "val/rewards/margins")
        if name in row
    ]


OLD_POLICIES = {
    "trainer.deterministic": False,
    "algorithm.rollout_correction.preset": "decoupled_token_is",
}
FOUR_RANKS = TP2_PP2 | {"trainer.runtime": "torchrun"}


@pytest.mark.long
def test_layouts_agree(server: ForkServer, tmp_path: Path) -> None:
    found = []
    for name, layout in (("one", ONE_RANK), ("four", FOUR_RANKS)):
        attempt = server.train(
            write_config(tmp_path / name, 64), layout | steps(4), command="reward-model"
        )
        assert attempt.code == 0, attempt.console
        found.append(curve(attempt.rows()))
    assert found[0] == pytest.approx(found[1], abs=2e-5)


def test_transformers_reads_the_model(server: ForkServer, tmp_path: Path) -> None:
    """Trained at tp2 pp2; the exported model gives the margin that the run measured."""
    attempt = server.train(
        write_config(tmp_path / "run", 64), FOUR_RANKS | steps(3), command="reward-model"
    )
    assert attempt.code == 0, attempt.console
    last = [row for row in attempt.rows() if row["kind"] == "evaluation"][-1]
    assert (
        last["val/rewards/accuracies_low"]
        < last["val/rewards/accuracies"]
        < last["val/rewards/accuracies_high"]
    )

    assert main(["export", str(attempt.run_dir), "--out", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "config.json").read_text() == (
        attempt.run_dir / "hf" / "config.json"
    ).read_text()

    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").float().eval()
    tokenizer = load_tokenizer(str(MODEL), str(MODEL))
    # it wants one for batches; these need no padding
    model.config.pad_token_id = tokenizer.vocab_size - 1
    rows = pairs(300, 2)
    means = {}
    for key in ("chosen", "rejected"):
        ids = [
            [*t, tokenizer.eos_token_id]
            for t in tokenizer.encode_texts([row["prompt"] + row[key] for row in rows])
        ]
        with torch.no_grad():
            means[key] = float(model(torch.tensor(ids)).logits.mean())
    assert means["chosen"] - means["rejected"] == pytest.approx(
        last["val/rewards/margins"], abs=1e-5
    )
    assert abs(last["val/rewards/margins"]) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (TP2_PP2, {"reward_model.granularity": "step", "reward_model.step_separator": "1"}),
        (
            {"trainer.n_gpus_per_node": 3, "tp": 1, "pp": 1},
            {"reward_model.num_ranks": 2, "reward_model.megatron.tensor_model_parallel_size": 2},
        ),
        (ONE_RANK, {"actor.backend": "fsdp", "reward_model.param_offload": True}),
        (ONE_RANK, OLD_POLICIES | {"schedule.name": "one_step_off"}),
        (ONE_RANK, {"schedule.name": "streaming", "trainer.deterministic": False}),
        (ONE_RANK, OLD_POLICIES | {"schedule.name": "asynchronous"}),
    ],
    ids=["on the actor's ranks", "own pool", "fsdp", "one_step_off", "streaming", "asynchronous"],
)
def test_a_run_is_scored_by_a_model(
    server: ForkServer, tmp_path: Path, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Two steps, killed in the second after its scores, and resumed; each reward
    against transformers.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(MODEL, num_labels=1)
    ).eval()
    model.save_pretrained(tmp_path / "judge")
    config = write_rl_config(tmp_path, data=None)
    chosen = {
        "reward_model.path": str(tmp_path / "judge"),
        "reward_model.weight": 0.5,
        "trainer.save_freq": 1,
    }
    runtime = {} if layout is ONE_RANK else {"trainer.runtime": "torchrun"}
    settings = (
        layout
        | runtime
        | settings
        | chosen
        | {"trainer.record": True, "trainer.total_training_steps": 2}
    )
    settings |= {"trainer.test_freq": 2}
    killed = server.train(config, settings, faults="kill@loop.after_advantages:step=2")
    assert killed.code != 0 and [row["step"] for row in killed.rows() if row["kind"] == "step"] == [
        1
    ], killed.console
    attempt = server.train(config, settings)
    assert attempt.code == 0, attempt.console
    rows = [row for row in attempt.rows() if row["kind"] == "step"]
    assert len(rows) == 2
    for row in rows:
        batch = RolloutRecorder(attempt.run_dir / "record").read_step(row["step"])
        parts = []
        rule = batch.reward_parts["exact_match"].tolist()
        for ids, mask in zip(
            batch.token_ids.split(batch.lengths.tolist()),
            batch.response_mask.split(batch.lengths.tolist()),
        ):
            with torch.no_grad():
                hidden = model.model(ids[None].long()).last_hidden_state[0]
                scores = model.score(hidden)[:, 0]
            places = mask.nonzero().view(-1).tolist()
            if "reward_model.granularity" in settings:
                one = load_tokenizer(str(MODEL), str(MODEL)).decode
                places = [place for place in places[:-1] if "1" in one([int(ids[place])])] + places[
                    -1:
                ]
            else:
                places = places[-1:]
            parts.append(float(scores[places].mean()))
        assert row["reward/part/reward_model"] == pytest.approx(sum(parts) / len(parts), abs=1e-5)
        total = [own + 0.5 * part for own, part in zip(rule, parts, strict=True)]
        assert row["critic/rewards/mean"] == pytest.approx(sum(total) / len(total), abs=1e-5)
        assert row["critic/rewards/max"] == pytest.approx(max(total), abs=1e-5)
    assert max(abs(part) for part in parts) > 1e-2
    last = [row for row in attempt.rows() if row["kind"] == "evaluation"][-1]
    assert abs(last["val/accuracy"] * 40 - round(last["val/accuracy"] * 40)) > 1e-6, (
        "the rule alone: 40 items of 0 or 1"
    )


COLOCATED = {"rollout.colocated": True}


@needs_sglang
@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "is_judge"),
    [
        ({}, False),
        (COLOCATED, False),
        (COLOCATED | {"trainer.runtime": "ray", "ray.num_cpus_per_engine": 0.5}, False),
        (COLOCATED, True),
    ],
    ids=["apart", "colocated", "colocated under Ray", "judge"],
)
def test_a_run_starts_servers_of_its_model(
    server: ForkServer, tmp_path: Path, settings: dict[str, Any], is_judge: bool
) -> None:
    """Steps and evaluations are scored by them; each reward against transformers."""
    scored = Scored(tmp_path / "judge", is_judge)
    settings = (
        ONE_RANK
        | scored.settings()
        | {"trainer.test_freq": 1, "trainer.total_training_steps": 2}
        | settings
    )
    if "trainer.runtime" in settings:
        pytest.importorskip("ray")
        run = train(write_rl_config(tmp_path), settings | {"trainer.logger": ["jsonl"]})
        code = run.exit_code
        console = run.console
        rows = [*run.rows("step"), *run.rows("evaluation")]
    else:
        attempt = server.train(write_rl_config(tmp_path), settings)
        code = attempt.code
        console = attempt.console
        rows = attempt.rows() if code == 0 else []
    assert code == 0, console
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 2
    for row in steps:
        assert row["reward/servers"] == 1 and row["reward/server_restarts"] == 0
        assert scored.assert_scored(tmp_path / "runs" / "tiny", row["step"]) >= (
            2 if is_judge else 8
        )
    # the record has what the servers said: a replay asks none
    if "trainer.runtime" not in settings:
        words = ("--replay", "2", "--replay-from", str(tmp_path / "runs" / "tiny"))
        again = server.train(tmp_path / "tiny.yaml", settings, *words)
        assert again.code == 0, again.console
        rows_again = replace(again, run_dir=again.run_dir.with_name("tiny-replay")).rows()
        for before, after in zip(
            steps, (row for row in rows_again if row["kind"] == "step"), strict=True
        ):
            names = [
                name
                for name in before
                if name.startswith(("critic/rewards", "reward/part/", "reward/status/"))
            ]
            assert "reward/part/reward_model" in names and {n: after[n] for n in names} == {
                n: before[n] for n in names
            }
    for row in (row for row in rows if row["kind"] == "evaluation" and not is_judge):
        times = [row["val/accuracy"] * count for count in range(1, 41)]
        assert all(abs(one - round(one)) > 1e-6 for one in times), (
            "the rule alone: up to 40 items of 0 or 1"
        )


def test_a_reward_model_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model of a run is an older reward model, whose bias would be lost, or one without a
    language model's output layer.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(MODEL, num_labels=1, tie_word_embeddings=False)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "init_seed": None}
    path = str(write_config(tmp_path / "run", 64, model=model))
    words = [f"{key}={value}" for key, value in ONE_RANK.items() if "." in key]
    check = ["config", "check", path, *words]
    assert main(check) == 0, capsys.readouterr()

    file = tmp_path / "model" / "model.safetensors"
    save_file({**load_file(file), "score.bias": torch.tensor([0.25])}, file, {"format": "pt"})
    assert main(check) == 2
    output = capsys.readouterr()
    assert "has a score.bias of 0.25, and the head" in output.out + output.err
    assert main([*check, "sft.use_head_bias=true"]) == 0, capsys.readouterr()


def test_the_bias_of_a_head_is_for_reward_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "run", 8, sft={"loss_mode": "dpo"})
    assert main(["sft", str(path), "job=sft", "sft.use_head_bias=true"]) == 2
    assert "sft.use_head_bias (true) would be ignored because job is sft" in capsys.readouterr().err


def test_the_command_and_the_loss_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path / "run", 8, sft={"loss_mode": "dpo"})
    assert main(["reward-model", str(path)]) == 2
    assert "sft.loss_mode (dpo) is not a loss of job: reward-model" in capsys.readouterr().err


@pytest.mark.long
def test_2000_pairs_are_told_apart(server: ForkServer, tmp_path: Path) -> None:
    attempt = server.train(
        write_config(tmp_path / "run", 2000), ONE_RANK | steps(180), command="reward-model"
    )
    assert attempt.code == 0, attempt.console
    last = [row for row in attempt.rows() if row["kind"] == "evaluation"][-1]
    assert last["val/rewards/accuracies_low"] > 0.9, last
