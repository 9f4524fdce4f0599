"""A short supervised warm-up through the same actor worker, before the first RL step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_megatron.config.schema import WarmupConfig
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.evaluation import EvaluationResult
from rlhf_megatron.scheduler.mini_batches import supervised_mini_batch
from rlhf_megatron.scheduler.seeds import derive_seed
from rlhf_megatron.scheduler.tracker import Tracker


@dataclass(frozen=True)
class WarmupResult:
    num_steps: int  # supervised optimizer steps that were made
    evaluation: EvaluationResult | None  # the last one


def warm_up(
    config: WarmupConfig,
    group: WorkerGroup,
    tracker: Tracker,
    num_items: int,
    make_batch: Callable[[list[int]], TokenBatch],
    accuracy: Callable[[int], EvaluationResult] | int,
    token_budget: int,
    seed: int,
) -> WarmupResult:
    """Supervised steps until `stop_accuracy` of sampled held-out answers or `max_steps`.

    `make_batch`: training items by index -> prompts with their right answers. `accuracy(n)`: syncs the engines and
    samples the first n held-out items; a number: make this many steps and never evaluate. The optimizer of the actor
    is a fresh one afterwards.
    """
    last_step = accuracy if isinstance(accuracy, int) else config.max_steps
    result: EvaluationResult | None = None
    step = 0
    for step in range(1, last_step + 1):
        items = random.Random(derive_seed(seed, step, 3)).choices(range(num_items), k=config.batch_size)
        update = group.scatter(
            "actor.update",
            supervised_mini_batch(make_batch(items)),
            token_budget=token_budget,
            temperature=1.0,
            loss="sft",
        ).result()
        metrics = {"warmup/loss": update.sums["actor/sft_loss"], "warmup/grad_norm": update.grad_norm}
        if not isinstance(accuracy, int) and (step % config.test_freq == 0 or step == last_step):
            result = accuracy(config.test_samples)
            metrics["warmup/accuracy"] = result.accuracy
            tracker.warmup(step, metrics)
            if result.accuracy >= config.stop_accuracy:
                break
        else:
            tracker.write(step, "warmup", metrics)
    group.broadcast("actor.reset_optimizer", phase="rl").result()
    return WarmupResult(step, result)
