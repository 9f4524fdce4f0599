"""A recorded run again: the same trainer over the same rollouts, without engines. Used by `train --replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.evaluation.evaluation import EvaluationResult
from rlhf_megatron.observe.run_dir import write_json
from rlhf_megatron.observe.run_facts import run_facts
from rlhf_megatron.observe.summary import layouts_of
from rlhf_megatron.observe.traced_group import TracedGroup
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.recovery.guard import StageGuard
from rlhf_megatron.recovery.keeper import Keeper
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.runtime.proxies import Workers
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.loop import LoopPlan, run
from rlhf_megatron.scheduler.parts import Parts, load_parts
from rlhf_megatron.scheduler.run_data import load_data
from rlhf_megatron.scheduler.stages import RunData, Stages
from rlhf_megatron.scheduler.supply.foreground import Foreground
from rlhf_megatron.scheduler.warmup import warm_up_policy
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.sync.weight_sync import NoSync, Sync


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
    sets, tokenizer = load_data(config)
    trainer = config.trainer
    with ExitStack() as stack:
        facts = run_facts(config, run_dir.name, tokenizer)
        tracker = stack.enter_context(Tracker(run_dir, trainer.logger, trainer.total_training_steps, facts))
        tracker.note(f"replay of steps 1 .. {last} of {source}")
        group = TracedGroup(connect_group(), tracker.trace)
        stack.callback(group.close)
        stages = ReplayStages(config, Workers(group), parts, recorder, tokenizer, NoSync(start.policy_version))
        guard = StageGuard(tracker, stop)
        warm_up_policy(config, stages, tracker, sets, guard.stop, num_steps=start.num_warmup_steps)
        run(stages, Foreground(stages), tracker, guard, Keeper(), LoopPlan(last))
        if trainer.save_hf:
            stages.save_hf(run_dir)
        layouts = layouts_of(group)
        found = {"layout": layouts["actor"], "layouts": layouts, "steps": last, "seconds": tracker.seconds}
        write_json(run_dir / "summary.json", found)
        tracker.note(f"report: rlhf-megatron report {run_dir}")


def _no_scorer(samples: Sequence[RewardSample]) -> list[RewardResult]:
    raise AssertionError("a replay has recorded rewards")


class ReplayStages(Stages):
    """The same trainer over recorded rollouts: no engine, nothing is generated or evaluated."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        parts: Parts,
        recorder: Recorder,
        tokenizer: Tokenizer,
        weight_sync: Sync,
    ) -> None:
        data = RunData(None, (), tokenizer, ())
        super().__init__(config, workers, None, data, parts, weight_sync, None, _no_scorer)
        self.source = recorder

    def next_prompts(self, step: int) -> PromptBatch:
        self.begin()
        return PromptBatch((), (), (), (), (), ())

    def generate(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        return self.source.read(step)

    def score(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        assert isinstance(rollout, ScoredBatch)
        return rollout

    def evaluate(self, is_final: bool = True) -> EvaluationResult | None:
        return None
