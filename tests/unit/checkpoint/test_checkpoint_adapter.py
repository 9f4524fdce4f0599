"""Adapters as peft writes them: read back as they were,
or refused with what is not of this model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.weights.lora_adapter import CONFIG, read_peft_adapter, write_peft_adapter

LORA = LoRAConfig(rank=2, alpha=8.0)
MATRICES = {"layers.0.q_proj.lora_A.weight": torch.arange(6.0).view(2, 3),
            "layers.0.q_proj.lora_B.weight": torch.arange(8.0).view(4, 2)}  # fmt: skip


def written(directory: Path, **change: Any) -> dict[str, Tensor]:
    """Read back after the adapter's configuration was changed so."""
    assert write_peft_adapter(directory, LORA, iter(MATRICES.items()), "base") == 2
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | change))
    return read_peft_adapter(
        directory, LORA, {name: tensor.shape for name, tensor in MATRICES.items()}
    )


@pytest.mark.parametrize("begun", [True, False, "gaussian", None])
def test_matrices_come_back(tmp_path: Path, begun: Any) -> None:
    found = written(tmp_path / "adapter", init_lora_weights=begun)
    assert found.keys() == MATRICES.keys() and all(
        torch.equal(found[name], MATRICES[name]) for name in found
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"init_lora_weights": "pissa"},
            "'pissa': its matrices stand beside weights that peft changed",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, "merge that adapter"),
        ({"use_rslora": True}, "has use_rslora True, but False is needed"),
        ({"lora_alpha": 16}, "has lora_alpha 16, but 8.0 is needed"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
    ],
)
def test_adapters_of_another_kind(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        written(tmp_path / "adapter", **change)


def test_matrices_of_other_layers(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path / "adapter", LORA, iter(MATRICES.items()), "base")
    shapes = {name: tensor.shape for name, tensor in MATRICES.items()} | {
        "layers.0.v_proj.lora_A.weight": (2, 3)
    }
    with pytest.raises(ValueError, match=r"differ in layers\.0\.v_proj\.lora_A\.weight and 0 more"):
        read_peft_adapter(tmp_path / "adapter", LORA, shapes)
