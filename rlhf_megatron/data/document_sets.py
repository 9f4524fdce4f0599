"""The rows of supervised and preference jobs as samples: prompts and answers, conversations, plain
texts, pairs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import DataConfig, DataSourceConfig, SFTConfig
from rlhf_megatron.data.assistant_turns import TokenDocument
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.data_rows import (
    SOURCE_KEY,
    check_text_encoding,
    default_source_name,
    is_missing_value,
    look_up_key,
    raise_on_bad_rows,
)
from rlhf_megatron.data.document_row_parsing import (
    RowOutcomeCounts,
    parse_conversation_row,
    parse_preference_row,
    parse_sample_weight,
    parse_text_row,
)
from rlhf_megatron.data.document_samples import DocumentSample, InMemorySampleSet, SampleSource
from rlhf_megatron.data.extra_columns import (
    ExtraColumnWriter,
    describe_picture_refusal,
    find_picture_column,
    parse_extra,
)
from rlhf_megatron.data.nesting import refuse_deep_nesting
from rlhf_megatron.data.prompt_items import PromptFormat, PromptItem, Truncation, truncate_ids
from rlhf_megatron.data.prompts import load_prompt_sets, name_source_in_errors, resolve_sources
from rlhf_megatron.data.row_files import drop_null_columns, iterate_json_rows, iterate_raw_rows
from rlhf_megatron.data.streamed_samples import StreamedSampleSet
from rlhf_megatron.data.tokenizer import Tokenizer

# keys that published files have
MESSAGES_KEY = "messages"
TEXT_KEY = "text"
ANY_LENGTH = 1 << 24  # tokens: the limit on documents comes after the one on prompts


@dataclass(frozen=True)
class DocumentSets:
    """The result of `load_documents`."""

    sources: tuple[SampleSource, ...]
    held_out_sources: tuple[SampleSource, ...]  # a set for each source that the rows name
    counts: RowOutcomeCounts = field(default_factory=RowOutcomeCounts)

    @property
    def num_train(self) -> int:
        """Return the number of training samples."""
        return sum(len(source.items) for source in self.sources)

    @property
    def num_held_out(self) -> int:
        """Return the number of held-out samples."""
        return sum(len(held_out.items) for held_out in self.held_out_sources)


def load_documents(
    data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, is_pairs: bool
) -> DocumentSets:
    """Load the documents of the job's sources, or of its task or files. `is_pairs`: rows are pairs
    of answers.

    Raise ValueError that names the rows for malformed rows, empty sets and documents over the
    limit; also for a task or parameter that does not exist, and for a missing chat template.
    """
    counts = RowOutcomeCounts()
    if is_pairs or sft.messages_key is not None or sft.text_key is not None:
        train, held_out = _load_row_samples(data, sft, tokenizer, is_pairs, counts)
    else:
        train, held_out = _load_prompt_samples(data, sft, tokenizer, counts)
    limited = partial(_apply_length_limit, data=data, max_length=sft.max_length, counts=counts)
    sources = tuple(
        SampleSource(
            name,
            weight,
            samples
            if isinstance(samples, StreamedSampleSet)
            else InMemorySampleSet(limited(samples)),
        )
        for name, weight, samples in train
    )
    for source in sources:
        if not len(source.items):
            raise ValueError(
                f"the dataset is empty{f' ({source.name})' if source.name else ''}: no document is"
                f" left with tokens that train, in at most sft.max_length ({sft.max_length})"
                " tokens; look at data.train_files."
            )
    sets = {name: InMemorySampleSet(limited(samples)) for name, samples in held_out.items()}
    return DocumentSets(
        sources,
        tuple(SampleSource(name, 1.0, items) for name, items in sets.items() if items),
        counts,
    )


def first_row_has_label(data: DataConfig) -> bool:
    """Return whether the first row of the files of `data` has a prompt and its answer; False for a
    malformed row.
    """
    try:
        return all(
            look_up_key(_read_first_row(data), key, "") is not None
            for key in (data.prompt_key, data.label_key)
        )
    except ValueError:
        return False


def _read_first_row(data: DataConfig) -> Mapping[str, Any]:
    """Return the first row of the first held-out or training file that is an object, or {}."""
    source = next(iter(resolve_sources(data).values()))
    files = [*source.val_files, *source.train_files][:1]
    return next(
        (row for file in files for _, row in iterate_raw_rows(Path(file)) if isinstance(row, dict)),
        {},
    )


def load_held_out_samples(
    data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, is_pairs: bool = False
) -> tuple[DocumentSample, ...]:
    """Return the held-out documents of a job, to be scored. The first row of the files decides
    their kind: prompts and answers, pairs where `is_pairs`, conversations (under "messages" where
    sft.messages_key is null), or plain texts (under "text" where sft.text_key is null).

    Raise ValueError as `load_documents` does.
    """
    first = _read_first_row(data)
    is_pairs = is_pairs and sft.chosen_key in first
    names_kind = sft.messages_key is not None or sft.text_key is not None
    is_other = not is_pairs and not names_kind and data.prompt_key not in first
    if is_other and MESSAGES_KEY in first:
        sft = replace(sft, messages_key=MESSAGES_KEY)
        data = replace(data, apply_chat_template=True)
    elif (is_other and TEXT_KEY in first) or sft.text_key is not None:
        counts = RowOutcomeCounts()
        read = partial(
            parse_text_row,
            text_key=TEXT_KEY if sft.text_key is None else sft.text_key,
            data=data,
            sft=sft,
            tokenizer=tokenizer,
        )
        samples: Iterable[DocumentSample] = _read_samples(
            data.val_files, DataSourceConfig(""), read, (TEXT_KEY,), data, counts
        )
        return tuple(_apply_length_limit(samples, data, sft.max_length, counts))
    sets = load_documents(data, sft, tokenizer, is_pairs)
    return tuple(
        held_out.items[i] for held_out in sets.held_out_sources for i in range(len(held_out.items))
    )


# (name, weight, samples) of each source
SourceSamples = list[tuple[str, float, list[DocumentSample] | StreamedSampleSet]]
SamplesBySource = dict[str, list[DocumentSample]]


def make_answer_samples(items: Sequence[PromptItem], tokenizer: Tokenizer) -> list[DocumentSample]:
    """Return a document for each item: the prompt as an engine gets it, then the label and the
    end-of-sequence token, which train.
    """
    labels = tokenizer.encode_texts([item.label for item in items])
    samples = []
    for item, label_ids in zip(items, labels, strict=True):
        ids = (*item.prompt_ids, *label_ids, tokenizer.eos_token_id)
        samples.append(
            DocumentSample((TokenDocument(ids, ((len(item.prompt_ids), len(ids)),)),), item.source)
        )
    return samples


def _load_prompt_samples(
    data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, counts: RowOutcomeCounts
) -> tuple[SourceSamples, SamplesBySource]:
    """Return the training samples by source and the held-out samples by name, for rows of prompt
    and answer. Prompts are in the template, the shots and the chat that RL would use. Prompts of
    any length are kept, and of `counts` only num_bad is set. Samples have the weights of
    `sft.weight_key`.
    """
    weight_column = {} if sft.weight_key is None else {sft.weight_key: "sft.weight_key"}
    sets = load_prompt_sets(
        replace(data, max_prompt_length=ANY_LENGTH),
        tokenizer,
        must_encode_labels=True,
        extra_writer=ExtraColumnWriter(data.extra_columns, weight_column),
    )
    counts.num_bad = sets.num_bad_rows

    def make_weighted_samples(items: Sequence[PromptItem]) -> list[DocumentSample]:
        """Return the items as samples, with the weights of their rows."""
        samples = make_answer_samples(items, tokenizer)
        if sft.weight_key is None:
            return samples
        weights = [parse_sample_weight(parse_extra(item.extra), sft) for item in items]
        return [
            replace(sample, weight=weight) for sample, weight in zip(samples, weights, strict=True)
        ]

    train: SourceSamples = [
        (source.name, source.weight, make_weighted_samples(source.items)) for source in sets.sources
    ]
    return train, {
        held_out.name: make_weighted_samples(held_out.items) for held_out in sets.held_out_sets
    }


def _load_row_samples(
    data: DataConfig, sft: SFTConfig, tokenizer: Tokenizer, is_pairs: bool, counts: RowOutcomeCounts
) -> tuple[SourceSamples, SamplesBySource]:
    """Return the training samples by source and the held-out samples by name, for files of
    conversations, of plain texts or, with `is_pairs`, of pairs.
    """
    chat = None
    if data.apply_chat_template:
        chat = make_chat_format(tokenizer, data.system_prompt, data.apply_chat_template_kwargs)
    train: SourceSamples = []
    held_out: SamplesBySource = {}
    read_keys = _list_read_keys(data, sft, is_pairs)
    for key, source in resolve_sources(data).items():
        prompt_format = PromptFormat(
            source.prompt_template or "{prompt}",
            chat=chat,
            add_special_tokens=data.add_special_tokens,
        )
        if is_pairs:
            read = partial(
                parse_preference_row,
                data=data,
                sft=sft,
                prompt_format=prompt_format,
                tokenizer=tokenizer,
                counts=counts,
            )
        elif sft.text_key is not None:
            read = partial(
                parse_text_row,
                text_key=sft.text_key,
                data=data,
                sft=sft,
                tokenizer=tokenizer,
            )
        else:
            assert chat is not None, "a rule demands the template of conversations"
            read = partial(
                parse_conversation_row, sft=sft, chat=chat, tokenizer=tokenizer, counts=counts
            )
        with name_source_in_errors(key, source):
            if sft.in_memory:
                samples: list[DocumentSample] | StreamedSampleSet = _read_samples(
                    source.train_files, source, read, read_keys, data, counts
                )
            else:
                samples = _stream_samples(source, read, read_keys, data, sft.max_length, counts)
            train.append((source.name, source.weight, samples))
            # held-out losses ask no teacher
            untaught = partial(read, sft=replace(sft, teacher_key=None))
            for sample in (
                _read_samples(source.val_files, source, untaught, read_keys, data, counts)
                if source.val_files
                else ()
            ):
                held_out.setdefault(sample.source, []).append(sample)
    return train, held_out


def _list_read_keys(data: DataConfig, sft: SFTConfig, is_pairs: bool) -> tuple[str, ...]:
    """Return the keys of a row that a job of conversations or pairs reads, beside its source."""
    answers = (data.prompt_key, sft.chosen_key, sft.rejected_key)
    keys = (*answers, sft.tools_key) if is_pairs else (sft.messages_key, sft.tools_key)
    return tuple(key for key in (*keys, sft.weight_key, sft.teacher_key) if key is not None)


def _read_samples(
    files: Sequence[str],
    source: DataSourceConfig,
    parse_row: Any,
    read_keys: Sequence[str],
    data: DataConfig,
    counts: RowOutcomeCounts,
) -> list[DocumentSample]:
    """Return the samples of all rows of these files. Raise ValueError for bad rows that are not
    skipped, where no row is left, and for a task.
    """
    if source.task is not None or not files:
        raise ValueError(
            "conversations, plain texts and pairs come from files; name train_files, and no task."
        )
    rows = (
        (path, number, 0, value)
        for path in map(Path, files)
        for number, value in iterate_raw_rows(path)
    )
    return [
        sample
        for _, _, part in _iterate_good_rows(rows, source, parse_row, read_keys, data, counts)
        for sample in part
    ]


def _stream_samples(
    source: DataSourceConfig,
    parse_row: Any,
    read_keys: Sequence[str],
    data: DataConfig,
    max_length: int,
    counts: RowOutcomeCounts,
) -> StreamedSampleSet:
    """Return a source's samples, read from its files when drawn; their rows and lengths are checked
    once, one row at a time, as `_read_samples` and `_apply_length_limit` do.
    """
    if source.task is not None or not source.train_files:
        raise ValueError(
            "conversations, plain texts and pairs come from files; name train_files, and no task."
        )
    files = [Path(name) for name in source.train_files]
    for path in files:
        if not path.is_file():
            raise ValueError(
                f"{path} is no file of JSON, which sft.in_memory: false reads; set that to true."
            )
    rows = ((path, *row) for path in files for row in iterate_json_rows(path))
    good = _iterate_good_rows(rows, source, parse_row, read_keys, data, counts)
    limited = (
        (files.index(path), begin, list(_apply_length_limit(part, data, max_length, counts)))
        for path, begin, part in good
    )

    again = partial(parse_row, counts=RowOutcomeCounts())

    def parse_row_again(path: Path, value: Any) -> list[DocumentSample]:
        """Return the samples of a row, without counting it again."""
        return list(
            _apply_length_limit(
                _make_row_samples(path, value, source, again, read_keys),
                data,
                max_length,
                RowOutcomeCounts(),
            )
        )

    return StreamedSampleSet(files, limited, parse_row_again)


def _iterate_good_rows(
    rows: Iterable[tuple[Path, int, int, Any]],
    source: DataSourceConfig,
    parse_row: Any,
    read_keys: Sequence[str],
    data: DataConfig,
    counts: RowOutcomeCounts,
) -> Iterator[tuple[Path, int, list[DocumentSample]]]:
    """Yield (file, byte, samples) of each good row among `rows` (file, number, byte, value). After
    the last row raise ValueError as `_read_samples` does.
    """
    problems: list[str] = []
    num_good = 0
    for path, number, begin, value in rows:
        try:
            part = _make_row_samples(path, value, source, parse_row, read_keys)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        num_good += 1
        yield path, begin, part
    raise_on_bad_rows(problems, num_good, data.skip_bad_rows)
    counts.num_bad += len(problems)
    if not num_good:
        names = ", ".join((*source.train_files, *source.val_files))
        raise ValueError(
            f"the dataset is empty: no rows in {names}; each line must be a JSON object, or the"
            " file an array of objects."
        )


@refuse_deep_nesting
def _make_row_samples(
    path: Path,
    value: Any,
    source: DataSourceConfig,
    parse_row: Any,
    read_keys: Sequence[str],
) -> list[DocumentSample]:
    """Return the samples of a raw row, with their source set. Raise ValueError for a bad row; what
    stands under other keys than `read_keys` and the source does not count, but for pictures.
    """
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    row = drop_null_columns(value)
    row_source = source.name or default_source_name(path)
    if not source.name and not is_missing_value(row.get(SOURCE_KEY)):
        row_source = str(row[SOURCE_KEY])
    check_text_encoding(row_source, "source")
    columns = [row[name] for key in read_keys if (name := _find_column_name(row, key)) is not None]
    check_text_encoding(json.dumps(columns, ensure_ascii=False, default=str))
    pictures = find_picture_column(row)
    if pictures is not None:
        raise ValueError(describe_picture_refusal(pictures))
    return [replace(sample, source=row_source) for sample in parse_row(row)]


def _find_column_name(row: Mapping[str, Any], key: str) -> str | None:
    """Return the name of the row's column in which `look_up_key` looks for a key; None where the
    row has no such column.
    """
    name = key if key in row else key.split(".")[0]
    return name if name in row else None


def _apply_length_limit(
    samples: Iterable[DocumentSample], data: DataConfig, max_length: int, counts: RowOutcomeCounts
) -> Iterator[DocumentSample]:
    """Yield the samples within the limit; drop or cut longer ones as `data` says, and drop samples
    in which nothing is left to train. Add to `counts`. Raise ValueError where `data` neither drops
    nor cuts.
    """
    for sample in samples:
        longest = max(len(document.token_ids) for document in sample.documents)
        if longest > max_length:
            if data.filter_overlong_prompts:
                counts.num_overlong += 1
                continue
            if data.truncation == "error":
                raise ValueError(
                    f"a document of {sample.source!r} has {longest} tokens, over sft.max_length"
                    f" ({max_length}); raise it, or set data.filter_overlong_prompts=true to drop"
                    " such documents, or data.truncation to cut them."
                )
            if sample.teacher_top_tokens is not None:
                raise ValueError(
                    f"a document of {sample.source!r} has {longest} tokens, over sft.max_length"
                    f" ({max_length}), and what a teacher told of it is not cut; raise that, or"
                    " set data.filter_overlong_prompts=true."
                )
            sample = replace(
                sample,
                documents=tuple(
                    _truncate_document(d, max_length, data.truncation) for d in sample.documents
                ),
            )
            counts.num_cut += 1
        if any(
            not document.trained_spans or len(document.token_ids) < 2
            for document in sample.documents
        ):
            counts.num_overlong += 1  # what trains was cut off
            continue
        yield sample


def _truncate_document(document: TokenDocument, length: int, side: Truncation) -> TokenDocument:
    """Return the document with at most `length` tokens, cut off at `side`, with its trained spans
    adjusted.
    """
    if len(document.token_ids) <= length:
        return document
    kept = truncate_ids(tuple(range(len(document.token_ids))), length, side)
    trains = {i for begin, end in document.trained_spans for i in range(begin, end)}
    spans: list[tuple[int, int]] = []
    for position, index in enumerate(kept):
        if index in trains and position:  # nothing predicts a document's first token
            begin = spans.pop()[0] if spans and spans[-1][1] == position else position
            spans.append((begin, position + 1))
    return TokenDocument(tuple(document.token_ids[i] for i in kept), tuple(spans))
