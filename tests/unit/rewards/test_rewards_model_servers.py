"""What the run's own servers of a reward model are given to load. They run
in tests/engines/test_reward_servers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_megatron.config.schema import RewardModelConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.registry import load_registry
from rlhf_megatron.rewards.service.reward_model_servers import (
    find_dropped_bias,
    make_score_params,
    make_served_model_dir,
)
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.value_model import read_head_bias


def write(folder: Path, architecture: str, has_index: bool = False, has_bias: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "id": 7}))
    tensors = {"score.weight": torch.ones(1, 4)} | (
        {"score.bias": torch.full((1,), 0.75)} if has_bias else {}
    )
    save_file(tensors, folder / "model.safetensors")
    if has_index:
        weight_map = dict.fromkeys(tensors, "model.safetensors")
        index = {"metadata": {"total_size": 16}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("has_index", [False, True])
def test_a_head_without_a_bias_gets_the_bias_0(tmp_path: Path, has_index: bool) -> None:
    model = write(tmp_path / "model", "Qwen3ForSequenceClassification", has_index)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for _ in range(2):  # a run that is resumed makes it anew
        served = make_served_model_dir(model, tmp_path / "served")
    reader = HFReader(served)
    assert set(reader.names) == {"score.weight", "score.bias"} and reader.read_shape(
        "score.bias"
    ) == (1,)
    assert (served / "config.json").read_bytes() == before["config.json"]
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


@pytest.mark.parametrize(
    ("architecture", "has_bias"),
    [("Qwen3ForSequenceClassification", True), ("LlamaForSequenceClassification", False)],
)
def test_other_models_are_served_as_they_are(
    tmp_path: Path, architecture: str, has_bias: bool
) -> None:
    model = write(tmp_path / "model", architecture, has_bias=has_bias)
    assert (
        make_served_model_dir(model, tmp_path / "served") == model
        and not (tmp_path / "served").exists()
    )


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_token_classifier_is_served_as_a_sequence_classifier(
    tmp_path: Path, has_bias: bool
) -> None:
    """SGLang knows no token classifiers. The class of Qwen3 reads the bias; a missing one is 0."""
    model = write(tmp_path / "model", "Qwen3ForTokenClassification", has_bias=has_bias)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for _ in range(2):
        served = make_served_model_dir(model, tmp_path / "served")
    config = json.loads((served / "config.json").read_text())
    assert config == {"architectures": ["Qwen3ForSequenceClassification"], "id": 7}
    assert read_head_bias(HFReader(served)) == (0.75 if has_bias else 0.0)
    assert "score.bias" in HFReader(served).names
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


def test_a_class_that_the_servers_do_not_know_keeps_its_name(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "MixtralForTokenClassification", has_bias=True)
    assert make_served_model_dir(model, tmp_path / "served") == model
    assert find_dropped_bias(model) == 0.0


@pytest.mark.parametrize(
    ("architecture", "dropped_bias"),
    [
        ("Qwen3ForSequenceClassification", 0.0),
        ("Qwen2ForTokenClassification", 0.0),
        ("LlamaForSequenceClassification", 0.75),
        ("LlamaForTokenClassification", 0.75),
        ("Gemma2ForSequenceClassification", 0.75),
    ],
)
def test_a_bias_that_the_servers_drop_is_found(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    dropped_bias: float,
) -> None:
    model = write(tmp_path / "model", architecture, has_bias=True)
    assert find_dropped_bias(model) == dropped_bias
    assert ("the run adds it to the servers' scores" in caplog.text) == (dropped_bias != 0)


def test_a_dropped_bias_is_added_to_the_scores() -> None:
    """A server's 1.5 is the model's 2.25 with its bias 0.75: (2.25 - 0.25) / 4 = 0.5."""
    params = make_score_params(RewardModelConfig(mean=0.25, std=4.0), dropped_bias=0.75)
    assert params == {"mean": -0.5, "std": 4.0, "activation": "none"}
    servers = [{"url": "http://host:1/classify"}]
    term = build_params(
        load_registry("reward").get("reward_server").params,
        {"servers": servers, **params},
        "params",
    )
    assert term.scale_score(1.5) == 0.5
