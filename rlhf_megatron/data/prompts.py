"""Prompts of a run: rows of files or of a generated task, as token ids, in an order that a seed fixes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from rlhf_megatron.config.params import params_from_mapping
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import PromptBatch, TokenBatch, offsets_from_lengths
from rlhf_megatron.data.rows import PromptRow, RowCounts, read_jsonl
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptItem:
    """One question, ready to be asked."""

    prompt_ids: tuple[int, ...]
    prompt: str
    label: str
    source: str
    extra: str = ""  # JSON object of what else a reward may read


@dataclass(frozen=True)
class PromptSets:
    """What `load_prompts` found. `held_out` is empty when a run of files names no data.val_files."""

    train: tuple[PromptItem, ...]
    held_out: tuple[PromptItem, ...]
    num_bad_rows: int  # skipped, of both sets
    num_overlong: int  # dropped, of both sets
    num_duplicates: int  # training rows whose prompt stood in an earlier one; they are kept
    num_shared: int  # held-out items whose prompt is trained on too


@codec.register
@dataclass(frozen=True)
class PromptCursor:
    """Where a stream stands, and of which stream."""

    num_drawn: int  # prompts
    batch_size: int
    order: str  # digest of items, seed and shuffling


def load_prompts(config: DataConfig, tokenizer: Tokenizer) -> PromptSets:
    """The items of the run's task, or of its files where `config.task` is None.

    Raises ValueError for malformed rows, empty sets and prompts over the limit, as `read_jsonl` and `encode_rows` say,
    and for a task or parameter that does not exist.
    """
    train, train_counts, held_out, held_out_counts = _read(config)
    limits = (tokenizer, config.max_prompt_length, config.filter_overlong_prompts)
    train_items = encode_rows(train, *limits)
    held_out_items = encode_rows(held_out, *limits) if held_out else ()
    trained = {item.prompt for item in train_items}
    return PromptSets(
        train_items,
        held_out_items,
        num_bad_rows=train_counts.num_bad + held_out_counts.num_bad,
        num_overlong=len(train) + len(held_out) - len(train_items) - len(held_out_items),
        num_duplicates=train_counts.num_duplicates,
        num_shared=sum(item.prompt in trained for item in held_out_items),
    )


def _read(config: DataConfig) -> tuple[tuple[PromptRow, ...], RowCounts, tuple[PromptRow, ...], RowCounts]:
    """Training rows and held-out rows, each with their counts."""
    nothing = RowCounts(0, 0, 0)
    if config.task is not None:
        task = TASKS.get(config.task)
        params = params_from_mapping(task.params, config.task_params, "data.task_params") if task.params else None
        rows = task.build(params)
        return rows.train, nothing, rows.held_out, nothing
    if not config.train_files:
        raise ValueError("the dataset is empty: data.train_files names no file; name one, or set data.task.")
    keys = (config.prompt_key, config.label_key, config.skip_bad_rows)
    held_out = read_jsonl(config.val_files, *keys) if config.val_files else ((), nothing)
    return *read_jsonl(config.train_files, *keys), *held_out


def encode_rows(
    rows: Sequence[PromptRow], tokenizer: Tokenizer, max_prompt_length: int, filter_overlong_prompts: bool
) -> tuple[PromptItem, ...]:
    """Items of the rows of at most `max_prompt_length` tokens.

    Raises ValueError for a longer one (unless `filter_overlong_prompts` drops it), and when no row is left.
    """
    items = []
    all_ids = tokenizer.encode_all([row.prompt for row in rows])
    for row, ids in zip(rows, all_ids, strict=True):
        if not ids:
            raise ValueError(f"{row.origin}: the prompt {row.prompt!r} has no tokens; remove the row.")
        if len(ids) <= max_prompt_length:
            items.append(PromptItem(ids, row.prompt, row.label, row.source, row.extra))
        elif not filter_overlong_prompts:
            longest = max(map(len, all_ids))
            count = sum(len(other) > max_prompt_length for other in all_ids)
            raise ValueError(
                f"{row.origin}: the prompt has {len(ids)} tokens, over data.max_prompt_length ({max_prompt_length}), "
                f"as have {count} of {len(rows)} prompts; raise it to {longest}, "
                "or set data.filter_overlong_prompts=true to drop them."
            )
    if not items:
        shortest = min(map(len, all_ids), default=0)
        raise ValueError(
            f"the dataset is empty: all {len(rows)} prompts are over data.max_prompt_length ({max_prompt_length}); "
            f"the shortest has {shortest} tokens."
        )
    return tuple(items)


class PromptStream:
    """Endless batches of prompts, shuffled anew in each epoch. The batch of a step depends on nothing but the step.

    The last batch of an epoch is filled from the next one, so every batch is whole and no prompt is left out.
    """

    def __init__(self, items: Sequence[PromptItem], batch_size: int, shuffle: bool, seed: int) -> None:
        if not items:
            raise ValueError("the dataset is empty; a stream needs at least one prompt.")
        if batch_size < 1:
            raise ValueError(f"data.train_batch_size ({batch_size}) must be at least 1.")
        self.items = tuple(items)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._num_drawn = 0
        self._epoch_order = lru_cache(maxsize=2)(self._make_epoch_order)

    def next(self, step: int) -> PromptBatch:
        """The prompts of `step`, which counts from 1. Group ids are unique over the run."""
        if step < 1:
            raise ValueError(f"step ({step}) must be at least 1.")
        self._num_drawn = step * self.batch_size
        positions = range(self._num_drawn - self.batch_size, self._num_drawn)
        return prompt_batch([self._item(position) for position in positions], first_group_id=positions.start)

    def state(self) -> PromptCursor:
        digest = hashlib.sha256(repr((self.seed if self.shuffle else None, self.items)).encode())
        return PromptCursor(self._num_drawn, self.batch_size, digest.hexdigest()[:16])

    def restore(self, cursor: PromptCursor) -> None:
        """Raises ValueError when this stream would go on in another order than the one that made `cursor`."""
        own = self.state()
        if cursor.batch_size != own.batch_size:
            raise ValueError(
                f"data.train_batch_size ({own.batch_size}) must be {cursor.batch_size}, as before the interruption."
            )
        if cursor.order != own.order:
            raise ValueError(
                "the prompts or their order differ from those before the interruption; "
                "restore the data files, data.seed and data.shuffle, or start a new run."
            )
        self._num_drawn = cursor.num_drawn

    def _item(self, position: int) -> PromptItem:
        epoch, index = divmod(position, len(self.items))
        return self.items[self._epoch_order(epoch)[index]]

    def _make_epoch_order(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self.items)))
        if self.shuffle:
            random.Random(f"prompts/{self.seed}/{epoch}").shuffle(order)
        return order


def prompt_batch(items: Sequence[PromptItem], first_group_id: int = 0) -> PromptBatch:
    """The items in order, their group ids counting from `first_group_id`. Makes the held-out batch of a run too."""
    return PromptBatch(
        prompt_ids=tuple(item.prompt_ids for item in items),
        prompts=tuple(item.prompt for item in items),
        labels=tuple(item.label for item in items),
        sources=tuple(item.source for item in items),
        group_ids=tuple(range(first_group_id, first_group_id + len(items))),
        extras=tuple(item.extra for item in items),
    )


def majority_answer_accuracy(items: Sequence[PromptItem]) -> float:
    """Accuracy on `items` of always giving their most common label: what is reached without reading the question."""
    assert items, "no items"
    return Counter(item.label for item in items).most_common(1)[0][1] / len(items)


def supervised_batch(items: Sequence[PromptItem], tokenizer: Tokenizer) -> TokenBatch:
    """Prompt, label and end-of-sequence token of each item; `response_mask` is True on the last two."""
    responses = [(*ids, tokenizer.eos_token_id) for ids in tokenizer.encode_all([item.label for item in items])]
    token_ids: list[int] = []
    mask: list[bool] = []
    for item, response in zip(items, responses, strict=True):
        token_ids += [*item.prompt_ids, *response]
        mask += [False] * len(item.prompt_ids) + [True] * len(response)
    lengths = [len(item.prompt_ids) + len(response) for item, response in zip(items, responses, strict=True)]
    return TokenBatch(
        offsets=offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
    )
