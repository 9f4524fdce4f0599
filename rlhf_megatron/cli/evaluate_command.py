"""`rlhf-megatron evaluate SOURCE [PROMPTS ...]`: scores a file of answers, a model or a run, also
along its steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_megatron.agents.episode_batch import EpisodeRewardWeights
from rlhf_megatron.cli.generate_command import (
    generate_answer_file,
    generate_answers_of_each_step,
    is_http_address,
    split_files_and_settings,
)
from rlhf_megatron.cli.serve_rewards_command import start_model_servers
from rlhf_megatron.config.rules.environment_rules import are_labels_for_scorers
from rlhf_megatron.config.rules.run_rules import has_reward_model
from rlhf_megatron.config.yaml_nodes import DEFAULT, LoadedConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    ScoredEvaluationSet,
    summarize_evaluation,
)
from rlhf_megatron.jobs.evaluation_page import render_evaluation_page
from rlhf_megatron.jobs.generation.answer_file import PARQUET_SUFFIX, read_answer_rows
from rlhf_megatron.jobs.generation.answer_scoring import (
    compare_answers,
    convert_evaluation_to_json,
    format_evaluation_table,
    score_answer_file,
)
from rlhf_megatron.jobs.generation.episode_job import summarize_episodes
from rlhf_megatron.jobs.generation.loss_job import (
    compute_source_losses,
    convert_losses_to_json,
    format_loss_table,
)
from rlhf_megatron.jobs.generation.model_source import load_job_settings
from rlhf_megatron.rewards.published_datasets import prepare_held_out_file
from rlhf_megatron.rewards.service.reward_scorer import check_reward_labels
from rlhf_megatron.rollout.fleet.server_process import make_throttled_progress
from rlhf_megatron.write_errors import write_text_file

SERVED_MODEL_HINT = (
    "give reward_model.served.num_servers=1 and what else its servers need, and it scores too"
)
_print_progress = make_throttled_progress(lambda line: print(line, file=sys.stderr), lambda: None)


def run_evaluate_command(args: argparse.Namespace) -> int:
    """Score a file of answers, or let a model or run answer first, and print the figures; --json
    and --report write them too. Return 0, or the exit code of a failed or stopped `generate`. With
    several files also print their paired differences.
    """
    if args.loss is not None:
        return _evaluate_losses(args)
    settings: list[str] = []
    if args.task:
        if split_files_and_settings(args)[0]:
            raise ValueError(
                f"--task {args.task} brings its questions; leave out the files of prompts."
            )
        questions_file, settings = prepare_held_out_file(args.task)
        args.words = [str(questions_file), *args.words]
    prompts, overrides = split_files_and_settings(args)
    answers = Path(args.source)
    source = args.config
    files: list[tuple[str, Path]] = []
    is_asked = not _is_result_file(answers)
    if is_asked:
        source = source or (None if is_http_address(args.source) else answers)
    loaded = load_job_settings(source, [], [*settings, *overrides])
    config = loaded.config
    if is_asked:
        kind = args.task or "answers"
        is_checked = are_labels_for_scorers(config.rollout.environment)
        check_labels = partial(check_reward_labels, config.reward) if is_checked else None
        if args.every_step:
            code, steps = generate_answers_of_each_step(args, settings, kind, check_labels)
            files = [(f"step {step}", path) for step, path in steps]
        else:
            code, answers = generate_answer_file(args, settings, kind, check_labels)
        if code:
            return code
        prompts = []
    elif args.every_step or args.task:
        name = "every-step" if args.every_step else "task"
        raise ValueError(
            f"--{name} is for a model or a run that is asked; {answers} is a file of answers."
        )
    files = files or [(str(answers), answers), *((name, Path(name)) for name in prompts)]
    with (
        TemporaryDirectory() as scratch,
        start_model_servers(config, Path(scratch), _print_progress) as servers,
    ):
        if has_reward_model(config):
            print(
                f"the model of reward_model.path is left out; {SERVED_MODEL_HINT}.", file=sys.stderr
            )
        term = servers.make_reward_term() if servers is not None else None
        log = Path(scratch) / "rewards.log"
        report_once = cache(lambda line: print(line, file=sys.stderr))
        scored = [
            (
                name,
                score_answer_file(
                    path,
                    config.reward,
                    log,
                    config.data,
                    term,
                    report_once,
                    is_asked,
                    EpisodeRewardWeights(
                        config.rollout.environment.reward_weight,
                        config.rollout.environment.scorer_weight,
                    ),
                ),
            )
            for name, path in files
        ]
    print(_describe_reward(loaded), file=sys.stderr)
    notes = [] if args.every_step else _compare_with_first_file(scored)
    path_by_name = dict(files)
    for name, of_file in scored:
        if len(scored) > 1:
            print(f"\n{name}")
        print("\n".join(format_evaluation_table(summarize_evaluation(of_file))))
        for line in summarize_episodes(list(read_answer_rows(path_by_name[name]))):
            print(line)
    print("\n".join(notes), end="\n" if notes else "")
    if args.json:
        _write_figures(
            args,
            _collect_figures(
                [(name, convert_evaluation_to_json(answered)) for name, answered in scored],
                args.every_step,
            ),
        )
    if args.report:
        write_text_file(
            args.report,
            render_evaluation_page(
                args.source, [(name, summarize_evaluation(a)) for name, a in scored], notes
            ),
        )
        print(f"page: {args.report}")
    return 0


def _describe_reward(loaded: LoadedConfig) -> str:
    """Return the line that names the reward of the scores, and says so where nobody has chosen
    it.
    """
    reward = loaded.config.reward
    names = [f"{one.name} for {source}" for source, one in reward.by_source.items()]
    place = f" ({reward.params['path']})" if "path" in reward.params else ""
    text = f"scored by {', '.join([reward.name + place, *names])}"
    if reward.terms:
        text += f", with the terms {', '.join(term.name for term in reward.terms)}"
    if loaded.find_origin("reward.name") == DEFAULT:
        text += (
            ", the default; reward.name=NAME chooses another (rlhf-megatron algorithms lists all)"
        )
    return text


def _evaluate_losses(args: argparse.Namespace) -> int:
    """Compute and print the loss and perplexity over files or held-out data (--loss), or print
    those of a file of losses. Return 0, or the exit code of a failed or stopped run. Raise
    ValueError for options that --loss would ignore.
    """
    names = ("task", "report", "config", "tokens", "n", "temperature", "top_p", "max_tokens")
    ignored = [
        name
        for name in names
        if getattr(args, name) is not None and getattr(args, name) is not False
    ]
    if is_http_address(args.source) or ignored or args.split != "val":
        told = (
            ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
            or "--split, or the address"
        )
        raise ValueError(
            f"--loss scores given documents with engines of this command, without {told};"
            " leave that out."
        )
    args.words = [*args.words, *args.loss]
    files = [(args.source, Path(args.source))]
    if _is_result_file(files[0][1]) and args.words:
        raise ValueError(
            f"{args.source} is a file of losses, for which nothing is computed; leave"
            f" out {' '.join(args.words)}."
        )
    if not _is_result_file(files[0][1]):
        code, steps = (
            generate_answers_of_each_step(args, (), "loss") if args.every_step else (0, [])
        )
        if not args.every_step:
            code, out = generate_answer_file(args, (), "loss")
            files = [(str(out), out)]
        if code:
            return code
        files = [(f"step {step}", path) for step, path in steps] or files
    found = [(name, compute_source_losses(path)) for name, path in files]
    for name, sets in found:
        print("\n".join([f"\n{name}"] * (len(found) > 1) + format_loss_table(sets)))
    if args.json:
        _write_figures(
            args,
            _collect_figures(
                [(name, convert_losses_to_json(sets)) for name, sets in found], args.every_step
            ),
        )
    return 0


def _is_result_file(path: Path) -> bool:
    """Return whether the path is an existing file of results: JSONL or parquet, as `generate` and
    --loss write them, or JSON of another program.
    """
    return path.suffix in (".jsonl", ".json", PARQUET_SUFFIX) and path.is_file()


def _write_figures(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Write the figures as JSON to the file of --json, and print its path."""
    write_text_file(args.json, json.dumps(figures, indent=1) + "\n")
    print(f"all figures: {args.json}")


def _compare_with_first_file(
    scored_files: list[tuple[str, list[ScoredEvaluationSet]]],
) -> list[str]:
    """Return for each file after the first a line with its mean score minus that of the first, its
    interval, and the number of paired items.
    """
    first = scored_files[0]
    lines = []
    for name, other in scored_files[1:]:
        count, difference, interval = compare_answers(first[1], other)
        low_high = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
        lines.append(
            f"{name} minus {first[0]}: {difference:+.4f}{low_high} over {count} items, paired"
        )
    return lines


def _collect_figures(
    named_figures: list[tuple[str, dict[str, Any]]], is_every_step: bool
) -> dict[str, Any]:
    """Return the figures of the first file, or with --every-step a list of the figures of all steps
    under "steps".
    """
    if not is_every_step:
        return named_figures[0][1]
    return {"steps": [{"step": int(name.split()[-1])} | figures for name, figures in named_figures]}
