"""Files that hold no secret have the mode that the umask leaves: another user of the machine reads
an adapter, a checkpoint and a served model as the files beside them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import ROOT
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.ranks.checkpoint.rng_state import save_rng_states
from rlhf_megatron.rewards.service.reward_model_servers import make_served_model_dir
from rlhf_megatron.weights.lora_adapter import write_peft_adapter

MATRICES = {
    "layers.0.q_proj.lora_A.weight": torch.zeros(2, 3),
    "layers.0.q_proj.lora_B.weight": torch.zeros(4, 2),
}


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def read_modes(directory: Path) -> dict[str, int]:
    """The modes of the files themselves; links to files of other folders are left out."""
    return {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def test_an_adapter_is_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    write_peft_adapter(tmp_path / "adapter", LoRAConfig(rank=2), iter(MATRICES.items()), "base")
    assert read_modes(tmp_path / "adapter") == dict.fromkeys(
        ("adapter_config.json", "adapter_model.safetensors"), 0o666 & ~umask
    )


def test_random_states_of_a_checkpoint_are_readable_as_the_umask_says(
    tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "rng" / "rank0.safetensors"
    for _ in range(2):  # a step that is done again writes over its former file
        save_rng_states(path, torch.device("cpu"))
    assert read_modes(path.parent) == {path.name: 0o666 & ~umask}
    with safe_open(path, framework="pt") as file:
        assert {"python", "numpy", "torch"} <= set(file.keys()) and file.metadata()


def test_a_served_reward_model_is_readable_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForSequenceClassification"]})
    )
    save_file({"score.weight": torch.ones(1, 4)}, model / "model.safetensors")
    served = make_served_model_dir(model, tmp_path / "served")
    modes = read_modes(served)
    assert len(modes) == 2 and set(modes.values()) == {0o666 & ~umask}, modes


def test_all_tensor_files_of_the_package_are_written_by_the_function_that_sets_the_mode() -> None:
    callers = {
        path.name
        for path in (ROOT / "rlhf_megatron").rglob("*.py")
        if "save_file" in path.read_text("utf-8")
    }
    assert callers == {"tensor_file.py"}
