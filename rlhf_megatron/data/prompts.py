"""Prompts of a run: rows of files or of generated tasks, one source or several, as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from rlhf_megatron.config.schema import DataConfig, SourceConfig
from rlhf_megatron.config.typed import params_from_mapping
from rlhf_megatron.data.chat_template import ChatFormat, make_chat_format
from rlhf_megatron.data.items import Encoded, Limit, PromptFormat, PromptItem, PromptSource, encode_rows, take_shots
from rlhf_megatron.data.rows import PromptRow, RowCounts, check_texts, read_rows
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class HeldOutSet:
    """Held-out prompts that are evaluated and shown together."""

    name: str
    items: tuple[PromptItem, ...]


@dataclass(frozen=True)
class PromptSets:
    """The result of `load_prompts`. `held_out_sets` is empty when a run of files names no val_files."""

    sources: tuple[PromptSource, ...]
    held_out_sets: tuple[HeldOutSet, ...]
    num_bad_rows: int  # skipped, of all sets
    num_overlong: int  # dropped, of all sets
    num_cut: int  # over the limit and shortened, of all sets
    num_duplicates: int  # training rows whose prompt stood in an earlier one of its source; they are kept
    num_shared: int  # held-out items whose prompt is trained on too

    @cached_property
    def train(self) -> tuple[PromptItem, ...]:
        """The training items of all sources."""
        return tuple(item for source in self.sources for item in source.items)

    @cached_property
    def held_out(self) -> tuple[PromptItem, ...]:
        """The items of all held-out sets."""
        return tuple(item for held_out in self.held_out_sets for item in held_out.items)


@dataclass(frozen=True)
class _Loaded:
    """One source."""

    train: Encoded
    held_out: Encoded
    sets: tuple[HeldOutSet, ...]
    num_bad_rows: int
    num_duplicates: int


def load_prompts(config: DataConfig, tokenizer: Tokenizer, spells_labels: bool = False) -> PromptSets:
    """The items of the run's sources, or of its task or files. `spells_labels`: labels are trained on, too.

    A held-out set is what a source holds out, by file or data_source where it has several. Raises ValueError for
    malformed rows, empty sets and prompts over the limit, as `read_rows` and `encode_rows` say, for a task or parameter
    that does not exist, and for a missing chat template.
    """
    chat = None
    if config.apply_chat_template:
        chat = make_chat_format(tokenizer, config.system_prompt, config.apply_chat_template_kwargs)
    sources = sources_of(config)
    loaded = [_load(key, source, config, tokenizer, chat, spells_labels) for key, source in sources.items()]
    trained = {item.prompt for source in loaded for item in source.train.items}
    encoded = [part for source in loaded for part in (source.train, source.held_out)]
    return PromptSets(
        sources=tuple(
            PromptSource(source.name, source.weight, found.train.items)
            for source, found in zip(sources.values(), loaded, strict=True)
        ),
        held_out_sets=tuple(held_out for source in loaded for held_out in source.sets),
        num_bad_rows=sum(source.num_bad_rows for source in loaded) + sum(part.num_bad for part in encoded),
        num_overlong=sum(part.num_dropped for part in encoded),
        num_cut=sum(part.num_cut for part in encoded),
        num_duplicates=sum(source.num_duplicates for source in loaded),
        num_shared=sum(item.prompt in trained for source in loaded for item in source.held_out.items),
    )


def sources_of(data: DataConfig) -> dict[str, SourceConfig]:
    """Return the sources by the place of their settings, each with what it takes over from the section; without
    sources, the section itself.
    """
    if not data.sources:
        files = (data.train_files, data.val_files)
        return {"data": SourceConfig("", 1.0, data.task, data.task_params, *files, data.prompt_template, data.few_shot)}
    return {
        f"data.sources[{index}]": replace(
            source,
            prompt_template=data.prompt_template if source.prompt_template is None else source.prompt_template,
            few_shot=source.few_shot or data.few_shot,
        )
        for index, source in enumerate(data.sources)
    }


def read_all(config: DataConfig) -> None:
    """Read the rows of all sources, without a tokenizer. Raises ValueError as `load_prompts` does."""
    for key, source in sources_of(config).items():
        with of_source(key, source):
            _read(key, source, config)


@contextmanager
def of_source(key: str, source: SourceConfig) -> Iterator[None]:
    """Name the source in a ValueError raised inside, where there are several."""
    try:
        yield
    except ValueError as error:
        if not source.name:
            raise
        raise ValueError(f"{key} ({source.name}): {error}") from error


def _load(
    key: str,
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    chat: ChatFormat | None,
    spells_labels: bool,
) -> _Loaded:
    assert source.prompt_template is not None and source.few_shot is not None, "see `_sources`"
    with of_source(key, source):
        train, train_counts, held_out, held_out_counts = _read(key, source, config)
        shots, train, taken = take_shots(train, source.few_shot, source.prompt_template)
        held_out_rows = tuple(row for row in held_out if row.prompt not in taken)
        if held_out and not held_out_rows:
            raise ValueError("every held-out prompt is used as a solved example; lower few_shot.num_shots.")
        form = PromptFormat(source.prompt_template, shots, chat)
        limit = Limit(config.max_prompt_length, config.filter_overlong_prompts, config.truncation)
        how = (tokenizer, form, limit, config.skip_bad_rows)
        train_items = encode_rows(train, *how, spells_labels)
        held_out_items = encode_rows(held_out_rows, *how) if held_out_rows else Encoded((), 0, 0)
    return _Loaded(
        _named(train_items, source.name),
        _named(held_out_items, source.name),
        _held_out_sets(held_out_items.items, source.name),
        train_counts.num_bad + held_out_counts.num_bad,
        train_counts.num_duplicates,
    )


def _read(
    key: str, source: SourceConfig, config: DataConfig
) -> tuple[tuple[PromptRow, ...], RowCounts, tuple[PromptRow, ...], RowCounts]:
    """Training rows and held-out rows, each with their counts."""
    nothing = RowCounts(0, 0, 0)
    if source.task is not None:
        task = TASKS.get(source.task)
        params = params_from_mapping(task.params, source.task_params, f"{key}.task_params") if task.params else None
        rows = task.build(params)
        for row in (*rows.train, *rows.held_out):
            try:
                check_texts(row)
            except ValueError as error:
                raise ValueError(f"task {source.task}, {row.origin}: {error}; mend the task.") from None
        return rows.train, nothing, rows.held_out, nothing
    if not source.train_files:
        raise ValueError(f"the dataset is empty: {key}.train_files names no file; name one, or set {key}.task.")
    keys = (config.prompt_key, config.label_key, config.skip_bad_rows)
    held_out = read_rows(source.val_files, *keys) if source.val_files else ((), nothing)
    return *read_rows(source.train_files, *keys), *held_out


def _named(encoded: Encoded, name: str) -> Encoded:
    """Items of a named source bear its name."""
    if not name:
        return encoded
    return replace(encoded, items=tuple(replace(item, source=name) for item in encoded.items))


def _held_out_sets(items: tuple[PromptItem, ...], name: str) -> tuple[HeldOutSet, ...]:
    """A set for each source that the rows name (their data_source, file or task)."""
    by_source: dict[str, list[PromptItem]] = {}
    for item in items:
        by_source.setdefault(item.source, []).append(item if not name else replace(item, source=name))
    if name and len(by_source) == 1:
        return (HeldOutSet(name, *(tuple(rows) for rows in by_source.values())),)
    return tuple(HeldOutSet(f"{name}/{source}" if name else source, tuple(rows)) for source, rows in by_source.items())
