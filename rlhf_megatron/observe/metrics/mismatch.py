"""Engine against trainer on the sampled tokens: metrics every step, stop thresholds at the first of a process.

A line of mismatch.jsonl has the histograms of a step by group, and its worst tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.mismatch import (
    EDGES,
    differences,
    mismatch_statistics,
    response_differences,
    spread,
    worst_tokens,
)
from rlhf_megatron.config.schema import CheckConfig
from rlhf_megatron.data.batch import ScoredBatch, TrainBatch, select
from rlhf_megatron.observe.metrics.batch import prompt_lengths, sample_versions, token_versions
from rlhf_megatron.observe.report.files import MismatchGroup, MismatchStep, WorstToken


class MismatchCheck:
    """Callable: (step, batch, trainer's log-probs [T]) -> metrics.

    Raises ValueError past a threshold at `first_step`, or the first one after it that has tokens to compare.
    """

    def __init__(self, checks: CheckConfig, is_exact: bool) -> None:
        """`is_exact`: `RunConfig.is_exact`."""
        self.checks = checks
        self.first_step = 1  # of this process
        self.is_exact = is_exact

    def __call__(
        self, step: int, batch: ScoredBatch, log_probs: Tensor, version: int | None = None
    ) -> dict[str, float]:
        """`version`: of the policy whose log-probs they are; tokens that it sampled are compared, and nothing is said
        where there are none. None: it has sampled all."""
        mask = batch.response_mask
        if version is not None and any(of_sample != {version} for of_sample in sample_versions(batch)):
            mask = mask & (token_versions(batch) == version)
            if not bool(mask.any()) and bool(batch.response_mask.any()):
                self.first_step += step == self.first_step
                return {}
        found = mismatch_statistics(batch.rollout_log_probs, log_probs, mask)
        if step == self.first_step:
            self._stop_past_thresholds(found)
        return found

    def _stop_past_thresholds(self, found: dict[str, float]) -> None:
        past = past_thresholds(self.checks, self.is_exact, found)
        if past:
            raise ValueError(
                "engine and trainer disagree on the sampled tokens before the first update: "
                + "; ".join(past)
                + ". The engine serves other weights or another temperature, or its arithmetic differs: compare the"
                " model configuration of both, or raise the threshold if this precision is what you want."
            )


def past_thresholds(checks: CheckConfig, is_exact: bool, found: dict[str, float]) -> list[str]:
    """Which of the `mismatch_statistics` are over their bound, in words. `is_exact`: both sides compute in float32."""
    name = "training/rollout_log_probs_diff"
    bounds = (
        [(f"{name}_max", "log_prob_max_abs_diff", checks.log_prob_max_abs_diff)]
        if is_exact
        else [
            (f"{name}_p50", "log_prob_p50_abs_diff", checks.log_prob_p50_abs_diff),
            (f"{name}_p99", "log_prob_p99_abs_diff", checks.log_prob_p99_abs_diff),
            ("training/rollout_kl", "log_prob_mean_kl", checks.log_prob_mean_kl),
        ]
    )
    return [
        f"{key} = {found[key]:.3g} (checks.{rule} = {bound:g})" for key, rule, bound in bounds if found[key] > bound
    ]


NUM_WORST, OVERSAMPLING = 10, 10
CONTEXT_TOKENS, CONTEXT_CHARACTERS = 48, 80


def mismatch_record(step: int, batch: TrainBatch, spell: Callable[[Sequence[int]], str]) -> MismatchStep | None:
    """Compare engine and trainer token by token; None where the trainer's log-probs or all response tokens are missing.
    `spell`: token ids as text.
    """
    if batch.old_log_probs is None or not bool(batch.response_mask.any()):
        return None
    groups = []
    for (version, reason), runs in sorted(_runs_of_groups(batch).items()):
        chosen = response_differences(batch.rollout_log_probs, batch.old_log_probs, batch.response_mask, runs)
        if chosen.numel():
            groups.append(MismatchGroup(version, reason, **vars(spread(chosen))))
    worst = [_worst_token(batch, t, sample, spell) for t, sample in _worst_places(batch)]
    return MismatchStep(step, EDGES, tuple(groups), tuple(worst))


def _runs_of_groups(batch: TrainBatch) -> dict[tuple[int, str], list[slice]]:
    """(version, finish reason) -> runs of tokens, prompts among them. Neighbours are one run."""
    found: dict[tuple[int, str], list[slice]] = {}
    borders, versions, prompts = batch.offsets.tolist(), batch.policy_versions.tolist(), prompt_lengths(batch).tolist()

    def add(version: int, reason: str, start: int, stop: int) -> None:
        runs = found.setdefault((version, reason), [])
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        if stop > start:
            runs.append(slice(start, stop))

    for i, reason in enumerate(batch.finish_reasons):
        at, first = borders[i], borders[i] + prompts[i]
        for version, begin, end in batch.version_spans[i] if batch.version_spans is not None else ():
            add(versions[i], reason, at, first + begin)
            add(version, reason, first + begin, first + end)
            at = first + end
        add(versions[i], reason, at, borders[i + 1])
    return found


def _worst_places(batch: TrainBatch) -> list[tuple[int, int]]:
    """(token, its sample). The samples of a group often begin alike: a token is taken once, however many have it after
    the same text."""
    assert batch.old_log_probs is not None
    places = worst_tokens(batch.rollout_log_probs, batch.old_log_probs, batch.response_mask, NUM_WORST * OVERSAMPLING)
    owners = torch.searchsorted(batch.offsets, places, right=True) - 1
    found: dict[bytes, tuple[int, int]] = {}
    for t, sample in zip(places.tolist(), owners.tolist(), strict=True):
        found.setdefault(batch.token_ids[batch.offsets[sample] : t + 1].numpy().tobytes(), (t, sample))
    return list(found.values())[:NUM_WORST]


def _worst_token(batch: TrainBatch, t: int, sample: int, spell: Callable[[Sequence[int]], str]) -> WorstToken:
    assert batch.old_log_probs is not None
    trainer, engine = batch.old_log_probs[t], batch.rollout_log_probs[t]
    start = int(batch.offsets[sample])
    before = batch.token_ids[max(start, t - CONTEXT_TOKENS) : t].tolist()
    return WorstToken(
        token=spell([int(batch.token_ids[t])]),
        token_id=int(batch.token_ids[t]),
        position=int(batch.response_mask[start:t].sum()),
        trainer=trainer.item(),
        engine=engine.item(),
        difference=differences(engine, trainer).item(),
        context=spell(before)[-CONTEXT_CHARACTERS:],
        sample_id=int(batch.sample_ids[sample]),
        policy_version=int(token_versions(select(batch, [sample]))[t - start]),
        finish_reason=batch.finish_reasons[sample],
    )
