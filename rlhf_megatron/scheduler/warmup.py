"""A short supervised warm-up through the same actor worker, before the first RL step."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.config.schema import SamplingConfig, WarmupConfig
from rlhf_megatron.data.documents import answered
from rlhf_megatron.data.items import WeightedItems
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.data.samples import Documents, SampleBatch
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.evaluation.evaluation import EvaluationResult
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.runtime.proxies import ActorProxy
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.supervised.learning import Answers


@dataclass(frozen=True)
class WarmupResult:
    num_steps: int  # supervised optimizer steps that were made
    evaluation: EvaluationResult | None  # the last one


def warm_up(
    config: WarmupConfig,
    actor: ActorProxy,
    tracker: Tracker,
    num_items: int,
    make_batch: Callable[[list[int]], SampleBatch],
    accuracy: Callable[[int], EvaluationResult] | int,
    token_budget: int,
    seed: int,
    should_stop: Callable[[], None] = lambda: None,
    count: Callable[[bool], None] = lambda is_skipped: None,
) -> WarmupResult:
    """Supervised steps until `stop_accuracy` of sampled held-out answers or `max_steps`.

    `make_batch`: training items by index -> prompts with their right answers. `accuracy(n)`: syncs the engines and
    samples the first n held-out items; a number: make this many steps and never evaluate. `should_stop` raises where
    the run is to end, and so may `count`, which is told of each step whether it was skipped. The optimizer of the actor
    is a fresh one afterwards.
    """
    last_step = accuracy if isinstance(accuracy, int) else config.max_steps
    result: EvaluationResult | None = None
    learner = Answers(actor, token_budget)
    step = 0
    for step in range(1, last_step + 1):
        should_stop()
        tracker.waiting(f"warm-up, step {step} of at most {last_step}")
        items = random.Random(derive_seed(seed, step, 3)).choices(range(num_items), k=config.batch_size)
        update, _ = learner.update(make_batch(items))
        count(update.is_skipped)
        metrics = {"warmup/loss": update.sums["actor/sft_loss"], "warmup/grad_norm": update.grad_norm}
        if not isinstance(accuracy, int) and (step % config.test_freq == 0 or step == last_step):
            result = accuracy(config.test_samples)
            metrics["warmup/accuracy"] = result.accuracy
            tracker.warmup(step, metrics)
            if result.accuracy >= config.stop_accuracy:
                break
        else:
            tracker.write(step, "warmup", metrics)
    actor.reset_optimizer(phase="rl").result()
    return WarmupResult(step, result)


def warm_up_policy(
    stages: Stages,
    tracker: Tracker,
    sets: PromptSets,
    stop: StopRequest,
    num_steps: int | None = None,
) -> WarmupResult:
    """The warm-up of a run, and what starts from its result: reference and critic.

    `num_steps`: in a replay, the steps to make without evaluation. Raises RunStopped between two steps.
    """
    config = stages.config
    if not config.warmup.max_steps:
        return WarmupResult(0, None)

    items = WeightedItems(sets.sources)

    def make_batch(indices: list[int]) -> SampleBatch:
        samples = Documents(answered([items[i] for i in indices], stages.data.tokenizer))
        return samples.batch(range(len(samples)))

    def accuracy(num_items: int) -> EvaluationResult:
        stages.sync()
        result = stages.accuracy(num_items, SamplingConfig(temperature=1.0))
        stages.turns.to_trainer()
        return result

    with tracker.productive():
        result = warm_up(
            config.warmup,
            stages.workers.actor,
            tracker,
            len(items),
            make_batch,
            accuracy if num_steps is None else num_steps,
            config.actor.ppo_max_token_len_per_gpu,
            config.trainer.seed,
            stop.check,
            stages.skips.count_supervised,
        )
    if stages.parts.needs_reference and config.reference.path is None:
        stages.workers.host.refresh_reference().result()
    _hand_on(stages, tracker.run_dir / "warm_model", is_kept=config.warmup.save_hf and num_steps is None)
    return result


def _hand_on(stages: Stages, directory: Path, is_kept: bool) -> None:
    """The warmed-up policy as a Hugging Face directory, from which the critic starts unless it has a path of its own.

    Through files because the critic may stand on other ranks in another layout.
    """
    is_critics_start = stages.parts.needs_values and stages.config.critic.path is None
    if is_kept or is_critics_start:
        stages.workers.host.save_hf(directory=directory).result()
    if is_critics_start:
        stages.workers.critic.load_hf(directory=directory).result()
        if not is_kept:
            shutil.rmtree(directory)
