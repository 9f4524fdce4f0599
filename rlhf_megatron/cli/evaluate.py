"""`rlhf-megatron evaluate SOURCE [PROMPTS ...]`: scores a file of answers, a model or a run, also along its steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_megatron.cli.generate import answer, answer_steps, is_address, split_words
from rlhf_megatron.evaluation.evaluation import Answered, summarize
from rlhf_megatron.evaluation.page import page
from rlhf_megatron.generation.answer_file import PARQUET
from rlhf_megatron.generation.score import as_json, compare, score, table_of
from rlhf_megatron.generation.source import config_of


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0: the figures are printed; others as those of `generate`."""
    prompts, overrides = split_words(args)
    answers, source = Path(args.source), args.config
    files: list[tuple[str, Path]] = []
    if answers.suffix not in (".jsonl", PARQUET) or not answers.is_file():
        source = source or (None if is_address(args.source) else answers)
        if args.every_step:
            code, steps = answer_steps(args)
            files = [(f"step {step}", path) for step, path in steps]
        else:
            code, answers = answer(args)
        if code:
            return code
        prompts = []
    elif args.every_step:
        raise ValueError(f"--every-step is for the directory of a run; {answers} is a file of answers.")
    files = files or [(str(answers), answers), *((name, Path(name)) for name in prompts)]
    config = config_of(source, [], overrides).reward
    with TemporaryDirectory() as scratch:
        scored = [(name, score(path, config, Path(scratch) / "rewards.log")) for name, path in files]
    notes = [] if args.every_step else _comparisons(scored)
    for name, of_file in scored:
        if len(scored) > 1:
            print(f"\n{name}")
        print("\n".join(table_of(summarize(of_file))))
    print("\n".join(notes), end="\n" if notes else "")
    if args.json:
        args.json.write_text(json.dumps(_figures(scored, args.every_step), indent=1) + "\n")
        print(f"all figures: {args.json}")
    if args.report:
        args.report.write_text(page(args.source, [(name, summarize(a)) for name, a in scored], notes))
        print(f"page: {args.report}")
    return 0


def _comparisons(scored: list[tuple[str, list[Answered]]]) -> list[str]:
    """A line for each file behind the first."""
    first, lines = scored[0], []
    for name, other in scored[1:]:
        count, difference, interval = compare(first[1], other)
        low_high = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
        lines.append(f"{name} minus {first[0]}: {difference:+.4f}{low_high} over {count} items, paired")
    return lines


def _figures(scored: list[tuple[str, list[Answered]]], is_along: bool) -> dict[str, Any]:
    if not is_along:
        return as_json(scored[0][1])
    return {"steps": [{"step": int(name.split()[-1])} | as_json(answered) for name, answered in scored]}
