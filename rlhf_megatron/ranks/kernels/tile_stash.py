"""The stash of tiles that the forward pass keeps, so that the backward pass need not compute their
logits again.

Either the logits themselves, which costs memory and no precision, or probabilities as float16. Of a
tile with row maxima n these are STASH_SCALE e^(z - n), which float16 rounds by at most 2^-11 of
itself down to z - n = -20 and by 2^-40 below. So with p the exact probabilities and d what the
stash makes of them

    |d_j - p_j| <= 2^-11 p_j + 2^-40 max p,     d_j = p_j at the largest logit of each tile
                                                (e^0 is exact)

and the gradient of a row's logits for a gradient u of its log-probability, g = u (1[target] - p),
is off by at most 2^-11 |u| |p'| (2-norm; p' is p without the largest logit; 2^-40 left out).
Relative to |g| that is never above 2^-11 / sqrt 2 = 3.5e-4, a sixth of what rounding g to bfloat16
costs (2^-9): where the target t is the largest logit, |g|^2 = u^2 ((sum p')^2 + |p'|^2) and sum p'
>= |p'|; where not, 1 - p_t is the sum of all others, so its square is at least the sum of theirs,
and the largest is not below p_t. Errors of columns are independent of each other: those of the
hidden states' gradient, which sums over columns, are 1e-6 to 4e-5 of it. The entropy's part of g_j,
-w p (log p + H), is off by at most 2^-11 |w| p |log p + H + 1|.
"""

# R rows, C columns of a chunk

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# one of a CPU's four products is saved of what fits; a GPU has better uses for it
_EXACT_BYTES = {"cpu": 48 * 2**20}


@dataclass
class StashBudget:
    """The bytes left for float16 chunks, and for logit chunks. Either budget ends with the first
    chunk that does not fit.
    """

    float16_bytes: int
    logit_bytes: int

    @staticmethod
    def make_for_device(device_type: str, stash_bytes: int) -> StashBudget:
        """Return a budget of `stash_bytes` for float16, and of a fixed number of bytes for logits
        on a CPU.
        """
        return StashBudget(stash_bytes, _EXACT_BYTES.get(device_type, 0))

    def reserve_float16_chunk(self, num_rows: int, num_columns: int, element_size: int) -> bool:
        """Return whether a chunk fits as float16, with the largest z of each row beside it, and
        take its bytes from the budget; the first chunk that does not fit ends the budget.
        `element_size` is the bytes of a logit.
        """
        num_bytes = num_rows * (2 * num_columns + element_size)
        self.float16_bytes = (
            self.float16_bytes - num_bytes if num_bytes <= self.float16_bytes else -1
        )
        return self.float16_bytes >= 0

    def reserve_logit_chunk(self, num_rows: int, num_columns: int, element_size: int) -> bool:
        """Return whether a chunk fits as logits, and take its bytes from the budget; the first
        chunk that does not fit ends the budget.
        """
        num_bytes = num_rows * num_columns * element_size
        self.logit_bytes = self.logit_bytes - num_bytes if num_bytes <= self.logit_bytes else -1
        return self.logit_bytes >= 0


@dataclass(frozen=True)
class StashedChunk:
    """A chunk of the stash. `max_R` holds the largest z of each row in the chunk, to which the
    float16 `values_RC` are relative; None where `values_RC` are logits.
    """

    values_RC: Tensor
    max_R: Tensor | None

    def select_rows(self, rows: slice | Tensor) -> StashedChunk:
        """Return some of the rows: views for a slice, copies for an index."""
        return StashedChunk(self.values_RC[rows], None if self.max_R is None else self.max_R[rows])


class TileStash:
    """The stash of vocabulary chunks, from the first chunk on until the budget ends. Each chunk is
    read once, because readers destroy it.
    """

    def __init__(self, budget: StashBudget) -> None:
        self._budget = budget
        self._chunks: dict[int, StashedChunk] = {}

    def allocate_chunk(
        self, first_column: int, num_rows: int, num_columns: int, logits_like: Tensor
    ) -> StashedChunk | None:
        """Return memory for the chunk that begins at column `first_column` and keep it in the
        stash; None where it does not fit. `logits_like` has the type and device of the logits.
        """
        element_size = logits_like.element_size()
        if self._budget.reserve_float16_chunk(num_rows, num_columns, element_size):
            values_RC = logits_like.new_empty(num_rows, num_columns, dtype=torch.float16)
            chunk = StashedChunk(values_RC, logits_like.new_empty(num_rows))
        elif self._budget.reserve_logit_chunk(num_rows, num_columns, element_size):
            chunk = StashedChunk(logits_like.new_empty(num_rows, num_columns), None)
        else:
            return None
        self._chunks[first_column] = chunk
        return chunk

    def pop_chunk(self, first_column: int) -> StashedChunk | None:
        """Remove the chunk from the stash and return it; None where it is not there. A second
        backward pass of the same graph computes the chunk again.
        """
        return self._chunks.pop(first_column, None)
