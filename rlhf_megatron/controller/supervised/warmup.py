"""A short supervised warm-up through the same actor worker, before the first RL step."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.config.schema import SamplingConfig, WarmupConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.supervised.supervised_learners import AnswerLearner
from rlhf_megatron.data.document_samples import DocumentSampleBatch, InMemorySampleSet
from rlhf_megatron.data.document_sets import make_answer_samples
from rlhf_megatron.data.prompt_items import WeightedPromptItems
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.runtime.role_proxies import ActorProxy
from rlhf_megatron.stop import StopRequest


@dataclass(frozen=True)
class WarmupResult:
    num_steps: int  # supervised optimizer steps that were made
    last_evaluation: EvaluationResult | None  # the last one


def run_supervised_warmup(
    config: WarmupConfig,
    actor: ActorProxy,
    tracker: RunTracker,
    num_items: int,
    make_batch: Callable[[list[int]], DocumentSampleBatch],
    measure_accuracy: Callable[[int], EvaluationResult] | int,
    token_budget: int,
    seed: int,
    should_stop: Callable[[], None] = lambda: None,
    count_step: Callable[[bool], None] = lambda is_skipped: None,
) -> WarmupResult:
    """Make supervised steps until the sampled held-out accuracy reaches `stop_accuracy`, or
    `max_steps` are made. Reset the actor's optimizer afterwards.

    `make_batch` returns the training items of these indices as prompts with their right answers.
    `measure_accuracy(n)` syncs the engines and evaluates the first n held-out items; a number
    instead means: make this many steps and never evaluate. `should_stop` raises where the run is to
    end; `count_step` is called after each step with whether it was skipped, and may raise too.
    """
    last_step = measure_accuracy if isinstance(measure_accuracy, int) else config.max_steps
    result: EvaluationResult | None = None
    learner = AnswerLearner(actor, token_budget)
    step = 0
    for step in range(1, last_step + 1):
        should_stop()
        tracker.show_stage(f"warm-up, step {step} of at most {last_step}")
        items = random.Random(derive_seed(seed, step, 3)).choices(
            range(num_items), k=config.batch_size
        )
        update, _ = learner.update_model(make_batch(items))
        count_step(update.is_skipped)
        metrics = {
            "warmup/loss": update.sums["actor/sft_loss"],
            "warmup/grad_norm": update.grad_norm,
        }
        if not isinstance(measure_accuracy, int) and (
            step % config.test_freq == 0 or step == last_step
        ):
            result = measure_accuracy(config.test_samples)
            metrics["warmup/accuracy"] = result.accuracy
            tracker.log_warmup_step(step, metrics)
            if result.accuracy >= config.stop_accuracy:
                break
        else:
            tracker.log_metrics(step, "warmup", metrics)
    actor.reset_optimizer(phase="rl").result()
    return WarmupResult(step, result)


def run_policy_warmup(
    stages: StepStages,
    tracker: RunTracker,
    prompt_sets: PromptSets,
    stop_request: StopRequest,
    num_steps: int | None = None,
) -> WarmupResult:
    """Warm the policy up, and start the reference and the critic from the result where they have no
    path of their own. Return the number of steps made (0 where the run has no warm-up) and the last
    evaluation.

    `num_steps`: in a replay, the steps to make without evaluation. Raise RunStopped between two
    steps.
    """
    config = stages.config
    if not config.warmup.max_steps:
        return WarmupResult(0, None)

    items = WeightedPromptItems(prompt_sets.sources)

    def make_supervised_batch(item_indices: list[int]) -> DocumentSampleBatch:
        """Return the items of these indices with their right answers as documents."""
        samples = InMemorySampleSet(
            make_answer_samples([items[i] for i in item_indices], stages.run_data.tokenizer)
        )
        return samples.make_batch(range(len(samples)))

    def sync_and_measure_accuracy(num_items: int) -> EvaluationResult:
        """Sync the engines, evaluate at temperature 1, and give the devices back to the trainer."""
        stages.sync_weights()
        result = stages.measure_accuracy(num_items, SamplingConfig(temperature=1.0))
        stages.turns.give_devices_to_trainer()
        return result

    with tracker.count_as_productive():
        result = run_supervised_warmup(
            config.warmup,
            stages.workers.actor,
            tracker,
            len(items),
            make_supervised_batch,
            sync_and_measure_accuracy if num_steps is None else num_steps,
            config.actor.ppo_max_token_len_per_gpu,
            config.trainer.seed,
            stop_request.raise_if_requested,
            stages.skips.count_supervised_step,
        )
    if stages.setup.needs_reference and config.reference.path is None:
        stages.workers.host.refresh_reference().result()
    _pass_policy_to_critic(
        stages,
        tracker.run_dir / "warm_model",
        keep_directory=config.warmup.save_hf and num_steps is None,
    )
    return result


def _pass_policy_to_critic(stages: StepStages, directory: Path, keep_directory: bool) -> None:
    """Load the warmed-up policy into the critic, where there is a critic without a path of its own.
    The weights go through `directory`, in Hugging Face layout, because the critic may run on other
    ranks in another layout.

    With `keep_directory` write the directory in any case and keep it; without, remove it
    afterwards.
    """
    is_critics_start = stages.setup.needs_values and stages.config.critic.path is None
    if keep_directory or is_critics_start:
        stages.workers.host.save_hf(directory=directory).result()
    if is_critics_start:
        stages.workers.critic.load_hf(directory=directory).result()
        if not keep_directory:
            shutil.rmtree(directory)
