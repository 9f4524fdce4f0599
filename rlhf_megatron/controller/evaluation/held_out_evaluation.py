"""Held-out sets: what is asked of the engines, and accuracy, mean@N and best@N with
their intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import comb, inf, sqrt

from rlhf_megatron.config.rules.part_rules import MAIN_REWARD
from rlhf_megatron.controller.evaluation.confidence_intervals import (
    compute_item_interval,
    compute_wilson_interval,
)
from rlhf_megatron.controller.evaluation.sample_figures import (
    SampleFigure,
    compute_sample_figures,
    extract_final_answer,
)
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.rewards.scorers.reward_types import RewardResult, RewardSample, is_masked
from rlhf_megatron.rewards.service.reward_components import get_main_score
from rlhf_megatron.rollout.engine_interface import GeneratedSample

MAX_EXAMPLES = 8


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out prompts that one row of figures tells of."""

    name: str
    prompts: PromptBatch  # group ids are unique over all sets


@dataclass(frozen=True)
class SetResult:
    """Figures of one evaluation set. N = `num_samples`; only `mean_response_length` counts
    masked samples.
    """

    name: str
    num_items: int  # with at least one sample that counts
    num_samples: int  # asked of each item
    num_masked: int  # samples left out
    mean: float  # mean@N: mean over items of the mean score of an item's samples
    std: float  # std@N: mean over items of the standard deviation of an item's scores (divisor N)
    # (k, best@k) for k = 1, 2, 4 .. N: expected best of k samples of an item
    best: tuple[tuple[int, float], ...]
    low: float | None  # 95 % interval of `mean`, see `confidence_intervals.compute_item_interval`
    high: float | None
    mean_response_length: float  # tokens
    majority_accuracy: float  # of always giving the most common label
    # best, worst and maj of k = 2, 4 .. N samples, with intervals
    figures: tuple[SampleFigure, ...] = ()
    # mean over items of the mean whole reward of an item's samples; None where that is the score
    reward: float | None = None


@dataclass(frozen=True)
class HeldOutExample:
    """The first sample of an item of an evaluation set, for people to look at."""

    set_name: str
    item: int  # index in the set, the same in every evaluation
    prompt: str
    response: str
    label: str
    score: float | None  # main reward; None, here and below, where the status is masked
    reward: float | None  # whole reward
    status: str
    parts: Mapping[str, float]  # named components of the reward
    num_tokens: int  # of the response


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of one evaluation, all sets together. A sample's score is its main reward
    (`get_main_score`), which says whether the answer is right; an item's score is the mean
    over its samples.
    """

    accuracy: float  # mean score
    # 95 % interval of the mean over items: Wilson's, or Student's where scores are graded
    low: float
    high: float
    num_items: int
    mean_response_length: float  # tokens
    examples: tuple[HeldOutExample, ...]  # of the first items of each set
    sets: tuple[SetResult, ...] = ()
    # mean over items of the whole reward, with terms; None where that is the score
    reward: float | None = None
    has_binary_scores: bool = False  # all scores are 0 or 1: `accuracy` is one


@dataclass(frozen=True)
class ScoredEvaluationSet:
    """A set after generation and scoring, a tuple an item in each column."""

    name: str
    prompts: PromptBatch
    responses: tuple[tuple[str, ...], ...]
    lengths: tuple[tuple[int, ...], ...]  # tokens
    results: tuple[tuple[RewardResult, ...], ...]

    def collect_valid_scores(self) -> list[tuple[float, ...]]:
        """Return a tuple for each item with the scores, which are main rewards, of its samples that
        are not masked.
        """
        return [
            tuple(get_main_score(r) for r in results if not is_masked(r.status))
            for results in self.results
        ]

    @property
    def has_separate_main_reward(self) -> bool:
        """Return whether the whole reward of some sample is more than its main reward."""
        return any(MAIN_REWARD in result.parts for results in self.results for result in results)

    def compute_item_rewards(self) -> list[float]:
        """Return the mean whole reward of each item that has samples that count."""
        items = [
            [result.score for result in results if not is_masked(result.status)]
            for results in self.results
        ]
        return [_compute_mean(rewards) for rewards in items if rewards]

    def collect_valid_answers(self) -> list[tuple[str, ...]]:
        """Return a tuple for each item with the final answers of its samples that are not masked,
        for majorities.
        """
        return [
            tuple(
                extract_final_answer(text)
                for text, r in zip(texts, results, strict=True)
                if not is_masked(r.status)
            )
            for texts, results in zip(self.responses, self.results, strict=True)
        ]


def evaluate_sets(
    sets: Sequence[EvaluationSet],
    generate: Callable[[PromptBatch], Sequence[Sequence[GeneratedSample]]],
    reader: ResponseReader,
    score: Callable[[list[RewardSample]], Sequence[RewardResult]],
    num_examples: int = MAX_EXAMPLES,
) -> EvaluationResult:
    """Generate the samples of all prompts in one call, score all of them in one call, and return
    the figures of each set and of all together, with about `num_examples` examples. `reader`
    decodes the responses.

    Raise ValueError when no sample of a set could be scored.
    """
    prompts = _concat_prompt_batches([evaluation_set.prompts for evaluation_set in sets])
    groups = generate(prompts)
    rows = [(i, sample) for i, group in enumerate(groups) for sample in group]
    texts = [reader.tokenizer.decode(sample.token_ids) for _, sample in rows]
    results = score(
        [
            _make_reward_sample(prompts, i, sample, text, reader)
            for (i, sample), text in zip(rows, texts, strict=True)
        ]
    )
    answered = []
    first_item = 0
    first_row = 0
    for evaluation_set in sets:
        of_set = groups[first_item : first_item + len(evaluation_set.prompts)]
        counts = [len(group) for group in of_set]
        last_row = first_row + sum(counts)
        answered.append(
            ScoredEvaluationSet(
                evaluation_set.name,
                evaluation_set.prompts,
                _split_by_counts(texts[first_row:last_row], counts),
                tuple(tuple(len(sample.token_ids) for sample in group) for group in of_set),
                _split_by_counts(results[first_row:last_row], counts),
            )
        )
        first_item = first_item + len(of_set)
        first_row = last_row
    return summarize_evaluation(answered, num_examples)


def summarize_evaluation(
    scored_sets: Sequence[ScoredEvaluationSet], num_examples: int = MAX_EXAMPLES
) -> EvaluationResult:
    """Return the figures of each set and of all sets together. The examples are equally many of
    each set, `num_examples` in all where that is no less than one of each; none for 0.
    """
    sets = tuple(summarize_set(a) for a in scored_sets)
    item_scores = [
        sum(scores) / len(scores)
        for a in scored_sets
        for scores in a.collect_valid_scores()
        if scores
    ]
    lengths = list(chain.from_iterable(length for a in scored_sets for length in a.lengths))
    num_of_set = max(1, num_examples // len(scored_sets)) if num_examples else 0
    examples = tuple(chain.from_iterable(_collect_examples(a, num_of_set) for a in scored_sets))
    scores = {score for a in scored_sets for item in a.collect_valid_scores() for score in item}
    has_rewards = any(a.has_separate_main_reward for a in scored_sets)
    rewards = list(chain.from_iterable(a.compute_item_rewards() for a in scored_sets))
    reward = _compute_mean(rewards) if has_rewards else None
    result = compute_accuracy(item_scores, lengths, has_binary_scores=scores <= {0.0, 1.0})
    return replace(result, examples=examples, sets=sets, reward=reward)


def compute_accuracy(
    item_scores: Sequence[float], response_lengths: Sequence[int], *, has_binary_scores: bool
) -> EvaluationResult:
    """Return the accuracy with its interval and the mean response length, without examples and
    sets. `item_scores`: the mean score of each item; `response_lengths`: the tokens of each sample;
    `has_binary_scores`: each sample's score is 0 or 1.

    Where scores are graded the mean is no share, and its interval is Student's, as that of a set. A
    single item has none: Wilson's bounds any mean of scores in [0, 1].
    """
    count = len(item_scores)
    accuracy = sum(item_scores) / count
    interval = None
    if not has_binary_scores:
        interval = compute_item_interval([(score,) for score in item_scores])
    if interval is None:
        is_in_unit_interval = all(0.0 <= score <= 1.0 for score in item_scores)
        interval = compute_wilson_interval(accuracy, count) if is_in_unit_interval else (-inf, inf)
    low, high = interval
    return EvaluationResult(
        accuracy,
        low,
        high,
        count,
        sum(response_lengths) / max(1, len(response_lengths)),
        (),
        has_binary_scores=has_binary_scores,
    )


def summarize_set(scored_set: ScoredEvaluationSet) -> SetResult:
    """Return the figures of one set. Raise ValueError when all of its samples were masked."""
    items = [scores for scores in scored_set.collect_valid_scores() if scores]
    statuses = Counter(
        r.status for results in scored_set.results for r in results if is_masked(r.status)
    )
    if not items:
        raise ValueError(
            f"no sample of the evaluation set {scored_set.name!r} could be scored"
            f" ({_format_status_counts(statuses)}); fix what the reward or the engines reported,"
            " or take the set out of the run."
        )
    num_samples = max(map(len, scored_set.results))
    interval = compute_item_interval(items)
    lengths = list(chain.from_iterable(scored_set.lengths))
    return SetResult(
        name=scored_set.name,
        num_items=len(items),
        num_samples=num_samples,
        num_masked=statuses.total(),
        mean=_compute_mean([_compute_mean(scores) for scores in items]),
        std=_compute_mean(
            [
                sqrt(_compute_mean([(score - _compute_mean(scores)) ** 2 for score in scores]))
                for scores in items
            ]
        ),
        best=tuple(_compute_best_of_k(items, num_samples)),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        mean_response_length=_compute_mean(lengths),
        majority_accuracy=compute_majority_accuracy(scored_set.prompts.labels),
        figures=compute_sample_figures(
            scored_set.collect_valid_scores(), scored_set.collect_valid_answers()
        )
        if num_samples > 1
        else (),
        reward=_compute_mean(scored_set.compute_item_rewards())
        if scored_set.has_separate_main_reward
        else None,
    )


def estimate_best_of_k(scores: Sequence[float], k: int) -> float:
    """Return the expected best of k of these scores, drawn without replacement: the unbiased
    estimate of best@k.

    For 0/1 scores it is pass@k of Chen et al. 2021, 1 - C(n - c, k) / C(n, k) with c right answers
    of n.
    """
    n = len(scores)
    assert 1 <= k <= n, f"best of {k} out of {n}"
    return sum(comb(i, k - 1) * score for i, score in enumerate(sorted(scores))) / comb(n, k)


def compute_majority_accuracy(labels: Sequence[str]) -> float:
    """Return the accuracy of always giving the most common label, which needs no reading of the
    question.
    """
    assert labels, "no labels"
    return Counter(labels).most_common(1)[0][1] / len(labels)


def limit_prompts(
    sets: Sequence[EvaluationSet], num_prompts: int | None
) -> tuple[EvaluationSet, ...]:
    """Return each set with its first `num_prompts` prompts (None: all)."""
    return tuple(replace(s, prompts=_slice_prompt_batch(s.prompts, num_prompts)) for s in sets)


def _compute_best_of_k(
    item_scores: Sequence[Sequence[float]], num_samples: int
) -> list[tuple[int, float]]:
    """Return (k, mean best@k over items) for k = 1, 2, 4 ... and `num_samples`. An item counts for
    k when it has k valid samples.
    """
    sizes = sorted({2**e for e in range(num_samples.bit_length())} | {num_samples})
    pairs = [
        (k, [estimate_best_of_k(scores, k) for scores in item_scores if len(scores) >= k])
        for k in sizes
    ]
    return [(k, _compute_mean(values)) for k, values in pairs if values]


def _make_reward_sample(
    prompts: PromptBatch,
    prompt_index: int,
    sample: GeneratedSample,
    text: str,
    reader: ResponseReader,
) -> RewardSample:
    """Return the input of the reward function for one sample of a prompt."""
    return RewardSample(
        prompts.prompts[prompt_index],
        text,
        prompts.labels[prompt_index],
        prompts.sources[prompt_index],
        sample.finish_reason,
        len(sample.token_ids),
        prompts.extras[prompt_index],
        reader.find_prefix(prompts.prompts[prompt_index]),
        reader.locate_special_tokens(sample.token_ids, text),
    )


def _collect_examples(scored_set: ScoredEvaluationSet, num_items: int) -> list[HeldOutExample]:
    """Return the first sample of each of the first items of a set."""
    prompts = scored_set.prompts
    examples = []
    for item in range(min(num_items, len(prompts))):
        if not scored_set.results[item]:
            continue
        result = scored_set.results[item][0]
        examples.append(
            HeldOutExample(
                set_name=scored_set.name,
                item=item,
                prompt=prompts.prompts[item],
                response=scored_set.responses[item][0],
                label=prompts.labels[item],
                score=None if is_masked(result.status) else get_main_score(result),
                reward=None if is_masked(result.status) else result.score,
                status=result.status,
                parts=dict(result.parts),
                num_tokens=scored_set.lengths[item][0],
            )
        )
    return examples


def _split_by_counts(values: Sequence, counts: Sequence[int]) -> tuple:
    """Split `values` into consecutive tuples of these lengths."""
    rest = iter(values)
    return tuple(tuple(next(rest) for _ in range(count)) for count in counts)


def _concat_prompt_batches(batches: Sequence[PromptBatch]) -> PromptBatch:
    """Join the batches, column by column."""
    columns = [[getattr(batch, field.name) for batch in batches] for field in fields(PromptBatch)]
    return PromptBatch(*(tuple(chain.from_iterable(column)) for column in columns))


def _slice_prompt_batch(prompts: PromptBatch, num_prompts: int | None) -> PromptBatch:
    """Return the first `num_prompts` prompts (None: all)."""
    return PromptBatch(
        *(getattr(prompts, field.name)[:num_prompts] for field in fields(PromptBatch))
    )


def _compute_mean(values: Sequence[float]) -> float:
    """Return the mean of the values, of which there must be at least one."""
    return sum(values) / len(values)


def _format_status_counts(statuses: Counter[str]) -> str:
    """Return the statuses with their counts as text, the most common first."""
    return ", ".join(f"{status} {count}" for status, count in statuses.most_common())
