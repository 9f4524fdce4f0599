"""Whole runs on device cuda with right numbers, each against a run of the same configuration on one
rank of the CPU.

A layout changes no figure beyond rounding, so one run on the CPU serves all layouts of
a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TP, PP, CP, EP = (
    f"actor.megatron.{axis}_parallel_size"
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model")
)
# Two steps of 8 prompts x 4 samples in two mini-batches of several micro-batches. Samples are drawn
# and batched the same way on every device, and all of them are written down.
SHORT = {
    "actor.megatron.sequence_parallel": False,
    "actor.mini_batch_size": 16,
    "actor.ppo_max_token_len_per_gpu": 80,
    "data.train_batch_size": 8,
    "rollout.n": 4,
    "rollout.update_weights_bucket_megabytes": 1,
    "trainer.test_freq": 0,
    "trainer.test_samples": 40,
    "trainer.val_before_train": True,
    "trainer.samples_kept": 32,
    "trainer.desync_freq": 1,
    "trainer.deterministic": True,
    "trainer.save_last": "none",
}
# from random weights: three supervised steps first, and an entropy bonus, so that each step learns
EXPERTS = {
    "warmup.max_steps": 3,
    "warmup.batch_size": 16,
    "warmup.test_freq": 3,
    "warmup.test_samples": 8,
    "warmup.optim.lr_warmup_steps": 0,
    "actor.entropy_coeff": 0.01,
    "actor.megatron.sequence_parallel": False,
    EP: 1,
}


@dataclass(frozen=True)
class Baseline:
    """A configuration as one rank of a CPU runs it."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A run on device cuda. `settings` are added to those of its baseline."""

    name: str
    baseline: str
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    resumes: str = ""  # the case from whose first step it goes on
    is_compared: bool = True  # else only its end is looked at: what it learns from depends on time


@dataclass(frozen=True)
class Program:
    """Checks numbers of its own on device cuda, and fails where one is wrong. `words`
    follow "python -m".
    """

    name: str
    words: str  # {folder}: of the runs
    num_ranks: int = 1


BASELINES = {
    "grpo": Baseline("quickstart_warm"),
    "ppo": Baseline("quickstart_ppo", {"trainer.critic_warmup": 0}),
    "experts": Baseline("quickstart_moe", EXPERTS),
    "latent": Baseline("quickstart_mla", EXPERTS),
    "async": Baseline(
        "quickstart_async",
        {
            "model.path": "examples/quickstart/warm_model",
            "model.init_seed": None,
            "warmup.max_steps": 0,
            "schedule.params.max_lag": 1,
        },
    ),
}
CASES = (
    Case("one rank", "grpo", 1, {"trainer.save_freq": 1}),
    Case("tp2", "grpo", 2, {TP: 2, "actor.megatron.sequence_parallel": True}),
    Case("pp2", "grpo", 2, {PP: 2}),
    Case("dp2", "grpo", 2),
    Case("dp2 shared prompts", "grpo", 2, {"actor.megatron.share_prompts": True}),
    Case("cp2", "grpo", 2, {CP: 2}),
    Case("tp2 pp2", "grpo", 4, {TP: 2, PP: 2}),
    Case("colocated", "grpo", 1, {"rollout.colocated": True}),
    Case("colocated tp2", "grpo", 2, {TP: 2, "rollout.colocated": True}),
    Case("files", "grpo", 1, {"rollout.weight_transport": "disk"}),
    Case("beside a GPU", "grpo", 1, {"trainer.device": "cpu"}),
    Case(
        "bfloat16",
        "grpo",
        1,
        {"model.dtype": "bfloat16", "rollout.dtype": "bfloat16"},
        is_compared=False,
    ),
    Case("fsdp", "grpo", 1, {"actor.backend": "fsdp"}),
    Case("fsdp dp2", "grpo", 2, {"actor.backend": "fsdp"}),
    Case("resumed", "grpo", 1, resumes="one rank"),
    Case("ppo", "ppo", 1),
    Case("ppo pp2", "ppo", 2, {PP: 2}),
    Case("experts", "experts", 1),
    Case("experts ep2", "experts", 2, {EP: 2}),
    Case("experts tp2 ep2", "experts", 2, {TP: 2, EP: 2, "actor.megatron.sequence_parallel": True}),
    Case("latent", "latent", 1),
    Case("latent tp2 ep2", "latent", 2, {TP: 2, EP: 2, "actor.megatron.sequence_parallel": True}),
    Case("asynchronous", "async", 1, {"trainer.deterministic": False}, is_compared=False),
)
PARITY = (
    "benchmarks.parity --device cuda --max-ranks 2 --in-turns --out {folder}/parity.json"
    " --dumps {folder}/parity"
)
PROGRAMS = (
    Program("parity", PARITY, 2),
    Program("triton", "tools.cuda_rehearsal.interpreted"),
    Program("servers", "tools.cuda_rehearsal.servers", 2),
)
