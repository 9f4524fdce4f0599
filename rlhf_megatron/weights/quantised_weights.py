"""Weights in files of fewer bits: the numbers that they stand for, and FP8 for numbers.

FP8 in blocks (DeepSeek-V3): `X.weight` in float8_e4m3fn and `X.weight_scale_inv` in float32, which
multiplies. MXFP4 (GPT-OSS): `X_blocks`, two 4-bit floats a byte, and `X_scales`, a power of two
for 32 of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

SCALE = "_scale_inv"
BLOCKS = "_blocks"
SCALES = "_scales"
"""The names of the further tensors end with these."""
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP = 32  # values of a scale of MXFP4
FP8_BLOCK = (128, 128)
"""Rows and columns that share a scale in the FP8 files of DeepSeek-V3, Qwen3 and Kimi-K2."""
_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_AMAX = 1e-12  # of a block, below which its scale stays the same
_CPU_ELEMENTS = 1 << 18  # that are quantised at once: they stay in a cache; few launches
_DEVICE_ELEMENTS = 1 << 24
_IN_FP8 = re.compile(r"\.layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])\.weight$")


def read_fp8_block_size(hf_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (rows, columns) that share an FP8 scale: `weight_block_size` of the config, or
    (128, 128) where the config gives none, also for MXFP4 and for a model that is not quantised.
    Raise ValueError for any other quantisation method and for a malformed block size.
    """
    found = hf_config.get("quantization_config") or {}
    method = found.get("quant_method", "fp8")
    block = found.get("weight_block_size", [128, 128])
    is_block = (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    )
    if method not in ("fp8", "mxfp4") or not is_block:
        raise ValueError(
            f"config.json: quantization_config ({method!r}, weight_block_size {block!r}) is not"
            " read; FP8 with scales of blocks and MXFP4 are. Take the model in bfloat16."
        )
    return block[0], block[1]


def dequantise_fp8(
    weight: Tensor, scales: Tensor, block_size: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the weight [rows, columns] in `dtype`: element (i, j) is weight[i, j] * scales[i //
    block rows, j // block columns]. The last blocks may be short.

    Raise ValueError for scales of another shape.
    """
    rows, columns = weight.shape
    wanted = (-(-rows // block_size[0]), -(-columns // block_size[1]))
    if tuple(scales.shape) != wanted:
        raise ValueError(
            f"scales {tuple(scales.shape)} of {tuple(weight.shape)} in blocks of {block_size} must"
            f" be {wanted}"
        )
    values = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    wide = scales.float().repeat_interleave(block_size[1], 1)[:, :columns]
    for number in range(wanted[0]):
        part = slice(number * block_size[0], (number + 1) * block_size[0])
        values[part] = (weight[part].float() * wide[number]).to(dtype)
    return values


def is_stored_in_fp8(tensor_name: str) -> bool:
    """Return whether FP8 checkpoints store this tensor in FP8: the matrices of attention, MLP and
    experts.

    Embeddings, heads, norms, routers and the projection of a multi-token prediction layer keep
    their type.
    """
    return _IN_FP8.search(tensor_name) is not None and not tensor_name.endswith(".eh_proj.weight")


def quantise_to_fp8(
    weight: Tensor, block_size: tuple[int, int] = FP8_BLOCK
) -> tuple[Tensor, Tensor]:
    """Quantise a weight in blocks. Return (float8_e4m3fn [rows, columns], float32 scales [blocks of
    rows, blocks of columns]).

    The scale of a block is s = max(amax, 1e-12) / 448, and q = weight / s, rounded to nearest even;
    the last blocks may be short. This is the formula of slime's tools/convert_hf_to_fp8.py. For a
    bfloat16 weight, quantising the output of `dequantise_fp8` again gives the same bytes.

    Raise ValueError for a weight that is not finite.
    """
    rows, columns = weight.shape
    shape = (-(-rows // block_size[0]), -(-columns // block_size[1]))
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(shape, device=weight.device)
    room = _CPU_ELEMENTS if weight.device.type == "cpu" else _DEVICE_ELEMENTS
    at_once = max(1, room // (block_size[0] * columns))  # rows of blocks
    for first in range(0, shape[0], at_once):
        part = slice(first * block_size[0], (first + at_once) * block_size[0])
        own = slice(first, first + at_once)
        values = weight[part].float()
        missing = -len(values) % block_size[0]
        largest = pad(values.abs(), (0, 0, 0, missing)).view(-1, block_size[0], columns).amax(1)
        padded = pad(largest, (0, shape[1] * block_size[1] - columns)).view(
            -1, shape[1], block_size[1]
        )
        scales[own] = padded.amax(2).clamp(min=_SMALLEST_AMAX) / _LARGEST
        wide = (
            scales[own]
            .repeat_interleave(block_size[1], 1)[:, None, :columns]
            .expand(-1, block_size[0], -1)
        )
        wide = wide.reshape(-1, columns)[: len(values)]
        quantised[part] = (values / wide).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    if not scales.isfinite().all():
        raise ValueError("its weights are not all finite numbers, which FP8 cannot hold")
    return quantised, scales


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an MXFP4 tensor in `dtype`: value * 2^(scale - 127), two values a byte, transposed to
    the layout of GPT-OSS, input axis first. `blocks` [..., out, groups, 16] bytes and `scales`
    [..., out, groups] give [..., groups * 32, out]. Raise ValueError for shapes or a type that do
    not fit.
    """
    if (
        blocks.dtype != torch.uint8
        or blocks.shape[-1] * 2 != _GROUP
        or blocks.shape[:-1] != scales.shape
    ):
        raise ValueError(
            f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} are not of MXFP4"
        )
    table = torch.tensor(_FLOAT4)
    values = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1).flatten(-2)
    values = torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)
    return values.to(dtype).transpose(-1, -2).contiguous()
