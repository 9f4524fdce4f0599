"""What a step's times and counts come to: tokens a second, time a token, MFU, balance, lag,
memory, variance.
"""

from dataclasses import replace

import pytest
import torch
from data_samples import scored
from scheduler_samples import to_train, train_batch

from benchmarks.kernels import stage_metrics
from rlhf_megatron.config.schema import (
    ActorConfig,
    MegatronConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    compute_variance_metrics,
    compute_version_metrics,
    split_signal_and_noise,
)
from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    FORWARD_PASSES,
    GIB,
    TRAINING_PASSES,
    PerformanceBasis,
    compute_flops_utilisation,
    compute_memory_metrics,
    compute_replica_balance,
    compute_throughput,
    compute_time_per_token,
    count_model_flops,
    find_peak_tflops,
    make_performance_basis,
)
from rlhf_megatron.ranks.workers.rank_reports import MemoryReport
from rlhf_megatron.weights.parallel_layout import ParallelLayout

TINY = {
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 3,
    "intermediate_size": 5,
    "vocab_size": 7,
}
# Weights of a layer: q and output 2 x 4 x 6, k and v 2 x 4 x 3, MLP 3 x 4 x 5 = 48 + 24 + 60 =
# 132; of both 264.


def work(dp: int = 1) -> PerformanceBasis:
    layout = ParallelLayout(dp)
    return PerformanceBasis(
        4, 2, 1, layout, 64, 8, num_critic_epochs=2, policy_hf_config=TINY, critic_hf_config=TINY
    )


def test_flops_by_hand() -> None:
    lengths = torch.tensor([2, 4])
    # 6 tokens x 264 weights x 2 = 3168; pairs (4 + 16) / 2 = 10: 10 x 4 x 2 layers x 2 heads x 3 =
    # 480; the head on 3 tokens: 2 x 4 x 7 x 3 = 168.
    assert count_model_flops(TINY, lengths, 3, FORWARD_PASSES) == 3168 + 480 + 168
    assert count_model_flops(TINY, lengths, 3, TRAINING_PASSES) == 3 * (3168 + 480 + 168)
    assert count_model_flops(TINY, lengths, 3, FORWARD_PASSES, head_size=1) == 3168 + 480 + 24


def test_flops_are_told_of_known_models_only() -> None:
    assert (
        count_model_flops(TINY | {"num_experts": 8}, torch.tensor([2]), 1, FORWARD_PASSES) is None
    )
    assert count_model_flops({}, torch.tensor([2]), 1, FORWARD_PASSES) is None
    plain = {
        key: value for key, value in TINY.items() if key not in ("head_dim", "num_key_value_heads")
    }
    # Head size 4 / 2 = 2, as many heads of keys as of queries: 4 x 4 x 4 + 60 = 124 weights;
    # head 2 x 4 x 7.
    assert (
        count_model_flops(plain, torch.tensor([1]), 1, FORWARD_PASSES)
        == 2 * 2 * 124 + 4 * 2 * 2 * 2 * 0.5 + 56
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GB200", 2500.0),
        ("", None),
        ("Some H2000", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert find_peak_tflops(name) == peak


def test_throughput_counts_all_devices() -> None:
    assert (
        compute_throughput({"perf/total_num_tokens": 600.0, "timing_s/step": 4.0}, 3)[
            "perf/throughput"
        ]
        == 50.0
    )


def test_time_per_token_by_hand() -> None:
    metrics = {
        "perf/total_num_tokens": 500.0,
        "response_length/mean": 4.0,
        "rollout/num_samples": 50.0,
    }
    metrics |= {"timing_s/generate": 2.0, "timing_s/advantages": 0.5}
    found = compute_time_per_token(
        metrics, {"actor.update": 5.0, "critic.values": 1.0, "host.save_hf": 9.0}
    )
    assert found == pytest.approx(
        {
            "timing_per_token_ms/gen": 10.0,  # over 200 response tokens
            "timing_per_token_ms/adv": 1.0,
            "timing_per_token_ms/update_actor": 10.0,
            "timing_per_token_ms/values": 2.0,
        }
    )


def test_utilisation_by_hand() -> None:
    batch = to_train(scored())  # 6 tokens in samples of 3, 1, 2; 3 response tokens
    forward = 2.0 * 264 * 6 + 4 * 2 * 2 * 3 * (9 + 1 + 4) / 2 + 2 * 4 * 7 * 3
    as_critic = forward - 2 * 4 * 6 * 3
    metrics = {"perf/peak_tflops": 1e-9, "actor/num_epochs": 2.0}  # 1000 a second
    calls = {"actor.update": 4.0, "actor.log_probs": 0.5, "critic.update": 2.0}
    expected = pytest.approx(
        {
            "perf/peak_tflops": 1e-9,
            "perf/mfu/actor": 3 * 2 * forward / (4.0 * 2 * 1000),
            "perf/mfu/actor_infer": forward / (0.5 * 2 * 1000),
            "perf/mfu/critic": 3 * 2 * as_critic / (2.0 * 1 * 1000),
        }
    )
    assert compute_flops_utilisation(metrics, calls, batch, work()) == expected
    told = replace(work(), device_peak_tflops=1e-9)
    assert (
        compute_flops_utilisation(metrics | {"perf/peak_tflops": 5.0}, calls, batch, told)
        == expected
    ), "the configuration's wins"
    assert compute_flops_utilisation({"actor/num_epochs": 2.0}, calls, batch, told) == expected, (
        "also of a device that is not known"
    )
    assert compute_flops_utilisation({"actor/num_epochs": 1.0}, calls, batch, work()) == {}, (
        "a CPU has no peak"
    )


def test_balance_by_hand() -> None:
    # Samples of 2, 3, .. 7 tokens; in order replicas have 9 and 18; dealt by cost they
    # are nearly even.
    batch = train_batch(6)
    found = {
        name.partition("/")[2]: value
        for name, value in compute_replica_balance(batch, work(dp=2)).items()
    }
    assert (found["min"], found["max"], found["minmax_diff"], found["mean"]) == (
        9.0,
        18.0,
        9.0,
        13.5,
    )
    assert found["balanced_min"] + found["balanced_max"] == 27.0 and found["balanced_max"] <= 15.0
    assert set(compute_replica_balance(batch, work()).values()) == {27.0, 0.0}, (
        "one replica has all"
    )
    alike = replace(batch, token_ids=torch.zeros_like(batch.token_ids))  # one prompt, of a token
    of_sharing = [
        replace(work(dp), actor_layout=ParallelLayout(dp, shares_prompts=True)) for dp in (1, 2)
    ]
    assert [compute_replica_balance(alike, one)["global_seqlen/shared"] for one in of_sharing] == [
        5.0,
        4.0,
    ], "once a replica"
    assert compute_replica_balance(batch, of_sharing[0])["global_seqlen/shared"] == 0.0


def test_what_rates_refer_to() -> None:
    config = RunConfig(
        trainer=TrainerConfig(nnodes=2, n_gpus_per_node=8),
        actor=ActorConfig(megatron=MegatronConfig(tensor_model_parallel_size=4), ppo_epochs=3),
        rollout=RolloutConfig(num_engines=2),
    )
    found = make_performance_basis(config)
    assert (
        found.num_devices,
        found.num_actor_ranks,
        found.actor_layout.dp,
        found.num_critic_epochs,
    ) == (18, 16, 4, 3)
    shared = replace(config, rollout=replace(config.rollout, colocated=True))
    assert make_performance_basis(shared).num_devices == 16


def test_versions_by_hand() -> None:
    """Trained at version 3; samples of (1 then 2), (1, nothing told), (2)."""
    found = compute_version_metrics(3, scored())
    assert found == pytest.approx(
        {
            "policy/lag": 5 / 3,
            "training/off_policy/trajectory_staleness/mean": 5 / 3,
            "training/off_policy/trajectory_staleness/max": 2.0,
            "training/off_policy/trajectory_staleness/min": 1.0,
            "training/off_policy/trajectory_spans/mean": 4 / 3,
            "training/off_policy/trajectory_spans/max": 2.0,
            "training/off_policy/trajectory_spans/min": 1.0,
        }
    )
    resumed = replace(scored(), policy_versions=torch.tensor([2, 1, 2]))  # dispatched late
    assert (
        compute_version_metrics(3, resumed)["training/off_policy/trajectory_staleness/max"] == 2.0
    )
    assert (
        compute_version_metrics(3, replace(scored(), version_spans=None))[
            "training/off_policy/trajectory_spans/max"
        ]
        == 1.0
    )


def test_memory_is_the_largest_of_a_rank() -> None:
    half = int(GIB / 2)
    on_cpu = [MemoryReport(0, 0, 0, 0, half), MemoryReport(0, 0, 0, 0, 4 * half)]
    assert compute_memory_metrics(on_cpu) == {"perf/cpu_memory_used_gb": 2.0}
    on_gpu = [
        MemoryReport(1, 1, 1, 1, half, 6 * half, 8 * half, name)
        for name in ("NVIDIA H200", "NVIDIA A100")
    ]
    assert compute_memory_metrics(on_gpu) == {
        "perf/cpu_memory_used_gb": 0.5,
        "perf/max_memory_allocated_gb": 3.0,
        "perf/max_memory_reserved_gb": 4.0,
        "perf/peak_tflops": 312.0,
    }
    assert "perf/peak_tflops" not in compute_memory_metrics(
        [replace(on_gpu[0], device_name="unheard of"), on_gpu[1]]
    )


def test_variance_proxies_by_hand() -> None:
    """Response tokens 1, 2 (advantages 3, -1: mean 1) and 5 (advantage 4); the second
    sample is masked.
    """
    half = torch.full((6,), 0.5)
    batch = to_train(scored(), old_log_probs=half.log(), sum_squares=torch.full((6,), 0.75))
    # A token has 1 - 2 x 0.5 + 0.75 = 0.75; w is 1.5 and 0.75; A^2 is 1 and 16.
    found = compute_variance_metrics(batch, {"actor/grad_norm": 2.0})
    assert found == pytest.approx(
        {
            "variance_proxy/proxy1_signal_strength": 4.0,
            "variance_proxy/proxy2_total_power": (1.5 + 12.0) / 2,
            "variance_proxy/proxy3_pure_noise": 6.75 - 4.0,
            "variance_proxy/expected_a_squared": 8.5,
            "variance_proxy/expected_w": 1.125,
        }
    )
    assert compute_variance_metrics(to_train(scored(), old_log_probs=half.log()), {}) == {}
    assert split_signal_and_noise(1.0, 2.0, 5) == {
        "variance_proxy/proxy1_signal_strength": 4.0,
        "variance_proxy/proxy3_pure_noise": 0.0,
    }


def test_all_of_these_are_listed() -> None:
    batch = to_train(scored(), old_log_probs=torch.zeros(6), sum_squares=torch.ones(6))
    metrics = {
        "perf/peak_tflops": 1.0,
        "actor/num_epochs": 1.0,
        "perf/total_num_tokens": 6.0,
        "timing_s/step": 1.0,
    }
    calls = dict.fromkeys(
        (
            "actor.update",
            "actor.log_probs",
            "critic.update",
            "critic.values",
            "reference.log_probs",
        ),
        1.0,
    )
    found = {
        **compute_version_metrics(3, batch),
        **compute_replica_balance(batch, work()),
        **compute_flops_utilisation(metrics, calls, batch, work()),
        **compute_time_per_token(metrics, calls),
        **compute_throughput(metrics, 1),
        **compute_variance_metrics(batch, {"actor/grad_norm": 1.0}),
    }
    assert len(found) > 20 and [name for name in found if find_metric(name) is None] == []


def test_the_benchmark_of_a_steps_metrics_makes_listed_ones_and_its_figures() -> None:
    batch = stage_metrics.make_batch(16, 32)
    found = stage_metrics.step_metrics(batch, replace(work(dp=2), token_budget=64))
    assert len(found) > 70 and [name for name in found if find_metric(name) is None] == []
    figures = stage_metrics.run(is_quick=True).figures
    num_parts = 3 + len(stage_metrics.PRESETS) + len(stage_metrics.ESTIMATORS)
    assert [figure.baseline for figure in figures] == ["numpy sum of the columns"] * num_parts
