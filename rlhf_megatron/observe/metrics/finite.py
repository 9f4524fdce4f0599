"""Columns of a batch that hold numbers that are not finite, looked for before the batch is trained on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_megatron.data.batch import TrainBatch

COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns")
NUM_NAMED = 8  # samples of a column that a message names
PROMPT_LENGTH = 80  # characters of a prompt in a message


@dataclass(frozen=True)
class BadColumn:
    """One column that would poison an update."""

    name: str
    samples: tuple[int, ...]  # indices into the batch, in order
    num_tokens: int


def bad_columns(batch: TrainBatch) -> tuple[BadColumn, ...]:
    """Over the response tokens, also of samples that are masked: a weight of 0 does not stop a NaN."""
    sample_of = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    found = []
    for name in COLUMNS:
        column = getattr(batch, name)
        if column is None:
            continue
        is_bad = ~column.isfinite() & batch.response_mask
        if is_bad.any():
            samples = sample_of[is_bad].unique().tolist()
            found.append(BadColumn(name, tuple(samples), int(is_bad.sum())))
    return tuple(found)


def describe(columns: Sequence[BadColumn], batch: TrainBatch) -> str:
    """Columns, sample ids and prompts, for a person."""
    parts = []
    for column in columns:
        named = ", ".join(sample_name(batch, sample) for sample in column.samples[:NUM_NAMED])
        more = f" and {len(column.samples) - NUM_NAMED} more" if len(column.samples) > NUM_NAMED else ""
        parts.append(f"{column.name} ({column.num_tokens} tokens of {named}{more})")
    return "; ".join(parts)


def sample_name(batch: TrainBatch, sample: int) -> str:
    """Its id and the beginning of its prompt."""
    prompt = batch.prompts[sample]
    shown = prompt if len(prompt) <= PROMPT_LENGTH else prompt[:PROMPT_LENGTH] + "..."
    return f"sample {int(batch.sample_ids[sample])} {shown!r}"
