"""Finished episodes as a RolloutBatch, one row an episode, and what they are worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.agents.episode_messages import EPISODE_ENDS
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.algorithms.metric_names import make_single_key_part
from rlhf_megatron.config.rules.part_rules import MAIN_REWARD
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, VersionSpans, compute_offsets
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rewards.scorers.reward_types import (
    TIMEOUT,
    BadResultError,
    RewardResult,
    is_masked,
    make_masked_result,
)
from rlhf_megatron.rollout.engine_interface import UNSYNCED, GeneratedSample

ENVIRONMENT_PART = "environment"  # the part of a reward that the environment gives


@dataclass(frozen=True)
class EpisodeRewardWeights:
    """What environment and scorers count in the reward of an episode."""

    reward_weight: float  # of the environment
    scorer_weight: float  # of the section `reward`, where the environment rewards too
    # True: a reward model on the ranks adds its scores behind the reward stage
    has_later_scores: bool = False


def collect_episode_batch(
    prompts: PromptBatch,
    groups: Sequence[Sequence[Episode]],
    tokenizer: Tokenizer,
    policy_version: int,
) -> RolloutBatch:
    """Join the episodes of all groups to one ragged batch, in the order of the groups. What trains
    is what was sampled: the mask is True on the tokens of turns alone. The response of a row is its
    last answer as text, which is what scorers read. All groups must have as many episodes.
    `policy_version` is the version of the weights that the engines serve, for episodes without a
    turn.
    """
    flat = [(row, episode) for row, group in enumerate(groups) for episode in group]
    num_episodes = len(groups[0])
    ids = [
        prompts.group_ids[row] * num_episodes + place % num_episodes
        for place, (row, _) in enumerate(flat)
    ]
    episode_ids = torch.tensor(ids, dtype=torch.int64)
    episodes = [episode for _, episode in flat]
    rows = [row for row, _ in flat]
    masks = [make_response_mask(episode) for episode in episodes]
    return RolloutBatch(
        offsets=compute_offsets(torch.tensor([len(episode.token_ids) for episode in episodes])),
        token_ids=torch.cat([episode.token_ids for episode in episodes]),
        response_mask=torch.cat(masks),
        rollout_log_probs=torch.cat(
            [spread_log_probs(episode, mask) for episode, mask in zip(episodes, masks, strict=True)]
        ),
        group_ids=torch.tensor([prompts.group_ids[row] for row in rows], dtype=torch.int64),
        sample_ids=episode_ids,
        routes=("",) * len(flat),
        policy_versions=torch.tensor(
            [
                episode.turns[0].policy_version if episode.turns else policy_version
                for episode in episodes
            ],
            dtype=torch.int64,
        ),
        finish_reasons=tuple(
            episode.turns[-1].finish_reason if episode.turns else "abort" for episode in episodes
        ),
        prompts=tuple(prompts.prompts[row] for row in rows),
        responses=tuple(decode_last_answer(episode, tokenizer) for episode in episodes),
        labels=tuple(prompts.labels[row] for row in rows),
        sources=tuple(prompts.sources[row] for row in rows),
        extras=tuple(prompts.extras[row] for row in rows),
        version_spans=tuple(join_version_spans(episode) for episode in episodes),
        num_cached_tokens=torch.tensor(
            [sum(turn.num_cached_tokens for turn in episode.turns) for episode in episodes],
            dtype=torch.int64,
        ),
        num_retractions=torch.tensor(
            [sum(turn.num_retractions for turn in episode.turns) for episode in episodes],
            dtype=torch.int64,
        ),
        episode_ids=episode_ids,
        turn_spans=tuple(
            tuple((turn.begin, turn.end) for turn in episode.turns) for episode in episodes
        ),
        episode_ends=tuple(episode.end for episode in episodes),
        episode_rewards=torch.tensor(
            [nan if episode.reward is None else episode.reward for episode in episodes],
            dtype=torch.float32,
        ),
        turn_rewards=tuple(episode.turn_rewards for episode in episodes),
        conversations=tuple(episode.messages for episode in episodes),
    )


def make_response_mask(episode: Episode) -> Tensor:
    """Return [T] bool: True on the tokens that the policy sampled."""
    mask = torch.zeros(len(episode.token_ids), dtype=torch.bool)
    for turn in episode.turns:
        mask[turn.begin : turn.end] = True
    return mask


def spread_log_probs(episode: Episode, mask_T: Tensor) -> Tensor:
    """Return [T] float32: the engine's log-probs at the sampled tokens, 0 elsewhere."""
    spread = torch.zeros(len(mask_T), dtype=torch.float32)
    spread[mask_T] = episode.log_probs
    return spread


def join_version_spans(episode: Episode) -> VersionSpans:
    """Return which version sampled which of the episode's sampled tokens, counted over all turns;
    () where all are of the first turn's version.
    """
    spans: list[tuple[int, int, int]] = []
    num_before = 0
    for turn in episode.turns:
        num_tokens = turn.end - turn.begin
        of_turn = turn.version_spans or ((turn.policy_version, 0, num_tokens),)
        for version, begin, end in of_turn:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], num_before + end)
            else:
                spans.append((version, num_before + begin, num_before + end))
        num_before += num_tokens
    return () if len(spans) <= 1 else tuple(spans)


def make_sampled_tokens(episode: Episode) -> GeneratedSample:
    """Return all that the policy sampled in an episode as one sample, for an evaluation."""
    mask = make_response_mask(episode)
    turns = episode.turns
    return GeneratedSample(
        tuple(episode.token_ids[mask].tolist()),
        tuple(episode.log_probs.tolist()),
        "stop" if turns and turns[-1].finish_reason == "stop" else "length",
        turns[0].policy_version if turns else UNSYNCED,
    )


def decode_last_answer(episode: Episode, tokenizer: Tokenizer) -> str:
    """Return the text of the last turn, "" without turns."""
    if not episode.turns:
        return ""
    last = episode.turns[-1]
    return tokenizer.decode(episode.token_ids[last.begin : last.end].tolist())


def judge_episodes(
    episodes: Sequence[Episode],
    scorer_results: Sequence[RewardResult | None],
    weights: EpisodeRewardWeights,
) -> list[RewardResult]:
    """Return the reward of each episode. `scorer_results`: what the section `reward` says of it;
    None: it was not asked (see `needs_scorers`).

    An episode whose end is not the policy's doing is masked. Else its reward is reward_weight x
    (the environment's + those of its turns) + scorer_weight x the scorers'. Where the environment
    gives no reward of the episode, the scorers' counts whole, beside reward_weight x those of its
    turns.
    """
    return [
        _judge_episode(episode, result, weights)
        for episode, result in zip(episodes, scorer_results, strict=True)
    ]


def needs_scorers(episode: Episode, weights: EpisodeRewardWeights) -> bool:
    """Return whether the section `reward` has a say in the episode's reward."""
    if not episode.is_scored or episode.is_policy_timeout:
        return False
    return episode.reward is None or weights.scorer_weight != 0.0


def _judge_episode(
    episode: Episode, scorer_result: RewardResult | None, weights: EpisodeRewardWeights
) -> RewardResult:
    """Return the reward of one episode; see `judge_episodes`. An environment's reward that is too
    large for a score is a failure of the environment.
    """
    if not episode.is_scored:
        return make_masked_result(episode.end, episode.error)
    if episode.is_policy_timeout:
        return RewardResult(0.0, TIMEOUT)
    if scorer_result is not None and is_masked(scorer_result.status):
        return scorer_result
    try:
        turns_reward = sum(episode.turn_rewards)
        return add_rewards(episode.reward, turns_reward, scorer_result, weights)
    except BadResultError as error:
        return make_masked_result("environment_failed", f"{episode.environment}: {error}")


def add_rewards(
    episode_reward: float | None,
    turns_reward: float,
    scorer_result: RewardResult | None,
    weights: EpisodeRewardWeights,
) -> RewardResult:
    """Return the weighted sum of what the environment gives for an episode and for its turns, and
    of what the scorers give. Where an environment rewards the episode, its own reward is the main
    one. Raise BadResultError for a sum out of range.
    """
    if episode_reward is None:
        assert scorer_result is not None, "the scorers are asked where the environment is silent"
        if not turns_reward:
            return scorer_result
        parts = {**scorer_result.parts, ENVIRONMENT_PART: turns_reward}
        parts.setdefault(MAIN_REWARD, scorer_result.score)
        score = weights.reward_weight * turns_reward + scorer_result.score
        return replace(scorer_result, score=score, parts=parts)
    own = episode_reward + turns_reward
    score = weights.reward_weight * own
    if scorer_result is None:
        is_whole = weights.reward_weight == 1.0 and not weights.has_later_scores
        main_parts = {} if is_whole else {MAIN_REWARD: own}
        return RewardResult(score, parts={ENVIRONMENT_PART: own, **main_parts})
    parts = {**scorer_result.parts, ENVIRONMENT_PART: own, MAIN_REWARD: own}
    return replace(
        scorer_result, score=score + weights.scorer_weight * scorer_result.score, parts=parts
    )


def make_process_rewards(
    batch: RolloutBatch, rewards: Sequence[RewardResult], reward_weight: float
) -> Tensor:
    """Return [T] float32: the weighted reward of each turn at its last token, 0 elsewhere. The rest
    of a sample's reward is paid at its last token.
    """
    assert batch.turn_rewards is not None and batch.turn_spans is not None
    process_rewards = torch.zeros(batch.num_tokens, dtype=torch.float32)
    begins = batch.offsets[:-1].tolist()
    rows = zip(begins, batch.turn_spans, batch.turn_rewards, rewards, strict=True)
    for begin, spans, turn_rewards, result in rows:
        if is_masked(result.status) or result.status == TIMEOUT or not turn_rewards:
            continue
        for (_, end), reward in zip(spans, turn_rewards, strict=True):
            process_rewards[begin + end - 1] = reward_weight * reward
    return process_rewards


def compute_episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics `agents/*` of a step's episodes."""
    if not episodes:
        return {}
    turns = [turn for episode in episodes for turn in episode.turns]
    num_turns = np.array([len(episode.turns) for episode in episodes], np.float64)
    ends = Counter(episode.end for episode in episodes)
    metrics = {
        "agents/num_episodes": float(len(episodes)),
        "agents/turns/mean": float(num_turns.mean()),
        "agents/turns/max": float(num_turns.max()),
        "agents/episode_seconds/mean": float(np.mean([e.seconds for e in episodes])),
        "agents/episode_seconds/max": float(max(e.seconds for e in episodes)),
        "agents/sampled_tokens/mean": float(np.mean([e.num_sampled_tokens for e in episodes])),
        "agents/environment_tokens/mean": float(
            np.mean([_count_environment_tokens(episode) for episode in episodes])
        ),
        "agents/restarts": float(sum(episode.num_restarts for episode in episodes)),
        "agents/joins_refused": float(ends["refused"]),
    }
    for end in EPISODE_ENDS:
        metrics[f"agents/ends/{end}"] = ends[end] / len(episodes)
    if turns:
        metrics |= {
            "agents/turn_tokens/mean": float(np.mean([turn.end - turn.begin for turn in turns])),
            "agents/turn_seconds/mean": float(np.mean([turn.engine_seconds for turn in turns])),
            "agents/environment_seconds/mean": float(
                np.mean([turn.environment_seconds for turn in turns])
            ),
        }
    return metrics | _compute_environment_metrics(episodes)


def _count_environment_tokens(episode: Episode) -> int:
    """Return the number of tokens behind the first prompt that the policy did not sample."""
    return len(episode.token_ids) - episode.num_prompt_tokens - episode.num_sampled_tokens


def _compute_environment_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean of each metric that environments have reported, over the episodes that have
    it.
    """
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            key = f"agents/environment/{make_single_key_part(name)}"
            values.setdefault(key, []).append(value)
    return {name: float(np.mean(numbers)) for name, numbers in sorted(values.items())}
