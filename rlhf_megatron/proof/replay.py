"""`train --replay` without engines: a recorded run trains on its rollouts again, a capsule runs its mini-batch again.

A capsule runs in any layout and on any device, forward and backward, to see whether the number that was not finite
shows again; no optimizer step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.batch import (
    MiniBatch,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    TokenBatch,
    TrainBatch,
    ValueMiniBatch,
)
from rlhf_megatron.evaluation.evaluation import EvaluationResult
from rlhf_megatron.observe.line_file import strict
from rlhf_megatron.observe.metrics.batch import BadColumn, bad_columns, describe
from rlhf_megatron.observe.run_dir import write_json
from rlhf_megatron.observe.run_facts import run_facts
from rlhf_megatron.observe.summary import layouts_of
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.recovery.capsule import Capsule, read_capsule
from rlhf_megatron.recovery.keeper import Keeper, StageGuard
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.recovery.skips import seen
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.runtime.dispatch import plan_call
from rlhf_megatron.runtime.proxies import TrainedProxy, Workers
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.advantages import AdvantageStage
from rlhf_megatron.scheduler.loop import LoopPlan, run
from rlhf_megatron.scheduler.mini_batches import supervised_mini_batch, weigh
from rlhf_megatron.scheduler.parts import RunData, load_data, load_parts
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.supply.foreground import Foreground
from rlhf_megatron.scheduler.warmup import warm_up_policy
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.sync.weight_sync import Sync


def replay(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    source: Path,
    last: int,
    stop: StopRequest | None = None,
) -> None:
    """Train on the recorded rollouts of steps 1 .. `last` of the run `source`.

    A warm-up is done again, with as many steps as were made then.
    """
    parts = load_parts(config)
    recorder = Recorder(source / "record")
    start = recorder.read_start()
    sets, tokenizer = load_data(config.model, config.data, config.warmup.max_steps > 0)
    trainer = config.trainer
    with ExitStack() as stack:
        facts = run_facts(config, run_dir.name, tokenizer)
        tracker = stack.enter_context(Tracker(run_dir, trainer.logger, trainer.total_training_steps, facts))
        tracker.note(f"replay of steps 1 .. {last} of {source}")
        group = connect_group()
        stack.callback(group.close)
        workers, data = Workers(group, tracker.trace.watch), RunData(None, (), tokenizer, ())
        sync = Sync(start.policy_version)
        stages = ReplayStages(config, workers, None, data, parts, sync, no_scorer, source=recorder)
        guard = StageGuard(tracker, stop)
        warm_up_policy(stages, tracker, sets, guard.stop, num_steps=start.num_warmup_steps)
        run(stages, Foreground(stages), tracker, guard, Keeper(), LoopPlan(last))
        if trainer.save_hf:
            stages.save_hf(run_dir)
        layouts = layouts_of(group)
        found = {"layout": layouts["actor"], "layouts": layouts, "steps": last, "seconds": tracker.seconds}
        write_json(run_dir / "summary.json", found)
        tracker.note(f"report: rlhf-megatron report {run_dir}")


def no_scorer(samples: Sequence[RewardSample]) -> list[RewardResult]:
    raise AssertionError("a replay has recorded rewards")


@dataclass
class ReplayStages(Stages):
    """The same trainer over recorded rollouts: no engine, nothing is generated or evaluated."""

    source: Recorder | None = None  # of the rollouts

    def next_prompts(self, step: int) -> PromptBatch:
        self.begin()
        return PromptBatch((), (), (), (), (), ())

    def generate(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        assert self.source is not None
        return self.source.read(step)

    def score(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        assert isinstance(rollout, ScoredBatch)
        return rollout

    def evaluate(self, is_final: bool = True) -> EvaluationResult | None:
        return None


NOT_REPRODUCED_EXIT_CODE = 3
ARGUMENTS = ("temperature", "loss")  # of an update
NUM_SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Outcome:
    """The result of a capsule's replay. `found`: the facts of this pass, as in a capsule."""

    is_reproduced: bool
    found: Mapping[str, Any]
    lines: tuple[str, ...]  # for a person


def replay_capsule(
    config: RunConfig, connect_group: Callable[[], WorkerGroup], run_dir: Path, directory: Path
) -> Outcome:
    """Load the weights of a capsule and run its mini-batch, forward and backward. Written to replay.json too.

    Raises ValueError for a directory that is no capsule, or one of another model.
    """
    capsule = read_capsule(directory)
    group = connect_group()
    workers = Workers(group)
    try:
        if capsule.weights is not None:
            worker = workers.actor if capsule.role == "actor" else workers.critic
            worker.load_weights(directory=capsule.weights).result()
        if capsule.mini_batch is not None:
            outcome = _update_again(workers, capsule, capsule.mini_batch)
        else:
            actor = config.actor.ppo_max_token_len_per_gpu
            critic = config.critic.ppo_max_token_len_per_gpu or actor
            reference = config.reference.max_token_len_per_gpu or actor
            budgets = {"actor": actor, "critic": critic, "reference": reference}
            advantages = AdvantageStage(config.algorithm, load_parts(config))
            outcome = _batch_again(workers, capsule, budgets, config.rollout.temperature, advantages)
    finally:
        group.close()
    lines = [*_head(capsule), *outcome.lines, _verdict(outcome.is_reproduced)]
    write_json(run_dir / "replay.json", strict({"reproduced": outcome.is_reproduced, **outcome.found}))
    return replace(outcome, lines=tuple(lines))


def _update_again(workers: Workers, capsule: Capsule, mini_batch: TokenBatch) -> Outcome:
    given = capsule.facts["arguments"]
    arguments = {name: given[name] for name in ARGUMENTS if name in given}
    mini_batch = replace(mini_batch, sample_ids=None, routes=None)  # which experts its tokens met is gone
    is_skipped, found = _look_again(workers, capsule, mini_batch, int(capsule.facts["token_budget"]), arguments)
    return Outcome(is_skipped, found, tuple(_lines(found)))


def _look_again(
    workers: Workers, capsule: Capsule, mini_batch: TokenBatch, token_budget: int, arguments: Mapping[str, Any]
) -> tuple[bool, dict[str, Any]]:
    worker: TrainedProxy
    if isinstance(mini_batch, ValueMiniBatch):
        worker, call = workers.critic, workers.critic.look_again(mini_batch, token_budget)
    else:
        assert isinstance(mini_batch, MiniBatch)
        worker, call = workers.actor, workers.actor.look_again(mini_batch, token_budget, **arguments)
    is_skipped = call.result().is_skipped
    findings = [of_rank[-1] for of_rank in worker.take_skips().result()]
    layout = worker.layout
    plans = plan_call(mini_batch, layout, token_budget)
    return is_skipped, {"layout": str(layout), **seen(capsule.samples, layout, plans, findings)}


def _batch_again(
    workers: Workers, capsule: Capsule, budgets: Mapping[str, int], temperature: float, advantages: AdvantageStage
) -> Outcome:
    """Compute the bad columns of a step that was not trained on again, as far as a replay can.

    `budgets`: tokens of a micro-batch, by role.
    """
    batch = capsule.samples
    columns = {column.name: column for column in bad_columns(batch)}
    tokens = TokenBatch(batch.offsets, batch.token_ids, batch.response_mask)
    verdicts: dict[str, bool] = {}
    lines: list[str] = []
    found: dict[str, Any] = {}
    own_column = "old_log_probs" if capsule.role == "actor" else "values"
    if own_column in columns:
        mini_batch: TokenBatch = supervised_mini_batch(tokens)
        arguments: dict[str, Any] = {"temperature": temperature, "loss": "sft"}
        if capsule.role == "critic":
            mini_batch, arguments = _value_batch(tokens), {}
        _, found = _look_again(workers, capsule, mini_batch, budgets[capsule.role], arguments)
        verdicts[own_column] = bool(found["num_bad_tokens"])
        lines += _lines(found)
    if "ref_log_probs" in columns:
        again = workers.reference.log_probs(tokens, budgets["reference"], temperature=temperature).result()
        verdicts["ref_log_probs"] = not bool(again.log_probs[batch.response_mask].isfinite().all())
    made = [name for name in ("advantages", "returns") if name in columns]
    if made and not [name for name in columns if name not in ("advantages", "returns", "rollout_log_probs")]:
        train, _ = advantages(batch)
        verdicts |= {name: name in [column.name for column in bad_columns(train)] for name in made}
    lines += [_column_line(column, batch, verdicts.get(name)) for name, column in columns.items()]
    return Outcome(any(verdicts.values()), {**found, "columns": verdicts}, tuple(lines))


def _value_batch(tokens: TokenBatch) -> ValueMiniBatch:
    """Make a mini-batch for a pass of the critic that is only looked at: its targets are zeros."""
    weights, for_metrics = weigh(tokens, "token-mean")
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


def _head(capsule: Capsule) -> list[str]:
    facts = capsule.facts
    what = f"mini-batch {facts['mini_batch']}" if capsule.mini_batch is not None else "the whole batch"
    lines = [f"capsule of step {facts['step']}, {capsule.role}, {what}; it ran at {facts['layout']}"]
    if capsule.mini_batch is not None:
        lines.append(f"it had gradient norm {facts['grad_norm']}")
    if capsule.weights is None:
        lines.append("the capsule has no weights: these are those that the configuration names")
    return lines


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"at {found['layout']}:"]
    for entry in found["micro_batches"]:
        loss = entry["loss"] if isinstance(entry["loss"], str) else f"{entry['loss']:.6g}"
        lines.append(
            f"  replica {entry['replica']} micro-batch {entry['micro_batch']}: loss {loss}, samples {entry['samples']}"
        )
    norm = found["grad_norm"] if isinstance(found["grad_norm"], str) else f"{found['grad_norm']:.6g}"
    lines.append(f"  gradient norm {norm}")
    if found["first"]:
        lines.append(f"  first tensor that is not finite: {found['first']}")
    for kind in ("parameters", "gradients"):
        named = [f"[{rank['where']}] {bad}" for rank in found["ranks"] for bad in rank[kind]]
        if named:
            lines.append(f"  {kind} that are not finite: {', '.join(named[:NUM_SAMPLES_SHOWN])}")
    for entry in found["tokens"][:NUM_SAMPLES_SHOWN]:
        lines.append(f"  sample {entry['sample']} {entry['prompt']!r}: tokens {entry['positions']}")
    return lines


def _column_line(column: BadColumn, batch: TrainBatch, is_again: bool | None) -> str:
    made_again = {True: "not finite again", False: "finite now", None: "what made it is not part of a replay"}
    return f"  {describe([column], batch)}: {made_again[is_again]}"


def _verdict(is_reproduced: bool) -> str:
    if is_reproduced:
        return "reproduced: the weights and the batch of the capsule give numbers that are not finite here too"
    return (
        "not reproduced: every number is finite here. What was not came from elsewhere: a fault of the hardware, a race"
        " between ranks, an engine, or the arithmetic of the device and layout that it ran on"
    )
