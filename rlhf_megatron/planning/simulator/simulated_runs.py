"""The two kinds of simulated runs; `simulate_run` picks the one for a schedule.

`BackgroundSimulation` generates groups while the trainer works, in the order of
controller/scheduler/supply/group_ledger.py: it asks the schedule after every event, and again until
it decides nothing more. `ForegroundSimulation` generates and scores in the step itself, in the
order of controller/scheduler/supply/foreground_supply.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhf_megatron.controller.scheduler.schedules import Schedule
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import StalePolicy
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule
from rlhf_megatron.planning.simulator.durations import SimulatedWorkload
from rlhf_megatron.planning.simulator.simulated_fleet import (
    RunningGroup,
    SimulatedPiece,
    cut_into_pieces,
)
from rlhf_megatron.planning.simulator.simulation import RunSimulation, SimulationHistory
from rlhf_megatron.planning.simulator.simulation_plan import SimulationPlan
from rlhf_megatron.rollout.chunk_sizes import CHUNKS_IN_FLIGHT


class BackgroundSimulation(RunSimulation):
    """Generates while the trainer works, under any schedule."""

    def __init__(
        self,
        plan: SimulationPlan,
        schedule: Schedule,
        workload: SimulatedWorkload,
        keeps_details: bool = False,
    ) -> None:
        """Make the simulation of a plan under a schedule. `keeps_details`: also keep events and the
        engines' loads.
        """
        super().__init__(plan, schedule, workload, keeps_details)
        self._unscored_groups: list[RunningGroup] = []
        self._is_scoring = False
        self._annotating_numbers: frozenset[int] = frozenset()  # numbers, early, at the moment
        self._num_scored_groups = 0  # groups, since the last batch

    def _advance_flow(self) -> None:
        """Ask the schedule until it decides nothing more, then annotate early and begin a sync
        where possible.
        """
        again = set[int]()
        while self._apply_schedule_decisions(again):
            pass
        if not self.flow.is_training and not self._annotating_numbers:
            self._annotate_early_if_worthwhile()
        self.start_sync_if_due()

    def _apply_schedule_decisions(self, restarted_numbers: set[int]) -> bool:
        """Ask the schedule once for stale groups, a batch and groups to start, and carry the
        decisions out. Return whether anything was decided. `restarted_numbers` are the groups that
        were started anew after this event, which are not restarted again.
        """
        flow = self.flow
        schedule = self.schedule
        has_decided = False
        for number in list(schedule.find_stale_groups(flow)):
            if number not in restarted_numbers:
                self._drop_or_restart_stale_group(number, restarted_numbers)
                has_decided = True
        if not flow.is_training and flow.num_steps_left:
            numbers = schedule.select_batch(flow)
            is_short = len(flow.scored_order) < flow.batch_size
            if (
                numbers is None
                and is_short
                and self._num_scored_groups >= self.plan.max_scored_groups
            ):
                numbers = sorted(flow.scored_order)  # with what there is
            if numbers is not None:
                self._take_batch(numbers)
                has_decided = True
        for number in flow.start_groups(schedule.count_groups_to_start(flow)):
            self.fleet.submit_piece(self.now, [self.start_group(number)])
            has_decided = True
        return has_decided

    def _drop_or_restart_stale_group(self, group_number: int, restarted_numbers: set[int]) -> None:
        """Drop a stale group, or generate it anew, as the schedule's policy says."""
        if self.schedule.stale_policy is StalePolicy.DROP:
            self.drop_group(group_number, "lag")
            return
        group = self.running_groups[group_number]
        self.fleet.abandon_group(self.now, group)
        restarted_numbers.add(group_number)
        self.drop_counts["again"] += 1
        self.flow.restart_group(group_number)
        self.fleet.submit_piece(self.now, [self.start_group(group_number, group.attempt + 1)])

    def _take_batch(self, group_numbers: Sequence[int]) -> None:
        """Begin the next step with these groups, and drop the groups that the schedule gives up;
        after the last step drop all.
        """
        has_log_probs = {
            n for n in group_numbers if self.flow.groups_in_flight[n].is_annotated
        } | self._annotating_numbers
        self.start_step(group_numbers, has_log_probs.__contains__)
        self._num_scored_groups = 0
        for number in list(self.schedule.select_groups_to_give_up(self.flow)):
            self.drop_group(number, "tail")
        if not self.flow.num_steps_left:
            for number in list(self.flow.groups_in_flight):
                self.drop_group(number, "end")

    # Rewards

    def _on_piece_done(self, piece: SimulatedPiece) -> bool:
        """Record the generated groups and score them as soon as the scorer is free. Return True:
        ask the schedule.
        """
        for group in piece.groups:
            self.flow.record_generated(group.number, min(group.first_versions))
            self._unscored_groups.append(group)
        self._score_waiting_groups()
        return True

    def _score_waiting_groups(self) -> None:
        """Score all waiting groups in one call, unless a call is running."""
        self._unscored_groups = [group for group in self._unscored_groups if not group.is_abandoned]
        if self._is_scoring or not self._unscored_groups:
            return
        groups = self._unscored_groups
        self._unscored_groups = []
        self._is_scoring = True
        self.start_scoring(groups, partial(self._finish_scoring, groups))

    def _finish_scoring(self, groups: Sequence[RunningGroup]) -> bool:
        """End a scoring call: schedule the admission of each of its groups at this time, and begin
        the next call. Return False: the schedule is asked after each admission.
        """
        self._is_scoring = False
        for group in groups:
            self.schedule_event(self.now, partial(self._admit_scored_group, group))
        self._score_waiting_groups()
        return False

    def _admit_scored_group(self, group: RunningGroup) -> bool:
        """Record a scored group, and drop it where it has no signal. Return whether to ask the
        schedule: False for an abandoned group.
        """
        if group.is_abandoned:
            return False
        self.flow.record_scored(group.number)
        self._num_scored_groups += 1
        if not self.workload.has_signal(group.number, group.attempt):
            self.drop_group(group.number, "no signal")
        return True

    # Early log-probs

    def _annotate_early_if_worthwhile(self) -> None:
        """Annotate finished groups early where they make at least a mini-batch, as
        controller/scheduler/supply/background_supply.py does.
        """
        numbers = self.schedule.select_groups_to_annotate(self.flow)
        if numbers and len(numbers) * self.plan.group_size >= self.plan.min_annotated_samples:
            self._annotating_numbers = frozenset(numbers)
            self.start_early_annotation(numbers, partial(self._finish_early_annotation, numbers))

    def _finish_early_annotation(self, group_numbers: Sequence[int]) -> bool:
        """Record the annotated groups that are still in flight. Return True: ask the schedule."""
        self._annotating_numbers = frozenset()
        self.flow.record_annotated(
            [number for number in group_numbers if number in self.flow.groups_in_flight]
        )
        return True


class ForegroundSimulation(RunSimulation):
    """Groups come back in pieces; all of a generate call are scored together. Where groups without
    signal are left out (`algorithm.filter_groups`), further batches are generated until
    there are enough.
    """

    max_pieces = CHUNKS_IN_FLIGHT
    _num_batches = 0  # that this step has generated
    _num_awaited_groups = 0  # groups of the last of them

    def _advance_flow(self) -> None:
        """Generate the batch of the next step where no step is in progress, and begin a sync where
        possible.
        """
        if not self.flow.is_training and self.flow.num_steps_left and not self.running_groups:
            self._num_batches = 0
            self._generate_batch()
        self.start_sync_if_due()

    def _generate_batch(self) -> None:
        """Start the groups of a batch, and submit them in pieces."""
        groups = [
            self.start_group(number) for number in self.flow.start_groups(self.flow.batch_size)
        ]
        self._num_awaited_groups = len(groups)
        self._num_batches += 1
        for piece in cut_into_pieces(groups, self.plan.num_engines):
            self.fleet.submit_piece(self.now, piece)

    def _on_piece_done(self, piece: SimulatedPiece) -> bool:
        """Record the generated groups; when the whole batch is generated, score it. Return True: go
        on.
        """
        for group in piece.groups:
            self.flow.record_generated(group.number, min(group.first_versions))
        self._num_awaited_groups -= len(piece.groups)
        if not self._num_awaited_groups:
            last = list(self.running_groups.values())[-self.flow.batch_size :]
            self.start_scoring(
                last, partial(self._finish_scoring, list(self.running_groups.values()))
            )
        return True

    def _finish_scoring(self, groups: Sequence[RunningGroup]) -> bool:
        """Begin the step with the scored groups that have signal, or generate a further batch where
        these are too few and one is allowed. Return True: go on.
        """
        flow = self.flow
        kept = [group.number for group in groups if self.workload.has_signal(group.number)]
        if (
            len(kept) < flow.batch_size
            and self._num_batches * flow.batch_size < self.plan.max_scored_groups
        ):
            self._generate_batch()
            return True
        numbers = (kept or [group.number for group in groups])[: flow.batch_size]
        for group in groups:
            flow.record_scored(group.number)
        for group in groups:
            if group.number not in numbers:
                self.drop_group(group.number, "no signal" if group.number < numbers[-1] else "tail")
        self.start_step(numbers, lambda number: False)
        if not flow.num_steps_left:
            flow.drop_remaining_groups()
        return True


def simulate_run(
    plan: SimulationPlan,
    schedule: Schedule,
    workload: SimulatedWorkload,
    keeps_details: bool = False,
) -> SimulationHistory:
    """Simulate the first `plan.num_steps` steps of a run, and return what happened.
    `keeps_details`: also keep the events of the flow and the load of each engine over time. Raise
    ScheduleStuckError where the schedule waits for ever.
    """
    kind = (
        ForegroundSimulation if isinstance(schedule, SynchronousSchedule) else BackgroundSimulation
    )
    return kind(plan, schedule, workload, keeps_details).run()
