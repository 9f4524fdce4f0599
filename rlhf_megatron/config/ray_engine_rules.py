"""Rules on engines under Ray, which says where their servers run and what devices they have."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded

RUNTIME = "trainer.runtime"
DEVICES = "CUDA_VISIBLE_DEVICES"


def engine_devices(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    if c.trainer.runtime != "ray" or c.rollout.engine != "sglang" or c.rollout.endpoints:
        return
    keys = [f"rollout.sglang.args.{name}" for name in c.rollout.sglang.args if name.replace("-", "_") == "base_gpu_id"]
    keys += [f"rollout.sglang.env.{DEVICES}"] if DEVICES in c.rollout.sglang.env else []
    for key in keys:
        yield Problem(
            f"{key} names devices, but with {RUNTIME} ray each server sees those that Ray gives it; remove it.", (key,)
        )
