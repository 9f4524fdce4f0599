"""`rlhf-megatron data`: `show` prints samples of a run, with the tokens that train
in colour; `prepare` writes files of published questions.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run_rules import learns_from_pairs
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.scheduler.algorithm_setup import load_run_prompts
from rlhf_megatron.controller.supervised.supervised_run import load_supervised_data
from rlhf_megatron.data.assistant_turns import TokenDocument
from rlhf_megatron.data.document_samples import InMemorySampleSet, SampleSource
from rlhf_megatron.data.document_sets import DocumentSets, make_answer_samples
from rlhf_megatron.data.extra_columns import LeftOutColumn, describe_left_out_columns
from rlhf_megatron.data.opening_tokens import describe_opening_tokens
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rewards.published_datasets import (
    PUBLISHED_DATASETS,
    fetch_dataset,
    prepare_dataset,
)
from rlhf_megatron.rewards.service.response_reading import describe_configured_reading
from rlhf_megatron.rewards.service.reward_scorer import describe_partial_labels

# around what trains, with a terminal and without
COLOUR_MARKS = ("\x1b[32m", "\x1b[0m")
TEXT_MARKS = ("⟦", "⟧")


def run_data_show_command(args: argparse.Namespace) -> None:
    """Print the first samples of each source, with marks around the tokens that train, and the
    number of samples. For an RL run, print the prompts with their labels, as a warm-up would train
    them, and what the rewards read of responses beyond their text.
    """
    config = load_run_config(args.config, args.overrides).config
    sets, tokenizer, left_out_columns, reading_lines = _load_document_sets(config)
    items_name = "prompts" if config.job == "train" else "documents"
    marks = COLOUR_MARKS if sys.stdout.isatty() and "NO_COLOR" not in os.environ else TEXT_MARKS
    for line in format_sample_lines(
        sets.sources if args.split == "train" else sets.held_out_sources, tokenizer, args.n, marks
    ):
        print(line)
    print(
        "; ".join(
            [
                f"{sets.num_train} training and {sets.num_held_out} held-out samples",
                *sets.counts.describe_counts(),
                *filter(None, [describe_left_out_columns(left_out_columns)]),
            ]
        )
    )
    first_document = sets.sources[0].items[0].documents[0]
    print(describe_opening_tokens(tokenizer, config.data, first_document.token_ids, items_name))
    for line in reading_lines:
        print(line)


def _load_document_sets(
    config: RunConfig,
) -> tuple[DocumentSets, Tokenizer, tuple[LeftOutColumn, ...], list[str]]:
    """Return (training and held-out samples of a run, its tokenizer, the columns that its rewards
    cannot read, lines on what its rewards read of responses and of labels). For an RL run, make
    samples of each prompt and its label.
    """
    if config.job != "train":
        document_sets, tokenizer = load_supervised_data(
            config.model, config.data, config.sft, learns_from_pairs(config)
        )
        return document_sets, tokenizer, (), []
    prompt_sets, tokenizer = load_run_prompts(
        config.model, config.data, config.warmup.max_steps > 0
    )
    train = [
        SampleSource(s.name, s.weight, InMemorySampleSet(make_answer_samples(s.items, tokenizer)))
        for s in prompt_sets.sources
    ]
    held_out = [
        SampleSource(s.name, 1.0, InMemorySampleSet(make_answer_samples(s.items, tokenizer)))
        for s in prompt_sets.held_out_sets
    ]
    token_names = [*tokenizer.special_tokens_by_id.values()]
    lines = describe_configured_reading(
        config.reward, prompt_sets.list_response_prefixes(), token_names
    )
    items = (*prompt_sets.train_items, *prompt_sets.held_out_items)
    lines += describe_partial_labels(
        config.reward, ((item.source, item.label, item.extra) for item in items)
    )
    samples = DocumentSets(tuple(train), tuple(held_out))
    return samples, tokenizer, prompt_sets.left_out_columns, lines


def format_sample_lines(
    sources: Sequence[SampleSource],
    tokenizer: Tokenizer,
    num_samples: int,
    marks: tuple[str, str] = TEXT_MARKS,
) -> Iterator[str]:
    """Yield the lines that `data show` prints for the first `num_samples` samples of each source: a
    header with token counts, and the text of each document. `marks` go before and behind text that
    trains.
    """
    for source in sources:
        for index in range(min(num_samples, len(source.items))):
            sample = source.items[index]
            weight = f", weight {sample.weight:g}" if sample.weight != 1 else ""
            for name, document in zip(("chosen", "rejected"), sample.documents, strict=False):
                of_pair = f" {name}," if len(sample.documents) > 1 else ""
                trained = sum(end - begin for begin, end in document.trained_spans)
                place = f"{sample.source} {index + 1} of {len(source.items)}"
                yield (
                    f"--- {place}:{of_pair} {len(document.token_ids)} tokens,"
                    f" {trained} train{weight}"
                )
                yield mark_trained_text(document, tokenizer, marks)


def mark_trained_text(document: TokenDocument, tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """Return the text of a document with special tokens by name, and with marks[0] and marks[1]
    around each stretch that trains.
    """
    pieces = []
    at = 0
    for begin, end in document.trained_spans:
        pieces += [tokenizer.decode_with_special_tokens(document.token_ids[at:begin]), marks[0]]
        pieces += [tokenizer.decode_with_special_tokens(document.token_ids[begin:end]), marks[1]]
        at = end
    return "".join([*pieces, tokenizer.decode_with_special_tokens(document.token_ids[at:])])


def run_data_prepare_command(args: argparse.Namespace) -> None:
    """Write the JSONL files of a published data set, fetched from the hub unless --from names a
    copy, and print the settings with which a run uses them.
    """
    published = PUBLISHED_DATASETS[args.name]
    out = args.out or Path("data") / args.name
    source = args.source or fetch_dataset(published)
    counts = prepare_dataset(args.name, source, out)
    for split, count in counts.items():
        print(f"{out / split}.jsonl: {count} rows")
    names = {"train": "data.train_files", "test": "data.val_files"}
    for line in (
        *(f"{names[split]}: [{out / split}.jsonl]" for split in counts),
        *published.settings,
    ):
        print(f"  {line}")
    if "test" in counts and args.out is None:
        print(f"next: rlhf-megatron evaluate MODEL --task {args.name}")
