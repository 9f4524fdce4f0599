"""C10: plans of micro-batches: padding, balance and the time they take, for 16384 samples.

Lengths are lognormal (most are short, the longest has twelve times the median) or of two modes (70
% around 6 % of the longest, 30 % around 60 %). Measured over token budgets from 8k to 64k, with and
without a layout that pads documents to 8 and micro-batches to 16 tokens:

    padding     tokens of no sample over all tokens, every micro-batch padded to the longest, as
                pipeline parallelism
                does; the floor is what no plan can avoid, by Martello and Toth's bound on the
                    number of bins
    imbalance   dearest replica over the mean, by a cost of length x (24576 + length)
    waiting     the same, where replicas wait for each other after each micro-batch

Baselines, at 32k tokens on 64 replicas: `ffd`, first fit decreasing, bins dealt in turn (AReaL's
default allocation), and `kk`, Karmarkar and Karp's differencing, samples to replicas by cost and
then to micro-batches by length (as verl and slime do, and AReaL on request). `kk` knows no budget:
it takes as many micro-batches as the volume needs, and how far the longest is over is reported.
Both are written here, in Python.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from benchmarks.common import significant
from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.measure import cpu_seconds
from rlhf_megatron.data.bin_packing import compute_bin_lower_bound
from rlhf_megatron.data.replica_plan import NO_OP, plan_replicas

Shares = list[list[list[int]]]  # samples of each micro-batch of each replica

ATTENTION_LENGTH = 24576
NUM_SAMPLES = 16384
QUICK_NUM_SAMPLES = 512
BUDGETS = (8192, 16384, 32768, 65536)
LONGEST = 32768
REPLICAS = (1, 8, 64)
MULTIPLES = ((1, 1), (8, 16))  # of a document and of a micro-batch
PADDING = 0.03
IMBALANCE = 1.02
SECONDS = 0.1
# floors above the first have a bar of their own: the floor and the second
FLOOR = 0.025
ABOVE_FLOOR = 0.005
REPEATS = 3


@dataclass(frozen=True)
class Call:
    kind: str
    lengths: list[int]
    dp: int
    budget: int
    document_multiple: int
    packed_multiple: int

    @property
    def padded(self) -> list[int]:
        return [round_up(length, self.document_multiple) for length in self.lengths]

    @property
    def floor(self) -> float:
        """Padding of a plan with the fewest bins, all of one length or of the longest sample's."""
        num_bins = round_up(max(1, compute_bin_lower_bound(self.padded, self.budget)), self.dp)
        longest = max(max(self.padded), -(-sum(self.padded) // num_bins))
        return 1 - sum(self.lengths) / (num_bins * round_up(longest, self.packed_multiple))


@dataclass(frozen=True)
class Quality:
    padding: float
    imbalance: float
    waiting: float
    num_micro_batches: int
    over_budget: float  # longest micro-batch over the budget, less 1


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def lognormal(generator: random.Random, longest: int) -> float:
    return generator.lognormvariate(0, 1) * longest / 12


def bimodal(generator: random.Random, longest: int) -> float:
    share, spread = (0.06, 0.02) if generator.random() < 0.7 else (0.6, 0.15)
    return generator.gauss(share * longest, spread * longest)


KINDS: dict[str, Callable[[random.Random, int], float]] = {
    "lognormal": lognormal,
    "bimodal": bimodal,
}


def calls_of(kind: str, dp: int, num_samples: int) -> Iterator[Call]:
    for budget in BUDGETS:
        longest = min(budget, LONGEST)
        generator = random.Random(0)
        lengths = [
            max(16, min(longest, int(KINDS[kind](generator, longest)))) for _ in range(num_samples)
        ]
        for multiples in MULTIPLES:
            yield Call(kind, lengths, dp, budget, *multiples)


def ours(call: Call) -> Shares:
    plans = plan_replicas(
        call.lengths,
        call.dp,
        call.budget,
        call.document_multiple,
        call.packed_multiple,
        1,
        ATTENTION_LENGTH,
    )
    return [
        [[plan.samples[i] for i in held if plan.samples[i] != NO_OP] for held in plan.micro_batches]
        for plan in plans
    ]


def ffd(call: Call) -> Shares:
    lengths = call.padded
    bins: list[list[int]] = []
    rooms: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = next((i for i, room in enumerate(rooms) if room >= lengths[sample]), len(bins))
        if index == len(bins):
            bins.append([])
            rooms.append(call.budget)
        bins[index].append(sample)
        rooms[index] -= lengths[sample]
    bins += [[] for _ in range(round_up(len(bins), call.dp) - len(bins))]
    return [bins[replica :: call.dp] for replica in range(call.dp)]


def kk(call: Call) -> Shares:
    lengths = call.padded
    shares = differenced(list(range(len(lengths))), costs_of(lengths), call.dp)
    num_bins = max(-(-sum(lengths[i] for i in share) // call.budget) for share in shares)
    return [differenced(share, lengths, num_bins) for share in shares]


def differenced(items: list[int], weights: list[int], num_parts: int) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method: the two partitions of the widest spread
    become one, the largest part of the one with the smallest of the other, until one is left.
    """
    order = count()
    empty: list[tuple[int, list[int]]] = [(0, [])] * (num_parts - 1)
    heap = [(-weights[i], next(order), [(weights[i], [i]), *empty]) for i in items]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], next(order), joined))
    return [part for _, part in heap[0][2]]


def costs_of(lengths: list[int]) -> list[int]:
    return [length * (ATTENTION_LENGTH + length) for length in lengths]


def quality_of(call: Call, shares: Shares) -> Quality:
    lengths = call.padded
    costs = costs_of(lengths)
    assert sorted(i for share in shares for held in share for i in held) == list(
        range(len(lengths))
    ), "samples are lost"
    tokens = [sum(lengths[i] for i in held) for share in shares for held in share]
    cost = [[sum(costs[i] for i in held) for held in share] for share in shares]
    mean = sum(map(sum, cost)) / call.dp
    longest = round_up(max(tokens), call.packed_multiple)
    return Quality(
        padding=1 - sum(call.lengths) / (len(tokens) * longest),
        imbalance=max(map(sum, cost)) / mean,
        waiting=sum(max(at_once) for at_once in zip(*cost, strict=True)) / mean,
        num_micro_batches=len(tokens),
        over_budget=longest / call.budget - 1,
    )


def best_seconds(run: Callable[[], object]) -> float:
    return min(cpu_seconds(run) for _ in range(REPEATS))


def figures_of(
    kind: str, dp: int, num_samples: int, is_quick: bool, details: dict[str, Any]
) -> Iterator[Figure]:
    """The worst of all budgets and multiples."""
    calls = list(calls_of(kind, dp, num_samples))
    found = [quality_of(call, ours(call)) for call in calls]
    seconds = [best_seconds(lambda call=call: ours(call)) for call in calls]
    for call, quality, time_s in zip(calls, found, seconds, strict=True):
        assert quality.over_budget <= 0, f"{call.budget} tokens are exceeded"
        name = (
            f"{kind}, dp {dp}, {call.budget} tokens, multiples {call.document_multiple}"
            f" and {call.packed_multiple}"
        )
        details[name] = {key: significant(x) for key, x in vars(quality).items()} | {
            "floor": significant(call.floor),
            "cpu_s": significant(time_s),
        }

    def bar(value: float) -> float | None:
        return None if is_quick else value

    name = f"{kind}, dp {dp}"
    low = [q.padding for call, q in zip(calls, found, strict=True) if call.floor <= FLOOR]
    high = [
        q.padding - call.floor for call, q in zip(calls, found, strict=True) if call.floor > FLOOR
    ]
    if low:
        yield Figure(f"{name}, padding", max(low), "of the tokens", "", bar(PADDING))
    if high:
        floor = max(call.floor for call in calls)
        yield Figure(
            f"{name}, padding above the floor",
            max(high),
            "of the tokens",
            f"{floor:.1%}",
            bar(ABOVE_FLOOR),
        )
    yield Figure(
        f"{name}, imbalance",
        max(q.imbalance for q in found),
        "x",
        "the mean replica",
        bar(IMBALANCE),
    )
    yield Figure(f"{name}, waiting", max(q.waiting for q in found), "x", "the mean replica")
    yield Figure(f"{name}, time", max(seconds), "s", "", bar(SECONDS))


def baselines_of(kind: str, num_samples: int, details: dict[str, Any]) -> Iterator[Figure]:
    call = next(c for c in calls_of(kind, REPLICAS[-1], num_samples) if c.budget == LONGEST)
    time_s = best_seconds(lambda: ours(call))
    mine = quality_of(call, ours(call))
    for run in (ffd, kk):
        theirs_s = cpu_seconds(lambda run=run: run(call))
        quality = quality_of(call, run(call))
        name = f"{run.__name__}, {kind}, dp {call.dp}"
        details[name] = {key: significant(x) for key, x in vars(quality).items()} | {
            "cpu_s": significant(theirs_s)
        }
        yield Figure(
            f"{name}, padding", quality.padding, "of the tokens", f"ours {mine.padding:.2%}"
        )
        yield Figure(f"{name}, imbalance", quality.imbalance, "x", f"ours {mine.imbalance:.4f}")
        yield Figure(f"{name}, longest over the budget", quality.over_budget, "of the budget", "")
        yield Figure(f"{name}, time", theirs_s, "s", f"ours {time_s:.3f}")


def run(is_quick: bool) -> CaseResult:
    num_samples = QUICK_NUM_SAMPLES if is_quick else NUM_SAMPLES
    details: dict[str, Any] = {}
    figures: list[Figure] = []
    for kind in KINDS:
        for dp in REPLICAS:
            figures += figures_of(kind, dp, num_samples, is_quick, details)
        figures += baselines_of(kind, num_samples, details)
    return CaseResult(tuple(figures), {"samples": num_samples, "plans": details})


CASE = Case("C10", "plans of micro-batches: padding, balance, time", run)
