"""The whole supervised job on the controller: hosts up, or resumed; steps; held-out losses; checkpoints; summary.

Used by `rlhf-megatron sft` and `reward-model`. It has no engines and no rewards, and is otherwise a run
as `scheduler.run` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron import faults
from rlhf_megatron.config.rules.run import has_pairs, has_teacher, needs_reference, teaching
from rlhf_megatron.config.schema import DataConfig, ModelConfig, RunConfig, SFTConfig, TrainerConfig
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.data.documents import DocumentSets, load_documents
from rlhf_megatron.data.samples import DocumentSource, SampleBatch, drawn
from rlhf_megatron.data.seeds import seed_process
from rlhf_megatron.data.stream import Stream
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.observe.line_file import Attempts, RunClock, read_rows
from rlhf_megatron.observe.metrics.rates import HeadWatch, MemoryWatch
from rlhf_megatron.observe.run_dir import RunLock, write_text
from rlhf_megatron.observe.summary import facts_of_any, layouts_of, write_summary
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.plugins import digests, load_plugins
from rlhf_megatron.recovery.checkpointer import Checkpointer, check_replicas
from rlhf_megatron.recovery.export import best_step, closing_lines
from rlhf_megatron.recovery.keeper import Keeper, StageGuard
from rlhf_megatron.recovery.resume import CONFIG, RunState, architecture_of, facts_of, find_start
from rlhf_megatron.recovery.skips import Skips
from rlhf_megatron.recovery.watchdog import StageWatchdog
from rlhf_megatron.runtime.pool import PoolSpec, pools_of
from rlhf_megatron.runtime.proxies import ActorProxy, ReferenceProxy, Workers
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.loop import LoopPlan
from rlhf_megatron.scheduler.run import loop_plan, open_tracker
from rlhf_megatron.scheduler.update import update_metrics
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.supervised.learning import Learner, held_out_metrics, make_learner
from rlhf_megatron.workers.losses import distillation_params

HELD_OUT = "val/loss"


def load_job_data(
    model: ModelConfig, data: DataConfig, sft: SFTConfig, is_pairs: bool
) -> tuple[DocumentSets, Tokenizer]:
    """Documents and tokenizer of a job. Raises ValueError for what a user can fix; starts nothing."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.path)
    return load_documents(data, sft, tokenizer, is_pairs), tokenizer


def order_of(data: DataConfig, seed: int, sets: DocumentSets) -> Stream[DocumentSource]:
    """Return the order of samples; the batch of a step depends on the step alone. `seed`: where `data` has none."""
    return Stream(sets.sources, data.train_batch_size, data.shuffle, seed if data.seed is None else data.seed)


@dataclass
class Steps:
    """The steps of the job."""

    trainer: TrainerConfig
    batch_size: int
    workers: Workers
    sets: DocumentSets
    stream: Stream[DocumentSource]
    learner: Learner
    skips: Skips
    watches: tuple[Callable[[], dict[str, float]], ...]

    def next(self, step: int) -> SampleBatch:
        return drawn(self.sets.sources, self.stream.places(step))

    def update(self, step: int, batch: SampleBatch) -> dict[str, float]:
        """Make one optimizer step. Raises NonFiniteNumbers, ReplicasDiffer."""
        result, measured = self.learner.update(batch)
        self.skips.count_supervised(result.is_skipped, step)
        metrics = update_metrics("actor", 1, [result]) | measured
        del metrics["actor/loss"]  # it is sft/loss, or of a preference loss what its slopes make of the log-probs
        freq = self.trainer.desync_freq
        if freq and step % freq == 0:
            metrics |= check_replicas(self.workers.learning(has_critic=False))
        for metrics_of in self.watches:
            metrics |= metrics_of()
        metrics["sft/num_samples"] = float(len(batch))
        metrics["sft/num_trained_tokens"] = float(batch.tokens.response_mask.sum())
        metrics["training/epoch"] = self.stream.num_drawn / self.stream.num_prompts
        return metrics

    def held_out(self, is_final: bool) -> dict[str, float]:
        limit = None if is_final else self.trainer.test_samples
        return held_out_metrics(self.learner, self.sets.held_out, self.batch_size, limit)


def train_supervised(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    lock: RunLock,
    stop: StopRequest,
) -> None:
    """Make a run, or what is left of it, up to its summary, as `scheduler.run.train` does with engines."""
    trainer, sft, is_pairs, batch_size = config.trainer, config.sft, has_pairs(config), config.data.train_batch_size
    seed_process(trainer.seed, 0)
    load_plugins(config.plugins)
    sets, tokenizer = load_job_data(config.model, config.data, sft, is_pairs)
    stream = order_of(config.data, trainer.seed, sets)
    start = find_start(config, run_dir, stream)
    attempts = Attempts(run_dir)
    with ExitStack() as stack:
        pools = pools_of(config)
        layouts = {pool.name: str(pool.layout) for pool in pools}
        facts = facts_of(start, trainer.resume_from_path, config.plugins)
        stack.enter_context(attempts.attempt(lock.since, layouts=layouts, **facts))
        write_text(run_dir / CONFIG, as_yaml(config))
        tracker = stack.enter_context(open_tracker(config, run_dir, tokenizer, start, attempts))
        tracker.note(description(trainer, config.model, pools, sft.loss_mode, is_pairs, batch_size, sets))
        watchdog = stack.enter_context(StageWatchdog(trainer.stage_timeout_s, trainer.stage_timeouts_s, run_dir))
        group = connect_group()
        stack.callback(group.close)
        watchdog.look_at(group, list)
        workers = Workers(group, tracker.trace.watch)
        policies: list[ActorProxy | ReferenceProxy] = [] if config.job == "reward-model" else [workers.actor]
        policies += [workers.reference] if needs_reference(config) else []
        watches = (HeadWatch(policies, tracker.note).metrics, MemoryWatch(workers).metrics)
        skips = Skips(trainer, None, tracker.note)
        top_k = distillation_params(*teaching(config)).top_k if has_teacher(config) else 0
        kind = (is_pairs, config.job == "reward-model", top_k)
        learner = make_learner(sft, config.actor, config.reference.max_token_len_per_gpu, *kind, workers)
        steps = Steps(trainer, batch_size, workers, sets, stream, learner, skips, watches)
        checkpointer = Checkpointer(trainer, as_yaml(config), workers, False, False, run_dir, tracker.note)
        checkpointer.best_of = partial(best_step, tracker.watched_values, metric=trainer.keep_best)
        state = RunState(0, 0, None, architecture=architecture_of(config.model.path), plugins=digests(config.plugins))
        if start is not None:
            with tracker.stage("restore"):
                state = checkpointer.restore(start.found)
            skips.restore(state.num_consecutive_skips)

        def save_hf() -> None:
            workers.host.save_hf(directory=run_dir / "hf").result()

        keeper = Keeper(partial(capture, steps, tracker.clock, state), checkpointer, None, trainer, save_hf, lock.check)
        keeper.begin(state.step, is_saved=start is not None and start.is_same_run)
        plan = loop_plan(trainer, state.step, _evaluated(run_dir))
        with keeper.saving_when_stopped(stop):
            run(steps, tracker, StageGuard(tracker, stop, watchdog, keeper), keeper, plan)
        keeper.finish()
        if trainer.save_hf or trainer.save_last == "weights":
            save_hf()
        _finish(trainer, config.model.path, tracker, run_dir, layouts_of(group), attempts, stop)


def capture(steps: Steps, clock: RunClock, before: RunState, step: int) -> RunState:
    """Return the state after `step`, as it stands now. `before`: a former state of this job."""
    skips, seconds = steps.skips.num_consecutive, clock.productive_s
    return replace(before, step=step, cursor=steps.stream.state(), num_consecutive_skips=skips, productive_s=seconds)


def _finish(
    trainer: TrainerConfig,
    model: str,
    tracker: Tracker,
    run_dir: Path,
    layouts: Mapping[str, str],
    attempts: Attempts,
    stop: StopRequest,
) -> None:
    """Write the summary and say what is kept."""
    held_out = [(row["step"], row[HELD_OUT]) for row in read_rows(run_dir) if HELD_OUT in row]
    found = summary(tracker, layouts, attempts, held_out) | {"seed": trainer.seed, "model": model}
    write_summary(found, tracker, run_dir, stop.check, f"{trainer.experiment_name} ({found['layout']})", held_out)
    for line in closing_lines(run_dir, trainer, tracker.watched_values):
        tracker.note(line)


def run(steps: Steps, tracker: Tracker, stage: StageGuard, keeper: Keeper, plan: LoopPlan) -> None:
    """Make the steps after `plan.steps_done`. Raises RunStopped between two stages when the run was asked to stop."""
    if plan.is_evaluation_due(plan.steps_done) and not plan.is_evaluated:
        _evaluate(steps, tracker, stage, plan, plan.steps_done)
    for step in range(plan.steps_done + 1, plan.last_step + 1):
        faults.set_step(step)
        faults.reach("loop.step_begins")
        with tracker.step(step):
            with stage("next"):
                batch = steps.next(step)
            with stage("update"):
                metrics = steps.update(step, batch)
            tracker.tokens(batch.tokens, metrics | keeper.take_metrics())
        keeper.step_done(step)
        faults.reach("loop.step_ends")
        if plan.is_evaluation_due(step):
            _evaluate(steps, tracker, stage, plan, step)


def _evaluate(steps: Steps, tracker: Tracker, stage: StageGuard, plan: LoopPlan, step: int) -> None:
    if not steps.sets.held_out:
        return
    with stage("evaluate"):
        found = steps.held_out(is_final=step in (0, plan.last_step))
    tracker.held_out(step, found)


def _evaluated(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_rows(run_dir) if row["kind"] == "evaluation"]


def description(
    trainer: TrainerConfig,
    model: ModelConfig,
    pools: Sequence[PoolSpec],
    loss_mode: str,
    is_pairs: bool,
    batch_size: int,
    sets: DocumentSets,
) -> str:
    """Return the first line that a run says."""
    epochs = trainer.total_training_steps * batch_size / sets.num_train
    text = (
        f"{trainer.experiment_name}: {model.path} ({model.dtype}), {' and '.join(map(str, pools))}, {loss_mode} on"
        f" {sets.num_train} training and {sets.num_held_out} held-out {'pairs' if is_pairs else 'documents'},"
        f" {epochs:.3g} epochs"
    )
    return "; ".join([text, *sets.counts.told()])


def summary(
    tracker: Tracker, layouts: Mapping[str, str], attempts: Attempts, held_out: list[tuple[int, float]]
) -> dict[str, Any]:
    """Return what a run came to, for people and for scripts. `held_out`: (step, loss)."""
    ends = {"loss_first": tracker.curve[:1], "loss_last": tracker.curve[-1:]}
    ends |= {"held_out_loss_before": [pair for pair in held_out if pair[0] == 0], "held_out_loss_after": held_out[-1:]}
    found: dict[str, Any] = {name: pairs[0][1] for name, pairs in ends.items() if pairs}
    return found | facts_of_any(tracker, layouts, attempts)
