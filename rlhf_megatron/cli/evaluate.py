"""`rlhf-megatron evaluate SOURCE [PROMPTS ...]`: scores a file of answers, a model or a run; compares two files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_megatron.cli.generate import answer, split_words
from rlhf_megatron.evaluation.evaluation import summarize
from rlhf_megatron.generation.score import as_json, compare, score, table_of
from rlhf_megatron.generation.source import config_of


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0: the figures are printed; others as those of `generate`."""
    prompts, overrides = split_words(args)
    answers, source = Path(args.source), args.config
    if answers.suffix != ".jsonl":
        source = source or answers
        code, answers = answer(args)
        if code:
            return code
        prompts = []
    config = config_of(source, [], overrides).reward
    with TemporaryDirectory() as scratch:
        scored = score(answers, config, Path(scratch) / "rewards.log")
        others = [score(Path(name), config, Path(scratch) / "rewards.log") for name in prompts]
    print("\n".join(table_of(summarize(scored))))
    for name, other in zip(prompts, others, strict=True):
        print(f"\n{name}")
        print("\n".join(table_of(summarize(other))))
        count, difference, interval = compare(scored, other)
        low_high = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
        print(f"{name} minus {answers}: {difference:+.4f}{low_high} over {count} items, paired")
    if args.json:
        args.json.write_text(json.dumps(as_json(scored), indent=1) + "\n")
        print(f"all figures: {args.json}")
    return 0
