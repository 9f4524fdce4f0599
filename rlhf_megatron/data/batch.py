# ruff: noqa: RUF009  (per_token and per_sample make dataclass fields)
"""Everything that flows between the stages of a step, as passive frozen dataclasses.

A batch only gains fields from stage to stage. On the controller it is ragged: sample i owns the
token positions `offsets[i] : offsets[i + 1]` of every token column. There is no padding
anywhere in this file.

    prompts "07+45=" and a response "052<eos>":
        token_ids      0 7 + 4 5 =  0 5 2 <eos>
        response_mask  . . . . . .  1 1 1 1
                       True on tokens that the policy sampled and that train
        log_probs      0 0 0 0 0 0  a b c d
                       entry t is log p(token_ids[t] | token_ids[:t]); 0 where not computed

Legend: P prompts, B samples (B = P x group size), T tokens of all samples together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.data import codec

Batch = TypeVar("Batch", bound="TokenBatch")
# (version, start, end): response tokens start .. end - 1 are of that version
VersionSpans = tuple[tuple[int, int, int], ...]
TurnSpans = tuple[tuple[int, int], ...]


def sample_column(**kwargs: Any) -> Any:
    """Return a dataclass field with one entry a sample: Tensor [B] or a tuple of B objects."""
    return field(metadata={"axis": "sample"}, **kwargs)


def token_column(**kwargs: Any) -> Any:
    """Return a dataclass field with one entry a token: Tensor [T], or None."""
    return field(metadata={"axis": "token"}, **kwargs)


@codec.register("PromptBatch")
@dataclass(frozen=True)
class PromptBatch:
    """P prompts drawn for one step. Made by `data.prompts`."""

    prompt_ids: tuple[tuple[int, ...], ...]  # token ids of each prompt
    prompts: tuple[str, ...]  # the same as text (after templates), for rewards and logs
    labels: tuple[str, ...]  # what the reward compares with
    sources: tuple[str, ...]  # name of the data source of each prompt
    group_ids: tuple[int, ...]  # unique over the run; the samples of one prompt share it
    extras: tuple[str, ...]  # JSON object of what else a reward may read of the row, or ""
    # JSON list of the prompt's messages, for episodes of several turns; () in other runs
    chats: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompt_ids)


@codec.register("TokenBatch")
@dataclass(frozen=True)
class TokenBatch:
    """B samples as ragged token columns: what a forward pass needs."""

    offsets: Tensor  # [B + 1] int64; offsets[0] == 0, offsets[B] == T
    token_ids: Tensor = token_column()  # [T] int32 (int64 in older files), prompt then response
    response_mask: Tensor = token_column()  # [T] bool, never True on the first token of a sample
    # Where routing is replayed: which sample it is, and what its engine wrote of it.
    # [B] int64, unique over the run
    sample_ids: Tensor | None = sample_column(default=None, kw_only=True)
    # files, see data.expert_route_files
    routes: tuple[str, ...] | None = sample_column(default=None, kw_only=True)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all samples."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of each sample, [B] int64."""
        return self.offsets.diff()


@codec.register("RolloutBatch")
@dataclass(frozen=True)
class RolloutBatch(TokenBatch):
    """The samples after `generate`."""

    rollout_log_probs: Tensor = token_column()  # [T] float32, as the engine reported
    group_ids: Tensor = sample_column()  # [B] int64
    sample_ids: Tensor = sample_column()  # [B] int64, unique over the run
    policy_versions: Tensor = sample_column()  # [B] int64, version at dispatch
    finish_reasons: tuple[str, ...] = sample_column()  # "stop" | "length" | "abort"
    prompts: tuple[str, ...] = sample_column()
    responses: tuple[str, ...] = sample_column()  # decoded, without special tokens
    labels: tuple[str, ...] = sample_column()
    sources: tuple[str, ...] = sample_column()
    extras: tuple[str, ...] = sample_column()  # as in PromptBatch
    # What engines tell beyond text; None in a file that was written before they were asked.
    # (): all of `policy_versions`
    version_spans: tuple[VersionSpans, ...] | None = sample_column(default=None, kw_only=True)
    # [B] int64, of the prompt
    num_cached_tokens: Tensor | None = sample_column(default=None, kw_only=True)
    num_retractions: Tensor | None = sample_column(default=None, kw_only=True)  # [B] int64
    # Of episodes with an environment; None where a sample is one answer. An episode is one row.
    # [B] int64, unique over the run
    episode_ids: Tensor | None = sample_column(default=None, kw_only=True)
    # (begin, end) of what each turn sampled, counted from the sample's first token
    turn_spans: tuple[TurnSpans, ...] | None = sample_column(default=None, kw_only=True)
    # what ended each, see agents.episode_messages.EpisodeEnd
    episode_ends: tuple[str, ...] | None = sample_column(default=None, kw_only=True)
    # [B] float32, what the environment says without its turns; nan: it leaves that to scorers
    episode_rewards: Tensor | None = sample_column(default=None, kw_only=True)
    # one a turn, or ()
    turn_rewards: tuple[tuple[float, ...], ...] | None = sample_column(default=None, kw_only=True)
    # JSON list of the messages of each, for people
    conversations: tuple[str, ...] | None = sample_column(default=None, kw_only=True)


@codec.register("ScoredBatch")
@dataclass(frozen=True)
class ScoredBatch(RolloutBatch):
    """The samples after `score`."""

    rewards: Tensor = sample_column()  # [B] float32; what a masked status has here is never read
    # see rewards; a "masked:<why>" sample is left out
    reward_statuses: tuple[str, ...] = sample_column()
    # name -> [B] float32
    reward_parts: dict[str, Tensor] = field(default_factory=dict, metadata={"axis": "sample"})
    # Shares of `rewards` that are paid at tokens of their own; the rest is paid at the
    # response's last token.
    process_rewards: Tensor | None = token_column(default=None, kw_only=True)  # [T] float32
    # Of the greedy sample of the sample's prompt, where the estimator needs it; nan: that one is of
    # masked status.
    greedy_rewards: Tensor | None = sample_column(default=None, kw_only=True)  # [B] float32


@codec.register("AnnotatedBatch")
@dataclass(frozen=True)
class AnnotatedBatch(ScoredBatch):
    """The samples after `annotate`. A column that neither estimator nor loss needs is None."""

    # [T] float32, trainer's policy at the start of this update
    old_log_probs: Tensor | None = token_column(default=None)
    ref_log_probs: Tensor | None = token_column(default=None)  # [T] float32, frozen reference
    values: Tensor | None = token_column(default=None)  # [T] float32, critic
    entropies: Tensor | None = token_column(default=None)  # [T] float32, nats
    # [T] float32, of the trainer's probabilities
    sum_squares: Tensor | None = token_column(default=None)
    # [T, K] int32, the teacher's most likely tokens
    teacher_ids: Tensor | None = token_column(default=None, kw_only=True)
    teacher_log_probs: Tensor | None = token_column(default=None, kw_only=True)  # [T, K] float32


@codec.register("TrainBatch")
@dataclass(frozen=True)
class TrainBatch(AnnotatedBatch):
    """The samples after `advantages`."""

    advantages: Tensor = token_column(default=None)  # [T] float32, 0 outside of response_mask
    returns: Tensor | None = token_column(default=None)  # [T] float32
    # [T] float32, factor of the policy loss
    correction_weights: Tensor | None = token_column(default=None)
    # [T] bool; False: rejected, the actor's loss leaves it out
    is_kept: Tensor | None = token_column(default=None)


@codec.register("MiniBatch")
@dataclass(frozen=True)
class MiniBatch(TokenBatch):
    """The samples of one optimizer step, with the loss weights already divided by the
    global denominator.

    `loss = sum(token_loss * loss_weights)` over all tokens of all replicas; nothing divides
    afterwards. Token metrics are averaged the same way with `metric_weights`.
    """

    loss_weights: Tensor = token_column()  # [T] float32, from algorithms.loss_aggregation
    # [T] float32, response_mask / (response tokens of the whole mini-batch)
    metric_weights: Tensor = token_column()
    advantages: Tensor | None = token_column(default=None)  # [T] float32
    # None: those of the policy that the step begins with
    old_log_probs: Tensor | None = token_column(default=None)
    ref_log_probs: Tensor | None = token_column(default=None)
    rollout_log_probs: Tensor | None = token_column(default=None)
    # [T] float32, factor of the policy loss
    correction_weights: Tensor | None = token_column(default=None)
    # [T] bool, tokens that the policy loss treats in its own way
    is_picked: Tensor | None = token_column(default=None)
    # [T, K] int32, the teacher's most likely tokens
    teacher_ids: Tensor | None = token_column(default=None)
    teacher_log_probs: Tensor | None = token_column(default=None)  # [T, K] float32


@codec.register("ValueMiniBatch")
@dataclass(frozen=True)
class ValueMiniBatch(TokenBatch):
    """The samples of one optimizer step of the critic; weights as in `MiniBatch`."""

    loss_weights: Tensor = token_column()
    metric_weights: Tensor = token_column()
    old_values: Tensor = token_column()  # [T] float32, before the update
    returns: Tensor = token_column()  # [T] float32


@codec.register("TokenColumns")
@dataclass(frozen=True)
class TokenColumns:
    """The reply of a rank to a TokenBatch: its token columns alone,
    since the caller has the rest.
    """


@codec.register("Values")
@dataclass(frozen=True)
class CriticValues(TokenColumns):
    """The result of the critic's forward-only pass. Zero where `response_mask` is False."""

    # [T] float32; entry t is the value of the state token_ids[:t], as for log-probs
    values: Tensor = token_column()


@codec.register("LogProbs")
@dataclass(frozen=True)
class TokenLogProbs(TokenColumns):
    """The result of a forward-only pass. Zero where `response_mask` is False."""

    log_probs: Tensor = token_column()  # [T] float32
    entropies: Tensor | None = token_column(default=None)  # [T] float32, nats, when asked for
    # [T] float32, sum over the vocabulary of p^2, when asked for
    sum_squares: Tensor | None = token_column(default=None)


@codec.register("TopLogProbs")
@dataclass(frozen=True)
class TopLogProbs(TokenColumns):
    """The K most likely tokens at each place, the likeliest first. Zero where
    `response_mask` is False.
    """

    teacher_ids: Tensor = token_column()  # [T, K] int32
    teacher_log_probs: Tensor = token_column()  # [T, K] float32


def make_token_index(offsets: Tensor, sample_indices: Sequence[int]) -> Tensor:
    """Return the token positions of the samples `sample_indices`, in that order, [T'] int64."""
    rows = torch.as_tensor(list(sample_indices), dtype=torch.int64)
    lengths = offsets.diff()[rows]
    # from a token's new position to its old one
    shifts = offsets[rows] - compute_offsets(lengths)[:-1]
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shifts, lengths)


def compute_offsets(lengths: Tensor) -> Tensor:
    """Return the offsets [B + 1] int64 of samples with these lengths [B], from 0 to the number of
    tokens.
    """
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.to(torch.int64).cumsum(0)])


def append_next_state_positions(
    tokens: TokenBatch, is_selected_T: Tensor | None = None
) -> TokenBatch:
    """Return the tokens with a copy of each sample's last token behind it, so that a value model's
    value of the state behind each token has a place. The mask is True at the places behind the
    tokens of `is_selected_T` ([T] bool; None: behind each whole sample).
    """
    if is_selected_T is None:
        is_selected_T = torch.zeros(tokens.num_tokens, dtype=torch.bool)
        is_selected_T[tokens.offsets[1:] - 1] = True
    index_T = torch.repeat_interleave(torch.arange(len(tokens)), tokens.lengths)
    token_ids = torch.empty(tokens.num_tokens + len(tokens), dtype=tokens.token_ids.dtype)
    token_ids[torch.arange(tokens.num_tokens) + index_T] = tokens.token_ids
    token_ids[tokens.offsets[1:] + torch.arange(len(tokens))] = tokens.token_ids[
        tokens.offsets[1:] - 1
    ]
    mask = torch.zeros(len(token_ids), dtype=torch.bool)
    mask[find_next_state_positions(tokens.offsets, is_selected_T)] = True
    return TokenBatch(tokens.offsets + torch.arange(len(tokens.offsets)), token_ids, mask)


def find_next_state_positions(offsets: Tensor, is_selected_T: Tensor) -> Tensor:
    """Return the positions, [N] int64, at which `append_next_state_positions` puts the states
    behind the selected tokens.
    """
    index_T = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    return (torch.arange(len(is_selected_T)) + index_T + 1)[is_selected_T]


@functools.cache
def _list_column_axes(batch_type: type) -> tuple[tuple[str, str], ...]:
    """Return (name, "sample" or "token") of each column of a batch type."""
    return tuple((f.name, f.metadata["axis"]) for f in fields(batch_type) if "axis" in f.metadata)


def iterate_columns(batch: TokenBatch | TokenColumns) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, "sample" or "token", value) of each column that is not None."""
    kind: Any = type(batch)
    for name, axis in _list_column_axes(kind):
        if (value := getattr(batch, name)) is not None:
            yield name, axis, value


def select_samples(
    batch: Batch,
    sample_indices: Sequence[int],
    join_runs: Callable[[Tensor, Sequence[slice]], Any] | None = None,
) -> Batch:
    """Return the samples of these indices as a batch, in that order. Each token column becomes
    `join_runs(column, runs)`; by default a tensor, which is a view where the samples are one run of
    neighbours.
    """
    rows = torch.as_tensor(list(sample_indices), dtype=torch.int64)
    starts = batch.offsets[rows]
    stops = batch.offsets[rows + 1]
    runs = _merge_token_runs(starts, stops)
    new: dict[str, Any] = {"offsets": compute_offsets(stops - starts)}
    for name, axis, value in iterate_columns(batch):
        if axis == "token":
            new[name] = (join_runs or _concat_column_runs)(value, runs)
        elif isinstance(value, Tensor):
            new[name] = value[rows]
        elif isinstance(value, dict):
            new[name] = {key: column[rows] for key, column in value.items()}
        else:
            new[name] = tuple(value[i] for i in sample_indices)
    return replace(batch, **new)


def _concat_column_runs(column: Tensor, runs: Sequence[slice]) -> Tensor:
    """Return the rows of these runs as one tensor: a view for one run, else a copy."""
    if len(runs) == 1:
        return column[runs[0]]
    array = column.numpy()
    return torch.from_numpy(np.concatenate([array[:0], *(array[run] for run in runs)]))


def _merge_token_runs(starts: Tensor, stops: Tensor) -> list[slice]:
    """Return the token ranges of these samples; ranges of neighbouring samples are merged into one
    run. An index with an entry a token would be larger than a column.
    """
    runs: list[slice] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(slice(start, stop))
    return runs


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the samples of all batches, in order. All must be of one type and have
    the same optional columns. A named part that a batch lacks is nan for its samples.
    """
    assert batches, "concat needs at least one batch"
    first = batches[0]
    new: dict[str, Any] = {"offsets": compute_offsets(torch.cat([b.lengths for b in batches]))}
    for f in fields(first):
        if f.metadata.get("axis") is None:
            continue
        values = [getattr(b, f.name) for b in batches]
        if any(v is None for v in values):
            assert all(v is None for v in values), (
                f"column {f.name} is present in some batches only"
            )
        elif isinstance(values[0], Tensor):
            new[f.name] = torch.cat(values)
        elif isinstance(values[0], dict):
            new[f.name] = _concat_parts(values, [len(b) for b in batches])
        else:
            new[f.name] = tuple(item for v in values for item in v)
    return replace(first, **new)


def _concat_parts(
    parts_of_batches: Sequence[Mapping[str, Tensor]], lengths: Sequence[int]
) -> dict[str, Tensor]:
    """Return each named part of the batches, joined; nan for the samples of a batch without it."""
    names = dict.fromkeys(name for parts in parts_of_batches for name in parts)
    return {
        name: torch.cat(
            [
                parts[name] if name in parts else torch.full((length,), torch.nan)
                for parts, length in zip(parts_of_batches, lengths, strict=True)
            ]
        )
        for name in names
    }


def add_columns(batch_type: type[Batch], batch: TokenBatch, **columns: Any) -> Batch:
    """Return `batch` as the later stage's type `batch_type`, with `columns` added."""
    kept = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return batch_type(**{**kept, **columns})
