"""What a study found, as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.scheduler.simulation.durations import Durations
from rlhf_megatron.scheduler.simulation.figures import Figures
from rlhf_megatron.scheduler.simulation.lengths import LengthsConfig
from rlhf_megatron.scheduler.simulation.plan import measured_gpus
from rlhf_megatron.scheduler.simulation.search import Case, ranked

HEADINGS = (
    "schedule",
    "trainer + engines",
    "step s",
    "tokens/s/GPU",
    "trainer",
    "engines",
    "mean",
    "max",
    "lost",
    "trained",
)
_GAP = "  "


def run_lines(config: RunConfig, durations: Durations, num_steps: int, num_warmup: int, seed: int) -> Iterator[str]:
    """What is simulated, and what it rests on."""
    samples = config.data.train_batch_size * config.rollout.n
    yield (
        f"{config.trainer.experiment_name}: {config.data.train_batch_size} prompts x {config.rollout.n} ="
        f" {samples} samples a step; {num_steps} steps, figures of the last {num_steps - num_warmup}, seed {seed}"
    )
    cut = config.data.max_response_length
    yield f"responses: {lengths_text(durations.lengths)}, cut at {cut}"
    yield f"prompts: {lengths_text(durations.prompts)}, cut at {config.data.max_prompt_length}"
    yield (
        f"trainer's rates: of {measured_gpus(config, durations)} GPUs; twice as many make"
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
    rows = [_row(case.name, str(case.split), case.figures) for case in ranked(cases) if case.figures]
    widths = [max(len(row[i]) for row in [HEADINGS, *rows]) for i in range(len(HEADINGS))]
    above = [" " * width for width in widths[:4]]
    above += ["idle".center(widths[4] + widths[5] + len(_GAP)), "lag".center(widths[6] + widths[7] + len(_GAP))]
    yield _GAP.join(above).rstrip()
    for row in [HEADINGS, *rows]:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield _GAP.join(cells).rstrip()
    for case in cases:
        if case.figures is None:
            yield f"{case.name}, {case.split}: not simulated: {case.why_not}"


def _row(name: str, split: str, found: Figures) -> tuple[str, ...]:
    return (
        name,
        split,
        f"{found.step_s:.1f}",
        f"{found.tokens_per_s_per_gpu:.0f}",
        f"{found.trainer_idle:.0%}",
        f"{found.engines_idle:.0%}",
        f"{found.lag_mean:.2f}",
        str(found.lag_max),
        f"{found.lost:.1%}",
        f"{found.response_tokens:.0f}",
    )


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
    """What to choose, against the best synchronous case, and what it costs."""
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
