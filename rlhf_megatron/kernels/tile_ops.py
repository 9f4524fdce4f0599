"""What a backend of `log_prob_chunked` does with one tile of logits. `TorchTileOps` is plain torch, on any device.

A tile is [R rows, C vocabulary columns] of raw logits in float32 (float64), contiguous. With z = logit / temperature,
the running statistics of a row over the tiles seen so far are (Milakov and Gimelshein, "Online normalizer calculation
for softmax", arXiv 1805.02867, extended by the entropy's sum and that of the squares)

    m = max z      s = sum e^(z-m)      b = sum (z-m) e^(z-m)      g = z at the target      q = sum e^(2(z-m))
    log p(target) = g - m - log s       H = log s - b / s          sum p^2 = q / s^2

and the backward, with p = e^(z - log Z), log Z = m + log s and upstream gradients u (log-prob) and w (entropy):

    d loss / d logit_j = (u (1[j = target] - p_j) - w p_j (log p_j + H)) / temperature
"""

# R rows of a tile, C columns of a tile

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MIN_LOGIT = (
    -1e30
)  # running maximum before the first tile: finite, so that a shard of padding only combines to 0, not NaN
STASH_SCALE = 2.0**15  # float16 keeps its full 11 bits from e^0 to e^-20 of a row's largest, and has 0 below e^-27.7


@dataclass(frozen=True)
class RowStatistics:
    """Views of running statistics, float32 (float64); changed in place. `b` and `q` are None where nobody asked."""

    max_R: Tensor
    sum_R: Tensor
    target_R: Tensor  # -inf until the tile with the target came
    weighted_R: Tensor | None  # b
    squares_R: Tensor | None  # q


@dataclass(frozen=True)
class RowGradients:
    """What the gradient of a tile needs of its rows, float32 (float64)."""

    log_z_R: Tensor  # of the whole vocabulary
    inv_temperature_R: Tensor | None  # None: 1, or already in the logits
    grad_log_probs_R: Tensor  # u
    entropies_R: Tensor | None  # H; None where w is
    grad_entropies_R: Tensor | None  # w; None: the entropy has no gradient


class TileOps(Protocol):
    def update(
        self,
        logits_RC: Tensor,
        inv_temperature_R: Tensor | None,
        columns_R: Tensor,
        statistics: RowStatistics,
        stash_RC: Tensor | None = None,
        stash_max_R: Tensor | None = None,
    ) -> None:
        """Take a tile into `statistics`. May destroy `logits_RC`.

        `inv_temperature_R`: None where the logits are z already. `columns_R`: int64, the target's column in this tile,
        or outside of [0, C). `stash_RC` (float16, contiguous) gets STASH_SCALE e^(z - n) with n the largest z of the
        row in this tile, `stash_max_R` gets n.
        """
        ...

    def grad_logits(self, logits_RC: Tensor, columns_R: Tensor, rows: RowGradients, dtype: torch.dtype) -> Tensor:
        """[R, C] d loss / d logit in `dtype`, contiguous. May destroy `logits_RC`, and may return its memory."""
        ...

    def grad_logits_from_stash(
        self, stash_RC: Tensor, stash_max_R: Tensor, columns_R: Tensor, rows: RowGradients, dtype: torch.dtype
    ) -> Tensor:
        """As `grad_logits`, from what `update` stashed: p = stash / STASH_SCALE e^(n - log Z), and p log p = 0 where
        the stash is 0. May destroy `stash_RC`, and may return its memory where `dtype` has 16 bits."""
        ...
