"""`rlhf-megatron simulate RUN.yaml --durations FILE | --gpu NAME`: step time, idle shares and lag
of a run to be.
"""

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
from rlhf_megatron.config.yaml_nodes import convert_to_plain, parse_yaml
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.planning.simulator.durations import (
    ARGUMENTS_SUBJECT,
    RunDurations,
    read_durations,
)
from rlhf_megatron.planning.simulator.recorded_durations import (
    format_durations_yaml,
    read_recorded_durations,
)
from rlhf_megatron.planning.simulator.schedule_search import (
    CANDIDATE_SCHEDULES,
    ScheduleStudy,
    StudyCase,
    choose_best_case,
    format_case_lines,
    format_run_lines,
    format_table_lines,
    format_verdict_lines,
)
from rlhf_megatron.planning.simulator.simulation_plan import SimulationSetup
from rlhf_megatron.planning.simulator.timeline_picture import (
    TimelinePanel,
    find_time_window,
    render_timeline_svg,
    render_trace_json,
)
from rlhf_megatron.write_errors import explain_write_errors, write_text_file

MAX_LOST_SHARE = 0.05  # share of the groups that the best schedule may lose
STEP_TIME_TOLERANCE = 0.02  # of the step time: so near, the smaller lag counts
NUM_FIRST_LOOK_STEPS = 8  # behind the warm-up, of a first look at a split
DEFAULT_NUM_SPLITS = 6  # tried for a schedule
NUM_STEPS_SHOWN = 3  # of the first picture


def run_simulate_command(args: argparse.Namespace) -> None:
    """Simulate the run, and unless --only is given compare schedules and splits; print the figures
    and write the requested files. With --write only write the durations. Raise ConfigError or
    ValueError for wrong arguments and for a run that cannot be simulated.
    """
    _check_arguments(args)
    schedules = [
        schedule for text in args.schedule for schedule in expand_schedule_grid(text)
    ] or list(CANDIDATE_SCHEDULES)
    config = load_run_config(args.config, args.overrides, with_files=False).config
    if config.rollout.environment.name is not None:
        raise ValueError(
            f"rollout.environment.name is {config.rollout.environment.name}, and simulate knows"
            " samples of one answer, without the time of environments; set"
            " rollout.environment.name=null to simulate such a run."
        )
    durations = _read_or_plan_durations(config, args)
    if args.write is not None:
        with explain_write_errors(args.write), args.write.open("x", encoding="utf-8") as file:
            file.write(format_durations_yaml(durations))
        print(f"durations: {args.write}")
        return
    setting = SimulationSetup(config, durations)
    study = ScheduleStudy(setting, setting.make_workload(args.seed), args.steps, args.warmup)
    for line in format_run_lines(study):
        print(line)
    own = study.simulate_case(config.schedule, setting.split)
    if own.figures is None:
        raise ValueError(own.skip_reason)
    cases = [own] if args.only else _simulate_cases(study, own, schedules, args)
    best = own if args.only else choose_best_case(cases, STEP_TIME_TOLERANCE, MAX_LOST_SHARE)
    if args.only:
        print(*format_case_lines(own), sep="\n")
    else:
        print(
            "",
            *format_table_lines(cases),
            "",
            *format_verdict_lines(best, cases, STEP_TIME_TOLERANCE, MAX_LOST_SHARE),
            "",
            *format_case_lines(best),
            sep="\n",
        )
    _write_requested_files(args, study, own, best, cases)


def _read_or_plan_durations(config: RunConfig, args: argparse.Namespace) -> RunDurations:
    """Return the durations that --durations names, read from a file or from a run's directory, or
    those planned for the GPU of --gpu.
    """
    path: Path | None = args.durations
    if path is not None:
        return read_recorded_durations(path) if path.is_dir() else read_durations(path)
    # with torch, which the others do without
    from rlhf_megatron.planning.simulator.planned_durations import plan_durations

    return plan_durations(config, args.gpu, args.median)


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError with all problems of the command line, before anything takes time."""
    if problems := list(_find_argument_problems(args)):
        raise ConfigError(problems, ARGUMENTS_SUBJECT)


def _find_argument_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield a text for each option that does not fit the others, and for each output file that
    cannot be written.
    """
    if not 0 <= args.warmup < args.steps:
        yield (
            f"--warmup ({args.warmup}) must be from 0 to --steps ({args.steps}) - 1; lower it, or"
            " raise --steps."
        )
    if args.only and (args.gpus or args.schedule):
        yield "--only simulates the run as it is; leave it out to compare (--gpus, --schedule)."
    if args.median is not None and args.gpu is None:
        yield (
            f"--median ({args.median}) is of --gpu NAME; a durations file has its lengths."
            " Leave it out."
        )
    if args.splits is not None and args.gpus is None:
        yield f"--splits ({args.splits}) are of --gpus N; give that too, or leave it out."
    outputs = {"--json": args.json, "--timeline": args.timeline, "--trace": args.trace}
    if args.write is not None:
        others = outputs | {"--only": args.only, "--gpus": args.gpus, "--schedule": args.schedule}
        yield from (
            f"{name} needs a simulation, but --write makes none; leave one out."
            for name in others
            if others[name]
        )
        if args.write.exists():
            yield f"--write ({args.write}) is there already; name another file, or remove it."
    for name, path in {**outputs, "--write": args.write}.items():
        if path is not None and not path.parent.is_dir():
            yield (
                f"{name} ({path}): there is no directory {path.parent}; make it, or name"
                " another file."
            )


def _simulate_cases(
    study: ScheduleStudy,
    run_case: StudyCase,
    schedules: Sequence[ScheduleConfig],
    args: argparse.Namespace,
) -> list[StudyCase]:
    """Return the case of the run itself and a case for each schedule, with the run's split, or,
    with --gpus, with the best split of so many GPUs. Print the progress on a terminal.
    """
    cases = [run_case]
    for number, schedule in enumerate(schedules):
        _print_progress(f"{number + 1}/{len(schedules)} {schedule.name}")
        if args.gpus is None:
            if schedule != run_case.schedule:
                cases.append(study.simulate_case(schedule, run_case.split))
        else:
            first_look = replace(
                study, num_steps=min(args.steps, args.warmup + NUM_FIRST_LOOK_STEPS)
            )
            found = first_look.search_splits(
                schedule, args.gpus, args.splits or DEFAULT_NUM_SPLITS
            )[0]
            cases.append(study.simulate_case(schedule, found.split))
    _print_progress("")
    return cases


def expand_schedule_grid(grid_text: str) -> list[ScheduleConfig]:
    """Return the schedules that a text names, one for each combination of its values: "asynchronous
    max_lag=1,2 late=wait,drop" gives four. Raise ConfigError for an unknown schedule or wrong
    parameters.
    """
    subject = f'--schedule "{grid_text}"'
    if not grid_text.strip():
        raise ConfigError(["it names no schedule; write one such as one_step_off."], subject)
    name, *settings = grid_text.split()
    pairs = []
    for setting in settings:
        key, equals, values = setting.partition("=")
        if not equals or not key or not values:
            raise ConfigError(
                [f"{setting} must be key=value or key=value,value; correct it."], subject
            )
        pairs.append(
            [
                (key, convert_to_plain(parse_yaml(value, "--schedule", 0)))
                for value in values.split(",")
            ]
        )
    found = [ScheduleConfig(name, dict(choice)) for choice in itertools.product(*pairs)]
    try:
        for schedule in found:
            load_schedule(schedule)
    except ConfigError as error:
        raise ConfigError(error.problems, subject) from None
    return found


def _write_requested_files(
    args: argparse.Namespace,
    study: ScheduleStudy,
    run_case: StudyCase,
    best_case: StudyCase,
    cases: Sequence[StudyCase],
) -> None:
    """Write the files that --json, --timeline and --trace ask for, and print their paths. For the
    last two, simulate the run and the best case again with details.
    """
    if args.json is not None:
        found: dict[str, Any] = {
            "run": run_case.make_json_record(),
            "best": best_case.make_json_record(),
            "cases": [c.make_json_record() for c in cases],
        }
        write_text_file(args.json, json.dumps(found, indent=1) + "\n")
        print(f"figures: {args.json}")
    if args.timeline is None and args.trace is None:
        return
    drawn = [run_case] if best_case == run_case else [run_case, best_case]
    histories = [
        study.simulate_history(case.schedule, case.split, keeps_details=True) for case in drawn
    ]
    if args.timeline is not None:
        _, seconds = find_time_window(histories[0], args.warmup, NUM_STEPS_SHOWN)
        panels = [
            TimelinePanel(
                _format_panel_title(case),
                history,
                find_time_window(history, args.warmup, NUM_STEPS_SHOWN)[0],
            )
            for case, history in zip(drawn, histories, strict=True)
        ]
        write_text_file(args.timeline, render_timeline_svg(panels, seconds))
        print(f"timeline: {args.timeline}")
    if args.trace is not None:
        write_text_file(args.trace, render_trace_json(histories[-1], best_case.name))
        print(f"trace: {args.trace}")


def _format_panel_title(case: StudyCase) -> str:
    """Return the title of a case in the timeline: schedule, split, and seconds a step. The case
    must have figures.
    """
    assert case.figures is not None
    return f"{case.name}, {case.split} GPUs: {case.figures.step_s:.1f} s a step"


def _print_progress(text: str) -> None:
    """Show a text in place of the last one on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
