"""C9: generalized advantage estimation against loops over columns and other scans, on one thread.

Two steps are measured: the discounted sums alone, and the whole estimator (mask, compaction,
deltas, sums, returns, explained variance). Their baselines have samples as the rows of a padded [B,
T] matrix, as trainers of this kind do:

    columns     sums by a Python loop over columns, from the last to the first: two
                operations a column
    verl        verl's loop over columns, with its mask recurrence: thirteen operations a column
    chunks      slime's scheme: products with a triangle of 128 powers in float32, a loop over
                chunks for carries
    compiled    `chunks` under torch.compile, where a C++ compiler is found
    lfilter     scipy's recursive filter in C over each row, as in Spinning Up, where
                scipy is installed
    doubling    log2(T) rounds over the packed column, in float64

`chunks`, `compiled` and `lfilter` know no masks: as whole estimators they make deltas, sums and
returns of all tokens.

`masked`: the first eighth of a sample is its prompt, and every fourth stretch of 32
tokens is a tool's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.measure import Parts, Ratio, compile_problem, cpu_seconds, take_turns
from rlhf_megatron.algorithms.advantages.advantage_estimator import AdvantageInputs
from rlhf_megatron.algorithms.advantages.gae import GAEParams, gae
from rlhf_megatron.algorithms.advantages.response_tokens import compute_discounted_sums_

PARAMS = GAEParams(gamma=0.99, lam=0.95, whiten=False)
DECAY = PARAMS.gamma * PARAMS.lam
# samples x tokens
SHAPES = ((1024, 4096), (64, 32768))
QUICK_SHAPES = ((16, 256), (4, 1024))
# ragged samples of 64 tokens in the median
NUM_SHORT = 16384
QUICK_NUM_SHORT = 256
CHUNK = 128
SPEED_UP = 60.0  # over verl's loop, at the last of the shapes
RATE = 150.0  # million tokens a second
AGREEMENT = 1e-5  # of the largest number


def sums_by_columns(terms_BT: Tensor) -> Tensor:
    sums_BT = torch.empty_like(terms_BT)
    carried_B = torch.zeros(terms_BT.shape[0])
    for t in range(terms_BT.shape[1] - 1, -1, -1):
        carried_B = terms_BT[:, t] + DECAY * carried_B
        sums_BT[:, t] = carried_B
    return sums_BT


def sums_by_chunks(terms_BT: Tensor) -> Tensor:
    step_C = torch.arange(CHUNK)
    distance_CC = step_C[:, None] - step_C[None, :]
    triangle_CC = torch.where(distance_CC >= 0, DECAY ** distance_CC.clamp(min=0).float(), 0.0)
    sums_BKC = (terms_BT.view(-1, CHUNK) @ triangle_CC).view(terms_BT.shape[0], -1, CHUNK)
    fading_C = DECAY ** (CHUNK - step_C).float()
    for chunk in range(sums_BKC.shape[1] - 2, -1, -1):
        sums_BKC[:, chunk] += fading_C * sums_BKC[:, chunk + 1, :1]
    return sums_BKC.view(terms_BT.shape)


def sums_by_filter(terms_BT: Tensor) -> Tensor:
    from scipy.signal import lfilter

    return torch.from_numpy(lfilter([1.0], [1.0, -DECAY], terms_BT.flip(1).numpy(), axis=1)).flip(1)


def gae_of(
    sums: Callable[[Tensor], Tensor], rewards_BT: Tensor, values_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of rows without masks."""
    deltas_BT = rewards_BT - values_BT
    deltas_BT[:, :-1] += PARAMS.gamma * values_BT[:, 1:]
    advantages_BT = sums(deltas_BT)
    return advantages_BT, advantages_BT + values_BT


def others(
    is_quick: bool,
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | str]]:
    """Whole estimators to compare with, or why one does not run here."""
    yield "chunks", partial(gae_of, sums_by_chunks)
    problem = "a quick run" if is_quick else compile_problem()
    yield "compiled", problem or torch.compile(partial(gae_of, sums_by_chunks), dynamic=False)
    has_scipy = find_spec("scipy") is not None
    yield "lfilter", partial(gae_of, sums_by_filter) if has_scipy else "scipy is not installed"


def sums_by_doubling(terms_N: Tensor, num_after_N: Tensor) -> Tensor:
    sums_N = terms_N.clone()
    reach = 1
    factor = DECAY
    while reach <= int(num_after_N.max()):
        sums_N[:-reach] += (factor * sums_N[reach:]).masked_fill_(num_after_N[:-reach] < reach, 0.0)
        reach = 2 * reach
        factor = factor * factor
    return sums_N


def gae_by_columns(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns. verl's recurrence
    (verl/trainer/ppo/core_algos.py, compute_gae_advantage_return).
    """
    next_B = carried_B = torch.zeros(values_BT.shape[0])
    columns = []
    for t in range(values_BT.shape[1] - 1, -1, -1):
        delta_B = rewards_BT[:, t] + PARAMS.gamma * next_B - values_BT[:, t]
        advantage_B = delta_B + DECAY * carried_B
        next_B = values_BT[:, t] * mask_BT[:, t] + (1 - mask_BT[:, t]) * next_B
        carried_B = advantage_B * mask_BT[:, t] + (1 - mask_BT[:, t]) * carried_B
        columns.append(carried_B)
    advantages_BT = torch.stack(columns[::-1], 1)
    return advantages_BT * mask_BT, (advantages_BT + values_BT) * mask_BT


def make_inputs(lengths_B: Tensor, is_masked: bool) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)
    num_samples = lengths_B.numel()
    total = int(lengths_B.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
    place_T = torch.arange(total) - offsets[:-1].repeat_interleave(lengths_B)
    is_response_T = (place_T >= (lengths_B // 8).repeat_interleave(lengths_B)) & (
        place_T // 32 % 4 != 1
    )
    return AdvantageInputs(
        rewards_B=torch.zeros(num_samples),
        group_ids_B=torch.zeros(num_samples, dtype=torch.int64),
        is_valid_B=torch.ones(num_samples, dtype=torch.bool),
        response_mask_T=is_response_T if is_masked else torch.ones_like(is_response_T),
        offsets=offsets,
        token_rewards_T=torch.randn(total, generator=generator),
        values_T=torch.randn(total, generator=generator),
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest, over the largest number."""
    return ((found.flatten() - expected.flatten()).abs().max() / expected.abs().max()).item()


def timed(run: Callable[[], object]) -> Callable[[], Parts]:
    return lambda: {"total": cpu_seconds(run)}


class Report:
    """Figures as they are found."""

    def __init__(self, is_quick: bool) -> None:
        self.is_quick = is_quick
        self.figures: list[Figure] = []
        self.cpu_s: dict[str, Any] = {}
        self.absent: dict[str, str] = {}

    def faster(self, what: str, ratio: Ratio, baseline: str, bar: float | None) -> None:
        spread = "" if math.isinf(ratio.spread) else f"; spread {100 * ratio.spread:.1f} %"
        self._add(what, 1 / ratio.value, "times as fast", baseline + spread, bar)

    def rate(self, what: str, num_tokens: int, seconds: list[float], bar: float | None) -> None:
        self._add(what, num_tokens / min(seconds) / 1e6, "Mtok/s", "", bar)

    def agreement(self, what: str, error: float, baseline: str) -> None:
        self.figures.append(
            Figure(f"{what}, difference", error, "of the largest", baseline, AGREEMENT)
        )

    def _add(self, what: str, value: float, unit: str, baseline: str, bar: float | None) -> None:
        self.figures.append(
            Figure(what, value, unit, baseline, None if self.is_quick else bar, is_more_better=True)
        )


def measure_sums(report: Report, num_samples: int, length: int) -> None:
    name = f"sums, {num_samples} x {length}"
    generator = torch.Generator().manual_seed(1)
    terms_BT = torch.randn(num_samples, length, generator=generator)
    column = torch.empty(terms_BT.numel() + 1, dtype=torch.float64)
    lengths_B = torch.full((num_samples,), length)

    def ours() -> None:
        column[:-1] = terms_BT.view(-1)
        compute_discounted_sums_(column, lengths_B, DECAY)

    expected_BT = sums_by_columns(terms_BT.double())
    ours()
    report.agreement(name, difference(column[:-1], expected_BT), "the loop over columns in float64")
    report.agreement(
        f"chunks, {name}", difference(sums_by_chunks(terms_BT), expected_BT), "the same"
    )
    variants = {
        "ours": timed(ours),
        "columns": timed(lambda: sums_by_columns(terms_BT)),
        "chunks": timed(lambda: sums_by_chunks(terms_BT)),
    }
    turns = take_turns(variants, [("ours", "columns")])
    report.rate(name, terms_BT.numel(), turns.seconds("ours"), RATE)
    report.rate(f"chunks, {name}", terms_BT.numel(), turns.seconds("chunks"), None)
    report.faster(name, turns.ratio("ours", "columns"), "loop over columns", None)
    report.faster(name, turns.ratio("ours", "chunks"), "chunks of 128", None)
    report.cpu_s[name] = turns.summary()


def measure_whole(
    report: Report, num_samples: int, length: int, is_masked: bool, bar: float | None
) -> None:
    name = f"gae{', masked' if is_masked else ''}, {num_samples} x {length}"
    inputs = make_inputs(torch.full((num_samples,), length), is_masked)
    assert inputs.token_rewards_T is not None and inputs.values_T is not None
    columns = [
        column.view(num_samples, length)
        for column in (inputs.token_rewards_T, inputs.values_T, inputs.response_mask_T.float())
    ]
    found = gae(inputs, PARAMS)
    expected = gae_by_columns(*(column.double() for column in columns))
    assert found.returns_T is not None
    wrong = max(
        difference(found.advantages_T, expected[0]), difference(found.returns_T, expected[1])
    )
    report.agreement(name, wrong, "verl's loop in float64")
    variants = {
        "ours": timed(lambda: gae(inputs, PARAMS)),
        "whitened": timed(lambda: gae(inputs, GAEParams(PARAMS.gamma, PARAMS.lam))),
        "verl": timed(lambda: gae_by_columns(*columns)),
    }
    for other, run_other in () if is_masked else others(report.is_quick):
        if isinstance(run_other, str):
            report.absent[other] = run_other
            continue
        wrong = max(
            difference(*pair) for pair in zip(run_other(*columns[:2]), expected, strict=True)
        )
        report.agreement(f"{other}, {name}", wrong, "the same")
        variants[other] = timed(partial(run_other, *columns[:2]))
    turns = take_turns(variants, [("ours", "verl")])
    report.rate(name, length * num_samples, turns.seconds("ours"), None)
    report.rate(f"{name}, whitened", length * num_samples, turns.seconds("whitened"), None)
    report.faster(name, turns.ratio("ours", "verl"), "verl's loop", bar)
    for other in variants:
        if other not in ("ours", "whitened", "verl"):
            report.faster(name, turns.ratio("ours", other), other, 1.0)
    report.cpu_s[name] = turns.summary()


def measure_short(report: Report, num_samples: int) -> None:
    name = f"sums, {num_samples} ragged, 64 in the median"
    generator = torch.Generator().manual_seed(2)
    lengths_B = (torch.randn(num_samples, generator=generator).exp() * 64).long().clamp(1, 1024)
    terms_N = torch.randn(int(lengths_B.sum()), generator=generator, dtype=torch.float64)
    num_after_N = lengths_B.cumsum(0).repeat_interleave(lengths_B) - torch.arange(
        1, terms_N.numel() + 1
    )
    column = torch.empty(terms_N.numel() + 1, dtype=torch.float64)

    def ours() -> None:
        column[:-1] = terms_N
        compute_discounted_sums_(column, lengths_B, DECAY)

    ours()
    report.agreement(
        name, difference(column[:-1], sums_by_doubling(terms_N, num_after_N)), "doubling"
    )
    variants = {
        "ours": timed(ours),
        "doubling": timed(lambda: sums_by_doubling(terms_N, num_after_N)),
    }
    turns = take_turns(variants, [("ours", "doubling")])
    report.rate(name, terms_N.numel(), turns.seconds("ours"), None)
    report.faster(name, turns.ratio("ours", "doubling"), "doubling", 1.0)
    report.cpu_s[name] = turns.summary()


def run(is_quick: bool) -> CaseResult:
    report = Report(is_quick)
    shapes = QUICK_SHAPES if is_quick else SHAPES
    for shape in shapes:
        measure_sums(report, *shape)
        for is_masked in (False, True):
            measure_whole(report, *shape, is_masked, SPEED_UP if shape == shapes[-1] else None)
    measure_short(report, QUICK_NUM_SHORT if is_quick else NUM_SHORT)
    return CaseResult(
        tuple(report.figures), {"decay": DECAY, "cpu_s": report.cpu_s, "absent": report.absent}
    )


CASE = Case("C9", "advantages: discounted sums and the whole estimator", run)
