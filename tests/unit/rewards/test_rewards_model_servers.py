"""What the run's own servers of a reward model are given to load. They run
in tests/engines/test_reward_servers.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_megatron.rewards.service.reward_model_servers import make_served_model_dir
from rlhf_megatron.weights.hf_reader import HFReader


def write(folder: Path, architecture: str, has_index: bool = False, has_bias: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    tensors = {"score.weight": torch.ones(1, 4)} | (
        {"score.bias": torch.ones(1)} if has_bias else {}
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
