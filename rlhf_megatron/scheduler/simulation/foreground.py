"""A run that generates and scores in the step itself: the order of scheduler/supply/foreground.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhf_megatron.rollout.sizes import CHUNKS_IN_FLIGHT
from rlhf_megatron.scheduler.simulation.engine import RunningGroup
from rlhf_megatron.scheduler.simulation.fleet import Piece, cut
from rlhf_megatron.scheduler.simulation.simulation import Simulation


class Foreground(Simulation):
    """Groups come back in pieces; all of a generate call are scored together. Where groups without signal are left out
    (`algorithm.filter_groups`), further batches are generated until there are enough."""

    most_pieces = CHUNKS_IN_FLIGHT
    _num_batches = 0  # that this step has generated
    _num_awaited = 0  # groups of the last of them

    def _settle(self) -> None:
        if not self.flow.is_training and self.flow.num_steps_left and not self.groups:
            self._num_batches = 0
            self._generate()
        self.sync_if_due()

    def _generate(self) -> None:
        """A batch of prompts."""
        groups = [self.made(number) for number in self.flow.started(self.flow.batch_size)]
        self._num_awaited = len(groups)
        self._num_batches += 1
        for piece in cut(groups, self.plan.num_engines):
            self.fleet.submit(self.now, piece)

    def _came(self, piece: Piece) -> bool:
        for group in piece.groups:
            self.flow.generated(group.number, min(group.first_versions))
        self._num_awaited -= len(piece.groups)
        if not self._num_awaited:
            last = list(self.groups.values())[-self.flow.batch_size :]
            self.score_for(last, partial(self._scored, list(self.groups.values())))
        return True

    def _scored(self, groups: Sequence[RunningGroup]) -> bool:
        flow = self.flow
        kept = [group.number for group in groups if self.workload.has_signal(group.number)]
        if len(kept) < flow.batch_size and self._num_batches * flow.batch_size < self.plan.most_scored:
            self._generate()
            return True
        numbers = (kept or [group.number for group in groups])[: flow.batch_size]
        for group in groups:
            flow.scored(group.number)
        for group in groups:
            if group.number not in numbers:
                self.drop(group.number, "no signal" if group.number < numbers[-1] else "tail")
        self.take(numbers, lambda number: False)
        if not flow.num_steps_left:
            flow.ended()
        return True
