"""`rlhf-megatron simulate RUN.yaml --durations FILE | --gpu NAME`: step time, idle shares and lag of a run to be."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import RunConfig, ScheduleConfig
from rlhf_megatron.config.source import parse, plain
from rlhf_megatron.scheduler.schedules import load_schedule
from rlhf_megatron.simulator.durations import ARGUMENTS, Durations, read_durations
from rlhf_megatron.simulator.picture import Panel, timeline_svg, trace_json, window
from rlhf_megatron.simulator.plan import Setting
from rlhf_megatron.simulator.recorded import as_yaml, recorded_durations
from rlhf_megatron.simulator.search import (
    CANDIDATES,
    Case,
    Study,
    detail_lines,
    pick,
    run_lines,
    table_lines,
    verdict_lines,
)

MOST_LOST = 0.05  # share of the groups that the best schedule may lose
TOLERANCE = 0.02  # of the step time: so near, the smaller lag counts
LOOK_STEPS = 8  # behind the warm-up, of a first look at a split
SPLITS = 6  # tried for a schedule
SHOWN_STEPS = 3  # of the first picture


def simulate(args: argparse.Namespace) -> None:
    """Simulate and print a table. Raises ConfigError, ValueError."""
    _check(args)
    schedules = [schedule for text in args.schedule for schedule in grid(text)] or list(CANDIDATES)
    config = load_run_config(args.config, args.overrides, with_files=False).config
    durations = _durations(config, args)
    if args.write is not None:
        with args.write.open("x", encoding="utf-8") as file:
            file.write(as_yaml(durations))
        print(f"durations: {args.write}")
        return
    setting = Setting(config, durations)
    study = Study(setting, setting.workload(args.seed), args.steps, args.warmup)
    for line in run_lines(study):
        print(line)
    own = study.case(config.schedule, setting.split)
    if own.figures is None:
        raise ValueError(own.why_not)
    cases = [own] if args.only else _compared(study, own, schedules, args)
    best = own if args.only else pick(cases, TOLERANCE, MOST_LOST)
    if args.only:
        print(*detail_lines(own), sep="\n")
    else:
        print(
            "",
            *table_lines(cases),
            "",
            *verdict_lines(best, cases, TOLERANCE, MOST_LOST),
            "",
            *detail_lines(best),
            sep="\n",
        )
    _files(args, study, own, best, cases)


def _durations(config: RunConfig, args: argparse.Namespace) -> Durations:
    path: Path | None = args.durations
    if path is not None:
        return recorded_durations(path) if path.is_dir() else read_durations(path)
    from rlhf_megatron.simulator.planned import planned_durations  # with torch, which the others do without

    return planned_durations(config, args.gpu, args.median)


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError with all that is wrong, before anything takes time."""
    if problems := list(_problems(args)):
        raise ConfigError(problems, ARGUMENTS)


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if not 0 <= args.warmup < args.steps:
        yield f"--warmup ({args.warmup}) must be from 0 to --steps ({args.steps}) - 1; lower it, or raise --steps."
    if args.only and (args.gpus or args.schedule):
        yield "--only simulates the run as it is; leave it out to compare (--gpus, --schedule)."
    if args.median is not None and args.gpu is None:
        yield f"--median ({args.median}) is of --gpu NAME; a durations file has its lengths. Leave it out."
    if args.splits is not None and args.gpus is None:
        yield f"--splits ({args.splits}) are of --gpus N; give that too, or leave it out."
    outputs = {"--json": args.json, "--timeline": args.timeline, "--trace": args.trace}
    if args.write is not None:
        others = outputs | {"--only": args.only, "--gpus": args.gpus, "--schedule": args.schedule}
        yield from (
            f"{name} needs a simulation, but --write makes none; leave one out." for name in others if others[name]
        )
        if args.write.exists():
            yield f"--write ({args.write}) is there already; name another file, or remove it."
    for name, path in {**outputs, "--write": args.write}.items():
        if path is not None and not path.parent.is_dir():
            yield f"{name} ({path}): there is no directory {path.parent}; make it, or name another file."


def _compared(study: Study, own: Case, schedules: Sequence[ScheduleConfig], args: argparse.Namespace) -> list[Case]:
    """The run as it is, then each schedule: with the run's split, or with its best splits of `--gpus`."""
    cases = [own]
    for number, schedule in enumerate(schedules):
        _progress(f"{number + 1}/{len(schedules)} {schedule.name}")
        if args.gpus is None:
            if schedule != own.schedule:
                cases.append(study.case(schedule, own.split))
        else:
            first_look = replace(study, num_steps=min(args.steps, args.warmup + LOOK_STEPS))
            found = first_look.best_split(schedule, args.gpus, args.splits or SPLITS)[0]
            cases.append(study.case(schedule, found.split))
    _progress("")
    return cases


def grid(text: str) -> list[ScheduleConfig]:
    """ "asynchronous max_lag=1,2 late=wait,drop" -> its four schedules. Raises ConfigError for a wrong one."""
    subject = f'--schedule "{text}"'
    if not text.strip():
        raise ConfigError(["it names no schedule; write one such as one_step_off."], subject)
    name, *settings = text.split()
    pairs = []
    for setting in settings:
        key, equals, values = setting.partition("=")
        if not equals or not key or not values:
            raise ConfigError([f"{setting} must be key=value or key=value,value; correct it."], subject)
        pairs.append([(key, plain(parse(value, "--schedule", 0))) for value in values.split(",")])
    found = [ScheduleConfig(name, dict(choice)) for choice in itertools.product(*pairs)]
    try:
        for schedule in found:
            load_schedule(schedule)
    except ConfigError as error:
        raise ConfigError(error.problems, subject) from None
    return found


def _files(args: argparse.Namespace, study: Study, own: Case, best: Case, cases: Sequence[Case]) -> None:
    if args.json is not None:
        found: dict[str, Any] = {"run": own.as_json(), "best": best.as_json(), "cases": [c.as_json() for c in cases]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"figures: {args.json}")
    if args.timeline is None and args.trace is None:
        return
    drawn = [own] if best == own else [own, best]
    histories = [study.history(case.schedule, case.split, keeps_all=True) for case in drawn]
    if args.timeline is not None:
        _, seconds = window(histories[0], args.warmup, SHOWN_STEPS)
        panels = [
            Panel(_title(case), history, window(history, args.warmup, SHOWN_STEPS)[0])
            for case, history in zip(drawn, histories, strict=True)
        ]
        args.timeline.write_text(timeline_svg(panels, seconds))
        print(f"timeline: {args.timeline}")
    if args.trace is not None:
        args.trace.write_text(trace_json(histories[-1], best.name))
        print(f"trace: {args.trace}")


def _title(case: Case) -> str:
    assert case.figures is not None
    return f"{case.name}, {case.split} GPUs: {case.figures.step_s:.1f} s a step"


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
