"""Seeds, requests, what engines return as a batch, mini-batches, metrics of a batch."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_samples import scored
from places import MODEL
from scheduler_samples import to_train, train_batch

from rlhf_megatron.algorithms import metric_names as loss_names
from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS
from rlhf_megatron.config.schema import (
    ActorConfig,
    DataConfig,
    EnvironmentConfig,
    PolicyLossConfig,
    RolloutConfig,
    RunConfig,
)
from rlhf_megatron.controller.observe.metrics import batch_metrics
from rlhf_megatron.controller.observe.metrics import metric_catalogue as metric_names
from rlhf_megatron.controller.scheduler.mini_batches import (
    iterate_mini_batch_indices,
    make_actor_mini_batch,
    make_critic_mini_batch,
    make_supervised_mini_batch,
    make_token_selection_mask,
)
from rlhf_megatron.controller.scheduler.model_updates import (
    UpdateSettings,
    plan_actor_update,
    plan_critic_update,
)
from rlhf_megatron.data.batch import PromptBatch, TokenBatch, TrainBatch, select_samples
from rlhf_megatron.data.seeds import derive_seed, seed_process
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rollout.engine_interface import GeneratedSample, SamplingParams, VersionSpan
from rlhf_megatron.rollout.rollout_requests import build_generate_requests, collect_rollout_batch
from rlhf_megatron.runtime.role_proxies import RoleProxies

WORKERS = RoleProxies(None)  # type: ignore[arg-type]  # nothing is called
PROMPTS = PromptBatch(
    prompt_ids=((0, 1, 2), (3,)),
    prompts=("012", "3"),
    labels=("a", "b"),
    sources=("s", "t"),
    group_ids=(40, 41),
    extras=("", '{"level": 2}'),
)


def cut(
    batch: TrainBatch, size: int, use_shuffle: bool, seed: int, step: int, epoch: int
) -> Iterator[TrainBatch]:
    """The mini-batches of one epoch."""
    of_all = list(iterate_mini_batch_indices(len(batch), epoch + 1, size, use_shuffle, seed, step))
    return (select_samples(batch, samples) for samples in of_all[epoch * -(-len(batch) // size) :])


def samples_of(batch: TokenBatch) -> list[int]:
    """Sample numbers of a (mini-)batch made from `train_batch`."""
    return (batch.token_ids[batch.offsets[:-1]] - 100).tolist()


def test_seeds_are_those_of_splitmix64_and_stay_what_they_are() -> None:
    # The generator's published outputs from state 0 are e220a8397b1dcdaf, 6e789e6aa1b965f4, ...
    assert derive_seed(0) == 0x6E789E6AA1B965F4 >> 33
    assert [derive_seed(1, 2, 3, 4), derive_seed(1, 2, 3), derive_seed(7, -1, 0, 0)] == [
        1627633942,
        610773012,
        492990349,
    ]


def test_a_process_is_seeded_by_what_it_is() -> None:
    def draws(*parts: int) -> list[float]:
        seed_process(*parts)
        return [random.random(), float(np.random.rand())]

    assert (
        draws(1, 0) == draws(1, 0)
        and len({value for parts in ((1, 0), (1, 1), (2, 0)) for value in draws(*parts)}) == 6
    )


def test_seeds_differ_in_every_part_and_fit_31_bits() -> None:
    seeds = [
        derive_seed(a, b, c, d)
        for a in range(3)
        for b in range(-1, 9)
        for c in range(32)
        for d in range(16)
    ]
    # 0.05 collisions are expected of as many random ones
    assert len(set(seeds)) == len(seeds) == 15360
    assert min(seeds) >= 0 and max(seeds) < 1 << 31
    assert len({derive_seed(1, 2), derive_seed(2, 1), derive_seed(1, 2, 0), derive_seed(12)}) == 4
    mean = sum(seeds) / len(seeds) / (1 << 31)
    assert abs(mean - 0.5) < 5 * (1 / 12 / len(seeds)) ** 0.5


def test_requests_carry_a_seed_a_sample() -> None:
    params = SamplingParams(max_new_tokens=4, stop_token_ids=(14,))
    requests = build_generate_requests(PROMPTS, 3, params, seed=5, step=2)
    assert [r.prompt_ids for r in requests] == [(0, 1, 2), (3,)]
    assert requests[1].seeds == (
        derive_seed(5, 2, 41, 0),
        derive_seed(5, 2, 41, 1),
        derive_seed(5, 2, 41, 2),
    )
    assert all(r.params is params for r in requests)
    assert not set(requests[0].seeds) & set(
        build_generate_requests(PROMPTS, 3, params, seed=5, step=3)[0].seeds
    )


def test_collect_lays_prompts_and_responses_out() -> None:
    tokenizer = load_tokenizer(MODEL)
    eos = tokenizer.eos_token_id
    one = tokenizer.encode("1")[0]
    two = tokenizer.encode("2")[0]
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    groups = [
        [
            GeneratedSample((one, eos), (-0.5, -0.25), "stop", 3, spans, 2, 1),
            GeneratedSample((two,), (-1.5,), "length", 3),
        ],
        [
            GeneratedSample((two, two, one), (-1.0, -2.0, -3.0), "length", 4),
            GeneratedSample((), (), "abort", 3),
        ],
    ]
    batch = collect_rollout_batch(PROMPTS, groups, tokenizer)
    assert batch.offsets.tolist() == [0, 5, 9, 13, 14]
    assert batch.token_ids.tolist() == [0, 1, 2, one, eos, 0, 1, 2, two, 3, two, two, one, 3]
    assert batch.response_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0]
    assert batch.rollout_log_probs.tolist() == [
        0,
        0,
        0,
        -0.5,
        -0.25,
        0,
        0,
        0,
        -1.5,
        0,
        -1,
        -2,
        -3,
        0,
    ]
    assert batch.group_ids.tolist() == [40, 40, 41, 41]
    assert batch.sample_ids.tolist() == [80, 81, 82, 83]
    assert batch.policy_versions.tolist() == [3, 3, 4, 3]
    assert batch.finish_reasons == ("stop", "length", "length", "abort")
    assert batch.responses == ("1", "2", "221", "")
    assert batch.prompts == ("012", "012", "3", "3") and batch.labels == ("a", "a", "b", "b")
    assert batch.sources == ("s", "s", "t", "t")
    assert batch.extras == ("", "", '{"level": 2}', '{"level": 2}')
    assert batch.version_spans == (((3, 0, 1), (4, 1, 2)), (), (), ())
    assert batch.num_cached_tokens.tolist() == [2, 0, 0, 0] and batch.num_retractions.tolist() == [
        1,
        0,
        0,
        0,
    ]


def test_an_epoch_has_every_sample_once_with_its_columns() -> None:
    batch = train_batch()
    parts = [
        make_actor_mini_batch(part, "token-mean")
        for part in cut(batch, 4, True, seed=1, step=2, epoch=0)
    ]
    assert [len(part) for part in parts] == [4, 4, 2]
    assert sorted(i for part in parts for i in samples_of(part)) == list(range(10))
    for part in parts:
        owner = torch.tensor(samples_of(part)).repeat_interleave(part.lengths)
        assert part.lengths.tolist() == [i + 2 for i in samples_of(part)]
        assert torch.equal(part.advantages, owner.float() * part.response_mask)
        assert torch.equal(part.old_log_probs, -2.0 * owner) and torch.equal(
            part.rollout_log_probs, -owner.float()
        )
        assert part.ref_log_probs is None


def test_the_order_is_a_function_of_seed_step_and_epoch() -> None:
    batch = train_batch()

    def order(seed: int, step: int, epoch: int) -> list[int]:
        return [i for part in cut(batch, 4, True, seed, step, epoch) for i in samples_of(part)]

    torch.manual_seed(0)
    first = order(1, 2, 0)
    torch.manual_seed(99)  # what happened before does not matter
    assert order(1, 2, 0) == first != list(range(10))
    assert len({tuple(order(*key)) for key in ((1, 2, 0), (1, 2, 1), (1, 3, 0), (2, 2, 0))}) == 4
    plain = cut(batch, 4, False, 1, 2, 0)
    assert [samples_of(part) for part in plain] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_have_the_denominator_of_their_mini_batch(mode: str) -> None:
    first, _, last = (
        make_actor_mini_batch(part, mode, scale_factor=8)
        for part in cut(train_batch(), 4, False, 1, 1, 0)
    )
    counts = {0: 1, 1: 2, 2: 3, 3: 4}  # response tokens of the samples of the first
    expected = {
        "token-mean": [1 / 10] * 10,
        "token-sum": [1.0] * 10,
        "seq-mean-token-sum-norm": [1 / 32] * 10,
        "seq-mean-token-sum": [1 / 4] * 10,
        "seq-mean-token-mean": [1 / (4 * counts[i]) for i in counts for _ in range(counts[i])],
    }[mode]
    assert first.loss_weights[first.response_mask].tolist() == pytest.approx(expected)
    assert not first.loss_weights[~first.response_mask].any()
    assert first.metric_weights.sum().item() == pytest.approx(1.0)
    total = {
        "token-sum": 19.0,
        "seq-mean-token-sum": 19 / 2,
        "seq-mean-token-sum-norm": 19 / 16,
    }.get(mode, 1.0)
    # two samples, of 9 and 10 response tokens
    assert last.loss_weights.sum().item() == pytest.approx(total)


def picks_of(
    batch: TrainBatch, mini_batch: int = 0, seed: int = 3, step: int = 2
) -> dict[int, list[bool]]:
    """Sample -> which of its tokens clip_cov chooses."""
    loss = PolicyLossConfig(
        "clip_cov", {"clip_cov_lb": -1e9, "clip_cov_ub": 1e9, "clip_cov_ratio": 0.2}
    )
    is_picked = make_token_selection_mask(batch, loss, seed, step, mini_batch)
    assert is_picked is not None and int(is_picked.sum()) == 11, "a fifth of 55 response tokens"
    assert not is_picked[~batch.response_mask].any()
    return {
        int(sample): is_picked[start:stop].tolist()
        for sample, start, stop in zip(
            batch.sample_ids, batch.offsets, batch.offsets[1:], strict=False
        )
    }


def test_what_a_loss_picks_is_a_function_of_seed_step_mini_batch_and_sample() -> None:
    batch = train_batch()
    once = picks_of(batch)
    torch.manual_seed(99)  # what happened before does not matter
    assert picks_of(batch) == once
    assert picks_of(select_samples(batch, [7, 2, 9, 0, 1, 8, 3, 5, 4, 6])) == once, (
        "nor does the order"
    )
    assert all(
        picks_of(batch, **other) != once for other in ({"mini_batch": 1}, {"seed": 4}, {"step": 3})
    )


def test_the_actors_mini_batches_have_their_own_picks_and_others_have_none() -> None:
    batch = train_batch()
    loss = PolicyLossConfig(
        "clip_cov", {"clip_cov_lb": -1e9, "clip_cov_ub": 1e9, "clip_cov_ratio": 0.2}
    )
    config = RunConfig(
        actor=ActorConfig(mini_batch_size=10, ppo_epochs=2, shuffle=False, policy_loss=loss)
    )
    first, second = (
        part.is_picked.tolist()
        for part in plan_actor_update(
            WORKERS, UpdateSettings.from_run_config(config), 2, batch
        ).make_mini_batches()
    )
    assert sum(first) == sum(second) == 11 and first != second
    plain = RunConfig(actor=ActorConfig(mini_batch_size=10))
    assert (
        next(
            plan_actor_update(
                WORKERS, UpdateSettings.from_run_config(plain), 2, batch
            ).make_mini_batches()
        ).is_picked
        is None
    )


def test_samples_of_masked_status_are_neither_picked_nor_counted() -> None:
    batch = replace(train_batch(4), reward_statuses=("ok", "ok", "ok", "masked:server"))
    loss = PolicyLossConfig("kl_cov", {"kl_cov_ratio": 1.0})
    is_picked = make_token_selection_mask(batch, loss, 1, 1, 0)
    assert is_picked is not None
    owner = batch.sample_ids.repeat_interleave(batch.lengths)
    assert torch.equal(is_picked, batch.response_mask & (owner != batch.sample_ids[3]))


def test_a_norm_without_a_factor_divides_by_the_longest_response() -> None:
    actor = ActorConfig(mini_batch_size=10, loss_agg_mode="seq-mean-token-sum-norm")
    batch = replace(train_batch(), values=torch.zeros(65), returns=torch.zeros(65))
    game = EnvironmentConfig("guess_number", max_turns=3)
    none = EnvironmentConfig()
    for factor, environment, expected in (
        (None, none, 1 / (10 * 40)),
        (None, game, 1 / (10 * 3 * 40)),
        (None, replace(game, max_tokens=100), 1 / (10 * 100)),
        (5.0, none, 1 / 50),
    ):
        config = RunConfig(
            data=DataConfig(max_response_length=40),
            actor=replace(actor, loss_scale_factor=factor),
            rollout=RolloutConfig(environment=environment),
        )
        for update in (plan_actor_update, plan_critic_update):
            (part,) = update(
                WORKERS, UpdateSettings.from_run_config(config), 2, batch
            ).make_mini_batches()
            assert part.loss_weights.max().item() == pytest.approx(expected)


def test_supervised_mini_batch_is_a_mean_over_answer_tokens() -> None:
    batch = TokenBatch(
        torch.tensor([0, 3, 5]), torch.arange(5), torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)
    )
    part = make_supervised_mini_batch(batch)
    third = pytest.approx(1 / 3)
    assert part.loss_weights.tolist() == part.metric_weights.tolist() == [0, third, third, 0, third]
    assert (
        part.advantages is None
        and part.old_log_probs is None
        and torch.equal(part.token_ids, batch.token_ids)
    )


def test_a_critic_learns_nothing_from_masked_samples() -> None:
    """Samples of 1 .. 4 response tokens, the third masked. All ten tokens are in the denominator of
    the loss, but its three have no weight; metrics are means over the other seven.
    """
    statuses = ("ok", "malformed", "masked:server", "ok")
    ones = torch.ones(14)
    batch = replace(train_batch(4), reward_statuses=statuses, values=2 * ones, returns=3 * ones)
    part = make_critic_mini_batch(batch, "token-mean")
    owner = (part.token_ids - 100)[part.response_mask]
    assert owner.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert part.loss_weights[part.response_mask].tolist() == pytest.approx(
        [0.1] * 3 + [0.0] * 3 + [0.1] * 4
    )
    assert part.metric_weights[part.response_mask].tolist() == pytest.approx(
        [1 / 7] * 3 + [0.0] * 3 + [1 / 7] * 4
    )
    assert (
        not part.loss_weights[~part.response_mask].any()
        and not part.metric_weights[~part.response_mask].any()
    )
    assert torch.equal(part.old_values, batch.values) and torch.equal(part.returns, batch.returns)
    part = make_critic_mini_batch(batch, "seq-mean-token-mean")
    assert part.loss_weights.sum().item() == pytest.approx(3 / 4)


def test_critic_and_actor_see_the_same_samples_in_mini_batches_of_one_size() -> None:
    batch = replace(train_batch(), values=torch.zeros(65), returns=torch.zeros(65))
    config = RunConfig(actor=ActorConfig(mini_batch_size=4, ppo_epochs=2))
    of_actor, of_critic = (
        [
            samples_of(part)
            for part in update(
                WORKERS, UpdateSettings.from_run_config(config), 2, batch
            ).make_mini_batches()
        ]
        for update in (plan_actor_update, plan_critic_update)
    )
    assert of_critic == of_actor and len(of_actor) == 6
    epochs = [[i for samples in of_actor[first : first + 3] for i in samples] for first in (0, 3)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))


def test_batch_metrics_by_hand() -> None:
    # Three samples of 3, 1, 2 tokens, of them 2, 0, 1 of the response; rewards 1, masked, 0.5;
    # groups 7, 7, 8.
    entropies = torch.tensor([9.0, 1.0, 2.0, 9.0, 9.0, 6.0])
    found = batch_metrics.compute_batch_metrics(to_train(scored(), entropies=entropies))
    assert found == pytest.approx(
        {
            "critic/rewards/mean": 0.75,
            "critic/rewards/max": 1.0,
            "critic/rewards/min": 0.5,
            "critic/rewards/std": 0.125**0.5,  # (0.25^2 + 0.25^2) / (2 - 1)
            "critic/advantages/mean": 2.0,
            "critic/advantages/max": 4.0,
            "critic/advantages/min": -1.0,
            "reward/masked": 1 / 3,
            # the second sample of group 7 is masked: no group has two that count
            "reward/mixed_groups": 0.0,
            "reward/uniform_groups": 0.0,
            "reward/solve_all": 0.0,
            "reward/solve_none": 0.0,
            "reward/part/exact": 0.5,
            "reward/source/s/mean": 0.75,
            "reward/source/s/count": 2,
            "reward/source/s/masked": 1 / 3,
            "reward/status/ok": 2 / 3,
            "reward/status/masked:aborted": 1 / 3,
            "response_length/mean": 1.0,
            "response_length/max": 2,
            "response_length/min": 0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 1.5,  # of 2 and 1
            "response_length_non_aborted/max": 2,
            "response_length_non_aborted/min": 1,
            "response_length_non_aborted/clip_ratio": 0.5,
            "response/aborted_ratio": 1 / 3,
            "prompt_length/mean": 1.0,
            "prompt_length/max": 1,
            "prompt_length/min": 1,
            "rollout/finish_reason/stop": 1 / 3,
            "rollout/finish_reason/length": 1 / 3,
            "rollout/finish_reason/abort": 1 / 3,
            "rollout/samples_of_several_versions": 1 / 3,
            "rollout/cached_token_share": 1 / 3,  # one of the three prompt tokens
            "rollout/num_retractions": 2,
            "perf/total_num_tokens": 6.0,
            "actor/entropy": 3.0,
        }
    )


def test_rewards_by_source_and_part_over_the_samples_that_have_them() -> None:
    nan = float("nan")
    batch = replace(
        scored(),
        sources=("add", "mul", "add"),
        rewards=torch.tensor([1.0, 7.0, 0.25]),
        reward_parts={
            "exact": torch.tensor([1.0, 0.0, nan]),
            "length": torch.tensor([nan, 1.0, nan]),
        },
    )
    found = batch_metrics.compute_reward_metrics(batch)
    assert found["reward/source/add/mean"] == 0.625 and found["reward/source/add/count"] == 2
    assert found["reward/source/mul/mean"] == 0.0 and found["reward/source/mul/count"] == 0, (
        "its sample is masked"
    )
    assert found["reward/part/exact"] == 1.0, "the third sample has no such part"
    assert found["reward/part/length"] == 0.0, "the only sample that has it is masked"
    assert (found["reward/source/add/masked"], found["reward/source/mul/masked"]) == (0.0, 1.0)
    of_statuses = {
        name: share for name, share in found.items() if "/status/" in name and "/source/" in name
    }
    assert of_statuses == {"reward/source/mul/status/masked:aborted": 1.0}


def test_latencies_of_reward_servers_have_quantiles() -> None:
    """Of samples that count: 1 and 3 s, not the masked one's 90."""
    latencies = {
        "judge/latency_s": torch.tensor([1.0, 90.0, 3.0]),
        "judge/retries": torch.tensor([0.0, 5.0, 1.0]),
    }
    found = batch_metrics.compute_reward_metrics(replace(scored(), reward_parts=latencies))
    of_part = {
        key.removeprefix("reward/part/judge:"): value
        for key, value in found.items()
        if "/part/" in key
    }
    wanted = {
        "latency_s": 2.0,
        "latency_s_p50": 2.0,
        "latency_s_p95": 2.9,
        "latency_s_max": 3.0,
        "retries": 0.5,
    }
    assert of_part == pytest.approx(wanted)
    assert all(metric_names.find_metric(key) is not None for key in found)


def test_values_and_returns_of_samples_that_count() -> None:
    """Response tokens are 1, 2 and 5; with the first sample masked only token 5 counts."""
    values = torch.tensor([9.0, 1.0, 2.0, 9.0, 9.0, 6.0])
    returns = torch.tensor([9.0, 0.0, 4.0, 9.0, 9.0, 5.0])
    found = batch_metrics.compute_value_metrics(to_train(scored(), values=values, returns=returns))
    assert found == {
        "critic/values/mean": 3.0,
        "critic/values/max": 6.0,
        "critic/values/min": 1.0,
        "critic/returns/mean": 3.0,
        "critic/returns/max": 5.0,
        "critic/returns/min": 0.0,
    }
    masked = replace(scored(), reward_statuses=("masked:x", "ok", "ok"))
    found = batch_metrics.compute_value_metrics(to_train(masked, values=values, returns=returns))
    assert (
        found["critic/values/mean"] == found["critic/values/min"] == 6.0
        and found["critic/returns/max"] == 5.0
    )
    assert batch_metrics.compute_value_metrics(to_train(scored())) == {}


def test_every_token_has_its_version() -> None:
    """Samples of 3, 1, 2 tokens with 2, 0, 1 of the response; the first turned from version 1
    to 2 within it.
    """
    assert batch_metrics.assign_token_versions(scored()).tolist() == [1, 1, 2, 1, 2, 2]
    plain = replace(scored(), version_spans=((), (), ()))
    assert batch_metrics.assign_token_versions(plain).tolist() == [1, 1, 1, 1, 2, 2]
    assert batch_metrics.assign_token_versions(replace(scored(), version_spans=None)).tolist() == [
        1,
        1,
        1,
        1,
        2,
        2,
    ]


def test_a_step_that_was_recorded_earlier_has_no_engine_metrics_but_its_finish_reasons() -> None:
    old = replace(scored(), version_spans=None, num_cached_tokens=None, num_retractions=None)
    assert batch_metrics.compute_engine_metrics(
        replace(old, finish_reasons=("stop", "stop", "length"))
    ) == {
        "rollout/finish_reason/stop": 2 / 3,
        "rollout/finish_reason/length": 1 / 3,
        "rollout/finish_reason/abort": 0.0,
    }
    one = replace(scored(), version_spans=(((1, 0, 1), (1, 1, 2)), (), ((2, 0, 1),)))
    assert batch_metrics.compute_engine_metrics(one)["rollout/samples_of_several_versions"] == 0.0


def test_a_group_is_mixed_when_its_valid_rewards_differ() -> None:
    batch = replace(scored(), reward_statuses=("ok", "malformed", "ok"))
    assert batch_metrics.compute_group_metrics(batch)["reward/mixed_groups"] == 0.5
    assert (
        batch_metrics.compute_group_metrics(replace(batch, rewards=torch.ones(3)))[
            "reward/mixed_groups"
        ]
        == 0.0
    )


def test_groups_without_signal_by_hand() -> None:
    # Groups: 4 all right, 5 all wrong, 6 agrees in between, 7 mixed, 8 has one sample.
    rewards = [1.0, 1.0, 0.0, -1.0, 0.0, 0.5, 0.5, 0.0, 1.0, 1.0]
    groups = [4, 4, 5, 5, 5, 6, 6, 7, 7, 8]
    statuses = ["ok"] * 10
    statuses[3] = "masked:x"  # its -1 does not make group 5 a mixed one
    batch = replace(
        train_batch(),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        reward_statuses=tuple(statuses),
    )
    assert batch_metrics.compute_group_metrics(batch) == {
        "reward/mixed_groups": 0.2,
        "reward/uniform_groups": 0.6,
        "reward/solve_all": 0.2,
        "reward/solve_none": 0.2,
    }


def test_turns_are_stretches_of_the_response_and_told_where_there_are_several() -> None:
    """Samples of 6, 2 and 4 tokens: two turns, none (no response), one."""
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
    batch = replace(scored(), offsets=torch.tensor([0, 6, 8, 12]), response_mask=mask)
    found = batch_metrics.compute_length_metrics(batch)
    assert batch_metrics.count_prompt_tokens(batch).tolist() == [1, 2, 2], (
        "what lies between two turns is no prompt"
    )
    assert [found[f"num_turns/{name}"] for name in ("mean", "max", "min")] == [1.0, 2.0, 0.0]
    assert (
        found["response_length/mean"] == pytest.approx(5 / 3) and found["prompt_length/max"] == 2.0
    )
    assert not any(
        name.startswith("num_turns") for name in batch_metrics.compute_length_metrics(scored())
    )


def test_prompts_at_their_limit() -> None:
    """Prompts of 3, 1 and 2 tokens."""
    batch = replace(scored(), response_mask=torch.zeros(6, dtype=torch.bool))
    shares = [
        batch_metrics.compute_length_metrics(batch, limit).get("prompt_length/clip_ratio")
        for limit in (3, 2, 4, None)
    ]
    assert shares == [pytest.approx(1 / 3), pytest.approx(2 / 3), 0.0, None]


def test_lengths_of_samples_without_tokens() -> None:
    offsets = torch.tensor([0, 0, 3, 3, 4])
    mask = torch.tensor([False, True, True, False])
    assert batch_metrics.count_sampled_tokens(
        TokenBatch(offsets, torch.zeros(4), mask)
    ).tolist() == [0, 2, 0, 0]
    assert batch_metrics.count_sampled_tokens(train_batch(4)).tolist() == [1, 2, 3, 4]


def test_batch_metrics_where_nothing_counts() -> None:
    batch = replace(
        scored(), reward_statuses=("masked:x",) * 3, response_mask=torch.zeros(6, dtype=torch.bool)
    )
    found = batch_metrics.compute_batch_metrics(to_train(batch, entropies=torch.ones(6)))
    assert found["reward/masked"] == 1.0
    assert (
        found["critic/rewards/mean"] == found["actor/entropy"] == found["reward/part/exact"] == 0.0
    )
    assert found["critic/advantages/max"] == 0.0


def test_every_metric_of_a_batch_is_listed() -> None:
    ones = torch.ones(6)
    found = batch_metrics.compute_batch_metrics(
        to_train(scored(), entropies=ones, values=ones, returns=ones)
    )
    assert [name for name in found if metric_names.find_metric(name) is None] == []


def test_a_listed_pattern_stands_for_its_keys() -> None:
    assert (
        metric_names.find_metric("reward/source/a.b/mean")
        == metric_names.METRIC_CATALOGUE["reward/source/<source>/mean"]
    )
    assert (
        metric_names.find_metric("reward/status/masked:server error")
        == metric_names.METRIC_CATALOGUE["reward/status/<status>"]
    )
    assert (
        metric_names.find_metric("timing_s/step")
        == metric_names.METRIC_CATALOGUE["timing_s/step"]
        != metric_names.find_metric("timing_s/x")
    )
    assert metric_names.find_metric("actor/pg_loss") == loss_names.METRICS["actor/pg_loss"]
    assert (
        metric_names.find_metric("reward/source/x") is None
        and metric_names.find_metric("reward/part/") is None
    )
    assert metric_names.find_metric("critic/reward/mean") is None
