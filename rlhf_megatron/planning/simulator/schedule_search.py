"""A study simulates schedules and splits of GPUs with the same responses, and finds the
shortest steps.

The other functions say what it found, as text for a terminal. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.config.rules.schedule_rules import does_schedule_take_turns
from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.planning.simulator.durations import LengthsConfig, SimulatedWorkload
from rlhf_megatron.planning.simulator.simulated_runs import simulate_run
from rlhf_megatron.planning.simulator.simulation import (
    ScheduleStuckError,
    SimulationFigures,
    SimulationHistory,
    compute_simulation_figures,
)
from rlhf_megatron.planning.simulator.simulation_plan import GpuSplit, SimulationSetup

CANDIDATE_SCHEDULES = (
    ScheduleConfig("synchronous"),
    ScheduleConfig("streaming"),
    ScheduleConfig("streaming", {"oversampling": 1.25, "tail": "drop"}),
    ScheduleConfig("streaming", {"oversampling": 1.5, "tail": "carry_over", "max_lag": 1}),
    ScheduleConfig("one_step_off"),
    ScheduleConfig("asynchronous", {"max_lag": 1}),
    ScheduleConfig("asynchronous", {"max_lag": 2}),
    ScheduleConfig("asynchronous", {"max_lag": 4}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "partial_rollouts": False}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "late": "drop"}),
    ScheduleConfig("asynchronous", {"max_lag": 2, "late": "again"}),
)
"""What is compared where nothing else is asked for."""

_COLUMN_GAP = "  "


@dataclass(frozen=True)
class StudyCase:
    """One row of the comparison. `figures` None: `skip_reason` says why there are none."""

    schedule: ScheduleConfig
    split: GpuSplit
    figures: SimulationFigures | None
    skip_reason: str = ""

    @property
    def name(self) -> str:
        """Return the schedule's name with its parameters."""
        return format_schedule_name(self.schedule)

    def make_json_record(self) -> dict[str, Any]:
        """Return the case as plain values for JSON."""
        found = {"schedule": asdict(self.schedule), "split": asdict(self.split)}
        return found | {
            "figures": asdict(self.figures) if self.figures else None,
            "why_not": self.skip_reason,
        }


def format_schedule_name(schedule: ScheduleConfig) -> str:
    """Return the schedule's name with its parameters, such as "asynchronous max_lag 2"."""
    values = {
        key: str(value).lower() if value in (True, False) else value
        for key, value in schedule.params.items()
    }
    return " ".join([schedule.name, *(f"{key} {value}" for key, value in values.items())])


@dataclass(frozen=True)
class ScheduleStudy:
    """A run and how it is simulated."""

    setup: SimulationSetup
    workload: SimulatedWorkload
    num_steps: int
    num_warmup: int

    def simulate_history(
        self, schedule: ScheduleConfig, split: GpuSplit, keeps_details: bool = False
    ) -> SimulationHistory:
        """Simulate one schedule and split, and return all that happened. Raise ConfigError, and
        ScheduleStuckError where the schedule waits for ever.
        """
        return simulate_run(
            self.setup.make_plan(split, self.num_steps),
            load_schedule(schedule),
            self.workload,
            keeps_details,
        )

    def simulate_case(self, schedule: ScheduleConfig, split: GpuSplit) -> StudyCase:
        """Simulate one schedule and split, and return the figures, or why there are none. Raise
        ConfigError.
        """
        if split.is_colocated and not does_schedule_take_turns(schedule):
            return StudyCase(
                schedule, split, None, "trainer and engines take turns with the same GPUs"
            )
        try:
            history = self.simulate_history(schedule, split)
        except ScheduleStuckError as error:
            return StudyCase(schedule, split, None, str(error))
        return StudyCase(
            schedule, split, compute_simulation_figures(history, split, self.num_warmup)
        )

    def search_splits(
        self, schedule: ScheduleConfig, num_gpus: int, max_cases: int
    ) -> list[StudyCase]:
        """Simulate a coarse choice of splits, then splits around the best of them, at most
        `max_cases` in all. Return the cases, the best first.
        """
        every = self.setup.list_splits(num_gpus, 1 << 20)
        coarse = self.setup.list_splits(num_gpus, max(2, max_cases - max_cases // 3))
        cases: dict[GpuSplit, StudyCase] = {}
        for split in coarse:
            if not split.is_colocated or does_schedule_take_turns(schedule):
                cases[split] = self.simulate_case(schedule, split)
        apart = [split for split in every if not split.is_colocated]
        while apart and len(cases) < max_cases:
            halfway = self._find_untried_splits_near_best(apart, cases)
            if not halfway:
                break
            for split in halfway[: max_cases - len(cases)]:
                cases[split] = self.simulate_case(schedule, split)
        return sorted(cases.values(), key=_make_case_sort_key)

    def _find_untried_splits_near_best(
        self, disjoint_splits: list[GpuSplit], cases: dict[GpuSplit, StudyCase]
    ) -> list[GpuSplit]:
        """Return the splits halfway between the best simulated split and its simulated neighbours,
        where there are splits between them.
        """
        known = [i for i, split in enumerate(disjoint_splits) if split in cases]
        place = min(
            range(len(known)), key=lambda k: _make_case_sort_key(cases[disjoint_splits[known[k]]])
        )
        ends = [known[k] for k in (place - 1, place + 1) if 0 <= k < len(known)]
        between = sorted({(known[place] + end) // 2 for end in ends} - set(known))
        return [disjoint_splits[i] for i in between]


def _make_case_sort_key(case: StudyCase) -> tuple[float, int]:
    """Return the key that sorts cases with shorter steps first, and equal ones by fewer engines."""
    return (case.figures.step_s if case.figures else float("inf"), case.split.num_engines)


def rank_cases(cases: Sequence[StudyCase]) -> list[StudyCase]:
    """Return the cases with figures, the shortest steps first."""
    return sorted((case for case in cases if case.figures is not None), key=_make_case_sort_key)


def choose_best_case(
    cases: Sequence[StudyCase], tolerance: float, max_lost_share: float
) -> StudyCase:
    """Return the case with the smallest largest lag among those within `tolerance` (a share) of the
    shortest steps.

    Cases that lose more than `max_lost_share` of their groups are not chosen where there are
    others: they lose the long groups first, so their steps are short because they train on short
    responses.
    """
    rows = [
        case for case in rank_cases(cases) if _get_lost_share(case) <= max_lost_share
    ] or rank_cases(cases)
    assert rows and rows[0].figures is not None, "no case has figures"
    bound = rows[0].figures.step_s * (1 + tolerance)
    close = [case for case in rows if case.figures is not None and case.figures.step_s <= bound]
    return min(
        close,
        key=lambda case: (
            case.figures.lag_max if case.figures else 0,
            _get_lost_share(case),
            _make_case_sort_key(case),
        ),
    )


def _get_lost_share(case: StudyCase) -> float:
    """Return the share of groups that a case loses; 1 where it has no figures."""
    return case.figures.lost_share if case.figures else 1.0


TABLE_COLUMNS: dict[str, Callable[[StudyCase, SimulationFigures], str]] = {
    "schedule": lambda case, _: case.name,
    "trainer + engines": lambda case, _: str(case.split),
    "step s": lambda _, figures: f"{figures.step_s:.1f}",
    "tokens/s/GPU": lambda _, figures: f"{figures.tokens_per_s_per_gpu:.0f}",
    "trainer": lambda _, figures: f"{figures.trainer_idle:.0%}",
    "engines": lambda _, figures: f"{figures.engines_idle:.0%}",
    "mean": lambda _, figures: f"{figures.lag_mean:.2f}",
    "max": lambda _, figures: str(figures.lag_max),
    "lost": lambda _, figures: f"{figures.lost_share:.1%}",
    "trained": lambda _, figures: f"{figures.response_tokens:.0f}",
}


def format_run_lines(study: ScheduleStudy) -> Iterator[str]:
    """Yield lines that say what is simulated, and on which durations and assumptions."""
    config = study.setup.config
    durations = study.setup.durations
    samples = config.data.train_batch_size * config.rollout.n
    yield (
        f"{config.trainer.experiment_name}: {config.data.train_batch_size} prompts x"
        f" {config.rollout.n} = {samples} samples a step; {study.num_steps} steps, figures of the"
        f" last {study.num_steps - study.num_warmup}, seed {study.workload.seed}"
    )
    cut = config.data.max_response_length
    yield f"responses: {describe_lengths(durations.lengths)}, cut at {cut}"
    yield f"prompts: {describe_lengths(durations.prompts)}, cut at {config.data.max_prompt_length}"
    yield (
        f"trainer's rates: of {study.setup.num_measured_gpus} GPUs; twice as many make"
        f" {2 * durations.trainer.doubling_efficiency:g} times the tokens a second"
    )
    if durations.source:
        yield f"durations: {durations.source}"
    for text in durations.assumed:
        yield f"assumed: {text}"
    if config.rollout.colocated and durations.sync.turns_s is None:
        yield "assumed: turns of trainer and engines take no time (sync.turns_s)"


def describe_lengths(lengths: LengthsConfig) -> str:
    """Return a text on a distribution of lengths."""
    if lengths.kind == "constant":
        return f"{lengths.median:g} tokens"
    if lengths.values:
        what = "in their order" if lengths.kind == "cycle" else "drawn"
        mean = sum(lengths.values) / len(lengths.values)
        return f"{len(lengths.values)} given lengths {what}, {round(mean, 1):g} tokens in the mean"
    text = f"lognormal, median {lengths.median:g} tokens, sigma {lengths.sigma:g}"
    if lengths.kind == "pareto":
        text += (
            f", the longest {lengths.tail_share:.0%} with a Pareto tail of"
            f" index {lengths.tail_index:g}"
        )
    return text


def format_table_lines(cases: Sequence[StudyCase]) -> Iterator[str]:
    """Yield the lines of the table of cases, in the order of their step time, and a line for each
    case that was not simulated. `lost`: see `SimulationFigures.lost_share`; `trained`: mean tokens
    of a response that trains, which are fewer where long responses are lost.
    """
    rows = [list(TABLE_COLUMNS)]
    rows += [
        [cell(case, case.figures) for cell in TABLE_COLUMNS.values()]
        for case in rank_cases(cases)
        if case.figures
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    above = [" " * width for width in widths[:4]]
    above += [
        "idle".center(widths[4] + widths[5] + len(_COLUMN_GAP)),
        "lag".center(widths[6] + widths[7] + len(_COLUMN_GAP)),
    ]
    yield _COLUMN_GAP.join(above).rstrip()
    for row in rows:
        cells = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        yield _COLUMN_GAP.join(cells).rstrip()
    for case in cases:
        if case.figures is None:
            yield f"{case.name}, {case.split}: not simulated: {case.skip_reason}"


def format_case_lines(case: StudyCase) -> Iterator[str]:
    """Yield lines with all figures of one case, which must have figures."""
    found = case.figures
    assert found is not None
    yield f"{case.name} with {case.split} GPUs:"
    extent = f"{found.step_s_min:.2f} .. {found.step_s_max:.2f}"
    yield f"  step {found.step_s:.2f} s in the mean of {found.num_steps} ({extent})"
    yield f"  {found.tokens_per_s:.0f} trained tokens/s, {found.tokens_per_s_per_gpu:.1f} a GPU"
    yield (
        f"  idle: trainer {found.trainer_idle:.1%}, engines {found.engines_idle:.1%} (in weight"
        f" syncs {found.engines_syncing:.1%}), scorer {found.scorer_idle:.1%}"
    )
    for lag, share in found.lags.items():
        yield f"  lag {lag}: {share:6.1%} of the samples {'#' * round(40 * share)}"
    lost = [*((f"dropped ({reason})", share) for reason, share in found.dropped.items())]
    if found.regenerated:
        lost.append(("begun anew", found.regenerated))
    yield "  groups: " + (
        ", ".join(f"{share:.1%} {what}" for what, share in lost) if lost else "none lost"
    )


def format_verdict_lines(
    best_case: StudyCase, cases: Sequence[StudyCase], tolerance: float, max_lost_share: float
) -> Iterator[str]:
    """Yield lines that say which case to choose, why not the faster ones, how it compares with the
    best synchronous case, and what it costs.
    """
    found = best_case.figures
    assert found is not None
    yield (
        f"best for this run: {best_case.name} with {best_case.split} GPUs,"
        f" {found.step_s:.1f} s a step"
    )
    for case in rank_cases(cases):
        if case == best_case:
            break
        if case.figures is not None:
            why = (
                (
                    f"loses {case.figures.lost_share:.0%} of the groups, the long ones first (its"
                    f" responses have {case.figures.response_tokens:.0f} tokens in the mean)"
                )
                if case.figures.lost_share > max_lost_share
                else (
                    f"is less than {tolerance:.0%} faster with a larger lag"
                    f" ({case.figures.lag_max}), or loses more"
                )
            )
            yield f"  not {case.name} with {case.split} ({case.figures.step_s:.1f} s): it {why}"
    plain = [
        case
        for case in rank_cases(cases)
        if case.schedule.name == "synchronous" and case != best_case
    ]
    if plain and plain[0].figures is not None:
        other = plain[0].figures
        yield (
            f"  {other.step_s / found.step_s:.2f} times as fast as synchronous with"
            f" {plain[0].split} ({other.step_s:.1f} s), where the trainer is idle"
            f" {other.trainer_idle:.0%} and the engines {other.engines_idle:.0%} of the time; here"
            f" {found.trainer_idle:.0%} and {found.engines_idle:.0%}"
        )
    limit = "the trainer" if found.trainer_idle <= found.engines_idle else "generation"
    yield f"  what limits it now: {limit}, which is idle the least"
    cost = f"samples are {found.lag_mean:.2f} versions old in the mean, {found.lag_max} at most"
    yield (
        f"  cost: {cost if found.lag_max else 'none in lag'}; {found.lost_share:.1%} of the"
        " groups are lost"
    )
