"""The supply of a run, as its configuration and the state that it goes on from say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlhf_megatron.config.rules.schedule_rules import does_schedule_take_turns
from rlhf_megatron.config.schema import SamplingConfig
from rlhf_megatron.controller.recovery.resume_point import RunState
from rlhf_megatron.controller.recovery.run_journal import GroupJournal
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import GroupFlow
from rlhf_megatron.controller.scheduler.scored_samples import GroupFilterReport
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.scheduler.supply.background_supply import (
    BackgroundSupply,
    ResumedGroups,
    SupplyServices,
)
from rlhf_megatron.controller.scheduler.supply.foreground_supply import ForegroundSupply
from rlhf_megatron.controller.scheduler.supply.group_ledger import (
    BatchSupply,
    FinishedGroup,
    PromptProgress,
)
from rlhf_megatron.controller.scheduler.supply.supply_threads import GroupScorer, RecentErrorBound
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.item_stream import PromptStream
from rlhf_megatron.rewards.service.reward_scorer import RewardScorer
from rlhf_megatron.rollout.engine_interface import GenerateRequest
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.rollout_requests import build_generate_requests


def make_batch_supply(
    stages: StepStages,
    fleet: EngineFleet,
    scorer: RewardScorer,
    run_state: RunState,
    journal: GroupJournal | None,
    should_stop: Callable[[], None],
    report_waiting: Callable[[str], None],
) -> BatchSupply:
    """Make the supply of a run: a ForegroundSupply where the schedule takes turns, else a
    BackgroundSupply.

    `run_state` is the state that the run goes on from; the engines serve its weights. `journal` is
    that of a run that generates in the background and has checkpoints.
    """
    config = stages.config
    stream = stages.run_data.stream
    assert stream is not None, "a run draws prompts"
    if does_schedule_take_turns(config.schedule):
        return ForegroundSupply(stages)
    steps = config.trainer.total_training_steps
    flow = GroupFlow(
        config.data.train_batch_size, steps, stages.policy_version, run_state.step, stream.num_drawn
    )
    filter_groups = config.algorithm.filter_groups
    num_samples = config.data.train_batch_size * config.rollout.n
    score = RecentErrorBound(
        scorer.score_without_limit, num_samples, config.reward.max_error_rate, str(scorer.log_path)
    )
    found = find_resumable_groups(
        journal,
        stream,
        PromptProgress(stream.num_drawn, run_state.untrained),
        stages.policy_version,
    )
    return BackgroundSupply(
        flow,
        load_schedule(config.schedule),
        SupplyServices(
            session=fleet.open_session(),
            draw_prompts=stream.fetch_prompts,
            make_requests=partial(make_prompt_requests, stages),
            score_groups=GroupScorer(stages.run_data.response_reader, score, filter_groups),
            annotate_samples=stages.compute_annotations,
        ),
        get_policy_version=lambda: stages.policy_version,
        mini_batch_size=config.actor.mini_batch_size,
        begin_step=stages.begin_step,
        should_stop=should_stop,
        pause_session=fleet.hold_exclusively,
        is_serving=lambda: bool(fleet.live_engines),
        filter_report=GroupFilterReport(filter_groups, config.data.train_batch_size)
        if filter_groups.enable
        else None,
        journal=journal,
        resumed_groups=found,
        discard_route_files=stages.route_files.record_trained_step,
        report_waiting=report_waiting,
    )


def make_prompt_requests(
    stages: StepStages, prompts: PromptBatch, policy_version: int
) -> list[list[GenerateRequest]]:
    """Return a list of requests for each prompt: its samples, and a greedy sample where the
    estimator needs one. The seeds depend on `policy_version`, the version of the weights that the
    group is started with.
    """
    rollout = stages.config.rollout
    seed = stages.config.trainer.seed
    sampled = stages.make_sampling_params(SamplingConfig(rollout.temperature))
    place = stages.route_files.directory_and_max_bytes
    requests = [
        [request]
        for request in build_generate_requests(
            prompts, rollout.n, sampled, seed, policy_version, place
        )
    ]
    if stages.setup.needs_greedy_rewards:
        greedy = build_generate_requests(
            prompts,
            1,
            stages.make_sampling_params(SamplingConfig(temperature=0.0)),
            seed,
            policy_version,
        )
        for of_prompt, one in zip(requests, greedy, strict=True):
            of_prompt.append(one)
    return requests


def find_resumable_groups(
    journal: GroupJournal | None,
    stream: PromptStream,
    checkpoint_progress: PromptProgress,
    policy_version: int,
) -> ResumedGroups:
    """Return the groups that were in flight at the checkpoint, or were started after it: generated
    groups whose samples the journal has, and the numbers of the others.

    A group with tokens of a later version than `policy_version`, the checkpoint's, is generated
    anew: those weights are gone. Remove all other files from the journal.
    """
    groups = journal.read_prompt_groups() if journal is not None else {}
    known = {}
    for number, samples in groups.items():
        finished = FinishedGroup(number, stream.fetch_prompts([number]), samples)
        is_trained = (
            number < checkpoint_progress.num_drawn
            and number not in checkpoint_progress.untrained_positions
        )
        if not is_trained and max(finished.versions) <= policy_version:
            known[number] = finished
    if journal is not None:
        journal.keep_only_positions(known)
    num_drawn = max([checkpoint_progress.num_drawn, *(number + 1 for number in known)])
    positions = [
        *checkpoint_progress.untrained_positions,
        *range(checkpoint_progress.num_drawn, num_drawn),
    ]
    lost = tuple(position for position in positions if position not in known)
    return ResumedGroups(num_drawn, tuple(known.values()), lost)


def attach_progress(run_state: RunState, progress: PromptProgress) -> RunState:
    """Return `run_state` with the number of prompts drawn and the untrained positions of
    `progress`; unchanged where the run has no prompt stream.
    """
    if run_state.cursor is None:
        return run_state
    return replace(
        run_state,
        cursor=replace(run_state.cursor, num_drawn=progress.num_drawn),
        untrained=progress.untrained_positions,
    )
