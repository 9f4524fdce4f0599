"""GAE over packed ragged samples: the doubling scan against the plain loop, and against the field's padded one.

    python -m benchmarks.bench_gae [--repetitions 5] [--samples 512] [--longest 1024]

`plain`: a Python loop over samples and tokens. `padded`: samples as the rows of a padded matrix, a loop over its
columns from the last to the first (what trainers of this kind do); padding and unpadding are part of it, as ours packs
and unpacks. All three take the same columns and must agree before anything is timed; whitening is in none of them.
Lengths are lognormal with a median of a quarter of the longest. One thread; wall and CPU time. Writes
benchmarks/results/gae.json.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.common import ratios, take_turns, write_result
from rlhf_megatron.algorithms.advantages.base import AdvantageInputs
from rlhf_megatron.algorithms.advantages.gae import GAEParams, gae

PARAMS = GAEParams(gamma=0.99, lam=0.95, whiten=False)
NUM_PROMPT_TOKENS = 8


def make_inputs(num_samples: int, longest: int) -> AdvantageInputs:
    """Prompts of 8 tokens, ragged responses."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(num_samples, generator=generator).exp() * longest / 4).long().clamp(1, longest)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + NUM_PROMPT_TOKENS).cumsum(0)])
    total = int(offsets[-1])
    position = torch.arange(total) - offsets[:-1].repeat_interleave(offsets.diff())
    mask = position >= NUM_PROMPT_TOKENS
    return AdvantageInputs(
        rewards_B=torch.zeros(num_samples),
        group_ids_B=torch.zeros(num_samples, dtype=torch.int64),
        is_valid_B=torch.ones(num_samples, dtype=torch.bool),
        response_mask_T=mask,
        offsets=offsets,
        token_rewards_T=torch.randn(total, generator=generator) * mask,
        values_T=torch.randn(total, generator=generator) * mask,
    )


def plain(inputs: AdvantageInputs) -> Tensor:
    """[T] float32."""
    assert inputs.token_rewards_T is not None and inputs.values_T is not None
    rewards, values = inputs.token_rewards_T.tolist(), inputs.values_T.tolist()
    mask, offsets = inputs.response_mask_T.tolist(), inputs.offsets.tolist()
    advantages = [0.0] * len(values)
    for start, end in pairwise(offsets):
        next_value = advantage = 0.0
        for t in range(end - 1, start - 1, -1):
            if mask[t]:
                delta = rewards[t] + PARAMS.gamma * next_value - values[t]
                advantage = delta + PARAMS.gamma * PARAMS.lam * advantage
                next_value = values[t]
                advantages[t] = advantage
    return torch.tensor(advantages)


def padded(inputs: AdvantageInputs) -> Tensor:
    """[T] float32."""
    assert inputs.token_rewards_T is not None and inputs.values_T is not None
    lengths = inputs.offsets.diff()
    is_real = torch.arange(int(lengths.max())) < lengths[:, None]
    shape = is_real.shape
    rewards, values = (
        torch.zeros(shape).masked_scatter_(is_real, column) for column in (inputs.token_rewards_T, inputs.values_T)
    )
    mask = torch.zeros(shape).masked_scatter_(is_real, inputs.response_mask_T.float())
    next_values = carried = torch.zeros(shape[0])
    columns = []
    for t in range(shape[1] - 1, -1, -1):
        delta = rewards[:, t] + PARAMS.gamma * next_values - values[:, t]
        advantages = delta + PARAMS.gamma * PARAMS.lam * carried
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        carried = advantages * mask[:, t] + (1 - mask[:, t]) * carried
        columns.append(carried)
    return (torch.stack(columns[::-1], 1) * mask)[is_real]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--longest", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs(args.samples, args.longest)
    runs: dict[str, Callable[[], Tensor]] = {
        "doubling": lambda: gae(inputs, PARAMS).advantages_T,
        "plain": lambda: plain(inputs),
        "padded": lambda: padded(inputs),
    }
    for name in ("plain", "padded"):
        torch.testing.assert_close(runs["doubling"](), runs[name](), rtol=1e-4, atol=1e-4)
    timings = take_turns(runs, args.repetitions)
    result = {
        "shape": {
            "samples": args.samples,
            "tokens": int(inputs.offsets[-1]),
            "longest": int(inputs.offsets.diff().max()),
        },
        "seconds": {name: timing.summary() for name, timing in timings.items()},
        "ratio": {name: ratios(timings["doubling"], timings[name])["cpu_median"] for name in ("plain", "padded")},
    }
    command = f"python -m benchmarks.bench_gae --samples {args.samples} --longest {args.longest}"
    path = write_result("gae", command, result)
    for name, timing in timings.items():
        print(f"{name:10} {1e3 * min(timing.cpu_s):9.2f} ms of CPU")
    print(f"doubling / plain {result['ratio']['plain']:.4f}, / padded {result['ratio']['padded']:.4f}; written: {path}")


if __name__ == "__main__":
    main()
