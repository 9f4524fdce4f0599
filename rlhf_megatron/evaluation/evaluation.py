"""Held-out sets: what is asked of the engines, and accuracy, mean@N and best@N with their intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import comb, inf, sqrt

from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.evaluation.intervals import interval_over_items, wilson_interval
from rlhf_megatron.evaluation.sample_figures import SampleFigure, answer_of, sample_figures
from rlhf_megatron.rewards.scorers.base import RewardResult, RewardSample, is_masked
from rlhf_megatron.rollout.engine import GeneratedSample

EXAMPLES_KEPT = 8


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out prompts that one row of figures tells of."""

    name: str
    prompts: PromptBatch  # group ids are unique over all sets


@dataclass(frozen=True)
class SetResult:
    """Figures of one evaluation set. N = `num_samples`; only `mean_response_length` counts masked samples."""

    name: str
    num_items: int  # with at least one sample that counts
    num_samples: int  # asked of each item
    num_masked: int  # samples left out
    mean: float  # mean@N: mean over items of the mean score of an item's samples
    std: float  # std@N: mean over items of the standard deviation of an item's scores (divisor N)
    best: tuple[tuple[int, float], ...]  # (k, best@k) for k = 1, 2, 4 .. N: expected best of k samples of an item
    low: float | None  # 95 % interval of `mean`, see `intervals.interval_over_items`
    high: float | None
    mean_response_length: float  # tokens
    majority_accuracy: float  # of always giving the most common label
    figures: tuple[SampleFigure, ...] = ()  # best, worst and maj of k = 2, 4 .. N samples, with intervals


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of one evaluation, all sets together. An item's score is the mean over its samples."""

    accuracy: float  # mean score
    low: float  # 95 % interval of the mean over items: Wilson's, or Student's where scores leave [0, 1]
    high: float
    num_items: int
    mean_response_length: float  # tokens
    examples: tuple[tuple[str, str, str, float], ...]  # prompt, response, label, score of a few items
    sets: tuple[SetResult, ...] = ()


@dataclass(frozen=True)
class Answered:
    """A set after generation and scoring, a tuple an item in each column."""

    name: str
    prompts: PromptBatch
    responses: tuple[tuple[str, ...], ...]
    lengths: tuple[tuple[int, ...], ...]  # tokens
    results: tuple[tuple[RewardResult, ...], ...]

    def scores(self) -> list[tuple[float, ...]]:
        """Return the scores of the samples that count, an entry an item; empty where all its samples are masked."""
        return [tuple(r.score for r in results if not is_masked(r.status)) for results in self.results]

    def answers(self) -> list[tuple[str, ...]]:
        """Return the answers that majorities count; entries as in `scores`."""
        return [
            tuple(answer_of(text) for text, r in zip(texts, results, strict=True) if not is_masked(r.status))
            for texts, results in zip(self.responses, self.results, strict=True)
        ]


def evaluate(
    sets: Sequence[EvaluationSet],
    generate: Callable[[PromptBatch], Sequence[Sequence[GeneratedSample]]],
    decode: Callable[[Sequence[int]], str],
    score: Callable[[list[RewardSample]], Sequence[RewardResult]],
) -> EvaluationResult:
    """All prompts are generated in one call, and all samples are scored in one.

    Raises ValueError when no sample of a set could be scored.
    """
    prompts = _join([evaluation_set.prompts for evaluation_set in sets])
    groups = generate(prompts)
    rows = [(i, sample) for i, group in enumerate(groups) for sample in group]
    texts = [decode(sample.token_ids) for _, sample in rows]
    results = score([_reward_sample(prompts, i, s, text) for (i, s), text in zip(rows, texts, strict=True)])
    answered, first_item, first_row = [], 0, 0
    for evaluation_set in sets:
        of_set = groups[first_item : first_item + len(evaluation_set.prompts)]
        counts = [len(group) for group in of_set]
        last_row = first_row + sum(counts)
        answered.append(
            Answered(
                evaluation_set.name,
                evaluation_set.prompts,
                _cut(texts[first_row:last_row], counts),
                tuple(tuple(len(sample.token_ids) for sample in group) for group in of_set),
                _cut(results[first_row:last_row], counts),
            )
        )
        first_item, first_row = first_item + len(of_set), last_row
    return summarize(answered)


def summarize(answered: Sequence[Answered]) -> EvaluationResult:
    """The figures of each set, and of all together."""
    sets = tuple(summarize_set(a) for a in answered)
    item_scores = [sum(scores) / len(scores) for a in answered for scores in a.scores() if scores]
    lengths = list(chain.from_iterable(length for a in answered for length in a.lengths))
    examples = tuple(chain.from_iterable(_examples(a, max(1, EXAMPLES_KEPT // len(answered))) for a in answered))
    result = accuracy_of(item_scores, lengths)
    return replace(result, examples=examples, sets=sets)


def accuracy_of(item_scores: Sequence[float], response_lengths: Sequence[int]) -> EvaluationResult:
    """`item_scores`: one mean score an item; `response_lengths`: tokens, one a sample.

    Scores that leave [0, 1] (rewards with terms) are no shares: their interval is Student's.
    """
    count = len(item_scores)
    accuracy = sum(item_scores) / count
    if all(0.0 <= score <= 1.0 for score in item_scores):
        low, high = wilson_interval(accuracy, count)
    else:
        low, high = interval_over_items([(score,) for score in item_scores]) or (-inf, inf)
    return EvaluationResult(accuracy, low, high, count, sum(response_lengths) / max(1, len(response_lengths)), ())


def summarize_set(answered: Answered) -> SetResult:
    """Raises ValueError when all of its samples were masked."""
    items = [scores for scores in answered.scores() if scores]
    statuses = Counter(r.status for results in answered.results for r in results if is_masked(r.status))
    if not items:
        raise ValueError(
            f"no sample of the evaluation set {answered.name!r} could be scored ({_counts(statuses)}); fix what the"
            " reward or the engines reported, or take the set out of the run."
        )
    num_samples = max(map(len, answered.results))
    interval = interval_over_items(items)
    lengths = list(chain.from_iterable(answered.lengths))
    return SetResult(
        name=answered.name,
        num_items=len(items),
        num_samples=num_samples,
        num_masked=statuses.total(),
        mean=_mean([_mean(scores) for scores in items]),
        std=_mean([sqrt(_mean([(score - _mean(scores)) ** 2 for score in scores])) for scores in items]),
        best=tuple(_best(items, num_samples)),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        mean_response_length=_mean(lengths),
        majority_accuracy=majority_accuracy(answered.prompts.labels),
        figures=sample_figures(answered.scores(), answered.answers()) if num_samples > 1 else (),
    )


def best_of(scores: Sequence[float], k: int) -> float:
    """Expected best of k of these scores, drawn without replacement: the unbiased estimate of best@k.

    For 0/1 scores it is pass@k of Chen et al. 2021, 1 - C(n - c, k) / C(n, k) with c right answers of n.
    """
    n = len(scores)
    assert 1 <= k <= n, f"best of {k} out of {n}"
    return sum(comb(i, k - 1) * score for i, score in enumerate(sorted(scores))) / comb(n, k)


def majority_accuracy(labels: Sequence[str]) -> float:
    """Accuracy of always giving the most common label: what is reached without reading the question."""
    assert labels, "no labels"
    return Counter(labels).most_common(1)[0][1] / len(labels)


def first_items(sets: Sequence[EvaluationSet], count: int | None) -> tuple[EvaluationSet, ...]:
    """The first `count` prompts of each set (None: all)."""
    return tuple(replace(s, prompts=_slice(s.prompts, count)) for s in sets)


def _best(items: Sequence[Sequence[float]], num_samples: int) -> list[tuple[int, float]]:
    """An item counts for k when it has k samples that do."""
    sizes = sorted({2**e for e in range(num_samples.bit_length())} | {num_samples})
    pairs = [(k, [best_of(scores, k) for scores in items if len(scores) >= k]) for k in sizes]
    return [(k, _mean(values)) for k, values in pairs if values]


def _reward_sample(prompts: PromptBatch, i: int, sample: GeneratedSample, text: str) -> RewardSample:
    return RewardSample(
        prompts.prompts[i],
        text,
        prompts.labels[i],
        prompts.sources[i],
        sample.finish_reason,
        len(sample.token_ids),
        prompts.extras[i],
    )


def _examples(answered: Answered, count: int) -> list[tuple[str, str, str, float]]:
    p = answered.prompts
    return [
        (prompt, response, label, result.score)
        for prompt, label, responses, results in zip(
            p.prompts, p.labels, answered.responses, answered.results, strict=True
        )
        for response, result in zip(responses, results, strict=True)
    ][:count]


def _cut(values: Sequence, counts: Sequence[int]) -> tuple:
    """`values` in pieces of `counts`."""
    rest = iter(values)
    return tuple(tuple(next(rest) for _ in range(count)) for count in counts)


def _join(batches: Sequence[PromptBatch]) -> PromptBatch:
    columns = [[getattr(batch, field.name) for batch in batches] for field in fields(PromptBatch)]
    return PromptBatch(*(tuple(chain.from_iterable(column)) for column in columns))


def _slice(p: PromptBatch, count: int | None) -> PromptBatch:
    return PromptBatch(*(getattr(p, field.name)[:count] for field in fields(PromptBatch)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _counts(statuses: Counter[str]) -> str:
    return ", ".join(f"{status} {count}" for status, count in statuses.most_common())
