"""Episodes as rows of a batch, and what they are worth: all expectations by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from episode_samples import make_episode, make_prompts, make_turn
from places import MODEL

from rlhf_megatron.agents.episode_batch import (
    EpisodeRewardWeights,
    collect_episode_batch,
    judge_episodes,
    make_process_rewards,
    make_sampled_tokens,
    needs_scorers,
)
from rlhf_megatron.agents.episode_record import Episode, EpisodeTokens
from rlhf_megatron.algorithms.advantages.advantage_estimator import AdvantageInputs
from rlhf_megatron.algorithms.advantages.gae import GAEParams, gae
from rlhf_megatron.algorithms.kl_in_reward import make_token_rewards
from rlhf_megatron.config.schema import CheckConfig, RewardModelConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    assign_token_versions,
    compute_engine_metrics,
    compute_version_metrics,
)
from rlhf_megatron.controller.observe.metrics.mismatch_check import (
    MismatchCheck,
    make_mismatch_step,
)
from rlhf_megatron.controller.scheduler.model_rewards import ModelRewardScorer
from rlhf_megatron.controller.scheduler.scored_samples import (
    make_reward_samples,
    make_scored_batch,
)
from rlhf_megatron.data.batch import RolloutBatch, TrainBatch, add_columns, select_samples
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers.reward_types import MALFORMED, MASKED, TIMEOUT, RewardResult
from rlhf_megatron.rollout.engine_interface import GeneratedSample, VersionSpan

TOKENIZER = load_tokenizer(MODEL)
ALONE = EpisodeRewardWeights(reward_weight=1.0, scorer_weight=0.0)
BOTH = EpisodeRewardWeights(reward_weight=2.0, scorer_weight=0.5)
FIRST, SECOND = TOKENIZER.encode("0"), TOKENIZER.encode("7")


def make_two_groups() -> list[list[Episode]]:
    """Group 7: an episode of two turns, and one whose environment failed before any turn. Group 8:
    an episode of one turn, and one that was cut in its second turn, over a weight sync.
    """
    two_turns = make_episode(
        [1, 2, *FIRST, 4, 5, *SECOND, 7], [make_turn(2, 3), make_turn(5, 7)], turn_rewards=(0.5, 1)
    )
    no_turn = make_episode([1, 2], [], "environment_failed", reward=None, error="no server")
    one_turn = make_episode([1, 2, 3, 9], [make_turn(3, 4)], "max_turns")
    cut = make_episode(
        [1, 2, 3, 9, 9, 4, 8, 8],
        [make_turn(3, 5), make_turn(6, 8, 3, ((3, 0, 1), (4, 1, 2)), "length")],
        "max_tokens",
    )
    return [[two_turns, no_turn], [one_turn, cut]]


def collect_two_groups() -> RolloutBatch:
    return collect_episode_batch(make_prompts([(1, 2), (1, 2, 3)]), make_two_groups(), TOKENIZER, 4)


def make_train_batch(batch: RolloutBatch) -> TrainBatch:
    results = judge_episodes(
        [one for group in make_two_groups() for one in group], [None] * 4, ALONE
    )
    scored = make_scored_batch(batch, results)
    return add_columns(
        TrainBatch,
        scored,
        old_log_probs=batch.rollout_log_probs - 0.25 * batch.response_mask,
        advantages=torch.zeros(batch.num_tokens),
    )


def test_rows_masks_and_log_probs_are_those_of_the_turns() -> None:
    batch = collect_two_groups()
    assert batch.offsets.tolist() == [0, 7, 9, 13, 21]
    assert batch.token_ids[:7].tolist() == [1, 2, *FIRST, 4, 5, *SECOND, 7]
    masks = ["0010011", "00", "0001", "00011011"]
    assert batch.response_mask.tolist() == [bit == "1" for bit in "".join(masks)]
    log_probs = [0, 0, -1, 0, 0, -2, -3, *[0, 0], *[0, 0, 0, -1], *[0, 0, 0, -1, -2, 0, -3, -4]]
    assert (8 * batch.rollout_log_probs).tolist() == log_probs
    assert batch.group_ids.tolist() == [7, 7, 8, 8]
    assert batch.sample_ids.tolist() == [14, 15, 16, 17]
    assert batch.episode_ids is not None and batch.episode_ids.tolist() == [14, 15, 16, 17]
    assert batch.finish_reasons == ("stop", "abort", "stop", "length")
    assert batch.turn_spans == (((2, 3), (5, 7)), (), ((3, 4),), ((3, 5), (6, 8)))
    assert batch.responses[0].startswith("7"), "the last answer alone"
    assert batch.responses[1] == ""


def test_an_episode_without_a_turn_is_as_new_as_the_weights() -> None:
    batch = collect_two_groups()
    assert batch.policy_versions.tolist() == [3, 4, 3, 3]
    metrics = compute_version_metrics(4, batch)
    assert metrics["policy/lag"] == 0.75
    assert metrics["training/off_policy/trajectory_staleness/max"] == 1


def test_version_spans_count_sampled_tokens_over_all_turns() -> None:
    batch = collect_two_groups()
    assert batch.version_spans == ((), (), (), ((3, 0, 3), (4, 3, 4)))
    versions = assign_token_versions(batch)[batch.response_mask]
    assert versions.tolist() == [3, 3, 3, 3, 3, 3, 3, 4]
    only_last = select_samples(batch, [3])
    assert assign_token_versions(only_last)[only_last.response_mask].tolist() == [3, 3, 3, 4]


def test_the_mismatch_of_engine_and_trainer_is_found_behind_gaps() -> None:
    """Of the tokens, one is of version 4; the environment's tokens belong to no version."""
    batch = make_train_batch(collect_two_groups())
    record = make_mismatch_step(1, batch, lambda ids: str(ids))
    assert record is not None
    counts = {
        (group.policy_version, group.finish_reason): group.num_tokens for group in record.groups
    }
    assert counts == {(3, "stop"): 4, (3, "length"): 3, (4, "length"): 1}
    check = MismatchCheck(CheckConfig(), is_exact=False)
    assert batch.old_log_probs is not None
    wrong_at_4 = batch.old_log_probs.clone()
    wrong_at_4[-1] -= 5.0
    found = check(99, batch, wrong_at_4, policy_version=4)
    assert found["training/rollout_log_probs_diff_max"] == pytest.approx(5.25)


def test_cached_tokens_are_a_share_of_all_that_the_engines_read() -> None:
    """Each turn reads all that stands before it: 2 + 5, 3, 3 + 6 tokens; half of that, rounded
    down, was in a cache.
    """
    metrics = compute_engine_metrics(collect_two_groups())
    assert metrics["rollout/cached_token_share"] == (1 + 2 + 1 + 1 + 3) / (7 + 3 + 9)
    assert metrics["rollout/num_retractions"] == 5


def test_scorers_read_the_last_answer() -> None:
    """The text, the number of tokens and the places of special tokens are of one answer."""
    stop = TOKENIZER.eos_token_ids[:1]
    ids = [1, 2, *FIRST, *stop, 4, *SECOND, *stop]
    episode = make_episode(ids, [make_turn(2, 4), make_turn(5, 7)])
    batch = collect_episode_batch(make_prompts([(1, 2)]), [[episode]], TOKENIZER, 3)
    [sample] = make_reward_samples(batch, ResponseReader(TOKENIZER))
    assert sample.response == "7" and sample.num_tokens == 2
    assert [place for place, _ in sample.special_tokens] == [1]


def test_what_an_evaluation_counts_is_all_that_was_sampled() -> None:
    sampled = make_sampled_tokens(make_two_groups()[0][0])
    assert sampled.token_ids == (*FIRST, *SECOND, 7)
    assert sampled.log_probs == (-0.125, -0.25, -0.375)
    assert sampled.finish_reason == "stop" and sampled.policy_version == 3


def test_tokens_of_an_episode_are_put_together_turn_by_turn() -> None:
    tokens = EpisodeTokens()
    assert tokens.append_prompt([1, 2]) == (1, 2)
    tokens.append_turn(GeneratedSample((3,), (-0.5,), "stop", 3), 1.0, 0.5)
    assert tokens.append_prompt([4]) == (1, 2, 3, 4)
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    tokens.append_turn(GeneratedSample((5, 6), (-1.0, -2.0), "length", 3, spans), 2.0, 0.5)
    tokens.append_prompt([9, 9])  # never answered: it is no part of the episode
    ids, log_probs, num_prompt = tokens.join_columns([1, 2])
    assert ids.tolist() == [1, 2, 3, 4, 5, 6] and num_prompt == 2
    assert log_probs.tolist() == [-0.5, -1.0, -2.0]
    assert [(turn.begin, turn.end) for turn in tokens.turns] == [(2, 3), (4, 6)]
    assert tokens.turns[1].version_spans == ((3, 0, 1), (4, 1, 2))


@pytest.mark.parametrize(
    ("end", "status"),
    [
        *((end, "ok") for end in ("done", "max_turns", "max_tokens")),
        *(
            (end, MASKED + end)
            for end in ("environment_failed", "engine_failed", "refused", "aborted", "timeout")
        ),
    ],
)
def test_what_the_policy_has_not_caused_is_masked(end: str, status: str) -> None:
    episode = make_episode([1, 2, 3], [make_turn(2, 3)], end, reward=0.5)
    [result] = judge_episodes([episode], [None], ALONE)
    assert result.status == status
    assert result.score == (0.5 if status == "ok" else 0.0)


@pytest.mark.parametrize(("engine_seconds", "status"), [(4.9, MASKED + "timeout"), (5.1, TIMEOUT)])
def test_a_timeout_is_the_policys_where_it_spoke_for_more_than_half_of_the_time(
    engine_seconds: float, status: str
) -> None:
    """A turn of 2 s, and one that the deadline has cut off."""
    episode = make_episode(
        [1, 2, 3],
        [make_turn(2, 3, seconds=2.0)],
        "timeout",
        seconds=10.0,
        unfinished_turn_seconds=engine_seconds - 2.0,
    )
    assert not needs_scorers(episode, BOTH)
    assert judge_episodes([episode], [None], BOTH)[0].status == status


def judge(
    reward: float | None, scorer: RewardResult | None, weights: EpisodeRewardWeights
) -> RewardResult:
    episode = make_episode(
        [1, 2, 3, 4], [make_turn(2, 3), make_turn(3, 4)], reward=reward, turn_rewards=(0.25, 0.5)
    )
    return judge_episodes([episode], [scorer], weights)[0]


def test_the_environment_alone() -> None:
    assert judge(1.0, None, ALONE) == RewardResult(1.75, parts={"environment": 1.75})
    weighted = EpisodeRewardWeights(2.0, 0.0)
    assert judge(1.0, None, weighted).score == 3.5
    assert judge(1.0, None, weighted).parts["main_reward"] == 1.75, "what an evaluation counts"


def test_the_environment_with_scorers() -> None:
    scorer = RewardResult(4.0, MALFORMED, {"exact_match": 4.0, "main_reward": 4.0}, "a hint")
    result = judge(1.0, scorer, BOTH)
    assert (result.score, result.status, result.error) == (
        2 * 1.75 + 0.5 * 4.0,
        MALFORMED,
        "a hint",
    )
    assert result.parts == {"exact_match": 4.0, "main_reward": 1.75, "environment": 1.75}
    masked = RewardResult(0.0, MASKED + "worker")
    assert judge(1.0, masked, BOTH) is masked


def test_the_scorers_alone_with_the_rewards_of_turns() -> None:
    scorer = RewardResult(4.0, parts={"exact_match": 4.0})
    result = judge(None, scorer, BOTH)
    assert result.score == 4.0 + 2.0 * 0.75
    assert result.parts == {"exact_match": 4.0, "main_reward": 4.0, "environment": 0.75}
    silent = make_episode([1, 2, 3], [make_turn(2, 3)], reward=None)
    assert judge_episodes([silent], [scorer], BOTH) == [scorer]
    assert needs_scorers(silent, ALONE) and not needs_scorers(replace(silent, reward=0.0), ALONE)


def test_a_reward_out_of_range_is_a_failure_of_the_environment() -> None:
    result = judge(1e9, None, ALONE)
    assert result.status == MASKED + "environment_failed" and "must be a number" in result.error


def test_rewards_of_turns_are_paid_at_their_last_tokens() -> None:
    batch = collect_two_groups()
    episodes = [one for group in make_two_groups() for one in group]
    results = judge_episodes(episodes, [None] * 4, ALONE)
    paid = make_process_rewards(batch, results, reward_weight=2.0)
    assert paid.nonzero().view(-1).tolist() == [2, 6] and paid[[2, 6]].tolist() == [1.0, 2.0]
    masked = [RewardResult(0.0, MASKED + "worker"), *results[1:]]
    assert not make_process_rewards(batch, masked, 2.0).any()
    silent = replace(batch, turn_rewards=((), (), (), ()))
    assert not make_process_rewards(silent, results, 2.0).any()


def test_a_reward_model_adds_to_the_rewards_of_turns() -> None:
    batch = collect_two_groups()
    episodes = [one for group in make_two_groups() for one in group]
    results = judge_episodes(episodes, [None] * 4, ALONE)
    scored = replace(
        make_scored_batch(batch, results), process_rewards=make_process_rewards(batch, results, 1.0)
    )
    for granularity, extra in (("response", 0.0), ("token", 3.0)):
        config = RewardModelConfig(
            path="model", granularity=granularity, step_reduction="sum", weight=0.5
        )
        scorer = ModelRewardScorer(config, 100, lambda ids: "")
        is_scored = scorer.mask_scored_tokens(scored)
        found = scorer.add_scores_to_rewards(scored, is_scored, torch.full((21,), 6.0))
        assert found.process_rewards is not None
        assert found.process_rewards[[2, 5, 6]].tolist() == [0.5 + extra, extra, 1.0 + extra]
        num_scored = 3 if granularity == "token" else 1
        assert found.rewards[0] == 1.5 + 0.5 * 6.0 * num_scored


def test_gae_with_rewards_of_turns_by_hand() -> None:
    """In float64, from equation 16, over the sampled tokens alone: two episodes of three turns, of
    which one has an outcome reward too; gaps between turns are no time steps.
    """
    gamma, lam = 0.9, 0.8
    episodes = [
        make_episode(
            list(range(1, 11)),
            [make_turn(2, 4), make_turn(5, 6), make_turn(8, 10)],
            reward=0.3,
            turn_rewards=(0.5, -0.25, 1.0),
        ),
        make_episode(
            list(range(1, 7)), [make_turn(1, 2), make_turn(4, 6)], reward=0.0, turn_rewards=(0.7, 0)
        ),
    ]
    weight = 2.0
    batch = collect_episode_batch(make_prompts([(1, 2)]), [episodes], TOKENIZER, 3)
    results = judge_episodes(episodes, [None, None], EpisodeRewardWeights(weight, 0.0))
    scored = make_scored_batch(batch, results)
    values = torch.linspace(-1.0, 1.0, batch.num_tokens)
    is_valid = torch.ones(2, dtype=torch.bool)
    token_rewards = make_token_rewards(
        scored.rewards,
        is_valid,
        batch.response_mask,
        batch.offsets,
        None,
        0.0,
        make_process_rewards(batch, results, weight),
    )
    outputs = gae(
        AdvantageInputs(
            rewards_B=scored.rewards,
            group_ids_B=batch.group_ids,
            is_valid_B=is_valid,
            response_mask_T=batch.response_mask,
            offsets=batch.offsets,
            token_rewards_T=token_rewards,
            values_T=values,
        ),
        GAEParams(gamma, lam, whiten=False),
    )
    # (places of sampled tokens, what each is paid)
    by_hand = [
        ([2, 3, 5, 8, 9], [0.0, weight * 0.5, weight * -0.25, 0.0, weight * (1.0 + 0.3)]),
        ([11, 14, 15], [weight * 0.7, 0.0, 0.0]),
    ]
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for places, rewards in by_hand:
        next_value = next_advantage = 0.0
        for place, reward in reversed(list(zip(places, rewards, strict=True))):
            value = float(values[place].double())
            delta = reward + gamma * next_value - value
            next_advantage = delta + gamma * lam * next_advantage
            next_value = value
            expected[place] = next_advantage
    assert outputs.advantages_T.double().sub(expected).abs().max() < 1e-6
    sampled = batch.response_mask
    assert outputs.returns_T is not None
    returns = (expected + values.double())[sampled]
    assert outputs.returns_T.double()[sampled].sub(returns).abs().max() < 1e-6
