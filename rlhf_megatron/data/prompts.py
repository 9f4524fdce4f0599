"""Prompts of a run: rows of files or of generated tasks, one source or several, as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rlhf_megatron.config.schema import DataConfig, DataSourceConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.data.chat_template import ChatFormat, make_chat_format
from rlhf_megatron.data.data_rows import PromptRow, RowCounts, check_row_encoding, read_prompt_rows
from rlhf_megatron.data.extra_columns import ExtraColumnWriter, LeftOutColumn
from rlhf_megatron.data.prompt_items import (
    EncodedPrompts,
    PromptFormat,
    PromptItem,
    PromptLimit,
    PromptSource,
    draw_few_shot_examples,
    encode_prompt_rows,
)
from rlhf_megatron.data.response_texts import find_response_prefix, find_template_prefix
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class HeldOutPrompts:
    """Held-out prompts that are evaluated and shown together."""

    name: str
    items: tuple[PromptItem, ...]


@dataclass(frozen=True)
class PromptSets:
    """The result of `load_prompt_sets`. `held_out_sets` is empty when a run of files
    names no val_files.
    """

    sources: tuple[PromptSource, ...]
    held_out_sets: tuple[HeldOutPrompts, ...]
    num_bad_rows: int  # skipped, of all sets
    num_overlong: int  # dropped, of all sets
    num_cut: int  # over the limit and shortened, of all sets
    # training rows whose prompt stood in an earlier one of its source; they are kept
    num_duplicates: int
    num_held_out_in_train: int  # held-out items whose prompt is trained on too
    template_prefix: str = ""  # what the chat template writes of each answer, as "<think>\n"
    left_out_columns: tuple[LeftOutColumn, ...] = ()  # what rewards cannot read of the rows

    @cached_property
    def train_items(self) -> tuple[PromptItem, ...]:
        """Return the training items of all sources."""
        return tuple(item for source in self.sources for item in source.items)

    def list_response_prefixes(self) -> list[str]:
        """Return what the first prompt of each source and of each held-out set writes of its
        answer.
        """
        first_items = [source.items[0] for source in self.sources]
        first_items += [held_out.items[0] for held_out in self.held_out_sets]
        return [find_response_prefix(item.prompt, self.template_prefix) for item in first_items]

    @cached_property
    def held_out_items(self) -> tuple[PromptItem, ...]:
        """Return the items of all held-out sets."""
        return tuple(item for held_out in self.held_out_sets for item in held_out.items)


@dataclass(frozen=True)
class _LoadedPromptSource:
    """One source."""

    train_prompts: EncodedPrompts
    held_out_prompts: EncodedPrompts
    held_out_sets: tuple[HeldOutPrompts, ...]
    num_bad_rows: int
    num_duplicates: int


def load_prompt_sets(
    config: DataConfig,
    tokenizer: Tokenizer,
    must_encode_labels: bool = False,
    extra_writer: ExtraColumnWriter | None = None,
    keeps_messages: bool = False,
) -> PromptSets:
    """Load the items of the run's sources, or of its task or files. `must_encode_labels`: labels
    are trained on too, so that the tokenizer must be able to spell them. `extra_writer` chooses the
    columns that rewards read, and counts those that it leaves out; without one, `config` chooses.
    `keeps_messages`: items also have the prompt's messages, for episodes of several turns.

    A source's held-out prompts are one set, or one for each file or data_source of its rows where
    it has several. Raise ValueError for malformed rows, empty sets and prompts over the limit, as
    `read_prompt_rows` and `encode_prompt_rows` do, for a task or parameter that does not exist, and
    for a missing chat template.
    """
    chat = None
    if config.apply_chat_template:
        chat = make_chat_format(tokenizer, config.system_prompt, config.apply_chat_template_kwargs)
    sources = resolve_sources(config)
    extra_writer = extra_writer or ExtraColumnWriter(config.extra_columns)
    loaded = [
        _load_prompt_source(
            key,
            source,
            config,
            tokenizer,
            chat,
            must_encode_labels,
            extra_writer,
            keeps_messages,
        )
        for key, source in sources.items()
    ]
    extra_writer.check_named_columns()
    trained = {item.prompt for source in loaded for item in source.train_prompts.items}
    encoded = [
        part for source in loaded for part in (source.train_prompts, source.held_out_prompts)
    ]
    return PromptSets(
        sources=tuple(
            PromptSource(source.name, source.weight, loaded_source.train_prompts.items)
            for source, loaded_source in zip(sources.values(), loaded, strict=True)
        ),
        held_out_sets=tuple(held_out for source in loaded for held_out in source.held_out_sets),
        num_bad_rows=sum(source.num_bad_rows for source in loaded)
        + sum(part.num_bad for part in encoded),
        num_overlong=sum(part.num_dropped for part in encoded),
        num_cut=sum(part.num_cut for part in encoded),
        num_duplicates=sum(source.num_duplicates for source in loaded),
        num_held_out_in_train=sum(
            item.prompt in trained for source in loaded for item in source.held_out_prompts.items
        ),
        template_prefix="" if chat is None else find_template_prefix(chat),
        left_out_columns=extra_writer.list_left_out_columns(),
    )


def resolve_sources(data: DataConfig) -> dict[str, DataSourceConfig]:
    """Return the sources by the path of their settings, each completed with the settings that it
    takes over from the data section; without sources, the section itself as the only source.
    """
    if not data.sources:
        section = DataSourceConfig(
            "",
            1.0,
            data.task,
            data.task_params,
            data.train_files,
            data.val_files,
            data.prompt_template,
            data.few_shot,
        )
        return {"data": section}
    return {
        f"data.sources[{index}]": replace(
            source,
            prompt_template=data.prompt_template
            if source.prompt_template is None
            else source.prompt_template,
            few_shot=source.few_shot or data.few_shot,
        )
        for index, source in enumerate(data.sources)
    }


def check_source_rows(config: DataConfig) -> None:
    """Read the rows of all sources, without a tokenizer, and drop them. Raise ValueError as
    `load_prompt_sets` does.
    """
    extra_writer = ExtraColumnWriter(config.extra_columns)
    for key, source in resolve_sources(config).items():
        with name_source_in_errors(key, source):
            _read_source_rows(key, source, config, extra_writer)
    extra_writer.check_named_columns()


@contextmanager
def name_source_in_errors(setting_path: str, source: DataSourceConfig) -> Iterator[None]:
    """Within the block, add the source's name to a ValueError, where the source has one."""
    try:
        yield
    except ValueError as error:
        if not source.name:
            raise
        raise ValueError(f"{setting_path} ({source.name}): {error}") from error


def _load_prompt_source(
    setting_path: str,
    source: DataSourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    chat: ChatFormat | None,
    must_encode_labels: bool,
    extra_writer: ExtraColumnWriter,
    keeps_messages: bool,
) -> _LoadedPromptSource:
    """Read, encode and group the rows of one source. Raise ValueError with the name of the
    source.
    """
    assert source.prompt_template is not None and source.few_shot is not None, "see `_sources`"
    with name_source_in_errors(setting_path, source):
        train, train_counts, held_out, held_out_counts = _read_source_rows(
            setting_path, source, config, extra_writer
        )
        shots, train, taken = draw_few_shot_examples(train, source.few_shot, source.prompt_template)
        held_out_rows = tuple(row for row in held_out if row.prompt not in taken)
        if held_out and not held_out_rows:
            raise ValueError(
                "every held-out prompt is used as a solved example; lower few_shot.num_shots."
            )
        prompt_format = PromptFormat(
            source.prompt_template, shots, chat, config.add_special_tokens, keeps_messages
        )
        limit = PromptLimit(
            config.max_prompt_length, config.filter_overlong_prompts, config.truncation
        )
        encode_rows = partial(
            encode_prompt_rows,
            tokenizer=tokenizer,
            prompt_format=prompt_format,
            prompt_limit=limit,
            skip_bad_rows=config.skip_bad_rows,
        )
        train_items = encode_rows(train, must_encode_labels=must_encode_labels)
        held_out_items = encode_rows(held_out_rows) if held_out_rows else EncodedPrompts((), 0, 0)
    return _LoadedPromptSource(
        _set_item_source(train_items, source.name),
        _set_item_source(held_out_items, source.name),
        _group_held_out_prompts(held_out_items.items, source.name),
        train_counts.num_bad + held_out_counts.num_bad,
        train_counts.num_duplicates,
    )


def _read_source_rows(
    setting_path: str,
    source: DataSourceConfig,
    config: DataConfig,
    extra_writer: ExtraColumnWriter,
) -> tuple[tuple[PromptRow, ...], RowCounts, tuple[PromptRow, ...], RowCounts]:
    """Return (training rows, their counts, held-out rows, their counts) of a source. Raise
    ValueError for bad rows or missing files.
    """
    nothing = RowCounts(0, 0, 0)
    if source.task is not None:
        task = TASKS.get(source.task)
        params = (
            build_params(task.params, source.task_params, f"{setting_path}.task_params")
            if task.params
            else None
        )
        rows = task.build(params)
        for row in (*rows.train, *rows.held_out):
            try:
                check_row_encoding(row)
            except ValueError as error:
                raise ValueError(
                    f"task {source.task}, {row.origin}: {error}; mend the task."
                ) from None
        return rows.train, nothing, rows.held_out, nothing
    if not source.train_files:
        raise ValueError(
            f"the dataset is empty: {setting_path}.train_files names no file; name one, or"
            f" set {setting_path}.task."
        )
    read_rows = partial(
        read_prompt_rows,
        prompt_key=config.prompt_key,
        label_key=config.label_key,
        skip_bad_rows=config.skip_bad_rows,
        extra_writer=extra_writer,
    )
    held_out: tuple[tuple[PromptRow, ...], RowCounts] = ((), nothing)
    if source.val_files:
        held_out = read_rows(source.val_files)
    return *read_rows(source.train_files), *held_out


def _set_item_source(encoded: EncodedPrompts, source_name: str) -> EncodedPrompts:
    """Return the items with `source_name` as their source; unchanged where it is ""."""
    if not source_name:
        return encoded
    return replace(
        encoded, items=tuple(replace(item, source=source_name) for item in encoded.items)
    )


def _group_held_out_prompts(
    items: tuple[PromptItem, ...], source_name: str
) -> tuple[HeldOutPrompts, ...]:
    """Return a held-out set for each source that the rows name (their data_source, file or
    task).
    """
    by_source: dict[str, list[PromptItem]] = {}
    for item in items:
        by_source.setdefault(item.source, []).append(
            item if not source_name else replace(item, source=source_name)
        )
    if source_name and len(by_source) == 1:
        return (HeldOutPrompts(source_name, *(tuple(rows) for rows in by_source.values())),)
    return tuple(
        HeldOutPrompts(f"{source_name}/{source}" if source_name else source, tuple(rows))
        for source, rows in by_source.items()
    )
