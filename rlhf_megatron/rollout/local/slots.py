"""The rows of running samples as static tensors: cache, tokens drawn so far, and what sampling needs to know of each.

A token's column is its position in the whole sequence, prompt included. Rows 0 .. n-1 are in use, without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.rollout.local.model import LocalModel

_COLUMN_STEP = 16  # columns that attention sees are a multiple of it (CUDA kernels want aligned masks)


def padded_columns(num_columns: int) -> int:
    return -(-num_columns // _COLUMN_STEP) * _COLUMN_STEP


class Slots:
    """`ages[i]`: tokens of row i that lie in the cache; its newest token, `tokens[i, ages[i]]`, does not yet."""

    def __init__(self, model: LocalModel, num_rows: int, num_columns: int, num_stop_ids: int = 1) -> None:
        device = model.device
        self.model = model
        self.cache = model.new_cache(num_rows, num_columns)
        self.tokens = torch.zeros(num_rows, num_columns + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(num_rows, num_columns + 1, dtype=torch.float32, device=device)
        self.integers = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.ages, self.prompt_lengths, self.seeds = self.integers  # views
        self.stop_ids = torch.full((num_rows, num_stop_ids), -1, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(num_rows, device=device)
        self.column_numbers = torch.arange(num_columns, device=device)
        # The host's copies, so that a step needs no other transfer than "who drew a stop token".
        self.host_ages = np.zeros(num_rows, dtype=np.int64)
        self.host_limits = np.zeros(num_rows, dtype=np.int64)  # tokens, prompt included, at which a row ends
        self.host_joined = np.zeros(num_rows, dtype=np.int64)  # age at which it joined

    @property
    def num_rows(self) -> int:
        return self.cache.shape[2]

    @property
    def num_columns(self) -> int:
        return self.cache.shape[3]

    @property
    def num_stop_ids(self) -> int:
        return self.stop_ids.shape[1]

    def resized(self, num_used: int, num_rows: int, num_columns: int, num_stop_ids: int) -> Slots:
        """New slots of that size that hold the first `num_used` rows of these."""
        new = Slots(self.model, num_rows, num_columns, num_stop_ids)
        columns = min(self.num_columns, num_columns)
        used = slice(num_used)
        new.cache[:, :, used, :columns] = self.cache[:, :, used, :columns]
        new.tokens[used, : columns + 1] = self.tokens[used, : columns + 1]
        new.log_probs[used, : columns + 1] = self.log_probs[used, : columns + 1]
        new.integers[:, used] = self.integers[:, used]
        new.stop_ids[used, : self.num_stop_ids] = self.stop_ids[used]
        new.host_ages[used] = self.host_ages[used]
        new.host_limits[used] = self.host_limits[used]
        new.host_joined[used] = self.host_joined[used]
        return new

    def join(
        self,
        first: int,
        keys_values: Tensor,
        sources: Sequence[int],
        ages: Sequence[int],
        prompt_lengths: Sequence[int],
        limits: Sequence[int],
        seeds: Sequence[int],
        stop_ids: Sequence[tuple[int, ...]],
    ) -> None:
        """Fill rows `first` and on. Row k gets row `sources[k]` of `keys_values` [2, layers, N, P, Hk, D]."""
        device = self.model.device
        rows = slice(first, first + len(sources))
        columns = min(keys_values.shape[3], self.num_columns)
        index = torch.tensor(sources, device=device)
        self.cache[:, :, rows, :columns] = keys_values[:, :, :, :columns].index_select(2, index)
        self.integers[:, rows] = torch.tensor([ages, prompt_lengths, seeds], device=device)
        padded = [[*ids, *[-1] * (self.num_stop_ids - len(ids))] for ids in stop_ids]
        self.stop_ids[rows] = torch.tensor(padded, device=device)
        self.host_ages[rows] = ages
        self.host_joined[rows] = ages
        self.host_limits[rows] = limits

    def move(self, sources: list[int], targets: list[int], num_columns: int) -> None:
        """Overwrite rows `targets` with rows `sources`; `num_columns` of the cache are in use."""
        device = self.model.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self.cache[:, :, target, :num_columns] = self.cache[:, :, source, :num_columns]
        self.tokens[target, : num_columns + 1] = self.tokens[source, : num_columns + 1]
        self.log_probs[target, : num_columns + 1] = self.log_probs[source, : num_columns + 1]
        self.integers[:, target] = self.integers[:, source]
        self.stop_ids[target] = self.stop_ids[source]
        for column in (self.host_ages, self.host_limits, self.host_joined):
            column[targets] = column[sources]
