"""Samples on their way through the generator, and the rows of those that run as static tensors:
cache, tokens drawn so far, and what sampling needs to know of each.

A token's column is its position in the whole sequence, prompt included. Rows 0 .. n-1 are in
use, without gaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.data.expert_route_files import write_route_file
from rlhf_megatron.rollout.engine_interface import (
    UNSYNCED,
    FinishReason,
    GeneratedSample,
    SamplingParams,
    VersionSpan,
)
from rlhf_megatron.rollout.local.local_model import LocalModel

# columns that attention sees are a multiple of it (CUDA kernels want aligned masks)
_COLUMN_STEP = 16


def round_up_columns(num_columns: int) -> int:
    """Return the number of columns rounded up to a multiple of _COLUMN_STEP."""
    return -(-num_columns // _COLUMN_STEP) * _COLUMN_STEP


class CacheSlots:
    """The rows of the running samples as static tensors. `ages[i]` is the number of tokens of row i
    that lie in the cache; the row's newest token, `tokens[i, ages[i]]`, does not yet.
    """

    def __init__(
        self, model: LocalModel, num_rows: int, num_columns: int, num_stop_ids: int = 1
    ) -> None:
        device = model.device
        self.model = model
        self.cache = model.make_cache(num_rows, num_columns)
        self.routes = model.make_routes(num_rows, num_columns)
        self.tokens = torch.zeros(num_rows, num_columns + 1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(num_rows, num_columns + 1, dtype=torch.float32, device=device)
        self.row_integers = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.ages, self.prompt_lengths, self.seeds = self.row_integers  # views
        self.stop_ids = torch.full((num_rows, num_stop_ids), -1, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(num_rows, device=device)
        self.column_numbers = torch.arange(num_columns, device=device)
        # The host's copies, so that a step needs no other transfer than "who drew a stop token".
        self.host_ages = np.zeros(num_rows, dtype=np.int64)
        # tokens, prompt included, at which a row ends
        self.host_limits = np.zeros(num_rows, dtype=np.int64)
        self.host_join_ages = np.zeros(num_rows, dtype=np.int64)  # age at which it joined

    @property
    def num_rows(self) -> int:
        """Return the number of rows that are allocated."""
        return self.cache.shape[2]

    @property
    def num_columns(self) -> int:
        """Return the number of token columns that are allocated."""
        return self.cache.shape[3]

    @property
    def num_stop_ids(self) -> int:
        """Return how many stop tokens a row can have."""
        return self.stop_ids.shape[1]

    def make_resized_copy(
        self, num_used: int, num_rows: int, num_columns: int, num_stop_ids: int
    ) -> CacheSlots:
        """Return new slots of these sizes with a copy of the first `num_used` rows."""
        new = CacheSlots(self.model, num_rows, num_columns, num_stop_ids)
        columns = min(self.num_columns, num_columns)
        used = slice(num_used)
        new.cache[:, :, used, :columns] = self.cache[:, :, used, :columns]
        new.routes[used, :columns] = self.routes[used, :columns]
        new.tokens[used, : columns + 1] = self.tokens[used, : columns + 1]
        new.log_probs[used, : columns + 1] = self.log_probs[used, : columns + 1]
        new.row_integers[:, used] = self.row_integers[:, used]
        new.stop_ids[used, : self.num_stop_ids] = self.stop_ids[used]
        new.host_ages[used] = self.host_ages[used]
        new.host_limits[used] = self.host_limits[used]
        new.host_join_ages[used] = self.host_join_ages[used]
        return new

    def fill_rows(
        self,
        first_row: int,
        keys_values: Tensor,
        routes: Tensor,
        sources: Sequence[int],
        ages: Sequence[int],
        prompt_lengths: Sequence[int],
        limits: Sequence[int],
        seeds: Sequence[int],
        stop_ids: Sequence[tuple[int, ...]],
    ) -> None:
        """Fill the rows from `first_row` on. Row k gets row `sources[k]` of `keys_values` [2,
        layers, N, P, Hk, D] and of `routes` [N, P, layers, experts], and item k of the other lists.
        `prompt_lengths` and `limits` are in tokens; a row ends at its limit, prompt included.
        """
        device = self.model.device
        rows = slice(first_row, first_row + len(sources))
        columns = min(keys_values.shape[3], self.num_columns)
        index = torch.tensor(sources, device=device)
        self.cache[:, :, rows, :columns] = keys_values[:, :, :, :columns].index_select(2, index)
        self.routes[rows, :columns] = routes[:, :columns].index_select(0, index)
        self.row_integers[:, rows] = torch.tensor([ages, prompt_lengths, seeds], device=device)
        padded = [[*ids, *[-1] * (self.num_stop_ids - len(ids))] for ids in stop_ids]
        self.stop_ids[rows] = torch.tensor(padded, device=device)
        self.host_ages[rows] = ages
        self.host_join_ages[rows] = ages
        self.host_limits[rows] = limits

    def move_rows(self, sources: list[int], targets: list[int], num_columns: int) -> None:
        """Copy rows `sources` over rows `targets`, of the cache only the first `num_columns`
        columns.
        """
        device = self.model.device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        self.cache[:, :, target, :num_columns] = self.cache[:, :, source, :num_columns]
        self.routes[target, :num_columns] = self.routes[source, :num_columns]
        self.tokens[target, : num_columns + 1] = self.tokens[source, : num_columns + 1]
        self.log_probs[target, : num_columns + 1] = self.log_probs[source, : num_columns + 1]
        self.row_integers[:, target] = self.row_integers[:, source]
        self.stop_ids[target] = self.stop_ids[source]
        for column in (self.host_ages, self.host_limits, self.host_join_ages):
            column[targets] = column[sources]


@dataclass(eq=False)
class PendingSample:
    """A sample that waits or runs."""

    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams
    num_given: int = 0  # of `prompt_ids`: tokens of the response, for which seeds have drawn before
    routes_dir: str = ""  # "": nobody asks which experts its tokens met
    routes_bytes: int = 0
    # in order: [tokens, layers, experts], as each was first read
    routes: list[Tensor] = field(default_factory=list)
    # response; brought up to date when it leaves its row
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: not finished
    # of the prompt, copied from what another sample of the group made the engine read
    num_cached_tokens: int = 0
    num_retractions: int = 0
    # (version, first token drawn from its weights)
    _version_starts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def context_ids(self) -> list[int]:
        """Return the tokens of the prompt and of the response so far. Those of a running row are
        not counted in.
        """
        return [*self.prompt_ids, *self.token_ids]

    @property
    def max_length(self) -> int:
        """Return the number of tokens, prompt included, at which the sample ends."""
        return len(self.prompt_ids) + self.params.max_new_tokens

    def record_version(self, version: int, num_tokens: int) -> None:
        """Note that the response tokens from index `num_tokens` on come from the weights of
        `version`.
        """
        if self._version_starts and self._version_starts[-1][1] == num_tokens:
            self._version_starts.pop()  # no token came from those
        if not self._version_starts or self._version_starts[-1][0] != version:
            self._version_starts.append((version, num_tokens))

    def make_generated_sample(self) -> GeneratedSample:
        """Return the finished sample, and write its expert routes, where they are wanted, to a
        file. Raise FloatingPointError when a log-prob is not finite, OSError where the file has no
        room.
        """
        assert self.finish_reason is not None, "the sample has not finished"
        if not all(value > float("-inf") for value in self.log_probs):
            raise FloatingPointError(
                "the model's logits are not finite: a sampled token has no finite log-prob."
            )
        spans = self._make_version_spans()
        routes = torch.cat(self.routes).numpy() if self.routes else None
        return GeneratedSample(
            tuple(self.token_ids),
            tuple(self.log_probs),
            self.finish_reason,
            spans[0].version if spans else UNSYNCED,
            spans,
            self.num_cached_tokens,
            self.num_retractions,
            "" if routes is None else write_route_file(self.routes_dir, routes, self.routes_bytes),
        )

    def record_routes(self, routes: Tensor) -> None:
        """Keep the experts that the tokens read so far met: [tokens, layers, experts]. Tokens that
        are read again after new weights keep the experts of their first reading. Do nothing where
        no routes are wanted.
        """
        if self.routes_dir:
            self.routes.append(routes[sum(map(len, self.routes)) :].to("cpu", copy=True))

    def _make_version_spans(self) -> tuple[VersionSpan, ...]:
        """Return the version spans of the response, without empty ones."""
        if len(self._version_starts) == 1 and self.token_ids:  # by far the most
            return (VersionSpan(self._version_starts[0][0], 0, len(self.token_ids)),)
        borders = [*(start for _, start in self._version_starts), len(self.token_ids)]
        spans = [
            VersionSpan(self._version_starts[i][0], *borders[i : i + 2])
            for i in range(len(self._version_starts))
        ]
        return tuple(span for span in spans if span.start < span.end)


@dataclass(eq=False)
class WaitingGroup:
    """Samples that share all tokens so far and wait for a row."""

    context_ids: list[int]
    waiting_samples: deque[PendingSample]
    is_context_used: bool = False  # a sample has joined with the context as it was read last

    @property
    def is_scored(self) -> bool:
        """Return whether the group only needs the log-probs of its context's last tokens, with no
        token drawn.
        """
        return self.waiting_samples[0].params.max_new_tokens == 0

    def pop_next_sample(self) -> PendingSample:
        """Take and return the next sample, which joins with the context that was read. A later
        sample of a group counts the context as cached tokens.
        """
        member = self.waiting_samples.popleft()
        if self.is_context_used and not member.token_ids:
            member.num_cached_tokens = len(self.context_ids)
        self.is_context_used = True
        return member


@dataclass(eq=False)
class PrefilledBatch:
    """Groups whose contexts were read in one pass: kept until their last samples have joined."""

    groups: deque[tuple[int, WaitingGroup]]  # (row of the tensors below, group)
    keys_values: Tensor  # [2, layers, rows, columns, heads, head size]
    logits: Tensor  # [rows, V], of the last position
    routes: Tensor  # [rows, columns, layers with experts, experts]

    @property
    def num_tokens(self) -> int:
        """Return the padded size of the batch, rows times columns."""
        return self.keys_values.shape[2] * self.keys_values.shape[3]
