"""A whole run on the controller: engines and hosts up, warm-up, the loop, summary. Used by `rlhf-megatron train`."""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhf_megatron.config.rules import has_critic
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.items import WeightedItems, prompt_batch, supervised_batch
from rlhf_megatron.data.prompts import PromptSets, load_prompts
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.resharding.transfer_dir import make_transfer_dir
from rlhf_megatron.reward_service.scorer import REWARD_LOG, make_scorer
from rlhf_megatron.rollout.clients import connect
from rlhf_megatron.rollout.fleet import EngineFleet
from rlhf_megatron.runtime.pools import pools_of
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.attempts import Attempts
from rlhf_megatron.scheduler.curve import draw_curve
from rlhf_megatron.scheduler.engines import MIB, engine_dtype, start_engines, transfer_bytes
from rlhf_megatron.scheduler.evaluation import EvaluationResult, EvaluationSet, majority_accuracy
from rlhf_megatron.scheduler.loop import run
from rlhf_megatron.scheduler.plugins import load_plugins
from rlhf_megatron.scheduler.recorder import RecordedStart, Recorder
from rlhf_megatron.scheduler.run_dir import write_json
from rlhf_megatron.scheduler.run_facts import run_facts
from rlhf_megatron.scheduler.stages import ReplayStages, RunData, Stages
from rlhf_megatron.scheduler.traced_group import TracedGroup
from rlhf_megatron.scheduler.tracker import Tracker
from rlhf_megatron.scheduler.warmup import WarmupResult, warm_up
from rlhf_megatron.scheduler.weight_sync import NoSync, WeightSync
from rlhf_megatron.stop import StopRequest

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "megatron-core", "transformers", "rlhf-megatron")


def load_data(config: RunConfig) -> tuple[PromptSets, Tokenizer]:
    """Prompts and tokenizer of a run. Raises ValueError for what a user can fix; starts nothing."""
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.path)
    return load_prompts(config.data, tokenizer), tokenizer


def train(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    is_recorded: bool,
    since: float,
    stop: StopRequest,
) -> None:
    """A run from the first sync to the summary. `connect_group` waits for the hosts; `since`: when it was launched.

    Raises RunStopped where `stop` asks for it.
    """
    plugins = load_plugins(config)
    sets, tokenizer = load_data(config)
    with ExitStack() as stack:
        stack.enter_context(Attempts(run_dir).attempt(since, resumed_from_step=None))
        tracker = stack.enter_context(_tracker(config, run_dir, tokenizer))
        tracker.note(_description(config, sets))
        scorer = stack.enter_context(make_scorer(config.reward, run_dir / REWARD_LOG))
        transfer = stack.enter_context(make_transfer_dir(config.rollout.transfer_dir, transfer_bytes(config)))
        servers = stack.enter_context(start_engines(config, run_dir, transfer.path, _report(tracker)))
        fleet = EngineFleet(
            [connect(address, transfer.path) for address in servers.addresses],
            config.rollout.request_timeout_s,
            config.rollout.request_retries,
        )
        stack.callback(fleet.close)
        group = TracedGroup(connect_group(), tracker.trace)
        stack.callback(group.close)
        bucket_bytes = config.rollout.update_weights_bucket_megabytes * MIB
        weight_sync = WeightSync(group, fleet, transfer.path, bucket_bytes, engine_dtype(config))
        recorder = Recorder(run_dir / "record") if is_recorded else None
        data = run_data(config, sets, tokenizer)
        stages = Stages(config, group, fleet, data, plugins, weight_sync, recorder, scorer)
        warm = _warm_up(config, stages, tracker, sets)
        if recorder:
            recorder.write_start(RecordedStart(warm.num_steps, weight_sync.version + 1))
        stop.check()
        stages.sync()
        trainer = config.trainer
        run(stages, tracker, trainer.total_training_steps, trainer.test_freq, trainer.val_before_train, stop=stop)
        if trainer.save_hf:
            _save_hf(stages, run_dir)
        _finish(config, tracker, run_dir, sets, warm.evaluation, _layouts(group))


def replay(config: RunConfig, connect_group: Callable[[], WorkerGroup], run_dir: Path, source: Path, last: int) -> None:
    """Train on the recorded rollouts of steps 1 .. `last` of the run `source`, without engines.

    A warm-up is done again, with as many steps as were made then.
    """
    plugins = load_plugins(config)
    recorder = Recorder(source / "record")
    start = recorder.read_start()
    sets, tokenizer = load_data(config)
    with ExitStack() as stack:
        tracker = stack.enter_context(_tracker(config, run_dir, tokenizer))
        tracker.note(f"replay of steps 1 .. {last} of {source}")
        group = TracedGroup(connect_group(), tracker.trace)
        stack.callback(group.close)
        stages = ReplayStages(config, group, plugins, recorder, tokenizer, NoSync(start.policy_version))
        _warm_up(config, stages, tracker, sets, num_steps=start.num_warmup_steps)
        run(stages, tracker, last, test_freq=0, val_before_train=False)
        if config.trainer.save_hf:
            _save_hf(stages, run_dir)
        layouts = _layouts(group)
        found = {"layout": layouts["actor"], "layouts": layouts, "steps": last, "seconds": tracker.seconds}
        write_json(run_dir / "summary.json", found)
        tracker.note(f"report: rlhf-megatron report {run_dir}")


def _save_hf(stages: Stages, run_dir: Path) -> None:
    """Trained weights in Hugging Face layout: the policy's, and the critic's where there is one."""
    stages.group.broadcast("host.save_hf", directory=run_dir / "hf").result()
    if stages.plugins.needs_values:
        stages.group.broadcast("critic.save_hf", directory=run_dir / "hf_critic").result()


def _tracker(config: RunConfig, run_dir: Path, tokenizer: Tokenizer) -> Tracker:
    facts = run_facts(config, run_dir.name, tokenizer)
    return Tracker(run_dir, config.trainer.logger, config.trainer.total_training_steps, facts)


def _report(tracker: Tracker) -> Callable[[str, float, str], None]:
    def report(name: str, seconds: float, line: str) -> None:
        tracker.waiting(f"{name} starts ({seconds:.0f} s) {line[-80:]}")

    return report


def _description(config: RunConfig, sets: PromptSets) -> str:
    pools = pools_of(config)
    where = " and ".join(map(str, pools)) + (" with the critic" if has_critic(config) and len(pools) == 1 else "")
    text = (
        f"{config.trainer.experiment_name}: {config.model.path} ({config.model.dtype}), {where},"
        f" {config.rollout.num_engines} {config.rollout.engine} engine(s),"
        f" {len(sets.train)} training and {len(sets.held_out)} held-out prompts"
    )
    skipped = {"malformed rows skipped": sets.num_bad_rows, "over-long prompts dropped": sets.num_overlong}
    skipped["over-long prompts cut"] = sets.num_cut
    skipped["held-out prompts that are trained on too"] = sets.num_shared
    if len(sets.sources) > 1:
        total = sum(source.weight for source in sets.sources)
        shares = ", ".join(
            f"{source.name} {source.weight / total:.0%} of {len(source.items)}" for source in sets.sources
        )
        text += f" ({shares})"
    return text + "".join(f"; {count} {what}" for what, count in skipped.items() if count)


def run_data(config: RunConfig, sets: PromptSets, tokenizer: Tokenizer) -> RunData:
    """What the controller of a run reads. Raises ValueError for a stop string that is not one token."""
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    stops = [*tokenizer.eos_token_ids, *(tokenizer.token_id(text) for text in config.rollout.stop)]
    return RunData(
        stream=PromptStream(sets.sources, config.data.train_batch_size, config.data.shuffle, seed),
        held_out=tuple(_evaluation_sets(sets)),
        tokenizer=tokenizer,
        stop_token_ids=tuple(dict.fromkeys(stops)),
    )


def _evaluation_sets(sets: PromptSets) -> Iterator[EvaluationSet]:
    """Group ids count over all sets, so that no two prompts share the seeds of their samples."""
    first = 0
    for held_out in sets.held_out_sets:
        yield EvaluationSet(held_out.name, prompt_batch(held_out.items, first))
        first += len(held_out.items)


def _warm_up(
    config: RunConfig, stages: Stages, tracker: Tracker, sets: PromptSets, num_steps: int | None = None
) -> WarmupResult:
    """`num_steps`: in a replay, the steps to make without evaluation."""
    if not config.warmup.max_steps:
        return WarmupResult(0, None)

    items = WeightedItems(sets.sources)

    def make_batch(indices: list[int]) -> TokenBatch:
        return supervised_batch([items[i] for i in indices], stages.data.tokenizer)

    def accuracy(num_items: int) -> EvaluationResult:
        stages.sync()
        return stages.accuracy(num_items, temperature=1.0, num_samples=1)

    result = warm_up(
        config.warmup,
        stages.group,
        tracker,
        len(items),
        make_batch,
        accuracy if num_steps is None else num_steps,
        config.actor.ppo_max_token_len_per_gpu,
        config.trainer.seed,
    )
    if stages.plugins.needs_reference and config.reference.path is None:
        stages.group.broadcast("host.refresh_reference").result()
    _hand_on(config, stages, tracker.run_dir / "warm_model", is_kept=config.warmup.save_hf and num_steps is None)
    return result


def _hand_on(config: RunConfig, stages: Stages, directory: Path, is_kept: bool) -> None:
    """The warmed-up policy as a Hugging Face directory, from which the critic starts unless it has a path of its own.

    Through files because the critic may stand on other ranks in another layout.
    """
    is_critics_start = stages.plugins.needs_values and config.critic.path is None
    if is_kept or is_critics_start:
        stages.group.broadcast("host.save_hf", directory=directory).result()
    if is_critics_start:
        stages.group.broadcast("critic.load_hf", directory=directory).result()
        if not is_kept:
            shutil.rmtree(directory)


def _finish(
    config: RunConfig,
    tracker: Tracker,
    run_dir: Path,
    sets: PromptSets,
    warm: EvaluationResult | None,
    layouts: Mapping[str, str],
) -> None:
    majority = majority_accuracy([item.label for item in sets.held_out]) if sets.held_out else None
    title = f"{config.trainer.experiment_name} ({layouts['actor']})"
    has_curve = draw_curve(run_dir / "curve.png", title, tracker.rewards, tracker.evaluations, majority)
    write_json(run_dir / "summary.json", summary(config, tracker, layouts, majority, warm))
    tracker.note(f"summary: {run_dir / 'summary.json'}")
    tracker.note(
        f"curve: {run_dir / 'curve.png'}" if has_curve else "no curve: install matplotlib (pip install '.[demo]')"
    )
    tracker.note(f"report: rlhf-megatron report {run_dir}")


def _layouts(group: WorkerGroup) -> dict[str, str]:
    """Pool -> its layout."""
    return {pool: str(layout) for pool, layout in group.layouts.items()}


def summary(
    config: RunConfig,
    tracker: Tracker,
    layouts: Mapping[str, str],
    majority: float | None,
    warm: EvaluationResult | None,
) -> dict[str, Any]:
    """What a run came to, for people and for scripts."""
    found: dict[str, Any] = {}
    evaluations = tracker.evaluations
    before, after = [r for step, r in evaluations if step == 0], [r for step, r in evaluations if step > 0]
    for name, results in (("before", before), ("after", after)):
        if results:
            found[f"accuracy_{name}"] = results[-1].accuracy
            found[f"accuracy_{name}_interval"] = [results[-1].low, results[-1].high]
            found[f"accuracy_{name}_items"] = results[-1].num_items
    return {
        **found,
        "majority_answer_accuracy": majority,
        "warmup_sampled_accuracy": warm.accuracy if warm else None,
        "reward_first": tracker.rewards[0][1] if tracker.rewards else None,
        "reward_last": tracker.rewards[-1][1] if tracker.rewards else None,
        "steps": tracker.rewards[-1][0] if tracker.rewards else 0,
        "layout": layouts["actor"],
        "layouts": dict(layouts),
        "seconds": round(tracker.seconds, 1),
        "seed": config.trainer.seed,
        "log_prob_max_abs_diff": tracker.first_mismatch,
        "model": config.model.path,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
