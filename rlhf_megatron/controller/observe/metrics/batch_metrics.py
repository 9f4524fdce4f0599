"""What is read off a finished batch: metrics, distributions, columns that are not finite, samples
that people see.

Proxies tell how much of a step's gradient is signal, without a second backward pass; lags tell how
old the policy was that sampled the tokens. All functions are pure.
"""
# T packed tokens, B samples

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    count_response_tokens as sample_counts,
)
from rlhf_megatron.algorithms.log_prob_mismatch import compute_response_differences
from rlhf_megatron.algorithms.loss_aggregation import sum_by_sequence
from rlhf_megatron.algorithms.metric_names import make_single_key_part
from rlhf_megatron.algorithms.prompt_groups import PromptGroups
from rlhf_megatron.config.rules.part_rules import MAIN_REWARD
from rlhf_megatron.controller.observe.metrics.metric_catalogue import make_source_key_part
from rlhf_megatron.controller.observe.report.run_files import LoggedSample, TalkPiece
from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, TokenBatch, TrainBatch
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.rollout.engine_interface import FinishReason

CHECKED_COLUMNS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
)
NUM_SAMPLES_NAMED = 8  # samples of a column that a message names
MAX_PROMPT_CHARACTERS = 80  # characters of a prompt in a message

SAMPLE_CHOICE_SEED_PURPOSE = 5  # of the seed


def make_valid_sample_mask(batch: ScoredBatch) -> Tensor:
    """Return [B] bool: the samples whose reward counts, which is not masked."""
    return torch.tensor(
        [not status.startswith("masked:") for status in batch.reward_statuses], dtype=torch.bool
    )


def make_valid_token_mask(batch: ScoredBatch) -> Tensor:
    """Return [T] bool: the response tokens of samples whose reward counts."""
    is_valid = make_valid_sample_mask(batch)
    if bool(is_valid.all()):
        return batch.response_mask
    return batch.response_mask & is_valid.repeat_interleave(batch.lengths)


def count_sampled_tokens(batch: TokenBatch) -> Tensor:
    """Return [B] int64: the number of tokens of each sample that the policy sampled."""
    return sample_counts(batch.response_mask, batch.offsets)


def count_prompt_tokens(batch: TokenBatch) -> Tensor:
    """Return [B] int64: the number of tokens before the first that the policy sampled. Tokens
    between the policy's turns do not count.
    """
    mask = batch.response_mask.numpy()
    borders = batch.offsets.tolist()
    own = [mask[start:end] for start, end in pairwise(borders)]
    return torch.tensor(
        [int(of.argmax()) if of.any() else len(of) for of in own], dtype=torch.int64
    )


def count_read_tokens(batch: RolloutBatch) -> int:
    """Return the number of tokens that the engines were asked to read: the prompts of all samples,
    and for an episode all that stands before each of its turns.
    """
    if batch.turn_spans is None:
        return int(count_prompt_tokens(batch).sum())
    return sum(begin for spans in batch.turn_spans for begin, _ in spans)


def select_masked_values(column: Tensor, mask: Tensor) -> Tensor:
    """Return `column[mask]`. numpy takes a fifth of torch's time for it on a CPU, where all columns
    of a step are.
    """
    return torch.from_numpy(column.numpy()[mask.numpy()])


def assign_token_versions(batch: RolloutBatch) -> Tensor:
    """Return [T] int64: the policy version that each sampled token was sampled from; the tokens
    between the turns of an episode have the version of the turn before, prompt tokens that of the
    first.
    """
    versions_T = batch.policy_versions.repeat_interleave(batch.lengths)
    for version, tokens in iterate_version_runs(batch):
        versions_T[tokens] = version
    return versions_T


def iterate_version_runs(batch: RolloutBatch) -> Iterator[tuple[int, slice]]:
    """Yield (version, slice of the packed tokens) for each version span of the batch, in order. A
    span counts sampled tokens alone: what an environment says between two turns is no part of its
    positions, but of the slice where the span goes on behind it.
    """
    if batch.version_spans is None or not any(batch.version_spans):
        return
    mask = batch.response_mask.numpy()
    borders = pairwise(batch.offsets.tolist())
    for (begin, end), spans in zip(borders, batch.version_spans, strict=True):
        if not spans:
            continue
        sampled = begin + np.flatnonzero(mask[begin:end])
        for version, first, last in spans:
            if last > first:
                yield version, slice(int(sampled[first]), int(sampled[last - 1]) + 1)


def select_reward_column(batch: ScoredBatch, name: str) -> Tensor:
    """Return [B]: the reward part of this name, and a sample's whole reward where the sample lacks
    the part. "reward" is the whole reward of all samples, `MAIN_REWARD` the reward that says
    whether an answer is right.
    """
    if name == "reward" or name not in batch.reward_parts:
        return batch.rewards
    part = batch.reward_parts[name]
    return torch.where(part.isnan(), batch.rewards, part)


def compute_group_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Return the share of groups with different rewards, of groups of several valid samples whose
    rewards agree, and of groups of several valid samples that are all right or all wrong by their
    main rewards.
    """
    groups = PromptGroups.from_ids(batch.group_ids, make_valid_sample_mask(batch))
    is_mixed = groups.have_differing_entries(batch.rewards)
    counts = groups.count_valid_samples()
    is_uniform = (counts > 1) & ~is_mixed
    main_rewards = select_reward_column(batch, MAIN_REWARD)
    agree = (counts > 1) & ~groups.have_differing_entries(main_rewards)
    # of a group that agrees: of each of its samples
    rewards = groups.sum_by_group(main_rewards) / counts.clamp(min=1)
    shares = {
        "mixed_groups": is_mixed,
        "uniform_groups": is_uniform,
        "solve_all": agree & (rewards >= 1.0),
        "solve_none": agree & (rewards <= 0.0),
    }
    return {
        f"reward/{name}": int(of_groups.sum()) / max(1, groups.num_groups)
        for name, of_groups in shares.items()
    }


def summarise_mean_max_min(metric_name: str, values: Tensor) -> dict[str, float]:
    """Return `metric_name`/mean, /max and /min of the values; zeros where there are no values."""
    values = values.float() if values.numel() else torch.zeros(1)
    return {
        f"{metric_name}/mean": values.mean().item(),
        f"{metric_name}/max": values.max().item(),
        f"{metric_name}/min": values.min().item(),
    }


def compute_batch_metrics(
    batch: TrainBatch, max_prompt_length: int | None = None
) -> dict[str, float]:
    """Return all metrics of a batch that trained; for units and meanings see `metric_catalogue`.
    `max_prompt_length` is the length that prompts are cut to, None where not known.
    """
    metrics = {
        "perf/total_num_tokens": float(batch.num_tokens),
        **summarise_mean_max_min(
            "critic/advantages", select_masked_values(batch.advantages, batch.response_mask)
        ),
        **compute_length_metrics(batch, max_prompt_length),
        **compute_group_metrics(batch),
        **compute_reward_metrics(batch),
        **compute_engine_metrics(batch),
        **compute_value_metrics(batch),
    }
    if batch.entropies is not None:
        metrics["actor/entropy"] = _mean_or_zero(
            select_masked_values(batch.entropies, batch.response_mask)
        )
    return metrics


def compute_length_metrics(
    batch: RolloutBatch, max_prompt_length: int | None = None
) -> dict[str, float]:
    """Return metrics of the lengths of all responses, of responses that were not aborted and of
    prompts, and of the turns where a sample has several.
    """
    responses = count_sampled_tokens(batch)
    prompts = count_prompt_tokens(batch)
    is_whole = torch.tensor(
        [reason != "abort" for reason in batch.finish_reasons], dtype=torch.bool
    )
    num_cut = sum(reason == "length" for reason in batch.finish_reasons)
    num_whole = int(is_whole.sum())
    metrics = {
        **summarise_mean_max_min("response_length", responses),
        "response_length/clip_ratio": num_cut / len(batch),
        **summarise_mean_max_min("response_length_non_aborted", responses[is_whole]),
        "response_length_non_aborted/clip_ratio": num_cut / max(1, num_whole),
        "response/aborted_ratio": 1.0 - num_whole / len(batch),
        **summarise_mean_max_min("prompt_length", prompts),
    }
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = int((prompts >= max_prompt_length).sum()) / len(batch)
    mask = batch.response_mask.numpy()
    begins = mask[1:] & ~mask[:-1]  # no sample begins with a response token
    if np.count_nonzero(begins) > int((responses > 0).sum()):
        turns = sample_counts(torch.from_numpy(np.concatenate([[False], begins])), batch.offsets)
        metrics |= summarise_mean_max_min("num_turns", turns)
    return metrics


def compute_reward_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Return metrics of the rewards that count, over all samples, by source and by reward part, and
    the share of each status.
    """
    is_valid = make_valid_sample_mask(batch)
    rewards = batch.rewards[is_valid]
    metrics = {
        "reward/masked": 1.0 - is_valid.float().mean().item(),
        **summarise_mean_max_min("critic/rewards", rewards),
        "critic/rewards/std": rewards.std().item() if rewards.numel() > 1 else 0.0,
    }
    numbers = {source: number for number, source in enumerate(sorted(set(batch.sources)))}
    sources = torch.tensor([numbers[source] for source in batch.sources])
    for source, number in numbers.items():
        is_of = (sources == number) & is_valid
        prefix = f"reward/source/{make_source_key_part(source)}"
        metrics[f"{prefix}/mean"] = _mean_or_zero(batch.rewards[is_of])
        metrics[f"{prefix}/count"] = float(is_of.sum())
        metrics[f"{prefix}/masked"] = 1.0 - is_valid[sources == number].float().mean().item()
    for status, count in sorted(Counter(batch.reward_statuses).items()):
        metrics[f"reward/status/{make_single_key_part(status)}"] = count / len(batch)
    for (source, status), count in sorted(
        Counter(zip(batch.sources, batch.reward_statuses, strict=True)).items()
    ):
        if status != "ok" and len(numbers) > 1:
            prefix = f"reward/source/{make_source_key_part(source)}/status"
            share = count / batch.sources.count(source)
            metrics[f"{prefix}/{make_single_key_part(status)}"] = share
    for name, part in batch.reward_parts.items():
        known = part[is_valid & ~part.isnan()]
        key = f"reward/part/{make_single_key_part(name)}"
        metrics[key] = _mean_or_zero(known)
        if name.endswith("latency_s") and known.numel():
            quantiles = torch.quantile(known, torch.tensor([0.5, 0.95, 1.0])).tolist()
            metrics |= {
                f"{key}_{end}": q for end, q in zip(("p50", "p95", "max"), quantiles, strict=True)
            }
    return metrics


def compute_engine_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Return metrics of what the engines reported of their samples (finish reasons, versions,
    cached tokens, retractions), as far as the batch has these columns.
    """
    counts = Counter(batch.finish_reasons)
    metrics = {
        f"rollout/finish_reason/{make_single_key_part(reason)}": counts[reason] / len(batch)
        for reason in sorted({*get_args(FinishReason), *counts})
    }
    if batch.version_spans is not None:
        several = sum(
            len({version for version, _, _ in spans}) > 1 for spans in batch.version_spans
        )
        metrics["rollout/samples_of_several_versions"] = several / len(batch)
    if batch.num_cached_tokens is not None:
        num_prompt_tokens = count_read_tokens(batch)
        metrics["rollout/cached_token_share"] = int(batch.num_cached_tokens.sum()) / max(
            1, num_prompt_tokens
        )
    if batch.num_retractions is not None:
        metrics["rollout/num_retractions"] = float(batch.num_retractions.sum())
    return metrics


def compute_value_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of the critic's values before the update and of the estimator's returns, where
    the batch has them.
    """
    columns = {"critic/values": batch.values, "critic/returns": batch.returns}
    found = {name: column for name, column in columns.items() if column is not None}
    is_valid = make_valid_token_mask(batch) if found else batch.response_mask
    return {
        key: value
        for name, column in found.items()
        for key, value in summarise_mean_max_min(
            name, select_masked_values(column, is_valid)
        ).items()
    }


def _mean_or_zero(values: Tensor) -> float:
    """Return the mean, or 0 where there are no values."""
    return values.mean().item() if values.numel() else 0.0


def compute_variance_metrics(
    batch: TrainBatch, update_metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return metrics of the gradient's variance; {} where no estimator or loss needs the sums of
    squared probabilities. `update_metrics` are the metrics of the update, for its gradient norm.
    """
    if batch.sum_squares is None or batch.old_log_probs is None:
        return {}
    found = estimate_variance_proxies(batch, batch.sum_squares)
    if found and (grad_norm := update_metrics.get("actor/grad_norm")) is not None:
        num_samples = int(make_valid_sample_mask(batch).sum())
        found |= split_signal_and_noise(
            found["variance_proxy/proxy2_total_power"], grad_norm, num_samples
        )
    return found


def estimate_variance_proxies(batch: TrainBatch, sum_squares_T: Tensor) -> dict[str, float]:
    """Estimate the gradient's variance from the samples whose reward counts; {} where none does.
    `sum_squares_T`: sum of the squared probabilities at each token.
    """
    assert batch.old_log_probs is not None
    is_valid_B = make_valid_sample_mask(batch)
    if not bool(is_valid_B.any()):
        return {}
    weights_T = (
        batch.old_log_probs.exp().mul_(-2.0).add_(sum_squares_T).add_(1.0).mul_(batch.response_mask)
    )
    w_B = _sum_per_sample(weights_T, batch.offsets)[is_valid_B]
    # advantages are 0 outside of the response
    sums_B = _sum_per_sample(batch.advantages, batch.offsets)
    squares_B = (sums_B / count_sampled_tokens(batch).clamp(min=1)).square()[is_valid_B]
    return {
        "variance_proxy/proxy2_total_power": (squares_B * w_B).mean().item(),
        "variance_proxy/expected_a_squared": squares_B.mean().item(),
        "variance_proxy/expected_w": w_B.mean().item(),
    }


def split_signal_and_noise(
    total_power: float, grad_norm: float, num_samples: float
) -> dict[str, float]:
    """Split the gradient's power into signal and noise. `total_power` is proxy 2, `grad_norm` is
    the norm of the update. With a single sample, return only the signal.
    """
    signal = grad_norm**2
    metrics = {"variance_proxy/proxy1_signal_strength": signal}
    if num_samples > 1:
        metrics["variance_proxy/proxy3_pure_noise"] = max(0.0, total_power - signal) / (
            num_samples - 1
        )
    return metrics


def _sum_per_sample(column_T: Tensor, offsets: Tensor) -> Tensor:
    """Return [B] float64: the sum of each sample. Where all samples have tokens, use numpy, which
    takes a tenth of the time of `sum_by_sequence`.
    """
    if not bool((offsets.diff() > 0).all()):
        return sum_by_sequence(column_T, offsets)
    return torch.from_numpy(
        np.add.reduceat(column_T.numpy(), offsets[:-1].numpy(), dtype=np.float64)
    )


def compute_version_metrics(policy_version: int, batch: RolloutBatch) -> dict[str, float]:
    """Return the lag (from each sample's first token), the staleness (from its oldest token) and
    the number of policy versions of the samples. `policy_version` is the version of the weights
    that are about to be trained.
    """
    prefix = "training/off_policy/trajectory"
    spans = torch.tensor([len(of_sample) for of_sample in collect_sample_versions(batch)])
    return {
        "policy/lag": (policy_version - batch.policy_versions.float()).mean().item(),
        **summarise_mean_max_min(f"{prefix}_staleness", compute_sample_lags(policy_version, batch)),
        **summarise_mean_max_min(f"{prefix}_spans", spans),
    }


def compute_sample_lags(policy_version: int, batch: RolloutBatch) -> Tensor:
    """Return [B] int64: `policy_version` less the version of each sample's oldest token."""
    return policy_version - torch.tensor(
        [min(of_sample) for of_sample in collect_sample_versions(batch)], dtype=torch.int64
    )


def collect_sample_versions(batch: RolloutBatch) -> list[set[int]]:
    """Return the policy versions of each sample's tokens."""
    spans = batch.version_spans or ((),) * len(batch)
    pairs = zip(spans, batch.policy_versions.tolist(), strict=True)
    return [{of for of, _, _ in of_sample} or {first} for of_sample, first in pairs]


def iter_distributions(
    batch: TrainBatch, policy_version: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, [n] finite values): of samples whose reward counts, of all responses, or of
    response tokens. Only one column is in memory at a time.

    `policy_version` is the version of the policy that trained on the batch; with it, the lags are
    yielded where any is not 0.
    """
    for name, values in _iter_distribution_columns(batch, policy_version):
        is_finite = np.isfinite(values.numpy())
        if is_finite.any():
            yield name, values if is_finite.all() else torch.from_numpy(values.numpy()[is_finite])


def _iter_distribution_columns(
    batch: TrainBatch, policy_version: int | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of each distribution, values that are not finite included."""
    mask_T = batch.response_mask
    engine_T = batch.rollout_log_probs
    trainer_T = batch.old_log_probs
    yield "rewards", batch.rewards[make_valid_sample_mask(batch)]
    yield "response_length", count_sampled_tokens(batch)
    if policy_version is not None and bool(
        (of_samples := compute_sample_lags(policy_version, batch)).any()
    ):
        yield "lag", of_samples
    yield "advantages", select_masked_values(batch.advantages, mask_T)
    if trainer_T is not None:
        yield (
            "mismatch_ratio",
            select_masked_values(trainer_T, mask_T)
            .sub_(select_masked_values(engine_T, mask_T))
            .exp_(),
        )
        yield "log_prob_difference", compute_response_differences(engine_T, trainer_T, mask_T)
    for name, column_T in (
        ("values", batch.values),
        ("returns", batch.returns),
        ("entropy", batch.entropies),
    ):
        if column_T is not None:
            yield name, select_masked_values(column_T, mask_T)


@dataclass(frozen=True)
class NonFiniteColumn:
    """One column that would poison an update."""

    name: str
    sample_indices: tuple[int, ...]  # indices into the batch, in order
    num_tokens: int


def find_non_finite_columns(batch: TrainBatch) -> tuple[NonFiniteColumn, ...]:
    """Return the columns with values that are not finite on response tokens, also of masked
    samples: a weight of 0 does not stop a NaN.
    """
    found = []
    for name in CHECKED_COLUMNS:
        column = getattr(batch, name)
        if column is None or _is_column_finite(column):  # reads it once, where all is well
            continue
        is_bad = ~column.isfinite() & batch.response_mask
        if is_bad.any():
            owners = torch.searchsorted(batch.offsets, is_bad.nonzero().view(-1), right=True) - 1
            samples = owners.unique().tolist()
            found.append(NonFiniteColumn(name, tuple(samples), int(is_bad.sum())))
    return tuple(found)


def _is_column_finite(column: Tensor) -> bool:
    """Return whether all values are finite, reading the column once."""
    return column.numel() == 0 or bool(torch.stack(torch.aminmax(column)).isfinite().all())


def describe_non_finite_columns(columns: Sequence[NonFiniteColumn], batch: TrainBatch) -> str:
    """Return a text for a person: the columns, the number of bad tokens, and the first samples with
    id and prompt.
    """
    parts = []
    for column in columns:
        named = ", ".join(
            describe_sample(batch, sample) for sample in column.sample_indices[:NUM_SAMPLES_NAMED]
        )
        more = (
            f" and {len(column.sample_indices) - NUM_SAMPLES_NAMED} more"
            if len(column.sample_indices) > NUM_SAMPLES_NAMED
            else ""
        )
        parts.append(f"{column.name} ({column.num_tokens} tokens of {named}{more})")
    return "; ".join(parts)


def describe_sample(batch: TrainBatch, sample_index: int) -> str:
    """Return a text that names a sample by its id and the beginning of its prompt."""
    prompt = batch.prompts[sample_index]
    shown = (
        prompt if len(prompt) <= MAX_PROMPT_CHARACTERS else prompt[:MAX_PROMPT_CHARACTERS] + "..."
    )
    return f"sample {int(batch.sample_ids[sample_index])} {shown!r}"


def choose_logged_samples(
    step: int, batch: ScoredBatch, max_samples: int, seed: int
) -> list[tuple[int, str]]:
    """Return (index, kind) of at most `max_samples` different samples: a third "best", a third
    "worst", the rest "random".

    Equal rewards are ordered by lot, and a masked sample is neither best nor worst. The lot depends
    on `seed` and `step` only, so that a replay shows the same samples.
    """
    order = list(range(len(batch)))
    random.Random(derive_seed(seed, step, SAMPLE_CHOICE_SEED_PURPOSE)).shuffle(order)
    is_valid = make_valid_sample_mask(batch).tolist()
    rewards = batch.rewards.tolist()
    ranked = sorted((i for i in order if is_valid[i]), key=lambda i: -rewards[i])
    num_best = (max_samples + 2) // 3
    num_worst = (max_samples + 1) // 3
    best = ranked[:num_best]
    worst = ranked[len(best) :][::-1][:num_worst]
    taken = {*best, *worst}
    others = [i for i in order if i not in taken][: max(0, max_samples - len(taken))]
    return (
        [(i, "best") for i in best]
        + [(i, "worst") for i in worst]
        + [(i, "random") for i in others]
    )


def make_logged_samples(
    step: int,
    batch: ScoredBatch,
    max_samples: int,
    seed: int,
    decode_tokens: Callable[[Sequence[int]], str] | None = None,
) -> list[LoggedSample]:
    """Return the samples of a step that `choose_logged_samples` chooses, with their full texts.
    `decode_tokens` makes the talk of an episode; None: episodes are shown without.
    """
    lengths = count_sampled_tokens(batch)
    is_valid = make_valid_sample_mask(batch)
    return [
        LoggedSample(
            step=step,
            kind=kind,
            prompt=batch.prompts[i],
            response=batch.responses[i],
            label=batch.labels[i],
            source=batch.sources[i],
            reward=batch.rewards[i].item() if is_valid[i] else None,
            status=batch.reward_statuses[i],
            parts={
                name: part[i].item()
                for name, part in batch.reward_parts.items()
                if not part[i].isnan()
            },
            finish_reason=batch.finish_reasons[i],
            num_tokens=int(lengths[i]),
            policy_version=int(batch.policy_versions[i]),
            version_spans=batch.version_spans[i] if batch.version_spans is not None else (),
            num_cached_tokens=_read_optional_count(batch.num_cached_tokens, i),
            num_retractions=_read_optional_count(batch.num_retractions, i),
            episode_end=None if batch.episode_ends is None else batch.episode_ends[i],
            talk=() if decode_tokens is None else make_talk_pieces(batch, i, decode_tokens),
        )
        for i, kind in choose_logged_samples(step, batch, max_samples, seed)
    ]


def make_talk_pieces(
    batch: ScoredBatch, sample_index: int, decode_tokens: Callable[[Sequence[int]], str]
) -> tuple[TalkPiece, ...]:
    """Return the turns of an episode with what stands between them; () for a sample of one answer
    and for an episode without a turn.
    """
    if batch.turn_spans is None or not batch.turn_spans[sample_index]:
        return ()
    spans = batch.turn_spans[sample_index]
    rewards = batch.turn_rewards[sample_index] if batch.turn_rewards is not None else ()
    begin = int(batch.offsets[sample_index])
    token_ids = batch.token_ids[begin : int(batch.offsets[sample_index + 1])].tolist()
    pieces = []
    end_before = spans[0][0]
    for number, (start, end) in enumerate(spans):
        if start > end_before:
            pieces.append(TalkPiece(decode_tokens(token_ids[end_before:start]), False))
        reward = rewards[number] if rewards else None
        pieces.append(TalkPiece(decode_tokens(token_ids[start:end]), True, reward))
        end_before = end
    return tuple(pieces)


def _read_optional_count(column: Tensor | None, sample_index: int) -> int | None:
    """Return the count of a sample, None where the batch lacks the column."""
    return None if column is None else int(column[sample_index])
