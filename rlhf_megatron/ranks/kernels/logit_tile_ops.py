"""The operations of a backend of `log_prob_chunked` on one tile of logits. `TorchTileOps` is plain
torch, on any device.

A tile is [R rows, C vocabulary columns] of raw logits in float32 (float64), contiguous. With z =
logit / temperature, the running statistics of a row over the tiles seen so far are (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, extended by the entropy's
sum and that of the squares)

    m = max z      s = sum e^(z-m)      b = sum (z-m) e^(z-m)      g = z at the target
                   q = sum e^(2(z-m))
    log p(target) = g - m - log s       H = log s - b / s          sum p^2 = q / s^2

and the backward, with p = e^(z - log Z), log Z = m + log s and upstream gradients u (log-prob)
and w (entropy):

    d loss / d logit_j = (u (1[j = target] - p_j) - w p_j (log p_j + H)) / temperature

With a softcap c the logits l of the product become c tanh(l / c) first, and the gradient is
multiplied by 1 - tanh^2(l / c).
"""

# R rows of a tile, B rows of a block of it, C columns of a tile

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# maximum before the first tile: finite, so that a shard of padding only combines to 0, not NaN
MIN_LOGIT = -1e30
# float16 keeps its full 11 bits from e^0 to e^-20 of a row's largest, and has 0 below e^-27.7
STASH_SCALE = 2.0**15
_LOG2_E = 1.0 / math.log(2.0)
# elements that TorchTileOps passes over at a time: they stay in a CPU's cache
_BLOCK = {"cpu": 2**17, "cuda": 2**24}


@dataclass(frozen=True)
class RowStatistics:
    """The running statistics of rows, float32 (float64), shapes [..., R]. `weighted_R` and
    `squares_R` are None where not requested.
    """

    max_R: Tensor
    sum_R: Tensor
    target_R: Tensor  # -inf until the tile with the target came
    weighted_R: Tensor | None  # b
    squares_R: Tensor | None  # q

    def rescale_to_max(self, max_R: Tensor) -> RowStatistics:
        """Return the same statistics relative to another maximum m, which must not be below their
        own.
        """
        shift_R = self.max_R - max_R
        scale_R = shift_R.exp()
        weighted_R = (
            None if self.weighted_R is None else (self.weighted_R + shift_R * self.sum_R) * scale_R
        )
        squares_R = None if self.squares_R is None else self.squares_R * scale_R.square()
        return RowStatistics(max_R, self.sum_R * scale_R, self.target_R, weighted_R, squares_R)


@dataclass(frozen=True)
class RowGradientInputs:
    """The numbers of its rows that the gradient of a tile needs, float32 (float64)."""

    log_z_R: Tensor  # of the whole vocabulary
    inv_temperature_R: Tensor | None  # None: 1, or already in the logits
    grad_log_probs_R: Tensor  # u
    entropies_R: Tensor | None  # H; None where w is
    grad_entropies_R: Tensor | None  # w; None: the entropy has no gradient
    # what rounding left out of `log_z_R`; at logits of 200 it is 1e-5 of all p
    log_z_rest_R: Tensor | None = None

    def select_rows(self, rows: slice | Tensor) -> RowGradientInputs:
        """Return the inputs of some of the rows: views for a slice, copies for an index."""
        return RowGradientInputs(
            self.log_z_R[rows],
            None if self.inv_temperature_R is None else self.inv_temperature_R[rows],
            self.grad_log_probs_R[rows],
            None if self.entropies_R is None else self.entropies_R[rows],
            None if self.grad_entropies_R is None else self.grad_entropies_R[rows],
            None if self.log_z_rest_R is None else self.log_z_rest_R[rows],
        )


class TileOps(Protocol):
    softcap: float | None  # of the logits that tiles bring; with one there is no stash

    def update_statistics(
        self,
        logits_RC: Tensor,
        inv_temperature_R: Tensor | None,
        columns_R: Tensor,
        statistics: RowStatistics,
        stash_RC: Tensor | None = None,
        stash_max_R: Tensor | None = None,
        first_column: int = 0,
    ) -> None:
        """Merge a tile into `statistics`, in place. May destroy `logits_RC`.

        `inv_temperature_R` is None where the logits are z already. `columns_R` (int64) is the
        target's column in the shard, of which column `first_column` is the tile's first: outside of
        [first, first + C) where another tile has the target. `stash_RC` (float16, contiguous)
        receives STASH_SCALE e^(z - n) with n the largest z of the row in this tile, and
        `stash_max_R` receives n.
        """
        ...

    def compute_logit_gradient(
        self,
        logits_RC: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        """Return [R, C] d loss / d logit in `dtype`, contiguous. May destroy `logits_RC`, and may
        return its memory.
        """
        ...

    def compute_logit_gradient_from_stash(
        self,
        stash_RC: Tensor,
        stash_max_R: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        """Return the gradient of `compute_logit_gradient` from the values that `update_statistics`
        stashed: p = stash / STASH_SCALE e^(n - log Z), and p log p = 0 where the stash is 0. May
        destroy `stash_RC`, and may return its memory where `dtype` has 16 bits.
        """
        ...


class TorchTileOps:
    """`TileOps` in plain torch, which works in blocks of rows that stay in a CPU's cache, in place
    where possible.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap
        self._scratch: Tensor | None = None

    def update_statistics(
        self,
        logits_RC: Tensor,
        inv_temperature_R: Tensor | None,
        columns_R: Tensor,
        statistics: RowStatistics,
        stash_RC: Tensor | None = None,
        stash_max_R: Tensor | None = None,
        first_column: int = 0,
    ) -> None:
        """Merge a tile into `statistics`, in place, and destroy `logits_RC`: see `TileOps`."""
        if self.softcap is not None:
            logits_RC.div_(self.softcap).tanh_().mul_(self.softcap)
        if inv_temperature_R is not None:
            logits_RC.mul_(inv_temperature_R[:, None])
        is_here_R, index_R1 = _locate_target_column(logits_RC, columns_R - first_column)
        found_R = logits_RC.gather(1, index_R1)[:, 0]
        statistics.target_R.copy_(torch.where(is_here_R, found_R, statistics.target_R))

        max_R = logits_RC.amax(1)
        tile = RowStatistics(
            max_R,
            torch.empty_like(max_R),
            statistics.target_R,
            None if statistics.weighted_R is None else torch.empty_like(max_R),
            None if statistics.squares_R is None else torch.empty_like(max_R),
        )
        for rows in _iter_row_blocks(logits_RC):
            z_BC = logits_RC[rows].sub_(max_R[rows, None])
            exp_BC = _compute_exp(
                z_BC, z_BC if tile.weighted_R is None else self._get_scratch_like(z_BC)
            )
            tile.sum_R[rows] = exp_BC.sum(1)
            if stash_RC is not None:
                stash_RC[rows].copy_(exp_BC * STASH_SCALE)
            if tile.weighted_R is not None:
                tile.weighted_R[rows] = z_BC.mul_(exp_BC).sum(1)
            if tile.squares_R is not None:
                tile.squares_R[rows] = exp_BC.square_().sum(1)
        if stash_max_R is not None:
            stash_max_R.copy_(max_R)
        _merge_statistics(statistics, tile)

    def compute_logit_gradient(
        self,
        logits_RC: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        """Return the gradient of a tile's logits in `dtype`, and overwrite `logits_RC`: see
        `TileOps`.
        """
        weights = _RowGradientWeights.from_gradient_inputs(gradient_inputs)
        for block in _iter_row_blocks(logits_RC):
            z_BC = logits_RC[block]
            slope_BC = None
            if self.softcap is not None:
                slope_BC = 1 - z_BC.div_(self.softcap).tanh_().square()
                z_BC.mul_(self.softcap)
            if gradient_inputs.inv_temperature_R is not None:
                z_BC.mul_(gradient_inputs.inv_temperature_R[block, None])
            log_p_BC = z_BC.sub_(gradient_inputs.log_z_R[block, None])
            p_BC = _compute_exp(
                log_p_BC, log_p_BC if weights.slope_R is None else self._get_scratch_like(log_p_BC)
            )
            weights.apply_to_block(log_p_BC, p_BC, block)
            _add_target_gradient(log_p_BC, columns_R[block] - first_column, weights.target_R[block])
            if slope_BC is not None:
                log_p_BC.mul_(slope_BC)
        return logits_RC.to(dtype)

    def compute_logit_gradient_from_stash(
        self,
        stash_RC: Tensor,
        stash_max_R: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        """Return the gradient of a tile's logits from the stash, in its memory where `dtype` has 16
        bits: see `TileOps`.
        """
        weights = _RowGradientWeights.from_gradient_inputs(gradient_inputs)
        scale_R = (stash_max_R - gradient_inputs.log_z_R).exp() / STASH_SCALE
        # 16-bit gradients take the stash's place, row by row: a block is read before it is written.
        is_in_place = dtype.itemsize == stash_RC.element_size()
        out_RC = stash_RC.view(dtype) if is_in_place else torch.empty_like(stash_RC, dtype=dtype)
        for block in _iter_row_blocks(stash_RC):
            p_BC = stash_RC[block].to(scale_R.dtype).mul_(scale_R[block, None])
            log_p_BC = (
                p_BC
                if weights.slope_R is None
                else p_BC.clamp_min(torch.finfo(p_BC.dtype).tiny).log_()
            )
            weights.apply_to_block(log_p_BC, p_BC, block)
            out_RC[block] = _add_target_gradient(
                log_p_BC, columns_R[block] - first_column, weights.target_R[block]
            )
        return out_RC

    def _get_scratch_like(self, block_BC: Tensor) -> Tensor:
        """Return scratch memory in the shape of the block; the next call may return the same
        memory.
        """
        if self._scratch is None or self._scratch.numel() < block_BC.numel():
            self._scratch = block_BC.new_empty(block_BC.numel())
        return self._scratch[: block_BC.numel()].view_as(block_BC)


def _merge_statistics(statistics: RowStatistics, tile_statistics: RowStatistics) -> None:
    """Merge a tile's statistics into the running ones, in place. The target's logit is left alone:
    both share it already.
    """
    max_R = torch.maximum(statistics.max_R, tile_statistics.max_R)
    mine = statistics.rescale_to_max(max_R)
    its = tile_statistics.rescale_to_max(max_R)
    statistics.max_R.copy_(max_R)
    statistics.sum_R.copy_(mine.sum_R + its.sum_R)
    if (
        statistics.weighted_R is not None
        and mine.weighted_R is not None
        and its.weighted_R is not None
    ):
        statistics.weighted_R.copy_(mine.weighted_R + its.weighted_R)
    if (
        statistics.squares_R is not None
        and mine.squares_R is not None
        and its.squares_R is not None
    ):
        statistics.squares_R.copy_(mine.squares_R + its.squares_R)


@dataclass(frozen=True)
class _RowGradientWeights:
    """A row's numbers for the gradient p (constant + slope log p), and the part that the target
    adds to it.
    """

    target_R: Tensor  # u / temperature
    constant_R: Tensor
    slope_R: Tensor | None  # None: 0

    @staticmethod
    def from_gradient_inputs(gradient_inputs: RowGradientInputs) -> _RowGradientWeights:
        """Return the weights for p = e^(z - log_z_R). That p lacks the factor of the rest of log Z,
        which goes into the weights.
        """
        u_R = gradient_inputs.grad_log_probs_R
        w_R = gradient_inputs.grad_entropies_R
        H_R = gradient_inputs.entropies_R
        inv_R = gradient_inputs.inv_temperature_R
        rest_R = gradient_inputs.log_z_rest_R
        target_R = u_R if inv_R is None else u_R * inv_R
        if w_R is None:
            constant_R = -target_R
            slope_R = None
        else:
            assert H_R is not None, "a gradient of entropies needs the entropies"
            slope_R = -w_R if inv_R is None else -w_R * inv_R
            constant_R = slope_R * (H_R if rest_R is None else H_R - rest_R) - target_R
        if rest_R is not None:
            factor_R = (-rest_R).exp()
            constant_R = constant_R * factor_R
            slope_R = None if slope_R is None else slope_R * factor_R
        return _RowGradientWeights(target_R, constant_R, slope_R)

    def apply_to_block(self, log_p_BC: Tensor, p_BC: Tensor, row_block: slice) -> None:
        """Overwrite `log_p_BC` with the gradient p (constant + slope log p); without a slope
        `log_p_BC` must hold p.
        """
        if self.slope_R is None:
            log_p_BC.mul_(self.constant_R[row_block, None])
        else:
            log_p_BC.mul_(self.slope_R[row_block, None]).add_(
                self.constant_R[row_block, None]
            ).mul_(p_BC)


def _add_target_gradient(grad_RC: Tensor, columns_R: Tensor, u_R: Tensor) -> Tensor:
    """Add u at the target's column of each row, in place, where the target is in this tile, and
    return the tile.
    """
    is_here_R, index_R1 = _locate_target_column(grad_RC, columns_R)
    at_target_R1 = grad_RC.gather(1, index_R1) + torch.where(is_here_R, u_R, 0.0)[:, None]
    return grad_RC.scatter_(1, index_R1, at_target_R1)


def _locate_target_column(tile_RC: Tensor, columns_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return (whether the target is in this tile, [R]; the target's column in the tile, clamped
    into the tile, [R, 1]).
    """
    num_columns = tile_RC.shape[1]
    return (columns_R >= 0) & (columns_R < num_columns), columns_R.clamp(0, num_columns - 1)[
        :, None
    ]


def _compute_exp(x: Tensor, out: Tensor) -> Tensor:
    """Write e^x to `out` and return it. On a CPU this uses exp2, several times as fast as torch's
    exp; the factor costs |x| / 2^24 of the result.
    """
    return torch.exp(x, out=out) if x.is_cuda else torch.mul(x, _LOG2_E, out=out).exp2_()


def choose_rows_per_block(num_rows: int, num_columns: int, device_type: str) -> int:
    """Return the number of rows of a tile that TorchTileOps handles at a time."""
    return max(1, min(num_rows, _BLOCK.get(device_type, num_rows * num_columns) // num_columns))


def _iter_row_blocks(tile_RC: Tensor) -> Iterator[slice]:
    """Yield slices that cover the rows of a tile in blocks."""
    size = choose_rows_per_block(tile_RC.shape[0], tile_RC.shape[1], tile_RC.device.type)
    for first in range(0, tile_RC.shape[0], size):
        yield slice(first, min(first + size, tile_RC.shape[0]))
