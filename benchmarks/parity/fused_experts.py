"""transformers holds the experts of a layer as two tensors; on disk, and here, each expert has
three matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

MATRICES = ("gate_proj", "up_proj", "down_proj")
ON_DISK = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}  # Mixtral's own names
_ONE = re.compile(r"(.*layers\.\d+\.)(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
# GPT-OSS
_ENTRY = re.compile(r"(.*layers\.\d+\.mlp\.experts\.)(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
_ENTRIES = re.compile(r"(.*layers\.\d+\.mlp\.experts\.)((?:gate_up|down)_proj(?:_bias)?)")
_FUSED = re.compile(r"(.*layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")


def fused(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names on disk -> those of transformers' model."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    entries: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        if found := _ENTRY.fullmatch(name):
            entries.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
        elif found := _ONE.fullmatch(name):
            prefix, block, number, matrix = found.groups()
            names = ON_DISK["mixtral"][1] if block != "mlp" else MATRICES
            experts.setdefault(prefix, {})[int(number), MATRICES[names.index(matrix)]] = tensor
        else:
            result[name.replace("block_sparse_moe.gate.", "mlp.gate.")] = tensor
    for name, parts in entries.items():
        result[name] = torch.stack([parts[number] for number in range(len(parts))])
    for prefix, tensors in experts.items():
        numbers = range(1 + max(number for number, _ in tensors))
        pairs = [
            torch.cat([tensors[number, "gate_proj"], tensors[number, "up_proj"]])
            for number in numbers
        ]
        result[f"{prefix}mlp.experts.gate_up_proj"] = torch.stack(pairs)
        result[f"{prefix}mlp.experts.down_proj"] = torch.stack(
            [tensors[number, "down_proj"] for number in numbers]
        )
    return result


def unfused(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """The inverse; names may have a prefix."""
    block, names = ON_DISK.get(model_type, ("mlp", MATRICES))
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if model_type == "gpt_oss" and (found := _ENTRIES.fullmatch(name)):
            result |= {
                f"{found[1]}{number}.{found[2]}": part.clone() for number, part in enumerate(tensor)
            }
            continue
        found = _FUSED.fullmatch(name)
        if found is None:
            result[name.replace("mlp.gate.", f"{block}.gate.")] = tensor
            continue
        prefix, kind = found.groups()
        for number, whole in enumerate(tensor):
            parts = whole.chunk(2) if kind == "gate_up_proj" else (whole,)
            for matrix, part in zip(
                names[:2] if len(parts) == 2 else names[2:], parts, strict=True
            ):
                result[f"{prefix}{block}.experts.{number}.{matrix}.weight"] = part.clone()
    return result
