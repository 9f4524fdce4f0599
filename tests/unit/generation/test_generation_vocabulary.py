"""A tokenizer with ids that the model's vocabulary lacks is refused before an engine starts, with
both numbers and the remedy, by every job that reads text.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from table_samples import SMALL_LLAMA, random_state

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.schema import ModelConfig, RewardModelConfig, RunConfig
from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.rewards.service.reward_model_servers import check_model_servers
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup

CONFIG = {**SMALL_LLAMA, "head_dim": 4}
WORDS = "the tokenizer has 24 token ids (0 to 23), but {} has a vocabulary of 21"
REMEDY = "set model.tokenizer_path to the tokenizer of this model, or resize the model's embedding"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 21 tokens with a tokenizer of 24."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_state(CONFIG), path / "model.safetensors")
    write_character_tokenizer(path, 24)
    return path


@pytest.mark.parametrize("command", ["generate", "evaluate", "evaluate --loss", "serve"])
def test_every_job_refuses_it(
    model: Path,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    name, *options = command.split()
    words = {"serve": ["--port", "0"]}.get(name, [str(rows), *options])
    assert main([name, str(model), *words]) == 1
    text = capsys.readouterr().err
    assert WORDS.format(model) in text and REMEDY in text
    assert not list(tmp_path.rglob("engine*")) and not list(tmp_path.glob("*answers*"))


def test_a_served_reward_model_is_checked_with_its_own_tokenizer(model: Path) -> None:
    setup = EngineSetup.from_config(RunConfig(model=ModelConfig(path=str(model))))
    served = RewardModelConfig(path=str(model))
    with pytest.raises(ValueError) as error:
        check_model_servers(setup, served)
    assert WORDS.format(model) in str(error.value)
