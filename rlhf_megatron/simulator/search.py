"""A study simulates schedules and splits of GPUs with the same responses, and finds the shortest steps.

The other functions say what it found, as text for a terminal. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_megatron.config.rules.schedule import takes_turns
from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.scheduler.schedules import load_schedule
from rlhf_megatron.simulator.durations import LengthsConfig, Workload
from rlhf_megatron.simulator.plan import Setting, Split
from rlhf_megatron.simulator.simulation import Figures, History, Stuck, figures
from rlhf_megatron.simulator.supplies import simulate

CANDIDATES = (
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


@dataclass(frozen=True)
class Case:
    """One row of the comparison. `figures` None: `why_not` says why there are none."""

    schedule: ScheduleConfig
    split: Split
    figures: Figures | None
    why_not: str = ""

    @property
    def name(self) -> str:
        return schedule_name(self.schedule)

    def as_json(self) -> dict[str, Any]:
        found = {"schedule": asdict(self.schedule), "split": asdict(self.split)}
        return found | {"figures": asdict(self.figures) if self.figures else None, "why_not": self.why_not}


def schedule_name(schedule: ScheduleConfig) -> str:
    """ "asynchronous max_lag 2" """
    values = {key: str(value).lower() if value in (True, False) else value for key, value in schedule.params.items()}
    return " ".join([schedule.name, *(f"{key} {value}" for key, value in values.items())])


@dataclass(frozen=True)
class Study:
    """A run and how it is simulated."""

    setting: Setting
    workload: Workload
    num_steps: int
    num_warmup: int

    def history(self, schedule: ScheduleConfig, split: Split, keeps_all: bool = False) -> History:
        """Raises ConfigError, Stuck."""
        return simulate(self.setting.plan(split, self.num_steps), load_schedule(schedule), self.workload, keeps_all)

    def case(self, schedule: ScheduleConfig, split: Split) -> Case:
        """Raises ConfigError."""
        if split.is_colocated and not takes_turns(schedule):
            return Case(schedule, split, None, "trainer and engines take turns with the same GPUs")
        try:
            history = self.history(schedule, split)
        except Stuck as error:
            return Case(schedule, split, None, str(error))
        return Case(schedule, split, figures(history, split, self.num_warmup))

    def best_split(self, schedule: ScheduleConfig, gpus: int, most: int) -> list[Case]:
        """A coarse choice of splits, then those around the best of them, at most `most` in all; the best first."""
        every = self.setting.splits(gpus, 1 << 20)
        coarse = self.setting.splits(gpus, max(2, most - most // 3))
        cases: dict[Split, Case] = {}
        for split in coarse:
            if not split.is_colocated or takes_turns(schedule):
                cases[split] = self.case(schedule, split)
        apart = [split for split in every if not split.is_colocated]
        while apart and len(cases) < most:
            halfway = self._halfway(apart, cases)
            if not halfway:
                break
            for split in halfway[: most - len(cases)]:
                cases[split] = self.case(schedule, split)
        return sorted(cases.values(), key=_order)

    def _halfway(self, apart: list[Split], cases: dict[Split, Case]) -> list[Split]:
        """Between the best split that is known and its neighbours, where there are others between them."""
        known = [i for i, split in enumerate(apart) if split in cases]
        place = min(range(len(known)), key=lambda k: _order(cases[apart[known[k]]]))
        ends = [known[k] for k in (place - 1, place + 1) if 0 <= k < len(known)]
        between = sorted({(known[place] + end) // 2 for end in ends} - set(known))
        return [apart[i] for i in between]


def _order(case: Case) -> tuple[float, int]:
    """Shorter steps first; of equal ones the one that needs fewer GPUs for generation."""
    return (case.figures.step_s if case.figures else float("inf"), case.split.num_engines)


def ranked(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with figures, the shortest steps first."""
    return sorted((case for case in cases if case.figures is not None), key=_order)


def pick(cases: Sequence[Case], tolerance: float, most_lost: float) -> Case:
    """The one to choose: with the smallest largest lag of those within `tolerance` of the shortest steps.

    Of those that lose more than `most_lost` of their groups none is chosen where there are others: they lose the long
    ones first, so their steps are short because what they train on is.
    """
    rows = [case for case in ranked(cases) if _lost(case) <= most_lost] or ranked(cases)
    assert rows and rows[0].figures is not None, "no case has figures"
    bound = rows[0].figures.step_s * (1 + tolerance)
    close = [case for case in rows if case.figures is not None and case.figures.step_s <= bound]
    return min(close, key=lambda case: (case.figures.lag_max if case.figures else 0, _lost(case), _order(case)))


def _lost(case: Case) -> float:
    return case.figures.lost if case.figures else 1.0


COLUMNS: dict[str, Callable[[Case, Figures], str]] = {
    "schedule": lambda case, _: case.name,
    "trainer + engines": lambda case, _: str(case.split),
    "step s": lambda _, found: f"{found.step_s:.1f}",
    "tokens/s/GPU": lambda _, found: f"{found.tokens_per_s_per_gpu:.0f}",
    "trainer": lambda _, found: f"{found.trainer_idle:.0%}",
    "engines": lambda _, found: f"{found.engines_idle:.0%}",
    "mean": lambda _, found: f"{found.lag_mean:.2f}",
    "max": lambda _, found: str(found.lag_max),
    "lost": lambda _, found: f"{found.lost:.1%}",
    "trained": lambda _, found: f"{found.response_tokens:.0f}",
}
_GAP = "  "


def run_lines(study: Study) -> Iterator[str]:
    """Say what is simulated, and what it rests on."""
    config, durations = study.setting.config, study.setting.durations
    samples = config.data.train_batch_size * config.rollout.n
    yield (
        f"{config.trainer.experiment_name}: {config.data.train_batch_size} prompts x {config.rollout.n} ="
        f" {samples} samples a step; {study.num_steps} steps, figures of the last"
        f" {study.num_steps - study.num_warmup}, seed {study.workload.seed}"
    )
    cut = config.data.max_response_length
    yield f"responses: {lengths_text(durations.lengths)}, cut at {cut}"
    yield f"prompts: {lengths_text(durations.prompts)}, cut at {config.data.max_prompt_length}"
    yield (
        f"trainer's rates: of {study.setting.measured_gpus} GPUs; twice as many make"
        f" {2 * durations.trainer.doubling_efficiency:g} times the tokens a second"
    )
    if durations.source:
        yield f"durations: {durations.source}"
    for text in durations.assumed:
        yield f"assumed: {text}"
    if config.rollout.colocated and durations.sync.turns_s is None:
        yield "assumed: turns of trainer and engines take no time (sync.turns_s)"


def lengths_text(lengths: LengthsConfig) -> str:
    if lengths.kind == "constant":
        return f"{lengths.median:g} tokens"
    if lengths.values:
        what = "in their order" if lengths.kind == "cycle" else "drawn"
        mean = sum(lengths.values) / len(lengths.values)
        return f"{len(lengths.values)} given lengths {what}, {round(mean, 1):g} tokens in the mean"
    text = f"lognormal, median {lengths.median:g} tokens, sigma {lengths.sigma:g}"
    if lengths.kind == "pareto":
        text += f", the longest {lengths.tail_share:.0%} with a Pareto tail of index {lengths.tail_index:g}"
    return text


def table_lines(cases: Sequence[Case]) -> Iterator[str]:
    """Rows in the order of their step time; `lost`: see `Figures.lost`; `trained`: mean tokens of
    a response that trains, which are fewer where long ones are lost."""
    rows = [list(COLUMNS)]
    rows += [[cell(case, case.figures) for cell in COLUMNS.values()] for case in ranked(cases) if case.figures]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    above = [" " * width for width in widths[:4]]
    above += ["idle".center(widths[4] + widths[5] + len(_GAP)), "lag".center(widths[6] + widths[7] + len(_GAP))]
    yield _GAP.join(above).rstrip()
    for row in rows:
        cells = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        yield _GAP.join(cells).rstrip()
    for case in cases:
        if case.figures is None:
            yield f"{case.name}, {case.split}: not simulated: {case.why_not}"


def detail_lines(case: Case) -> Iterator[str]:
    """Everything that is known of one case."""
    found = case.figures
    assert found is not None
    yield f"{case.name} with {case.split} GPUs:"
    extent = f"{found.step_s_min:.2f} .. {found.step_s_max:.2f}"
    yield f"  step {found.step_s:.2f} s in the mean of {found.num_steps} ({extent})"
    yield f"  {found.tokens_per_s:.0f} trained tokens/s, {found.tokens_per_s_per_gpu:.1f} a GPU"
    yield (
        f"  idle: trainer {found.trainer_idle:.1%}, engines {found.engines_idle:.1%} (in weight syncs"
        f" {found.engines_syncing:.1%}), scorer {found.scorer_idle:.1%}"
    )
    for lag, share in found.lags.items():
        yield f"  lag {lag}: {share:6.1%} of the samples {'#' * round(40 * share)}"
    lost = [*((f"dropped ({reason})", share) for reason, share in found.dropped.items())]
    if found.regenerated:
        lost.append(("begun anew", found.regenerated))
    yield "  groups: " + (", ".join(f"{share:.1%} {what}" for what, share in lost) if lost else "none lost")


def verdict_lines(best: Case, cases: Sequence[Case], tolerance: float, most_lost: float) -> Iterator[str]:
    """Say what to choose, how it compares with the best synchronous case, and what it costs."""
    found = best.figures
    assert found is not None
    yield f"best for this run: {best.name} with {best.split} GPUs, {found.step_s:.1f} s a step"
    for case in ranked(cases):
        if case == best:
            break
        if case.figures is not None:
            why = (
                f"loses {case.figures.lost:.0%} of the groups, the long ones first (its responses have"
                f" {case.figures.response_tokens:.0f} tokens in the mean)"
                if case.figures.lost > most_lost
                else f"is less than {tolerance:.0%} faster with a larger lag ({case.figures.lag_max}), or loses more"
            )
            yield f"  not {case.name} with {case.split} ({case.figures.step_s:.1f} s): it {why}"
    plain = [case for case in ranked(cases) if case.schedule.name == "synchronous" and case != best]
    if plain and plain[0].figures is not None:
        other = plain[0].figures
        yield (
            f"  {other.step_s / found.step_s:.2f} times as fast as synchronous with {plain[0].split}"
            f" ({other.step_s:.1f} s), where the trainer is idle {other.trainer_idle:.0%} and the engines"
            f" {other.engines_idle:.0%} of the time; here {found.trainer_idle:.0%} and {found.engines_idle:.0%}"
        )
    limit = "the trainer" if found.trainer_idle <= found.engines_idle else "generation"
    yield f"  what limits it now: {limit}, which is idle the least"
    cost = f"samples are {found.lag_mean:.2f} versions old in the mean, {found.lag_max} at most"
    yield f"  cost: {cost if found.lag_max else 'none in lag'}; {found.lost:.1%} of the groups are lost"
