"""`train --replay` without engines: a recorded run trains on its rollouts again, a capsule runs its
mini-batch again.

A capsule runs in any layout and on any device, forward and backward, to see whether the number that
was not finite shows again; no optimizer step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult
from rlhf_megatron.controller.observe.line_file import replace_non_finite
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    NonFiniteColumn,
    describe_non_finite_columns,
    find_non_finite_columns,
)
from rlhf_megatron.controller.observe.run_dir import write_json_atomically
from rlhf_megatron.controller.observe.run_facts import make_run_facts
from rlhf_megatron.controller.observe.run_summary import describe_pool_layouts
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.nonfinite_skips import merge_rank_findings
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.recovery.save_policy import SavePolicy, StageGuard
from rlhf_megatron.controller.recovery.skip_capsule import SkipCapsule, read_skip_capsule
from rlhf_megatron.controller.scheduler.advantage_stage import AdvantageStage
from rlhf_megatron.controller.scheduler.algorithm_setup import (
    RunData,
    load_algorithm_setup,
    load_run_prompts,
)
from rlhf_megatron.controller.scheduler.loop import LoopPlan, run_training_loop
from rlhf_megatron.controller.scheduler.mini_batches import (
    compute_token_weights,
    make_supervised_mini_batch,
)
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.scheduler.supply.foreground_supply import ForegroundSupply
from rlhf_megatron.controller.supervised.warmup import run_policy_warmup
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.batch import (
    MiniBatch,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    TokenBatch,
    TrainBatch,
    ValueMiniBatch,
)
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.runtime.call_dispatch import plan_scattered_call
from rlhf_megatron.runtime.role_proxies import RoleProxies, TrainedProxy
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.stop import StopRequest

NOT_REPRODUCED_EXIT_CODE = 3
UPDATE_ARGUMENTS = ("temperature", "loss")  # of an update
NUM_SAMPLES_SHOWN = 8


def replay_run(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    recorded_run_dir: Path,
    last_step: int,
    stop_request: StopRequest | None = None,
) -> None:
    """Train on the recorded rollouts of steps 1 .. `last_step` of the run `recorded_run_dir`, and
    write metrics and a summary to `run_dir`. No engine is started.

    A warm-up is done again, with as many steps as the recorded run made.
    """
    parts = load_algorithm_setup(config)
    recorder = RolloutRecorder(recorded_run_dir / "record")
    start = recorder.read_start()
    sets, tokenizer = load_run_prompts(config.model, config.data, config.warmup.max_steps > 0)
    trainer = config.trainer
    with ExitStack() as stack:
        facts = make_run_facts(config, run_dir.name, tokenizer)
        tracker = stack.enter_context(
            RunTracker(run_dir, trainer.logger, trainer.total_training_steps, facts)
        )
        tracker.show_note(f"replay of steps 1 .. {last_step} of {recorded_run_dir}")
        group = connect_group()
        stack.callback(group.close)
        workers = RoleProxies(group, tracker.trace.record_call)
        data = RunData(None, (), tokenizer, ())
        sync = PolicySync(start.policy_version)
        stages = ReplayStages(
            config,
            workers,
            None,
            data,
            parts,
            sync,
            refuse_to_score,
            show_note=tracker.show_note,
            recorded_rollouts=recorder,
        )
        guard = StageGuard(tracker, stop_request)
        run_policy_warmup(
            stages, tracker, sets, guard.stop_request, num_steps=start.num_warmup_steps
        )
        run_training_loop(
            stages, ForegroundSupply(stages), tracker, guard, SavePolicy(), LoopPlan(last_step)
        )
        if trainer.save_hf:
            stages.save_hf_weights(run_dir)
        layouts = describe_pool_layouts(group)
        found = {
            "layout": layouts["actor"],
            "layouts": layouts,
            "steps": last_step,
            "seconds": tracker.run_seconds,
        }
        write_json_atomically(run_dir / "summary.json", found)
        tracker.show_note(f"report: rlhf-megatron report {run_dir}")


def refuse_to_score(samples: Sequence[RewardSample]) -> list[RewardResult]:
    """Raise AssertionError: a replay never calls its scorer."""
    raise AssertionError("a replay has recorded rewards")


@dataclass
class ReplayStages(StepStages):
    """The same trainer over recorded rollouts: no engine, nothing is generated or evaluated."""

    recorded_rollouts: RolloutRecorder | None = None  # of the rollouts

    def draw_prompts(self, step: int) -> PromptBatch:
        """Begin the step and return an empty batch of prompts."""
        self.begin_step()
        return PromptBatch((), (), (), (), (), ())

    def generate_rollout(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        """Return the recorded samples of the step, with their rewards."""
        assert self.recorded_rollouts is not None
        return self.recorded_rollouts.read_step(step)

    def score_rollout(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        """Return `rollout` as it is: recorded samples have their rewards."""
        assert isinstance(rollout, ScoredBatch)
        return rollout

    def evaluate_held_out(self, is_final: bool = True) -> EvaluationResult | None:
        """Return None: a replay does not evaluate."""
        return None


@dataclass(frozen=True)
class CapsuleReplayResult:
    """The result of a capsule's replay. `pass_facts`: the facts of this pass, as in a capsule."""

    is_reproduced: bool
    pass_facts: Mapping[str, Any]
    report_lines: tuple[str, ...]  # for a person


def replay_capsule(
    config: RunConfig, connect_group: Callable[[], WorkerGroup], run_dir: Path, capsule_dir: Path
) -> CapsuleReplayResult:
    """Load the weights of a capsule and run its mini-batch again, forward and backward; where the
    capsule is of a whole step, compute its bad columns again. Write the result to replay.json in
    `run_dir` too.

    Raise ValueError for a directory that is no capsule, or a capsule of another model.
    """
    capsule = read_skip_capsule(capsule_dir)
    group = connect_group()
    workers = RoleProxies(group)
    try:
        if capsule.weights_directory is not None:
            worker = workers.actor if capsule.role == "actor" else workers.critic
            worker.load_weights(directory=capsule.weights_directory).result()
        if capsule.mini_batch is not None:
            outcome = _rerun_mini_batch(workers, capsule, capsule.mini_batch)
        else:
            actor = config.actor.ppo_max_token_len_per_gpu
            critic = config.critic.ppo_max_token_len_per_gpu or actor
            reference = config.reference.max_token_len_per_gpu or actor
            budgets = {"actor": actor, "critic": critic, "reference": reference}
            advantages = AdvantageStage(config.algorithm, load_algorithm_setup(config))
            outcome = _recompute_bad_columns(
                workers, capsule, budgets, config.rollout.temperature, advantages
            )
    finally:
        group.close()
    lines = [
        *_describe_capsule(capsule),
        *outcome.report_lines,
        _format_verdict_line(outcome.is_reproduced),
    ]
    write_json_atomically(
        run_dir / "replay.json",
        replace_non_finite({"reproduced": outcome.is_reproduced, **outcome.pass_facts}),
    )
    return replace(outcome, report_lines=tuple(lines))


def _rerun_mini_batch(
    workers: RoleProxies, capsule: SkipCapsule, mini_batch: TokenBatch
) -> CapsuleReplayResult:
    """Run the capsule's mini-batch again, without its recorded routes; the fault is reproduced
    where the pass would be skipped again.
    """
    given = capsule.facts["arguments"]
    arguments = {name: given[name] for name in UPDATE_ARGUMENTS if name in given}
    # which experts its tokens met is gone
    mini_batch = replace(mini_batch, sample_ids=None, routes=None)
    is_skipped, found = _rerun_forward_backward(
        workers, capsule, mini_batch, int(capsule.facts["token_budget"]), arguments
    )
    return CapsuleReplayResult(is_skipped, found, tuple(_describe_pass(found)))


def _rerun_forward_backward(
    workers: RoleProxies,
    capsule: SkipCapsule,
    mini_batch: TokenBatch,
    token_budget: int,
    arguments: Mapping[str, Any],
) -> tuple[bool, dict[str, Any]]:
    """Run a mini-batch forward and backward on the capsule's role, without an optimizer step.
    Return (whether the pass had numbers that are not finite, the facts of the pass, merged over
    ranks).
    """
    worker: TrainedProxy
    if isinstance(mini_batch, ValueMiniBatch):
        worker = workers.critic
        call = workers.critic.rerun_forward_backward(mini_batch, token_budget)
    else:
        assert isinstance(mini_batch, MiniBatch)
        worker = workers.actor
        call = workers.actor.rerun_forward_backward(mini_batch, token_budget, **arguments)
    is_skipped = call.result().is_skipped
    findings = [of_rank[-1] for of_rank in worker.take_skip_reports().result()]
    layout = worker.layout
    plans = plan_scattered_call(mini_batch, layout, token_budget)
    return is_skipped, {
        "layout": str(layout),
        **merge_rank_findings(capsule.samples, layout, plans, findings),
    }


def _recompute_bad_columns(
    workers: RoleProxies,
    capsule: SkipCapsule,
    token_budgets: Mapping[str, int],
    temperature: float,
    advantage_stage: AdvantageStage,
) -> CapsuleReplayResult:
    """Compute again, as far as a replay can, the columns that made a step be skipped, and report
    for each whether it is not finite again.

    `token_budgets`: tokens of a micro-batch, by role.
    """
    batch = capsule.samples
    columns = {column.name: column for column in find_non_finite_columns(batch)}
    tokens = TokenBatch(batch.offsets, batch.token_ids, batch.response_mask)
    verdicts: dict[str, bool] = {}
    lines: list[str] = []
    found: dict[str, Any] = {}
    own_column = "old_log_probs" if capsule.role == "actor" else "values"
    if own_column in columns:
        mini_batch: TokenBatch = make_supervised_mini_batch(tokens)
        arguments: dict[str, Any] = {"temperature": temperature, "loss": "sft"}
        if capsule.role == "critic":
            mini_batch = _make_zero_value_batch(tokens)
            arguments = {}
        _, found = _rerun_forward_backward(
            workers, capsule, mini_batch, token_budgets[capsule.role], arguments
        )
        verdicts[own_column] = bool(found["num_bad_tokens"])
        lines += _describe_pass(found)
    if "ref_log_probs" in columns:
        again = workers.reference.log_probs(
            tokens, token_budgets["reference"], temperature=temperature
        ).result()
        verdicts["ref_log_probs"] = not bool(again.log_probs[batch.response_mask].isfinite().all())
    made = [name for name in ("advantages", "returns") if name in columns]
    if made and not [
        name for name in columns if name not in ("advantages", "returns", "rollout_log_probs")
    ]:
        train, _ = advantage_stage(batch)
        verdicts |= {
            name: name in [column.name for column in find_non_finite_columns(train)]
            for name in made
        }
    lines += [
        _describe_column(column, batch, verdicts.get(name)) for name, column in columns.items()
    ]
    return CapsuleReplayResult(any(verdicts.values()), {**found, "columns": verdicts}, tuple(lines))


def _make_zero_value_batch(tokens: TokenBatch) -> ValueMiniBatch:
    """Make a critic's mini-batch with targets of zero, for a pass that is only inspected."""
    weights, for_metrics = compute_token_weights(tokens, "token-mean")
    zeros = torch.zeros(tokens.num_tokens)
    return ValueMiniBatch(
        tokens.offsets,
        tokens.token_ids,
        tokens.response_mask,
        loss_weights=weights,
        metric_weights=for_metrics,
        old_values=zeros,
        returns=zeros,
    )


def _describe_capsule(capsule: SkipCapsule) -> list[str]:
    """Return lines for a person: the step, role, layout, gradient norm and weights of the
    capsule.
    """
    facts = capsule.facts
    what = (
        f"mini-batch {facts['mini_batch']}" if capsule.mini_batch is not None else "the whole batch"
    )
    lines = [
        f"capsule of step {facts['step']}, {capsule.role}, {what}; it ran at {facts['layout']}"
    ]
    if capsule.mini_batch is not None:
        lines.append(f"it had gradient norm {facts['grad_norm']}")
    if capsule.weights_directory is None:
        lines.append("the capsule has no weights: these are those that the configuration names")
    return lines


def _describe_pass(pass_facts: Mapping[str, Any]) -> list[str]:
    """Return lines for a person: loss of each micro-batch, gradient norm, and the tensors,
    parameters, gradients and tokens that are not finite.
    """
    lines = [f"at {pass_facts['layout']}:"]
    for entry in pass_facts["micro_batches"]:
        loss = entry["loss"] if isinstance(entry["loss"], str) else f"{entry['loss']:.6g}"
        lines.append(
            f"  replica {entry['replica']} micro-batch {entry['micro_batch']}: loss {loss},"
            f" samples {entry['samples']}"
        )
    norm = (
        pass_facts["grad_norm"]
        if isinstance(pass_facts["grad_norm"], str)
        else f"{pass_facts['grad_norm']:.6g}"
    )
    lines.append(f"  gradient norm {norm}")
    if pass_facts["first"]:
        lines.append(f"  first tensor that is not finite: {pass_facts['first']}")
    for kind in ("parameters", "gradients"):
        named = [f"[{rank['where']}] {bad}" for rank in pass_facts["ranks"] for bad in rank[kind]]
        if named:
            lines.append(f"  {kind} that are not finite: {', '.join(named[:NUM_SAMPLES_SHOWN])}")
    for entry in pass_facts["tokens"][:NUM_SAMPLES_SHOWN]:
        lines.append(f"  sample {entry['sample']} {entry['prompt']!r}: tokens {entry['positions']}")
    return lines


def _describe_column(column: NonFiniteColumn, batch: TrainBatch, is_bad_again: bool | None) -> str:
    """Return a line on a bad column. `is_bad_again` is None where a replay cannot compute the
    column.
    """
    made_again = {
        True: "not finite again",
        False: "finite now",
        None: "what made it is not part of a replay",
    }
    return f"  {describe_non_finite_columns([column], batch)}: {made_again[is_bad_again]}"


def _format_verdict_line(is_reproduced: bool) -> str:
    """Return the sentence that says whether the fault was reproduced."""
    if is_reproduced:
        return (
            "reproduced: the weights and the batch of the capsule give numbers that are not"
            " finite here too"
        )
    return (
        "not reproduced: every number is finite here. What was not came from elsewhere: a fault of"
        " the hardware, a race between ranks, an engine, or the arithmetic of the device and"
        " layout that it ran on"
    )
