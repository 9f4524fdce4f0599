"""Where the host waits for the device in a call of an actor on one rank, under the rehearsal.

Prints {call: {place: [waits with one micro-batch, with several]}}."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).parent
sys.path.append(str(SUPPORT.parent / "gpu"))

import gpu_checks  # noqa: E402
import gpu_samples  # noqa: E402

# tokens of a micro-batch: 1 and 4 micro-batches
FEW = 300
MANY = 100


def place() -> str:
    """ "ranks/workers/sequence_packing.py:batch_of", or "ranks/workers/megatron_optimizer.py:step >
    core/optimizer/clip_grads.py:norm"
    """
    names = []
    for frame in traceback.extract_stack():
        for package in ("rlhf_megatron", "megatron"):
            _, found, path = frame.filename.rpartition(f"/{package}/")
            if found and "/tests/" not in frame.filename:
                names.append((package, f"{path}:{frame.name}"))
    ours = [number for number, (package, _) in enumerate(names) if package == "rlhf_megatron"]
    inner = names[ours[-1] :] if ours else names
    return " > ".join(dict.fromkeys((inner[0][1], inner[-1][1]))) if inner else "elsewhere"


def waits_of(call: Callable[[], Any]) -> Counter[str]:
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def main() -> dict[str, dict[str, tuple[int, int]]]:
    batch = gpu_samples.make_batch()
    found = {}
    with gpu_checks.one_rank_actor(torch.device("cuda"), torch.bfloat16) as (actor, _):
        few, many = (gpu_samples.share(batch, budget) for budget in (FEW, MANY))
        calls: dict[str, Callable[[Any, Any], Any]] = {
            "log_probs": lambda shard, plan: actor.log_probs(shard, plan, 1.0, with_entropy=True),
            "update": lambda shard, plan: actor.update(shard, plan, 1.0),
        }
        for name, call in calls.items():
            for _ in range(2):
                call(*few)  # what is done once: self-checks, buffers
            counts = [waits_of(partial(call, *given)) for given in (few, many)]
            places = sorted(counts[0] | counts[1])
            found[name] = {where: (counts[0][where], counts[1][where]) for where in places}
    return found


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
