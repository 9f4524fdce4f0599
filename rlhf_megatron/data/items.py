"""Prompts as token ids, ready to be asked, and the batches that are made of them.

A row becomes an item by the template around its prompt, solved rows in front of it, and the limit on its length.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rlhf_megatron.config.schema import FewShotConfig
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.chat_template import ChatFormat
from rlhf_megatron.data.rows import Prompt, PromptRow, refuse
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptItem:
    """One question, ready to be asked."""

    prompt_ids: tuple[int, ...]
    prompt: str  # the same as text
    label: str
    source: str
    extra: str = ""  # JSON object of what else a reward may read


@dataclass(frozen=True)
class PromptSource:
    """Training prompts that share a weight."""

    name: str
    weight: float  # relative to the other sources
    items: tuple[PromptItem, ...]


def prompt_batch(items: Sequence[PromptItem], first_group_id: int = 0) -> PromptBatch:
    """The items in order, their group ids counting from `first_group_id`. Makes the held-out batches of a run too."""
    return PromptBatch(
        prompt_ids=tuple(item.prompt_ids for item in items),
        prompts=tuple(item.prompt for item in items),
        labels=tuple(item.label for item in items),
        sources=tuple(item.source for item in items),
        group_ids=tuple(range(first_group_id, first_group_id + len(items))),
        extras=tuple(item.extra for item in items),
    )


@dataclass(frozen=True)
class WeightedItems:
    """The items of all sources behind one range of integers, in which a source has the room of its weight.

    An integer drawn from `range(len(...))` with equal chances is an item of source s with the chance w_s / len(s).
    With one source the integers are its items.
    """

    sources: tuple[PromptSource, ...]

    RESOLUTION = 1 << 30

    def __len__(self) -> int:
        return len(self.sources[0].items) if len(self.sources) == 1 else self.RESOLUTION

    def __getitem__(self, index: int) -> PromptItem:
        if len(self.sources) == 1:
            return self.sources[0].items[index]
        ends = [0.0, *accumulate(source.weight for source in self.sources)]
        point = index / self.RESOLUTION * ends[-1]
        s = min(bisect_right(ends, point) - 1, len(self.sources) - 1)
        items = self.sources[s].items
        return items[min(len(items) - 1, int((point - ends[s]) / (ends[s + 1] - ends[s]) * len(items)))]


Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True)
class Limit:
    """The limit on a prompt's length, and what happens to longer ones."""

    max_prompt_length: int  # tokens
    filter_overlong: bool = False  # drop them
    truncation: Truncation = "error"  # otherwise: refuse, or cut tokens off that side


@dataclass(frozen=True)
class PromptFormat:
    """Turns a row into what the model reads."""

    template: str = "{prompt}"  # around a text prompt
    shots: str = ""  # solved rows in front of it
    chat: ChatFormat | None = None  # None: the text is read as it is

    def text(self, prompt: Prompt) -> str:
        """Raises ValueError where a list of messages meets what is for texts, and what `ChatFormat.text` does."""
        if isinstance(prompt, str):
            text = self.shots + self.template.replace("{prompt}", prompt)
            return text if self.chat is None else self.chat.text(text)
        if self.chat is None:
            raise ValueError("the prompt is a list of chat messages; set data.apply_chat_template=true.")
        if self.shots or self.template != "{prompt}":
            raise ValueError(
                "the prompt is a list of chat messages, and prompt_template and few_shot are for texts; remove them, or"
                " write prompts as text."
            )
        return self.chat.text(prompt)


@dataclass(frozen=True)
class Encoded:
    """Items of rows, in order."""

    items: tuple[PromptItem, ...]
    num_dropped: int  # over the limit
    num_cut: int  # likewise, and shortened
    num_bad: int = 0  # skipped


def take_shots(
    rows: Sequence[PromptRow], config: FewShotConfig, prompt_template: str
) -> tuple[str, tuple[PromptRow, ...], frozenset[Prompt]]:
    """(solved rows as text, the other rows, prompts of the solved ones), chosen by `config.seed`.

    Rows with the prompt of a solved one are left out with it. Raises ValueError where too few different ones are left.
    """
    if config.num_shots == 0:
        return "", tuple(rows), frozenset()
    by_prompt = {row.prompt: row for row in reversed(rows)}  # the first of each
    prompts = [prompt for prompt in dict.fromkeys(row.prompt for row in rows) if isinstance(prompt, str)]
    if len(prompts) <= config.num_shots:
        raise ValueError(
            f"few_shot.num_shots ({config.num_shots}) must be below the number of different training prompts that are"
            f" texts ({len(prompts)}), so that some are left to train on; use fewer."
        )
    chosen = random.Random(f"few_shot/{config.seed}").sample(prompts, config.num_shots)

    def solved(prompt: str) -> str:
        values = {"{prompt}": prompt_template.replace("{prompt}", prompt), "{label}": by_prompt[prompt].label}
        return re.sub(r"\{prompt\}|\{label\}", lambda match: values[match[0]], config.template)

    text = "".join(solved(prompt) for prompt in chosen)
    taken = frozenset[Prompt](chosen)
    return text, tuple(row for row in rows if row.prompt not in taken), taken


def encode_rows(
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    form: PromptFormat,
    limit: Limit,
    skip_bad_rows: bool = False,
    spells_labels: bool = False,
) -> Encoded:
    """Items of the rows; those over the limit are dropped or cut as it says.

    Raises ValueError naming the rows that `form` refuses, that have no tokens or that the tokenizer cannot spell (with
    `spells_labels`: their labels too), unless they are skipped; for a prompt that is too long where `limit` neither
    drops nor cuts it; and when no row is left.
    """
    spelled, problems = _spelled(rows, tokenizer, form, spells_labels)
    refuse(problems, len(spelled), skip_bad_rows)
    items: list[PromptItem] = []
    num_dropped = num_cut = 0
    lengths = [len(ids) for _, _, ids in spelled]
    for row, text, ids in spelled:
        if len(ids) > limit.max_prompt_length:
            if limit.filter_overlong:
                num_dropped += 1
                continue
            if limit.truncation == "error":
                raise ValueError(_too_long(row, len(ids), lengths, limit.max_prompt_length))
            ids = cut(ids, limit.max_prompt_length, limit.truncation)
            text = tokenizer.spell(ids)
            num_cut += 1
        items.append(PromptItem(ids, text, row.label, row.source, row.extra))
    if not items:
        raise ValueError(
            f"the dataset is empty: all {len(rows)} prompts are over data.max_prompt_length"
            f" ({limit.max_prompt_length}); the shortest has {min(lengths, default=0)} tokens."
        )
    return Encoded(tuple(items), num_dropped, num_cut, len(problems))


Spelled = tuple[PromptRow, str, tuple[int, ...]]  # row, what the model reads, the same as token ids


def _spelled(
    rows: Sequence[PromptRow], tokenizer: Tokenizer, form: PromptFormat, spells_labels: bool
) -> tuple[list[Spelled], list[str]]:
    """The rows that have tokens, and what is wrong with the others."""
    made: list[tuple[PromptRow, str]] = []
    problems: dict[str, str] = {}
    for row in rows:
        try:
            made.append((row, form.text(row.prompt)))
        except ValueError as error:
            problems[row.origin] = f"{row.origin}: {error}"
    try:
        if spells_labels:
            tokenizer.encode_all([row.label for row, _ in made])
        all_ids = tokenizer.encode_all([text for _, text in made])
    except ValueError:  # of which row, it does not say
        all_ids = []
        for row, text in made:
            try:
                all_ids.append(tokenizer.encode_all([text, row.label][: 1 + spells_labels])[0])
            except ValueError as error:
                all_ids.append(())
                problems[row.origin] = f"{row.origin}: {error}"
    for (row, text), ids in zip(made, all_ids, strict=True):
        if not ids:
            problems.setdefault(row.origin, f"{row.origin}: the prompt {text!r} has no tokens; remove the row.")
    return [(row, text, ids) for (row, text), ids in zip(made, all_ids, strict=True) if ids], [*problems.values()]


def cut(ids: tuple[int, ...], length: int, side: Truncation) -> tuple[int, ...]:
    """The first `length` ids ("right" is cut off), the last ones ("left"), or both ends ("middle")."""
    if side == "right":
        return ids[:length]
    if side == "left":
        return ids[len(ids) - length :]
    assert side == "middle", side
    return ids[: length // 2] + ids[len(ids) - (length - length // 2) :]


def _too_long(row: PromptRow, length: int, lengths: Sequence[int], limit: int) -> str:
    count = sum(other > limit for other in lengths)
    return (
        f"{row.origin}: the prompt has {length} tokens, over data.max_prompt_length ({limit}), "
        f"as have {count} of {len(lengths)} prompts; raise it to {max(lengths)}, "
        "or set data.filter_overlong_prompts=true to drop them, or data.truncation to cut them."
    )
