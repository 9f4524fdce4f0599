"""The supply of a run, as its configuration and the state that it goes on from say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlhf_megatron.config.rules.schedule import takes_turns
from rlhf_megatron.config.schema import SamplingConfig
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.recovery.journal import GroupJournal
from rlhf_megatron.recovery.resume import RunState
from rlhf_megatron.rewards.service.scorer import Scorer
from rlhf_megatron.rollout.engine import GenerateRequest
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.requests import build_requests
from rlhf_megatron.scheduler.samples import FewGroups
from rlhf_megatron.scheduler.schedules import load_schedule
from rlhf_megatron.scheduler.schedules.flow import Flow
from rlhf_megatron.scheduler.stages import Stages
from rlhf_megatron.scheduler.supply.background import Background, Found, Work
from rlhf_megatron.scheduler.supply.drive import LastSamples, ScoreGroups
from rlhf_megatron.scheduler.supply.foreground import Foreground
from rlhf_megatron.scheduler.supply.ledger import Finished, Progress, Supply


def make_supply(
    stages: Stages,
    fleet: EngineFleet,
    scorer: Scorer,
    state: RunState,
    journal: GroupJournal | None,
    should_stop: Callable[[], None],
    report: Callable[[str], None],
) -> Supply:
    """`state`: that the run goes on from; the engines serve its weights. `journal`: of a run that generates in the
    background and has checkpoints."""
    config, stream = stages.config, stages.data.stream
    assert stream is not None, "a run draws prompts"
    if takes_turns(config.schedule):
        return Foreground(stages)
    steps = config.trainer.total_training_steps
    flow = Flow(config.data.train_batch_size, steps, stages.version, state.step, stream.num_drawn)
    filter_groups = config.algorithm.filter_groups
    num_samples = config.data.train_batch_size * config.rollout.n
    score = LastSamples(scorer.unbounded, num_samples, config.reward.max_error_rate, str(scorer.log))
    found = find_groups(journal, stream, Progress(stream.num_drawn, state.untrained), stages.version)
    return Background(
        flow,
        load_schedule(config.schedule),
        Work(
            session=fleet.open_session(),
            draw=stream.at,
            make_requests=partial(make_requests, stages),
            score=ScoreGroups(stages.data.tokenizer, score, filter_groups),
            annotate=stages.annotated,
        ),
        version=lambda: stages.version,
        mini_batch_size=config.actor.mini_batch_size,
        begin_step=stages.begin,
        should_stop=should_stop,
        exclusive=fleet.exclusive,
        is_serving=lambda: bool(fleet.live),
        few=FewGroups(filter_groups, config.data.train_batch_size) if filter_groups.enable else None,
        journal=journal,
        found=found,
        leave_out=stages.route_files.trained,
        report=report,
    )


def make_requests(stages: Stages, prompts: PromptBatch, version: int) -> list[list[GenerateRequest]]:
    """Make each prompt's requests: its samples, and a greedy one where the estimator needs it. Seeds follow from the
    version of the weights that it is started with.
    """
    rollout, seed = stages.config.rollout, stages.config.trainer.seed
    sampled, place = stages.sampling(SamplingConfig(rollout.temperature)), stages.route_files.place
    requests = [[request] for request in build_requests(prompts, rollout.n, sampled, seed, version, place)]
    if stages.parts.needs_greedy_rewards:
        greedy = build_requests(prompts, 1, stages.sampling(SamplingConfig(temperature=0.0)), seed, version)
        for of_prompt, one in zip(requests, greedy, strict=True):
            of_prompt.append(one)
    return requests


def find_groups(journal: GroupJournal | None, stream: PromptStream, before: Progress, version: int) -> Found:
    """Find what a former process has left of the groups that were in flight at the checkpoint, or were started after
    it.

    A group with tokens of a later version than the checkpoint's is generated anew: those weights are gone. All other
    files of the journal are removed.
    """
    groups = journal.groups() if journal is not None else {}
    known = {}
    for number, samples in groups.items():
        finished = Finished(number, stream.at([number]), samples)
        is_trained = number < before.num_drawn and number not in before.untrained
        if not is_trained and max(finished.versions) <= version:
            known[number] = finished
    if journal is not None:
        journal.keep(known)
    num_drawn = max([before.num_drawn, *(number + 1 for number in known)])
    positions = [*before.untrained, *range(before.num_drawn, num_drawn)]
    lost = tuple(position for position in positions if position not in known)
    return Found(num_drawn, tuple(known.values()), lost)


def with_progress(state: RunState, progress: Progress) -> RunState:
    """`state` with what is done of the prompts."""
    if state.cursor is None:
        return state
    return replace(state, cursor=replace(state.cursor, num_drawn=progress.num_drawn), untrained=progress.untrained)
