"""`rlhf-megatron doctor`: which fast paths are live on this machine, which are not, why, and what would bring them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_megatron.cli.doctor.rows import Row
    from rlhf_megatron.cli.doctor.run import Problem

TITLES = {
    "device": "Devices",
    "packages": "Packages",
    "trainer": "Trainer",
    "engines": "Engines",
    "around": "Launchers and loggers",
    "host": "Machine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("config", metavar="RUN.yaml", type=Path, nargs="?", help="a run: what it takes and lacks here")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings over those of the file")
    parser.add_argument("--json", action="store_true", dest="is_json", help="one JSON object instead of a table")


def doctor(args: argparse.Namespace) -> int:
    """0; 1 when the run asks for what is not there. Raises ConfigError for a file that is wrong anywhere."""
    from rlhf_megatron.cli.doctor.facts import gather
    from rlhf_megatron.cli.doctor.host import around_rows, device_rows, engine_rows, host_rows
    from rlhf_megatron.cli.doctor.rows import Wanted, package_rows, trainer_rows
    from rlhf_megatron.cli.doctor.run import device_of, of_this_machine, run_problems, wanted_by
    from rlhf_megatron.config.load import load_run_config

    config = load_run_config(args.config, args.overrides, with_files=False).config if args.config else None
    facts = gather()
    wanted = Wanted(device_of("auto", facts)) if config is None else of_this_machine(wanted_by(config, facts), facts)
    rows = [
        *device_rows(facts),
        *package_rows(facts, wanted.device),
        *trainer_rows(facts, wanted),
        *engine_rows(config.rollout.sglang.python if config else None),
        *around_rows(facts),
        *host_rows(facts.host),
    ]
    problems = [] if config is None else run_problems(config, facts)
    try:
        if args.is_json:
            _print_json(args, rows, problems)
        else:
            _print_table(args, rows, problems)
    except BrokenPipeError:  # `doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if problems else 0


def _print_json(args: argparse.Namespace, rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    found = {
        "run": str(args.config) if args.config else None,
        "overrides": list(args.overrides),
        "rows": [dataclasses.asdict(row) for row in rows],
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }
    print(json.dumps(found, indent=1), flush=True)


def _print_table(args: argparse.Namespace, rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    width = max(len(row.path) for row in rows)
    area = ""
    for row in rows:
        if row.area != area:
            print(f"{TITLES[row.area]}" if not area else f"\n{TITLES[row.area]}")
            area = row.area
        print(f"  {row.state:8}  {row.path:{width}}  {row.taken}".rstrip())
        for word, text in (("note" if row.state == "live" else "why", row.why), ("fix", row.fix)):
            if text:
                print(f"{'':{width + 14}}{word}: {text}")
    if args.config is not None:
        print(f"\n{args.config}: {len(problems)} setting(s) ask for what is not here")
        for problem in problems:
            print(f"  {problem}")
    sys.stdout.flush()
