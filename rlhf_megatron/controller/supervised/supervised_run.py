"""The whole supervised job on the controller: hosts up, or resumed; steps; held-out losses;
checkpoints; summary.

Used by `rlhf-megatron sft` and `reward-model`. It has no engines and no rewards, and is otherwise a
run as `controller.scheduler.training_run` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron import faults
from rlhf_megatron.config.rules.run_rules import (
    get_teacher_term,
    has_teacher,
    learns_from_pairs,
    needs_reference,
)
from rlhf_megatron.config.schema import DataConfig, ModelConfig, RunConfig, SFTConfig, TrainerConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.line_file import RunAttempts, RunClock, read_step_rows
from rlhf_megatron.controller.observe.metrics.performance_metrics import LmHeadWatch, MemoryWatch
from rlhf_megatron.controller.observe.run_dir import RunLock, write_text_atomically
from rlhf_megatron.controller.observe.run_summary import (
    describe_pool_layouts,
    summarise_any_job,
    write_loss_summary,
)
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.checkpoint_export import (
    describe_saved_weights,
    find_best_step,
)
from rlhf_megatron.controller.recovery.nonfinite_skips import NonFiniteSkips
from rlhf_megatron.controller.recovery.resume_point import (
    CONFIG,
    RunState,
    find_resume_point,
    make_attempt_facts,
    read_architecture,
)
from rlhf_megatron.controller.recovery.run_checkpointer import (
    RunCheckpointer,
    require_equal_replicas,
)
from rlhf_megatron.controller.recovery.save_policy import SavePolicy, StageGuard
from rlhf_megatron.controller.recovery.stage_watchdog import StageWatchdog
from rlhf_megatron.controller.scheduler.loop import LoopPlan
from rlhf_megatron.controller.scheduler.model_updates import average_update_metrics
from rlhf_megatron.controller.scheduler.training_run import make_loop_plan, open_run_tracker
from rlhf_megatron.controller.supervised.supervised_learners import (
    SupervisedLearner,
    compute_held_out_metrics,
    make_supervised_learner,
)
from rlhf_megatron.data.document_samples import DocumentSampleBatch, SampleSource, gather_samples
from rlhf_megatron.data.document_sets import DocumentSets, load_documents
from rlhf_megatron.data.item_stream import ItemStream
from rlhf_megatron.data.opening_tokens import describe_opening_tokens
from rlhf_megatron.data.seeds import seed_process
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.plugins import compute_plugin_digests, load_plugins
from rlhf_megatron.ranks.workers.actor_losses import parse_distillation_params
from rlhf_megatron.runtime.rank_pools import PoolSpec, build_pool_specs
from rlhf_megatron.runtime.role_proxies import ActorProxy, ReferenceProxy, RoleProxies
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.stop import StopRequest

HELD_OUT_LOSS = "val/loss"


def load_supervised_data(
    model_config: ModelConfig, data_config: DataConfig, sft: SFTConfig, is_pairs: bool
) -> tuple[DocumentSets, Tokenizer]:
    """Return (documents, tokenizer) of a job. Raise ValueError for what a user can fix. No process
    is started.
    """
    tokenizer = load_tokenizer(model_config.tokenizer_path or model_config.path, model_config.path)
    return load_documents(data_config, sft, tokenizer, is_pairs), tokenizer


def make_document_stream(
    data_config: DataConfig, seed: int, document_sets: DocumentSets
) -> ItemStream[SampleSource]:
    """Return the stream that orders the training samples; the batch of a step depends on the step
    alone. `seed` is used where `data_config` has none.
    """
    return ItemStream(
        document_sets.sources,
        data_config.train_batch_size,
        data_config.shuffle,
        seed if data_config.seed is None else data_config.seed,
    )


@dataclass
class SupervisedSteps:
    """The steps of the job."""

    trainer: TrainerConfig
    batch_size: int
    workers: RoleProxies
    document_sets: DocumentSets
    stream: ItemStream[SampleSource]
    learner: SupervisedLearner
    skips: NonFiniteSkips
    metric_sources: tuple[Callable[[], dict[str, float]], ...]

    def draw_batch(self, step: int) -> DocumentSampleBatch:
        """Return the training samples of this step."""
        return gather_samples(self.document_sets.sources, self.stream.locate_batch_items(step))

    def update_model(self, step: int, batch: DocumentSampleBatch) -> dict[str, float]:
        """Make one optimizer step and return its metrics. Raise NonFiniteNumbers after too many
        skipped steps, and ReplicasDiffer.
        """
        result, measured = self.learner.update_model(batch)
        self.skips.count_supervised_step(result.is_skipped, step)
        metrics = average_update_metrics("actor", 1, [result]) | measured
        # it is sft/loss, or of a preference loss what its slopes make of the log-probs
        del metrics["actor/loss"]
        freq = self.trainer.desync_freq
        if freq and step % freq == 0:
            metrics |= require_equal_replicas(self.workers.list_trained_proxies(has_critic=False))
        for metrics_of in self.metric_sources:
            metrics |= metrics_of()
        metrics["sft/num_samples"] = float(len(batch))
        metrics["sft/num_trained_tokens"] = float(batch.tokens.response_mask.sum())
        metrics["training/epoch"] = self.stream.num_drawn / self.stream.num_items
        return metrics

    def measure_held_out(self, is_final: bool) -> dict[str, float]:
        """Return the held-out metrics, over all samples where `is_final`, else over `test_samples`
        of each set.
        """
        limit = None if is_final else self.trainer.test_samples
        return compute_held_out_metrics(
            self.learner, self.document_sets.held_out_sources, self.batch_size, limit
        )


def run_supervised_training(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    run_lock: RunLock,
    stop_request: StopRequest,
) -> None:
    """Train from the start to the summary, or go on where a former attempt ended, as
    `controller.scheduler.training_run.run_training` does with engines.
    """
    trainer = config.trainer
    sft = config.sft
    is_pairs = learns_from_pairs(config)
    batch_size = config.data.train_batch_size
    seed_process(trainer.seed, 0)
    load_plugins(config.plugins)
    sets, tokenizer = load_supervised_data(config.model, config.data, sft, is_pairs)
    stream = make_document_stream(config.data, trainer.seed, sets)
    start = find_resume_point(config, run_dir, stream)
    attempts = RunAttempts(run_dir)
    with ExitStack() as stack:
        pools = build_pool_specs(config)
        layouts = {pool.name: str(pool.layout) for pool in pools}
        facts = make_attempt_facts(start, trainer.resume_from_path, config.plugins)
        stack.enter_context(attempts.record_attempt(run_lock.acquired_at, layouts=layouts, **facts))
        write_text_atomically(run_dir / CONFIG, render_config_yaml(config))
        tracker = stack.enter_context(open_run_tracker(config, run_dir, tokenizer, start, attempts))
        tracker.show_note(
            describe_supervised_run(
                trainer, config.model, pools, sft.loss_mode, is_pairs, batch_size, sets
            )
        )
        tracker.show_note(describe_document_opening(tokenizer, config.data, sets))
        watchdog = stack.enter_context(
            StageWatchdog(trainer.stage_timeout_s, trainer.stage_timeouts_s, run_dir)
        )
        group = connect_group()
        stack.callback(group.close)
        watchdog.set_report_sources(group, list)
        workers = RoleProxies(group, tracker.trace.record_call)
        policies: list[ActorProxy | ReferenceProxy] = (
            [] if config.job == "reward-model" else [workers.actor]
        )
        policies += [workers.reference] if needs_reference(config) else []
        watches = (
            LmHeadWatch(policies, tracker.show_note).collect_metrics,
            MemoryWatch(workers).collect_metrics,
        )
        skips = NonFiniteSkips(trainer, None, tracker.show_note)
        top_k = (
            parse_distillation_params(*get_teacher_term(config)).top_k if has_teacher(config) else 0
        )
        learner = make_supervised_learner(
            sft,
            config.actor,
            config.reference.max_token_len_per_gpu,
            is_pairs=is_pairs,
            is_reward_model=config.job == "reward-model",
            teacher_top_k=top_k,
            workers=workers,
        )
        steps = SupervisedSteps(trainer, batch_size, workers, sets, stream, learner, skips, watches)
        checkpointer = RunCheckpointer(
            trainer, render_config_yaml(config), workers, False, False, run_dir, tracker.show_note
        )
        checkpointer.choose_best_step = partial(
            find_best_step, tracker.watched_values, metric=trainer.keep_best
        )
        state = RunState(
            0,
            0,
            None,
            architecture=read_architecture(config.model.path),
            plugins=compute_plugin_digests(config.plugins),
        )
        if start is not None:
            with tracker.time_stage("restore"):
                state = checkpointer.restore_checkpoint(start.checkpoint)
            skips.restore_count(state.num_consecutive_skips)

        def save_hf_weights() -> None:
            """Write the trained weights in Hugging Face layout to `run_dir`/hf."""
            workers.host.save_hf(directory=run_dir / "hf").result()

        keeper = SavePolicy(
            partial(capture_supervised_state, steps, tracker.clock, state),
            checkpointer,
            None,
            trainer,
            save_hf_weights,
            run_lock.verify_ownership,
        )
        keeper.record_initial_state(state.step, is_saved=start is not None and start.is_same_run)
        plan = make_loop_plan(trainer, state.step, _read_evaluated_steps(run_dir))
        with keeper.save_when_stopped(stop_request):
            run_supervised_loop(
                steps, tracker, StageGuard(tracker, stop_request, watchdog, keeper), keeper, plan
            )
        keeper.wait_for_saves()
        if trainer.save_hf or trainer.save_last == "weights":
            save_hf_weights()
        _write_supervised_summary(
            trainer,
            config.model.path,
            tracker,
            run_dir,
            describe_pool_layouts(group),
            attempts,
            stop_request,
        )


def capture_supervised_state(
    steps: SupervisedSteps, run_clock: RunClock, earlier_state: RunState, step: int
) -> RunState:
    """Return the state of the run after `step`, for a checkpoint. `earlier_state` is any former
    state of this run; facts that do not change are copied from it.
    """
    skips = steps.skips.num_consecutive
    seconds = run_clock.productive_s
    return replace(
        earlier_state,
        step=step,
        cursor=steps.stream.make_cursor(),
        num_consecutive_skips=skips,
        productive_s=seconds,
    )


def _write_supervised_summary(
    trainer: TrainerConfig,
    model_path: str,
    tracker: RunTracker,
    run_dir: Path,
    layouts: Mapping[str, str],
    attempts: RunAttempts,
    stop_request: StopRequest,
) -> None:
    """Write the summary and the loss curve, and show which weights are kept."""
    held_out = [
        (row["step"], row[HELD_OUT_LOSS])
        for row in read_step_rows(run_dir)
        if row.get(HELD_OUT_LOSS) is not None
    ]
    found = make_supervised_summary(tracker, layouts, attempts, held_out) | {
        "seed": trainer.seed,
        "model": model_path,
    }
    write_loss_summary(
        found,
        tracker,
        run_dir,
        stop_request.raise_if_requested,
        f"{trainer.experiment_name} ({found['layout']})",
        held_out,
    )
    for line in describe_saved_weights(run_dir, trainer, tracker.watched_values):
        tracker.show_note(line)


def run_supervised_loop(
    steps: SupervisedSteps,
    tracker: RunTracker,
    stage_guard: StageGuard,
    save_policy: SavePolicy,
    plan: LoopPlan,
) -> None:
    """Run the steps after `plan.num_steps_done`, with their saves and evaluations. Raise RunStopped
    between two stages when the run was asked to stop.
    """
    if plan.is_evaluation_due(plan.num_steps_done) and not plan.has_start_evaluation:
        _run_held_out_stage(steps, tracker, stage_guard, plan, plan.num_steps_done)
    for step in range(plan.num_steps_done + 1, plan.last_step + 1):
        faults.set_fault_step(step)
        faults.reach_fault_point("loop.step_begins")
        with tracker.track_step(step):
            with stage_guard("next"):
                batch = steps.draw_batch(step)
            with stage_guard("update"):
                metrics = steps.update_model(step, batch)
            tracker.set_step_tokens(batch.tokens, metrics | save_policy.take_metrics())
        save_policy.save_if_due(step)
        faults.reach_fault_point("loop.step_ends")
        if plan.is_evaluation_due(step):
            _run_held_out_stage(steps, tracker, stage_guard, plan, step)


def _run_held_out_stage(
    steps: SupervisedSteps, tracker: RunTracker, stage_guard: StageGuard, plan: LoopPlan, step: int
) -> None:
    """Measure and log the held-out losses; do nothing without held-out samples."""
    if not steps.document_sets.held_out_sources:
        return
    with stage_guard("evaluate"):
        found = steps.measure_held_out(is_final=step in (0, plan.last_step))
    tracker.log_held_out_metrics(step, found)


def _read_evaluated_steps(run_dir: Path) -> list[int]:
    """Return the steps that metrics.jsonl has an evaluation of."""
    return [row["step"] for row in read_step_rows(run_dir) if row["kind"] == "evaluation"]


def describe_supervised_run(
    trainer: TrainerConfig,
    model_config: ModelConfig,
    pools: Sequence[PoolSpec],
    loss_mode: str,
    is_pairs: bool,
    batch_size: int,
    document_sets: DocumentSets,
) -> str:
    """Return the first line that a run shows: model, pools, loss, data and epochs."""
    epochs = trainer.total_training_steps * batch_size / document_sets.num_train
    text = (
        f"{trainer.experiment_name}: {model_config.path} ({model_config.dtype}),"
        f" {' and '.join(map(str, pools))}, {loss_mode} on {document_sets.num_train} training and"
        f" {document_sets.num_held_out} held-out {'pairs' if is_pairs else 'documents'},"
        f" {epochs:.3g} epochs"
    )
    return "; ".join([text, *document_sets.counts.describe_counts()])


def describe_document_opening(
    tokenizer: Tokenizer, data_config: DataConfig, document_sets: DocumentSets
) -> str:
    """Return a phrase on what the documents of a job begin with, by the first of them."""
    first_document = document_sets.sources[0].items[0].documents[0]
    return describe_opening_tokens(tokenizer, data_config, first_document.token_ids, "documents")


def make_supervised_summary(
    tracker: RunTracker,
    layouts: Mapping[str, str],
    attempts: RunAttempts,
    held_out_losses: list[tuple[int, float]],
) -> dict[str, Any]:
    """Return the entries of summary.json: first and last losses, and the entries of every job.
    `held_out_losses`: (step, loss).
    """
    ends = {"loss_first": tracker.curve_points[:1], "loss_last": tracker.curve_points[-1:]}
    ends |= {
        "held_out_loss_before": [pair for pair in held_out_losses if pair[0] == 0],
        "held_out_loss_after": held_out_losses[-1:],
    }
    found: dict[str, Any] = {name: pairs[0][1] for name, pairs in ends.items() if pairs}
    return found | summarise_any_job(tracker, layouts, attempts)
