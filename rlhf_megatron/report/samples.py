"""Which samples a page shows: whole steps, evenly chosen, within a budget of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf_megatron.report.records import Sample

TEXT_BUDGET = 1_000_000  # characters of samples on a page
OVERHEAD = 300  # characters that a sample takes beside its texts
HEAD, TAIL = 4000, 2000  # characters kept of a longer text


@dataclass(frozen=True)
class Choice:
    samples: tuple[Sample, ...]  # in the order of steps
    num_samples: int  # of the run


def choose(samples: Sequence[Sample], budget: int = TEXT_BUDGET) -> Choice:
    """The first and the last step always; then steps half-way between those chosen, as long as the budget lasts."""
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(_cut(sample))
    steps = sorted(by_step)
    chosen: list[int] = []
    size = 0
    for i in _halving(len(steps)):
        size += sum(len(s.prompt) + len(s.response) + OVERHEAD for s in by_step[steps[i]])
        if size > budget and len(chosen) >= 2:
            break
        chosen.append(steps[i])
    return Choice(tuple(sample for step in sorted(chosen) for sample in by_step[step]), len(samples))


def _halving(count: int) -> Iterator[int]:
    """0, the last, the middle, the quarters, ...: each of 0 .. count - 1 once."""
    if count == 0:
        return
    seen = {0, count - 1}
    yield 0
    if count > 1:
        yield count - 1
    parts = 2
    while len(seen) < count:
        for part in range(1, parts, 2):
            i = part * (count - 1) // parts
            if i not in seen:
                seen.add(i)
                yield i
        parts *= 2
        if parts > 2 * count:
            yield from (i for i in range(count) if i not in seen)
            return


def _cut(sample: Sample) -> Sample:
    return replace(sample, prompt=cut_text(sample.prompt), response=cut_text(sample.response))


def cut_text(text: str) -> str:
    """A long text without its middle, and how much is missing."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[... {len(text) - HEAD - TAIL} characters left out ...]\n{text[-TAIL:]}"
