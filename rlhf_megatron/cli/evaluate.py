"""`rlhf-megatron evaluate SOURCE [PROMPTS ...]`: scores a file of answers, a model or a run, also along its steps."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_megatron.cli.generate import answer, answer_steps, is_address, split_words
from rlhf_megatron.cli.serve_rewards import model_servers
from rlhf_megatron.config.rules.run import has_reward_model
from rlhf_megatron.data.prepare import questions
from rlhf_megatron.evaluation.evaluation import Answered, summarize
from rlhf_megatron.evaluation.page import page
from rlhf_megatron.generation.answer_file import PARQUET
from rlhf_megatron.generation.loss import loss_table, losses_as_json, losses_of
from rlhf_megatron.generation.score import as_json, compare, score, table_of
from rlhf_megatron.generation.source import config_of
from rlhf_megatron.rollout.fleet.process import now_and_then

BY_SERVERS = "give reward_model.served.num_servers=1 and what else its servers need, and it scores too"
_progress = now_and_then(lambda line: print(line, file=sys.stderr), lambda: None)


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0: the figures are printed; others as those of `generate`."""
    if args.loss is not None:
        return _losses(args)
    settings: list[str] = []
    if args.task:
        if split_words(args)[0]:
            raise ValueError(f"--task {args.task} brings its questions; leave out the files of prompts.")
        questions_file, settings = questions(args.task)
        args.words = [str(questions_file), *args.words]
    prompts, overrides = split_words(args)
    answers, source = Path(args.source), args.config
    files: list[tuple[str, Path]] = []
    if not _is_rows(answers):
        source = source or (None if is_address(args.source) else answers)
        kind = args.task or "answers"
        if args.every_step:
            code, steps = answer_steps(args, settings, kind)
            files = [(f"step {step}", path) for step, path in steps]
        else:
            code, answers = answer(args, settings, kind)
        if code:
            return code
        prompts = []
    elif args.every_step or args.task:
        name = "every-step" if args.every_step else "task"
        raise ValueError(f"--{name} is for a model or a run that is asked; {answers} is a file of answers.")
    files = files or [(str(answers), answers), *((name, Path(name)) for name in prompts)]
    config = config_of(source, [], [*settings, *overrides])
    with TemporaryDirectory() as scratch, model_servers(config, Path(scratch), _progress) as servers:
        if has_reward_model(config):
            print(f"the model of reward_model.path is left out; {BY_SERVERS}.", file=sys.stderr)
        term = servers.term() if servers is not None else None
        log = Path(scratch) / "rewards.log"
        scored = [(name, score(path, config.reward, log, config.data, term)) for name, path in files]
    notes = [] if args.every_step else _comparisons(scored)
    for name, of_file in scored:
        if len(scored) > 1:
            print(f"\n{name}")
        print("\n".join(table_of(summarize(of_file))))
    print("\n".join(notes), end="\n" if notes else "")
    if args.json:
        _write(args, _figures([(name, as_json(answered)) for name, answered in scored], args.every_step))
    if args.report:
        args.report.write_text(page(args.source, [(name, summarize(a)) for name, a in scored], notes))
        print(f"page: {args.report}")
    return 0


def _losses(args: argparse.Namespace) -> int:
    """Exit code as of `evaluate`."""
    names = ("task", "report", "config", "tokens", "n", "temperature", "top_p", "max_tokens")
    ignored = [name for name in names if getattr(args, name) is not None and getattr(args, name) is not False]
    if is_address(args.source) or ignored or args.split != "val":
        told = ", ".join(f"--{name.replace('_', '-')}" for name in ignored) or "--split, or the address"
        raise ValueError(f"--loss scores given documents with engines of this command, without {told}; leave that out.")
    args.words = [*args.words, *args.loss]
    files = [(args.source, Path(args.source))]
    if _is_rows(files[0][1]) and args.words:
        raise ValueError(
            f"{args.source} is a file of losses, for which nothing is computed; leave out {' '.join(args.words)}."
        )
    if not _is_rows(files[0][1]):
        code, steps = answer_steps(args, (), "loss") if args.every_step else (0, [])
        if not args.every_step:
            code, out = answer(args, (), "loss")
            files = [(str(out), out)]
        if code:
            return code
        files = [(f"step {step}", path) for step, path in steps] or files
    found = [(name, losses_of(path)) for name, path in files]
    for name, sets in found:
        print("\n".join([f"\n{name}"] * (len(found) > 1) + loss_table(sets)))
    if args.json:
        _write(args, _figures([(name, losses_as_json(sets)) for name, sets in found], args.every_step))
    return 0


def _is_rows(path: Path) -> bool:
    """A file that `generate` or --loss wrote."""
    return path.suffix in (".jsonl", PARQUET) and path.is_file()


def _write(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"all figures: {args.json}")


def _comparisons(scored: list[tuple[str, list[Answered]]]) -> list[str]:
    """A line for each file behind the first."""
    first, lines = scored[0], []
    for name, other in scored[1:]:
        count, difference, interval = compare(first[1], other)
        low_high = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
        lines.append(f"{name} minus {first[0]}: {difference:+.4f}{low_high} over {count} items, paired")
    return lines


def _figures(found: list[tuple[str, dict[str, Any]]], is_along: bool) -> dict[str, Any]:
    if not is_along:
        return found[0][1]
    return {"steps": [{"step": int(name.split()[-1])} | figures for name, figures in found]}
