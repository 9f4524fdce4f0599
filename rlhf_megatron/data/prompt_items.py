"""Prompts as token ids, ready to be asked, and the batches that are made of them.

A row becomes an item by the template around its prompt, solved rows in front of it, and the limit
on its length.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from rlhf_megatron.config.schema import FewShotConfig
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.chat_template import ChatFormat
from rlhf_megatron.data.data_rows import Prompt, PromptRow, raise_on_bad_rows
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptItem:
    """One question, ready to be asked."""

    prompt_ids: tuple[int, ...]
    prompt: str  # the same as text, without what the tokenizer writes before text
    label: str
    source: str
    extra: str = ""  # JSON object of what else a reward may read
    # JSON list of the prompt's messages, for episodes; "" in other runs. The digest of a run's data
    # is made of the repr, which files of former runs have without the messages.
    chat: str = field(default="", repr=False)


@dataclass(frozen=True)
class PromptSource:
    """Training prompts that share a weight."""

    name: str
    weight: float  # relative to the other sources
    items: tuple[PromptItem, ...]


def make_prompt_batch(items: Sequence[PromptItem], first_group_id: int = 0) -> PromptBatch:
    """Return the items as a batch, in order, with group ids that count from `first_group_id`.
    Held-out batches of a run are made this way too.
    """
    return PromptBatch(
        prompt_ids=tuple(item.prompt_ids for item in items),
        prompts=tuple(item.prompt for item in items),
        labels=tuple(item.label for item in items),
        sources=tuple(item.source for item in items),
        group_ids=tuple(range(first_group_id, first_group_id + len(items))),
        extras=tuple(item.extra for item in items),
        chats=tuple(item.chat for item in items) if any(item.chat for item in items) else (),
    )


@dataclass(frozen=True)
class WeightedPromptItems:
    """The items of all sources behind one range of integers, in which a source has the room
    of its weight.

    An integer drawn from `range(len(...))` with equal chances is an item of source s with the
    chance w_s / len(s). With one source the integers are its items.
    """

    sources: tuple[PromptSource, ...]

    RESOLUTION = 1 << 30

    def __len__(self) -> int:
        """Return the size of the range of integers: the number of items of a single source, else
        RESOLUTION.
        """
        return len(self.sources[0].items) if len(self.sources) == 1 else self.RESOLUTION

    def __getitem__(self, index: int) -> PromptItem:
        """Return the item at an integer of the range."""
        if len(self.sources) == 1:
            return self.sources[0].items[index]
        ends = [0.0, *accumulate(source.weight for source in self.sources)]
        point = index / self.RESOLUTION * ends[-1]
        s = min(bisect_right(ends, point) - 1, len(self.sources) - 1)
        items = self.sources[s].items
        return items[
            min(len(items) - 1, int((point - ends[s]) / (ends[s + 1] - ends[s]) * len(items)))
        ]


Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True)
class PromptLimit:
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
    # write what the tokenizer writes before text, where no chat format writes it
    add_special_tokens: bool = True
    keeps_messages: bool = False  # items also have the prompt's messages, for episodes

    def select_opening_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the token ids that stand before the text of each prompt: those that the tokenizer
        writes before plain text, and none before a chat, whose template writes its own.
        """
        return tokenizer.opening_ids if self.add_special_tokens and self.chat is None else ()

    def format_prompt(self, prompt: Prompt) -> str:
        """Return the text that the model reads: a text prompt in the template, behind the solved
        rows, as a chat where there is a chat format. Raise ValueError for a list of messages
        without a chat format or with a template or solved rows, and as `ChatFormat.render_prompt`
        does.
        """
        if isinstance(prompt, str):
            text = self.shots + self.template.replace("{prompt}", prompt)
            return text if self.chat is None else self.chat.render_prompt(text)
        if self.chat is None:
            raise ValueError(
                "the prompt is a list of chat messages; set data.apply_chat_template=true."
            )
        if self.shots or self.template != "{prompt}":
            raise ValueError(
                "the prompt is a list of chat messages, and prompt_template and few_shot are for"
                " texts; remove them, or write prompts as text."
            )
        return self.chat.render_prompt(prompt)

    def encode_messages(self, prompt: Prompt, text: str) -> str:
        """Return the messages of a prompt as JSON, "" where items do not keep them. A prompt that
        is text is one message of the user; `text` is what the model reads of it where no chat
        format is around it.
        """
        if not self.keeps_messages:
            return ""
        if not isinstance(prompt, str):
            messages = [{"role": one.role, "content": one.content} for one in prompt]
        elif self.chat is None:
            messages = [{"role": "user", "content": text}]
        else:
            content = self.shots + self.template.replace("{prompt}", prompt)
            messages = [{"role": "user", "content": content}]
        return json.dumps(messages, ensure_ascii=False)


@dataclass(frozen=True)
class EncodedPrompts:
    """Items of rows, in order."""

    items: tuple[PromptItem, ...]
    num_dropped: int  # over the limit
    num_cut: int  # likewise, and shortened
    num_bad: int = 0  # skipped


def draw_few_shot_examples(
    rows: Sequence[PromptRow], config: FewShotConfig, prompt_template: str
) -> tuple[str, tuple[PromptRow, ...], frozenset[Prompt]]:
    """Return (solved rows as text, the other rows, prompts of the solved rows), chosen at random by
    `config.seed`.

    All rows with the prompt of a solved row are left out of the other rows. Raise ValueError where
    too few different prompts are left.
    """
    if config.num_shots == 0:
        return "", tuple(rows), frozenset()
    by_prompt = {row.prompt: row for row in reversed(rows)}  # the first of each
    prompts = [
        prompt for prompt in dict.fromkeys(row.prompt for row in rows) if isinstance(prompt, str)
    ]
    if len(prompts) <= config.num_shots:
        raise ValueError(
            f"few_shot.num_shots ({config.num_shots}) must be below the number of different"
            f" training prompts that are texts ({len(prompts)}), so that some are left to train"
            " on; use fewer."
        )
    chosen = random.Random(f"few_shot/{config.seed}").sample(prompts, config.num_shots)

    def format_solved_row(prompt: str) -> str:
        """Return the row of a prompt as text, in the template of solved rows."""
        values = {
            "{prompt}": prompt_template.replace("{prompt}", prompt),
            "{label}": by_prompt[prompt].label,
        }
        return re.sub(r"\{prompt\}|\{label\}", lambda match: values[match[0]], config.template)

    text = "".join(format_solved_row(prompt) for prompt in chosen)
    taken = frozenset[Prompt](chosen)
    return text, tuple(row for row in rows if row.prompt not in taken), taken


def encode_prompt_rows(
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    prompt_limit: PromptLimit,
    skip_bad_rows: bool = False,
    must_encode_labels: bool = False,
) -> EncodedPrompts:
    """Return the rows as items, with their counts; prompts over the limit are dropped or cut as
    `prompt_limit` says.

    A prompt begins with the ids that `PromptFormat.select_opening_ids` names; they count as a part
    of its length, and a cut leaves them in place.

    Raise ValueError that names the rows that `prompt_format` refuses, that have no tokens or that
    the tokenizer cannot spell (with `must_encode_labels` also their labels), unless
    `skip_bad_rows`; for a prompt that is too long where `prompt_limit` neither drops nor cuts it;
    and when no row is left.
    """
    spelled, problems = _tokenize_rows(rows, tokenizer, prompt_format, must_encode_labels)
    raise_on_bad_rows(problems, len(spelled), skip_bad_rows)
    opening_ids = prompt_format.select_opening_ids(tokenizer)
    most_text_tokens = prompt_limit.max_prompt_length - len(opening_ids)
    if most_text_tokens < 1:
        raise ValueError(
            f"data.max_prompt_length ({prompt_limit.max_prompt_length}) leaves no token for a"
            f" prompt's text: the tokenizer writes {len(opening_ids)} before each text; raise it,"
            " or set data.add_special_tokens=false."
        )
    items: list[PromptItem] = []
    num_dropped = num_cut = 0
    lengths = [len(opening_ids) + len(text_ids) for _, _, text_ids in spelled]
    for row, text, text_ids in spelled:
        if len(text_ids) > most_text_tokens:
            if prompt_limit.filter_overlong:
                num_dropped += 1
                continue
            if prompt_limit.truncation == "error":
                raise ValueError(
                    _describe_overlong_prompt(
                        row,
                        len(opening_ids) + len(text_ids),
                        lengths,
                        prompt_limit.max_prompt_length,
                    )
                )
            text_ids = truncate_ids(text_ids, most_text_tokens, prompt_limit.truncation)
            text = tokenizer.decode_with_special_tokens(text_ids)
            num_cut += 1
        prompt_ids = (*opening_ids, *text_ids)
        chat = prompt_format.encode_messages(row.prompt, text)
        items.append(PromptItem(prompt_ids, text, row.label, row.source, row.extra, chat))
    if not items:
        raise ValueError(
            f"the dataset is empty: all {len(rows)} prompts are over data.max_prompt_length"
            f" ({prompt_limit.max_prompt_length}); the shortest has"
            f" {min(lengths, default=0)} tokens."
        )
    return EncodedPrompts(tuple(items), num_dropped, num_cut, len(problems))


# row, the text that the model reads, that text as token ids
TokenizedRow = tuple[PromptRow, str, tuple[int, ...]]


def _tokenize_rows(
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    must_encode_labels: bool,
) -> tuple[list[TokenizedRow], list[str]]:
    """Return the rows that have tokens, and a message for each of the others."""
    made: list[tuple[PromptRow, str]] = []
    problems: dict[str, str] = {}
    for row in rows:
        try:
            made.append((row, prompt_format.format_prompt(row.prompt)))
        except ValueError as error:
            problems[row.origin] = f"{row.origin}: {error}"
    try:
        if must_encode_labels:
            tokenizer.encode_texts([row.label for row, _ in made])
        all_ids = tokenizer.encode_texts([text for _, text in made])
    except ValueError:  # of which row, it does not say
        all_ids = []
        for row, text in made:
            try:
                all_ids.append(
                    tokenizer.encode_texts([text, row.label][: 1 + must_encode_labels])[0]
                )
            except ValueError as error:
                all_ids.append(())
                problems[row.origin] = f"{row.origin}: {error}"
    for (row, text), ids in zip(made, all_ids, strict=True):
        if not ids:
            problems.setdefault(
                row.origin, f"{row.origin}: the prompt {text!r} has no tokens; remove the row."
            )
    return [(row, text, ids) for (row, text), ids in zip(made, all_ids, strict=True) if ids], [
        *problems.values()
    ]


def truncate_ids(ids: tuple[int, ...], length: int, side: Truncation) -> tuple[int, ...]:
    """Return `length` of the ids: the first ones ("right" is cut off), the last ones ("left" is cut
    off), or both ends ("middle" is cut out).
    """
    if side == "right":
        return ids[:length]
    if side == "left":
        return ids[len(ids) - length :]
    assert side == "middle", side
    return ids[: length // 2] + ids[len(ids) - (length - length // 2) :]


def _describe_overlong_prompt(
    row: PromptRow, length: int, lengths: Sequence[int], max_prompt_length: int
) -> str:
    """Return the error message for a prompt over the limit."""
    count = sum(other > max_prompt_length for other in lengths)
    return (
        f"{row.origin}: the prompt has {length} tokens, over data.max_prompt_length"
        f" ({max_prompt_length}), as have {count} of {len(lengths)} prompts; raise it to"
        f" {max(lengths)}, or set data.filter_overlong_prompts=true to drop them, or"
        " data.truncation to cut them."
    )
