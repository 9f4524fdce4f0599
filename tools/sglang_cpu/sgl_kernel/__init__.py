"""torch versions of the `sgl_kernel` parts that SGLang needs even without AMX. Any other name
raises when called.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

__version__ = "0.0.0"
_MASK = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_loc: Tensor,
    _: Any,
) -> None:
    """Rows of the request-to-token table get the cache locations of their new tokens, in order."""
    position = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        count = end - start
        req_to_token[row, start:end] = out_loc[position : position + count].to(req_to_token.dtype)
        position += count


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate(word * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    return _rotate(state ^ word, 13) * 5 + 0xE6546B64 & _MASK


def _murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit) of (seed, position, column), for seeded sampling."""
    seed = seed.to(torch.int64)[:, None]
    state = torch.zeros(1, 1, dtype=torch.int64)
    for word in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64)[:, None] & _MASK):
        state = _mix(state, word)
    state = _mix(state, col_indices.to(torch.int64)[None, :] & _MASK) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B & _MASK
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def _picked(
    scores: Tensor, topk: int, renormalize: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(weights, numbers of the experts) of each token; `bias` picks and does not weigh."""
    experts = torch.topk(scores if bias is None else scores + bias, topk, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.to(torch.int32)


def _topk_softmax(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _picked(gating_output.float().softmax(-1), topk, renormalize, correction_bias)


def _topk_sigmoid(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _picked(gating_output.float().sigmoid(), topk, renormalize, correction_bias)


_TOPK = (
    "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor?"
    " correction_bias=None) -> (Tensor, Tensor)"
)
for _name, _function in (("topk_softmax_cpu", _topk_softmax), ("topk_sigmoid_cpu", _topk_sigmoid)):
    _library.define(_name + _TOPK)
    _library.impl(_name, _function, "CPU")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on this CPU")

    missing.__name__ = name
    return missing
