"""G11: log-probs of rollouts where the head runs on response tokens only, against a head that runs
on all tokens.

The head alone saves what the share of response tokens says; the whole pass saves the
head's part of that.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.head import (
    DEFAULT_CHUNK_SIZE,
    FULL,
    QUICK,
    QUICK_CHUNK_SIZES,
    HeadInputs,
    OurHead,
    backends,
)
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.small_models import (
    CONFIGS,
    QUICK_CONFIG,
    DeviceWeights,
    make_batch,
    make_lengths,
)
from benchmarks.gpu.timing import time_run
from benchmarks.gpu.train_step import LONGEST, NUM_TOKENS, TOKEN_BUDGETS, make_actor
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.data.replica_plan import plan_replicas, take_replica_shard
from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
from rlhf_megatron.weights.parallel_layout import ParallelLayout

SHARES = (0.25, 0.5)  # of response tokens
BAR = 0.95  # of what the share promises


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    recorder.attempt("head alone", lambda: _head(recorder))
    recorder.attempt("whole pass", lambda: _pass(recorder))
    return recorder.result()


def _head(recorder: Recorder) -> None:
    inputs = HeadInputs.make(QUICK if recorder.is_quick else FULL, recorder.device)
    num_tokens = inputs.shape.num_tokens
    chunk_size = QUICK_CHUNK_SIZES[0] if recorder.is_quick else DEFAULT_CHUNK_SIZE
    backend = backends(recorder.device)[-1]
    whole = OurHead(inputs, backend, chunk_size).time_forward(recorder.device, recorder.limit_s)
    recorder.add_times("head, all tokens", whole)
    generator = torch.Generator().manual_seed(0)
    for share in SHARES:
        rows_R = (
            torch.randperm(num_tokens, generator=generator)[: int(share * num_tokens)].sort().values
        )
        head = OurHead(inputs, backend, chunk_size, rows_R=rows_R.to(recorder.device))
        times = head.time_forward(recorder.device, recorder.limit_s)
        recorder.add_times(f"head, {share:.0%} of the tokens", times)
        gain = whole.median / times.median
        recorder.add(
            f"head, {share:.0%} of the tokens: speed", gain, "x", "all tokens", BAR / share, True
        )


def _pass(recorder: Recorder) -> None:
    """The actor's pass over packed samples; for "all tokens" every token counts as response."""
    hf_config = QUICK_CONFIG if recorder.is_quick else CONFIGS["0.5B"]
    lengths = make_lengths(256, 64) if recorder.is_quick else make_lengths(NUM_TOKENS, LONGEST)
    plan = plan_replicas(lengths, 1, 128 if recorder.is_quick else TOKEN_BUDGETS[0])[0]
    world = create_world(ParallelLayout(1), recorder.device)
    try:
        actor = make_actor(hf_config, DeviceWeights(recorder.device), world, recorder.dtype)
        speeds = {}
        for share in (1.0, *SHARES):
            shard = take_replica_shard(
                make_batch(lengths, hf_config["vocab_size"], 1.0 - share), plan
            )
            run_pass = lambda shard=shard: actor.log_probs(shard, plan, 1.0, with_entropy=True)  # noqa: E731
            times = time_run(run_pass, recorder.device, recorder.limit_s)
            speeds[share] = sum(lengths) / times.median
            recorder.add_times(f"whole pass, response {share:.0%}", times)
            recorder.add(f"whole pass, response {share:.0%}, speed", speeds[share], "tokens/s")
        for share in SHARES:
            gain = speeds[share] / speeds[1.0]
            recorder.add(
                f"whole pass, response {share:.0%}: speed", gain, "x", "a head on all tokens"
            )
    finally:
        destroy_world()


CASE = Case("G11", "log-prob pass with and without response compaction", run)
