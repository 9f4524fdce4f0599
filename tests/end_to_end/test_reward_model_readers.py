"""A reward model of `rlhf-megatron reward-model` gives one number to whoever reads what the run
has written: transformers, and the models of a run that it scores.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import ONE_RANK
from forked_runs import Attempt, ForkServer
from older_checkpoints import remove_settings
from places import MODEL
from test_reward_model_run import pairs, steps, write_config
from torch import Tensor

from rlhf_megatron.cli.main import main
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.value_model import read_head_bias

pytestmark = pytest.mark.dist

REGRESSION = {"loss_mode": "regression", "params": {"high": 4.0, "low": 3.0}, "max_length": 12}


def tokenize_answers(key: str) -> Tensor:
    """The held-out documents [300, length] whose answers are `key`, with their ends."""
    tokenizer = load_tokenizer(str(MODEL), str(MODEL))
    texts = [row["prompt"] + row[key] for row in pairs(300, 2)]
    return torch.tensor([[*ids, tokenizer.eos_token_id] for ids in tokenizer.encode_texts(texts)])


def score_by_transformers(directory: Path, key: str) -> float:
    """The mean score of the class that config.json names."""
    import transformers

    [name] = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(tokenize_answers(key)).logits
    is_of_tokens = name == "Qwen3ForTokenClassification"
    return float(logits[:, -1].mean() if is_of_tokens else logits.mean())


def copy_tokenizer(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    shutil.copy(MODEL / "tokenizer.json", directory)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
    return directory


def read_rewards(attempt: Attempt) -> dict[str, float]:
    last = [row for row in attempt.rows() if row["kind"] == "evaluation"][-1]
    return {key: last[f"val/rewards/{key}"] for key in ("chosen", "rejected")}


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_transformers_gives_the_rewards_that_the_run_measured(
    server: ForkServer, tmp_path: Path, backend: str
) -> None:
    """The level of the rewards counts as well: `regression` and `center_coef` train it."""
    config = write_config(tmp_path / "run", 64, sft=REGRESSION)
    tokenizer = copy_tokenizer(tmp_path / "tokenizer", pad_token="+")
    settings = ONE_RANK | steps(30) | {"actor.backend": backend}
    settings |= {"model.tokenizer_path": str(tokenizer)}
    attempt = server.train(config, settings, command="reward-model")
    assert attempt.code == 0, attempt.console
    exported = tmp_path / "exported"
    assert main(["export", str(attempt.run_dir), "--out", str(exported)]) == 0
    for directory in (attempt.run_dir / "hf", exported):
        config_json = json.loads((directory / "config.json").read_text())
        assert config_json["architectures"] == ["Qwen3ForSequenceClassification"]
        # the run's own tokenizer, of which no answer ends with the padding
        written = json.loads((directory / "tokenizer_config.json").read_text())
        assert (written["pad_token"], config_json["pad_token_id"]) == ("+", 12)
        # SGLang's class reads a bias, which would be random without this one
        reader = HFReader(directory)
        assert "score.bias" in reader.names and read_head_bias(reader) == 0.0
        for key, reward in read_rewards(attempt).items():
            assert score_by_transformers(directory, key) == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp", marks=pytest.mark.long)])
def test_an_older_run_keeps_its_bias(server: ForkServer, tmp_path: Path, backend: str) -> None:
    """It began before there was a setting: resumed, it ends as it would have ended, and what it
    writes is read with the bias.
    """
    settings = ONE_RANK | steps(4) | {"actor.backend": backend}
    biased: dict[str, Any] = settings | {"sft.use_head_bias": True}
    whole = server.train(
        write_config(tmp_path / "whole", 64, sft=REGRESSION), biased, command="reward-model"
    )
    assert whole.code == 0, whole.console
    assert "AutoModelForTokenClassification" in whole.console
    config = write_config(tmp_path / "older", 64, sft=REGRESSION)
    begun = server.train(
        config, biased, faults="kill@ckpt.after_commit:nth=1", command="reward-model"
    )
    assert begun.code == -9, begun.console
    remove_settings(begun.run_dir / "checkpoints" / "step_000002", "sft.use_head_bias")

    exported = tmp_path / "exported"
    assert main(["export", str(begun.run_dir), "--out", str(exported)]) == 0
    assert read_head_bias(HFReader(exported)) > 1e-3
    refused = server.train(config, settings | {"sft.use_head_bias": False}, command="reward-model")
    assert refused.code != 0
    assert "sft.use_head_bias is false and was true: the state has the head" in refused.console

    resumed = server.train(config, settings, command="reward-model")
    assert resumed.code == 0, resumed.console
    assert "sft.use_head_bias stays true because" in resumed.console
    assert resumed.weights() == whole.weights()
    assert resumed.rows() == whole.rows()
    assert read_head_bias(HFReader(resumed.run_dir / "hf")) > 1e-3
    for key, reward in read_rewards(whole).items():
        score = score_by_transformers(resumed.run_dir / "hf", key)
        assert score == pytest.approx(reward, abs=1e-4)
