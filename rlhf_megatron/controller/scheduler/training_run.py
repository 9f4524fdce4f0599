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

from rlhf_megatron.agents.answer_reader import make_answer_reader
from rlhf_megatron.agents.dialogue import make_dialogue_format
from rlhf_megatron.agents.episode_batch import EpisodeRewardWeights
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.agents.join_check import check_joins, describe_joins
from rlhf_megatron.agents.row_environments import NamedEnvironment, list_row_environments
from rlhf_megatron.agents.run_episodes import (
    WORKER_LOG,
    RunEpisodes,
    make_episode_runner,
    make_episode_settings,
    make_episode_workers,
)
from rlhf_megatron.config.resume_changes import compute_settings_digest, flatten_config_yaml
from rlhf_megatron.config.rules.engine_machines import describe_engine_placement
from rlhf_megatron.config.rules.engine_rules import count_engines
from rlhf_megatron.config.rules.run_rules import (
    has_critic,
    has_reward_model,
    has_served_model,
    needs_reference,
)
from rlhf_megatron.config.rules.schedule_rules import does_schedule_take_turns
from rlhf_megatron.config.schema import RunConfig, TrainerConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.line_file import SUPERSEDED_DIR as SUPERSEDED
from rlhf_megatron.controller.observe.line_file import (
    RunAttempts,
    RunClock,
    move_superseded_rows,
    read_step_rows,
    sum_evaluation_seconds,
)
from rlhf_megatron.controller.observe.metrics.performance_metrics import LmHeadWatch, MemoryWatch
from rlhf_megatron.controller.observe.run_dir import RunLock, write_text_atomically
from rlhf_megatron.controller.observe.run_facts import make_run_facts
from rlhf_megatron.controller.observe.run_summary import (
    describe_pool_layouts,
    describe_run_start,
    write_training_summary,
)
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.checkpoint_export import (
    describe_saved_weights,
    find_best_step,
)
from rlhf_megatron.controller.recovery.nonfinite_skips import NonFiniteSkips
from rlhf_megatron.controller.recovery.resume_point import (
    CONFIG,
    ResumePoint,
    RunState,
    find_resume_point,
    make_attempt_facts,
    read_architecture,
)
from rlhf_megatron.controller.recovery.rollout_recorder import RecordedStart, RolloutRecorder
from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.controller.recovery.run_checkpointer import RunCheckpointer
from rlhf_megatron.controller.recovery.run_journal import (
    GroupJournal,
    StepJournal,
    find_journalled_routes,
)
from rlhf_megatron.controller.recovery.save_policy import SavePolicy, StageGuard
from rlhf_megatron.controller.recovery.skip_capsule import CapsuleStore
from rlhf_megatron.controller.recovery.stage_watchdog import StageWatchdog
from rlhf_megatron.controller.scheduler.algorithm_setup import (
    AlgorithmSetup,
    RunData,
    load_algorithm_setup,
    load_run_prompts,
    make_run_data,
)
from rlhf_megatron.controller.scheduler.loop import LoopPlan, run_training_loop
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.scheduler.supply.group_ledger import BatchSupply
from rlhf_megatron.controller.scheduler.supply.supply_factory import (
    attach_progress,
    make_batch_supply,
)
from rlhf_megatron.controller.supervised.warmup import run_policy_warmup
from rlhf_megatron.controller.sync.device_turns import (
    ColocatedDeviceTurns,
    DeviceTurns,
    offload_trainer,
    refuse_engine_probe,
)
from rlhf_megatron.controller.sync.engine_probe import EngineWeightProbe
from rlhf_megatron.controller.sync.lost_update_warning import LostAdapterWarning
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.data.opening_tokens import describe_opening_tokens
from rlhf_megatron.data.prompts import PromptSets
from rlhf_megatron.data.seeds import seed_process
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.device import has_accelerator
from rlhf_megatron.plugins import compute_plugin_digests
from rlhf_megatron.rewards.service.response_reading import describe_response_reading
from rlhf_megatron.rewards.service.reward_model_servers import RewardModelServers
from rlhf_megatron.rewards.service.reward_scorer import REWARD_LOG, RewardScorer, make_reward_scorer
from rlhf_megatron.rewards.service.run_placement import RunPlacement
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_setup import MIB, EngineSetup, register_engine_faults
from rlhf_megatron.rollout.fleet.server_process import LaunchPlacement, make_throttled_progress
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory
from rlhf_megatron.runtime.rank_pools import build_pool_specs
from rlhf_megatron.runtime.role_proxies import ActorProxy, RoleProxies
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.stop import StopRequest


@dataclass(frozen=True)
class RunConnections:
    """Whom the controller speaks to: ranks, engines, servers and processes of rewards."""

    worker_group: WorkerGroup
    workers: RoleProxies
    fleet: EngineFleet
    transfer_dir: Path
    turns: DeviceTurns
    reward_servers: RewardModelServers | None
    scorer: RewardScorer
    episode_workers: EpisodeWorkerPool | None  # where samples talk with an environment


def run_training(
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    records_rollouts: bool,
    run_lock: RunLock,
    stop_request: StopRequest,
    service_places: RunPlacement = RunPlacement(),  # noqa: B008  (frozen)
) -> None:
    """Train from the first weight sync to the summary, or go on where a former attempt ended.

    `connect_group` waits for the hosts and returns them; `run_lock` is the lock of `run_dir`;
    `service_places` says where servers and reward workers run. Raise RunStopped where
    `stop_request` asks for it, after the state was saved if the run has checkpoints.
    """
    trainer = config.trainer
    seed_process(trainer.seed, 0)
    parts = load_algorithm_setup(config)
    has_episodes = config.rollout.environment.name is not None
    sets, tokenizer = load_run_prompts(
        config.model, config.data, config.warmup.max_steps > 0, has_episodes
    )
    row_environments: Sequence[NamedEnvironment] = ()
    if has_episodes:
        items = (*sets.train_items, *sets.held_out_items)
        row_environments = list_row_environments(items, trainer.deterministic)
    data = make_run_data(config.data, trainer.seed, config.rollout.stop, sets, tokenizer)
    start = find_resume_point(config, run_dir, data.stream)
    attempts = RunAttempts(run_dir)
    with ExitStack() as stack:
        layouts = {pool.name: str(pool.layout) for pool in build_pool_specs(config)}
        facts = make_attempt_facts(start, trainer.resume_from_path, config.plugins)
        stack.enter_context(attempts.record_attempt(run_lock.acquired_at, layouts=layouts, **facts))
        write_text_atomically(run_dir / CONFIG, render_config_yaml(config))
        tracker = stack.enter_context(open_run_tracker(config, run_dir, tokenizer, start, attempts))
        _note_run_start(config, tracker, sets, tokenizer)
        watchdog = stack.enter_context(
            StageWatchdog(trainer.stage_timeout_s, trainer.stage_timeouts_s, run_dir)
        )
        reached = _connect_run(
            stack,
            config,
            connect_group,
            run_dir,
            tracker,
            stop_request,
            service_places,
            row_environments,
        )
        for line in describe_response_reading(
            [*reached.scorer.components],
            sets.list_response_prefixes(),
            [*tokenizer.special_tokens_by_id.values()],
        ):
            tracker.show_note(line)
        watchdog.set_report_sources(reached.worker_group, reached.fleet.list_recent_calls)
        recorder = RolloutRecorder(run_dir / "record") if records_rollouts else None
        journal = _open_journal(config, run_dir, tracker)
        route_files = _open_route_files(config, run_dir, journal, records_rollouts, tracker)
        stages = _make_step_stages(
            config, reached, data, parts, sets, run_dir, tracker, recorder, journal, route_files
        )
        checkpointer = _make_checkpointer(
            config, reached.workers, parts, run_dir, tracker, reached.turns
        )
        if start is not None:
            state = _restore_run_state(start, stages, checkpointer, tracker)
        else:
            state = _warm_up_from_start(config, stages, tracker, sets, stop_request)
        stages.sync_weights()
        groups = journal if isinstance(journal, GroupJournal) else None
        supply = stack.enter_context(
            make_batch_supply(
                stages,
                reached.fleet,
                reached.scorer,
                state,
                groups,
                stop_request.raise_if_requested,
                tracker.show_stage,
            )
        )
        captured = partial(capture_run_state, stages, supply, tracker.clock, state)
        save_hf = partial(stages.save_hf_weights, run_dir)
        keeper = SavePolicy(
            captured,
            checkpointer,
            journal,
            trainer,
            save_hf,
            run_lock.verify_ownership,
            route_files,
        )
        keeper.record_initial_state(state.step, is_saved=start is not None and start.is_same_run)
        guard = StageGuard(tracker, stop_request, watchdog, keeper)
        plan = make_loop_plan(trainer, state.step, [step for step, _ in tracker.evaluation_results])
        with keeper.save_when_stopped(stop_request):
            run_training_loop(stages, supply, tracker, guard, keeper, plan)
        keeper.wait_for_saves()
        if trainer.save_hf or trainer.save_last == "weights":
            save_hf()
        _write_run_summary(
            config, tracker, run_dir, sets, state, attempts, reached.worker_group, stop_request
        )


def _note_run_start(
    config: RunConfig, tracker: RunTracker, prompt_sets: PromptSets, tokenizer: Tokenizer
) -> None:
    """Show which models, engines and prompts the run uses, what the prompts begin with, and where
    the run's processes are, before it waits for any of them.
    """
    engines = f"{count_engines(config)} {config.rollout.engine}"
    tracker.show_note(
        describe_run_start(
            config.trainer.experiment_name,
            config.model,
            _describe_pools(config),
            engines,
            prompt_sets,
        )
    )
    first_prompt = prompt_sets.sources[0].items[0]
    tracker.show_note(
        describe_opening_tokens(tokenizer, config.data, first_prompt.prompt_ids, "prompts")
    )
    if config.rollout.environment.name is not None:
        dialogue_format = make_dialogue_format(tokenizer, config.data, config.rollout.stop)
        for line in describe_joins(check_joins(dialogue_format)):
            tracker.show_note(f"episodes: {line}")
        reader = make_answer_reader(dialogue_format, config.data.apply_chat_template_kwargs)
        tracker.show_note(f"episodes: {reader.describe()}")
    if spread := describe_engine_placement(config):
        tracker.show_note(f"engines by machine: {spread}")
        tracker.show_note(
            "a run that goes on on other machines needs its directory there: put"
            " trainer.default_local_dir on a file system that all see"
        )
        if config.actor.router_replay == "r3":
            tracker.show_note(
                "routes stay on the machines of their engines: where the run directory is not"
                " shared, a run that goes on on other machines generates again what they have"
            )


def _connect_run(
    stack: ExitStack,
    config: RunConfig,
    connect_group: Callable[[], WorkerGroup],
    run_dir: Path,
    tracker: RunTracker,
    stop_request: StopRequest,
    service_places: RunPlacement,
    row_environments: Sequence[NamedEnvironment],
) -> RunConnections:
    """Connect the hosts, and start reward servers, engines, reward processes and the workers of
    episodes; all of them end with `stack`. Colocated hosts come first, because they must free their
    devices before the engines start.
    """
    hosts = _connect_hosts(stack, config, connect_group) if config.rollout.colocated else None
    setup = EngineSetup.from_config(config)
    reward_servers = None
    if has_served_model(config):
        progress = make_throttled_progress(tracker.show_note, stop_request.raise_if_requested)
        servers = RewardModelServers(
            setup, config.reward_model, run_dir, progress, service_places.place_reward_server
        )
        reward_servers = stack.enter_context(servers)
        if config.rollout.colocated:
            reward_servers.sleep()
    fleet, transfer_dir = _start_engines(
        stack, setup, run_dir, tracker, stop_request, service_places.place_engine
    )
    group = hosts or _connect_hosts(stack, config, connect_group)
    workers = RoleProxies(group, tracker.trace.record_call)
    turns = _make_device_turns(config, workers, fleet, reward_servers)
    of_model = reward_servers.make_reward_term() if reward_servers is not None else None
    scorer = stack.enter_context(
        make_reward_scorer(
            config.reward,
            run_dir / REWARD_LOG,
            of_model,
            service_places.make_reward_pool,
            has_later_scores=has_reward_model(config),
        )
    )
    episode_workers = None
    if config.rollout.environment.name is not None:
        episode_workers = stack.enter_context(
            make_episode_workers(
                config.rollout, config.model, config.data, run_dir, row_environments
            )
        )
        episode_workers.start()
    return RunConnections(
        group, workers, fleet, transfer_dir, turns, reward_servers, scorer, episode_workers
    )


def _make_step_stages(
    config: RunConfig,
    connections: RunConnections,
    run_data: RunData,
    setup: AlgorithmSetup,
    prompt_sets: PromptSets,
    run_dir: Path,
    tracker: RunTracker,
    recorder: RolloutRecorder | None,
    journal: StepJournal | GroupJournal | None,
    route_files: RouteFileRetention,
) -> StepStages:
    """Make the stages of the loop from the run's connections and data."""
    workers = connections.workers
    servers = connections.reward_servers
    capsules = CapsuleStore(
        run_dir, render_config_yaml(config), config.trainer.capsules_kept, tracker.show_note
    )
    pool = connections.episode_workers
    episodes = None
    if pool is not None:
        environment = config.rollout.environment
        settings = make_episode_settings(environment, config.data, config.trainer.seed)
        episodes = RunEpisodes(
            make_episode_runner(connections.fleet, pool, settings, config.trainer.deterministic),
            run_data.tokenizer,
            EpisodeRewardWeights(
                environment.reward_weight, environment.scorer_weight, has_reward_model(config)
            ),
            config.reward.max_error_rate,
            run_dir / WORKER_LOG,
        )
    policies = (workers.actor, workers.reference) if setup.needs_reference else (workers.actor,)
    watches = [
        LmHeadWatch(policies, tracker.show_note).collect_metrics,
        MemoryWatch(workers).collect_metrics,
    ]
    return StepStages(
        config,
        workers,
        connections.fleet,
        run_data,
        setup,
        _make_weight_sync(config, connections, prompt_sets, tracker),
        connections.scorer,
        recorder=recorder,
        journal=journal if isinstance(journal, StepJournal) else None,
        skips=NonFiniteSkips(config.trainer, capsules, tracker.show_note),
        episodes=episodes,
        turns=connections.turns,
        route_files=route_files,
        metric_sources=(*watches, *([servers.collect_metrics] if servers is not None else [])),
        report_progress=tracker.show_stage,
        show_note=tracker.show_note,
    )


def _write_run_summary(
    config: RunConfig,
    tracker: RunTracker,
    run_dir: Path,
    prompt_sets: PromptSets,
    run_state: RunState,
    attempts: RunAttempts,
    worker_group: WorkerGroup,
    stop_request: StopRequest,
) -> None:
    """Write the summary of the run, and show which weights were saved."""
    trainer = config.trainer
    accuracy = run_state.warmup_accuracy
    model = config.model.path
    write_training_summary(
        trainer,
        config.rollout,
        model,
        tracker,
        run_dir,
        prompt_sets,
        accuracy,
        attempts,
        describe_pool_layouts(worker_group),
        stop_request.raise_if_requested,
    )
    for line in describe_saved_weights(run_dir, trainer, tracker.watched_values):
        tracker.show_note(line)


def make_loop_plan(
    trainer: TrainerConfig, num_steps_done: int, evaluated_steps: Sequence[int]
) -> LoopPlan:
    """Return the steps and evaluations of the loop. `evaluated_steps` are the steps whose
    evaluation is already in the run's files.
    """
    last_step = trainer.total_training_steps
    is_evaluated = num_steps_done in evaluated_steps
    return LoopPlan(
        last_step, num_steps_done, trainer.test_freq, trainer.val_before_train, is_evaluated
    )


def _make_device_turns(
    config: RunConfig,
    workers: RoleProxies,
    fleet: EngineFleet,
    reward_servers: RewardModelServers | None,
) -> DeviceTurns:
    """Return the object that hands devices between trainer and engines. For a colocated run, it has
    given them to the trainer.
    """
    if not config.rollout.colocated:
        return DeviceTurns()
    reference = workers.reference if needs_reference(config) else None
    turns = ColocatedDeviceTurns(
        workers.list_trained_proxies(has_critic(config)), reference, fleet, reward_servers
    )
    turns.give_devices_to_trainer()
    return turns


def _make_weight_sync(
    config: RunConfig, connections: RunConnections, prompt_sets: PromptSets, tracker: RunTracker
) -> WeightSync:
    """Make the weight sync. In a colocated run, an engine without digests is refused instead of
    probed. A run with an adapter shows a warning in `tracker` where engines do not see the adapter.
    """
    engine_dtype = config.rollout.dtype or config.model.dtype
    adapter_warning = LostAdapterWarning(engine_dtype, tracker.show_note)
    return WeightSync(
        connections.workers.host,
        connections.fleet,
        connections.transfer_dir,
        config.rollout.update_weights_bucket_megabytes * MIB,
        engine_dtype,
        probe_engine=refuse_engine_probe
        if config.rollout.colocated
        else _make_weight_probe(config, connections.workers.actor, prompt_sets),
        transport=config.rollout.weight_transport,
        model_path=Path(config.model.path),
        device_turns=connections.turns,
        ranks_per_machine=config.trainer.n_gpus_per_node if config.trainer.nnodes > 1 else None,
        watch_lost_update=adapter_warning if config.actor.lora.rank else None,
    )


def _make_weight_probe(
    config: RunConfig, actor: ActorProxy, prompt_sets: PromptSets
) -> EngineWeightProbe:
    """Make the probe for engines that cannot compute digests, on the first training prompts."""
    length = config.data.max_response_length
    budget = config.actor.ppo_max_token_len_per_gpu
    prompts = [item.prompt_ids for item in prompt_sets.train_items]
    return EngineWeightProbe(
        config.checks, config.is_float32_throughout, config.rollout, length, budget, actor, prompts
    )


def _open_journal(
    config: RunConfig, run_dir: Path, tracker: RunTracker
) -> StepJournal | GroupJournal | None:
    """Return the journal of the run: a StepJournal where the schedule takes turns, else a
    GroupJournal. Return None where the run saves no checkpoints.
    """
    if not config.trainer.save_freq:
        return None
    digest = compute_settings_digest(
        flatten_config_yaml(render_config_yaml(config)), compute_plugin_digests(config.plugins)
    )
    if does_schedule_take_turns(config.schedule):
        return StepJournal(run_dir / "journal", digest, tracker.clock.add_productive_time)
    return GroupJournal(run_dir / "journal", digest)


def _open_route_files(
    config: RunConfig,
    run_dir: Path,
    journal: StepJournal | GroupJournal | None,
    records_rollouts: bool,
    tracker: RunTracker,
) -> RouteFileRetention:
    """Return the keeper of the route files, after removing the files of a former attempt that the
    journal does not name.
    """
    directory = run_dir / "routes" if config.actor.router_replay == "r3" else None
    most_bytes = round(config.rollout.routes_gb * 1e9)
    files = RouteFileRetention(
        directory, journal is not None, records_rollouts, most_bytes, tracker.show_note
    )
    files.remove_unneeded_files(
        find_journalled_routes(journal.directory) if directory and journal else ()
    )
    return files


def _make_checkpointer(
    config: RunConfig,
    workers: RoleProxies,
    setup: AlgorithmSetup,
    run_dir: Path,
    tracker: RunTracker,
    turns: DeviceTurns,
) -> RunCheckpointer:
    """Make the run's checkpointer, which keeps the best step by the metric `trainer.keep_best`."""
    has_frozen_start = setup.needs_reference and config.reference.path is None
    checkpointer = RunCheckpointer(
        config.trainer,
        render_config_yaml(config),
        workers,
        setup.needs_values,
        has_frozen_start,
        run_dir,
        tracker.show_note,
        turns,
    )
    checkpointer.choose_best_step = partial(
        find_best_step, tracker.watched_values, metric=config.trainer.keep_best
    )
    return checkpointer


def _describe_pools(config: RunConfig) -> str:
    """Return a text with the pools and their layouts, and a warning where ranks share the cores of
    this machine.
    """
    pools = build_pool_specs(config)
    cores = len(os.sched_getaffinity(0))
    text = " and ".join(map(str, pools)) + (
        " with the critic" if has_critic(config) and len(pools) == 1 else ""
    )
    is_crowded = config.trainer.nnodes == 1 and pools[-1].end_rank > cores and not has_accelerator()
    return text + (f" (more than the {cores} cores here: they take turns)" if is_crowded else "")


def open_run_tracker(
    config: RunConfig,
    run_dir: Path,
    tokenizer: Tokenizer,
    resume_point: ResumePoint | None,
    attempts: RunAttempts,
) -> RunTracker:
    """Open the tracker of a run. For a resumed run, first move the rows that will be written again
    out of its files, then restore the tracker and the clock from the other rows.
    """
    rows = []
    clock = RunClock(attempts.first_start_time)
    resumed_from_step = (
        resume_point.state.step if resume_point is not None and resume_point.is_same_run else None
    )
    num_superseded = 0
    if resume_point is not None and resumed_from_step is not None:
        num_superseded = move_superseded_rows(run_dir, resumed_from_step, attempts.num_attempts - 1)
        rows = read_step_rows(run_dir)
        clock.productive_s = resume_point.state.productive_s + sum_evaluation_seconds(
            rows, resumed_from_step
        )
    facts = make_run_facts(config, run_dir.name, tokenizer, resumed_from_step)
    trainer = config.trainer
    tracker = RunTracker(
        run_dir, trainer.logger, trainer.total_training_steps, facts, clock, trainer.keep_best
    )
    tracker.restore_from_rows(rows)
    if resume_point is not None:
        again = (
            f"; rows of later steps: {num_superseded}, now in {SUPERSEDED}/"
            if num_superseded
            else ""
        )
        tracker.show_note(f"attempt {attempts.num_attempts}: {resume_point}{again}")
    return tracker


def _connect_hosts(
    stack: ExitStack, config: RunConfig, connect_group: Callable[[], WorkerGroup]
) -> WorkerGroup:
    """Return the connected hosts, which end with `stack`. Colocated hosts have moved the trainer
    off their devices, for the engines that start next.
    """
    group = connect_group()
    stack.callback(group.close)
    if config.rollout.colocated:
        offload_trainer(RoleProxies(group).list_trained_proxies(has_critic(config)))
    return group


def _start_engines(
    stack: ExitStack,
    engine_setup: EngineSetup,
    run_dir: Path,
    tracker: RunTracker,
    stop_request: StopRequest,
    engine_place: LaunchPlacement,
) -> tuple[EngineFleet, Path]:
    """Start the engine servers, without weights. Return (the fleet, the directory through which the
    weights come). Both end with `stack`.
    """

    def report_engine_start(engine_name: str, elapsed_s: float, log_line: str) -> None:
        """Show how long an engine has been starting, and the end of its latest log line."""
        tracker.show_stage(f"{engine_name} starts ({elapsed_s:.0f} s) {log_line[-80:]}")

    transfer = stack.enter_context(
        make_transfer_directory(
            engine_setup.get_transfer_parent(run_dir), engine_setup.compute_transfer_bytes()
        )
    )
    servers = engine_setup.start_servers(run_dir, transfer.path, report_engine_start, engine_place)
    stack.enter_context(servers)
    register_engine_faults(servers)
    fleet = engine_setup.make_fleet(
        servers, run_dir, transfer.path, stop_request.raise_if_requested
    )
    stack.callback(fleet.close)
    return fleet, transfer.path


def _restore_run_state(
    resume_point: ResumePoint,
    stages: StepStages,
    checkpointer: RunCheckpointer,
    tracker: RunTracker,
) -> RunState:
    """Restore hosts and controller from the checkpoint, and return its state. The policy version is
    set one lower: the sync that follows sends the restored weights as the same version.
    """
    with tracker.time_stage("restore"):
        state = checkpointer.restore_checkpoint(resume_point.checkpoint)
    # the same weights are the same version
    stages.weight_sync.policy_version = state.policy_version - 1
    stages.mismatch_check.first_step = state.step + 1
    stages.skips.restore_count(state.num_consecutive_skips)
    kl = stages.advantage_stage.kl_controller
    if kl is not None and state.kl:
        kl.restore(state.kl)
    if stages.journal is not None:
        stages.journal.forget_through_step(state.step)
    return state


def _warm_up_from_start(
    config: RunConfig,
    stages: StepStages,
    tracker: RunTracker,
    prompt_sets: PromptSets,
    stop_request: StopRequest,
) -> RunState:
    """Warm the policy up where the run does so, and return the state before the first step. Raise
    RunStopped where the run was asked to stop meanwhile.
    """
    warm = run_policy_warmup(stages, tracker, prompt_sets, stop_request)
    stop_request.raise_if_requested()
    if stages.recorder:
        stages.recorder.write_start(
            RecordedStart(warm.num_steps, stages.weight_sync.policy_version + 1)
        )
    accuracy = warm.last_evaluation.accuracy if warm.last_evaluation else None
    architecture = read_architecture(config.model.path)
    plugins = compute_plugin_digests(config.plugins)
    return RunState(
        0, 0, None, {}, warm.num_steps, accuracy, architecture=architecture, plugins=plugins
    )


def capture_run_state(
    stages: StepStages, supply: BatchSupply, run_clock: RunClock, earlier_state: RunState, step: int
) -> RunState:
    """Return the state of the run after `step`, for a checkpoint. `earlier_state` is any former
    state of this run; facts that do not change are copied from it.
    """
    stream = stages.run_data.stream
    kl = stages.advantage_stage.kl_controller
    state = replace(
        earlier_state,
        step=step,
        policy_version=stages.weight_sync.policy_version,
        cursor=stream.make_cursor() if stream is not None else None,
        kl=kl.state() if kl is not None else {},
        num_consecutive_skips=stages.skips.num_consecutive,
        productive_s=run_clock.productive_s,
    )
    return attach_progress(state, supply.get_progress())
