"""What the forward pass keeps of its tiles, so that the backward pass need not compute their logits again.

Either the logits themselves, which changes nothing but memory and time; or probabilities as float16. Of a tile with row maxima n the stash has STASH_SCALE e^(z - n), which float16 rounds by at most 2^-11 of itself down to
z - n = -20 and by 2^-40 below. So with p the exact probabilities and d what the stash makes of them

    |d_j - p_j| <= 2^-11 p_j + 2^-40 max p,     d_j = p_j at the largest logit of each tile (e^0 is exact)

and the gradient of a row's logits for a gradient u of its log-probability, g = u (1[target] - p), is off by at most
2^-11 |u| |p'| (2-norm; p' is p without the largest logit; 2^-40 left out). Relative to |g| that is never above
2^-11 / sqrt 2 = 3.5e-4, a sixth of what rounding g to bfloat16 costs (2^-9): where the target t is the largest logit,
|g|^2 = u^2 ((sum p')^2 + |p'|^2) and sum p' >= |p'|; where not, 1 - p_t is the sum of all others, so its square is at
least the sum of theirs, and the largest is not below p_t. Errors of columns are independent of each other: those of
the hidden states' gradient, which sums over columns, are 1e-6 to 4e-5 of it. The entropy's part of g_j,
-w p (log p + H), is off by at most 2^-11 |w| p |log p + H + 1|.
"""

# R rows, C columns of a chunk

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_BYTES = {"cpu": 48 * 2**20}
"""How much is kept of logits themselves, on a device. A CPU's head is bound by its products, one of four is saved of
what fits: a small model's whole batch. A GPU has better uses for its memory: 16 bits of a stash."""


@dataclass(frozen=True)
class KeptChunk:
    """`max_R`: the largest z of each row in the chunk, of which `values_RC` are float16 ratios; None: logits."""

    values_RC: Tensor
    max_R: Tensor | None

    def of(self, rows: slice | Tensor) -> KeptChunk:
        """Those of some rows: views of a slice, copies of an index."""
        return KeptChunk(self.values_RC[rows], None if self.max_R is None else self.max_R[rows])


class Stash:
    """As many of the first vocabulary chunks as fit into `num_bytes`, and of the next ones the logits, as many as fit
    into `exact_bytes`. Read once, chunk by chunk: readers destroy it."""

    def __init__(self, num_bytes: int, exact_bytes: int) -> None:
        self._bytes_left = num_bytes
        self._exact_bytes_left = exact_bytes
        self._chunks: dict[int, KeptChunk] = {}

    def make_room(self, first: int, num_rows: int, num_columns: int, like: Tensor) -> KeptChunk | None:
        """Where to keep the chunk that begins at column `first`; None: it does not fit. `like`: type of logits."""
        num_bytes = num_rows * (2 * num_columns + like.element_size())
        exact_bytes = num_rows * num_columns * like.element_size()
        if num_rows == 0:
            return None
        if num_bytes <= self._bytes_left:
            self._bytes_left -= num_bytes
            values_RC = like.new_empty(num_rows, num_columns, dtype=torch.float16)
            chunk = KeptChunk(values_RC, like.new_empty(num_rows))
        elif exact_bytes <= self._exact_bytes_left:
            self._exact_bytes_left -= exact_bytes
            chunk = KeptChunk(like.new_empty(num_rows, num_columns), None)
        else:
            return None
        self._chunks[first] = chunk
        return chunk

    def take(self, first: int) -> KeptChunk | None:
        """The chunk, which the stash then no longer has: a second backward pass computes it again."""
        return self._chunks.pop(first, None)
