"""Figures of answer files: score every response,
then the figures that a run's own evaluation has.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_megatron.agents.episode_batch import EpisodeRewardWeights, add_rewards
from rlhf_megatron.config.schema import DataConfig, RewardConfig, RewardTermConfig
from rlhf_megatron.controller.evaluation.confidence_intervals import compute_item_interval
from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    EvaluationResult,
    ScoredEvaluationSet,
    summarize_evaluation,
)
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.extra_columns import ExtraColumnWriter, describe_left_out_columns
from rlhf_megatron.data.response_texts import find_response_prefix
from rlhf_megatron.jobs.generation.answer_file import read_answer_rows
from rlhf_megatron.rewards.scorers.reward_types import (
    OK,
    BadResultError,
    RewardResult,
    RewardSample,
    is_masked,
    make_masked_result,
)
from rlhf_megatron.rewards.service.response_reading import describe_response_reading
from rlhf_megatron.rewards.service.reward_components import get_main_score
from rlhf_megatron.rewards.service.reward_scorer import (
    check_reward_labels,
    check_sources_exist,
    make_reward_scorer,
)

logger = logging.getLogger(__name__)


def score_answer_file(
    answers_path: Path,
    reward_config: RewardConfig,
    log_path: Path,
    data: DataConfig | None = None,
    reward_model: RewardTermConfig | None = None,
    report_line: Callable[[str], object] = lambda line: None,
    labels_are_checked: bool = False,
    episode_weights: EpisodeRewardWeights | None = None,
) -> list[ScoredEvaluationSet]:
    """Score every response in a file of answers, and return one set for each data source.

    `log_path` is the file for the output of rewards that run in processes. With `data`, files of
    other programs with these keys are read too. `reward_model` is a reward term that asks the
    servers of a reward model. `report_line` is called with what is to be said of the responses that
    the rewards read. With `labels_are_checked` the caller has checked the labels, before a model
    answered. `episode_weights` weigh the environment's reward of an episode and the scorers'; None:
    the environment's alone, where there is one. Raise ConfigError and ValueError for a wrong reward
    or file, RewardErrorRateError where too many rewards fail.
    """
    extra_writer = ExtraColumnWriter(None if data is None else data.extra_columns)
    rows = list(read_answer_rows(answers_path, data, extra_writer, is_scored=True))
    extra_writer.check_named_columns()
    if note := describe_left_out_columns(extra_writer.list_left_out_columns()):
        logger.warning(note)
    if not rows:
        raise ValueError(f"{answers_path} has no answers.")
    check_sources_exist(reward_config, {row["source"] for row in rows})
    if not labels_are_checked:
        check_reward_labels(
            reward_config, ((row["source"], row["answer"], row.get("extra", "")) for row in rows)
        )
    samples = [sample for row in rows for sample in _make_reward_samples(row)]
    prefixes = sorted({sample.response_prefix for sample in samples})
    token_names = [*dict.fromkeys(name for s in samples for _, name in s.special_tokens)]
    with make_reward_scorer(reward_config, log_path, reward_model) as scorer:
        for line in describe_response_reading([*scorer.components], prefixes, token_names):
            report_line(line)
        results = iter(score_responses(rows, samples, scorer, episode_weights))
    by_source: dict[str, list[tuple[dict[str, Any], tuple[RewardResult, ...]]]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(
            (row, tuple(next(results) for _ in row["responses"]))
        )
    return [_make_scored_set(name, pairs) for name, pairs in by_source.items()]


def score_responses(
    rows: Sequence[dict[str, Any]],
    samples: Sequence[RewardSample],
    score: Callable[[list[RewardSample]], Sequence[RewardResult]],
    episode_weights: EpisodeRewardWeights | None,
) -> list[RewardResult]:
    """Return the reward of each response of the rows. Of episodes the column `episodes` has what
    the environment says (see `episode_job`), and the scorers are asked where they have a say.
    """
    weights = episode_weights or EpisodeRewardWeights(1.0, 0.0)
    episodes = [
        episode for row in rows for episode in row.get("episodes") or [None] * len(row["responses"])
    ]
    needs_scorer = [
        episode is None
        or (episode["status"] == OK and (episode["reward"] is None or weights.scorer_weight != 0.0))
        for episode in episodes
    ]
    samples_to_score = [
        sample for sample, is_asked in zip(samples, needs_scorer, strict=True) if is_asked
    ]
    scored = iter(score(samples_to_score) if samples_to_score else [])
    results = []
    for episode, is_asked in zip(episodes, needs_scorer, strict=True):
        scorer_result = next(scored) if is_asked else None
        if episode is None:
            assert scorer_result is not None, "a single answer is scored"
            results.append(scorer_result)
        elif episode["status"] != OK:
            results.append(RewardResult(0.0, episode["status"], error=episode.get("error", "")))
        elif scorer_result is not None and is_masked(scorer_result.status):
            results.append(scorer_result)
        else:
            results.append(_judge_described_episode(episode, scorer_result, weights))
    return results


def _judge_described_episode(
    episode: Mapping[str, Any], scorer_result: RewardResult | None, weights: EpisodeRewardWeights
) -> RewardResult:
    """Return the reward of an episode that counts, masked where it is out of range."""
    turns_reward = sum(episode["turn_rewards"])
    try:
        return add_rewards(episode["reward"], turns_reward, scorer_result, weights)
    except BadResultError as error:
        return make_masked_result("environment_failed", str(error))


def _make_reward_samples(row: dict[str, Any]) -> list[RewardSample]:
    """Return the samples to score for a row, one for each response. A row without special tokens or
    prefix is of another program, or has none: its prompt may end with a tag of thoughts.
    """
    special_tokens = [
        tuple((place["position"], place["token"]) for place in places)
        for places in row.get("special_tokens") or [()] * len(row["responses"])
    ]
    columns = zip(
        row["responses"], row["finish_reasons"], row["num_tokens"], special_tokens, strict=True
    )
    of_prompt = {
        "prompt": row["prompt"],
        "label": row["answer"],
        "source": row["source"],
        "extra": row.get("extra", ""),
        "response_prefix": row.get("response_prefix") or find_response_prefix(row["prompt"]),
    }
    return [
        RewardSample(
            response=text,
            finish_reason=finish_reason,
            num_tokens=num_tokens,
            special_tokens=places,
            **of_prompt,
        )
        for text, finish_reason, num_tokens, places in columns
    ]


def _make_scored_set(
    source_name: str, scored_rows: Sequence[tuple[dict[str, Any], tuple[RewardResult, ...]]]
) -> ScoredEvaluationSet:
    """Return the set of a source from its rows and the results of their responses."""
    rows = [row for row, _ in scored_rows]
    prompts = PromptBatch(
        prompt_ids=tuple(() for _ in rows),
        prompts=tuple(row["prompt"] for row in rows),
        labels=tuple(row["answer"] for row in rows),
        sources=tuple(row["source"] for row in rows),
        group_ids=tuple(row["index"] for row in rows),
        extras=tuple(row.get("extra", "") for row in rows),
    )
    return ScoredEvaluationSet(
        source_name,
        prompts,
        tuple(tuple(row["responses"]) for row in rows),
        tuple(tuple(row["num_tokens"]) for row in rows),
        tuple(results for _, results in scored_rows),
    )


def format_evaluation_table(result: EvaluationResult) -> list[str]:
    """Return the lines of a table for a terminal: one for each set, with figures of several samples
    below, and one over all sets.
    """
    width = max(len(s.name) for s in result.sets)
    lines = [f"{'set':<{width}}  items    N    mean  95 % interval     tokens  left out"]
    for s in result.sets:
        interval = (
            f"[{s.low:.4f}, {s.high:.4f}]" if s.low is not None and s.high is not None else "-"
        )
        lines.append(
            f"{s.name:<{width}}  {s.num_items:5d} {s.num_samples:4d}  {s.mean:6.4f}  {interval:16}"
            f" {s.mean_response_length:7.1f}  {s.num_masked:8d}"
        )
        for f in s.figures:
            interval = (
                f"[{f.low:.4f}, {f.high:.4f}]" if f.low is not None and f.high is not None else "-"
            )
            lines.append(
                f"{'':<{width}}  {f.name + '@' + str(f.k):>10}  {f.value:6.4f}  {interval}"
            )
    if len(result.sets) > 1:
        lines.append(
            f"all: {result.accuracy:.4f} [{result.low:.4f}, {result.high:.4f}] over"
            f" {result.num_items} items"
        )
    return lines


def convert_evaluation_to_json(scored_sets: Sequence[ScoredEvaluationSet]) -> dict[str, Any]:
    """Return all figures, and for each set the scores of its responses in the order of the file's
    rows; a masked score is None.
    """
    result = summarize_evaluation(scored_sets)
    sets = [
        asdict(s) | {"scores": [[_extract_valid_score(r) for r in item] for item in a.results]}
        for s, a in zip(result.sets, scored_sets, strict=True)
    ]
    figures = {"mean": result.accuracy, "low": result.low, "high": result.high, "sets": sets}
    return figures if result.reward is None else figures | {"reward": result.reward}


def _extract_valid_score(result: RewardResult) -> float | None:
    """Return the score of a result, or None if it is masked."""
    return None if is_masked(result.status) else get_main_score(result)


def compare_answers(
    first_sets: Sequence[ScoredEvaluationSet], second_sets: Sequence[ScoredEvaluationSet]
) -> tuple[int, float, tuple[float, float] | None]:
    """Return (number of items, mean difference, its 95 % interval or None) of the second file minus
    the first, over the prompts that both answered.

    Paired: an item's difference is that of its two mean scores, and the interval is Student's over
    items. Raise ValueError where the two share no prompt.
    """
    means = [_compute_item_means(sets) for sets in (first_sets, second_sets)]
    shared = [key for key in means[0] if key in means[1]]
    if not shared:
        raise ValueError(
            "the two files have no prompt of the same source in common; nothing can be compared."
        )
    differences = [means[1][key] - means[0][key] for key in shared]
    interval = (
        compute_item_interval([(difference,) for difference in differences])
        if any(differences)
        else (0.0, 0.0)
    )
    return len(shared), sum(differences) / len(differences), interval


def _compute_item_means(
    sets: Sequence[ScoredEvaluationSet],
) -> dict[tuple[str, str, str, int], float]:
    """Return the mean score of each item that has scores, by its source, prompt and label, and by
    the number of items before it that have the same: games may begin with one prompt.
    """
    means = {}
    num_seen: Counter[tuple[str, str, str]] = Counter()
    for scored_set in sets:
        prompts = scored_set.prompts
        scores_by_item = scored_set.collect_valid_scores()
        for prompt, label, scores in zip(
            prompts.prompts, prompts.labels, scores_by_item, strict=True
        ):
            item = (scored_set.name, prompt, label)
            if scores:
                means[(*item, num_seen[item])] = sum(scores) / len(scores)
            num_seen[item] += 1
    return means
