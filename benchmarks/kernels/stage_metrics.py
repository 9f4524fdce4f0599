"""C11: what the controller makes of a step's batch, against one numpy sum of each of the batch's
token columns.

Apart from each other: all that a step's row is made of (metrics of the batch, versions, balance
over replicas, MFU, variance proxies, health); the comparison of engine and trainer; the rollout
correction with its metrics, by preset; and the advantage stage without that, by estimator, and with
the KL in the reward. Responses are ragged, with values, returns, entropies and sums of squared
probabilities; one reward in fifty is masked.
"""

# T packed tokens, B samples

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.measure import Parts, cpu_seconds, significant, take_turns
from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.log_prob_mismatch import compute_mismatch_statistics
from rlhf_megatron.config.schema import AlgorithmConfig, RolloutCorrectionConfig
from rlhf_megatron.controller.observe.health import HealthWatch
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    compute_batch_metrics,
    compute_variance_metrics,
    compute_version_metrics,
    make_valid_sample_mask,
)
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    PerformanceBasis,
    compute_flops_utilisation,
    compute_replica_balance,
    compute_throughput,
    compute_time_per_token,
)
from rlhf_megatron.controller.scheduler.advantage_stage import (
    AdvantageStage,
    compute_correction_columns,
)
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup as RunParts
from rlhf_megatron.data.batch import TrainBatch, compute_offsets
from rlhf_megatron.ranks.workers.actor_losses import parse_correction_params
from rlhf_megatron.weights.parallel_layout import ParallelLayout

# samples, tokens of a sample at most
SHAPES = ((2048, 2048), (16384, 2048))
QUICK_SHAPES = ((64, 64),)
GROUP_SIZE = 8
NUM_SOURCES = 8
NUM_REPLICAS = 8
BAR = 20.0
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 32,
}
PRESETS = ("disabled", "decoupled_token_is", "decoupled_seq_is_rs", "decoupled_k3_rs_token_tis")
ESTIMATORS = (
    "grpo",
    "gae",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
COLUMNS = (
    *("token_ids", "response_mask", "rollout_log_probs", "old_log_probs", "advantages"),
    *("values", "returns", "entropies", "sum_squares"),
)


def make_batch(num_samples: int, length: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(length * 7 // 8, length + 1, (num_samples,), generator=generator)
    offsets = compute_offsets(lengths_B)
    total = int(offsets[-1])
    place_T = torch.arange(total) - offsets[:-1].repeat_interleave(lengths_B)
    mask_T = place_T >= length // 8
    log_probs_T = -torch.rand(total, generator=generator)
    names = tuple(f"source{i % NUM_SOURCES}" for i in range(num_samples))
    spans = tuple(((1, 0, 5), (2, 5, length)) if i % 4 == 0 else () for i in range(num_samples))
    return TrainBatch(
        offsets=offsets,
        token_ids=torch.randint(32000, (total,), generator=generator),
        response_mask=mask_T,
        rollout_log_probs=log_probs_T + 1e-3 * torch.randn(total, generator=generator),
        group_ids=torch.arange(num_samples) // GROUP_SIZE,
        sample_ids=torch.arange(num_samples),
        policy_versions=torch.ones(num_samples, dtype=torch.int64),
        finish_reasons=tuple("stop" if i % 5 else "length" for i in range(num_samples)),
        **dict.fromkeys(("prompts", "responses", "labels", "sources", "extras"), names),
        version_spans=spans,
        num_cached_tokens=torch.zeros(num_samples, dtype=torch.int64),
        num_retractions=torch.zeros(num_samples, dtype=torch.int64),
        rewards=torch.randint(2, (num_samples,), generator=generator).float(),
        reward_statuses=tuple("ok" if i % 50 else "masked:aborted" for i in range(num_samples)),
        reward_parts={"exact": torch.zeros(num_samples)},
        old_log_probs=log_probs_T,
        values=torch.randn(total, generator=generator),
        entropies=torch.rand(total, generator=generator),
        sum_squares=torch.rand(total, generator=generator),
        advantages=torch.randn(total, generator=generator) * mask_T,
        returns=torch.randn(total, generator=generator),
    )


def step_metrics(batch: TrainBatch, work: PerformanceBasis) -> dict[str, float]:
    """As the stages and the tracker make them."""
    metrics = compute_batch_metrics(batch, work.max_prompt_length) | compute_version_metrics(
        2, batch
    )
    metrics |= {
        "timing_s/step": 1.0,
        "actor/num_epochs": 1.0,
        "perf/peak_tflops": 1.0,
        "actor/grad_norm": 1.0,
    }
    calls = {"actor.log_probs": 1.0, "actor.update": 1.0, "critic.update": 1.0}
    metrics |= (
        compute_time_per_token(metrics, calls)
        | compute_replica_balance(batch, work)
        | compute_flops_utilisation(metrics, calls, batch, work)
    )
    metrics |= compute_variance_metrics(batch, metrics) | compute_throughput(
        metrics, work.num_devices
    )
    return metrics | HealthWatch().judge_step(1, metrics)[0]


def parts_of(batch: TrainBatch, work: PerformanceBasis) -> dict[str, Callable[[], object]]:
    """What -> the work that is measured."""
    old = batch.old_log_probs
    is_valid = make_valid_sample_mask(batch)
    assert old is not None
    columns = replace(batch, ref_log_probs=batch.rollout_log_probs, greedy_rewards=batch.rewards)

    def corrected(preset: str) -> Callable[[], object]:
        params = parse_correction_params(RolloutCorrectionConfig(preset))
        return lambda: compute_correction_columns(columns, is_valid, params, is_bypass=False)

    def estimated(name: str, use_kl: bool = False) -> Callable[[], object]:
        stage = AdvantageStage(
            AlgorithmConfig(use_kl_in_reward=use_kl, kl_penalty="k3"), run_parts(name, use_kl)
        )
        return lambda: stage.estimate_advantages(columns, is_valid)

    return {
        "metrics of a step": lambda: step_metrics(batch, work),
        "engine against trainer": lambda: compute_mismatch_statistics(
            batch.rollout_log_probs, old, batch.response_mask
        ),
        **{f"correction, {preset}": corrected(preset) for preset in PRESETS},
        **{f"advantages, {name}": estimated(name) for name in ESTIMATORS},
        "advantages, grpo, KL in the reward": estimated("grpo", use_kl=True),
    }


def run_parts(name: str, use_kl: bool) -> RunParts:
    entry = ADV_ESTIMATORS.get(name)
    return RunParts(
        entry.build,
        None if entry.params is None else entry.params(),
        needs_reference=use_kl,
        needs_token_rewards="token_rewards" in entry.needs,
        needs_greedy_rewards="greedy_rewards" in entry.needs,
    )


def run(is_quick: bool) -> CaseResult:
    figures: list[Figure] = []
    details: dict[str, object] = {}
    for num_samples, length in QUICK_SHAPES if is_quick else SHAPES:
        batch = make_batch(num_samples, length)
        layout = ParallelLayout(NUM_REPLICAS)
        work = PerformanceBasis(
            16,
            NUM_REPLICAS,
            NUM_REPLICAS,
            layout,
            4 * length,
            length // 8,
            1,
            policy_hf_config=TINY,
            critic_hf_config=TINY,
        )
        columns = [getattr(batch, name).numpy() for name in COLUMNS]

        def sums(columns: list[np.ndarray] = columns) -> Parts:
            return {"total": cpu_seconds(lambda: [column.sum() for column in columns])}

        parts = parts_of(batch, work)
        variants = {what: partial(_measured, part) for what, part in parts.items()}
        turns = take_turns({"sums": sums, **variants}, [(what, "sums") for what in parts])
        shape = f"{num_samples} x {length}"
        bar = None if is_quick else BAR
        for what in parts:
            ratio = turns.ratio(what, "sums").value
            figures.append(
                Figure(f"{what}, {shape}", significant(ratio), "x", "numpy sum of the columns", bar)
            )
        details[shape] = turns.summary()
    return CaseResult(tuple(figures), {"columns": COLUMNS, "cpu_s": details})


def _measured(part: Callable[[], object]) -> Parts:
    return {"total": cpu_seconds(part)}


CASE = Case("C11", "advantages, correction and metrics of a step on the controller", run)
