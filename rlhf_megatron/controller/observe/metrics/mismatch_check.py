"""Engine against trainer on the sampled tokens: metrics every step, stop thresholds at the
first of a process.

A line of mismatch.jsonl has the histograms of a step by group, and its worst tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.log_prob_mismatch import (
    HISTOGRAM_EDGES,
    compute_differences,
    compute_mismatch_statistics,
    compute_response_differences,
    find_worst_tokens,
    make_difference_histogram,
)
from rlhf_megatron.config.schema import CheckConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    assign_token_versions,
    collect_sample_versions,
    iterate_version_runs,
)
from rlhf_megatron.controller.observe.report.run_files import (
    MismatchGroup,
    MismatchStep,
    WorstToken,
)
from rlhf_megatron.data.batch import ScoredBatch, TrainBatch, select_samples

NUM_WORST_TOKENS = 10
WORST_TOKEN_OVERSAMPLING = 10
CONTEXT_TOKENS = 48
CONTEXT_CHARACTERS = 80


class MismatchCheck:
    """Callable: (step, batch, trainer's log-probs [T]) -> metrics.

    Raises ValueError past a threshold at `first_step`, or the first one after it that has
    tokens to compare.
    """

    def __init__(self, check_config: CheckConfig, is_exact: bool) -> None:
        """Make the check. `is_exact`: `RunConfig.is_float32_throughout`, whether engine and trainer
        both compute in float32.
        """
        self.check_config = check_config
        self.first_step = 1  # of this process
        self.is_exact = is_exact

    def __call__(
        self, step: int, batch: ScoredBatch, log_probs: Tensor, policy_version: int | None = None
    ) -> dict[str, float]:
        """Return metrics of the difference between the engine's log-probs and the trainer's. Raise
        ValueError past a threshold where `step` is `first_step`.

        `policy_version` is the version of the policy that computed `log_probs`; only tokens that
        this version sampled are compared. Where there are none, return {} and check the next step
        instead. None: the policy has sampled all tokens.
        """
        mask = batch.response_mask
        if policy_version is not None and any(
            of_sample != {policy_version} for of_sample in collect_sample_versions(batch)
        ):
            mask = mask & (assign_token_versions(batch) == policy_version)
            if not bool(mask.any()) and bool(batch.response_mask.any()):
                self.first_step += step == self.first_step
                return {}
        found = compute_mismatch_statistics(batch.rollout_log_probs, log_probs, mask)
        if step == self.first_step:
            self._raise_past_thresholds(found)
        return found

    def _raise_past_thresholds(self, statistics: dict[str, float]) -> None:
        """Raise ValueError where any statistic is over its threshold."""
        past = describe_exceeded_thresholds(self.check_config, self.is_exact, statistics)
        if past:
            raise ValueError(
                "engine and trainer disagree on the sampled tokens before the first update: "
                + "; ".join(past)
                + (
                    ". The engine serves other weights or another temperature, or its arithmetic"
                    " differs: compare the model configuration of both, or raise the threshold if"
                    " this precision is what you want."
                )
            )


def describe_exceeded_thresholds(
    check_config: CheckConfig, is_exact: bool, statistics: dict[str, float]
) -> list[str]:
    """Return a text for each of the `compute_mismatch_statistics` that is over its threshold.
    `is_exact`: whether both sides compute in float32, which has a threshold of its own.
    """
    name = "training/rollout_log_probs_diff"
    bounds = (
        [(f"{name}_max", "log_prob_max_abs_diff", check_config.log_prob_max_abs_diff)]
        if is_exact
        else [
            (f"{name}_p50", "log_prob_p50_abs_diff", check_config.log_prob_p50_abs_diff),
            (f"{name}_p99", "log_prob_p99_abs_diff", check_config.log_prob_p99_abs_diff),
            ("training/rollout_kl", "log_prob_mean_kl", check_config.log_prob_mean_kl),
        ]
    )
    return [
        f"{key} = {statistics[key]:.3g} (checks.{rule} = {bound:g})"
        for key, rule, bound in bounds
        if statistics[key] > bound
    ]


def make_mismatch_step(
    step: int, batch: TrainBatch, decode_tokens: Callable[[Sequence[int]], str]
) -> MismatchStep | None:
    """Compare engine and trainer token by token, by histograms and worst tokens. Return None where
    the trainer's log-probs or all response tokens are missing. `decode_tokens`: token ids to text.
    """
    if batch.old_log_probs is None or not bool(batch.response_mask.any()):
        return None
    groups = []
    for (version, reason), runs in sorted(_find_token_runs(batch).items()):
        chosen = compute_response_differences(
            batch.rollout_log_probs, batch.old_log_probs, batch.response_mask, runs
        )
        if chosen.numel():
            groups.append(MismatchGroup(version, reason, **vars(make_difference_histogram(chosen))))
    worst = [
        _make_worst_token(batch, t, sample, decode_tokens)
        for t, sample in _find_worst_tokens(batch)
    ]
    return MismatchStep(step, HISTOGRAM_EDGES, tuple(groups), tuple(worst))


def _find_token_runs(batch: TrainBatch) -> dict[tuple[int, str], list[slice]]:
    """Return, by (version, finish reason), slices of the packed tokens, prompts among them.
    Neighbouring slices are joined.
    """
    found: dict[tuple[int, str], list[slice]] = {}
    borders = batch.offsets.tolist()
    versions = batch.policy_versions.tolist()
    version_runs = iterate_version_runs(batch)
    next_run = next(version_runs, None)

    def append_run(policy_version: int, finish_reason: str, start: int, stop: int) -> None:
        """Add a slice to its key, joined with the last slice where that ends at `start`."""
        runs = found.setdefault((policy_version, finish_reason), [])
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        if stop > start:
            runs.append(slice(start, stop))

    for i, reason in enumerate(batch.finish_reasons):
        at = borders[i]
        while next_run is not None and next_run[1].start < borders[i + 1]:
            version, tokens = next_run
            append_run(versions[i], reason, at, tokens.start)
            append_run(version, reason, tokens.start, tokens.stop)
            at = tokens.stop
            next_run = next(version_runs, None)
        append_run(versions[i], reason, at, borders[i + 1])
    return found


def _find_worst_tokens(batch: TrainBatch) -> list[tuple[int, int]]:
    """Return (token index, sample index) of the tokens that differ most. The samples of a group
    often begin alike: a token after the same text counts once.
    """
    assert batch.old_log_probs is not None
    places = find_worst_tokens(
        batch.rollout_log_probs,
        batch.old_log_probs,
        batch.response_mask,
        NUM_WORST_TOKENS * WORST_TOKEN_OVERSAMPLING,
    )
    owners = torch.searchsorted(batch.offsets, places, right=True) - 1
    found: dict[bytes, tuple[int, int]] = {}
    for t, sample in zip(places.tolist(), owners.tolist(), strict=True):
        found.setdefault(
            batch.token_ids[batch.offsets[sample] : t + 1].numpy().tobytes(), (t, sample)
        )
    return list(found.values())[:NUM_WORST_TOKENS]


def _make_worst_token(
    batch: TrainBatch,
    token_index: int,
    sample_index: int,
    decode_tokens: Callable[[Sequence[int]], str],
) -> WorstToken:
    """Return the record of a token that differs much, with its text and the text before it."""
    assert batch.old_log_probs is not None
    trainer = batch.old_log_probs[token_index]
    engine = batch.rollout_log_probs[token_index]
    start = int(batch.offsets[sample_index])
    before = batch.token_ids[max(start, token_index - CONTEXT_TOKENS) : token_index].tolist()
    return WorstToken(
        token=decode_tokens([int(batch.token_ids[token_index])]),
        token_id=int(batch.token_ids[token_index]),
        position=int(batch.response_mask[start:token_index].sum()),
        trainer=trainer.item(),
        engine=engine.item(),
        difference=compute_differences(engine, trainer).item(),
        context=decode_tokens(before)[-CONTEXT_CHARACTERS:],
        sample_id=int(batch.sample_ids[sample_index]),
        policy_version=int(
            assign_token_versions(select_samples(batch, [sample_index]))[token_index - start]
        ),
        finish_reason=batch.finish_reasons[sample_index],
    )
