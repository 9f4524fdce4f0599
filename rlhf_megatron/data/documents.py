"""The rows of supervised and preference jobs as samples: prompts and answers, conversations, pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import DataConfig, SFTConfig, SourceConfig
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.document_rows import Counts, conversation_of, pair_of, weight_of
from rlhf_megatron.data.items import PromptFormat, PromptItem, Truncation, cut
from rlhf_megatron.data.prompts import load_prompts, of_source, sources_of
from rlhf_megatron.data.rows import (
    SOURCE_KEY,
    check_text,
    json_rows,
    look_up,
    name_of,
    raw_rows,
    refuse,
)
from rlhf_megatron.data.samples import Documents, DocumentSource, Sample
from rlhf_megatron.data.streamed import StreamedDocuments
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.turns import Document

MESSAGES, TEXT = "messages", "text"  # keys that published files have
ANY_LENGTH = 1 << 24  # tokens: the limit on documents comes after the one on prompts


@dataclass(frozen=True)
class DocumentSets:
    """The result of `load_documents`."""

    sources: tuple[DocumentSource, ...]
    held_out: tuple[DocumentSource, ...]  # a set for each source that the rows name
    counts: Counts = field(default_factory=Counts)

    @property
    def num_train(self) -> int:
        return sum(len(source.items) for source in self.sources)

    @property
    def num_held_out(self) -> int:
        return sum(len(held_out.items) for held_out in self.held_out)


def load_documents(data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, is_pairs: bool) -> DocumentSets:
    """The documents of the job's sources, or of its task or files. `is_pairs`: the loss compares two answers.

    Raises ValueError for malformed rows, empty sets and documents over the limit, with the rows; for a task or
    parameter that does not exist, and for a missing chat template.
    """
    counts = Counts()
    if is_pairs or sft.messages_key is not None:
        train, held_out = _from_rows(data, sft, tokenizer, is_pairs, counts)
    else:
        train, held_out = _from_prompts(data, sft, tokenizer, counts)
    limited = partial(_limited, data=data, max_length=sft.max_length, counts=counts)
    sources = tuple(
        DocumentSource(name, weight, samples if isinstance(samples, StreamedDocuments) else Documents(limited(samples)))
        for name, weight, samples in train
    )
    for source in sources:
        if not len(source.items):
            raise ValueError(
                f"the dataset is empty{f' ({source.name})' if source.name else ''}: no document is left with tokens"
                f" that train, in at most sft.max_length ({sft.max_length}) tokens; look at data.train_files."
            )
    sets = {name: Documents(limited(samples)) for name, samples in held_out.items()}
    return DocumentSets(
        sources, tuple(DocumentSource(name, 1.0, items) for name, items in sets.items() if items), counts
    )


def has_labels(data: DataConfig) -> bool:
    """Whether the first row that `data` names has a prompt and its answer."""
    try:
        return all(look_up(_first_row(data), key, "") is not None for key in (data.prompt_key, data.label_key))
    except ValueError:
        return False


def _first_row(data: DataConfig) -> Mapping[str, Any]:
    source = next(iter(sources_of(data).values()))
    files = [*source.val_files, *source.train_files][:1]
    return next((row for file in files for _, row in raw_rows(Path(file)) if isinstance(row, dict)), {})


def load_held_out(data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, is_pairs: bool = False) -> tuple[Sample, ...]:
    """The held-out documents of a job, to be scored. Files say by their first row what they are: of prompts and
    answers, of pairs where the job learns from some, of conversations (under "messages" where sft.messages_key is
    null), or of plain texts ("text").

    Raises ValueError as `load_documents` does.
    """
    first = _first_row(data)
    is_pairs = is_pairs and sft.chosen_key in first
    is_other = not is_pairs and sft.messages_key is None and data.prompt_key not in first
    if is_other and MESSAGES in first:
        sft, data = replace(sft, messages_key=MESSAGES), replace(data, apply_chat_template=True)
    elif is_other and TEXT in first:
        counts = Counts()
        read = partial(_text, tokenizer=tokenizer)
        samples: Iterable[Sample] = _read(data.val_files, SourceConfig(""), read, data, counts)
        return tuple(_limited(samples, data, sft.max_length, counts))
    sets = load_documents(data, sft, tokenizer, is_pairs)
    return tuple(held_out.items[i] for held_out in sets.held_out for i in range(len(held_out.items)))


def _text(row: Mapping[str, Any], tokenizer: Tokenizer) -> list[Sample]:
    text = look_up(row, TEXT, "a row")
    if not isinstance(text, str):
        raise ValueError(f"{TEXT!r} must be a text, not {type(text).__name__}")
    ids = tokenizer.encode(text)
    return [Sample((Document(ids, ((1, len(ids)),) if len(ids) > 1 else ()),), "")]


Train = list[tuple[str, float, list[Sample] | StreamedDocuments]]  # (name, weight, samples) of each source
HeldOut = dict[str, list[Sample]]


def answered(items: Sequence[PromptItem], tokenizer: Tokenizer) -> list[Sample]:
    """Make a document of each item: the prompt as an engine is asked it, then the label and the end-of-sequence token,
    which train.
    """
    labels = tokenizer.encode_all([item.label for item in items])
    samples = []
    for item, label_ids in zip(items, labels, strict=True):
        ids = (*item.prompt_ids, *label_ids, tokenizer.eos_token_id)
        samples.append(Sample((Document(ids, ((len(item.prompt_ids), len(ids)),)),), item.source))
    return samples


def _from_prompts(data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, counts: Counts) -> tuple[Train, HeldOut]:
    """Rows of prompt and answer, in the template, with the shots and the chat that RL would ask them in."""
    sets = load_prompts(replace(data, max_prompt_length=ANY_LENGTH), tokenizer, spells_labels=True)
    counts.num_bad = sets.num_bad_rows

    def samples(items: Sequence[PromptItem]) -> list[Sample]:
        found = answered(items, tokenizer)
        if sft.weight_key is None:
            return found
        weights = [weight_of(json.loads(item.extra or "{}"), sft) for item in items]
        return [replace(sample, weight=weight) for sample, weight in zip(found, weights, strict=True)]

    train: Train = [(source.name, source.weight, samples(source.items)) for source in sets.sources]
    return train, {held_out.name: samples(held_out.items) for held_out in sets.held_out_sets}


def _from_rows(
    data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, is_pairs: bool, counts: Counts
) -> tuple[Train, HeldOut]:
    """Conversations, or pairs, of files."""
    chat = None
    if data.apply_chat_template:
        chat = make_chat_format(tokenizer, data.system_prompt, data.apply_chat_template_kwargs)
    train: Train = []
    held_out: HeldOut = {}
    for key, source in sources_of(data).items():
        form = PromptFormat(source.prompt_template or "{prompt}", chat=chat)
        if is_pairs:
            read = partial(pair_of, data=data, sft=sft, form=form, tokenizer=tokenizer, counts=counts)
        else:
            assert chat is not None, "a rule demands the template of conversations"
            read = partial(conversation_of, sft=sft, chat=chat, tokenizer=tokenizer, counts=counts)
        with of_source(key, source):
            if sft.in_memory:
                samples: list[Sample] | StreamedDocuments = _read(source.train_files, source, read, data, counts)
            else:
                samples = _streamed(source, read, data, sft.max_length, counts)
            train.append((source.name, source.weight, samples))
            untaught = partial(read, sft=replace(sft, teacher_key=None))  # held-out losses ask no teacher
            for sample in _read(source.val_files, source, untaught, data, counts) if source.val_files else ():
                held_out.setdefault(sample.source, []).append(sample)
    return train, held_out


def _read(files: Sequence[str], source: SourceConfig, read: Any, data: DataConfig, counts: Counts) -> list[Sample]:
    """Raises ValueError for bad rows that are not to be skipped, and where no row is left."""
    if source.task is not None or not files:
        raise ValueError("conversations and pairs come from files; name train_files, and no task.")
    rows = ((path, number, 0, value) for path in map(Path, files) for number, value in raw_rows(path))
    return [sample for _, _, part in _good(rows, source, read, data, counts) for sample in part]


def _streamed(source: SourceConfig, read: Any, data: DataConfig, max_length: int, counts: Counts) -> StreamedDocuments:
    """Read a source's files as `_read` and `_limited` do, one row at a time."""
    if source.task is not None or not source.train_files:
        raise ValueError("conversations and pairs come from files; name train_files, and no task.")
    files = [Path(name) for name in source.train_files]
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} is no file of JSON lines, which sft.in_memory: false reads; set that to true.")
    rows = ((path, *row) for path in files for row in json_rows(path))
    good = _good(rows, source, read, data, counts)
    limited = ((files.index(path), begin, list(_limited(part, data, max_length, counts))) for path, begin, part in good)

    again = partial(read, counts=Counts())

    def read_again(path: Path, value: Any) -> list[Sample]:
        return list(_limited(_of_row(path, value, source, again), data, max_length, Counts()))

    return StreamedDocuments(files, limited, read_again)


def _good(
    rows: Iterable[tuple[Path, int, int, Any]], source: SourceConfig, read: Any, data: DataConfig, counts: Counts
) -> Iterator[tuple[Path, int, list[Sample]]]:
    """(file, byte, samples) of each row (file, number, byte, value) that is none of the bad ones. Raises as `_read`."""
    problems: list[str] = []
    num_good = 0
    for path, number, begin, value in rows:
        try:
            part = _of_row(path, value, source, read)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        num_good += 1
        yield path, begin, part
    refuse(problems, num_good, data.skip_bad_rows)
    counts.num_bad += len(problems)
    if not num_good:
        names = ", ".join((*source.train_files, *source.val_files))
        raise ValueError(f"the dataset is empty: no rows in {names}; each line must be a JSON object.")


def _of_row(path: Path, value: Any, source: SourceConfig, read: Any) -> list[Sample]:
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    check_text(json.dumps(value, ensure_ascii=False))
    row_source = source.name or str(value.get(SOURCE_KEY, name_of(path)))
    return [replace(sample, source=row_source) for sample in read(value)]


def _limited(samples: Iterable[Sample], data: DataConfig, max_length: int, counts: Counts) -> Iterator[Sample]:
    """Yield samples within the limit; drop or cut longer ones as `data` says. Raises ValueError where it says
    neither.
    """
    for sample in samples:
        longest = max(len(document.token_ids) for document in sample.documents)
        if longest > max_length:
            if data.filter_overlong_prompts:
                counts.num_overlong += 1
                continue
            if data.truncation == "error":
                raise ValueError(
                    f"a document of {sample.source!r} has {longest} tokens, over sft.max_length ({max_length}); raise"
                    " it, or set data.filter_overlong_prompts=true to drop such documents, or data.truncation to cut"
                    " them."
                )
            if sample.taught is not None:
                raise ValueError(
                    f"a document of {sample.source!r} has {longest} tokens, over sft.max_length ({max_length}), and"
                    " what a teacher told of it is not cut; raise that, or set data.filter_overlong_prompts=true."
                )
            sample = replace(sample, documents=tuple(_cut(d, max_length, data.truncation) for d in sample.documents))
            counts.num_cut += 1
        if any(not document.trained or len(document.token_ids) < 2 for document in sample.documents):
            counts.num_overlong += 1  # what trains was cut off
            continue
        yield sample


def _cut(document: Document, length: int, side: Truncation) -> Document:
    if len(document.token_ids) <= length:
        return document
    kept = cut(tuple(range(len(document.token_ids))), length, side)
    trains = {i for begin, end in document.trained for i in range(begin, end)}
    spans: list[tuple[int, int]] = []
    for position, index in enumerate(kept):
        if index in trains and position:  # nothing predicts a document's first token
            begin = spans.pop()[0] if spans and spans[-1][1] == position else position
            spans.append((begin, position + 1))
    return Document(tuple(document.token_ids[i] for i in kept), tuple(spans))
