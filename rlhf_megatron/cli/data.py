"""`rlhf-megatron data`: `show` prints samples of a run, with the tokens that train in colour; `prepare` writes files of
published questions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run import has_pairs
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.documents import DocumentSets, answered
from rlhf_megatron.data.prepare import SETS, fetched, prepare
from rlhf_megatron.data.samples import Documents, DocumentSource
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.turns import Document
from rlhf_megatron.scheduler.parts import load_data
from rlhf_megatron.supervised.run import load_job_data

COLOURS, MARKS = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")  # around what trains, with a terminal and without


def show(args: argparse.Namespace) -> None:
    """Print the first samples of each source. Of an RL run: prompts, with the label as a warm-up would train it."""
    config = load_run_config(args.config, args.overrides).config
    sets, tokenizer = _sets(config)
    marks = COLOURS if sys.stdout.isatty() and "NO_COLOR" not in os.environ else MARKS
    for line in lines(sets.sources if args.split == "train" else sets.held_out, tokenizer, args.n, marks):
        print(line)
    print("; ".join([f"{sets.num_train} training and {sets.num_held_out} held-out samples", *sets.counts.told()]))


def _sets(config: RunConfig) -> tuple[DocumentSets, Tokenizer]:
    if config.job != "train":
        return load_job_data(config.model, config.data, config.sft, has_pairs(config))
    found, tokenizer = load_data(config.model, config.data, config.warmup.max_steps > 0)
    train = [DocumentSource(s.name, s.weight, Documents(answered(s.items, tokenizer))) for s in found.sources]
    held_out = [DocumentSource(s.name, 1.0, Documents(answered(s.items, tokenizer))) for s in found.held_out_sets]
    return DocumentSets(tuple(train), tuple(held_out)), tokenizer


def lines(
    sources: Sequence[DocumentSource], tokenizer: Tokenizer, count: int, marks: tuple[str, str] = MARKS
) -> Iterator[str]:
    """Yield what `data show` prints of the first `count` samples of each source."""
    for source in sources:
        for index in range(min(count, len(source.items))):
            sample = source.items[index]
            weight = f", weight {sample.weight:g}" if sample.weight != 1 else ""
            for name, document in zip(("chosen", "rejected"), sample.documents, strict=False):
                of_pair = f" {name}," if len(sample.documents) > 1 else ""
                trained = sum(end - begin for begin, end in document.trained)
                place = f"{sample.source} {index + 1} of {len(source.items)}"
                yield f"--- {place}:{of_pair} {len(document.token_ids)} tokens, {trained} train{weight}"
                yield marked(document, tokenizer, marks)


def marked(document: Document, tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """The text of a document, special tokens by name, with marks around each stretch that trains."""
    pieces, at = [], 0
    for begin, end in document.trained:
        pieces += [tokenizer.spell(document.token_ids[at:begin]), marks[0]]
        pieces += [tokenizer.spell(document.token_ids[begin:end]), marks[1]]
        at = end
    return "".join([*pieces, tokenizer.spell(document.token_ids[at:])])


def prepare_files(args: argparse.Namespace) -> None:
    """Write the files of a published set, and say how a run names them."""
    published, out = SETS[args.name], args.out or Path("data") / args.name
    source = args.source or fetched(published)
    counts = prepare(args.name, source, out)
    for split, count in counts.items():
        print(f"{out / split}.jsonl: {count} rows")
    names = {"train": "data.train_files", "test": "data.val_files"}
    for line in (*(f"{names[split]}: [{out / split}.jsonl]" for split in counts), *published.settings):
        print(f"  {line}")
    if "test" in counts and args.out is None:
        print(f"next: rlhf-megatron evaluate MODEL --task {args.name}")
