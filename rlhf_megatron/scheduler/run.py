"""A whole run on the controller: engines and hosts up, warm-up or resumption, the loop, summary.

Used by `rlhf-megatron train`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlhf_megatron.config.changes import flat, settings_digest
from rlhf_megatron.config.rules.engines import num_engines
from rlhf_megatron.config.rules.machines import told
from rlhf_megatron.config.rules.run import has_critic, has_served_model, needs_reference
from rlhf_megatron.config.rules.schedule import takes_turns
from rlhf_megatron.config.schema import RunConfig, TrainerConfig
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.data.seeds import seed_process
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.observe.line_file import DIRECTORY as SUPERSEDED
from rlhf_megatron.observe.line_file import Attempts, RunClock, evaluation_seconds, read_rows, supersede
from rlhf_megatron.observe.metrics.rates import HeadWatch, MemoryWatch
from rlhf_megatron.observe.run_dir import RunLock, write_text
from rlhf_megatron.observe.run_facts import run_facts
from rlhf_megatron.observe.summary import description, finish, layouts_of
from rlhf_megatron.observe.tracker import Tracker
from rlhf_megatron.parallel.device import has_accelerator
from rlhf_megatron.plugins import digests
from rlhf_megatron.recovery.capsule import Capsules
from rlhf_megatron.recovery.checkpointer import Checkpointer
from rlhf_megatron.recovery.export import best_step, closing_lines
from rlhf_megatron.recovery.journal import GroupJournal, Journal, routes_in
from rlhf_megatron.recovery.keeper import Keeper, StageGuard
from rlhf_megatron.recovery.recorder import RecordedStart, Recorder
from rlhf_megatron.recovery.resume import CONFIG, RunState, Start, architecture_of, facts_of, find_start
from rlhf_megatron.recovery.route_files import RouteFiles
from rlhf_megatron.recovery.skips import Skips
from rlhf_megatron.recovery.watchdog import StageWatchdog
from rlhf_megatron.resharding.transfer_dir import make_transfer_dir
from rlhf_megatron.rewards.service.model_servers import ModelServers
from rlhf_megatron.rewards.service.places import Places
from rlhf_megatron.rewards.service.scorer import REWARD_LOG, Scorer, make_scorer
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.fleet.process import Place, now_and_then
from rlhf_megatron.rollout.fleet.start import (
    MIB,
    EngineSetup,
    register_engine_faults,
)
from rlhf_megatron.runtime.pool import pools_of
from rlhf_megatron.runtime.proxies import ActorProxy, Workers
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.loop import LoopPlan, run
from rlhf_megatron.scheduler.parts import Parts, RunData, load_data, load_parts, run_data
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.supply.ledger import Supply
from rlhf_megatron.scheduler.supply.make import make_supply, with_progress
from rlhf_megatron.scheduler.warmup import warm_up_policy
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.sync.colocation import Colocation, Turns, leave_devices, refuse_probe
from rlhf_megatron.sync.probe import Probe
from rlhf_megatron.sync.weight_sync import WeightSync


@dataclass(frozen=True)
class Reached:
    """Whom the controller speaks to: ranks, engines, servers and processes of rewards."""

    group: WorkerGroup
    workers: Workers
    fleet: EngineFleet
    transfer_dir: Path
    turns: Turns
    reward_servers: ModelServers | None
    scorer: Scorer


def train(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    is_recorded: bool,
    lock: RunLock,
    stop: StopRequest,
    places: Places = Places(),  # noqa: B008  (frozen)
) -> None:
    """A run from the first sync to the summary, or what is left of it.

    `connect_group` waits for the hosts; `lock`: of the directory; `places`: where servers and reward workers run.
    Raises RunStopped where `stop` asks for it, after the state was saved if the run has checkpoints.
    """
    trainer = config.trainer
    seed_process(trainer.seed, 0)
    parts = load_parts(config)
    sets, tokenizer = load_data(config.model, config.data, config.warmup.max_steps > 0)
    data = run_data(config.data, trainer.seed, config.rollout.stop, sets, tokenizer)
    start = find_start(config, run_dir, data.stream)
    attempts = Attempts(run_dir)
    with ExitStack() as stack:
        layouts = {pool.name: str(pool.layout) for pool in pools_of(config)}
        facts = facts_of(start, trainer.resume_from_path, config.plugins)
        stack.enter_context(attempts.attempt(lock.since, layouts=layouts, **facts))
        write_text(run_dir / CONFIG, as_yaml(config))
        tracker = stack.enter_context(open_tracker(config, run_dir, tokenizer, start, attempts))
        _tell(config, tracker, sets)
        watchdog = stack.enter_context(StageWatchdog(trainer.stage_timeout_s, trainer.stage_timeouts_s, run_dir))
        reached = _reach(stack, config, connect_group, run_dir, tracker, stop, places)
        watchdog.look_at(reached.group, reached.fleet.calls)
        recorder = Recorder(run_dir / "record") if is_recorded else None
        journal = _journal(config, run_dir, tracker)
        route_files = _route_files(config, run_dir, journal, is_recorded, tracker)
        stages = _stages(config, reached, data, parts, sets, run_dir, tracker, recorder, journal, route_files)
        checkpointer = _checkpointer(config, reached.workers, parts, run_dir, tracker, reached.turns)
        if start is not None:
            state = _resumed(start, stages, checkpointer, tracker)
        else:
            state = _warmed_up(config, stages, tracker, sets, stop)
        stages.sync()
        groups = journal if isinstance(journal, GroupJournal) else None
        supply = stack.enter_context(
            make_supply(stages, reached.fleet, reached.scorer, state, groups, stop.check, tracker.waiting)
        )
        captured = partial(capture, stages, supply, tracker.clock, state)
        save_hf = partial(stages.save_hf, run_dir)
        keeper = Keeper(captured, checkpointer, journal, trainer, save_hf, lock.check, route_files)
        keeper.begin(state.step, is_saved=start is not None and start.is_same_run)
        guard = StageGuard(tracker, stop, watchdog, keeper)
        plan = loop_plan(trainer, state.step, [step for step, _ in tracker.evaluations])
        with keeper.saving_when_stopped(stop):
            run(stages, supply, tracker, guard, keeper, plan)
        keeper.finish()
        if trainer.save_hf or trainer.save_last == "weights":
            save_hf()
        _finish(config, tracker, run_dir, sets, state, attempts, reached.group, stop)


def _tell(config: RunConfig, tracker: Tracker, sets: PromptSets) -> None:
    """Say what runs where, before anything is waited for."""
    engines = f"{num_engines(config)} {config.rollout.engine}"
    tracker.note(description(config.trainer.experiment_name, config.model, _where(config), engines, sets))
    if spread := told(config):
        tracker.note(f"engines by machine: {spread}")
        tracker.note(
            "a run that goes on on other machines needs its directory there: put trainer.default_local_dir on a file"
            " system that all see"
        )
        if config.actor.router_replay == "r3":
            tracker.note(
                "routes stay on the machines of their engines: where the run directory is not shared, a run that"
                " goes on on other machines generates again what they have"
            )


def _reach(
    stack: ExitStack,
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    tracker: Tracker,
    stop: StopRequest,
    places: Places,
) -> Reached:
    """Wait for hosts, engines and reward servers; all end with `stack`. Hosts that lend their devices come first."""
    hosts = _hosts(stack, config, connect_group) if config.rollout.colocated else None
    setup, reward_servers = EngineSetup.of(config), None
    if has_served_model(config):
        progress = now_and_then(tracker.note, stop.check)
        servers = ModelServers(setup, config.reward_model, run_dir, progress, places.reward_servers)
        reward_servers = stack.enter_context(servers)
        if config.rollout.colocated:
            reward_servers.sleep()
    fleet, transfer_dir = _engines(stack, setup, run_dir, tracker, stop, places.engines)
    group = hosts or _hosts(stack, config, connect_group)
    workers = Workers(group, tracker.trace.watch)
    turns = _turns(config, workers, fleet, reward_servers)
    of_model = reward_servers.term() if reward_servers is not None else None
    scorer = stack.enter_context(make_scorer(config.reward, run_dir / REWARD_LOG, of_model, places.reward_workers))
    return Reached(group, workers, fleet, transfer_dir, turns, reward_servers, scorer)


def _stages(
    config: RunConfig,
    reached: Reached,
    data: RunData,
    parts: Parts,
    sets: PromptSets,
    run_dir: Path,
    tracker: Tracker,
    recorder: Recorder | None,
    journal: Journal | GroupJournal | None,
    route_files: RouteFiles,
) -> Stages:
    workers, servers = reached.workers, reached.reward_servers
    capsules = Capsules(run_dir, as_yaml(config), config.trainer.capsules_kept, tracker.note)
    policies = (workers.actor, workers.reference) if parts.needs_reference else (workers.actor,)
    watches = [HeadWatch(policies, tracker.note).metrics, MemoryWatch(workers).metrics]
    return Stages(
        config,
        workers,
        reached.fleet,
        data,
        parts,
        _weight_sync(config, reached, sets),
        reached.scorer,
        recorder=recorder,
        journal=journal if isinstance(journal, Journal) else None,
        skips=Skips(config.trainer, capsules, tracker.note),
        turns=reached.turns,
        route_files=route_files,
        watches=(*watches, *([servers.metrics] if servers is not None else [])),
        say=tracker.waiting,
    )


def _finish(
    config: RunConfig,
    tracker: Tracker,
    run_dir: Path,
    sets: PromptSets,
    state: RunState,
    attempts: Attempts,
    group: WorkerGroup,
    stop: StopRequest,
) -> None:
    trainer, accuracy, model = config.trainer, state.warmup_accuracy, config.model.path
    finish(trainer, config.rollout, model, tracker, run_dir, sets, accuracy, attempts, layouts_of(group), stop.check)
    for line in closing_lines(run_dir, trainer, tracker.watched_values):
        tracker.note(line)


def loop_plan(trainer: TrainerConfig, steps_done: int, evaluated: Sequence[int]) -> LoopPlan:
    """`evaluated`: the steps whose evaluation stands."""
    last_step, is_evaluated = trainer.total_training_steps, steps_done in evaluated
    return LoopPlan(last_step, steps_done, trainer.test_freq, trainer.val_before_train, is_evaluated)


def _turns(config: RunConfig, workers: Workers, fleet: EngineFleet, scorers: ModelServers | None) -> Turns:
    if not config.rollout.colocated:
        return Turns()
    reference = workers.reference if needs_reference(config) else None
    turns = Colocation(workers.learning(has_critic(config)), reference, fleet, scorers)
    turns.to_trainer()
    return turns


def _weight_sync(config: RunConfig, reached: Reached, sets: PromptSets) -> WeightSync:
    return WeightSync(
        reached.workers.host,
        reached.fleet,
        reached.transfer_dir,
        config.rollout.update_weights_bucket_megabytes * MIB,
        config.rollout.dtype or config.model.dtype,
        probe=refuse_probe if config.rollout.colocated else _probe(config, reached.workers.actor, sets),
        transport=config.rollout.weight_transport,
        model_path=Path(config.model.path),
        turns=reached.turns,
        ranks_per_machine=config.trainer.n_gpus_per_node if config.trainer.nnodes > 1 else None,
    )


def _probe(config: RunConfig, actor: ActorProxy, sets: PromptSets) -> Probe:
    length, budget = config.data.max_response_length, config.actor.ppo_max_token_len_per_gpu
    prompts = [item.prompt_ids for item in sets.train]
    return Probe(config.checks, config.is_exact, config.rollout, length, budget, actor, prompts)


def _journal(config: RunConfig, run_dir: Path, tracker: Tracker) -> Journal | GroupJournal | None:
    if not config.trainer.save_freq:
        return None
    digest = settings_digest(flat(as_yaml(config)), digests(config.plugins))
    if takes_turns(config.schedule):
        return Journal(run_dir / "journal", digest, tracker.clock.add)
    return GroupJournal(run_dir / "journal", digest)


def _route_files(
    config: RunConfig, run_dir: Path, journal: Journal | GroupJournal | None, is_recorded: bool, tracker: Tracker
) -> RouteFiles:
    """Open the files of routes, and remove those of a former attempt that the journal does not name."""
    directory = run_dir / "routes" if config.actor.router_replay == "r3" else None
    most_bytes = round(config.rollout.routes_gb * 1e9)
    files = RouteFiles(directory, journal is not None, is_recorded, most_bytes, tracker.note)
    files.begin(routes_in(journal.directory) if directory and journal else ())
    return files


def _checkpointer(
    config: RunConfig, workers: Workers, parts: Parts, run_dir: Path, tracker: Tracker, turns: Turns
) -> Checkpointer:
    has_frozen_start = parts.needs_reference and config.reference.path is None
    checkpointer = Checkpointer(
        config.trainer, as_yaml(config), workers, parts.needs_values, has_frozen_start, run_dir, tracker.note, turns
    )
    checkpointer.best_of = partial(best_step, tracker.watched_values, metric=config.trainer.keep_best)
    return checkpointer


def _where(config: RunConfig) -> str:
    pools, cores = pools_of(config), len(os.sched_getaffinity(0))
    text = " and ".join(map(str, pools)) + (" with the critic" if has_critic(config) and len(pools) == 1 else "")
    is_crowded = config.trainer.nnodes == 1 and pools[-1].end > cores and not has_accelerator()
    return text + (f" (more than the {cores} cores here: they take turns)" if is_crowded else "")


def open_tracker(
    config: RunConfig, run_dir: Path, tokenizer: Tokenizer, start: Start | None, attempts: Attempts
) -> Tracker:
    """Goes on with the files of a run that is resumed; rows that will be written again leave them first."""
    rows = []
    clock = RunClock(attempts.first_start)
    resumed_from_step = start.state.step if start is not None and start.is_same_run else None
    num_superseded = 0
    if start is not None and resumed_from_step is not None:
        num_superseded = supersede(run_dir, resumed_from_step, attempts.count - 1)
        rows = read_rows(run_dir)
        clock.productive_s = start.state.productive_s + evaluation_seconds(rows, resumed_from_step)
    facts = run_facts(config, run_dir.name, tokenizer, resumed_from_step)
    trainer = config.trainer
    tracker = Tracker(run_dir, trainer.logger, trainer.total_training_steps, facts, clock, trainer.keep_best)
    tracker.restore(rows)
    if start is not None:
        again = f"; rows of later steps: {num_superseded}, now in {SUPERSEDED}/" if num_superseded else ""
        tracker.note(f"attempt {attempts.count}: {start}{again}")
    return tracker


def _hosts(stack: ExitStack, config: RunConfig, connect_group: Callable[[], WorkerGroup]) -> WorkerGroup:
    """They end with `stack`. Colocated ones have left their devices to the engines, which start after them."""
    group = connect_group()
    stack.callback(group.close)
    if config.rollout.colocated:
        leave_devices(Workers(group).learning(has_critic(config)))
    return group


def _engines(
    stack: ExitStack, setup: EngineSetup, run_dir: Path, tracker: Tracker, stop: StopRequest, place: Place
) -> tuple[EngineFleet, Path]:
    """Servers without weights, and the directory through which these come. They end with `stack`."""

    def report(name: str, seconds: float, line: str) -> None:
        tracker.waiting(f"{name} starts ({seconds:.0f} s) {line[-80:]}")

    transfer = stack.enter_context(make_transfer_dir(setup.transfer_parent(run_dir), setup.transfer_bytes()))
    servers = setup.start(run_dir, transfer.path, report, place)
    stack.enter_context(servers)
    register_engine_faults(servers)
    fleet = setup.fleet(servers, run_dir, transfer.path, stop.check)
    stack.callback(fleet.close)
    return fleet, transfer.path


def _resumed(start: Start, stages: Stages, checkpointer: Checkpointer, tracker: Tracker) -> RunState:
    """Hosts and controller as they were at the checkpoint; the engines get those weights by the sync that follows."""
    with tracker.stage("restore"):
        state = checkpointer.restore(start.found)
    stages.weight_sync.version = state.policy_version - 1  # the same weights are the same version
    stages.mismatch.first_step = state.step + 1
    stages.skips.restore(state.num_consecutive_skips)
    kl = stages.advantage_stage.kl
    if kl is not None and state.kl:
        kl.restore(state.kl)
    if stages.journal is not None:
        stages.journal.drop_through(state.step)
    return state


def _warmed_up(config: RunConfig, stages: Stages, tracker: Tracker, sets: PromptSets, stop: StopRequest) -> RunState:
    """The state before the first step."""
    warm = warm_up_policy(stages, tracker, sets, stop)
    stop.check()
    if stages.recorder:
        stages.recorder.write_start(RecordedStart(warm.num_steps, stages.weight_sync.version + 1))
    accuracy = warm.evaluation.accuracy if warm.evaluation else None
    architecture, plugins = architecture_of(config.model.path), digests(config.plugins)
    return RunState(0, 0, None, {}, warm.num_steps, accuracy, architecture=architecture, plugins=plugins)


def capture(stages: Stages, supply: Supply, clock: RunClock, before: RunState, step: int) -> RunState:
    """The state after `step`, as it stands now. `before`: a former state of this run."""
    stream, kl = stages.data.stream, stages.advantage_stage.kl
    state = replace(
        before,
        step=step,
        policy_version=stages.weight_sync.version,
        cursor=stream.state() if stream is not None else None,
        kl=kl.state() if kl is not None else {},
        num_consecutive_skips=stages.skips.num_consecutive,
        productive_s=clock.productive_s,
    )
    return with_progress(state, supply.progress())
